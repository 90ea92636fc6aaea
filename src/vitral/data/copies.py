"""Copy detection: finds re-encoded, resized, cropped and mirrored copies of an image. `check` and `dedupe` share it.

An image is reduced to two digests and a grey thumbnail (`ImageSignature`). Equal digests are exact copies. For the
rest, perceptual hashes of crops propose a few candidates (`CopyIndex`), and the correlation of the two thumbnails
decides, first of coarse cells and then of fine ones: photographs of different hands in front of one wall agree in the
coarse ones. On photographs this finds re-encoded, resized and mirrored copies, and crops of up to 9 % per side; few
rotated copies are found. Images that are tiny or of one colour are compared by digest only: their hashes carry no
information.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np

from vitral.data.images import ImageError, channels_of, decode
from vitral.data.pixels import resize
from vitral.data.splits import Split, content_bytes
from vitral.data.workers import CHUNK, map_images
from vitral.events import EventHandler, Progress, ignore_events

SIDE = 32  # pixels per side of what is hashed
_BANDS, _BAND_BITS = 4, 16
MAX_BITS = 2 * _BANDS - 1  # hashes that differ in at most this many bits have a band that differs in at most one
_BLOCK = 1 << 21  # candidate pairs in memory at a time
# Of coarse cells. 540,000 pairs of different photographs with near hashes reach 0.69, copies start at 0.91; but 1,114
# pairs of 2,062 photographs of hands, mostly of different people, reach 0.8 to 0.95; 8 of them have near fine cells.
MIN_COARSE = 0.8
MIN_CORRELATION = 0.88  # of fine cells
MIN_SIDE = 32  # pixels of the shorter side; smaller images are compared by digest only
MIN_STD = 2.0  # grey levels; flatter images are compared by digest only
MAX_CANDIDATES = 4  # images of one index that are compared with one query, those with the nearest hashes first
THRESHOLDS = {
    "min_correlation": MIN_CORRELATION,
    "min_coarse": MIN_COARSE,
    "hash_bits": MAX_BITS,
    "min_side": MIN_SIDE,
    "min_std": MIN_STD,
}

# Images of a train split up to which cropped copies within it are found too: that search is quadratic, and takes
# about a minute for so many. Copies of val and test images are always searched with crops.
MAX_CROP_SEARCH = 20_000

THUMBNAIL = 64  # pixels per side
Spans = Sequence[tuple[float, float]]  # parts of a side, (start, end) in 0..1; two of them span a crop
ExactMethod = Literal["bytes", "pixels"]

_CELLS = 16  # per side; the crop steps of 3 % shift the image by at most half a cell
_FINE_CELLS = 32
_FINE_STEPS = (0.015, 0.0075)  # by which the sides of the best crop are moved, one after the other
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

    file_digest: bytes  # sha256 of the file; empty if the source stores pixels, or the image is unreadable
    pixel_digest: bytes  # sha256 of the decoded pixels; empty if the image is unreadable
    thumbnail: np.ndarray  # (64, 64) uint8, grey
    comparable: bool  # False if the image is unreadable, tiny or of one colour


UNREADABLE = ImageSignature(b"", b"", np.zeros((THUMBNAIL, THUMBNAIL), np.uint8), False)


def signature(data: bytes | np.ndarray) -> ImageSignature:
    """The signature of an encoded image, or of uint8 pixels (height, width, channels); raises ImageError."""
    pixels = decode(data, channels_of(data)) if isinstance(data, bytes) else data
    rgb = np.repeat(pixels, 3, axis=2) if pixels.shape[2] == 1 else pixels  # as `decode` returns a grey file
    pixel_digest = hashlib.sha256(content_bytes(rgb)).digest()
    thumbnail = _grey(resize(rgb, (THUMBNAIL, THUMBNAIL)))
    comparable = min(pixels.shape[:2]) >= MIN_SIDE and float(thumbnail.std()) >= MIN_STD
    file_digest = hashlib.sha256(data).digest() if isinstance(data, bytes) else b""
    return ImageSignature(file_digest, pixel_digest, thumbnail, comparable)


def signatures(split: Split, workers: int = 0) -> Iterator[list[ImageSignature]]:
    """The signatures of all images of a split in order, in lists of `CHUNK`."""
    return map_images(_read, [split], workers)


def thumbnail_correlation(first: np.ndarray, second: np.ndarray, families: Sequence[Spans] = (CROPS,)) -> float:
    """The best correlation of one thumbnail with a crop of the other, mirrored or not.

    The local mean is subtracted first: many photographs are bright above and dark below, and correlate for that alone.
    Thumbnails are (64, 64), and a crop to try is spanned by two spans of one family. Where the correlation of coarse
    cells reaches MIN_COARSE, the result is that of fine cells, after the sides of the best crop were moved to fit.
    """
    orders = ((first, second), (second, first))
    crops = [_best_crop(*pair, spans, spans, _CELLS) for spans in families for pair in orders]
    best = max(crops, key=lambda crop: crop.score)
    if best.score >= MIN_COARSE:
        for step in _FINE_STEPS:
            rows, columns = _moved(best.rows, step), _moved(best.columns, step)
            best = _best_crop(best.whole, best.other, rows, columns, _FINE_CELLS)
    return min(best.score, 1.0)  # rounding may exceed 1


class CopyIndex:
    """The images of one split, indexed to find their copies; about 10 kB per image.

    The time of a lookup grows with the number of crops of each image whose hashes are stored.
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

        Where the queries are the index's own images, starting with `first`, pairs are an image and a later one.
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


def identical(digests: Sequence[Hashable]) -> list[list[int]]:
    """Groups of at least two indices with the same digest; an empty digest belongs to no group."""
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for index, digest in enumerate(digests):
        if digest:
            groups[digest].append(index)
    return [members for members in groups.values() if len(members) > 1]


def near_pairs(
    signatures: list[ImageSignature], group: np.ndarray, on_event: EventHandler = ignore_events
) -> list[tuple[int, int, float]]:
    """Near copies (index, index, score) whose pixels differ, the best first.

    Every image is compared with the later ones of its own group, an entry of `group` (n,), and with the images of later
    groups, as `dedupe` compares train with test; `on_event` receives `Progress("comparing", ...)`.
    """
    pairs, done = [], 0
    total = sum(int((group <= number).sum()) for number in range(int(group.max(initial=-1)) + 1))
    for number in range(int(group.max(initial=-1)) + 1):
        stored = np.flatnonzero(group == number)
        crops = UNCROPPED if number == 0 and len(stored) > MAX_CROP_SEARCH else CROPS
        index = CopyIndex([signatures[i] for i in stored], crops)
        for earlier in range(number + 1):
            queries = np.flatnonzero(group == earlier)
            for start in range(0, len(queries), CHUNK):
                chunk = queries[start : start + CHUNK]
                matches = index.near_copies([signatures[i] for i in chunk], first=start if earlier == number else None)
                pairs += [(int(chunk[row]), int(stored[match]), score) for row, match, score in matches]
                done += len(chunk)
                on_event(Progress("comparing", done, total))
    different = [pair for pair in pairs if signatures[pair[0]].pixel_digest != signatures[pair[1]].pixel_digest]
    return sorted(different, key=lambda pair: (-pair[2], *pair[:2]))


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


def _read(split: Split, index: int) -> ImageSignature:
    try:
        return signature(split.reader.read(index))
    except ImageError:
        return UNREADABLE


def _grey(image: np.ndarray) -> np.ndarray:
    """uint8 (h, w, c) -> (h, w)"""
    grey = image @ _LUMINANCE if image.shape[2] == 3 else image.mean(2)
    return np.rint(grey).astype(np.uint8)


class _Crop(NamedTuple):
    """A crop of `other`, and its correlation with the whole thumbnail."""

    score: float
    whole: np.ndarray
    other: np.ndarray
    rows: tuple[float, float]
    columns: tuple[float, float]


def _best_crop(whole: np.ndarray, other: np.ndarray, rows: Spans, columns: Spans, cells: int) -> _Crop:
    """The crop of the other thumbnail with the best correlation with the whole one, as it is or mirrored."""
    upright = _crops(whole, UNCROPPED, UNCROPPED, cells)
    orientations = _details(np.concatenate([upright, upright[:, :, ::-1]]))
    scores = (_details(_crops(other, rows, columns, cells)) @ orientations.T).max(1)
    best = int(scores.argmax())
    return _Crop(float(scores[best]), whole, other, rows[best // len(columns)], columns[best % len(columns)])


def _moved(span: tuple[float, float], step: float) -> Spans:
    """The span with either end moved by a step outwards, not at all, or inwards."""
    start, end = span
    moves = (-step, 0.0, step)
    return [(max(start + left, 0.0), min(end + right, 1.0)) for left in moves for right in moves]


def _crops(thumbnail: np.ndarray, rows: Spans, columns: Spans, cells: int) -> np.ndarray:
    """(s, s) -> float32 (rows * columns, cells, cells), every crop of a span of rows and one of columns"""
    down, across = (
        np.concatenate([area_weights(len(thumbnail), cells, start, end) for start, end in spans])
        for spans in (rows, columns)
    )
    crops = (down @ thumbnail.astype(np.float32) @ across.T).reshape(len(rows), cells, len(columns), cells)
    return crops.transpose(0, 2, 1, 3).reshape(-1, cells, cells)


def _details(images: np.ndarray) -> np.ndarray:
    """(n, c, c) -> (n, c * c) of mean 0 and length 1, shorter if there is no detail except rounding"""
    local_mean = _local_mean(images.shape[1])
    details = (images - local_mean @ images @ local_mean.T).reshape(len(images), -1)
    details -= details.mean(1, keepdims=True)
    return details / np.maximum(np.linalg.norm(details, axis=1, keepdims=True), 1.0)


@lru_cache(maxsize=2)
def _local_mean(cells: int) -> np.ndarray:
    """The matrix (cells, cells) that replaces a cell by the mean of those around it, fewer at the ends."""
    numbers = np.arange(cells)
    near = (np.abs(numbers[:, None] - numbers) <= _AROUND).astype(np.float32)
    return near / near.sum(1, keepdims=True)


def perceptual_hashes(thumbnails: np.ndarray, spans: Spans = UNCROPPED) -> np.ndarray:
    """pHash of every crop that the spans span: the signs of its 64 lowest frequencies about their median.

    The mean brightness (frequency 0, 0) is left out: 8 x 8 frequencies begin at 1 in both directions. Averaging a crop
    to 32 x 32 and the cosine transform are both linear, so the crops themselves are never computed. Grey thumbnails
    (n, side, side) and k spans -> (n, k * k) uint64.
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
        """All pairs of queries (m,) and stored hashes that differ in at most `max_bits` bits, 0 to 7, each once.

        Where four bands together differ in at most seven bits, one of them differs in at most one. So only hashes with
        an equal band, or a band with one bit flipped, are compared. Yields blocks (p, 2) int64 of indices.
        """
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
