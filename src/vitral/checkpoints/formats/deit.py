"""DeiT with a distillation token: timm's `deit_*_distilled_*`, and transformers' DeiT models (a folder).

The token is our register. The mean of the two heads, one on each token, is one linear layer on both tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vitral.architecture import Architecture, ViTConfig
from vitral.checkpoints.card import Card
from vitral.checkpoints.formats.hugging_face import HUGGING_FACE
from vitral.checkpoints.formats.table import CheckpointHeader, Entry, Format, Tensors, later_parts, linear
from vitral.checkpoints.formats.timm import TIMM
from vitral.checkpoints.formats.timm_reading import plain_header
from vitral.errors import UserError


@dataclass(frozen=True)
class Names:
    """Names of what DeiT adds to the plain ViT of a library, and of what it changes."""

    plain: Format[ViTConfig]
    token: str
    positions: str
    head: str  # of the plain ViT
    heads: tuple[str, str]  # of the class token and of the distillation token


_TIMM = Names(TIMM, "dist_token", "pos_embed", "head", ("head", "head_dist"))
_HF = Names(
    plain=HUGGING_FACE,
    token="embeddings.distillation_token",
    positions="embeddings.position_embeddings",
    head="classifier",
    heads=("cls_classifier", "distillation_classifier"),
)


def _without_token(header: CheckpointHeader, names: Names) -> CheckpointHeader:
    """The header of the plain ViT: one head and no distillation token."""
    shapes = dict(header.shapes)
    batch, rows, width = header.shape(names.positions, 3)
    if header.shape(names.token, 3)[2] != width:
        raise UserError(f"tensor {names.token} has the shape {list(shapes[names.token])}, not {[1, 1, width]}.")
    del shapes[names.token]
    shapes[names.positions] = (batch, rows - 1, width)
    if header.has(f"{names.heads[1]}.weight"):
        classifier = {key: header.shape(f"{names.heads[0]}.{key}", rank) for key, rank in (("weight", 2), ("bias", 1))}
        for name in names.heads:
            shapes.pop(f"{name}.weight", None)
            shapes.pop(f"{name}.bias", None)
        shapes |= {f"{names.head}.{key}": shape for key, shape in classifier.items()}
    return plain_header(header, shapes) if names is _TIMM else replace(header, shapes=shapes)


def _architecture(header: CheckpointHeader, names: Names) -> ViTConfig:
    two = header.has(f"{names.heads[1]}.weight")
    if names is _TIMM and not two:
        raise UserError("the file has a distillation token without its head (head_dist): its features are no logits.")
    plain = names.plain.architecture(_without_token(header, names))
    if plain.registers or not plain.class_row:
        raise UserError("the file has a distillation token beside registers or without position rows: not supported.")
    return replace(plain, registers=1, pool="token+register" if two else plain.pool)


def _plain(c: ViTConfig) -> ViTConfig:
    return replace(c, registers=0, pool="token")


def _entries(c: ViTConfig, names: Names) -> list[Entry]:
    """The table of the plain ViT, but with the token, and a head on both tokens."""
    entries = [Entry(names.token, "registers", (1, 1, c.width))]
    if c.pool != "token+register":
        return entries + names.plain.entries(_plain(c))
    entries += names.plain.entries(replace(_plain(c), classes=0))
    return entries + linear(names.head, "head.output", c.features, c.classes)


def _unpack(tensors: Tensors, c: ViTConfig, names: Names) -> Tensors:
    """Two heads -> one of half the weights side by side; the token's position row is added to the token."""
    positions, token = tensors.get(names.positions), tensors.get(names.token)
    if positions is None or token is None:
        return tensors  # the table reports what is missing
    tensors = dict(tensors)
    tensors[names.token] = token.float() + positions[:, 1:2].float()
    tensors[names.positions] = torch.cat([positions[:, :1], positions[:, 2:]], dim=1)
    if c.pool == "token+register":
        weights, biases = ([_taken(tensors, f"{name}.{key}") for name in names.heads] for key in ("weight", "bias"))
        if weights[0].shape != weights[1].shape or biases[0].shape != biases[1].shape:
            raise UserError("the heads of the class token and of the distillation token have different shapes.")
        tensors[f"{names.head}.weight"] = torch.cat(weights, dim=-1) / 2
        tensors[f"{names.head}.bias"] = (biases[0] + biases[1]) / 2
    return tensors


def _taken(tensors: Tensors, key: str) -> Tensor:
    if key not in tensors:
        raise UserError(f"the file has no tensor {key}: it is incomplete or of another kind.")
    return tensors.pop(key).float()


def _pack(tensors: Tensors, c: ViTConfig, names: Names) -> Tensors:
    """The inverse of `_unpack`, with a position row of zeros and both heads with the same bias."""
    tensors = dict(tensors)
    positions = tensors[names.positions]
    tensors[names.positions] = torch.cat([positions[:, :1], torch.zeros_like(positions[:, :1]), positions[:, 1:]], 1)
    if c.pool == "token+register":
        weight, bias = tensors.pop(f"{names.head}.weight"), tensors.pop(f"{names.head}.bias")
        for name, part in zip(names.heads, weight.chunk(2, dim=1), strict=True):
            tensors |= {f"{name}.weight": 2 * part, f"{name}.bias": bias.clone()}
    return tensors


def _assumptions(header: CheckpointHeader, c: ViTConfig, names: Names) -> tuple[str, ...]:
    folded = "position row of the distillation token folded into the token"
    two = ("mean of the heads of class and distillation token made one linear layer",)
    changes = (folded, *(two if c.pool == "token+register" else ()))
    return (*names.plain.assumptions(_without_token(header, names), _plain(c)), *changes)


def _pack_changes(c: ViTConfig) -> tuple[str, ...]:
    row = "distillation token given a position row of zeros"
    two = ("head split into those of class and distillation token, with the same bias",)
    return (row, *(two if c.pool == "token+register" else ()))


def _unsupported_reason(architecture: Architecture, names: Names) -> str | None:
    c = architecture
    if not isinstance(c, ViTConfig) or c.registers != 1 or not c.class_token:
        return "it is for a ViT with a class token and one register, the distillation token"
    if c.pool == "token+register" and (not c.classes or c.representation):
        return "it needs a head without a tanh layer on class and distillation token"
    if c.pool not in ("token", "token+register") or c.norm_place != "tokens" or c.stem:
        return "its heads read the class token and the distillation token after the last LayerNorm"
    if names is _TIMM and c.pool == "token":
        return "it has a head on the distillation token, and this model has none"
    return later_parts(c, "pool") or names.plain.unsupported_reason(_plain(c))


def _timm_config(card: Card, c: ViTConfig) -> dict[str, Any]:
    assert TIMM.config is not None
    config = TIMM.config(card, _plain(c))
    # The class of the distilled models has none of these.
    arguments = {key: value for key, value in config["model_args"].items() if key not in ("class_token", "reg_tokens")}
    return {**config, "architecture": "deit_base_distilled_patch16_224", "model_args": arguments}


def _hf_config(card: Card, c: ViTConfig) -> dict[str, Any]:
    assert HUGGING_FACE.config is not None
    teacher = "WithTeacher" if c.pool == "token+register" else ""
    model = f"DeiTForImageClassification{teacher}" if c.classes else "DeiTModel"
    return {**HUGGING_FACE.config(card, _plain(c)), "architectures": [model], "model_type": "deit"}


def _hf_renames(keys: Iterable[str]) -> dict[str, str]:
    keys = list(keys)
    stripped = [re.sub(r"^deit\.", "", key) for key in keys]
    renamed = HUGGING_FACE.renames(stripped)
    return {key: renamed[name] for key, name in zip(keys, stripped, strict=True)}


def _format(names: Names, **functions: Any) -> Format[ViTConfig]:
    return Format(
        container="safetensors",
        architecture=lambda header: _architecture(header, names),
        entries=lambda c: _entries(c, names),
        unsupported_reason=lambda c: _unsupported_reason(c, names),
        unpack=lambda tensors, c: _unpack(tensors, c, names),
        pack=lambda tensors, c: _pack(tensors, c, names),
        pack_changes=_pack_changes,
        assumptions=lambda header, c: _assumptions(header, c, names),
        preprocess=names.plain.preprocess,
        class_names=names.plain.class_names,
        alone=lambda c: names.plain.alone(_plain(c)),
        **functions,
    )


TIMM_DEIT = _format(
    _TIMM,
    name="timm-deit",
    title="timm's distilled DeiT (safetensors, or a folder with its config.json)",
    recognises=lambda header: header.has("dist_token") and header.has("pos_embed"),
    config=_timm_config,
)

HUGGING_FACE_DEIT = _format(
    _HF,
    name="hf-deit",
    title="Hugging Face DeiT with its distillation token (a folder)",
    recognises=lambda header: header.has("embeddings.distillation_token"),
    renames=_hf_renames,
    ignored=r"embeddings\.mask_token$|pooler\.",
    config=_hf_config,
    preprocessor=HUGGING_FACE.preprocessor,
    file_key=lambda key, c: f"deit.{key}" if c.classes and "classifier." not in key else key,
)
