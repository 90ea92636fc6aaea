"""A data set's own splits with a task's labels, whatever the layout; of TFDS's files only what is taken is read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from vitral.data.folders import read_folder
from vitral.data.parquet import read_parquet
from vitral.data.shards import ShardReader, read_shards
from vitral.data.splits import DataSet, Split
from vitral.data.vtab.columns import last_word, read_columns
from vitral.data.vtab.find import Found, stated_lengths
from vitral.data.vtab.labels import CLASS
from vitral.data.vtab.records import RecordFiles
from vitral.data.vtab.tasks import Task
from vitral.errors import UserError


class Stored(Protocol):
    """Splits by TFDS's names, of which images are taken by place."""

    def count(self, split: str) -> int: ...

    def take(self, split: str, places: np.ndarray, name: str) -> Split: ...


class Whole:
    """Splits that are known from end to end."""

    def __init__(self, splits: Mapping[str, Split]) -> None:
        self.splits = splits

    def count(self, split: str) -> int:
        return len(self.splits[split])

    def take(self, split: str, places: np.ndarray, name: str) -> Split:
        return self.splits[split].select(places, name)


class Records:
    """TFDS's files: all records are counted, and only those that are taken are read."""

    def __init__(self, task: Task, found: Found) -> None:
        self.task = task
        self.files = {split: RecordFiles(files) for split, files in found.files.items()}
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


def read_whole(task: Task, found: Found) -> tuple[dict[str, Split], list[str]]:
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
    splits = {split.name: split for split in (data.train, data.test, data.final) if split is not None}
    return {"validation" if name == "val" else name: split for name, split in splits.items()}, notes


def _computed(task: Task, found: Found) -> dict[str, Split] | None:
    splits: dict[str, Split] = {}
    for split, files in found.files.items():
        columns = read_columns(files, task.rule.fields)
        if columns is None:
            return None
        labels = [_label(task, key, row) for key, row in zip(columns.keys, columns.values, strict=True)]
        classes = task.rule.names or _numbers(task)
        splits[split] = Split(split, columns.keys, np.array(labels, np.int64), classes, columns.reader)
    return splits


def _labelled(found: Found) -> DataSet:
    if found.layout == "folders":
        return read_folder(found.folder, seed=0, held_out=0)
    files = [file for members in found.files.values() for file in members]
    read = read_parquet if found.layout == "parquet" else read_shards
    return read(str(found.folder), files, seed=0, held_out=0)


def _label(task: Task, key: str, values: list[list[Any]]) -> int:
    try:
        label = task.rule.label(*values)
    except (IndexError, ValueError, TypeError) as error:
        fields = " and ".join(task.rule.fields)
        raise UserError(f"{key} does not state {fields} as {task.builder} does: take that data set.") from error
    if not 0 <= label < task.classes:
        raise UserError(f"{key} has the label {label}, which is out of range: {task.name} has {task.classes} classes.")
    return label


def _stated_names(task: Task, folder: Path) -> tuple[str, ...]:
    """The class names that TFDS writes beside the records, one a line."""
    file = folder / f"{task.rule.fields[0]}.labels.txt"
    names = tuple(file.read_text(encoding="utf-8").splitlines()) if file.is_file() else ()
    return names if len(names) == task.classes else ()


def _numbers(task: Task) -> tuple[str, ...]:
    return tuple(map(str, range(task.classes)))
