"""What is kept of a run as it goes: JSON lines in the folder, the speed."""

from __future__ import annotations

from vitral.checkpoints.run import RunFolder
from vitral.events import Evaluated, Event, EventHandler, RunStarted, StepDone

_LINES = 1000  # about as many steps are written down, however long the run


class MetricsLogger:
    """Listens to the loop, writes metrics.jsonl, and passes every event on."""

    def __init__(self, folder: RunFolder | None, on_event: EventHandler) -> None:
        """Processes other than the first have no folder."""
        self.folder = folder
        self.on_event = on_event
        self._images = 0
        self._seconds = 0.0
        self._first = -1

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._first = event.step + 1
        if isinstance(event, StepDone):
            self._step(event)
        if isinstance(event, Evaluated):
            self._write({"step": event.step, "evaluation": _short(event.metrics), "seconds": round(event.seconds, 3)})
        self.on_event(event)

    def images_per_second(self) -> float:
        """Over all steps of this process but its first, which pays for warming up."""
        return self._images / self._seconds if self._seconds else 0.0

    def _step(self, event: StepDone) -> None:
        if event.step != self._first:
            self._images += event.images
            self._seconds += event.seconds
        every = max(event.steps // _LINES, 1)
        if event.step % every == 0 or event.step == event.steps:
            values = {"step": event.step, "loss": event.loss, "accuracy": event.accuracy, "lr": event.lr}
            self._write({**values, "seconds": round(event.seconds, 4), "data_seconds": round(event.data_seconds, 4)})

    def _write(self, values: dict) -> None:
        if self.folder is not None:
            self.folder.add_metrics(values)


def _short(metrics: dict) -> dict:
    """The numbers of an evaluation without its tables."""
    return {key: value for key, value in metrics.items() if isinstance(value, int | float)}
