"""The fastest way that fits the shape, the device and the precision; plain PyTorch everywhere else."""

from __future__ import annotations

import importlib.util
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

HALVES = (torch.bfloat16, torch.float16)
_LONGEST = 256  # tokens of a sequence whose rows stay on chip
_WIDTHS = (16, 32, 64, 128)  # of a head
_WIDEST = 4096  # channels that a LayerNorm's program holds at once
# By the first number of their compute capability: Hopper, where the kernels were measured, and Blackwell for data
# centres. A program may use 227 KiB on their chips; on consumers' Blackwell, of a higher number, 99 KiB are too few.
_GPUS = (9, 10)
_TRITONS = (7, 0)  # the least compute capability that Triton itself takes
_TRITON = importlib.util.find_spec("triton") is not None


def attention(qkv: Tensor, bias: Tensor | None, dropout: float) -> Tensor:
    """(b, n, 3, heads, d), (b, heads, n, n) or None -> (b, heads, n, d)"""
    width = qkv.shape[4]
    fits = bias is None or width < _WIDTHS[-1]  # a bias beside the widest heads is too much to hold on some GPUs
    if dropout == 0.0 and fits and is_short(qkv, width):
        from vitral.kernels.attention import short_attention

        return short_attention(qkv, None if bias is None else bias.to(qkv.dtype))[0].transpose(1, 2)
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout)


def fits_blocks(x: Tensor, heads: int) -> bool:
    """Whether `blocks.encode` takes it: (b, n, d)"""
    return x.shape[2] <= _WIDEST and is_short(x, x.shape[2] // heads)


def is_short(tokens: Tensor, width: int) -> bool:
    """Whether a head of this width attends within kernels, for tokens (b, n, ...)"""
    known = tokens.dtype in HALVES and tokens.shape[1] <= _LONGEST and width in _WIDTHS
    return known and tokens.shape[0] > 0 and _has_kernels(tokens.device)


@cache
def resizes_parts(device: torch.device) -> bool:
    """Whether `resize.PartResize` runs there."""
    return device.type == "cuda" and _TRITON and torch.cuda.get_device_capability(device) >= _TRITONS


@cache
def _has_kernels(device: torch.device) -> bool:
    """One of _GPUS, with Triton installed"""
    if device.type != "cuda" or not _TRITON:
        return False
    return torch.cuda.get_device_capability(device)[0] in _GPUS


def on_device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Kernels start on the current GPU, whatever memory they are given; autograd itself sees to backward passes."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def launch(
    kernel: Any, programs: tuple[int, ...], *arguments: Any, warps: int = 4, stages: int = 3, **sizes: Any
) -> None:
    """`programs` of the kernel, of so many warps each; `stages` is how far loops that multiply read ahead."""
    kernel[programs](*arguments, **sizes, num_warps=warps, num_stages=stages)
