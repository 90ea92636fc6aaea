"""Attention of one query per head, the class token's: a program computes a head, and reads its keys and values once."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _head_rows(base, row, channel, tokens, heads, DIM: tl.constexpr):
    """Pointers to rows of a head in (tokens, 2, heads, DIM), and where they exist: (rows, channels)"""
    pointer = base + row[:, None].to(tl.int64) * (2 * heads * DIM) + channel[None, :]
    return pointer, (row[:, None] < tokens) & (channel[None, :] < DIM)


@triton.jit
def class_attention_forward(
    Q, KV, OUT, LSE, tokens, heads, scale, DIM: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr
):  # fmt: skip
    """Q (batch, heads, DIM), KV (batch, tokens, 2, heads, DIM) -> OUT as Q, and the log-sum-exp in base 2."""
    head = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, CHANNELS)
    base = KV + head // heads * tokens * (2 * heads * DIM) + head % heads * DIM
    q = tl.load(Q + head * DIM + channel, mask=channel < DIM, other=0.0).to(tl.float32) * (scale * 1.4426950408889634)
    row_max = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    out = tl.zeros((CHANNELS,), tl.float32)
    for start in range(0, tokens, ROWS):
        row = start + tl.arange(0, ROWS)
        keys, inside = _head_rows(base, row, channel, tokens, heads, DIM)
        k = tl.load(keys, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(keys + heads * DIM, mask=inside, other=0.0).to(tl.float32)
        s = tl.where(row < tokens, tl.sum(k * q[None, :], 1), float("-inf"))
        new_max = tl.maximum(row_max, tl.max(s, 0))
        p = tl.exp2(s - new_max)
        shrink = tl.exp2(row_max - new_max)
        total = total * shrink + tl.sum(p, 0)
        out = out * shrink + tl.sum(p[:, None] * v, 0)
        row_max = new_max
    tl.store(OUT + head * DIM + channel, (out / total).to(OUT.dtype.element_ty), mask=channel < DIM)
    tl.store(LSE + head + tl.arange(0, 1), row_max + tl.log2(total))


@triton.jit
def class_attention_backward(
    Q, KV, OUT, LSE, GRAD, DQ, DKV, tokens, heads, scale,
    DIM: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """The gradients DQ and DKV, from that of OUT."""
    head = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, CHANNELS)
    start_of_head = head // heads * tokens * (2 * heads * DIM) + head % heads * DIM
    offset, exists = head * DIM + channel, channel < DIM
    q = tl.load(Q + offset, mask=exists, other=0.0).to(tl.float32)
    out = tl.load(OUT + offset, mask=exists, other=0.0).to(tl.float32)
    grad = tl.load(GRAD + offset, mask=exists, other=0.0).to(tl.float32)
    delta = tl.sum(grad * out, 0)
    lse = tl.load(LSE + head)
    dq = tl.zeros((CHANNELS,), tl.float32)
    for start in range(0, tokens, ROWS):
        row = start + tl.arange(0, ROWS)
        keys, inside = _head_rows(KV + start_of_head, row, channel, tokens, heads, DIM)
        k = tl.load(keys, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(keys + heads * DIM, mask=inside, other=0.0).to(tl.float32)
        s = tl.sum(k * q[None, :], 1) * (scale * 1.4426950408889634)
        p = tl.where(row < tokens, tl.exp2(s - lse), 0.0)
        ds = p * (tl.sum(v * grad[None, :], 1) - delta) * scale
        dq += tl.sum(ds[:, None] * k, 0)
        targets, _ = _head_rows(DKV + start_of_head, row, channel, tokens, heads, DIM)
        tl.store(targets, (ds[:, None] * q[None, :]).to(DKV.dtype.element_ty), mask=inside)
        tl.store(targets + heads * DIM, (p[:, None] * grad[None, :]).to(DKV.dtype.element_ty), mask=inside)
    tl.store(DQ + offset, dq.to(DQ.dtype.element_ty), mask=exists)
