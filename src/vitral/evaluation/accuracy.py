"""Classification and multi-label metrics from all outputs and labels of a split, by exact counts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from vitral.errors import UserError
from vitral.evaluation.calibration import Calibration, calibrate, calibration_at, check_scores

CONFIDENCE = 0.95
_ROWS = 4096  # rows compared at a time, which bounds the memory of the masks
_NUMBERS = (
    *("n", "top1", "top5", "mean_per_class", "nll", "ece"),
    *("temperature", "nll_calibrated", "ece_calibrated"),
)


class ClassMetrics(NamedTuple):
    """Metrics of one class. Recall is None without examples, precision without predictions."""

    name: str
    support: int
    recall: float | None
    precision: float | None


class ConfusedPair(NamedTuple):
    """`count` of the `support` examples of class `true` were predicted as `predicted`."""

    true: str
    predicted: str
    count: int
    support: int


@dataclass(frozen=True)
class ClassificationMetrics:
    """Metrics of single-label classification. Ties go to the lower class index."""

    n: int
    top1: float
    top5: float | None  # None below five classes
    mean_per_class: float  # recall, averaged over the classes that have examples
    nll: float  # negative log-likelihood of the softmax over the classes, whatever loss trained the model
    ece: float  # expected calibration error of the probabilities, softmax or sigmoid, of the logits as they are
    temperature: float  # what the logits are divided by to calibrate them
    nll_calibrated: float  # at that temperature, or cross-fitted where it was fitted to these examples
    ece_calibrated: float
    per_class: tuple[ClassMetrics, ...]
    confused: tuple[ConfusedPair, ...]
    confusion: np.ndarray  # (m, 3) int64, sparse: true class, predicted class, count

    def as_dict(self) -> dict[str, Any]:
        """For JSON; the confusion matrix as [true, predicted, count] where the count is not zero."""
        return {**{name: getattr(self, name) for name in _NUMBERS}, **tables_as_dict(vars(self))}


def classification_metrics(
    logits: np.ndarray,
    labels: np.ndarray,
    classes: Sequence[str],
    *,
    sigmoid: bool = False,
    temperature: float | None = None,
) -> ClassificationMetrics:
    """Compute the metrics of single-label classification of logits (n, k) and labels (n,) int64.

    Args:
        sigmoid: Whether each class has its own probability (sigmoid), or they sum to 1 (softmax).
        temperature: What the logits are divided by to calibrate them. By default it is fitted to these examples, for
            which the calibrated metrics are cross-fitted; with `sigmoid` it is 1 then.
    """
    check_scores(logits, labels)
    _check_names(classes, logits.shape[1])
    k = logits.shape[1]
    predictions = logits.argmax(axis=1)
    counted = confusion_metrics(np.stack([labels, predictions, np.ones_like(labels)], axis=1), classes)
    plain, calibrated = _calibrations(logits, labels, sigmoid, temperature)
    return ClassificationMetrics(
        **counted,
        top5=float((_ranks(logits, labels) < 5).mean()) if k >= 5 else None,
        nll=plain.nll,
        ece=plain.ece,
        temperature=calibrated.temperature,
        nll_calibrated=calibrated.nll,
        ece_calibrated=calibrated.ece,
    )


def tables_as_dict(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """per_class, confused and confusion for JSON."""
    rows = {name: [row._asdict() for row in metrics[name]] for name in ("per_class", "confused")}
    return {**rows, "confusion": metrics["confusion"].tolist()}


def _calibrations(
    logits: np.ndarray, labels: np.ndarray, sigmoid: bool, temperature: float | None
) -> tuple[Calibration, Calibration]:
    """Loss and calibration error without a temperature and with it."""
    plain = calibration_at(logits, labels, 1.0, sigmoid=sigmoid)
    if temperature is None:
        return plain, plain if sigmoid else calibrate(logits, labels)
    return plain, calibration_at(logits, labels, temperature, sigmoid=sigmoid)


def confusion_metrics(confusion: np.ndarray, classes: Sequence[str]) -> dict[str, Any]:
    """The fields of `ClassificationMetrics` that need no probabilities, but for top5.

    The confusion matrix is (m, 3) int64, sparse: true class, predicted class, count. Equal pairs of classes are pooled.
    """
    k = len(classes)
    codes, places = np.unique(confusion[:, 0] * k + confusion[:, 1], return_inverse=True)
    counts = np.bincount(places, weights=confusion[:, 2]).astype(np.int64)
    labels, predictions = codes // k, codes % k
    correct, support, predicted = (
        np.bincount(values, weights=weights, minlength=k).astype(np.int64)
        for values, weights in ((labels, counts * (labels == predictions)), (labels, counts), (predictions, counts))
    )
    present, pooled = support > 0, np.stack([labels, predictions, counts], axis=1)
    return {
        "n": int(counts.sum()),
        "top1": float(correct.sum() / counts.sum()),
        "mean_per_class": float((correct[present] / support[present]).mean()),
        "per_class": tuple(
            ClassMetrics(name, int(support[i]), _ratio(correct[i], support[i]), _ratio(correct[i], predicted[i]))
            for i, name in enumerate(classes)
        ),
        "confused": confused_pairs(pooled, classes),
        "confusion": pooled,
    }


def wilson_interval(share: float, n: int) -> tuple[float, float]:
    """The 95 % confidence interval of a share of n independent examples (Wilson's score interval)."""
    z = 1.959964  # 97.5 % of the standard normal distribution are below
    centre, spread = share + z * z / (2 * n), z * (share * (1 - share) / n + z * z / (4 * n * n)) ** 0.5
    return (centre - spread) / (1 + z * z / n), (centre + spread) / (1 + z * z / n)


def interval(values: Sequence[float]) -> float | None:
    """Half the width of the 95 % confidence interval of the mean (Student's t); None for fewer than two values."""
    if len(values) < 2:
        return None
    return student_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def student_quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t distribution."""
    low, high = 0.0, math.pi / 2
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if _within(middle, freedom) < CONFIDENCE else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _within(angle: float, freedom: int) -> float:
    """The probability of |t| < sqrt(freedom) tan(angle) (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for power in range(odd, freedom - 1, 2):
        total += term
        term *= (power + 1) / (power + 2) * math.cos(angle) ** 2
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total


def confused_pairs(confusion: np.ndarray, classes: Sequence[str], most: int = 5) -> tuple[ConfusedPair, ...]:
    """The most frequent confusions of a sparse confusion matrix (m, 3), ties in the order of the classes."""
    support = np.bincount(confusion[:, 0], weights=confusion[:, 2], minlength=len(classes))
    wrong = confusion[confusion[:, 0] != confusion[:, 1]]
    order = np.lexsort((wrong[:, 1], wrong[:, 0], -wrong[:, 2]))[:most]
    return tuple(
        ConfusedPair(classes[true], classes[predicted], count, int(support[true]))
        for true, predicted, count in wrong[order].tolist()
    )


class LabelMetrics(NamedTuple):
    """Metrics of one class of a multi-label problem; None if they need a positive example and there is none."""

    name: str
    support: int
    average_precision: float | None
    threshold: float
    f1_at_half: float | None
    f1_at_threshold: float | None


@dataclass(frozen=True, kw_only=True)
class MultiLabelMetrics:
    """Metrics of multi-label classification. Means over classes include those with a positive example."""

    n: int
    mean_average_precision: float
    micro_f1: float  # at probability 0.5
    macro_f1: float
    micro_f1_at_thresholds: float
    macro_f1_at_thresholds: float
    fitted_here: bool = True  # the thresholds were chosen on the same examples
    per_class: tuple[LabelMetrics, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "per_class": [row._asdict() for row in self.per_class]}


def multilabel_metrics(scores: np.ndarray, labels: np.ndarray, classes: Sequence[str]) -> MultiLabelMetrics:
    """Compute mAP, and F1 at probability 0.5 and at one threshold per class, of probabilities and labels (n, k).

    The thresholds are fitted to these examples, so F1 at them is optimistic.
    """
    _check_probabilities(scores, labels)
    _check_names(classes, scores.shape[1])
    truth = labels.astype(bool)
    support = truth.sum(axis=0)
    present = support > 0
    if not present.any():
        raise UserError("no example has a label, so there is nothing to score: check the data.")
    limits = best_thresholds(scores, labels)
    precision = [average_precision(scores[:, i], truth[:, i]) if present[i] else None for i in range(len(classes))]
    (micro, half), (fitted_micro, fitted) = (_f1(scores >= limit, truth) for limit in (0.5, limits))
    return MultiLabelMetrics(
        n=len(scores),
        mean_average_precision=float(np.mean([value for value in precision if value is not None])),
        micro_f1=micro,
        macro_f1=float(half[present].mean()),
        micro_f1_at_thresholds=fitted_micro,
        macro_f1_at_thresholds=float(fitted[present].mean()),
        per_class=tuple(
            LabelMetrics(
                name,
                int(support[i]),
                precision[i],
                float(limits[i]),
                float(half[i]) if present[i] else None,
                float(fitted[i]) if present[i] else None,
            )
            for i, name in enumerate(classes)
        ),
    )


def average_precision(scores: np.ndarray, truth: np.ndarray) -> float:
    """(n,), (n,) bool -> the sum of precision times increase in recall over all thresholds, without interpolation."""
    _, hits, taken = _cumulative(scores, truth)
    return float((hits / taken * np.diff(hits, prepend=0)).sum() / hits[-1])


def best_thresholds(scores: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """(n, k), (n, k) -> (k,): the highest score at which `score >= threshold` has the best F1; 0.5 for classes without
    a positive example."""
    _check_probabilities(scores, labels)
    thresholds = np.full(scores.shape[1], 0.5)
    for i in np.flatnonzero(labels.any(axis=0)):
        values, hits, taken = _cumulative(scores[:, i], labels[:, i].astype(bool))
        thresholds[i] = values[np.argmax(2 * hits / (taken + hits[-1]))]
    return thresholds


def _cumulative(scores: np.ndarray, truth: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Distinct scores from high to low, and how many positives and examples score at least as high."""
    order = np.argsort(-scores, kind="stable")
    ordered = scores[order]
    last = np.append(np.diff(ordered) != 0, True).nonzero()[0]  # of each run of equal scores
    return ordered[last], np.cumsum(truth[order])[last], last + 1


def _f1(predicted: np.ndarray, truth: np.ndarray) -> tuple[float, np.ndarray]:
    """(n, k) bool twice -> micro F1, and F1 per class (k,); 0 for classes without positives and predictions"""
    hits = (predicted & truth).sum(axis=0)
    total = predicted.sum(axis=0) + truth.sum(axis=0)
    return float(2 * hits.sum() / total.sum()), 2 * hits / np.maximum(total, 1)


def _ranks(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """(n, k), (n,) -> (n,): how many classes rank before the label; ties go to the lower index."""
    ranks = np.empty(len(labels), np.int64)
    columns = np.arange(logits.shape[1])
    for start in range(0, len(labels), _ROWS):
        rows = slice(start, start + _ROWS)
        score, label = logits[rows][np.arange(len(labels[rows])), labels[rows]][:, None], labels[rows][:, None]
        before = (logits[rows] > score) | ((logits[rows] == score) & (columns < label))
        ranks[rows] = before.sum(axis=1)
    return ranks


def _ratio(part: Any, total: Any) -> float | None:
    return float(part / total) if total else None


def _check_names(classes: Sequence[str], k: int) -> None:
    if len(classes) != k:
        raise UserError(f"{len(classes)} class names do not fit {k} outputs: give one name for each.")


def _check_probabilities(scores: np.ndarray, labels: np.ndarray) -> None:
    if labels.shape != scores.shape:
        raise UserError(
            f"labels of shape {labels.shape} do not fit outputs of shape {scores.shape}: give labels of 0 and 1."
        )
    check_scores(scores, labels)
    if scores.min() < 0 or scores.max() > 1:
        raise UserError("multi-label scores are probabilities from 0 to 1: apply a sigmoid to the outputs first.")
