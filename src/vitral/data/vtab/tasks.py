"""The 19 tasks of VTAB-1k: the paper's rows, each with the rule of its labels."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from vitral.errors import UserError
from vitral.paper import vtab_tasks


@dataclass(frozen=True)
class TaskSpec:
    """One task; `train`, `val` and `test` are TFDS split expressions, before the first 800 and 200 are taken."""

    name: str
    group: str  # natural, specialized or structured
    builder: str  # TFDS's name of the data set, its setting and version
    classes: int
    train: str
    val: str
    test: str
    rule: LabelRule
    flip: bool  # whether BiT mirrors the training images
    crop: bool  # whether BiT crops them
    column: str  # in Table 9

    @property
    def dataset(self) -> str:
        """The data set's own name, which several tasks may share."""
        return self.builder.split(":")[0].split("/")[0]

    @property
    def setting(self) -> str:
        """TFDS's configuration, such as rgb of eurosat; empty if there is only one."""
        return self.builder.split(":")[0].partition("/")[2]

    def expressions(self, train: int = 800, val: int = 200) -> dict[str, str]:
        """Expressions by the names of our splits."""
        return {"train800": f"{self.train}[:{train}]", "val200": f"{self.val}[:{val}]", "test": self.test}


_VEHICLES = frozenset((0, 1, 2, "Car", "Van", "Truck"))
_NO_VEHICLE = 1000.0  # metres


@dataclass(frozen=True)
class LabelRule:
    """The fields that a label is computed from, by the last part of their names, the function, and class names."""

    fields: tuple[str, ...]
    label: Callable[..., int]
    names: tuple[str, ...] = ()


def stored(values: Sequence[Any]) -> int:
    return int(values[0])


def count_less_three(coordinates: Sequence[float]) -> int:
    """Every CLEVR scene has 3 to 10 objects, each with three coordinates."""
    return len(coordinates) // 3 - 3


def nearest_object(coordinates: Sequence[float]) -> int:
    return bin_of(min(coordinates[2::3]), (0, 8, 8.5, 9, 9.5, 10, 100))


def nearest_vehicle(types: Sequence[int | str], locations: Sequence[float]) -> int:
    """The z coordinate of the nearest car, van or truck, in metres before the camera; an image may have none."""
    depths = [depth for type_, depth in zip(types, locations[2::3], strict=True) if type_ in _VEHICLES]
    return bin_of(min([*depths, _NO_VEHICLE]), (-100, 8, 20, 999))


def bin_of(value: float, edges: Sequence[float]) -> int:
    """The last edge that lies below the value, -1 where none does: a value on an edge belongs to the bin before it.

    In single precision, in which TFDS stores what is given here.
    """
    return int((np.asarray(edges, np.float32) < np.float32(value)).sum()) - 1


def merged(values: Sequence[int], before: int, after: int) -> int:
    """`before` classes to `after`, neighbours together: floor(label / (before / after))."""
    return int(values[0]) * after // before


CLASS = LabelRule(("label",), stored)
# Of all tasks whose label is not the data set's own.
RULES: dict[str, LabelRule] = {
    "clevr-count": LabelRule(("pixel_coords",), count_less_three, tuple(f"{count} objects" for count in range(3, 11))),
    "clevr-distance": LabelRule(
        ("pixel_coords",), nearest_object, ("up to 8", "up to 8.5", "up to 9", "up to 9.5", "up to 10", "farther")
    ),
    "dsprites-location": LabelRule(("label_x_position",), partial(merged, before=32, after=16)),
    "dsprites-orientation": LabelRule(("label_orientation",), partial(merged, before=40, after=16)),
    "kitti-distance": LabelRule(
        ("type", "location"), nearest_vehicle, ("up to 8 m", "up to 20 m", "farther", "no vehicle")
    ),
    "smallnorb-azimuth": LabelRule(("label_azimuth",), stored),
    "smallnorb-elevation": LabelRule(("label_elevation",), stored),
}


def flattened(value: Any) -> list[Any]:
    """The values of nested lists and mappings, in order."""
    if isinstance(value, dict):
        return [item for inner in value.values() for item in flattened(inner)]
    if isinstance(value, list):
        return [item for inner in value for item in flattened(inner)]
    return [] if value is None else [value]


TASKS: dict[str, TaskSpec] = {
    row.name: TaskSpec(
        name=row.name,
        group=row.group,
        builder=row.builder,
        classes=row.classes,
        train="train",
        val=row.val.removesuffix("[:200]"),
        test=row.test,
        rule=RULES.get(row.name, CLASS),
        flip=row.flip,
        crop=row.crop,
        column=row.paper,
    )
    for row in vtab_tasks()
}


def find_task(name: str) -> TaskSpec:
    if name not in TASKS:
        close = difflib.get_close_matches(name, TASKS, 1)
        hint = f"did you mean {close[0]}?" if close else f"name one of {', '.join(TASKS)}."
        raise UserError(f"{name} is no task of VTAB: {hint}")
    return TASKS[name]


# TFDS numbers KITTI's types Car 0, Van 1, Truck 2, then people, trams and the rest; KITTI's own files name them.
