"""Cold start: the time from a command to its first prediction, in a new process each time."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from vitral.bench.backends import OURS, Backend, Workload
from vitral.bench.machine import environment_info
from vitral.bench.results import BenchmarkRow, now, timed_row
from vitral.bench.worker import child_environment
from vitral.checkpoints.adapt import Weights
from vitral.checkpoints.card import Card, Preprocess
from vitral.checkpoints.weights import write
from vitral.data.images import encode_png
from vitral.errors import UserError
from vitral.events import EventHandler, Note
from vitral.models.build import build
from vitral.names import parse

# What a user of transformers writes for one prediction.
_PIPELINE = """
import sys
from transformers import pipeline
print(pipeline("image-classification", model=sys.argv[1])(sys.argv[2]))
"""
_SETTINGS = {OURS: "predict", "transformers": "pipeline"}


def measure_cold_start(
    workload: Workload, libraries: Sequence[str], rounds: int, on_event: EventHandler
) -> list[BenchmarkRow]:
    """Time the first prediction of each library, the libraries in turns.

    Args:
        workload: names the model.
        libraries: vitral, transformers or both.
        rounds: timed starts of each.
        on_event: called with notes about the progress.

    Returns:
        A row per library.
    """
    started_at = now()
    with tempfile.TemporaryDirectory() as folder:
        commands = _prepare_commands(Path(folder), workload.model)
        chosen = {name: command for name, command in commands.items() if name in libraries}
        times = _run_rounds(chosen, rounds, on_event)
    return [
        timed_row(
            Backend(name, _SETTINGS[name]),
            workload,
            seconds,
            started_at,
            startup_seconds=float(np.median(seconds)),
            environment=environment_info(name, "cpu"),
        )
        for name, seconds in times.items()
    ]


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


def _run_rounds(commands: Mapping[str, Sequence[str]], rounds: int, on_event: EventHandler) -> dict[str, list[float]]:
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
        raise UserError(f"{name} failed to predict ({message}): leave it out of --against.")
    return seconds
