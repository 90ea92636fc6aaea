"""Few-shot ridge regression against Google's numbers, brute force and SciPy; the real ViT-Ti/16 on pets."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import vitral
from vitral.checkpoints.card import Preprocess
from vitral.data.preprocess import parse_preprocess
from vitral.data.sources import open_data
from vitral.errors import UserError
from vitral.evaluation import probes as room
from vitral.evaluation.accuracy import interval
from vitral.evaluation.predict import SplitFeatures, cached_features
from vitral.evaluation.probes import (
    RIDGE_L2,
    RIDGE_L2_CANDIDATES,
    Ridge,
    choose_l2,
    draw,
    fewshot,
    knn,
    linear_probe,
    stratified_folds,
    whitening,
)

PROBLEMS = ("large_d", "small_d", "small_l2")


@pytest.fixture(scope="module")
def golden(golden_file: Callable[[str], Path]) -> dict[str, np.ndarray]:
    with np.load(golden_file("fewshot.npz")) as arrays:
        return dict(arrays)


def runs(golden: dict[str, np.ndarray], problem: str) -> list[str]:
    return sorted({key.split("/")[1] for key in golden if key.startswith(f"{problem}/seed")})


def settings(run: str) -> tuple[int, int]:
    """ "seed0_shots10" -> (0, 10)"""
    seed, shots = run.removeprefix("seed").split("_shots")
    return int(seed), int(shots)


def problem_of(n: int, d: int, classes: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    labels = np.arange(n) % classes
    centres = rng.normal(size=(classes, d))
    return (centres[labels] + rng.normal(size=(n, d))).astype(np.float32), labels


@pytest.mark.parametrize("problem", PROBLEMS)
def test_draws_fits_and_predictions_equal_those_of_google(golden: dict[str, np.ndarray], problem: str) -> None:
    one = {key: golden[f"{problem}/{key}"] for key in ("train_x", "train_y", "test_x", "test_y")}
    classes, l2 = int(golden[f"{problem}/num_classes"]), float(golden[f"{problem}/l2_reg"])
    assert len(runs(golden, problem)) >= 3
    for run in runs(golden, problem):
        expected = {
            key: golden[f"{problem}/{run}/{key}"]
            for key in ("indices", "mean", "std", "weights_f64", "scores_f64", "pred", "accuracy")
        }
        seed, shots = settings(run)
        rows = draw(one["train_y"], shots, seed)
        np.testing.assert_array_equal(rows, expected["indices"])
        ridge = Ridge.fit(one["train_x"][rows], one["train_y"][rows], classes, l2)
        np.testing.assert_allclose(ridge.mean, expected["mean"], atol=1e-6)
        np.testing.assert_allclose(ridge.std, expected["std"], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(ridge.weights, expected["weights_f64"], atol=1e-5)
        np.testing.assert_allclose(ridge.scores(one["test_x"]), expected["scores_f64"], atol=1e-4)
        np.testing.assert_array_equal(ridge.predict(one["test_x"]), expected["pred"])
        result = fewshot(*one.values(), classes=classes, shots=[shots], seeds=seed + 1, l2=l2)[0]
        assert result.accuracies[seed] == pytest.approx(float(expected["accuracy"]), abs=1e-6)
        assert result.drawn == len(expected["indices"])


@given(st.lists(st.integers(0, 4), min_size=1, max_size=40), st.integers(1, 6), st.integers(0, 3))
def test_a_draw_has_shots_of_each_class_and_draws_are_nested(labels, shots, seed):
    y = np.array(labels)
    rows = draw(y, shots, seed)
    assert len(set(rows.tolist())) == len(rows)
    for label in range(5):
        own = [row for row in rows.tolist() if y[row] == label]
        assert len(own) == min(shots, labels.count(label))
        more = [row for row in draw(y, shots + 1, seed).tolist() if y[row] == label]
        assert more[: len(own)] == own


@pytest.mark.parametrize(("n", "d"), [(12, 40), (40, 40), (41, 40), (90, 30)])
@pytest.mark.parametrize("l2", [1.0, RIDGE_L2, 2.0**20])
def test_primal_and_dual_form_equal_the_textbook_solution(n: int, d: int, l2: float) -> None:
    x, labels = problem_of(n, d, 4)
    ridge = Ridge.fit(x, labels, 4, l2)
    mean, std = x.mean(0, dtype=np.float64), x.std(0, dtype=np.float64) + 1e-5
    design = np.hstack([(x - mean) / std, np.full((n, 1), 100.0)])
    targets = np.where(labels[:, None] == np.arange(4), 1.0, -1.0)
    primal = np.linalg.inv(design.T @ design + l2 * np.eye(d + 1)) @ design.T @ targets
    dual = design.T @ np.linalg.inv(design @ design.T + l2 * np.eye(n)) @ targets
    np.testing.assert_allclose(ridge.weights, primal, rtol=0, atol=1e-9)
    np.testing.assert_allclose(ridge.weights, dual, rtol=0, atol=1e-9)


def test_predictions_do_not_depend_on_the_block_size(monkeypatch: pytest.MonkeyPatch) -> None:
    x, labels = problem_of(60, 10, 3)
    ridge = Ridge.fit(x[:20], labels[:20], 3)
    whole = ridge.predict(x)
    monkeypatch.setattr(room, "_RIDGE_ROWS", 7)
    np.testing.assert_array_equal(ridge.predict(x), whole)
    assert whole.tolist() == ridge.scores(x).argmax(1).tolist()
    assert ridge.predict(x[:0]).shape == (0,)


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 10, 29, 30, 199])
def test_the_interval_is_that_of_students_t(freedom: int) -> None:
    values = np.random.default_rng(freedom).random(freedom + 1).tolist()
    low, high = stats.t.interval(0.95, freedom, loc=np.mean(values), scale=stats.sem(values))
    assert interval(values) == pytest.approx((high - low) / 2, rel=1e-9)
    assert interval(values[:1]) is None


def test_a_result_has_a_mean_and_an_interval() -> None:
    x, labels = problem_of(120, 8, 3)
    one, five = fewshot(x[:60], labels[:60], x[60:], labels[60:], classes=3, shots=(1, 50), seeds=3)
    assert (one.shots, one.drawn, one.n, five.drawn) == (1, 3, 60, 60)
    assert one.l2 == (RIDGE_L2,) * 3
    assert len(set(five.accuracies)) == 1  # every draw takes all there is
    assert five.interval == pytest.approx(0)
    assert one.mean == pytest.approx(np.mean(one.accuracies))
    assert fewshot(x, labels, x, labels, classes=3, shots=[2], seeds=1)[0].interval is None


def test_the_chosen_l2_equals_that_of_brute_force() -> None:
    """Another way through the same search: a fit by inverse for each part and candidate, counted one by one."""
    x, labels = problem_of(40, 60, 4, seed=3)
    x[::3] += np.random.default_rng(1).normal(size=(len(x[::3]), 60)) * 4
    mistakes = dict.fromkeys(RIDGE_L2_CANDIDATES, 0)
    for part in range(5):
        held = np.array([(labels[:row] == labels[row]).sum() % 5 == part for row in range(40)])
        mean, std = whitening(x[~held])
        design, queries = (
            np.hstack([(rows - mean) / std, np.full((len(rows), 1), 100.0)]) for rows in (x[~held], x[held])
        )
        targets = np.where(labels[~held][:, None] == np.arange(4), 1.0, -1.0)
        for l2 in RIDGE_L2_CANDIDATES:
            weights = np.linalg.inv(design.T @ design + l2 * np.eye(61)) @ design.T @ targets
            mistakes[l2] += int(((queries @ weights).argmax(1) != labels[held]).sum())
    least = [l2 for l2 in RIDGE_L2_CANDIDATES if mistakes[l2] == min(mistakes.values())]
    assert len(set(mistakes.values())) > 2
    assert choose_l2(x, labels, 4) == min(least, key=lambda l2: abs(np.log2(l2 / RIDGE_L2)))


def test_l2_does_not_depend_on_the_test_set() -> None:
    x, labels = problem_of(200, 30, 5)
    test = problem_of(50, 30, 5, seed=9)
    first = fewshot(x, labels, *test, classes=5, shots=(5,), seeds=2, l2="choose")[0]
    second = fewshot(x, labels, test[0], test[1][::-1], classes=5, shots=(5,), seeds=2, l2="choose")[0]
    assert first.l2 == second.l2 != (RIDGE_L2, RIDGE_L2)
    assert first.accuracies != second.accuracies
    assert fewshot(x, labels, *test, classes=5, shots=(1,), seeds=2, l2="choose")[0].l2 == (RIDGE_L2, RIDGE_L2)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=40), st.integers(2, 6))
def test_folds_hold_out_each_row_once_and_leave_every_class_in_training(labels, folds):
    y = np.array(labels)
    counted = np.zeros(len(y), np.int64)
    for training, held in stratified_folds(y, folds):
        assert (training == ~held).all()
        assert held.any()
        assert set(y[training].tolist()) == set(labels)
        counted += held
    lone = np.array([labels.count(label) == 1 for label in labels])
    np.testing.assert_array_equal(counted, ~lone)


def test_invalid_arguments_are_errors() -> None:
    x, labels = problem_of(20, 5, 2)
    several = np.zeros((20, 2), np.uint8)
    broken = np.where(np.arange(5) == 2, np.nan, x)
    for arguments, message in [
        ((x, several, x, labels), "one label per image"),
        ((x[:3], labels, x, labels), "one row per image"),
        ((x, labels, x[:0], labels[:0]), "one row per image"),
        ((x, labels + 1, x, labels), "from 1 to 2 do not fit 2 classes"),
        ((x, labels, broken, labels), "not finite"),
    ]:
        with pytest.raises(UserError, match=message):
            fewshot(*arguments, classes=2)
    for shots, seeds in (((), 5), ((5, 0), 5), ((1,), 0)):
        with pytest.raises(UserError, match="at least 1"):
            fewshot(x, labels, x, labels, classes=2, shots=shots, seeds=seeds)
    for strength in (0.0, -1.0, float("nan")):
        with pytest.raises(UserError, match="above 0"):
            fewshot(x, labels, x, labels, classes=2, l2=strength)


class Pets(NamedTuple):
    train: SplitFeatures
    test: SplitFeatures
    seconds: float  # to have them again


@pytest.fixture(scope="session")
def pets(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Pets:
    """Features of 780 photographs by the real ViT-Ti/16, prepared as the paper's authors do; half a minute."""
    data, folder = assets / "data", tmp_path_factory.mktemp("features")
    model, _ = vitral.load(data / "vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors")
    prepared = Preprocess(*parse_preprocess("decode|resize(256, 256)|central_crop(224)|value_range(-1, 1)"))
    opened = open_data(data / "pets_mini")
    assert opened.test is not None
    splits = opened.train, opened.test
    computed = [cached_features(model, split, prepared, folder=folder) for split in splits]
    start = time.process_time()  # of this process: the machine may be busy
    again = [cached_features(model, split, prepared, folder=folder) for split in splits]
    seconds = time.process_time() - start
    for one, other in zip(computed, again, strict=True):
        np.testing.assert_array_equal(one.x, other.x)
    return Pets(again[0], again[1], seconds)


@pytest.mark.slow
@pytest.mark.xdist_group("pets")
def test_ten_shots_of_pets_give_96_percent_and_cached_features_take_seconds(pets: Pets) -> None:
    start = time.process_time()  # of this process: the machine may be busy
    five, ten = fewshot(*pets.train.readable(), *pets.test.readable(), classes=12, shots=(5, 10))
    assert time.process_time() - start + pets.seconds < 30
    assert (five.drawn, ten.drawn, ten.n) == (60, 120, 300)
    assert ten.mean >= 0.96
    assert five.mean < ten.mean
    assert ten.interval is not None
    assert 0 < ten.interval < 0.03


@pytest.mark.slow
@pytest.mark.xdist_group("pets")
def test_neighbours_and_linear_probe_classify_pets(pets: Pets) -> None:
    test_x, test_y = pets.test.readable()
    votes = knn(*pets.train.readable(), test_x, classes=12)
    assert (votes.argmax(1) == test_y).mean() >= 0.96
    probe = linear_probe(*pets.train.readable(), classes=12, l2_candidates=(1e-1, 1e-3))
    assert (probe.logits(test_x).argmax(1) == test_y).mean() >= 0.96
