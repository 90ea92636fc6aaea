"""Images inside larger files: tar shards and their indexes, Parquet in the hub's layout."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vitral.data import shards
from vitral.data.cache import cache_folder
from vitral.data.check import check
from vitral.data.images import ImageError
from vitral.data.shards import expand_pattern, index_shard
from vitral.data.sources import DataSet, Split, open_data
from vitral.errors import UserError


def tar(path: Path, members: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as archive:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def pairs(start: int, stop: int) -> dict[str, bytes]:
    """Samples whose "image" states its number and whose class is the number modulo 3."""
    members: dict[str, bytes] = {}
    for number in range(start, stop):
        members[f"{number:04d}.cls"] = str(number % 3).encode()
        members[f"{number:04d}.jpg"] = f"image {number}".encode() * (number + 1)
    return members


def check_numbers(split: Split) -> set[int]:
    """Every image is the one its key names, with its label; returns the numbers."""
    found = set()
    for index in np.random.default_rng(0).permutation(len(split)).tolist():
        number = int(split.keys[index].rpartition("/")[2].removesuffix(".jpg"))
        assert split.reader.read(index) == f"image {number}".encode() * (number + 1)
        assert split.classes[split.labels[index]] == str(number % 3)
        found.add(number)
    return found


def test_shards_are_read_in_any_order_and_by_any_process(tmp_path):
    for number in range(11):
        tar(tmp_path / f"s-{number:03d}.tar", pairs(number * 6, number * 6 + 6))
    data = open_data(f"{tmp_path}/s-{{000..010}}.tar")
    assert data.test is not None
    for split in (data.train, pickle.loads(pickle.dumps(data.train))):
        assert check_numbers(split) | check_numbers(data.test) == set(range(66))
    assert data.train.classes == ("0", "1", "2")
    for same in (tmp_path, f"{tmp_path}/s-*.tar"):
        assert open_data(same).train.fingerprint() == data.train.fingerprint()


def test_the_split_is_read_from_shard_names(tmp_path):
    tar(tmp_path / "set-train-0.tar", pairs(0, 9))
    tar(tmp_path / "set-val-0.tar", pairs(9, 12))
    data = open_data(f"{tmp_path}/set-{{train,val}}-0.tar")
    assert data.val is not None
    assert (check_numbers(data.train), check_numbers(data.val)) == (set(range(9)), {9, 10, 11})
    alone = open_data(tmp_path / "set-val-0.tar", held_out=0)
    assert check_numbers(alone.train) == {9, 10, 11}


def test_labels_from_json_text_and_folders(tmp_path):
    members = {
        "a/1.jpg": b"1", "a/1.json": b'{"label": "dog", "caption": "x"}',
        "a/2.seg.png": b"2", "a/2.txt": b"cat\n",
        "a/bird/3.PNG": b"3",
        "._a.jpg": b"x", "other.bin": b"x",
    }  # fmt: skip
    split = open_data(tar(tmp_path / "x.tar", members), held_out=0).train
    found = {split.reader.read(index): split.classes[label] for index, label in enumerate(split.labels)}
    assert found == {b"1": "dog", b"2": "cat", b"3": "bird"}
    several = {"1.jpg": b"1", "1.json": b'{"labels": ["b", "a"]}', "2.jpg": b"2", "2.json": b'{"labels": []}'}
    assert open_data(tar(tmp_path / "y.tar", several), held_out=0).train.labels.tolist() == [[1, 1], [0, 0]]


def test_the_index_is_made_once_and_again_when_the_shard_changes(tmp_path, monkeypatch):
    shard = tar(tmp_path / "x.tar", pairs(0, 5))
    first = index_shard(shard)
    assert [path.name for path in tmp_path.iterdir() if path != shard] == ["x.tar.index.json"]
    scans: list[Path] = []
    scan = shards._scan
    monkeypatch.setattr(shards, "_scan", lambda file: scans.append(file) or scan(file))
    assert index_shard(shard) == first
    assert scans == []
    (tmp_path / "x.tar.index.json").write_text('{"shard": ')  # torn
    assert index_shard(shard) == first
    assert len(scans) == 1
    os.utime(tar(shard, pairs(0, 4)), ns=(1, 1))
    assert len(index_shard(shard)) == 4
    assert len(scans) == 2


def test_a_read_only_folder_is_indexed_in_the_cache(tmp_path, monkeypatch):
    shard = tar(tmp_path / "data/x.tar", pairs(0, 5))
    monkeypatch.setenv("VITRAL_CACHE", str(tmp_path / "cache"))
    write = Path.write_text

    def refuse(path: Path, *rest: Any, **options: Any) -> int:
        if path.parent == shard.parent:
            raise PermissionError(13, "Permission denied")
        return write(path, *rest, **options)

    monkeypatch.setattr(Path, "write_text", refuse)
    first = index_shard(shard)
    assert list(shard.parent.iterdir()) == [shard]
    assert len(list((tmp_path / "cache/shards").iterdir())) == 1
    monkeypatch.setattr(shards, "_scan", lambda file: pytest.fail("the index was not found"))
    assert index_shard(shard) == first


def test_the_cache_folder_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("VITRAL_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder("shards") == Path(os.path.expanduser("~")) / ".cache/vitral/shards"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder("shards") == tmp_path / "vitral/shards"
    monkeypatch.setenv("VITRAL_CACHE", "~/own")
    assert cache_folder("shards") == Path(os.path.expanduser("~")) / "own/shards"


def test_names_that_are_no_text(tmp_path, monkeypatch):
    """Latin-1 in the archive, as older programs write it."""
    name = b"caf\xe9".decode("utf-8", "surrogateescape")
    shard = tar(tmp_path / "x.tar", {f"{name}.jpg": b"1", f"{name}.cls": b"0"})
    assert b"caf\xe9.jpg" in shard.read_bytes()
    first = index_shard(shard)
    assert [sample.name for sample in first] == [f"{name}.jpg"]
    monkeypatch.setattr(shards, "_scan", lambda file: pytest.fail("the index was not found"))
    assert index_shard(shard) == first


def test_braces_and_patterns(tmp_path):
    names = [f"{kind}-{number:02d}.tar" for kind in ("a", "b") for number in (8, 9, 10)]
    for name in names:
        (tmp_path / name).touch()
    assert [path.name for path in expand_pattern(f"{tmp_path}/{{a,b}}-{{08..10}}.tar")] == names
    assert [path.name for path in expand_pattern(f"{tmp_path}/a-*.tar")] == names[:3]
    with pytest.raises(UserError, match=r"no shard .*a-11.tar: check the numbers"):
        expand_pattern(f"{tmp_path}/a-{{08..11}}.tar")
    with pytest.raises(UserError, match="counts down"):
        expand_pattern(f"{tmp_path}/a-{{10..08}}.tar")


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({"1.jpg": b"x"}, "1 has no label: add 1.cls"),
        ({"1.jpg": b"x", "1.cls": b"-1"}, "label -1, which is out of range"),
        ({"1.jpg": b"x", "1.json": b"{"}, "label that cannot be read"),
        ({"1.jpg": b"x", "1.json": b'{"caption": "x"}'}, "has no label"),
        ({"1.cls": b"0"}, "contains no labelled image"),
    ],
)
def test_faulty_shards_say_what_to_do(tmp_path, members, said):
    with pytest.raises(UserError) as caught:
        open_data(tar(tmp_path / "x.tar", members))
    assert said in str(caught.value)


def test_other_files_and_truncated_shards(tmp_path):
    shard = tar(tmp_path / "x.tar", pairs(0, 6))
    split = open_data(shard, held_out=0).train
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 4])
    with pytest.raises(ImageError, match="ends before the image"):
        split.reader.read(5)
    shard.write_bytes(gzip.compress(whole))
    with pytest.raises(UserError, match="compressed: unpack it with gunzip"):
        open_data(shard)


# Parquet


def parquet(path: Path, images: list[Any], labels: list[Any], group: int = 4, names: list[str] | None = None) -> Path:
    """A file as `datasets` writes it."""
    arrow = pytest.importorskip("pyarrow", reason="needs pyarrow")
    import pyarrow.parquet as pq

    kind = arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())])
    table = arrow.table({"image": arrow.array(images, kind), "label": labels, "row": list(range(len(labels)))})
    feature = {"names": names, "_type": "ClassLabel"}
    info = {"info": {"features": {"image": {"_type": "Image"}, "label": feature}}}
    path.parent.mkdir(parents=True, exist_ok=True)
    described = table.replace_schema_metadata({"huggingface": json.dumps(info)}) if names else table
    pq.write_table(described, path, row_group_size=group)
    return path


def rows(start: int, stop: int) -> list[dict[str, Any]]:
    return [{"bytes": f"image {number}".encode(), "path": None} for number in range(start, stop)]


def contents(data: DataSet) -> list[list[tuple[bytes | np.ndarray, str]]]:
    splits = [data.train] if data.test is None else [data.train, data.test]
    return [[(s.reader.read(i), s.classes[s.labels[i]]) for i in range(len(s))] for s in splits]


@pytest.mark.parametrize("layout", ["data/{}-00000-of-00001.parquet", "{}/0000.parquet", "{}.parquet"])
def test_the_hubs_layouts(tmp_path, layout):
    names = ["zebra", "ape", "never"]
    parquet(tmp_path / layout.format("train"), rows(0, 11), [number % 2 for number in range(11)], names=names)
    parquet(tmp_path / layout.format("test"), rows(11, 14), [1, 1, 0], names=names)
    data = open_data(tmp_path)
    expected = [(f"image {number}".encode(), names[number % 2]) for number in range(11)]
    assert contents(data) == [expected, [(b"image 11", "ape"), (b"image 12", "ape"), (b"image 13", "zebra")]]
    assert data.train.classes == ("zebra", "ape", "never")  # the order that the file states, not the natural one
    assert any(note.endswith('in train or test: "never".') for note in data.notes)


def test_several_files_in_any_order_and_by_any_process(tmp_path, monkeypatch):
    for number in range(3):
        labels = ["even" if row % 2 == 0 else "odd" for row in range(10 * number, 10 * number + 10)]
        parquet(tmp_path / f"train-{number}.parquet", rows(10 * number, 10 * number + 10), labels, group=3)
    monkeypatch.setattr("vitral.data.parquet._CACHED_BYTES", 40)
    split = open_data(tmp_path, held_out=0).train
    assert split.keys[13] == "train-1.parquet:3"
    split.reader.read(0)
    for reader in (split.reader, pickle.loads(pickle.dumps(split)).reader):
        for row in np.random.default_rng(0).permutation(30).tolist():
            assert reader.read(row) == f"image {row}".encode()
            assert split.classes[split.labels[row]] == ("even" if row % 2 == 0 else "odd")
    assert len(split.reader._cached) < 3  # type: ignore[attr-defined]


def test_lists_of_labels_and_plain_bytes(tmp_path):
    arrow = pytest.importorskip("pyarrow", reason="needs pyarrow")
    import pyarrow.parquet as pq

    table = arrow.table({"jpg": arrow.array([b"1", b"2"], arrow.binary()), "labels": [["b", "a"], ["a"]]})
    pq.write_table(table, tmp_path / "x.parquet")
    split = open_data(tmp_path / "x.parquet", held_out=0).train
    assert split.labels.tolist() == [[1, 1], [1, 0]]
    assert split.reader.read(1) == b"2"


def test_unknown_labels_and_empty_rows(tmp_path):
    parquet(tmp_path / "train.parquet", [*rows(0, 9), {"bytes": None, "path": "x"}], [0, 1] * 5, names=["a", "b"])
    parquet(tmp_path / "test.parquet", rows(0, 3), [-1, -1, -1], names=["a", "b"])
    data = open_data(tmp_path, held_out=0)
    assert data.notes == ("Left out test: its labels are all -1, which means unknown.",)
    with pytest.raises(ImageError, match="contains no image"):
        data.train.reader.read(9)


@pytest.mark.parametrize(
    ("images", "labels", "names", "said"),
    [
        (rows(0, 3), [0, 1, 2], ["a", "b"], "x.parquet:2 has the label 2, which is out of range: classes are 0 to 1"),
        (rows(0, 3), [0, None, 1], ["a", "b"], "x.parquet:1 has no label"),
        (rows(0, 3), [0, -1, 1], None, "x.parquet:1 has the label -1"),
        ([{"bytes": None, "path": "1.jpg"}] * 2, [0, 1], ["a", "b"], "contains paths without image bytes"),
    ],
)
def test_faulty_parquet_says_what_to_do(tmp_path, images, labels, names, said):
    with pytest.raises(UserError) as caught:
        open_data(parquet(tmp_path / "x.parquet", images, labels, names=names))
    assert said in str(caught.value)


def test_parquet_without_a_column_of_images_or_labels(tmp_path):
    pytest.importorskip("pyarrow", reason="needs pyarrow")
    import pyarrow as pa
    import pyarrow.parquet

    for columns, said in (
        ({"path": ["0.png"], "label": ["a"]}, 'no column of image bytes among path, label: name one "image"; where'),
        ({"picture": [b"0"], "breed": ["a"]}, 'no column of labels among picture, breed: name one "label"; where'),
    ):
        pa.parquet.write_table(pa.table(columns), tmp_path / "x.parquet")
        with pytest.raises(UserError, match=said):
            open_data(tmp_path / "x.parquet")


def test_no_parquet(tmp_path):
    pytest.importorskip("pyarrow", reason="needs pyarrow")
    (tmp_path / "x.parquet").write_bytes(b"PAR1 and nothing more")
    with pytest.raises(UserError, match=r"x.parquet is not a readable Parquet file \(.*\): copy it again"):
        open_data(tmp_path / "x.parquet")


def damage(path: Path, group: int, column: str) -> None:
    """Overwrites the head of the column's first page in a row group."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as table:
        places = table.metadata.row_group(group)
        found = [places.column(number) for number in range(places.num_columns)]
    page = next(item for item in found if item.path_in_schema == column)
    data = bytearray(path.read_bytes())
    start = page.dictionary_page_offset or page.data_page_offset
    data[start : start + 8] = b"\xff" * 8
    path.write_bytes(data)


@pytest.mark.parametrize("group", [0, 1])
def test_a_damaged_page_costs_its_own_images_alone(tmp_path, group):
    path = parquet(tmp_path / "x.parquet", rows(0, 11), [number % 2 for number in range(11)])
    damage(path, group, "image.bytes")
    reader = open_data(path, held_out=0).train.reader
    for row in range(11):
        if row // 4 != group:
            assert reader.read(row) == f"image {row}".encode()
            continue
        with pytest.raises(ImageError) as told:
            reader.read(row)
        assert str(told.value).startswith(f"{path} cannot be read (")
        assert str(told.value).isprintable()
    report = check(path)
    assert [image.path for image in report.unreadable if str(path) in image.reason] == [
        f"x.parquet:{row}" for row in range(11) if row // 4 == group
    ]


def test_labels_that_cannot_be_read_name_the_file(tmp_path):
    path = parquet(tmp_path / "x.parquet", rows(0, 11), [number % 2 for number in range(11)])
    damage(path, 1, "label")
    with pytest.raises(UserError, match=r"x.parquet is not a readable Parquet file \(.*\): copy it again"):
        open_data(path)


@pytest.mark.parametrize("fault", ["cut", "gone"])
def test_a_parquet_file_that_is_lost_later(tmp_path, fault):
    path = parquet(tmp_path / "x.parquet", rows(0, 4), [0, 1, 0, 1])
    reader = open_data(path, held_out=0).train.reader
    path.unlink() if fault == "gone" else path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ImageError, match=r"x.parquet cannot be read"):
        reader.read(0)


def test_a_data_set_of_the_hub(tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub", reason="needs huggingface_hub")
    for form in ("small", "large"):
        parquet(tmp_path / form / "train-00000-of-00001.parquet", rows(0, 4), [0, 1, 0, 1], names=["a", "b"])
    asked: list[Any] = []
    monkeypatch.setattr(
        hub, "snapshot_download", lambda name, **options: asked.append((name, options)) or str(tmp_path)
    )
    data = open_data("hf:owner/name/small@v2", held_out=0)
    assert (data.source, len(data.train)) == ("hf:owner/name/small@v2", 4)
    assert asked == [
        ("owner/name", {"repo_type": "dataset", "revision": "v2", "allow_patterns": ["small/*.parquet"]}),
    ]
    with pytest.raises(UserError, match="several configurations: name one of them, such as hf:owner/name/large"):
        open_data("hf:owner/name")


def test_the_hub_out_of_reach(monkeypatch):
    hub = pytest.importorskip("huggingface_hub", reason="needs huggingface_hub")
    with pytest.raises(UserError, match="not in the cache and the hub cannot be reached"):
        open_data("hf:owner/name")

    def offline(name: str, **options: Any) -> str:
        raise ConnectionError("offline mode is enabled")  # as some releases do

    monkeypatch.setattr(hub, "snapshot_download", offline)
    with pytest.raises(UserError, match="not in the cache and the hub cannot be reached"):
        open_data("hf:owner/name")


def test_a_name_that_no_file_can_have(tmp_path):
    shard = tar(tmp_path / "x.tar", {"a.jpg": b"1", "a.cls": b"0", "b.jpg": b"1", "b.cls": b"1"})
    index_shard(shard)
    index = tmp_path / "x.tar.index.json"
    index.write_text(index.read_text().replace('"a.jpg"', '"\\ud800.jpg"'))
    with pytest.raises(UserError, match="is not valid text"):
        open_data(str(shard))
