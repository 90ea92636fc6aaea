"""How the time of a step grows with the image, the batch and the depth, beside what the arithmetic says."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from vitral.architecture import ViTConfig
from vitral.bench.contestants import Contestant, Task
from vitral.bench.player import Player, PlayerFailed
from vitral.bench.race import Tell, macs, now, row, warm
from vitral.bench.results import Row

_WORK = "growth, "
IMAGES = (64, 128, 256, 512, 1024)
BATCHES = (1, 2, 4, 8, 16, 32)
DEPTHS = (3, 6, 12, 24)
_RUNS = 5
_LONGEST = 5.0  # seconds of a step: an axis ends where the next one would take longer
_SLACK = 1.15  # of the arithmetic: what a step may take more, for the noise of clocks


class Point(NamedTuple):
    """A step at one size."""

    axis: str  # image, batch or depth
    value: int
    seconds: float  # at the usual matrix rate
    macs: int


def measure(task: Task, contestant: Contestant, tell: Tell) -> list[Row]:
    """A row for each size, in a process of its own; an axis ends where memory or patience does."""
    rows: list[Row] = []
    ended: set[str] = set()
    call = now()
    for axis, value, larger in _tasks(task):
        if axis in ended or _too_long(rows, axis, larger):
            ended.add(axis)
            continue
        tell(f"{axis} {value}")
        try:
            with Player(contestant) as player:
                runner = warm(player, larger, rounds=1)
                runner.seconds.extend(player.run(_RUNS))
                found = row(runner, larger, call, player.ask("rate")["flops"])
        except PlayerFailed as failure:
            tell(f"{axis} {value}: {failure}")
            ended.add(axis)
            continue
        rows.append(replace(found, work=f"{_WORK}{axis}", details={"value": value}))
    return rows


def _too_long(rows: Sequence[Row], axis: str, larger: Task) -> bool:
    """By the arithmetic, from the last step along this axis."""
    own = [one for one in rows if one.work == f"{_WORK}{axis}"]
    return bool(own) and own[-1].seconds * macs(larger) / own[-1].macs > _LONGEST


def points(rows: Iterable[Row]) -> list[Point]:
    """Those of the rows that belong to a growth, along each axis.

    Sizes are measured one after the other, not in turns: times are those at the median of the matrix rates, so that
    a clock that falls, or a neighbour who takes half of the machine, does not look like growth.
    """
    own = [row for row in rows if row.work.startswith(_WORK)]
    usual = median(row.rate for row in own) if own else 0.0
    return sorted(
        Point(row.work.removeprefix(_WORK), int(row.details["value"]), row.seconds * row.rate / usual, row.macs)
        for row in own
    )


def steepness(points: Sequence[Point]) -> list[float]:
    """Of each point after the first of its axis: growth of time over growth of arithmetic; above 1 is too much."""
    return [(after.seconds / before.seconds) / (after.macs / before.macs) for before, after in pairwise(points)]


def too_steep(points: Sequence[Point]) -> list[str]:
    """One sentence for each place where time grows faster than the arithmetic, beyond what clocks scatter."""
    found = []
    for axis in dict.fromkeys(point.axis for point in points):
        own = [point for point in points if point.axis == axis]
        for point, steep in zip(own[1:], steepness(own), strict=True):
            if steep > _SLACK:
                found.append(f"up to {axis} {point.value} time grows {steep:.2f} times as fast as the arithmetic.")
    return found


def _tasks(task: Task) -> Iterator[tuple[str, int, Task]]:
    for image in IMAGES:
        yield "image", image, replace(task, image=image)
    for batch in BATCHES:
        yield "batch", batch, replace(task, batch=batch)
    if isinstance(task.architecture, ViTConfig):
        for depth in DEPTHS:
            yield "depth", depth, replace(task, depth=depth)
