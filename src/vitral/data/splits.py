"""Splits of labelled images, their classes, and a stratified test split if a source has none."""

from __future__ import annotations

import hashlib
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from vitral.errors import UserError

HELD_OUT = 0.2  # the default share of each class that becomes test if the source has no held-out split

# Common names of splits, in lower case.
SPLIT_NAMES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}

# Common names of image and label columns in tables.
IMAGE_COLUMNS = ("image", "img", "picture")
LABEL_COLUMNS = ("label", "labels", "class", "fine_label")


def content_bytes(image: bytes | np.ndarray) -> bytes:
    """The bytes that identify an encoded image, or pixels."""
    return image if isinstance(image, bytes) else f"{image.shape}".encode() + image.tobytes()


class Reader(Protocol):
    """Reads the images of a split. Readers can be pickled, and open their files in the process that reads."""

    def read(self, index: int) -> bytes | np.ndarray:
        """An encoded image, or its pixels as uint8 (h, w, c); raises ImageError."""
        ...

    def mark(self, index: int) -> str:
        """A text that changes when the stored image changes, such as its path, size and time of modification."""
        ...


@dataclass(frozen=True)
class SubsetReader:
    """The images of another reader at these indices."""

    reader: Reader
    indices: np.ndarray

    def read(self, index: int) -> bytes | np.ndarray:
        return self.reader.read(int(self.indices[index]))

    def mark(self, index: int) -> str:
        return self.reader.mark(int(self.indices[index]))


@dataclass(frozen=True, eq=False)
class Split:
    """Labelled images by index."""

    name: str
    keys: Sequence[str]  # unique readable names: a relative path, a row of a table
    labels: np.ndarray  # (n,) int64, or (n, classes) uint8 if multi-label
    classes: tuple[str, ...]
    reader: Reader

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def multilabel(self) -> bool:
        return self.labels.ndim == 2

    def select(self, indices: np.ndarray, name: str | None = None) -> Split:
        """The images at these indices, in this order."""
        keys = [self.keys[index] for index in indices.tolist()]
        reader, reader_indices = self.reader, indices.astype(np.int64)
        if isinstance(reader, SubsetReader):  # never nested, however often a split is selected from
            reader, reader_indices = reader.reader, reader.indices[reader_indices]
        return Split(name or self.name, keys, self.labels[indices], self.classes, SubsetReader(reader, reader_indices))

    def counts(self) -> np.ndarray:
        """The number of images of each class, (classes,) int64."""
        if self.multilabel:
            return self.labels.sum(0, dtype=np.int64)
        return np.bincount(self.labels, minlength=len(self.classes)).astype(np.int64)

    def fingerprint(self) -> str:
        """sha256 of keys, labels and classes: identifies the images, the same on every machine."""
        digest = hashlib.sha256()
        for texts in (self.classes, self.keys):
            digest.update(f"{len(texts)}\n".encode())
            for text in texts:
                encoded = _encoded(text)
                digest.update(f"{len(encoded)}\n".encode() + encoded)
        digest.update(f"{self.labels.shape}\n".encode() + self.labels.astype("<i8").tobytes())
        return digest.hexdigest()

    def stamp(self) -> str:
        """sha256 of the fingerprint and of every image's mark: cached pixels are valid while it stays the same."""
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
        """The split that is evaluated during training: val if there is one, else test."""
        return self.test if self.val is None else self.val

    def reported_split(self, selects: bool) -> Split | None:
        """The split that the result of a run is of: another than `eval_split` where the run selects weights by that."""
        return self.test if selects and self.test is not None else self.eval_split

    @property
    def splits(self) -> tuple[Split, ...]:
        """All splits that exist, train first."""
        return tuple(split for split in (self.train, self.val, self.test) if split is not None)

    @property
    def messages(self) -> tuple[str, ...]:
        """The notes, and which split is evaluated if there are two to choose from."""
        if self.val is None or self.test is None:
            return self.notes
        split = f"{self.val.name} ({len(self.val):,} images)"
        return (*self.notes, f"Evaluated on {split}; {self.test.name} is not used before the end.")


@dataclass(frozen=True)
class RawSplit:
    """A split as its source holds it: labels are class names, or tuples of them if multi-label."""

    keys: Sequence[str]
    labels: Sequence[str] | Sequence[tuple[str, ...]]
    reader: Reader


def natural_key(text: str) -> tuple[list[str | tuple[int, str]], str]:
    """A sort key in which "2" comes before "10"; otherwise the order of code points, as `sorted` has it."""
    pieces: list[str | tuple[int, str]] = list(re.split("([0-9]+)", text))
    for index in range(1, len(pieces), 2):
        digits = str(pieces[index]).lstrip("0")
        pieces[index] = (len(digits), digits)  # compares as the number does, at any length
    return pieces, text


def unique_names(names: Iterable[str]) -> tuple[str, ...]:
    """Class names, with the index added to those that occur twice: ImageNet has two cranes."""
    listed = list(names)
    counts = Counter(listed)
    return tuple(name if counts[name] == 1 else f"{name} ({index})" for index, name in enumerate(listed))


def split_name(filename: str) -> str | None:
    """The split that a file name contains: "imagenet-train-0001.tar" gives "train"."""
    words = re.split("[^a-z]+", filename.lower())
    return next((SPLIT_NAMES[word] for word in words if word in SPLIT_NAMES), None)


def files_by_split(source: str, files: Iterable[Path]) -> dict[str, list[Path]]:
    """Files in natural order by the split in their name, else in their folder's; train if there is none.

    Where all files are of one split, the user asked for it, and it becomes "train" whatever its name.
    """
    by_split: dict[str, list[Path]] = {}
    for file in sorted(files, key=lambda file: natural_key(str(file))):
        folder = "" if str(file.parent) == source else file.parent.name
        by_split.setdefault(split_name(file.stem) or split_name(folder) or "train", []).append(file)
    if len(by_split) == 1:
        return {"train": next(iter(by_split.values()))}
    if "train" not in by_split:
        names = " and ".join(by_split)
        raise UserError(f"{source} has {names} but no train: name the files of one split, or add train.")
    return by_split


def make_dataset(
    source: str,
    parts: Mapping[str, RawSplit],
    *,
    held_out: float,
    classes: tuple[str, ...] | None = None,
    notes: Iterable[str] = (),
) -> DataSet:
    """Build a data set with one list of classes from raw splits, called `source` in messages.

    Args:
        parts: "train", "val" and "test", as many as there are; without train the data is for testing only.
        held_out: without val and test, the share of each class of train that becomes the test split, always the
            same images; with 0 all stay in train, and a single class is accepted.
        classes: the class names in order; by default those of train, or of all without it, sorted naturally.
        notes: messages for the user.
    """
    if not 0 <= held_out < 1:
        raise UserError(f"held_out is the share of images kept for testing, such as 0.2, not {held_out}.")
    messages = [*notes, *_merged_spellings(parts, classes or ())]
    parts = {name: replace(part, labels=[_composed(label) for label in part.labels]) for name, part in parts.items()}
    classes = tuple(dict.fromkeys(map(_composed, classes))) if classes else None
    labelled = [parts["train"]] if "train" in parts else list(parts.values())
    class_names = classes or tuple(
        sorted({x for part in labelled for x in _label_counts(part.labels)}, key=natural_key)
    )
    if groups := similar_names(class_names):
        shown = _some([" and ".join(f'"{name}"' for name in group) for group in groups])
        messages.append(f"Class names that differ only in case or spaces: {shown}; rename them if they are one class.")
    multilabel = any(isinstance(label, tuple) for part in parts.values() for label in part.labels)
    train = _split("train", parts.get("train", RawSplit([], [], labelled[0].reader)), class_names, multilabel)
    if held_out and len(train) and (reason := too_few_classes(source, train)):
        raise UserError(reason)
    held: dict[str, Split] = {}
    for name in ("val", "test"):
        if name in parts:
            _refuse_unknown(source, name, parts[name], class_names)
            held[name] = _split(name, parts[name], class_names, multilabel)
    if not held:
        return _with_held_out(source, train, held_out, messages)
    messages += _absent(train, next(iter(held.values()))) if len(train) else []
    return DataSet(source, train, **held, notes=tuple(messages))


def _composed(label: Any) -> Any:
    """A label, or several, with "é" as one character (NFC): in names of folders from macOS it is two."""
    return tuple(map(_composed, label)) if isinstance(label, tuple) else unicodedata.normalize("NFC", label)


def _merged_spellings(parts: Mapping[str, RawSplit], classes: Iterable[str]) -> list[str]:
    """A note about names that are written in two forms of Unicode, and become one class."""
    written = {*classes, *(name for part in parts.values() for name in _label_counts(part.labels))}
    counts = Counter(map(_composed, written))
    merged = sorted((name for name in counts if counts[name] > 1), key=natural_key)
    shown = _some([f'"{name}"' for name in merged])
    return [f"Class names in two Unicode forms (NFC and NFD) are taken as one class: {shown}."] if merged else []


def similar_names(classes: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    """Groups of class names that differ only in case or surrounding spaces: possibly one class written differently."""
    groups: dict[str, list[str]] = {}
    for name in classes:
        groups.setdefault(name.strip().casefold(), []).append(name)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)


def too_few_classes(source: str, train: Split) -> str:
    """The reason why no classifier can be trained on this; empty if one can."""
    if len(train.classes) > 1 or train.multilabel:
        return ""
    only = f'one class, "{train.classes[0]}"' if train.classes else "no class"
    kind = "sub-folder or label" if os.path.isdir(source) else "label"
    return f"{source} has {only}: a classifier needs at least two, each with its own {kind}."


def unreadable_refusal(train: Split, readable: Split, held_out: Split | None) -> str:
    """The reason why no classifier can be trained on the readable images of train; empty if one can."""
    lost = np.flatnonzero((readable.counts() == 0) & (train.counts() > 0))
    if len(lost):
        return f'no training image of the class "{train.classes[lost[0]]}" can be read: add some, or remove the class.'
    if held_out is not None and len(held_out) == 0:
        return f"none of the {held_out.name} images can be read: run `vitral check`."
    return ""


def evenly(count: int, most: int) -> np.ndarray:
    """At most `most` of the numbers below `count`, from the first to the last."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(np.int64))


def key_hash(key: str, prefix: str = "") -> bytes:
    """Depends on nothing but the key of an image and a prefix, on any machine and in any version of Python."""
    return hashlib.blake2b(prefix.encode() + _encoded(key), digest_size=16).digest()


def hashed_order(keys: Sequence[str], prefix: str = "") -> np.ndarray:
    """A permutation that depends on the keys alone, (n,) int64: in the order of their hashes."""
    hashes = [key_hash(key, prefix) for key in keys]
    return np.array(sorted(range(len(keys)), key=hashes.__getitem__), np.int64)


def stratified(keys: Sequence[str], strata: np.ndarray, held_out: float, seed: int = 0) -> np.ndarray:
    """Which images are held out, (n,) bool: the same share of each stratum, at least one on each side if it has two.

    The draw orders images by a hash of key and seed: the order of files, the platform and the version of a random
    generator change nothing, and a new image moves few of the others.
    """
    held, order = np.zeros(len(keys), bool), hashed_order(keys, f"{seed} ")
    for stratum in np.unique(strata):
        members = order[strata[order] == stratum]
        wanted = int(np.floor(len(members) * held_out + 0.5))
        held[members[: min(max(wanted, 1), len(members) - 1)]] = True
    return held


def _are_values(classes: Sequence[str]) -> bool:
    """Whether these are measurements, as of regression: numbers, but not just those that count the classes."""
    numbers = all(re.fullmatch(r"[+-]?\d*\.?\d+(e[+-]?\d+)?", name, re.IGNORECASE) for name in classes)
    return numbers and not {*classes} <= {str(index) for index in range(len(classes) + 1)}


def _with_held_out(source: str, train: Split, held_out: float, notes: list[str]) -> DataSet:
    if held_out == 0:
        return DataSet(source, train, notes=tuple(notes))
    if len(train.classes) > len(train) / 2 and _are_values(train.classes):
        raise UserError(
            f"{source} has {len(train.classes)} different numbers as labels of {len(train)} images, such as "
            f"{train.classes[0]}: vitral predicts classes, not values; use the names of a few ranges as labels."
        )
    held = stratified(train.keys, strata(train), held_out)
    test = train.select(np.flatnonzero(held), "test")
    if len(test) == 0:
        raise UserError(f"{source} has one image in each class: add more images, or a test split.")
    kept = train.select(np.flatnonzero(~held))
    notes.append(
        f"No test split was given: {len(test)} of {len(train)} images ({held_out:.0%} of each class, at least one; "
        f"seed 0) are held out for testing; split {test.fingerprint()[:12]}."
    )
    return DataSet(source, kept, test=test, notes=(*notes, *_absent(kept, test)))


def strata(split: Split) -> np.ndarray:
    """The class of each image; if multi-label, its rarest one, so that rare labels are split evenly too. (n,)."""
    if not split.multilabel:
        return split.labels
    rarity = np.where(split.labels > 0, split.counts(), len(split) + 1)
    return np.where(split.labels.any(1), rarity.argmin(1), -1)


def _split(name: str, part: RawSplit, classes: tuple[str, ...], multilabel: bool) -> Split:
    class_index = {label: index for index, label in enumerate(classes)}
    if not multilabel:
        labels = np.array([class_index[label] for label in part.labels], np.int64)  # type: ignore[index]
        return Split(name, part.keys, labels, classes, part.reader)
    matrix = np.zeros((len(part.keys), len(classes)), np.uint8)
    for row, label in enumerate(part.labels):
        for item in (label,) if isinstance(label, str) else label:
            matrix[row, class_index[item]] = 1
    return Split(name, part.keys, matrix, classes, part.reader)


def _label_counts(labels: Sequence[str] | Sequence[tuple[str, ...]]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for label, count in Counter[str | tuple[str, ...]](labels).items():  # there are far fewer different ones
        for name in (label,) if isinstance(label, str) else label:
            counts[name] += count
    return counts


def _refuse_unknown(source: str, name: str, part: RawSplit, classes: tuple[str, ...]) -> None:
    counts = _label_counts(part.labels)
    unknown = sorted(set(counts) - set(classes), key=natural_key)
    if unknown:
        shown = _some([f'"{label}" ({counts[label]} image{"s" * (counts[label] != 1)})' for label in unknown])
        raise UserError(f"{source}: {name} has classes that train lacks: {shown}; add them to train or remove them.")


def _absent(train: Split, test: Split) -> list[str]:
    """Notes about classes without an image on one side."""
    train_counts, test_counts = train.counts(), test.counts()
    nowhere = np.flatnonzero(train_counts + test_counts == 0)
    notes = []
    if len(nowhere):
        shown = _some([f'"{train.classes[index]}"' for index in nowhere])
        notes.append(f"{len(nowhere)} of {len(train.classes)} classes have no image in train or {test.name}: {shown}.")
        if train.classes == tuple(map(str, range(len(train.classes)))):
            notes.append("Labels that are numbers count the classes from 0: use strings if they are names.")
    for split, counts, others in ((test, test_counts, train_counts), (train, train_counts, test_counts)):
        absent = np.flatnonzero((counts == 0) & (others > 0))
        if len(absent):
            other = "train" if split is test else test.name
            shown = _some([f'"{split.classes[i]}" ({others[i]} in {other})' for i in absent])
            notes.append(f"{len(absent)} of {len(split.classes)} classes have no image in {split.name}: {shown}.")
    return notes


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _encoded(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")  # file names need not be text
    except UnicodeEncodeError as error:  # a JSON file may name half a character
        raise UserError(f"{text[:50]!a} is not valid text: correct this name or label in the data.") from error
