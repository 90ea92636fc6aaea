"""timm's Vision Transformers, a safetensors file alone or with timm's config.json; and torchvision's.

timm reads what is written here with `timm.create_model("local-dir:FOLDER", pretrained=True)`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from vitral.architecture import Architecture, ModelConfig, RopeConfig, ViTConfig
from vitral.checkpoints.card import Card
from vitral.checkpoints.formats.hf_config import square_only
from vitral.checkpoints.formats.layout import Layout, layout_entries, plain_architecture, timm_layout
from vitral.checkpoints.formats.table import CheckpointHeader, Entry, Format, Hints, later_parts, other_epsilon
from vitral.checkpoints.formats.timm_arguments import POOLS, arguments_of
from vitral.checkpoints.formats.timm_reading import INDEX, file_entries, named_factory, read_header
from vitral.checkpoints.processors import from_timm, to_timm
from vitral.errors import UserError

_PARTS = ("patch_embed.", "blocks.0.")
_OTHERS = ("mask_token", "masked_embed", "register_tokens", "storage_tokens")  # of DINO's, iBOT's and BEiT's code

# (norm_eps, swiglu, post_norm) -> an architecture of timm with these layers
_VIT_BASES = {
    (1e-6, False, False): "vit_base_patch16_224",
    (1e-5, False, False): "vit_base_patch16_clip_224",
    (1e-6, True, False): "vit_giant_patch14_dinov2",
    (1e-6, False, True): "vit_base_patch16_rpn_224",
}
# (norm_eps, layer_scale) -> an architecture of timm's Eva; those of 1e-5 without LayerScale all have a RoPE reference
_EVA_BASES = {
    (1e-6, False): "eva_giant_patch14_224",
    (1e-6, True): "eva_giant_patch14_224",
    (1e-5, False): "vit_pe_spatial_base_patch16_512",
    (1e-5, True): "vit_base_patch16_dinov3",
}


def _recognises(header: CheckpointHeader) -> bool:
    if named_factory(header) and all(any(key.startswith(part) for key in header.shapes) for part in _PARTS):
        return True  # also one that is then refused by its name
    projections = ("blocks.0.attn.qkv.weight", "blocks.0.attn.q_proj.weight")
    plain = header.has("patch_embed.proj.weight") and any(header.has(key) for key in projections)
    return plain and not any(header.has(key) for key in _OTHERS)


def _class_names(header: CheckpointHeader) -> tuple[str, ...]:
    names = (header.config or {}).get("label_names")
    return tuple(names) if isinstance(names, list) else ()


def unsupported_reason(architecture: Architecture) -> str | None:
    """Why formats of plain Vision Transformers in PyTorch, without timm's later parts, cannot hold an architecture."""
    reason = _encoder_reason(architecture)
    return later_parts(architecture) if reason is None and isinstance(architecture, ViTConfig) else reason


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
    return _reason(architecture)


def _alone(c: ViTConfig) -> str | None:
    """What a reader of the file without config.json takes for granted, ours as an example."""
    plain = replace(c, dropout=0.0, attention_dropout=0.0, stochastic_depth=0.0, resize="timm")
    shapes = {entry.theirs: entry.shape for entry in _entries(c)}
    rows, columns = c.grid(c.image)
    shapes |= {"pos_embed": (1, int(c.class_row) + rows * columns, c.width)} if c.position == "1d" else {}
    hints = Hints(grid=(rows, columns), heads=c.heads)
    try:
        back = read_header(CheckpointHeader(shapes, hints=hints)).architecture
    except UserError:
        return "its tensors do not state all of its architecture"
    back = replace(back, image=c.image, resize="timm")
    if back.gelu != c.gelu:
        return "timm assumes the exact (erf) GELU"
    if back.pool != c.pool and c.norm_place == "tokens":
        return "timm assumes that the class token is the feature"
    if back.pool != c.pool:
        return "timm assumes that a last LayerNorm after pooling follows a mean"
    return None if back == plain else "its tensors do not state all of its architecture"


def pretrained_cfg(card: Card, c: ModelConfig) -> dict[str, Any]:
    """What config.json states of images and classes."""
    return {"input_size": [c.channels, *c.image], "num_classes": c.classes, **to_timm(card.preprocess, c.image)}


def _config(card: Card, c: ViTConfig) -> dict[str, Any]:
    model = _class_of(c)
    assert model is not None
    arguments = arguments_of(model, c)
    bases = {
        "VisionTransformer": _VIT_BASES.get((c.norm_eps, c.swiglu, c.post_norm)),
        "Eva": _EVA_BASES[c.norm_eps, c.layer_scale],
        "Beit": "beit_base_patch16_224",
    }
    config: dict[str, Any] = {
        "architecture": bases[model],  # every size is in the arguments
        "num_classes": c.classes,
        "num_features": c.width,
        "global_pool": arguments["global_pool"],
        "model_args": arguments,
        "pretrained_cfg": pretrained_cfg(card, c),
    }
    return {**config, "label_names": list(card.class_names)} if card.class_names else config


# ------------------------------------------------------------------------------------------------ writing for timm
#
# config.json cannot name classes, so an architecture of timm whose factory sets them is the base; all else is
# overridden. timm drops arguments that are null, so what a factory sets cannot be unset.


def _class_of(c: ViTConfig) -> str | None:
    """The class of timm that can hold an architecture, None if there is none."""
    reasons = {"VisionTransformer": _vit_reason, "Eva": _eva_reason, "Beit": _beit_reason}
    return next((model for model, reason in reasons.items() if not reason(c)), None)


def _reason(c: ViTConfig) -> str | None:
    """Why no class of timm can hold a Vision Transformer without a stem."""
    if _class_of(c):
        return None
    if c.position == "bias":
        return _beit_reason(c)
    return _eva_reason(c) if c.rope or not c.key_bias else _vit_reason(c)


def _entries(c: ViTConfig) -> list[Entry]:
    """The table of the class of timm that holds an architecture."""
    model = _class_of(c)
    gates = c.swiglu and (model == "Beit" or (model == "Eva" and c.mlp_norm))
    return layout_entries(timm_layout(gamma=model in ("Eva", "Beit"), separate_gate=gates), c)


def _general_reason(c: ViTConfig) -> str | None:
    if c.pool not in POOLS.values():
        return f'it does not have the pooling "{c.pool}"'
    if not c.head_bias:
        return "its heads have a bias"
    if c.patch_bias == c.pre_norm:
        return "its patch embedding has a bias if and only if there is no LayerNorm before the blocks"
    if c.norm_eps not in (1e-5, 1e-6):
        return f"it implies a LayerNorm epsilon of 1e-5 or 1e-6, not {c.norm_eps:g}"
    return None


def _vit_reason(c: ViTConfig) -> str | None:
    if reason := _general_reason(c):
        return reason
    if c.rope or c.position == "bias" or (c.qkv_bias and not c.key_bias):
        return "its VisionTransformer has neither RoPE nor relative positions, and its keys have a bias"
    if (c.norm_eps, c.swiglu, c.post_norm) not in _VIT_BASES:
        return f"it has no architecture with this combination: {_combination(c)}"
    if c.pool == "map" and c.swiglu:
        return "its attention pooling beside SwiGLU has no GELU"
    if c.pool == "map" and (c.map_heads not in (0, c.heads) or c.map_mlp not in (0, c.mlp)):
        return "its attention pooling has the heads and the MLP of the blocks"
    return None


def _eva_reason(c: ViTConfig) -> str | None:
    if reason := _general_reason(c):
        return reason
    if c.position == "bias":
        return "its Eva has no relative positions"
    if c.gelu != "erf" and not (c.swiglu and c.pool != "map"):
        return "its models with RoPE, or without a bias of the keys, have the exact (erf) GELU"
    if c.post_norm and c.qk_norm:
        return "its blocks with norms after the branches do not normalise queries and keys"
    if c.pool == "map" and c.prefix and not c.map_prefix:
        return "its attention pooling reads all tokens after RoPE"
    if c.rope and (reason := _rope_reason(c, c.rope)):
        return reason
    return None


def _rope_reason(c: ViTConfig, rope: RopeConfig) -> str | None:
    dinov3 = rope.coordinates == "center"
    if rope.periods != "float32" or (rope.pairs == "halves") != dinov3 or (dinov3 and (rope.learned or rope.offset)):
        return "its RoPE is that of EVA, of DINOv3 in float32, or learned"
    if dinov3 and (rope.axes != "yx" or rope.reference):
        return "its RoPE with centered coordinates has neither other axes nor a reference grid"
    if rope.learned and (rope.offset or rope.reference):
        return "its learned RoPE has neither an offset nor a reference grid"
    if not (dinov3 or rope.learned or rope.reference) and (c.norm_eps, c.layer_scale) == (1e-5, False):
        return f"it has no architecture with this combination: {_combination(c)}, RoPE without a reference grid"
    return None


def _beit_reason(c: ViTConfig) -> str | None:
    if reason := _general_reason(c):
        return reason
    if c.position != "bias" or c.rope or c.norm_eps != 1e-6 or c.gelu != "erf":
        return "its Beit has relative positions, the exact (erf) GELU and a LayerNorm epsilon of 1e-6"
    if not c.class_token or c.registers or (c.qkv_bias and c.key_bias):
        return "its Beit has a class token, no registers, and no bias of the keys"
    if c.pre_norm or c.post_norm or c.qk_norm or c.attention_norm:
        return "its Beit has no further norms"
    rows, columns = c.grid(c.image)
    if rows != columns:  # timm 1.0 resizes such a table on loading, as if it were square, and fails
        return f"it loads relative positions of square grids only, not of {rows}x{columns}"
    if (c.pool, c.norm_place) not in (("mean", "features"), ("token", "tokens")):
        return "its Beit pools by the mean before the last LayerNorm, or by the class token after it"
    return None


def _combination(c: ViTConfig) -> str:
    parts = [f"epsilon {c.norm_eps:g}", *(["SwiGLU"] if c.swiglu else []), *(["post-norm"] if c.post_norm else [])]
    return ", ".join(parts)


TIMM = Format(
    name="timm",
    title="timm (safetensors, or a folder with its config.json)",
    recognises=_recognises,
    architecture=lambda header: read_header(header).architecture,
    entries=_entries,
    file_entries=lambda header, c: file_entries(header),
    unsupported_reason=_unsupported_reason,
    ignored=rf".*{INDEX}$",
    positions=("1d", "none", "bias"),
    # With registers, timm has a position row for every prefix token or for none.
    class_row=lambda c: "folded" if c.registers else "either",
    assumptions=lambda header, c: read_header(header).assumed,
    preprocess=lambda header, c: from_timm((header.config or {}).get("pretrained_cfg") or {}, c.image),
    class_names=_class_names,
    config=_config,
    alone=_alone,
)


# ------------------------------------------------------------------------------------------------------ torchvision

_TORCHVISION = Layout(
    patches="conv_proj",
    positions="encoder.pos_embedding",
    class_token="class_token",
    block="encoder.layers.encoder_layer_{}",
    norm1="ln_1",
    qkv=("self_attention.in_proj",),
    qkv_separator="_",
    out="self_attention.out_proj",
    norm2="ln_2",
    hidden="mlp.0",
    output="mlp.3",
    norm="encoder.ln",
    head_hidden="heads.pre_logits",
    head="heads.head",
)


def _torchvision_renames(keys: Iterable[str]) -> dict[str, str]:
    """Releases before 0.13 named the layers of the MLP linear_1 and linear_2; a new head may be put into `heads`."""
    older = {"linear_1": "0", "linear_2": "3"}
    keys = {key: re.sub(r"\.mlp\.(linear_[12])\.", lambda m: f".mlp.{older[m[1]]}.", key) for key in keys}
    return {key: re.sub(r"^heads\.(weight|bias)$", r"heads.head.\1", new) for key, new in keys.items()}


def _torchvision_unsupported_reason(architecture: Architecture) -> str | None:
    general = unsupported_reason(architecture)
    if general or not isinstance(architecture, ViTConfig):
        return general
    c = architecture
    if c.pool != "token" or c.registers or c.layer_scale:
        return "it needs a class token, and does not support registers or LayerScale"
    if c.gelu != "erf":
        return "it implies the exact (erf) GELU, and these weights use the tanh one"
    return other_epsilon(c) or square_only(c)


TORCHVISION = Format(
    name="torchvision",
    title="torchvision VisionTransformer (safetensors)",
    recognises=lambda header: header.has("conv_proj.weight") and header.has("encoder.pos_embedding"),
    architecture=lambda header: plain_architecture(
        header, _TORCHVISION, representation=header.size("heads.pre_logits.weight"), resize="torchvision"
    ),
    entries=lambda c: layout_entries(_TORCHVISION, c),
    unsupported_reason=_torchvision_unsupported_reason,
    renames=_torchvision_renames,
)
