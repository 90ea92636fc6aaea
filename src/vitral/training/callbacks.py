"""User-supplied parts of a run: loss, optimizer, transform and callbacks, with their protocols.

    vitral.train(data, loss=my_loss, optimizer=my_optimizer, transform=my_transform, callbacks=[MyCallback()])

| part | is called with | returns |
|---|---|---|
| loss | logits (batch, classes), targets (batch,) or (batch, classes) | (batch,) losses, or their mean () |
| optimizer | parameter groups of `torch.optim` | a `torch.optim.Optimizer`; its rates are the schedule's peaks |
| transform | a PIL image | a uint8 image, normalised by vitral, or a float tensor (c, h, w), used as is |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitral.data.images import PILImage
from vitral.errors import UserError
from vitral.events import Event, StepDone
from vitral.training.metrics import MetricsLogger
from vitral.training.parallel import World, all_ranks

Loss = Callable[[Tensor, Tensor], Tensor]
OptimizerFactory = Callable[[list[dict[str, object]]], torch.optim.Optimizer]
Transform = Callable[[PILImage], object]


class RunHandle:
    """A callback's access to its run."""

    def __init__(self, folder: Path, model: Callable[[], nn.Module], step: Callable[[], int]) -> None:
        self.folder = folder
        self.stop_reason = ""
        self._model, self._step = model, step
        self._logged: dict[str, float] = {}

    @property
    def step(self) -> int:
        """Steps done."""
        return self._step()

    @property
    def model(self) -> nn.Module:
        """The plain model with the weights that would be evaluated now. All processes must access it together."""
        return self._model()

    def log(self, **metrics: float) -> None:
        """Add metrics to the current evaluation (and so to the result), or else to this step in metrics.jsonl."""
        self._logged |= {name: float(value) for name, value in metrics.items()}

    def stop(self, reason: str = "a callback asked to stop") -> None:
        """End the run after this step, with an evaluation and the usual result."""
        self.stop_reason = reason

    def take_logged(self) -> dict[str, float]:
        """The metrics logged since the last call."""
        logged, self._logged = self._logged, {}
        return logged


class Callback:
    """Base class of callbacks; override the methods you need. Every process of a run calls them.

    A callback with state should define `state_dict()` (JSON values) and `load_state_dict(state)`, so that resumed runs
    are exact.
    """

    def on_run_start(self, run: RunHandle) -> None:
        """Before the first step of this session; after `load_state_dict` in a resumed run."""

    def on_step_end(self, run: RunHandle, step: StepDone) -> None:
        """After each step; its metrics arrive one step late, so that a GPU never waits for them."""

    def on_evaluation(self, run: RunHandle, metrics: dict[str, Any]) -> None:
        """With the metrics of an evaluation, before they are logged; `run.log(name=value)` adds to them."""

    def on_run_end(self, run: RunHandle) -> None:
        """After the last evaluation, before the model is written."""


def as_callbacks(callbacks: object) -> tuple[Callback, ...]:
    """One callback or several as a tuple; raises UserError for anything that is not derived from `Callback`."""
    listed = callbacks if isinstance(callbacks, Iterable) else (callbacks,)
    return tuple(_checked(callback) for callback in listed)


def _checked(callback: object) -> Callback:
    if isinstance(callback, Callback):
        return callback
    if isinstance(callback, type) and issubclass(callback, Callback):
        raise UserError(f"the callback {callback.__name__} is a class: pass callbacks=[{callback.__name__}()].")
    raise UserError(
        f"the callback {part_name(callback)} is not derived from vitral.Callback: derive a class with the methods that "
        "you need, and pass an object of it, as in callbacks=[MyCallback()]."
    )


@dataclass(frozen=True)
class OwnParts:
    """The user-supplied parts of a run; None means vitral's."""

    model: nn.Module | None = None
    loss: Loss | None = None
    optimizer: OptimizerFactory | None = None
    train_transform: Transform | None = None
    eval_transform: Transform | None = None
    callbacks: Sequence[Callback] = ()

    def describe(self) -> dict[str, str]:
        """The name of each part that is set; a run is resumed only with parts of the same names."""
        parts = {
            name: getattr(self, name) for name in ("model", "loss", "optimizer", "train_transform", "eval_transform")
        }
        names = {name: part_name(part) for name, part in parts.items() if part is not None}
        if self.callbacks:
            names["callbacks"] = ", ".join(part_name(callback) for callback in self.callbacks)
        return names


def part_name(part: Any) -> str:
    """The name of a function, or of an object's class."""
    named = part if hasattr(part, "__qualname__") else type(part)
    return f"{named.__module__}.{named.__qualname__}"


class CallbackRunner:
    """Event handler between the loop and the logger: calls the user's callbacks and collects their metrics."""

    def __init__(
        self,
        callbacks: Sequence[Callback],
        handle: RunHandle,
        evaluate: Callable[[], dict[str, Any]],
        logger: MetricsLogger,
        world: World,
    ) -> None:
        self.callbacks, self.handle, self.logger, self.world = callbacks, handle, logger, world
        self._evaluate = evaluate

    def __call__(self, event: Event) -> None:
        """Handle an event of the loop."""
        self.logger(event)
        if isinstance(event, StepDone):
            for callback in self.callbacks:
                callback.on_step_end(self.handle, event)
            if logged := self.handle.take_logged():
                self.logger.log(event.step, logged)

    def on_run_start(self) -> None:
        """Call the callbacks before the first step."""
        for callback in self.callbacks:
            callback.on_run_start(self.handle)

    def on_run_end(self) -> None:
        """Call the callbacks after the last evaluation."""
        for callback in self.callbacks:
            callback.on_run_end(self.handle)

    def evaluate(self) -> dict[str, Any]:
        """Metrics of the evaluated split and of the callbacks."""
        metrics = self._evaluate()
        for callback in self.callbacks:
            callback.on_evaluation(self.handle, metrics)
        return metrics | self.handle.take_logged()

    def stop_reason(self) -> str:
        """Why a callback of any process wants the run to end; empty if none does."""
        if not self.callbacks or all_ranks(not self.handle.stop_reason, self.world):
            return ""
        return self.handle.stop_reason or "a callback of another process asked to stop"

    def state_dicts(self) -> list[Any]:
        """The states of callbacks that have one, else None."""
        return [getattr(callback, "state_dict", lambda: None)() for callback in self.callbacks]
