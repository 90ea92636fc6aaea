"""Evaluation while training: a plain model, exact counts over all processes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from vitral.data.sources import Split
from vitral.errors import UserError
from vitral.evaluation.accuracy import classification_metrics, multilabel_metrics
from vitral.evaluation.calibration import probabilities
from vitral.evaluation.predict import Predictions
from vitral.training.parallel import World, gather_rows
from vitral.training.state import TrainState, full_weights


@dataclass(frozen=True)
class Evaluator:
    """Scores the held-out split. `outputs` gives this process's share of a split's predictions, `batch` at a time, and
    `measure` makes metrics of all of them."""

    test: Split
    world: World
    batch: int
    outputs: Callable[[Split], Predictions]
    measure: Callable[[np.ndarray, np.ndarray, tuple[str, ...]], dict[str, Any]]

    def evaluate(self) -> dict[str, Any]:
        """Metrics of the whole split, the same in every process; "score" is the one to select by."""
        rows = gather_rows(self.outputs(self.test)._asdict(), self.world)
        order = np.argsort(rows["indices"], kind="stable")
        rows = {key: values[order] for key, values in rows.items()}
        valid = rows["valid"]
        if not valid.any():
            raise UserError("none of the test images can be read: check them with `vitral check`.")
        logits, labels = rows["logits"][valid], self.test.labels[rows["indices"][valid]]
        return self.measure(logits, labels, self.test.classes)

    def seconds_for_all(self) -> float:
        """How long `evaluate` will take: starting costs something, too, and two batches less one are without that."""
        batches = math.ceil(len(self.test) / (self.batch * self.world.size))
        if self.world.device.type != "cpu":
            self._timed(1)  # pays for warming up
        if batches <= 2:
            return self._timed(batches)
        one, two = self._timed(1), self._timed(2)
        return one + (batches - 1) * max(two - one, 0.0)

    def _timed(self, batches: int) -> float:
        """Seconds for so many batches of every process; the last may have fewer images."""
        images = min(len(self.test), batches * self.batch * self.world.size)
        began = time.perf_counter()
        self.outputs(self.test.select(np.arange(images)))
        return time.perf_counter() - began


def measure(
    logits: np.ndarray, labels: np.ndarray, classes: tuple[str, ...], *, sigmoid: bool = False
) -> dict[str, Any]:
    """(n, k) and labels -> metrics as a dictionary, with the value to select by under "score"; `sigmoid`: a model whose
    classes are a yes or no each, whether images have several labels or one."""
    if labels.ndim == 2:
        found = multilabel_metrics(probabilities(logits, sigmoid=True), labels, classes)
        return {"score": found.mean_average_precision, **found.as_dict()}
    counted = classification_metrics(logits, labels, classes, sigmoid=sigmoid)
    return {"score": counted.top1, **counted.as_dict()}


@dataclass(frozen=True)
class PlainModel:
    """The weights to evaluate and keep, as a plain model: `model` is the train_state's own, or a copy to load them into."""

    train_state: TrainState
    model: nn.Module

    def __call__(self) -> Any:
        """All processes must call this: shards come together here."""
        if self.model is not self.train_state.model:
            self.model.load_state_dict(full_weights(self.train_state))
        return self.model
