"""The image towers of CLIP, SigLIP and SigLIP 2 in a folder of Hugging Face.

CLIP's projection into the space of texts is a head without a bias; SigLIP's image tower ends in attention pooling.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from vitral.architecture import ViTConfig
from vitral.checkpoints.card import Card
from vitral.checkpoints.formats.hf_config import (
    UNUSED,
    Variant,
    chosen,
    hf_format,
    is_family,
    labels,
    read_settings,
    requires,
    shared_config,
    square_only,
    vision_config,
)
from vitral.checkpoints.formats.layout import Layout, layout_entries
from vitral.checkpoints.formats.table import CheckpointHeader, Entry, Format, Tensors
from vitral.errors import UserError

_LAYOUT = Layout(
    patches="embeddings.patch_embedding",
    positions="embeddings.position_embedding.weight",
    class_token="embeddings.class_embedding",
    pre_norm="pre_layrnorm",
    block="encoder.layers.{}",
    norm1="layer_norm1",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.out_proj",
    norm2="layer_norm2",
    hidden="mlp.fc1",
    output="mlp.fc2",
    norm="post_layernorm",
    map_head=(
        *("head.probe", "head.q", "head.kv", "head.attention.out_proj", "head.layernorm"),
        *("head.mlp.fc1", "head.mlp.fc2"),
    ),
    head="classifier",
    embedding=True,
)
_CLIP_DEFAULTS = {"num_attention_heads": 12, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}
_SIGLIP_DEFAULTS = {"num_attention_heads": 12, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}
_TEXT = re.compile(r"text_model\.|text_projection\.|logit_scale$|logit_bias$")
_PARTS = {
    _TEXT.pattern: "text tower",
    r"head\.": "attention pooling, which the classifier does not run,",
    r"post_layernorm\.": "last norm, which the classifier does not run,",
    r"visual_projection\.": "projection, which the classifier does not run,",
}
_PATCHES = "embeddings.patch_embedding.weight"
_FUSED = {"head.attention.in_proj_weight": "weight", "head.attention.in_proj_bias": "bias"}


def _renames(keys: Iterable[str]) -> dict[str, str]:
    """Keys of the image tower, with or without a text tower -> those of the tower alone, or unused ones."""
    renamed = {key: key.removeprefix("vision_model.") for key in keys}
    names = set(renamed.values())
    classifier, clip = "classifier.weight" in names, _LAYOUT.class_token in names
    for key, new in renamed.items():
        skipped = ("post_layernorm.", "visual_projection.") if clip else ("head.",)
        if _TEXT.match(new) or new.endswith("embeddings.position_ids") or (classifier and new.startswith(skipped)):
            renamed[key] = UNUSED + new
    return renamed


def _is(header: CheckpointHeader, name: str) -> bool:
    """Whether a checkpoint with these names is of this family, by its model_type or else by its tensors."""
    patches = header.shapes.get(_PATCHES)  # a text tower has none
    if patches is None or not header.has("encoder.layers.0.self_attn.q_proj.weight"):
        return False
    flat = len(patches) == 2
    by_tensors = "hf-clip" if header.has(_LAYOUT.class_token) else "hf-siglip2" if flat else "hf-siglip"
    return is_family(header, name, by_tensors)


def _shared_config(card: Card, c: ViTConfig) -> dict[str, Any]:
    """The keys of the image tower."""
    shared = shared_config(card, c)
    dropped = {"qkv_bias", "hidden_dropout_prob", "attention_probs_dropout_prob", *labels(card)}
    return {**{k: v for k, v in shared.items() if k not in dropped}, "attention_dropout": c.attention_dropout}


def _format(name: str, title: str, variants: tuple[Variant, ...], **functions: Any) -> Format[ViTConfig]:
    def file_key(key: str, c: ViTConfig) -> str:  # as in releases, even if the image tower is alone
        return key if key.startswith(("classifier.", "visual_projection.")) else f"vision_model.{key}"

    shared: dict[str, Any] = {"renames": _renames, "file_key": file_key}
    shared["recognises"] = lambda header: _is(header, name)
    return hf_format(name, title, "", variants, _LAYOUT, _PARTS, **shared, **functions)


# ------------------------------------------------------------------------------------------------------------- CLIP


def _clip_architecture(header: CheckpointHeader) -> ViTConfig:
    settings = read_settings(header, _LAYOUT, _CLIP_DEFAULTS)
    settings |= {"pre_norm": True, "patch_bias": False}
    if settings["classes"]:
        return ViTConfig(**settings, pool="mean", norm_place="none")
    outputs, stated = header.size("visual_projection.weight"), (header.config or {}).get("projection_dim")
    if isinstance(stated, int) and outputs not in (0, stated):
        raise UserError(
            f"config.json states projection_dim={stated} and the projection has {outputs} outputs: "
            "one of them is of another model."
        )
    settings["classes"] = outputs
    return ViTConfig(**settings, head_bias=False)


def _clip_config(card: Card, c: ViTConfig) -> dict[str, Any]:
    model, vision = chosen(_CLIP, c), {"model_type": "clip_vision_model", **_shared_config(card, c)}
    if model == "CLIPForImageClassification":
        return {"architectures": [model], "model_type": "clip", "vision_config": vision, **labels(card)}
    return {"architectures": [model], **vision, **({"projection_dim": c.classes} if c.classes else {})}


_TOWER = {"pre_norm": (True,), "patch_bias": (False,)}
_TOKEN = {**_TOWER, "norm_place": ("tokens", "features")}
_CLIP = (
    Variant("CLIPVisionModelWithProjection", True, {**_TOKEN, "head_bias": (False,)}, square_only),
    Variant("CLIPForImageClassification", True, {**_TOWER, "pool": ("mean",), "norm_place": ("none",)}, square_only),
    Variant("CLIPVisionModel", False, _TOKEN, square_only),
)

HUGGING_FACE_CLIP = _format(
    "hf-clip",
    "Hugging Face CLIP, the image tower (a folder)",
    _CLIP,
    architecture=_clip_architecture,
    entries=lambda c: layout_entries(_LAYOUT if c.head_bias else replace(_LAYOUT, head="visual_projection"), c),
    config=_clip_config,
    # The last norm, which the classifier has and does not run.
    zeros=lambda c: {f"post_layernorm.{part}": (c.width,) for part in ("weight", "bias") if c.norm_place == "none"},
)


# ----------------------------------------------------------------------------------------------------------- SigLIP


def _siglip_architecture(header: CheckpointHeader) -> ViTConfig:
    settings = read_settings(header, replace(_LAYOUT, class_token=""), _SIGLIP_DEFAULTS)
    pool = "map" if header.has("head.probe") else "mean"
    if pool == "map":
        requires(header, vision_use_head=True)
    return ViTConfig(**settings, pool=pool)


def _siglip_note(header: CheckpointHeader, c: ViTConfig) -> tuple[str, ...]:
    mean = c.pool == "mean" and not c.classes
    return ("features are the mean of the patches, as the file has no attention pooling",) if mean else ()


def _unpack(tensors: Tensors, c: ViTConfig) -> Tensors:
    """Queries, keys and values of the pooling, which files have as one projection -> queries, and keys and values."""
    tensors = dict(tensors)
    for key, part in _FUSED.items():
        if key in tensors:
            fused = tensors.pop(key)
            tensors |= {f"head.q.{part}": fused[: c.width], f"head.kv.{part}": fused[c.width :]}
    return tensors


def _pack(tensors: Tensors, c: ViTConfig) -> Tensors:
    tensors = dict(tensors)
    for key, part in _FUSED.items():
        if f"head.q.{part}" in tensors:
            tensors[key] = torch.cat([tensors.pop(f"head.q.{part}"), tensors.pop(f"head.kv.{part}")])
    return tensors


def _siglip_config(card: Card, c: ViTConfig) -> dict[str, Any]:
    model = chosen(_SIGLIP, c)
    vision = {"model_type": "siglip_vision_model", **_shared_config(card, c)}
    vision |= {} if c.pool == "map" else {"vision_use_head": False}
    if c.classes:
        return {"architectures": [model], "model_type": "siglip", "vision_config": vision, **labels(card)}
    return {"architectures": [model], **vision}


def _siglip_reason(c: ViTConfig) -> str | None:
    if c.pool == "map" and (c.map_heads or c.heads, c.map_mlp or c.mlp) != (c.heads, c.mlp):
        return "its attention pooling has the heads and the MLP of a block"
    return square_only(c)


_NO_TOKEN = {"class_token": (False,)}
_ANY_MAP = {"map_heads": (), "map_mlp": ()}
_SIGLIP = (
    Variant("SiglipForImageClassification", True, {**_NO_TOKEN, "pool": ("mean",)}, _siglip_reason),
    Variant("SiglipVisionModel", False, {**_NO_TOKEN, **_ANY_MAP, "pool": ("map", "mean")}, _siglip_reason),
)

HUGGING_FACE_SIGLIP = _format(
    "hf-siglip",
    "Hugging Face SigLIP, the image tower (a folder)",
    _SIGLIP,
    notes=_siglip_note,
    unpack=_unpack,
    pack=_pack,
    architecture=_siglip_architecture,
    config=_siglip_config,
)


# -------------------------------------------------------------------------------------------- SigLIP 2 with NaFlex


def _siglip2_architecture(header: CheckpointHeader) -> ViTConfig:
    """The patches of a SigLIP 2 are rows of pixels, (patch, patch, channels); its table is of a square grid."""
    config = vision_config(header)
    width, pixels = header.shape(_PATCHES, 2)
    channels = config.get("num_channels", 3)
    patch = config.get("patch_size", 16) if header.config else round((pixels / channels) ** 0.5)
    if patch * patch * channels != pixels:
        raise UserError(f"its patches have {pixels} pixels, not {patch}x{patch}x{channels}.")
    shapes = {**header.shapes, _PATCHES: (width, channels, patch, patch)}
    return replace(_siglip_architecture(replace(header, shapes=shapes)), resize="siglip")


def _siglip2_entries(c: ViTConfig) -> list[Entry]:
    kernel = Entry(_PATCHES, "embed.weight", (c.width, c.patch, c.patch, c.channels), axes=(0, 3, 1, 2))
    return [kernel, *(entry for entry in layout_entries(_LAYOUT, c) if entry.theirs != _PATCHES)]


def _siglip2_unpack(tensors: Tensors, c: ViTConfig) -> Tensors:
    tensors = _unpack(tensors, c)
    if _PATCHES in tensors and tensors[_PATCHES].ndim == 2:
        tensors[_PATCHES] = tensors[_PATCHES].unflatten(1, (c.patch, c.patch, c.channels))
    return tensors


def _siglip2_config(card: Card, c: ViTConfig) -> dict[str, Any]:
    config = _siglip_config(replace(card, class_names=()), c)
    vision = config.get("vision_config", config)
    del vision["image_size"]
    vision |= {"model_type": "siglip2_vision_model", "num_patches": c.grid(c.image)[0] ** 2}
    kind = {"model_type": "siglip2"} if c.classes else {}
    return {**config, **kind, "architectures": [chosen(_SIGLIP2, c)], **labels(card)}


_SIGLIP2 = tuple(replace(variant, model=variant.model.replace("Siglip", "Siglip2")) for variant in _SIGLIP)

HUGGING_FACE_SIGLIP2 = _format(
    "hf-siglip2",
    "Hugging Face SigLIP 2 with NaFlex, the image tower (a folder)",
    _SIGLIP2,
    notes=_siglip_note,
    unpack=_siglip2_unpack,
    pack=lambda tensors, c: _pack({**tensors, _PATCHES: tensors[_PATCHES].flatten(1)}, c),
    architecture=_siglip2_architecture,
    entries=_siglip2_entries,
    config=_siglip2_config,
)
