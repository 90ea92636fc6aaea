"""A user's copy of a data set of the catalog: its folder, and the layouts that any data set may have."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from vitral.data.folders import FileReader, read_folder, sub_folders
from vitral.data.parquet import read_parquet
from vitral.data.splits import SPLIT_NAMES, DataSet, RawSplit, make_dataset
from vitral.errors import UserError

ROOT = "VITRAL_DATA"  # the variable that names the folder of all copies


@dataclass(frozen=True)
class LocalCopy:
    """A copy on disk."""

    source: str  # as the user wrote it
    path: Path
    held_out: float  # the share to hold out where it has no test split of its own

    def folders(self) -> list[Path]:
        """The folder and its direct sub-folders: archives often unpack into one."""
        if not self.path.is_dir():
            return []
        return [self.path, *(self.path / name for name in sub_folders(self.path))]

    def find_folder(self, *names: str) -> Path | None:
        """The first of `folders` that contains all these files and folders."""
        matches = (folder for folder in self.folders() if all((folder / name).exists() for name in names))
        return next(matches, None)

    def build(
        self, parts: Mapping[str, RawSplit], classes: tuple[str, ...] | None = None, notes: Iterable[str] = ()
    ) -> DataSet:
        """The data set of raw splits, always with seed 0, so that results can be compared."""
        return make_dataset(self.source, parts, seed=0, held_out=self.held_out, classes=classes, notes=notes)


@dataclass(frozen=True)
class CatalogEntry:
    """A data set of the catalog."""

    about: str
    read: Callable[[LocalCopy], DataSet | None]  # None where the copy has none of the layouts
    layout: str = ""  # what a copy contains, for messages; empty if the data set needs no copy
    classes: int = 0
    sizes: Mapping[str, int] = field(default_factory=dict)  # images of the original, by split


def find_copy(source: str, layout: str, held_out: float) -> LocalCopy:
    """The copy that `name:PATH` means, or `name` for $VITRAL_DATA/name."""
    name, _, given = source.partition(":")
    if not layout:
        if given:
            raise UserError(f"{name} comes with a library and has no copy: write {name} alone.")
        return LocalCopy(source, Path(), held_out)
    root = os.environ.get(ROOT, "")
    path = Path(given or (os.path.join(root, name) if root else "")).expanduser()
    if not (given or root) or not path.exists():
        lacking = f"{path} does not exist" if given or root else f"{name} is not downloaded automatically"
        raise UserError(f"{lacking}: write {name}:FOLDER, or put it in ${ROOT}/{name}; it should have {layout}.")
    return LocalCopy(source, path, held_out)


def read_parquet_copy(copy: LocalCopy) -> DataSet | None:
    """Read Parquet files in the hub's layout; None if there are none."""
    single = copy.path.suffix.lower() == ".parquet" and copy.path.is_file()
    files = [copy.path] if single else [file for folder in copy.folders() for file in folder.glob("*.parquet")]
    if not files:
        return None
    return replace(read_parquet(str(copy.path), files, seed=0, held_out=copy.held_out), source=copy.source)


def read_generic(copy: LocalCopy) -> DataSet | None:
    """Read the hub's Parquet files, or class folders in train (and val, test); None if there are neither."""
    if (data := read_parquet_copy(copy)) is not None:
        return data
    for folder in copy.folders():
        train = [name for name in sub_folders(folder) if SPLIT_NAMES.get(name.lower()) == "train"]
        if any(sub_folders(folder / name) for name in train):
            return replace(read_folder(folder, seed=0, held_out=copy.held_out), source=copy.source)
    return None


def listed_files(folder: Path, names: Sequence[str], listing: str) -> FileReader:
    """A reader of files that a listing of the data set names, all of them in one folder below `folder`."""
    below = os.path.dirname(names[0]) if names else ""
    present = {f"{below}/{name}" for name in os.listdir(folder / below)}
    missing = [name for name in names if name not in present]
    if missing or not names:
        what = f"lists {len(missing)} images that are not there ({missing[0]})" if missing else "lists no images"
        raise UserError(f"{folder / listing} {what}: unpack the whole archive again.")
    return FileReader(str(folder), names)


def test_only(copy: LocalCopy, name: str, part: RawSplit, notes: Iterable[str]) -> DataSet:
    """A data set whose images are all in one held-out split, called `name`; train is empty."""
    data = replace(copy, held_out=0.0).build({"train": part}, notes=notes)
    empty = data.train.select(np.empty(0, np.int64))
    return replace(data, train=empty, test=replace(data.train, name=name))
