"""Perceptual hashes: 64 bits per image, of which few differ between similar images, and a table to look them up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np

SIDE = 32  # pixels per side of what is hashed
_BANDS, _BAND_BITS = 4, 16
MAX_BITS = 2 * _BANDS - 1  # hashes that differ in at most this many bits have a band that differs in at most one
_BLOCK = 1 << 21  # candidate pairs in memory at a time


def perceptual_hashes(thumbnails: np.ndarray, spans: Sequence[tuple[float, float]] = ((0.0, 1.0),)) -> np.ndarray:
    """pHash of every crop that the spans span: the signs of its 64 lowest frequencies about their median.

    The mean brightness (frequency 0, 0) is left out: 8 x 8 frequencies begin at 1 in both directions. Averaging a crop
    to 32 x 32 and the cosine transform are both linear, so the crops themselves are never computed.

    Args:
        thumbnails: (n, side, side), grey.
        spans: k parts of a side, (start, end) in 0..1.

    Returns:
        (n, k * k) uint64.
    """
    n, side, k = len(thumbnails), thumbnails.shape[1], len(spans)
    low = np.concatenate([_cosines() @ area_weights(side, SIDE, start, end) for start, end in spans])
    frequencies = (low @ thumbnails.astype(np.float32) @ low.T).reshape(n, k, 8, k, 8)
    return _signs(frequencies.transpose(0, 1, 3, 2, 4).reshape(n * k * k, 64)).reshape(n, k * k)


def hamming_distance(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """How many of the 64 bits differ, (n,) and (n,) uint64 -> (n,) uint8."""
    return np.bitwise_count(left ^ right)


class HashTable:
    """(n,) uint64 hashes, sorted by each of their four bands of 16 bits; 24 bytes per hash."""

    def __init__(self, hashes: np.ndarray) -> None:
        self.hashes = np.ascontiguousarray(hashes)
        bands = _bands(self.hashes)
        self._orders = [np.argsort(bands[:, band], kind="stable").astype(np.uint32) for band in range(_BANDS)]
        values = np.arange(2**_BAND_BITS + 1)
        self._starts = [np.searchsorted(bands[order, band], values) for band, order in enumerate(self._orders)]

    def near(self, queries: np.ndarray, max_bits: int) -> Iterator[np.ndarray]:
        """All pairs (query, stored hash) that differ in at most `max_bits` bits, each once.

        Where four bands together differ in at most seven bits, one of them differs in at most one. So only hashes with
        an equal band, or a band with one bit flipped, are compared.

        Args:
            queries: (m,) uint64.
            max_bits: 0 to 7.

        Yields:
            Blocks (p, 2) int64 of indices into the queries and into the table.
        """
        if not 0 <= max_bits <= MAX_BITS:
            raise ValueError(f"max_bits must be between 0 and {MAX_BITS}, not {max_bits}")
        queries = np.ascontiguousarray(queries)
        query_bands, stored_bands = _bands(queries), _bands(self.hashes)
        for band, (order, starts) in enumerate(zip(self._orders, self._starts, strict=True)):
            for flip in (0, *(1 << bit for bit in range(_BAND_BITS))):
                value = (query_bands[:, band] ^ np.uint16(flip)).astype(np.int64)
                first, counts = starts[value], starts[value + 1] - starts[value]
                for left, right in _candidates(order, first, counts):
                    near = hamming_distance(queries[left], self.hashes[right]) <= max_bits
                    left, right = left[near], right[near]
                    # A pair is reported by the first band that finds it.
                    earlier = np.bitwise_count(query_bands[left, :band] ^ stored_bands[right, :band]) <= 1
                    new = ~earlier.any(1)
                    if new.any():
                        yield np.stack([left[new], right[new]], 1)


def _candidates(order: np.ndarray, first: np.ndarray, counts: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Row i with each of `order[first[i] : first[i] + counts[i]]`, a bounded number of pairs at a time."""
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
    """(n,) uint64, contiguous -> (n, 4) uint16, a view"""
    return hashes[:, None].view(np.uint16)


def _signs(frequencies: np.ndarray) -> np.ndarray:
    """Which of (n, 64) lie above their median, as (n,) uint64; sorting such short rows is faster than np.median."""
    median = np.sort(frequencies, axis=1)[:, 31:33].mean(1, keepdims=True)
    return np.packbits(frequencies > median, axis=1).view(">u8")[:, 0].astype(np.uint64)


@lru_cache(maxsize=256)
def area_weights(length: int, cells: int, start: float = 0.0, end: float = 1.0) -> np.ndarray:
    """The matrix (cells, length) that averages pixels over equal cells between `start` and `end`, in 0..1.

    A pixel on a border counts for both sides, in proportion.
    """
    edges = np.linspace(start * length, end * length, cells + 1)
    pixels = np.arange(length)
    overlap = np.minimum(edges[1:, None], pixels + 1) - np.maximum(edges[:-1, None], pixels)
    return (np.maximum(overlap, 0) * cells / ((end - start) * length)).astype(np.float32)


@lru_cache(maxsize=1)
def _cosines() -> np.ndarray:
    """Rows 1 to 8 of the cosine transform (DCT-II), (8, 32)."""
    phases = (np.arange(SIDE) + 0.5) * np.pi / SIDE
    return np.cos(np.arange(1, 9)[:, None] * phases).astype(np.float32)
