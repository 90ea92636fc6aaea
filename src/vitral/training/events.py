"""What the loop tells whoever listens: displays, metric files, trackers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Started:
    """The preflight is over: what the run will take if it goes on like its first step."""

    step: int  # steps done before, in a resumed run
    steps: int
    evaluations: int  # to come
    batch: int  # images a step = processes * pieces * micro, the last piece perhaps smaller
    processes: int
    micro: int
    step_seconds: float
    evaluation_seconds: float
    peak_bytes: int


@dataclass(frozen=True)
class StepDone:
    step: int  # steps done, this one included
    steps: int
    loss: float
    accuracy: float | None  # of the training batch; None where targets are mixed or multi-label
    rate: float
    images: int  # in the global batch; 0 where the step reads features
    seconds: float
    waited: float  # seconds of them spent waiting for data


@dataclass(frozen=True)
class Decoding:
    """Images of a split decoded once, before the run."""

    split: str
    done: int
    total: int


@dataclass(frozen=True)
class EvaluationProgress:
    done: int
    total: int


@dataclass(frozen=True)
class Evaluated:
    step: int
    metrics: dict[str, Any]
    seconds: float
    best: bool


@dataclass(frozen=True)
class Saved:
    step: int


@dataclass(frozen=True)
class RunDirChosen:
    """Where a run, or several of one command, will be; the command with this folder goes on with them."""

    folder: str


@dataclass(frozen=True)
class Note:
    """A sentence for the person watching."""

    text: str


Event = Decoding | Started | StepDone | EvaluationProgress | Evaluated | Saved | RunDirChosen | Note
Listener = Callable[[Event], None]
