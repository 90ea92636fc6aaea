"""Perceptual hashes: pictures that look alike get 64 bits that are alike, and near pairs are found without n x n work.

Hashes are made from grey pictures of 32 x 32, or from parts of larger ones averaged to that size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    return _signs((low @ thumbnails.astype(np.float32) @ low.T).reshape(len(thumbnails), 64))


def phash_of_parts(thumbnails: np.ndarray, stretches: Sequence[tuple[float, float]]) -> np.ndarray:
    """`phash` of every rectangle that the stretches of a side, (start, end) in 0..1, span: (n, s, s) -> (n, k * k).

    Averaging a part to 32 x 32 and the cosine transform are both linear, so the part itself is never made.
    """
    n, side, k = len(thumbnails), thumbnails.shape[1], len(stretches)
    low = np.concatenate([_cosines() @ averages(side, SIDE, start, end) for start, end in stretches])
    frequencies = (low @ thumbnails.astype(np.float32) @ low.T).reshape(n, k, 8, k, 8)
    return _signs(frequencies.transpose(0, 1, 3, 2, 4).reshape(n * k * k, 64)).reshape(n, k * k)


def dhash(thumbnails: np.ndarray) -> np.ndarray:
    """Whether brightness rises from left to right on an 8 x 9 grid, (n, 32, 32) -> (n,) uint64."""
    grid = averages(SIDE, 8) @ thumbnails.astype(np.float32) @ averages(SIDE, 9).T
    return _packed((grid[:, :, 1:] > grid[:, :, :-1]).reshape(len(thumbnails), 64))


def distance(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """How many of the 64 bits differ, (n,) and (n,) uint64 -> (n,) uint8."""
    return np.bitwise_count(left ^ right)


def near_pairs(hashes: np.ndarray, farthest: int) -> Iterator[np.ndarray]:
    """All pairs i < j of (n,) uint64 hashes at most `farthest` bits apart, each once, in blocks (m, 2) int64."""
    for block in HashTable(hashes).near(hashes, farthest):
        ordered = block[block[:, 0] < block[:, 1]]
        if len(ordered):
            yield ordered


class HashTable:
    """(n,) uint64 hashes, sorted by each of their four bands of 16 bits; 24 bytes a hash."""

    def __init__(self, hashes: np.ndarray) -> None:
        self.hashes = np.ascontiguousarray(hashes)
        bands = _bands(self.hashes)
        self._orders = [np.argsort(bands[:, band], kind="stable").astype(np.uint32) for band in range(_BANDS)]
        values = np.arange(2**_BAND_BITS + 1)
        self._starts = [np.searchsorted(bands[order, band], values) for band, order in enumerate(self._orders)]

    def near(self, wanted: np.ndarray, farthest: int) -> Iterator[np.ndarray]:
        """All pairs (place in (m,) `wanted`, place in the table) at most `farthest` bits apart, each once, in blocks
        (p, 2) int64.

        Of four bands at least one differs in at most one bit where all four differ in at most seven. So a pair is
        looked for among the hashes whose band is equal or has one bit flipped, and nowhere else.
        """
        if not 0 <= farthest <= FARTHEST:
            raise ValueError(f"near pairs differ in 0 to {FARTHEST} bits, not {farthest}")
        wanted = np.ascontiguousarray(wanted)
        asked, stored = _bands(wanted), _bands(self.hashes)
        for band, (order, starts) in enumerate(zip(self._orders, self._starts, strict=True)):
            for flip in (0, *(1 << bit for bit in range(_BAND_BITS))):
                value = (asked[:, band] ^ np.uint16(flip)).astype(np.int64)
                first, counts = starts[value], starts[value + 1] - starts[value]
                for left, right in _candidates(order, first, counts):
                    near = distance(wanted[left], self.hashes[right]) <= farthest
                    left, right = left[near], right[near]
                    # The pair belongs to the first band that finds it.
                    earlier = np.bitwise_count(asked[left, :band] ^ stored[right, :band]) <= 1
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


def _bands(hashes: np.ndarray) -> np.ndarray:
    """(n,) uint64, contiguous -> (n, 4) uint16, the same memory"""
    return hashes[:, None].view(np.uint16)


def _signs(frequencies: np.ndarray) -> np.ndarray:
    """Which of (n, 64) lie above their median, (n,) uint64; a sort of rows so short is faster than np.median."""
    middle = np.sort(frequencies, axis=1)[:, 31:33].mean(1, keepdims=True)
    return _packed(frequencies > middle)


def _packed(bits: np.ndarray) -> np.ndarray:
    return np.packbits(bits, axis=1).view(">u8")[:, 0].astype(np.uint64)


@lru_cache(maxsize=256)
def averages(length: int, cells: int, start: float = 0.0, end: float = 1.0) -> np.ndarray:
    """The matrix (cells, length) that averages over equal cells between two places, shares of the length.

    A pixel on a border counts for both sides.
    """
    edges = np.linspace(start * length, end * length, cells + 1)
    pixels = np.arange(length)
    overlap = np.minimum(edges[1:, None], pixels + 1) - np.maximum(edges[:-1, None], pixels)
    return (np.maximum(overlap, 0) * cells / ((end - start) * length)).astype(np.float32)


@lru_cache(maxsize=1)
def _cosines() -> np.ndarray:
    """Rows 1 to 8 of the cosine transform (DCT-II), (8, 32)."""
    places = (np.arange(SIDE) + 0.5) * np.pi / SIDE
    return np.cos(np.arange(1, 9)[:, None] * places).astype(np.float32)
