"""`dedupe`: training images that are copies of test images.

The paper removes near-duplicates of all test images from its largest training set, "following BiT"; neither paper
describes the detector (section 4.1). This one is `vitral.data.copies`. With a model, the test image with the most
similar features is a further candidate, and crops of up to 42 % of a side are found. Thumbnails decide in either case:
a weak model costs time, but adds no false pairs.

Test images are kept in memory, about 10 kB each; training images are streamed. The work per training image does not
depend on their number.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitral.atomic import atomic_write
from vitral.data import copies
from vitral.data.copies import CopyIndex, ImageSignature, signatures
from vitral.data.neighbours import nearest, unit_vectors
from vitral.data.sources import Split
from vitral.errors import UserError
from vitral.evaluation.predict import Preprocessing, embed_split
from vitral.events import Event, EventHandler, Progress, ignore_events
from vitral.models.build import Model

MIN_COSINE = 0.5  # similarity of features from which a pair is a candidate
FEATURE_BLOCK = 4096  # training images whose features are in memory at a time

CopyKind = Literal["exact", "near"]
CopyMethod = Literal["bytes", "pixels", "hash", "features"]


class TrainTestCopy(NamedTuple):
    """A training image and the test image that it is a copy of."""

    train: str
    test: str
    split: int  # index of the test split
    kind: CopyKind
    method: CopyMethod  # how the pair was found
    score: float  # correlation of the thumbnails; 1 if the images are identical


@dataclass(frozen=True)
class DedupeResult:
    """The result of `find_duplicates`, in the order of the training images."""

    pairs: tuple[TrainTestCopy, ...]  # at most one per training image and test split
    train: int  # images
    against: tuple[int, ...]  # images per test split
    unreadable: int
    not_compared: int  # tiny or of one colour: compared by digest only
    unreadable_tests: int = 0  # of the unreadable ones, and
    not_compared_tests: int = 0  # of those not compared, test images

    @property
    def keys(self) -> list[str]:
        """The training images to exclude, each once."""
        return list(dict.fromkeys(pair.train for pair in self.pairs))

    def to_json(self) -> str:
        """As text that `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> DedupeResult:
        """The result that `to_json` wrote."""
        values = json.loads(text)
        pairs = tuple(TrainTestCopy(*pair) for pair in values.pop("pairs"))
        return cls(pairs=pairs, against=tuple(values.pop("against")), **values)

    def as_dict(self) -> dict[str, Any]:
        """For JSON, with the thresholds."""
        thresholds = {**copies.THRESHOLDS, "min_cosine": MIN_COSINE}
        return {**asdict(self), "pairs": [pair._asdict() for pair in self.pairs], "thresholds": thresholds}


def find_duplicates(
    train: Split,
    against: Sequence[Split],
    *,
    model: Model | None = None,
    preprocess: Preprocessing | None = None,
    batch: int = 64,
    device: torch.device | str = "cpu",
    workers: int = 0,
    on_event: EventHandler = ignore_events,
) -> DedupeResult:
    """Find the images of `train` that are copies of a test image.

    A model, which comes with its preprocessing, adds the search by features. `on_event` receives
    `Progress("comparing", ...)`; with a model, every image counts twice.
    """
    if not any(map(len, against)):
        raise UserError("there is no test image to compare with: name at least one test set.")
    if not len(train):
        raise UserError("there is no training image to look for copies in: name a data set with a train split.")
    if any(len(split) == len(train) and split.stamp() == train.stamp() for split in against):
        raise UserError(
            "the training images and the test images are the same files: `vitral check` finds copies inside one data "
            "set, `vitral dedupe` those between two."
        )
    images = len(train) + sum(map(len, against))
    counter = _Counter(images if model is None else 2 * images, on_event)
    indexes = [CopyIndex(_read_signatures(split, workers, counter)) for split in against]
    search = _Search(train, against, indexes, workers)
    for block in signatures(train, workers):
        search.add_block(block)
        counter.advance(len(block))
    if model is not None and preprocess is not None:

        def embed(split: Split) -> Tensor:
            embeddings = embed_split(
                model, split, preprocess, batch=batch, device=device, workers=workers, on_event=counter.forward
            )
            counter.advance(len(split))
            # Zero, and so similar to nothing, if the image is unreadable.
            return unit_vectors(embeddings.features * embeddings.valid[:, None]).to(device)

        search.by_features(embed)
    return search.result()


def merge_duplicates(parts: Sequence[DedupeResult]) -> DedupeResult:
    """The result for all training images from those of consecutive parts, each compared with the same test images."""
    first, others = parts[0], parts[1:]
    return replace(
        first,
        pairs=tuple(pair for part in parts for pair in part.pairs),
        train=sum(part.train for part in parts),
        unreadable=first.unreadable + sum(part.unreadable - part.unreadable_tests for part in others),
        not_compared=first.not_compared + sum(part.not_compared - part.not_compared_tests for part in others),
    )


def write_exclusions(path: Path, result: DedupeResult) -> None:
    """Write the training images to exclude, one per line, each followed by comments with its copies; UTF-8, atomic."""
    lines = [f"# {len(result.keys)} of {result.train} training images are copies of test images"]
    copies: dict[str, list[TrainTestCopy]] = {}
    for pair in result.pairs:
        copies.setdefault(pair.train, []).append(pair)
    for key, pairs in copies.items():
        lines.append(_escape(key))
        lines += [f"#   {pair.kind} ({pair.method}, {pair.score:.3f}): {_escape(pair.test)}" for pair in pairs]
    with atomic_write(path) as temporary:
        # File names need not be valid UTF-8.
        temporary.write_bytes("".join(f"{line}\n" for line in lines).encode("utf-8", "surrogateescape"))


def read_exclusions(path: Path) -> list[str]:
    """The training images of an exclusion list; empty lines and lines that begin with # are skipped."""
    try:
        text = path.read_bytes().decode("utf-8-sig", "surrogateescape")
    except OSError as error:
        raise UserError(f"{path} cannot be read: name a list that `vitral dedupe` wrote.") from error
    lines = (line.removesuffix("\r") for line in text.split("\n"))
    return [_unescape(line, f"{path}, line {n}") for n, line in enumerate(lines, 1) if line and line[0] != "#"]


def _escape(key: str) -> str:
    """A key as a single line that is not a comment."""
    line = key.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    return "\\" + line if line.startswith("#") else line


def _unescape(line: str, position: str) -> str:
    characters = {"\\": "\\", "n": "\n", "r": "\r", "#": "#"}

    def replacement(match: re.Match[str]) -> str:
        if match[1] not in characters:
            raise UserError(f"{position}: a backslash is written \\\\ in a list of images.")
        return characters[match[1]]

    return re.sub(r"\\(.?)", replacement, line)


@dataclass
class _Counter:
    """Counts images for `on_event` over all stages."""

    total: int
    on_event: EventHandler
    done: int = 0

    def advance(self, images: int) -> None:
        self.done += images
        self.on_event(Progress("comparing", self.done, self.total))

    def forward(self, event: Event) -> None:
        """Progress within a split that `advance` counts as a whole later."""
        if isinstance(event, Progress):
            self.on_event(Progress("comparing", self.done + event.done, self.total))


def _read_signatures(split: Split, workers: int, counter: _Counter) -> list[ImageSignature]:
    images: list[ImageSignature] = []
    for block in signatures(split, workers):
        images += block
        counter.advance(len(block))
    return images


class _Search:
    """The copies found so far, by index in train and number of the test split."""

    def __init__(self, train: Split, against: Sequence[Split], indexes: Sequence[CopyIndex], workers: int) -> None:
        self.train, self.against, self.indexes, self.workers = train, against, indexes, workers
        self.pairs: dict[tuple[int, int], TrainTestCopy] = {}
        self.done = 0  # training images
        tested = [image for index in indexes for image in index.signatures]
        self.unreadable = self.unreadable_tests = sum(not image.pixel_digest for image in tested)
        self.comparable = sum(image.comparable for image in tested)
        self.not_compared_tests = len(tested) - self.unreadable - self.comparable

    def add_block(self, block: list[ImageSignature]) -> None:
        """Compare the next images of train by digest and by hash."""
        for number, index in enumerate(self.indexes):
            for row, match, score in index.near_copies(block):
                self._add(self.done + row, number, match, "near", "hash", score)
            for row, image in enumerate(block):
                if (copy := index.exact_copy(image)) is not None:
                    self._add(self.done + row, number, copy[0], "exact", copy[1], 1.0)
        self.done += len(block)
        self.unreadable += sum(not image.pixel_digest for image in block)
        self.comparable += sum(image.comparable for image in block)

    def by_features(self, embed: Callable[[Split], Tensor]) -> None:
        """Compare each image of train with the one of each test split that is most similar; `embed` gives (n, d)."""
        tests = [embed(split) if len(split) else None for split in self.against]
        for start in range(0, len(self.train), FEATURE_BLOCK):
            rows = np.arange(start, min(start + FEATURE_BLOCK, len(self.train)))
            features = embed(self.train.select(rows))
            for number, test in enumerate(tests):
                if test is None:
                    continue
                cosines, matches = (tensor[:, 0].cpu().numpy() for tensor in nearest(features, test, 1))
                chosen = [
                    row for row in np.flatnonzero(cosines >= MIN_COSINE) if (start + row, number) not in self.pairs
                ]
                self._compare(rows[chosen], number, matches[chosen])

    def result(self) -> DedupeResult:
        images = self.done + sum(len(index.signatures) for index in self.indexes)
        return DedupeResult(
            pairs=tuple(self.pairs[position] for position in sorted(self.pairs)),
            train=len(self.train),
            against=tuple(map(len, self.against)),
            unreadable=self.unreadable,
            not_compared=images - self.unreadable - self.comparable,
            unreadable_tests=self.unreadable_tests,
            not_compared_tests=self.not_compared_tests,
        )

    def _compare(self, rows: np.ndarray, number: int, matches: np.ndarray) -> None:
        """Compare the thumbnails of candidates; those of training images were not kept, and are computed again."""
        candidates = zip(rows.tolist(), matches.tolist(), strict=True)
        for block in signatures(self.train.select(rows), self.workers):
            for image in block:
                row, match = next(candidates)
                test = self.indexes[number].signatures[match]
                if not (image.comparable and test.comparable):
                    continue
                families = (copies.CROPS, *copies.LARGE_CROPS)
                score = copies.thumbnail_correlation(image.thumbnail, test.thumbnail, families)
                if score >= copies.MIN_CORRELATION:
                    self._add(row, number, match, "near", "features", score)

    def _add(self, row: int, number: int, match: int, kind: CopyKind, method: CopyMethod, score: float) -> None:
        """Keep the pair unless a better one is known; an exact copy is better than any near one."""
        earlier = self.pairs.get((row, number))
        if earlier is None or kind == "exact" or (earlier.kind == "near" and score > earlier.score):
            test = self.against[number].keys[match]
            self.pairs[row, number] = TrainTestCopy(self.train.keys[row], test, number, kind, method, score)
