"""How large the images of a split are, from a few of them."""

from __future__ import annotations

import numpy as np

from vitral.data.images import UnreadableImage, describe
from vitral.data.splits import Split

_SAMPLE = 32


def median_short_side(split: Split) -> int:
    """Pixels of the shorter side in the middle of a sample spread over the split; headers are read, not pixels."""
    sides = []
    for index in np.unique(np.linspace(0, len(split) - 1, _SAMPLE).astype(int)).tolist():
        try:
            sides.append(_short_side(split.reader.read(index)))
        except (UnreadableImage, OSError):
            continue
    return int(np.median(sides)) if sides else 224


def _short_side(image: bytes | np.ndarray) -> int:
    if isinstance(image, np.ndarray):
        return min(image.shape[:2])
    facts = describe(image)
    return min(facts.width, facts.height)
