"""DINO and DINOv2 backbones without a classifier, with the names of Meta's code."""

from __future__ import annotations

import re
from collections.abc import Iterable

from vitral.architecture import Architecture, ViTConfig
from vitral.checkpoints.formats import timm
from vitral.checkpoints.formats.table import CheckpointHeader, Entry, Format, Shape, grid_of_rows, norm

_CHUNK = re.compile(r"^blocks\.\d+\.(\d+)\.")  # sharded training groups the blocks: blocks.CHUNK.INDEX


def _renames(keys: Iterable[str]) -> dict[str, str]:
    return {key: _CHUNK.sub(r"blocks.\1.", key) for key in keys}


def _architecture(header: CheckpointHeader) -> ViTConfig:
    sizes = timm.read_encoder(header)
    rows = header.shape("pos_embed", 3)[1]
    grid = grid_of_rows(header, rows - 1)
    registers = header.shape("register_tokens", 3)[1] if header.has("register_tokens") else 0
    return ViTConfig(
        **sizes,
        image=(grid[0] * sizes["patch"], grid[1] * sizes["patch"]),
        classes=0,
        registers=registers,
        gelu="erf",
        # The models with registers were released with antialiasing and without the offset of 0.1.
        resize="timm" if registers else "dino",
    )


def _entries(c: Architecture) -> list[Entry]:
    assert isinstance(c, ViTConfig)
    registers = [Entry("register_tokens", "registers", (1, c.registers, c.width))] if c.registers else []
    return timm.encoder_entries(c) + registers + norm("norm", "norm", c.width)


def unsupported_reason(architecture: Architecture) -> str | None:
    """Why DINO's backbones, here and in Hugging Face's format, cannot represent an architecture."""
    general = timm.unsupported_reason(architecture)
    if general or not isinstance(architecture, ViTConfig):
        return general
    c = architecture
    if c.classes or c.representation:
        return "it is for backbones without a classifier: load with classes=0 first"
    if c.pool != "token":
        return "its feature is the class token"
    return None


def _unsupported_reason(architecture: Architecture) -> str | None:
    reason = unsupported_reason(architecture)
    if reason or not isinstance(architecture, ViTConfig):
        return reason
    if architecture.gelu != "erf" or architecture.norm_eps != 1e-6:
        return "it implies the exact (erf) GELU and a LayerNorm epsilon of 1e-6"
    return None


def _zeros(c: Architecture) -> dict[str, Shape]:
    """DINOv2's model always has a mask token, which only its pre-training uses."""
    assert isinstance(c, ViTConfig)
    return {"mask_token": (1, c.width)} if c.layer_scale or c.registers else {}


DINO = Format(
    name="dino",
    title="DINO and DINOv2 backbones (safetensors)",
    container="safetensors",
    recognises=lambda header: all(map(header.has, ("blocks.0.attn.qkv.weight", "cls_token", "pos_embed"))),
    architecture=_architecture,
    entries=_entries,
    unsupported_reason=_unsupported_reason,
    renames=_renames,
    ignored=r"mask_token$|(dino_|ibot_)head\.|head\.(mlp|last_layer)\.",  # projection heads of the pre-training
    zeros=_zeros,
)
