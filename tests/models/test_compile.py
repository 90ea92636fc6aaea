"""torch.compile makes one graph per image size and no more; torch.export takes a batch of any size."""

from __future__ import annotations

import logging
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from vitral.architecture import Architecture, ResNetConfig, Size, StemConfig, ViTConfig
from vitral.models.build import build

TINY: dict[str, Any] = {"depth": 1, "width": 16, "mlp": 24, "heads": 2, "classes": 5}
TWO: dict[str, Any] = {**TINY, "depth": 2}
GRID: dict[str, Any] = {"class_token": False, "pool": "mean"}
NARROW: dict[str, Any] = {"blocks": (1, 1, 1, 1), "classes": 5, "image": (32, 32)}
MODELS: dict[str, Architecture] = {
    "ViT": ViTConfig(**TINY, patch=8, image=(32, 32)),
    "2d, map": ViTConfig(**TWO, patch=8, image=(32, 32), position="2d", injection="shared", pool="map", resize="timm"),
    "relative": ViTConfig(**TINY, patch=8, image=(32, 32), position="relative"),
    "sincos2d": ViTConfig(**TINY, patch=8, image=(32, 32), position="sincos2d", registers=2, **GRID),
    "axial": ViTConfig(**TINY, patch=8, image=(32, 32), axial=True, **GRID),
    "hybrid": ViTConfig(**TINY, patch=1, image=(32, 32), stem=StemConfig(blocks=(1,))),
    "ResNet": ResNetConfig(**NARROW),
    "AxialResNet": ResNetConfig(**NARROW, axial=True),
}
CAN_BUILD = bool(shutil.which("g++")) and Path(sysconfig.get_path("include"), "Python.h").exists()
NATIVE: Size = (32, 32)
OTHER: Size = (24, 43)
each_model = pytest.mark.parametrize("architecture", MODELS.values(), ids=MODELS.keys())


@pytest.fixture(autouse=True)
def forget_graphs(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.WARNING, logger="torch.__trace")  # pytest would collect every step of the compiler
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def random_model(architecture: Architecture) -> nn.Module:
    torch.manual_seed(0)
    model = build(architecture).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model


class Counter:
    """A backend that runs the graphs as they are, and keeps them."""

    def __init__(self) -> None:
        self.graphs: list[fx.GraphModule] = []

    def __call__(self, graph: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.graphs.append(graph)
        return graph.forward


@each_model
def test_one_graph_per_size(architecture: Architecture) -> None:
    model, counter = random_model(architecture), Counter()
    # A break in the graph is an error here.
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=False)
    with torch.inference_mode():
        for graphs, size in ((1, NATIVE), (2, OTHER)):
            images = torch.randn(2, 3, *size)
            torch.testing.assert_close(compiled(images), model(images))
            assert len(counter.graphs) == graphs
        for size in (NATIVE, OTHER):
            compiled(torch.randn(2, 3, *size))
        assert len(counter.graphs) == 2


def test_half_precision_is_one_graph_where_there_are_no_kernels() -> None:
    model, counter = random_model(MODELS["ViT"]).bfloat16(), Counter()
    images = torch.randn(2, 3, *NATIVE, dtype=torch.bfloat16)
    with torch.inference_mode():
        found = torch.compile(model, backend=counter, fullgraph=True, dynamic=False)(images)
        torch.testing.assert_close(found, model(images))
    assert len(counter.graphs) == 1


@pytest.mark.parametrize("name", ["ViT", "2d, map", "relative", "axial"])
def test_training_compiles_without_a_break(name: str) -> None:
    rates: dict[str, Any] = {"dropout": 0.1, "attention_dropout": 0.1, "stochastic_depth": 0.1}
    model, counter = random_model(replace(MODELS[name], **rates)).train(), Counter()
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=False)
    images = torch.randn(2, 3, 32, 32)
    for _ in range(2):
        model.zero_grad()
        compiled(images).square().sum().backward()
    assert len(counter.graphs) == 1
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(("name", "size"), [("ViT", NATIVE), ("axial", NATIVE), *((name, OTHER) for name in MODELS)])
def test_exports_with_any_batch(name: str, size: Size) -> None:
    model = random_model(MODELS[name])
    shapes = ({0: torch.export.Dim("batch", min=1)},)
    program = torch.export.export(model, (torch.randn(2, 3, *size),), dynamic_shapes=shapes).module()
    for batch in (1, 5):
        images = torch.randn(batch, 3, *size)
        torch.testing.assert_close(program(images), model(images))


@pytest.mark.skipif(not CAN_BUILD, reason="needs a C++ compiler (g++) and Python's headers")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # inductor itself imports what it deprecates
def test_inductor_gives_the_same_logits() -> None:
    model = random_model(MODELS["ViT"])
    compiled = torch.compile(model, fullgraph=True, dynamic=False)
    images = torch.randn(2, 3, *OTHER)
    with torch.inference_mode():
        torch.testing.assert_close(compiled(images), model(images), rtol=1e-4, atol=1e-5)
