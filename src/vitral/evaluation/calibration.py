"""Calibration: negative log-likelihood, expected calibration error, temperature scaling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from vitral.data.splits import evenly
from vitral.errors import UserError

BINS = 15  # of equal width, as in Guo et al. 2017, whose ECE this is
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 100.0  # beyond: perfectly separable, or worse than chance
FOLDS = 5
_FITTED = 10_000  # examples that one number is fitted to; more would cost minutes with thousands of classes
_BLOCK = 2**18  # logits in float64 at a time: blocks that stay in the caches, and 50,000 x 21,843 would take 8.7 GB


class ReliabilityBin(NamedTuple):
    """The examples whose confidence lies in (low, high]."""

    low: float
    high: float
    count: int
    confidence: float  # mean; 0 in an empty bin
    accuracy: float


class Calibration(NamedTuple):
    """A temperature, and the metrics of probabilities at the temperature that the other examples suggest."""

    temperature: float  # fitted to all examples; 1 if that is not better
    nll: float  # cross-fitted: each fold at the temperature fitted to the other folds
    ece: float


def check_scores(scores: np.ndarray, labels: np.ndarray) -> None:
    """Raise a UserError for empty, mismatched or non-finite outputs, and for labels outside the classes."""
    if scores.ndim != 2 or len(labels) != len(scores):
        raise UserError(
            f"outputs of shape {scores.shape} and labels of shape {labels.shape} do not fit: give one row per example."
        )
    if len(scores) == 0:
        raise UserError("there is no example to score: check that the images can be read.")
    if not np.isfinite(scores).all():
        bad = int((~np.isfinite(scores).all(axis=1)).sum())
        raise UserError(
            f"{bad} of {len(scores)} outputs are not finite (NaN or Inf): the weights are damaged or training diverged."
        )
    if labels.ndim == 1 and (labels.min() < 0 or labels.max() >= scores.shape[1]):
        wrong = labels.min() if labels.min() < 0 else labels.max()
        raise UserError(f"label {wrong} has no output: the model has {scores.shape[1]} classes, counted from 0.")


def probabilities(logits: np.ndarray, *, sigmoid: bool = False, temperature: float | np.ndarray = 1.0) -> np.ndarray:
    """(n, k) -> (n, k) float64: softmax over the classes, or the sigmoid of each, of the logits / temperature."""
    z = logits.astype(np.float64) / np.reshape(temperature, (-1, 1))
    if sigmoid:
        return np.exp(-np.logaddexp(0, -z))
    return np.exp(z - log_sum_exp(z)[:, None])


def confidences(logits: np.ndarray, *, sigmoid: bool = False, temperature: float | np.ndarray = 1.0) -> np.ndarray:
    """(n, k) -> (n,) float64: the probability of the predicted class"""
    top = logits.max(axis=1).astype(np.float64) / temperature
    return np.exp(-np.logaddexp(0, -top)) if sigmoid else np.exp(top - log_sum_exp(logits, temperature))


def log_sum_exp(logits: np.ndarray, temperature: float | np.ndarray = 1.0) -> np.ndarray:
    """(n, k) -> (n,) float64, of the logits / temperature: one for all, or (n,)"""
    sums = [top[:, 0] + np.log(np.exp(z).sum(axis=1)) for z, top, _ in _blocks(logits, temperature)]
    return np.concatenate(sums) if sums else np.zeros(0)


def negative_log_likelihood(logits: np.ndarray, labels: np.ndarray, temperature: float | np.ndarray = 1.0) -> float:
    """(n, k), (n,) -> the mean of -log p(label) under the softmax of the logits / temperature, in nats"""
    check_scores(logits, labels)
    labelled = logits[np.arange(len(labels)), labels].astype(np.float64) / temperature
    return float(np.mean(log_sum_exp(logits, temperature) - labelled))


def reliability(
    logits: np.ndarray, labels: np.ndarray, *, sigmoid: bool = False, temperature: float | np.ndarray = 1.0
) -> tuple[ReliabilityBin, ...]:
    """(n, k), (n,) -> accuracy by confidence, the probability of the predicted class, in `BINS` bins."""
    check_scores(logits, labels)
    confidence = confidences(logits, sigmoid=sigmoid, temperature=temperature)
    correct = logits.argmax(axis=1) == labels  # of the logits: a temperature never changes the predicted class
    edges = np.linspace(0, 1, BINS + 1)
    bins = np.searchsorted(edges[1:-1], confidence, side="left")
    table = []
    for i in range(BINS):
        inside = bins == i
        means = (float(confidence[inside].mean()), float(correct[inside].mean())) if inside.any() else (0.0, 0.0)
        table.append(ReliabilityBin(float(edges[i]), float(edges[i + 1]), int(inside.sum()), *means))
    return tuple(table)


def calibration_error(bins: tuple[ReliabilityBin, ...]) -> float:
    """Expected calibration error (ECE): the mean |confidence - accuracy| of the bins, weighted by their counts."""
    gaps = [row.count * abs(row.confidence - row.accuracy) for row in bins]
    return sum(gaps) / sum(row.count for row in bins)


def calibration_at(
    logits: np.ndarray, labels: np.ndarray, temperature: float | np.ndarray, *, sigmoid: bool = False
) -> Calibration:
    """Loss and calibration error of (n, k) and (n,) at a temperature, one for all or (n,)."""
    bins = reliability(logits, labels, sigmoid=sigmoid, temperature=temperature)
    nll = negative_log_likelihood(logits, labels, temperature)
    return Calibration(float(np.ravel(temperature)[0]), nll, calibration_error(bins))


def calibrate(logits: np.ndarray, labels: np.ndarray) -> Calibration:
    """Fit a temperature to examples and measure it on the same ones by cross-fitting.

    No example is measured at a temperature that was fitted to it. Unless both loss and calibration error
    improve, the temperature is 1. Each fit counts one more mistake than there is (`fit_temperature`), so that a few
    examples without any mistake do not make a model certain. Logits are (n, k), labels (n,) int64.
    """
    plain = calibration_at(logits, labels, 1.0)
    if len(labels) < 2 or logits.shape[1] < 2:
        return plain
    folds, fitted = _folds(labels), evenly(len(labels), _FITTED)
    temperatures = np.ones(len(labels))
    for fold in range(min(FOLDS, len(labels))):
        others = fitted[folds[fitted] != fold]
        temperatures[folds == fold] = fit_temperature(logits[others], labels[others], mistakes=1)
    _, nll, ece = calibration_at(logits, labels, temperatures)
    if nll >= plain.nll or ece >= plain.ece:
        return plain
    return Calibration(fit_temperature(logits[fitted], labels[fitted], mistakes=1), nll, ece)


def _folds(labels: np.ndarray) -> np.ndarray:
    """(n,) -> (n,): a fold for each example, with the classes spread evenly over the folds."""
    folds = np.empty(len(labels), np.int64)
    folds[np.argsort(labels, kind="stable")] = np.arange(len(labels)) % FOLDS
    return folds


def fit_temperature(logits: np.ndarray, labels: np.ndarray, *, mistakes: float = 0.0) -> float:
    """The temperature that maximises the likelihood of labels (n,) by logits (n, k); fit it on held-out data only.

    The log-likelihood is concave in 1 / temperature, so its maximum is where the slope is zero: Newton's method, with
    bisection where a step leaves the bracket. Clipped to MIN_TEMPERATURE and MAX_TEMPERATURE.

    `mistakes` is the weight, in examples, of an imagined example like the average of these whose label is the second
    most likely class. With 1, n right predictions of equal margin get the confidence n / (n + 1); with 0 they get 1.
    """
    check_scores(logits, labels)
    targets, share = _margins(logits, labels), mistakes / (len(labels) + mistakes)
    target = float((1 - share) * targets[0].mean() + share * targets[1].mean())
    low, high, inverse = 1 / MAX_TEMPERATURE, 1 / MIN_TEMPERATURE, 1.0
    if _slope(logits, target, high)[0] <= 0:
        return MIN_TEMPERATURE
    if _slope(logits, target, low)[0] >= 0:
        return MAX_TEMPERATURE
    for _ in range(60):
        slope, curvature = _slope(logits, target, inverse)
        low, high = (low, inverse) if slope > 0 else (inverse, high)
        step = inverse - slope / curvature if curvature > 0 else low
        after = step if low < step < high else (low + high) / 2
        if abs(after - inverse) <= 1e-10 * inverse:
            break
        inverse = after
    return float(1 / inverse)


def _margins(logits: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The logits of the labels and of the second most likely classes, each (n,), minus those of the likeliest."""
    labelled, second = [], []
    for z, _, start in _blocks(logits):
        labelled.append(z[np.arange(len(z)), labels[start : start + len(z)]])
        second.append(np.partition(z, -2, axis=1)[:, -2].copy() if z.shape[1] > 1 else z[:, 0])  # not a view
    return np.concatenate(labelled), np.concatenate(second)


def _slope(logits: np.ndarray, target: float, inverse: float) -> tuple[float, float]:
    """First and second derivative of the mean negative log-likelihood by the inverse temperature.

    `target` is the mean logit of the labels, minus the highest of the row.
    """
    slope = curvature = 0.0
    for z, _, _ in _blocks(logits):
        p = np.exp(inverse * z)
        p /= p.sum(axis=1, keepdims=True)
        mean = (p * z).sum(axis=1)
        slope += float(mean.sum())
        curvature += float(((p * z * z).sum(axis=1) - mean**2).sum())
    return slope / len(logits) - target, curvature / len(logits)


def _blocks(logits: np.ndarray, temperature: float | np.ndarray = 1.0) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """Rows / temperature in float64 minus their maximum, the maximum (rows, 1), and the index of the first row."""
    temperatures = np.broadcast_to(temperature, len(logits))[:, None]
    size = max(1, _BLOCK // logits.shape[1])
    for start in range(0, len(logits), size):
        rows = slice(start, start + size)
        z = logits[rows].astype(np.float64) / temperatures[rows]
        top = z.max(axis=1, keepdims=True)
        yield z - top, top, start
