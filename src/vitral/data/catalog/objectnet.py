"""ObjectNet as its makers pack it: images/ in a folder for each class, and mappings/ from its classes to ImageNet's.

Only the classes that ImageNet has too are opened. Its licence forbids changing the parameters of any model by these
images, so all of them are for testing and none for training.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitral.data.catalog.copies import Copy, copy_of, for_testing
from vitral.data.folders import FileReader, find_images, sub_folders
from vitral.data.images import decode
from vitral.data.splits import DataSet, Part
from vitral.errors import UserError

# The makers speak of a red border of 1 pixel, and their own loader (objectnet-template-pytorch) cuts off 2, as have
# those who published results since: a pixel of the photograph is lost, and no red is left.
BORDER = 2
FOLDERS, OVERLAP = "mappings/folder_to_objectnet_label.json", "mappings/objectnet_to_imagenet_1k.json"
NAMES, OUTPUTS = "mappings/imagenet_to_label_2012_v2", "mappings/pytorch_to_imagenet_2012_id.json"


@dataclass(frozen=True)
class BorderlessReader:
    """Photographs without their red border, uint8 (h, w, 3)."""

    files: FileReader

    def read(self, index: int) -> np.ndarray:
        pixels = decode(self.files.read(index))
        return np.ascontiguousarray(pixels[BORDER:-BORDER, BORDER:-BORDER])

    def mark(self, index: int) -> str:
        return self.files.mark(index)


def read_objectnet(copy: Copy) -> DataSet | None:
    place = copy.place_of("images", FOLDERS, OVERLAP)
    if place is None:
        return None
    overlap, called = _json(place / OVERLAP), _json(place / FOLDERS)
    folders = sub_folders(place / "images")
    names: list[str] = []
    labels: list[str] = []
    for folder in folders:
        if called.get(folder) in overlap:
            inside = find_images(place, f"images/{folder}/").names
            names += inside
            labels += [called[folder]] * len(inside)
    left_out = sum(called.get(folder) not in overlap for folder in folders)
    notes = ["ObjectNet is for testing only: its licence forbids training on it."]
    notes += [f"Left out {left_out} of {len(folders)} classes, which ImageNet does not have."] if left_out else []
    part = Part(names, labels, BorderlessReader(FileReader(str(place), names)))
    return for_testing(copy, "test", part, notes)


def imagenet_outputs(source: str, classes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """The outputs of an ImageNet model that are right for each of these classes, by the mappings of the copy."""
    place = copy_of(source, "the mappings of objectnet-1.0.zip", held_out=0).place_of(OVERLAP, NAMES, OUTPUTS)
    if place is None:
        raise UserError(f"{source} lacks {OVERLAP}, {NAMES} or {OUTPUTS}: unpack the whole of objectnet-1.0.zip.")
    names = [line.strip() for line in (place / NAMES).read_text("utf-8").splitlines()]
    overlap, lines = _json(place / OVERLAP), _json(place / OUTPUTS)
    try:
        output = {names[int(line)]: int(number) for number, line in lines.items()}
        return tuple(tuple(output[name] for name in overlap[label].split("; ")) for label in classes)
    except (KeyError, IndexError, ValueError) as error:
        raise UserError(
            f"{place / 'mappings'} has files that do not belong together ({error}): unpack it again."
        ) from error


def _json(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise UserError(f"{file} is no JSON: unpack it again.") from error
