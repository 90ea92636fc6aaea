"""GELU backwards, a part of a row at a time."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gelu_backward(
    H, GRAD, DH, OUT, SUMS, rows, width,
    TANH: tl.constexpr, HAS_OUT: tl.constexpr, EACH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.program_id(0) * EACH
    total = tl.zeros((COLUMNS,), tl.float32)
    for number in range(EACH):
        row = first + number + tl.arange(0, 1)
        place = row.to(tl.int64) * width + column
        inside = (row < rows) & (column < width)
        h = tl.load(H + place, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(GRAD + place, mask=inside, other=0.0).to(tl.float32)
        if TANH:  # h * share, where share = sigmoid(2 * sqrt(2 / pi) * (h + 0.044715 * h^3)), by powers of 2
            square = h * h
            share = 1.0 / (1.0 + tl.exp2(h * (-2.302208198144325 - 0.10294323460941147 * square)))
            rise = h * (1.5957691216057308 + 0.21406443848170365 * square)
            dh = grad * share * (1.0 + rise * (1.0 - share))
        else:
            share = 0.5 * (1.0 + tl.erf(h * 0.7071067811865476))
            dh = grad * (share + h * 0.3989422804014327 * tl.exp(-0.5 * h * h))
        tl.store(DH + place, dh.to(DH.dtype.element_ty), mask=inside)
        if HAS_OUT:
            tl.store(OUT + place, (h * share).to(OUT.dtype.element_ty), mask=inside)
        total += dh
    tl.store(SUMS + tl.program_id(0) * width + column, total, mask=column < width)
