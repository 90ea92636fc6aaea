"""How fast a run goes and how long it will take, from the events of the loop."""

from __future__ import annotations

from collections import deque

from vitral.training.events import Evaluated, Event, Started, StepDone

_WARM_UP = 5  # steps of a process: workers start, three are computed and one is recorded before a GPU replays them
_RECENT = 100  # steps; their mean and not their median, since batches come in bursts where loading is the slower part


class Pace:
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
