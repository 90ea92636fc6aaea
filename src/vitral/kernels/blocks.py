"""A stack of pre-norm blocks in half precision, forwards and backwards, as few passes over memory as it takes.

What `models/layers.py` writes down block by block is computed here with kernels that do several things in one pass:
a residual sum with the LayerNorm after it, attention with whole rows on chip, GELU's gradient with all that is wanted
around it. Matrix products stay cuBLAS's. A block keeps its two residual sums, the projection, what attention made of
it and the MLP's hidden layer; both LayerNorms and the GELU are computed again in the backward pass.

The last sum of a block is left to the next one, whose LayerNorm it then shares a pass with: between blocks the stream
is a pair, what is summed so far and the branch (with its bias) that is to be added.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.kernels import attention, cublas, gelu, norm
from vitral.kernels.weights import Dense, Layer, Norm


class Shape(NamedTuple):
    """What a block has besides weights."""

    batch: int
    heads: int
    gelu: str  # "tanh" or "none"


def encode(x: Tensor, layers: Sequence[Layer], last: Norm, *, heads: int, gelu: str) -> Tensor:
    """(b, n, d) in half precision -> (b, n, d), normed by `last`; with a gradient where the weights learn."""
    shape = Shape(x.shape[0], heads, gelu)
    run = _learn if torch.is_grad_enabled() and last.weight.requires_grad else _infer
    return run(x.flatten(0, 1).contiguous(), layers, last, shape).view(x.shape)


def _infer(x: Tensor, layers: Sequence[Layer], last: Norm, shape: Shape) -> Tensor:
    """Without a gradient nothing is kept: (r, d) -> (r, d)"""
    branch, bias = None, None
    for layer in layers:
        x, normed, _ = norm.forward(x, branch, bias, layer.norm1)
        read, _ = attention.forward(_split(_dense(normed, layer.qkv), shape))
        x, normed, _ = norm.forward(x, _times(_flat(read), layer.out.weight), layer.out.bias, layer.norm2)
        branch = _times(_dense_gelu(normed, layer.hidden, shape.gelu), layer.output.weight)
        bias = layer.output.bias
    return norm.forward(x, branch, bias, last).normed


def _learn(x: Tensor, layers: Sequence[Layer], last: Norm, shape: Shape) -> Tensor:
    branch, bias = None, None
    for layer, halves in zip(layers, _halved(layers, x.dtype), strict=True):
        weights = (*layer.norm1[:2], *layer.qkv, *layer.out, *layer.norm2[:2], *layer.hidden, layer.output.weight)
        x, branch = _Block.apply(x, branch, bias, *weights, halves, (layer.norm1.eps, layer.norm2.eps), shape)
        bias = layer.output.bias
    return _LastNorm.apply(x, branch, bias, *last)


@torch.no_grad()
def _halved(layers: Sequence[Layer], dtype: torch.dtype) -> list[_Halves]:
    """All at once: as many kernels as there are weights would take longer to start than to run."""
    dense = [(*layer.qkv, layer.out.weight, *layer.hidden, layer.output.weight) for layer in layers]
    weights = [weight for block in dense for weight in block]
    halves = [torch.empty_like(weight, dtype=dtype) for weight in weights]
    torch._foreach_copy_(halves, weights)
    return [_Halves(*halves[first : first + 6]) for first in range(0, len(halves), 6)]


class _Halves(NamedTuple):
    """The weights of a block's products, in half precision."""

    wqkv: Tensor
    bqkv: Tensor
    wout: Tensor
    whidden: Tensor
    bhidden: Tensor
    woutput: Tensor


class _Block(torch.autograd.Function):
    """The sum so far (r, d), the branch to be added (r, d) with its bias (d,), weights -> the same two after it."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, branch: Tensor | None, bias: Tensor | None,
        scale1: Tensor, shift1: Tensor, wqkv: Tensor, bqkv: Tensor, wout: Tensor, bout: Tensor,
        scale2: Tensor, shift2: Tensor, whidden: Tensor, bhidden: Tensor, woutput: Tensor,
        halves: _Halves, eps: tuple[float, float], shape: Shape,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        first = norm.forward(x, branch, bias, Norm(scale1, shift1, eps[0]))
        qkv = torch.addmm(halves.bqkv, first.normed, halves.wqkv.t())
        read, lse = attention.forward(_split(qkv, shape))
        second = norm.forward(first.total, _flat(read) @ halves.wout.t(), bout, Norm(scale2, shift2, eps[1]))
        activated, h = _dense_gelu_kept(second.normed, Dense(halves.whidden, halves.bhidden), shape.gelu)
        branch_out = activated @ halves.woutput.t()
        ctx.save_for_backward(
            first.total, first.moments, qkv, read, lse, second.total, second.moments, h,
            scale1, shift1, scale2, shift2,
        )  # fmt: skip
        ctx.facts = (halves, eps, shape, branch is not None)
        return second.total, branch_out

    @staticmethod
    def backward(ctx: Any, dx: Tensor, dbranch: Tensor) -> tuple[Tensor | None, ...]:
        x1, moments1, qkv, read, lse, x2, moments2, h, scale1, shift1, scale2, shift2 = ctx.saved_tensors
        halves, eps, shape, has_branch = ctx.facts
        dbranch = dbranch.contiguous()
        dh, activated, dbhidden = gelu.backward(h, dbranch @ halves.woutput, shape.gelu)
        dwoutput = _product(dbranch, activated)
        del activated
        second = norm.backward(x2, moments2, Norm(scale2, shift2, eps[1]), dx.contiguous(), dh @ halves.whidden)
        dwhidden = _product(dh, second.normed)
        dwout = _product(second.total, _flat(read))
        dread = (second.total @ halves.wout).view(read.shape)
        dqkv, _ = attention.backward(_split(qkv, shape), None, read, lse, dread)
        dqkv = dqkv.view(qkv.shape)
        first = norm.backward(x1, moments1, Norm(scale1, shift1, eps[0]), second.total, dqkv @ halves.wqkv)
        dwqkv = _product(dqkv, first.normed)
        dbqkv = _bias_slope(dqkv, second.weights[2], halves.wout)
        dbranch_in, dbias = (first.total, first.weights[2]) if has_branch else (None, None)
        return (
            first.total, dbranch_in, dbias, first.weights[0], first.weights[1], dwqkv, dbqkv, dwout,
            second.weights[2], second.weights[0], second.weights[1], dwhidden, dbhidden, dwoutput, None, None, None,
        )  # fmt: skip


class _LastNorm(torch.autograd.Function):
    """The last sum and the norm after the blocks: (r, d), (r, d), (d,) -> (r, d)"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, branch: Tensor, bias: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
        found = norm.forward(x, branch, bias, Norm(scale, shift, eps))
        ctx.save_for_backward(found.total, found.moments, scale, shift)
        ctx.eps = eps
        return found.normed

    @staticmethod
    def backward(ctx: Any, dnormed: Tensor) -> tuple[Tensor | None, ...]:
        total, moments, scale, shift = ctx.saved_tensors
        found = norm.backward(total, moments, Norm(scale, shift, ctx.eps), None, dnormed.contiguous())
        return found.total, found.total, found.weights[2], found.weights[0], found.weights[1], None


def _split(qkv: Tensor, shape: Shape) -> Tensor:
    """(b * n, 3 * d) -> (b, n, 3, heads, d / heads)"""
    return qkv.view(shape.batch, -1, 3, shape.heads, qkv.shape[1] // (3 * shape.heads))


def _flat(read: Tensor) -> Tensor:
    """(b, n, heads, d / heads) -> (b * n, d)"""
    return read.view(read.shape[0] * read.shape[1], -1)


def _dense_gelu_kept(x: Tensor, dense: Dense, kind: str) -> tuple[Tensor, Tensor]:
    """GELU(h) and h = x weight' + bias: (r, i) -> (r, o), (r, o)"""
    if kind == "tanh" and x.is_cuda and cublas.is_there(x.device, x.dtype):
        return cublas.dense_gelu(x, *dense)
    h = torch.addmm(dense.bias, x, dense.weight.t())
    return F.gelu(h, approximate=kind), h


def _bias_slope(dqkv: Tensor, dbout: Tensor, wout: Tensor) -> Tensor:
    """The sum of dqkv over tokens, of which only the queries' third has to be added up: (r, 3 d) -> float32 (3 d,)

    Shares of attention add up to 1. So what all values get is what all outputs give, and the output's own bias has that
    sum; and what the keys get adds up to 0, since a bias that all keys have in common changes no share.
    """
    width = wout.shape[1]
    slope = torch.zeros(3, width, dtype=torch.float32, device=dqkv.device)
    slope[0] = dqkv[:, :width].sum(0, dtype=torch.float32)
    slope[2] = dbout.to(wout.dtype) @ wout
    return slope.flatten()


def _product(left: Tensor, right: Tensor) -> Tensor:
    """left' right in single precision, of a weight's gradient: (r, i), (r, j) -> (i, j)"""
    if left.is_cuda and left.dtype != torch.float32:
        return torch.mm(left.t(), right, out_dtype=torch.float32)
    return (left.t() @ right).float()


def _times(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.to(x.dtype).t()


def _dense(x: Tensor, dense: Dense) -> Tensor:
    return torch.addmm(dense.bias.to(x.dtype), x, dense.weight.to(x.dtype).t())


def _dense_gelu(x: Tensor, dense: Dense, kind: str) -> Tensor:
    if kind == "tanh" and x.is_cuda:  # PyTorch hands this to cuBLAS as one product
        return torch._addmm_activation(dense.bias.to(x.dtype), x, dense.weight.to(x.dtype).t(), use_gelu=True)
    return F.gelu(_dense(x, dense), approximate=kind)
