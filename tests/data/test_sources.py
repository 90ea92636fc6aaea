"""Where labelled images come from: folders, manifests, Parquet, the catalogue; class lists and splits."""

from __future__ import annotations

import csv
import io
import json
import os
import pickle
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vitral.api.data import open_to_train
from vitral.data.images import ImageError
from vitral.data.sources import Split, open_data, open_images
from vitral.data.splits import RawSplit, make_dataset, natural_key, split_name, stratified
from vitral.errors import UserError
from vitral.recipe import Recipe
from vitral.recipe_schema import DataRecipe


def picture(value: int = 0) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (4, 4), (value % 256, 0, 0)).save(stream, "PNG")
    return stream.getvalue()


def plant(folder: Path, *names: str) -> Path:
    """Files with one-colour pictures, each another colour."""
    for number, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(number))
    return folder


def red(split: Split, index: int) -> int:
    data = split.reader.read(index)
    assert isinstance(data, bytes)
    return int(np.asarray(Image.open(io.BytesIO(data)))[0, 0, 0])


# Order and splits


@given(st.lists(st.tuples(st.sampled_from(["", "a", "b-"]), st.integers(0, 10**6)), unique=True))
def test_natural_order_is_the_order_of_the_numbers(pairs):
    texts = [f"{letters}{number}" for letters, number in pairs]
    assert sorted(texts, key=natural_key) == [f"{letters}{number}" for letters, number in sorted(pairs)]


@given(st.lists(st.text(max_size=8)))
def test_any_texts_have_a_natural_order(texts):
    found = sorted(texts, key=natural_key)
    assert Counter(found) == Counter(texts)
    assert sorted(reversed(texts), key=natural_key) == found


def test_the_split_is_read_from_words_in_names():
    names = {
        "train-00000-of-00002": "train",
        "imagenet1k-validation-03": "val",
        "Testing": "test",
        "dev": "val",
        "contest": None,
    }
    assert {name: split_name(name) for name in names} == names


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=80),
    st.floats(0.01, 0.99),
    st.integers(0, 2**32),
    st.randoms(use_true_random=False),
)
def test_held_out_share_of_each_class_and_independence_of_order(labels, share, seed, random):
    keys = [f"{place}.jpg" for place in range(len(labels))]
    held = stratified(keys, np.array(labels), share, seed)
    for label in set(labels):
        members = np.array(labels) == label
        count, taken = members.sum(), held[members].sum()
        assert abs(taken - share * count) <= 1
        assert count < 2 or 1 <= taken <= count - 1
    order = random.sample(range(len(keys)), len(keys))
    again = stratified([keys[place] for place in order], np.array(labels)[order], share, seed)
    np.testing.assert_array_equal(again, held[order])


def test_a_held_out_split_is_disjoint_complete_and_noted(tmp_path):
    names = [f"{label}/{number}.png" for label in "ab" for number in range(10)]
    data = open_data(plant(tmp_path, *names))
    assert data.test is not None
    assert sorted((*data.train.keys, *data.test.keys)) == sorted(names)
    assert data.test.counts().tolist() == [2, 2]
    assert data.train.counts().tolist() == [8, 8]
    for split in (data.train, data.test):
        for index, key in enumerate(split.keys):
            assert red(split, index) == names.index(key)
            assert split.classes[split.labels[index]] == key[0]
    assert data.notes == (
        "No test split was given: 4 of 20 images (20% of each class, at least one; seed 0) are held out for testing; "
        f"split {data.test.fingerprint()[:12]}.",
    )
    whole = open_data(tmp_path, held_out=0)
    assert whole.test is None
    assert len(whole.train) == 20


def test_several_labels_are_split_by_the_rarest(tmp_path):
    # "rare" is on two images that also have a common label: one must be on each side.
    labels = [("common", "rare") if place < 2 else ("common",) for place in range(50)]
    for draw in range(5):
        part = RawSplit([f"{draw}-{place}" for place in range(50)], labels, Unused())
        data = make_dataset("x", {"train": part}, held_out=0.2)
        assert data.test is not None
        assert data.train.classes == ("common", "rare")
        assert data.train.counts()[1] == data.test.counts()[1] == 1


class Unused:
    def read(self, index: int) -> bytes:
        raise AssertionError("nothing asks for the image")

    def mark(self, index: int) -> str:
        return ""


def test_selecting_twice_and_pickling_keep_the_images(tmp_path):
    names = [f"{label}/{number}.png" for label in "ab" for number in range(4)]
    split = open_data(plant(tmp_path, *names), held_out=0).train
    some = split.select(np.array([7, 0, 5])).select(np.array([2, 0]))
    copy = pickle.loads(pickle.dumps(some))
    for chosen in (some, copy):
        assert list(chosen.keys) == ["b/1.png", "b/3.png"]
        assert [red(chosen, index) for index in range(2)] == [5, 7]
        assert chosen.labels.tolist() == [1, 1]


def test_fingerprint_and_stamp(tmp_path):
    one = open_data(plant(tmp_path / "one", "a/1.png", "b/1.png"), held_out=0).train
    two = open_data(plant(tmp_path / "two", "a/1.png", "b/1.png"), held_out=0).train
    assert one.fingerprint() == two.fingerprint() != one.select(np.array([1, 0])).fingerprint()
    assert one.stamp() != two.stamp()
    before = one.stamp()
    (tmp_path / "one/a/1.png").write_bytes(picture(9) + b"longer")
    assert one.stamp() != before


# Folders


def test_folder_with_splits_links_and_other_files(tmp_path):
    folder = plant(tmp_path / "set", *(f"Train/{label}/x.png" for label in ("10", "2", "1")), "val/2/deep/er/y.png")
    plant(folder, "Train/1/.hidden.png", "Train/1/noext", "Train/__MACOSX/z.png", "extra/a/b.png", "val/loose.png")
    (folder / "Train/1/notes.txt").write_text("no picture")
    (folder / "Train/1/README").write_text("no picture")
    (folder / "Train/2/zero.jpg").touch()
    plant(tmp_path / "elsewhere", "linked.png")
    os.symlink(tmp_path / "elsewhere", folder / "Train/10/link")
    os.symlink(folder / "Train/10", folder / "Train/10/loop")
    data = open_data(folder)
    assert data.train.classes == ("1", "2", "10")
    assert list(data.train.keys) == [
        *("Train/1/noext", "Train/1/x.png", "Train/2/x.png", "Train/2/zero.jpg"),
        *("Train/10/link/linked.png", "Train/10/x.png"),
    ]
    assert data.train.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert data.val is not None
    assert (data.val.name, list(data.val.keys), data.val.labels.tolist()) == ("val", ["val/2/deep/er/y.png"], [1])
    assert data.notes == (
        "Left out 2 files that are no images (.txt 1, without extension 1).",
        "Left out 1 image beside the class folders.",
        "Left out the folder extra beside Train.",
        '2 of 3 classes have no image in val: "1" (2 in train), "10" (2 in train).',
    )


@pytest.mark.parametrize(
    ("names", "note"),
    [
        (["train/pets/cats/1.png", "train/pets/dogs/2/2.png"], "2 sub-folders of pets are read as one class."),
        (["train/pets/cats/1.png", "test/pets/dogs/2.png"], "2 sub-folders of pets are read as one class."),
        (
            [f"train/{name}/{inner}/1.png" for name in "abcdef" for inner in "xyz"],
            "Sub-folders of 6 classes are read as one class each: a (3), b (3), c (3), d (3), ...",
        ),
        (["train/pets/images/1.png", "train/pets/images/2.png"], None),  # as Tiny ImageNet has them
        (["train/pets/cats/1.png", "train/pets/.dogs/2.png"], None),
    ],
)
def test_sub_folders_that_become_one_class_are_named(tmp_path, names, note):
    plant(tmp_path, "train/birds/1.png", "test/birds/2.png", "train/pets/0.png", "test/pets/0.png", *names)
    assert open_data(tmp_path).notes[:1] == ((note,) if note else ())


def test_val_is_evaluated_and_test_left_alone(tmp_path):
    names = [f"{split}/{label}/{split}.png" for split in ("train", "test", "validation") for label in "ab"]
    data = open_data(plant(tmp_path, *names))
    assert data.val is not None
    assert data.test is not None
    assert data.eval_split is data.val
    assert list(data.val.keys) == ["validation/a/validation.png", "validation/b/validation.png"]
    assert list(data.test.keys) == ["test/a/test.png", "test/b/test.png"]
    assert data.notes == ()
    assert data.messages == ("Evaluated on val (2 images); test is not used before the end.",)


def test_a_class_is_the_same_in_both_forms_of_unicode(tmp_path):
    plant(tmp_path, "train/caf\u00e9/1.png", "train/tea/1.png", "test/cafe\u0301/1.png", "test/tea/2.png")
    data = open_data(tmp_path)
    assert data.test is not None
    assert (data.train.classes, data.test.labels.tolist()) == (("caf\u00e9", "tea"), [0, 1])
    assert isinstance(data.test.reader.read(0), bytes)  # the file keeps its name
    assert data.notes == ('Class names in two Unicode forms (NFC and NFD) are taken as one class: "caf\u00e9".',)


def test_class_names_that_differ_only_in_case_are_noted(tmp_path):
    rows = [(f"{number}.png", label) for number, label in enumerate(("Cat", "cat", "dog", "Cat", "cat", "dog"))]
    plant(tmp_path, *(name for name, _ in rows))
    data = open_data(write_csv(tmp_path / "m.csv", ("path", "label"), *rows))
    assert data.train.classes == ("Cat", "cat", "dog")
    assert data.notes[0] == (
        'Class names that differ only in case or spaces: "Cat" and "cat"; rename them if they are one class.'
    )


def test_a_class_may_be_called_train(tmp_path):
    data = open_data(plant(tmp_path, "train/1.png", "train/2.png", "car/1.png", "car/2.png"))
    assert data.train.classes == ("car", "train")


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["train/a/1.png", "train/b/1.png", "test/c/1.png"], '"c" (1 image); add them to train or remove them'),
        (["a/1.png", "b/x.txt"], "b has no image: add some, or remove the folder"),
        (
            ["a/1.png", "a/2.png"],
            'one class, "a": a classifier needs at least two, each with its own sub-folder or label.',
        ),
        (["1.png", "2.png"], "2 images but no class folders: put the images of each class in a sub-folder"),
        (["train/1.png", "test/a/1.png"], "no class folders in train"),
        (["val/1.png", "test/1.png"], "no class folders in train"),
        (["train/a/1.png", "Training/a/1.png", "test/a/1.png"], "both Training and train: keep one"),
        (["a/1.png", "b/1.png"], "one image in each class: add more images, or a test split."),
        (["flowers/a/1.png", "flowers/b/1.png"], "one folder, and the class folders are in that: name "),
        (["voc/JPEGImages/1.png", "voc/Annotations/1.xml", "voc/ImageSets/Main/1.txt"], 'one class, "voc"'),
        (["JPEGImages/1.png", "Annotations/1.xml"], "Annotations has no image: its XML files (boxes of object"),
        (["seg_train/a/1.png", "seg_train/b/1.png", "seg_test/a/1.png"], "seg_train has class folders, as a split has"),
        (["train/a/1.png", "train/b/1.png", "test/1.png"], "1 images but no class folders: put the images of each"),
        (["train/a/1.png", "train/b/1.png", "test/1.png"], "or name the train folder alone."),
        (["1.png", "labels.csv"], "or name the file of their labels: "),
        (["train/1.png", "train/metadata.csv"], "train/metadata.csv."),
        (["images/1.png", "labels.csv"], "has no class folders but images: add some, or name the file of their labels"),
        (["test_images/1.png", "train_images/1.png", "sample.csv", "train.csv"], "their labels: "),
        (["test_images/1.png", "train_images/1.png", "sample.csv", "train.csv"], "train.csv."),
        (["images/1.png", "annotations/instances.json"], "annotations has no image: its JSON files (boxes of object"),
    ],
)
def test_faulty_folders_say_what_to_do(tmp_path, names, said):
    with pytest.raises(UserError) as caught:
        open_data(plant(tmp_path, *names))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_empty_name_is_not_this_folder():
    with pytest.raises(UserError, match="The name of the data is empty"):
        open_data("")


@pytest.mark.parametrize("name", ["photos.zip", "photos.tar.gz", "photos.ZIP", "pets.zip"])
def test_an_archive_is_to_be_unpacked(tmp_path, name):
    (tmp_path / name).write_bytes(b"PK")
    with pytest.raises(UserError, match=f"{name} is not a data set: unpack it, and name the folder of class folders"):
        open_data(tmp_path / name)


@pytest.mark.parametrize("values", [["1.5", "2.25", "-3e-2"], ["1.5", "1.5", "2.0"]])
def test_numbers_to_predict_are_no_classes(tmp_path, values):
    plant(tmp_path, "0.png", "1.png", "2.png")
    (tmp_path / "m.csv").write_text("path,label\n" + "".join(f"{i}.png,{v}\n" for i, v in enumerate(values)))
    with pytest.raises(
        UserError, match=r"different numbers as labels of 3 images, .*: vitral predicts classes, not values"
    ):
        open_data(tmp_path / "m.csv")


def test_a_single_class_is_refused_only_where_a_part_is_held_out(tmp_path):
    """Who holds out nothing wants to look at, compare or score what is there."""
    folder = plant(tmp_path, "a/1.png", "a/2.png")
    split = open_data(folder, held_out=0).train
    assert (split.classes, split.labels.tolist()) == (("a",), [0, 0])
    with pytest.raises(UserError, match='one class, "a": a classifier needs at least two'):
        open_to_train(folder, Recipe())
    with pytest.raises(UserError, match="held_out must be above 0"):
        Recipe(data=DataRecipe(held_out=0))  # else training would lose the rule


@pytest.mark.parametrize("held_out", [0, 0.2])
def test_a_folder_with_test_alone_is_for_testing(tmp_path, held_out):
    folder = plant(tmp_path / "one", "Test/b/1.png", "Test/a/2.png")
    data = open_data(folder, held_out=held_out)
    assert data.test is not None
    assert (len(data.train), data.train.classes, data.test.name) == (0, ("a", "b"), "test")
    assert list(zip(data.test.keys, data.test.labels.tolist(), strict=True)) == [
        ("Test/a/2.png", 0),
        ("Test/b/1.png", 1),
    ]
    assert red(data.test, 0) == 1
    assert data.notes == ("There is no train folder: this is for testing only.",)
    both = open_data(plant(tmp_path / "two", "val/a/1.png", "test/a/1.png", "test/c/2.png"), held_out=held_out)
    assert both.val is not None
    assert both.test is not None
    assert (both.train.classes, len(both.train), len(both.val), len(both.test)) == (("a", "c"), 0, 1, 2)
    assert both.test.labels.tolist() == [0, 1]
    with pytest.raises(UserError, match="no images to train on: it is for testing only; pass data with a train split"):
        open_to_train(folder, Recipe())


def test_missing_sources_and_missing_permissions(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="did you mean digits"):
        open_data("digit")
    with pytest.raises(UserError, match="nowhere does not exist: name a folder"):
        open_data(tmp_path / "nowhere")
    with pytest.raises(UserError, match="held_out is the share"):
        open_data(plant(tmp_path, "a/1.png", "b/1.png"), held_out=1)

    def refuse(path: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(UserError, match=r"cannot be read \(Permission denied\): check"):
        open_data(tmp_path)


def test_a_file_that_vanishes_is_unreadable(tmp_path):
    split = open_data(plant(tmp_path, "a/1.png", "b/1.png"), held_out=0).train
    (tmp_path / "a/1.png").unlink()
    with pytest.raises(ImageError, match="no such file"):
        split.reader.read(0)
    assert split.stamp()


def test_images_without_labels(tmp_path):
    folder = plant(tmp_path, "x/10.png", "x/2.png", "y.dat")
    named, inside = folder / "y.dat", folder / "x"
    split = open_images([named, inside, named])
    assert list(split.keys) == [str(named), str(inside / "2.png"), str(inside / "10.png")]
    assert split.labels.tolist() == [-1, -1, -1]
    assert [red(split, index) for index in range(3)] == [2, 1, 0]
    with pytest.raises(UserError, match="does not exist"):
        open_images([folder / "z.png"])
    (folder / "empty").mkdir()
    with pytest.raises(UserError, match="There is no image in"):
        open_images([folder / "empty"])
    with pytest.raises(UserError, match="IMAGES have an empty name"):  # not all of the current folder
        open_images([named, ""])


# Manifests


def write_csv(path: Path, *rows: tuple[str, ...]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream).writerows(rows)
    return path


def test_csv_with_splits_and_missing_files(tmp_path):
    plant(tmp_path, "a 1.png", "b,2.png", "c/3.png")
    rows = [("File", "Class", "split", "more"), ("a 1.png", "cat", "train", ""), ("b,2.png", "dog", "train", "")]
    rows += [("c/3.png", "dog", "TEST", ""), ("gone.png", "dog", "train", ""), ("a 1.png", "cat", "train", "")]
    data = open_data(write_csv(tmp_path / "m.csv", *rows))
    assert data.train.classes == ("cat", "dog")
    assert list(data.train.keys) == ["a 1.png", "b,2.png"]
    assert data.test is not None
    assert (list(data.test.keys), data.test.labels.tolist(), red(data.test, 0)) == (["c/3.png"], [1], 2)
    assert data.notes == (
        "1 of 5 files in m.csv is missing, such as gone.png.",
        "1 repeated line of m.csv is left out.",
        '1 of 2 classes have no image in test: "cat" (1 in train).',
    )


def test_paths_of_a_manifest_from_windows(tmp_path):
    plant(tmp_path, "a/1.png", "a/2.png", "odd\\name.png", "b/2.png")
    rows = [("path", "label"), (r"a\1.png", "a"), (r"a\2.png", "a"), (r"odd\name.png", "b"), ("b/2.png", "b")]
    data = open_data(write_csv(tmp_path / "m.csv", *rows), held_out=0)
    assert list(data.train.keys) == ["a/1.png", "a/2.png", r"odd\name.png", "b/2.png"]


def test_several_labels_make_a_matrix(tmp_path):
    plant(tmp_path, *(f"{number}.png" for number in range(4)))
    table = write_csv(tmp_path / "m.csv", ("path", "label"), ("0.png", "b|a"), ("1.png", "c"), ("2.png", "a"))
    lines = [
        {"image": f"{number}.png", "labels": labels} for number, labels in enumerate([["b", "a"], ["c"], ["a"], []])
    ]
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    expected = [[1, 1, 0], [0, 0, 1], [1, 0, 0], [0, 0, 0]]
    for source, rows in ((table, 3), (tmp_path / "m.jsonl", 4)):
        split = open_data(source, held_out=0).train
        assert split.multilabel
        assert split.labels.dtype == np.uint8
        assert split.labels.tolist() == expected[:rows]
        assert split.counts().tolist() == [2, 1, 1]


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_the_separator_is_that_of_the_header_and_rows_of_empty_cells_are_left_out(tmp_path, separator):
    plant(tmp_path, "a,b.png", "c.png")
    rows = ["path,label", "", '"a,b.png",x', ",", "c.png,y", " , ", ",", ""]
    text = "\n".join(row if "b.png" in row else row.replace(",", separator) for row in rows)
    (tmp_path / "m.csv").write_text(text.replace('g",x', f'g"{separator}x'))
    split = open_data(tmp_path / "m.csv", held_out=0).train
    assert (list(split.keys), split.classes) == (["a,b.png", "c.png"], ("x", "y"))


def test_one_label_per_line_is_multi_label_only_as_lists(tmp_path):
    plant(tmp_path, "0.png", "1.png")
    table = write_csv(tmp_path / "m.csv", ("path", "label"), ("0.png", "a"), ("1.png", "b"))
    assert open_data(table, held_out=0).train.labels.tolist() == [0, 1]
    lines = [{"path": "0.png", "label": ["a"]}, {"path": "1.png", "label": ["b"]}]
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert open_data(tmp_path / "m.jsonl", held_out=0).train.labels.tolist() == [[1, 0], [0, 1]]


def test_numbers_as_labels_keep_their_order(tmp_path):
    plant(tmp_path, *(f"{number}.png" for number in range(3)))
    lines = [{"path": f"{number}.png", "label": label} for number, label in enumerate((10, 2, 0))]
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, lines)))
    split = open_data(tmp_path / "m.jsonl", held_out=0).train
    assert split.classes == ("0", "2", "10")
    assert split.labels.tolist() == [2, 1, 0]


@pytest.mark.parametrize("held_out", [0, 0.2])
def test_a_manifest_without_train_is_for_testing(tmp_path, held_out):
    plant(tmp_path, *(f"{number}.png" for number in range(3)))
    rows = [("path", "label", "split"), ("0.png", "b", "test"), ("1.png", "a", "test"), ("2.png", "c", "val")]
    data = open_data(write_csv(tmp_path / "one.csv", *rows[:3]), held_out=held_out)
    assert data.test is not None
    assert (len(data.train), data.train.classes, data.test.name) == (0, ("a", "b"), "test")
    assert list(zip(data.test.keys, data.test.labels.tolist(), strict=True)) == [("0.png", 1), ("1.png", 0)]
    assert red(data.test, 1) == 1
    assert data.notes == ("No image is of the split train: this is for testing only.",)
    both = open_data(write_csv(tmp_path / "two.csv", *rows), held_out=held_out)
    assert both.val is not None
    assert both.test is not None
    assert (both.train.classes, both.val.labels.tolist(), both.test.labels.tolist()) == (("a", "b", "c"), [2], [1, 0])
    lines = [{"path": "0.png", "label": ["b", "a"], "split": "test"}, {"path": "1.png", "label": [], "split": "test"}]
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, lines)))
    several = open_data(tmp_path / "m.jsonl", held_out=held_out)
    assert several.test is not None
    assert (several.train.labels.shape, several.test.labels.tolist()) == ((0, 2), [[1, 1], [0, 0]])
    with pytest.raises(UserError, match="no images to train on: it is for testing only"):
        open_to_train(tmp_path / "one.csv", Recipe())


def test_test_images_need_no_training_images_that_are_missing(tmp_path):
    plant(tmp_path, "0.png")
    rows = [("path", "label", "split"), ("0.png", "a", "test"), ("gone/1.png", "a", "train")]
    table = write_csv(tmp_path / "m.csv", *rows)
    data = open_data(table, held_out=0)
    assert data.test is not None
    assert (len(data.train), list(data.test.keys)) == (0, ["0.png"])
    with pytest.raises(UserError, match=r"None of the training files .* such as .*gone/1.png: correct the paths"):
        open_data(table)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("m.csv", "0.png,cat\n", 'no column "path": its columns are 0.png, cat, and must be named'),
        ("m.csv", ",".join(["column"] * 99) + "\n", "column, c..., and must be named as"),
        ("m.csv", "path,label\n0.png,a\n1.png,\n", "line 3 has an empty label"),
        ("m.csv", "path,label\n0.png,a|\n", "line 2 has an empty label"),
        ("m.csv", "path,label\n0.png,a\n1.png,\n", "name the class of 1.png."),
        (
            "m.csv",
            "path,label\n0.png,a|b\n1.png,\n",
            'name the class of 1.png; an image of no class is written "label"',
        ),
        ("m.jsonl", '{"path": "0.png", "label": ["a", null]}\n', "line 1 has an empty label"),
        ("m.csv", "path,label\n,a\n", "line 2 has no path"),
        ("m.csv", 'path,label\n\n0.png,a\na "b".png,a\n1.png,"b" c\n', "m.csv, line 5: not valid CSV (',' expected"),
        ("m.csv", 'path,label\n0.png,a\n1.png,"b\n', "m.csv, line 3: not valid CSV (unexpected end of data); put a"),
        ("m.csv", 'path,label\n0.png,"a\n1.png,"b"\n', "m.csv, lines 2 to 3: not valid CSV"),
        ("m.csv", "path,label\n0.png,a\ncats, dogs/1.png,b\n", "m.csv, line 3: 3 values for 2 columns; put a value"),
        ("m.csv", "path,label\n0.png,0\n1.png,-1\n", "line 3: the label -1 is out of range"),
        ("m.csv", "path,label\n0.png,a\n0.png,b\n", "lines 2 and 3 give 0.png different labels"),
        ("m.csv", "path,label,split\n0.png,a,devel\n", 'line 2 has the split "devel"'),
        ("m.csv", "path,label,split\n0.png,a,train\n1.png,b,\n", "line 3 has no split while others have one"),
        ("m.csv", "path,label,split\nx.png,a,train\n1.png,b,test\n", "None of the training files"),
        ("m.csv", "path,label\nx.png,a\n", "None of the files"),
        ("m.csv", "path,label\n", "lists no images"),
        ("m.tsv", "path,label\n", 'no column "path"'),
        ("m.jsonl", '{"path": "0.png", "label": "a"}\n{"path"\n', "line 2 is not valid JSON"),
        ("m.jsonl", '["0.png"]\n', "line 1: write"),
        ("m.jsonl", '{"path": "0.png", "label": null}\n', "line 1 has an empty label"),
        ("m.csv", "path,label\n0.png,a\nx.png,b\n", "1 of 2 files in m.csv is missing, such as x.png. "),
        ("m.jsonl", "\udcff", "save it as such"),
    ],
)
def test_faulty_manifests_name_the_line(tmp_path, name, text, said):
    plant(tmp_path, "0.png", "1.png")
    (tmp_path / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UserError) as caught:
        open_data(tmp_path / name)
    assert said in str(caught.value)


@pytest.mark.parametrize("name", ["0", "0.png", "elsewhere/0.png"])
def test_a_manifest_whose_paths_lack_a_folder_or_an_ending(tmp_path, name):
    plant(tmp_path, "images/0.png", "images/1.png")
    (tmp_path / "m.csv").write_text(f"path,label\n{name},a\n")
    with pytest.raises(UserError) as caught:
        open_data(tmp_path / "m.csv")
    assert str(caught.value).endswith(f"correct the paths (instead of {name}, write images/0.png).")


# The catalogue


def test_digits_are_scikit_learns_with_one_split():
    datasets = pytest.importorskip("sklearn.datasets", reason="needs scikit-learn")
    table = datasets.load_digits()
    data = open_data("digits")
    assert data.test is not None
    assert (len(data.train), len(data.test)) == (1438, 359)
    assert data.test.fingerprint() == open_data("digits").test.fingerprint()  # type: ignore[union-attr]
    assert data.test.fingerprint()[:12] in data.notes[0]
    for split in (data.train, data.test):
        for index in range(0, len(split), 97):
            row = int(split.keys[index].removeprefix("digit-"))
            pixels = split.reader.read(index)
            assert isinstance(pixels, np.ndarray)
            assert pixels.shape == (8, 8, 1)
            assert split.labels[index] == table.target[row]
            np.testing.assert_array_equal(
                pixels[:, :, 0], [[round(x * 255 / 16) for x in y] for y in table.images[row]]
            )
