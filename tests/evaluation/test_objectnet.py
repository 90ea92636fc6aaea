"""ObjectNet scored by a loop, and the paper's way of preparing its images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from catalog_files import objectnet
from hypothesis import given
from hypothesis import strategies as st

import vitral
from vitral.api import inference
from vitral.architecture import ViTConfig
from vitral.checkpoints.card import Card, Preprocess
from vitral.errors import UserError
from vitral.evaluation.mapping import objectnet_accuracy
from vitral.models.build import build

SMALL = ViTConfig(depth=1, width=16, mlp=32, heads=2, patch=4, image=(30, 30), classes=1000)
STATED = Preprocess("decode|resize(30)", (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))


@pytest.fixture
def saved(tmp_path) -> Callable[[Preprocess | None], Path]:
    """Weights that state this of their pixels, or nothing."""

    def save(pixels: Preprocess | None) -> Path:
        torch.manual_seed(0)
        path = tmp_path / "model.safetensors"
        vitral.save(build(SMALL), path, Card(SMALL, preprocess=pixels))
        return path

    return save


@given(st.integers(0, 10**6), st.integers(1, 30), st.integers(1, 4), st.integers(5, 12), st.sampled_from([0, 1, 8]))
def test_scores_equal_those_of_a_loop(seed, n, classes, outputs, digits):
    """Rounded outputs are often equal: the lower index counts as the answer."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(n, outputs)).round(digits).astype(np.float32)
    labels = rng.integers(0, classes, n)
    mapping = [sorted(rng.choice(outputs, rng.integers(1, 4), replace=False).tolist()) for _ in range(classes)]
    first = five = 0
    for row, label in zip(logits.tolist(), labels.tolist(), strict=True):
        answers = sorted(range(outputs), key=lambda output: (-row[output], output))
        first += answers[0] in mapping[label]
        five += any(answer in mapping[label] for answer in answers[:5])
    assert objectnet_accuracy(logits, labels, mapping) == (first / n, five / n, n)


def test_any_mapped_class_is_correct():
    """An output that no ObjectNet class is mapped to takes the first place, and the answer is wrong."""
    logits = np.zeros((1, 1000), np.float32)
    logits[0, [7, 409]] = 2, 1
    assert objectnet_accuracy(logits, np.array([0]), [[409, 530]]) == (0, 1, 1)


def test_other_models_and_empty_splits_are_errors():
    with pytest.raises(UserError, match="this model has 10"):
        objectnet_accuracy(np.zeros((1, 10), np.float32), np.array([0]), [[409]])
    with pytest.raises(UserError, match="to score"):
        objectnet_accuracy(np.zeros((0, 1000), np.float32), np.zeros(0, np.int64), [[409]])


def test_preprocessing_is_that_of_bit_with_the_mean_and_std_of_the_weights(saved, tmp_path, monkeypatch):
    seen = []
    real = inference.predict_split
    monkeypatch.setattr(
        inference,
        "predict_split",
        lambda model, split, how, **rest: (seen.append(how), real(model, split, how, **rest))[1],
    )
    objectnet(tmp_path / "objectnet-1.0")
    result = vitral.evaluate(saved(STATED), f"objectnet:{tmp_path}", device="cpu")
    assert result.metrics["n"] == 2
    assert seen == [replace(STATED, pipeline="decode|resize_small(32)|central_crop(30)")]


def test_weights_without_preprocessing_are_evaluated_with_what_is_assumed(saved, tmp_path):
    objectnet(tmp_path / "objectnet-1.0")
    source, data = saved(None), f"objectnet:{tmp_path}"
    heard = []
    assert vitral.evaluate(source, data, device="cpu", on_event=heard.append).metrics["n"] == 2
    assert "mean and std 0.5 are assumed" in str(heard)
    said = "decode|resize(30)|value_range(0, 1)"
    assert vitral.evaluate(source, data, preprocess=said, device="cpu").metrics["n"] == 2
