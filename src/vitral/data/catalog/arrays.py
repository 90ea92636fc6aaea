"""Data sets whose pixels fit in memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vitral.data.catalog.copies import LocalCopy, read_generic
from vitral.data.images import ImageError, decode
from vitral.data.splits import DataSet, RawSplit
from vitral.errors import UserError


@dataclass(frozen=True)
class ArrayReader:
    """Images of one size that are in memory, uint8 (n, h, w, c)."""

    images: np.ndarray
    version: str

    def read(self, index: int) -> np.ndarray:
        return self.images[index]

    def mark(self, index: int) -> str:
        return self.version


def read_digits(copy: LocalCopy) -> DataSet:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UserError("The digits come with scikit-learn: pip install 'vitral[demo]' to have them.") from error
    pixels, labels = load_digits(return_X_y=True)
    # The scans have 17 levels of grey.
    images = np.rint(pixels.reshape(-1, 8, 8, 1) * (255 / 16)).astype(np.uint8)
    keys = [f"digit-{row:04d}" for row in range(len(images))]
    part = RawSplit(keys, [str(label) for label in labels], ArrayReader(images, "scikit-learn's digits"))
    return copy.build({"train": part})


SIDE = 32
CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
BATCHES = [f"data_batch_{number}" for number in range(1, 6)]


def read_cifar10(copy: LocalCopy) -> DataSet | None:
    if place := copy.find_folder("test_batch.bin"):
        train = [place / f"{name}.bin" for name in BATCHES]
        parts = {
            "train": _records("train", train, CIFAR10, head=1),
            "test": _records("test", [place / "test_batch.bin"], CIFAR10, head=1),
        }
        return copy.build(parts, CIFAR10)
    if place := copy.find_folder("test_lables.json"):
        train = [place / f"{name}.png" for name in BATCHES]
        parts = {
            "train": _pictures("train", train, place / "train_lables.json"),
            "test": _pictures("test", [place / "test_batch.png"], place / "test_lables.json"),
        }
        return copy.build(parts, CIFAR10)
    _refuse_python_version(copy, "batches.meta", "cifar-10-binary.tar.gz")
    return read_generic(copy)


def read_cifar100(copy: LocalCopy) -> DataSet | None:
    if place := copy.find_folder("train.bin", "test.bin"):
        classes = _fine_names(place / "fine_label_names.txt")
        parts = {name: _records(name, [place / f"{name}.bin"], classes, head=2) for name in ("train", "test")}
        return copy.build(parts, classes)
    _refuse_python_version(copy, "meta", "cifar-100-binary.tar.gz")
    return read_generic(copy)


def _records(split: str, files: Sequence[Path], classes: tuple[str, ...], head: int) -> RawSplit:
    """One split of the binary version; `head` bytes stand before the pixels, the last of them the label."""
    length = head + 3 * SIDE * SIDE
    data = [_bytes(file) for file in files]
    for file, content in zip(files, data, strict=True):
        if not content or len(content) % length:
            raise UserError(f"{file} is cut off or no CIFAR: its {len(content)} bytes are no records of {length}.")
    records = np.frombuffer(b"".join(data), np.uint8).reshape(-1, length)
    images = records[:, head:].reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1)
    return _part(split, np.ascontiguousarray(images), records[:, head - 1].tolist(), classes, files)


def _pictures(split: str, files: Sequence[Path], listing: Path) -> RawSplit:
    """One split of the npm package."""
    images = []
    for file in files:
        try:
            pixels = decode(_bytes(file))
        except ImageError as error:
            raise UserError(f"{file} cannot be used ({error}): unpack the package again.") from error
        if pixels.shape[1] != SIDE * SIDE:
            raise UserError(f"{file} is {pixels.shape[1]} pixels wide, not {SIDE * SIDE}: it is no CIFAR.")
        images.append(pixels.reshape(-1, SIDE, SIDE, 3))
    try:
        labels = json.loads(_bytes(listing))
    except ValueError as error:
        raise UserError(f"{listing} is no JSON: unpack the package again.") from error
    return _part(split, np.concatenate(images), labels, CIFAR10, files)


def _part(
    split: str, images: np.ndarray, labels: list[int], classes: tuple[str, ...], files: Sequence[Path]
) -> RawSplit:
    """Keys are the same in every layout, so that a split's fingerprint is."""
    folder = files[0].parent
    if len(labels) != len(images):
        raise UserError(f"{folder} has {len(images)} {split} images and {len(labels)} labels: unpack it again.")
    if not 0 <= min(labels) <= max(labels) < len(classes):
        raise UserError(f"{folder} has a {split} label outside 0 to {len(classes) - 1}: it is another data set.")
    keys = [f"{split}-{row:05d}" for row in range(len(images))]
    facts = [(file, file.stat()) for file in files]
    version = " ".join(f"{file.absolute()} {fact.st_size} {fact.st_mtime_ns}" for file, fact in facts)
    return RawSplit(keys, [classes[label] for label in labels], ArrayReader(images, version))


def _bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}): unpack the whole archive.") from error


def _fine_names(file: Path) -> tuple[str, ...]:
    return tuple(_bytes(file).decode("utf-8", "replace").split())


def _refuse_python_version(copy: LocalCopy, mark: str, binary: str) -> None:
    if place := copy.find_folder(mark):
        raise UserError(f"{place} is the Python version, which runs code when it is read: unpack {binary} instead.")
