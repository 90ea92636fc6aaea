"""VTAB-1k's data: TFRecord, Parquet, tar shards and class folders to the same images, unchanged, and their lists."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import struct
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from vtab_files import Record, encode, write_frames, write_parquet, write_records
from vtab_stand_ins import write_real_counts, write_real_locations, write_stand_in

from vitral.data.catalog.readers import ArrayReader
from vitral.data.images import decode, encode_png
from vitral.data.pixels import resize
from vitral.data.sources import Split, open_data
from vitral.data.vtab import TASKS, VtabTask, open_task, write_ids
from vitral.data.vtab.files import TFRecordFiles, checksum, parse
from vitral.errors import UserError

FEW = {"train": 40, "val": 10}


FEATURES = st.dictionaries(
    st.text(min_size=1, max_size=8),
    st.binary(max_size=300)
    | st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40)
    | st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=40),
    max_size=5,
)


@given(FEATURES)
def test_examples_are_read_as_protobuf_writes_them(features):
    arrays: dict[str, bytes | np.ndarray] = {}
    for name, value in features.items():
        is_float = isinstance(value, list) and value and isinstance(value[0], float)
        arrays[name] = value if isinstance(value, bytes) else np.array(value, np.float32 if is_float else np.int64)
    data = b"before" + encode(arrays) + b"after"
    found = parse(data, 6, len(data) - 5)
    assert {name: data[slice(*place)] for name, place in found.spans.items()} == {
        name: value for name, value in features.items() if isinstance(value, bytes)
    }
    assert found.numbers == {name: value for name, value in features.items() if not isinstance(value, bytes)}


def test_numbers_that_are_not_packed_are_read_too():
    """proto2 writers store each number with its own tag: 0d for a float, 08 for an integer."""

    def sized(number: int, value: bytes) -> bytes:
        return bytes([number << 3 | 2, len(value)]) + value

    floats = sized(2, b"".join(b"\x0d" + struct.pack("<f", value) for value in (1.5, -2.0)))
    integers = sized(3, b"\x08\x05\x08\xac\x02")
    entries = sized(1, sized(1, b"f") + sized(2, floats)) + sized(1, sized(1, b"i") + sized(2, integers))
    data = sized(1, entries)
    assert parse(data, 0, len(data)).numbers == {"f": [1.5, -2.0], "i": [5, 300]}


@given(st.binary(max_size=200))
def test_the_checksum_is_the_one_of_tensorboard(data):
    from tensorboardX.record_writer import masked_crc32c

    assert checksum(data) == masked_crc32c(data)


def test_frames_of_tensorboard_are_read_in_any_order(tmp_path):
    path = tmp_path / "x-train.tfrecord-00000-of-00001"
    write_frames(path, [encode({"label": np.array(number)}) for number in range(5)])
    files = TFRecordFiles([path])
    assert [example.numbers["label"] for example in files.examples([4, 0, 2])] == [[4], [0], [2]]


def test_a_damaged_or_cut_record_file_is_refused(tmp_path):
    path = tmp_path / "x.tfrecord"
    write_frames(path, [encode({"label": np.array(3)})])
    one = path.read_bytes()
    cases = {
        "ends within a record": one + one[:-2],
        f"is damaged at byte {len(one)}:": one + b"\x07" + one[1:],
        f"is damaged at byte {2 * len(one)}:": one + one + b"\x07",
    }
    for words, data in cases.items():
        path.write_bytes(data)
        with pytest.raises(UserError, match=words):
            TFRecordFiles([path])


def digest(pixels: np.ndarray) -> str:
    return hashlib.sha256(pixels.tobytes()).hexdigest()


def pictures(count: int, classes: int, seed: int = 0) -> list[Record]:
    """Noise, so that any second encoding would show; every other one a JPEG, which changes when encoded anew."""
    rng = np.random.default_rng(seed)
    found: list[Record] = []
    for number in range(count):
        pixels = rng.integers(0, 256, (12, 16, 3), np.uint8)
        stream = io.BytesIO()
        Image.fromarray(pixels).save(stream, "JPEG" if number % 2 else "PNG")
        found.append({"image": stream.getvalue(), "label": np.array(number % classes)})
    return [found[place] for place in rng.permutation(count)]


def image_of(record: Record) -> bytes:
    data = record["image"]
    assert isinstance(data, bytes)
    return data


def write_tar(folder: Path, split: str, records: Sequence[Record]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(folder / f"{split}-000.tar", "w") as archive:
        for number, record in enumerate(records):
            label = np.asarray(record["label"])
            for name, data in ((f"{number:05d}.jpg", image_of(record)), (f"{number:05d}.cls", str(label).encode())):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))


def write_folders(folder: Path, split: str, records: Sequence[Record]) -> None:
    for number, record in enumerate(records):
        place = folder / split / str(record["label"])
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number:05d}.jpg").write_bytes(image_of(record))


def write_layout(layout: str, root: Path, splits: dict[str, list[Record]]) -> None:
    """svhn's splits, ten classes, in any layout."""
    if layout == "parquet":
        write_parquet(root / "svhn", splits, [str(number) for number in range(10)])
    elif layout == "tfrecord":
        write_records(root / "svhn_cropped" / "3.0.0", "svhn_cropped", splits)
    for split, records in splits.items():
        if layout == "tar":
            write_tar(root / "svhn", split, records)
        elif layout == "folders":
            write_folders(root / "svhn", split, records)


LAYOUTS = ("tfrecord", "parquet", "tar", "folders")


def opened(task: VtabTask) -> dict[str, Split]:
    return {"train800": task.train800, "val200": task.val200, "train1000": task.train1000, "test": task.test}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_images_are_passed_on_unchanged(tmp_path, layout):
    splits = {"train": pictures(200, 10), "test": pictures(30, 10, seed=1)}
    write_layout(layout, tmp_path, splits)
    stored = {data: int(record["label"]) for part in splits.values() for record in part for data in [record["image"]]}
    task = open_task("svhn", tmp_path, **FEW)
    for split in opened(task).values():
        reader = pickle.loads(pickle.dumps(split.reader))  # loaders read in other processes
        for index, label in enumerate(split.labels.tolist()):
            data = reader.read(index)
            assert stored[data] == label
            reference = np.array(Image.open(io.BytesIO(data)).convert("RGB"))
            assert digest(decode(data)) == digest(reference)
    assert [len(split) for split in opened(task).values()] == [40, 10, 50, 30]
    assert len({task.train1000.reader.read(index) for index in range(50)}) == 50
    assert len(set(task.train1000.keys)) == 50


@pytest.mark.parametrize("layout", ["tfrecord", "parquet", "tar"])
def test_the_first_images_and_those_after_ninety_percent_are_taken(tmp_path, layout):
    splits = {"train": pictures(200, 10), "test": pictures(30, 10, seed=1)}
    write_layout(layout, tmp_path, splits)
    task = open_task("svhn", tmp_path, **FEW)
    rows = {"train800": splits["train"][:40], "val200": splits["train"][180:190], "test": splits["test"]}
    for name, records in rows.items():
        split = opened(task)[name]
        assert [split.reader.read(index) for index in range(len(split))] == [record["image"] for record in records]
        assert split.labels.tolist() == [int(record["label"]) for record in records]
    assert task.order.startswith("tfds order: yes" if layout == "tfrecord" else "tfds order: not verified (order of")
    assert task.notes == ()


@pytest.mark.parametrize("layout", ["parquet", "folders"])
def test_files_sorted_by_class_are_sampled_by_hash(tmp_path, layout):
    splits = {"train": pictures(200, 10), "test": pictures(30, 10, seed=1)}
    splits["train"].sort(key=lambda record: int(record["label"]))
    write_layout(layout, tmp_path, splits)
    task = open_task("svhn", tmp_path, **FEW)
    assert len(np.unique(task.train800.labels)) >= 8
    assert task.order.startswith("tfds order: no (")
    assert "not stored in random order" in task.notes[0]
    again = open_task("svhn", tmp_path, **FEW)
    assert again.train1000.fingerprint() == task.train1000.fingerprint()


@pytest.mark.parametrize("layout", ["parquet", "tfrecord"])
@pytest.mark.parametrize("name", TASKS)
def test_every_task_is_opened_from_its_stand_in(tmp_path, name, layout):
    row = TASKS[name]
    write_stand_in(name, tmp_path, train=150, others=60, layout=layout, shrink=8)
    task = open_task(name, tmp_path, **FEW)
    assert [len(task.train800), len(task.val200), len(task.train1000)] == [40, 10, 50]
    assert len(task.test) >= 15
    for split in opened(task).values():
        assert len(split.classes) == row.classes
        assert split.labels.min() >= 0
        assert split.labels.max() < row.classes
    assert len(np.unique(task.train1000.labels)) >= min(row.classes, 4)
    assert task.notes == ()
    images = [task.train1000.reader.read(index) for index in range(50)]
    pixels = [decode(data) if isinstance(data, bytes) else data for data in images]
    assert all(image.shape[2] == 3 and image.max() > 1 for image in pixels)
    assert task.with_dev_split().val is task.val200
    assert task.with_test_split().train is task.train1000


def test_both_layouts_give_the_same_task(tmp_path):
    for name in ("clevr-distance", "kitti-distance", "dsprites-orientation", "smallnorb-azimuth", "pets"):
        tasks = []
        for layout in ("parquet", "tfrecord"):
            write_stand_in(name, tmp_path / layout, train=150, others=40, layout=layout, shrink=8)
            tasks.append(open_task(name, tmp_path / layout, **FEW))
        for first, second in zip(opened(tasks[0]).values(), opened(tasks[1]).values(), strict=True):
            assert first.labels.tolist() == second.labels.tolist()
            assert first.classes == second.classes
            for index in range(len(first)):
                assert np.array_equal(first.reader.read(index), second.reader.read(index))


def test_sprites_become_white_on_black_in_colour(tmp_path):
    write_stand_in("dsprites-location", tmp_path, train=150)
    task = open_task("dsprites-location", tmp_path, **FEW)
    picture = task.train800.reader.read(0)
    assert isinstance(picture, np.ndarray)
    assert picture.shape == (64, 64, 3)
    assert sorted(np.unique(picture)) == [0, 255]
    stored = decode(task.train800.reader.stored.read(0), 1)  # type: ignore[attr-defined]
    assert np.array_equal(picture, np.tile(stored * 255, (1, 1, 3)))


@pytest.mark.parametrize("name", ["svhn", "clevr-count", "clevr-distance", "smallnorb-azimuth", "dsprites-location"])
def test_a_stand_in_can_be_learned(tmp_path, name):
    """By nearest neighbours on small pictures, better than by naming the commonest class."""
    write_stand_in(name, tmp_path, train=500, others=100, shrink=4)
    task = open_task(name, tmp_path, train=400, val=50)

    def features(split: Split) -> np.ndarray:
        data = [split.reader.read(index) for index in range(len(split))]
        pixels = [resize(decode(item) if isinstance(item, bytes) else item, (24, 24), "nearest") for item in data]
        return np.stack(pixels).reshape(len(split), -1).astype(np.float32)

    train, test = features(task.train1000), features(task.test)
    distances = (test**2).sum(1)[:, None] - 2 * test @ train.T + (train**2).sum(1)
    nearest = task.train1000.labels[distances.argsort(1)[:, : 15 if name == "clevr-count" else 1]]
    guesses = [np.bincount(labels).argmax() for labels in nearest]
    commonest = task.test.counts().max() / len(task.test)
    assert np.mean(guesses == task.test.labels) > 1.3 * commonest


def test_ids_are_listed_and_compared(tmp_path):
    splits = {"train": pictures(200, 10), "test": pictures(30, 10, seed=1)}
    write_layout("tfrecord", tmp_path / "a", splits)
    write_layout("parquet", tmp_path / "b", splits)
    task = open_task("svhn", tmp_path / "a", **FEW)
    assert "listed in" in write_ids(task)
    file = tmp_path / "a" / "vtab-ids" / "svhn.txt"
    head, order, *lines = file.read_text().splitlines()
    assert order == "# tfds order: yes (tfrecord files read in shard order)"
    expected = [*splits["train"][:40], *splits["train"][180:190], *splits["test"]]
    digests = [hashlib.sha256(image_of(record)).hexdigest() for record in expected]
    assert [line.split("\t")[3] for line in lines] == digests
    assert lines[40].split("\t")[:3] == ["val200", "0", "svhn_cropped-train.tfrecord-00001-of-00002:80"]
    text = "\n".join(" ".join(np.array(line.split("\t"))[[0, 1, 3]]) for line in lines)
    assert head.endswith(hashlib.sha256(text.encode()).hexdigest())
    before = file.read_bytes()
    assert "are those of" in write_ids(task)
    # The same images in another layout: other keys, no difference.
    assert "are those of" in write_ids(open_task("svhn", tmp_path / "b", **FEW), file.parent)
    assert file.read_bytes() == before
    assert [path.name for path in file.parent.iterdir()] == ["svhn.txt"]


def test_another_image_is_named_by_the_comparison(tmp_path):
    splits = {"train": pictures(200, 10), "test": pictures(30, 10, seed=1)}
    write_layout("tfrecord", tmp_path / "a", splits)
    write_ids(open_task("svhn", tmp_path / "a", **FEW), tmp_path / "ids")
    splits["train"][183]["image"] = encode_png(np.zeros((4, 4, 3), np.uint8))  # type: ignore[index]
    write_layout("parquet", tmp_path / "b", splits)
    with pytest.raises(UserError, match=r"lists another image at val200 3 .*: restore that one, or remove the list"):
        write_ids(open_task("svhn", tmp_path / "b", **FEW), tmp_path / "ids")
    with pytest.raises(UserError, match="lists another image at train800 40"):
        write_ids(open_task("svhn", tmp_path / "a", train=41, val=10), tmp_path / "ids")


@pytest.mark.parametrize("line", ["torn", "train800\t3\tkey"])
def test_a_damaged_list_is_refused(tmp_path, line):
    write_layout("parquet", tmp_path, {"train": pictures(200, 10), "test": pictures(30, 10, seed=1)})
    task = open_task("svhn", tmp_path, **FEW)
    write_ids(task)
    file = tmp_path / "vtab-ids" / "svhn.txt"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines[:5], line, *lines[6:]]))
    with pytest.raises(UserError) as told:
        write_ids(task)
    assert str(told.value) == f"{file} is damaged: remove it to recreate the list."


def test_an_image_that_cannot_be_listed_is_named(tmp_path):
    write_layout("parquet", tmp_path, {"train": pictures(200, 10), "test": pictures(30, 10, seed=1)})
    task = open_task("svhn", tmp_path, **FEW)
    file = next((tmp_path / "svhn").glob("test-*"))
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(UserError, match=r"test-00000-of-00001.parquet:0 of svhn cannot be read \(.*: copy it again"):
        write_ids(task)
    assert not (tmp_path / "vtab-ids").exists()


def test_a_missing_task_has_a_reason(tmp_path):
    (tmp_path / "smallnorb").mkdir()
    write_layout("parquet", tmp_path, {"train": pictures(20, 10)})
    reasons = {
        "pets": "has no folder pets or oxford_iiit_pet",
        "smallnorb-azimuth": "is empty",
        "svhn": "has no test split",
    }
    for name, words in reasons.items():
        with pytest.raises(UserError, match=words):
            open_task(name, tmp_path)


def test_too_few_images_are_refused(tmp_path):
    write_layout("parquet", tmp_path, {"train": pictures(200, 10), "test": pictures(30, 10, seed=1)})
    with pytest.raises(UserError, match=r"has 200 images in train\[:800\], which is too few"):
        open_task("svhn", tmp_path)
    with pytest.raises(UserError, match="would share images"):
        open_task("svhn", tmp_path, train=190, val=10)


def test_incomplete_record_files_are_refused(tmp_path):
    splits = {"train": pictures(200, 10), "test": pictures(30, 10, seed=1)}
    write_layout("tfrecord", tmp_path, splits)
    folder = tmp_path / "svhn_cropped" / "3.0.0"
    info = json.loads((folder / "dataset_info.json").read_text())
    info["splits"][0]["shardLengths"][1] = "101"
    (folder / "dataset_info.json").write_text(json.dumps(info))
    with pytest.raises(UserError, match="lacks records of train"):
        open_task("svhn", tmp_path, **FEW)
    next(folder.glob("*train*-00001-of-*")).unlink()
    with pytest.raises(UserError, match="has 1 of the 2 files of train"):
        open_task("svhn", tmp_path, **FEW)


def test_two_versions_are_not_mixed(tmp_path):
    splits = {"train": pictures(20, 10), "test": pictures(3, 10)}
    for version in ("3.0.0", "3.1.0"):
        write_records(tmp_path / "svhn" / version, "svhn_cropped", splits)
    with pytest.raises(UserError, match=r"several forms of the data \(3.0.0, 3.1.0\)"):
        open_task("svhn", tmp_path, **FEW)


def test_the_right_configuration_is_found_among_others(tmp_path):
    write_stand_in("eurosat", tmp_path, train=200, layout="tfrecord", shrink=2)
    write_records(tmp_path / "eurosat" / "all" / "2.0.0", "eurosat", {"train": pictures(3, 10)})
    assert len(open_task("eurosat", tmp_path, **FEW).test) == 40


def test_an_extra_split_is_ignored(tmp_path):
    splits = {"train": pictures(200, 10), "test": pictures(30, 10, seed=1), "extra": pictures(500, 10, seed=2)}
    write_layout("parquet", tmp_path, splits)
    task = open_task("svhn", tmp_path, **FEW)
    assert task.val200.reader.read(0) == splits["train"][180]["image"]


def test_a_label_column_serves_where_the_folder_is_the_tasks_own(tmp_path):
    splits = {"train": pictures(200, 8), "validation": pictures(30, 8, seed=1)}
    names = [f"{count} things" for count in range(3, 11)]
    write_parquet(tmp_path / "clevr-count", splits, names)
    task = open_task("clevr-count", tmp_path, **FEW)
    assert task.train800.classes == tuple(names)
    assert "taken as clevr-count's own" in task.notes[0]
    (tmp_path / "clevr-count").rename(tmp_path / "clevr")
    with pytest.raises(UserError, match="does not state pixel_coords"):
        open_task("clevr-count", tmp_path, **FEW)


def test_objects_are_found_however_parquet_nests_them(tmp_path):
    """KITTI with a list of tables, with a table of lists, under another name with words, and flat as TFDS names it."""
    rng = np.random.default_rng(0)
    rows = [(rng.integers(0, 8, count).tolist(), rng.uniform(1, 60, (count, 3))) for count in rng.integers(0, 5, 120)]
    words = ("Car", "Van", "Truck", "Pedestrian", "Person_sitting", "Cyclist", "Tram", "Misc")

    def nest(form: int, kinds: list[int], places: list[list[float]]) -> dict[str, Any]:
        tables = [{"type": kind, "location": place} for kind, place in zip(kinds, places, strict=True)]
        named = [{"type": words[kind], "location": place} for kind, place in zip(kinds, places, strict=True)]
        flat = {"objects/type": kinds, "objects/location": [value for place in places for value in place]}
        return ({"objects": tables}, {"objects": {"type": kinds, "location": places}}, {"label": named}, flat)[form]

    expected = []
    for kinds, places in rows:
        depths = [place[2] for kind, place in zip(kinds, places, strict=True) if kind in (0, 1, 2)]
        expected.append(3 if not depths else 0 if min(depths) <= 8 else 1 if min(depths) <= 20 else 2)
    image = encode_png(np.zeros((4, 4, 3), np.uint8))
    for form in range(4):
        table = pa.Table.from_pylist([{"image": image, **nest(form, kinds, at.tolist())} for kinds, at in rows])
        folder = tmp_path / str(form) / "kitti"
        folder.mkdir(parents=True)
        for split in ("train", "validation", "test"):
            pq.write_table(table, folder / f"{split}.parquet", row_group_size=50)
        task = open_task("kitti-distance", tmp_path / str(form), **FEW)
        assert task.test.labels.tolist() == expected
        assert task.train800.reader.read(0) == image


def test_wrong_records_are_named(tmp_path):
    write_records(tmp_path / "clevr", "clevr", {"train": pictures(200, 8), "validation": pictures(9, 8)})
    with pytest.raises(UserError, match="has the label -3, which is out of range: clevr-count has 8 classes"):
        open_task("clevr-count", tmp_path, **FEW)
    with pytest.raises(UserError, match="tfrecord-00000-of-00002:0 does not state pixel_coords"):
        open_task("clevr-distance", tmp_path, **FEW)
    write_layout("parquet", tmp_path, {"train": pictures(200, 7), "test": pictures(30, 7)})
    (tmp_path / "svhn").rename(tmp_path / "dtd")
    with pytest.raises(UserError, match="has no validation split"):
        open_task("dtd", tmp_path, **FEW)


def photographs(count: int) -> Split:
    """Bright noise, which is nowhere the canvas's grey."""
    images = np.random.default_rng(0).integers(180, 256, (count, 40, 30, 3), np.uint8)
    keys = [str(number) for number in range(count)]
    return Split("photos", keys, np.zeros(count, np.int64), ("photo",), ArrayReader(images, "noise"))


def test_photographs_on_the_canvas_are_as_many_as_the_label_says(tmp_path):
    write_real_counts(photographs(10), tmp_path, train=120, test=20, side=64)
    task = open_task("clevr-count", tmp_path, **FEW)
    for split in opened(task).values():
        for index, label in enumerate(split.labels.tolist()):
            covered = (decode(split.reader.read(index)) != 128).any(2)  # type: ignore[arg-type]
            assert covered.sum() == (label + 3) * 12 * 12
    assert sorted(np.unique(task.train1000.labels)) == list(range(8))


def test_the_photograph_lies_where_the_label_says(tmp_path):
    write_real_locations(photographs(10), tmp_path, train=160, side=64)
    task = open_task("dsprites-location", tmp_path, **FEW)
    for split in opened(task).values():
        for index, label in enumerate(split.labels.tolist()):
            covered = np.flatnonzero((np.asarray(split.reader.read(index)) != 128).any((0, 2)))
            assert covered.tolist() == list(range(label * 48 // 15, label * 48 // 15 + 16))


def test_scenes_of_real_photographs(tmp_path, assets):
    """Test scenes show photographs that the training scenes do not; the count can be read off the covered area."""
    source = open_data(assets / "data" / "pets_mini").train.select(np.arange(0, 480, 24))
    write_real_counts(source, tmp_path, train=120, test=30, side=64)
    task = open_task("clevr-count", tmp_path, **FEW)
    for index, label in enumerate(task.test.labels.tolist()):
        covered = (decode(task.test.reader.read(index)) != 128).any(2).sum()  # type: ignore[arg-type]
        assert round(covered / 144) == label + 3
