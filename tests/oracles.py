"""What the tests of formats share: weights without a forgotten start value, a dozen architectures, comparisons."""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from vitral.architecture import Architecture, ResNetConfig, StemConfig, ViTConfig
from vitral.checkpoints.adapt import Weights
from vitral.checkpoints.card import Card
from vitral.checkpoints.formats import FORMATS
from vitral.checkpoints.formats.table import Hints
from vitral.checkpoints.weights import assemble, write
from vitral.models.build import build

SMALL = ViTConfig(depth=2, width=32, mlp=48, heads=4, patch=8, image=(32, 32), classes=5)

# One of each kind; what tells two formats apart is in at least one of them.
ARCHITECTURES: dict[str, Architecture] = {
    "tanh": SMALL,
    "erf": ViTConfig(**{**vars(SMALL), "gelu": "erf"}),
    "tanh layer": ViTConfig(**{**vars(SMALL), "representation": 24}),
    "erf, tanh layer": ViTConfig(**{**vars(SMALL), "gelu": "erf", "representation": 24}),
    "mean": ViTConfig(**{**vars(SMALL), "pool": "mean", "class_token": False}),
    "no class row, not square": ViTConfig(**{**vars(SMALL), "class_position": False, "image": (16, 40)}),
    "map, fixed positions": ViTConfig(
        **{**vars(SMALL), "pool": "map", "class_token": False, "position": "sincos2d", "class_position": False}
    ),
    "mean beside a class token, norm after": ViTConfig(
        **{**vars(SMALL), "pool": "mean", "norm_place": "features", "gelu": "erf"}
    ),
    "mean beside a class token, norm before": ViTConfig(**{**vars(SMALL), "pool": "mean", "gelu": "erf"}),
    "eps 1e-12, one channel": ViTConfig(**{**vars(SMALL), "norm_eps": 1e-12, "channels": 1, "gelu": "erf"}),
    "DINOv2 with registers": ViTConfig(
        **{**vars(SMALL), "mlp": 64, "classes": 0, "registers": 3, "layer_scale": True, "gelu": "erf"}
    ),
    "2d, every block": ViTConfig(**{**vars(SMALL), "position": "2d", "injection": "every"}),
    "relative": ViTConfig(**{**vars(SMALL), "position": "relative"}),
    "axial": ViTConfig(**{**vars(SMALL), "axial": True, "pool": "mean", "class_token": False}),
    "hybrid": ViTConfig(**{**vars(SMALL), "stem": StemConfig(blocks=(1, 1)), "patch": 1}),
    "BiT": ResNetConfig(blocks=(1, 1, 1, 1), classes=5, image=(32, 32)),
    "AxialResNet": ResNetConfig(blocks=(1, 1, 1, 1), classes=5, image=(32, 48), axial=True),
}


@contextmanager
def quiet() -> Generator[None]:
    """Other libraries' warnings are not ours to fix."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def outside(name: str) -> ModuleType:
    """A library that is a judge here; importing it takes seconds, so only the tests that need it do."""
    with quiet():
        pytest.importorskip(name.partition(".")[0])
        return importlib.import_module(name)


def randomised(module: nn.Module, seed: int = 0) -> nn.Module:
    """Move every parameter off its start value, so that a wrong or forgotten one shows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.add_(_noise(name, parameter.shape, generator))
    return module.eval()


def random_weights(architecture: Architecture, seed: int = 0) -> Weights:
    """Our arrays, all random."""
    with torch.device("meta"):
        shapes = {key: array.shape for key, array in build(architecture).state_dict().items()}
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for key, shape in shapes.items():
        state[key] = _noise(key, shape, generator)
        if len(shape) == 1 and key.endswith("weight"):
            state[key] = state[key] + 1
    return Weights(architecture, state)


def _noise(name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Faint tokens at the input: there a LayerNorm shows its epsilon."""
    scale = 1 / math.sqrt(math.prod(shape[1:])) if len(shape) in (2, 4) else 0.2
    if any(word in name for word in ("embed", "cls", "token", "regist", "position", "conv_proj")):
        scale = 0.01
    return scale * torch.randn(shape, generator=generator)


def pictures(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def run(weights: Weights, images: Tensor) -> Tensor:
    """(b, c, h, w) -> (b, classes) or, without classes, features"""
    with torch.no_grad():
        return assemble(weights)(images)


def gap(left: Tensor, right: Tensor | np.ndarray) -> float:
    """The largest absolute difference; another shape is no match at all."""
    right = torch.as_tensor(right)
    assert left.shape == right.shape, (left.shape, right.shape)
    return float((left.detach().double() - right.detach().double()).abs().max())


def same_bits(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[key].dtype == right[key].dtype and torch.equal(left[key], right[key]) for key in left
    )


def written(weights: Weights, path: Path, format: str) -> Card:
    return write(weights, Card(architecture=weights.architecture), path, format)


def hints_for(architecture: Architecture, format: str) -> Hints:
    """What a file of this format does not say; a folder with a config.json says everything."""
    if isinstance(architecture, ResNetConfig) or format == "vitral" or FORMATS[format].config is not None:
        return Hints()
    return Hints(grid=architecture.grid(architecture.image), heads=architecture.heads)
