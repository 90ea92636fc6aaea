"""Labelled images as a sequence: what a split is, which classes there are, and a fair split where none was given."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from vitral.errors import UserError

HELD_OUT = 0.2  # of each class where the source has no test split and nobody says otherwise

# What people call their splits, in lower case.
SPLIT_NAMES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}

# What people call the columns of images and labels in tables.
IMAGE_COLUMNS = ("image", "img", "picture")
LABEL_COLUMNS = ("label", "labels", "class", "fine_label")


class Reader(Protocol):
    """Where images come from. Readers can be pickled and open their files in the process that reads."""

    def read(self, index: int) -> bytes | np.ndarray:
        """An encoded image, or its pixels as uint8 (h, w, c). Raises ImageError where there is neither."""
        ...

    def mark(self, index: int) -> str:
        """What changes when the stored image does, found without reading it: path, size, time."""
        ...


@dataclass(frozen=True)
class SubsetReader:
    """Some images of another reader, in another order."""

    reader: Reader
    indices: np.ndarray

    def read(self, index: int) -> bytes | np.ndarray:
        return self.reader.read(int(self.indices[index]))

    def mark(self, index: int) -> str:
        return self.reader.mark(int(self.indices[index]))


@dataclass(frozen=True, eq=False)
class Split:
    """Images with labels, by position."""

    name: str
    keys: Sequence[str]  # unique names that a person recognises: a relative path, a row
    labels: np.ndarray  # (n,) int64, or (n, classes) uint8 where an image may have several
    classes: tuple[str, ...]
    reader: Reader

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def multilabel(self) -> bool:
        return self.labels.ndim == 2

    def select(self, indices: np.ndarray, name: str | None = None) -> Split:
        """The images at these positions, in this order."""
        keys = [self.keys[index] for index in indices.tolist()]
        inner, places = self.reader, indices.astype(np.int64)
        if isinstance(inner, SubsetReader):  # one step to the file, however often a split is restrict_train
            inner, places = inner.reader, inner.indices[places]
        return Split(name or self.name, keys, self.labels[indices], self.classes, SubsetReader(inner, places))

    def counts(self) -> np.ndarray:
        """Images of each class, (classes,) int64."""
        if self.multilabel:
            return self.labels.sum(0, dtype=np.int64)
        return np.bincount(self.labels, minlength=len(self.classes)).astype(np.int64)

    def fingerprint(self) -> str:
        """sha256 of keys, labels and classes: which images these are, the same on every machine."""
        digest = hashlib.sha256()
        for texts in (self.classes, self.keys):
            digest.update(f"{len(texts)}\n".encode())
            for text in texts:
                encoded = _encoded(text)
                digest.update(f"{len(encoded)}\n".encode() + encoded)
        digest.update(f"{self.labels.shape}\n".encode() + self.labels.astype("<i8").tobytes())
        return digest.hexdigest()

    def stamp(self) -> str:
        """sha256 of the fingerprint and of every image's mark: a cache of pixels is valid while this stays the same."""
        digest = hashlib.sha256(self.fingerprint().encode())
        for index in range(len(self)):
            digest.update(_encoded(self.reader.mark(index)) + b"\n")
        return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class DataSet:
    """The splits of a data source. `notes` are messages for the user: what was split, left out or is missing."""

    source: str
    train: Split
    val: Split | None = None
    test: Split | None = None
    notes: tuple[str, ...] = ()

    @property
    def eval_split(self) -> Split | None:
        """The split that is evaluated during training: val where there is one, else test."""
        return self.test if self.val is None else self.val

    @property
    def splits(self) -> tuple[Split, ...]:
        """All splits that exist, train first."""
        return tuple(split for split in (self.train, self.val, self.test) if split is not None)

    @property
    def messages(self) -> tuple[str, ...]:
        """The notes, and which split is evaluated where there are two to choose from."""
        if self.val is None or self.test is None:
            return self.notes
        split = f"{self.val.name} ({len(self.val):,} images)"
        return (*self.notes, f"Evaluated on {split}; {self.test.name} is not used before the end.")


@dataclass(frozen=True)
class RawSplit:
    """One split as its source holds it, labels by name: one each, or a tuple each where there may be several."""

    keys: Sequence[str]
    labels: Sequence[str] | Sequence[tuple[str, ...]]
    reader: Reader


def natural_key(text: str) -> tuple[list[str | tuple[int, str]], str]:
    """A sort key in which "2" comes before "10"; otherwise the order of code points, as `sorted` has it."""
    pieces: list[str | tuple[int, str]] = list(re.split("([0-9]+)", text))
    for place in range(1, len(pieces), 2):
        digits = str(pieces[place]).lstrip("0")
        pieces[place] = (len(digits), digits)  # compares as the number does, at any length
    return pieces, text


def unique_names(names: Iterable[str]) -> tuple[str, ...]:
    """Class names, with the index added to those that occur twice: ImageNet has two cranes."""
    listed = list(names)
    counts = Counter(listed)
    return tuple(name if counts[name] == 1 else f"{name} ({index})" for index, name in enumerate(listed))


def split_name(words: str) -> str | None:
    """The split that a file name speaks of: "imagenet-train-0001.tar" gives "train"."""
    found = (SPLIT_NAMES[word] for word in re.split("[^a-z]+", words.lower()) if word in SPLIT_NAMES)
    return next(found, None)


def files_by_split(source: str, files: Iterable[Path]) -> dict[str, list[Path]]:
    """Files in natural order by the split that their name, else their folder's, speaks of; train where none does.

    Where all are of one split it is what was asked for, whatever it is called, and goes by "train".
    """
    found: dict[str, list[Path]] = {}
    for file in sorted(files, key=lambda file: natural_key(str(file))):
        folder = "" if str(file.parent) == source else file.parent.name
        found.setdefault(split_name(file.stem) or split_name(folder) or "train", []).append(file)
    if len(found) == 1:
        return {"train": next(iter(found.values()))}
    if "train" not in found:
        raise UserError(f"{source} has {' and '.join(found)} but no train: name the files of one split, or add train.")
    return found


def make_dataset(
    source: str,
    parts: Mapping[str, RawSplit],
    *,
    seed: int,
    held_out: float,
    classes: tuple[str, ...] | None = None,
    notes: Iterable[str] = (),
) -> DataSet:
    """Splits by name to a data set with one class list, made from the training split unless the source states it.

    `parts` has "train" and perhaps "val" and "test". Without both, a share `held_out` of train becomes the test split;
    with `held_out=0` all images stay in train, and a single class is accepted.
    """
    if not 0 <= held_out < 1:
        raise UserError(f"held_out is the share of images kept for testing, such as 0.2, not {held_out}.")
    said = list(notes)
    listed = classes or tuple(sorted(_names(parts["train"].labels), key=natural_key))
    several = any(isinstance(label, tuple) for part in parts.values() for label in part.labels)
    train = _split("train", parts["train"], listed, several)
    if held_out and len(train) and (why := too_few_classes(source, train)):
        raise UserError(why)
    held: dict[str, Split] = {}
    for name in ("val", "test"):
        if name in parts:
            _refuse_unknown(source, name, parts[name], listed)
            held[name] = _split(name, parts[name], listed, several)
    if not held:
        return _with_held_out(source, train, seed, held_out, said)
    said += _absent(train, next(iter(held.values()))) if len(train) else []
    return DataSet(source, train, **held, notes=tuple(said))


def too_few_classes(source: str, train: Split) -> str:
    """Why no classifier can be trained on this, as a sentence; empty where one can."""
    if len(train.classes) > 1 or train.multilabel:
        return ""
    only = f'one class, "{train.classes[0]}"' if train.classes else "no class"
    return f"{source} has {only}: a classifier needs at least two, each in its own sub-folder or label."


def stratified(keys: Sequence[str], strata: np.ndarray, held_out: float, seed: int) -> np.ndarray:
    """Which images are held out, (n,) bool: the same share of each stratum, at least one on each side if it has two.

    An image's place in the draw is a hash of its key and the seed, so the order in which files are found, the platform
    and the version of a random generator change nothing, and a new image moves few of the others.
    """
    held = np.zeros(len(keys), bool)
    drawn = [hashlib.blake2b(f"{seed} ".encode() + _encoded(key), digest_size=16).digest() for key in keys]
    order = np.array(sorted(range(len(keys)), key=drawn.__getitem__), np.int64)
    for stratum in np.unique(strata):
        members = order[strata[order] == stratum]
        wanted = int(np.floor(len(members) * held_out + 0.5))
        held[members[: min(max(wanted, 1), len(members) - 1)]] = True
    return held


def _with_held_out(source: str, train: Split, seed: int, held_out: float, notes: list[str]) -> DataSet:
    if held_out == 0:
        return DataSet(source, train, notes=tuple(notes))
    held = stratified(train.keys, strata(train), held_out, seed)
    test = train.select(np.flatnonzero(held), "test")
    if len(test) == 0:
        raise UserError(f"{source} has one image in each class: add more, or name a test split.")
    kept = train.select(np.flatnonzero(~held))
    notes.append(
        f"No test split was given: {len(test)} of {len(train)} images ({held_out:.0%} of each class, seed {seed}) "
        f"are held out for testing; split {test.fingerprint()[:12]}."
    )
    return DataSet(source, kept, test=test, notes=(*notes, *_absent(kept, test)))


def strata(split: Split) -> np.ndarray:
    """The class; where there may be several, the rarest one the image has, so that no rare label is left to chance."""
    if not split.multilabel:
        return split.labels
    rarity = np.where(split.labels > 0, split.counts(), len(split) + 1)
    return np.where(split.labels.any(1), rarity.argmin(1), -1)


def _split(name: str, part: RawSplit, classes: tuple[str, ...], several: bool) -> Split:
    place = {label: index for index, label in enumerate(classes)}
    if not several:
        labels = np.array([place[label] for label in part.labels], np.int64)  # type: ignore[index]
        return Split(name, part.keys, labels, classes, part.reader)
    matrix = np.zeros((len(part.keys), len(classes)), np.uint8)
    for row, label in enumerate(part.labels):
        for item in (label,) if isinstance(label, str) else label:
            matrix[row, place[item]] = 1
    return Split(name, part.keys, matrix, classes, part.reader)


def _names(labels: Sequence[str] | Sequence[tuple[str, ...]]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for label in labels:
        counts.update((label,) if isinstance(label, str) else label)
    return counts


def _refuse_unknown(source: str, name: str, part: RawSplit, classes: tuple[str, ...]) -> None:
    counts = _names(part.labels)
    unknown = sorted(set(counts) - set(classes), key=natural_key)
    if unknown:
        shown = ", ".join(f'"{label}" ({_images(counts[label])})' for label in unknown[:3])
        shown += f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        raise UserError(f"{source}: {name} has what train has not: {shown}; add them to train or remove them.")


def _absent(train: Split, test: Split) -> list[str]:
    here, there = train.counts(), test.counts()
    notes = []
    for split, counts, others in ((test, there, here), (train, here, there)):
        absent = np.flatnonzero(counts == 0)
        if len(absent):
            other = "train" if split is test else test.name
            shown = ", ".join(f'"{split.classes[i]}" ({others[i]} in {other})' for i in absent[:3])
            shown += f" and {len(absent) - 3} more" if len(absent) > 3 else ""
            notes.append(f"{len(absent)} of {len(split.classes)} classes have no image in {split.name}: {shown}.")
    return notes


def _images(count: int) -> str:
    return f"{count} image" + "s" * (count != 1)


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")  # file names need not be text
