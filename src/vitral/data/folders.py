"""Class folders and loose files: DIR/class/..., or DIR/train/class/... with val and test; and readers of images."""

from __future__ import annotations

import hashlib
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vitral.data.arrays import NPY
from vitral.data.images import ImageError
from vitral.data.pixels import eight_bit_array
from vitral.data.splits import SPLIT_NAMES, DataSet, RawSplit, content_bytes, make_dataset, natural_key, split_name
from vitral.errors import UserError

_FORMATS = "jpg jpeg jpe jfif mpo png apng webp gif bmp dib tif tiff avif heic heif hif jp2 j2k jpx"
_FORMATS += " ppm pgm pbm pnm tga pcx ico qoi npy"
# Images in formats that are not read; they are named, as their owner counts on them.
_OTHER_FORMATS = "cr2 cr3 nef arw dng raf orf rw2 raw psd svg jxl exr hdr eps pdf mp4 mov avi mkv webm"
EXTENSIONS, _UNSUPPORTED = (frozenset(f".{name}" for name in names.split()) for names in (_FORMATS, _OTHER_FORMATS))
MANIFESTS = frozenset({".csv", ".tsv", ".jsonl", ".ndjson"})  # files that list images and labels
# The first bytes of the common formats, for files without an extension.
_MAGIC_BYTES = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"BM", b"II*\0", b"MM\0*", b"\0\0\0\x0cjP", NPY)


class EmptyClass(UserError):
    """A class folder without an image; `check` reports it and continues."""

    def __init__(self, folder: Path, name: str) -> None:
        fix = "add some, or remove the folder"
        endings = {os.path.splitext(entry.name)[1].lower() for entry in _entries(str(folder / name)) if entry.is_file()}
        boxes = [kind.removeprefix(".").upper() for kind in sorted(endings & {".json", ".xml"})]
        if boxes:
            fix = (
                f"its {boxes[0]} files (boxes of object detection?) are not read; sort images by class, or list labels "
                "in a CSV"
            )
        super().__init__(f"The class folder {folder / name} has no image: {fix}.")
        self.folder = folder  # of the data set


def read_regular(path: str) -> bytes:
    """The bytes of a regular file, or ImageError: a pipe would wait for ever, and a device may never end."""
    with open(path, "rb", buffering=0, opener=_open_at_once) as stream:
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            raise ImageError("not a regular file")
        return stream.readall()


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # does not wait for the writer of a pipe


@dataclass(frozen=True)
class FileReader:
    """Image files below one folder."""

    folder: str
    names: Sequence[str]

    def read(self, index: int) -> bytes:
        try:
            return read_regular(os.path.join(self.folder, self.names[index]))
        except OSError as error:
            raise ImageError((error.strerror or "cannot be read").lower()) from error

    def mark(self, index: int) -> str:
        path = os.path.abspath(os.path.join(self.folder, self.names[index]))
        try:
            status = os.stat(path)
        except OSError:
            return path
        return f"{path} {status.st_size} {status.st_mtime_ns}"


@dataclass(frozen=True, eq=False)
class ObjectReader:
    """The images of an object in memory; `image` returns the value at an index.

    `mark` is a path's size and time of change, else a hash of the content, for which the image is read: pixels and
    features that are cached on disk are used again only for images that are equal.
    """

    image: Callable[[int], Any]
    keys: Sequence[str]

    def read(self, index: int) -> bytes | np.ndarray:
        value = self._value(index)
        if isinstance(value, str | Path):
            return FileReader("", [os.path.expanduser(value)]).read(0)
        if isinstance(value, bytes):
            return value
        return eight_bit_array(value, f"the image of {self.keys[index]}")

    def mark(self, index: int) -> str:
        value = self._value(index)
        if isinstance(value, str | Path):
            return FileReader("", [os.path.expanduser(value)]).mark(0)
        try:
            data = self.read(index)
        except ImageError as error:
            return str(error)
        return hashlib.sha256(content_bytes(data)).hexdigest()

    def _value(self, index: int) -> Any:
        value = self.image(index)
        if isinstance(value, Mapping):  # the undecoded form of a Hugging Face image
            return value.get("bytes") or value.get("path")
        return value


@dataclass
class ImageListing:
    """Image files below a folder, as "/"-separated paths relative to it, and counts of the files left out."""

    names: list[str] = field(default_factory=list)
    others: Counter[str] = field(default_factory=Counter)  # files that are no images, by extension
    unsupported: list[str] = field(default_factory=list)  # images in formats that are not read
    loose: int = 0  # images next to the class folders
    inner: dict[str, set[str]] = field(default_factory=dict)  # by class, its sub-folders that have images

    def notes(self) -> list[str]:
        notes = []
        if self.unsupported:
            named = ", ".join(self.unsupported[:4]) + (", ..." if self.unsupported[4:] else "")
            count = f"{len(self.unsupported)} file{'s' * (len(self.unsupported) != 1)}"
            notes.append(f"Left out {count} in formats that are not read ({named}): convert to JPEG or PNG.")
        if self.others:
            total = sum(self.others.values())
            common = sorted(self.others.items(), key=lambda item: (-item[1], item[0]))[:4]
            counts = ", ".join(f"{extension} {count}" for extension, count in common)
            files = "file that is no image" if total == 1 else "files that are no images"
            notes.append(f"Left out {total} {files} ({counts}).")
        if self.loose:
            notes.append(f"Left out {self.loose} image{'s' * (self.loose != 1)} beside the class folders.")
        return [*notes, *self._merged()]

    def _merged(self) -> list[str]:
        """A note about classes with several sub-folders, which may have been meant as classes."""
        counts = {name: len(folders) for name, folders in self.inner.items() if len(folders) > 1}
        if not counts:
            return []
        if len(counts) == 1:
            return [f"{count} sub-folders of {name} are read as one class." for name, count in counts.items()]
        named = ", ".join(f"{name} ({count})" for name, count in list(counts.items())[:4])
        more = ", ..." if len(counts) > 4 else "."
        return [f"Sub-folders of {len(counts)} classes are read as one class each: {named}{more}"]


def read_folder(folder: Path, *, held_out: float, empty: bool = False) -> DataSet:
    """Read a folder with one sub-folder per class, or with train (and val, test) folders of such sub-folders.

    If it has val and test alone, the data is for testing only. A class without an image in train raises EmptyClass
    unless `empty` accepts it.
    """
    source, children = str(folder), sub_folders(folder)
    splits: dict[str, str] = {}
    for child in children:
        name = SPLIT_NAMES.get(child.lower())
        if name in splits:
            raise UserError(f"{folder} has both {splits[name]} and {child}: keep one of them.")
        if name:
            splits[name] = child
    listing = ImageListing()
    has_train = "train" in splits and _holds_classes(folder / splits["train"])
    if not has_train and not (children and len(splits) == len(children)):
        if held_out:  # else a single class is accepted
            _refuse_folders_around_classes(folder, children)
        parts, classes = {"train": _read_classes(folder, "", listing, empty)}, tuple(children)
        return make_dataset(source, parts, held_out=held_out, classes=classes, notes=listing.notes())
    if not has_train and ("train" in splits or not any(_holds_classes(folder / child) for child in children)):
        raise UserError(
            f"{folder} has {' and '.join(children)} but no class folders in train: "
            f"add train/CLASS/{_or_manifest(folder, folder / splits.get('train', ''))}."
        )
    parts = {name: _read_classes(folder, f"{child}/", listing, empty) for name, child in splits.items()}
    class_parents = [splits["train"]] if has_train else children
    classes = tuple(
        sorted({name for parent in class_parents for name in sub_folders(folder / parent)}, key=natural_key)
    )
    notes = listing.notes()
    if not has_train:
        notes.append("There is no train folder: this is for testing only.")
    ignored = [child for child in children if child not in splits.values()]
    if ignored:
        notes.append(f"Left out the folder{'s' * (len(ignored) > 1)} {', '.join(ignored)} beside {splits['train']}.")
    return make_dataset(source, parts, held_out=held_out, classes=classes, notes=notes)


def find_images(folder: Path, below: str = "", listing: ImageListing | None = None) -> ImageListing:
    """Find the image files under `folder / below` in natural order; hidden ones are left out, links are followed.

    Beside other images, arrays are features or masks of them, and left out.
    """
    listing = listing or ImageListing()
    names: list[str] = []
    for name, regular in _walk(str(folder), below, ()):
        if not regular:
            listing.others["not regular files"] += 1
            continue
        extension = os.path.splitext(name)[1].lower()
        if extension in EXTENSIONS or (not extension and _has_image_magic(folder / name)):
            names.append(name)
        elif extension in _UNSUPPORTED:
            listing.unsupported.append(name)
        else:
            listing.others[extension or "without extension"] += 1
    images = [name for name in names if not is_array_file(name)] or names
    if len(images) < len(names):
        listing.others[".npy"] += len(names) - len(images)
    listing.names += sorted(images, key=natural_key)
    return listing


def is_array_file(name: str) -> bool:
    """Whether the name is that of a NumPy array, which may be an image or belong to one."""
    return name.lower().endswith(".npy")


def labelled_images(folder: Path, labels: Mapping[str, str]) -> RawSplit:
    """The images of some folders below `folder`, which end in "/", with the label of each."""
    names_by_folder = {below: find_images(folder, below).names for below in labels}
    names = [name for images in names_by_folder.values() for name in images]
    return RawSplit(
        names,
        [labels[below] for below in names_by_folder for _ in names_by_folder[below]],
        FileReader(str(folder), names),
    )


def sub_folders(folder: Path) -> list[str]:
    """The names of the folders in a folder, in natural order, hidden ones left out."""
    return sorted((entry.name for entry in _entries(str(folder)) if entry.is_dir()), key=natural_key)


def _read_classes(folder: Path, below: str, listing: ImageListing, empty: bool) -> RawSplit:
    names: list[str] = []
    labels: list[str] = []
    classes = sub_folders(folder / below)
    for name in classes:
        start = len(listing.names)
        images = find_images(folder, f"{below}{name}/", listing).names[start:]
        if not (images or empty) and SPLIT_NAMES.get(below.rstrip("/").lower(), "train") == "train":
            raise EmptyClass(folder, f"{below}{name}")
        listing.inner.setdefault(name, set()).update(_first_folders(images, f"{below}{name}/"))
        names += images
        labels += [name] * len(images)
    loose = sum(_has_image_extension(entry) for entry in _entries(str(folder / below)))
    if not classes:
        contents = f"{loose} images but no class folders" if loose else "no class folders"
        advice = f"put the images of each class in a sub-folder named after it{_or_manifest(folder / below)}"
        if SPLIT_NAMES.get(below.rstrip("/").lower(), "train") != "train":
            advice += ", or name the train folder alone"
        raise UserError(f"{folder / below} has {contents}: {advice}.")
    listing.loose += loose
    return RawSplit(names, labels, FileReader(str(folder), names))


def _first_folders(names: Sequence[str], below: str) -> set[str]:
    """The folders in `below`, which ends in "/", that these files are in or below."""
    rests = (name[len(below) :].partition("/") for name in names)
    return {folder for folder, slash, _ in rests if slash}


def _refuse_folders_around_classes(folder: Path, children: Sequence[str]) -> None:
    """Refuse what is not meant as classes: images with a file of their labels, the folder that an archive is unpacked
    to, splits of other names."""
    if not children:
        return
    manifest = _or_manifest(folder) if len(children) == 1 or all(map(split_name, children)) else ""
    if manifest and not any(_holds_classes(folder / child) for child in children):
        raise UserError(f"{folder} has no class folders but {', '.join(children[:4])}: add some{manifest}.")
    if not all(_holds_classes(folder / child) for child in children):
        return
    inner = folder / children[0]
    if len(children) == 1 and sum(bool(find_images(inner, f"{name}/").names) for name in sub_folders(inner)) > 1:
        raise UserError(f"{folder} has one folder, and the class folders are in that: name {inner}.")
    for child in children:
        if split_name(child) == "train":
            raise UserError(
                f"{folder / child} has class folders, as a split has: rename it to train, and others to val or test, "
                f"or name {folder / child}."
            )


def _or_manifest(*folders: Path) -> str:
    """The advice to pass a file of labels, if there is one next to the images."""
    names = (entry.path for folder in folders for entry in _entries(str(folder)))
    manifests = [name for name in names if os.path.splitext(name)[1].lower() in MANIFESTS]
    manifests.sort(key=lambda name: ("train" not in os.path.basename(name).lower(), name))
    return f", or name the file of their labels: {manifests[0]}" if manifests else ""


def _holds_classes(folder: Path) -> bool:
    """Whether a folder named train is a split: a class may have that name too, but contains images directly."""
    entries = _entries(str(folder))
    return not any(map(_has_image_extension, entries)) and any(entry.is_dir() for entry in entries)


def _has_image_extension(entry: os.DirEntry[str]) -> bool:
    return os.path.splitext(entry.name)[1].lower() in EXTENSIONS and entry.is_file()


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if not entry.name.startswith((".", "__MACOSX"))]
    except OSError as error:
        raise UserError(f"{folder} cannot be read ({error.strerror}): check its name and your permissions.") from error


def _walk(folder: str, below: str, above: tuple[str, ...]) -> Iterator[tuple[str, bool]]:
    """Files, and whether they are regular; so is a broken link, whose image is then reported as unreadable."""
    current = os.path.realpath(os.path.join(folder, below))
    if current in above:  # a link to one of its parents
        return
    for entry in _entries(os.path.join(folder, below)):
        if entry.is_dir():
            yield from _walk(folder, f"{below}{entry.name}/", (*above, current))
        else:
            yield f"{below}{entry.name}", entry.is_file() or not os.path.exists(entry.path)


def _has_image_magic(path: Path) -> bool:
    try:
        with path.open("rb") as stream:
            start = stream.read(16)
    except OSError:
        return False
    return start.startswith(_MAGIC_BYTES) or (start[:4] == b"RIFF" and start[8:12] == b"WEBP")
