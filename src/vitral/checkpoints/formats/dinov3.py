"""DINOv3 ViTs with the names of Meta's code.

Its files store RoPE's periods as bfloat16 rounded them, and Meta's code computes with these; timm and transformers
compute them anew, in float32. So a file is read with `RopeConfig.periods` "bfloat16", and others are refused.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vitral.architecture import Architecture, RopeConfig, ViTConfig
from vitral.checkpoints.formats.hf_layout import Variant, unsupported
from vitral.checkpoints.formats.table import (
    CheckpointHeader,
    Entry,
    Format,
    Shape,
    Tensors,
    linear,
    norm,
    patches,
    read_sizes,
)
from vitral.errors import UserError

_PERIODS = "rope_embed.periods"
_ROPE = RopeConfig(temperature=100.0, periods="bfloat16")


def _architecture(header: CheckpointHeader) -> ViTConfig:
    gated = header.has("blocks.0.mlp.w1.weight")
    hidden = f"blocks.0.mlp.{'w1' if gated else 'fc1'}.weight"
    sizes = read_sizes(header, "patch_embed.proj.weight", hidden, r"blocks\.(\d+)\.")
    bias, masked = header.has("blocks.0.attn.qkv.bias"), header.has("blocks.0.attn.qkv.bias_mask")
    return ViTConfig(
        **vars(sizes),
        heads=sizes.width // (4 * max(header.shape(_PERIODS, 1)[0], 1)),
        image=(14 * sizes.patch, 14 * sizes.patch),
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


def _assumptions(header: CheckpointHeader, architecture: Architecture) -> tuple[str, ...]:
    return ("a LayerNorm epsilon of 1e-5 assumed, as of all releases",)


def _entries(c: Architecture) -> list[Entry]:
    assert isinstance(c, ViTConfig)
    entries = [*patches("patch_embed.proj", c), Entry("cls_token", "class_token", (1, 1, c.width))]
    entries += [Entry("storage_tokens", "registers", (1, c.registers, c.width))] if c.registers else []
    for i in range(c.depth):
        entries += _block(f"blocks.{i}", c)
    return entries + norm("norm", "norm", c.width)


def _block(name: str, c: ViTConfig) -> list[Entry]:
    qkv = f"{name}.attn.qkv"
    entries = [Entry(f"{qkv}.weight", f"{name}.attention.qkv.weight", (3 * c.width, c.width))]
    if c.qkv_bias and c.key_bias:
        entries.append(Entry(f"{qkv}.bias", f"{name}.attention.qkv.bias", (3 * c.width,)))
    elif c.qkv_bias:
        entries.append(Entry(f"{qkv}.bias", f"{name}.attention.qv_bias", (2, c.width)))
    entries += norm(f"{name}.norm1", f"{name}.norm1", c.width) + norm(f"{name}.norm2", f"{name}.norm2", c.width)
    entries += linear(f"{name}.attn.proj", f"{name}.attention.out", c.width, c.width)
    if c.swiglu:
        for k, layer in enumerate(("w1", "w2")):
            theirs, ours = f"{name}.mlp.{layer}", f"{name}.mlp.hidden"
            entries.append(Entry(f"{theirs}.weight", f"{ours}.weight", (c.mlp, c.width), part=(k, 2)))
            entries.append(Entry(f"{theirs}.bias", f"{ours}.bias", (c.mlp,), part=(k, 2)))
    else:
        entries += linear(f"{name}.mlp.fc1", f"{name}.mlp.hidden", c.width, c.mlp)
    entries += linear(f"{name}.mlp.{'w3' if c.swiglu else 'fc2'}", f"{name}.mlp.output", c.mlp, c.width)
    if c.layer_scale:
        entries += [Entry(f"{name}.ls{k}.gamma", f"{name}.scale{k}.scale", (c.width,)) for k in (1, 2)]
    return entries


def _unpack(tensors: Tensors, c: Architecture) -> Tensors:
    """Check the periods, and reduce biases to those of queries and values where a mask hides those of keys."""
    assert isinstance(c, ViTConfig)
    tensors = dict(tensors)
    stored = tensors.pop(_PERIODS, None)
    if stored is None or not torch.equal(stored.float(), _periods(c)):
        raise UserError("its RoPE periods are not those of the released models: convert it with its own code first.")
    for i in range(c.depth if c.qkv_bias and not c.key_bias else 0):
        key = f"blocks.{i}.attn.qkv.bias"
        bias, mask = tensors.get(key), tensors.pop(f"{key}_mask", None)
        if bias is None or mask is None or bias.shape != (3 * c.width,) or not torch.equal(mask.float(), _mask(c)):
            raise UserError(f"tensor {key} has no mask that hides the keys' third of it: that is not supported.")
        tensors[key] = bias.reshape(3, c.width)[::2]
    return tensors


def _pack(tensors: Tensors, c: Architecture) -> Tensors:
    assert isinstance(c, ViTConfig)
    tensors = {**tensors, _PERIODS: _periods(c)}
    for i in range(c.depth if c.qkv_bias and not c.key_bias else 0):
        key = f"blocks.{i}.attn.qkv.bias"
        q, v = tensors[key]
        tensors |= {key: torch.cat([q, torch.zeros_like(q), v]), f"{key}_mask": _mask(c)}
    return tensors


def _periods(c: ViTConfig) -> Tensor:
    """(dim of a head / 4,)"""
    count = c.width // c.heads // 4
    return (_ROPE.temperature ** (torch.arange(count) / count)).bfloat16().float()


def _mask(c: ViTConfig) -> Tensor:
    """(3 * dim,): what remains of a bias of queries, keys and values."""
    return torch.tensor([1.0, 0.0, 1.0]).repeat_interleave(c.width)


def _zeros(c: Architecture) -> dict[str, Shape]:
    assert isinstance(c, ViTConfig)
    return {"mask_token": (1, c.width)}


def _reason(c: ViTConfig) -> str | None:
    if c.gelu != "erf" and not c.swiglu:
        return "it implies the exact (erf) GELU"
    return None if c.norm_eps == 1e-5 else f"it implies a LayerNorm epsilon of 1e-5, not {c.norm_eps:g}"


_MODEL = Variant(
    "DINOv3",
    classifier=False,
    accepts={
        **{"registers": (), "position": ("none",), "rope": (_ROPE,), "layer_scale": (True, False)},
        **{"swiglu": (True, False), "qkv_bias": (True, False), "key_bias": (True, False)},
    },
    reason=_reason,
)

DINOV3 = Format(
    name="dinov3",
    title="DINOv3 ViTs, as Meta's files (safetensors)",
    container="safetensors",
    recognises=lambda header: header.has("blocks.0.attn.qkv.weight") and header.has(_PERIODS),
    architecture=_architecture,
    entries=_entries,
    unsupported_reason=unsupported((_MODEL,)),
    unpack=_unpack,
    pack=_pack,
    assumptions=_assumptions,
    ignored=r"mask_token$|local_cls_norm\.",  # both are for training alone
    positions=("none",),
    zeros=_zeros,
)
