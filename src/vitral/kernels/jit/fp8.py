"""Quantisation to FP8 (e4m3, whose largest number is 448): of activations and weights, of gradients by row, and of
what the products for the gradients of weights read, transposed."""

from __future__ import annotations

import triton
import triton.language as tl

from vitral.kernels.jit.gelu import gelu_gradient, gelu_of


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
    tl.store(OUT + offset, to_e4m3(value * (1.0 / tl.load(SCALE)), OUT), mask=offset < size)


@triton.jit
def quantize_rows(
    X, FACTOR, OUT, SCALE, LENGTH, LARGEST, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """OUT * SCALE = X * FACTOR, with a FACTOR per column and a SCALE per row; LENGTH is the Euclidean norm of rows.

    LARGEST, which is 0 before, becomes the largest SCALE.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    offset = row[:, None].to(tl.int64) * width + column[None, :]
    inside = (row[:, None] < rows) & (column[None, :] < width)
    factor = tl.load(FACTOR + column, mask=column < width, other=0.0)
    value = tl.load(X + offset, mask=inside, other=0.0).to(tl.float32) * factor[None, :]
    scale = row_scale(tl.max(tl.abs(value), 1))
    tl.store(OUT + offset, to_e4m3(value * (1.0 / scale)[:, None], OUT), mask=inside)
    tl.store(SCALE + row, scale, mask=row < rows)
    tl.store(LENGTH + row, tl.sqrt(tl.sum(value * value, 1)), mask=row < rows)
    tl.atomic_max(LARGEST, tl.max(scale, 0))


@triton.jit
def quantize_weight(
    WEIGHT, BIAS, NORM_WEIGHT, NORM_BIAS, VALUES, SCALE, FOLDED_BIAS, LARGEST, LARGEST_OUT, rows, width, norm, first,
    FOLDS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """VALUES * SCALE = WEIGHT, with a SCALE per row.

    FOLDS: a LayerNorm's weight and bias are folded into WEIGHT and BIAS. LARGEST and LARGEST_OUT, which are 0 before,
    become the largest SCALE and the largest scale of an output from `first` on for inputs of the Euclidean length
    `norm`.
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
        bound = tl.sqrt(tl.sum(weight * weight, 1)) * norm + tl.abs(bias)
        out_scale = tl.where((row >= first) & (row < rows), row_scale(bound), 0.0)
        tl.atomic_max(LARGEST_OUT, tl.max(out_scale, 0))
    # Not less, as gradients are multiplied by it: the weights of a new layer may be zero.
    scale = tl.maximum(tl.max(tl.abs(weight), 1) / 448.0, 1e-7)
    tl.store(VALUES + offset, to_e4m3(weight * (1.0 / scale)[:, None], VALUES), mask=inside)
    tl.store(SCALE + row, scale, mask=row < rows)
    if FOLDS:
        tl.atomic_max(LARGEST, tl.max(scale, 0))


@triton.jit
def transpose(
    X, SCALE, LARGEST, UNIT, OUT, rows, width, padded,
    SCALED: tl.constexpr, GELU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """X (rows, width) of bytes -> OUT (width, padded), with zeros beyond `rows`.

    SCALED: of numbers in half precision, or GELU of them, times SCALE / (LARGEST * UNIT) with a SCALE per row, in e4m3.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = (row[:, None] < rows) & (column[None, :] < width)
    value = tl.load(X + row[:, None].to(tl.int64) * width + column[None, :], mask=inside, other=0)
    if SCALED:
        value = value.to(tl.float32)
        if GELU != "":
            value = gelu_of(value, GELU)
        scale = tl.load(SCALE + row, mask=row < rows, other=0.0) / (tl.load(LARGEST) * tl.load(UNIT))
        value *= scale[:, None]
    # Triton moves what it has loaded between threads, in half precision: 3.6 and 3.7 spoil some numbers that move in
    # FP8 (its issue 11111). A test compiles this and looks.
    inside = (column[:, None] < width) & (row[None, :] < padded)
    value = tl.trans(value).to(OUT.dtype.element_ty)
    tl.store(OUT + column[:, None].to(tl.int64) * padded + row[None, :], value, mask=inside)


@triton.jit
def gelu_backward(
    H, GRAD, LENGTH, LARGEST_FACTOR, FACTOR, DH, SCALE, LARGEST, SUMS, rows, width, bound,
    GELU: tl.constexpr, PROGRAM_ROWS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The gradient dh of the GELU's input H: DH * SCALE = dh * FACTOR, with a FACTOR per column.

    SCALE = LENGTH * LARGEST_FACTOR * bound per row; LARGEST, which is 0 before, becomes the largest of these. SUMS are
    the column sums of dh over the rows of a program.
    """
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    factor = tl.load(FACTOR + column, mask=column < width, other=0.0)
    row_bound = tl.load(LARGEST_FACTOR) * bound
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    largest = tl.zeros((ROWS,), tl.float32)
    first = tl.program_id(0) * PROGRAM_ROWS
    for start in range(first, first + PROGRAM_ROWS, ROWS):
        row = start + tl.arange(0, ROWS)
        offset = row[:, None].to(tl.int64) * width + column[None, :]
        inside = (row[:, None] < rows) & (column[None, :] < width)
        h = tl.load(H + offset, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(GRAD + offset, mask=inside, other=0.0).to(tl.float32)
        _, dh = gelu_gradient(h, grad, GELU)
        scale = tl.maximum(tl.load(LENGTH + row, mask=row < rows, other=0.0) * row_bound, 1e-30)
        # None is beyond the largest number, by the choice of the scales: `to_e4m3` would take more instructions.
        tl.store(DH + offset, (dh * factor[None, :] * (1.0 / scale)[:, None]).to(DH.dtype.element_ty), mask=inside)
        if tl.program_id(1) == 0:
            tl.store(SCALE + row, scale, mask=row < rows)
        largest = tl.maximum(largest, scale)
        total += dh
    tl.store(SUMS + tl.program_id(0) * width + column, tl.sum(total, 0), mask=column < width)
    if tl.program_id(1) == 0:
        tl.atomic_max(LARGEST, tl.max(largest, 0))
