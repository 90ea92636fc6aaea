"""Temperatures against brute force and SciPy, cross-fitting against a loop, and what runs and cards do with them."""

from __future__ import annotations

import json
import re
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from journeys import COLOURS, MODEL, QUICK, colour_folder, paint
from oracles import SMALL, random_weights
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, softmax

import vitral
from vitral.checkpoints.adapt import Adaptation
from vitral.checkpoints.card import Card
from vitral.checkpoints.weights import read_adapted, write
from vitral.errors import UserError
from vitral.evaluation.accuracy import classification_metrics
from vitral.evaluation.calibration import (
    calibrate,
    calibration_error,
    fit_temperature,
    negative_log_likelihood,
    probabilities,
    reliability,
)
from vitral.training.metrics import measure


def outputs(seed: int, n: int, k: int, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Logits (n, k) whose labels (n,) follow their softmax, then multiplied by `scale`: the best temperature."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(scale=2, size=(n, k))
    labels = (softmax(logits, axis=1).cumsum(axis=1) < rng.random((n, 1))).sum(axis=1)
    return (logits * scale).astype(np.float32), labels


def loss(logits: np.ndarray, labels: np.ndarray, temperature: float, mistakes: float = 0.0) -> float:
    """The mean negative log-likelihood, with `mistakes` examples more whose label is the runner-up."""
    logs = log_softmax(logits.astype(np.float64) / temperature, axis=1)
    right = logs[np.arange(len(labels)), labels]
    return float(-(right.sum() + mistakes * np.sort(logs, axis=1)[:, -2].mean()) / (len(labels) + mistakes))


def best(logits: np.ndarray, labels: np.ndarray, mistakes: float) -> float:
    found = minimize_scalar(
        lambda log: loss(logits, labels, np.exp(log), mistakes),
        bounds=(-4.6, 4.6),
        method="bounded",
        options={"xatol": 1e-9},
    )
    return float(np.exp(found.x))


@pytest.mark.parametrize("mistakes", [0.0, 1.0, 3.5])
@pytest.mark.parametrize(("seed", "n", "k", "scale"), [(0, 40, 3, 0.2), (1, 300, 12, 1.0), (2, 25, 2, 4.0)])
def test_the_temperature_is_that_of_scipy_and_of_a_grid(seed, n, k, scale, mistakes):
    logits, labels = outputs(seed, n, k, scale)
    found = fit_temperature(logits, labels, mistakes=mistakes)
    assert found == pytest.approx(best(logits, labels, mistakes), rel=1e-5)
    grid = min(loss(logits, labels, t, mistakes) for t in np.geomspace(0.01, 100, 500))
    assert loss(logits, labels, found, mistakes) <= grid


@pytest.mark.parametrize("n", [2, 9, 36])
def test_right_predictions_alone_do_not_make_a_model_certain(n):
    """n of n right, by equal margins between two classes: Laplace's n / (n + 1), or certainty without a mistake."""
    logits, labels = np.tile([[0.3, 0.0]], (n, 1)), np.zeros(n, np.int64)
    found = fit_temperature(logits, labels, mistakes=1)
    assert probabilities(logits, temperature=found)[0, 0] == pytest.approx(n / (n + 1))
    assert fit_temperature(logits, labels) == 0.01


def test_cross_fitting_equals_a_loop():
    """Each example at a temperature of others only; classes in turn, so that every fold has all of them."""
    logits, labels = outputs(3, 61, 4, 0.25)
    fold = dict(zip(sorted(range(61), key=lambda i: labels[i]), [i % 5 for i in range(61)], strict=True))
    temperatures = np.empty(61)
    for i in range(61):
        others = [j for j in range(61) if fold[j] != fold[i]]
        temperatures[i] = best(logits[others], labels[others], 1)
    chances = softmax(logits / temperatures[:, None], axis=1)
    found = calibrate(logits, labels)
    assert found.temperature == pytest.approx(best(logits, labels, 1), rel=1e-5)
    assert found.nll == pytest.approx(-np.log(chances[np.arange(61), labels]).mean(), rel=1e-5)
    sure, right = chances.max(1), logits.argmax(1) == labels
    bins = np.digitize(sure, np.linspace(0, 1, 16)[1:-1], right=True)
    gaps = [abs((sure - right)[bins == i].sum()) for i in range(15)]
    assert found.ece == pytest.approx(sum(gaps) / 61, abs=1e-5)
    assert found.ece < calibration_error(reliability(logits, labels)) / 2


@settings(max_examples=60)
@given(seed=st.integers(0, 999), n=st.integers(1, 40), k=st.integers(1, 5), scale=st.sampled_from([0.0, 0.1, 1.0, 9.0]))
def test_a_temperature_is_never_worse_than_none(seed, n, k, scale):
    logits, labels = outputs(seed, n, k, scale)
    found, plain = calibrate(logits, labels), calibration_error(reliability(logits, labels))
    nll = negative_log_likelihood(logits, labels)
    if found.temperature == 1.0:
        assert (found.nll, found.ece) == (nll, plain)
    else:
        assert found.nll < nll
        assert found.ece < plain


def test_no_temperature_is_fitted_to_noise():
    """Few examples, and logits that already are calibrated: most draws keep 1, and no more than a few are changed."""
    kept = [calibrate(*outputs(seed, 12, 3, 1.0)).temperature == 1.0 for seed in range(40)]
    assert sum(kept) > 20


def test_a_temperature_of_others_holds_for_new_examples():
    """The cross-fitted error is about that of examples that were not there."""
    logits, labels = outputs(5, 6000, 10, 0.2)
    fitted = calibrate(logits[:300], labels[:300])
    after = calibration_error(reliability(logits[300:], labels[300:], temperature=fitted.temperature))
    before = calibration_error(reliability(logits[300:], labels[300:]))
    assert before > 0.3
    assert after < 0.04
    assert fitted.nll == pytest.approx(
        negative_log_likelihood(logits[300:], labels[300:], fitted.temperature), abs=0.15
    )


@pytest.mark.parametrize("temperature", [0.01, 0.37, 3.0, 100.0])
def test_metrics_at_a_temperature(temperature):
    """Neighbouring floats, which become equal after a division, keep their order."""
    logits, labels = outputs(6, 50, 4, 1.0)
    logits[0, :2], labels[0] = (np.nextafter(np.float32(9), np.float32(0)), 9), 1
    plain, scaled = (classification_metrics(logits, labels, "abcd", temperature=t) for t in (1.0, temperature))
    assert (plain.top1, plain.nll, plain.ece) == (scaled.top1, scaled.nll, scaled.ece)
    assert scaled.nll_calibrated == pytest.approx(loss(logits, labels, temperature))
    assert probabilities(logits, temperature=temperature) == pytest.approx(
        softmax(logits.astype(np.float64) / temperature, axis=1)
    )
    assert (plain.nll_calibrated, plain.ece_calibrated) == (plain.nll, plain.ece)


def test_sigmoid_outputs_keep_a_temperature_of_one():
    logits, labels = outputs(7, 60, 4, 0.1)
    found = measure(logits, labels, tuple("abcd"), sigmoid=True)
    assert (found["temperature"], found["ece_calibrated"]) == (1.0, found["ece"])
    assert measure(logits, labels, tuple("abcd"))["temperature"] < 0.5


def test_cards_hold_a_temperature_and_new_heads_lose_it(tmp_path):
    model = replace(SMALL, classes=3)
    path, card = tmp_path / "model.safetensors", Card(model, class_names=("a", "b", "c"), temperature=0.25)
    write(random_weights(model), card, path, "vitral")
    assert vitral.load(path)[1].temperature == 0.25
    assert read_adapted(path, Adaptation(classes=3)).card.temperature == 0.25  # the same head
    assert read_adapted(path, Adaptation(classes=5)).card.temperature == 1.0
    told = vitral.convert(path, tmp_path / "hf", format="hf").unstated
    assert any("its temperature, 0.25" in sentence for sentence in told)
    values = json.loads(card.to_json())
    assert Card.from_json(json.dumps({key: values[key] for key in values if key != "temperature"})).temperature == 1.0
    for wrong in (0, -1.0, float("nan"), float("inf"), "1", None):
        with pytest.raises(UserError, match="card cannot be read"):
            Card.from_json(json.dumps({**values, "temperature": wrong}))


@pytest.fixture(scope="module")
def colours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of which a quarter of the reds lies among the greens."""
    folder = colour_folder(tmp_path_factory.mktemp("data"), 12)
    for number in range(4):
        paint(folder / "green" / f"red-{number}.png", COLOURS["red"], 99 + number)
    return folder


@pytest.mark.parametrize(
    "words",
    [(), ("patience=2", "evaluate_every=4", "data.dev=0.6", "batch=4"), ("loss=sigmoid",)],
    ids=("last", "best", "sigmoid"),
)
def test_a_run_keeps_the_temperature_of_its_weights(words, colours, tmp_path):
    options = [*QUICK, "steps=12", "regularization.label_smoothing=0", "data.held_out=0.4", *words]
    done = vitral.train(colours, model=MODEL, out=tmp_path / "run", set=options, device="cpu").results[0]
    _, card = vitral.load(tmp_path / "run")
    assert card.temperature == done.metrics["temperature"]
    found = vitral.evaluate(tmp_path / "run", colours, device="cpu")
    assert {"score": found.metrics["top1"], **found.metrics} == done.metrics
    if "loss=sigmoid" in words:
        assert (card.temperature, card.changes) == (1.0, ())
        assert "none is fitted to sigmoid" in done.calibration
        return
    assert card.temperature != 1.0
    assert done.metrics["nll_calibrated"] < done.metrics["nll"]
    selected = "patience=2" in words  # then the result is of other images than the temperature
    images = r"\d+ dev" if selected else f"{done.metrics['n']} test"
    (sentence,) = card.changes
    assert re.fullmatch(f"temperature {card.temperature:.3g}, fitted on the {images} images", sentence)
    assert done.calibration.startswith(sentence)
    assert ("cross-fitted" in done.calibration) != selected
    assert any("fitted on these images" in note for note in found.notes) != selected
    # Elsewhere the temperature is applied as it is.
    other = colour_folder(tmp_path / "other", 3, seed=1000)
    found = vitral.evaluate(tmp_path / "run", other, device="cpu")
    assert found.metrics["temperature"] == card.temperature
    rows = vitral.predict(tmp_path / "run", other, top=3, device="cpu").rows
    names = [Path(row.path).parent.name for row in rows]
    chances = [row.probabilities[row.names.index(name)] for row, name in zip(rows, names, strict=True)]
    assert found.metrics["nll_calibrated"] == pytest.approx(-np.log(chances).mean(), rel=1e-3)
    # A run from these weights begins without it, even where the head stays.
    again = vitral.train(
        other, init=tmp_path / "run", out=tmp_path / "again", set=["steps=1", "workers=0"], device="cpu"
    )
    assert vitral.load(tmp_path / "again")[1].temperature == again.results[0].metrics["temperature"]


def test_memory_of_a_fit_does_not_grow_with_the_number_of_classes() -> None:
    logits = np.random.default_rng(0).standard_normal((200, 20_000), np.float32)
    tracemalloc.start()
    try:
        fit_temperature(logits, logits.argmax(axis=1), mistakes=1)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < logits.nbytes  # 16 MB; in float64 at once it was 128 MB
