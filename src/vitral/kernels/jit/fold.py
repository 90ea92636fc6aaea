"""A norm's weight and bias, folded into the linear layer after it and out of its gradient again."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def fold_norm(
    WEIGHT, BIAS, SCALE, SHIFT, FOLDED, FOLDED_BIAS, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    place = row[:, None] * width + column[None, :]
    inside = (row[:, None] < rows) & (column[None, :] < width)
    weight = tl.load(WEIGHT + place, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(SCALE + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    shift = tl.load(SHIFT + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    tl.store(FOLDED + place, (weight * scale).to(FOLDED.dtype.element_ty), mask=inside)
    bias = tl.load(BIAS + row, mask=row < rows, other=0.0).to(tl.float32) + tl.sum(weight * shift, 1)
    tl.store(FOLDED_BIAS + row, bias.to(FOLDED_BIAS.dtype.element_ty), mask=row < rows)


@triton.jit
def unfold_norm(
    SLOPE, DBIAS, WEIGHT, SCALE, SHIFT, SUMS, rows, width,
    EACH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """SLOPE, of the folded weight, becomes that of the weight."""
    column = tl.arange(0, COLUMNS)
    scale = tl.load(SCALE + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    shift = tl.load(SHIFT + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    dscale = tl.zeros((COLUMNS,), tl.float32)
    dshift = tl.zeros((COLUMNS,), tl.float32)
    first = tl.program_id(0) * EACH
    for start in range(first, first + EACH, ROWS):
        row = start + tl.arange(0, ROWS)
        place = row[:, None] * width + column[None, :]
        inside = (row[:, None] < rows) & (column[None, :] < width)
        slope = tl.load(SLOPE + place, mask=inside, other=0.0)
        weight = tl.load(WEIGHT + place, mask=inside, other=0.0).to(tl.float32)
        dbias = tl.load(DBIAS + row, mask=row < rows, other=0.0)[:, None]
        tl.store(SLOPE + place, slope * scale + dbias * shift, mask=inside)
        dscale += tl.sum(slope * weight, 0)
        dshift += tl.sum(dbias * weight, 0)
    place = SUMS + tl.program_id(0) * 2 * width + column
    tl.store(place, dscale, mask=column < width)
    tl.store(place + width, dshift, mask=column < width)
