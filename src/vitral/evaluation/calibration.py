"""Calibration: negative log-likelihood, expected calibration error, temperature scaling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from vitral.errors import UserError

BINS = 15  # of equal width, as in Guo et al. 2017, whose ECE this is
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 100.0  # beyond: perfectly separable, or worse than chance
_ROWS = 4096  # rows in float64 at a time; 50,000 x 21,843 logits would take 8.7 GB


class ReliabilityBin(NamedTuple):
    """The examples whose confidence lies in (low, high]."""

    low: float
    high: float
    count: int
    confidence: float  # mean; 0 in an empty bin
    accuracy: float


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


def probabilities(logits: np.ndarray, *, sigmoid: bool = False) -> np.ndarray:
    """(n, k) -> (n, k) float64: softmax over the classes, or the sigmoid of each."""
    z = logits.astype(np.float64)
    if sigmoid:
        return np.exp(-np.logaddexp(0, -z))
    return np.exp(z - log_sum_exp(logits)[:, None])


def log_sum_exp(logits: np.ndarray) -> np.ndarray:
    """(n, k) -> (n,) float64"""
    sums = [top[:, 0] + np.log(np.exp(z).sum(axis=1)) for z, top, _ in _blocks(logits)]
    return np.concatenate(sums) if sums else np.zeros(0)


def negative_log_likelihood(logits: np.ndarray, labels: np.ndarray) -> float:
    """(n, k), (n,) -> the mean of -log p(label) under the softmax, in nats"""
    check_scores(logits, labels)
    return float(np.mean(log_sum_exp(logits) - logits[np.arange(len(labels)), labels]))


def reliability(logits: np.ndarray, labels: np.ndarray, *, sigmoid: bool = False) -> tuple[ReliabilityBin, ...]:
    """(n, k), (n,) -> accuracy by confidence, the probability of the predicted class, in `BINS` bins."""
    check_scores(logits, labels)
    top = logits.max(axis=1).astype(np.float64)
    confidence = np.exp(-np.logaddexp(0, -top)) if sigmoid else np.exp(top - log_sum_exp(logits))
    correct = logits.argmax(axis=1) == labels
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


def fit_temperature(logits: np.ndarray, labels: np.ndarray) -> float:
    """The temperature to divide logits by that maximises the likelihood of the labels; fit it on held-out data only.

    The log-likelihood is concave in 1 / temperature, so its maximum is where the slope is zero: Newton's method, with
    bisection where a step leaves the bracket. Clipped to MIN_TEMPERATURE and MAX_TEMPERATURE.
    """
    check_scores(logits, labels)
    low, high, inverse = 1 / MAX_TEMPERATURE, 1 / MIN_TEMPERATURE, 1.0
    if _slope(logits, labels, high)[0] <= 0:
        return MIN_TEMPERATURE
    if _slope(logits, labels, low)[0] >= 0:
        return MAX_TEMPERATURE
    for _ in range(60):
        slope, curvature = _slope(logits, labels, inverse)
        low, high = (low, inverse) if slope > 0 else (inverse, high)
        step = inverse - slope / curvature if curvature > 0 else low
        after = step if low < step < high else (low + high) / 2
        if abs(after - inverse) <= 1e-10 * inverse:
            break
        inverse = after
    return float(1 / inverse)


def _slope(logits: np.ndarray, labels: np.ndarray, inverse: float) -> tuple[float, float]:
    """First and second derivative of the mean negative log-likelihood by the inverse temperature."""
    slope = curvature = 0.0
    for z, _, start in _blocks(logits):
        p = np.exp(inverse * z)
        p /= p.sum(axis=1, keepdims=True)
        mean = (p * z).sum(axis=1)
        slope += float((mean - z[np.arange(len(z)), labels[start : start + len(z)]]).sum())
        curvature += float(((p * z * z).sum(axis=1) - mean**2).sum())
    return slope / len(labels), curvature / len(labels)


def _blocks(logits: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """Rows in float64 minus their maximum, the maximum (rows, 1), and the index of the first row."""
    for start in range(0, len(logits), _ROWS):
        z = logits[start : start + _ROWS].astype(np.float64)
        top = z.max(axis=1, keepdims=True)
        yield z - top, top, start
