"""Records written as a data set is found: Parquet as on the hub, or TFRecord as TFDS stores it.

TFRecord files are written by protobuf and tensorboardX, so that what reads them is held against other programs.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

# Features by TFDS's names; of an object's features the first axis are objects.
Record = Mapping[str, bytes | np.ndarray]


def write_parquet(folder: Path, splits: Mapping[str, Sequence[Record]], names: Sequence[str] = ()) -> None:
    """SPLIT-00000-of-00001.parquet each; `names` are the classes of the label column, kept as the hub does."""
    folder.mkdir(parents=True, exist_ok=True)
    feature = {"label": {"names": list(names), "_type": "ClassLabel"}} if names else {}
    about = {"huggingface": json.dumps({"info": {"features": feature}})}
    for split, records in splits.items():
        table = pa.Table.from_pylist([_row(record) for record in records]).replace_schema_metadata(about)
        # Small groups, so that reading one image does not mean reading all.
        pq.write_table(table, folder / f"{split}-00000-of-00001.parquet", row_group_size=100)


def write_records(
    folder: Path, dataset: str, splits: Mapping[str, Sequence[Record]], names: Sequence[str] = (), shards: int = 2
) -> None:
    """TFDS's files: the shards of each split, their lengths in dataset_info.json, and the class names."""
    folder.mkdir(parents=True, exist_ok=True)
    lengths: dict[str, list[int]] = {}
    for split, records in splits.items():
        bounds = [len(records) * shard // shards for shard in range(shards + 1)]
        lengths[split] = np.diff(bounds).tolist()
        for shard in range(shards):
            file = folder / f"{dataset}-{split}.tfrecord-{shard:05d}-of-{shards:05d}"
            write_frames(file, map(encode, records[bounds[shard] : bounds[shard + 1]]))
    stated = [{"name": split, "shardLengths": list(map(str, counts))} for split, counts in lengths.items()]
    (folder / "dataset_info.json").write_text(json.dumps({"name": dataset, "splits": stated}), encoding="utf-8")
    if names:
        (folder / "label.labels.txt").write_text("".join(f"{name}\n" for name in names), encoding="utf-8")


def write_frames(file: Path, messages: Iterable[bytes]) -> None:
    """A TFRecord file."""
    from tensorboardX.record_writer import RecordWriter

    writer = RecordWriter(str(file))
    for message in messages:
        writer.write(message)
    writer.close()


def encode(record: Record) -> bytes:
    """A tf.train.Example; arrays are flattened."""
    example = _message()()
    for name, value in record.items():
        feature = example.features.feature.add(key=name).value
        if isinstance(value, bytes):
            feature.bytes_list.value.append(value)
        elif value.dtype.kind == "f":
            feature.float_list.value.extend(value.ravel().tolist())
        else:
            feature.int64_list.value.extend(value.ravel().tolist())
            feature.int64_list.SetInParent()  # also without a number in it
    return example.SerializeToString()


@functools.cache
def _message() -> Any:
    """tf.train.Example as a message class of the protobuf library, from a description written here."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="t", syntax="proto3")
    field = descriptor_pb2.FieldDescriptorProto

    def add(name: str, *fields: tuple[str, int, int, str, bool]) -> None:
        kind = file.message_type.add(name=name)
        for text, number, form, type_name, repeated in fields:
            label = field.LABEL_REPEATED if repeated else field.LABEL_OPTIONAL
            kind.field.add(name=text, number=number, type=form, type_name=type_name or None, label=label)

    add("BytesList", ("value", 1, field.TYPE_BYTES, "", True))
    add("FloatList", ("value", 1, field.TYPE_FLOAT, "", True))
    add("Int64List", ("value", 1, field.TYPE_INT64, "", True))
    kinds = (("bytes_list", 1, ".t.BytesList"), ("float_list", 2, ".t.FloatList"), ("int64_list", 3, ".t.Int64List"))
    add("Feature", *((name, number, field.TYPE_MESSAGE, kind, False) for name, number, kind in kinds))
    # A map travels as repeated entries.
    text, entry = field.TYPE_STRING, field.TYPE_MESSAGE
    add("Entry", ("key", 1, text, "", False), ("value", 2, entry, ".t.Feature", False))
    add("Features", ("feature", 1, entry, ".t.Entry", True))
    add("Example", ("features", 1, entry, ".t.Features", False))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Example"))


def _row(record: Record) -> dict[str, Any]:
    """A record as the hub nests it: the image in a table with its path, objects in a list of tables."""
    row: dict[str, Any] = {}
    objects: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, bytes):
            row[name] = {"bytes": value, "path": None}
        elif "/" in name:
            objects[name.partition("/")[2]] = value.tolist()
        else:
            row[name] = value.item()
    if objects:
        row["objects"] = [dict(zip(objects, values, strict=True)) for values in zip(*objects.values(), strict=True)]
    return row
