"""Suspicious labels: planted ones come first, and no image is scored by a probe that saw it."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_predict

from vitral.evaluation.probes import _held_out_logits, find_label_errors


def clusters(rng: np.random.Generator, sizes: list[int], spread: float = 0.6) -> tuple[np.ndarray, np.ndarray]:
    labels = np.repeat(np.arange(len(sizes)), sizes)
    return (np.eye(len(sizes))[labels] * 3 + rng.normal(0, spread, (len(labels), len(sizes)))).astype(
        np.float32
    ), labels


def test_flipped_labels_come_first():
    rng = np.random.default_rng(0)
    x, labels = clusters(rng, [40, 40, 40])
    flipped = rng.choice(len(labels), 6, replace=False)
    given = labels.copy()
    given[flipped] = (labels[flipped] + 1) % 3
    errors = find_label_errors(x, given, classes=3)
    assert {error.row for error in errors[:6]} == set(flipped)
    assert all(error.suggested == labels[error.row] for error in errors[:6])
    assert sum(error.likely for error in errors[:6]) >= 4  # a stricter test than the ranking
    assert not any(error.likely for error in errors[6:])
    assert [error.score for error in errors] == sorted(error.score for error in errors)


def test_random_labels_are_not_fitted():
    """A probe that saw its own image would agree with a random label: 40 features separate 30 images perfectly."""
    rng = np.random.default_rng(1)
    x, labels = rng.normal(size=(30, 40)).astype(np.float32), rng.permutation(np.repeat([0, 1], 15))
    logits = _held_out_logits(x, labels, 2, 0, "cpu")
    assert np.mean(logits.argmax(1) == labels) < 0.8


def test_held_out_predictions_agree_with_scikit_learn():
    """Not in their bits, as folds differ: in which class they predict, and in the order of what is suspicious."""
    rng = np.random.default_rng(2)
    x, labels = clusters(rng, [50, 30, 40], spread=1.2)
    ours = _held_out_logits(x, labels, 3, 0, "cpu")
    theirs = cross_val_predict(LogisticRegression(C=1.0, max_iter=500), x, labels, cv=5, method="predict_proba")
    assert np.mean(ours.argmax(1) == theirs.argmax(1)) > 0.93


@pytest.mark.parametrize("alone", [True, False])
def test_a_class_with_one_image_is_neither_judged_nor_suggested(alone):
    rng = np.random.default_rng(3)
    x, labels = clusters(rng, [20, 20, 1 if alone else 2])
    errors = find_label_errors(x, labels, classes=3)
    judged = {error.row for error in errors} | {error.suggested for error in errors}
    assert not alone or (40 not in judged and all(error.suggested != 2 for error in errors))
    assert all(np.isfinite(error.score) for error in errors)


def test_probabilities_count_relative_to_their_class():
    """Two classes that overlap: half of their images are uncertain, and that alone makes none of them likely wrong."""
    rng = np.random.default_rng(4)
    x = np.concatenate([rng.normal(0, 1, (60, 2)), rng.normal(0.3, 1, (60, 2)), rng.normal(8, 1, (60, 2))])
    labels = np.repeat([0, 1, 2], 60)
    labels[0] = 2  # far from its class, among those of class 0
    errors = find_label_errors(x.astype(np.float32), labels, classes=3)
    assert errors[0].row == 0
    assert errors[0].score < errors[1].score - 0.1
