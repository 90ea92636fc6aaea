"""Attention over short sequences with whole rows on chip: launchers of the kernels, and a reference in PyTorch.

General flash kernels are built for long sequences; at 197 tokens they spend time on what short rows do not need. Here
the keys and values of a head stay on chip, a row of logits is never split, so the softmax needs a single pass, and
lengths are padded to a multiple of 16 instead of a power of two. Inputs and gradients keep the layout of the fused qkv
projection: nothing is transposed or copied around the kernels. The backward pass computes the logits twice, once along
the queries and once along the keys: that costs less than accumulating a gradient across programs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.kernels.dispatch import ceil_div, launch, on_device_of
from vitral.kernels.jit import attention as jit

Spans = tuple[tuple[int, int], ...]  # (first, size) of each part of a sequence
_ROWS = 64  # that a program computes at a time; tuned on an H200


def reference(qkv: Tensor, bias: Tensor | None = None) -> Tensor:
    """(batch, tokens, 3, heads, dim), bias (batch, heads, tokens, tokens) -> (batch, tokens, heads, dim)"""
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2)


def split_sequence(n: int, max_size: int) -> Spans:
    """Split a sequence, padded to a multiple of 16, into powers of two up to `max_size`: 197 -> 128 + 64 + 16."""
    spans, first = [], 0
    while first < n:
        remaining = -(-(n - first) // 16) * 16
        size = min(max_size, 1 << (remaining.bit_length() - 1))
        spans.append((first, size))
        first += size
    return tuple(spans)


def _launch(kernel: Any, tensors: tuple[Any, ...], qkv: Tensor, bias: Tensor | None, max_size: int) -> None:
    b, n, _, heads, d = qkv.shape
    programs_per_head = ceil_div(n, _ROWS) if b * heads < 256 else 1  # a GPU has about 132 multiprocessors
    launch(
        kernel, (b * heads, programs_per_head), *tensors, heads, d**-0.5,
        N=n, D=d, ROWS=_ROWS, PARTS=split_sequence(n, max_size), HAS_BIAS=bias is not None, stages=2,
    )  # fmt: skip


def forward(qkv: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As the reference, for contiguous inputs; and the log-sum-exp for the backward pass, (batch, heads, tokens)"""
    out, lse = _empty(qkv)
    _launch(jit.attention_forward, (qkv, bias, out, lse), qkv, bias, 128)
    return out, lse


def backward(qkv: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `qkv` and of `bias`; without a bias the second is empty."""
    dqkv, dbias = _empty_gradients(qkv, bias)
    delta = torch.empty_like(lse)
    _launch(jit.attention_queries, (qkv, bias, out, grad, lse, delta, dqkv, dbias), qkv, bias, 64)
    _launch(jit.attention_keys, (qkv, bias, grad, lse, delta, dqkv), qkv, bias, 128)
    return dqkv, dbias


def _empty(qkv: Tensor) -> tuple[Tensor, Tensor]:
    b, n, _, heads, d = qkv.shape
    return qkv.new_empty(b, n, heads, d), qkv.new_empty(b, heads, n, dtype=torch.float32)


def _empty_gradients(qkv: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    dqkv = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    if bias is None:
        return dqkv, qkv.new_empty(0)
    return dqkv, torch.empty_like(bias, memory_format=torch.contiguous_format)


# Custom operators, so that torch.compile calls them as they are and does not trace into them.
@torch.library.custom_op("vitral::short_attention", mutates_args=())
def short_attention(qkv: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """`forward` as a differentiable operator."""
    with on_device_of(qkv):
        return forward(qkv.contiguous(), _contiguous(bias))


@short_attention.register_fake
def _(qkv: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return _empty(qkv)


@torch.library.custom_op("vitral::short_attention_backward", mutates_args=())
def short_attention_backward(
    qkv: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    return backward(qkv.contiguous(), _contiguous(bias), out, lse, grad.contiguous())


@short_attention_backward.register_fake
def _(qkv: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    return _empty_gradients(qkv, bias)


def _contiguous(bias: Tensor | None) -> Tensor | None:
    """A bias that all images share comes as a view that repeats it."""
    return None if bias is None else bias.contiguous()


def _save(ctx: Any, inputs: tuple[Tensor, Tensor | None], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _gradients(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor | None]:
    qkv, bias, out, lse = ctx.saved_tensors
    dqkv, dbias = short_attention_backward(qkv, bias, out, lse, grad)
    return dqkv, dbias if bias is not None else None


short_attention.register_autograd(_gradients, setup_context=_save)
