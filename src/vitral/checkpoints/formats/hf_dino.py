"""Hugging Face DINOv2, with and without registers, and DINOv3: a folder for `from_pretrained`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from vitral.architecture import RopeConfig, ViTConfig
from vitral.checkpoints.card import Card
from vitral.checkpoints.formats.hf_config import (
    UNUSED,
    Variant,
    agrees,
    chosen,
    classes_of,
    hf_format,
    is_family,
    model_type,
    read_settings,
    requires,
    shared_config,
    square_only,
    vision_config,
)
from vitral.checkpoints.formats.hugging_face import LAYOUT, PARTS, hf_renames
from vitral.checkpoints.formats.layout import Layout, separate
from vitral.checkpoints.formats.table import CheckpointHeader, Shape, Tensors
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
_V3_QKV, _V3_BIASES = separate("attention.q_proj", "attention.k_proj", "attention.v_proj")
_V3 = Layout(
    patches="embeddings.patch_embeddings",
    positions="",
    class_token="embeddings.cls_token",
    registers="embeddings.register_tokens",
    block="layer.{}",
    norm1="norm1",
    qkv=_V3_QKV,
    qkv_biases=_V3_BIASES,
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
_GATE = re.compile(r"(.*\.mlp\.)gate_proj(\..*)")  # in the memory of transformers 5, gate and value are two layers


# ----------------------------------------------------------------------------------------------------------- DINOv2


def _v2_renames(keys: Iterable[str]) -> dict[str, str]:
    return {key: new.replace(".mlp.down_proj.", ".mlp.weights_out.") for key, new in hf_renames(keys).items()}


def _v2_unpack(tensors: Tensors, c: ViTConfig) -> Tensors:
    """Join a gate and its value into one layer, as files have them."""
    joined = dict(tensors)
    for key in tensors:
        match = _GATE.fullmatch(key)
        value = f"{match[1]}up_proj{match[2]}" if match else ""
        if match and value in tensors:
            joined[f"{match[1]}weights_in{match[2]}"] = torch.cat([joined.pop(key), joined.pop(value)])
    return joined


def _v2_shapes(header: CheckpointHeader) -> CheckpointHeader:
    shapes = dict(header.shapes)
    for key, shape in header.shapes.items():
        if match := _GATE.fullmatch(key):
            shapes[f"{match[1]}weights_in{match[2]}"] = (2 * shape[0], *shape[1:])
    return replace(header, shapes=shapes)


def _v2_architecture(header: CheckpointHeader) -> ViTConfig:
    header = _v2_shapes(header)
    settings = read_settings(header, _V2, _V2_DEFAULTS)
    registers, classes = _registers(header), classes_of(header)
    agrees(header, "use_swiglu_ffn", settings["swiglu"])
    agrees(header, "qkv_bias", settings["qkv_bias"])
    # The models with registers are resized with antialiasing.
    settings["resize"] = "timm" if registers else "hf"
    pool = "token+mean" if classes else "token"
    return _check_heads(header, ViTConfig(**settings, classes=classes, registers=registers, pool=pool))


def _check_heads(header: CheckpointHeader, c: ViTConfig) -> ViTConfig:
    """Refuse to assume heads where DINO's sizes, of 64 channels per head, have others than ViTs of that size."""
    stated = header.hints.heads or model_type(header) or vision_config(header).get("num_attention_heads")
    if not stated and c.heads * 64 != c.width:
        raise UserError(f"the file does not state its number of heads (width {c.width}): pass heads=.")
    return c


def _registers(header: CheckpointHeader) -> int:
    key = "embeddings.register_tokens"
    count = header.shape(key, 3)[1] if header.has(key) else 0
    agrees(header, "num_register_tokens", count)
    return count


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


def _v2_config(card: Card, c: ViTConfig) -> dict[str, Any]:
    shared = shared_config(card, c)
    del shared["intermediate_size"]
    model = chosen(_V2_CLASSES, c)
    model = model.replace("Dinov2", "Dinov2WithRegisters") if c.registers else model
    return {
        **{"architectures": [model], "model_type": _v2_name(c), "mlp_ratio": _ratio(c), "use_swiglu_ffn": c.swiglu},
        **shared,
        **({"num_register_tokens": c.registers} if c.registers else {}),
    }


_V2_ACCEPTS = {"registers": (), "layer_scale": (True,), "swiglu": (True, False), "qkv_bias": (True, False)}
_V2_CLASSES = (
    Variant("Dinov2ForImageClassification", True, {**_V2_ACCEPTS, "pool": ("token+mean",)}, _v2_reason),
    Variant("Dinov2Model", False, _V2_ACCEPTS, _v2_reason),
)

HUGGING_FACE_DINO = hf_format(
    name="hf-dinov2",
    title="Hugging Face Dinov2, with and without registers (a folder)",
    recognises=lambda header: (
        header.has("encoder.layer.0.layer_scale1.lambda1") and is_family(header, "hf-dinov2", "hf-dinov2")
    ),
    layout=_V2,
    variants=_V2_CLASSES,
    parts=PARTS,
    renames=_v2_renames,
    unpack=_v2_unpack,
    architecture=_v2_architecture,
    config=_v2_config,
    file_key=lambda key, c: f"{_v2_name(c)}.{key}" if c.classes and not key.startswith("classifier.") else key,
    zeros=lambda c: {"embeddings.mask_token": (1, c.width)},
)


# ----------------------------------------------------------------------------------------------------------- DINOv3


def _v3_renames(keys: Iterable[str]) -> dict[str, str]:
    """In the memory of transformers 5, the layers are below "model."."""
    keys = list(keys)
    renamed = {key: key.removeprefix("model.") for key in keys}
    unused = re.compile(r"embeddings\.mask_token$|rope_embeddings\.")
    return {key: UNUSED + new if unused.match(new) else new for key, new in renamed.items()}


def _v3_unpack(tensors: Tensors, c: ViTConfig) -> Tensors:
    """A model without registers has a tensor of none."""
    return {key: tensor for key, tensor in tensors.items() if key != _V3.registers or tensor.shape[1]}


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
    return _check_heads(header, ViTConfig(**settings, classes=0, registers=_registers(header), rope=rope))


def _theta(config: dict[str, Any]) -> float:
    """RoPE's temperature, which other versions of transformers state among `rope_parameters`."""
    parameters = config.get("rope_parameters") or {}
    kind = parameters.get("rope_type", "default")
    if kind != "default":
        raise UserError(f'its RoPE is of the type "{kind}": only the default is supported.')
    return parameters.get("rope_theta", config["rope_theta"])


def _v3_reason(c: ViTConfig) -> str | None:
    if c.rope != RopeConfig(temperature=c.rope.temperature if c.rope else 0.0, pairs="halves"):
        return "its RoPE turns by the centers of patches, with halves of a head as pairs and periods in float32"
    return None


def _v3_config(card: Card, c: ViTConfig) -> dict[str, Any]:
    assert c.rope is not None
    shared = shared_config(card, c)
    for key in ("qkv_bias", "hidden_dropout_prob", "attention_probs_dropout_prob"):
        del shared[key]
    return {
        **{"architectures": [chosen(_V3_CLASSES, c)], "model_type": "dinov3_vit"},
        **shared,
        "attention_dropout": c.attention_dropout,
        "hidden_act": "silu" if c.swiglu else shared["hidden_act"],
        "use_gated_mlp": c.swiglu,
        "query_bias": c.qkv_bias,
        "value_bias": c.qkv_bias,
        "key_bias": c.qkv_bias and c.key_bias,
        "num_register_tokens": c.registers,
        "rope_theta": c.rope.temperature,
    }


def _v3_zeros(c: ViTConfig) -> dict[str, Shape]:
    registers = {} if c.registers else {"embeddings.register_tokens": (1, 0, c.width)}
    return {"embeddings.mask_token": (1, 1, c.width), **registers}


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
    name="hf-dinov3",
    title="Hugging Face DINOv3 ViTs (a folder)",
    recognises=lambda header: (
        header.has("layer.0.attention.q_proj.weight") and is_family(header, "hf-dinov3", "hf-dinov3")
    ),
    layout=_V3,
    variants=_V3_CLASSES,
    parts=PARTS,
    renames=_v3_renames,
    unpack=_v3_unpack,
    architecture=_v3_architecture,
    config=_v3_config,
    zeros=_v3_zeros,
    positions=("none",),
)
