"""Whole runs of masked patch prediction: they resume, keep a model without a head, and learn what pictures show."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from journeys import Command
from runs import MODEL, Crash, crash_at, make_pictures, outcome

import vitral
from vitral.architecture import ViTConfig
from vitral.data.images import encode_png
from vitral.data.loader import evaluation_batches
from vitral.data.preprocess import parse_pipeline
from vitral.data.sources import open_images
from vitral.errors import UserError

TINY = (
    *("objective=masked", "steps=8", "batch=6", "shape.depth=2", "shape.width=16", "shape.heads=2", "workers=0"),
    *("data.mixup=0", "evaluate_every=4", "save_every=2", "data.eval_transform=decode|resize({size})"),
    *("data.train_transform=decode|random_resized_crop({size}, 0.05)|flip", "schedule.warmup=0"),
)


def masked(pictures: Path, out: Path, *words: str, model: str = MODEL, on_event: Any = lambda event: None) -> Any:
    """The metrics of a short run."""
    overrides = [*TINY, *words]
    return vitral.train(pictures, model=model, out=out, set=overrides, device="cpu", on_event=on_event).results[0]


def blocks(folder: Path, images: int = 40) -> Path:
    """Pictures of one of eight colours, with noise: any shown patch tells the colour of the hidden ones."""
    rng = np.random.default_rng(0)
    for number in range(images):
        colour = rng.choice([20, 230], 3) + rng.integers(-8, 9, (16, 16, 3))
        path = folder / f"class-{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode_png(colour.clip(0, 255).astype(np.uint8)))
    return folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pictures(tmp_path_factory.mktemp("data") / "pictures")


@pytest.fixture(scope="module")
def learned(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "masked"
    masked(pictures, out)
    return out


def test_a_run_that_crashed_goes_on_to_the_same_bits(pictures, learned, tmp_path):
    for step in (3, 6):
        with pytest.raises(Crash):
            masked(pictures, tmp_path / "run", on_event=crash_at(step))
    masked(pictures, tmp_path / "run")
    assert outcome(tmp_path / "run") == outcome(learned)


def test_pieces_of_a_batch_are_the_same_run(pictures, learned, tmp_path):
    masked(pictures, tmp_path / "run", "micro_batch=2")
    whole, parts = vitral.load(learned)[0].state_dict(), vitral.load(tmp_path / "run")[0].state_dict()
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value, rtol=1e-4, atol=1e-5)


def test_what_is_kept_is_a_model_without_a_head(pictures, learned, tmp_path):
    model, card = vitral.load(learned)
    assert model.config.classes == 0
    assert card.class_names == ()
    assert not any("mask" in name or "predict" in name or "head" in name for name in model.state_dict())
    paths, features = vitral.embed(learned, pictures, device="cpu")
    assert features.shape == (len(paths), 16)
    result = json.loads((learned / "result.json").read_text())
    assert result["metrics"]["score"] == -result["metrics"]["masked_loss"]


def test_fine_tuning_begins_with_what_was_learned(pictures, learned, tmp_path):
    words = ["steps=1", "optim.lr=1e-12", "optim.weight_decay=0", "batch=6", "workers=0"]
    done = vitral.train(pictures, init=learned, out=tmp_path / "run", set=words, device="cpu")
    before, after = vitral.load(learned)[0].state_dict(), vitral.load(tmp_path / "run")[0].state_dict()
    assert set(after) - set(before) == {"head.output.weight", "head.output.bias"}
    for name, value in before.items():
        torch.testing.assert_close(after[name], value, rtol=0, atol=1e-9)
    assert done.results[0].metrics["n"] == 6
    assert done.recipe.objective == "classes"


def test_an_untrained_model_guesses_blindly_and_its_rivals_are_told(pictures, tmp_path):
    found = masked(pictures, tmp_path / "run", "steps=1", "optim.lr=1e-30").metrics
    assert found["masked_loss"] == pytest.approx(math.log(512), abs=1e-4)
    assert found["n"] == 6
    # Two rivals, neither of which costs as much as a blind guess.
    assert 0 < found["histogram_entropy"] < math.log(512)
    assert 0 < found["neighbour_loss"] < math.log(512)
    # At 8 pixels and patches of 4 each of 6 held-out images hides 2 of 4: the entropy of 12 colours is at most ln 12.
    assert found["histogram_entropy"] <= math.log(12)


def test_a_hidden_patch_is_told_by_those_around_it(tmp_path):
    words = ("steps=150", "batch=16", "optim.lr=0.01", "evaluate_every=150", "shape.width=32")
    found = masked(blocks(tmp_path / "data"), tmp_path / "run", *words, model="ViT-Ti/4@16").metrics
    assert found["masked_loss"] < found["histogram_entropy"] / 2
    assert found["masked_accuracy"] > 0.5


@pytest.mark.parametrize("words", [["masked.target=grid"], ["masked.target=pixels"], ["masked.ratio=0.15"]])
def test_other_targets_and_shares_learn(pictures, tmp_path, words):
    model = "ViT-Ti/4@16"
    first = masked(pictures, tmp_path / "0", *words, "steps=1", "optim.lr=1e-30", model=model).metrics
    last = masked(pictures, tmp_path / "1", *words, "steps=60", "optim.lr=0.01", model=model).metrics
    assert last["masked_loss"] < 0.9 * first["masked_loss"]
    assert ("masked_accuracy" in last) == ("pixels" not in words[0])
    assert ("neighbour_loss" in last) == ("ratio" in words[0])


def test_a_tanh_head_has_nothing_to_do(pictures, tmp_path):
    masked(pictures, tmp_path / "run", "shape.head=tanh", "shape.head_bias=-10", "steps=1")
    config = vitral.load(tmp_path / "run")[0].config
    assert isinstance(config, ViTConfig)
    assert config.representation == 0


@pytest.mark.parametrize(
    "model, words, says",
    [
        ("R50x1@32", [], "R50x1@32 has no patches to mask: objective=masked needs a ViT or a hybrid."),
        (MODEL, ["data.mixup=0.1"], "neither mixup, cutmix nor data.augment"),
        (MODEL, ["data.cutmix=1"], "neither mixup, cutmix nor data.augment"),
        (MODEL, ["balance=weights"], 'balance="none"'),
        (MODEL, ["trainable=head"], 'trainable="full"'),
        (MODEL, ["masked.token_ratio=0.8", "masked.random_ratio=0.3"], "together at most 1"),
        ("ViT-Ti/8@8", [], "an image of one patch has nothing to predict it from"),
        ("ViT-Ti/2@8", ["masked.target=grid"], "cannot be shrunk to 4 x 4"),
    ],
)
def test_what_cannot_be_hidden_is_one_sentence(pictures, tmp_path, model, words, says):
    shape = [word for word in TINY if not (model.startswith("R") and word.startswith("shape"))]
    with pytest.raises(UserError) as error:
        vitral.train(pictures, model=model, out=tmp_path / "run", set=[*shape, *words], device="cpu")
    assert says in str(error.value)
    assert len(str(error.value)) < 160


def test_several_labels_are_asked_for_their_loss(tmp_path):
    blocks(tmp_path / "data", 12)
    names = [f"class-{number % 2}/{number}.png" for number in range(12)]
    table = "\n".join(["path,label", *(f"{name},{'a|b' if place % 3 else 'a'}" for place, name in enumerate(names))])
    (tmp_path / "data" / "labels.csv").write_text(table)
    with pytest.raises(UserError, match="several labels"):
        masked(tmp_path / "data" / "labels.csv", tmp_path / "run", "loss=softmax")


def test_the_papers_recipe_by_the_command_line(pictures, tmp_path, monkeypatch, capsys):
    short = [word for word in TINY if not word.startswith(("objective", "data.mixup"))]
    said = Command(monkeypatch, capsys)(
        *("pretrain", pictures, "--model", MODEL, "--recipe", "paper:pretrain/jft300m-masked"),
        *("--out", tmp_path / "run", "--device", "cpu", "--seeds", "2", "--set", *short),
    )
    assert said.code == 0
    row = json.loads((tmp_path / "run" / "protocol.json").read_text())
    assert f"loss {-row['score']:.4f} +- {row['spread']:.4f}" in said.out
    assert "mean of neighbours" in said.err


@pytest.mark.slow
def test_photographs_are_learned_beyond_their_colours(assets, tmp_path):
    """800 photographs at 64 pixels, about 45 s alone: the loss falls below what histogram and neighbours give."""
    photos = tmp_path / "photos"
    pipeline = parse_pipeline("decode|resize_small(72)|central_crop(72)")
    for batch in evaluation_batches(open_images([assets / "data" / "imagenet_val_1000"]), pipeline, batch=50):
        for pixels, place in zip(batch.images, batch.indices.tolist(), strict=True):
            path = photos / ("train" if place % 5 else "test") / str(place % 2) / f"{place}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encode_png(pixels.permute(1, 2, 0).numpy()))
    words = (
        *("steps=560", "batch=32", "shape.depth=2", "shape.width=96", "shape.heads=3", "optim.lr=2e-3"),
        *(
            "schedule.warmup=50",
            "evaluate_every=560",
            "save_every=560",
            "data.train_transform=decode|random_resized_crop({size}, 0.5)|flip",
        ),
        "data.eval_transform=decode|resize_small({size})|central_crop({size})",
    )
    found = masked(photos, tmp_path / "run", *words, model="ViT-Ti/8@64").metrics
    assert found["n"] == 200
    assert found["masked_loss"] < found["neighbour_loss"] < found["histogram_entropy"]


def test_a_head_alone_is_trained_on_a_backbone(pictures, learned, tmp_path):
    words = ["steps=2", "batch=6", "workers=0"]
    done = vitral.train(pictures, init=learned, out=tmp_path / "run", trainable="head", set=words, device="cpu")
    before, after = vitral.load(learned)[0].state_dict(), vitral.load(tmp_path / "run")[0].state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert after["head.output.weight"].any()
    assert done.recipe.trainable == "head"
