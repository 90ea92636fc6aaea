"""What is kept of an image to find its copies: two digests, a grey thumbnail, and hashes of its parts.

A copy may be mirrored and may be cut by up to 9 % at any side. `Gallery.propose` says which images it might be a copy
of, by hashes alone; `likeness` looks at a pair of thumbnails, and decides.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from vitral.data.check import FLAT, TINY
from vitral.data.hashes import FARTHEST, HashTable, averages, distance, phash_of_parts
from vitral.data.images import ImageError, decode, resize
from vitral.data.loader import iterate_in_workers
from vitral.data.splits import Split

THUMBNAIL = 64
CHUNK = 64  # images that a worker looks at before it answers
MOST_PROPOSED = 4  # images of one split for one copy, the nearest first
Stretches = Sequence[tuple[float, float]]  # parts of a side, (start, end) in 0..1

_CELLS = 16  # of a side; the steps of 3 % below move a picture by half a cell at most
_AROUND = 2  # cells to each side whose mean is subtracted
_LUMINANCE = np.array([0.299, 0.587, 0.114], np.float32)

_STEP = 0.03
_WHOLE: Stretches = ((0.0, 1.0),)
# Up to 9 % cut off at either end of a side.
CUT: Stretches = tuple((left * _STEP, 1 - right * _STEP) for left in range(4) for right in range(4))
# 12 % to 42 % of a side cut off, as much of the height as of the width, wherever the rest lies.
CUT_FAR: tuple[Stretches, ...] = tuple(
    tuple((left * _STEP, 1 - (steps - left) * _STEP) for left in range(steps + 1)) for steps in range(4, 15, 2)
)
# What a copy is sought by: itself, its inner part of 82 %, and both again half a step inwards, between CUT's steps.
_SOUGHT: tuple[Stretches, ...] = tuple(((edge, 1 - edge),) for edge in (0.0, 0.015, 0.075, 0.09))


class ThumbnailBatch(NamedTuple):
    """Some images as a worker saw them. An image without digests could not be read."""

    files: list[bytes]  # sha256 of the stored bytes, empty where pixels are stored
    pixels: list[bytes]  # sha256 of what they decode to
    thumbnails: np.ndarray  # (n, 64, 64) uint8
    compared: np.ndarray  # (n,) bool: False where the picture is too small or of one colour, and looks like any other


def looks(split: Split, workers: int = 0) -> Iterator[ThumbnailBatch]:
    """All images of a split in order, a few at a time."""
    return iterate_in_workers(_Chunks(split), workers)


def likeness(first: np.ndarray, second: np.ndarray, families: Sequence[Stretches]) -> float:
    """The correlation of the details of two thumbnails (64, 64), at best 1, where one may be mirrored and may be a part
    of the other: a rectangle that two stretches of one family span.

    Details are what remains without the mean of the surroundings: many photographs are light above and dark below, and
    correlate for that alone.
    """
    best = max(
        _best(whole, other, stretches) for stretches in families for whole, other in ((first, second), (second, first))
    )
    return min(best, 1.0)  # but for rounding it is


class Gallery:
    """Images of several splits, one after the other, as their copies are sought; about 10 kB each."""

    def __init__(self, splits: Sequence[Split], workers: int, on_progress: Callable[[int], None]) -> None:
        self.keys = [key for split in splits for key in split.keys]
        self.split = np.repeat(
            np.arange(len(splits)), [len(split) for split in splits]
        )  # (n,) int64, whose image it is
        self.files: list[dict[bytes, int]] = [{} for _ in splits]  # in each split, the image with this digest
        self.pixels: list[dict[bytes, int]] = [{} for _ in splits]
        self.thumbnails = np.empty((len(self.keys), THUMBNAIL, THUMBNAIL), np.uint8)
        self.compared = np.zeros(len(self.keys), bool)
        self.unreadable = 0
        hashes, start = [], 0
        for number, split in enumerate(splits):
            for seen in looks(split, workers):
                hashes.append(phash_of_parts(seen.thumbnails[seen.compared], CUT).ravel())
                self._take(seen, number, start)
                start += len(seen.compared)
                on_progress(len(seen.compared))
        self._table = HashTable(np.concatenate(hashes))
        self._places = np.flatnonzero(self.compared)

    def propose(self, thumbnails: np.ndarray) -> np.ndarray:
        """(m, 64, 64) -> (p, 2) int64, rows of these beside places of images that they might be copies of.

        A copy that was cut out of an image is found among the image's parts. Of one that an image was cut out of, the
        inner part is a part of the image too. Both are sought as they are and as seen in a mirror.
        """
        mirrored = thumbnails[:, :, ::-1]
        ways = [phash_of_parts(seen, part) for seen in (thumbnails, mirrored) for part in _SOUGHT]
        wanted = np.concatenate(ways, axis=1).ravel()
        few = np.empty((3, 0), np.int64)
        for block in self._table.near(wanted, FARTHEST):
            asked, stored = block.T
            bits = distance(wanted[asked], self._table.hashes[stored])
            # Pictures without contents are near to many: what is kept of them is bounded at each step.
            places = self._places[stored // len(CUT) ** 2]
            few = self._nearest(np.hstack([few, [asked // len(ways), places, bits]]))
        return few[:2].T

    def _take(self, seen: ThumbnailBatch, number: int, start: int) -> None:
        stop = start + len(seen.compared)
        self.thumbnails[start:stop], self.compared[start:stop] = seen.thumbnails, seen.compared
        self.unreadable += seen.pixels.count(b"")
        for known, digests in ((self.files, seen.files), (self.pixels, seen.pixels)):
            for place, digest in zip(range(start, stop), digests, strict=True):
                if digest:
                    known[number].setdefault(digest, place)

    def _nearest(self, found: np.ndarray) -> np.ndarray:
        """(3, k) of row, place and bits -> a few for each row and split, each place once"""
        found = found[:, np.lexsort(found[::-1])]
        rows, places, _ = found
        once = np.ones(len(rows), bool)
        once[1:] = (rows[1:] != rows[:-1]) | (places[1:] != places[:-1])
        found = found[:, once]
        splits = self.split[found[1]]
        order = np.lexsort((found[2], splits, found[0]))
        found, group = found[:, order], found[0, order] * (int(self.split.max()) + 1) + splits[order]
        rank = np.arange(len(group)) - np.searchsorted(group, group)
        return found[:, rank < MOST_PROPOSED]


@dataclass(frozen=True)
class _Chunks:
    """A map-style data set for the workers."""

    split: Split

    def __len__(self) -> int:
        return -(-len(self.split) // CHUNK)

    def __getitem__(self, item: int) -> ThumbnailBatch:
        rows = range(item * CHUNK, min((item + 1) * CHUNK, len(self.split)))
        files, pixels, thumbnails, compared = zip(*(_look(self.split, row) for row in rows), strict=True)
        return ThumbnailBatch(list(files), list(pixels), np.stack(thumbnails), np.array(compared, bool))


def _look(split: Split, index: int) -> tuple[bytes, bytes, np.ndarray, bool]:
    try:
        data = split.reader.read(index)
        pixels = decode(data) if isinstance(data, bytes) else data
    except ImageError:
        return b"", b"", np.zeros((THUMBNAIL, THUMBNAIL), np.uint8), False
    colour = np.repeat(pixels, 3, axis=2) if pixels.shape[2] == 1 else pixels  # as `decode` gives a grey file
    digest = hashlib.sha256(f"{colour.shape}".encode() + colour.tobytes()).digest()
    small = _grey(resize(colour, (THUMBNAIL, THUMBNAIL)))
    compared = min(pixels.shape[:2]) >= TINY and float(small.std()) >= FLAT
    return hashlib.sha256(data).digest() if isinstance(data, bytes) else b"", digest, small, compared


def _grey(image: np.ndarray) -> np.ndarray:
    """uint8 (h, w, c) -> (h, w)"""
    grey = image @ _LUMINANCE if image.shape[2] == 3 else image.mean(2)
    return np.rint(grey).astype(np.uint8)


def _best(whole: np.ndarray, other: np.ndarray, stretches: Stretches) -> float:
    """The best correlation of the whole picture, as it is or mirrored, with a part of the other."""
    upright = _parts(whole, _WHOLE)
    ways = _details(np.concatenate([upright, upright[:, :, ::-1]]))
    return float((_details(_parts(other, stretches)) @ ways.T).max())


def _parts(thumbnail: np.ndarray, stretches: Stretches) -> np.ndarray:
    """(s, s) -> float32 (k * k, 16, 16), every rectangle that the stretches span"""
    k = len(stretches)
    cells = np.concatenate([averages(len(thumbnail), _CELLS, start, end) for start, end in stretches])
    parts = (cells @ thumbnail.astype(np.float32) @ cells.T).reshape(k, _CELLS, k, _CELLS)
    return parts.transpose(0, 2, 1, 3).reshape(k * k, _CELLS, _CELLS)


def _details(pictures: np.ndarray) -> np.ndarray:
    """(n, 16, 16) -> (n, 256) of mean 0 and length 1, shorter where there is no detail but rounding"""
    around = _surroundings()
    details = (pictures - around @ pictures @ around.T).reshape(len(pictures), -1)
    details -= details.mean(1, keepdims=True)
    return details / np.maximum(np.linalg.norm(details, axis=1, keepdims=True), 1.0)


@lru_cache(maxsize=1)
def _surroundings() -> np.ndarray:
    """The matrix (16, 16) that replaces a cell by the mean of those around it, fewer at the ends."""
    places = np.arange(_CELLS)
    near = (np.abs(places[:, None] - places) <= _AROUND).astype(np.float32)
    return near / near.sum(1, keepdims=True)
