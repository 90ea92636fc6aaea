"""What is wrong with this data set: files that cannot be read, odd kinds, duplicates, leaks from train into test.

Duplicates are files with the same bytes. Near-duplicates are pictures whose perceptual hashes differ in at most
NEAR_BITS of 64 and whose second hash agrees (at most CONFIRM_BITS). On photographs this finds copies that were encoded
again or made smaller (all of 400), a 1 % border cut off (98 %) or a 2 % border (80 %), hardly any with a 5 % border cut
off, and none that is mirrored or turned. Pictures under 32 pixels or nearly of one colour are not compared: their
hashes say nothing.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitral.data.folders import EmptyClass, read_folder
from vitral.data.hashes import SIDE, dhash, distance, near_pairs, phash
from vitral.data.images import ImageError, ImageFacts, decode, describe, resize
from vitral.data.loader import iterate_in_workers
from vitral.data.sources import DataSet, Split, open_data
from vitral.data.splits import HELD_OUT, strata, stratified, too_few_classes

NEAR_BITS = 6  # of 1.6 million pairs of different photographs none is nearer than 12
CONFIRM_BITS = 12
TINY = 32  # pixels of the shorter side
FLAT = 2.0  # grey levels of standard deviation
MOST_PAIRS = 100_000
_CHUNK = 16


class Pair(NamedTuple):
    """Two images that look alike, and in how many of 64 bits they differ; identical files have -1."""

    first: str
    second: str
    bits: int


@dataclasses.dataclass(frozen=True)
class Report:
    """What `check` found. Images are named by their keys."""

    source: str
    notes: tuple[str, ...]
    images: dict[str, int]  # of each split
    classes: dict[str, dict[str, int]]  # images of each class in each split
    empty: tuple[str, ...]  # classes without an image in train
    imbalance: float  # the largest class of train over its smallest that has images
    formats: dict[str, int]
    widths: dict[str, int]  # smallest, median, largest
    heights: dict[str, int]
    unreadable: dict[str, str]  # with the reason
    rotated: tuple[str, ...]
    deep: tuple[str, ...]  # more than 8 bits a channel
    cmyk: tuple[str, ...]
    animated: tuple[str, ...]
    tiny: tuple[str, ...]
    grey: int
    transparent: int
    duplicates: tuple[tuple[str, ...], ...]  # groups of identical files
    contradictions: tuple[tuple[str, ...], ...]  # groups of identical files with different labels
    near: tuple[Pair, ...]
    leaks: tuple[Pair, ...]  # (in train, in test), identical or near; each image of either side in at least one
    held_out: int  # images that training would test on by itself, where there is no test split: `leaks` are into these
    not_compared: int  # tiny, flat or unreadable
    near_is_complete: bool  # False where more than MOST_PAIRS pairs were found, and the search ended there

    def as_dict(self) -> dict[str, Any]:
        """For JSON, with the thresholds."""
        limits = {"near_bits": NEAR_BITS, "confirm_bits": CONFIRM_BITS, "tiny_pixels": TINY, "flat_levels": FLAT}
        pairs = {name: [pair._asdict() for pair in getattr(self, name)] for name in ("near", "leaks")}
        return {**dataclasses.asdict(self), **pairs, "thresholds": limits}


class _Image(NamedTuple):
    """One image as a worker saw it; the hashes are of use only where it is compared."""

    facts: ImageFacts | None
    reason: str
    digest: bytes
    phash: int
    dhash: int
    compared: bool


def check(
    source: str | Path | DataSet,
    *,
    workers: int = 0,
    on_progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Read every image of a source once. `on_progress` hears how many of how many are done.

    A source without a test split is looked at whole; its leaks are those of the split that training makes by default.
    """
    data = source if isinstance(source, DataSet) else _opened(source)
    splits = list(data.splits)
    seen: list[_Image] = []
    total = sum(map(len, splits))
    for chunk in iterate_in_workers(_Chunks(splits), workers):
        seen += chunk
        if on_progress:
            on_progress(len(seen), total)
    return _report(data, splits, seen)


def _opened(source: str | Path) -> DataSet:
    """All that there is, classes without images too."""
    try:
        return open_data(source, held_out=0)
    except EmptyClass as error:
        return dataclasses.replace(read_folder(error.folder, seed=0, held_out=0, empty=True), source=str(source))


@dataclasses.dataclass(frozen=True)
class _Chunks:
    """A map-style data set for the workers: a few images an item, as asking costs more than a small answer."""

    splits: list[Split]

    def __len__(self) -> int:
        return -(-sum(map(len, self.splits)) // _CHUNK)

    def __getitem__(self, item: int) -> list[_Image]:
        rows = range(item * _CHUNK, min((item + 1) * _CHUNK, sum(map(len, self.splits))))
        images, small = zip(*(_look(*self._place(row)) for row in rows), strict=True)
        hashes = zip(phash(np.stack(small)).tolist(), dhash(np.stack(small)).tolist(), strict=True)
        return [image._replace(phash=one, dhash=other) for image, (one, other) in zip(images, hashes, strict=True)]

    def _place(self, row: int) -> tuple[Split, int]:
        for split in self.splits:
            if row < len(split):
                return split, row
            row -= len(split)
        raise IndexError(row)


def _look(split: Split, index: int) -> tuple[_Image, np.ndarray]:
    """An image without its hashes, and the (32, 32) to hash."""
    digest = b""
    try:
        data = split.reader.read(index)
        digest = hashlib.sha256(data if isinstance(data, bytes) else f"{data.shape}".encode() + data.tobytes()).digest()
        facts, grey = _seen_pixels(data) if isinstance(data, np.ndarray) else (describe(data), decode(data, 1))
    except ImageError as error:
        return _Image(None, str(error), digest, 0, 0, False), np.zeros((SIDE, SIDE), np.uint8)
    small = resize(grey, (SIDE, SIDE))[:, :, 0]
    compared = min(facts.width, facts.height) >= TINY and float(small.std()) >= FLAT
    return _Image(facts, "", digest, 0, 0, compared), small


def _seen_pixels(data: np.ndarray) -> tuple[ImageFacts, np.ndarray]:
    height, width, channels = data.shape
    facts = ImageFacts("pixels", width, height, "L" if channels == 1 else "RGB", 8, channels, False, 1)
    return facts, data.mean(2, keepdims=True).astype(np.uint8)


def _report(data: DataSet, splits: list[Split], seen: list[_Image]) -> Report:
    keys = [key for split in splits for key in split.keys]
    labels = [row.tobytes() for split in splits for row in split.labels]
    tested = _tested(data)
    groups = _identical(seen)
    alike, complete = _near(seen, groups)
    facts = [(key, image.facts) for key, image in zip(keys, seen, strict=True) if image.facts]
    counts = data.train.counts()
    learns = counts.any() or not data.splits[1:]  # else the data is for testing only
    lacking = too_few_classes(data.source, data.train) if learns else ""

    def those(kind: Callable[[ImageFacts], bool]) -> tuple[str, ...]:
        return tuple(key for key, found in facts if kind(found))

    return Report(
        source=data.source,
        notes=(*data.notes, lacking) if lacking else data.notes,
        images={split.name: len(split) for split in splits},
        classes={split.name: dict(zip(split.classes, split.counts().tolist(), strict=True)) for split in splits},
        empty=tuple(data.train.classes[place] for place in np.flatnonzero(counts == 0)) if learns else (),
        imbalance=float(counts.max() / counts[counts > 0].min()) if counts.any() else 0.0,
        formats=dict(Counter(found.format for _, found in facts).most_common()),
        widths=_spread([found.width for _, found in facts]),
        heights=_spread([found.height for _, found in facts]),
        unreadable={key: image.reason for key, image in zip(keys, seen, strict=True) if not image.facts},
        rotated=those(lambda found: found.rotated),
        deep=those(lambda found: found.bits > 8),
        cmyk=those(lambda found: found.mode == "CMYK"),
        animated=those(lambda found: found.frames > 1),
        tiny=those(lambda found: min(found.width, found.height) < TINY),
        grey=len(those(lambda found: found.channels == 1 and found.mode != "P")),
        transparent=len(those(lambda found: found.mode in ("RGBA", "LA", "PA"))),
        duplicates=tuple(tuple(keys[place] for place in group) for group in groups),
        contradictions=tuple(
            tuple(keys[place] for place in group) for group in groups if len({labels[place] for place in group}) > 1
        ),
        near=tuple(Pair(keys[first], keys[second], bits) for first, second, bits in alike),
        leaks=tuple(Pair(keys[first], keys[second], bits) for first, second, bits in _crossing(groups, alike, tested)),
        held_out=int(tested.sum()) if not data.splits[1:] else 0,
        not_compared=sum(not image.compared for image in seen),
        near_is_complete=complete,
    )


def _identical(seen: list[_Image]) -> list[list[int]]:
    groups: dict[bytes, list[int]] = defaultdict(list)
    for place, image in enumerate(seen):
        if image.facts:  # empty files are all alike, and unreadable anyway
            groups[image.digest].append(place)
    return [group for group in groups.values() if len(group) > 1]


def _tested(data: DataSet) -> np.ndarray:
    """Which images of all splits, train first, are held out, (n,) bool; without a split those that training would hold
    out."""
    if not data.splits[1:]:
        return stratified(data.train.keys, strata(data.train), HELD_OUT, seed=0)
    return np.arange(sum(map(len, data.splits))) >= len(data.train)


def _crossing(
    groups: list[list[int]], alike: list[tuple[int, int, int]], tested: np.ndarray
) -> list[tuple[int, int, int]]:
    """Pairs as (place in train, place in test, bits) in which every image is that has a copy on the other side."""
    pairs: list[tuple[int, int, int]] = []
    for group in groups:
        train, test = ([place for place in group if tested[place] == side] for side in (False, True))
        if train and test:
            pairs += [(place, test[0], -1) for place in train] + [(train[0], place, -1) for place in test[1:]]
    for one, other, bits in alike:
        if tested[one] != tested[other]:
            pairs.append((other, one, bits) if tested[one] else (one, other, bits))
    return pairs


def _near(seen: list[_Image], groups: list[list[int]]) -> tuple[list[tuple[int, int, int]], bool]:
    """Near pairs as (place, place, bits) with the nearest first; identical files are told elsewhere."""
    group_of = {place: number for number, group in enumerate(groups) for place in group}
    places = np.array([place for place, image in enumerate(seen) if image.compared], np.int64)
    first, second = (
        np.array([getattr(seen[place], name) for place in places], np.uint64) for name in ("phash", "dhash")
    )
    found: list[tuple[int, int, int]] = []
    for block in near_pairs(first, NEAR_BITS):
        left, right = block.T
        block = block[distance(second[left], second[right]) <= CONFIRM_BITS]
        bits = distance(first[block[:, 0]], first[block[:, 1]]).tolist()
        for (one, other), apart in zip(places[block].tolist(), bits, strict=True):
            if group_of.get(one, -1) != group_of.get(other, -2):
                found.append((one, other, apart))
        if len(found) > MOST_PAIRS:
            return sorted(found, key=lambda pair: pair[2])[:MOST_PAIRS], False
    return sorted(found, key=lambda pair: (pair[2], pair[0], pair[1])), True


def _spread(values: list[int]) -> dict[str, int]:
    if not values:
        return {}
    return {"smallest": min(values), "median": int(np.median(values)), "largest": max(values)}
