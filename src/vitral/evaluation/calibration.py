"""Do the probabilities mean what they say? Likelihood, calibration error, and the one-number repair."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from vitral.errors import UserError

BINS = 15  # of equal width, as in Guo et al. 2017, whose ECE this is
COLDEST, HOTTEST = 0.01, 100.0  # temperatures outside mean: perfectly separable, or worse than guessing
_ROWS = 4096  # rows that exist in float64 at a time; a whole 50,000 x 21,843 table would take 8.7 GB


class Bin(NamedTuple):
    """The examples whose confidence lies in (low, high]."""

    low: float
    high: float
    count: int
    confidence: float  # mean; 0 in an empty bin
    accuracy: float


def check_scores(scores: np.ndarray, labels: np.ndarray) -> None:
    """Refuse what cannot be counted: nothing, a wrong shape, values that are not numbers, labels without a column."""
    if scores.ndim != 2 or len(labels) != len(scores):
        raise UserError(f"outputs {scores.shape} and labels {labels.shape} must have one row for each example.")
    if len(scores) == 0:
        raise UserError("there is nothing to score: not one example was left, check that the images can be read.")
    if not np.isfinite(scores).all():
        bad = int((~np.isfinite(scores).all(axis=1)).sum())
        raise UserError(f"{bad} of {len(scores)} outputs are not finite: the weights are damaged or training diverged.")
    if labels.ndim == 1 and (labels.min() < 0 or labels.max() >= scores.shape[1]):
        wrong = labels.min() if labels.min() < 0 else labels.max()
        raise UserError(f"label {wrong} has no output: the model has {scores.shape[1]} classes, counted from 0.")


def probabilities(logits: np.ndarray, *, sigmoid: bool = False) -> np.ndarray:
    """(n, k) -> (n, k) float64: a softmax over the classes, or with `sigmoid` each class on its own."""
    z = logits.astype(np.float64)
    if sigmoid:
        return np.exp(-np.logaddexp(0, -z))
    return np.exp(z - log_sum_exp(logits)[:, None])


def log_sum_exp(logits: np.ndarray) -> np.ndarray:
    """(n, k) -> (n,) float64"""
    sums = [top[:, 0] + np.log(np.exp(z).sum(axis=1)) for z, top, _ in _blocks(logits)]
    return np.concatenate(sums) if sums else np.zeros(0)


def negative_log_likelihood(logits: np.ndarray, labels: np.ndarray) -> float:
    """(n, k), (n,) -> the mean of -log p(label), in nats"""
    check_scores(logits, labels)
    return float(np.mean(log_sum_exp(logits) - logits[np.arange(len(labels)), labels]))


def reliability(logits: np.ndarray, labels: np.ndarray, *, sigmoid: bool = False) -> tuple[Bin, ...]:
    """(n, k), (n,) -> how often the predicted class is right, by the probability it was given."""
    check_scores(logits, labels)
    top = logits.max(axis=1).astype(np.float64)
    confidence = np.exp(-np.logaddexp(0, -top)) if sigmoid else np.exp(top - log_sum_exp(logits))
    right = logits.argmax(axis=1) == labels
    edges = np.linspace(0, 1, BINS + 1)
    place = np.searchsorted(edges[1:-1], confidence, side="left")
    table = []
    for i in range(BINS):
        inside = place == i
        means = (float(confidence[inside].mean()), float(right[inside].mean())) if inside.any() else (0.0, 0.0)
        table.append(Bin(float(edges[i]), float(edges[i + 1]), int(inside.sum()), *means))
    return tuple(table)


def calibration_error(table: tuple[Bin, ...]) -> float:
    """Expected calibration error (ECE): the mean |confidence - accuracy| of the bins, weighted by their examples."""
    gaps = [row.count * abs(row.confidence - row.accuracy) for row in table]
    return sum(gaps) / sum(row.count for row in table)


def fit_temperature(logits: np.ndarray, labels: np.ndarray) -> float:
    """The number to divide logits by for the best likelihood of these labels; fit it on held-out data only.

    The likelihood is concave in 1 / temperature, so the place where its slope is zero is the best one; it is searched
    by Newton's method between bounds that close in, unless it lies outside them from the start.
    """
    check_scores(logits, labels)
    low, high, inverse = 1 / HOTTEST, 1 / COLDEST, 1.0
    if _slope(logits, labels, high)[0] <= 0:
        return COLDEST
    if _slope(logits, labels, low)[0] >= 0:
        return HOTTEST
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
    """Rows in float64 less their maximum, the maximum (rows, 1), and the first row's number."""
    for start in range(0, len(logits), _ROWS):
        z = logits[start : start + _ROWS].astype(np.float64)
        top = z.max(axis=1, keepdims=True)
        yield z - top, top, start
