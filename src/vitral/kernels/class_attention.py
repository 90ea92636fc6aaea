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

from vitral.kernels import linears
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


def project(tokens: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The query of the class token, and keys and values of all tokens.

    Args:
        tokens: in half precision, (batch, tokens, dim).
        weight: of queries, keys and values, (3 * dim, dim).
        bias: (3 * dim,).

    Returns:
        (batch, dim), (batch, tokens, 2 * dim)
    """
    if not torch.compiler.is_compiling():
        with on_device_of(tokens):
            return _Project.apply(tokens.contiguous(), weight, bias)
    dim = tokens.shape[2]
    sizes = (dim, 2 * dim)
    (q_weight, kv_weight), (q_bias, kv_bias) = weight.to(tokens.dtype).split(sizes), bias.to(tokens.dtype).split(sizes)
    return F.linear(tokens[:, 0], q_weight, q_bias), F.linear(tokens, kv_weight, kv_bias)


class _Project(torch.autograd.Function):
    """`project`, with the gradients of weights in float32, and without a gradient of zeros for most queries."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        dim = tokens.shape[2]
        half = weight.to(tokens.dtype)
        ctx.save_for_backward(tokens, half)
        q = linears.linear(tokens[:, 0], LinearWeights(half[:dim], bias[:dim]))
        kv = linears.linear(tokens.flatten(0, 1), LinearWeights(half[dim:], bias[dim:]))
        return q, kv.view(*tokens.shape[:2], 2 * dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        tokens, half = ctx.saved_tensors
        dim = tokens.shape[2]
        dq, dkv = grads[0].contiguous(), grads[1].flatten(0, 1).contiguous()
        dtokens = linears.input_grad(dkv, half[dim:]).view(tokens.shape)
        dtokens[:, 0] += dq @ half[:dim]
        dweight = [linears.weight_grad(dq, tokens[:, 0]), linears.weight_grad(dkv, tokens.flatten(0, 1))]
        dbias = [grad.sum(0, dtype=torch.float32) for grad in (dq, dkv)]
        return dtokens, torch.cat(dweight), torch.cat(dbias)
