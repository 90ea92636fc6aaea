"""Counts against plain loops and scikit-learn; calibration against its definition."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitral.errors import UserError
from vitral.evaluation.accuracy import (
    average_precision,
    best_thresholds,
    classification_metrics,
    confused_pairs,
    multilabel_metrics,
)
from vitral.evaluation.calibration import (
    BINS,
    calibration_error,
    fit_temperature,
    log_sum_exp,
    negative_log_likelihood,
    probabilities,
    reliability,
)
from vitral.evaluation.mapping import real_accuracy


def outputs(seed: int, n: int, k: int, levels: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Logits (n, k) that favour the labels (n,); with `levels` only so many distinct values, so that many are equal."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, k, n)
    logits = rng.normal(size=(n, k)) + 1.5 * np.eye(k)[labels]
    if levels:
        logits = np.round(logits * levels) / levels
    return logits.astype(np.float32), labels


def names(k: int) -> tuple[str, ...]:
    return tuple(f"class {i}" for i in range(k))


def sorted_classes(row: np.ndarray) -> list[int]:
    """Best first, of equal ones the lower index first."""
    return sorted(range(len(row)), key=lambda i: (-row[i], i))


@given(seed=st.integers(0, 999), n=st.integers(1, 40), k=st.integers(2, 9), levels=st.sampled_from([0, 1, 2]))
def test_counts_equal_those_of_a_loop(seed, n, k, levels):
    logits, labels = outputs(seed, n, k, levels)
    result = classification_metrics(logits, labels, names(k))
    order = [sorted_classes(row) for row in logits]
    matrix = [
        [sum(y == t and o[0] == p for y, o in zip(labels, order, strict=True)) for p in range(k)] for t in range(k)
    ]
    assert result.n == n
    assert result.top1 == sum(o[0] == y for o, y in zip(order, labels, strict=True)) / n
    expected = sum(y in o[:5] for o, y in zip(order, labels, strict=True)) / n
    assert result.top5 == (expected if k >= 5 else None)
    assert {(true, chosen): count for true, chosen, count in result.confusion.tolist()} == {
        (i, j): count for i, row in enumerate(matrix) for j, count in enumerate(row) if count
    }
    recalls = []
    for i, row in enumerate(result.per_class):
        support, taken = sum(matrix[i]), sum(line[i] for line in matrix)
        assert row.name == f"class {i}"
        assert row.support == support
        assert row.recall == (matrix[i][i] / support if support else None)
        assert row.precision == (matrix[i][i] / taken if taken else None)
        recalls += [matrix[i][i] / support] if support else []
    assert result.mean_per_class == pytest.approx(sum(recalls) / len(recalls))


def test_ties_go_to_the_lower_index():
    logits = np.zeros((8, 8), np.float32)
    result = classification_metrics(logits, np.arange(8), names(8))
    assert result.top1 == 1 / 8
    assert result.top5 == 5 / 8


def test_confused_pairs_come_most_frequent_first():
    labels = np.array([0] * 5 + [1] * 4 + [2] * 3)
    chosen = np.array([0, 1, 1, 2, 2, 1, 0, 0, 0, 2, 2, 0])
    result = classification_metrics(np.eye(3, dtype=np.float32)[chosen], labels, ("a", "b", "c"))
    expected = [("b", "a", 3, 4), ("a", "b", 2, 5), ("a", "c", 2, 5), ("c", "a", 1, 3)]
    assert [tuple(pair) for pair in result.confused] == expected
    assert [tuple(pair) for pair in confused_pairs(result.confusion, "abc", most=1)] == expected[:1]


def test_counts_do_not_depend_on_the_block_size():
    logits, labels = outputs(0, 9000, 6)
    result = classification_metrics(logits, labels, names(6))
    assert result.top1 == np.mean(logits.argmax(1) == labels)
    assert result.top5 == np.mean([y in sorted_classes(row)[:5] for row, y in zip(logits, labels, strict=True)])
    torch = pytest.importorskip("torch")
    expected = torch.nn.functional.cross_entropy(torch.tensor(logits).double(), torch.tensor(labels))
    assert result.nll == pytest.approx(float(expected), abs=1e-12)


def test_metrics_become_json():
    logits, labels = outputs(1, 20, 6)
    result = classification_metrics(logits, labels, names(6))
    back = json.loads(json.dumps(result.as_dict(), allow_nan=False))
    assert back["top1"] == result.top1
    assert sum(count for _, _, count in back["confusion"]) == 20
    scores = probabilities(logits, sigmoid=True)
    json.dumps(multilabel_metrics(scores, np.eye(6, dtype=np.uint8)[labels], names(6)).as_dict(), allow_nan=False)


@pytest.mark.parametrize(
    ("logits", "labels", "classes", "message"),
    [
        (np.zeros((0, 3)), np.zeros(0, int), "abc", "to score"),
        (np.zeros((2, 3)), np.array([0, 3]), "abc", "label 3 has no output"),
        (np.zeros((2, 3)), np.array([-1, 0]), "abc", "label -1 has no output"),
        (np.array([[0, np.nan, 0], [0, 0, 0]]), np.zeros(2, int), "abc", "1 of 2 outputs are not finite"),
        (np.zeros((2, 3)), np.zeros(3, int), "abc", "one row per example"),
        (np.zeros((2, 3)), np.zeros(2, int), "ab", "2 class names do not fit 3 outputs"),
    ],
)
def test_invalid_outputs_and_labels_are_errors(logits, labels, classes, message):
    with pytest.raises(UserError, match=message):
        classification_metrics(logits, labels, classes)


@given(seed=st.integers(0, 999), n=st.integers(1, 60), levels=st.sampled_from([2, 4, 100]))
def test_average_precision_equals_that_of_a_loop(seed, n, levels):
    rng = np.random.default_rng(seed)
    scores, truth = rng.integers(0, levels + 1, n) / levels, rng.random(n) < 0.4
    truth[rng.integers(n)] = True
    total, before = 0.0, 0.0
    for limit in sorted(set(scores.tolist()), reverse=True):
        taken = scores >= limit
        recall = (taken & truth).sum() / truth.sum()
        total += (recall - before) * (taken & truth).sum() / taken.sum()
        before = recall
    assert average_precision(scores, truth) == pytest.approx(total, abs=1e-12)


def f1(predicted: np.ndarray, truth: np.ndarray) -> float:
    hits, wrong, missed = (predicted & truth).sum(), (predicted & ~truth).sum(), (~predicted & truth).sum()
    return 2 * hits / (2 * hits + wrong + missed)


@given(seed=st.integers(0, 999), n=st.integers(1, 30))
def test_best_thresholds_beat_every_other_one(seed, n):
    rng = np.random.default_rng(seed)
    scores, labels = rng.integers(0, 11, (n, 4)) / 10, (rng.random((n, 4)) < 0.4).astype(np.uint8)
    labels[:, 3] = 0
    limits = best_thresholds(scores, labels)
    assert limits[3] == 0.5
    for i in np.flatnonzero(labels[:, :3].any(axis=0)):
        truth = labels[:, i] == 1
        tried = {limit: f1(scores[:, i] >= limit, truth) for limit in scores[:, i]}
        best = max(tried.values())
        assert limits[i] == max(limit for limit, value in tried.items() if value == pytest.approx(best, abs=1e-12))


def test_multilabel_metrics_equal_those_of_scikit_learn():
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(3)
    labels = (rng.random((300, 7)) < 0.25).astype(np.uint8)
    labels[:, 2] = 0
    scores = np.round(probabilities(rng.normal(size=(300, 7)) + 1.5 * labels, sigmoid=True), 2)
    result = multilabel_metrics(scores, labels, names(7))
    present = [0, 1, 3, 4, 5, 6]
    expected = metrics.average_precision_score(labels[:, present], scores[:, present], average=None)
    assert [result.per_class[i].average_precision for i in present] == pytest.approx(list(expected), abs=1e-12)
    assert result.per_class[2].average_precision is None
    assert result.mean_average_precision == pytest.approx(expected.mean())
    half = (scores >= 0.5).astype(int)
    assert result.micro_f1 == pytest.approx(metrics.f1_score(labels, half, average="micro"))
    assert result.macro_f1 == pytest.approx(metrics.f1_score(labels, half, average="macro", labels=present))
    fitted = (scores >= best_thresholds(scores, labels)).astype(int)
    assert result.fitted_here
    assert result.micro_f1_at_thresholds == pytest.approx(metrics.f1_score(labels, fitted, average="micro"))
    assert result.macro_f1_at_thresholds == pytest.approx(
        metrics.f1_score(labels, fitted, average="macro", labels=present)
    )
    assert result.macro_f1 < result.macro_f1_at_thresholds


def test_invalid_multilabel_arguments_are_errors():
    labels = np.eye(3, dtype=np.uint8)
    with pytest.raises(UserError, match="apply a sigmoid"):
        multilabel_metrics(labels * 2.0, labels, "abc")
    with pytest.raises(UserError, match="no example has a label"):
        multilabel_metrics(labels * 0.5, labels * 0, "abc")
    with pytest.raises(UserError, match="labels of 0 and 1"):
        multilabel_metrics(labels * 0.5, np.zeros(3, np.uint8), "abc")
    with pytest.raises(UserError, match="to score"):
        multilabel_metrics(np.zeros((0, 3)), np.zeros((0, 3), np.uint8), "abc")


def test_real_labels():
    logits = np.eye(5)[[0, 1, 2, 3]]
    keys = [f"some/ILSVRC2012_val_{i:08d}.JPEG" for i in (3, 1, 4, 2)]
    real = [[1, 4], [2], [4], []]  # of pictures 1 to 4
    assert real_accuracy(logits, keys, real) == (1 / 3, 3)
    with pytest.raises(UserError, match=r'not "cat\.jpg"'):
        real_accuracy(logits[:1], ["cat.jpg"], real)
    with pytest.raises(UserError, match="ILSVRC2012_val_00000005"):
        real_accuracy(logits[:1], ["ILSVRC2012_val_00000005.JPEG"], real)
    with pytest.raises(UserError, match="to score"):
        real_accuracy(logits[:1], ["ILSVRC2012_val_00000004.JPEG"], real)
    with pytest.raises(UserError, match="this model has 3"):
        real_accuracy(logits[:1, :3], ["ILSVRC2012_val_00000001.JPEG"], real)


@given(
    seed=st.integers(0, 999),
    n=st.integers(1, 50),
    scale=st.sampled_from([0.0, 0.5, 3.0, 300.0]),
    sigmoid=st.booleans(),
)
def test_calibration_error_equals_that_of_a_loop(seed, n, scale, sigmoid):
    """With a sigmoid, of the classes each by itself: what `predict` gives models that were trained so."""
    logits, labels = outputs(seed, n, 4)
    logits = (logits * scale).astype(np.float32)
    table = reliability(logits, labels, sigmoid=sigmoid)
    assert len(table) == BINS == 15
    total = 0.0
    chances = [[math.exp(z - max(row)) for z in row] for row in logits.tolist()]
    sure = [max(row) / sum(row) for row in chances]
    if sigmoid:
        sure = [1 / (1 + math.exp(-max(row))) for row in logits.tolist()]
    right = [sorted_classes(row)[0] == y for row, y in zip(logits, labels, strict=True)]
    for i in range(15):
        inside = [j for j in range(n) if i / 15 < sure[j] <= (i + 1) / 15]
        assert table[i].count == len(inside)
        if inside:
            gap = sum(sure[j] for j in inside) / len(inside) - sum(right[j] for j in inside) / len(inside)
            total += len(inside) / n * abs(gap)
    assert calibration_error(table) == pytest.approx(total, abs=1e-9)
    counted = classification_metrics(logits, labels, names(4), sigmoid=sigmoid)
    assert counted.ece == pytest.approx(total, abs=1e-9)
    assert counted.nll == negative_log_likelihood(logits, labels)


def test_probabilities_hold_for_large_outputs():
    logits = np.array([[1000.0, 999.0, -1000.0], [-1000.0, -1000.0, -1000.0]], np.float32)
    e = math.e
    assert probabilities(logits) == pytest.approx(np.array([[e / (e + 1), 1 / (e + 1), 0], [1 / 3] * 3]))
    assert probabilities(logits, sigmoid=True)[0] == pytest.approx(np.array([1.0, 1.0, 0.0]))
    assert log_sum_exp(logits) == pytest.approx([1000 + math.log(1 + 1 / e), -1000 + math.log(3)])
    assert negative_log_likelihood(logits, np.array([1, 0])) == pytest.approx(
        (1 + math.log(1 + 1 / e) + math.log(3)) / 2
    )


def test_the_temperature_has_the_best_likelihood():
    logits, labels = outputs(5, 5000, 10)
    result = fit_temperature(logits * 3, labels)
    tried = {t: negative_log_likelihood(logits * 3 / t, labels) for t in np.geomspace(0.2, 20, 400)}
    assert result == pytest.approx(min(tried, key=tried.__getitem__), rel=0.012)
    best = negative_log_likelihood(logits.astype(np.float64) * 3 / result, labels)
    assert best <= min(tried.values()) + 1e-12
    errors = [calibration_error(reliability(logits * 3 / t, labels)) for t in (1.0, result)]
    assert errors[1] < errors[0] / 5


def test_a_known_temperature_is_recovered():
    rng = np.random.default_rng(0)
    logits = rng.normal(scale=2, size=(20000, 5))
    labels = (probabilities(logits).cumsum(axis=1) < rng.random((20000, 1))).sum(axis=1)
    assert fit_temperature(logits * 2.5, labels) == pytest.approx(2.5, rel=0.03)


def test_temperatures_stay_in_bounds():
    logits = np.eye(4) * 5
    assert fit_temperature(logits, np.arange(4)) == pytest.approx(0.01, rel=1e-6)
    assert fit_temperature(logits, (np.arange(4) + 1) % 4) == pytest.approx(100, rel=1e-6)
    assert 0.01 <= fit_temperature(np.zeros((4, 4)), np.arange(4)) <= 100
