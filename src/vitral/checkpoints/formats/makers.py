"""Files of their makers' own code, without a config.json: torchvision, CLIP, DINO, DINOv2 and DINOv3.

Pickles are read; written files are safetensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from vitral.architecture import Architecture, RopeConfig, ViTConfig
from vitral.checkpoints.formats import timm
from vitral.checkpoints.formats.hf_config import Variant, square_only, unsupported
from vitral.checkpoints.formats.layout import Layout, layout_entries
from vitral.checkpoints.formats.table import (
    CheckpointHeader,
    Entry,
    Format,
    Tensors,
    grid_of_rows,
    heads_of,
    read_sizes,
)
from vitral.checkpoints.formats.timm_arguments import timm_layout
from vitral.errors import UserError

# ------------------------------------------------------------------------------------------------------ torchvision

_TORCHVISION = Layout(
    patches="conv_proj",
    positions="encoder.pos_embedding",
    class_token="class_token",
    block="encoder.layers.encoder_layer_{}",
    norm1="ln_1",
    qkv=("self_attention.in_proj_weight",),
    qkv_biases=("self_attention.in_proj_bias",),
    out="self_attention.out_proj",
    norm2="ln_2",
    hidden="mlp.0",
    output="mlp.3",
    norm="encoder.ln",
    head_hidden="heads.pre_logits",
    head="heads.head",
)


def _torchvision_renames(keys: Iterable[str]) -> dict[str, str]:
    """Releases before 0.13 named the layers of the MLP linear_1 and linear_2."""
    older = {"linear_1": "0", "linear_2": "3"}
    return {key: re.sub(r"\.mlp\.(linear_[12])\.", lambda m: f".mlp.{older[m[1]]}.", key) for key in keys}


def _torchvision_architecture(header: CheckpointHeader) -> ViTConfig:
    hidden = _TORCHVISION.in_block(0, "mlp.0.weight")
    sizes = read_sizes(header, "conv_proj.weight", hidden, r"encoder\.layers\.encoder_layer_(\d+)\.")
    grid = grid_of_rows(header, header.shape("encoder.pos_embedding", 3)[1] - 1)
    pre_logits = "heads.pre_logits.weight"
    return ViTConfig(
        **sizes,
        heads=heads_of(header, sizes["depth"], sizes["width"]),
        image=(grid[0] * sizes["patch"], grid[1] * sizes["patch"]),
        classes=header.shape("heads.head.weight", 2)[0] if header.has("heads.head.weight") else 0,
        representation=header.shape(pre_logits, 2)[0] if header.has(pre_logits) else 0,
        gelu="erf",
        resize="torchvision",
    )


def _torchvision_unsupported_reason(architecture: Architecture) -> str | None:
    general = timm.unsupported_reason(architecture)
    if general or not isinstance(architecture, ViTConfig):
        return general
    c = architecture
    if c.pool != "token" or c.registers or c.layer_scale:
        return "it needs a class token, and does not support registers or LayerScale"
    if c.gelu != "erf":
        return "it implies the exact (erf) GELU, and these weights use the tanh one"
    return None if c.norm_eps == 1e-6 else f"it implies a LayerNorm epsilon of 1e-6, not {c.norm_eps:g}"


TORCHVISION = Format(
    name="torchvision",
    title="torchvision VisionTransformer (safetensors)",
    container="safetensors",
    recognises=lambda header: header.has("conv_proj.weight") and header.has("encoder.pos_embedding"),
    architecture=_torchvision_architecture,
    entries=lambda c: layout_entries(_TORCHVISION, c),
    unsupported_reason=_torchvision_unsupported_reason,
    renames=_torchvision_renames,
)


# ------------------------------------------------------------------------------------------------------------- CLIP
#
# The image tower with the names of OpenAI's code, which OpenCLIP shares. The projection into the space of texts is a
# head without a bias, stored transposed. A file does not state its GELU: OpenAI's own models have the "quick" one,
# those that OpenCLIP trained mostly the exact one.

_BLOCK = "visual.transformer.resblocks"
_CLIP = Layout(
    patches="visual.conv1",
    positions="visual.positional_embedding",
    class_token="visual.class_embedding",
    pre_norm="visual.ln_pre",
    block=_BLOCK + ".{}",
    norm1="ln_1",
    qkv=("attn.in_proj_weight",),
    qkv_biases=("attn.in_proj_bias",),
    out="attn.out_proj",
    norm2="ln_2",
    hidden="mlp.c_fc",
    output="mlp.c_proj",
    scales=("ls_1.gamma", "ls_2.gamma"),
    norm="visual.ln_post",
    embedding=True,
)
_OPENAI = "input_resolution"  # in the state dict of OpenAI's programs only
_UNUSED = re.compile(
    r"text\.|transformer\.|token_embedding\.|positional_embedding$|ln_final\.|text_projection|logit_scale$|logit_bias$"
    r"|(input_resolution|context_length|vocab_size|attn_mask)$"
)


def _clip_architecture(header: CheckpointHeader) -> ViTConfig:
    sizes = read_sizes(header, "visual.conv1.weight", f"{_BLOCK}.0.mlp.c_fc.weight", rf"{re.escape(_BLOCK)}\.(\d+)\.")
    grid = grid_of_rows(header, header.shape("visual.positional_embedding", 2)[0] - 1)
    return ViTConfig(
        **sizes,
        heads=heads_of(header, sizes["depth"], sizes["width"]),
        image=(grid[0] * sizes["patch"], grid[1] * sizes["patch"]),
        classes=header.shape("visual.proj", 2)[1] if header.has("visual.proj") else 0,
        head_bias=False,
        patch_bias=False,
        pre_norm=header.has("visual.ln_pre.weight"),
        layer_scale=header.has(f"{_BLOCK}.0.ls_1.gamma"),
        norm_eps=1e-5,
        gelu="quick" if header.has(_OPENAI) else "erf",
        resize="timm",  # OpenCLIP resizes its positions by cubic interpolation with antialiasing
    )


def _clip_assumptions(header: CheckpointHeader, c: ViTConfig) -> tuple[str, ...]:
    gelu = (
        "quick GELU, as of OpenAI's models"
        if c.gelu == "quick"
        else "exact (erf) GELU, which OpenAI's models and OpenCLIP's with -quickgelu in their name do not have"
    )
    notes = [f"{c.heads} heads, a LayerNorm epsilon of 1e-5 and the {gelu}, assumed"]
    count = sum(bool(_UNUSED.match(key)) for key in header.shapes)
    return (*notes, f"text tower not read ({count} tensors)") if count else tuple(notes)


def _clip_entries(c: ViTConfig) -> list[Entry]:
    projection = Entry("visual.proj", "head.output.weight", (c.width, c.classes), axes=(1, 0))
    return layout_entries(_CLIP, replace(c, classes=0)) + ([projection] if c.classes else [])


def _clip_reason(c: ViTConfig) -> str | None:
    if c.norm_eps != 1e-5 or c.gelu != "erf":
        return "its file would be read with a LayerNorm epsilon of 1e-5 and the exact (erf) GELU: write hf-clip instead"
    return square_only(c)


_CLIP_ACCEPTS = {"pre_norm": (True, False), "layer_scale": (True, False), "patch_bias": (False,)}
_CLIP_TOWERS = (
    Variant("CLIP", True, {**_CLIP_ACCEPTS, "head_bias": (False,), "norm_place": ("tokens", "features")}, _clip_reason),
    Variant("CLIP", False, {**_CLIP_ACCEPTS, "norm_place": ("tokens", "features")}, _clip_reason),
)

OPEN_CLIP = Format(
    name="open_clip",
    title="CLIP as OpenAI and OpenCLIP name it, the image tower (safetensors)",
    container="safetensors",
    recognises=lambda header: header.has(f"{_BLOCK}.0.attn.in_proj_weight"),
    architecture=_clip_architecture,
    entries=_clip_entries,
    unsupported_reason=unsupported(_CLIP_TOWERS),
    assumptions=_clip_assumptions,
    ignored=_UNUSED.pattern,
)


# -------------------------------------------------------------------------------------------------- DINO and DINOv2

_DINO = replace(timm_layout(), registers="register_tokens", pooled_norm="")
_CHUNK = re.compile(r"^blocks\.\d+\.(\d+)\.")  # sharded training groups the blocks: blocks.CHUNK.INDEX


def _dino_architecture(header: CheckpointHeader) -> ViTConfig:
    sizes = read_sizes(header, "patch_embed.proj.weight", "blocks.0.mlp.fc1.weight", r"blocks\.(\d+)\.")
    heads = heads_of(header, sizes["depth"], sizes["width"])
    rows = header.shape("pos_embed", 3)[1]
    grid = grid_of_rows(header, rows - 1)
    registers = header.shape("register_tokens", 3)[1] if header.has("register_tokens") else 0
    return ViTConfig(
        **sizes,
        heads=heads,
        layer_scale=header.has("blocks.0.ls1.gamma"),
        image=(grid[0] * sizes["patch"], grid[1] * sizes["patch"]),
        classes=0,
        registers=registers,
        gelu="erf",
        # The models with registers were released with antialiasing and without the offset of 0.1.
        resize="timm" if registers else "dino",
    )


def _dino_unsupported_reason(architecture: Architecture) -> str | None:
    general = timm.unsupported_reason(architecture)
    if general or not isinstance(architecture, ViTConfig):
        return general
    c = architecture
    if c.classes or c.representation:
        return "it is for backbones without a classifier: load with classes=0 first"
    if c.pool != "token":
        return "its feature is the class token"
    if c.gelu != "erf" or c.norm_eps != 1e-6:
        return "it implies the exact (erf) GELU and a LayerNorm epsilon of 1e-6"
    return None


DINO = Format(
    name="dino",
    title="DINO and DINOv2 backbones (safetensors)",
    container="safetensors",
    recognises=lambda header: all(map(header.has, ("blocks.0.attn.qkv.weight", "cls_token", "pos_embed"))),
    architecture=_dino_architecture,
    entries=lambda c: layout_entries(_DINO, c),
    unsupported_reason=_dino_unsupported_reason,
    renames=lambda keys: {key: _CHUNK.sub(r"blocks.\1.", key) for key in keys},
    # Of the pre-training: projection heads, and the decoder of MAE, whose files have the same names.
    ignored=r"mask_token$|(dino_|ibot_)head\.|head\.(mlp|last_layer)\.|decoder_",
    # DINOv2's model always has a mask token, which only its pre-training uses.
    zeros=lambda c: {"mask_token": (1, c.width)} if c.layer_scale or c.registers else {},
)


# ----------------------------------------------------------------------------------------------------------- DINOv3
#
# Its files store RoPE's periods as bfloat16 rounded them, and Meta's code computes with these; timm and transformers
# compute them anew, in float32. So a file is read with `RopeConfig.periods` "bfloat16", and others are refused.

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
    gated = header.has("blocks.0.mlp.w1.weight")
    hidden = f"blocks.0.mlp.{'w1' if gated else 'fc1'}.weight"
    sizes = read_sizes(header, "patch_embed.proj.weight", hidden, r"blocks\.(\d+)\.")
    bias, masked = header.has("blocks.0.attn.qkv.bias"), header.has("blocks.0.attn.qkv.bias_mask")
    return ViTConfig(
        **sizes,
        heads=sizes["width"] // (4 * max(header.shape(_PERIODS, 1)[0], 1)),
        image=(14 * sizes["patch"], 14 * sizes["patch"]),
        classes=0,
        registers=header.shape("storage_tokens", 3)[1] if header.has("storage_tokens") else 0,
        position="none",
        rope=_ROPE,
        norm_eps=1e-5,
        gelu="erf",
        swiglu=gated,
        qkv_bias=bias,
        key_bias=not (bias and masked),
        layer_scale=header.has("blocks.0.ls1.gamma"),
    )


def _dinov3_unpack(tensors: Tensors, c: ViTConfig) -> Tensors:
    """Check the periods, and reduce biases to those of queries and values where a mask hides those of keys."""
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
    container="safetensors",
    recognises=lambda header: header.has("blocks.0.attn.qkv.weight") and header.has(_PERIODS),
    architecture=_dinov3_architecture,
    entries=lambda c: layout_entries(_DINOV3, c),
    unsupported_reason=unsupported((_DINOV3_MODEL,)),
    unpack=_dinov3_unpack,
    pack=_dinov3_pack,
    assumptions=lambda header, c: ("a LayerNorm epsilon of 1e-5 assumed, as of all releases",),
    ignored=r"mask_token$|local_cls_norm\.",  # both are for training alone
    positions=("none",),
    zeros=lambda c: {"mask_token": (1, c.width)},
)
