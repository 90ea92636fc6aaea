"""torchvision's VisionTransformer. Its pickles are read; written files are safetensors."""

from __future__ import annotations

import re
from collections.abc import Iterable

from vitral.architecture import Architecture, ViTConfig
from vitral.checkpoints.formats import timm
from vitral.checkpoints.formats.table import (
    CheckpointHeader,
    Entry,
    Format,
    grid_of_rows,
    heads_of,
    later_parts,
    linear,
    norm,
    patches,
    position_entries,
    read_sizes,
)

_LAYER = "encoder.layers.encoder_layer_{}"


def _renames(keys: Iterable[str]) -> dict[str, str]:
    """Releases before 0.13 named the layers of the MLP linear_1 and linear_2."""
    older = {"linear_1": "0", "linear_2": "3"}
    return {key: re.sub(r"\.mlp\.(linear_[12])\.", lambda m: f".mlp.{older[m[1]]}.", key) for key in keys}


def _entries(c: Architecture) -> list[Entry]:
    assert isinstance(c, ViTConfig)
    entries = [Entry("class_token", "class_token", (1, 1, c.width)), *patches("conv_proj", c)]
    entries += position_entries("encoder.pos_embedding", c)
    for i in range(c.depth):
        theirs, ours = _LAYER.format(i), f"blocks.{i}"
        entries += norm(f"{theirs}.ln_1", f"{ours}.norm1", c.width)
        qkv, target = f"{theirs}.self_attention.in_proj", f"{ours}.attention.qkv"
        entries += [Entry(f"{qkv}_weight", f"{target}.weight", (3 * c.width, c.width))]
        entries += [Entry(f"{qkv}_bias", f"{target}.bias", (3 * c.width,))]
        entries += linear(f"{theirs}.self_attention.out_proj", f"{ours}.attention.out", c.width, c.width)
        entries += norm(f"{theirs}.ln_2", f"{ours}.norm2", c.width)
        entries += linear(f"{theirs}.mlp.0", f"{ours}.mlp.hidden", c.width, c.mlp)
        entries += linear(f"{theirs}.mlp.3", f"{ours}.mlp.output", c.mlp, c.width)
    entries += norm("encoder.ln", "norm", c.width)
    if c.representation:
        entries += linear("heads.pre_logits", "head.hidden", c.width, c.representation)
    if c.classes:
        entries += linear("heads.head", "head.output", c.representation or c.width, c.classes)
    return entries


def _architecture(header: CheckpointHeader) -> ViTConfig:
    hidden = f"{_LAYER.format(0)}.mlp.0.weight"
    sizes = read_sizes(header, "conv_proj.weight", hidden, r"encoder\.layers\.encoder_layer_(\d+)\.")
    grid = grid_of_rows(header, header.shape("encoder.pos_embedding", 3)[1] - 1)
    pre_logits = "heads.pre_logits.weight"
    return ViTConfig(
        **vars(sizes),
        heads=heads_of(header, sizes.depth, sizes.width),
        image=(grid[0] * sizes.patch, grid[1] * sizes.patch),
        classes=header.shape("heads.head.weight", 2)[0] if header.has("heads.head.weight") else 0,
        representation=header.shape(pre_logits, 2)[0] if header.has(pre_logits) else 0,
        gelu="erf",
        resize="torchvision",
    )


def _unsupported_reason(architecture: Architecture) -> str | None:
    general = timm.unsupported_reason(architecture)
    if general or not isinstance(architecture, ViTConfig):
        return general
    c = architecture
    if reason := later_parts(c):
        return reason
    if c.pool != "token" or c.registers or c.layer_scale:
        return "it needs a class token, and does not support registers or LayerScale"
    if c.gelu != "erf":
        return "it implies the exact (erf) GELU, and these weights use the tanh one"
    return None if c.norm_eps == 1e-6 else f"it implies a LayerNorm epsilon of 1e-6, not {c.norm_eps:g}"


TORCHVISION = Format(
    name="torchvision",
    title="torchvision VisionTransformer (safetensors)",
    container="safetensors",
    recognises=lambda header: header.has("conv_proj.weight") and header.has("encoder.pos_embedding"),
    architecture=_architecture,
    entries=_entries,
    unsupported_reason=_unsupported_reason,
    renames=_renames,
)
