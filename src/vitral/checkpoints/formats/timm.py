"""timm's ViT: a safetensors file, alone or with timm's config.json (`timm.create_model("local-dir:FOLDER")`)."""

from __future__ import annotations

import math
from typing import Any

from vitral.architecture import Architecture, Gelu, Pool, Size, ViTConfig
from vitral.checkpoints.card import Card, Preprocess
from vitral.checkpoints.formats.table import (
    CheckpointHeader,
    ClassRow,
    Entry,
    Format,
    grid_of_rows,
    heads_of,
    is_square,
    linear,
    norm,
    patches,
    position_entries,
    read_sizes,
)
from vitral.checkpoints.processors import from_timm, to_timm
from vitral.errors import UserError

_POOLS: dict[str, Pool] = {"token": "token", "avg": "mean", "map": "map"}
_GELUS: dict[str, Gelu] = {"gelu": "erf", "gelu_erf": "erf", "gelu_tanh": "tanh"}


def encoder_entries(c: ViTConfig) -> list[Entry]:
    """The entries that timm and DINO share."""
    entries = patches("patch_embed.proj", c)
    entries += [Entry("cls_token", "class_token", (1, 1, c.width))] if c.class_token else []
    entries += position_entries("pos_embed", c)
    for i in range(c.depth):
        theirs = ours = f"blocks.{i}"
        entries += norm(f"{theirs}.norm1", f"{ours}.norm1", c.width)
        entries += linear(f"{theirs}.attn.qkv", f"{ours}.attention.qkv", c.width, 3 * c.width)
        entries += linear(f"{theirs}.attn.proj", f"{ours}.attention.out", c.width, c.width)
        entries += norm(f"{theirs}.norm2", f"{ours}.norm2", c.width)
        entries += linear(f"{theirs}.mlp.fc1", f"{ours}.mlp.hidden", c.width, c.mlp)
        entries += linear(f"{theirs}.mlp.fc2", f"{ours}.mlp.output", c.mlp, c.width)
        if c.layer_scale:
            entries += [Entry(f"{theirs}.ls{k}.gamma", f"{ours}.scale{k}.scale", (c.width,)) for k in (1, 2)]
    return entries


def read_encoder(header: CheckpointHeader) -> dict[str, Any]:
    """Sizes, heads and LayerScale, for timm and DINO."""
    sizes = read_sizes(header, "patch_embed.proj.weight", "blocks.0.mlp.fc1.weight", r"blocks\.(\d+)\.")
    configured = None if header.hints.heads else _arguments(header).get("num_heads")
    heads = configured or heads_of(header, sizes.depth, sizes.width)
    return {**vars(sizes), "heads": heads, "layer_scale": header.has("blocks.0.ls1.gamma")}


def _entries(c: Architecture) -> list[Entry]:
    assert isinstance(c, ViTConfig)
    entries = encoder_entries(c)
    entries += [Entry("reg_token", "registers", (1, c.registers, c.width))] if c.registers else []
    entries += norm("fc_norm" if c.norm_place == "features" else "norm", "norm", c.width)
    if c.pool == "map":
        entries += [Entry("attn_pool.latent", "map.probe", (1, 1, c.width))]
        entries += linear("attn_pool.q", "map.q", c.width, c.width)
        entries += linear("attn_pool.kv", "map.kv", c.width, 2 * c.width)
        entries += linear("attn_pool.proj", "map.out", c.width, c.width)
        entries += norm("attn_pool.norm", "map.norm", c.width)
        entries += linear("attn_pool.mlp.fc1", "map.mlp.hidden", c.width, c.mlp)
        entries += linear("attn_pool.mlp.fc2", "map.mlp.output", c.mlp, c.width)
    return entries + (linear("head", "head.output", c.width, c.classes) if c.classes else [])


def _architecture(header: CheckpointHeader) -> ViTConfig:
    sizes = read_encoder(header)
    arguments = _arguments(header)
    gelu = arguments.get("act_layer", "gelu")
    if gelu not in _GELUS:
        raise UserError(f'the file\'s activation "{gelu}" is not supported: only GELU is.')
    token = header.has("cls_token")
    registers = header.shape("reg_token", 3)[1] if header.has("reg_token") else 0
    rows = header.shape("pos_embed", 3)[1]
    patch = sizes["patch"]
    height, width = _image(header, rows, int(token) + registers, patch)
    return ViTConfig(
        **sizes,
        image=(height, width),
        classes=header.shape("head.weight", 2)[0] if header.has("head.weight") else 0,
        pool=_pool(header, token),
        class_token=token,
        class_position=rows > (height // patch) * (width // patch),
        registers=registers,
        norm_place="features" if header.has("fc_norm.weight") else "tokens",
        gelu=_GELUS[gelu],
        resize="timm",
    )


def _image(header: CheckpointHeader, rows: int, prefix: int, patch: int) -> Size:
    """The image size whose patches fill the position table; `rows` may include the class token."""
    hint = header.hints.grid
    for height, width in _configured_sizes(header) if hint is None else []:
        if (height // patch) * (width // patch) in ((rows, rows - 1) if prefix else (rows,)):
            return height, width
    if prefix > 1 and is_square(rows - prefix):
        raise UserError(
            "the file has position rows for its registers (timm without no_embed_class): that is not supported."
        )
    patches_only = not prefix or (hint and hint[0] * hint[1] == rows) or is_square(rows)
    grid = grid_of_rows(header, rows if patches_only else rows - 1)
    return grid[0] * patch, grid[1] * patch


def _configured_sizes(header: CheckpointHeader) -> list[Size]:
    """The model's image size, then that of its pre-training, which timm does not update."""
    sizes = (_arguments(header).get("img_size"), _pretrained(header).get("input_size"))
    return [(size, size) if isinstance(size, int) else (size[-2], size[-1]) for size in sizes if size]


def _pool(header: CheckpointHeader, token: bool) -> Pool:
    arguments = _arguments(header)
    pool = arguments.get("global_pool") or (header.config or {}).get("global_pool")
    if (pool and pool not in _POOLS) or arguments.get("pool_include_prefix"):
        raise UserError(f'the file\'s pooling "{pool}" (over all tokens or by maximum) is not supported.')
    if header.has("attn_pool.latent"):
        return "map"
    if pool:
        return _POOLS[pool]
    return "token" if token and not header.has("fc_norm.weight") else "mean"


def _arguments(header: CheckpointHeader) -> dict[str, Any]:
    return dict((header.config or {}).get("model_args") or {})


def _pretrained(header: CheckpointHeader) -> dict[str, Any]:
    return dict((header.config or {}).get("pretrained_cfg") or {})


def _preprocess(header: CheckpointHeader, architecture: Architecture) -> Preprocess | None:
    return from_timm(_pretrained(header), architecture.image)


def _class_names(header: CheckpointHeader) -> tuple[str, ...]:
    names = (header.config or {}).get("label_names")
    return tuple(names) if isinstance(names, list) else ()


def unsupported_reason(architecture: Architecture) -> str | None:
    """Why neither timm nor the other PyTorch libraries can represent an architecture."""
    if not isinstance(architecture, ViTConfig):
        return "it is for Vision Transformers, not ResNets"
    c = architecture
    if c.stem or c.axial:
        return "it does not support a hybrid's ResNet or axial blocks"
    if c.position == "relative" or c.injection != "input":
        return "it adds positions once, at the input, and does not support relative ones"
    return None


def _unsupported_reason(architecture: Architecture) -> str | None:
    general = unsupported_reason(architecture)
    if general or not isinstance(architecture, ViTConfig):
        return general
    if architecture.representation:
        return "it does not support the tanh layer of the pre-training head"
    if architecture.norm_eps != 1e-6:
        return f"it implies a LayerNorm epsilon of 1e-6, not {architecture.norm_eps:g}"
    if architecture.pool == "map" and (architecture.prefix or architecture.norm_place == "features"):
        return "its attention pooling reads all tokens after the last LayerNorm"
    return None


def _class_row(c: ViTConfig) -> ClassRow:
    """With registers, timm has a position row for every prefix token or for none."""
    return "folded" if c.registers else "either"


def _alone(architecture: Architecture) -> str | None:
    assert isinstance(architecture, ViTConfig)
    c = architecture
    if c.gelu != "erf":
        return "timm assumes the exact (erf) GELU"
    if c.pool == "mean" and c.class_token and c.norm_place == "tokens":
        return "timm assumes that the class token is the feature"
    if c.pool == "token" and c.norm_place == "features":
        return "timm assumes that a last LayerNorm after pooling follows a mean"
    return None


def _config(card: Card) -> dict[str, Any]:
    c = card.architecture
    assert isinstance(c, ViTConfig)
    pools = {pool: name for name, pool in _POOLS.items()}
    arguments = {
        "img_size": list(c.image),
        "patch_size": c.patch,
        "in_chans": c.channels,
        "embed_dim": c.width,
        "depth": c.depth,
        "num_heads": c.heads,
        "mlp_ratio": _ratio(c),
        "class_token": c.class_token,
        "no_embed_class": not c.class_row,
        "reg_tokens": c.registers,
        "init_values": 1e-5 if c.layer_scale else None,
        "act_layer": "gelu_tanh" if c.gelu == "tanh" else "gelu",
        "fc_norm": c.norm_place == "features",
        "global_pool": pools[c.pool],
    }
    config: dict[str, Any] = {
        "architecture": "vit_base_patch16_224",  # every size is in the arguments
        "num_classes": c.classes,
        "num_features": c.width,
        "global_pool": pools[c.pool],
        "model_args": arguments,
        "pretrained_cfg": {
            "input_size": [c.channels, *c.image],
            "num_classes": c.classes,
            **to_timm(card.preprocess, c.image),
        },
    }
    return {**config, "label_names": list(card.class_names)} if card.class_names else config


def _ratio(c: ViTConfig) -> float:
    """timm takes int(width * ratio): the quotient, or the next float where rounding would lose one channel."""
    ratio = c.mlp / c.width
    return ratio if int(c.width * ratio) == c.mlp else math.nextafter(ratio, math.inf)


TIMM = Format(
    name="timm",
    title="timm (safetensors, or a folder with its config.json)",
    container="safetensors",
    recognises=lambda header: (
        header.has("blocks.0.attn.qkv.weight")
        and header.has("pos_embed")
        and not header.has("mask_token")
        and not header.has("register_tokens")
    ),
    architecture=_architecture,
    entries=_entries,
    unsupported_reason=_unsupported_reason,
    class_row=_class_row,
    preprocess=_preprocess,
    class_names=_class_names,
    config=_config,
    alone=_alone,
)
