"""vitral's own format: a safetensors file with our parameter names, and the card in its metadata.

A plain state dict of ours without a card (`torch.save(model.state_dict(), ...)`) is read as well. Its architecture is
derived from the shapes; what shapes do not show is in the metadata that torch.save keeps or, if that is lost,
assumed, and `assumptions` lists it for the card.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import torch

from vitral.architecture import (
    Architecture,
    Pool,
    Position,
    ResNetConfig,
    RopeConfig,
    Size,
    StemConfig,
    ViTConfig,
    rope_from_dict,
)
from vitral.checkpoints.card import Card
from vitral.checkpoints.formats.layout import Layout, read_parts, read_sizes
from vitral.checkpoints.formats.table import HINTED, CheckpointHeader, Entry, Format, grid_of_rows, heads_of
from vitral.errors import UserError
from vitral.models.build import build
from vitral.models.model import CONFIG

CARD = "vitral.card"

_VIT = ("blocks.0.attention.qkv.weight", "blocks.0.row.attention.qkv.weight")  # the second of an axial model
_LAYOUT = Layout(
    patches="embed",
    positions="positions.0.table",
    class_token="class_token",
    pre_norm="pre_norm",
    block="blocks.{}",
    norm1="norm1",
    qkv=("attention.qkv",),
    qv_biases=("attention.qv_bias",),
    qk_norms=("attention.q_norm", "attention.k_norm"),
    attention_norm="attention.norm",
    out="attention.out",
    norm2="norm2",
    hidden="mlp.hidden",
    gates=("mlp.hidden",),
    mlp_norm="mlp.norm",
    output="mlp.output",
    scales=("scale1.scale", "scale2.scale"),
    norm="norm",
    head="head.output",
)
_RESNET = ("root.weight", "stages.0.0.conv1.weight")


def card_of(header: CheckpointHeader) -> Card | None:
    """The card in the metadata, None for a plain state dict."""
    return Card.from_json(header.metadata[CARD]) if CARD in header.metadata else None


def entries(architecture: Architecture) -> list[Entry]:
    """Every tensor of the model, under its own name."""
    with torch.device("meta"):
        state = build(architecture).state_dict()
    return [Entry(key, key, tuple(array.shape)) for key, array in state.items()]


def _recognises(header: CheckpointHeader) -> bool:
    vit = header.has("embed.weight") and any(map(header.has, _VIT))
    return CARD in header.metadata or vit or all(map(header.has, _RESNET))


def _architecture(header: CheckpointHeader) -> Architecture:
    if card := card_of(header):
        return card.architecture
    if any(key.endswith((".down", ".up")) for key in header.shapes):
        raise UserError(
            "the state dict has LoRA adapters: load it into the model it is from and write that with vitral.save, "
            "which merges them."
        )
    derived = _resnet(header) if header.has("root.weight") else _vit(header)
    stated = _stated(header)
    if "rope" in stated:
        stated["rope"] = rope_from_dict(stated["rope"]) if stated["rope"] else None
    if "epsilons" in stated and isinstance(derived, ViTConfig) and derived.stem:
        derived = replace(derived, stem=replace(derived.stem, epsilons=stated["epsilons"]))
    return replace(derived, **{field: value for field, value in stated.items() if hasattr(derived, field)})


def _stated(header: CheckpointHeader) -> dict[str, Any]:
    """The fields in the metadata of a state dict, but for those that a user has passed or that tensors show."""
    stated = json.loads(header.metadata.get(CONFIG, "{}"))
    shown = {field for field in ("heads", *HINTED) if getattr(header.hints, field)}
    if header.has("map.probe") or not header.has("class_token") or stated.get("pool") == "map":
        shown.add("pool")
    if any(key.startswith("positions.") or ".relative." in key for key in header.shapes):
        shown |= {"position"} | ({"injection"} if stated.get("injection") == "every" else set())
    if any(key.startswith("positions.1.") for key in header.shapes):
        shown.add("injection")
    return {field: value for field, value in stated.items() if field not in shown}


def _vit(header: CheckpointHeader) -> ViTConfig:
    axial, stem = header.has(_VIT[1]), None
    if wide := header.size("stem.root.conv.weight", 4):
        stem = StemConfig(blocks=_stages(header, "stem.stages"), width=wide // 64)
    names = replace(_LAYOUT, block="blocks.{}.row") if axial else _LAYOUT
    sizes = {**read_sizes(header, names), **read_parts(header, names)}
    depth, width, patch, token = sizes["depth"], sizes["width"], sizes["patch"], sizes["class_token"]
    position = _position(header, width)
    rows, columns = _grid(header, position, patch, stem)
    stride = patch * (stem.stride if stem else 1)
    learned = RopeConfig(pairs="adjacent", coordinates="index", learned=True)
    map_mlp = header.size("map.mlp.hidden.weight")
    fields: dict[str, Any] = {
        "heads": _heads(header, depth, width),
        "image": (rows * stride, columns * stride),
        "channels": header.shape("stem.root.conv.weight", 4)[1] if stem else sizes["channels"],
        "pool": _pool(header, width),
        "registers": header.size("registers"),
        "position": position,
        "injection": "every" if any(key.startswith("positions.1.") for key in header.shapes) else "input",
        "class_position": header.has("positions.0.class_row") or not token or position not in ("1d", "2d"),
        "representation": header.size("head.hidden.weight"),
        "head_bias": header.has("head.output.bias") or not header.has("head.output.weight"),
        "norm_place": "tokens" if header.has("norm.weight") else "none",
        "map_mlp": 0 if map_mlp == sizes["mlp"] else map_mlp,
        "rope": learned if header.has("rope.frequencies") else None,
    }
    return ViTConfig(**{**sizes, **fields}, stem=stem, axial=axial)


def _pool(header: CheckpointHeader, width: int) -> Pool:
    if header.has("map.probe"):
        return "map"
    if not header.has("class_token"):
        return "mean"
    weight = next((key for key in ("head.hidden.weight", "head.output.weight") if header.has(key)), None)
    if weight is None or header.shape(weight, 2)[1] == width:
        return "token"
    raise UserError(
        "its head reads two tokens, the mean of the patches or a register besides the class token, and the file does "
        "not say which: write it with vitral.save."
    )


def _resnet(header: CheckpointHeader) -> ResNetConfig:
    wide, channels, _, _ = header.shape("root.weight", 4)
    blocks = _stages(header, "stages")
    if len(blocks) != 4:
        raise UserError(
            f"the file has {len(blocks)} stages where a ResNet has 4: it is incomplete or not of this format."
        )
    axes = [f"stages.0.0.conv2.{axis}.offsets" for axis in ("height", "width")]
    axial = header.has(axes[0])
    # The tables of the first unit cover the offsets of its grid, a quarter of the image.
    sides = [4 * ((header.shape(key, 2)[0] + 1) // 2) for key in axes] if axial else [224, 224]
    return ResNetConfig(
        blocks=(blocks[0], blocks[1], blocks[2], blocks[3]),
        width=wide // 64,
        image=(sides[0], sides[1]),
        channels=channels,
        classes=header.size("head.output.weight"),
        axial=axial,
    )


def _stages(header: CheckpointHeader, name: str) -> tuple[int, ...]:
    """How many units each stage has."""
    units: list[int] = []
    while any(key.startswith(f"{name}.{len(units)}.") for key in header.shapes):
        units.append(header.count(rf"{re.escape(name)}\.{len(units)}\.(\d+)\."))
    return tuple(units)


def _position(header: CheckpointHeader, width: int) -> Position:
    if header.has("positions.0.table"):
        return "1d"
    if header.has("positions.0.x"):
        return "2d"
    relative = header.shapes.get("blocks.0.attention.relative.table")
    if relative is not None:
        return "bias" if len(relative) == 3 else "relative"
    return "none" if width % 4 or header.has("rope.frequencies") else "sincos2d"


def _grid(header: CheckpointHeader, position: Position, patch: int, stem: StemConfig | None) -> Size:
    if position == "1d":
        rows, columns, _ = header.shape("positions.0.table", 3)
        return rows, columns
    if position == "2d":
        return header.shape("positions.0.y", 2)[0], header.shape("positions.0.x", 2)[0]
    if position == "bias":  # one row and column per offset between two patches
        rows, columns, _ = header.shape("blocks.0.attention.relative.table", 3)
        return (rows + 1) // 2, (columns + 1) // 2
    if position == "relative":  # one row per offset between two of n patches
        return grid_of_rows(header, (header.shape("blocks.0.attention.relative.table", 2)[0] + 1) // 2)
    side = max(224 // (patch * (stem.stride if stem else 1)), 1)
    return header.hints.grid or (side, side)


def _heads(header: CheckpointHeader, depth: int, width: int) -> int:
    relative = header.shapes.get("blocks.0.attention.relative.table", ())
    if len(relative) == 3:  # (rows, columns, heads)
        return relative[2]
    if len(relative) == 2:  # its rows have the width of a head
        return width // relative[1]
    if header.has("rope.frequencies"):
        return header.shape("rope.frequencies", 4)[2]
    if header.has("blocks.0.attention.q_norm.weight"):
        return width // header.shape("blocks.0.attention.q_norm.weight", 1)[0]
    return _stated(header).get("heads") or heads_of(header, depth, width)


def _assumptions(header: CheckpointHeader, architecture: Architecture) -> tuple[str, ...]:
    """What the shapes of a plain state dict do not show; a file with a card is not asked."""
    c, assumed = architecture, {"image": f"{architecture.image[0]}x{architecture.image[1]}"}
    if isinstance(c, ResNetConfig):
        assumed |= {"root_pool": c.root_pool, "epsilons": c.epsilons}
    elif isinstance(c, ViTConfig):
        assumed |= {"gelu": c.gelu, "norm_place": c.norm_place, "norm_eps": f"{c.norm_eps:g}", "resize": c.resize}
        assumed |= {"position": c.position} if c.position in ("none", "sincos2d") else {}
        adds = c.position in ("1d", "2d", "sincos2d") and c.injection == "input"
        assumed |= {"injection": c.injection} if adds else {}
        assumed |= {"pool": c.pool} if c.class_token and c.pool == "token" else {}
        assumed |= {"rope": "mixed, of adjacent channels" if c.rope else "none", "post_norm": str(c.post_norm)}
        assumed |= {"map_heads": str(c.heads), "map_prefix": str(c.map_prefix)} if c.pool == "map" else {}
        assumed |= {"epsilons": c.stem.epsilons} if c.stem else {}
    known = {*_stated(header), *(field for field in HINTED if getattr(header.hints, field))}
    return (f"assumed: {', '.join(f'{field}={value}' for field, value in assumed.items() if field not in known)}",)


NATIVE = Format(
    name="vitral",
    title="vitral safetensors with its card",
    recognises=_recognises,
    architecture=_architecture,
    entries=entries,
    unsupported_reason=lambda architecture: None,
    positions=("none", "1d", "2d", "relative", "bias", "sincos2d"),
    class_row=lambda c: "either",
    epsilons=None,
    assumptions=_assumptions,
)
