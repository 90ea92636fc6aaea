"""The files of a task, in ROOT/TASK or ROOT/DATASET: TFDS's own, Parquet, tar shards or class folders."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from vitral.data.folders import read_folder, sub_folders
from vitral.data.images import decode
from vitral.data.parquet import ParquetReader, open_parquet, read_parquet, row_group_sizes, row_keys
from vitral.data.shards import ShardReader, read_shards
from vitral.data.splits import SPLIT_NAMES, DataSet, Reader, Split, files_by_split, natural_key, split_name
from vitral.data.vtab.tasks import CLASS, TaskSpec, flattened, stored_split
from vitral.data.vtab.tfrecord import TFRecordFiles
from vitral.errors import UserError

_RECORDS = re.compile(r".+-([a-z_]+)\.tfrecord-([0-9]+)-of-([0-9]+)")


@dataclass(frozen=True)
class TaskFiles:
    """A task's files by TFDS's split names; for class folders the lists are empty."""

    folder: Path
    layout: str  # tfrecord, parquet, tar or folders
    files: Mapping[str, list[Path]]


def find_files(task: TaskSpec, root: Path) -> TaskFiles:
    """Find the task's files, with all the splits it needs; a folder named after the task takes precedence."""
    names = tuple(dict.fromkeys((task.name, task.dataset)))
    folder = next((root / name for name in names if (root / name).is_dir()), None)
    if folder is None:
        raise UserError(f"{root} has no folder {' or '.join(names)}: put the files of {task.builder} there.")
    task_files = _records(task, folder) or _parquet(folder) or _tar(folder) or _folders(folder)
    needed = {stored_split(expression): None for expression in task.expressions().values()}
    missing = [split for split in needed if split not in task_files.files]
    if missing:
        raise UserError(
            f"{task_files.folder} has no {' and no '.join(missing)} split: {task.name} needs it, so add it."
        )
    return task_files


def _records(task: TaskSpec, folder: Path) -> TaskFiles | None:
    """TFDS's files, in folders for the configuration and the version; a split must have all its shards."""
    matches = [(file, _RECORDS.fullmatch(file.name)) for file in sorted(folder.rglob("*.tfrecord-*"))]
    folders = {file.parent for file, match in matches if match}
    if task.setting:
        folders = {path for path in folders if task.setting in path.relative_to(folder).parts} or folders
    if not folders:
        return None
    source = _only(folder, folders)
    files: dict[str, list[Path]] = {}
    for file, match in matches:
        if match and file.parent == source:
            files.setdefault(match[1], []).append(file)
    for split, members in files.items():
        expected = int(members[0].name.rpartition("-")[2])
        if len(members) != expected:
            raise UserError(f"{source} has {len(members)} of the {expected} files of {split}: copy the others too.")
    return TaskFiles(source, "tfrecord", files)


def _parquet(folder: Path) -> TaskFiles | None:
    files = list(folder.rglob("*.parquet"))
    # The hub's svhn has a third split, "extra", which nobody asked for.
    files = [file for file in files if split_name(file.stem) or split_name(file.parent.name)] or files
    return _by_split(folder, "parquet", files)


def _tar(folder: Path) -> TaskFiles | None:
    return _by_split(folder, "tar", list(folder.rglob("*.tar")))


def _by_split(folder: Path, layout: str, files: list[Path]) -> TaskFiles | None:
    if not files:
        return None
    source = _only(folder, {file.parent.parent if split_name(file.parent.name) else file.parent for file in files})
    splits = files_by_split(str(source), files)
    return TaskFiles(source, layout, {_tfds_name(split): members for split, members in splits.items()})


def _folders(folder: Path) -> TaskFiles:
    splits = {_tfds_name(SPLIT_NAMES[name.lower()]): [] for name in sub_folders(folder) if name.lower() in SPLIT_NAMES}
    if not sub_folders(folder):
        raise UserError(f"{folder} is empty: put TFRecord or Parquet files, tar shards or class folders there.")
    return TaskFiles(folder, "folders", splits or {"train": []})


def _only(folder: Path, candidates: set[Path]) -> Path:
    if len(candidates) > 1:
        names = sorted((str(path.relative_to(folder)) for path in candidates), key=natural_key)
        raise UserError(f"{folder} has several forms of the data ({', '.join(names)}): keep one of them.")
    return next(iter(candidates))


def _tfds_name(split: str) -> str:
    return "validation" if split == "val" else split


def recorded_lengths(folder: Path) -> dict[str, list[int]]:
    """The number of records of each file by split, from TFDS's dataset_info.json; empty if there is none."""
    file = folder / "dataset_info.json"
    if not file.is_file():
        return {}
    try:
        splits = json.loads(file.read_text(encoding="utf-8")).get("splits", [])
        return {split["name"]: [int(length) for length in split["shardLengths"]] for split in splits}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is not what TFDS writes ({error}): copy it again, or remove it.") from error


_IMAGE = "image"


class ParquetColumns(NamedTuple):
    """Rows of some files: keys, the requested fields as lists of numbers, and a reader of the images."""

    keys: list[str]
    values: list[list[list[Any]]]  # of each row, of each field
    reader: ParquetReader


def read_columns(files: list[Path], fields: tuple[str, ...]) -> ParquetColumns | None:
    """Read fields by the last part of their names; None if a file lacks one."""
    values: list[list[list[Any]]] = []
    rows: list[list[int]] = []
    for file in files:
        with open_parquet(file) as table:
            leaves = {field_name(table.schema.column(index).path): index for index in range(len(table.schema.names))}
            if _IMAGE not in table.schema_arrow.names or not leaves.keys() >= set(fields):
                return None
            paths = [table.schema.column(leaves[field]).path for field in fields]
            columns = [table.read([path], use_threads=False).column(0).to_pylist() for path in paths]
            rows.append(row_group_sizes(table))
        values += [[flattened(value) for value in row] for row in zip(*columns, strict=True)]
    return ParquetColumns(row_keys(files, rows), values, ParquetReader(files, rows, _IMAGE))


def field_name(path: str) -> str:
    """The last part of "objects.list.element.location.list.element" and in TFDS's "objects/location"."""
    return [word for word in re.split("[./]", path) if word not in ("list", "element", "item")][-1]


@dataclass(frozen=True)
class ConcatReader:
    """The `count` images of one reader, then those of another."""

    first: Reader
    count: int
    second: Reader

    def read(self, index: int) -> bytes | np.ndarray:
        return self.first.read(index) if index < self.count else self.second.read(index - self.count)

    def mark(self, index: int) -> str:
        return self.first.mark(index) if index < self.count else self.second.mark(index - self.count)


@dataclass(frozen=True)
class BinaryMaskReader:
    """Images of zeros and ones as black and white, uint8 (h, w, 3); other images unchanged."""

    stored: Reader

    def read(self, index: int) -> np.ndarray:
        data = self.stored.read(index)
        pixels = decode(data) if isinstance(data, bytes) else data
        return pixels * 255 if pixels.max() <= 1 else pixels

    def mark(self, index: int) -> str:
        return self.stored.mark(index)


def concat_splits(first: Split, second: Split, name: str) -> Split:
    """Concatenate two splits; the keys begin with the name of the original split."""
    keys = [f"{split.name}/{key}" for split in (first, second) for key in split.keys]
    labels = np.concatenate([first.labels, second.labels])
    return Split(name, keys, labels, first.classes, ConcatReader(first.reader, len(first), second.reader))


class SplitStore(Protocol):
    """Splits by TFDS's names, from which images are taken by index."""

    def count(self, split: str) -> int: ...

    def take(self, split: str, indices: np.ndarray, name: str) -> Split: ...


class LoadedSplits:
    """Splits whose labels are all loaded."""

    def __init__(self, splits: Mapping[str, Split]) -> None:
        self.splits = splits

    def count(self, split: str) -> int:
        return len(self.splits[split])

    def take(self, split: str, indices: np.ndarray, name: str) -> Split:
        return self.splits[split].select(indices, name)


class TFRecordReader:
    """TFDS's files: all records are counted, and only the requested ones are read."""

    def __init__(self, task: TaskSpec, task_files: TaskFiles) -> None:
        self.task = task
        self.files = {split: TFRecordFiles(files) for split, files in task_files.files.items()}
        for split, lengths in recorded_lengths(task_files.folder).items():
            if split in self.files and self.files[split].lengths() != lengths:
                raise UserError(
                    f"{task_files.folder} lacks records of {split} that dataset_info.json counts: copy the data again."
                )
        self.classes = task.rule.names or _recorded_names(task, task_files.folder) or _numbers(task)

    def count(self, split: str) -> int:
        return len(self.files[split])

    def take(self, split: str, indices: np.ndarray, name: str) -> Split:
        files = self.files[split]
        starts = np.cumsum([0, *files.lengths()])
        keys: list[str] = []
        labels: list[int] = []
        spans: list[tuple[int, int, int]] = []
        for index, example in zip(indices.tolist(), files.examples(indices.tolist()), strict=True):
            file = int(files.frames[index, 0])
            key = f"{files.files[file].name}:{index - int(starts[file])}"
            if "image" not in example.spans:
                raise UserError(f"{key} has no image: take the files of {self.task.builder}.")
            fields = {field_name(field): values for field, values in example.numbers.items()}
            # An image without objects has empty lists, which need not be stored.
            labels.append(_label(self.task, key, [fields.get(field, []) for field in self.task.rule.fields]))
            keys.append(key)
            first, last = example.spans["image"]
            spans.append((file, first, last - first))
        reader = ShardReader(tuple(map(str, files.files)), np.array(spans, np.int64).reshape(-1, 3))
        return Split(name, keys, np.array(labels, np.int64), self.classes, reader)


def load_splits(task: TaskSpec, task_files: TaskFiles) -> tuple[dict[str, Split], list[str]]:
    """The splits of a layout other than TFDS's, in its own order; and notes about their labels."""
    notes: list[str] = []
    if task.rule is not CLASS:
        computed = _with_computed_labels(task, task_files) if task_files.layout == "parquet" else None
        if computed is not None:
            return computed, notes
        fields = " and ".join(task.rule.fields)
        if task_files.layout != "parquet" or task_files.folder.name != task.name:
            raise UserError(
                f"{task_files.folder} does not state {fields}: {task.name} needs Parquet or TFRecord with it."
            )
        notes.append(f"The label column is taken as {task.name}'s own, since the files do not state {fields}.")
    data = _with_stored_labels(task_files)
    if len(data.train.classes) != task.classes:
        raise UserError(
            f"{task_files.folder} has {len(data.train.classes)} classes, {task.name} {task.classes}: complete it."
        )
    splits = {split.name: split for split in data.splits}
    return {"validation" if name == "val" else name: split for name, split in splits.items()}, notes


def _with_computed_labels(task: TaskSpec, task_files: TaskFiles) -> dict[str, Split] | None:
    splits: dict[str, Split] = {}
    for split, files in task_files.files.items():
        columns = read_columns(files, task.rule.fields)
        if columns is None:
            return None
        labels = [_label(task, key, row) for key, row in zip(columns.keys, columns.values, strict=True)]
        classes = task.rule.names or _numbers(task)
        splits[split] = Split(split, columns.keys, np.array(labels, np.int64), classes, columns.reader)
    return splits


def _with_stored_labels(task_files: TaskFiles) -> DataSet:
    if task_files.layout == "folders":
        return read_folder(task_files.folder, seed=0, held_out=0)
    files = [file for members in task_files.files.values() for file in members]
    read = read_parquet if task_files.layout == "parquet" else read_shards
    return read(str(task_files.folder), files, seed=0, held_out=0)


def _label(task: TaskSpec, key: str, values: list[list[Any]]) -> int:
    try:
        label = task.rule.label(*values)
    except (IndexError, ValueError, TypeError) as error:
        fields = " and ".join(task.rule.fields)
        raise UserError(f"{key} does not state {fields} as {task.builder} does: take that data set.") from error
    if not 0 <= label < task.classes:
        raise UserError(f"{key} has the label {label}, which is out of range: {task.name} has {task.classes} classes.")
    return label


def _recorded_names(task: TaskSpec, folder: Path) -> tuple[str, ...]:
    """The class names that TFDS writes beside the records, one per line."""
    file = folder / f"{task.rule.fields[0]}.labels.txt"
    names = tuple(file.read_text(encoding="utf-8").splitlines()) if file.is_file() else ()
    return names if len(names) == task.classes else ()


def _numbers(task: TaskSpec) -> tuple[str, ...]:
    return tuple(map(str, range(task.classes)))
