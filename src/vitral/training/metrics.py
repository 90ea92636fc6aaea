"""Metrics of a run: their asynchronous copy to the host, metrics.jsonl, and evaluation during training."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from vitral.checkpoints.card import Card
from vitral.checkpoints.run import RunFolder
from vitral.data.sources import Split
from vitral.display import headline
from vitral.errors import UserError
from vitral.evaluation.accuracy import classification_metrics, multilabel_metrics
from vitral.evaluation.calibration import FOLDS, probabilities
from vitral.evaluation.predict import Predictions
from vitral.events import Evaluated, Event, EventHandler, RunStarted, StepDone
from vitral.training.parallel import World, gather_rows
from vitral.training.state import TrainProgress, TrainState, evaluated_weights

_LINES = 1000  # about as many steps are logged, however long the run


class StepMetrics(NamedTuple):
    """Metrics of a step, on the device: mean loss (), number of correct predictions () or -1, gradient norm ()."""

    loss: Tensor
    correct: Tensor
    grad_norm: Tensor


class AsyncMetrics:
    """Step metrics that are copied to the host asynchronously. Read one step late, they do not block; a plain copy
    would be queued after all steps that were started in the meantime."""

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
        """Over all steps of this session except the first, which includes the warm-up."""
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


@dataclass(frozen=True)
class Evaluator:
    """Scores a split during training, or the test split after it: `predict` gives this process's share of a split's
    predictions, `measure` the metrics of all predictions, labels and class names."""

    split: Split
    world: World
    batch: int
    predict: Callable[[Split], Predictions]
    measure: Callable[..., dict[str, Any]]

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
            self._timed(1)  # warm-up
        if batches <= 2:
            return self._timed(batches)
        one, two = self._timed(1), self._timed(2)
        return one + (batches - 1) * max(two - one, 0.0)

    def _timed(self, batches: int) -> float:
        """Seconds for this many batches per process; the last may have fewer images."""
        images = min(len(self.split), batches * self.batch * self.world.size)
        began = time.perf_counter()
        self.predict(self.split.select(np.arange(images)))
        return time.perf_counter() - began


def measure(
    logits: np.ndarray,
    labels: np.ndarray,
    classes: tuple[str, ...],
    *,
    sigmoid: bool = False,
    temperature: float | None = None,
) -> dict[str, Any]:
    """Metrics of logits (n, classes), with the one to select by under "score".

    With `sigmoid` each class is an independent binary output, for one or several labels per image. Without a
    `temperature`, one is fitted to these labels.
    """
    if labels.ndim == 2:
        multilabel = multilabel_metrics(probabilities(logits, sigmoid=True), labels, classes)
        return {"score": multilabel.mean_average_precision, **multilabel.as_dict()}
    metrics = classification_metrics(logits, labels, classes, sigmoid=sigmoid, temperature=temperature)
    return {"score": metrics.top1, **metrics.as_dict()}


def metrics_on_test(evaluator: Evaluator | None, evaluation: dict[str, Any]) -> dict[str, Any]:
    """The metrics of selected weights on test, which was not used for selection; there may be none, as in a trial.

    `evaluation` has the metrics that the weights were selected by, including those added by callbacks.
    """
    if evaluator is None:
        return evaluation
    if "temperature" in evaluation:  # that of the model's card, fitted where the weights were selected
        measure = partial(evaluator.measure, temperature=evaluation["temperature"])
        evaluator = replace(evaluator, measure=measure)
    return {**evaluation, **evaluator.evaluate()}


def describe_selection(progress: TrainProgress, split: Split, reported: Split) -> str:
    """How the weights of a run were selected, and on which split its result is."""
    best = f"weights of step {progress.best_step:,}, the best on {split.name}: {headline(progress.metrics or {})}"
    return f"{best}; the result is on {reported.name}" if reported is not split else best


def calibrated_card(card: Card, metrics: dict[str, Any], split: Split) -> Card:
    """The card with the temperature fitted in the evaluation of a split, and with a sentence about it."""
    temperature = metrics.get("temperature", 1.0)
    if temperature == 1.0:
        return card
    sentence = f"temperature {temperature:.3g}, fitted on the {metrics['n']:,} {split.name} images"
    return replace(card, temperature=temperature, changes=(*card.changes, sentence))


def describe_calibration(card: Card, metrics: dict[str, Any], split: Split, *, reported: bool) -> str:
    """What the temperature of a run was fitted on, by these metrics of a split, and what its calibrated metrics mean;
    empty without classes. `reported`: these metrics are the result of the run, not those of another split."""
    if not card.architecture.classes:
        return ""
    if card.multilabel:
        return "temperature 1: none is fitted to sigmoid outputs"
    images = f"the {metrics['n']:,} {split.name} images"
    if metrics["temperature"] == 1.0:
        return f"temperature 1: none that is fitted on {images} gives better probabilities"
    cross_fitted = f"; the reported error is cross-fitted over {min(FOLDS, metrics['n'])} folds" if reported else ""
    return f"temperature {metrics['temperature']:.3g}, fitted on {images}{cross_fitted}"


@dataclass
class PlainModel:
    """The weights to evaluate and save, as a plain model: `model` is that of the state, or a copy to load them into."""

    state: TrainState
    model: nn.Module
    selected: bool = False  # whether `model` has the selected weights instead of the state's

    def select(self, weights: dict[str, Tensor]) -> None:
        """Load the selected weights; no further steps may follow."""
        self.model.load_state_dict(weights)
        self.selected = True

    def __call__(self) -> Any:
        """Load the current weights. All processes must call this: shards are gathered here."""
        if self.model is not self.state.model and not self.selected:
            self.model.load_state_dict(evaluated_weights(self.state))
        return self.model
