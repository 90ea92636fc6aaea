"""What predicting the colours of hidden patches costs without a model: the two numbers that training must beat.

Colours are means of patches, rounded down to whole numbers of 0..255, which loses nothing of the three bits a channel
that are predicted. Both numbers count the hidden patches alone, in nats; guessing blindly costs log(512) = 6.2383. A
model also sees the hidden patches that were left unchanged: to compare like with like, score it with every hidden patch
replaced by the mask token.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
from torch import Tensor

LEVELS = 8  # of a channel: three bits
# Patches' worth of the plain histogram in each row of the table. On ImageNet's validation images 16 is within 1 % of
# the best for 50 to 800 training images; one more of each of the 512 classes instead costs 0.3 to 1.1 nats more.
BACKOFF = 16

Numbers = TypeVar("Numbers", np.ndarray, Tensor)


def colour_class(colours: Numbers) -> Numbers:
    """int64 (..., c) of 0..255 -> (...) below 8^c, the first channel counting most.

    Level i of a channel is 32 i to 32 i + 31: the paper does not say how it rounds its means, we round down.
    """
    bands: Any = colours // (256 // LEVELS)
    number = bands[..., 0]
    for band in range(1, colours.shape[-1]):
        number = number * LEVELS + bands[..., band]
    return number


def histogram_entropy(targets: np.ndarray) -> float:
    """Whole numbers of any shape -> entropy of their histogram, in nats: what the best constant prediction costs."""
    _, counts = np.unique(targets, return_counts=True)
    shares = counts / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def neighbour_loss(train: np.ndarray, train_hidden: np.ndarray, test: np.ndarray, test_hidden: np.ndarray) -> float:
    """The mean cost of a held-out image's hidden patch, predicted from the visible ones around it, in nats.

    Colours int64 (m, h, w, c) and hidden bool (m, h, w). A patch is predicted by the class of `colours_around` it; the
    probabilities of its own class given that one are counted on training images, hidden in the same way.
    """
    classes = LEVELS ** train.shape[-1]
    table = _probabilities(colour_class(colours_around(train, train_hidden)), _targets(train, train_hidden), classes)
    return float(-np.log(table[colour_class(colours_around(test, test_hidden)), _targets(test, test_hidden)]).mean())


def colours_around(colours: np.ndarray, hidden: np.ndarray) -> np.ndarray:
    """Mean colour of the visible patches next to each hidden one: int64 (m, h, w, c), bool (m, h, w) -> int64 (k, c).

    Its eight neighbours count; where none of them is visible the ring around them, and so on. Where an image shows no
    patch at all the answer is black, and the table of probabilities learns the plain histogram for it.
    """
    visible = ~hidden[..., None]
    sums = np.zeros((*hidden.shape, colours.shape[-1] + 1), np.int64)  # of colours, and the number of patches
    shown = np.concatenate([colours * visible, visible], axis=-1)
    for radius in range(1, max(hidden.shape[1:])):
        alone = sums[..., -1] == 0  # no smaller box shows one, so what this box shows is its rim
        if not alone.any():
            break
        sums[alone] = _box_sums(shown, radius)[alone]
    found = sums[hidden]
    return found[:, :-1] // np.maximum(found[:, -1:], 1)


def _box_sums(values: np.ndarray, radius: int) -> np.ndarray:
    """(m, h, w, c) -> the same: sums over the square of 2 * radius + 1 patches a side around each, inside the image."""
    for axis in (1, 2):
        length = values.shape[axis]
        before = np.insert(values.cumsum(axis=axis), 0, 0, axis=axis)
        places = np.arange(length)
        first, last = np.maximum(places - radius, 0), np.minimum(places + radius + 1, length)
        values = before.take(last, axis=axis) - before.take(first, axis=axis)
    return values


def _targets(colours: np.ndarray, hidden: np.ndarray) -> np.ndarray:
    """(m, h, w, c), (m, h, w) -> (k,): the classes of the hidden patches."""
    return colour_class(colours[hidden])


def _probabilities(seen: np.ndarray, targets: np.ndarray, classes: int) -> np.ndarray:
    """(k,), (k,) -> (classes, classes): of a target, in the row of what was seen. Every one is above 0."""
    counts = np.zeros((classes, classes))
    np.add.at(counts, (seen, targets), 1)
    histogram = (counts.sum(axis=0) + 1) / (len(targets) + classes)
    return (counts + BACKOFF * histogram) / (counts.sum(axis=1, keepdims=True) + BACKOFF)
