"""Hugging Face ViT and Dinov2 backbones: a folder for `from_pretrained` with config.json and model.safetensors."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from vitral.architecture import Architecture, Gelu, Size, ViTConfig
from vitral.checkpoints.card import Card, Preprocess
from vitral.checkpoints.formats import dino, timm
from vitral.checkpoints.formats.table import (
    CheckpointHeader,
    Entry,
    Format,
    Shape,
    grid_of_rows,
    heads_of,
    linear,
    norm,
    patches,
    position_entries,
    read_sizes,
    separate_qkv,
)
from vitral.checkpoints.processors import from_transformers, to_transformers
from vitral.errors import UserError

_GELUS: dict[str, Gelu] = {"gelu": "erf", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu_fast": "tanh"}
_PREFIX = re.compile(r"^(?:vit|dinov2|dinov2_with_registers)\.")
# transformers 5 renames the layers in memory; its files keep the older names, but a plain state dict may not.
_LAYER = re.compile(r"^(?:layers|encoder\.layer)\.(?=\d+\.)")
_MEMORY = {
    "attention.q_proj.": "attention.attention.query.",
    "attention.k_proj.": "attention.attention.key.",
    "attention.v_proj.": "attention.attention.value.",
    "attention.o_proj.": "attention.output.dense.",
}
_MEMORY_MLP = {"mlp.fc1.": "intermediate.dense.", "mlp.fc2.": "output.dense."}


def _renames(keys: Iterable[str]) -> dict[str, str]:
    renamed = {key: _PREFIX.sub("", key) for key in keys}
    plain = any("layernorm_before" in key for key in renamed)  # Dinov2's files have mlp.fc1, ViT's do not
    memory = {**_MEMORY, **_MEMORY_MLP} if plain else _MEMORY
    return {key: _in_file(new, memory) for key, new in renamed.items()}


def _in_file(key: str, memory: dict[str, str]) -> str:
    if not _LAYER.match(key):
        return key
    key = _LAYER.sub("encoder.layer.", key)
    for name, file in memory.items():
        key = key.replace(name, file)
    return key


def _attention(theirs: str, ours: str, c: ViTConfig) -> list[Entry]:
    inner = f"{theirs}.attention.attention"
    names = (f"{inner}.query", f"{inner}.key", f"{inner}.value")
    out = linear(f"{theirs}.attention.output.dense", f"{ours}.attention.out", c.width, c.width)
    return separate_qkv(names, f"{ours}.attention.qkv", c.width) + out


def _embeddings(c: ViTConfig) -> list[Entry]:
    entries = [Entry("embeddings.cls_token", "class_token", (1, 1, c.width))]
    entries += patches("embeddings.patch_embeddings.projection", c)
    return entries + position_entries("embeddings.position_embeddings", c)


def _vit_entries(c: Architecture) -> list[Entry]:
    assert isinstance(c, ViTConfig)
    entries = _embeddings(c)
    for i in range(c.depth):
        theirs, ours = f"encoder.layer.{i}", f"blocks.{i}"
        entries += norm(f"{theirs}.layernorm_before", f"{ours}.norm1", c.width)
        entries += _attention(theirs, ours, c)
        entries += norm(f"{theirs}.layernorm_after", f"{ours}.norm2", c.width)
        entries += linear(f"{theirs}.intermediate.dense", f"{ours}.mlp.hidden", c.width, c.mlp)
        entries += linear(f"{theirs}.output.dense", f"{ours}.mlp.output", c.mlp, c.width)
    entries += norm("layernorm", "norm", c.width)
    entries += linear("pooler.dense", "head.hidden", c.width, c.representation) if c.representation else []
    return entries + (linear("classifier", "head.output", c.width, c.classes) if c.classes else [])


def _dino_entries(c: Architecture) -> list[Entry]:
    assert isinstance(c, ViTConfig)
    entries = _embeddings(c)
    entries += [Entry("embeddings.register_tokens", "registers", (1, c.registers, c.width))] if c.registers else []
    for i in range(c.depth):
        theirs, ours = f"encoder.layer.{i}", f"blocks.{i}"
        entries += norm(f"{theirs}.norm1", f"{ours}.norm1", c.width)
        entries += _attention(theirs, ours, c)
        entries += norm(f"{theirs}.norm2", f"{ours}.norm2", c.width)
        entries += linear(f"{theirs}.mlp.fc1", f"{ours}.mlp.hidden", c.width, c.mlp)
        entries += linear(f"{theirs}.mlp.fc2", f"{ours}.mlp.output", c.mlp, c.width)
        entries += [Entry(f"{theirs}.layer_scale{k}.lambda1", f"{ours}.scale{k}.scale", (c.width,)) for k in (1, 2)]
    return entries + norm("layernorm", "norm", c.width)


def _read(header: CheckpointHeader, hidden: str, eps: float) -> dict[str, Any]:
    """The settings of both families, from shapes and config.json."""
    projection = "embeddings.patch_embeddings.projection.weight"
    sizes = read_sizes(header, projection, f"encoder.layer.0.{hidden}.weight", r"encoder\.layer\.(\d+)\.")
    config = header.config or {}
    act = config.get("hidden_act", "gelu")
    if act not in _GELUS:
        raise UserError(f'the file\'s activation "{act}" is not supported: only GELU is.')
    return {
        **vars(sizes),
        "heads": header.hints.heads or config.get("num_attention_heads") or heads_of(header, sizes.depth, sizes.width),
        "image": _image(header, sizes.patch),
        "gelu": _GELUS[act],
        "norm_eps": float(config.get("layer_norm_eps", eps)),
        "dropout": float(config.get("hidden_dropout_prob", 0.0)),
        "attention_dropout": float(config.get("attention_probs_dropout_prob", 0.0)),
    }


def _image(header: CheckpointHeader, patch: int) -> Size:
    rows = header.shape("embeddings.position_embeddings", 3)[1] - 1
    size = (header.config or {}).get("image_size")
    if size and not header.hints.grid:
        height, width = size if isinstance(size, list | tuple) else (size, size)
        if (height // patch) * (width // patch) == rows:
            return height, width
    grid = grid_of_rows(header, rows)
    return grid[0] * patch, grid[1] * patch


def _vit_architecture(header: CheckpointHeader) -> ViTConfig:
    classes = header.shape("classifier.weight", 2)[0] if header.has("classifier.weight") else 0
    # ViTForImageClassification never runs the pooler, even if the file has one.
    pooler = header.has("pooler.dense.weight") and not classes
    representation = header.shape("pooler.dense.weight", 2)[0] if pooler else 0
    act = (header.config or {}).get("pooler_act", "tanh")
    if representation and act != "tanh":
        raise UserError(f'the file\'s pooler ends in "{act}" instead of tanh: that is not supported.')
    settings = _read(header, "intermediate.dense", eps=1e-12)
    return ViTConfig(**settings, classes=classes, representation=representation, resize="hf")


def _dino_architecture(header: CheckpointHeader) -> ViTConfig:
    if header.has("classifier.weight"):
        raise UserError("the file's classifier reads the class token and the mean together: that is not supported.")
    registers = "embeddings.register_tokens"
    count = header.shape(registers, 3)[1] if header.has(registers) else 0
    settings = _read(header, "mlp.fc1", eps=1e-6)
    return ViTConfig(**settings, classes=0, registers=count, layer_scale=True, resize="timm" if count else "hf")


def _vit_unsupported_reason(architecture: Architecture) -> str | None:
    general = timm.unsupported_reason(architecture)
    if general or not isinstance(architecture, ViTConfig):
        return general
    c = architecture
    if c.pool != "token" or c.registers or c.layer_scale:
        return "it needs a class token, and does not support registers or LayerScale"
    if c.representation and c.classes:
        return "its classifier does not run the tanh layer of the pre-training head"
    return None


def _dino_unsupported_reason(architecture: Architecture) -> str | None:
    reason = dino.unsupported_reason(architecture)
    if reason or not isinstance(architecture, ViTConfig):
        return reason
    if not architecture.layer_scale or architecture.mlp % architecture.width:
        return "it needs LayerScale and an MLP width that is a multiple of the embedding width"
    return None


def _shared_config(card: Card) -> dict[str, Any]:
    c = card.architecture
    assert isinstance(c, ViTConfig)
    height, width = c.image
    labels = {"id2label": {str(i): name for i, name in enumerate(card.class_names)}} if card.class_names else {}
    labels |= {"label2id": {name: i for i, name in enumerate(card.class_names)}} if card.class_names else {}
    if c.classes and not labels:
        labels = {"id2label": {str(i): f"LABEL_{i}" for i in range(c.classes)}}
        labels |= {"label2id": {f"LABEL_{i}": i for i in range(c.classes)}}
    return {
        "hidden_size": c.width,
        "num_hidden_layers": c.depth,
        "num_attention_heads": c.heads,
        "image_size": height if height == width else [height, width],
        "patch_size": c.patch,
        "num_channels": c.channels,
        "hidden_act": "gelu" if c.gelu == "erf" else "gelu_pytorch_tanh",
        "layer_norm_eps": c.norm_eps,
        "hidden_dropout_prob": c.dropout,
        "attention_probs_dropout_prob": c.attention_dropout,
        "qkv_bias": True,
        **labels,
    }


def _vit_config(card: Card) -> dict[str, Any]:
    c = card.architecture
    assert isinstance(c, ViTConfig)
    pooler = {"pooler_output_size": c.representation, "pooler_act": "tanh"} if c.representation else {}
    model = "ViTForImageClassification" if c.classes else "ViTModel"
    return {"architectures": [model], "model_type": "vit", "intermediate_size": c.mlp, **_shared_config(card), **pooler}


def _dino_config(card: Card) -> dict[str, Any]:
    c = card.architecture
    assert isinstance(c, ViTConfig)
    model_type, model = (
        ("dinov2_with_registers", "Dinov2WithRegistersModel") if c.registers else ("dinov2", "Dinov2Model")
    )
    registers = {"num_register_tokens": c.registers} if c.registers else {}
    config = {
        "architectures": [model],
        "model_type": model_type,
        "mlp_ratio": c.mlp // c.width,
        "use_swiglu_ffn": False,
    }
    return {**config, **_shared_config(card), **registers}


def _preprocess(header: CheckpointHeader, architecture: Architecture) -> Preprocess | None:
    return from_transformers(header.preprocessor or {}, (header.config or {}).get("model_type", ""))


def _class_names(header: CheckpointHeader) -> tuple[str, ...]:
    names = (header.config or {}).get("id2label")
    if not isinstance(names, dict) or all(str(name).startswith("LABEL_") for name in names.values()):
        return ()
    return tuple(str(names[key]) for key in sorted(names, key=int))


def _zeros(c: Architecture) -> dict[str, Shape]:
    assert isinstance(c, ViTConfig)
    return {"embeddings.mask_token": (1, c.width)}


def _file_key(key: str, c: Architecture) -> str:
    assert isinstance(c, ViTConfig)
    return f"vit.{key}" if c.classes and not key.startswith("classifier.") else key


HUGGING_FACE = Format(
    name="hf",
    title="Hugging Face ViT (a folder)",
    container="safetensors",
    recognises=lambda header: header.has("encoder.layer.0.layernorm_before.weight"),
    architecture=_vit_architecture,
    entries=_vit_entries,
    unsupported_reason=_vit_unsupported_reason,
    renames=_renames,
    ignored=r"embeddings\.mask_token$|pooler\.",
    preprocess=_preprocess,
    class_names=_class_names,
    config=_vit_config,
    preprocessor=lambda card: to_transformers(card.preprocess),
    alone=lambda c: "transformers reads its shape from config.json",
    file_key=_file_key,
)

HUGGING_FACE_DINO = Format(
    name="hf-dinov2",
    title="Hugging Face Dinov2 backbones, with and without registers (a folder)",
    container="safetensors",
    recognises=lambda header: header.has("encoder.layer.0.layer_scale1.lambda1"),
    architecture=_dino_architecture,
    entries=_dino_entries,
    unsupported_reason=_dino_unsupported_reason,
    renames=_renames,
    ignored=r"embeddings\.mask_token$",
    preprocess=_preprocess,
    class_names=_class_names,
    config=_dino_config,
    preprocessor=lambda card: to_transformers(card.preprocess),
    alone=lambda c: "transformers reads its shape from config.json",
    zeros=_zeros,
)
