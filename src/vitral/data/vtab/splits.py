"""TFDS split expressions such as "train[60%:80%][:200]", and a test whether a slice is a random sample.

A boundary is a count or a percentage; percentages are rounded to the closest count, as TFDS does (at .5 to the even
one). task_adaptation rounds them down: at the sizes of VTAB's data sets both give the same images. A second slice
counts within the first, as in Python; TFDS itself has no second one.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

import numpy as np

_EXPRESSION = re.compile(r"([a-z_]+)((?:\[[^\[\]]*\])*)")
_SLICE = re.compile(r"\[(-?[0-9]+%?)?:(-?[0-9]+%?)?\]")
_MAX_DEVIATIONS = 10.0  # standard deviations


def stored_split(expression: str) -> str:
    """The data set's split that an expression selects from."""
    return _parsed(expression)[0]


def positions(expression: str, count: int) -> range:
    """The indices that an expression selects in a split of `count` images, in ascending order."""
    indices = range(count)
    for first, last in _parsed(expression)[1]:
        indices = indices[_boundary(first, len(indices)) : _boundary(last, len(indices))]
    return indices


def _parsed(expression: str) -> tuple[str, list[tuple[str, str]]]:
    whole = _EXPRESSION.fullmatch(expression)
    slices = re.findall(r"\[[^\[\]]*\]", whole[2]) if whole else []
    if whole is None or not all(_SLICE.fullmatch(text) for text in slices):
        raise ValueError(f"{expression} is no split expression such as train[60%:80%][:200]")
    return whole[1], [(first, last) for first, last in _SLICE.findall(whole[2])]


def _boundary(text: str, count: int) -> int | None:
    if text.endswith("%"):
        return round(int(text[:-1]) * count / 100)
    return int(text) if text else None


def fairly_drawn(chosen: np.ndarray, stored: np.ndarray) -> bool:
    """Whether class counts, (k,) of (k,), may be a random sample: chi-square, within 10 standard deviations.

    Files that are sorted by class fail this by far: their first 800 images are of one class or a few.
    """
    share = stored[stored > 0] / stored.sum()
    drawn, classes = chosen.sum(), len(share)
    expected = share * drawn
    distance = ((chosen[stored > 0] - expected) ** 2 / expected).sum()
    variance = 2 * (classes - 1) + ((1 / share).sum() - classes**2 - 2 * classes + 2) / drawn
    return bool(distance <= classes - 1 + _MAX_DEVIATIONS * np.sqrt(max(variance, 0)))


def hashed_order(keys: Sequence[str]) -> np.ndarray:
    """A permutation that depends on the keys alone, (n,) int64: in the order of their hashes."""
    hashes = [hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=16).digest() for key in keys]
    return np.array(sorted(range(len(keys)), key=hashes.__getitem__), np.int64)
