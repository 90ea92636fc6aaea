"""Costs against Google's parameter counts, the paper's exaFLOPs, and what torch counts on the models we build."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from vitral import names, paper
from vitral.architecture import Architecture, ResNetConfig, StemConfig, ViTConfig
from vitral.cost import cost, training_flops
from vitral.models.build import build

# Google's vision_transformer, 224 pixels, 1000 classes: parameters and tokens.
PUBLISHED = {
    "ViT-Ti/16": (5_717_416, 197),
    "ViT-S/16": (22_050_664, 197),
    "ViT-S/32": (22_878_952, 50),
    "ViT-B/8": (86_576_872, 785),
    "ViT-B/16": (86_567_656, 197),
    "ViT-B/32": (88_224_232, 50),
    "ViT-L/16": (304_326_632, 197),
    "ViT-L/32": (306_535_400, 50),
    "ViT-H/14": (632_045_800, 257),
    "R+ViT-Ti/16": (6_337_704, 50),
    "R26+ViT-S/32": (36_431_912, 50),
    "R26+ViT-B/32": (101_383_976, 50),
    "R50+ViT-B/16": (98_659_112, 197),
    "R50+ViT-L/32": (328_994_856, 50),
}
HEADLESS = {"ViT-B/16": 85_798_656, "ViT-L/16": 303_301_632, "ViT-H/14": 630_764_800}
WITH_21K_HEAD = {
    "ViT-B/16": 103_186_515,
    "ViT-L/16": 326_740_307,
    "ViT-H/14": 660_385_363,
    "R50+ViT-B/16": 115_277_971,
}
MEAN: dict[str, Any] = {"pool": "mean", "class_token": False}


# Small, not square, with every part that a description can switch on.
SMALL = ViTConfig(depth=3, width=32, mlp=48, heads=4, patch=8, image=(40, 72), classes=5)
VARIANTS: dict[str, Architecture] = {
    "plain": SMALL,
    "grey": replace(SMALL, channels=1),
    "crumbs": replace(SMALL, image=(47, 79)),
    "headless": replace(SMALL, classes=0),
    "mean": replace(SMALL, **MEAN),
    "mean with class token": replace(SMALL, pool="mean"),
    "map": replace(SMALL, pool="map", class_token=False),
    "map with class token": replace(SMALL, pool="map", registers=2),
    "features norm": replace(SMALL, pool="mean", norm_place="features"),
    "registers": replace(SMALL, registers=4),
    "registers only": replace(SMALL, registers=4, **MEAN),
    "representation": replace(SMALL, representation=24),
    "representation headless": replace(SMALL, representation=24, classes=0),
    "layer scale": replace(SMALL, layer_scale=True),
    "no position": replace(SMALL, position="none"),
    "1d without class row": replace(SMALL, class_position=False),
    "1d every": replace(SMALL, injection="every"),
    "1d shared": replace(SMALL, injection="shared"),
    "2d": replace(SMALL, position="2d"),
    "2d every": replace(SMALL, position="2d", injection="every"),
    "2d shared, mean": replace(SMALL, position="2d", injection="shared", **MEAN),
    "2d without class row": replace(SMALL, position="2d", class_position=False),
    "sincos2d": replace(SMALL, position="sincos2d"),
    "sincos2d every": replace(SMALL, position="sincos2d", injection="every"),
    "relative": replace(SMALL, position="relative"),
    "relative, registers": replace(SMALL, position="relative", registers=2),
    "relative, mean": replace(SMALL, position="relative", **MEAN),
    "axial": replace(SMALL, axial=True, **MEAN),
    "axial, layer scale, map": replace(SMALL, axial=True, layer_scale=True, pool="map", class_token=False),
    "axial, 2d every": replace(SMALL, axial=True, position="2d", injection="every", **MEAN),
    "root only": replace(SMALL, stem=StemConfig(blocks=()), patch=2, image=(33, 71)),
    "one stage": replace(SMALL, stem=StemConfig(blocks=(2,)), patch=2, image=(33, 71)),
    "three stages": replace(SMALL, stem=StemConfig(blocks=(1, 1, 2)), patch=1, image=(65, 97)),
    "wide stem": replace(SMALL, stem=StemConfig(blocks=(1, 2, 1, 1), width=2), patch=1, image=(64, 97), channels=1),
    "resnet": ResNetConfig(blocks=(1, 2, 1, 1), image=(64, 97), classes=5),
    "wide resnet": ResNetConfig(blocks=(1, 1, 1, 1), width=2, image=(65, 65), classes=0, channels=1),
    "axial resnet": ResNetConfig(blocks=(1, 2, 1, 1), image=(64, 97), classes=5, axial=True),
    "wide axial resnet": ResNetConfig(blocks=(1, 1, 2, 1), width=2, image=(65, 65), classes=3, axial=True),
}


def built(architecture: Architecture) -> torch.nn.Module:
    """On the meta device nothing is computed, so any size is quick."""
    with torch.device("meta"):
        return build(architecture).eval()


def counted_params(model: torch.nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters())


def counted_macs(model: torch.nn.Module, architecture: Architecture) -> int:
    """What torch's counter sees for one image; on a CPU, unlike here, it would overlook fused attention."""
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        model(torch.empty(1, architecture.channels, *architecture.image))
    assert counter.get_total_flops() % 2 == 0
    return counter.get_total_flops() // 2


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_parameters_and_tokens(name: str) -> None:
    found = cost(names.parse(name))
    assert (found.params, found.tokens) == PUBLISHED[name]


@pytest.mark.parametrize("name", HEADLESS)
def test_headless_parameters(name: str) -> None:
    assert cost(names.parse(name, classes=0)).params == HEADLESS[name]


@pytest.mark.parametrize("name", WITH_21K_HEAD)
def test_parameters_with_the_pretraining_head(name: str) -> None:
    classes = paper.pretraining_sets()["ImageNet-21k"].classes
    width = names.parse(name).width
    assert cost(names.parse(name, classes=classes, representation=width)).params == WITH_21K_HEAD[name]


def test_table1_parameters() -> None:
    for row in paper.table1():
        assert cost(names.parse(row.model)).params == pytest.approx(row.params, abs=1e6)


def golden_changes(family: str, name: str) -> dict[str, Any]:
    """How a model of the golden counts departs from what its name stands for."""
    changes = MEAN if "pool=gap" in family or name.endswith("-gap-norep") else {}
    if "sincos2d" in family:
        changes = {**changes, "position": "sincos2d"}
    if "rep_size=True" in family:
        changes = {**changes, "representation": names.parse(name).width}
    return changes


def test_golden_parameter_counts(golden_file: Callable[[str], Path]) -> None:
    families = json.loads(golden_file("param_counts.json").read_text())
    assert sum(map(len, families.values())) == 36
    for family, models in families.items():
        for name, expected in models.items():
            changes = golden_changes(family, name)
            found = cost(names.parse(name.removesuffix("-gap-norep").replace("_", "/"), **changes))
            params, tokens = (
                (expected["params"], expected["tokens"]) if isinstance(expected, dict) else (expected, found.tokens)
            )
            assert (found.params, found.tokens) == (params, tokens), name


def exaflops(model: str, epochs: int) -> float:
    images = paper.pretraining_sets()["JFT-300M"].images
    return training_flops(names.parse(model), images=images, epochs=epochs) / 1e18


@pytest.mark.parametrize(
    "row",
    [row for row in paper.table6() if "exaflops" not in row.doubtful],
    ids=lambda row: f"{row.model}, {row.epochs} epochs",
)
def test_table6_exaflops(row: paper.ScalingRow) -> None:
    found = exaflops(row.model, row.epochs)
    # The paper does not say how its ResNets were counted: they come out 3 to 4 % high.
    limit = 0.05 if row.model.startswith("ResNet") else 0.03 if row.model == "ViT-B/32" else 0.02
    assert found == pytest.approx(row.exaflops, rel=limit)


def test_the_doubtful_row_of_table6_costs_half_of_its_longer_run() -> None:
    (row,) = [row for row in paper.table6() if "exaflops" in row.doubtful]
    (longer,) = [other for other in paper.table6() if other.model == row.model and other.epochs == 2 * row.epochs]
    assert exaflops(row.model, row.epochs) == pytest.approx(longer.exaflops / 2, rel=0.001)


@pytest.mark.parametrize("name", names.NAMES)
def test_named_models_have_the_parameters_that_are_built(name: str) -> None:
    architecture = names.parse(name)
    assert cost(architecture).params == counted_params(built(architecture))


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_cost_what_torch_counts(name: str) -> None:
    architecture, found = VARIANTS[name], cost(VARIANTS[name])
    model = built(architecture)
    assert (found.params, found.macs) == (counted_params(model), counted_macs(model, architecture))


@pytest.mark.parametrize("name", ["ViT-Ti/16", "R26+ViT-S/32", "R50x1", "Axial-ViT-B/32", "AxialResNet50"])
def test_one_named_model_of_each_family_does_the_work_that_torch_counts(name: str) -> None:
    architecture = names.parse(name)
    assert cost(architecture).macs == counted_macs(built(architecture), architecture)


@pytest.mark.parametrize("name", VARIANTS)
def test_another_image_changes_the_work_but_not_the_parameters(name: str) -> None:
    architecture = VARIANTS[name]
    other = cost(architecture, image=(96, 128))
    assert other.params == cost(architecture).params
    native = cost(replace(architecture, image=(96, 128)))
    assert (other.macs, other.tokens, other.grid) == (native.macs, native.tokens, native.grid)
    assert other.macs > cost(architecture).macs


def test_tokens_and_grid() -> None:
    vit = cost(
        names.parse("ViT-H/14@384", registers=4)
    )  # 384 pixels hold 27 patches of 14 and 6 pixels that are dropped
    assert (vit.grid, vit.tokens) == ((27, 27), 27 * 27 + 5)
    resnet = cost(names.parse("R50x1"), image=(225, 256))
    assert (resnet.grid, resnet.tokens) == ((8, 8), 64)
    assert cost(names.parse("ViT-B/16"), image=384) == cost(names.parse("ViT-B/16"), image=(384, 384))


def test_training_flops_grow_with_images_and_epochs() -> None:
    flops = training_flops(SMALL, images=10, epochs=3, image=64)
    assert flops == 6 * 10 * 3 * cost(SMALL, 64).macs


def test_costs_need_no_torch() -> None:
    code = "import sys, vitral.cost, vitral.paper, vitral.names; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
