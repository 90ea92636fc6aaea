"""Attention of the class token alone, for the last block of a model that pools it.

What other tokens become in that block changes no logit: only their keys and values are needed. Kernels for many queries
would compute a whole tile of them. These read keys and values once, and sum in a fixed order.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from vitral.kernels import linears, rotary
from vitral.kernels.dispatch import launch, next_power_of_2, on_device_of
from vitral.kernels.fused_ops import LinearWeights
from vitral.kernels.jit import class_attention as jit
from vitral.kernels.rotary import RotaryTables

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


def project(
    tokens: Tensor, weight: Tensor, bias: Tensor, heads: int, rotation: RotaryTables | None = None
) -> tuple[Tensor, Tensor]:
    """The query of the class token, which no rotation changes, and keys and values of all tokens.

    Args:
        tokens: in half precision, (batch, tokens, dim).
        weight: of queries, keys and values, (3 * dim, dim).
        bias: (3 * dim,).
        heads: of the attention.
        rotation: of keys; it gets no gradient.

    Returns:
        (batch, heads, dim / heads), (batch, tokens, 2, heads, dim / heads)
    """
    if not torch.compiler.is_compiling():
        with on_device_of(tokens):
            return _Project.apply(tokens.contiguous(), weight, bias, heads, rotation)
    sizes = (tokens.shape[2], 2 * tokens.shape[2])
    (q_weight, kv_weight), (q_bias, kv_bias) = weight.to(tokens.dtype).split(sizes), bias.to(tokens.dtype).split(sizes)
    q, kv = F.linear(tokens[:, 0], q_weight, q_bias), F.linear(tokens, kv_weight, kv_bias)
    kv = kv.unflatten(2, (2, heads, -1))
    return q.unflatten(1, (heads, -1)), kv if rotation is None else rotary.reference(kv, rotation).to(kv.dtype)


class _Project(torch.autograd.Function):
    """`project`, with the gradients of weights in float32, and without a gradient of zeros for most queries."""

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, weight: Tensor, bias: Tensor, heads: int, rotation: RotaryTables | None
    ) -> tuple[Tensor, Tensor]:
        batch, count, dim = tokens.shape
        half = weight.to(tokens.dtype)
        ctx.save_for_backward(tokens, half, *(rotation or ())[:2])
        ctx.adjacent = rotation is not None and rotation[2]
        q = linears.linear(tokens[:, 0], LinearWeights(half[:dim], bias[:dim])).view(batch, heads, -1)
        kv = linears.linear(tokens.flatten(0, 1), LinearWeights(half[dim:], bias[dim:])).view(
            batch, count, 2, heads, -1
        )
        if rotation is not None:
            rotary.rotate_(kv, rotation)
        return q, kv

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        tokens, half, *tables = ctx.saved_tensors
        dim = tokens.shape[2]
        dq, dkv = grads[0].flatten(1), grads[1].contiguous()
        if tables:
            dkv = dkv.clone()  # autograd may read the gradient again
            rotary.rotate_back_(dkv, (*tables, ctx.adjacent))
        dkv = dkv.view(-1, 2 * dim)
        dtokens = linears.input_grad(dkv, half[dim:]).view(tokens.shape)
        dtokens[:, 0] += dq @ half[:dim]
        dweight = [linears.weight_grad(dq, tokens[:, 0]), linears.weight_grad(dkv, tokens.flatten(0, 1))]
        dbias = [grad.sum(0, dtype=torch.float32) for grad in (dq, dkv)]
        return dtokens, torch.cat(dweight), torch.cat(dbias), None, None
