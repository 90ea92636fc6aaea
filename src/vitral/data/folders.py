"""Class folders and loose files: DIR/class/..., or DIR/train/class/... beside val and test."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vitral.data.images import ImageError
from vitral.data.splits import SPLIT_NAMES, DataSet, RawSplit, make_dataset, natural_key
from vitral.errors import UserError

EXTENSIONS = frozenset(
    f".{kind}"
    for kind in (
        *("jpg", "jpeg", "jpe", "jfif", "mpo", "png", "apng", "webp", "gif", "bmp", "dib", "tif", "tiff", "avif"),
        *("jp2", "j2k", "jpx", "ppm", "pgm", "pbm", "pnm", "tga", "pcx", "ico", "qoi"),
    )
)
# The first bytes of the common formats, for files without an extension.
_OPENINGS = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"BM", b"II*\0", b"MM\0*", b"\0\0\0\x0cjP")


class EmptyClass(UserError):
    """A class folder without an image: too little to learn from, and one of the things that `check` tells."""

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(f"The class folder {folder / name} has no image: add some, or remove the folder.")
        self.folder = folder  # of the data set


@dataclass(frozen=True)
class FileReader:
    """Files below one folder."""

    folder: str
    names: Sequence[str]

    def read(self, index: int) -> bytes:
        try:
            with open(os.path.join(self.folder, self.names[index]), "rb", buffering=0) as stream:
                return stream.readall()
        except OSError as error:
            raise ImageError((error.strerror or "cannot be read").lower()) from error

    def mark(self, index: int) -> str:
        path = os.path.abspath(os.path.join(self.folder, self.names[index]))
        try:
            facts = os.stat(path)
        except OSError:
            return path
        return f"{path} {facts.st_size} {facts.st_mtime_ns}"


@dataclass
class ImageListing:
    """Image files below a folder, as "/"-separated paths relative to where the search began, and what is left out."""

    names: list[str] = field(default_factory=list)
    others: Counter[str] = field(default_factory=Counter)  # no images, by extension
    loose: int = 0  # images beside the class folders

    def note(self) -> list[str]:
        notes = []
        if self.others:
            total = sum(self.others.values())
            common = sorted(self.others.items(), key=lambda item: (-item[1], item[0]))[:4]
            kinds = ", ".join(f"{kind} {count}" for kind, count in common)
            words = "file that is no image" if total == 1 else "files that are no images"
            notes.append(f"Left out {total} {words} ({kinds}).")
        if self.loose:
            notes.append(f"Left out {self.loose} image{'s' * (self.loose != 1)} beside the class folders.")
        return notes


def read_folder(folder: Path, *, seed: int, held_out: float, empty: bool = False) -> DataSet:
    """A folder with one sub-folder per class, or with train (and val, test) folders that have them.

    With `empty` a class may have no image in train; without, it raises EmptyClass. Where there are only val and test
    the data is for testing, and train has no images.
    """
    source, children = str(folder), sub_folders(folder)
    splits: dict[str, str] = {}
    for child in children:
        name = SPLIT_NAMES.get(child.lower())
        if name in splits:
            raise UserError(f"{folder} has both {splits[name]} and {child}: keep one of them.")
        if name:
            splits[name] = child
    found = ImageListing()
    learns = "train" in splits and _holds_classes(folder / splits["train"])
    if not learns and not (children and len(splits) == len(children)):
        parts, classes = {"train": _part(folder, "", found, empty)}, tuple(children)
        return make_dataset(source, parts, seed=seed, held_out=held_out, classes=classes, notes=found.note())
    if not learns and ("train" in splits or not any(_holds_classes(folder / child) for child in children)):
        raise UserError(f"{folder} has {' and '.join(children)} but no class folders in train: add train/CLASS/.")
    parts = {name: _part(folder, f"{child}/", found, empty) for name, child in splits.items()}
    homes = [splits["train"]] if learns else children
    classes = tuple(sorted({name for home in homes for name in sub_folders(folder / home)}, key=natural_key))
    notes = found.note()
    if not learns:
        parts["train"] = RawSplit([], [], FileReader(source, []))
        notes.append("There is no train folder: this is for testing only.")
        return make_dataset(source, parts, seed=seed, held_out=held_out, classes=classes, notes=notes)
    ignored = [child for child in children if child not in splits.values()]
    if ignored:
        notes.append(f"Left out the folder{'s' * (len(ignored) > 1)} {', '.join(ignored)} beside {splits['train']}.")
    return make_dataset(source, parts, seed=seed, held_out=held_out, classes=classes, notes=notes)


def find_images(folder: Path, below: str = "", found: ImageListing | None = None) -> ImageListing:
    """Every image file under `folder / below`, hidden ones left out, links followed, in natural order."""
    found = found or ImageListing()
    names = []
    for name in _walk(str(folder), below, ()):
        extension = os.path.splitext(name)[1].lower()
        if extension in EXTENSIONS or (not extension and _opens_like_an_image(folder / name)):
            names.append(name)
        else:
            found.others[extension or "without extension"] += 1
    found.names += sorted(names, key=natural_key)
    return found


def sub_folders(folder: Path) -> list[str]:
    """The names of the folders in a folder, in natural order, hidden ones left out."""
    return sorted((entry.name for entry in _entries(str(folder)) if entry.is_dir()), key=natural_key)


def _part(folder: Path, below: str, found: ImageListing, empty: bool) -> RawSplit:
    names: list[str] = []
    labels: list[str] = []
    classes = sub_folders(folder / below)
    for name in classes:
        inside = find_images(folder, f"{below}{name}/", ImageListing(others=found.others)).names
        if not (inside or empty) and SPLIT_NAMES.get(below.rstrip("/").lower(), "train") == "train":
            raise EmptyClass(folder, f"{below}{name}")
        names += inside
        labels += [name] * len(inside)
    loose = sum(_named_like_an_image(entry) for entry in _entries(str(folder / below)))
    if not classes:
        what = f"{loose} images but no class folders" if loose else "no class folders"
        raise UserError(f"{folder / below} has {what}: put the images of each class in a sub-folder named after it.")
    found.loose += loose
    return RawSplit(names, labels, FileReader(str(folder), names))


def _holds_classes(folder: Path) -> bool:
    """Whether a folder called train is a split: a class may have that name too, but has its images directly."""
    entries = _entries(str(folder))
    return not any(map(_named_like_an_image, entries)) and any(entry.is_dir() for entry in entries)


def _named_like_an_image(entry: os.DirEntry[str]) -> bool:
    return os.path.splitext(entry.name)[1].lower() in EXTENSIONS and entry.is_file()


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if not entry.name.startswith((".", "__MACOSX"))]
    except OSError as error:
        raise UserError(f"{folder} cannot be read ({error.strerror}): check its name and your rights.") from error


def _walk(folder: str, below: str, above: tuple[str, ...]) -> Iterator[str]:
    here = os.path.realpath(os.path.join(folder, below))
    if here in above:  # a link to a folder around it
        return
    for entry in _entries(os.path.join(folder, below)):
        if entry.is_dir():
            yield from _walk(folder, f"{below}{entry.name}/", (*above, here))
        else:
            yield f"{below}{entry.name}"


def _opens_like_an_image(path: Path) -> bool:
    try:
        with path.open("rb") as stream:
            start = stream.read(16)
    except OSError:
        return False
    return start.startswith(_OPENINGS) or (start[:4] == b"RIFF" and start[8:12] == b"WEBP")
