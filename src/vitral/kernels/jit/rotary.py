"""Rotary position embeddings: pairs of channels of queries and keys are rotated in place."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _load_pairs(base, mask, HALF: tl.constexpr, ADJACENT: tl.constexpr):
    """The two channels of each pair, (rows, pairs) each in float32; ADJACENT, `base` points to both."""
    x = tl.load(base, mask=mask, other=0.0).to(tl.float32)
    if ADJACENT:
        x, y = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    else:
        y = tl.load(base + HALF, mask=mask, other=0.0).to(tl.float32)
    return x, y


@triton.jit
def _store_pairs(base, mask, x, y, HALF: tl.constexpr, ADJACENT: tl.constexpr):
    if ADJACENT:
        both = tl.reshape(tl.join(x, y), (x.shape[0], x.shape[1] * 2))
        tl.store(base, both.to(base.dtype.element_ty), mask=mask)
    else:
        tl.store(base, x.to(base.dtype.element_ty), mask=mask)
        tl.store(base + HALF, y.to(base.dtype.element_ty), mask=mask)


@triton.jit
def rotate(
    QKV, COS, SIN, SUMS, rows, tokens, heads,
    PARTS: tl.constexpr, HALF: tl.constexpr, HEAD_TABLES: tl.constexpr, ADJACENT: tl.constexpr, INVERSE: tl.constexpr,
    PROGRAM_ROWS: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Rotate by the angles of the tables or, INVERSE, back; then SUMS are the column sums of what PROGRAM_ROWS became.

    A row has the pairs of the queries' heads, then those of the keys' heads (2 PARTS), or the latter alone (1 part),
    and values behind them. The channels of a pair are HALF apart in their head, or ADJACENT.
    """
    pair = tl.program_id(1) * PAIRS + tl.arange(0, PAIRS)
    exists = pair < PARTS * heads * HALF
    angle, angles = pair % HALF, HALF
    if HEAD_TABLES:
        angle, angles = pair % (heads * HALF), heads * HALF
    if ADJACENT:  # both channels of a pair are loaded at once
        column = 2 * PAIRS * tl.program_id(1) + tl.arange(0, 2 * PAIRS)
        column_exists = column < 2 * PARTS * heads * HALF
    else:
        column = pair // HALF * (2 * HALF) + pair % HALF
        column_exists = exists
    x_sum = tl.zeros((1, PAIRS), tl.float32)
    y_sum = tl.zeros((1, PAIRS), tl.float32)
    first = tl.program_id(0) * PROGRAM_ROWS
    for start in range(first, first + PROGRAM_ROWS, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row[:, None] < rows) & exists[None, :]
        table = (row % tokens)[:, None] * angles + angle[None, :]
        cos = tl.load(COS + table, mask=inside, other=0.0)
        sin = tl.load(SIN + table, mask=inside, other=0.0)
        if INVERSE:
            sin = -sin
        base = QKV + row[:, None].to(tl.int64) * (2 * (PARTS + 1) * heads * HALF) + column[None, :]
        mask = (row[:, None] < rows) & column_exists[None, :]
        x, y = _load_pairs(base, mask, HALF, ADJACENT)
        x, y = x * cos - y * sin, y * cos + x * sin
        _store_pairs(base, mask, x, y, HALF, ADJACENT)
        if INVERSE:
            x_sum += tl.sum(x, 0)[None, :]
            y_sum += tl.sum(y, 0)[None, :]
    if INVERSE:
        base = SUMS + tl.program_id(0) * (2 * PARTS * heads * HALF) + column[None, :]
        _store_pairs(base, column_exists[None, :], x_sum, y_sum, HALF, ADJACENT)
