"""The weight and bias of a LayerNorm, folded into the linear layer that reads it: what it must compute, and who starts
the kernels.

    W (z * scale + shift) + b  =  (W * scale) z + (b + W shift)

A sum over a weight's rows costs next to nothing beside one over a batch: folded, the norm keeps nothing for its own
weights in the backward pass and adds nothing up for them; their gradients come out of that of the folded weight.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from vitral.kernels.dispatch import launch
from vitral.kernels.jit import fold as jit
from vitral.kernels.weights import Dense, Norm

_EACH, _ROWS = 32, 4  # rows of a program when unfolding, and at a time


class Unfolded(NamedTuple):
    """Gradients: of the layer's weight (o, i), of the norm's weight and bias (i,)"""

    weight: Tensor
    scale: Tensor
    shift: Tensor


def fold_reference(dense: Dense, norm: Norm) -> Dense:
    """What `fold` computes, in plain PyTorch"""
    return Dense(dense.weight * norm.weight, dense.bias + dense.weight @ norm.bias)


def fold(dense: Dense, norm: Norm, dtype: torch.dtype) -> Dense:
    """(o, i), (o,) and the norm's (i,), (i,) -> the layer that takes what the norm gives without them, in `dtype`"""
    rows, width = dense.weight.shape
    folded = Dense(torch.empty_like(dense.weight, dtype=dtype), torch.empty_like(dense.bias, dtype=dtype))
    launch(
        jit.fold_norm, (triton.cdiv(rows, _ROWS),), *dense, norm.weight, norm.bias, *folded, rows, width,
        ROWS=_ROWS, COLUMNS=triton.next_power_of_2(width),
    )  # fmt: skip
    return folded


def unfold_reference(slope: Tensor, dbias: Tensor, dense: Dense, norm: Norm) -> Unfolded:
    """What `unfold` computes, in plain PyTorch"""
    return Unfolded(
        slope * norm.weight + dbias[:, None] * norm.bias, (slope * dense.weight).sum(0), dbias @ dense.weight
    )


def unfold(slope: Tensor, dbias: Tensor, dense: Dense, norm: Norm) -> Unfolded:
    """From the gradients of the folded weight, float32 (o, i), which is overwritten, and bias, float32 (o,)"""
    rows, width = slope.shape
    programs = triton.cdiv(rows, _EACH)
    sums = slope.new_empty(programs, 2, width)
    launch(
        jit.unfold_norm, (programs,), slope, dbias, dense.weight, norm.weight, norm.bias, sums, rows, width,
        EACH=_EACH, ROWS=_ROWS, COLUMNS=triton.next_power_of_2(width),
    )  # fmt: skip
    dscale, dshift = sums.sum(0)
    return Unfolded(slope, dscale, dshift)
