"""Fewer images to train on: lists of images to leave out, nested draws, and a share that choices are made on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from journeys import MODEL, PLAIN, SHAPE, Command
from runs import make_pictures, train

import vitral
from vitral.api import inference
from vitral.api.data import open_restricted, open_to_choose
from vitral.data.catalog.readers import ArrayReader
from vitral.data.loader import SMALL
from vitral.data.sources import nested_subset, open_data, restrict_train, with_dev_split, with_test_split
from vitral.data.splits import DataSet, RawSplit, Split, make_dataset
from vitral.errors import UserError
from vitral.recipe import Recipe, from_toml, with_overrides

CLASSES = ("ant", "bee", "cat")


def part(name: str, counts: Sequence[int]) -> RawSplit:
    labels = [label for label, count in zip(CLASSES, counts, strict=True) for _ in range(count)]
    keys = [f"{name}/{label}/{number}.png" for number, label in enumerate(labels)]
    return RawSplit(keys, labels, ArrayReader(np.zeros((len(keys), 2, 2, 3), np.uint8), "1"))


def data(**counts: Sequence[int]) -> DataSet:
    """Splits by name with so many images of each class."""
    return make_dataset("pictures", {name: part(name, few) for name, few in counts.items()}, held_out=0.2)


def keys(split: Split | None) -> set[str]:
    assert split is not None
    return set(split.keys)


# Draws


@given(
    images=st.integers(1, 3 * SMALL),
    shares=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    seed=st.integers(0, 2**40),
)
def test_a_smaller_draw_lies_inside_a_larger_one(images, shares, seed):
    small, large = sorted(max(round(share * images), 1) for share in shares)
    few, many = nested_subset(small, images, seed), nested_subset(large, images, seed)
    assert len(set(few.tolist())) == small
    assert np.array_equal(many, np.unique(many))  # in the order of the source
    assert set(few.tolist()) <= set(many.tolist()) <= set(range(images))


def mixed(number: int) -> int:
    """SplitMix64's finalizer in Python's own whole numbers."""
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB % 2**64
    return number ^ (number >> 31)


@pytest.mark.parametrize("images, seed", [(20, 0), (20, 1), (SMALL, 7)])
def test_a_draw_is_the_same_on_every_machine(images, seed):
    digest = hashlib.blake2b(f"order {seed} 0".encode()).digest()
    first, second = (int.from_bytes(digest[place : place + 8], "little") for place in (0, 8))
    order = sorted(range(images), key=lambda place: mixed((mixed((place + first) % 2**64) + second) % 2**64))
    for count in (1, 5, images):
        assert nested_subset(count, images, seed).tolist() == sorted(order[:count])


def test_a_large_draw_is_the_same_on_every_machine():
    assert nested_subset(5, 10_000, 0).tolist() == [2784, 2928, 5061, 6995, 7343]


def test_every_image_is_drawn_equally_often():
    counts = sum(np.bincount(nested_subset(5, 20, seed), minlength=20) for seed in range(2000))
    assert np.abs(counts / 2000 - 0.25).max() < 5 * (0.25 * 0.75 / 2000) ** 0.5


def test_other_seeds_draw_others_and_one_seed_the_same():
    sets = [keys(restrict_train(data(train=(30, 20, 10)), subset=20, subset_seed=seed).train) for seed in (0, 1, 2, 0)]
    assert sets[0] == sets[3]
    assert len({frozenset(one) for one in sets}) == 3


@given(counts=st.tuples(*[st.integers(4, 30)] * 3), size=st.integers(1, 8), seed=st.integers(0, 99))
def test_subsets_of_any_size_are_evaluated_on_the_same_images(counts, size, seed):
    whole = restrict_train(data(train=counts), dev=0.25)
    few = restrict_train(data(train=counts), dev=0.25, subset=size, subset_seed=seed)
    assert keys(few.val) == keys(whole.val)
    assert keys(few.test) == keys(whole.test)
    assert keys(few.train) <= keys(whole.train)
    assert len(few.train) == size


# The dev split


@given(counts=st.tuples(*[st.integers(1, 60)] * 3), share=st.floats(0.02, 0.9))
def test_dev_has_its_share_of_each_class_and_nothing_of_train(counts, share):
    whole = data(train=counts, test=(2, 2, 2))
    if max(counts) == 1:
        with pytest.raises(UserError, match="too few images"):
            with_dev_split(whole, share)
        return
    chosen = with_dev_split(whole, share)
    assert chosen.val is not None
    assert chosen.val.name == "dev"
    for count, held in zip(counts, chosen.val.counts().tolist(), strict=True):
        assert abs(held - count * share) <= 0.5 or held in (1, count - 1)
        assert held < count  # none of them leaves train
    assert keys(chosen.train).isdisjoint(keys(chosen.val))
    assert keys(chosen.train) | keys(chosen.val) == keys(whole.train)
    assert keys(chosen.test) == keys(whole.test)
    assert f"Evaluated on dev ({len(chosen.val):,} images)" in chosen.messages[-1]


def test_a_val_split_is_used_as_the_dev_split():
    whole = data(train=(9, 9, 9), val=(3, 3, 3), test=(4, 4, 4))
    chosen = restrict_train(whole, dev=0.3)
    assert chosen is whole
    assert chosen.val is not None
    assert chosen.val.name == "val"
    last = with_test_split(chosen)
    assert last.test is not None
    assert (last.test.name, len(last.test), last.val) == ("test", 12, None)
    assert keys(last.train) == keys(whole.train)


def test_data_with_a_test_split_only_is_left_as_it_is():
    whole = data(train=(9, 9, 9), test=(4, 4, 4))
    assert with_test_split(whole) is whole
    last = with_test_split(with_dev_split(whole, 0.3))
    assert keys(last.test) == keys(whole.test)


# Lists


def test_excluded_images_are_left_out_of_train_alone():
    whole = data(train=(5, 5, 5), test=(2, 2, 2))
    names = {"train/ant/0.png", "train/cat/14.png", "test/ant/0.png", "another/set.png"}
    left = restrict_train(whole, exclude=names)
    assert keys(left.train) == keys(whole.train) - names
    assert keys(left.test) == keys(whole.test)
    assert "Left out 2 training images" in left.notes[-1]
    assert left.train.labels.tolist() == [CLASSES.index(key.split("/")[1]) for key in left.train.keys]


def test_a_list_whose_images_were_all_held_out_is_no_mistake():
    whole = data(train=(5, 5, 5), test=(2, 2, 2))
    left = restrict_train(whole, exclude={"test/ant/0.png"})
    assert keys(left.train) == keys(whole.train)


def test_excluded_images_are_in_no_subset_and_no_dev_split():
    whole = data(train=(12, 12, 12), test=(2, 2, 2))
    names = set(list(whole.train.keys)[::3])
    left = restrict_train(whole, exclude=names, dev=0.3, subset=10)
    assert (keys(left.train) | keys(left.test)).isdisjoint(names)


@pytest.mark.parametrize(
    "words, says",
    [
        ({"exclude": {"nowhere.png"}}, "data.exclude names none of the training images of pictures"),
        ({"subset": 16}, "data.subset=16 is more than the 15 training images"),
        ({"subset": 12, "dev": 0.5}, "data.subset=12 is more than the 6 training images"),
    ],
)
def test_a_mistake_is_one_sentence(words, says):
    with pytest.raises(UserError) as error:
        restrict_train(data(train=(5, 5, 5), test=(1, 1, 1)), **words)
    assert says in str(error.value)
    assert str(error.value).count(".") - str(error.value).count("data.") <= 1


# Runs


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pictures(tmp_path_factory.mktemp("data") / "pictures", images=10)


NARROW = ("data.subset=9", "data.subset_seed=4", "data.dev=0.3", "steps=2", "data.mixup=0")


@pytest.fixture(scope="module")
def small_run(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "small"
    (out.parent / "list").write_text("class-0/3.png\nclass-2/7.png\n")
    train(pictures, out, *NARROW, f"data.exclude={out.parent / 'list'}")
    return out


def seen(pictures: Path, run: Path) -> set[str]:
    """The images that a run was trained on, by its own folder."""
    opened = open_restricted(pictures, from_toml((run / "recipe.toml").read_text()))
    assert opened.train.fingerprint() == json.loads((run / "data.json").read_text())["train"]
    return keys(opened.train)


def test_a_run_trains_on_its_subset_and_is_evaluated_on_dev(pictures, small_run):
    used = seen(pictures, small_run)
    assert len(used) == 9
    assert used.isdisjoint({"class-0/3.png", "class-2/7.png"})
    held = open_data(pictures)
    assert used < keys(held.train)
    notes = json.loads((small_run / "data.json").read_text())["notes"]
    assert any("Trained on 9 of" in note for note in notes)
    # 8 of each class are trained on, two of those left out; 30 % of what remains of each is 2.
    assert json.loads((small_run / "result.json").read_text())["metrics"]["n"] == 6


def test_the_command_line_prints_subset_and_dev_split(pictures, tmp_path, monkeypatch, capsys):
    words = [*SHAPE, *PLAIN, "steps=1", "batch=4", "data.subset=7", "data.dev=0.25"]
    said = Command(monkeypatch, capsys)("train", pictures, "--model", MODEL, "--out", tmp_path / "run", "--set", *words)
    assert said.code == 0
    assert "6 of 24 training images are the dev split." in said.err
    assert "Evaluated on dev (6 images); test is not used before the end." in said.err
    assert "Trained on 7 of 18 images, drawn with seed 0." in said.err
    said = Command(monkeypatch, capsys)("train", pictures, "--model", MODEL, "--set", "data.subset=30")
    assert (said.code, said.err) == (
        2,
        "vitral: data.subset=30 is more than the 24 training images: choose a smaller one.\n",
    )


@pytest.mark.parametrize("split", ["", "dev", "test"])
def test_evaluation_never_uses_training_images(pictures, small_run, monkeypatch, split):
    scored: list[set[str]] = []
    real = inference.predict_split
    monkeypatch.setattr(
        inference,
        "predict_split",
        lambda model, images, *rest, **named: scored.append(set(images.keys)) or real(model, images, *rest, **named),
    )
    found = vitral.evaluate(small_run, pictures, split=split, device="cpu")
    assert found.metrics["n"] == len(scored[0]) == 6
    assert scored[0].isdisjoint(seen(pictures, small_run))
    assert (scored[0] == keys(open_data(pictures).test)) == (split == "test")
    assert f"only the 6 held-out images of its {split or 'dev'} split are scored" in found.notes[0]
    if split != "test":
        before = json.loads((small_run / "result.json").read_text())["metrics"]
        assert found.metrics["top1"] == before["top1"]


def test_a_split_that_is_not_there_is_named(pictures, small_run):
    with pytest.raises(UserError, match='has no split "val" to score: use --split dev or --split test'):
        vitral.evaluate(small_run, pictures, split="val")


def test_what_protocols_choose_on_does_not_depend_on_the_subset(pictures):
    opened = {
        size: open_to_choose(pictures, with_overrides(Recipe(), [f"data.subset={size}"]), 0.25) for size in (5, 15)
    }
    dev = [keys(choosing.val) for _, choosing in opened.values() if choosing is not None]
    assert len(dev) == 2
    assert dev[0] == dev[1]
    for size, (final, choosing) in opened.items():
        assert choosing is not None
        assert len(final.train) == len(choosing.train) == size
        assert keys(choosing.train).isdisjoint(dev[0])
        assert keys(final.test) == keys(choosing.test)
    assert open_to_choose(pictures, Recipe(), 0.0)[1] is None


@pytest.mark.parametrize("words", [["data.subset=20"], ["data.exclude=LIST"], ["data.dev=0.3"]])
def test_a_run_on_a_subset_is_evaluated_on_other_data(pictures, tmp_path, words):
    (tmp_path / "LIST").write_text("class-0/3.png\nclass-2/7.png\n")
    words = [word.replace("LIST", str(tmp_path / "LIST")) for word in words]
    train(pictures, tmp_path / "run", *words, "steps=1")
    other = make_pictures(tmp_path / "other", images=2, size=14).rename(tmp_path / "another")
    for image in other.glob("*/*.png"):
        image.rename(image.with_name(f"new-{image.name}"))
    found = vitral.evaluate(tmp_path / "run", other, device="cpu")
    assert found.metrics["n"] == 6
    assert "All 6 images are scored." in found.notes[0]


def test_a_missing_exclusion_list_is_an_error(pictures, tmp_path):
    (tmp_path / "list").write_text("class-0/3.png\nclass-2/7.png\n")
    train(pictures, tmp_path / "run", f"data.exclude={tmp_path / 'list'}", "steps=1")
    (tmp_path / "list").unlink()
    with pytest.raises(UserError, match="cannot be read: name a list"):
        vitral.evaluate(tmp_path / "run", pictures, device="cpu")


def test_a_run_is_evaluated_on_data_with_one_image_per_class(small_run, tmp_path):
    other = make_pictures(tmp_path / "single", images=1, size=14)  # not the bytes that the run has seen
    assert vitral.evaluate(small_run, other, device="cpu").metrics["n"] == 3
