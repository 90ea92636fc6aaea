"""Timing of alternating backends, so that a busy machine slows all equally; of cold starts; of growing sizes.

A cold start, from a command to its first prediction, is timed in a new process each time. A sweep measures how the time
of a training step grows with image size, batch and depth, compared with its arithmetic.
"""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from vitral.architecture import ViTConfig
from vitral.bench.backends import OURS, Backend, Workload
from vitral.bench.results import BenchmarkRow, now, percentiles_ms, timed_row
from vitral.bench.steps import ParityError
from vitral.bench.worker import Worker, WorkerFailed, child_environment, environment_info
from vitral.checkpoints.adapt import Weights
from vitral.checkpoints.card import Card, Preprocess
from vitral.checkpoints.weights import write
from vitral.cost import cost
from vitral.data.images import encode_png
from vitral.errors import UserError
from vitral.events import EventHandler, Note
from vitral.models.build import build
from vitral.names import parse
from vitral.report.charts import line_chart, svg_file

_WARM_UP = 3  # steps after the first, which compiles and allocates
_TURN_SECONDS = 1.0
_LOADING_TURN_SECONDS = 4.0  # longer, since loaders start their workers in each turn
_MAX_STEPS = 50  # per turn, of steps that compute
_LATENCIES = 200  # at least, for percentiles
_COMPUTING = ("train", "infer", "latency")
# What a user of transformers writes for one prediction.
_PIPELINE = """
import sys
from transformers import pipeline
print(pipeline("image-classification", model=sys.argv[1])(sys.argv[2]))
"""
_SETTINGS = {OURS: "predict", "transformers": "pipeline"}
SIZES = {"image": (64, 128, 256, 512, 1024), "batch": (1, 4, 16, 64, 256), "depth": (3, 6, 12, 24)}
AXES = {"image": "image size in pixels", "batch": "batch size in images", "depth": "depth in blocks"}
_MIN_STEPS = 3
_MAX_SECONDS = 2.0  # of a step: an axis ends where the next one would take longer
_NOISE = 1.15  # factor by which a step may exceed the arithmetic


def run_benchmark(
    workload: Workload, backends: Sequence[Backend], *, rounds: int, on_event: EventHandler
) -> tuple[list[BenchmarkRow], list[str]]:
    """Time every backend in every round; the first one also measures the FLOP/s of a matrix product.

    Returns a row for each backend that finished, and one sentence for each that failed. Raises ParityError if our
    outputs differ from those of the float32 model; no row is written then.
    """
    failures: list[str] = []
    started_at = now()
    with ExitStack() as stack:
        workers: list[Worker] = []
        for backend in backends:
            try:
                if backend.library == OURS and workload.work in _COMPUTING:
                    _check_parity(backend, workload, on_event)
                on_event(Note(f"{backend.label}: starting"))
                worker = stack.enter_context(Worker(backend))
                warm_up(worker, workload, rounds)
                workers.append(worker)
            except WorkerFailed as failure:
                _raise_ours(failure, backend)
                failures.append(f"{backend.label} is excluded: {failure}.")
        rates = _run_rounds(workers, workload, rounds, failures, on_event)
        rate = statistics.median(rates or [0.0])
        rows = [
            replace(worker_row(worker, workload, started_at, rate), details=_details(worker, workload, failures))
            for worker in workers
        ]
    return rows, failures


def _check_parity(backend: Backend, workload: Workload, on_event: EventHandler) -> None:
    """In a separate process, so that what is compiled for a few images does not affect what is timed."""
    with Worker(backend) as worker:
        parity = worker.call("check_parity", workload)
    gradients = f" and gradients within {parity['gradients']:.0e}" if workload.work == "train" else ""
    within = f"logits within {parity['logits']:.0e}{gradients} of the float32 model"
    on_event(Note(f"{backend.label}: {within}, relative to the norm (tolerance: {parity['tolerance']:g})"))


def _raise_ours(failure: WorkerFailed, backend: Backend) -> None:
    """Peers may fail; our own outputs must not be wrong, and a usage error concerns all."""
    if failure.kind == "parity":
        raise ParityError(str(failure)) from failure
    if backend.library == OURS and failure.kind == "usage":
        raise UserError(str(failure)) from failure


def warm_up(worker: Worker, workload: Workload, rounds: int) -> None:
    """Run the first steps, which compile and allocate, and choose how many steps fill a turn."""
    worker.measured = {"environment": worker.call("build", workload)}
    worker.run(1)
    worker.measured["startup_seconds"] = time.perf_counter() - worker.started
    worker.steps, worker.seconds = _steps_per_turn(worker, workload, rounds), []
    worker.measured["peak_bytes"] = worker.call("memory")


def _steps_per_turn(worker: Worker, workload: Workload, rounds: int) -> int:
    if workload.work not in _COMPUTING:
        return _batches_per_turn(worker)
    seconds = statistics.median(worker.run(_WARM_UP))
    if workload.work == "latency":
        return math.ceil(_LATENCIES / rounds)
    return min(math.ceil(_TURN_SECONDS / seconds), _MAX_STEPS)


def _batches_per_turn(worker: Worker) -> int:
    """Loaders start slowly and deliver in bursts, so trials get longer until they are long enough to extrapolate."""
    count = _WARM_UP
    while (seconds := count * statistics.mean(worker.run(count))) < _LOADING_TURN_SECONDS / 2:
        count = math.ceil(count * _LOADING_TURN_SECONDS / seconds)
    return math.ceil(count * _LOADING_TURN_SECONDS / seconds)


def _run_rounds(
    workers: list[Worker], workload: Workload, rounds: int, failures: list[str], on_event: EventHandler
) -> list[float]:
    """Add times to the workers and return matmul FLOP/s. Every other round is reversed, against a drift of clocks."""
    rates = []
    for number in range(rounds):
        on_event(Note(f"round {number + 1} of {rounds}"))
        for worker in list(workers) if number % 2 == 0 else workers[::-1]:
            try:
                if worker is workers[0] and workload.work in _COMPUTING:
                    rates.append(worker.call("matmul_flops"))
                worker.seconds += worker.run(worker.steps)
            except WorkerFailed as failure:
                failures.append(f"{worker.backend.label} did not finish: {failure}.")
                workers.remove(worker)
    return rates


def worker_row(worker: Worker, workload: Workload, started_at: str, matmul_flops: float) -> BenchmarkRow:
    """The row of what a worker measured."""
    measured = {"macs": step_macs(workload), "matmul_flops": matmul_flops, **worker.measured}
    return timed_row(worker.backend, workload, worker.seconds, started_at, **measured)


def step_macs(workload: Workload) -> int:
    """Multiply-accumulates of a step: the backward pass takes twice those of the forward pass."""
    if workload.work not in _COMPUTING:
        return 0
    return cost(workload.architecture).macs * workload.batch * (3 if workload.work == "train" else 1)


def _details(worker: Worker, workload: Workload, failures: list[str]) -> dict[str, Any]:
    """Further measurements; a worker that fails here keeps its times."""
    if workload.work == "latency":
        return percentiles_ms(worker.seconds)
    try:
        return worker.call("details")
    except WorkerFailed as failure:
        failures.append(f"{worker.backend.label} has no details: {failure}.")
        return {}


def measure_cold_start(
    workload: Workload, libraries: Sequence[str], rounds: int, on_event: EventHandler
) -> list[BenchmarkRow]:
    """Time the first prediction of each library (vitral, transformers), the libraries in turns."""
    started_at = now()
    with tempfile.TemporaryDirectory() as folder:
        commands = _prepare_commands(Path(folder), workload.model)
        chosen = {name: command for name, command in commands.items() if name in libraries}
        times = _run_starts(chosen, rounds, on_event)
    rows = []
    for name, seconds in times.items():
        measured = {"startup_seconds": statistics.median(seconds), "environment": environment_info(name, "cpu")}
        rows.append(timed_row(Backend(name, _SETTINGS[name]), workload, seconds, started_at, **measured))
    return rows


def _prepare_commands(folder: Path, model: str) -> dict[str, list[str]]:
    """Write the same weights in each library's format, and one image."""
    architecture = parse(model)
    state = {name: array.detach() for name, array in build(architecture).state_dict().items()}
    side = architecture.image[0]
    preprocess = Preprocess(f"decode|resize({side})", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    card = Card(architecture, tuple(f"class {number}" for number in range(architecture.classes)), preprocess=preprocess)
    ours, hf, image = folder / "model.safetensors", folder / "hf", folder / "image.png"
    write(Weights(architecture, state, ()), card, ours, "vitral")
    write(Weights(architecture, state, ()), card, hf, "hf")
    image.write_bytes(encode_png(np.random.default_rng(0).integers(0, 256, (375, 500, 3), np.uint8)))
    return {
        OURS: [sys.executable, "-m", "vitral", "predict", str(ours), str(image), "--json"],
        "transformers": [sys.executable, "-c", _PIPELINE, str(hf), str(image)],
    }


def _run_starts(commands: Mapping[str, Sequence[str]], rounds: int, on_event: EventHandler) -> dict[str, list[float]]:
    """Seconds of each start, in turns; a first round fills the disk cache and does not count."""
    times: dict[str, list[float]] = {name: [] for name in commands}
    for number in range(rounds + 1):
        on_event(Note(f"round {number} of {rounds}" if number else "warm-up, to fill the disk cache"))
        for name in list(times):
            try:
                seconds = _time_command(name, commands[name])
            except UserError as failure:
                if name == OURS:
                    raise
                on_event(Note(str(failure)))
                del times[name]
                continue
            if number:
                times[name].append(seconds)
    return times


def _time_command(name: str, command: Sequence[str]) -> float:
    environment = {**child_environment(), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    start = time.perf_counter()
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start
    if process.returncode:
        message = (process.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(f"{name} failed to predict ({message}): omit it of --against.")
    return seconds


def run_sweep(workload: Workload, backend: Backend, on_event: EventHandler) -> list[BenchmarkRow]:
    """Measure a row per size of images, batches and depths; an axis ends where memory runs out or steps take too
    long."""
    rows: list[BenchmarkRow] = []
    axes = [axis for axis in SIZES if axis != "depth" or isinstance(workload.architecture, ViTConfig)]
    started_at, points = now(), deque((axis, size) for axis in axes for size in SIZES[axis])
    while points:  # in a new process after one that failed, which ends the axis
        with Worker(backend) as worker:
            while points:
                axis, size = points.popleft()
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
                    points = deque(point for point in points if point[0] != axis)
                    break
                rows.append(replace(row, axis=axis, axis_value=size))
    return rows


def _measure(worker: Worker, workload: Workload, started_at: str) -> BenchmarkRow:
    """One row; all sizes share a process, so there is no startup time, and peak memory only if it can be reset."""
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
