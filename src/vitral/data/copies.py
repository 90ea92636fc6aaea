"""Copy detection: finds re-encoded, resized, cropped and mirrored copies of an image. `check` and `dedupe` share it.

An image is reduced to two digests and a grey thumbnail (`ImageSignature`). Equal digests are exact copies. For the
rest, perceptual hashes of crops propose a few candidates (`CopyIndex`), and the correlation of the two thumbnails
decides. On photographs this finds re-encoded, resized and mirrored copies, and crops of up to 9 % per side; few rotated
copies are found. Images that are tiny or of one colour are compared by digest only: their hashes carry no information.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np

from vitral.data.hashes import MAX_BITS, HashTable, area_weights, hamming_distance, perceptual_hashes
from vitral.data.images import ImageError, decode, resize
from vitral.data.loader import iterate_in_workers
from vitral.data.splits import Split

MIN_CORRELATION = 0.8  # 540,000 pairs of different photographs with near hashes reach 0.69; copies start at 0.91
MIN_SIDE = 32  # pixels of the shorter side; smaller images are compared by digest only
MIN_STD = 2.0  # grey levels; flatter images are compared by digest only
MAX_CANDIDATES = 4  # images of one index that are compared with one query, those with the nearest hashes first
THRESHOLDS = {
    "min_correlation": MIN_CORRELATION,
    "hash_bits": MAX_BITS,
    "min_side": MIN_SIDE,
    "min_std": MIN_STD,
}

THUMBNAIL = 64  # pixels per side
CHUNK = 64  # images per work item
Spans = Sequence[tuple[float, float]]  # parts of a side, (start, end) in 0..1; two of them span a crop
ExactMethod = Literal["bytes", "pixels"]

_CELLS = 16  # per side; the crop steps of 3 % shift the image by at most half a cell
_AROUND = 2  # cells to each side whose mean is subtracted
_LUMINANCE = np.array([0.299, 0.587, 0.114], np.float32)

_STEP = 0.03
UNCROPPED: Spans = ((0.0, 1.0),)
# Up to 9 % cropped at either end of a side.
CROPS: Spans = tuple((left * _STEP, 1 - right * _STEP) for left in range(4) for right in range(4))
# 12 % to 42 % of a side cropped, as much of the height as of the width, at any position.
LARGE_CROPS: tuple[Spans, ...] = tuple(
    tuple((left * _STEP, 1 - (steps - left) * _STEP) for left in range(steps + 1)) for steps in range(4, 15, 2)
)
# Crops of a query whose hashes are looked up: the whole image, its central 82 %, and both half a step further in.
_QUERY_CROPS: tuple[Spans, ...] = tuple(((edge, 1 - edge),) for edge in (0.0, 0.015, 0.075, 0.09))


class ImageSignature(NamedTuple):
    """What is kept of an image to find its copies."""

    file_digest: bytes  # sha256 of the file; empty where the source stores pixels, or the image is unreadable
    pixel_digest: bytes  # sha256 of the decoded pixels; empty where the image is unreadable
    thumbnail: np.ndarray  # (64, 64) uint8, grey
    comparable: bool  # False where the image is unreadable, tiny or of one colour


UNREADABLE = ImageSignature(b"", b"", np.zeros((THUMBNAIL, THUMBNAIL), np.uint8), False)


def signature(data: bytes | np.ndarray) -> ImageSignature:
    """The signature of an encoded image, or of uint8 pixels (height, width, channels); raises ImageError."""
    pixels = decode(data) if isinstance(data, bytes) else data
    rgb = np.repeat(pixels, 3, axis=2) if pixels.shape[2] == 1 else pixels  # as `decode` returns a grey file
    pixel_digest = hashlib.sha256(f"{rgb.shape}".encode() + rgb.tobytes()).digest()
    thumbnail = _grey(resize(rgb, (THUMBNAIL, THUMBNAIL)))
    comparable = min(pixels.shape[:2]) >= MIN_SIDE and float(thumbnail.std()) >= MIN_STD
    file_digest = hashlib.sha256(data).digest() if isinstance(data, bytes) else b""
    return ImageSignature(file_digest, pixel_digest, thumbnail, comparable)


def signatures(split: Split, workers: int = 0) -> Iterator[list[ImageSignature]]:
    """The signatures of all images of a split in order, in lists of `CHUNK`."""
    return iterate_in_workers(_Chunks(split), workers)


def thumbnail_correlation(first: np.ndarray, second: np.ndarray, families: Sequence[Spans] = (CROPS,)) -> float:
    """The best correlation of one thumbnail with a crop of the other, mirrored or not.

    The local mean is subtracted first: many photographs are bright above and dark below, and correlate for that alone.

    Args:
        first: (64, 64).
        second: (64, 64).
        families: Crops to try; a crop is spanned by two spans of one family.

    Returns:
        The correlation, at most 1.
    """
    best = max(
        _best_correlation(whole, other, spans)
        for spans in families
        for whole, other in ((first, second), (second, first))
    )
    return min(best, 1.0)  # rounding may exceed 1


class CopyIndex:
    """The images of one split, indexed to find their copies; about 10 kB per image.

    Args:
        signatures: One per image.
        crops: Crops of each image whose hashes are stored. The lookup time grows with their number.
    """

    def __init__(self, signatures: Sequence[ImageSignature], crops: Spans = CROPS) -> None:
        self.signatures = signatures
        self._by_file: dict[bytes, int] = {}
        self._by_pixels: dict[bytes, int] = {}
        for index, image in enumerate(signatures):
            if image.file_digest:
                self._by_file.setdefault(image.file_digest, index)
            if image.pixel_digest:
                self._by_pixels.setdefault(image.pixel_digest, index)
        self._comparable = np.array([i for i, image in enumerate(signatures) if image.comparable], np.int64)
        hashes = [np.empty(0, np.uint64)]
        for start in range(0, len(self._comparable), CHUNK):
            chunk = [signatures[i].thumbnail for i in self._comparable[start : start + CHUNK]]
            hashes.append(perceptual_hashes(np.stack(chunk), crops).ravel())
        self._table = HashTable(np.concatenate(hashes))
        self._hashes_per_image = len(crops) ** 2

    def exact_copy(self, image: ImageSignature) -> tuple[int, ExactMethod] | None:
        """The index of the first image with the same bytes, else with the same pixels, and which of the two it was."""
        if (index := self._by_file.get(image.file_digest)) is not None:
            return index, "bytes"
        if (index := self._by_pixels.get(image.pixel_digest)) is not None:
            return index, "pixels"
        return None

    def near_copies(
        self, queries: Sequence[ImageSignature], *, first: int | None = None
    ) -> Iterator[tuple[int, int, float]]:
        """Pairs (query, index, correlation) of images that show the same picture.

        Args:
            queries: Signatures; those that are not comparable have no copies.
            first: Where the queries are the index's own images, starting with this one: pairs are then limited to an
                image and a later one.
        """
        rows = np.array([row for row, image in enumerate(queries) if image.comparable], np.int64)
        if not len(rows):
            return
        thumbnails = np.stack([queries[row].thumbnail for row in rows])
        after = rows + first if first is not None else np.full(len(rows), -1)
        for row, index in self._candidates(thumbnails, after).tolist():
            score = thumbnail_correlation(thumbnails[row], self.signatures[index].thumbnail)
            if score >= MIN_CORRELATION:
                yield int(rows[row]), index, score

    def _candidates(self, thumbnails: np.ndarray, after: np.ndarray) -> np.ndarray:
        """(m, 64, 64) and (m,) -> (p, 2): rows with the images after `after[row]` that may be copies.

        A crop of an indexed image matches one of that image's hashes. Where the query is the larger one, its central
        part is a crop of the indexed image. Both are looked up as they are and mirrored.
        """
        orientations = (thumbnails, thumbnails[:, :, ::-1])
        lookups = [perceptual_hashes(image, crop) for image in orientations for crop in _QUERY_CROPS]
        hashes = np.concatenate(lookups, axis=1).ravel()
        candidates = np.empty((3, 0), np.int64)  # row, index, bits
        for block in self._table.near(hashes, MAX_BITS):
            query, stored = block.T
            rows, indices = query // len(lookups), self._comparable[stored // self._hashes_per_image]
            bits = hamming_distance(hashes[query], self._table.hashes[stored])
            new = np.stack([rows, indices, bits])[:, indices > after[rows]]
            # Images without detail are near to many others: the number kept is limited in every step.
            candidates = _nearest_candidates(np.hstack([candidates, new]))
        return candidates[:2].T


def _nearest_candidates(candidates: np.ndarray) -> np.ndarray:
    """(3, n) of row, index and bits -> the same with each pair once and at most MAX_CANDIDATES per row."""
    candidates = candidates[:, np.lexsort(candidates[::-1])]
    rows, indices, _ = candidates
    first = np.ones(len(rows), bool)
    first[1:] = (rows[1:] != rows[:-1]) | (indices[1:] != indices[:-1])
    candidates = candidates[:, first]
    candidates = candidates[:, np.lexsort((candidates[2], candidates[0]))]
    rank = np.arange(candidates.shape[1]) - np.searchsorted(candidates[0], candidates[0])
    return candidates[:, rank < MAX_CANDIDATES]


@dataclass(frozen=True)
class _Chunks:
    """A map-style dataset of lists of signatures, for the workers."""

    split: Split

    def __len__(self) -> int:
        return -(-len(self.split) // CHUNK)

    def __getitem__(self, item: int) -> list[ImageSignature]:
        return [_read(self.split, i) for i in range(item * CHUNK, min((item + 1) * CHUNK, len(self.split)))]


def _read(split: Split, index: int) -> ImageSignature:
    try:
        return signature(split.reader.read(index))
    except ImageError:
        return UNREADABLE


def _grey(image: np.ndarray) -> np.ndarray:
    """uint8 (h, w, c) -> (h, w)"""
    grey = image @ _LUMINANCE if image.shape[2] == 3 else image.mean(2)
    return np.rint(grey).astype(np.uint8)


def _best_correlation(whole: np.ndarray, other: np.ndarray, spans: Spans) -> float:
    """The best correlation of the whole thumbnail, as it is or mirrored, with a crop of the other."""
    upright = _crops(whole, UNCROPPED)
    orientations = _details(np.concatenate([upright, upright[:, :, ::-1]]))
    return float((_details(_crops(other, spans)) @ orientations.T).max())


def _crops(thumbnail: np.ndarray, spans: Spans) -> np.ndarray:
    """(s, s) -> float32 (k * k, 16, 16), every crop that the spans span"""
    k = len(spans)
    cells = np.concatenate([area_weights(len(thumbnail), _CELLS, start, end) for start, end in spans])
    crops = (cells @ thumbnail.astype(np.float32) @ cells.T).reshape(k, _CELLS, k, _CELLS)
    return crops.transpose(0, 2, 1, 3).reshape(k * k, _CELLS, _CELLS)


def _details(images: np.ndarray) -> np.ndarray:
    """(n, 16, 16) -> (n, 256) of mean 0 and length 1, shorter where there is no detail except rounding"""
    local_mean = _local_mean()
    details = (images - local_mean @ images @ local_mean.T).reshape(len(images), -1)
    details -= details.mean(1, keepdims=True)
    return details / np.maximum(np.linalg.norm(details, axis=1, keepdims=True), 1.0)


@lru_cache(maxsize=1)
def _local_mean() -> np.ndarray:
    """The matrix (16, 16) that replaces a cell by the mean of those around it, fewer at the ends."""
    cells = np.arange(_CELLS)
    near = (np.abs(cells[:, None] - cells) <= _AROUND).astype(np.float32)
    return near / near.sum(1, keepdims=True)
