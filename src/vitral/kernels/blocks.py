"""A stack of pre-norm blocks in half precision, forwards and backwards, as few passes over memory as it takes.

What `models/layers.py` writes down block by block is computed here with kernels that do several things in one pass:
a residual sum with the LayerNorm after it, attention with whole rows on chip, GELU's gradient with all that is wanted
around it. Matrix products stay cuBLAS's. A block keeps what its two norms give, the projection, what attention made of
it and the MLP's hidden layer; residual sums are not kept, and in every second block the GELU is computed again in the
backward pass.

The last sum of a block is left to the next one, whose LayerNorm it then shares a pass with: between blocks the stream
is a pair, what is summed so far and the branch (with its bias) that is to be added.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from vitral.kernels import attention, cublas, gelu, norm
from vitral.kernels.dispatch import on_device_of
from vitral.kernels.fold import fold, unfold
from vitral.kernels.weights import Dense, Layer, Norm, PlainNorm


class Shape(NamedTuple):
    """What a block has besides weights."""

    batch: int
    heads: int
    gelu: str  # "tanh" or "none"


def encode(x: Tensor, layers: Sequence[Layer], last: Norm, *, heads: int, gelu: str) -> Tensor:
    """(b, n, d) in half precision -> (b, n, d), normed by `last`; with a gradient where the weights learn."""
    shape = Shape(x.shape[0], heads, gelu)
    run = _learn if torch.is_grad_enabled() and last.weight.requires_grad else _infer
    with on_device_of(x):
        return run(x.flatten(0, 1).contiguous(), layers, last, shape).view(x.shape)


def _infer(x: Tensor, layers: Sequence[Layer], last: Norm, shape: Shape) -> Tensor:
    """Without a gradient nothing is kept: (r, d) -> (r, d)"""
    branch, bias = None, None
    for layer in layers:
        x, normed, _ = norm.forward(x, branch, bias, layer.norm1)
        del branch  # it is in the sum: not needed where memory is at its peak
        x, normed, _ = norm.forward(x, _attended(normed, layer, shape), layer.out.bias, layer.norm2)
        branch = _times(_dense_gelu(normed, layer.hidden, shape.gelu), layer.output.weight)
        bias = layer.output.bias
    return norm.forward(x, branch, bias, last).normed


def _attended(normed: Tensor, layer: Layer, shape: Shape) -> Tensor:
    """The branch of attention, without its bias: (r, d) -> (r, d)"""
    read, _ = attention.forward(_split(_dense(normed, layer.qkv), shape))
    return _times(_flat(read), layer.out.weight)


def _learn(x: Tensor, layers: Sequence[Layer], last: Norm, shape: Shape) -> Tensor:
    branch, bias = None, None
    halves = _halved([weight for layer in layers for weight in (layer.out.weight, layer.output.weight)], x.dtype)
    for number, (layer, wout, woutput) in enumerate(zip(layers, halves[::2], halves[1::2], strict=True)):
        weights = (*layer.norm1[:2], *layer.qkv, *layer.out, *layer.norm2[:2], *layer.hidden, layer.output.weight)
        keeps = number % 2 == 1  # half of the time and of the memory that the outputs of all GELUs would be
        x, branch = _Block.apply(x, branch, bias, *weights, layer, (wout, woutput), shape, keeps)
        bias = layer.output.bias
    return _LastNorm.apply(x, branch, bias, *last)


@torch.no_grad()
def _halved(weights: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """All at once: as many kernels as there are weights would take longer to start than to run."""
    halves = [torch.empty_like(weight, dtype=dtype) for weight in weights]
    torch._foreach_copy_(halves, weights)
    return halves


class _Kept(NamedTuple):
    """What a block keeps for its backward pass: (r, d) unless said otherwise"""

    normed1: Tensor
    moments1: Tensor  # (2, r)
    qkv: Tensor  # (r, 3 d)
    read: Tensor  # what attention made of it
    lse: Tensor  # (b, heads, n)
    normed2: Tensor
    moments2: Tensor  # (2, r)
    h: Tensor  # the MLP's hidden layer before its GELU, (r, f)


class _Products(NamedTuple):
    """The weights of a block's products in half precision; the norms' own are folded into two of them."""

    qkv: Tensor
    out: Tensor
    hidden: Tensor
    output: Tensor


class _Block(torch.autograd.Function):
    """The sum so far (r, d), the branch to be added (r, d) with its bias (d,) -> the same two after the block.

    `weights` are there to get their gradients: those of `layer` in order, without the bias of `output`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, branch: Tensor | None, bias: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
        *_, layer, (wout, woutput), shape, keeps = rest
        qkv_dense = fold(layer.qkv, layer.norm1, x.dtype)
        hidden_dense = fold(layer.hidden, layer.norm2, x.dtype)
        first = norm.forward(x, branch, bias, PlainNorm(layer.norm1.eps))
        qkv = torch.addmm(qkv_dense.bias, first.normed, qkv_dense.weight.t())
        read, lse = attention.forward(_split(qkv, shape))
        second = norm.forward(first.total, _flat(read) @ wout.t(), layer.out.bias, PlainNorm(layer.norm2.eps))
        activated, h = _dense_gelu_kept(second.normed, hidden_dense, shape.gelu)
        ctx.save_for_backward(
            *_Kept(first.normed, first.moments, qkv, read, lse, second.normed, second.moments, h),
            *_Products(qkv_dense.weight, wout, hidden_dense.weight, woutput),
            activated if keeps else None,
        )
        ctx.facts = (layer, shape, branch is not None)
        return second.total, activated @ woutput.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        dx, dbranch = (slope.contiguous() for slope in slopes)
        saved = ctx.saved_tensors
        kept, products, activated = _Kept(*saved[:8]), _Products(*saved[8:12]), saved[12]
        layer, shape, has_branch = ctx.facts
        dh, activated, dbhidden = gelu.backward(kept.h, dbranch @ products.output, shape.gelu, activated)
        dwoutput = _product(dbranch, activated)
        del activated
        dx, sums = norm.backward(kept.normed2, kept.moments2, None, dx, dh @ products.hidden)
        hidden = unfold(_product(dh, kept.normed2), dbhidden, layer.hidden, layer.norm2)
        dbout = sums[0]
        dwout = _product(dx, _flat(kept.read))
        dread = (dx @ products.out).view(kept.read.shape)
        dqkv, _ = attention.backward(_split(kept.qkv, shape), None, kept.read, kept.lse, dread)
        dqkv = dqkv.view(kept.qkv.shape)
        dx, sums = norm.backward(kept.normed1, kept.moments1, None, dx, dqkv @ products.qkv)
        dbqkv = _bias_slope(dqkv, dbout, products.out)
        qkv = unfold(_product(dqkv, kept.normed1), dbqkv, layer.qkv, layer.norm1)
        before = (dx, dx, sums[0]) if has_branch else (dx, None, None)
        attended = (qkv.scale, qkv.shift, qkv.weight, dbqkv, dwout, dbout)
        return *before, *attended, hidden.scale, hidden.shift, hidden.weight, dbhidden, dwoutput, None, None, None, None


class _LastNorm(torch.autograd.Function):
    """The last sum and the norm after the blocks: (r, d), (r, d), (d,) -> (r, d)"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, branch: Tensor, bias: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
        found = norm.forward(x, branch, bias, Norm(scale, shift, eps))
        ctx.save_for_backward(found.total, found.moments, scale)
        return found.normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        total, moments, scale = ctx.saved_tensors
        dx, (dbias, dscale, dshift) = norm.backward(total, moments, scale, None, slopes[0].contiguous())
        return dx, dx, dbias, dscale, dshift, None


def _split(qkv: Tensor, shape: Shape) -> Tensor:
    """(b * n, 3 * d) -> (b, n, 3, heads, d / heads)"""
    return qkv.view(shape.batch, -1, 3, shape.heads, qkv.shape[1] // (3 * shape.heads))


def _flat(read: Tensor) -> Tensor:
    """(b, n, heads, d / heads) -> (b * n, d)"""
    return read.view(read.shape[0] * read.shape[1], -1)


def _dense_gelu_kept(x: Tensor, dense: Dense, kind: str) -> tuple[Tensor, Tensor]:
    """GELU(h) and h = x weight' + bias: (r, i) -> (r, o), (r, o)"""
    aligned = dense.weight.shape[0] % 8 == 0  # what cuBLAS asks of the memory that it keeps h in
    if kind == "tanh" and x.is_cuda and aligned and cublas.is_there(x.device, x.dtype):
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
