"""Attention of the class token alone, for the last block of a model that pools it.

What other tokens become in that block changes no logit: only their keys and values are needed. Kernels for many queries
would compute a whole tile of them. These read keys and values once, and sum in a fixed order.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.kernels import linears, rotary
from vitral.kernels.dispatch import launch, next_power_of_2, on_device_of
from vitral.kernels.fused_ops import LinearWeights
from vitral.kernels.jit import class_attention as jit

_ROWS = 64  # keys and values at a time


def reference(q: Tensor, kv: Tensor) -> Tensor:
    """(batch, heads, dim), (batch, tokens, 2, heads, dim) -> (batch, heads, dim)"""
    k, v = kv.permute(2, 0, 3, 1, 4).unbind(0)
    return F.scaled_dot_product_attention(q.unsqueeze(2), k, v).squeeze(2)


# Custom operators, so that torch.compile calls them as they are and does not trace into them.
@torch.library.custom_op("vitral::class_attention", mutates_args=())
def class_attention(q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
    """As the reference; and the log-sum-exp for the backward pass, (batch, heads)"""
    q, kv = q.contiguous(), kv.contiguous()
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
    with on_device_of(q):
        _launch(jit.class_attention_forward, (q, kv, out, lse), kv)
    return out, lse


@class_attention.register_fake
def _(q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


@torch.library.custom_op("vitral::class_attention_backward", mutates_args=())
def class_attention_backward(q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `q` and `kv`, from that of the output."""
    q, kv, grad = q.contiguous(), kv.contiguous(), grad.contiguous()
    dq, dkv = torch.empty_like(q), torch.empty_like(kv)
    with on_device_of(q):
        _launch(jit.class_attention_backward, (q, kv, out, lse, grad, dq, dkv), kv)
    return dq, dkv


@class_attention_backward.register_fake
def _(q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), kv.new_empty(kv.shape)


def _launch(kernel: Any, tensors: tuple[Tensor, ...], kv: Tensor) -> None:
    batch, tokens, _, heads, dim = kv.shape
    constants = {"DIM": dim, "ROWS": _ROWS, "CHANNELS": next_power_of_2(dim)}
    launch(kernel, (batch * heads,), *tensors, tokens, heads, dim**-0.5, **constants)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    return class_attention_backward(*ctx.saved_tensors, grad)


class_attention.register_autograd(_gradients, setup_context=_save)


@torch.library.custom_op("vitral::class_projection", mutates_args=())
def class_projection(
    tokens: Tensor, weight: Tensor, bias: Tensor, cos: Tensor | None, sin: Tensor | None, adjacent: bool, heads: int
) -> tuple[Tensor, Tensor]:
    """The query of the class token, which no rotation changes, and keys and values of all tokens.

    Args:
        tokens: in half precision, (batch, tokens, dim).
        weight: of queries, keys and values, (3 * dim, dim).
        bias: (3 * dim,).
        cos: of the rotation of keys, if they are; it gets no gradient.
        sin: likewise.
        adjacent: see `rotary.RotaryTables`.
        heads: of the attention.

    Returns:
        (batch, heads, dim / heads), (batch, tokens, 2, heads, dim / heads)
    """
    tokens = tokens.contiguous()
    batch, count, dim = tokens.shape
    half = weight.to(tokens.dtype)
    with on_device_of(tokens):
        q = linears.linear(tokens[:, 0], LinearWeights(half[:dim], bias[:dim]))
        kv = linears.linear(tokens.flatten(0, 1), LinearWeights(half[dim:], bias[dim:]))
        kv = kv.view(batch, count, 2, heads, dim // heads)
        if cos is not None and sin is not None:
            rotary.rotate_(kv, (cos, sin, adjacent))
    return q.view(batch, heads, dim // heads), kv


@class_projection.register_fake
def _(
    tokens: Tensor, weight: Tensor, bias: Tensor, cos: Tensor | None, sin: Tensor | None, adjacent: bool, heads: int
) -> tuple[Tensor, Tensor]:
    batch, count, dim = tokens.shape
    return tokens.new_empty(batch, heads, dim // heads), tokens.new_empty(batch, count, 2, heads, dim // heads)


@torch.library.custom_op("vitral::class_projection_backward", mutates_args=())
def class_projection_backward(
    dq: Tensor, dkv: Tensor, tokens: Tensor, weight: Tensor, cos: Tensor | None, sin: Tensor | None, adjacent: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of tokens, and in float32 of weight and bias."""
    dim, tokens, half = tokens.shape[2], tokens.contiguous(), weight.to(tokens.dtype)
    dq, dkv = dq.flatten(1), dkv.contiguous()
    with on_device_of(tokens):
        if cos is not None and sin is not None:
            dkv = dkv.clone()
            rotary.rotate_back_(dkv, (cos, sin, adjacent))
        dkv = dkv.view(-1, 2 * dim)
        dtokens = linears.input_grad(dkv, half[dim:]).view(tokens.shape)
        dtokens[:, 0] += dq @ half[:dim]
        dweight = [linears.weight_grad(dq, tokens[:, 0]), linears.weight_grad(dkv, tokens.flatten(0, 1))]
    dbias = [grad.sum(0, dtype=torch.float32) for grad in (dq, dkv)]
    return dtokens, torch.cat(dweight), torch.cat(dbias)


@class_projection_backward.register_fake
def _(
    dq: Tensor, dkv: Tensor, tokens: Tensor, weight: Tensor, cos: Tensor | None, sin: Tensor | None, adjacent: bool
) -> tuple[Tensor, Tensor, Tensor]:
    wide = {"dtype": torch.float32}
    return tokens.new_empty(tokens.shape), weight.new_empty(weight.shape, **wide), weight.new_empty(len(weight), **wide)


def _save_projection(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tokens, weight, bias, cos, sin, ctx.adjacent, _ = inputs
    ctx.save_for_backward(tokens, weight, cos, sin)
    ctx.dtypes = weight.dtype, bias.dtype


def _projection_gradients(ctx: Any, dq: Tensor, dkv: Tensor) -> tuple[Tensor | None, ...]:
    dtokens, dweight, dbias = class_projection_backward(dq, dkv, *ctx.saved_tensors, ctx.adjacent)
    return dtokens, dweight.to(ctx.dtypes[0]), dbias.to(ctx.dtypes[1]), None, None, None, None


class_projection.register_autograd(_projection_gradients, setup_context=_save_projection)
