"""Vision Transformers after the paper's, as names of benchmarks: DINOv3-B/16, DINOv2-B/14, CLIP-B/16, OpenCLIP-B/16."""

from __future__ import annotations

from typing import Any, NamedTuple

from vitral.architecture import Architecture, ModelConfig, RopeConfig, ViTConfig
from vitral.names import name_of, parse


class Family(NamedTuple):
    """What a family changes in the ViT of the same size, and a name of it in timm, which overrides replace sizes of."""

    timm: str
    changes: dict[str, Any]
    overrides: dict[str, Any]


_CLIP: dict[str, Any] = {"pre_norm": True, "patch_bias": False, "norm_eps": 1e-5}
FAMILIES = {
    # As in timm, without the biases of queries and values, which Meta's checkpoints have.
    "DINOv3": Family(
        "vit_base_patch16_dinov3",
        {
            **{"rope": RopeConfig(), "position": "none", "registers": 4, "layer_scale": True},
            **{"qkv_bias": False, "gelu": "erf", "norm_eps": 1e-5},
        },
        {"global_pool": "token"},
    ),
    "DINOv2": Family("vit_base_patch14_dinov2", {"layer_scale": True, "gelu": "erf", "rope": None}, {}),
    "CLIP": Family("vit_base_patch16_clip_quickgelu_224", {**_CLIP, "gelu": "quick"}, {}),
    "OpenCLIP": Family("vit_base_patch16_clip_224", {**_CLIP, "gelu": "erf"}, {}),
}


def parse_model(name: str, **changes: Any) -> ModelConfig:
    """The architecture of a model's name, with fields replaced."""
    family, _, size = name.partition("-")
    if family not in FAMILIES:
        return parse(name, **changes)
    return parse(f"ViT-{size}", **FAMILIES[family].changes, **changes)


def model_name(architecture: Architecture) -> str:
    """The inverse of `parse_model`."""
    return name_of(architecture).replace("ViT", family_of(architecture) or "ViT", 1)


def family_of(architecture: Architecture) -> str:
    """The name of the family, empty for the paper's models."""
    if not isinstance(architecture, ViTConfig):
        return ""
    return next(
        (
            name
            for name, family in FAMILIES.items()
            if all(getattr(architecture, field) == value for field, value in family.changes.items())
        ),
        "",
    )
