"""Every kind of model that vitral reads exports, and computes the same at other batches and sizes."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import vitral
from vitral.architecture import Architecture, ResNetConfig, RopeConfig, StemConfig, ViTConfig
from vitral.checkpoints.card import Card, Preprocess
from vitral.errors import UserError
from vitral.export.graph import ExportGraph, Output
from vitral.export.onnx import OPSET
from vitral.models.build import Model, build
from vitral.models.position import resize_offsets, resize_table
from vitral.models.resnet import _zeros_around

SMALL: dict[str, Any] = {"depth": 2, "width": 32, "mlp": 48, "heads": 4, "patch": 8, "image": (32, 32), "classes": 5}
FREE: dict[str, Any] = {"class_token": False, "pool": "map"}
EVA: dict[str, Any] = {"pairs": "adjacent", "coordinates": "index", "reference": (4, 4)}
FAMILIES: dict[str, Architecture] = {
    "ViT": ViTConfig(**SMALL),
    "ViT, pre-training head": ViTConfig(**SMALL, representation=16),
    "hybrid": ViTConfig(**SMALL | {"patch": 1, "image": (64, 64)}, stem=StemConfig(blocks=(1, 1))),
    "BiT": ResNetConfig(blocks=(1, 1, 1, 1), image=(64, 64), classes=5),
    "axial ResNet": ResNetConfig(blocks=(1, 1, 1, 1), image=(64, 64), classes=5, axial=True),
    "axial ViT": ViTConfig(**SMALL, axial=True, class_token=False, pool="mean"),
    "CLIP": ViTConfig(**SMALL, pre_norm=True, gelu="quick", patch_bias=False, head_bias=False),
    "SigLIP": ViTConfig(**SMALL, **FREE, resize="siglip"),
    "DINOv2": ViTConfig(**SMALL, registers=4, layer_scale=True, resize="dino", pool="token+mean"),
    "DINOv3": ViTConfig(**SMALL, registers=4, layer_scale=True, position="none", rope=RopeConfig(), key_bias=False),
    "BEiT": ViTConfig(**SMALL, position="bias", layer_scale=True, pool="mean", norm_place="features", key_bias=False),
    "EVA-02": ViTConfig(
        **SMALL, rope=RopeConfig(**EVA), swiglu=True, mlp_norm=True, attention_norm=True, key_bias=False, pool="mean"
    ),
    "mixed RoPE": ViTConfig(**SMALL, rope=RopeConfig(learned=True, coordinates="index")),
    "DeiT": ViTConfig(**SMALL, registers=1, pool="token+register"),
    "NaFlex": ViTConfig(**SMALL, **FREE, resize="naflex-par"),
    "2-D positions": ViTConfig(**SMALL, position="2d", injection="every"),
    "relative positions": ViTConfig(**SMALL, position="relative"),
    "sines": ViTConfig(**SMALL, position="sincos2d", class_token=False, pool="mean"),
    "post-norm": ViTConfig(**SMALL, qk_norm=True, post_norm=True),
}


def random_model(architecture: Architecture) -> tuple[Model, Card]:
    torch.manual_seed(0)
    model = build(architecture).eval()
    noise = 0.05 if isinstance(architecture, ResNetConfig) else 0.2  # more makes logits of ResNets differ by roundings
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    height, width = architecture.image
    pipeline = f"decode|resize({height}, {width})"
    return model, Card(architecture, preprocess=Preprocess(pipeline, (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)))


@pytest.mark.slow
@pytest.mark.parametrize("dynamic_size", [False, True], ids=["fixed", "dynamic"])
@pytest.mark.parametrize("format", ["onnx", "pt2"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_exports(name, format, dynamic_size, tmp_path):
    """The gate compares probabilities, features and attention, at sizes below and above the native one if dynamic."""
    source = random_model(FAMILIES[name])
    has_attention = isinstance(source[0].config, ViTConfig) and not source[0].config.axial
    outputs: list[Output] = ["features", "attention"] if has_attention else ["features"]
    path = tmp_path / f"model.{format}"
    result = vitral.export_model(source, path, format=format, outputs=outputs, dynamic_size=dynamic_size)
    assert result.report.agreement == 1
    if format == "onnx":
        compare_in_openvino(path, ExportGraph(*source, outputs), dynamic_size=dynamic_size)


def compare_in_openvino(path: Path, graph: ExportGraph, *, dynamic_size: bool) -> None:
    """A runtime that shares no code with onnxruntime computes the same; nothing is compared where it is missing."""
    if find_spec("openvino") is None:
        return
    import openvino  # type: ignore[import-not-found]

    compiled = openvino.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    (height, width), stride = graph.image, graph.model.config.stride
    sizes = [(height, width), *([(height + stride, width + 2 * stride), (2 * stride, width)] if dynamic_size else [])]
    for batch, (rows, columns) in enumerate(sizes, start=1):
        pixels = torch.randint(0, 256, (batch, rows, columns, 3), dtype=torch.uint8)
        for name, expected in zip(graph.names, graph(pixels), strict=True):
            scale = float(expected.abs().max())
            np.testing.assert_allclose(compiled(pixels.numpy())[name], expected, rtol=0, atol=1e-4 * scale)


class FirstPooling(nn.Module):
    """The pooling of a BiT ResNet, whose values here are all negative, so that its zeros are the largest."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.max_pool2d(_zeros_around(x), 3, 2)


@pytest.mark.filterwarnings("ignore")  # the exporter warns about itself
def test_zeros_around_the_first_pooling_stay_zeros_in_onnxruntime(tmp_path):
    """It makes a Pad before a MaxPool part of it, where padding is minus infinity."""
    values = -1 - torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    options: dict[str, Any] = {"dynamo": True, "verbose": False, "opset_version": OPSET}
    torch.onnx.export(FirstPooling().eval(), (values,), tmp_path / "pooling.onnx", input_names=["values"], **options)
    session = onnxruntime.InferenceSession(tmp_path / "pooling.onnx", providers=["CPUExecutionProvider"])
    expected = F.max_pool2d(F.pad(values, (1, 1, 1, 1)), 3, 2)
    assert (np.asarray(session.run(None, {"values": values.numpy()})[0]) == expected.numpy()).all()


def test_what_a_model_does_not_have_is_refused(tmp_path):
    with pytest.raises(UserError, match="no attention between all patches"):
        vitral.export_model(random_model(FAMILIES["BiT"]), tmp_path / "a.onnx", outputs=["attention"])
    headless = random_model(ViTConfig(**SMALL | {"classes": 0}))
    with pytest.raises(UserError, match="no classification head"):
        vitral.export_model(headless, tmp_path / "a.onnx")
    with pytest.raises(UserError, match=r"ends in \.onnx"):
        vitral.export_model(random_model(FAMILIES["ViT"]), tmp_path / "a.pt")
    assert not list(tmp_path.iterdir())


class Resized(torch.nn.Module):
    """Tables of every rule at a grid that is known only when it runs."""

    def __init__(self, rule: Any) -> None:
        super().__init__()
        self.rule = rule
        generator = torch.Generator().manual_seed(0)
        self.table = torch.nn.Parameter(torch.randn(5, 4, 3, generator=generator))
        self.offsets = torch.nn.Parameter(torch.randn(7, 3, generator=generator))

    def forward(self, grid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        height, width = grid.shape
        return resize_table(self.table, (height, width), self.rule), resize_offsets(self.offsets, 2 * height - 1)


@pytest.mark.parametrize("rule", ["google", "timm", "dino", "siglip", "naflex-par"])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_table_is_resized_across_its_own_grid_in_one_program(rule):
    module = Resized(rule)
    dims = {"grid": {0: torch.export.Dim("rows", min=2), 1: torch.export.Dim("columns", min=2)}}
    program = torch.export.export(module, (torch.zeros(6, 7),), dynamic_shapes=dims).module()
    for grid in ((5, 4), (2, 3), (9, 8), (3, 9), (5, 6), (4, 4)):
        for found, expected in zip(program(torch.zeros(grid)), module(torch.zeros(grid)), strict=True):
            torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
