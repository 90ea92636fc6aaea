"""Data sets known by name, one row each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from vitral.data.splits import DataSet, Part, assemble
from vitral.errors import UserError


@dataclass(frozen=True)
class Known:
    """A row of the catalogue."""

    about: str
    read: Callable[[float], DataSet]  # from the share to hold out where the data set has no test split of its own


@dataclass(frozen=True)
class ArrayReader:
    """Images of one size that are in memory, uint8 (n, h, w, c)."""

    images: np.ndarray
    version: str

    def read(self, index: int) -> np.ndarray:
        return self.images[index]

    def mark(self, index: int) -> str:
        return self.version


def _digits(held_out: float) -> DataSet:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UserError("The digits come with scikit-learn: pip install 'vitral[demo]' to have them.") from error
    pixels, labels = load_digits(return_X_y=True)
    # The scans have 17 levels of grey.
    images = np.rint(pixels.reshape(-1, 8, 8, 1) * (255 / 16)).astype(np.uint8)
    keys = [f"digit-{row:04d}" for row in range(len(images))]
    part = Part(keys, [str(label) for label in labels], ArrayReader(images, "scikit-learn's digits"))
    # One split whatever the seed: results on a known data set can be compared.
    return assemble("digits", {"train": part}, seed=0, held_out=held_out)


CATALOG: dict[str, Known] = {
    "digits": Known("1,797 handwritten digits, 8 x 8 pixels, 10 classes, inside scikit-learn", _digits),
}
