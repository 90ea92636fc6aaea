"""Oxford Flowers-102 as its makers pack it: jpg/, imagelabels.mat and setid.mat, which say class and split by number.

Train is `trnid` (1,020 images), val is `valid` (1,020) and test is `tstid` (6,149), as in TensorFlow's catalogue. The
paper's fine-tuning code trains on train alone and never on val. The files give the classes numbers and no names.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from vitral.data.catalog.copies import Copy, listed_files, read_plain
from vitral.data.matlab import read_arrays
from vitral.data.splits import DataSet, Part
from vitral.errors import UserError

SPLITS = {"train": "trnid", "val": "valid", "test": "tstid"}


def read_flowers(copy: Copy) -> DataSet | None:
    place = copy.place_of("jpg", "imagelabels.mat", "setid.mat")
    if place is None:
        return read_plain(copy)
    labels = _numbers(place / "imagelabels.mat", "labels")
    parts = {}
    for split, variable in SPLITS.items():
        images = _numbers(place / "setid.mat", variable)
        if images.max() > len(labels):
            raise UserError(f"{place} has labels for {len(labels)} images and image {images.max()}: unpack it again.")
        names = [f"jpg/image_{image:05d}.jpg" for image in images]
        classes = [str(label) for label in labels[images - 1]]
        parts[split] = Part(names, classes, listed_files(place, names, "setid.mat"))
    return copy.assembled(parts, tuple(str(label) for label in np.unique(labels)))


def _numbers(file: Path, variable: str) -> np.ndarray:
    """(n,) int64, all of them from 1"""
    found = read_arrays(file).get(variable)
    if found is None or not found.size or found.min() < 1:
        raise UserError(f'{file} has no numbers called "{variable}": fetch it again.')
    return found.astype(np.int64).ravel()
