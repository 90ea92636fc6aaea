"""Weights are selected by images that the result is not of, and fine-tuning protocols start from a head of zeros."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs import MODEL, make_pictures, starting_from
from runs import train as train_tiny

import vitral
from vitral import events
from vitral.architecture import ViTConfig
from vitral.checkpoints.card import Card, Preprocess
from vitral.data.sources import DataSet, open_data
from vitral.models.build import build
from vitral.recipe import from_toml

CHOOSY = ("patience=1000", "evaluate_every=1", "save_every=100", "trainable=head", "data.mixup=0")
RESTLESS = ("optim.name=sgd", "optim.lr=5", "schedule.kind=constant", "schedule.warmup=0", "batch=3", "steps=40")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pictures(tmp_path_factory.mktemp("data") / "pictures", images=20)


@pytest.fixture(scope="module")
def init(tmp_path_factory: pytest.TempPathFactory) -> str:
    return starting_from(tmp_path_factory.mktemp("weights") / "vit.safetensors")


def coin_flips(seed: int) -> DataSet:
    """Colours with random labels, in train and in test: nothing can be learnt that holds for test."""
    rng = np.random.default_rng(seed)
    train, test = (
        [(image, "ab"[label]) for image, label in zip(images, rng.permutation(np.arange(len(images)) % 2), strict=True)]
        for images in (colours(rng, count) for count in (60, 100))
    )
    return open_data((train, test))


def colours(rng: np.random.Generator, count: int) -> np.ndarray:
    """Images of 2 x 2 colours each, uint8 (count, 8, 8, 3)."""
    return rng.integers(0, 256, (count, 2, 2, 3), np.uint8).repeat(4, 1).repeat(4, 2)


def test_the_best_of_many_evaluations_on_random_labels_is_reported_as_chance(init, tmp_path):
    """The best of 40 evaluations on test itself would be 60 %, four standard deviations above chance."""
    results = [
        train_tiny(coin_flips(seed), tmp_path / str(seed), init, *CHOOSY, *RESTLESS, f"seed={seed}").results[0]
        for seed in range(4)
    ]
    assert {(result.split, result.metrics["n"]) for result in results} == {("test", 100)}
    n = sum(result.metrics["n"] for result in results)
    deviation = math.sqrt(0.25 / n)
    assert abs(sum(result.metrics["top1"] for result in results) / 4 - 0.5) < 2.58 * deviation  # 99 % of the time
    # The selected score is far from chance.
    evaluations = [json.loads(line) for line in (tmp_path / "0" / "metrics.jsonl").read_text().splitlines()]
    scores = [line["evaluation"]["score"] for line in evaluations if "evaluation" in line]
    assert len(scores) == 40
    assert max(scores) > 0.6


def test_a_dev_split_is_carved_where_there_is_none(pictures, tmp_path):
    heard: list[events.Event] = []
    done = train_tiny(pictures, tmp_path / "run", "patience=9", "data.mixup=0", on_event=heard.append)
    result = done.results[0]
    assert done.recipe.data.dev == from_toml((tmp_path / "run" / "recipe.toml").read_text()).data.dev == 0.1
    notes = [event.text for event in heard if isinstance(event, events.Note)]
    assert "6 of 48 training images are the dev split." in notes  # two of each class
    assert any("the result is on test" in text for text in notes)
    assert (result.split, result.metrics["n"]) == ("test", 12)
    evaluated = [event for event in heard if isinstance(event, events.Evaluated)]
    assert {event.metrics["n"] for event in evaluated} == {6}
    best = max(evaluated, key=lambda event: event.metrics["score"])
    assert result.step == best.step
    assert f"weights of step {best.step}, the best on dev" in result.selection
    assert not (tmp_path / "run" / "best.safetensors").exists()
    scored = vitral.evaluate(tmp_path / "run", pictures)
    assert scored.metrics["top1"] == result.metrics["top1"]
    assert scored.metrics["n"] == 12
    again = vitral.evaluate(tmp_path / "run", pictures, split="dev")
    assert again.metrics["top1"] == best.metrics["top1"]


def test_without_patience_all_of_train_is_used(pictures, tmp_path):
    done = train_tiny(pictures, tmp_path / "run", "steps=2")
    assert (done.recipe.data.dev, done.results[0].split, done.results[0].selection) == (0.0, "test", "")


def test_val_selects_where_there_is_val_and_test(tmp_path):
    for split, images in (("train", 8), ("val", 3), ("test", 5)):
        make_pictures(tmp_path / "data" / split, images=images)
    done = train_tiny(tmp_path / "data", tmp_path / "run", "patience=9", "steps=4")
    assert (done.recipe.data.dev, done.results[0].split, done.results[0].metrics["n"]) == (0.0, "test", 15)
    assert "on val" in done.results[0].selection


@pytest.mark.parametrize(
    "words",
    [
        ("ema_decay=0.5",),
        ("objective=masked", "data.mixup=0"),
        ("init", "trainable=lora:2"),
        ("init", "trainable=head", "data.mixup=0"),
    ],
    ids=lambda words: words[-1],
)
def test_the_reported_weights_are_the_written_ones(words, pictures, init, tmp_path):
    """Also where they are an average, an adapter, or more than is written."""
    words = [init if word == "init" else word for word in words]
    done = train_tiny(pictures, tmp_path / "run", *words, "patience=9", "evaluate_every=2", "optim.lr=0.01").results[0]
    assert done.split == "test"
    if "masked_loss" in done.metrics:
        assert done.metrics["score"] == -done.metrics["masked_loss"]
        return
    scored = vitral.evaluate(tmp_path / "run", pictures).metrics
    assert scored["top1"] == done.metrics["top1"]
    assert scored["nll"] == pytest.approx(done.metrics["nll"], rel=1e-4)


# The head that fine-tuning starts from


@pytest.fixture(scope="module")
def pretrained(pictures, tmp_path_factory) -> Path:
    """Weights with a head for the very classes of the pictures, behind a tanh layer."""
    torch.manual_seed(0)
    config = ViTConfig(depth=1, width=16, mlp=32, heads=2, patch=4, image=(8, 8), classes=3, representation=16)
    model: Any = build(config)
    torch.nn.init.normal_(model.head.output.weight)
    names = open_data(pictures).train.classes
    card = Card(config, class_names=names, preprocess=Preprocess("decode|resize(8)", (0.5,) * 3, (0.5,) * 3))
    path = tmp_path_factory.mktemp("weights") / "tanh.safetensors"
    vitral.save(model, path, card)
    return path


QUICK = ("steps=2", "batch=6", "image=8", "workers=0", "regularization.dropout=0")


def first_loss(heard: list[events.Event]) -> float:
    return next(event.loss for event in heard if isinstance(event, events.StepDone))


def config_of(run: Path) -> ViTConfig:
    config = vitral.load(run)[0].config
    assert isinstance(config, ViTConfig)
    return config


@pytest.mark.parametrize("recipe", ["paper:finetune/imagenet", "bit:finetune/small"])
def test_a_protocol_drops_the_head_even_for_the_same_classes(recipe, pretrained, pictures, tmp_path):
    heard: list[events.Event] = []
    words = [*QUICK, "optim.lr=0.001"]
    vitral.finetune(
        pretrained, pictures, recipe=recipe, set=words, seeds=1, out=tmp_path / "run", on_event=heard.append
    )
    assert first_loss(heard) == pytest.approx(math.log(3), abs=1e-6)
    assert config_of(tmp_path / "run" / "seed-0").representation == 0
    notes = [event.text for event in heard if isinstance(event, events.Note)]
    assert "weights adapted: head of 3 classes replaced without its tanh layer, zero-initialised" in notes


def test_train_keeps_a_matching_head_and_says_so(pretrained, pictures, tmp_path):
    for word, kept in (("reset_head=false", True), ("reset_head=true", False)):
        heard: list[events.Event] = []
        out = tmp_path / word
        vitral.train(pictures, init=pretrained, out=out, set=[*QUICK, word], device="cpu", on_event=heard.append)
        said = any("which is kept" in event.text for event in heard if isinstance(event, events.Note))
        assert said == kept
        assert (abs(first_loss(heard) - math.log(3)) > 1e-3) == kept
        assert (config_of(out).representation == 16) == kept


def test_a_scaled_warmup_is_said(pictures, tmp_path):
    heard: list[events.Event] = []
    words = [*QUICK[1:], "steps=4", "schedule.warmup=50", "schedule.full_steps=200", "schedule.kind=constant"]
    shape = ["shape.depth=1", "shape.width=16", "shape.heads=2", "optim.lr=0.01"]
    vitral.train(pictures, model=MODEL, out=tmp_path / "run", set=[*words, *shape], device="cpu", on_event=heard.append)
    notes = [event.text for event in heard if isinstance(event, events.Note)]
    assert "warmup of 50 steps is scaled to 1: the run has only 4" in notes
    assert [event.lr for event in heard if isinstance(event, events.StepDone)] == [0.0, 0.01, 0.01, 0.01]
