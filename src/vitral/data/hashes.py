"""Perceptual hashes: pictures that look alike get 64 bits that are alike, and near pairs are found without n x n work.

Hashes are made from grey pictures of 32 x 32.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

SIDE = 32
_BANDS, _BAND_BITS = 4, 16
FARTHEST = 2 * _BANDS - 1  # up to here near pairs agree in one of the four bands up to one bit
_BLOCK = 1 << 21  # candidate pairs in memory at a time


def phash(thumbnails: np.ndarray) -> np.ndarray:
    """The signs of the 64 lowest frequencies about their median, (n, 32, 32) -> (n,) uint64.

    The mean brightness (frequency 0, 0) is left out: 8 x 8 frequencies begin at 1 in both directions.
    """
    low = _cosines()
    frequencies = (low @ thumbnails.astype(np.float32) @ low.T).reshape(len(thumbnails), 64)
    return _packed(frequencies > np.median(frequencies, axis=1, keepdims=True))


def dhash(thumbnails: np.ndarray) -> np.ndarray:
    """Whether brightness rises from left to right on an 8 x 9 grid, (n, 32, 32) -> (n,) uint64."""
    grid = _means(SIDE, 8) @ thumbnails.astype(np.float32) @ _means(SIDE, 9).T
    return _packed((grid[:, :, 1:] > grid[:, :, :-1]).reshape(len(thumbnails), 64))


def distance(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """How many of the 64 bits differ, (n,) and (n,) uint64 -> (n,) uint8."""
    return np.bitwise_count(left ^ right)


def near_pairs(hashes: np.ndarray, farthest: int) -> Iterator[np.ndarray]:
    """All pairs i < j of (n,) uint64 hashes that differ in at most `farthest` bits, each once, in blocks (m, 2) int64.

    Of four bands of 16 bits at least one differs in at most one bit where all four differ in at most seven. So a
    pair is looked for among the hashes whose band is equal or has one bit flipped, and nowhere else.
    """
    if not 0 <= farthest <= FARTHEST:
        raise ValueError(f"near pairs differ in 0 to {FARTHEST} bits, not {farthest}")
    bands = (hashes[:, None] >> np.arange(0, 64, _BAND_BITS, dtype=np.uint64)).astype(np.uint16)
    for band in range(_BANDS):
        order = np.argsort(bands[:, band], kind="stable")
        ordered = bands[order, band]
        for flip in (0, *(1 << bit for bit in range(_BAND_BITS))):
            wanted = bands[:, band] ^ np.uint16(flip)
            first = np.searchsorted(ordered, wanted, "left")
            counts = np.searchsorted(ordered, wanted, "right") - first
            for left, right in _candidates(order, first, counts):
                near = (left < right) & (distance(hashes[left], hashes[right]) <= farthest)
                left, right = left[near], right[near]
                # The pair belongs to the first band that finds it.
                earlier = np.bitwise_count(bands[left, :band] ^ bands[right, :band]) <= 1
                new = ~earlier.any(1)
                if new.any():
                    yield np.stack([left[new], right[new]], 1)


def _candidates(order: np.ndarray, first: np.ndarray, counts: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Row i beside `order[first[i] : first[i] + counts[i]]`, a bounded number of pairs at a time."""
    ends = np.cumsum(counts)
    start = 0
    while start < len(counts):
        before = int(ends[start - 1]) if start else 0
        stop = max(int(np.searchsorted(ends, before + _BLOCK, "right")), start + 1)
        sizes = counts[start:stop]
        left = np.repeat(np.arange(start, stop), sizes)
        within = np.arange(len(left)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        yield left, order[np.repeat(first[start:stop], sizes) + within]
        start = stop


def _packed(bits: np.ndarray) -> np.ndarray:
    return np.packbits(bits, axis=1).view(">u8")[:, 0].astype(np.uint64)


@lru_cache(maxsize=256)
def _means(length: int, cells: int) -> np.ndarray:
    """The matrix (cells, length) that averages over equal stretches, sharing a pixel on a border between both."""
    edges = np.linspace(0, length, cells + 1)
    pixels = np.arange(length)
    overlap = np.minimum(edges[1:, None], pixels + 1) - np.maximum(edges[:-1, None], pixels)
    return (np.maximum(overlap, 0) * cells / length).astype(np.float32)


@lru_cache(maxsize=1)
def _cosines() -> np.ndarray:
    """Rows 1 to 8 of the cosine transform (DCT-II), (8, 32)."""
    places = (np.arange(SIDE) + 0.5) * np.pi / SIDE
    return np.cos(np.arange(1, 9)[:, None] * places).astype(np.float32)
