"""Known data sets: tiny copies in every layout, written by other libraries, and what a wrong copy is told."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from catalog_files import RNG, objectnet, png, put, small_pictures

from vitral.data.catalog import CATALOG, imagenet_outputs
from vitral.data.loader import read_pixels
from vitral.data.sources import DataSet, Split, open_data
from vitral.errors import UserError

NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
IDS = [f"n{number:08d}" for number in range(1_440_764, 1_441_764)]


def held(split: Split | None) -> tuple[np.ndarray, list[str]]:
    """All pixels (n, h, w, 3) and class names of a split."""
    assert split is not None
    pixels = np.stack([read_pixels(split, index, 3) for index in range(len(split))])
    return pixels, [split.classes[label] for label in split.labels]


def refusal(source: str) -> str:
    with pytest.raises(UserError) as caught:
        open_data(source)
    text = str(caught.value)
    assert "\n" not in text
    assert text.endswith((".", "?"))
    return text


# CIFAR


class Cifar:
    """Pictures with labels: ten to train on, in batches of two, and three to test."""

    def __init__(self, classes: int) -> None:
        self.train, self.test = small_pictures(10), small_pictures(3)
        self.train_labels = RNG.integers(0, classes, 10).tolist()
        self.test_labels = RNG.integers(0, classes, 3).tolist()

    def check(self, data: DataSet, names: tuple[str, ...]) -> None:
        assert data.train.classes == names
        for split, images, labels in (
            (data.train, self.train, self.train_labels),
            (data.test, self.test, self.test_labels),
        ):
            pixels, found = held(split)
            np.testing.assert_array_equal(pixels, images)
            assert found == [names[label] for label in labels]


def record(image: np.ndarray, *labels: int) -> bytes:
    """Written plane by plane, with struct."""
    planes = [image[row, column, channel] for channel in range(3) for row in range(32) for column in range(32)]
    return struct.pack(f"{len(labels)}B3072B", *labels, *planes)


def binary_cifar10(folder: Path, cifar: Cifar) -> Path:
    for batch in range(5):
        rows = range(2 * batch, 2 * batch + 2)
        content = b"".join(record(cifar.train[row], cifar.train_labels[row]) for row in rows)
        put(folder / f"data_batch_{batch + 1}.bin", content)
    put(folder / "test_batch.bin", b"".join(map(record, cifar.test, cifar.test_labels)))
    return folder


def npm_cifar10(folder: Path, cifar: Cifar) -> Path:
    for batch in range(5):
        put(folder / f"data_batch_{batch + 1}.png", png(cifar.train[2 * batch : 2 * batch + 2].reshape(2, 1024, 3)))
    put(folder / "test_batch.png", png(cifar.test.reshape(3, 1024, 3)))
    put(folder / "train_lables.json", json.dumps(cifar.train_labels))
    put(folder / "test_lables.json", json.dumps(cifar.test_labels))
    return folder


def parquet(path: Path, columns: dict[str, Any], names: dict[str, list[str]]) -> Path:
    """As the hub writes it: PNG bytes in a struct, the names of classes in the metadata."""
    pa = pytest.importorskip("pyarrow", reason="needs pyarrow")
    import pyarrow.parquet as pq

    features = {column: {"names": list(listed), "_type": "ClassLabel"} for column, listed in names.items()}
    table = pa.table(
        {
            name: [{"bytes": png(pixels), "path": None} for pixels in values] if name in ("img", "image") else values
            for name, values in columns.items()
        }
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(
        table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})}), str(path)
    )
    return path


@pytest.mark.parametrize("write", [binary_cifar10, npm_cifar10])
@pytest.mark.parametrize("inside", ["", "package"])
def test_cifar10_keeps_pixels_labels_and_order(tmp_path, write, inside):
    cifar = Cifar(10)
    write(tmp_path / inside, cifar)
    data = open_data(f"cifar10:{tmp_path}")
    cifar.check(data, NAMES)
    assert data.source == f"cifar10:{tmp_path}"
    assert "A copy of 10 train images, not of 50,000." in data.notes


def test_cifar10_is_the_same_split_in_both_layouts(tmp_path):
    cifar = Cifar(10)
    one = open_data(f"cifar10:{binary_cifar10(tmp_path / 'a', cifar)}")
    other = open_data(f"cifar10:{npm_cifar10(tmp_path / 'b', cifar)}")
    assert one.train.fingerprint() == other.train.fingerprint()
    assert one.train.stamp() != other.train.stamp()


def test_cifar100_has_fine_labels(tmp_path):
    cifar = Cifar(100)
    names = tuple(f"fine_{number:02d}" for number in range(100))
    for split in ("train", "test"):
        rows = zip(getattr(cifar, split), getattr(cifar, f"{split}_labels"), strict=True)
        put(tmp_path / f"{split}.bin", b"".join(record(image, 7, label) for image, label in rows))
    put(tmp_path / "fine_label_names.txt", "\n".join(names) + "\n\n")
    cifar.check(open_data(f"cifar100:{tmp_path}"), names)


def test_the_hubs_cifar100_has_fine_labels_too(tmp_path):
    cifar = Cifar(100)
    names = [f"fine_{number:02d}" for number in range(100)]
    for split in ("train", "test"):
        columns = {
            "img": getattr(cifar, split),
            "fine_label": getattr(cifar, f"{split}_labels"),
            "coarse_label": [0] * len(getattr(cifar, split)),
        }
        parquet(
            tmp_path / f"cifar100/{split}-00000-of-00001.parquet", columns, {"fine_label": names, "coarse_label": ["x"]}
        )
    cifar.check(open_data(f"cifar100:{tmp_path}"), tuple(names))


def test_a_name_alone_is_looked_up_in_one_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("VITRAL_DATA", str(tmp_path))
    assert f"{tmp_path / 'cifar10'} does not exist: write cifar10:FOLDER" in refusal("cifar10")
    cifar = Cifar(10)
    binary_cifar10(tmp_path / "cifar10", cifar)
    cifar.check(open_data("cifar10"), NAMES)


@pytest.mark.parametrize("name", [name for name, known in CATALOG.items() if known.layout])
def test_a_missing_copy_is_refused_with_both_ways_to_name_one(name, tmp_path, monkeypatch):
    monkeypatch.delenv("VITRAL_DATA", raising=False)
    for source in (name, f"{name}:{tmp_path / 'nowhere'}"):
        said = refusal(source)
        assert f"write {name}:FOLDER, or put it in $VITRAL_DATA/{name}" in said
        assert CATALOG[name].layout in said
    assert f"{tmp_path} is no {name}: it should have {CATALOG[name].layout}" in refusal(f"{name}:{tmp_path}")
    archive = put(tmp_path / "archive.tar.gz", b"")
    assert "is a single file: unpack it" in refusal(f"{name}:{archive}")


def test_a_misspelt_name_is_answered_with_the_closest(tmp_path):
    assert "did you mean cifar10?" in refusal(f"cifar1:{tmp_path}")
    assert "write digits alone" in refusal(f"digits:{tmp_path}")


def test_the_python_versions_of_cifar_are_refused(tmp_path):
    put(tmp_path / "a/cifar-10-batches-py/batches.meta", b"\x80")
    put(tmp_path / "b/meta", b"\x80")
    assert "cifar-10-binary.tar.gz instead" in refusal(f"cifar10:{tmp_path / 'a'}")
    assert "cifar-100-binary.tar.gz instead" in refusal(f"cifar100:{tmp_path / 'b'}")


def test_damaged_cifar_is_refused(tmp_path):
    cifar = Cifar(10)
    folder = binary_cifar10(tmp_path / "a", cifar)
    source = f"cifar10:{folder}"
    whole = (folder / "data_batch_3.bin").read_bytes()
    put(folder / "data_batch_3.bin", whole[:-1])
    assert "data_batch_3.bin is truncated" in refusal(source)
    put(folder / "data_batch_3.bin", b"\x0a" + whole[1:])
    assert "a train label outside 0 to 9" in refusal(source)
    (folder / "data_batch_3.bin").unlink()
    assert "data_batch_3.bin cannot be read (No such file or directory)" in refusal(source)
    folder = npm_cifar10(tmp_path / "b", cifar)
    source = f"cifar10:{folder}"
    put(folder / "train_lables.json", json.dumps(cifar.train_labels[:-1]))
    assert "10 train images and 9 labels" in refusal(source)
    put(folder / "train_lables.json", "[1, 2")
    assert "train_lables.json is not valid JSON" in refusal(source)
    put(folder / "data_batch_2.png", png(cifar.train[2]))
    assert "32 pixels wide, not 1024" in refusal(source)
    put(folder / "data_batch_1.png", b"no picture")
    assert "data_batch_1.png cannot be used" in refusal(source)


# Pets


def pets(folder: Path) -> tuple[Path, dict[str, np.ndarray]]:
    """Three breeds, in which the order of the numbers is not the order of code points."""
    breeds = {"Abyssinian": 1, "american_bulldog": 2, "Bengal": 3}
    images = {}
    lines: dict[str, list[str]] = {"trainval": [], "test": []}
    for breed, number in breeds.items():
        for place, listing in enumerate(("test", "trainval", "trainval")):
            name = f"{breed}_{place + 1}"
            images[name] = small_pictures(1, 8)[0]
            put(folder / f"images/{name}.jpg", png(images[name]))
            lines[listing].append(f"{name} {number} 1 {number}")
    for listing, rows in lines.items():
        put(folder / f"annotations/{listing}.txt", "\n".join(rows) + "\n")
    return folder, images


def test_pets_follow_the_original_lists_and_numbers(tmp_path):
    folder, images = pets(tmp_path)
    put(folder / "images/Abyssinian_100.mat", b"beside the pictures")
    data = open_data(f"pets:{folder}")
    assert data.train.classes == ("Abyssinian", "american_bulldog", "Bengal")
    assert data.test is not None
    for split, count in ((data.train, 6), (data.test, 3)):
        pixels, found = held(split)
        assert len(pixels) == count
        for key, image, breed in zip(split.keys, pixels, found, strict=True):
            np.testing.assert_array_equal(image, images[Path(key).stem])
            assert Path(key).stem.rpartition("_")[0] == breed
    assert data.notes == (
        "This copy has 3 classes; pets has 37.",
        "A copy of 6 train images, not of 3,680.",
        "A copy of 3 test images, not of 3,669.",
    )


def test_faulty_pets_are_refused(tmp_path):
    folder, _ = pets(tmp_path)
    listing = folder / "annotations/test.txt"
    (folder / "images/Bengal_1.jpg").unlink()
    assert "lists 1 images that are not there (images/Bengal_1.jpg)" in refusal(f"pets:{folder}")
    put(listing, "Bengal_1 2 1 1\n")
    assert "has american_bulldog and Bengal as class 2" in refusal(f"pets:{folder}")
    put(listing, "# heading\nBengal_1\n")
    assert "no class in line 2" in refusal(f"pets:{folder}")
    put(listing, "# heading\n")
    assert "lists no images" in refusal(f"pets:{folder}")


def test_the_hubs_pets(tmp_path):
    names = ["abyssinian", "american_bulldog"]
    images = {split: small_pictures(4, 8) for split in ("train", "test")}
    for split, pixels in images.items():
        columns = {"image": pixels, "label": [1, 0, 0, 1], "image_id": list("abcd"), "label_cat_dog": [0, 1, 1, 0]}
        parquet(tmp_path / f"data/{split}-00000-of-00001.parquet", columns, {"label": names})
    data = open_data(f"pets:{tmp_path}")
    for split in (data.train, data.test):
        assert split is not None
        pixels, found = held(split)
        np.testing.assert_array_equal(pixels, images[split.name])
        assert found == [names[label] for label in (1, 0, 0, 1)]


def test_some_of_the_pets_in_class_folders(assets):
    folder = assets / "data/pets_mini"
    if not folder.is_dir():
        pytest.skip("needs data/pets_mini")
    known, plain = open_data(f"pets:{folder}"), open_data(folder)
    assert known.train.fingerprint() == plain.train.fingerprint()
    assert known.notes == (
        *plain.notes,
        "This copy has 12 classes; pets has 37.",
        "A copy of 480 train images, not of 3,680.",
        "A copy of 300 test images, not of 3,669.",
    )


# Flowers


def flowers(folder: Path, compress: bool) -> tuple[Path, np.ndarray, np.ndarray]:
    scipy = pytest.importorskip("scipy.io", reason="needs scipy")
    images, labels = small_pictures(12, 8), np.array([[3, 3, 3, 3, 1, 1, 1, 1, 2, 2, 2, 2]], np.uint8)
    for number, pixels in enumerate(images, start=1):
        put(folder / f"jpg/image_{number:05d}.jpg", png(pixels))
    sets = {"trnid": [[1, 5, 9]], "valid": [[2, 6, 10]], "tstid": [[12, 3, 4, 7, 8, 11]]}
    scipy.savemat(folder / "imagelabels.mat", {"labels": labels}, do_compression=compress)
    arrays = {name: np.array(rows, np.uint16) for name, rows in sets.items()}
    scipy.savemat(folder / "setid.mat", arrays, do_compression=compress)
    return folder, images, labels


@pytest.mark.parametrize("compress", [False, True])
def test_flowers_have_three_splits(tmp_path, compress):
    folder, images, labels = flowers(tmp_path, compress)
    data = open_data(f"flowers:{folder}")
    assert data.train.classes == ("1", "2", "3")
    expected = {"train": [1, 5, 9], "val": [2, 6, 10], "test": [12, 3, 4, 7, 8, 11]}
    for split in data.splits:
        assert split is not None
        places = np.array(expected.pop(split.name)) - 1
        pixels, found = held(split)
        np.testing.assert_array_equal(pixels, images[places])
        assert found == [str(label) for label in labels[0, places]]
    assert not expected
    assert "A copy of 6 test images, not of 6,149." in data.notes


def test_tiny_imagenet_lists_the_classes_of_its_val_images(tmp_path):
    pixels = RNG.integers(0, 256, (3, 4, 4, 3), dtype=np.uint8)
    for number, name in enumerate(("n1", "n2", "n2")):
        put(tmp_path / "train" / name / "images" / f"{name}_{number}.JPEG", png(pixels[number]))
    for number in range(2):
        put(tmp_path / "val" / "images" / f"val_{number}.JPEG", png(pixels[number]))
    listing = tmp_path / "val" / "val_annotations.txt"
    listing.write_text("val_0.JPEG\tn2\t0\t1\t2\t3\nval_1.JPEG\tn1\t0\t1\t2\t3\n")
    data = open_data(f"tiny-imagenet:{tmp_path}")
    assert data.train.classes == ("n1", "n2")
    assert data.train.labels.tolist() == [0, 1, 1]
    assert data.val is not None
    assert (data.val.keys, data.val.labels.tolist()) == (["val/images/val_0.JPEG", "val/images/val_1.JPEG"], [1, 0])
    assert "A copy of 3 train images, not of 100,000." in data.notes
    listing.write_text("val_0.JPEG\n")
    assert "has a line without a class" in refusal(f"tiny-imagenet:{tmp_path}")
    listing.write_text("val_7.JPEG\tn2\n")
    assert "lists 1 images that are not there (val/images/val_7.JPEG)" in refusal(f"tiny-imagenet:{tmp_path}")


def test_faulty_flowers_are_refused(tmp_path):
    folder, _, labels = flowers(tmp_path, True)
    scipy = pytest.importorskip("scipy.io", reason="needs scipy")
    (folder / "jpg/image_00012.jpg").unlink()
    assert "setid.mat lists 1 images that are not there (jpg/image_00012.jpg)" in refusal(f"flowers:{folder}")
    scipy.savemat(folder / "imagelabels.mat", {"labels": labels[:, :8]})
    assert "labels for 8 images and image 9" in refusal(f"flowers:{folder}")
    scipy.savemat(folder / "imagelabels.mat", {"other": labels})
    assert 'no numbers called "labels"' in refusal(f"flowers:{folder}")
    (folder / "imagelabels.mat").write_bytes(b"no MATLAB file" * 20)
    assert "imagelabels.mat is damaged, or not a MATLAB file" in refusal(f"flowers:{folder}")
    whole = (folder / "setid.mat").read_bytes()
    scipy.savemat(folder / "imagelabels.mat", {"labels": labels})
    put(folder / "setid.mat", whole[:-9])
    assert "setid.mat is damaged" in refusal(f"flowers:{folder}")


@pytest.mark.parametrize("length", [0, 100, 128, 150, 200])
def test_truncated_lists_are_refused(tmp_path, length):
    folder, _, _ = flowers(tmp_path, compress=False)
    content = (folder / "setid.mat").read_bytes()
    (folder / "setid.mat").write_bytes(content[:length])
    assert "setid.mat" in refusal(f"flowers:{folder}")


def test_flowers_name_the_extra_that_reads_matlab_files(tmp_path, monkeypatch):
    folder, _, _ = flowers(tmp_path, compress=True)
    monkeypatch.setitem(sys.modules, "scipy.io", None)
    assert "pip install 'vitral[matlab]'" in refusal(f"flowers:{folder}")


# ImageNet


def wnids(folder: Path, split: str, ids: list[str], each: int = 2) -> Path:
    number = 0
    for place, name in enumerate(ids):
        for _ in range(each):
            number += 1
            put(
                folder / f"{split}/{name}/ILSVRC2012_{split}_{number:08d}.JPEG",
                png(small_pictures(1, 8)[0] // 8 + place),
            )
    return folder


def test_imagenet_is_evaluated_on_val_and_sorted_by_id(tmp_path):
    ids = ["n02000001", "n01000002", "n01000010"]
    wnids(wnids(tmp_path, "train", ids), "val", ids, each=1)
    data = open_data(f"imagenet:{tmp_path}")
    assert data.train.classes == ("n01000002", "n01000010", "n02000001")
    assert data.val is not None
    assert data.val.name == "val"
    assert (len(data.train), len(data.val)) == (6, 3)
    for split in (data.train, data.val):
        assert [key.split("/")[1] for key in split.keys] == [split.classes[label] for label in split.labels]
    assert "A copy of 3 val images, not of 50,000." in data.notes


@pytest.mark.parametrize("table", ["numbers", "ids", "kaggle"])
def test_loose_validation_images_get_labels_from_a_table(tmp_path, table):
    root = tmp_path / "ILSVRC/Data/CLS-LOC" if table == "kaggle" else tmp_path
    used = [IDS[999], IDS[0], IDS[65]]
    wnids(root, "train", used)
    for number in (1, 2, 10):
        put(root / f"val/ILSVRC2012_val_{number:08d}.JPEG", png(small_pictures(1, 8)[0]))
    rows = {1: 65, 2: 999, 10: 0}
    if table == "kaggle":
        lines = [
            f"ILSVRC2012_val_{number:08d},{IDS[row]} 85 1 499 272 {IDS[0]} 1 2 3 4" for number, row in rows.items()
        ]
        put(tmp_path / "LOC_val_solution.csv", "\n".join(["ImageId,PredictionString", *reversed(lines)]))
    else:
        words = {number: IDS[row] if table == "ids" else row for number, row in rows.items()}
        lines = [f"ILSVRC2012_val_{number:08d}.JPEG {word}" for number, word in words.items()]
        put(tmp_path / "val.txt", "\n".join(lines))
    if table == "numbers":
        assert "val.txt numbers 1,000 classes: train/ must have all of them" in refusal(f"imagenet:{tmp_path}")
        put(tmp_path / "LOC_synset_mapping.txt", "\n".join(f"{name} some, names" for name in reversed(IDS)))
    data = open_data(f"imagenet:{tmp_path}")
    assert data.val is not None
    assert [Path(key).stem[-2:] for key in data.val.keys] == ["01", "02", "10"]
    assert [data.val.classes[label] for label in data.val.labels] == [IDS[65], IDS[999], IDS[0]]


def test_imagenets_validation_split_alone_is_for_testing(tmp_path):
    wnids(tmp_path, "val", ["n00000002", "n00000001"])
    data = open_data(f"imagenet:{tmp_path}")
    assert len(data.train) == 0
    assert data.test is not None
    assert data.test.labels.tolist() == [0, 0, 1, 1]
    assert data.notes[0] == "There is no train folder: this copy is for testing only."


def test_faulty_imagenet_is_refused(tmp_path):
    wnids(tmp_path, "train", IDS[:2])
    put(tmp_path / "val/ILSVRC2012_val_00000001.JPEG", png(small_pictures(1, 8)[0]))
    source = f"imagenet:{tmp_path}"
    assert "put val.txt or LOC_val_solution.csv next to it" in refusal(source)
    put(tmp_path / "val.txt", f"ILSVRC2012_val_00000002.JPEG {IDS[0]}\n")
    assert "does not name val/ILSVRC2012_val_00000001.JPEG" in refusal(source)
    put(tmp_path / "val.txt", "ILSVRC2012_val_00000001.JPEG 1000\n")
    put(tmp_path / "LOC_synset_mapping.txt", "\n".join(IDS))
    assert 'the class "1000"' in refusal(source)
    put(tmp_path / "train/cat/1.png", b"")
    assert "is not named by a WordNet id" in refusal(source)


def test_the_hubs_imagenet_leaves_out_the_unlabelled_test_split(tmp_path):
    names = ["tench, Tinca tinca", "goldfish"]
    for split, labels in (("train", [0, 1, 1]), ("validation", [1, 0]), ("test", [-1, -1])):
        columns = {"image": small_pictures(len(labels), 8), "label": labels}
        parquet(tmp_path / f"data/{split}-00000-of-00001.parquet", columns, {"label": names})
    data = open_data(f"imagenet:{tmp_path}")
    assert data.val is not None
    assert data.val.name == "val"
    assert data.train.classes == tuple(names)
    assert data.val.labels.tolist() == [1, 0]


# ObjectNet


def test_objectnet_is_a_test_split_without_borders(tmp_path):
    folder, inside = objectnet(tmp_path / "objectnet-1.0")
    data = open_data(f"objectnet:{tmp_path}")
    assert len(data.train) == 0
    assert data.test is not None
    assert data.test.classes == data.train.classes == ("Alarm clock", "Banana")
    assert data.test.keys == ["images/alarm_clock/1.png", "images/banana/1.png"]
    pixels, found = held(data.test)
    np.testing.assert_array_equal(pixels, [inside[key] for key in data.test.keys])
    assert found == ["Alarm clock", "Banana"]
    assert "Left out 1 of 3 classes, which ImageNet does not have." in data.notes
    assert imagenet_outputs(f"objectnet:{folder}", data.test.classes) == ((1, 3), (2,))


def test_faulty_objectnet_is_refused(tmp_path):
    folder, _ = objectnet(tmp_path)
    put(folder / "mappings/imagenet_to_label_2012_v2", "banana\nkit fox\nanalog clock\n")
    with pytest.raises(UserError, match="do not belong together"):
        imagenet_outputs(f"objectnet:{folder}", ("Alarm clock",))
    (folder / "mappings/imagenet_to_label_2012_v2").unlink()
    with pytest.raises(UserError, match="lacks mappings/objectnet_to_imagenet_1k"):
        imagenet_outputs(f"objectnet:{folder}", ("Alarm clock",))
    put(folder / "mappings/objectnet_to_imagenet_1k.json", "{")
    assert "objectnet_to_imagenet_1k.json is not valid JSON" in refusal(f"objectnet:{folder}")
