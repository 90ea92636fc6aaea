"""What Hugging Face's Vision Transformers share: the settings of config.json, and what its classes can express."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from vitral.architecture import Architecture, Gelu, Size, ViTConfig
from vitral.checkpoints.card import Card, Preprocess
from vitral.checkpoints.formats.layout import Layout, layout_entries, read_sizes
from vitral.checkpoints.formats.table import CheckpointHeader, Format, heads_of, image_of_rows
from vitral.checkpoints.processors import from_transformers, to_transformers
from vitral.errors import UserError

# The format of each model_type in config.json.
_FAMILIES = {
    **{"vit": "hf", "deit": "hf-deit", "vit_msn": "hf-msn", "ijepa": "hf-ijepa", "vit_mae": "hf-mae"},
    **{"beit": "hf-beit", "data2vec-vision": "hf-data2vec"},
    **{"dinov2": "hf-dinov2", "dinov2_with_registers": "hf-dinov2", "dinov3_vit": "hf-dinov3"},
    **{"clip": "hf-clip", "clip_vision_model": "hf-clip"},
    # Their image towers are CLIP's, with the defaults of CLIP's.
    **{"metaclip_2": "hf-clip", "metaclip_2_vision_model": "hf-clip"},
    **{"chinese_clip": "hf-clip", "chinese_clip_vision_model": "hf-clip"},
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


# ---------------------------------------------------------------------------------------------------------- reading


def model_type(header: CheckpointHeader) -> str | None:
    return (header.config or {}).get("model_type")


def is_family(header: CheckpointHeader, name: str, by_tensors: str) -> bool:
    """Whether a checkpoint is of a format, by its model_type or else as its tensors say."""
    return _FAMILIES.get(str(model_type(header)), by_tensors) == name


def vision_config(header: CheckpointHeader) -> dict[str, Any]:
    """config.json or, of two towers, its part about images; where older files have that twice, the second counts."""
    config = dict(header.config or {})
    if "vision_config" not in config:
        return config
    return {**(config["vision_config"] or {}), **(config.get("vision_config_dict") or {})}


def read_settings(header: CheckpointHeader, names: Layout, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a ViTConfig that all families read in the same way, from shapes and config.json.

    `defaults` are those of its configuration class in transformers, for keys that config.json leaves out.
    """
    kind = model_type(header)
    if kind is not None and kind not in _FAMILIES:
        larger = "vision_config" in (header.config or {})
        remedy = "save its image tower by itself, with save_pretrained" if larger else "use transformers for it"
        raise UserError(f'its model_type "{kind}" is not supported: {remedy}.')
    config = {**defaults, **vision_config(header)}
    sizes = read_sizes(header, names)
    depth, width, patch = sizes["depth"], sizes["width"], sizes["patch"]
    stated = vision_config(header).get("num_attention_heads") or (defaults["num_attention_heads"] if kind else None)
    heads = header.hints.heads or stated or heads_of(header, depth, width)
    head_dim = config.get("head_dim", width // heads)
    if head_dim * heads != width:
        raise UserError(f'its "head_dim" of {head_dim} is not its width of {width} divided by its {heads} heads.')
    agrees(header, "num_hidden_layers", depth)
    table = bool(names.positions) and (header.has(names.positions) or not names.bias_table)
    return {
        **sizes,
        "heads": heads,
        "image": _image(header, names, config, patch) if table else _stated_image(config, patch),
        "position": "1d" if table else "none",
        "gelu": "erf" if sizes["swiglu"] else _gelu(config["hidden_act"]),
        "norm_eps": float(config["layer_norm_eps"]),
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
    q, k, v = (header.has(names.in_block(0, name)) for name in names.qkv_biases)
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
        if vision_config(header).get("image_size"):
            raise UserError(
                f'its config.json states "image_size": {config["image_size"]}, but its tensors have {rows} positions '
                "of patches: use the config.json that was saved with them, or pass grid=(rows, columns)."
            )
    return image_of_rows(header, rows, patch)


def _stated_image(config: Mapping[str, Any], patch: int) -> Size:
    size = config.get("image_size") or 14 * patch
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return height, width


def _not_read(header: CheckpointHeader, parts: Mapping[str, str]) -> tuple[str, ...]:
    """Sentences about the `parts` of the file."""
    notes = []
    for pattern, words in parts.items():
        count = sum(bool(re.match(f"{re.escape(UNUSED)}(?:{pattern})", key)) for key in header.shapes)
        notes += [f"{words} not read ({count} tensor{'s' * (count > 1)})"] if count else []
    return tuple(notes)


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
                brief = repr(value) if isinstance(value, bool | int | float | str) else type(value).__name__
                return f"{self.model} has {item.name}={' or '.join(map(repr, allowed))}{label}, not {brief}"
        return self.reason(c)


def choose(variants: tuple[Variant, ...], c: ViTConfig) -> Variant | str:
    """The class that can express an architecture, or why none can."""
    candidates = [variant for variant in variants if variant.classifier == bool(c.classes)]
    if not candidates:
        return "it is for backbones without a classifier: remove that (classes=0, or --classes 0)"
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
    """torchvision and most families of transformers derive the grid from one side, or from the number of patches."""
    return None if c.image[0] == c.image[1] else "it is for square images only"


def shared_config(card: Card, c: ViTConfig) -> dict[str, Any]:
    """The keys of config.json that most families share, and the names of the classes."""
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


# ------------------------------------------------------------------------------------------------------ the format


def hf_format(
    name: str,
    title: str,
    kind: str,
    variants: tuple[Variant, ...],
    layout: Layout,
    parts: Mapping[str, str],
    notes: Callable[[CheckpointHeader, ViTConfig], tuple[str, ...]] = lambda header, c: (),
    stated: Callable[[ViTConfig], dict[str, Any]] = lambda c: {},
    **functions: Any,
) -> Format[ViTConfig]:
    """A format for `from_pretrained`: a folder with config.json, model.safetensors and preprocessor_config.json.

    `kind` is its model_type; `parts` are words for the tensors that are not read, by a pattern of their keys; `notes`
    are further assumptions; `stated` are keys of config.json, None for those that the family does not have; and
    `functions` are the other fields of a Format.
    """

    def config(card: Card, c: ViTConfig) -> dict[str, Any]:
        usual = {"architectures": [chosen(variants, c)], "model_type": kind, **shared_config(card, c)}
        return {key: value for key, value in {**usual, **stated(c)}.items() if value is not None}

    shared: dict[str, Any] = {
        "entries": lambda c: layout_entries(layout, c),
        "unsupported_reason": unsupported(variants),
        "assumptions": lambda header, c: _not_read(header, parts) + notes(header, c),
        "ignored": re.escape(UNUSED),
        "preprocess": preprocess,
        "class_names": class_names,
        "config": config,
        "preprocessor": preprocessor,
        "alone": alone,
    }
    return Format(name=name, title=title, **{**shared, **functions})


def preprocess(header: CheckpointHeader, architecture: Architecture) -> Preprocess | None:
    return from_transformers(header.preprocessor or {}, model_type(header) or "")


def class_names(header: CheckpointHeader) -> tuple[str, ...]:
    names = (header.config or {}).get("id2label")
    if not isinstance(names, dict) or all(str(name).startswith("LABEL_") for name in names.values()):
        return ()
    return tuple(str(names[key]) for key in sorted(names, key=int))


def preprocessor(card: Card) -> dict[str, Any] | None:
    return to_transformers(card.preprocess)


def alone(c: Architecture) -> str:
    return "transformers reads its shape from config.json"
