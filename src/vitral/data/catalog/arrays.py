"""Data sets whose pixels fit in memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vitral.data.catalog.copies import Copy
from vitral.data.splits import DataSet, Part
from vitral.errors import UserError


@dataclass(frozen=True)
class ArrayReader:
    """Images of one size that are in memory, uint8 (n, h, w, c)."""

    images: np.ndarray
    version: str

    def read(self, index: int) -> np.ndarray:
        return self.images[index]

    def mark(self, index: int) -> str:
        return self.version


def read_digits(copy: Copy) -> DataSet:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UserError("The digits come with scikit-learn: pip install 'vitral[demo]' to have them.") from error
    pixels, labels = load_digits(return_X_y=True)
    # The scans have 17 levels of grey.
    images = np.rint(pixels.reshape(-1, 8, 8, 1) * (255 / 16)).astype(np.uint8)
    keys = [f"digit-{row:04d}" for row in range(len(images))]
    part = Part(keys, [str(label) for label in labels], ArrayReader(images, "scikit-learn's digits"))
    return copy.assembled({"train": part})
