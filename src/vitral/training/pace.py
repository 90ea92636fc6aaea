"""How fast a run goes and how long it will take, from the events of the loop."""

from __future__ import annotations

from vitral.training.events import Evaluated, Event, Started, StepDone


class Pace:
    """Averages over the recent steps; the first one of a process is left out, it pays for warming up."""

    def __init__(self, started: Started) -> None:
        self.steps_left = started.steps - started.step
        self.evaluations_left = started.evaluations
        self.step_seconds = started.step_seconds
        self.evaluation_seconds = started.evaluation_seconds
        self.waiting = 0.0  # share of a step's time spent waiting for data
        self.images_per_second = 0.0
        self._seen = 0

    def hear(self, event: Event) -> None:
        if isinstance(event, StepDone):
            self.steps_left = event.steps - event.step
            self._step(event)
        elif isinstance(event, Evaluated):
            self.evaluations_left = max(self.evaluations_left - 1, 0)
            self.evaluation_seconds = event.seconds

    def seconds_left(self) -> float:
        return self.steps_left * self.step_seconds + self.evaluations_left * self.evaluation_seconds

    def _step(self, event: StepDone) -> None:
        self._seen += 1
        if self._seen == 1:
            return
        # A plain mean of the first steps, then one that forgets: weight 1, 1/2, 1/3, ... down to 1/50.
        weight = 1 / min(self._seen - 1, 50)
        self.step_seconds += weight * (event.seconds - self.step_seconds)
        self.waiting += weight * (event.waited / max(event.seconds, 1e-9) - self.waiting)
        self.images_per_second = event.images / max(self.step_seconds, 1e-9)
