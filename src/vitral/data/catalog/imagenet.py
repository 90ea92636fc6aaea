"""ImageNet (ILSVRC-2012): class folders named by WordNet ids, the validation images in such folders or all in one.

Classes go by their ids in sorted order, which is the order of every released model's outputs. They keep the ids as
names: two of the 1,000 are called "crane", and outputs are matched by id where weights name no classes. Labels of loose
validation images are looked for in val.txt ("ILSVRC2012_val_00000001.JPEG 65", numbers by sorted id, or an id) and in
LOC_val_solution.csv ("ILSVRC2012_val_00048981,n03995372 85 1 499 272").
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from vitral.data.catalog.copies import Copy, for_testing, read_hub
from vitral.data.folders import FileReader, find_images, sub_folders
from vitral.data.splits import DataSet, Part
from vitral.errors import UserError

KAGGLE = "ILSVRC/Data/CLS-LOC"
TABLES = ("val.txt", "LOC_val_solution.csv")
SYNSETS = "LOC_synset_mapping.txt"
CLASSES = 1000
_ID = re.compile(r"n\d{8}")


def read_imagenet(copy: Copy) -> DataSet | None:
    if (data := read_hub(copy)) is not None:
        return data
    kaggle = copy.path / KAGGLE
    place = kaggle if kaggle.is_dir() else copy.place_of("train") or copy.place_of("val")
    if place is None:
        return None
    train = _by_folder(place, "train") if (place / "train").is_dir() else None
    val = _val(place, (place, copy.path)) if (place / "val").is_dir() else None
    if train is not None:
        return copy.assembled({"train": train} if val is None else {"train": train, "val": val})
    if val is not None:
        return for_testing(copy, "val", val, ["There is no train folder: this copy is for testing only."])
    return None


def _val(place: Path, tables: Sequence[Path]) -> Part:
    return _by_folder(place, "val") if sub_folders(place / "val") else _by_table(place, tables)


def _by_folder(place: Path, split: str) -> Part:
    names: list[str] = []
    labels: list[str] = []
    for folder in sub_folders(place / split):
        if not _ID.fullmatch(folder):
            raise UserError(
                f"{place / split / folder} is not named by a WordNet id such as n01440764: rename it, or open {place} "
                "as an ordinary folder."
            )
        inside = find_images(place, f"{split}/{folder}/").names
        names += inside
        labels += [folder] * len(inside)
    return Part(names, labels, FileReader(str(place), names))


def _by_table(place: Path, tables: Sequence[Path]) -> Part:
    """The images of a flat val folder, in the order of their numbers."""
    found = [folder / name for folder in tables for name in TABLES if (folder / name).is_file()]
    if not found:
        raise UserError(
            f"{place / 'val'} has no class folders: put {' or '.join(TABLES)} beside it (the kit's own ground truth "
            "numbers the classes otherwise)."
        )
    listed = _read_table(found[0])
    names = find_images(place, "val/").names
    labels = [listed.get(Path(name).stem, "") for name in names]
    if "" in labels:
        raise UserError(f"{found[0]} does not name {names[labels.index('')]}: it belongs to other images.")
    if not all(map(_ID.fullmatch, labels)):
        labels = _ids_of(found[0], labels, _synsets(place, tables))
    return Part(names, labels, FileReader(str(place), names))


def _read_table(table: Path) -> dict[str, str]:
    """What follows an image's name, by the name without its ending."""
    rows = [re.split(r"[\s,]+", line.strip()) for line in table.read_text("utf-8").splitlines()]
    return {Path(row[0]).stem: row[1] for row in rows if len(row) > 1}


def _ids_of(table: Path, labels: Sequence[str], ids: Sequence[str]) -> list[str]:
    """Numbers count all classes, so some of the ids will not do: they would give wrong ones quietly."""
    if len(ids) != CLASSES:
        raise UserError(f"{table} numbers {CLASSES:,} classes: have all of them in train/, or {SYNSETS} beside it.")
    strange = next((label for label in labels if not label.isdecimal() or int(label) >= CLASSES), None)
    if strange is not None:
        raise UserError(f'{table} has the class "{strange}": it should be a WordNet id or a number below {CLASSES:,}.')
    return [ids[int(label)] for label in labels]


def _synsets(place: Path, tables: Sequence[Path]) -> list[str]:
    """The sorted ids of the file that comes with Kaggle's copy, else of the training folders."""
    for file in (folder / SYNSETS for folder in tables):
        if file.is_file():
            return sorted(line.split()[0] for line in file.read_text("utf-8").splitlines() if line)
    return sub_folders(place / "train") if (place / "train").is_dir() else []
