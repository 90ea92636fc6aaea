"""Folds: each class spread evenly, copies together, the same draw for any order of files."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from vitral.data.sources import assign_folds, copy_groups, fold_data, open_data
from vitral.errors import UserError


@pytest.mark.parametrize("folds", [2, 3, 5, 7])
def test_classes_are_spread_as_scikit_learn_spreads_them(folds):
    selection = pytest.importorskip("sklearn.model_selection")
    labels = np.repeat(np.arange(4), [40, 9, 23, 11])
    keys = [f"{index}.png" for index in range(len(labels))]
    numbers = assign_folds(keys, labels, np.arange(len(labels)), folds, seed=0)
    theirs = selection.StratifiedKFold(folds, shuffle=True, random_state=0).split(labels, labels)
    expected = [np.bincount(labels[test], minlength=4) for _, test in theirs]
    ours = [np.bincount(labels[numbers == fold], minlength=4) for fold in range(folds)]
    for label in range(4):
        assert sorted(row[label] for row in ours) == sorted(row[label] for row in expected)
    sizes = [int(row.sum()) for row in ours]
    assert max(sizes) - min(sizes) <= 1


def test_groups_stay_together_and_the_order_of_files_changes_nothing():
    rng = np.random.default_rng(0)
    labels, groups = np.repeat(np.arange(3), 30), np.repeat(np.arange(45), 2)
    keys = [f"{index}.png" for index in range(90)]
    numbers = assign_folds(keys, labels, groups, 5, seed=0)
    assert (numbers[::2] == numbers[1::2]).all()
    counts = np.array([np.bincount(labels[numbers == fold], minlength=3) for fold in range(5)])
    assert (counts == 6).all()
    order = rng.permutation(90)
    again = assign_folds([keys[i] for i in order], labels[order], groups[order] + 7, 5, seed=0)
    np.testing.assert_array_equal(again, numbers[order])
    assert (assign_folds(keys, labels, groups, 5, seed=1) != numbers).any()


def picture(seed: int) -> Image.Image:
    """A smooth picture of its own."""
    noise = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), np.uint8)
    return Image.fromarray(noise).resize((64, 64), Image.Resampling.BICUBIC)


@pytest.fixture
def pictures(tmp_path) -> Path:
    """Two classes of six pictures; in one there are a copy of bytes, a re-encoded and a mirrored one of the first."""
    for label in range(2):
        (tmp_path / f"class-{label}").mkdir()
        for number in range(6):
            picture(10 * label + number).save(tmp_path / f"class-{label}" / f"{number}.png")
    first = tmp_path / "class-0" / "0.png"
    (tmp_path / "class-0" / "same.png").write_bytes(first.read_bytes())
    picture(0).save(tmp_path / "class-0" / "again.jpg", quality=80)
    ImageOps.mirror(picture(0)).save(tmp_path / "class-0" / "mirrored.png")
    return tmp_path


def test_copies_are_one_group(pictures):
    split = open_data(pictures, held_out=0).train
    groups = copy_groups(split)
    of = dict(zip(split.keys, groups.tolist(), strict=True))
    copies = {key for key, group in of.items() if group == of["class-0/0.png"]}
    assert copies == {f"class-0/{name}" for name in ("0.png", "same.png", "again.jpg", "mirrored.png")}
    assert len(set(groups.tolist())) == 12


def test_every_image_is_in_one_fold_and_copies_never_in_both(pictures):
    (pictures / "class-1" / "broken.png").write_bytes(b"no image")
    data = open_data(pictures, held_out=0)
    folds = fold_data(data, 3)
    scored = [fold.splits[1].keys for fold in folds]
    assert sorted(key for keys in scored for key in keys) == sorted(data.train.keys)
    for fold, keys in zip(folds, scored, strict=True):
        assert sorted([*fold.train.keys, *keys]) == sorted(data.train.keys)
        copies = {f"class-0/{name}" for name in ("0.png", "same.png", "again.jpg", "mirrored.png")}
        assert copies <= set(keys) or copies.isdisjoint(keys)
    assert [fold.splits[1].name for fold in folds] == ["fold-1", "fold-2", "fold-3"]
    assert "3 of them are copies of others, and in the same fold as those." in folds[0].notes
    assert any("2 classes have fewer images than folds" in note for note in fold_data(data, 12)[0].notes)
    with pytest.raises(UserError, match="has 13 different images, too few for 14 folds"):
        fold_data(data, 14)


def test_only_train_is_divided_where_there_are_other_splits(tmp_path):
    for split, count in (("train", 4), ("test", 2)):
        for label in range(2):
            (tmp_path / split / f"class-{label}").mkdir(parents=True)
            for number in range(count):
                stream = io.BytesIO()
                picture(100 * label + 10 * count + number).save(stream, "png")
                (tmp_path / split / f"class-{label}" / f"{number}.png").write_bytes(stream.getvalue())
    folds = fold_data(open_data(tmp_path, held_out=0), 2)
    assert [len(fold.test or ()) for fold in folds] == [4, 4]
    assert "Folds are made of train alone: the other splits are not used." in folds[0].notes
