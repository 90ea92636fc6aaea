"""Tiny runs for the tests of training: a few coloured pictures, a model of some thousand weights, quick steps.

Tests that start processes import this file there too.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import vitral
from vitral import events
from vitral.architecture import ViTConfig
from vitral.checkpoints.card import Card
from vitral.data.images import encode_png
from vitral.models.build import build
from vitral.recipe import Recipe, recipe_hash
from vitral.training import run as training_run
from vitral.training.run import RunResult

MODEL = "ViT-Ti/4@8"
TINY = (
    *("steps=12", "batch=6", "shape.depth=2", "shape.width=16", "shape.heads=2", "workers=0", "data.mixup=0.4"),
    *("evaluate_every=4", "save_every=2", "data.eval_transform=decode|resize({size})"),
    "data.train_transform=decode|random_resized_crop({size}, 0.05)|flip|randaugment(2, 10)",
)

# A study of 12 runs on the pictures below, in the folder of this name.
STUDY = """
title = "Depth and pooling"
data = "pictures"
seeds = [0, 1, 2]
metric = "top1"
x = "shape.depth"
[recipe]
model = "ViT-Ti/4@8"
steps = 4
batch = 6
workers = 0
save_every = 1
shape.width = 16
shape.heads = 2
[axes]
shape.depth = [1, 2]
shape.pool = ["token", "mean"]
[[claims]]
text = "more layers are better"
kind = "compare"
a.shape.depth = 2
b.shape.depth = 1
"""


def make_pictures(folder: Path, classes: int = 3, images: int = 8, size: int = 12) -> Path:
    """Noise with a tint, a folder per class: learnt in a few dozen steps, but not at once."""
    rng = np.random.default_rng(0)
    for label in range(classes):
        (folder / f"class-{label}").mkdir(parents=True)
        for number in range(images):
            pixels = rng.integers(0, 160, (size, size, 3))
            pixels[..., label % 3] += 90
            (folder / f"class-{label}" / f"{number}.png").write_bytes(encode_png(pixels.astype(np.uint8)))
    return folder


def train(
    pictures: Any,
    out: Path,
    *words: str,
    on_event: Any = lambda event: None,
    seeds: int = 1,
    device: str = "cpu",
) -> Any:
    """A run of TINY with some words on top; from weights that they name, without what belongs to one from scratch."""
    scratch = not any(word.startswith("init=") for word in words)
    overrides = [word for word in (*TINY, *words) if scratch or not word.startswith("shape.")]
    model = MODEL if scratch else ""
    return vitral.train(pictures, model=model, out=out, set=overrides, device=device, on_event=on_event, seeds=seeds)


def starting_from(path: Path) -> str:
    """The word that names weights of a model as TINY has it, which are written there."""
    torch.manual_seed(0)
    model = build(ViTConfig(depth=2, width=16, mlp=64, heads=2, patch=4, image=(8, 8), classes=3))
    vitral.save(model, path, Card(model.config))
    return f"init={path}"


def finished_run(recipe: Recipe, folder: Path, score: float, n: int, **facts: Any) -> RunResult:
    """What a run returns, for tests of what is made of several runs."""
    usual: dict[str, Any] = {"seconds": 1.0, "images_per_second": 1.0, "flops": 1.0, "device_hours": 1.0}
    usual |= {"step": 1, "devices": 1, "device": "cpu"}
    return RunResult(
        folder=str(folder),
        metrics={"score": score, "n": n},
        predicted_peak_bytes=0,
        peak_bytes=0,
        unreadable=[],
        recipe=recipe_hash(recipe),
        seed=recipe.seed,
        **(usual | facts),
    )


def outcome(run: Path) -> tuple[bytes, list[dict[str, Any]], Any, int]:
    """Everything of a finished run that must not depend on how it came about: model, metrics, result."""
    result = json.loads((run / "result.json").read_text())
    return (run / "model.safetensors").read_bytes(), metrics(run), result["metrics"], result["step"]


def metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what a clock says."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in ("seconds", "data_seconds")} for line in lines]


def states(run: Path) -> Sequence[Path]:
    """The saved states, oldest first."""
    return sorted((run / "state").glob("step-*"))


class Crash(Exception):
    """Stands in for the end of a process."""


def crash_at(step: int) -> Callable[[Any], None]:
    """A listener that ends the run when a step is done."""

    def on_event(event: Any) -> None:
        if isinstance(event, events.StepDone) and event.step == step:
            raise Crash

    return on_event


def interrupt_at(step: int) -> Callable[[Any], None]:
    """A listener that presses Ctrl-C when a step is done."""

    def on_event(event: Any) -> None:
        if isinstance(event, events.StepDone) and event.step == step:
            signal.raise_signal(signal.SIGINT)

    return on_event


def waiting(step: int) -> str:
    """Python that makes the run of a program wait after so many steps of its own until it is asked to stop; it says so
    on standard error, in the first process."""
    return f"import runs; runs.wait_after({step})"


def wait_after(step: int) -> None:
    """Make the runs of this process wait, as `waiting` says."""
    real, steps = training_run.StopRequests.__call__, itertools.count(1)

    def asked(self: training_run.StopRequests) -> bool:
        requested = real(self)
        if next(steps) == step and os.environ.get("RANK", "0") == "0":
            print(f"step {step} is done", file=sys.stderr, flush=True)
            while not self.requested:
                time.sleep(0.001)
        return requested

    training_run.StopRequests.__call__ = asked  # type: ignore[method-assign]


def said(pictures: Path, out: Path, *words: str) -> list[str]:
    """What a run tells a person."""
    notes: list[str] = []
    train(
        pictures,
        out,
        *words,
        on_event=lambda event: notes.append(event.text) if isinstance(event, events.Note) else None,
    )
    return notes
