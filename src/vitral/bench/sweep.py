"""How the time of a step grows with the image, the batch and the depth, beside what the arithmetic says."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from vitral.architecture import ViTConfig
from vitral.bench.backends import Backend, Task
from vitral.bench.benchmark import Tell, macs, now, row, warm
from vitral.bench.results import Row
from vitral.bench.worker import Worker, WorkerFailed

_WORK = "growth, "
IMAGES = (64, 128, 256, 512, 1024)
BATCHES = (1, 4, 16, 64, 256)
DEPTHS = (3, 6, 12, 24)
AXES = ("image", "batch", "depth")
_FEWEST = 3  # steps that are timed
_LONGEST = 2.0  # seconds of a step: an axis ends where the next one would take longer
_SLACK = 1.15  # of the arithmetic: what a step may take more, for the noise of clocks


class Point(NamedTuple):
    """A step at one size."""

    axis: str  # one of AXES
    value: int
    seconds: float  # at the usual matrix rate
    macs: int


class SweepPoint(NamedTuple):
    """A size along an axis, and its task."""

    axis: str
    value: int
    task: Task


def measure(task: Task, backend: Backend, tell: Tell) -> list[Row]:
    """A row for each size; an axis ends where memory or patience does."""
    rows: list[Row] = []
    call, left = now(), list(_rungs(task))
    while left:
        with Worker(backend) as worker:
            left = _until_it_fails(worker, left, rows, call, tell)
    return rows


def _until_it_fails(
    worker: Worker, rungs: Sequence[SweepPoint], rows: list[Row], call: str, tell: Tell
) -> list[SweepPoint]:
    """Adds rows. What is returned is left for a new process: this one failed, and its axis ends here."""
    for place, rung in enumerate(rungs):
        if _too_long(rows, rung):
            continue
        tell(f"{rung.axis} {rung.value}")
        try:
            rows.append(_row(worker, rung, call))
        except WorkerFailed as failure:
            tell(f"{rung.axis} {rung.value}: {failure}")
            return [other for other in rungs[place:] if other.axis != rung.axis]
    return []


def _row(worker: Worker, rung: SweepPoint, call: str) -> Row:
    """All sizes share a process: nothing is told of a cold start, nor of memory, which only a GPU's counts anew."""
    runner = warm(worker, rung.task, rounds=1)
    runner.seconds.extend(worker.run(max(runner.steps, _FEWEST)))
    found = row(runner, rung.task, call, worker.ask("rate")["flops"])
    peak = found.peak_bytes if rung.task.device == "cuda" else 0
    told: dict[str, float] = {"value": rung.value}
    return replace(found, work=f"{_WORK}{rung.axis}", peak_bytes=peak, cold_seconds=0.0, details=told)


def _too_long(rows: Sequence[Row], rung: SweepPoint) -> bool:
    """By the arithmetic, from the last step along this axis."""
    own = [one for one in rows if one.work == f"{_WORK}{rung.axis}"]
    return bool(own) and own[-1].seconds * macs(rung.task) / own[-1].macs > _LONGEST


def newest(rows: Iterable[Row]) -> list[Row]:
    """The rows of the last call that measured growth: another may have been of another model."""
    own = [row for row in rows if row.work.startswith(_WORK)]
    last = max((row.call for row in own), default="")
    return [row for row in own if row.call == last]


def title(rows: Sequence[Row]) -> str:
    """Of a chart: images and depths grow in batches of one size, and batches with the model as it is."""
    model = next((row.model for row in rows if row.work == f"{_WORK}batch"), rows[0].model)
    sizes = sorted({str(row.batch) for row in rows if row.work != f"{_WORK}batch"})
    batches = f"; images and depths in batches of {' and '.join(sizes)}" if sizes else ""
    return f"A training step of {model} on {rows[0].facts.get('hardware', rows[0].device)}{batches}"


def points(rows: Iterable[Row]) -> list[Point]:
    """The last growth among the rows, along each axis.

    Sizes are measured one after the other, not in turns: times are those at the median of the matrix rates, so that
    a clock that falls, or a neighbour who takes half of the machine, does not look like growth.
    """
    own = newest(rows)
    usual = median(row.rate for row in own) if own else 0.0
    found = [
        Point(row.work.removeprefix(_WORK), int(row.details["value"]), row.seconds * row.rate / usual, row.macs)
        for row in own
    ]
    return sorted(found, key=lambda point: (AXES.index(point.axis), point.value))


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


def _rungs(task: Task) -> Iterator[SweepPoint]:
    for image in IMAGES:
        yield SweepPoint("image", image, replace(task, image=image))
    for batch in BATCHES:
        yield SweepPoint("batch", batch, replace(task, batch=batch))
    if isinstance(task.architecture, ViTConfig):
        for depth in DEPTHS:
            yield SweepPoint("depth", depth, replace(task, depth=depth))
