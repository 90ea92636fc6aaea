"""timm's Vision Transformers: a safetensors file, alone or with timm's config.json.

timm reads what is written here with `timm.create_model("local-dir:FOLDER", pretrained=True)`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vitral.architecture import Architecture, ViTConfig
from vitral.checkpoints.card import Card, Preprocess
from vitral.checkpoints.formats.table import (
    CheckpointHeader,
    ClassRow,
    Entry,
    Format,
    Hints,
    heads_of,
    later_parts,
    read_sizes,
)
from vitral.checkpoints.formats.timm_entries import encoder_entries as encoder_entries
from vitral.checkpoints.formats.timm_entries import entries
from vitral.checkpoints.formats.timm_reading import INDEX, named_factory, read_header
from vitral.checkpoints.formats.timm_writing import arguments_of, layout_of, reason_against
from vitral.checkpoints.processors import from_timm, to_timm
from vitral.errors import UserError

_PARTS = ("patch_embed.", "blocks.0.")
_OTHERS = ("mask_token", "register_tokens", "storage_tokens")  # of DINO's and BEiT's own code


def read_encoder(header: CheckpointHeader) -> dict[str, Any]:
    """Sizes, heads and LayerScale of a plain encoder in timm's names, for DINO."""
    sizes = read_sizes(header, "patch_embed.proj.weight", "blocks.0.mlp.fc1.weight", r"blocks\.(\d+)\.")
    heads = heads_of(header, sizes.depth, sizes.width)
    return {**vars(sizes), "heads": heads, "layer_scale": header.has("blocks.0.ls1.gamma")}


def _recognises(header: CheckpointHeader) -> bool:
    if named_factory(header) and all(any(key.startswith(part) for key in header.shapes) for part in _PARTS):
        return True  # also one that is then refused by its name
    projections = ("blocks.0.attn.qkv.weight", "blocks.0.attn.q_proj.weight")
    plain = header.has("patch_embed.proj.weight") and any(header.has(key) for key in projections)
    return plain and not any(header.has(key) for key in _OTHERS)


def _entries(c: Architecture) -> list[Entry]:
    assert isinstance(c, ViTConfig)
    return entries(c, layout_of(c))


def _pretrained(header: CheckpointHeader) -> dict[str, Any]:
    return dict((header.config or {}).get("pretrained_cfg") or {})


def _preprocess(header: CheckpointHeader, architecture: Architecture) -> Preprocess | None:
    return from_timm(_pretrained(header), architecture.image)


def _class_names(header: CheckpointHeader) -> tuple[str, ...]:
    names = (header.config or {}).get("label_names")
    return tuple(names) if isinstance(names, list) else ()


def unsupported_reason(architecture: Architecture) -> str | None:
    """Why formats of plain Vision Transformers in PyTorch, without timm's later parts, cannot hold an architecture."""
    if reason := _encoder_reason(architecture):
        return reason
    assert isinstance(architecture, ViTConfig)
    return later_parts(architecture)


def _encoder_reason(architecture: Architecture) -> str | None:
    if not isinstance(architecture, ViTConfig):
        return "it is for Vision Transformers, not ResNets"
    c = architecture
    if c.stem or c.axial:
        return "it does not support a hybrid's ResNet or axial blocks"
    if c.position == "relative" or c.injection != "input":
        return "it adds positions once, at the input, and does not support relative ones"
    return None


def _unsupported_reason(architecture: Architecture) -> str | None:
    general = _encoder_reason(architecture)
    if general or not isinstance(architecture, ViTConfig):
        return general
    if architecture.representation:
        return "it does not support the tanh layer of the pre-training head"
    return reason_against(architecture)


def _class_row(c: ViTConfig) -> ClassRow:
    """With registers, timm has a position row for every prefix token or for none."""
    return "folded" if c.registers else "either"


def _alone(architecture: Architecture) -> str | None:
    """What a reader of the file without config.json takes for granted, ours as an example."""
    assert isinstance(architecture, ViTConfig)
    c = architecture
    plain = replace(c, dropout=0.0, attention_dropout=0.0, stochastic_depth=0.0, resize="timm")
    shapes = {entry.theirs: entry.shape for entry in _entries(c)}
    shapes |= {"pos_embed": _position_shape(c)} if c.position == "1d" else {}
    hints = Hints(grid=c.grid(c.image), heads=c.heads)
    try:
        back = read_header(CheckpointHeader(shapes, hints=hints)).architecture
    except UserError:
        return "its tensors do not state all of its architecture"
    back = replace(back, image=c.image)
    if back.gelu != c.gelu:
        return "timm assumes the exact (erf) GELU"
    if back.pool != c.pool and c.norm_place == "tokens":
        return "timm assumes that the class token is the feature"
    if back.pool != c.pool:
        return "timm assumes that a last LayerNorm after pooling follows a mean"
    return None if back == plain else "its tensors do not state all of its architecture"


def _position_shape(c: ViTConfig) -> tuple[int, int, int]:
    rows, columns = c.grid(c.image)
    return 1, int(c.class_row) + rows * columns, c.width


def _config(card: Card) -> dict[str, Any]:
    c = card.architecture
    assert isinstance(c, ViTConfig)
    name, arguments = arguments_of(c)
    config: dict[str, Any] = {
        "architecture": name,  # every size is in the arguments
        "num_classes": c.classes,
        "num_features": c.width,
        "global_pool": arguments["global_pool"],
        "model_args": arguments,
        "pretrained_cfg": {
            "input_size": [c.channels, *c.image],
            "num_classes": c.classes,
            **to_timm(card.preprocess, c.image),
        },
    }
    return {**config, "label_names": list(card.class_names)} if card.class_names else config


TIMM = Format(
    name="timm",
    title="timm (safetensors, or a folder with its config.json)",
    container="safetensors",
    recognises=_recognises,
    architecture=lambda header: read_header(header).architecture,
    entries=_entries,
    file_entries=lambda header, c: read_header(header).entries(header),
    unsupported_reason=_unsupported_reason,
    ignored=rf".*{INDEX}$",
    positions=("1d", "none", "bias"),
    class_row=_class_row,
    assumptions=lambda header, c: read_header(header).assumed,
    preprocess=_preprocess,
    class_names=_class_names,
    config=_config,
    alone=_alone,
)
