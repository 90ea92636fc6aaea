"""A sum and its LayerNorm in one pass over memory, and backwards: kernels, and what they must compute.

    x' = x + y + bias;  z = LN(x')

is what stands between two branches of a block. The backward kernel computes z again, which the weights' gradients
need and nobody then has to keep, and adds up the gradients of the bias and of the norm's own weights on the way.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from vitral.kernels.weights import Norm

_EACH = 32  # rows of a program of the backward kernel; measured on an H200


class Added(NamedTuple):
    """x + y + bias and its LayerNorm, both (r, d); for the backward pass mean and 1 / deviation of the rows, (2, r)."""

    total: Tensor
    normed: Tensor
    moments: Tensor


class Slopes(NamedTuple):
    """The gradient of x and y (r, d); the LayerNorm's output again (r, d); the gradients of its weight and bias and of
    the bias that was added, (3, d)."""

    total: Tensor
    normed: Tensor
    weights: Tensor


def reference(x: Tensor, y: Tensor, bias: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """What the kernels compute, in plain PyTorch: (r, d), (r, d), (d,) -> (r, d), (r, d)"""
    total = x + y + bias
    return total, F.layer_norm(total, total.shape[-1:], norm.weight, norm.bias, norm.eps)


@triton.jit
def _forward(
    X, Y, BIAS, WEIGHT, SHIFT, TOTAL, NORMED, MOMENTS, rows, width, eps,
    HAS_Y: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    place = row[:, None].to(tl.int64) * width + column[None, :]
    inside = (row[:, None] < rows) & (column[None, :] < width)
    total = tl.load(X + place, mask=inside, other=0.0)
    if HAS_Y:
        bias = tl.load(BIAS + column, mask=column < width, other=0.0)
        y = tl.load(Y + place, mask=inside, other=0.0)
        # Rounded before it is normalised: the backward pass will see nothing else.
        total = (total.to(tl.float32) + y.to(tl.float32) + bias[None, :]).to(TOTAL.dtype.element_ty)
        tl.store(TOTAL + place, total, mask=inside)
    value = total.to(tl.float32)
    mean = tl.sum(value, 1) / width
    centred = tl.where(inside, value - mean[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 1) / width + eps)
    weight = tl.load(WEIGHT + column, mask=column < width, other=0.0)
    shift = tl.load(SHIFT + column, mask=column < width, other=0.0)
    normed = centred * scale[:, None] * weight[None, :] + shift[None, :]
    tl.store(NORMED + place, normed.to(NORMED.dtype.element_ty), mask=inside)
    tl.store(MOMENTS + row, mean, mask=row < rows)
    tl.store(MOMENTS + rows + row, scale, mask=row < rows)


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def _backward(
    TOTAL, MOMENTS, WEIGHT, SHIFT, DTOTAL, DNORMED, DX, NORMED, SUMS, rows, width,
    HAS_TOTAL: tl.constexpr, EACH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, COLUMNS)
    weight = tl.load(WEIGHT + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    shift = tl.load(SHIFT + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    dweight = tl.zeros((COLUMNS,), tl.float32)
    dshift = tl.zeros((COLUMNS,), tl.float32)
    dbias = tl.zeros((COLUMNS,), tl.float32)
    first = tl.program_id(0) * EACH
    for start in range(first, first + EACH, ROWS):
        row = start + tl.arange(0, ROWS)
        place = row[:, None].to(tl.int64) * width + column[None, :]
        inside = (row[:, None] < rows) & (column[None, :] < width)
        total = tl.load(TOTAL + place, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(DNORMED + place, mask=inside, other=0.0).to(tl.float32)
        mean = tl.load(MOMENTS + row, mask=row < rows, other=0.0)[:, None]
        scale = tl.load(MOMENTS + rows + row, mask=row < rows, other=0.0)[:, None]
        value = tl.where(inside, (total - mean) * scale, 0.0)
        slope = grad * weight
        along, level = tl.reduce((value * slope, slope), 1, _add_pairs)
        dx = (slope - value * (along / width)[:, None] - (level / width)[:, None]) * scale
        if HAS_TOTAL:
            dx += tl.load(DTOTAL + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(DX + place, dx.to(DX.dtype.element_ty), mask=inside)
        tl.store(NORMED + place, (value * weight + shift).to(NORMED.dtype.element_ty), mask=inside)
        dweight += tl.sum(grad * value, 0)
        dshift += tl.sum(grad, 0)
        dbias += tl.sum(dx, 0)  # rows beyond the last are zero, since their scale is
    place = SUMS + tl.program_id(0) * 3 * width + column
    tl.store(place, dweight, mask=column < width)
    tl.store(place + width, dshift, mask=column < width)
    tl.store(place + 2 * width, dbias, mask=column < width)


def forward(x: Tensor, y: Tensor | None, bias: Tensor | None, norm: Norm) -> Added:
    """(r, d), (r, d) and (d,), or neither, to x's precision; without them the sum is x itself."""
    rows, width = x.shape
    total = x if y is None else torch.empty_like(x)
    normed, moments = torch.empty_like(x), x.new_empty(2, rows, dtype=torch.float32)
    columns = triton.next_power_of_2(width)
    tile = max(4096 // columns, 1)
    _forward[(triton.cdiv(rows, tile),)](
        x, y, bias, norm.weight, norm.bias, total, normed, moments, rows, width, norm.eps,
        HAS_Y=y is not None, ROWS=tile, COLUMNS=columns, num_warps=4,
    )  # fmt: skip
    return Added(total, normed, moments)


def backward(total: Tensor, moments: Tensor, norm: Norm, dtotal: Tensor | None, dnormed: Tensor) -> Slopes:
    """From the gradients of the sum, where anybody else uses it, and of its LayerNorm, (r, d) both."""
    rows, width = total.shape
    dx, normed = torch.empty_like(total), torch.empty_like(total)
    programs = triton.cdiv(rows, _EACH)
    sums = total.new_empty(programs, 3, width, dtype=torch.float32)
    columns = triton.next_power_of_2(width)
    tile, warps = (4, columns // 512) if columns >= 1024 else (2, max(columns // 256, 1))  # measured on an H200
    _backward[(programs,)](
        total, moments, norm.weight, norm.bias, dtotal, dnormed, dx, normed, sums, rows, width,
        HAS_TOTAL=dtotal is not None, EACH=_EACH, ROWS=tile, COLUMNS=columns, num_warps=warps,
    )  # fmt: skip
    return Slopes(dx, normed, sums.sum(0))
