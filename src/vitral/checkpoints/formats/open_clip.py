"""CLIP with the names of OpenAI's code, which OpenCLIP shares: the image tower of a model of two.

The projection into the space of texts is a head without a bias, stored transposed. A file does not state its GELU:
OpenAI's own models have the "quick" one, those that OpenCLIP trained mostly the exact one.
"""

from __future__ import annotations

import re

from vitral.architecture import Architecture, ViTConfig
from vitral.checkpoints.formats.hf_layout import Variant, square_only, unsupported
from vitral.checkpoints.formats.table import (
    CheckpointHeader,
    Entry,
    Format,
    grid_of_rows,
    heads_of,
    linear,
    norm,
    read_sizes,
)

_BLOCK = "visual.transformer.resblocks"
_OPENAI = "input_resolution"  # in the state dict of OpenAI's programs only
_UNUSED = re.compile(
    r"text\.|transformer\.|token_embedding\.|positional_embedding$|ln_final\.|text_projection|logit_scale$|logit_bias$"
    r"|(input_resolution|context_length|vocab_size|attn_mask)$"
)


def _architecture(header: CheckpointHeader) -> ViTConfig:
    sizes = read_sizes(header, "visual.conv1.weight", f"{_BLOCK}.0.mlp.c_fc.weight", rf"{re.escape(_BLOCK)}\.(\d+)\.")
    grid = grid_of_rows(header, header.shape("visual.positional_embedding", 2)[0] - 1)
    return ViTConfig(
        **vars(sizes),
        heads=heads_of(header, sizes.depth, sizes.width),
        image=(grid[0] * sizes.patch, grid[1] * sizes.patch),
        classes=header.shape("visual.proj", 2)[1] if header.has("visual.proj") else 0,
        head_bias=False,
        patch_bias=False,
        pre_norm=header.has("visual.ln_pre.weight"),
        layer_scale=header.has(f"{_BLOCK}.0.ls_1.gamma"),
        norm_eps=1e-5,
        gelu="quick" if header.has(_OPENAI) else "erf",
        resize="timm",  # OpenCLIP resizes its positions by cubic interpolation with antialiasing
    )


def _assumptions(header: CheckpointHeader, c: Architecture) -> tuple[str, ...]:
    assert isinstance(c, ViTConfig)
    gelu = (
        "quick GELU, as of OpenAI's models"
        if c.gelu == "quick"
        else "exact (erf) GELU, which OpenAI's models and OpenCLIP's with -quickgelu in their name do not have"
    )
    notes = [f"{c.heads} heads, a LayerNorm epsilon of 1e-5 and the {gelu}, assumed"]
    count = sum(bool(_UNUSED.match(key)) for key in header.shapes)
    return (*notes, f"text tower not read ({count} tensors)") if count else tuple(notes)


def _entries(c: Architecture) -> list[Entry]:
    assert isinstance(c, ViTConfig)
    rows, columns = c.grid(c.image)
    table = "visual.positional_embedding"
    entries = [
        Entry("visual.conv1.weight", "embed.weight", (c.width, c.channels, c.patch, c.patch)),
        Entry("visual.class_embedding", "class_token", (c.width,)),
        Entry(table, "positions.0.class_row", (1, c.width), rows=(0, 1)),
        Entry(table, "positions.0.table", (rows * columns, c.width), rows=(1, 1 + rows * columns)),
    ]
    entries += norm("visual.ln_pre", "pre_norm", c.width) if c.pre_norm else []
    for i in range(c.depth):
        theirs, ours = f"{_BLOCK}.{i}", f"blocks.{i}"
        qkv = f"{ours}.attention.qkv"
        entries += norm(f"{theirs}.ln_1", f"{ours}.norm1", c.width) + norm(f"{theirs}.ln_2", f"{ours}.norm2", c.width)
        entries.append(Entry(f"{theirs}.attn.in_proj_weight", f"{qkv}.weight", (3 * c.width, c.width)))
        entries.append(Entry(f"{theirs}.attn.in_proj_bias", f"{qkv}.bias", (3 * c.width,)))
        entries += linear(f"{theirs}.attn.out_proj", f"{ours}.attention.out", c.width, c.width)
        entries += linear(f"{theirs}.mlp.c_fc", f"{ours}.mlp.hidden", c.width, c.mlp)
        entries += linear(f"{theirs}.mlp.c_proj", f"{ours}.mlp.output", c.mlp, c.width)
        if c.layer_scale:
            entries += [Entry(f"{theirs}.ls_{k}.gamma", f"{ours}.scale{k}.scale", (c.width,)) for k in (1, 2)]
    entries += norm("visual.ln_post", "norm", c.width)
    projection = Entry("visual.proj", "head.output.weight", (c.width, c.classes), axes=(1, 0))
    return [*entries, projection] if c.classes else entries


def _reason(c: ViTConfig) -> str | None:
    if c.norm_eps != 1e-5 or c.gelu != "erf":
        return "its file would be read with a LayerNorm epsilon of 1e-5 and the exact (erf) GELU: write hf-clip instead"
    return square_only(c)


_ACCEPTS = {"pre_norm": (True, False), "layer_scale": (True, False), "patch_bias": (False,)}
_TOWERS = (
    Variant("CLIP", True, {**_ACCEPTS, "head_bias": (False,), "norm_place": ("tokens", "features")}, _reason),
    Variant("CLIP", False, {**_ACCEPTS, "norm_place": ("tokens", "features")}, _reason),
)

OPEN_CLIP = Format(
    name="open_clip",
    title="CLIP as OpenAI and OpenCLIP name it, the image tower (safetensors)",
    container="safetensors",
    recognises=lambda header: header.has(f"{_BLOCK}.0.attn.in_proj_weight"),
    architecture=_architecture,
    entries=_entries,
    unsupported_reason=unsupported(_TOWERS),
    assumptions=_assumptions,
    ignored=_UNUSED.pattern,
)
