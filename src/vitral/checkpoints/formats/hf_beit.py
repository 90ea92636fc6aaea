"""Hugging Face BEiT and data2vec-vision, which share their names and structure: a folder for `from_pretrained`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from vitral.architecture import Architecture, ViTConfig
from vitral.checkpoints.card import Card
from vitral.checkpoints.formats.hf_layout import (
    UNUSED,
    Variant,
    agrees,
    bias_rows,
    chosen,
    classes_of,
    layout_entries,
    read_settings,
    shared_config,
    square_only,
)
from vitral.checkpoints.formats.hugging_face import DEFAULTS, LAYOUT, PARTS, hf_format, hf_renames, is_family, prefixed
from vitral.checkpoints.formats.table import CheckpointHeader, Entry, Format, Tensors, linear
from vitral.errors import UserError

_LAYOUT = replace(
    LAYOUT,
    scales=("lambda_1", "lambda_2"),
    bias_table="attention.attention.relative_position_bias.relative_position_bias_table",
    pooled_norm="pooler.layernorm",
)
_SHARED = "encoder.relative_position_bias.relative_position_bias_table"
_FIRST = _LAYOUT.in_block(0, _LAYOUT.bias_table)


def _architecture(header: CheckpointHeader) -> ViTConfig:
    settings = read_settings(header, _LAYOUT, DEFAULTS)
    absolute, own, shared = settings["position"] == "1d", header.has(_FIRST), header.has(_SHARED)
    agrees(header, "use_absolute_position_embeddings", absolute)
    agrees(header, "use_relative_position_bias", own)
    agrees(header, "use_shared_relative_position_bias", shared)
    if absolute and (own or shared):
        raise UserError("it has both absolute positions and a relative bias: that is not supported.")
    if own or shared:
        settings |= {"position": "bias", "image": _image(header, settings)}
    return ViTConfig(**settings, classes=classes_of(header), **_pooling(header))


def _image(header: CheckpointHeader, settings: dict[str, Any]) -> tuple[int, int]:
    """The image size whose offsets fill the table of biases."""
    rows = header.shape(_FIRST if header.has(_FIRST) else _SHARED, 2)[0] - 3
    patch, (height, width) = settings["patch"], settings["image"]
    side = (math.isqrt(rows) + 1) // 2
    if height != width or (2 * side - 1) ** 2 != rows:
        raise UserError("its relative bias is of a grid that is not square, where transformers mixes up the axes.")
    return (height, width) if height // patch == side else (side * patch, side * patch)


def _pooling(header: CheckpointHeader) -> dict[str, Any]:
    if header.has("pooler.layernorm.weight"):
        agrees(header, "use_mean_pooling", True)
        return {"pool": "mean", "norm_place": "features"}
    if _masked_modeling_norm(header):
        return {"pool": "mean"}
    if header.has("layernorm.weight"):
        agrees(header, "use_mean_pooling", False)
        return {}
    return {"pool": "mean", "norm_place": "none"}


def _masked_modeling_norm(header: CheckpointHeader) -> bool:
    """Whether the last norm is that of the masked image modeling, as a model that averages has none before pooling."""
    modeling, averages = header.has(f"{UNUSED}lm_head.weight"), (header.config or {}).get("use_mean_pooling", True)
    return modeling and averages and not header.has(f"{UNUSED}layernorm.weight")


def _notes(header: CheckpointHeader, c: ViTConfig) -> tuple[str, ...]:
    notes = ["features are the mean of the patches, not normalized"] if c.norm_place == "none" else []
    if _masked_modeling_norm(header):
        notes.append("features are the mean of the patches that the masked image modeling reads")
    if header.has(_SHARED):
        notes.append("relative bias that all blocks share copied to each block")
    if c.position == "bias":
        notes.append("transformers resizes a relative bias to other grids bilinearly, vitral by rule hf")
    return tuple(notes)


def _unpack(tensors: Tensors, c: Architecture) -> Tensors:
    """Give each block the bias that all share, added to its own where it has one."""
    assert isinstance(c, ViTConfig)
    if c.position != "bias":
        return tensors
    tensors = dict(tensors)
    shared = tensors.pop(_SHARED, None)
    for i in range(c.depth):
        key = _LAYOUT.in_block(i, _LAYOUT.bias_table)
        if shared is not None:
            tensors[key] = tensors[key] + shared if key in tensors else shared
        expected = (bias_rows(c) + 3, c.heads)
        if key in tensors and tensors[key].shape != expected:
            raise UserError(
                f"tensor {key} has the shape {list(tensors[key].shape)} where {list(expected)} is expected."
            )
    return tensors


def _entries(c: Architecture) -> list[Entry]:
    assert isinstance(c, ViTConfig)
    head = linear("classifier", "head.output", c.width, c.classes) if c.classes else []
    return layout_entries(_LAYOUT, c) + head


def _config(kind: str, variants: tuple[Variant, ...]) -> Callable[[Card], dict[str, Any]]:
    def config(card: Card) -> dict[str, Any]:
        c = card.architecture
        assert isinstance(c, ViTConfig)
        shared = shared_config(card)
        del shared["qkv_bias"]
        return {
            **{"architectures": [chosen(variants, c)], "model_type": kind},
            **shared,
            "use_absolute_position_embeddings": c.position == "1d",
            "use_relative_position_bias": c.position == "bias",
            "use_shared_relative_position_bias": False,
            "layer_scale_init_value": 0.1 if c.layer_scale else 0.0,
            "use_mean_pooling": c.pool == "mean",
            "use_mask_token": False,
            "drop_path_rate": c.stochastic_depth,
        }

    return config


_ACCEPTS = {
    **{"position": ("bias", "1d", "2d", "sincos2d", "none"), "key_bias": (False,), "layer_scale": (True, False)},
}
_MEAN = {**_ACCEPTS, "pool": ("mean",), "norm_place": ("features",)}
_BARE = {**_ACCEPTS, "pool": ("mean",), "norm_place": ("none",)}


def _format(name: str, title: str, model: str, kind: str, prefix: str, mean: dict[str, Any]) -> Format:
    """`mean` is how the model without a classifier averages."""
    endings = (("ForImageClassification", True, _MEAN), ("Model", False, mean))
    variants = tuple(
        Variant(model + ending, classifier, accepts, square_only)
        for ending, classifier, pooling in endings
        for accepts in (pooling, _ACCEPTS)
    )
    return hf_format(
        name=name,
        title=title,
        recognises=is_family(name),
        variants=variants,
        parts=PARTS,
        notes=_notes,
        renames=hf_renames,
        unpack=_unpack,
        architecture=_architecture,
        entries=_entries,
        config=_config(kind, variants),
        file_key=prefixed(prefix),
        positions=("bias", "1d", "none"),
    )


HUGGING_FACE_BEIT = _format("hf-beit", "Hugging Face BEiT (a folder)", "Beit", "beit", "beit", _MEAN)
HUGGING_FACE_DATA2VEC = _format(
    "hf-data2vec",
    "Hugging Face data2vec-vision (a folder)",
    "Data2VecVision",
    "data2vec-vision",
    "data2vec_vision",
    _BARE,
)
