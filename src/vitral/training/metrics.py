"""The numbers of a run: how they travel from the device to the host, and metrics.jsonl."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitral.checkpoints.run import RunFolder
from vitral.events import Evaluated, Event, EventHandler, RunStarted, StepDone

_LINES = 1000  # about as many steps are logged, however long the run


class StepMetrics(NamedTuple):
    """The numbers of a step, on the device: mean loss (), correct predictions (), or -1, and gradient norm ()."""

    loss: Tensor
    correct: Tensor
    grad_norm: Tensor


class AsyncMetrics:
    """Step metrics on their way to the host. Read one step late, they do not make it wait for the steps queued since,
    behind which a plain copy would be queued."""

    def __init__(self, metrics: StepMetrics) -> None:
        stacked = torch.stack([value.float() for value in metrics])
        self.arrived = torch.cuda.Event() if stacked.is_cuda else None
        self.host = stacked
        if self.arrived is not None:
            self.host = torch.empty(stacked.shape, pin_memory=True).copy_(stacked, non_blocking=True)
            self.arrived.record()

    def read(self) -> tuple[float, float, float]:
        """Loss, correct predictions, gradient norm."""
        if self.arrived is not None:
            self.arrived.synchronize()
        loss, correct, grad_norm = self.host.tolist()
        return loss, correct, grad_norm


class MetricsLogger:
    """Event handler that writes metrics.jsonl, measures the speed, and passes every event on."""

    def __init__(self, folder: RunFolder | None, on_event: EventHandler) -> None:
        """Processes other than the first have no folder."""
        self.folder = folder
        self.on_event = on_event
        self._images = 0
        self._seconds = 0.0
        self._first_step = -1

    def __call__(self, event: Event) -> None:
        """Log an event and pass it on."""
        if isinstance(event, RunStarted):
            self._first_step = event.step + 1
        elif isinstance(event, StepDone):
            self._log_step(event)
        elif isinstance(event, Evaluated):
            self._write({"step": event.step, "evaluation": scalars(event.metrics), "seconds": round(event.seconds, 3)})
        self.on_event(event)

    def log(self, step: int, values: dict[str, float]) -> None:
        """Write metrics that a callback added to a step."""
        self._write({"step": step, **values})

    def images_per_second(self) -> float:
        """Over all steps of this session but its first, which pays for warming up."""
        return self._images / self._seconds if self._seconds else 0.0

    def _log_step(self, event: StepDone) -> None:
        if event.step != self._first_step:
            self._images += event.images
            self._seconds += event.seconds
        interval = max(event.steps // _LINES, 1)
        if event.step % interval == 0 or event.step == event.steps:
            values = {"step": event.step, "loss": event.loss, "accuracy": event.accuracy, "lr": event.lr}
            times = {"seconds": round(event.seconds, 4), "data_seconds": round(event.data_seconds, 4)}
            self._write({**values, **times})

    def _write(self, values: dict[str, Any]) -> None:
        if self.folder is not None:
            self.folder.add_metrics(values)


def scalars(metrics: dict[str, Any]) -> dict[str, Any]:
    """The numbers of an evaluation without its tables."""
    return {key: value for key, value in metrics.items() if isinstance(value, int | float)}
