"""Readers of the small data sets: digits and CIFAR, whose pixels fit in memory, and Oxford's flowers and pets.

Flowers-102 comes as jpg/, imagelabels.mat and setid.mat, which give class and split by number: train is `trnid` (1,020
images), val is `valid` (1,020) and test is `tstid` (6,149), as in TFDS. The paper's fine-tuning code trains on train
alone. The files number the classes and do not name them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vitral.data.catalog.copies import LocalCopy, listed_files, read_generic
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
        raise UserError("The digits come with scikit-learn: pip install 'vitral[demo]'.") from error
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
    if folder := copy.find_folder("test_batch.bin"):
        train = [folder / f"{name}.bin" for name in BATCHES]
        parts = {
            "train": _records("train", train, CIFAR10, head=1),
            "test": _records("test", [folder / "test_batch.bin"], CIFAR10, head=1),
        }
        return copy.build(parts, CIFAR10)
    if folder := copy.find_folder("test_lables.json"):
        train = [folder / f"{name}.png" for name in BATCHES]
        parts = {
            "train": _image_strips("train", train, folder / "train_lables.json"),
            "test": _image_strips("test", [folder / "test_batch.png"], folder / "test_lables.json"),
        }
        return copy.build(parts, CIFAR10)
    _refuse_python_version(copy, "batches.meta", "cifar-10-binary.tar.gz")
    return read_generic(copy)


def read_cifar100(copy: LocalCopy) -> DataSet | None:
    if folder := copy.find_folder("train.bin", "test.bin"):
        classes = _fine_names(folder / "fine_label_names.txt")
        parts = {name: _records(name, [folder / f"{name}.bin"], classes, head=2) for name in ("train", "test")}
        return copy.build(parts, classes)
    _refuse_python_version(copy, "meta", "cifar-100-binary.tar.gz")
    return read_generic(copy)


def _records(split: str, files: Sequence[Path], classes: tuple[str, ...], head: int) -> RawSplit:
    """One split of the binary version; `head` bytes precede the pixels, the last of them the label."""
    length = head + 3 * SIDE * SIDE
    data = [_bytes(file) for file in files]
    for file, content in zip(files, data, strict=True):
        if not content or len(content) % length:
            raise UserError(f"{file} is cut off or no CIFAR: its {len(content)} bytes are no records of {length}.")
    records = np.frombuffer(b"".join(data), np.uint8).reshape(-1, length)
    images = records[:, head:].reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1)
    return _part(split, np.ascontiguousarray(images), records[:, head - 1].tolist(), classes, files)


def _image_strips(split: str, files: Sequence[Path], listing: Path) -> RawSplit:
    """One split of the npm package: PNG files with one image per row."""
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
        raise UserError(f"{listing} is not valid JSON: unpack the package again.") from error
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
    stats = [(file, file.stat()) for file in files]
    version = " ".join(f"{file.absolute()} {stat.st_size} {stat.st_mtime_ns}" for file, stat in stats)
    return RawSplit(keys, [classes[label] for label in labels], ArrayReader(images, version))


def _bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}): unpack the whole archive.") from error


def _fine_names(file: Path) -> tuple[str, ...]:
    return tuple(_bytes(file).decode("utf-8", "replace").split())


def _refuse_python_version(copy: LocalCopy, mark: str, binary: str) -> None:
    if folder := copy.find_folder(mark):
        raise UserError(f"{folder} is the Python version, a pickle that can run code: unpack {binary} instead.")


SPLITS = {"train": "trnid", "val": "valid", "test": "tstid"}


def read_flowers(copy: LocalCopy) -> DataSet | None:
    folder = copy.find_folder("jpg", "imagelabels.mat", "setid.mat")
    if folder is None:
        return read_generic(copy)
    labels = _numbers(folder / "imagelabels.mat", "labels")
    parts = {}
    for split, variable in SPLITS.items():
        images = _numbers(folder / "setid.mat", variable)
        if images.max() > len(labels):
            raise UserError(f"{folder} has labels for {len(labels)} images and image {images.max()}: unpack it again.")
        names = [f"jpg/image_{image:05d}.jpg" for image in images]
        classes = [str(label) for label in labels[images - 1]]
        parts[split] = RawSplit(names, classes, listed_files(folder, names, "setid.mat"))
    return copy.build(parts, tuple(str(label) for label in np.unique(labels)))


def _numbers(file: Path, variable: str) -> np.ndarray:
    """(n,) int64, all of them from 1, of a variable in a MATLAB file."""
    try:
        from scipy.io import loadmat
    except ImportError as error:
        raise UserError(f"{file} is a MATLAB file: pip install 'vitral[matlab]' to read it.") from error
    try:
        numbers = loadmat(file, variable_names=[variable]).get(variable)
    except Exception as error:  # scipy raises nearly anything on damaged bytes
        raise UserError(f"{file} is damaged, or no MATLAB file up to version 7: download it again.") from error
    if numbers is None or not np.issubdtype(numbers.dtype, np.number) or not numbers.size or numbers.min() < 1:
        raise UserError(f'{file} has no numbers called "{variable}": download it again.')
    return numbers.astype(np.int64).ravel()


LISTS = {"train": "annotations/trainval.txt", "test": "annotations/test.txt"}


def read_pets(copy: LocalCopy) -> DataSet | None:
    folder = copy.find_folder("images", *LISTS.values())
    if folder is None:
        return read_generic(copy)
    breeds: dict[int, str] = {}
    parts = {}
    for split, listing in LISTS.items():
        rows = _rows(folder / listing)
        for name, number in rows:
            breed = name.rpartition("_")[0]
            if breeds.setdefault(number, breed) != breed:
                raise UserError(
                    f"{folder / listing} has {breeds[number]} and {breed} as class {number}: download it again."
                )
        files = [f"images/{name}.jpg" for name, _ in rows]
        parts[split] = RawSplit(files, [breeds[number] for _, number in rows], listed_files(folder, files, listing))
    # Breeds are numbered alphabetically, ignoring case; other files of the data set rely on the numbers.
    return copy.build(parts, tuple(breeds[number] for number in sorted(breeds)))


def _rows(listing: Path) -> list[tuple[str, int]]:
    """Lines such as "Abyssinian_100 1 1 1": the image, its class from 1, its species, its breed within the species."""
    rows = []
    for number, line in enumerate(listing.read_text("utf-8", "replace").splitlines(), start=1):
        fields = line.split()
        if not fields or line.startswith("#"):
            continue
        if len(fields) < 2 or not fields[1].isdecimal():
            raise UserError(f'{listing} has no class in line {number} ("{line}"): download it again.')
        rows.append((fields[0], int(fields[1])))
    return rows
