"""Evaluation during training: a plain model, exact counts over all processes."""

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
from vitral.training.state import TrainState, evaluated_weights


@dataclass(frozen=True)
class Evaluator:
    """Scores the split that is evaluated during training.

    Args:
        split: the val split, or test where there is none.
        world: this process among the others.
        batch: images at a time.
        predict: this process's share of a split's predictions.
        measure: metrics of all predictions, labels and class names.
    """

    split: Split
    world: World
    batch: int
    predict: Callable[[Split], Predictions]
    measure: Callable[[np.ndarray, np.ndarray, tuple[str, ...]], dict[str, Any]]

    def evaluate(self) -> dict[str, Any]:
        """Metrics of the whole split, the same in every process; "score" is the one to select by."""
        rows = gather_rows(self.predict(self.split)._asdict(), self.world)
        order = np.argsort(rows["indices"], kind="stable")
        rows = {key: values[order] for key, values in rows.items()}
        valid = rows["valid"]
        if not valid.any():
            raise UserError(f"none of the {self.split.name} images can be read: run `vitral check`.")
        logits, labels = rows["logits"][valid], self.split.labels[rows["indices"][valid]]
        return self.measure(logits, labels, self.split.classes)

    def estimate_seconds(self) -> float:
        """How long `evaluate` will take, from one and two batches: their difference is without the start-up cost."""
        batches = math.ceil(len(self.split) / (self.batch * self.world.size))
        if self.world.device.type != "cpu":
            self._timed(1)  # pays for warming up
        if batches <= 2:
            return self._timed(batches)
        one, two = self._timed(1), self._timed(2)
        return one + (batches - 1) * max(two - one, 0.0)

    def _timed(self, batches: int) -> float:
        """Seconds for so many batches of every process; the last may have fewer images."""
        images = min(len(self.split), batches * self.batch * self.world.size)
        began = time.perf_counter()
        self.predict(self.split.select(np.arange(images)))
        return time.perf_counter() - began


def measure(
    logits: np.ndarray, labels: np.ndarray, classes: tuple[str, ...], *, sigmoid: bool = False
) -> dict[str, Any]:
    """Metrics of logits (n, classes), with the one to select by under "score".

    With `sigmoid` each class is a yes or no of its own, whether images have several labels or one.
    """
    if labels.ndim == 2:
        multilabel = multilabel_metrics(probabilities(logits, sigmoid=True), labels, classes)
        return {"score": multilabel.mean_average_precision, **multilabel.as_dict()}
    metrics = classification_metrics(logits, labels, classes, sigmoid=sigmoid)
    return {"score": metrics.top1, **metrics.as_dict()}


@dataclass(frozen=True)
class PlainModel:
    """The weights to evaluate and keep, as a plain model: `model` is the state's own, or a copy to load them into."""

    state: TrainState
    model: nn.Module

    def __call__(self) -> Any:
        """Load the current weights. All processes must call this: shards are gathered here."""
        if self.model is not self.state.model:
            self.model.load_state_dict(evaluated_weights(self.state))
        return self.model
