"""A small model and its exported file, which the tests of this folder share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import vitral
from vitral.architecture import ViTConfig
from vitral.checkpoints.card import Card, Preprocess
from vitral.models.build import build
from vitral.models.vit import ViT

CONFIG = ViTConfig(
    depth=2,
    width=32,
    mlp=48,
    heads=2,
    patch=4,
    image=(16, 16),
    classes=6,
    layer_scale=True,
    gelu="erf",
    norm_eps=1e-6,
)
PREPROCESS = Preprocess("decode|resize(16, 16)", (0.5, 0.45, 0.3), (0.2, 0.25, 0.35))


def small_model() -> tuple[ViT, Card]:
    """A model in which every part matters: with the initial weights many branches are almost zero."""
    torch.manual_seed(0)
    model = build(CONFIG).eval()
    assert isinstance(model, ViT)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # As in trained models, tokens are small before the first block: there the epsilon of LayerNorm matters.
            small = name.startswith(("embed", "class_token", "positions"))
            parameter.add_(torch.randn_like(parameter) * (0.01 if small else 0.3))
        model.head.output.bias.mul_(0.1)  # type: ignore[union-attr]
    return model, Card(CONFIG, tuple("abcdef"), preprocess=PREPROCESS, temperature=2.0)


@pytest.fixture(scope="session")
def source() -> tuple[ViT, Card]:
    return small_model()


@pytest.fixture(scope="session")
def good(source, tmp_path_factory) -> Path:
    """It as an ONNX file, through the gate; exporting takes seconds, so tests share it."""
    path = tmp_path_factory.mktemp("export") / "good.onnx"
    result = vitral.export_model(source, path, outputs=["features", "attention"])
    assert result.report.difference < 1e-5
    return path
