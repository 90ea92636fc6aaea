"""Where a task's files lie: ROOT/TASK or ROOT/DATASET, with TFDS's own files, Parquet, tar shards or class folders."""

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
from vitral.data.parquet import ParquetReader, opened, read_parquet, row_group_sizes, row_keys
from vitral.data.shards import ShardReader, read_shards
from vitral.data.splits import SPLIT_NAMES, DataSet, Reader, Split, files_by_split, natural_key, split_name
from vitral.data.vtab.splits import stored_split
from vitral.data.vtab.tasks import CLASS, TaskSpec, flattened
from vitral.data.vtab.tfrecord import TFRecordFiles
from vitral.errors import UserError

_RECORDS = re.compile(r".+-([a-z_]+)\.tfrecord-([0-9]+)-of-([0-9]+)")


@dataclass(frozen=True)
class TaskFiles:
    """A task's files by split, in TFDS's words; of class folders the splits alone."""

    folder: Path
    layout: str  # tfrecord, parquet, tar or folders
    files: Mapping[str, list[Path]]


def find_files(task: TaskSpec, root: Path) -> TaskFiles:
    """The task's files with all the splits it needs; the task's own folder goes before the data set's."""
    names = tuple(dict.fromkeys((task.name, task.dataset)))
    folder = next((root / name for name in names if (root / name).is_dir()), None)
    if folder is None:
        raise UserError(f"{root} has no folder {' or '.join(names)}: put the files of {task.builder} there.")
    found = _records(task, folder) or _parquet(folder) or _tar(folder) or _folders(folder)
    needed = {stored_split(expression): None for expression in task.expressions().values()}
    missing = [split for split in needed if split not in found.files]
    if missing:
        raise UserError(f"{found.folder} has no {' and no '.join(missing)} split: {task.name} needs it, so add it.")
    return found


def _records(task: TaskSpec, folder: Path) -> TaskFiles | None:
    """TFDS's files, which lie in folders for the setting and the version; a split must have all its shards."""
    matches = [(file, _RECORDS.fullmatch(file.name)) for file in sorted(folder.rglob("*.tfrecord-*"))]
    places = {file.parent for file, match in matches if match}
    if task.setting:
        places = {place for place in places if task.setting in place.relative_to(folder).parts} or places
    if not places:
        return None
    place = _only(folder, places)
    files: dict[str, list[Path]] = {}
    for file, match in matches:
        if match and file.parent == place:
            files.setdefault(match[1], []).append(file)
    for split, members in files.items():
        stated = int(members[0].name.rpartition("-")[2])
        if len(members) != stated:
            raise UserError(f"{place} has {len(members)} of the {stated} files of {split}: copy the others too.")
    return TaskFiles(place, "tfrecord", files)


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
    place = _only(folder, {file.parent.parent if split_name(file.parent.name) else file.parent for file in files})
    splits = files_by_split(str(place), files)
    return TaskFiles(place, layout, {_word(split): members for split, members in splits.items()})


def _folders(folder: Path) -> TaskFiles:
    splits = {_word(SPLIT_NAMES[name.lower()]): [] for name in sub_folders(folder) if name.lower() in SPLIT_NAMES}
    if not sub_folders(folder):
        raise UserError(f"{folder} is empty: put TFRecord or Parquet files, tar shards or class folders there.")
    return TaskFiles(folder, "folders", splits or {"train": []})


def _only(folder: Path, places: set[Path]) -> Path:
    if len(places) > 1:
        names = sorted((str(place.relative_to(folder)) for place in places), key=natural_key)
        raise UserError(f"{folder} has several forms of the data ({', '.join(names)}): keep one of them.")
    return next(iter(places))


def _word(split: str) -> str:
    return "validation" if split == "val" else split


def stated_lengths(folder: Path) -> dict[str, list[int]]:
    """Records of each file by split, as TFDS's dataset_info.json states them; empty where there is none."""
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
    """Rows of some files: a key, the wanted fields as lists of numbers, and a reader of the images."""

    keys: list[str]
    values: list[list[list[Any]]]  # of each row, of each field
    reader: ParquetReader


def read_columns(files: list[Path], fields: tuple[str, ...]) -> ParquetColumns | None:
    """The fields with these last words in their names; None where a file lacks one."""
    values: list[list[list[Any]]] = []
    rows: list[list[int]] = []
    for file in files:
        with opened(file) as table:
            leaves = {last_word(table.schema.column(place).path): place for place in range(len(table.schema.names))}
            if _IMAGE not in table.schema_arrow.names or not leaves.keys() >= set(fields):
                return None
            paths = [table.schema.column(leaves[field]).path for field in fields]
            columns = [table.read([path], use_threads=False).column(0).to_pylist() for path in paths]
            rows.append(row_group_sizes(table))
        values += [[flattened(value) for value in row] for row in zip(*columns, strict=True)]
    return ParquetColumns(row_keys(files, rows), values, ParquetReader(files, rows, _IMAGE))


def last_word(path: str) -> str:
    """The field's own name in "objects.list.element.location.list.element" and in TFDS's "objects/location"."""
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
    """Pictures of zeros and ones as black and white ones in colour, uint8 (h, w, 3); others as they are."""

    stored: Reader

    def read(self, index: int) -> np.ndarray:
        data = self.stored.read(index)
        pixels = decode(data) if isinstance(data, bytes) else data
        return pixels * 255 if pixels.max() <= 1 else pixels

    def mark(self, index: int) -> str:
        return self.stored.mark(index)


def joined(first: Split, second: Split, name: str) -> Split:
    """One split of both, whose keys say from which each image came."""
    keys = [f"{split.name}/{key}" for split in (first, second) for key in split.keys]
    labels = np.concatenate([first.labels, second.labels])
    return Split(name, keys, labels, first.classes, ConcatReader(first.reader, len(first), second.reader))


class SplitStore(Protocol):
    """Splits by TFDS's names, of which images are taken by place."""

    def count(self, split: str) -> int: ...

    def take(self, split: str, places: np.ndarray, name: str) -> Split: ...


class LoadedSplits:
    """Splits that are known from end to end."""

    def __init__(self, splits: Mapping[str, Split]) -> None:
        self.splits = splits

    def count(self, split: str) -> int:
        return len(self.splits[split])

    def take(self, split: str, places: np.ndarray, name: str) -> Split:
        return self.splits[split].select(places, name)


class TFRecordReader:
    """TFDS's files: all records are counted, and only those that are taken are read."""

    def __init__(self, task: TaskSpec, found: TaskFiles) -> None:
        self.task = task
        self.files = {split: TFRecordFiles(files) for split, files in found.files.items()}
        for split, lengths in stated_lengths(found.folder).items():
            if split in self.files and self.files[split].lengths() != lengths:
                stated = f"{split} that dataset_info.json states"
                raise UserError(f"{found.folder} lacks records of {stated}: copy the data again.")
        self.classes = task.rule.names or _stated_names(task, found.folder) or _numbers(task)

    def count(self, split: str) -> int:
        return len(self.files[split])

    def take(self, split: str, places: np.ndarray, name: str) -> Split:
        files = self.files[split]
        starts = np.cumsum([0, *files.lengths()])
        keys: list[str] = []
        labels: list[int] = []
        spans: list[tuple[int, int, int]] = []
        for place, example in zip(places.tolist(), files.examples(places.tolist()), strict=True):
            file = int(files.frames[place, 0])
            key = f"{files.files[file].name}:{place - int(starts[file])}"
            if "image" not in example.places:
                raise UserError(f"{key} has no image: take the files of {self.task.builder}.")
            fields = {last_word(field): values for field, values in example.numbers.items()}
            # A picture without objects has empty lists, which need not be stored.
            labels.append(_label(self.task, key, [fields.get(field, []) for field in self.task.rule.fields]))
            keys.append(key)
            first, last = example.places["image"]
            spans.append((file, first, last - first))
        reader = ShardReader(tuple(map(str, files.files)), np.array(spans, np.int64).reshape(-1, 3))
        return Split(name, keys, np.array(labels, np.int64), self.classes, reader)


def read_whole(task: TaskSpec, found: TaskFiles) -> tuple[dict[str, Split], list[str]]:
    """The splits of a layout other than TFDS's, in its own order; and what to know of their labels."""
    notes: list[str] = []
    if task.rule is not CLASS:
        computed = _computed(task, found) if found.layout == "parquet" else None
        if computed is not None:
            return computed, notes
        fields = " and ".join(task.rule.fields)
        if found.layout != "parquet" or found.folder.name != task.name:
            raise UserError(f"{found.folder} does not state {fields}: {task.name} needs Parquet or TFRecord with it.")
        notes.append(f"The label column is taken as {task.name}'s own, since the files do not state {fields}.")
    data = _labelled(found)
    if len(data.train.classes) != task.classes:
        raise UserError(
            f"{found.folder} has {len(data.train.classes)} classes, {task.name} {task.classes}: complete it."
        )
    splits = {split.name: split for split in data.splits}
    return {"validation" if name == "val" else name: split for name, split in splits.items()}, notes


def _computed(task: TaskSpec, found: TaskFiles) -> dict[str, Split] | None:
    splits: dict[str, Split] = {}
    for split, files in found.files.items():
        columns = read_columns(files, task.rule.fields)
        if columns is None:
            return None
        labels = [_label(task, key, row) for key, row in zip(columns.keys, columns.values, strict=True)]
        classes = task.rule.names or _numbers(task)
        splits[split] = Split(split, columns.keys, np.array(labels, np.int64), classes, columns.reader)
    return splits


def _labelled(found: TaskFiles) -> DataSet:
    if found.layout == "folders":
        return read_folder(found.folder, seed=0, held_out=0)
    files = [file for members in found.files.values() for file in members]
    read = read_parquet if found.layout == "parquet" else read_shards
    return read(str(found.folder), files, seed=0, held_out=0)


def _label(task: TaskSpec, key: str, values: list[list[Any]]) -> int:
    try:
        label = task.rule.label(*values)
    except (IndexError, ValueError, TypeError) as error:
        fields = " and ".join(task.rule.fields)
        raise UserError(f"{key} does not state {fields} as {task.builder} does: take that data set.") from error
    if not 0 <= label < task.classes:
        raise UserError(f"{key} has the label {label}, which is out of range: {task.name} has {task.classes} classes.")
    return label


def _stated_names(task: TaskSpec, folder: Path) -> tuple[str, ...]:
    """The class names that TFDS writes beside the records, one a line."""
    file = folder / f"{task.rule.fields[0]}.labels.txt"
    names = tuple(file.read_text(encoding="utf-8").splitlines()) if file.is_file() else ()
    return names if len(names) == task.classes else ()


def _numbers(task: TaskSpec) -> tuple[str, ...]:
    return tuple(map(str, range(task.classes)))
