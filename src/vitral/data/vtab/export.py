"""Records written as a data set is found: Parquet as on the hub, or TFRecord as TFDS stores it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from vitral.aside import written_aside
from vitral.data.vtab.records import encode, frame
from vitral.errors import UserError

Record = Mapping[
    str, bytes | np.ndarray
]  # features by TFDS's names; of an object's features the first axis are objects


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill, which gets its name when all is written."""
    if folder.exists():
        raise UserError(f"{folder} exists: remove it, or choose another folder.")
    with written_aside(folder, folder=True) as aside:
        yield aside


def write_parquet(folder: Path, splits: Mapping[str, Sequence[Record]], names: Sequence[str] = ()) -> None:
    """SPLIT-00000-of-00001.parquet each; `names` are the classes of the label column, kept as the hub does."""
    import pyarrow as pa
    import pyarrow.parquet as pq

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
            file.write_bytes(b"".join(frame(encode(record)) for record in records[bounds[shard] : bounds[shard + 1]]))
    stated = [{"name": split, "shardLengths": list(map(str, counts))} for split, counts in lengths.items()]
    (folder / "dataset_info.json").write_text(json.dumps({"name": dataset, "splits": stated}), encoding="utf-8")
    if names:
        (folder / "label.labels.txt").write_text("".join(f"{name}\n" for name in names), encoding="utf-8")


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
