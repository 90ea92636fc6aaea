"""Hugging Face CLIP, SigLIP and SigLIP 2, the image tower: a folder for `from_pretrained`.

CLIP's projection into the space of texts is a head without a bias; SigLIP's image tower ends in attention pooling.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from vitral.architecture import Architecture, ViTConfig
from vitral.checkpoints.card import Card
from vitral.checkpoints.formats.hf_layout import (
    FAMILIES,
    UNUSED,
    Layout,
    Variant,
    chosen,
    classes_of,
    labels,
    layout_entries,
    model_type,
    read_settings,
    requires,
    shared_config,
    square_only,
    vision_config,
)
from vitral.checkpoints.formats.hugging_face import hf_format
from vitral.checkpoints.formats.table import CheckpointHeader, Entry, Shape, Tensors, linear, norm
from vitral.errors import UserError

_LAYOUT = Layout(
    patches="embeddings.patch_embedding",
    positions="embeddings.position_embedding.weight",
    class_token="embeddings.class_embedding",
    pre_norm="pre_layrnorm",
    block="encoder.layers.{}",
    norm1="layer_norm1",
    queries="self_attn.q_proj",
    keys="self_attn.k_proj",
    values="self_attn.v_proj",
    out="self_attn.out_proj",
    norm2="layer_norm2",
    hidden="mlp.fc1",
    output="mlp.fc2",
    norm="post_layernorm",
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
_FUSED = {"head.attention.in_proj_weight": "weight", "head.attention.in_proj_bias": "bias"}


def _renames(keys: Iterable[str]) -> dict[str, str]:
    """Keys of the image tower, alone or beside a text tower -> those of the tower alone, or unused ones."""
    renamed = {key: key.removeprefix("vision_model.") for key in keys}
    names = set(renamed.values())
    classifier, clip = "classifier.weight" in names, _LAYOUT.class_token in names
    for key, new in renamed.items():
        skipped = ("post_layernorm.", "visual_projection.") if clip else ("head.",)
        if _TEXT.match(new) or new.endswith("embeddings.position_ids") or (classifier and new.startswith(skipped)):
            renamed[key] = UNUSED + new
    return renamed


def _is(name: str) -> Callable[[CheckpointHeader], bool]:
    """Whether a checkpoint with these names is of this family, by its model_type or else by its tensors."""

    def recognises(header: CheckpointHeader) -> bool:
        patches = header.shapes.get("embeddings.patch_embedding.weight")  # a text tower has none
        if patches is None or not header.has("encoder.layers.0.self_attn.q_proj.weight"):
            return False
        flat = len(patches) == 2
        by_tensors = "hf-clip" if header.has(_LAYOUT.class_token) else "hf-siglip2" if flat else "hf-siglip"
        return FAMILIES.get(str(model_type(header)), by_tensors) == name

    return recognises


def _shared_config(card: Card) -> dict[str, Any]:
    """The keys of the image tower."""
    shared = shared_config(card)
    dropped = {"qkv_bias", "hidden_dropout_prob", "attention_probs_dropout_prob", *labels(card)}
    c = card.architecture
    assert isinstance(c, ViTConfig)
    return {**{k: v for k, v in shared.items() if k not in dropped}, "attention_dropout": c.attention_dropout}


def _file_key(key: str, c: Architecture) -> str:
    """As in releases, the image tower is below its name even where it is alone."""
    return key if key.startswith(("classifier.", "visual_projection.")) else f"vision_model.{key}"


# ------------------------------------------------------------------------------------------------------------- CLIP


def _clip_architecture(header: CheckpointHeader) -> ViTConfig:
    settings = read_settings(header, _LAYOUT, _CLIP_DEFAULTS)
    settings |= {"pre_norm": True, "patch_bias": False}
    if classes := classes_of(header):
        return ViTConfig(**settings, classes=classes, pool="mean", norm_place="none")
    return ViTConfig(**settings, classes=classes_of(header, "visual_projection"), head_bias=False)


def _clip_entries(c: Architecture) -> list[Entry]:
    assert isinstance(c, ViTConfig)
    entries = layout_entries(_LAYOUT, c)
    if c.classes and c.head_bias:
        return entries + linear("classifier", "head.output", c.width, c.classes)
    return entries + (
        [Entry("visual_projection.weight", "head.output.weight", (c.classes, c.width))] if c.classes else []
    )


def _clip_config(card: Card) -> dict[str, Any]:
    c = card.architecture
    assert isinstance(c, ViTConfig)
    model, vision = chosen(_CLIP, c), {"model_type": "clip_vision_model", **_shared_config(card)}
    if model == "CLIPForImageClassification":
        return {"architectures": [model], "model_type": "clip", "vision_config": vision, **labels(card)}
    return {"architectures": [model], **vision, **({"projection_dim": c.classes} if c.classes else {})}


def _clip_zeros(c: Architecture) -> dict[str, Shape]:
    """The last norm, which the classifier has and does not run."""
    assert isinstance(c, ViTConfig)
    parts = ("weight", "bias") if c.norm_place == "none" else ()
    return {f"post_layernorm.{part}": (c.width,) for part in parts}


_TOWER = {"pre_norm": (True,), "patch_bias": (False,)}
_TOKEN = {**_TOWER, "norm_place": ("tokens", "features")}
_CLIP = (
    Variant("CLIPVisionModelWithProjection", True, {**_TOKEN, "head_bias": (False,)}, square_only),
    Variant("CLIPForImageClassification", True, {**_TOWER, "pool": ("mean",), "norm_place": ("none",)}, square_only),
    Variant("CLIPVisionModel", False, _TOKEN, square_only),
)

HUGGING_FACE_CLIP = hf_format(
    name="hf-clip",
    title="Hugging Face CLIP, the image tower (a folder)",
    recognises=_is("hf-clip"),
    variants=_CLIP,
    parts=_PARTS,
    renames=_renames,
    architecture=_clip_architecture,
    entries=_clip_entries,
    config=_clip_config,
    file_key=_file_key,
    zeros=_clip_zeros,
)


# ----------------------------------------------------------------------------------------------------------- SigLIP


def _siglip_architecture(header: CheckpointHeader) -> ViTConfig:
    settings = read_settings(header, replace(_LAYOUT, class_token=""), _SIGLIP_DEFAULTS)
    pool = "map" if header.has("head.probe") else "mean"
    if pool == "map":
        requires(header, vision_use_head=True)
    return ViTConfig(**settings, classes=classes_of(header), pool=pool)


def _siglip_note(header: CheckpointHeader, c: ViTConfig) -> tuple[str, ...]:
    mean = c.pool == "mean" and not c.classes
    return ("features are the mean of the patches, as the file has no attention pooling",) if mean else ()


def _siglip_entries(c: Architecture) -> list[Entry]:
    assert isinstance(c, ViTConfig)
    entries = layout_entries(_LAYOUT, c)
    if c.pool == "map":
        entries += [Entry("head.probe", "map.probe", (1, 1, c.width))]
        entries += linear("head.q", "map.q", c.width, c.width) + linear("head.kv", "map.kv", c.width, 2 * c.width)
        entries += linear("head.attention.out_proj", "map.out", c.width, c.width)
        entries += norm("head.layernorm", "map.norm", c.width)
        entries += linear("head.mlp.fc1", "map.mlp.hidden", c.width, c.mlp)
        entries += linear("head.mlp.fc2", "map.mlp.output", c.mlp, c.width)
    return entries + (linear("classifier", "head.output", c.width, c.classes) if c.classes else [])


def _unpack(tensors: Tensors, c: Architecture) -> Tensors:
    """Queries, keys and values of the pooling, which files have as one projection -> queries, and keys and values."""
    assert isinstance(c, ViTConfig)
    tensors = dict(tensors)
    for key, part in _FUSED.items():
        if key in tensors:
            fused = tensors.pop(key)
            tensors |= {f"head.q.{part}": fused[: c.width], f"head.kv.{part}": fused[c.width :]}
    return tensors


def _pack(tensors: Tensors, c: Architecture) -> Tensors:
    tensors = dict(tensors)
    for key, part in _FUSED.items():
        if f"head.q.{part}" in tensors:
            tensors[key] = torch.cat([tensors.pop(f"head.q.{part}"), tensors.pop(f"head.kv.{part}")])
    return tensors


def _siglip_config(card: Card) -> dict[str, Any]:
    c = card.architecture
    assert isinstance(c, ViTConfig)
    model = chosen(_SIGLIP, c)
    vision = {"model_type": "siglip_vision_model", **_shared_config(card)}
    vision |= {} if c.pool == "map" else {"vision_use_head": False}
    if c.classes:
        return {"architectures": [model], "model_type": "siglip", "vision_config": vision, **labels(card)}
    return {"architectures": [model], **vision}


def _siglip_reason(c: ViTConfig) -> str | None:
    if c.pool == "map" and (c.map_heads or c.heads, c.map_mlp or c.mlp) != (c.heads, c.mlp):
        return "its attention pooling has the heads and the MLP of a block"
    return square_only(c)


_PATCHES = {"class_token": (False,)}
_ANY_MAP = {"map_heads": (), "map_mlp": ()}
_SIGLIP = (
    Variant("SiglipForImageClassification", True, {**_PATCHES, "pool": ("mean",)}, _siglip_reason),
    Variant("SiglipVisionModel", False, {**_PATCHES, **_ANY_MAP, "pool": ("map", "mean")}, _siglip_reason),
)

HUGGING_FACE_SIGLIP = hf_format(
    name="hf-siglip",
    title="Hugging Face SigLIP, the image tower (a folder)",
    recognises=_is("hf-siglip"),
    variants=_SIGLIP,
    parts=_PARTS,
    notes=_siglip_note,
    renames=_renames,
    unpack=_unpack,
    pack=_pack,
    architecture=_siglip_architecture,
    entries=_siglip_entries,
    config=_siglip_config,
    file_key=_file_key,
)


# -------------------------------------------------------------------------------------------- SigLIP 2 with NaFlex


def _siglip2_architecture(header: CheckpointHeader) -> ViTConfig:
    """The patches of a SigLIP 2 are rows of pixels, (patch, patch, channels); its table is of a square grid."""
    config = vision_config(header)
    width, pixels = header.shape("embeddings.patch_embedding.weight", 2)
    channels = config.get("num_channels", 3)
    patch = config.get("patch_size", 16) if header.config else round((pixels / channels) ** 0.5)
    if patch * patch * channels != pixels:
        raise UserError(f"its patches have {pixels} pixels, not {patch}x{patch}x{channels}.")
    shapes = {**header.shapes, "embeddings.patch_embedding.weight": (width, channels, patch, patch)}
    return _siglip_architecture(replace(header, shapes=shapes))


def _siglip2_note(header: CheckpointHeader, c: ViTConfig) -> tuple[str, ...]:
    note = "transformers resizes positions to other grids bilinearly with antialiasing, vitral by rule hf"
    return (note, *_siglip_note(header, c))


def _siglip2_entries(c: Architecture) -> list[Entry]:
    assert isinstance(c, ViTConfig)
    key = "embeddings.patch_embedding.weight"
    kernel = Entry(key, "embed.weight", (c.width, c.patch, c.patch, c.channels), axes=(0, 3, 1, 2))
    return [kernel, *(entry for entry in _siglip_entries(c) if entry.theirs != key)]


def _siglip2_unpack(tensors: Tensors, c: Architecture) -> Tensors:
    assert isinstance(c, ViTConfig)
    tensors = _unpack(tensors, c)
    key = "embeddings.patch_embedding.weight"
    if key in tensors and tensors[key].ndim == 2:
        tensors[key] = tensors[key].unflatten(1, (c.patch, c.patch, c.channels))
    return tensors


def _siglip2_pack(tensors: Tensors, c: Architecture) -> Tensors:
    key = "embeddings.patch_embedding.weight"
    return _pack({**tensors, key: tensors[key].flatten(1)}, c)


def _siglip2_config(card: Card) -> dict[str, Any]:
    c = card.architecture
    assert isinstance(c, ViTConfig)
    config = _siglip_config(replace(card, class_names=()))
    vision = config.get("vision_config", config)
    del vision["image_size"]
    vision |= {"model_type": "siglip2_vision_model", "num_patches": c.grid(c.image)[0] ** 2}
    kind = {"model_type": "siglip2"} if c.classes else {}
    return {**config, **kind, "architectures": [chosen(_SIGLIP2, c)], **labels(card)}


_SIGLIP2 = tuple(replace(variant, model=variant.model.replace("Siglip", "Siglip2")) for variant in _SIGLIP)

HUGGING_FACE_SIGLIP2 = hf_format(
    name="hf-siglip2",
    title="Hugging Face SigLIP 2 with NaFlex, the image tower (a folder)",
    recognises=_is("hf-siglip2"),
    variants=_SIGLIP2,
    parts=_PARTS,
    notes=_siglip2_note,
    renames=_renames,
    unpack=_siglip2_unpack,
    pack=_siglip2_pack,
    architecture=_siglip2_architecture,
    entries=_siglip2_entries,
    config=_siglip2_config,
    file_key=_file_key,
)
