"""Hugging Face ViT and its relatives with the same names: ViT-MSN, I-JEPA, the encoder of MAE, BEiT and data2vec.

A folder for `from_pretrained` with config.json and model.safetensors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from vitral.architecture import ViTConfig
from vitral.checkpoints.formats.hf_config import (
    UNUSED,
    Variant,
    agrees,
    hf_format,
    is_family,
    model_type,
    read_settings,
    square_only,
)
from vitral.checkpoints.formats.layout import Layout, layout_entries
from vitral.checkpoints.formats.table import CheckpointHeader, Entry, Format
from vitral.errors import UserError

_PREFIX = re.compile(r"^(?:vit|deit|ijepa|beit|data2vec_vision|dinov2|dinov2_with_registers)\.")
_LAYER = re.compile(r"^(?:layers|encoder\.layer)\.(?=\d+\.)")
# Names in the memory of transformers 5 -> names in files, which a plain state dict does not have.
_MEMORY = {
    "attention.q_proj.": "attention.attention.query.",
    "attention.k_proj.": "attention.attention.key.",
    "attention.v_proj.": "attention.attention.value.",
    "attention.o_proj.": "attention.output.dense.",
}
_MEMORY_MLP = {
    "mlp.fc1.": "intermediate.dense.",
    "mlp.fc2.": "output.dense.",
    ".relative_position_bias.": ".attention.attention.relative_position_bias.",
}
_NEVER_USED = re.compile(r"embeddings\.mask_token$|decoder\.|lm_head\.|.*\.relative_position_index$")
# Parts of a file that no classifier uses, for `Card.changes`.
PARTS = {
    r"embeddings\.mask_token": "mask token",
    r"decoder\.": "decoder",
    r"pooler\.": "pooler, which the classifier does not run,",
    r"lm_head\.|layernorm\.": "head of the masked image modeling",
}

LAYOUT = Layout(
    patches="embeddings.patch_embeddings.projection",
    positions="embeddings.position_embeddings",
    class_token="embeddings.cls_token",
    block="encoder.layer.{}",
    norm1="layernorm_before",
    qkv=("attention.attention.query", "attention.attention.key", "attention.attention.value"),
    out="attention.output.dense",
    norm2="layernorm_after",
    hidden="intermediate.dense",
    output="output.dense",
    norm="layernorm",
    head_hidden="pooler.dense",
    head="classifier",
)
DEFAULTS = {"num_attention_heads": 12, "hidden_act": "gelu", "layer_norm_eps": 1e-12}


def hf_renames(keys: Iterable[str]) -> dict[str, str]:
    """Keys of any class and version of transformers -> the keys of files of the bare model, or unused ones."""
    keys = list(keys)
    bare = {key: _PREFIX.sub("", key) for key in keys}
    plain = any("layernorm_before" in key for key in keys)  # Dinov2's files have mlp.fc1, ViT's do not
    memory = _MEMORY | _MEMORY_MLP if plain else _MEMORY
    renamed = {key: in_file(new, memory) for key, new in bare.items()}
    classifier = "classifier.weight" in bare
    repeated = len(set(renamed.values())) < len(renamed)  # masked image modeling has a norm besides the model's
    for key, new in renamed.items():
        unused = _NEVER_USED.match(new) or (classifier and new.startswith("pooler.dense."))
        if unused or (repeated and key.startswith("layernorm.")):
            renamed[key] = UNUSED + new
    return renamed


def in_file(key: str, memory: Mapping[str, str] = _MEMORY | _MEMORY_MLP) -> str:
    """A key in the memory of transformers 5 -> that in a file, by the names of a block's parts."""
    key = key.replace("shared_position_bias.", "encoder.relative_position_bias.")
    if not _LAYER.match(key):
        return key
    key = _LAYER.sub("encoder.layer.", key)
    for name, file in memory.items():
        key = key if file in key else key.replace(name, file)
    return key


def _is(header: CheckpointHeader, name: str) -> bool:
    """Whether a checkpoint with the names of ViT is of this family, by its model_type or else by its tensors."""
    named = header.has(LAYOUT.in_block(0, "layernorm_before.weight"))
    return named and is_family(header, name, _by_tensors(header))


def _by_tensors(header: CheckpointHeader) -> str:
    if model_type(header) is not None:
        return "hf"  # where reading it names the type that is not supported
    query, key, _ = (header.has(LAYOUT.in_block(0, bias)) for bias in LAYOUT.qkv_biases)
    if query and not key:
        return "hf-beit"
    if not header.has(LAYOUT.class_token):
        return "hf-ijepa"
    return "hf-mae" if header.has(f"{UNUSED}decoder.mask_token") else "hf"


def _read(header: CheckpointHeader, names: Layout = LAYOUT, eps: float = 1e-12, **fields: Any) -> ViTConfig:
    settings = read_settings(header, names, {**DEFAULTS, "layer_norm_eps": eps})
    agrees(header, "qkv_bias", settings["qkv_bias"])
    return ViTConfig(**settings, **fields)


def _vit_architecture(header: CheckpointHeader) -> ViTConfig:
    # ViTForImageClassification never runs the pooler, even if the file has one.
    representation = header.size("pooler.dense.weight")
    act = (header.config or {}).get("pooler_act", "tanh")
    if representation and act != "tanh":
        raise UserError(f'the file\'s pooler ends in "{act}" instead of tanh: that is not supported.')
    return _read(header, representation=representation)


_TOKEN = {"qkv_bias": (True, False)}
_MEAN = {**_TOKEN, "pool": ("mean",), "class_token": (False,)}
_VIT = (
    Variant("ViTForImageClassification", classifier=True, accepts=_TOKEN),
    Variant("ViTModel", classifier=False, accepts={**_TOKEN, "representation": ()}),
)
_MSN = (Variant("ViTMSNForImageClassification", True, _TOKEN), Variant("ViTMSNModel", False, _TOKEN))
_IJEPA = (Variant("IJepaForImageClassification", True, _MEAN), Variant("IJepaModel", False, _MEAN))
_MAE = (Variant("ViTMAEModel", classifier=False, accepts=_TOKEN),)


def _format(
    name: str, title: str, variants: tuple[Variant, ...], kind: str, prefix: str = "", **functions: Any
) -> Format[ViTConfig]:
    """A family with the names of ViT, whose model_type is `kind`; a classifier has the bare model below `prefix`."""

    def file_key(key: str, c: ViTConfig) -> str:
        return f"{prefix}.{key}" if prefix and c.classes and not key.startswith("classifier.") else key

    shared: dict[str, Any] = {"layout": LAYOUT, "renames": hf_renames, "file_key": file_key}
    shared["recognises"] = lambda header: _is(header, name)
    return hf_format(name, title, kind, variants, parts=PARTS, **{**shared, **functions})


HUGGING_FACE = _format(
    "hf",
    "Hugging Face ViT (a folder)",
    _VIT,
    *("vit", "vit"),
    architecture=_vit_architecture,
    stated=lambda c: {"pooler_output_size": c.representation, "pooler_act": "tanh"} if c.representation else {},
)
HUGGING_FACE_MSN = _format(
    "hf-msn",
    "Hugging Face ViT-MSN (a folder)",
    _MSN,
    *("vit_msn", "vit"),
    architecture=lambda header: _read(header, eps=1e-6),
)
HUGGING_FACE_IJEPA = _format(
    "hf-ijepa",
    "Hugging Face I-JEPA (a folder)",
    _IJEPA,
    *("ijepa", "ijepa"),
    notes=lambda header, c: (
        () if c.classes else ("features are the mean of the patches, as for IJepaForImageClassification",)
    ),
    architecture=lambda header: _read(header, replace(LAYOUT, class_token=""), pool="mean"),
)
HUGGING_FACE_MAE = _format(
    "hf-mae",
    "Hugging Face MAE, the encoder (a folder)",
    _MAE,
    "vit_mae",
    notes=lambda header, c: ("features are the class token of the whole image: nothing is masked",),
    architecture=_read,
    stated=lambda c: {"mask_ratio": 0.0},
)


# ------------------------------------------------------------------------------------------ BEiT and data2vec-vision

_BEIT_LAYOUT = replace(
    LAYOUT,
    scales=("lambda_1", "lambda_2"),
    bias_table="attention.attention.relative_position_bias.relative_position_bias_table",
    pooled_norm="pooler.layernorm",
)
_SHARED = "encoder.relative_position_bias.relative_position_bias_table"
_FIRST = _BEIT_LAYOUT.in_block(0, _BEIT_LAYOUT.bias_table)


def _beit_architecture(header: CheckpointHeader) -> ViTConfig:
    settings = read_settings(header, _BEIT_LAYOUT, DEFAULTS)
    absolute, own, shared = settings["position"] == "1d", header.has(_FIRST), header.has(_SHARED)
    agrees(header, "use_absolute_position_embeddings", absolute)
    agrees(header, "use_relative_position_bias", own)
    agrees(header, "use_shared_relative_position_bias", shared)
    if absolute and (own or shared):
        raise UserError("it has both absolute positions and a relative bias: that is not supported.")
    if own or shared:
        settings |= {"position": "bias", "image": _beit_image(header, settings), "resize": "linear"}
    return ViTConfig(**settings, **_pooling(header))


def _beit_image(header: CheckpointHeader, settings: dict[str, Any]) -> tuple[int, int]:
    """The image size whose offsets fill the table of biases."""
    rows = header.shape(_FIRST if header.has(_FIRST) else _SHARED, 2)[0] - 3
    patch, (height, width) = settings["patch"], settings["image"]
    side = (math.isqrt(rows) + 1) // 2
    if height != width or (2 * side - 1) ** 2 != rows:
        raise UserError("its relative bias is of a grid that is not square, where transformers mixes up the axes.")
    if height // patch == side:
        return height, width
    if size := (header.config or {}).get("image_size"):
        raise UserError(
            f'its config.json states "image_size": {size}, but its relative bias is of {side}x{side} patches.'
        )
    return side * patch, side * patch


def _pooling(header: CheckpointHeader) -> dict[str, Any]:
    if header.has("pooler.layernorm.weight"):
        agrees(header, "use_mean_pooling", True)
        return {"pool": "mean", "norm_place": "features"}
    if _masked_modeling_norm(header):
        return {"pool": "mean"}
    if header.has("layernorm.weight"):
        agrees(header, "use_mean_pooling", False)
        return {}
    if header.has(f"{_BEIT_LAYOUT.head}.weight"):  # both of its poolers have one
        raise UserError("the file has a classifier and no LayerNorm in front of it: it is incomplete.")
    return {"pool": "mean", "norm_place": "none"}


def _masked_modeling_norm(header: CheckpointHeader) -> bool:
    """Whether the last norm is that of the masked image modeling, as a model that averages has none before pooling."""
    modeling, averages = header.has(f"{UNUSED}lm_head.weight"), (header.config or {}).get("use_mean_pooling", True)
    return modeling and averages and not header.has(f"{UNUSED}layernorm.weight")


def _beit_notes(header: CheckpointHeader, c: ViTConfig) -> tuple[str, ...]:
    notes = ["features are the mean of the patches, not normalized"] if c.norm_place == "none" else []
    if _masked_modeling_norm(header):
        notes.append("features are the mean of the patches that the masked image modeling reads")
    if header.has(_SHARED):
        notes.append("relative bias that all blocks share copied to each block")
    return tuple(notes)


def _beit_entries(header: CheckpointHeader, c: ViTConfig) -> list[Entry]:
    """Give each block the bias that all share, added to its own if it has one."""
    own, shared = (layout_entries(replace(_BEIT_LAYOUT, shared_bias_table=name), c) for name in ("", _SHARED))
    if not header.has(_SHARED):
        return own
    return shared + ([entry for entry in own if entry not in shared] if header.has(_FIRST) else [])


def _beit_stated(c: ViTConfig) -> dict[str, Any]:
    return {
        "qkv_bias": None,
        "use_absolute_position_embeddings": c.position == "1d",
        "use_relative_position_bias": c.position == "bias",
        "use_shared_relative_position_bias": False,
        "layer_scale_init_value": 0.1 if c.layer_scale else 0.0,
        "use_mean_pooling": c.pool == "mean",
        "use_mask_token": False,
        "drop_path_rate": c.stochastic_depth,
    }


_BEIT_POSITIONS = ("bias", "1d", "2d", "sincos2d", "none")
_BEIT = {"position": _BEIT_POSITIONS, "key_bias": (False,), "layer_scale": (True, False)}
_BEIT_MEAN = {**_BEIT, "pool": ("mean",), "norm_place": ("features",)}
_BEIT_BARE = {**_BEIT, "pool": ("mean",), "norm_place": ("none",)}


def _beit_format(name: str, title: str, model: str, kind: str, prefix: str, mean: dict[str, Any]) -> Format[ViTConfig]:
    """`mean` is how the model without a classifier averages."""
    endings = (("ForImageClassification", True, _BEIT_MEAN), ("Model", False, mean))
    variants = tuple(
        Variant(model + ending, classifier, accepts, square_only)
        for ending, classifier, pooling in endings
        for accepts in (pooling, _BEIT)
    )
    return _format(
        name,
        title,
        variants,
        *(kind, prefix),
        layout=_BEIT_LAYOUT,
        notes=_beit_notes,
        file_entries=_beit_entries,
        architecture=_beit_architecture,
        stated=_beit_stated,
        positions=("bias", "1d", "none"),
    )


HUGGING_FACE_BEIT = _beit_format("hf-beit", "Hugging Face BEiT (a folder)", "Beit", "beit", "beit", _BEIT_MEAN)
HUGGING_FACE_DATA2VEC = _beit_format(
    "hf-data2vec",
    "Hugging Face data2vec-vision (a folder)",
    "Data2VecVision",
    *("data2vec-vision", "data2vec_vision"),
    _BEIT_BARE,
)
