"""How the time of a training step grows with image size, batch and depth, compared with its arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Any

from vitral.architecture import ViTConfig
from vitral.bench.backends import Backend, Workload
from vitral.bench.benchmark import step_macs, warm_up, worker_row
from vitral.bench.results import BenchmarkRow, now
from vitral.bench.worker import Worker, WorkerFailed
from vitral.events import EventHandler, Note
from vitral.report.charts import line_chart, svg_file

SIZES = {"image": (64, 128, 256, 512, 1024), "batch": (1, 4, 16, 64, 256), "depth": (3, 6, 12, 24)}
AXES = {"image": "image size in pixels", "batch": "batch size in images", "depth": "depth in blocks"}
_MIN_STEPS = 3
_MAX_SECONDS = 2.0  # of a step: an axis ends where the next one would take longer
_NOISE = 1.15  # factor by which a step may exceed the arithmetic


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
    axes = [axis for axis in SIZES if axis != "depth" or isinstance(workload.architecture, ViTConfig)]
    started_at, remaining = now(), [(axis, size) for axis in axes for size in SIZES[axis]]
    while remaining:
        with Worker(backend) as worker:
            remaining = _measure_until_failure(worker, workload, remaining, rows, started_at, on_event)
    return rows


def _measure_until_failure(
    worker: Worker,
    workload: Workload,
    points: Sequence[tuple[str, int]],
    rows: list[BenchmarkRow],
    started_at: str,
    on_event: EventHandler,
) -> list[tuple[str, int]]:
    """Add rows; return the points for a new process after this one failed, which ends the axis."""
    for index, (axis, size) in enumerate(points):
        changes: dict[str, Any] = {axis: size}
        sized = replace(workload, **changes)
        last = next((row for row in reversed(rows) if row.axis == axis), None)
        if last is not None and last.seconds * step_macs(sized) / last.macs > _MAX_SECONDS:  # by the arithmetic
            continue
        on_event(Note(f"{axis} {size}"))
        try:
            row = _measure(worker, sized, started_at)
        except WorkerFailed as failure:
            on_event(Note(f"{axis} {size}: {failure}"))
            return [point for point in points[index:] if point[0] != axis]
        rows.append(replace(row, axis=axis, axis_value=size))
    return []


def _measure(worker: Worker, workload: Workload, started_at: str) -> BenchmarkRow:
    """One row; all sizes share a process, so there is no startup time, and peak memory only where it can be reset."""
    warm_up(worker, workload, rounds=1)
    worker.seconds += worker.run(max(worker.steps, _MIN_STEPS))
    row = worker_row(worker, workload, started_at, worker.call("matmul_flops"))
    peak = row.peak_bytes if workload.device == "cuda" else 0
    return replace(row, work="growth", peak_bytes=peak, startup_seconds=0.0)


def newest_sweep(rows: Iterable[BenchmarkRow]) -> list[BenchmarkRow]:
    """The rows of the last sweep; an earlier one may have been of another model."""
    sweep_rows = [row for row in rows if row.axis]
    last = max((row.started_at for row in sweep_rows), default="")
    return [row for row in sweep_rows if row.started_at == last]


def measured_points(rows: Iterable[BenchmarkRow]) -> dict[str, list[BenchmarkRow]]:
    """The rows of the last sweep by axis, from the smallest size to the largest.

    Sizes are measured one after the other, not in turns: times are scaled to the median matmul FLOP/s, so that a clock
    that drops or another process does not look like growth.
    """
    sweep = sorted(newest_sweep(rows), key=lambda row: row.axis_value)
    rate = median(row.matmul_flops for row in sweep) if sweep else 0.0
    scaled = [replace(row, seconds=row.seconds * row.matmul_flops / rate) for row in sweep]
    points = {axis: [row for row in scaled if row.axis == axis] for axis in AXES}
    return {axis: rows for axis, rows in points.items() if rows}


def relative_growth(points: Sequence[BenchmarkRow]) -> list[float]:
    """For each point of an axis after the first: growth of the time over growth of the arithmetic."""
    return [(after.seconds / before.seconds) / (after.macs / before.macs) for before, after in pairwise(points)]


def summarize_sweep(rows: Iterable[BenchmarkRow]) -> list[str]:
    """One sentence for each size where time grows faster than the arithmetic, beyond noise."""
    return [
        f"up to {axis} {point.axis_value}, time grows {growth:.2f} times as fast as the arithmetic."
        for axis, points in measured_points(rows).items()
        for point, growth in zip(points[1:], relative_growth(points), strict=True)
        if growth > _NOISE
    ]


def sweep_chart(rows: Sequence[BenchmarkRow]) -> str:
    """An SVG file with one panel per axis.

    The dashed line is the arithmetic scaled to the last point: the measured line lies above it where there is overhead.
    """
    charts = []
    for axis, points in measured_points(rows).items():
        last = points[-1]
        measured = [(point.axis_value, 1e3 * point.seconds) for point in points]
        expected = [(point.axis_value, 1e3 * last.seconds * point.macs / last.macs) for point in points]
        charts.append(line_chart({"measured": measured}, x=AXES[axis], y="ms per step", log=True, guide=expected))
    model = next((row.model for row in rows if row.axis == "batch"), rows[0].model)
    batches = sorted({str(row.batch) for row in rows if row.axis != "batch"})
    note = f" Image size and depth: batch {' and '.join(batches)}." if batches else ""
    return svg_file(
        charts,
        f"Training step of {model} on {rows[0].hardware}",
        f"Solid: measured. Dashed: the arithmetic, scaled to the last point.{note}",
    )
