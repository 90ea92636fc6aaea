"""Training images that are copies of test images: the same bytes or pixels, then perceptual hashes, then features.

The paper removes the near-duplicates of all test images from its largest training set, "following BiT"; neither paper
describes the detector (section 4.1). Ours proposes pairs and looks at each again: a pair counts as near where the
details of the two thumbnails correlate by ALIKE or more. Hashes propose copies that were encoded again, made smaller or
larger, mirrored, or cut by up to 9 % at any side, in either direction. With a model, the test image whose features are
most like a training image's is proposed too, and then up to 42 % of a side may be cut off. Whatever the features say,
the pixels decide: a poor model costs time, not images. Few pictures that were turned are found. Of pictures that
`check` does not compare, tiny or of one colour, only those with identical pixels are found.

Test images are kept in memory, about 10 kB each; training images pass by. Work per training image does not depend on
how many there are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitral.atomic import atomic_write
from vitral.data.hashes import FARTHEST
from vitral.data.sources import Split
from vitral.data.thumbnails import CUT, CUT_FAR, Gallery, ThumbnailBatch, likeness, looks
from vitral.errors import UserError
from vitral.evaluation.predict import Preprocessing, Progress, embed_split
from vitral.models.build import Model

ALIKE = 0.8  # of 540,000 pairs of different photographs those with near hashes reach 0.69; copies begin at 0.91
SIMILAR = 0.5  # cosine from which features propose a pair
_BLOCK = 4096  # training images whose features are in memory
_MATCHED = 256  # of these at a time against all test images

Kind = Literal["exact", "near"]
How = Literal["bytes", "pixels", "hash", "features"]


class Pair(NamedTuple):
    """A training image and a test image that show the same picture."""

    train: str
    test: str
    split: int  # which of the test splits
    kind: Kind
    how: How
    score: float  # 1 where they are identical, else how well their details correlate


@dataclass(frozen=True)
class Duplicates:
    """What `find_duplicates` found, in the order of the training images."""

    pairs: tuple[Pair, ...]  # for a training image at most one with each test split
    train: int  # images
    against: tuple[int, ...]  # images of each test split
    unreadable: int
    not_compared: int  # tiny or of one colour: searched for identical pixels only

    @property
    def keys(self) -> list[str]:
        """The training images to leave out, each once."""
        return list(dict.fromkeys(pair.train for pair in self.pairs))

    def as_dict(self) -> dict[str, Any]:
        """For JSON, with the thresholds."""
        limits = {"alike": ALIKE, "hash_bits": FARTHEST, "similar_features": SIMILAR}
        return {**asdict(self), "pairs": [pair._asdict() for pair in self.pairs], "thresholds": limits}


def find_duplicates(
    train: Split,
    against: Sequence[Split],
    *,
    model: Model | None = None,
    preprocess: Preprocessing | None = None,
    batch: int = 64,
    device: torch.device | str = "cpu",
    workers: int = 0,
    on_progress: Progress | None = None,
) -> Duplicates:
    """The images of `train` that are copies of an image of one of the test splits.

    `model` with its `preprocess` adds the search by features. `on_progress` hears how many images of how many are done;
    with a model each counts twice.
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
    if (model is None) != (preprocess is None):
        raise ValueError("a model comes with its preprocess, and a preprocess with its model")
    images = len(train) + sum(map(len, against))
    clock = _Clock(images if model is None else 2 * images, on_progress)
    search = _Search(train, against, Gallery(against, workers, clock.advance), workers)
    for seen in looks(train, workers):
        search.by_digest_and_hash(seen)
        clock.advance(len(seen.compared))
    if model is not None and preprocess is not None:

        def embed(split: Split) -> Tensor:
            found = embed_split(
                model, split, preprocess, batch=batch, device=device, workers=workers, on_progress=clock.within
            )
            clock.advance(len(split))
            return _unit(found.features, found.valid).to(device)

        search.by_features(embed)
    return search.result()


def write_exclusions(path: Path, found: Duplicates) -> None:
    """One training image in a line, below it in a comment what it is a copy of; UTF-8, never half a file."""
    lines = [f"# {len(found.keys)} of {found.train} training images are copies of test images"]
    copies: dict[str, list[Pair]] = {}
    for pair in found.pairs:
        copies.setdefault(pair.train, []).append(pair)
    for key, pairs in copies.items():
        lines.append(_escaped(key))
        lines += [f"#   {pair.kind} ({pair.how}, {pair.score:.3f}): {_escaped(pair.test)}" for pair in pairs]
    with atomic_write(path) as aside:
        # File names need not be text.
        aside.write_bytes("".join(f"{line}\n" for line in lines).encode("utf-8", "surrogateescape"))


def read_exclusions(path: Path) -> list[str]:
    """The training images that a list names; empty lines and lines that begin with # say nothing."""
    try:
        text = path.read_bytes().decode("utf-8-sig", "surrogateescape")
    except OSError as error:
        raise UserError(f"{path} cannot be read: name a list that `vitral dedupe` wrote.") from error
    lines = (line.removesuffix("\r") for line in text.split("\n"))
    return [_unescaped(line, f"{path}, line {n}") for n, line in enumerate(lines, 1) if line and line[0] != "#"]


def _escaped(key: str) -> str:
    """A key as one line that is no comment."""
    line = key.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    return "\\" + line if line.startswith("#") else line


def _unescaped(line: str, where: str) -> str:
    meanings = {"\\": "\\", "n": "\n", "r": "\r", "#": "#"}

    def meant(found: re.Match[str]) -> str:
        if found[1] not in meanings:
            raise UserError(f"{where}: a backslash is written \\\\ in a list of images.")
        return meanings[found[1]]

    return re.sub(r"\\(.?)", meant, line)


@dataclass
class _Clock:
    """Counts images for `on_progress`."""

    total: int
    on_progress: Progress | None
    done: int = 0

    def advance(self, images: int) -> None:
        self.done += images
        self.within(0, 0)

    def within(self, more: int, _: int) -> None:
        """So many of the next ones are done, which are advanced over together later."""
        if self.on_progress is not None:
            self.on_progress(self.done + more, self.total)


@dataclass
class _Search:
    """The pairs found so far, by place in train and number of the test split."""

    train: Split
    against: Sequence[Split]
    known: Gallery
    workers: int
    found: dict[tuple[int, int], Pair] = field(default_factory=dict)
    seen: int = 0
    compared: int = 0
    unreadable: int = 0

    def by_digest_and_hash(self, seen: ThumbnailBatch) -> None:
        """The next images of train."""
        known = self.known
        for row, (file, picture) in enumerate(zip(seen.files, seen.pixels, strict=True), self.seen):
            for number in range(len(self.against)):
                if (place := known.files[number].get(file)) is not None:
                    self._add(row, place, "exact", "bytes", 1.0)
                elif (place := known.pixels[number].get(picture)) is not None:
                    self._add(row, place, "exact", "pixels", 1.0)
        rows = np.flatnonzero(seen.compared)
        for row, place in known.propose(seen.thumbnails[rows]).tolist():
            self._look_again(self.seen + int(rows[row]), seen.thumbnails[rows[row]], place, "hash")
        self.seen += len(seen.compared)
        self.compared += len(rows)
        self.unreadable += seen.pixels.count(b"")

    def by_features(self, embed: Callable[[Split], Tensor]) -> None:
        """The most similar image of each test split for each image of train; `embed` gives (n, d) of length 1."""
        tests = [embed(split) if len(split) else None for split in self.against]
        firsts = np.cumsum([0, *map(len, self.against)])
        for start in range(0, len(self.train), _BLOCK):
            rows = np.arange(start, min(start + _BLOCK, len(self.train)))
            features = embed(self.train.select(rows))
            for number, test in enumerate(tests):
                if test is None:
                    continue
                cosines, nearest = _most_similar(features, test)
                chosen = [row for row in np.flatnonzero(cosines >= SIMILAR) if (start + row, number) not in self.found]
                self._read_again(rows[chosen], firsts[number] + nearest[chosen])

    def result(self) -> Duplicates:
        known = self.known
        all_seen = self.seen + len(known.keys)
        unreadable = self.unreadable + known.unreadable
        return Duplicates(
            pairs=tuple(self.found[place] for place in sorted(self.found)),
            train=len(self.train),
            against=tuple(map(len, self.against)),
            unreadable=unreadable,
            not_compared=all_seen - unreadable - self.compared - int(known.compared.sum()),
        )

    def _read_again(self, rows: np.ndarray, places: np.ndarray) -> None:
        """The thumbnails of training images that features proposed were not kept."""
        pairs = zip(rows.tolist(), places.tolist(), strict=True)
        for seen in looks(self.train.select(rows), self.workers):
            for thumbnail, usable in zip(seen.thumbnails, seen.compared, strict=True):
                row, place = next(pairs)
                if usable and self.known.compared[place]:
                    self._look_again(row, thumbnail, place, "features")

    def _look_again(self, row: int, thumbnail: np.ndarray, place: int, how: How) -> None:
        earlier = self.found.get((row, int(self.known.split[place])))
        if earlier is not None and earlier.kind == "exact":
            return
        score = likeness(thumbnail, self.known.thumbnails[place], (CUT,) if how == "hash" else (CUT, *CUT_FAR))
        if score >= ALIKE and (earlier is None or score > earlier.score):
            self._add(row, place, "near", how, score)

    def _add(self, row: int, place: int, kind: Kind, how: How, score: float) -> None:
        number = int(self.known.split[place])
        self.found[row, number] = Pair(self.train.keys[row], self.known.keys[place], number, kind, how, score)


def _unit(features: np.ndarray, valid: np.ndarray) -> Tensor:
    """(n, d) of length 1; zero, and so similar to nothing, where the image could not be read"""
    return torch.nn.functional.normalize(torch.from_numpy(features * valid[:, None]), dim=1)


def _most_similar(features: Tensor, test: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """(n, d), (t, d) -> the highest cosine (n,), and whose it is (n,)"""
    best = [(rows @ test.T).max(1) for rows in features.split(_MATCHED)]
    values, places = (torch.cat(parts).cpu().numpy() for parts in zip(*best, strict=True))
    return values, places
