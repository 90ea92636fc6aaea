"""Attention over short sequences: a program computes a head, or some rows of it, with all keys and values on chip.

PARTS are the (first, size) of the parts that a sequence is split into, see `kernels/attention.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vitral.kernels.jit.fp8 import to_e4m3


@triton.jit
def _rows(base, first, stride, N: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, MASK: tl.constexpr):
    """(SIZE, D) elements from row `first` on; with MASK, zeros beyond the last row."""
    row = first + tl.arange(0, SIZE)
    pointer = base + row[:, None] * stride + tl.arange(0, D)[None, :]
    if MASK:
        return tl.load(pointer, mask=row[:, None] < N, other=0.0)
    return tl.load(pointer)


@triton.jit
def _tiles(base, stride, N: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr):
    """All rows of a head, part by part."""
    tiles = ()
    for i in tl.static_range(len(PARTS)):
        tiles = tiles + (_rows(base, PARTS[i][0], stride, N, D, PARTS[i][1], PARTS[i][0] + PARTS[i][1] > N),)
    return tiles


@triton.jit
def _row_values(base, first, N: tl.constexpr, SIZE: tl.constexpr, other):
    """One value per row."""
    row = first + tl.arange(0, SIZE)
    return tl.load(base + row, mask=row < N, other=other)


@triton.jit
def _scores(q, k, BIAS, row, first, scale, N: tl.constexpr, SIZE: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Logits of queries and the keys from `first` on, divided by `scale`: (rows, SIZE)"""
    column = first + tl.arange(0, SIZE)
    s = tl.dot(q, tl.trans(k))
    if HAS_BIAS:
        inside = (row[:, None] < N) & (column[None, :] < N)
        bias = tl.load(BIAS + row[:, None] * N + column[None, :], mask=inside, other=0.0)
        s += bias.to(tl.float32) / scale
    if first + SIZE > N:
        s = tl.where(column[None, :] < N, s, float("-inf"))
    return s


@triton.jit
def _forward_rows(
    base, BIAS, OUT, QUANTIZED, OUT_SCALE, LSE, keys, values, heads, scale, first,
    N: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_OUT: tl.constexpr, HAS_QUANTIZED: tl.constexpr,
):  # fmt: skip
    """The outputs of SIZE queries from `first` on."""
    row = first + tl.arange(0, SIZE)
    q = _rows(base, first, 3 * heads * D, N, D, SIZE, True)
    scores = ()
    for j in tl.static_range(len(PARTS)):
        scores = scores + (_scores(q, keys[j], BIAS, row, PARTS[j][0], scale, N, PARTS[j][1], HAS_BIAS),)
    row_max = tl.max(scores[0], 1)
    for j in tl.static_range(1, len(PARTS)):
        row_max = tl.maximum(row_max, tl.max(scores[j], 1))
    base_2 = scale * 1.4426950408889634
    row_max *= base_2
    total = tl.zeros_like(row_max)
    out = tl.zeros((SIZE, D), tl.float32)
    for j in tl.static_range(len(PARTS)):
        p = tl.exp2(scores[j] * base_2 - row_max[:, None])
        total += tl.sum(p, 1)
        out = tl.dot(p.to(q.dtype), values[j], out)
    out *= (1.0 / total)[:, None]
    offset = row[:, None] * (heads * D) + tl.arange(0, D)[None, :]
    if HAS_OUT:
        tl.store(OUT + offset, out.to(OUT.dtype.element_ty), mask=row[:, None] < N)
    if HAS_QUANTIZED:
        tl.store(QUANTIZED + offset, to_e4m3(out * (1.0 / tl.load(OUT_SCALE)), QUANTIZED), mask=row[:, None] < N)
    tl.store(LSE + row, row_max + tl.log2(total), mask=row < N)


@triton.jit
def attention_forward(
    QKV, BIAS, OUT, QUANTIZED, OUT_SCALE, LSE, heads, scale,
    N: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_OUT: tl.constexpr, HAS_QUANTIZED: tl.constexpr,
):  # fmt: skip
    """One head of one image; several programs share its rows if there are few heads.

    The output is written as it is, and in FP8, divided by OUT_SCALE; or one of the two.
    """
    head = tl.program_id(0)
    image, head_offset = (head // heads).to(tl.int64), (head % heads) * D
    stride = 3 * heads * D
    base = QKV + image * N * stride + head_offset
    if HAS_OUT:
        OUT += image * N * heads * D + head_offset
    if HAS_QUANTIZED:
        QUANTIZED += image * N * heads * D + head_offset
    LSE += head.to(tl.int64) * N
    if HAS_BIAS:
        BIAS += head.to(tl.int64) * N * N
    keys = _tiles(base + heads * D, stride, N, D, PARTS)
    values = _tiles(base + 2 * heads * D, stride, N, D, PARTS)
    for tile in range(tl.program_id(1), tl.cdiv(N, ROWS), tl.num_programs(1)):
        _forward_rows(
            base, BIAS, OUT, QUANTIZED, OUT_SCALE, LSE, keys, values, heads, scale, tile * ROWS, N, D, ROWS, PARTS,
            HAS_BIAS, HAS_OUT, HAS_QUANTIZED,
        )  # fmt: skip


@triton.jit
def _query_rows(
    base, BIAS, OUT, GRAD, LSE, DELTA, DQ, DBIAS, keys, values, heads, scale, first,
    N: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """The gradient of SIZE queries from `first` on; their sum, (D,)"""
    row = first + tl.arange(0, SIZE)
    q = _rows(base, first, 3 * heads * D, N, D, SIZE, True)
    grad = _rows(GRAD, first, heads * D, N, D, SIZE, True)
    out = _rows(OUT, first, heads * D, N, D, SIZE, True)
    delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
    tl.store(DELTA + row, delta, mask=row < N)
    lse = _row_values(LSE, first, N, SIZE, float("inf"))
    dq = tl.zeros((SIZE, D), tl.float32)
    for j in tl.static_range(len(PARTS)):
        s = _scores(q, keys[j], BIAS, row, PARTS[j][0], scale, N, PARTS[j][1], HAS_BIAS)
        p = tl.exp2(s * (scale * 1.4426950408889634) - lse[:, None])
        ds = p * (tl.dot(grad, tl.trans(values[j])) - delta[:, None])
        if HAS_BIAS:
            column = PARTS[j][0] + tl.arange(0, PARTS[j][1])
            inside = (row[:, None] < N) & (column[None, :] < N)
            tl.store(DBIAS + row[:, None] * N + column[None, :], ds.to(DBIAS.dtype.element_ty), mask=inside)
        dq = tl.dot(ds.to(q.dtype), keys[j], dq)
    dq *= scale
    pointer = DQ + row[:, None] * (3 * heads * D) + tl.arange(0, D)[None, :]
    tl.store(pointer, dq.to(DQ.dtype.element_ty), mask=row[:, None] < N)
    return tl.sum(dq, 0)  # zeros beyond the last row, whose log-sum-exp is infinite


@triton.jit
def attention_queries(
    QKV, BIAS, OUT, GRAD, LSE, DELTA, DQKV, DBIAS, SUMS, heads, scale,
    N: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """The gradient of a head's queries, and DELTA, the row sums of grad * out, which the keys' gradient needs, too.

    SUMS, (batch, programs of a head, heads, D), are those of the gradient over the rows of a program.
    """
    head = tl.program_id(0)
    image, head_offset = (head // heads).to(tl.int64), (head % heads) * D
    stride = 3 * heads * D
    start = image * N * stride + head_offset
    base, DQ = QKV + start, DQKV + start
    GRAD += image * N * heads * D + head_offset
    OUT += image * N * heads * D + head_offset
    LSE += head.to(tl.int64) * N
    DELTA += head.to(tl.int64) * N
    if HAS_BIAS:
        BIAS += head.to(tl.int64) * N * N
        DBIAS += head.to(tl.int64) * N * N
    keys = _tiles(base + heads * D, stride, N, D, PARTS)
    values = _tiles(base + 2 * heads * D, stride, N, D, PARTS)
    total = tl.zeros((D,), tl.float32)
    for tile in range(tl.program_id(1), tl.cdiv(N, ROWS), tl.num_programs(1)):
        total += _query_rows(
            base, BIAS, OUT, GRAD, LSE, DELTA, DQ, DBIAS, keys, values, heads, scale, tile * ROWS, N, D, ROWS, PARTS,
            HAS_BIAS,
        )  # fmt: skip
    row = image * tl.num_programs(1) + tl.program_id(1)
    tl.store(SUMS + row * heads * D + head_offset + tl.arange(0, D), total)


@triton.jit
def _key_rows(
    base, BIAS, LSE, DELTA, DQKV, queries, grads, heads, scale, first,
    N: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """The gradients of SIZE keys from `first` on and of their values. Rows are keys and parts are queries here."""
    row = first + tl.arange(0, SIZE)
    k = _rows(base + heads * D, first, 3 * heads * D, N, D, SIZE, True)
    v = _rows(base + 2 * heads * D, first, 3 * heads * D, N, D, SIZE, True)
    dk = tl.zeros((SIZE, D), tl.float32)
    dv = tl.zeros((SIZE, D), tl.float32)
    for j in tl.static_range(len(PARTS)):
        s = tl.dot(k, tl.trans(queries[j]))
        if HAS_BIAS:
            column = PARTS[j][0] + tl.arange(0, PARTS[j][1])
            inside = (row[:, None] < N) & (column[None, :] < N)
            bias = tl.load(BIAS + column[None, :] * N + row[:, None], mask=inside, other=0.0)
            s += bias.to(tl.float32) / scale
        # Queries beyond the last have an infinite log-sum-exp, hence no weight.
        lse = _row_values(LSE, PARTS[j][0], N, PARTS[j][1], float("inf"))
        p = tl.exp2(s * (scale * 1.4426950408889634) - lse[None, :])
        dv = tl.dot(p.to(v.dtype), grads[j], dv)
        delta = _row_values(DELTA, PARTS[j][0], N, PARTS[j][1], 0.0)
        ds = p * (tl.dot(v, tl.trans(grads[j])) - delta[None, :])
        dk = tl.dot(ds.to(k.dtype), queries[j], dk)
    pointer = DQKV + row[:, None] * (3 * heads * D) + tl.arange(0, D)[None, :]
    tl.store(pointer + heads * D, (dk * scale).to(DQKV.dtype.element_ty), mask=row[:, None] < N)
    tl.store(pointer + 2 * heads * D, dv.to(DQKV.dtype.element_ty), mask=row[:, None] < N)


@triton.jit
def attention_keys(
    QKV, BIAS, GRAD, LSE, DELTA, DQKV, heads, scale,
    N: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """The gradients of a head's keys and values."""
    head = tl.program_id(0)
    image, head_offset = (head // heads).to(tl.int64), (head % heads) * D
    stride = 3 * heads * D
    base = QKV + image * N * stride + head_offset
    DQKV += image * N * stride + head_offset
    LSE += head.to(tl.int64) * N
    DELTA += head.to(tl.int64) * N
    if HAS_BIAS:
        BIAS += head.to(tl.int64) * N * N
    queries = _tiles(base, stride, N, D, PARTS)
    grads = _tiles(GRAD + image * N * heads * D + head_offset, heads * D, N, D, PARTS)
    for tile in range(tl.program_id(1), tl.cdiv(N, ROWS), tl.num_programs(1)):
        _key_rows(base, BIAS, LSE, DELTA, DQKV, queries, grads, heads, scale, tile * ROWS, N, D, ROWS, PARTS, HAS_BIAS)


@triton.jit
def pack_gradients(
    DQ, DK, DV, DQKV, SUMS, image_stride, head_stride, token_stride, tokens, rows, width,
    D: tl.constexpr, PROGRAM_ROWS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """DQKV (rows, 3 * width) from three gradients with these strides; SUMS are the column sums of PROGRAM_ROWS of DQ.

    A row is a token of an image, and the channels of all heads are beside each other.
    """
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    exists = column < width
    source_column = (column // D).to(tl.int64) * head_stride + column % D
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    first = tl.program_id(0) * PROGRAM_ROWS
    for start in range(first, first + PROGRAM_ROWS, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row[:, None] < rows) & exists[None, :]
        source_row = (row // tokens).to(tl.int64) * image_stride + (row % tokens).to(tl.int64) * token_stride
        source = source_row[:, None] + source_column[None, :]
        target = row[:, None].to(tl.int64) * (3 * width) + column[None, :]
        dq = tl.load(DQ + source, mask=inside, other=0.0)
        dk = tl.load(DK + source, mask=inside, other=0.0)
        dv = tl.load(DV + source, mask=inside, other=0.0)
        tl.store(DQKV + target, dq, mask=inside)
        tl.store(DQKV + target + width, dk, mask=inside)
        tl.store(DQKV + target + 2 * width, dv, mask=inside)
        total += dq.to(tl.float32)
    tl.store(SUMS + tl.program_id(0) * width + column, tl.sum(total, 0), mask=exists)
