"""Recipes by name: what they build, cell by cell against the tables."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from paper_tables import WORDS, expanded, notes, printed_table
from torch import nn

from vitral import paper
from vitral.architecture import ViTConfig
from vitral.data.preprocess import parse_pipeline
from vitral.errors import UserError
from vitral.models.build import build
from vitral.names import name_of, parse
from vitral.recipe import Recipe, architecture_of, from_toml, keys, pipelines, to_toml, values, with_overrides
from vitral.recipe_presets import get_preset, hyperrule, preset_names
from vitral.training.build import build_model
from vitral.training.objective import LossSettings, Objective
from vitral.training.optimizer import build_optimizer, learning_rate, parameter_groups

TINY = ("image=32", "shape.depth=1", "shape.width=16", "shape.heads=2")
JFT = (
    *("ViT-B/16", "ViT-B/32", "ViT-L/32", "ViT-L/16", "ViT-H/14", "R50x1", "R50x2", "R101x1", "R152x1", "R152x2"),
    *("R50+ViT-B/16", "R50+ViT-B/32", "R50+ViT-L/32", "R50+ViT-L/16"),
)
I21K = ("ViT-B/16", "ViT-B/32", "ViT-L/16", "ViT-L/32")
# Models of the paper without a row of Table 3, and the rows that are nearest.
NEAREST = {
    ("jft300m", "ViT-b/32"): "ViT-B/32",
    ("jft300m", "R200x3"): "R152x2",
    ("jft300m", "Axial-ViT-B/16"): "ViT-B/16",
    ("jft300m", "Axial-ViT-B/32"): "ViT-B/32",
    ("jft300m", "AxialResNet50"): "R50x1",
    ("imagenet21k", "ViT-H/14"): "ViT-L/16",
}
TUNED = (*I21K, "ViT-H/14", "R50+ViT-B/16", "R50x1", "R152x4", "ViT-Ti/16")
DATASETS = ("imagenet", "cifar10", "cifar100", "pets", "flowers", "vtab")

# Rows of Table 3 by hand, for where the notes on the paper are not at hand: epochs, rate, decay, weight decay, dropout.
TABLE3 = {
    ("jft300m", "ViT-B/16"): (7, 8e-4, "linear", 0.1, 0.0),
    ("jft300m", "ViT-L/32"): (7, 6e-4, "linear", 0.1, 0.0),
    ("jft300m", "ViT-L/16"): (7, 4e-4, "linear", 0.1, 0.0),
    ("jft300m", "ViT-H/14"): (14, 3e-4, "linear", 0.1, 0.0),
    ("jft300m", "R50x2"): (7, 1e-3, "linear", 0.1, 0.0),
    ("jft300m", "R101x1"): (7, 8e-4, "linear", 0.1, 0.0),
    ("jft300m", "R152x2"): (7, 6e-4, "linear", 0.1, 0.0),
    ("jft300m", "R50+ViT-B/32"): (7, 8e-4, "linear", 0.1, 0.0),
    ("jft300m", "R50+ViT-L/32"): (7, 2e-4, "linear", 0.1, 0.0),
    ("imagenet21k", "ViT-B/32"): (90, 1e-3, "linear", 0.03, 0.1),
    ("imagenet21k", "ViT-L/16"): (30, 1e-3, "linear", 0.03, 0.1),
    ("imagenet", "ViT-B/16"): (300, 3e-3, "cosine", 0.3, 0.1),
}

# Table 4 and appendix B.1.1: steps, rates, share of train to choose on.
FOUR = (0.001, 0.003, 0.01, 0.03)
TABLE4 = {
    "imagenet": (20_000, (0.003, 0.01, 0.03, 0.06), 0.01),
    "cifar10": (10_000, FOUR, 0.02),
    "cifar100": (10_000, FOUR, 0.02),
    "pets": (500, FOUR, 0.1),
    "flowers": (500, FOUR, 0.1),
}


def models_of(name: str) -> tuple[str, ...]:
    """The models that a recipe must exist for."""
    rows = {"paper:pretrain/jft300m": JFT, "paper:pretrain/imagenet21k": I21K, "paper:pretrain/imagenet": TUNED[:5]}
    rows = {key: (*models, *(m for d, m in NEAREST if key.endswith(d))) for key, models in rows.items()}
    return rows.get(name) or (TUNED if "imagenet-" not in name and "masked" not in name else ("",))


def tiny(recipe: Recipe, classes: int = 5) -> nn.Module:
    """The model that the recipe builds, but small, and without values."""
    vit = isinstance(architecture_of(recipe, classes), ViTConfig)
    small = with_overrides(recipe, TINY if vit else TINY[:1])
    with torch.device("meta"):
        return build(architecture_of(small, classes))


def optimizer_of(recipe: Recipe, model: nn.Module) -> torch.optim.Optimizer:
    o = recipe.optim
    groups = parameter_groups(model, weight_decay=o.weight_decay, layer_decay=o.layer_decay, head_lr=o.head_lr)
    return build_optimizer(groups, name=o.name, lr=o.lr, beta1=o.beta1, beta2=o.beta2, momentum=o.momentum)


def rate_at(recipe: Recipe, step: int, total: int) -> float:
    s = recipe.schedule
    shape = {"power": s.power, "drops": s.drops, "factors": s.factors, "timescale": s.timescale, "cooldown": s.cooldown}
    return learning_rate(step, base=recipe.optim.lr, total=total, kind=s.kind, warmup=s.warmup, end=s.end, **shape)


def check_decay(model: nn.Module, optimizer: torch.optim.Optimizer, expected: float) -> None:
    """Every kernel, found by its shape and name, decays as much as the table says, and nothing else does."""
    decays = {id(weight): group["weight_decay"] for group in optimizer.param_groups for weight in group["params"]}
    found = set()
    for name, weight in model.named_parameters():
        kernel = name.endswith("weight") and weight.ndim in (2, 4)
        assert decays[id(weight)] == (expected if kernel else 0.0), name
        found.add(kernel)
    assert found == {True, False}


def check_pretraining(
    dataset: str, model: str, epochs: int, lr: float, decay: str, weight_decay: float, dropout: float
) -> None:
    """One row of Table 3, by what its recipe builds."""
    recipe = get_preset(f"paper:pretrain/{dataset}", model).recipe
    images = {"jft300m": 303e6, "imagenet21k": 14.2e6, "imagenet": 1_281_167}[dataset]
    assert (recipe.model, recipe.epochs, recipe.batch) == (model, epochs, 4096)
    architecture = architecture_of(recipe, 10)
    assert architecture.image == (224, 224)
    if isinstance(architecture, ViTConfig):
        assert architecture.dropout == dropout
        assert architecture.representation == architecture.width
    small = tiny(recipe)
    optimizer = optimizer_of(recipe, small)
    assert isinstance(optimizer, torch.optim.AdamW)
    assert {(group["lr"], *group["betas"]) for group in optimizer.param_groups} == {(lr, 0.9, 0.999)}
    check_decay(small, optimizer, weight_decay)
    assert recipe.optim.clip == (1.0 if dataset == "imagenet" else 0.0)
    total = round(images * epochs / 4096)
    middle = 10_000 + (total - 10_000) // 2
    end = 1e-5 if decay == "linear" else 0.0
    assert rate_at(recipe, 0, total) == 0.0
    assert rate_at(recipe, 5_000, total) == pytest.approx(lr / 2, rel=0.1)
    assert rate_at(recipe, 10_000, total) == pytest.approx(lr)
    assert rate_at(recipe, middle, total) == pytest.approx((lr + end) / 2, rel=1e-4)
    assert rate_at(recipe, total, total) == pytest.approx(end, abs=1e-12)


def check_finetuning(dataset: str, steps: int, rates: tuple[float, ...], dev: float) -> None:
    """One row of Table 4, by what its recipe builds."""
    entry = get_preset(f"paper:finetune/{dataset}", "ViT-B/16")
    recipe = entry.recipe
    assert (recipe.steps, recipe.epochs, recipe.batch, recipe.image) == (steps, 0, 512, 384)
    assert entry.sweep == {"optim.lr": rates}
    assert recipe.optim.lr in rates
    assert entry.dev == dev
    assert recipe.data.dev == 0.0
    optimizer = optimizer_of(recipe, tiny(recipe))
    assert isinstance(optimizer, torch.optim.SGD)
    assert {(group["momentum"], group["nesterov"]) for group in optimizer.param_groups} == {(0.9, False)}
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.0}
    assert recipe.optim.clip == 1.0
    warm = 100 if dataset in ("pets", "flowers") else 500
    assert rate_at(recipe, 0, steps) == 0.0
    assert rate_at(recipe, warm, steps) == pytest.approx(recipe.optim.lr)
    quarter = recipe.optim.lr * 0.5 * (1 + math.cos(math.pi / 4))
    assert rate_at(recipe, warm + (steps - warm) // 4, steps) == pytest.approx(quarter)
    assert rate_at(recipe, steps, steps) == pytest.approx(0.0, abs=1e-12)


PRINTED = [name for name in preset_names() if not name.startswith("speedrun/")]


@pytest.mark.parametrize("name", PRINTED)
def test_every_preset_makes_a_recipe_for_every_model(name: str) -> None:
    for model in models_of(name):
        entry = get_preset(name, model)
        assert entry.name == name
        assert from_toml(to_toml(entry.recipe)) == entry.recipe
        architecture = architecture_of(entry.recipe, 10)
        for text in pipelines(entry.recipe, architecture.image):
            assert parse_pipeline(text).size == architecture.image
        for key, tried in entry.sweep.items():
            assert values(entry.recipe)[key] in tried
            for value in tried:
                assert values(with_overrides(entry.recipe, [f"{key}={value}"]))[key] == value
        assert bool(entry.sweep) == bool(entry.dev)
        assert all(re.fullmatch(r"[A-Z0-9].*[^.]\.", reading.why) for reading in entry.readings)
        assert len({reading.name for reading in entry.readings}) == len(entry.readings) > 0


def test_every_reading_is_used() -> None:
    said = {
        reading.name for name in PRINTED for model in models_of(name) for reading in get_preset(name, model).readings
    }
    assert said == set(paper.readings())
    stated = paper.readings().values()
    assert {key for reading in stated for key in (*reading.keys, *reading.about)} <= set(keys())
    assert {word for reading in stated for word in reading.requires} == {"sweep", "preset sweep", "bit trial", "vtab"}


def test_speedruns_are_plain_vits_from_scratch() -> None:
    """No convolutional stem, no pre-training; what is drawn at random is drawn on the device."""
    runs = [get_preset(name) for name in preset_names() if name.startswith("speedrun/")]
    assert {run.name for run in runs} == {"speedrun/cifar10", "speedrun/cifar10-94", "speedrun/cifar10-96"}
    for run in runs:
        architecture = architecture_of(run.recipe, 10)
        assert isinstance(architecture, ViTConfig)
        assert (architecture.stem, architecture.image, run.recipe.init) == (None, (32, 32), "")
        train, test = pipelines(run.recipe, (32, 32))
        assert train == test == "decode|resize(32)"
        assert run.seeds == 3
        assert from_toml(to_toml(run.recipe)) == run.recipe


@pytest.mark.parametrize(("dataset", "model"), TABLE3)
def test_pretraining_builds_table3(dataset: str, model: str) -> None:
    check_pretraining(dataset, model, *TABLE3[dataset, model])


@pytest.mark.parametrize(("dataset", "model"), NEAREST)
def test_models_without_a_row_of_table3_take_the_nearest(dataset: str, model: str) -> None:
    preset = get_preset(f"paper:pretrain/{dataset}", model)
    nearest = get_preset(f"paper:pretrain/{dataset}", NEAREST[dataset, model])
    changed = {key for key, value in values(preset.recipe).items() if value != values(nearest.recipe)[key]}
    assert changed == ({"model", "epochs"} if model == "R200x3" else {"model"})
    assert preset.recipe.model == name_of(parse(model))  # ViT-b/32 is ViT-S/32
    (said,) = {reading.why for reading in preset.readings} - {reading.why for reading in nearest.readings}
    assert said.startswith("Table 3 has no row for")
    with torch.device("meta"):
        build(architecture_of(preset.recipe, 10))
    if model == "R200x3":
        printed = {name_of(parse(row.model)): row.epochs for row in paper.table6()}
        assert preset.recipe.epochs == printed[model] == 14


def test_positions_of_table8_can_be_trained() -> None:
    """All eight cells, with the keys that the documentation names."""
    recipe = get_preset("paper:pretrain/jft300m", "ViT-B/16").recipe
    cells = {(row.position, place) for row in paper.table8() for place in ("input", "every", "shared")}
    cells -= {
        (row.position, place) for row in paper.table8() for place in ("every", "shared") if not getattr(row, place)
    }
    assert len(cells) == 8
    for position, injection in cells:
        changed = with_overrides(recipe, [*TINY, f"shape.position={position}", f"shape.injection={injection}"])
        config = build_model(changed, tuple("abcde"))[1].architecture
        assert isinstance(config, ViTConfig)
        assert (config.position, config.injection) == (position, injection)


def test_pretraining_builds_every_printed_row_of_table3(assets: Path) -> None:
    seen = set()
    for line in printed_table(assets, "### 5.1 Table 3"):
        epochs, decay = int(line["epochs"].split("/")[0]), line["decay"]
        rates = float(line["base LR"]), decay, float(line["weight decay"]), float(line["dropout"])
        models = I21K if line["models"] == "ViT-*" else expanded(line["models"])
        for model in models:
            check_pretraining(WORDS[line["dataset"]], model, epochs, *rates)
            seen.add((WORDS[line["dataset"]], model))
    assert seen == {("jft300m", model) for model in JFT} | {
        (dataset, model) for dataset in ("imagenet21k", "imagenet") for model in I21K
    }


@pytest.mark.parametrize("dataset", TABLE4)
def test_finetuning_builds_table4(dataset: str) -> None:
    check_finetuning(dataset, *TABLE4[dataset])


def test_finetuning_builds_every_printed_row_of_table4(assets: Path) -> None:
    shares = re.search(r"(\d+)% Pets/Flowers, (\d+)% CIFAR, (\d+)% ImageNet", notes(assets))
    assert shares is not None
    few, cifar, imagenet = (int(share) / 100 for share in shares.groups())
    devs = {"pets": few, "flowers": few, "cifar10": cifar, "cifar100": cifar, "imagenet": imagenet}
    *lines, vtab = printed_table(assets, "### 5.2 Fine-tuning, Table 4")
    for line in lines:
        dataset, steps = WORDS[line["dataset"]], int(line["steps"].replace(",", ""))
        rates = tuple(map(float, line["base LR grid"].strip("{}").split(",")))
        check_finetuning(dataset, steps, rates, devs.pop(dataset))
    assert not devs
    recipe = get_preset("paper:finetune/vtab").recipe
    assert (recipe.steps, recipe.optim.lr) == (int(vtab["steps"].replace(",", "")), float(vtab["base LR grid"]))


def test_vtab_chooses_among_two_rates_and_two_lengths() -> None:
    entry = get_preset("paper:finetune/vtab")
    assert {key: len(tried) for key, tried in entry.sweep.items()} == {"optim.lr": 2, "steps": 2}
    assert (entry.recipe.optim.lr, entry.recipe.steps, entry.recipe.batch, entry.recipe.image) == (0.01, 2500, 512, 384)
    assert entry.dev * 1000 == 200
    assert any("only the chosen are printed" in reading.why for reading in entry.readings)


@pytest.mark.parametrize(
    ("dataset", "loss", "bias"),
    [("jft300m", "sigmoid", -10), ("imagenet21k", "sigmoid", -10), ("imagenet", "softmax", 0)],
)
def test_pretraining_has_a_tanh_head_and_the_loss_of_its_labels(dataset: str, loss: str, bias: float) -> None:
    recipe = get_preset(f"paper:pretrain/{dataset}").recipe
    assert (recipe.shape.head, recipe.shape.head_bias, recipe.loss) == ("tanh", bias, loss)
    built, card = build_model(with_overrides(recipe, TINY), tuple("abcde"))
    model: Any = built
    assert card.multilabel == (loss == "sigmoid")
    features, hidden = torch.randn(3, 16), model.head.hidden
    assert hidden is not None
    by_hand = torch.tanh(features @ hidden.weight.T + hidden.bias)
    torch.testing.assert_close(model.head.represent(features), by_hand)
    torch.testing.assert_close(model.head(features), torch.full((3, 5), float(bias)))
    settings = LossSettings(classes=5, mean=recipe.data.mean, std=recipe.data.std, kind=recipe.loss)
    objective = Objective(model.head, settings, np.ones(5))
    value, _ = objective(features, torch.tensor([0, 1, 2]), torch.ones(3, dtype=torch.bool), 0)
    # One yes among four noes at the same output, or one of five that are alike.
    yes_or_no = math.log1p(math.exp(-bias)) + 4 * math.log1p(math.exp(bias))
    assert value.item() == pytest.approx(3 * (yes_or_no if loss == "sigmoid" else math.log(5)), rel=1e-6)


def test_finetuning_has_one_linear_layer_and_softmax() -> None:
    for dataset in DATASETS:
        recipe = get_preset(f"paper:finetune/{dataset}").recipe
        assert recipe.loss == "softmax"
        model: Any = build_model(with_overrides(recipe, TINY), tuple("abcde"))[0]
        assert model.head.hidden is None
        assert not any(weight.any() for weight in model.head.parameters())


def test_a_resnet_keeps_its_shape() -> None:
    for name in ("paper:pretrain/jft300m", "paper:finetune/pets", "bit:pretrain/jft300m", "bit:finetune/small"):
        shape = get_preset(name, "R50x1").recipe.shape
        assert replace(shape, head_bias=0.0) == Recipe().shape


@pytest.mark.parametrize("dataset", ["jft300m", "imagenet21k", "imagenet"])
def test_heads_start_alike_for_vits_and_resnets(dataset: str) -> None:
    """Tables 6 and 7 compare them."""
    names = [(f"bit:pretrain/{dataset}", "R50x1"), (f"paper:pretrain/{dataset}", "ViT-B/16")]
    names += [("paper:pretrain/jft300m", "R50x1")] if dataset == "jft300m" else []
    recipes = [get_preset(*name).recipe for name in names]
    assert {recipe.shape.head_bias for recipe in recipes} == {0.0 if dataset == "imagenet" else -10.0}
    built: Any = build_model(with_overrides(recipes[0], ["image=32"]), tuple("abcde"))[0]
    assert torch.equal(built.head.output.bias, torch.full((5,), recipes[0].shape.head_bias))
    assert not built.head.output.weight.any()


@pytest.mark.parametrize(
    ("model", "dropout"),
    [
        ("ViT-B/16", 0),
        ("ViT-L/32", 0),
        ("ViT-L/16", 0.1),
        ("ViT-H/14", 0.1),
        ("R50+ViT-B/16", 0.1),
        ("R50+ViT-L/32", 0.1),
    ],
)
def test_finetuning_has_the_dropout_that_was_released(model: str, dropout: float) -> None:
    recipe = get_preset("paper:finetune/imagenet", model).recipe
    architecture = architecture_of(recipe, 1000)
    assert isinstance(architecture, ViTConfig)
    assert architecture.dropout == dropout


def test_masked_prediction_is_that_of_the_appendix() -> None:
    recipe = get_preset("paper:pretrain/jft300m-masked").recipe
    assert (recipe.model, recipe.objective, recipe.steps, recipe.batch) == ("ViT-B/16", "masked", 1_000_000, 4096)
    assert (recipe.masked.ratio, recipe.masked.token_ratio, recipe.masked.random_ratio) == (0.5, 0.8, 0.1)
    assert recipe.masked.target == "mean"
    assert isinstance(optimizer_of(recipe, tiny(recipe)), torch.optim.AdamW)
    assert [rate_at(recipe, step, 1_000_000) for step in (0, 10_000, 505_000)] == pytest.approx([0, 2e-4, 1e-4])


def test_the_best_imagenet_results_take_more_pixels_and_an_average() -> None:
    for pixels, model in ((512, "ViT-L/16"), (518, "ViT-H/14")):
        entry = get_preset(f"paper:finetune/imagenet-{pixels}")
        plain = get_preset("paper:finetune/imagenet", model)
        changed = {key for key, value in values(entry.recipe).items() if value != values(plain.recipe)[key]}
        assert changed == {"image", "ema_decay"}
        assert (entry.recipe.model, entry.recipe.image, entry.recipe.ema_decay) == (model, pixels, 0.9999)
        assert (entry.seeds, plain.seeds, entry.sweep) == (3, 1, plain.sweep)
        with pytest.raises(UserError, match=f"choose one of {model}"):
            get_preset(f"paper:finetune/imagenet-{pixels}", "ViT-B/16")


def test_a_suffix_changes_only_the_crops() -> None:
    text = {
        "": ("decode|resize(448, antialias=false)|random_crop(384)|flip", "decode|resize(384, antialias=false)"),
        ":inception": ("decode|inception_crop(384, antialias=false)|flip", "decode|resize(384, antialias=false)"),
        ":resmall": (
            "decode|resize_small(448, area)|random_crop(384)|flip",
            "decode|resize_small(448, area)|central_crop(384)",
        ),
    }
    for dataset in DATASETS:
        base = get_preset(f"paper:finetune/{dataset}")
        for suffix, expected in text.items():
            entry = get_preset(f"paper:finetune/{dataset}{suffix}")
            assert pipelines(entry.recipe, (384, 384)) == expected
            changed = {key for key, value in values(entry.recipe).items() if value != values(base.recipe)[key]}
            assert changed <= {"data.train_transform", "data.eval_transform"}


@pytest.mark.parametrize(
    ("dataset", "epochs", "drops"),
    [("imagenet", 90, (30, 60, 80)), ("imagenet21k", 90, (30, 60, 80)), ("jft300m", 40, (10, 23, 30, 37))],
)
def test_bits_pretraining_divides_the_rate_by_ten(dataset: str, epochs: int, drops: tuple[int, ...]) -> None:
    recipe = get_preset(f"bit:pretrain/{dataset}", "R50x1").recipe
    assert recipe.epochs == (7 if dataset == "jft300m" else epochs)  # Table 7's length, with BiT's drops
    optimizer = optimizer_of(recipe, model := tiny(recipe))
    assert isinstance(optimizer, torch.optim.SGD)
    assert {group["momentum"] for group in optimizer.param_groups} == {0.9}
    check_decay(model, optimizer, 1e-4)
    assert recipe.optim.clip == 0.0
    epoch, peak = 1000, 0.03 * 4096 / 256
    total = epochs * epoch
    assert rate_at(recipe, 2500, total) == pytest.approx(peak / 2)
    for place, drop in enumerate(drops):
        assert rate_at(recipe, drop * epoch - 1, total) == pytest.approx(peak / 10**place)
        assert rate_at(recipe, drop * epoch, total) == pytest.approx(peak / 10 ** (place + 1))


@pytest.mark.parametrize(
    ("images", "size", "steps", "warmup", "mixup"),
    [
        (1_000, "small", 500, 100, 0.0),
        (19_999, "small", 500, 100, 0.0),
        (20_000, "medium", 10_000, 500, 0.1),
        (499_999, "medium", 10_000, 500, 0.1),
        (500_000, "large", 20_000, 500, 0.1),
        (1_281_167, "large", 20_000, 500, 0.1),
    ],
)
def test_the_hyperrule_goes_by_the_number_of_images(
    images: int, size: str, steps: int, warmup: int, mixup: float
) -> None:
    assert hyperrule(images) == f"bit:finetune/{size}"
    recipe = get_preset(hyperrule(images)).recipe
    assert (recipe.steps, recipe.batch, recipe.data.mixup, recipe.image) == (steps, 512, mixup, 384)
    drops = (200, 300, 400) if size == "small" else (0.3 * steps, 0.6 * steps, 0.9 * steps)  # BiT's code
    rates = [rate_at(recipe, round(step) + late, steps) for step in drops for late in (-1, 0)]
    assert rates == pytest.approx([3e-3, 3e-4, 3e-4, 3e-5, 3e-5, 3e-6])
    assert rate_at(recipe, warmup // 2, steps) == pytest.approx(1.5e-3)
    assert recipe.optim.weight_decay == recipe.optim.clip == 0.0


def test_two_printed_lengths_are_noted() -> None:
    lengths = paper.readings()["lengths"]
    said = {row for row in TABLE3 if lengths in get_preset(f"paper:pretrain/{row[0]}", row[1]).readings}
    assert said == {("jft300m", "ViT-L/16"), ("imagenet21k", "ViT-L/16")}


def test_table2_has_three_seeds_where_it_prints_a_deviation() -> None:
    for dataset in DATASETS:
        assert get_preset(f"paper:finetune/{dataset}").seeds == (1 if dataset == "imagenet" else 3)
    assert get_preset("paper:pretrain/imagenet").seeds == 1


def test_names_may_be_spelt_as_people_do() -> None:
    spelt = [get_preset("paper:pretrain/jft300m", model).recipe.model for model in ("ResNet50x1", "L/16@384")]
    assert spelt == ["R50x1", "ViT-L/16@384"]
    unnamed = name_of(parse("ViT-Ti/16@32", depth=3))
    assert [get_preset("paper:finetune/pets", model).recipe.image for model in ("L/16@224", unnamed)] == [384, 384]


@pytest.mark.parametrize(
    ("name", "model", "expected"),
    [
        ("paper:pretrain/jft300m", "ViT-Ti/16", r"choose one of ViT-B/16, .*R50\+ViT-L/16"),
        ("paper:pretrain/imagenet21k", "R50x1", "choose one of ViT-B/16, ViT-B/32, ViT-L/16, ViT-L/32"),
        ("paper:pretrain/imagenet", "R50x1", r"choose one of ViT-B/16, ViT-\*"),
        ("paper:pretrain/jft300m-masked", "R50x1", "choose one of ViT-B/16"),
        ("paper:finetune/pets", "VGG16", "unknown model"),
        ("paper:finetune/petz", "", "did you mean paper:finetune/pets"),
        ("paper:finetune/pets:squash", "", "did you mean paper:finetune/pets"),
        ("paper:pretrain/imagenet:inception", "", "did you mean paper:"),
    ],
)
def test_unknown_presets_and_models_are_refused(name: str, model: str, expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        get_preset(name, model)


def test_presets_need_no_torch() -> None:
    code = (
        "import sys, vitral.recipe_presets as p; p.get_preset('paper:finetune/pets'); sys.exit('torch' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
