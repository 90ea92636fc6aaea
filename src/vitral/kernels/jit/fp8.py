"""Quantisation to FP8 (e4m3, whose largest number is 448): of activations, of weights, and of gradients by row."""

from __future__ import annotations

import triton
import triton.language as tl

from vitral.kernels.jit.gelu import gelu_of


@triton.jit
def to_e4m3(value, POINTER):
    """As what POINTER points to; beyond the largest number the conversion would give NaN on some devices."""
    return tl.minimum(tl.maximum(value, -448.0), 448.0).to(POINTER.dtype.element_ty)


@triton.jit
def row_scale(largest):
    """The scale of a row by its largest magnitude, which may be 0."""
    return tl.maximum(largest / 448.0, 1e-30)


@triton.jit
def quantize(X, OUT, SCALE, size, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """OUT = X / SCALE, or with GELU ("tanh", "none" for the exact one, or "quick") GELU(X) / SCALE."""
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(X + offset, mask=offset < size, other=0.0).to(tl.float32)
    if GELU != "":
        value = gelu_of(value, GELU)
    tl.store(OUT + offset, to_e4m3(value / tl.load(SCALE), OUT), mask=offset < size)


@triton.jit
def quantize_rows(X, FACTOR, OUT, SCALE, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """OUT * SCALE = X * FACTOR, with a FACTOR per column and a SCALE per row."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    offset = row[:, None].to(tl.int64) * width + column[None, :]
    inside = (row[:, None] < rows) & (column[None, :] < width)
    factor = tl.load(FACTOR + column, mask=column < width, other=0.0)
    value = tl.load(X + offset, mask=inside, other=0.0).to(tl.float32) * factor[None, :]
    scale = row_scale(tl.max(tl.abs(value), 1))
    tl.store(OUT + offset, to_e4m3(value / scale[:, None], OUT), mask=inside)
    tl.store(SCALE + row, scale, mask=row < rows)


@triton.jit
def quantize_weight(
    WEIGHT, BIAS, NORM_WEIGHT, NORM_BIAS, VALUES, SCALE, FOLDED_BIAS, OUT_SCALE, rows, width, norm,
    FOLDS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """VALUES * SCALE = WEIGHT, with a SCALE per row.

    FOLDS: a LayerNorm's weight and bias are folded into WEIGHT and BIAS, and OUT_SCALE is the scale of each output for
    inputs of the Euclidean length `norm`.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    offset = row[:, None] * width + column[None, :]
    inside = (row[:, None] < rows) & (column[None, :] < width)
    weight = tl.load(WEIGHT + offset, mask=inside, other=0.0).to(tl.float32)
    if FOLDS:
        norm_weight = tl.load(NORM_WEIGHT + column, mask=column < width, other=0.0).to(tl.float32)
        norm_bias = tl.load(NORM_BIAS + column, mask=column < width, other=0.0).to(tl.float32)
        bias = tl.load(BIAS + row, mask=row < rows, other=0.0).to(tl.float32)
        bias += tl.sum(weight * norm_bias[None, :], 1)
        weight *= norm_weight[None, :]
        tl.store(FOLDED_BIAS + row, bias.to(FOLDED_BIAS.dtype.element_ty), mask=row < rows)
        largest = tl.sqrt(tl.sum(weight * weight, 1)) * norm + tl.abs(bias)
        tl.store(OUT_SCALE + row, row_scale(largest), mask=row < rows)
    scale = row_scale(tl.max(tl.abs(weight), 1))
    tl.store(VALUES + offset, to_e4m3(weight / scale[:, None], VALUES), mask=inside)
    tl.store(SCALE + row, scale, mask=row < rows)


@triton.jit
def transpose(X, OUT, rows, width, TILE: tl.constexpr):
    """X (rows, width) of bytes -> OUT (width, rows)"""
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = (row[:, None] < rows) & (column[None, :] < width)
    value = tl.load(X + row[:, None] * width + column[None, :], mask=inside, other=0)
    inside = (column[:, None] < width) & (row[None, :] < rows)
    tl.store(OUT + column[:, None] * rows + row[None, :], tl.trans(value), mask=inside)
