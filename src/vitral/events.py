"""Events that long-running functions report; displays, log files and trackers handle them. No torch here.

Every function that takes long has one parameter, `on_event`, which is called with each event.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Progress:
    """How many of the items (images, unless `unit` says otherwise) of a task are done."""

    task: str  # a verb form: "evaluating", "reading train"
    done: int
    total: int
    unit: str = "images"


@dataclass(frozen=True)
class Note:
    """A message for the user."""

    text: str


@dataclass(frozen=True)
class RunDirChosen:
    """The folder of a run, or of several runs of one command; the same command with this folder resumes them."""

    folder: str


@dataclass(frozen=True)
class RunStarted:
    """The resource estimate is done and training begins; the estimates assume steps like the first one."""

    step: int  # steps done before, in a resumed run
    steps: int
    evaluations: int  # to come
    batch: int  # images per step, over all processes
    processes: int
    microbatch: int  # images that one process computes at a time
    step_seconds: float
    evaluation_seconds: float
    peak_bytes: int
    folder: str = ""
    recipe: dict[str, Any] = field(default_factory=dict)  # the value of each key


@dataclass(frozen=True)
class StepDone:
    """One optimizer step."""

    step: int  # steps done, this one included
    steps: int
    loss: float
    accuracy: float | None  # of the training batch; None if targets are mixed or multi-label
    lr: float
    images: int  # in the global batch; 0 if the step reads cached features
    seconds: float
    data_seconds: float  # the part of `seconds` spent waiting for data


@dataclass(frozen=True)
class Evaluated:
    """One evaluation of the val or test split."""

    step: int
    metrics: dict[str, Any]
    seconds: float
    best: bool  # the weights are kept as the best so far; False in runs without patience, which keep the last


@dataclass(frozen=True)
class Saved:
    """A checkpoint that the run can resume from was written."""

    step: int


@dataclass(frozen=True)
class RunFinished:
    """A run has ended, and its folder is complete."""

    result: dict[str, Any]  # as in result.json


Event = Progress | Note | RunDirChosen | RunStarted | StepDone | Evaluated | Saved | RunFinished
EventHandler = Callable[[Event], None]


def ignore_events(event: Event) -> None:
    """The handler for those who do not want to know."""
