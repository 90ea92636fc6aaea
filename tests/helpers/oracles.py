"""What the tests of formats share: weights without a forgotten start value, a dozen architectures, comparisons."""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

import vitral
from vitral.architecture import Architecture, ModelConfig, ResizeRule, ResNetConfig, Size, StemConfig, ViTConfig
from vitral.checkpoints.adapt import Weights
from vitral.checkpoints.card import Card
from vitral.checkpoints.formats import FORMATS
from vitral.checkpoints.formats.table import Hints
from vitral.checkpoints.weights import assemble, write
from vitral.models.build import build

SMALL = ViTConfig(depth=2, width=32, mlp=48, heads=4, patch=8, image=(32, 32), classes=5)

ERF = replace(SMALL, gelu="erf")

# One of each kind; what tells two formats apart is in at least one of them.
ARCHITECTURES: dict[str, ModelConfig] = {
    "tanh": SMALL,
    "erf": ERF,
    "tanh layer": replace(SMALL, representation=24),
    "erf, tanh layer": replace(ERF, representation=24),
    "mean": replace(SMALL, pool="mean", class_token=False),
    "no class row, not square": replace(SMALL, class_position=False, image=(16, 40)),
    "map, fixed positions": replace(SMALL, pool="map", class_token=False, position="sincos2d"),
    "mean beside a class token, norm after": replace(ERF, pool="mean", norm_place="features"),
    "mean beside a class token, norm before": replace(ERF, pool="mean"),
    "eps 1e-12, one channel": replace(ERF, norm_eps=1e-12, channels=1),
    "DINOv2 with registers": replace(ERF, mlp=64, classes=0, registers=3, layer_scale=True),
    "2d, every block": replace(SMALL, position="2d", injection="every"),
    "relative": replace(SMALL, position="relative"),
    "axial": replace(SMALL, axial=True, pool="mean", class_token=False),
    "hybrid": replace(SMALL, stem=StemConfig(blocks=(1, 1)), patch=1),
    "BiT": ResNetConfig(blocks=(1, 1, 1, 1), classes=5, image=(32, 32)),
    "AxialResNet": ResNetConfig(blocks=(1, 1, 1, 1), classes=5, image=(32, 48), axial=True),
}

# The same small model in the words of three libraries.
HF = {
    **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48},
    **{"image_size": 32, "patch_size": 8, "num_labels": 5},
}
TIMM = {
    **{"embed_dim": 32, "depth": 2, "num_heads": 4, "mlp_ratio": 1.5},
    **{"img_size": 32, "patch_size": 8, "num_classes": 5},
}
TORCHVISION = {
    **{"hidden_dim": 32, "num_layers": 2, "num_heads": 4, "mlp_dim": 48},
    **{"image_size": 32, "patch_size": 8, "num_classes": 5},
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


IMAGES = pictures(2, 3, 32, 32)


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
    if not isinstance(architecture, ViTConfig) or format == "vitral" or FORMATS[format].config is not None:
        return Hints()
    return Hints(grid=architecture.grid(architecture.image), heads=architecture.heads)


def hf_model(kind: str, **settings: Any) -> Any:
    library = outside("transformers")
    config = "Dinov2WithRegistersConfig" if "Registers" in kind else "Dinov2Config" if "Dinov2" in kind else "ViTConfig"
    with quiet():
        return randomised(getattr(library, kind)(getattr(library, config)(**{**HF, **settings})))


def hf_saved(model: Any, folder: Path) -> Path:
    with quiet():
        model.save_pretrained(folder)
    return folder


def hf_loaded(kind: str, folder: Path) -> Any:
    """Read by transformers, which must neither miss an array nor find one too many."""
    with quiet():
        model, report = getattr(outside("transformers"), kind).from_pretrained(folder, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    return model.eval()


def outcome(model: nn.Module, images: Tensor, **options: Any) -> Any:
    with torch.no_grad(), quiet():
        return model(images, **options)


def timm_model(**settings: Any) -> Any:
    with quiet():
        return randomised(outside("timm").create_model("vit_tiny_patch16_224", **{**TIMM, **settings}))


def timm_saved(model: Any, folder: Path, **settings: Any) -> Path:
    """A folder as timm's own writer for the hub makes it."""
    arguments = {key: value for key, value in {**TIMM, **settings}.items() if key != "num_classes"}
    with quiet():
        outside("timm.models._hub").save_for_hf(model, folder, model_args=arguments, safe_serialization=True)
    return folder


def timm_loaded(folder: Path, **settings: Any) -> Any:
    with quiet():
        return outside("timm").create_model(f"local-dir:{folder}", pretrained=True, **settings).eval()


def tv_model(**settings: Any) -> Any:
    with quiet():
        library = outside("torchvision.models.vision_transformer")
        return randomised(library.VisionTransformer(**{**TORCHVISION, **settings}))


def by_torch(table: Tensor, grid: Size, rule: ResizeRule) -> Tensor:
    """(h, w, d) -> (h', w', d), as the libraries call torch"""
    height, width, _ = table.shape
    planes = table.permute(2, 0, 1)[None]
    if rule == "dino":  # DINO states a scale, of which torch takes the floor for the size
        scale = ((grid[0] + 0.1) / height, (grid[1] + 0.1) / width)
        resized = F.interpolate(planes, scale_factor=scale, mode="bicubic", recompute_scale_factor=False)
    elif rule == "google":
        resized = F.interpolate(planes, size=grid, mode="bilinear", align_corners=True)
    else:
        corners, smooth = rule == "torchvision", rule == "timm"
        if smooth and grid[1] == 1 < grid[0]:  # here torch 2.13 repeats the first row; a lone row it resizes well
            return by_torch(table.transpose(0, 1), (1, grid[0]), rule).transpose(0, 1)
        resized = F.interpolate(planes, size=grid, mode="bicubic", align_corners=corners, antialias=smooth)
    return resized[0].permute(1, 2, 0)


def save_npz(path: Path, arrays: Mapping[str, Any]) -> None:
    """By NumPy's own writer."""
    np.savez(path, **arrays)


def save(content: Any, path: Path) -> Path:
    """By torch or by safetensors, as the suffix says."""
    if path.suffix == ".safetensors":
        save_file({key: tensor.clone() for key, tensor in content.items()}, path)
    else:
        torch.save(content, path)
    return path


def prefixed(prefix: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}{key}": tensor for key, tensor in state.items()}


def loads_as(model: nn.Module, path: Path, **options: Any) -> tuple[str, ...]:
    """Load a file, compare the outputs with the model's in float64, and return what the card says."""
    loaded, card = vitral.load(path, heads=4, **options)
    with torch.no_grad():
        assert gap(loaded.double()(IMAGES.double()), outcome(deepcopy(model).double(), IMAGES.double())) <= 1e-9
    return tuple(change for change in card.changes if not change.startswith("assumed: gelu"))
