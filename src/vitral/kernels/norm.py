"""A sum and its LayerNorm in one pass over memory, and backwards: what it must compute, and who starts the kernels.

    x' = x + y + bias;  z = LN(x')

is what stands between two branches of a block. Without the norm's own weight and bias (`fold.py` folds them into the
product that reads z) the backward pass has to keep z alone, and to add up only the gradient of the bias.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from vitral.kernels.dispatch import launch
from vitral.kernels.jit import norm as jit
from vitral.kernels.weights import Norm, PlainNorm

_EACH, _ROWS = 16, 2  # rows of a program of the backward kernel, and at a time


class Added(NamedTuple):
    """x + y + bias and its LayerNorm, both (r, d); for the backward pass mean and 1 / deviation of the rows, (2, r)."""

    total: Tensor
    normed: Tensor
    moments: Tensor


def reference(x: Tensor, y: Tensor, bias: Tensor, norm: Norm | PlainNorm) -> tuple[Tensor, Tensor]:
    """What the kernels compute, in plain PyTorch: (r, d), (r, d), (d,) -> (r, d), (r, d)"""
    total = x + y + bias
    return total, F.layer_norm(total, total.shape[-1:], norm.weight, norm.bias, norm.eps)


def forward(x: Tensor, y: Tensor | None, bias: Tensor | None, norm: Norm | PlainNorm) -> Added:
    """(r, d), (r, d) and (d,), or neither, to x's precision; without them the sum is x itself."""
    rows, width = x.shape
    total = x if y is None else torch.empty_like(x)
    normed, moments = torch.empty_like(x), x.new_empty(2, rows, dtype=torch.float32)
    columns = triton.next_power_of_2(width)
    tile = max(4096 // columns, 1)
    launch(
        jit.norm_forward, (triton.cdiv(rows, tile),),
        x, y, bias, norm.weight, norm.bias, total, normed, moments, rows, width, norm.eps,
        HAS_Y=y is not None, AFFINE=norm.weight is not None, ROWS=tile, COLUMNS=columns,
    )  # fmt: skip
    return Added(total, normed, moments)


def backward(
    kept: Tensor, moments: Tensor, weight: Tensor | None, dtotal: Tensor | None, dnormed: Tensor
) -> tuple[Tensor, Tensor]:
    """From the gradients of the sum, where anybody else uses it, and of its LayerNorm, (r, d) both: the gradient of x
    and of y, (r, d); those of the bias that was added and, with a `weight`, of the norm's weight and bias, (1 or 3, d).

    `kept` is `Added.normed` of a norm without a weight, else `Added.total`.
    """
    rows, width = kept.shape
    dx = torch.empty_like(kept)
    programs = triton.cdiv(rows, _EACH)
    sums = kept.new_empty(programs, 1 if weight is None else 3, width, dtype=torch.float32)
    columns = triton.next_power_of_2(width)
    launch(
        jit.norm_backward, (programs,), kept, moments, weight, dtotal, dnormed, dx, sums, rows, width,
        HAS_TOTAL=dtotal is not None, AFFINE=weight is not None, EACH=_EACH, ROWS=_ROWS, COLUMNS=columns,
        warps=max(columns // 512, 1),
    )  # fmt: skip
    return dx, sums.sum(0)
