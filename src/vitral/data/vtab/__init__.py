"""VTAB-1k's data: 19 tasks of 1,000 training images each, from files in one folder.

`tasks` has the tasks and their label rules, `files` finds the data sets and reads TFRecord; `open_task` combines them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitral.atomic import atomic_write
from vitral.data.folders import read_folder
from vitral.data.images import ImageError, decode
from vitral.data.parquet import ParquetReader, open_parquet, read_parquet, row_group_sizes, row_keys
from vitral.data.shards import TarReader, read_shards
from vitral.data.splits import DataSet, Reader, Split, hashed_order
from vitral.data.vtab import tasks
from vitral.data.vtab.files import TaskFiles, TFRecordFiles, find_files, recorded_lengths
from vitral.data.vtab.tasks import TASKS, TaskSpec, find_task, stored_split
from vitral.errors import UserError

__all__ = ["TASKS", "TaskSpec", "VtabTask", "find_task", "open_task", "write_ids"]

FOLDER = "vtab-ids"
_IMAGE = "image"
_ORDERS = {"parquet": "order of the Parquet rows", "tar": "order of the tar members", "folders": "order of the names"}


@dataclass(frozen=True, eq=False)
class VtabTask:
    """A task's splits; `train1000` is `train800` and `val200` together.

    `order` says whether the images are those that TFDS would select.
    """

    task: TaskSpec
    root: Path  # the folder of all tasks
    train800: Split
    val200: Split
    train1000: Split
    test: Split
    order: str
    notes: tuple[str, ...]

    def with_dev_split(self) -> DataSet:
        """The data to choose hyper-parameters on: 800 images to train on, 200 to evaluate."""
        return DataSet(self.task.name, self.train800, val=self.val200, notes=self.notes)

    def with_test_split(self) -> DataSet:
        """The data for reported results: all 1,000 images to train on, and the test split."""
        return DataSet(self.task.name, self.train1000, test=self.test, notes=self.notes)


class _Store(NamedTuple):
    """The images of a task by TFDS's split names: how many there are, and a function that takes some as a split."""

    counts: Mapping[str, int]
    take: Callable[[str, np.ndarray, str], Split]
    order: str  # whether it is that of TFDS
    notes: tuple[str, ...]


class _Selection(NamedTuple):
    stored: str
    indices: range


def open_task(name: str, root: str | Path, *, train: int = 800, val: int = 200) -> VtabTask:
    """Open a task in the folder of all tasks; `train` and `val` are the numbers of images of train800 and val200."""
    task = find_task(name)
    folder = Path(root).expanduser()
    files = find_files(task, folder)
    counts = {"train800": train, "val200": val}
    store = _open_store(task, files, counts)
    selections = _select(task, files, store.counts, counts)
    splits = {key: store.take(part.stored, np.array(part.indices), key) for key, part in selections.items()}
    if task.dataset == "dsprites":
        splits = {key: replace(split, reader=BinaryMaskReader(split.reader)) for key, split in splits.items()}
    both = concat_splits(splits["train800"], splits["val200"], "train1000")
    return VtabTask(task, folder, train1000=both, order=store.order, notes=store.notes, **splits)


def _open_store(task: TaskSpec, files: TaskFiles, counts: Mapping[str, int]) -> _Store:
    if files.layout == "tfrecord":
        records = TFRecordReader(task, files)
        return _Store(records.counts, records.take, "tfds order: yes (tfrecord files read in shard order)", ())
    splits, notes = load_splits(task, files)
    lengths, order = {key: len(split) for key, split in splits.items()}, _ORDERS[files.layout]
    selections = _select(task, files, lengths, counts)
    if all(_is_fair(splits[part.stored], part.indices) for part in selections.values()):
        order = f"tfds order: not verified ({order})"
    else:
        notes.append(f"{task.name} is not stored in random order: its images are taken by the hashes of their keys.")
        splits = {key: split.select(hashed_order(split.keys)) for key, split in splits.items()}
        order = "tfds order: no (not stored in random order, taken by key hashes)"
    return _Store(lengths, lambda stored, indices, name: splits[stored].select(indices, name), order, tuple(notes))


def _select(
    task: TaskSpec, files: TaskFiles, stored: Mapping[str, int], counts: Mapping[str, int]
) -> dict[str, _Selection]:
    """Which images each split consists of; raises UserError for too few, or for an image in two splits."""
    selections: dict[str, _Selection] = {}
    for key, expression in task.expressions(*counts.values()).items():
        split = stored_split(expression)
        indices = tasks.positions(expression, stored[split])
        if len(indices) < counts.get(key, 1):
            raise UserError(
                f"{files.folder} has {len(indices)} images in {expression}, which is too few: "
                f"{task.name} needs {counts.get(key, 1)}, so complete the data."
            )
        if any(split == part.stored and set(indices) & set(part.indices) for part in selections.values()):
            raise UserError(f"{files.folder} is too small: {key} of {task.name} would share images, so complete it.")
        selections[key] = _Selection(split, indices)
    return selections


def _is_fair(split: Split, indices: range) -> bool:
    counts = np.bincount(split.labels[np.array(indices)], minlength=len(split.classes))
    return tasks.fairly_drawn(counts, split.counts())


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

    @property
    def counts(self) -> dict[str, int]:
        return {split: len(files) for split, files in self.files.items()}

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
        reader = TarReader(tuple(map(str, files.files)), np.array(spans, np.int64).reshape(-1, 3))
        return Split(name, keys, np.array(labels, np.int64), self.classes, reader)


def load_splits(task: TaskSpec, task_files: TaskFiles) -> tuple[dict[str, Split], list[str]]:
    """The splits of a layout other than TFDS's, in its own order; and notes about their labels."""
    notes: list[str] = []
    if task.rule is not tasks.CLASS:
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
    """Splits of Parquet files with labels of the task's fields, by the last part of their names; None if one lacks."""
    splits: dict[str, Split] = {}
    for split, files in task_files.files.items():
        values: list[list[list[Any]]] = []  # of each row, of each field
        rows: list[list[int]] = []
        for file in files:
            with open_parquet(file) as table:
                columns = (table.schema.column(index) for index in range(len(table.schema.names)))
                leaves = {field_name(column.path): column.path for column in columns}
                if _IMAGE not in table.schema_arrow.names or not leaves.keys() >= set(task.rule.fields):
                    return None
                fields = [table.read([leaves[name]], use_threads=False).column(0) for name in task.rule.fields]
                cells = zip(*(field.to_pylist() for field in fields), strict=True)
                values += [[tasks.flattened(value) for value in row] for row in cells]
                rows.append(row_group_sizes(table))
        keys = row_keys(files, rows)
        labels = [_label(task, key, row) for key, row in zip(keys, values, strict=True)]
        reader = ParquetReader(files, rows, _IMAGE)
        splits[split] = Split(split, keys, np.array(labels, np.int64), task.rule.names or _numbers(task), reader)
    return splits


def _with_stored_labels(task_files: TaskFiles) -> DataSet:
    if task_files.layout == "folders":
        return read_folder(task_files.folder, held_out=0)
    files = [file for members in task_files.files.values() for file in members]
    read = read_parquet if task_files.layout == "parquet" else read_shards
    return read(str(task_files.folder), files, held_out=0)


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
    """The class names that TFDS writes next to the records, one per line."""
    file = folder / f"{task.rule.fields[0]}.labels.txt"
    names = tuple(file.read_text(encoding="utf-8").splitlines()) if file.is_file() else ()
    return names if len(names) == task.classes else ()


def _numbers(task: TaskSpec) -> tuple[str, ...]:
    return tuple(map(str, range(task.classes)))


def write_ids(task: VtabTask, folder: str | Path | None = None) -> str:
    """Write the list of a task's images, or compare them with an existing list; every image is read.

    The folder of lists is `vtab-ids` next to the tasks' folders by default. The message says which was done.
    """
    lists = Path(folder) if folder is not None else task.root / FOLDER
    file = lists / f"{task.task.name}.txt"
    lines = list(_lines(task))
    if file.is_file():
        _compare(file, file.read_text(encoding="utf-8", errors="surrogateescape").split("\n"), lines)
        return f"The images of {task.task.name} are those of {file}, {len(lines):,} of them."
    text = "\n".join([*_head(task, lines), *lines])
    with atomic_write(file) as aside:
        aside.write_text(f"{text}\n", encoding="utf-8", errors="surrogateescape")
    return f"The {len(lines):,} images of {task.task.name} are listed in {file}."


def _head(task: VtabTask, lines: list[str]) -> list[str]:
    digest = hashlib.sha256("\n".join(map(_compared, lines)).encode()).hexdigest()
    about = f"{task.task.name}, {len(lines)} images, sha256 of the list: {digest}"
    return [f"# {text}" for text in (about, task.order, *task.notes)]


def _lines(task: VtabTask) -> Iterator[str]:
    for split in (task.train800, task.val200, task.test):
        for index, key in enumerate(split.keys):
            try:
                digest = _digest(split.reader, index)
            except ImageError as error:
                raise UserError(f"{key} of {task.task.name} cannot be read ({error}): copy it again.") from error
            yield f"{split.name}\t{index}\t{key}\t{digest}"


def _digest(reader: Reader, index: int) -> str:
    data = reader.stored.read(index) if isinstance(reader, BinaryMaskReader) else reader.read(index)
    return hashlib.sha256(data if isinstance(data, bytes) else data.tobytes()).hexdigest()


def _compared(line: str) -> str:
    split, index, *_, digest = line.split("\t")
    return f"{split} {index} {digest}"


def _compare(file: Path, before: list[str], lines: list[str]) -> None:
    listed = [line for line in before if line and not line.startswith("#")]
    if any(line.count("\t") < 3 for line in listed):
        raise UserError(f"{file} is damaged: remove it to recreate the list.")
    for old, new in zip(listed, lines, strict=False):
        if _compared(old) != _compared(new):
            where = " ".join(new.split()[:2])
            raise UserError(
                f"{file} lists another image at {where} ({old!r} is now {new!r}): restore that one, "
                "or remove the list to recreate it."
            )
    if len(listed) != len(lines):
        raise UserError(
            f"{file} lists {len(listed)} images and there are {len(lines)}: remove it to recreate the list."
        )
