"""A user's copy of a data set of the catalog, the layouts that any copy may have, and readers of the small data sets.

Flowers-102 comes as jpg/, imagelabels.mat and setid.mat, which give class and split by number: train is `trnid` (1,020
images), val is `valid` (1,020) and test is `tstid` (6,149), as in TFDS. The paper's fine-tuning code trains on train
alone. The files number the classes and do not name them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from vitral.data.folders import FileReader, read_folder, sub_folders
from vitral.data.images import ImageError, decode
from vitral.data.parquet import read_parquet
from vitral.data.splits import SPLIT_NAMES, DataSet, RawSplit, make_dataset
from vitral.errors import UserError

ROOT = "VITRAL_DATA"  # the variable that names the folder of all copies


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
BATCHES = {"train": [f"data_batch_{number}" for number in range(1, 6)], "test": ["test_batch"]}


def read_cifar10(copy: LocalCopy) -> DataSet | None:
    if folder := copy.find_folder("test_batch.bin"):
        files = {split: [folder / f"{name}.bin" for name in names] for split, names in BATCHES.items()}
        return copy.build({split: _records(split, files[split], CIFAR10, head=1) for split in files}, CIFAR10)
    if folder := copy.find_folder("test_lables.json"):
        files = {split: [folder / f"{name}.png" for name in names] for split, names in BATCHES.items()}
        parts = {split: _image_strips(split, files[split], folder / f"{split}_lables.json") for split in files}
        return copy.build(parts, CIFAR10)
    _refuse_python_version(copy, "batches.meta", "cifar-10-binary.tar.gz")
    return read_generic(copy)


def read_cifar100(copy: LocalCopy) -> DataSet | None:
    if folder := copy.find_folder("train.bin", "test.bin"):
        classes = tuple(_bytes(folder / "fine_label_names.txt").decode("utf-8", "replace").split())
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
            raise UserError(f"{file} is truncated or not CIFAR: its {len(content)} bytes are not records of {length}.")
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
            raise UserError(f"{file} is {pixels.shape[1]} pixels wide, not {SIDE * SIDE}: it is not CIFAR.")
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
        raise UserError(f"{file} is damaged, or not a MATLAB file up to version 7: download it again.") from error
    if numbers is None or not np.issubdtype(numbers.dtype, np.number) or not numbers.size or numbers.min() < 1:
        raise UserError(f'{file} has no numbers called "{variable}": download it again.')
    return numbers.astype(np.int64).ravel()


def read_tiny_imagenet(copy: LocalCopy) -> DataSet | None:
    """train/WNID/images/, and val/images/ with the classes in a list."""
    listing = "val/val_annotations.txt"
    folder = copy.find_folder("train", listing)
    if folder is None:
        return read_generic(copy)
    rows = [line.split("\t") for line in _bytes(folder / listing).decode("utf-8", "replace").splitlines() if line]
    if any(len(row) < 2 for row in rows):
        raise UserError(f"{folder / listing} has a line without a class: download it again.")
    train = sorted(path.relative_to(folder).as_posix() for path in folder.glob("train/*/images/*.JPEG"))
    val, classes = [f"val/images/{row[0]}" for row in rows], [name.split("/")[1] for name in train]
    parts = {
        "train": RawSplit(train, classes, FileReader(str(folder), train)),
        "val": RawSplit(val, [row[1] for row in rows], listed_files(folder, val, listing)),
    }
    return copy.build(parts, tuple(sorted({*classes})))


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


@dataclass(frozen=True)
class LocalCopy:
    """A copy on disk."""

    source: str  # as the user wrote it
    path: Path
    held_out: float  # the share to hold out if it has no test split of its own

    def folders(self) -> list[Path]:
        """The folder and its direct sub-folders: archives often unpack into one."""
        if not self.path.is_dir():
            return []
        return [self.path, *(self.path / name for name in sub_folders(self.path))]

    def find_folder(self, *names: str) -> Path | None:
        """The first of `folders` that contains all these files and folders."""
        matches = (folder for folder in self.folders() if all((folder / name).exists() for name in names))
        return next(matches, None)

    def build(
        self, parts: Mapping[str, RawSplit], classes: tuple[str, ...] | None = None, notes: Iterable[str] = ()
    ) -> DataSet:
        """The data set of raw splits."""
        return make_dataset(self.source, parts, held_out=self.held_out, classes=classes, notes=notes)


@dataclass(frozen=True)
class CatalogEntry:
    """A data set of the catalog."""

    about: str
    read: Callable[[LocalCopy], DataSet | None]  # None if the copy has none of the layouts
    layout: str = ""  # what a copy contains, for messages; empty if the data set needs no copy
    classes: int = 0
    sizes: Mapping[str, int] = field(default_factory=dict)  # images of the original, by split


def find_copy(source: str, layout: str, held_out: float) -> LocalCopy:
    """The copy that `name:PATH` means, or `name` for $VITRAL_DATA/name."""
    name, _, given = source.partition(":")
    if not layout:
        if given:
            raise UserError(f"{name} comes with a library and has no copy: write {name} alone.")
        return LocalCopy(source, Path(), held_out)
    root = os.environ.get(ROOT, "")
    path = Path(given or (os.path.join(root, name) if root else "")).expanduser()
    if not (given or root) or not path.exists():
        lacking = f"{path} does not exist" if given or root else f"{name} is not downloaded automatically"
        raise UserError(f"{lacking}: write {name}:FOLDER, or put it in ${ROOT}/{name}; it should have {layout}.")
    return LocalCopy(source, path, held_out)


def read_parquet_copy(copy: LocalCopy) -> DataSet | None:
    """Read Parquet files in the hub's layout; None if there are none."""
    single = copy.path.suffix.lower() == ".parquet" and copy.path.is_file()
    files = [copy.path] if single else [file for folder in copy.folders() for file in folder.glob("*.parquet")]
    if not files:
        return None
    return replace(read_parquet(str(copy.path), files, held_out=copy.held_out), source=copy.source)


def read_generic(copy: LocalCopy) -> DataSet | None:
    """Read the hub's Parquet files, or class folders in train (and val, test); None if there are neither."""
    if (data := read_parquet_copy(copy)) is not None:
        return data
    for folder in copy.folders():
        train = [name for name in sub_folders(folder) if SPLIT_NAMES.get(name.lower()) == "train"]
        if any(sub_folders(folder / name) for name in train):
            return replace(read_folder(folder, held_out=copy.held_out), source=copy.source)
    return None


def listed_files(folder: Path, names: Sequence[str], listing: str) -> FileReader:
    """A reader of files that a listing of the data set names, all of them in one folder below `folder`."""
    below = os.path.dirname(names[0]) if names else ""
    present = {f"{below}/{name}" for name in os.listdir(folder / below)}
    missing = [name for name in names if name not in present]
    if missing or not names:
        problem = f"lists {len(missing)} images that are not there ({missing[0]})" if missing else "lists no images"
        raise UserError(f"{folder / listing} {problem}: unpack the whole archive again.")
    return FileReader(str(folder), names)


def test_only(copy: LocalCopy, name: str, part: RawSplit, notes: Iterable[str]) -> DataSet:
    """A data set whose images are all in one held-out split, called `name`; train is empty."""
    data = copy.build({"test": part}, notes=notes)
    assert data.test is not None
    return replace(data, test=replace(data.test, name=name))
