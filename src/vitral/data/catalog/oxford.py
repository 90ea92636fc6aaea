"""Oxford Flowers-102 as its makers pack it: jpg/, imagelabels.mat and setid.mat, which say class and split by number.

Train is `trnid` (1,020 images), val is `valid` (1,020) and test is `tstid` (6,149), as in TensorFlow's catalogue. The
paper's fine-tuning code trains on train alone and never on val. The files give the classes numbers and no names.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from vitral.data.catalog.copies import LocalCopy, listed_files, read_generic
from vitral.data.matlab import read_arrays
from vitral.data.splits import DataSet, RawSplit
from vitral.errors import UserError

SPLITS = {"train": "trnid", "val": "valid", "test": "tstid"}


def read_flowers(copy: LocalCopy) -> DataSet | None:
    place = copy.find_folder("jpg", "imagelabels.mat", "setid.mat")
    if place is None:
        return read_generic(copy)
    labels = _numbers(place / "imagelabels.mat", "labels")
    parts = {}
    for split, variable in SPLITS.items():
        images = _numbers(place / "setid.mat", variable)
        if images.max() > len(labels):
            raise UserError(f"{place} has labels for {len(labels)} images and image {images.max()}: unpack it again.")
        names = [f"jpg/image_{image:05d}.jpg" for image in images]
        classes = [str(label) for label in labels[images - 1]]
        parts[split] = RawSplit(names, classes, listed_files(place, names, "setid.mat"))
    return copy.build(parts, tuple(str(label) for label in np.unique(labels)))


def _numbers(file: Path, variable: str) -> np.ndarray:
    """(n,) int64, all of them from 1"""
    found = read_arrays(file).get(variable)
    if found is None or not found.size or found.min() < 1:
        raise UserError(f'{file} has no numbers called "{variable}": fetch it again.')
    return found.astype(np.int64).ravel()


LISTS = {"train": "annotations/trainval.txt", "test": "annotations/test.txt"}


def read_pets(copy: LocalCopy) -> DataSet | None:
    place = copy.find_folder("images", *LISTS.values())
    if place is None:
        return read_generic(copy)
    breeds: dict[int, str] = {}
    parts = {}
    for split, listing in LISTS.items():
        rows = _rows(place / listing)
        for name, number in rows:
            breed = name.rpartition("_")[0]
            if breeds.setdefault(number, breed) != breed:
                raise UserError(
                    f"{place / listing} has {breeds[number]} and {breed} as class {number}: fetch it again."
                )
        files = [f"images/{name}.jpg" for name, _ in rows]
        parts[split] = RawSplit(files, [breeds[number] for _, number in rows], listed_files(place, files, listing))
    # The makers number the breeds by the alphabet, whatever the case; other data of theirs relies on the numbers.
    return copy.build(parts, tuple(breeds[number] for number in sorted(breeds)))


def _rows(listing: Path) -> list[tuple[str, int]]:
    """Lines such as "Abyssinian_100 1 1 1": the image, its class from 1, its species, its breed within the species."""
    rows = []
    for number, line in enumerate(listing.read_text("utf-8", "replace").splitlines(), start=1):
        words = line.split()
        if not words or line.startswith("#"):
            continue
        if len(words) < 2 or not words[1].isdecimal():
            raise UserError(f'{listing} has no class in line {number} ("{line}"): fetch it again.')
        rows.append((words[0], int(words[1])))
    return rows
