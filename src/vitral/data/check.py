"""`check`: problems of a data set: unreadable and unusual files, duplicates, copies of val or test images in train.

Duplicates are files with the same bytes. Near copies are found by `vitral.data.copies`, as in `vitral dedupe`.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from vitral.data import copies
from vitral.data.arrays import dim_note
from vitral.data.copies import MIN_SIDE, THRESHOLDS, UNREADABLE, ImageSignature, signature
from vitral.data.folders import EmptyClass, read_folder
from vitral.data.images import ImageError, ImageFacts, UnreadableImage, channels_of, describe, largest_deep_value
from vitral.data.sources import DataSet, Split, channels_of_images, open_data
from vitral.data.splits import HELD_OUT, similar_names, strata, stratified, too_few_classes
from vitral.data.workers import map_images
from vitral.display import SummaryRepr
from vitral.events import EventHandler, Progress, ignore_events


class CopyPair(NamedTuple):
    """Two images that show the same picture. Images are named by their keys."""

    first: str
    second: str
    score: float  # correlation of their thumbnails; 1 if the pixels are identical


class SuspectLabel(NamedTuple):
    """An image that looks more like another class than like its own, by a classifier that did not see it."""

    image: str
    label: str
    suggested: str  # the class that it looks like
    confidence: float  # probability of its label
    suggested_confidence: float
    score: float  # the most negative is the most suspicious
    likely: bool  # it looks as much like the suggested class as the images of that class do on average


@dataclasses.dataclass(frozen=True, repr=False)
class CheckReport(SummaryRepr):
    """The result of `check`. Images are named by their keys."""

    # Findings by what becomes of them: reading images takes care of the first, the user has to look at the others.
    HANDLED: ClassVar = ("rotated", "deep", "cmyk", "animated", "tiny", "grey", "transparent")
    NEEDS_YOU: ClassVar = (
        *("refusal", "empty", "similar", "unreadable", "dim", "contradictions"),
        *("leaks", "duplicates", "near", "suspects"),
    )

    source: str
    notes: tuple[str, ...]
    images: dict[str, int]  # per split
    classes: dict[str, dict[str, int]]  # images per split and class
    empty: tuple[str, ...]  # classes without an image in train
    similar: tuple[tuple[str, ...], ...]  # groups of class names that differ only in case or surrounding spaces
    imbalance: float  # the largest class of train over its smallest non-empty one
    formats: dict[str, int]
    widths: dict[str, int]  # smallest, median, largest
    heights: dict[str, int]
    unreadable: tuple[UnreadableImage, ...]
    rotated: tuple[str, ...]
    deep: tuple[str, ...]  # more than 8 bits per channel
    dim: str  # what 8 bits keep of grey images of 16 bits, if that is little
    cmyk: tuple[str, ...]
    animated: tuple[str, ...]
    tiny: tuple[str, ...]
    grey: int
    transparent: int
    duplicates: tuple[tuple[str, ...], ...]  # groups of identical files
    contradictions: tuple[tuple[str, ...], ...]  # groups of identical files with different labels
    near: tuple[CopyPair, ...]  # near copies, and files that differ but decode to the same pixels
    leaks: tuple[CopyPair, ...]  # (in train, in val or test); every training image with such a copy is in one
    held_out: int  # without a val or test split: images that training would hold out, into which `leaks` are counted
    not_compared: int  # tiny, of one colour or unreadable
    refusal: str = ""  # why `train` would refuse the data
    suspects: tuple[SuspectLabel, ...] = ()  # with a model: suspicious labels, the most suspicious first
    scored: int = 0  # images whose label was scored
    page: str = ""  # the file that shows them

    def summary(self) -> dict[str, str]:
        images = ", ".join(f"{count:,} in {name}" for name, count in self.images.items())
        findings = {"needs you": self.needs_you, "handled": self.handled}
        return {"images": images, "classes": f"{len(self.classes['train']):,}"} | {
            name: ", ".join(fields) or "nothing" for name, fields in findings.items()
        }

    @property
    def handled(self) -> tuple[str, ...]:
        """The findings that need no action: names of fields that are not empty."""
        return tuple(name for name in self.HANDLED if getattr(self, name))

    @property
    def needs_you(self) -> tuple[str, ...]:
        """The findings to look at: names of fields that are not empty."""
        return tuple(name for name in self.NEEDS_YOU if getattr(self, name))

    def as_dict(self) -> dict[str, Any]:
        """For JSON, with the thresholds."""
        rows = {name: [row._asdict() for row in getattr(self, name)] for name in ("near", "leaks", "suspects")}
        by_action = {"handled": self.handled, "needs_you": self.needs_you}
        return {**dataclasses.asdict(self), **rows, **by_action, "thresholds": THRESHOLDS}


class _Image(NamedTuple):
    """One image as a worker read it; without facts it is unreadable, for the reason given."""

    facts: ImageFacts | None
    reason: str
    signature: ImageSignature
    largest: int = 0  # `largest_deep_value`


def check(source: str | Path | DataSet, *, workers: int = 0, on_event: EventHandler = ignore_events) -> CheckReport:
    """Read every image of all splits once and report problems; events are `Progress`, "checking" and "comparing".

    Without a val or test split, leaks are those of the split that training makes by default.
    """
    data = source if isinstance(source, DataSet) else open_to_check(source)
    images: list[_Image] = []
    total = sum(map(len, data.splits))
    channels = channels_of_images(next(filter(len, data.splits), data.train))
    for chunk in map_images(partial(_read, channels=channels), data.splits, workers):
        images += chunk
        on_event(Progress("checking", len(images), total))
    return _report(data, images, on_event)


def open_to_check(source: str | Path) -> DataSet:
    """All images of a data set in the splits that it has; classes may be empty, or one."""
    try:
        return open_data(source, held_out=0)
    except EmptyClass as error:
        return dataclasses.replace(read_folder(error.folder, held_out=0, empty=True), source=str(source))


def _read(split: Split, index: int, channels: int) -> _Image:
    """`channels` are those of the model that would be trained, which leaves out images with others."""
    try:
        data = split.reader.read(index)
        facts = describe(data) if isinstance(data, bytes) else _pixel_facts(data)
        if channels_of(data, channels) != channels:
            raise ImageError(f"the file has {facts.channels} channels, not {channels}")
        largest = largest_deep_value(data) if isinstance(data, bytes) and facts.bits > 8 else 0
        return _Image(facts, "", signature(data), largest)
    except ImageError as error:
        return _Image(None, str(error), UNREADABLE)


def _pixel_facts(pixels: np.ndarray) -> ImageFacts:
    height, width, channels = pixels.shape
    return ImageFacts("pixels", width, height, "L" if channels == 1 else "RGB", 8, channels, False, 1)


def _report(data: DataSet, images: list[_Image], on_event: EventHandler) -> CheckReport:
    keys = [key for split in data.splits for key in split.keys]
    labels = [row.tobytes() for split in data.splits for row in split.labels]
    group = _groups(data)
    same_file = copies.identical([image.signature.file_digest or image.signature.pixel_digest for image in images])
    same_pixels = copies.identical([image.signature.pixel_digest for image in images])
    near = copies.near_pairs([image.signature for image in images], group, on_event)
    facts = [(key, image.facts) for key, image in zip(keys, images, strict=True) if image.facts]
    counts = data.train.counts()
    trainable = counts.any() or not data.splits[1:]  # else the source has a test split only
    notes = [*data.notes, too_few_classes(data.source, data.train) if trainable else ""]
    if (group == 0).sum() > copies.MAX_CROP_SEARCH:
        notes.append(f"Cropped copies within train are not searched for above {copies.MAX_CROP_SEARCH:,} images.")

    def select(condition: Callable[[ImageFacts], bool]) -> tuple[str, ...]:
        return tuple(key for key, fact in facts if condition(fact))

    def named(pairs: list[tuple[int, int, float]]) -> tuple[CopyPair, ...]:
        return tuple(CopyPair(keys[first], keys[second], score) for first, second, score in pairs)

    return CheckReport(
        source=data.source,
        notes=tuple(filter(None, notes)),
        images={split.name: len(split) for split in data.splits},
        classes={split.name: dict(zip(split.classes, split.counts().tolist(), strict=True)) for split in data.splits},
        empty=tuple(data.train.classes[index] for index in np.flatnonzero(counts == 0)) if trainable else (),
        similar=similar_names(data.train.classes),
        imbalance=float(counts.max() / counts[counts > 0].min()) if counts.any() else 0.0,
        formats=dict(Counter(fact.format for _, fact in facts).most_common()),
        widths=_range([fact.width for _, fact in facts]),
        heights=_range([fact.height for _, fact in facts]),
        unreadable=tuple(
            UnreadableImage(key, image.reason) for key, image in zip(keys, images, strict=True) if not image.facts
        ),
        rotated=select(lambda fact: fact.rotated),
        deep=select(lambda fact: fact.bits > 8),
        dim=dim_note(max((image.largest for image in images), default=0)),
        cmyk=select(lambda fact: fact.mode == "CMYK"),
        animated=select(lambda fact: fact.frames > 1),
        tiny=select(lambda fact: min(fact.width, fact.height) < MIN_SIDE),
        grey=len(select(lambda fact: fact.channels == 1 and fact.mode != "P")),
        transparent=len(select(lambda fact: fact.mode in ("RGBA", "LA", "PA"))),
        duplicates=tuple(tuple(keys[index] for index in members) for members in same_file),
        contradictions=tuple(
            tuple(keys[index] for index in members)
            for members in same_file
            if len({labels[index] for index in members}) > 1
        ),
        near=named(_reencoded(same_pixels, images) + near),
        leaks=named(_leaks(same_pixels, near, group > 0)),
        held_out=int((group > 0).sum()) if not data.splits[1:] else 0,
        not_compared=sum(not image.signature.comparable for image in images),
    )


def _groups(data: DataSet) -> np.ndarray:
    """(n,) int64: the split of each image, 0 for train; without another split, 1 for what training would hold out."""
    if not data.splits[1:]:
        return stratified(data.train.keys, strata(data.train), HELD_OUT).astype(np.int64)
    return np.repeat(np.arange(len(data.splits)), [len(split) for split in data.splits])


def _reencoded(same_pixels: list[list[int]], images: list[_Image]) -> list[tuple[int, int, float]]:
    """Pairs (index, index, 1) of different files with the same pixels: the first of each group with each other file."""
    pairs = []
    for members in same_pixels:
        files = list({images[index].signature.file_digest: index for index in reversed(members)}.values())[::-1]
        pairs += [(members[0], index, 1.0) for index in files if index != members[0]]
    return pairs


def _leaks(
    same_pixels: list[list[int]], near: list[tuple[int, int, float]], held_out: np.ndarray
) -> list[tuple[int, int, float]]:
    """Pairs (in train, in val or test, score), identical ones first, each image of an identical group at least once."""
    pairs: list[tuple[int, int, float]] = []
    for members in same_pixels:
        train, test = ([index for index in members if held_out[index] == side] for side in (False, True))
        if train and test:
            pairs += [(index, test[0], 1.0) for index in train] + [(train[0], index, 1.0) for index in test[1:]]
    return pairs + [pair for pair in near if held_out[pair[0]] != held_out[pair[1]]]


def _range(values: list[int]) -> dict[str, int]:
    if not values:
        return {}
    return {"smallest": min(values), "median": int(np.median(values)), "largest": max(values)}
