"""A linear layer whose output goes through a GELU before it is written."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _gelu(h, GELU: tl.constexpr):
    """Quick or exact; the latter by Hastings' formula for erfc, which errs by no more than float32's own rounding."""
    if GELU == "quick":
        return h / (1.0 + tl.exp2(h * -2.455466959412555))
    t = 1.0 / (1.0 + 0.23164188699 * tl.abs(h))
    series = t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145)))
    tail = t * (0.127414796 + series) * tl.exp2(h * h * -0.7213475204444817)
    return h * tl.where(h < 0.0, tail, 1.0 - tail)


@triton.jit
def _store_columns(OUT, BIAS, h, row, first, outputs, COLUMNS: tl.constexpr, GELU: tl.constexpr):
    column = first + tl.arange(0, COLUMNS)
    h += tl.load(BIAS + column, mask=column < outputs, other=0.0).to(tl.float32)[None, :]
    OUT.store([row, first], _gelu(h, GELU).to(OUT.dtype))


@triton.jit
def linear_gelu(
    X, WEIGHT, OUT, BIAS, rows, outputs, inputs,
    GELU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """X (rows, inputs), WEIGHT (outputs, inputs) and OUT (rows, outputs) are tensor descriptors.

    A program computes tiles until all are done. GROUP tiles below each other come first, so that those computed at the
    same time share rows and columns in the cache. A tile is written in halves, which takes less shared memory.
    """
    tiles_down, tiles_across = tl.cdiv(rows, ROWS), tl.cdiv(outputs, COLUMNS)
    for tile in tl.range(tl.program_id(0), tiles_down * tiles_across, tl.num_programs(0), flatten=True):
        group, member = tile // (GROUP * tiles_across), tile % (GROUP * tiles_across)
        height = tl.minimum(tiles_down - group * GROUP, GROUP)
        row, column = (group * GROUP + member % height) * ROWS, member // height * COLUMNS
        h = tl.zeros((ROWS, COLUMNS), tl.float32)
        for step in range(tl.cdiv(inputs, DEPTH)):
            h = tl.dot(X.load([row, step * DEPTH]), WEIGHT.load([column, step * DEPTH]).T, h)
        left, right = tl.split(tl.permute(tl.reshape(h, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))
        _store_columns(OUT, BIAS, left, row, column, outputs, COLUMNS // 2, GELU)
        _store_columns(OUT, BIAS, right, row, column + COLUMNS // 2, outputs, COLUMNS // 2, GELU)
