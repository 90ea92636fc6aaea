"""A task of VTAB-1k, opened: the 800 and 200 training images and the test images, with their labels.

Image bytes are handed on as they are stored, never encoded again. TFDS's own files are taken in TFDS's order, which
makes the images those of VTAB. Other layouts keep their order unless it is evidently no random one (class after class);
then the hash of its key gives an image its place. `order` says which it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vitral.data.splits import DataSet, Split
from vitral.data.vtab.find import Found, find_files
from vitral.data.vtab.readers import Masks, joined
from vitral.data.vtab.splits import fairly_drawn, hashed_order, positions, stored_split
from vitral.data.vtab.stored import Records, Stored, Whole, read_whole
from vitral.data.vtab.tasks import Task, find_task
from vitral.errors import UserError

_ORDERS = {"parquet": "order of the Parquet rows", "tar": "order of the tar members", "folders": "order of the names"}


@dataclass(frozen=True, eq=False)
class VtabTask:
    """A task's splits; `train1000` is `train800` and `val200` together. `order` says whether TFDS chose the images."""

    task: Task
    root: Path  # the folder of all tasks
    train800: Split
    val200: Split
    train1000: Split
    test: Split
    order: str
    notes: tuple[str, ...]

    def for_choosing(self) -> DataSet:
        """What hyper-parameters are chosen on: trained on 800 images, measured on 200."""
        return DataSet(self.task.name, self.train800, self.val200, self.notes)

    def for_final(self) -> DataSet:
        """What is reported: trained on all 1,000 images, measured on the test split."""
        return DataSet(self.task.name, self.train1000, self.test, self.notes)


class _Chosen(NamedTuple):
    stored: str
    places: range


def open_task(name: str, root: str | Path, *, train: int = 800, val: int = 200) -> VtabTask:
    """A task whose files lie under `root`. `train` and `val` are how many images train800 and val200 have."""
    task = find_task(name)
    folder = Path(root).expanduser()
    found = find_files(task, folder)
    wanted = {"train800": train, "val200": val}
    stored, order, notes = _stored(task, found, wanted)
    chosen = _chosen(task, found, stored, wanted)
    splits = {key: stored.take(part.stored, np.array(part.places), key) for key, part in chosen.items()}
    if task.dataset == "dsprites":
        splits = {key: replace(split, reader=Masks(split.reader)) for key, split in splits.items()}
    both = joined(splits["train800"], splits["val200"], "train1000")
    return VtabTask(task, folder, train1000=both, order=order, notes=tuple(notes), **splits)


def _stored(task: Task, found: Found, wanted: Mapping[str, int]) -> tuple[Stored, str, list[str]]:
    """The data set, the order of its images in words, and what to know of it."""
    if found.layout == "tfrecord":
        return Records(task, found), "tfds order: yes (tfrecord files read in shard order)", []
    splits, notes = read_whole(task, found)
    whole = Whole(splits)
    chosen = _chosen(task, found, whole, wanted)
    if all(_fair(splits[part.stored], part.places) for part in chosen.values()):
        return whole, f"tfds order: not verified ({_ORDERS[found.layout]})", notes
    notes.append(f"{task.name} is not stored in random order: its images are taken by the hashes of their keys.")
    mixed = {key: split.select(hashed_order(split.keys)) for key, split in splits.items()}
    order = "tfds order: no (not stored in random order, taken by key hashes)"
    return Whole(mixed), order, notes


def _chosen(task: Task, found: Found, stored: Stored, wanted: Mapping[str, int]) -> dict[str, _Chosen]:
    """Which images each of our splits takes. Too few of them, or one taken twice, is refused."""
    chosen: dict[str, _Chosen] = {}
    for key, expression in task.expressions(*wanted.values()).items():
        split = stored_split(expression)
        places = positions(expression, stored.count(split))
        if len(places) < wanted.get(key, 1):
            raise UserError(
                f"{found.folder} has {len(places)} images in {expression}, which is too few: "
                f"{task.name} needs {wanted.get(key, 1)}, so complete the data."
            )
        if any(split == part.stored and set(places) & set(part.places) for part in chosen.values()):
            raise UserError(f"{found.folder} is too small: {key} of {task.name} would share images, so complete it.")
        chosen[key] = _Chosen(split, places)
    return chosen


def _fair(split: Split, places: range) -> bool:
    some = np.bincount(split.labels[np.array(places)], minlength=len(split.classes))
    return fairly_drawn(some, split.counts())
