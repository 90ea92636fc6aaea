"""Baselines of masked patch prediction: losses of predicting the mean colour of masked patches without a model.

Colours are means of patches, rounded down to integers in 0..255, which does not affect the three bits per channel that
are predicted. Losses are over masked patches, in nats; a uniform prediction has log(512) = 6.2383. A model also
receives the masked patches that were left unchanged: for a fair comparison, evaluate it with every masked patch
replaced by the mask token.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
from torch import Tensor

LEVELS = 8  # per channel: three bits
# Weight of the histogram, in patches, in each row of the table of probabilities. On ImageNet's validation images 16 is
# within 1 % of the best for 50 to 800 training images; add-one smoothing is 0.3 to 1.1 nats worse.
BACKOFF = 16

Array = TypeVar("Array", np.ndarray, Tensor)


def colour_class(colours: Array) -> Array:
    """int64 (..., channels) in 0..255 -> (...) below 8^channels; the first channel is the most significant.

    Level i of a channel is 32 i to 32 i + 31: the paper does not say how means are rounded, here they are rounded down.
    """
    levels: Any = colours // (256 // LEVELS)
    index = levels[..., 0]
    for channel in range(1, colours.shape[-1]):
        index = index * LEVELS + levels[..., channel]
    return index


def histogram_entropy(targets: np.ndarray) -> float:
    """Integers of any shape -> entropy of their histogram in nats, the loss of the best constant prediction."""
    _, counts = np.unique(targets, return_counts=True)
    shares = counts / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def neighbour_loss(train: np.ndarray, train_masked: np.ndarray, test: np.ndarray, test_masked: np.ndarray) -> float:
    """The mean loss, in nats, of predicting masked patches from the visible patches around them.

    The class of a masked patch, bool (m, h, w), is predicted from the class of its `neighbour_colours`, int64
    (m, h, w, channels), with probabilities counted on the training images.
    """
    classes = LEVELS ** train.shape[-1]
    contexts = colour_class(neighbour_colours(train, train_masked))
    table = _probabilities(contexts, colour_class(train[train_masked]), classes)
    contexts = colour_class(neighbour_colours(test, test_masked))
    return float(-np.log(table[contexts, colour_class(test[test_masked])]).mean())


def neighbour_colours(colours: np.ndarray, masked: np.ndarray) -> np.ndarray:
    """The mean colour of the visible patches nearest to each masked one.

    These are its eight neighbours; if none of them is visible the ring around them, and so on. In an image without
    visible patches the result is black. int64 (m, h, w, channels), bool (m, h, w) -> int64 (masked patches, channels).
    """
    visible = ~masked[..., None]
    sums = np.zeros((*masked.shape, colours.shape[-1] + 1), np.int64)  # of colours, and the number of patches
    values = np.concatenate([colours * visible, visible], axis=-1)
    for radius in range(1, max(masked.shape[1:])):
        missing = sums[..., -1] == 0  # smaller boxes have no visible patch, so those of this box are on its border
        if not missing.any():
            break
        sums[missing] = _box_sums(values, radius)[missing]
    totals = sums[masked]
    return totals[:, :-1] // np.maximum(totals[:, -1:], 1)


def _box_sums(values: np.ndarray, radius: int) -> np.ndarray:
    """(m, h, w, c) -> the same: sums over the box of 2 * radius + 1 patches per side around each, within the image."""
    for axis in (1, 2):
        length = values.shape[axis]
        cumulative = np.insert(values.cumsum(axis=axis), 0, 0, axis=axis)
        indices = np.arange(length)
        first, last = np.maximum(indices - radius, 0), np.minimum(indices + radius + 1, length)
        values = cumulative.take(last, axis=axis) - cumulative.take(first, axis=axis)
    return values


def _probabilities(contexts: np.ndarray, targets: np.ndarray, classes: int) -> np.ndarray:
    """(k,), (k,) -> (classes, classes): p(target | context), all above 0."""
    counts = np.zeros((classes, classes))
    np.add.at(counts, (contexts, targets), 1)
    histogram = (counts.sum(axis=0) + 1) / (len(targets) + classes)
    return (counts + BACKOFF * histogram) / (counts.sum(axis=1, keepdims=True) + BACKOFF)
