"""VTAB-1k's data: 19 tasks of 1,000 training images each, from files in one folder.

`tasks` has the tasks and their label rules, `splits` the TFDS split expressions, `files` finds and reads the data sets,
`tfrecord` reads TFRecord files; `open_task` combines them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vitral.atomic import atomic_write
from vitral.data.images import ImageError
from vitral.data.splits import DataSet, Reader, Split
from vitral.data.vtab.files import (
    BinaryMaskReader,
    LoadedSplits,
    SplitStore,
    TaskFiles,
    TFRecordReader,
    concat_splits,
    find_files,
    load_splits,
)
from vitral.data.vtab.tasks import TASKS, TaskSpec, fairly_drawn, find_task, hashed_order, positions, stored_split
from vitral.errors import UserError

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


class _Selection(NamedTuple):
    stored: str
    indices: range


def open_task(name: str, root: str | Path, *, train: int = 800, val: int = 200) -> VtabTask:
    """Open a task.

    Args:
        name: of the task.
        root: the folder of all tasks.
        train: the number of images of train800.
        val: the number of images of val200.
    """
    task = find_task(name)
    folder = Path(root).expanduser()
    files = find_files(task, folder)
    counts = {"train800": train, "val200": val}
    stored, order, notes = _open_store(task, files, counts)
    selections = _select(task, files, stored, counts)
    splits = {key: stored.take(part.stored, np.array(part.indices), key) for key, part in selections.items()}
    if task.dataset == "dsprites":
        splits = {key: replace(split, reader=BinaryMaskReader(split.reader)) for key, split in splits.items()}
    both = concat_splits(splits["train800"], splits["val200"], "train1000")
    return VtabTask(task, folder, train1000=both, order=order, notes=tuple(notes), **splits)


def _open_store(task: TaskSpec, files: TaskFiles, counts: Mapping[str, int]) -> tuple[SplitStore, str, list[str]]:
    """The data set, a description of the order of its images, and notes."""
    if files.layout == "tfrecord":
        return TFRecordReader(task, files), "tfds order: yes (tfrecord files read in shard order)", []
    splits, notes = load_splits(task, files)
    loaded = LoadedSplits(splits)
    selections = _select(task, files, loaded, counts)
    if all(_is_fair(splits[part.stored], part.indices) for part in selections.values()):
        return loaded, f"tfds order: not verified ({_ORDERS[files.layout]})", notes
    notes.append(f"{task.name} is not stored in random order: its images are taken by the hashes of their keys.")
    mixed = {key: split.select(hashed_order(split.keys)) for key, split in splits.items()}
    order = "tfds order: no (not stored in random order, taken by key hashes)"
    return LoadedSplits(mixed), order, notes


def _select(task: TaskSpec, files: TaskFiles, stored: SplitStore, counts: Mapping[str, int]) -> dict[str, _Selection]:
    """Which images each split consists of; raises UserError for too few, or for an image in two splits."""
    selections: dict[str, _Selection] = {}
    for key, expression in task.expressions(*counts.values()).items():
        split = stored_split(expression)
        indices = positions(expression, stored.count(split))
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
    return fairly_drawn(counts, split.counts())


FOLDER = "vtab-ids"


def write_ids(task: VtabTask, folder: str | Path | None = None) -> str:
    """Write the list of a task's images, or compare them with an existing list; every image is read.

    Args:
        task: the opened task.
        folder: of the lists; by default `vtab-ids` beside the tasks' folders.

    Returns:
        A message that says which was done.
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
        raise UserError(f"{file} is damaged: remove it to list the images anew.")
    for old, new in zip(listed, lines, strict=False):
        if _compared(old) != _compared(new):
            where = " ".join(new.split()[:2])
            raise UserError(
                f"{file} lists another image at {where} ({old!r} is now {new!r}): restore that one, "
                "or remove the list to have it made anew."
            )
    if len(listed) != len(lines):
        raise UserError(f"{file} lists {len(listed)} images and there are {len(lines)}: remove it to list them anew.")


__all__ = ["TASKS", "TaskSpec", "VtabTask", "find_task", "open_task", "write_ids"]
