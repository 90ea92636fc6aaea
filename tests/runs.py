"""Tiny runs for the tests of training: a few coloured pictures, a model of some thousand weights, quick steps.

Tests that start processes import this file there too.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitral import api
from vitral.data.images import encode_png

MODEL = "ViT-Ti/4@8"
TINY = (
    *("steps=12", "batch=6", "shape.depth=2", "shape.width=16", "shape.heads=2", "workers=0", "data.mixup=0.4"),
    *("evaluate_every=4", "save_every=2", "data.test=decode|resize({size})"),
    "data.train=decode|inception_crop({size})|flip|randaugment(2, 10)",
)


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
    pictures: Path,
    out: Path,
    *words: str,
    listen: Any = lambda event: None,
    seeds: int = 1,
    device: str = "cpu",
) -> Any:
    """A run of TINY with some words on top."""
    return api.train(
        pictures, model=MODEL, out=out, overrides=[*TINY, *words], device=device, listen=listen, seeds=seeds
    )


def outcome(run: Path) -> tuple[bytes, list[dict[str, Any]], Any, int]:
    """Everything of a finished run that must not depend on how it came about: model, metrics, result."""
    result = json.loads((run / "result.json").read_text())
    return (run / "model.safetensors").read_bytes(), metrics(run), result["metrics"], result["step"]


def metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what a clock says."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in ("seconds", "waited")} for line in lines]


def states(run: Path) -> Sequence[Path]:
    """The saved states, oldest first."""
    return sorted((run / "state").glob("step-*"))


class Crash(Exception):
    """Stands in for the end of a process."""


def crash_at(step: int) -> Callable[[Any], None]:
    """A listener that ends the run when a step is done."""

    def listen(event: Any) -> None:
        if isinstance(event, api.StepDone) and event.step == step:
            raise Crash

    return listen


def interrupt_at(step: int) -> Callable[[Any], None]:
    """A listener that presses Ctrl-C when a step is done."""

    def listen(event: Any) -> None:
        if isinstance(event, api.StepDone) and event.step == step:
            signal.raise_signal(signal.SIGINT)

    return listen


def said(pictures: Path, out: Path, *words: str) -> list[str]:
    """What a run tells a person."""
    notes: list[str] = []
    train(pictures, out, *words, listen=lambda event: notes.append(event.text) if isinstance(event, api.Note) else None)
    return notes
