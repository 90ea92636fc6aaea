"""What is kept of a run as it goes: JSON lines in the folder, the speed."""

from __future__ import annotations

from collections import deque

from vitral.checkpoints.run import RunFolder
from vitral.training.events import Evaluated, Event, Listener, Started, StepDone

_LINES = 1000  # about as many steps are written down, however long the run


class MetricsLogger:
    """Listens to the loop, writes metrics.jsonl, and passes every event on."""

    def __init__(self, folder: RunFolder | None, listen: Listener) -> None:
        """Processes other than the first have no folder."""
        self.folder = folder
        self.listen = listen
        self._images = 0
        self._seconds = 0.0
        self._first = -1

    def hear(self, event: Event) -> None:
        if isinstance(event, Started):
            self._first = event.step + 1
        if isinstance(event, StepDone):
            self._step(event)
        if isinstance(event, Evaluated):
            self._write({"step": event.step, "evaluation": _short(event.metrics), "seconds": round(event.seconds, 3)})
        self.listen(event)

    def images_per_second(self) -> float:
        """Over all steps of this process but its first, which pays for warming up."""
        return self._images / self._seconds if self._seconds else 0.0

    def _step(self, event: StepDone) -> None:
        if event.step != self._first:
            self._images += event.images
            self._seconds += event.seconds
        every = max(event.steps // _LINES, 1)
        if event.step % every == 0 or event.step == event.steps:
            values = {"step": event.step, "loss": event.loss, "accuracy": event.accuracy, "rate": event.rate}
            self._write({**values, "seconds": round(event.seconds, 4), "waited": round(event.waited, 4)})

    def _write(self, values: dict) -> None:
        if self.folder is not None:
            self.folder.add_metrics(values)


def _short(metrics: dict) -> dict:
    """The numbers of an evaluation without its tables."""
    return {key: value for key, value in metrics.items() if isinstance(value, int | float)}


_WARM_UP = 5  # steps of a process: workers start, three are computed and one is recorded before a GPU replays them
_RECENT = 100  # steps; their mean and not their median, since batches come in bursts where loading is the slower part


class ThroughputMeter:
    """The mean of the recent steps; until a process has warmed up, what its preflight foresaw."""

    def __init__(self, started: Started) -> None:
        self.steps_left = started.steps - started.step
        self.evaluations_left = started.evaluations
        self.step_seconds = started.step_seconds
        self.evaluation_seconds = started.evaluation_seconds
        self.waiting = 0.0  # share of a step's time spent waiting for data
        self.images_per_second = 0.0  # 0: not known yet
        self._warm = started.step + _WARM_UP
        self._recent: deque[StepDone] = deque(maxlen=_RECENT)

    def hear(self, event: Event) -> None:
        if isinstance(event, StepDone):
            self.steps_left = event.steps - event.step
            if event.step > self._warm:
                self._step(event)
        elif isinstance(event, Evaluated):
            self.evaluations_left = max(self.evaluations_left - 1, 0)
            self.evaluation_seconds = event.seconds

    def seconds_left(self) -> float:
        return self.steps_left * self.step_seconds + self.evaluations_left * self.evaluation_seconds

    def _step(self, event: StepDone) -> None:
        self._recent.append(event)
        seconds = max(sum(step.seconds for step in self._recent), 1e-9)
        self.step_seconds = seconds / len(self._recent)
        self.waiting = sum(step.waited for step in self._recent) / seconds
        self.images_per_second = event.images / self.step_seconds
