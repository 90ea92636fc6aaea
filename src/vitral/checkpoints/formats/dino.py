"""DINO, DINOv2 and DINOv3, of Hugging Face (a folder) and of Meta's own code (a file, also a pickle)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vitral.architecture import Architecture, RopeConfig, ViTConfig
from vitral.checkpoints.formats.hf_config import (
    UNUSED,
    Variant,
    agrees,
    chosen,
    hf_format,
    is_family,
    model_type,
    read_settings,
    requires,
    square_only,
    unsupported,
    vision_config,
)
from vitral.checkpoints.formats.hugging_face import LAYOUT, PARTS, hf_renames
from vitral.checkpoints.formats.layout import (
    Layout,
    layout_entries,
    plain_architecture,
    read_sizes,
    timm_layout,
)
from vitral.checkpoints.formats.table import CheckpointHeader, Format, Tensors
from vitral.checkpoints.formats.timm import unsupported_reason
from vitral.errors import UserError

_V2 = replace(
    LAYOUT,
    registers="embeddings.register_tokens",
    norm1="norm1",
    norm2="norm2",
    hidden="mlp.fc1",
    output="mlp.fc2",
    gates=("mlp.weights_in",),
    gated_output="mlp.weights_out",
    scales=("layer_scale1.lambda1", "layer_scale2.lambda1"),
)
_V3 = Layout(
    patches="embeddings.patch_embeddings",
    positions="",
    class_token="embeddings.cls_token",
    registers="embeddings.register_tokens",
    block="layer.{}",
    norm1="norm1",
    qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    out="attention.o_proj",
    norm2="norm2",
    hidden="mlp.up_proj",
    output="mlp.down_proj",
    gates=("mlp.gate_proj", "mlp.up_proj"),
    scales=("layer_scale1.lambda1", "layer_scale2.lambda1"),
    norm="norm",
)
_V2_DEFAULTS = {"num_attention_heads": 12, "hidden_act": "gelu", "layer_norm_eps": 1e-6}
_V3_DEFAULTS = {"num_attention_heads": 6, "hidden_act": "gelu", "layer_norm_eps": 1e-5, "rope_theta": 100.0}


# ----------------------------------------------------------------------------------------------------------- DINOv2


def _v2_names(header: CheckpointHeader) -> Layout:
    """In the memory of transformers 5, the gate of a SwiGLU and its value are two layers."""
    apart = header.has(_V2.in_block(0, "mlp.gate_proj.weight"))
    return replace(_V2, gates=("mlp.gate_proj", "mlp.up_proj")) if apart else _V2


def _v2_architecture(header: CheckpointHeader) -> ViTConfig:
    settings = read_settings(header, _v2_names(header), _V2_DEFAULTS)
    agrees(header, "num_register_tokens", settings["registers"])
    agrees(header, "use_swiglu_ffn", settings["swiglu"])
    agrees(header, "qkv_bias", settings["qkv_bias"])
    # The models with registers are resized with antialiasing.
    settings["resize"] = "timm" if settings["registers"] else "hf"
    return _check_heads(header, ViTConfig(**settings, pool="token+mean" if settings["classes"] else "token"))


def _check_heads(header: CheckpointHeader, c: ViTConfig) -> ViTConfig:
    """Refuse to assume heads where DINO's sizes, of 64 channels per head, have others than ViTs of that size."""
    stated = header.hints.heads or model_type(header) or vision_config(header).get("num_attention_heads")
    if not stated and c.heads * 64 != c.width:
        raise UserError(f"the file does not state its number of heads (width {c.width}): pass heads=.")
    return c


def _ratio(c: ViTConfig) -> int | None:
    """The `mlp_ratio` that gives this MLP: of a SwiGLU, two thirds of it remain, as a multiple of 8."""
    for ratio in range(1, 17):
        mlp = c.width * ratio
        if c.mlp == ((int(mlp * 2 / 3) + 7) // 8 * 8 if c.swiglu else mlp):
            return ratio
    return None


def _v2_reason(c: ViTConfig) -> str | None:
    if _ratio(c) is None:
        two_thirds = "two thirds of " if c.swiglu else ""
        return f"it needs an MLP width that is {two_thirds}a multiple of the embedding width"
    return square_only(c)


def _v2_name(c: ViTConfig) -> str:
    return "dinov2_with_registers" if c.registers else "dinov2"


def _v2_stated(c: ViTConfig) -> dict[str, Any]:
    registers: dict[str, Any] = {}
    if c.registers:
        model = chosen(_V2_CLASSES, c).replace("Dinov2", "Dinov2WithRegisters")
        registers = {"architectures": [model], "model_type": _v2_name(c), "num_register_tokens": c.registers}
    return {"intermediate_size": None, "mlp_ratio": _ratio(c), "use_swiglu_ffn": c.swiglu, **registers}


_V2_ACCEPTS = {"registers": (), "layer_scale": (True,), "swiglu": (True, False), "qkv_bias": (True, False)}
_V2_CLASSES = (
    Variant("Dinov2ForImageClassification", True, {**_V2_ACCEPTS, "pool": ("token+mean",)}, _v2_reason),
    Variant("Dinov2Model", False, _V2_ACCEPTS, _v2_reason),
)

HUGGING_FACE_DINO = hf_format(
    "hf-dinov2",
    "Hugging Face Dinov2, with and without registers (a folder)",
    "dinov2",
    _V2_CLASSES,
    recognises=lambda header: (
        header.has("encoder.layer.0.layer_scale1.lambda1") and is_family(header, "hf-dinov2", "hf-dinov2")
    ),
    layout=_V2,
    parts=PARTS,
    renames=lambda keys: {
        key: new.replace(".mlp.down_proj.", ".mlp.weights_out.") for key, new in hf_renames(keys).items()
    },
    file_entries=lambda header, c: layout_entries(_v2_names(header), c),
    architecture=_v2_architecture,
    stated=_v2_stated,
    file_key=lambda key, c: f"{_v2_name(c)}.{key}" if c.classes and not key.startswith("classifier.") else key,
    zeros=lambda c: {"embeddings.mask_token": (1, c.width)},
)


# ----------------------------------------------------------------------------------------------------------- DINOv3


def _v3_renames(keys: Iterable[str]) -> dict[str, str]:
    """In the memory of transformers 5, the layers are below "model."."""
    unused = re.compile(r"embeddings\.mask_token$|rope_embeddings\.")
    renamed = {key: key.removeprefix("model.") for key in keys}
    return {key: UNUSED + new if unused.match(new) else new for key, new in renamed.items()}


def _v3_architecture(header: CheckpointHeader) -> ViTConfig:
    """The architecture of a DINOv3.

    transformers computes RoPE's periods in float32, as timm does, so that is what these folders are read as. Meta's own
    code computes them in bfloat16 where its weights are: `RopeConfig.periods` is then "bfloat16". Shift, jitter and
    rescaling of the coordinates are for training alone.
    """
    requires(header, proj_bias=True, mlp_bias=True)
    config = {**_V3_DEFAULTS, **vision_config(header)}
    settings = read_settings(header, _V3, _V3_DEFAULTS)
    agrees(header, "use_gated_mlp", settings["swiglu"])
    agrees(header, "key_bias", settings["key_bias"] and settings["qkv_bias"])
    agrees(header, "query_bias", settings["qkv_bias"])
    if settings["swiglu"] and config["hidden_act"] != "silu" and model_type(header):
        raise UserError(f'its gated MLP has the activation "{config["hidden_act"]}": only silu is supported.')
    rope = RopeConfig(temperature=float(_theta(config)), pairs="halves")
    agrees(header, "num_register_tokens", settings["registers"])
    return _check_heads(header, ViTConfig(**settings, rope=rope))


def _theta(config: dict[str, Any]) -> float:
    """RoPE's temperature, which other versions of transformers state among `rope_parameters`."""
    parameters = config.get("rope_parameters") or {}
    kind = parameters.get("rope_type", "default")
    if kind != "default":
        raise UserError(f'its RoPE is of the type "{kind}": only the default is supported.')
    return parameters.get("rope_theta", config["rope_theta"])


def _v3_reason(c: ViTConfig) -> str | None:
    if c.rope is None or c.rope != RopeConfig(temperature=c.rope.temperature, pairs="halves"):
        return "its RoPE turns by the centers of patches, with halves of a head as pairs and periods in float32"
    return None


def _v3_stated(c: ViTConfig) -> dict[str, Any]:
    assert c.rope is not None
    return {
        **dict.fromkeys(("qkv_bias", "hidden_dropout_prob", "attention_probs_dropout_prob")),
        "attention_dropout": c.attention_dropout,
        **({"hidden_act": "silu"} if c.swiglu else {}),
        "use_gated_mlp": c.swiglu,
        "query_bias": c.qkv_bias,
        "value_bias": c.qkv_bias,
        "key_bias": c.qkv_bias and c.key_bias,
        "num_register_tokens": c.registers,
        "rope_theta": c.rope.temperature,
    }


_V3_CLASSES = (
    Variant(
        "DINOv3ViTModel",
        classifier=False,
        accepts={
            **{"registers": (), "layer_scale": (True,), "swiglu": (True, False), "rope": (), "position": ("none",)},
            **{"qkv_bias": (True, False), "key_bias": (True, False)},
        },
        reason=_v3_reason,
    ),
)

HUGGING_FACE_DINOV3 = hf_format(
    "hf-dinov3",
    "Hugging Face DINOv3 ViTs (a folder)",
    "dinov3_vit",
    _V3_CLASSES,
    recognises=lambda header: (
        header.has("layer.0.attention.q_proj.weight") and is_family(header, "hf-dinov3", "hf-dinov3")
    ),
    layout=_V3,
    parts=PARTS,
    renames=_v3_renames,
    # A model without registers has a tensor of none.
    unpack=lambda tensors, c: {key: one for key, one in tensors.items() if key != _V3.registers or one.shape[1]},
    architecture=_v3_architecture,
    stated=_v3_stated,
    zeros=lambda c: {
        "embeddings.mask_token": (1, 1, c.width),
        **({} if c.registers else {"embeddings.register_tokens": (1, 0, c.width)}),
    },
    positions=("none",),
)


# -------------------------------------------------------------------------------------- DINO and DINOv2 in Meta's names

_DINO = replace(timm_layout(), registers="register_tokens", gates=(), pooled_norm="")
_CHUNK = re.compile(r"^blocks\.\d+\.(\d+)\.")  # sharded training groups the blocks: blocks.CHUNK.INDEX


def _dino_unsupported_reason(architecture: Architecture) -> str | None:
    general = unsupported_reason(architecture)
    if general or not isinstance(architecture, ViTConfig):
        return general
    c = architecture
    if c.classes or c.representation:
        return "it is for backbones without a classifier: remove that (classes=0, or --classes 0)"
    if c.pool != "token":
        return "its feature is the class token"
    if c.gelu != "erf" or c.norm_eps != 1e-6:
        return "it implies the exact (erf) GELU and a LayerNorm epsilon of 1e-6"
    return square_only(c)


DINO = Format(
    name="dino",
    title="DINO and DINOv2 backbones (safetensors)",
    recognises=lambda header: all(map(header.has, ("blocks.0.attn.qkv.weight", "cls_token", "pos_embed"))),
    # The models with registers were released with antialiasing and without the offset of 0.1.
    architecture=lambda header: plain_architecture(
        header, _DINO, classes=0, resize="timm" if header.has("register_tokens") else "dino"
    ),
    entries=lambda c: layout_entries(_DINO, c),
    unsupported_reason=_dino_unsupported_reason,
    renames=lambda keys: {key: _CHUNK.sub(r"blocks.\1.", key) for key in keys},
    # Of the pre-training: projection heads, and the decoder of MAE, whose files have the same names.
    ignored=r"mask_token$|masked_embed$|(dino_|ibot_)head\.|head\.(mlp|last_layer)\.|decoder_",
    # DINOv2's model always has a mask token, which only its pre-training uses.
    zeros=lambda c: {"mask_token": (1, c.width)} if c.layer_scale or c.registers else {},
)


# ------------------------------------------------------------------------------------------ DINOv3 in Meta's names
#
# Its files store RoPE's periods as bfloat16 rounded them, and Meta's code computes with these; timm and transformers
# recompute them, in float32. So a file is read with `RopeConfig.periods` "bfloat16", and others are refused.

_PERIODS = "rope_embed.periods"
_QKV_BIAS = "attn.qkv.bias"  # of queries and values alone, after `_dinov3_unpack`
_DINOV3 = replace(
    timm_layout(),
    registers="storage_tokens",
    qv_biases=(_QKV_BIAS,),
    gates=("mlp.w1", "mlp.w2"),
    gated_output="mlp.w3",
    pooled_norm="",
)
_ROPE = RopeConfig(temperature=100.0, periods="bfloat16")


def _dinov3_architecture(header: CheckpointHeader) -> ViTConfig:
    sizes = read_sizes(header, _DINOV3)
    bias, masked = header.has("blocks.0.attn.qkv.bias"), header.has("blocks.0.attn.qkv.bias_mask")
    sizes |= {
        "heads": sizes["width"] // (4 * max(header.shape(_PERIODS, 1)[0], 1)),
        "image": (14 * sizes["patch"], 14 * sizes["patch"]),
        **{"classes": 0, "position": "none", "rope": _ROPE, "norm_eps": 1e-5, "gelu": "erf"},
        **{"qkv_bias": bias, "key_bias": not (bias and masked)},
    }
    return ViTConfig(**sizes)


def _dinov3_unpack(tensors: Tensors, c: ViTConfig) -> Tensors:
    """Check the periods, and reduce biases to those of queries and values if a mask hides those of keys."""
    tensors = dict(tensors)
    stored = tensors.pop(_PERIODS, None)
    if stored is None or not torch.equal(stored.float(), _periods(c)):
        raise UserError("its RoPE periods are not those of the released models: convert it with its own code first.")
    for i in range(c.depth if c.qkv_bias and not c.key_bias else 0):
        key = _DINOV3.in_block(i, _QKV_BIAS)
        bias, mask = tensors.get(key), tensors.pop(f"{key}_mask", None)
        if bias is None or mask is None or bias.shape != (3 * c.width,) or not torch.equal(mask.float(), _mask(c)):
            raise UserError(f"tensor {key} has no mask that hides the keys' third of it: that is not supported.")
        tensors[key] = bias.reshape(3, c.width)[::2].flatten()
    return tensors


def _dinov3_pack(tensors: Tensors, c: ViTConfig) -> Tensors:
    tensors = {**tensors, _PERIODS: _periods(c)}
    for i in range(c.depth if c.qkv_bias and not c.key_bias else 0):
        key = _DINOV3.in_block(i, _QKV_BIAS)
        q, v = tensors[key].chunk(2)
        tensors |= {key: torch.cat([q, torch.zeros_like(q), v]), f"{key}_mask": _mask(c)}
    return tensors


def _periods(c: ViTConfig) -> Tensor:
    """(dim of a head / 4,)"""
    count = c.width // c.heads // 4
    return (_ROPE.temperature ** (torch.arange(count) / count)).bfloat16().float()


def _mask(c: ViTConfig) -> Tensor:
    """(3 * dim,): what remains of a bias of queries, keys and values."""
    return torch.tensor([1.0, 0.0, 1.0]).repeat_interleave(c.width)


def _dinov3_reason(c: ViTConfig) -> str | None:
    if c.gelu != "erf" and not c.swiglu:
        return "it implies the exact (erf) GELU"
    return None if c.norm_eps == 1e-5 else f"it implies a LayerNorm epsilon of 1e-5, not {c.norm_eps:g}"


_DINOV3_MODEL = Variant(
    "DINOv3",
    classifier=False,
    accepts={
        **{"registers": (), "position": ("none",), "rope": (_ROPE,), "layer_scale": (True, False)},
        **{"swiglu": (True, False), "qkv_bias": (True, False), "key_bias": (True, False)},
    },
    reason=_dinov3_reason,
)

DINOV3 = Format(
    name="dinov3",
    title="DINOv3 ViTs, as Meta's files (safetensors)",
    recognises=lambda header: header.has("blocks.0.attn.qkv.weight") and header.has(_PERIODS),
    architecture=_dinov3_architecture,
    entries=lambda c: layout_entries(_DINOV3, c),
    unsupported_reason=unsupported((_DINOV3_MODEL,)),
    unpack=_dinov3_unpack,
    pack=_dinov3_pack,
    assumptions=lambda header, c: ("assumed: a LayerNorm epsilon of 1e-5, as of all releases; pass norm_eps= if not",),
    ignored=r"mask_token$|local_cls_norm\.",  # both are for training alone
    positions=("none",),
    zeros=lambda c: {"mask_token": (1, c.width)},
)
