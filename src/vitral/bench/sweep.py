"""How the time of a training step grows with image size, batch and depth, compared with its arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from statistics import median
from typing import NamedTuple

from vitral.architecture import ViTConfig
from vitral.bench.backends import Backend, Workload
from vitral.bench.benchmark import step_macs, warm_up, worker_row
from vitral.bench.results import BenchmarkRow, now
from vitral.bench.worker import Worker, WorkerFailed
from vitral.events import EventHandler, Note
from vitral.report.charts import line_chart, svg_file

IMAGES = (64, 128, 256, 512, 1024)
BATCHES = (1, 4, 16, 64, 256)
DEPTHS = (3, 6, 12, 24)
AXES = {"image": "image size in pixels", "batch": "batch size in images", "depth": "depth in blocks"}
_MIN_STEPS = 3
_MAX_SECONDS = 2.0  # of a step: an axis ends where the next one would take longer
_NOISE = 1.15  # factor by which a step may exceed the arithmetic


class SweepPoint(NamedTuple):
    """One size along an axis."""

    axis: str  # one of AXES
    value: int
    workload: Workload


class MeasuredPoint(NamedTuple):
    """The time of a step at one size."""

    axis: str
    value: int
    seconds: float  # at the median matmul FLOP/s of the sweep
    macs: int


def run_sweep(workload: Workload, backend: Backend, on_event: EventHandler) -> list[BenchmarkRow]:
    """Measure a row per size; an axis ends where memory runs out or steps take too long.

    Args:
        workload: the training step whose image size, batch and depth are varied.
        backend: the library and settings.
        on_event: called with notes about the progress.

    Returns:
        The rows.
    """
    rows: list[BenchmarkRow] = []
    started_at, remaining = now(), list(_sweep_points(workload))
    while remaining:
        with Worker(backend) as worker:
            remaining = _measure_until_failure(worker, remaining, rows, started_at, on_event)
    return rows


def _measure_until_failure(
    worker: Worker, points: Sequence[SweepPoint], rows: list[BenchmarkRow], started_at: str, on_event: EventHandler
) -> list[SweepPoint]:
    """Add rows; return the points for a new process after this one failed, which ends the axis."""
    for index, point in enumerate(points):
        if _too_slow(rows, point):
            continue
        on_event(Note(f"{point.axis} {point.value}"))
        try:
            rows.append(_measure(worker, point, started_at))
        except WorkerFailed as failure:
            on_event(Note(f"{point.axis} {point.value}: {failure}"))
            return [other for other in points[index:] if other.axis != point.axis]
    return []


def _measure(worker: Worker, point: SweepPoint, started_at: str) -> BenchmarkRow:
    """One row; all sizes share a process, so there is no startup time, and peak memory only where it can be reset."""
    warm = warm_up(worker, point.workload, rounds=1)
    warm.seconds.extend(worker.run(max(warm.steps, _MIN_STEPS)))
    row = worker_row(warm, point.workload, started_at, worker.call("matmul_flops")["flops"])
    peak = row.peak_bytes if point.workload.device == "cuda" else 0
    return replace(row, work="growth", axis=point.axis, axis_value=point.value, peak_bytes=peak, startup_seconds=0.0)


def _too_slow(rows: Sequence[BenchmarkRow], point: SweepPoint) -> bool:
    """Whether the arithmetic, from the last step along this axis, predicts too long a step."""
    axis_rows = [row for row in rows if row.axis == point.axis]
    last = axis_rows[-1] if axis_rows else None
    return last is not None and last.seconds * step_macs(point.workload) / last.macs > _MAX_SECONDS


def newest_sweep(rows: Iterable[BenchmarkRow]) -> list[BenchmarkRow]:
    """The rows of the last sweep; an earlier one may have been of another model."""
    sweep_rows = [row for row in rows if row.axis]
    last = max((row.started_at for row in sweep_rows), default="")
    return [row for row in sweep_rows if row.started_at == last]


def measured_points(rows: Iterable[BenchmarkRow]) -> list[MeasuredPoint]:
    """The points of the last sweep, axis by axis.

    Sizes are measured one after the other, not in turns: times are scaled to the median matmul FLOP/s, so that a clock
    that drops or another process does not look like growth.
    """
    sweep_rows = newest_sweep(rows)
    rate = median(row.matmul_flops for row in sweep_rows) if sweep_rows else 0.0
    points = [
        MeasuredPoint(row.axis, row.axis_value, row.seconds * row.matmul_flops / rate, row.macs) for row in sweep_rows
    ]
    return sorted(points, key=lambda point: (list(AXES).index(point.axis), point.value))


def relative_growth(points: Sequence[MeasuredPoint]) -> list[float]:
    """For each point of an axis after the first: growth of the time over growth of the arithmetic."""
    return [(after.seconds / before.seconds) / (after.macs / before.macs) for before, after in pairwise(points)]


def summarize_sweep(rows: Iterable[BenchmarkRow]) -> list[str]:
    """One sentence for each size where time grows faster than the arithmetic, beyond noise."""
    sentences = []
    for axis, group in groupby(measured_points(rows), key=lambda point: point.axis):
        points = list(group)
        for point, growth in zip(points[1:], relative_growth(points), strict=True):
            if growth > _NOISE:
                sentences.append(
                    f"up to {axis} {point.value}, time grows {growth:.2f} times as fast as the arithmetic."
                )
    return sentences


def sweep_chart(rows: Sequence[BenchmarkRow]) -> str:
    """An SVG file with one panel per axis.

    The dashed line is the arithmetic scaled to the last point: the measured line lies above it where there is overhead.
    """
    charts = []
    for axis, group in groupby(measured_points(rows), key=lambda point: point.axis):
        points = list(group)
        last = points[-1]
        measured = [(point.value, 1e3 * point.seconds) for point in points]
        expected = [(point.value, 1e3 * last.seconds * point.macs / last.macs) for point in points]
        charts.append(line_chart({"measured": measured}, x=AXES[axis], y="ms per step", log=True, guide=expected))
    model = next((row.model for row in rows if row.axis == "batch"), rows[0].model)
    batches = sorted({str(row.batch) for row in rows if row.axis != "batch"})
    note = f" Image size and depth: batch {' and '.join(batches)}." if batches else ""
    return svg_file(
        charts,
        f"Training step of {model} on {rows[0].hardware}",
        f"Solid: measured. Dashed: the arithmetic, scaled to the last point.{note}",
    )


def _sweep_points(workload: Workload) -> Iterator[SweepPoint]:
    for image in IMAGES:
        yield SweepPoint("image", image, replace(workload, image=image))
    for batch in BATCHES:
        yield SweepPoint("batch", batch, replace(workload, batch=batch))
    if isinstance(workload.architecture, ViTConfig):
        for depth in DEPTHS:
            yield SweepPoint("depth", depth, replace(workload, depth=depth))
