"""A sum with its LayerNorm, forwards and backwards, whole rows at a time."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def norm_forward(
    X, Y, BIAS, WEIGHT, SHIFT, TOTAL, NORMED, MOMENTS, rows, width, eps,
    HAS_Y: tl.constexpr, AFFINE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    place = row[:, None].to(tl.int64) * width + column[None, :]
    inside = (row[:, None] < rows) & (column[None, :] < width)
    total = tl.load(X + place, mask=inside, other=0.0)
    if HAS_Y:
        bias = tl.load(BIAS + column, mask=column < width, other=0.0).to(tl.float32)
        y = tl.load(Y + place, mask=inside, other=0.0)
        # Rounded before it is normalised, as whoever reads the sum will see it.
        total = (total.to(tl.float32) + y.to(tl.float32) + bias[None, :]).to(TOTAL.dtype.element_ty)
        tl.store(TOTAL + place, total, mask=inside)
    value = total.to(tl.float32)
    mean = tl.sum(value, 1) / width
    centred = tl.where(inside, value - mean[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 1) / width + eps)
    normed = centred * scale[:, None]
    if AFFINE:
        weight = tl.load(WEIGHT + column, mask=column < width, other=0.0).to(tl.float32)
        shift = tl.load(SHIFT + column, mask=column < width, other=0.0).to(tl.float32)
        normed = normed * weight[None, :] + shift[None, :]
    tl.store(NORMED + place, normed.to(NORMED.dtype.element_ty), mask=inside)
    tl.store(MOMENTS + row, mean, mask=row < rows)
    tl.store(MOMENTS + rows + row, scale, mask=row < rows)


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def norm_backward(
    KEPT, MOMENTS, WEIGHT, DTOTAL, DNORMED, DX, SUMS, rows, width,
    HAS_TOTAL: tl.constexpr, AFFINE: tl.constexpr, EACH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """KEPT is the sum where the norm is AFFINE, else what it was normalised to."""
    column = tl.arange(0, COLUMNS)
    dbias = tl.zeros((COLUMNS,), tl.float32)
    dweight = tl.zeros((COLUMNS,), tl.float32)
    dshift = tl.zeros((COLUMNS,), tl.float32)
    first = tl.program_id(0) * EACH
    for start in range(first, first + EACH, ROWS):
        row = start + tl.arange(0, ROWS)
        place = row[:, None].to(tl.int64) * width + column[None, :]
        inside = (row[:, None] < rows) & (column[None, :] < width)
        value = tl.load(KEPT + place, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(DNORMED + place, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(MOMENTS + rows + row, mask=row < rows, other=0.0)[:, None]
        slope = grad
        if AFFINE:
            mean = tl.load(MOMENTS + row, mask=row < rows, other=0.0)[:, None]
            value = tl.where(inside, (value - mean) * scale, 0.0)
            dweight += tl.sum(grad * value, 0)
            dshift += tl.sum(grad, 0)
            slope *= tl.load(WEIGHT + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
        along, level = tl.reduce((value * slope, slope), 1, _add_pairs)
        dx = (slope - value * (along / width)[:, None] - (level / width)[:, None]) * scale
        if HAS_TOTAL:
            dx += tl.load(DTOTAL + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(DX + place, dx.to(DX.dtype.element_ty), mask=inside)
        dbias += tl.sum(dx, 0)  # rows beyond the last are zero, since their scale is
    if AFFINE:
        place = SUMS + tl.program_id(0) * 3 * width + column
        tl.store(place + width, dweight, mask=column < width)
        tl.store(place + 2 * width, dshift, mask=column < width)
    else:
        place = SUMS + tl.program_id(0) * width + column
    tl.store(place, dbias, mask=column < width)
