"""Nearest neighbours and the linear probe against scikit-learn and brute force."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier

from vitral.data import neighbours
from vitral.errors import UserError
from vitral.evaluation import probes
from vitral.evaluation.probes import knn, linear_probe, whitening

CLASSES = 4


def problem_of(n: int, d: int = 12, seed: int = 0, noise: float = 1.5) -> tuple[np.ndarray, np.ndarray]:
    centres = np.random.default_rng(99).normal(size=(CLASSES, d))
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, n)
    return (centres[labels] + noise * rng.normal(size=(n, d)) + 3).astype(np.float32), labels


@pytest.mark.parametrize(("k", "temperature"), [(1, 0.07), (20, 0.07), (5, 1.0), (500, 0.5)])
@pytest.mark.parametrize("blocks", [(1024, 16384), (7, 31)])
def test_votes_equal_those_of_scikit_learn(monkeypatch, k, temperature, blocks):
    monkeypatch.setattr(neighbours, "QUERY_BLOCK", blocks[0])
    monkeypatch.setattr(neighbours, "STORED_BLOCK", blocks[1])
    train_x, train_y = problem_of(110)
    test_x, _ = problem_of(40, seed=1)
    reference = KNeighborsClassifier(
        n_neighbors=min(k, 110),
        metric="cosine",
        weights=lambda distance: np.exp((1 - distance) / temperature),
    )
    expected = reference.fit(train_x, train_y).predict_proba(test_x)
    result = knn(train_x, train_y, test_x, classes=CLASSES + 1, k=k, temperature=temperature)
    assert result.dtype == np.float32
    np.testing.assert_allclose(result[:, :CLASSES], expected, atol=1e-4)
    assert (result[:, CLASSES] == 0).all()


def test_neighbours_ignore_length_and_small_temperatures_do_not_overflow():
    train_x, train_y = problem_of(50)
    test_x, _ = problem_of(20, seed=1)
    scaled = knn(train_x * 7, train_y, test_x / 3, classes=CLASSES)
    np.testing.assert_allclose(scaled, knn(train_x, train_y, test_x, classes=CLASSES), atol=1e-5)
    cold = knn(train_x, train_y, test_x, classes=CLASSES, temperature=1e-6)
    first = knn(train_x, train_y, test_x, classes=CLASSES, k=1)
    assert (cold.argmax(1) == first.argmax(1)).all()
    with pytest.raises(UserError, match="k must be at least 1"):
        knn(train_x, train_y, test_x, classes=CLASSES, k=0)


def logistic(x: np.ndarray, labels: np.ndarray, l2: float) -> LogisticRegression:
    """scikit-learn weighs the sum of the losses by C beside half the squares, we the squares beside the mean loss."""
    return LogisticRegression(C=1 / (l2 * len(x)), tol=1e-10, max_iter=5000).fit(x, labels)


@pytest.mark.parametrize("l2", [10.0, 0.1, 1e-3])
def test_the_probe_equals_logistic_regression_of_scikit_learn(monkeypatch, l2):
    monkeypatch.setattr(probes, "_ROWS", 64)
    x, labels = problem_of(150)
    x[:, 3] = 2.5  # a constant feature
    fresh, _ = problem_of(30, seed=1)
    fresh[:, 3] = 2.5
    result = linear_probe(x, labels, classes=CLASSES, l2_candidates=[l2])
    mean, std = whitening(x)
    reference = logistic((x - mean) / std, labels, l2)
    np.testing.assert_allclose(result.weights, reference.coef_.T, atol=2e-4)
    logits, expected = result.logits(fresh), reference.decision_function((fresh - mean) / std)
    centred = [
        values - values.mean(1, keepdims=True) for values in (logits, expected)
    ]  # softmax ignores a common shift
    np.testing.assert_allclose(*centred, atol=1e-3)
    assert result.l2 == l2


def test_l2_is_chosen_by_cross_validation_on_the_training_images():
    x, labels = problem_of(60, d=40, noise=4.0)
    candidates = (100.0, 10.0, 1.0, 1e-1, 1e-2)
    result = linear_probe(x, labels, classes=CLASSES, l2_candidates=candidates, seed=3)
    order = np.random.default_rng(3).permutation(60)
    fold = np.empty(60, np.int64)
    for index, row in enumerate(order):
        fold[row] = (labels[order[:index]] == labels[row]).sum() % 5
    rating = {}
    for l2 in candidates:
        wrong = loss = 0.0
        for part in range(5):
            training = fold != part
            mean, std = whitening(x[training])
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the reference's, where it is content with fewer digits
                reference = logistic((x[training] - mean) / std, labels[training], l2)
            chances = reference.predict_proba((x[~training] - mean) / std)
            wrong += (chances.argmax(1) != labels[~training]).sum()
            loss -= np.log(chances[np.arange(len(chances)), labels[~training]]).sum()
        rating[l2] = (wrong, loss)
    assert result.l2 == min(candidates, key=rating.__getitem__)
    assert result.l2 not in (candidates[0], candidates[-1])
    alone = linear_probe(x, labels, classes=CLASSES, l2_candidates=[result.l2])
    np.testing.assert_allclose(result.weights, alone.weights, atol=1e-4)


def test_the_probe_is_deterministic():
    x, labels = problem_of(40)
    first, second = (linear_probe(x, labels, classes=CLASSES, l2_candidates=(1.0, 0.01)) for _ in range(2))
    np.testing.assert_array_equal(first.weights, second.weights)
    assert first.logits(x[:0]).shape == (0, CLASSES)


def test_invalid_arguments_are_errors():
    x, labels = problem_of(20)
    with pytest.raises(UserError, match="must be above 0"):
        linear_probe(x, labels, classes=CLASSES, l2_candidates=(0.0,))
    with pytest.raises(UserError, match="one image of each class"):
        linear_probe(x[:CLASSES], np.arange(CLASSES), classes=CLASSES)
    with pytest.raises(UserError, match="do not fit 2 classes"):
        knn(x, labels, x, classes=2)
