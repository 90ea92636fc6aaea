"""Pure numbers from outputs and labels: exact counts, so that they depend on no batch size and no process count."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from vitral.errors import UserError
from vitral.evaluation.calibration import calibration_error, check_scores, negative_log_likelihood, reliability

_ROWS = 4096  # rows compared at a time: the masks of a whole table of outputs would be as large as the table


class ClassRow(NamedTuple):
    """One class of a classification. Without examples there is no recall, without predictions no precision."""

    name: str
    support: int
    recall: float | None
    precision: float | None


class ConfusedPair(NamedTuple):
    """`count` of the `support` examples of class `true` were taken for `predicted`."""

    true: str
    predicted: str
    count: int
    support: int


@dataclass(frozen=True)
class Classification:
    """One label for each example. Equal outputs go to the lower class index."""

    n: int
    top1: float
    top5: float | None  # None below five classes
    mean_per_class: float  # recall, averaged over the classes that have examples
    nll: float  # of the softmax over the classes, of which one is right, whatever loss trained the model
    ece: float  # of the probabilities that the model gives: softmax or sigmoid
    per_class: tuple[ClassRow, ...]
    confused: tuple[ConfusedPair, ...]
    confusion: np.ndarray  # (m, 3) int64: true class, predicted class, count; 21,843 classes squared would fill 3.8 GB

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready; the confusion as [true, predicted, count] where the count is not zero."""
        return {
            **{name: getattr(self, name) for name in ("n", "top1", "top5", "mean_per_class", "nll", "ece")},
            "per_class": [row._asdict() for row in self.per_class],
            "confused": [pair._asdict() for pair in self.confused],
            "confusion": self.confusion.tolist(),
        }


def classification_metrics(
    logits: np.ndarray, labels: np.ndarray, classes: Sequence[str], *, sigmoid: bool = False
) -> Classification:
    """(n, k), (n,) and k names -> all that is counted about them; with `sigmoid` each class has a probability of its
    own."""
    check_scores(logits, labels)
    _check_names(classes, logits.shape[1])
    k = logits.shape[1]
    ranks, chosen = _ranks(logits, labels), logits.argmax(axis=1)
    codes, counts = np.unique(labels * k + chosen, return_counts=True)
    confusion = np.stack([codes // k, codes % k, counts], axis=1)
    right, support, predicted = (np.bincount(of, minlength=k) for of in (labels[chosen == labels], labels, chosen))
    present = support > 0
    return Classification(
        n=len(labels),
        top1=float((ranks == 0).mean()),
        top5=float((ranks < 5).mean()) if k >= 5 else None,
        mean_per_class=float((right[present] / support[present]).mean()),
        nll=negative_log_likelihood(logits, labels),
        ece=calibration_error(reliability(logits, labels, sigmoid=sigmoid)),
        per_class=tuple(
            ClassRow(name, int(support[i]), _share(right[i], support[i]), _share(right[i], predicted[i]))
            for i, name in enumerate(classes)
        ),
        confused=confused_pairs(confusion, classes),
        confusion=confusion,
    )


def confused_pairs(confusion: np.ndarray, classes: Sequence[str], most: int = 5) -> tuple[ConfusedPair, ...]:
    """(m, 3) -> the commonest mistakes, most frequent first; equally frequent ones in the order of the classes."""
    support = np.bincount(confusion[:, 0], weights=confusion[:, 2], minlength=len(classes))
    wrong = confusion[confusion[:, 0] != confusion[:, 1]]
    order = np.lexsort((wrong[:, 1], wrong[:, 0], -wrong[:, 2]))[:most]
    return tuple(
        ConfusedPair(classes[true], classes[predicted], count, int(support[true]))
        for true, predicted, count in wrong[order].tolist()
    )


def real_accuracy(logits: np.ndarray, keys: Sequence[str], real: Sequence[Sequence[int]]) -> tuple[float, int]:
    """(n, 1000) -> (accuracy, scored) by the ReaL labels (Beyer et al. 2020): any of an image's labels is right.

    Entry i of `real` belongs to ILSVRC2012_val_{i + 1:08d}, which every key must contain; an empty list is not scored.
    """
    numbers = [re.search(r"ILSVRC2012_val_(\d{8})", key) for key in keys]
    for key, number in zip(keys, numbers, strict=True):
        if number is None or not 1 <= int(number[1]) <= len(real):
            raise UserError(f'ReaL labels belong to files named as in ILSVRC2012_val_00000001.JPEG, not "{key}".')
    allowed = [set(real[int(number[1]) - 1]) for number in numbers if number]
    if len(logits) == 0 or not any(allowed):
        raise UserError("none of these images has a ReaL label: there is nothing to score.")
    if max(max(labels) for labels in allowed if labels) >= logits.shape[1]:
        raise UserError(f"ReaL labels count ImageNet's 1000 classes, and this model has {logits.shape[1]}.")
    check_scores(logits, np.zeros(len(allowed), np.int64))
    chosen = logits.argmax(axis=1).tolist()
    right = [guess in labels for guess, labels in zip(chosen, allowed, strict=True) if labels]
    return sum(right) / len(right), len(right)


class LabelRow(NamedTuple):
    """One class of a multi-label problem; what needs a positive example is None without one."""

    name: str
    support: int
    average_precision: float | None
    threshold: float
    f1_at_half: float | None
    f1_at_threshold: float | None


@dataclass(frozen=True)
class MultiLabel:
    """Several labels for each example. Means over classes take those with a positive example; `micro` pools them all.

    Where `fitted_here` is true, the thresholds were chosen on these very examples, so F1 at them is optimistic.
    """

    n: int
    mean_average_precision: float
    micro_f1: float  # at probability 0.5
    macro_f1: float
    micro_f1_at_thresholds: float
    macro_f1_at_thresholds: float
    fitted_here: bool
    per_class: tuple[LabelRow, ...]

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {**asdict(self), "per_class": [row._asdict() for row in self.per_class]}


def multilabel_metrics(
    scores: np.ndarray, labels: np.ndarray, classes: Sequence[str], thresholds: Sequence[float] | None = None
) -> MultiLabel:
    """Probabilities (n, k) and 0/1 labels (n, k) -> mAP and F1, at 0.5 and at thresholds given or fitted here."""
    _check_probabilities(scores, labels)
    _check_names(classes, scores.shape[1])
    truth = labels.astype(bool)
    support = truth.sum(axis=0)
    present = support > 0
    if not present.any():
        raise UserError("not one example has a label: there is nothing to score.")
    if thresholds is not None and len(thresholds) != len(classes):
        raise UserError(f"{len(thresholds)} thresholds do not fit {len(classes)} classes: give one for each.")
    limits = best_thresholds(scores, labels) if thresholds is None else np.asarray(thresholds, np.float64)
    precision = [average_precision(scores[:, i], truth[:, i]) if present[i] else None for i in range(len(classes))]
    (micro, half), (fitted_micro, fitted) = (_f1(scores >= limit, truth) for limit in (0.5, limits))
    return MultiLabel(
        n=len(scores),
        mean_average_precision=float(np.mean([value for value in precision if value is not None])),
        micro_f1=micro,
        macro_f1=float(half[present].mean()),
        micro_f1_at_thresholds=fitted_micro,
        macro_f1_at_thresholds=float(fitted[present].mean()),
        fitted_here=thresholds is None,
        per_class=tuple(
            LabelRow(
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
    """(n,), (n,) bool -> the sum of precision times gain in recall over all thresholds: steps, no interpolation."""
    _, hits, taken = _cumulative(scores, truth)
    return float((hits / taken * np.diff(hits, prepend=0)).sum() / hits[-1])


def best_thresholds(scores: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """(n, k), (n, k) -> (k,): where `score >= threshold` has its best F1, the highest such score; 0.5 for classes
    without a positive example."""
    _check_probabilities(scores, labels)
    found = np.full(scores.shape[1], 0.5)
    for i in np.flatnonzero(labels.any(axis=0)):
        values, hits, taken = _cumulative(scores[:, i], labels[:, i].astype(bool))
        found[i] = values[np.argmax(2 * hits / (taken + hits[-1]))]
    return found


def _cumulative(scores: np.ndarray, truth: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Distinct scores from high to low; positives, and examples, that score at least as much."""
    order = np.argsort(-scores, kind="stable")
    ordered = scores[order]
    last = np.append(np.diff(ordered) != 0, True).nonzero()[0]  # of each run of equal scores
    return ordered[last], np.cumsum(truth[order])[last], last + 1


def _f1(predicted: np.ndarray, truth: np.ndarray) -> tuple[float, np.ndarray]:
    """(n, k) bool twice -> the pooled F1, and (k,) of each class; 0 where there is nothing to find and nothing found"""
    hits = (predicted & truth).sum(axis=0)
    total = predicted.sum(axis=0) + truth.sum(axis=0)
    return float(2 * hits.sum() / total.sum()), 2 * hits / np.maximum(total, 1)


def _ranks(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """(n, k), (n,) -> (n,): how many classes come before the label; of equal outputs the lower index comes first."""
    ranks = np.empty(len(labels), np.int64)
    columns = np.arange(logits.shape[1])
    for start in range(0, len(labels), _ROWS):
        rows = slice(start, start + _ROWS)
        own, label = logits[rows][np.arange(len(labels[rows])), labels[rows]][:, None], labels[rows][:, None]
        before = (logits[rows] > own) | ((logits[rows] == own) & (columns < label))
        ranks[rows] = before.sum(axis=1)
    return ranks


def _share(part: Any, whole: Any) -> float | None:
    return float(part / whole) if whole else None


def _check_names(classes: Sequence[str], k: int) -> None:
    if len(classes) != k:
        raise UserError(f"{len(classes)} class names do not fit {k} outputs: give one name for each.")


def _check_probabilities(scores: np.ndarray, labels: np.ndarray) -> None:
    if labels.shape != scores.shape:
        raise UserError(f"several labels need a table of 0 and 1 as large as the outputs {scores.shape}.")
    check_scores(scores, labels)
    if scores.min() < 0 or scores.max() > 1:
        raise UserError("multi-label scores are probabilities from 0 to 1: apply a sigmoid to the outputs first.")


class ObjectNetScore(NamedTuple):
    top1: float
    top5: float
    n: int


def objectnet_accuracy(logits: np.ndarray, labels: np.ndarray, mapping: Sequence[Sequence[int]]) -> ObjectNetScore:
    """(n, 1000), (n,) -> how often the first, or one of the first five, is right. Equal outputs go to the lower index.

    `mapping` has the outputs that are right for each ObjectNet class.
    """
    check_scores(logits, labels)
    outputs = logits.shape[1]
    if max(map(max, mapping)) >= outputs:
        raise UserError(f"ObjectNet is mapped to ImageNet's 1000 classes, and this model has {outputs}.")
    right = np.zeros((len(mapping), outputs), bool)
    for label, allowed in enumerate(mapping):
        right[label, list(allowed)] = True
    first = np.argsort(-logits, axis=1, kind="stable")[:, :5]
    hits = right[labels[:, None], first]
    return ObjectNetScore(float(hits[:, 0].mean()), float(hits.any(axis=1).mean()), len(labels))
