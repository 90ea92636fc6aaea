"""The 19 tasks of VTAB-1k: the paper's rows, each with the rule of its labels and the images of its splits.

Splits are TFDS expressions such as "train[60%:80%][:200]". A boundary is a count or a percentage; percentages are
rounded to the closest count, as TFDS does (at .5 to the even one). task_adaptation rounds them down: at the sizes of
VTAB's data sets both give the same images. A second slice counts within the first, as in Python; TFDS itself has no
second one.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from vitral.errors import UserError
from vitral.paper import VtabTaskRow, read_rows

_EXPRESSION = re.compile(r"([a-z_]+)((?:\[[^\[\]]*\])*)")
_SLICE = re.compile(r"\[(-?[0-9]+%?)?:(-?[0-9]+%?)?\]")
_MAX_DEVIATIONS = 10.0  # standard deviations


@dataclass(frozen=True, kw_only=True)
class TaskSpec(VtabTaskRow):
    """One task, as a row of the paper's; `builder` is TFDS's name of the data set, its setting and version."""

    @property
    def rule(self) -> LabelRule:
        return RULES.get(self.name, CLASS)

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
        of_val = self.val.removesuffix("[:200]")
        return {"train800": f"train[:{train}]", "val200": f"{of_val}[:{val}]", "test": self.test}


# TFDS numbers KITTI's types Car 0, Van 1, Truck 2, then people, trams and the rest; KITTI's own files name them.
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


TASKS = {task.name: task for task in read_rows(TaskSpec, "vtab.toml")}


def find_task(name: str) -> TaskSpec:
    if name not in TASKS:
        close = difflib.get_close_matches(name, TASKS, 1)
        hint = f"did you mean {close[0]}?" if close else f"name one of {', '.join(TASKS)}."
        raise UserError(f"{name} is not a task of VTAB: {hint}")
    return TASKS[name]


def stored_split(expression: str) -> str:
    """The data set's split that an expression selects from."""
    return _parsed(expression)[0]


def positions(expression: str, count: int) -> range:
    """The indices that an expression selects in a split of `count` images, in ascending order."""
    indices = range(count)
    for first, last in _parsed(expression)[1]:
        indices = indices[_boundary(first, len(indices)) : _boundary(last, len(indices))]
    return indices


def _parsed(expression: str) -> tuple[str, list[tuple[str, str]]]:
    whole = _EXPRESSION.fullmatch(expression)
    slices = re.findall(r"\[[^\[\]]*\]", whole[2]) if whole else []
    if whole is None or not all(_SLICE.fullmatch(text) for text in slices):
        raise ValueError(f"{expression} is not a split expression such as train[60%:80%][:200]")
    return whole[1], [(first, last) for first, last in _SLICE.findall(whole[2])]


def _boundary(text: str, count: int) -> int | None:
    if text.endswith("%"):
        return round(int(text[:-1]) * count / 100)
    return int(text) if text else None


def fairly_drawn(chosen: np.ndarray, stored: np.ndarray) -> bool:
    """Whether class counts, (k,) of (k,), may be a random sample: chi-square, within 10 standard deviations.

    Files that are sorted by class fail this by far: their first 800 images are of one class or a few.
    """
    share = stored[stored > 0] / stored.sum()
    drawn, classes = chosen.sum(), len(share)
    expected = share * drawn
    distance = ((chosen[stored > 0] - expected) ** 2 / expected).sum()
    variance = 2 * (classes - 1) + ((1 / share).sum() - classes**2 - 2 * classes + 2) / drawn
    return bool(distance <= classes - 1 + _MAX_DEVIATIONS * np.sqrt(max(variance, 0)))
