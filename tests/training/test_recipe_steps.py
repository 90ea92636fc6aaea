"""Every recipe of the book, for a model of each row of its table, takes two steps when it is made small."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import make_pictures

import vitral
from vitral import paper
from vitral.architecture import Architecture, ResNetConfig, ViTConfig
from vitral.checkpoints.card import Card, Preprocess
from vitral.cost import training_flops
from vitral.data.sources import DataSet, open_data
from vitral.errors import UserError
from vitral.models.build import build
from vitral.names import parse
from vitral.recipe import Recipe, architecture_of, with_overrides
from vitral.recipe_presets import NEAREST, Preset, get_preset, preset_names
from vitral.training.build import check_recipe
from vitral.training.run import RunResult, run

SHORT = ("steps=2", "batch=4", "workers=0")
SHAPE = ("shape.depth=1", "shape.width=32", "shape.heads=2")
SPEEDRUNS = ("speedrun/cifar10", "speedrun/cifar10-94", "speedrun/cifar10-96")
TINY_VIT = ViTConfig(depth=1, width=32, mlp=64, heads=2, patch=16, image=(32, 32), classes=5)
TINY_RESNET = ResNetConfig(blocks=(1, 1, 1, 1), width=1, image=(32, 32), classes=5)
LARGE = ("R50x2", "R101x1", "R152x1", "R152x2", "R200x3")  # built without memory
NEAREST_ROWS = [(f"paper:pretrain/{dataset}", model) for dataset, model in NEAREST if model not in LARGE]
ROWS = [(f"paper:pretrain/{row.dataset}", row.models[0].replace("*", "B/16")) for row in paper.table3()]
SCRATCH = [
    *((name, model) for name, model in ROWS if model not in LARGE),
    *NEAREST_ROWS,
    ("paper:pretrain/jft300m-masked", "ViT-B/16"),
    ("bit:pretrain/imagenet", "R50x1"),
    ("bit:pretrain/imagenet21k", "ViT-B/16"),  # as R50x1, but quicker
    ("bit:pretrain/jft300m", "ViT-B/16"),
]
NAMES = [name for name in preset_names() if "finetune" in name]
TUNED = [
    *((name, "ViT") for name in NAMES),
    *((name, "ResNet") for name in NAMES if name.startswith("bit:") or name == "paper:finetune/pets"),
]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> DataSet:
    return open_data(make_pictures(tmp_path_factory.mktemp("data") / "pictures", images=5, size=40))


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What fine-tuning starts from: a ViT with the head of pre-training, and a ResNet."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("weights")
    tiny: dict[str, Architecture] = {"ViT": replace(TINY_VIT, representation=32), "ResNet": TINY_RESNET}
    for name, config in tiny.items():
        card = Card(config, preprocess=Preprocess("decode|resize(32)", (0.5,) * 3, (0.5,) * 3))
        vitral.save(build(config), folder / f"{name}.safetensors", card)
    return {name: folder / f"{name}.safetensors" for name in tiny}


def small(book: Preset) -> Recipe:
    """The recipe with a tiny model of the same kind over four patches; all else is its own.

    What cannot shrink, a ResNet or the stem of a hybrid, gets as few pixels as it takes.
    """
    config = parse(book.recipe.model)
    if isinstance(config, ResNetConfig):
        return with_overrides(book.recipe, [*SHORT, "image=32"])
    side = config.stride * (1 if config.stem else 2)
    return with_overrides(book.recipe, [*SHORT, *SHAPE, f"image={side}"])


def two_steps(recipe: Recipe, data: DataSet, out: Path) -> tuple[RunResult, list[dict[str, Any]]]:
    result = run(recipe, data, out, device="cpu", on_event=lambda event: None)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return result, [line for line in lines if "loss" in line]


def check_finished(result: RunResult, steps: list[dict[str, Any]], out: Path, test: int) -> Architecture:
    architecture = vitral.load(out)[1].architecture
    assert [line["step"] for line in steps] == [1, 2]
    assert all(math.isfinite(line["loss"]) for line in steps)
    assert result.step == 2
    assert result.metrics["n"] == test
    assert math.isfinite(result.metrics["score"])
    assert result.flops == training_flops(architecture, images=4, epochs=2)
    return architecture


def test_every_recipe_and_every_row_is_here():
    assert {name for name, _ in (*SCRATCH, *TUNED)} | set(SPEEDRUNS) == set(preset_names())
    assert {model for _, model in ROWS} <= {model for _, model in SCRATCH} | set(LARGE)


@pytest.mark.parametrize("name", SPEEDRUNS)
def test_a_speedrun_takes_two_steps(pictures, tmp_path, name):
    recipe = with_overrides(get_preset(name).recipe, [*SHORT, *SHAPE])
    result, steps = two_steps(recipe, pictures, tmp_path / "run")
    architecture = check_finished(result, steps, tmp_path / "run", test=3)
    assert architecture == architecture_of(recipe, 3)


SLOW = ("AxialResNet50",)  # as long as R50x1, which is here


@pytest.mark.parametrize(
    "name, model", [pytest.param(*row, marks=[pytest.mark.slow] if row[1] in SLOW else []) for row in SCRATCH]
)
def test_pretraining_takes_two_steps(pictures, tmp_path, name, model):
    recipe = small(get_preset(name, model))
    result, steps = two_steps(recipe, pictures, tmp_path / "run")
    architecture = check_finished(result, steps, tmp_path / "run", test=3)
    if recipe.objective == "masked":
        assert (architecture.classes, steps[0]["loss"]) == (0, pytest.approx(math.log(512), abs=1e-4))
        return
    assert architecture == architecture_of(recipe, 3)
    # A head of zeros answers with its bias alone.
    blind = math.log(3)
    if recipe.loss == "sigmoid":
        bias = recipe.shape.head_bias
        blind = math.log1p(math.exp(-bias)) + 2 * math.log1p(math.exp(bias))
    assert steps[0]["loss"] == pytest.approx(blind, rel=1e-4)


@pytest.mark.parametrize("model", LARGE)
def test_larger_resnets_are_built_without_memory(pictures, model):
    """Their rows differ from that of R50x1 in rates and lengths alone; two steps would take gigabytes."""
    book = get_preset("paper:pretrain/jft300m", model)
    recipe = small(book)
    check_recipe(recipe, pictures, None)
    assert with_overrides(recipe, ["optim.lr=1", "optim.weight_decay=0"]) == with_overrides(
        small(get_preset("paper:pretrain/jft300m", "R50x1")), [f"model={model}", "optim.lr=1", "optim.weight_decay=0"]
    )


@pytest.mark.parametrize("name, kind", TUNED)
def test_finetuning_takes_two_steps(pictures, weights, tmp_path, name, kind):
    recipe = replace(get_preset(name).recipe, init=str(weights[kind]))
    recipe = with_overrides(recipe, [*SHORT, "image=48"])
    result, steps = two_steps(recipe, pictures, tmp_path / "run")
    architecture = check_finished(result, steps, tmp_path / "run", test=3)
    assert (architecture.image, architecture.classes) == ((48, 48), 3)
    if isinstance(architecture, ViTConfig):
        assert (architecture.representation, architecture.dropout) == (0, recipe.regularization.dropout)
    assert steps[0]["loss"] == pytest.approx(math.log(3), rel=1e-4)


@pytest.mark.parametrize("key", ["dropout", "attention_dropout", "stochastic_depth"])
def test_what_a_resnet_does_not_have_is_refused(pictures, key):
    recipe = with_overrides(small(get_preset("bit:pretrain/imagenet", "R50x1")), [f"regularization.{key}=0.1"])
    with pytest.raises(UserError, match=f"regularization.{key} has no effect in R50x1"):
        check_recipe(recipe, pictures, None)
    check_recipe(with_overrides(recipe, [f"regularization.{key}=0"]), pictures, None)
    hybrid = with_overrides(recipe, ["model=R26+ViT-S/32", *SHAPE])
    check_recipe(hybrid, pictures, None)


def test_a_recipe_that_is_not_made_small_says_what_is_missing(pictures, tmp_path):
    with pytest.raises(UserError, match="batch=4096 is more than the 12 training images"):
        check_recipe(get_preset("paper:pretrain/imagenet", "ViT-B/16").recipe, pictures, None)
