"""A user's copy of a known data set: where it lies, and the layouts that any of them may have."""

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
    """Where one lies."""

    source: str  # as the user wrote it
    path: Path
    held_out: float  # the share to hold out where it has no test split of its own

    def folders(self) -> list[Path]:
        """The folder, and those right inside it: archives unpack into a folder of their own."""
        if not self.path.is_dir():
            return []
        return [self.path, *(self.path / name for name in sub_folders(self.path))]

    def find_folder(self, *names: str) -> Path | None:
        """The first place that has all these files and folders."""
        found = (place for place in self.folders() if all((place / name).exists() for name in names))
        return next(found, None)

    def build(
        self, parts: Mapping[str, RawSplit], classes: tuple[str, ...] | None = None, notes: Iterable[str] = ()
    ) -> DataSet:
        """One split whatever the seed: results on a known data set can be compared."""
        return make_dataset(self.source, parts, seed=0, held_out=self.held_out, classes=classes, notes=notes)


@dataclass(frozen=True)
class CatalogEntry:
    """A row of the catalogue."""

    about: str
    read: Callable[[LocalCopy], DataSet | None]  # None where the copy has none of the layouts
    layout: str = ""  # what a copy has, in words; empty where the data set needs none
    classes: int = 0
    sizes: Mapping[str, int] = field(default_factory=dict)  # images of the real data set, by split


def find_copy(source: str, layout: str, held_out: float) -> LocalCopy:
    """`name:PATH`, or `name` for $VITRAL_DATA/name."""
    name, _, stated = source.partition(":")
    if not layout:
        if stated:
            raise UserError(f"{name} comes with a library and has no copy: write {name} alone.")
        return LocalCopy(source, Path(), held_out)
    root = os.environ.get(ROOT, "")
    path = Path(stated or (os.path.join(root, name) if root else "")).expanduser()
    if not (stated or root) or not path.exists():
        lacking = f"{path} does not exist" if stated or root else f"{name} is not downloaded for you"
        raise UserError(f"{lacking}: write {name}:FOLDER, or put it in ${ROOT}/{name}; it should have {layout}.")
    return LocalCopy(source, path, held_out)


def read_parquet_copy(copy: LocalCopy) -> DataSet | None:
    """Parquet files in the hub's layout; else None."""
    single = copy.path.suffix.lower() == ".parquet" and copy.path.is_file()
    files = [copy.path] if single else [file for place in copy.folders() for file in place.glob("*.parquet")]
    if not files:
        return None
    return replace(read_parquet(str(copy.path), files, seed=0, held_out=copy.held_out), source=copy.source)


def read_generic(copy: LocalCopy) -> DataSet | None:
    """The hub's Parquet files, or class folders below train (and val, test); else None."""
    if (data := read_parquet_copy(copy)) is not None:
        return data
    for place in copy.folders():
        train = [name for name in sub_folders(place) if SPLIT_NAMES.get(name.lower()) == "train"]
        if any(sub_folders(place / name) for name in train):
            return replace(read_folder(place, seed=0, held_out=copy.held_out), source=copy.source)
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
    """All images as the split that is measured, and none to train on."""
    data = replace(copy, held_out=0.0).build({"train": part}, notes=notes)
    nothing = data.train.select(np.empty(0, np.int64))
    return replace(data, train=nothing, test=replace(data.train, name=name))
