"""Element-wise kernels of a block: GELU backward, residual sum with LayerNorm, and folding a LayerNorm's weights.

GELU is "tanh", "none" (exact) or "quick": h * sigmoid(1.702 * h).
"""

from __future__ import annotations

import triton
import triton.language as tl

from vitral.kernels.jit.fp8 import row_scale, to_e4m3
from vitral.kernels.jit.gelu import gelu_gradient


@triton.jit
def column_sums(
    X, FACTOR, OUT, rows, width, HAS_FACTOR: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """OUT (width,) are the sums over the rows of X (rows, width), each row times its FACTOR."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row[:, None] < rows) & (column[None, :] < width)
        value = tl.load(X + row[:, None].to(tl.int64) * width + column[None, :], mask=inside, other=0.0).to(tl.float32)
        if HAS_FACTOR:
            value *= tl.load(FACTOR + row, mask=row < rows, other=0.0)[:, None]
        total += value
    tl.store(OUT + column, tl.sum(total, 0), mask=column < width)


@triton.jit
def gelu_backward(
    H, GRAD, DH, OUT, SUMS, rows, width,
    GELU: tl.constexpr, HAS_OUT: tl.constexpr,
    PROGRAM_ROWS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.program_id(0) * PROGRAM_ROWS
    dbias = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(first, first + PROGRAM_ROWS, ROWS):
        row = start + tl.arange(0, ROWS)
        offset = row[:, None].to(tl.int64) * width + column[None, :]
        inside = (row[:, None] < rows) & (column[None, :] < width)
        h = tl.load(H + offset, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(GRAD + offset, mask=inside, other=0.0).to(tl.float32)
        gate, dh = gelu_gradient(h, grad, GELU)
        tl.store(DH + offset, dh.to(DH.dtype.element_ty), mask=inside)
        if HAS_OUT:
            tl.store(OUT + offset, (h * gate).to(OUT.dtype.element_ty), mask=inside)
        dbias += dh
    tl.store(SUMS + tl.program_id(0) * width + column, tl.sum(dbias, 0), mask=column < width)


@triton.jit
def _branch_factor(DRAWS, row, rows, tokens, keep):
    """1 / keep where the row's image keeps the branch, else 0: (rows,)"""
    draw = tl.load(DRAWS + row // tokens, mask=row < rows, other=1.0).to(tl.float32)
    return tl.where(draw < keep, 1.0, 0.0) / keep


@triton.jit
def norm_forward(
    X, Y, BIAS, DRAWS, WEIGHT, SHIFT, TOTAL, NORMED, QUANTIZED, MOMENTS, rows, width, eps, tokens, keep, factor,
    HAS_Y: tl.constexpr, HAS_DRAWS: tl.constexpr, AFFINE: tl.constexpr,
    HAS_NORMED: tl.constexpr, HAS_QUANTIZED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """QUANTIZED is the output times `factor` in FP8."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    offset = row[:, None].to(tl.int64) * width + column[None, :]
    inside = (row[:, None] < rows) & (column[None, :] < width)
    total = tl.load(X + offset, mask=inside, other=0.0)
    if HAS_Y:
        bias = tl.load(BIAS + column, mask=column < width, other=0.0).to(tl.float32)
        y = tl.load(Y + offset, mask=inside, other=0.0)
        # Rounded before it is normalized: later readers of the sum get the rounded values, too.
        if HAS_DRAWS:
            branch = (y.to(tl.float32) + bias[None, :]) * _branch_factor(DRAWS, row, rows, tokens, keep)[:, None]
            total = (total.to(tl.float32) + branch).to(TOTAL.dtype.element_ty)
        else:
            total = (total.to(tl.float32) + y.to(tl.float32) + bias[None, :]).to(TOTAL.dtype.element_ty)
        tl.store(TOTAL + offset, total, mask=inside)
    value = total.to(tl.float32)
    mean = tl.sum(value, 1) / width
    centered = tl.where(inside, value - mean[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(centered * centered, 1) / width + eps)
    normed = centered * scale[:, None]
    if AFFINE:
        weight = tl.load(WEIGHT + column, mask=column < width, other=0.0).to(tl.float32)
        shift = tl.load(SHIFT + column, mask=column < width, other=0.0).to(tl.float32)
        normed = normed * weight[None, :] + shift[None, :]
    if HAS_NORMED:
        tl.store(NORMED + offset, normed.to(NORMED.dtype.element_ty), mask=inside)
    if HAS_QUANTIZED:
        tl.store(QUANTIZED + offset, to_e4m3(normed * factor, QUANTIZED), mask=inside)
    tl.store(MOMENTS + row, mean, mask=row < rows)
    tl.store(MOMENTS + rows + row, scale, mask=row < rows)


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def norm_backward(
    SAVED, MOMENTS, WEIGHT, DTOTAL, DNORMED, DRAWS, DX, DY, SUMS, FACTOR, QUANTIZED, SCALE, LARGEST,
    rows, width, tokens, keep,
    HAS_TOTAL: tl.constexpr, HAS_DRAWS: tl.constexpr, AFFINE: tl.constexpr, QUANTIZES: tl.constexpr,
    PROGRAM_ROWS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """SAVED is the sum x + y + bias if the norm is AFFINE, else the normalized output.

    QUANTIZES: QUANTIZED * SCALE = DY * FACTOR, with a SCALE per row; LARGEST, which is 0 before, becomes the largest.
    """
    column = tl.arange(0, COLUMNS)
    dbias = tl.zeros((COLUMNS,), tl.float32)
    dweight = tl.zeros((COLUMNS,), tl.float32)
    dshift = tl.zeros((COLUMNS,), tl.float32)
    largest = tl.zeros((ROWS,), tl.float32)
    first = tl.program_id(0) * PROGRAM_ROWS
    for start in range(first, first + PROGRAM_ROWS, ROWS):
        row = start + tl.arange(0, ROWS)
        offset = row[:, None].to(tl.int64) * width + column[None, :]
        inside = (row[:, None] < rows) & (column[None, :] < width)
        value = tl.load(SAVED + offset, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(DNORMED + offset, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(MOMENTS + rows + row, mask=row < rows, other=0.0)[:, None]
        dz = grad
        if AFFINE:
            mean = tl.load(MOMENTS + row, mask=row < rows, other=0.0)[:, None]
            value = tl.where(inside, (value - mean) * scale, 0.0)
            dweight += tl.sum(grad * value, 0)
            dshift += tl.sum(grad, 0)
            dz *= tl.load(WEIGHT + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
        dot, dz_sum = tl.reduce((value * dz, dz), 1, _add_pairs)
        dx = (dz - value * (dot / width)[:, None] - (dz_sum / width)[:, None]) * scale
        if HAS_TOTAL:
            dx += tl.load(DTOTAL + offset, mask=inside, other=0.0).to(tl.float32)
        tl.store(DX + offset, dx.to(DX.dtype.element_ty), mask=inside)
        if HAS_DRAWS:
            dx *= _branch_factor(DRAWS, row, rows, tokens, keep)[:, None]
            tl.store(DY + offset, dx.to(DY.dtype.element_ty), mask=inside)
        if QUANTIZES:
            value = dx * tl.load(FACTOR + column, mask=column < width, other=0.0)[None, :]
            row_scales = row_scale(tl.max(tl.abs(value), 1))
            tl.store(QUANTIZED + offset, to_e4m3(value * (1.0 / row_scales)[:, None], QUANTIZED), mask=inside)
            tl.store(SCALE + row, row_scales, mask=row < rows)
            largest = tl.maximum(largest, row_scales)
        dbias += tl.sum(dx, 0)  # rows beyond the last are zero, as their scale is
    if AFFINE:
        pointer = SUMS + tl.program_id(0) * 3 * width + column
        tl.store(pointer + width, dweight, mask=column < width)
        tl.store(pointer + 2 * width, dshift, mask=column < width)
    else:
        pointer = SUMS + tl.program_id(0) * width + column
    tl.store(pointer, dbias, mask=column < width)
    if QUANTIZES:
        tl.atomic_max(LARGEST, tl.max(largest, 0))


@triton.jit
def fold_norm(
    WEIGHT, BIAS, SCALE, SHIFT, FOLDED, FOLDED_BIAS, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    offset = row[:, None] * width + column[None, :]
    inside = (row[:, None] < rows) & (column[None, :] < width)
    weight = tl.load(WEIGHT + offset, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(SCALE + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    shift = tl.load(SHIFT + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    tl.store(FOLDED + offset, (weight * scale).to(FOLDED.dtype.element_ty), mask=inside)
    bias = tl.load(BIAS + row, mask=row < rows, other=0.0).to(tl.float32) + tl.sum(weight * shift, 1)
    tl.store(FOLDED_BIAS + row, bias.to(FOLDED_BIAS.dtype.element_ty), mask=row < rows)


@triton.jit
def unfold_norm(
    DFOLDED, DIVISOR, DBIAS, WEIGHT, SCALE, SHIFT, SUMS, rows, width,
    HAS_DIVISOR: tl.constexpr, PROGRAM_ROWS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """DFOLDED, the gradient of the folded weight (times the DIVISOR of its row), is overwritten by the weight's."""
    column = tl.arange(0, COLUMNS)
    scale = tl.load(SCALE + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    shift = tl.load(SHIFT + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    dscale = tl.zeros((COLUMNS,), tl.float32)
    dshift = tl.zeros((COLUMNS,), tl.float32)
    first = tl.program_id(0) * PROGRAM_ROWS
    for start in range(first, first + PROGRAM_ROWS, ROWS):
        row = start + tl.arange(0, ROWS)
        offset = row[:, None] * width + column[None, :]
        inside = (row[:, None] < rows) & (column[None, :] < width)
        dfolded = tl.load(DFOLDED + offset, mask=inside, other=0.0)
        if HAS_DIVISOR:
            dfolded /= tl.load(DIVISOR + row, mask=row < rows, other=1.0)[:, None]
        weight = tl.load(WEIGHT + offset, mask=inside, other=0.0).to(tl.float32)
        dbias = tl.load(DBIAS + row, mask=row < rows, other=0.0)[:, None]
        tl.store(DFOLDED + offset, dfolded * scale + dbias * shift, mask=inside)
        dscale += tl.sum(dfolded * weight, 0)
        dshift += tl.sum(dbias * weight, 0)
    pointer = SUMS + tl.program_id(0) * 2 * width + column
    tl.store(pointer, dscale, mask=column < width)
    tl.store(pointer + width, dshift, mask=column < width)
