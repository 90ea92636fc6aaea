"""torch.compile makes one graph per image size and no more; torch.export takes a batch of any size."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from vitral.architecture import Architecture, ResNetConfig, Size, StemConfig, ViTConfig
from vitral.models.build import build

TINY: dict[str, Any] = {"depth": 2, "width": 16, "mlp": 24, "heads": 2, "classes": 5}
GRID: dict[str, Any] = {"class_token": False, "pool": "mean"}
NARROW: dict[str, Any] = {"blocks": (1, 1, 1, 1), "classes": 5, "image": (32, 32)}
MODELS: dict[str, Architecture] = {
    "ViT": ViTConfig(**TINY, patch=8, image=(32, 32)),
    "2d, map": ViTConfig(**TINY, patch=8, image=(32, 32), position="2d", injection="every", pool="map", resize="timm"),
    "relative": ViTConfig(**TINY, patch=8, image=(32, 32), position="relative"),
    "sincos2d": ViTConfig(**TINY, patch=8, image=(32, 32), position="sincos2d", registers=2, **GRID),
    "axial": ViTConfig(**TINY, patch=8, image=(32, 32), axial=True, **GRID),
    "hybrid": ViTConfig(**TINY, patch=1, image=(32, 32), stem=StemConfig(blocks=(1, 1))),
    "ResNet": ResNetConfig(**NARROW),
    "AxialResNet": ResNetConfig(**NARROW, axial=True),
}
SIZES: list[Size] = [(32, 32), (40, 24), (24, 51)]
each_model = pytest.mark.parametrize("architecture", MODELS.values(), ids=MODELS.keys())


@pytest.fixture(autouse=True)
def forget_graphs() -> Iterator[None]:
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
        for graphs in (1, 2, 3, 3, 3, 3):
            size = SIZES[len(counter.graphs) % 3] if graphs > len(counter.graphs) else SIZES[graphs - 3]
            images = torch.randn(2, 3, *size)
            torch.testing.assert_close(compiled(images), model(images))
            assert len(counter.graphs) == graphs


@each_model
def test_training_compiles_without_a_break(architecture: Architecture) -> None:
    model, counter = random_model(architecture).train(), Counter()
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=False)
    images = torch.randn(2, 3, 32, 32)
    for _ in range(2):
        model.zero_grad()
        compiled(images).square().sum().backward()
    assert len(counter.graphs) == 1
    assert all(parameter.grad is not None for parameter in model.parameters())


@each_model
@pytest.mark.parametrize("size", SIZES[:2], ids=["native", "other size"])
def test_exports_with_any_batch(architecture: Architecture, size: Size) -> None:
    model = random_model(architecture)
    shapes = ({0: torch.export.Dim("batch", min=1)},)
    program = torch.export.export(model, (torch.randn(2, 3, *size),), dynamic_shapes=shapes).module()
    for batch in (1, 5):
        images = torch.randn(batch, 3, *size)
        torch.testing.assert_close(program(images), model(images))


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler (g++)")
def test_inductor_gives_the_same_logits() -> None:
    model = random_model(MODELS["ViT"])
    compiled = torch.compile(model, fullgraph=True, dynamic=False)
    images = torch.randn(2, 3, 40, 24)
    with torch.inference_mode():
        torch.testing.assert_close(compiled(images), model(images), rtol=1e-4, atol=1e-5)
