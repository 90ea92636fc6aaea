"""What Hugging Face's Vision Transformers share: a family's names, the settings of config.json, what it can express.

Families differ in names, not in structure. A `Layout` has the names, from which the entries of both directions follow;
they are the names of files on the hub, as transformers 5 renames layers in memory and (mostly) not in its files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from vitral.architecture import Architecture, Gelu, Size, ViTConfig
from vitral.checkpoints.card import Card
from vitral.checkpoints.formats.table import CheckpointHeader, Entry, grid_of_rows, heads_of, linear, norm
from vitral.errors import UserError

# The format of each model_type in config.json.
FAMILIES = {
    **{"vit": "hf", "deit": "hf-deit", "vit_msn": "hf-msn", "ijepa": "hf-ijepa", "vit_mae": "hf-mae"},
    **{"beit": "hf-beit", "data2vec-vision": "hf-data2vec"},
    **{"dinov2": "hf-dinov2", "dinov2_with_registers": "hf-dinov2", "dinov3_vit": "hf-dinov3"},
    **{"clip": "hf-clip", "clip_vision_model": "hf-clip"},
    **{"siglip": "hf-siglip", "siglip_vision_model": "hf-siglip"},
    **{"siglip2": "hf-siglip2", "siglip2_vision_model": "hf-siglip2"},
}
UNUSED = "unused."  # in front of the keys that the model does not use: a text tower, a decoder, a mask token

_GELUS: dict[str, Gelu] = {
    **{"gelu": "erf", "gelu_python": "erf", "quick_gelu": "quick"},
    **{"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu_fast": "tanh"},
}
_ACTIVATIONS = {"erf": "gelu", "tanh": "gelu_pytorch_tanh", "quick": "quick_gelu"}
# Fields that config.json states, whatever their value, or that `write` converts.
_FREE = {
    *("depth", "width", "mlp", "heads", "patch", "image", "channels", "norm_eps", "gelu", "resize", "class_position"),
    *("dropout", "attention_dropout", "stochastic_depth"),
}
_TABLES = ("1d", "2d", "sincos2d", "none")  # positions that can be written as a learned table
_LABELS = {
    **{"layer_scale": "LayerScale", "representation": "the tanh layer of the pre-training head"},
    **{"stem": "a hybrid's ResNet", "axial": "axial blocks", "registers": "registers", "position": "positions"},
}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The names of a family's tensors; names of a block's are below `block`, names of absent parts are empty."""

    patches: str
    positions: str
    block: str  # with {} for the index
    norm1: str
    queries: str
    keys: str
    values: str
    out: str
    norm2: str
    hidden: str
    output: str
    norm: str
    class_token: str = ""
    registers: str = ""
    pre_norm: str = ""
    pooled_norm: str = ""  # the final norm, where it comes after pooling
    gates: tuple[str, ...] = ()  # the first layer of a SwiGLU: gate and value together, or each by itself
    gated_output: str = ""
    scales: tuple[str, str] = ("", "")
    bias_table: str = ""
    embedding: bool = False  # positions are an nn.Embedding, (rows, dim) instead of (1, rows, dim)

    def in_block(self, index: int, name: str) -> str:
        """The full name of a part of a block."""
        return f"{self.block.format(index)}.{name}"


def layout_entries(names: Layout, c: ViTConfig) -> list[Entry]:
    """The entries of everything up to the final norm."""
    entries = [Entry(f"{names.patches}.weight", "embed.weight", (c.width, c.channels, c.patch, c.patch))]
    entries += [Entry(f"{names.patches}.bias", "embed.bias", (c.width,))] if c.patch_bias else []
    token = (c.width,) if names.embedding else (1, 1, c.width)
    entries += [Entry(names.class_token, "class_token", token)] if c.class_token else []
    entries += [Entry(names.registers, "registers", (1, c.registers, c.width))] if c.registers else []
    entries += _positions(names, c) if c.position == "1d" else []
    entries += norm(names.pre_norm, "pre_norm", c.width) if c.pre_norm else []
    for i in range(c.depth):
        entries += _block(names, names.block.format(i), f"blocks.{i}", c)
    if c.norm_place == "none":
        return entries
    pooled = c.norm_place == "features" and names.pooled_norm
    return entries + norm(names.pooled_norm if pooled else names.norm, "norm", c.width)


def _positions(names: Layout, c: ViTConfig) -> list[Entry]:
    rows, columns = c.grid(c.image)
    n, first, lead = rows * columns, int(c.class_row), () if names.embedding else (1,)
    table = Entry(names.positions, "positions.0.table", (*lead, n, c.width), rows=(first, first + n))
    row = Entry(names.positions, "positions.0.class_row", (*lead, 1, c.width), rows=(0, 1))
    return [row, table] if first else [table]


def _block(names: Layout, theirs: str, ours: str, c: ViTConfig) -> list[Entry]:
    entries = norm(f"{theirs}.{names.norm1}", f"{ours}.norm1", c.width)
    entries += _projections(names, theirs, f"{ours}.attention", c)
    entries += linear(f"{theirs}.{names.out}", f"{ours}.attention.out", c.width, c.width)
    entries += norm(f"{theirs}.{names.norm2}", f"{ours}.norm2", c.width)
    if c.swiglu:
        n, rows = len(names.gates), 2 * c.mlp // len(names.gates)
        for k, gate in enumerate(names.gates):
            key, hidden = f"{theirs}.{gate}", f"{ours}.mlp.hidden"
            entries.append(Entry(f"{key}.weight", f"{hidden}.weight", (rows, c.width), part=(k, n)))
            entries.append(Entry(f"{key}.bias", f"{hidden}.bias", (rows,), part=(k, n)))
    else:
        entries += linear(f"{theirs}.{names.hidden}", f"{ours}.mlp.hidden", c.width, c.mlp)
    output = names.gated_output if c.swiglu else names.output
    entries += linear(f"{theirs}.{output}", f"{ours}.mlp.output", c.mlp, c.width)
    if c.layer_scale:
        entries += [Entry(f"{theirs}.{names.scales[k - 1]}", f"{ours}.scale{k}.scale", (c.width,)) for k in (1, 2)]
    if c.position == "bias":
        n, key, relative = bias_rows(c), f"{theirs}.{names.bias_table}", f"{ours}.attention.relative"
        entries.append(Entry(key, f"{relative}.table", (n, c.heads), rows=(0, n)))
        entries.append(Entry(key, f"{relative}.class_table", (3, c.heads), rows=(n, n + 3)))
    return entries


def _projections(names: Layout, theirs: str, ours: str, c: ViTConfig) -> list[Entry]:
    """Queries, keys and values: each fills a third of our projection and bias; half of a bias that keys do not have."""
    keys = [f"{theirs}.{name}" for name in (names.queries, names.keys, names.values)]
    entries = [
        Entry(f"{key}.weight", f"{ours}.qkv.weight", (c.width, c.width), part=(k, 3)) for k, key in enumerate(keys)
    ]
    if not c.qkv_bias:
        return entries
    biased, bias = (keys, "qkv.bias") if c.key_bias else (keys[::2], "qv_bias")
    n = len(biased)
    return entries + [Entry(f"{key}.bias", f"{ours}.{bias}", (c.width,), part=(k, n)) for k, key in enumerate(biased)]


def bias_rows(c: ViTConfig) -> int:
    """The rows of a table of relative biases, without the three of the class token."""
    rows, columns = c.grid(c.image)
    return (2 * rows - 1) * (2 * columns - 1)


# ---------------------------------------------------------------------------------------------------------- reading


def model_type(header: CheckpointHeader) -> str | None:
    return (header.config or {}).get("model_type")


def vision_config(header: CheckpointHeader) -> dict[str, Any]:
    """config.json or, of two towers, its part about images; where older files have that twice, the second counts."""
    config = dict(header.config or {})
    if "vision_config" not in config:
        return config
    return {**(config["vision_config"] or {}), **(config.get("vision_config_dict") or {})}


def read_settings(header: CheckpointHeader, names: Layout, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a ViTConfig that all families read alike, from shapes and config.json.

    Args:
        header: the checkpoint.
        names: the family's layout.
        defaults: the values of its configuration class in transformers, for keys that config.json leaves out.
    """
    kind = model_type(header)
    if kind is not None and kind not in FAMILIES:
        raise UserError(f'its model_type "{kind}" is not supported: `vitral list formats` shows what is.')
    config = {**defaults, **vision_config(header)}
    width, channels, patch, _ = header.shape(f"{names.patches}.weight", 4)
    depth = header.count(re.escape(names.block).replace(r"\{\}", r"(\d+)") + r"\.")
    gated = bool(names.gates) and header.has(names.in_block(0, f"{names.gates[0]}.weight"))
    first = names.gates[0] if gated else names.hidden
    rows = header.shape(names.in_block(0, f"{first}.weight"), 2)[0]
    stated = vision_config(header).get("num_attention_heads") or (defaults["num_attention_heads"] if kind else None)
    heads = header.hints.heads or stated or heads_of(header, depth, width)
    head_dim = config.get("head_dim", width // heads)
    if head_dim * heads != width:
        raise UserError(f'its "head_dim" of {head_dim} is not its width of {width} divided by its {heads} heads.')
    agrees(header, "num_hidden_layers", depth)
    table = bool(names.positions) and (header.has(names.positions) or not names.bias_table)
    return {
        **{"depth": depth, "width": width, "heads": heads, "patch": patch, "channels": channels},
        "mlp": rows // 2 if gated and len(names.gates) == 1 else rows,
        "swiglu": gated,
        "image": _image(header, names, config, patch) if table else _stated_image(config, patch),
        "class_token": bool(names.class_token),
        "position": "1d" if table else "none",
        "gelu": "erf" if gated else _gelu(config["hidden_act"]),
        "norm_eps": float(config["layer_norm_eps"]),
        "layer_scale": bool(names.scales[0]) and header.has(names.in_block(0, names.scales[0])),
        **_biases(header, names),
        "dropout": float(config.get("hidden_dropout_prob") or 0.0),
        "attention_dropout": float(
            config.get("attention_probs_dropout_prob") or config.get("attention_dropout") or 0.0
        ),
        "resize": "hf",
    }


def agrees(header: CheckpointHeader, key: str, value: Any) -> None:
    """Refuse a config.json that contradicts the tensors: transformers would ignore tensors or make up new ones."""
    stated = vision_config(header).get(key, value)
    if stated != value:
        raise UserError(f'its config.json states "{key}": {stated}, but its tensors show {value}.')


def requires(header: CheckpointHeader, **values: Any) -> None:
    """Refuse a config.json that changes the computation in a way that is not supported."""
    for key, value in values.items():
        stated = vision_config(header).get(key, value)
        if stated != value:
            raise UserError(f'its config.json states "{key}": {stated}, which is not supported: only {value} is.')


def _gelu(activation: str) -> Gelu:
    if activation not in _GELUS:
        raise UserError(f'the file\'s activation "{activation}" is not supported: only GELU is.')
    return _GELUS[activation]


def _biases(header: CheckpointHeader, names: Layout) -> dict[str, bool]:
    q, k, v = (header.has(names.in_block(0, f"{name}.bias")) for name in (names.queries, names.keys, names.values))
    if q != v or (k and not q):
        raise UserError("only some of its queries, keys and values have a bias: that is not supported.")
    return {"qkv_bias": q, "key_bias": k or not q}


def _image(header: CheckpointHeader, names: Layout, config: Mapping[str, Any], patch: int) -> Size:
    """The image size whose patches fill the position table, after the row of the class token."""
    rows = header.shape(names.positions, 2 if names.embedding else 3)[-2] - bool(names.class_token)
    if config.get("image_size") and not header.hints.grid:
        height, width = _stated_image(config, patch)
        if (height // patch) * (width // patch) == rows:
            return height, width
    grid = grid_of_rows(header, rows)
    return grid[0] * patch, grid[1] * patch


def _stated_image(config: Mapping[str, Any], patch: int) -> Size:
    size = config.get("image_size") or 14 * patch
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return height, width


def assumed(header: CheckpointHeader, c: ViTConfig, parts: Mapping[str, str]) -> tuple[str, ...]:
    """What a reader must know: settings that no config.json states, and parts of the file that are not read.

    Args:
        header: the checkpoint.
        c: the architecture that was derived from it.
        parts: the words for unused tensors, by a pattern of their keys.
    """
    notes = []
    if model_type(header) is None:
        notes.append(
            f"config.json does not state the model: {c.heads} heads, {c.gelu} GELU and a LayerNorm epsilon of "
            f"{c.norm_eps:g} assumed"
        )
    for pattern, words in parts.items():
        count = sum(bool(re.match(f"{re.escape(UNUSED)}(?:{pattern})", key)) for key in header.shapes)
        notes += [f"{words} not read ({count} tensor{'s' * (count > 1)})"] if count else []
    return tuple(notes)


def classes_of(header: CheckpointHeader, key: str = "classifier") -> int:
    """The rows of a head; 0 without one."""
    return header.shape(f"{key}.weight", 2)[0] if header.has(f"{key}.weight") else 0


# ---------------------------------------------------------------------------------------------------------- writing


@dataclass(frozen=True)
class Variant:
    """A class of transformers, and the architectures it can express."""

    model: str
    classifier: bool
    accepts: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # other than a field's default; (): any value
    reason: Callable[[ViTConfig], str | None] = lambda c: None  # why it cannot express an architecture nevertheless

    def unmet(self, c: ViTConfig) -> str | None:
        """Why this class cannot express an architecture."""
        skipped = _FREE | ({"classes"} if c.classes else {"classes", "head_bias"})
        for item in fields(c):
            allowed = self.accepts.get(item.name, _TABLES if item.name == "position" else (item.default,))
            value = getattr(c, item.name)
            if allowed and item.name not in skipped and value not in allowed:
                label = f" ({_LABELS[item.name]})" if item.name in _LABELS else ""
                return f"{self.model} has {item.name}={' or '.join(map(repr, allowed))}{label}, not {_brief(value)}"
        return self.reason(c)


def _brief(value: Any) -> str:
    return repr(value) if isinstance(value, bool | int | float | str) else type(value).__name__


def choose(variants: tuple[Variant, ...], c: ViTConfig) -> Variant | str:
    """The class that can express an architecture, or why none can."""
    candidates = [variant for variant in variants if variant.classifier == bool(c.classes)]
    if not candidates:
        return "it is for backbones without a classifier: load with classes=0 first"
    candidates.sort(key=lambda variant: c.pool not in variant.accepts.get("pool", ("token",)))  # the nearest first
    reasons = [variant.unmet(c) for variant in candidates]
    return next((v for v, reason in zip(candidates, reasons, strict=True) if reason is None), str(reasons[0]))


def chosen(variants: tuple[Variant, ...], c: ViTConfig) -> str:
    """The name of the class that expresses an architecture, which `unsupported` has accepted."""
    variant = choose(variants, c)
    assert isinstance(variant, Variant), variant
    return variant.model


def unsupported(variants: tuple[Variant, ...]) -> Callable[[Architecture], str | None]:
    """`Format.unsupported_reason` for these classes."""

    def reason(architecture: Architecture) -> str | None:
        if not isinstance(architecture, ViTConfig):
            return "it is for Vision Transformers, not ResNets"
        variant = choose(variants, architecture)
        return variant if isinstance(variant, str) else None

    return reason


def square_only(c: ViTConfig) -> str | None:
    """transformers derives the grid of most families from one side, or from the root of the number of patches."""
    return None if c.image[0] == c.image[1] else "it is for square images only"


def shared_config(card: Card) -> dict[str, Any]:
    """The keys of config.json that most families share, and the names of the classes."""
    c = card.architecture
    assert isinstance(c, ViTConfig)
    height, width = c.image
    return {
        "hidden_size": c.width,
        "num_hidden_layers": c.depth,
        "num_attention_heads": c.heads,
        "intermediate_size": c.mlp,
        "image_size": height if height == width else [height, width],
        "patch_size": c.patch,
        "num_channels": c.channels,
        "hidden_act": _ACTIVATIONS[c.gelu],
        "layer_norm_eps": c.norm_eps,
        "hidden_dropout_prob": c.dropout,
        "attention_probs_dropout_prob": c.attention_dropout,
        "qkv_bias": c.qkv_bias,
        **labels(card),
    }


def labels(card: Card) -> dict[str, Any]:
    """id2label and label2id, which tell transformers the number of classes, too."""
    names = card.class_names or tuple(f"LABEL_{i}" for i in range(card.architecture.classes))
    if not names:
        return {}
    return {
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
    }
