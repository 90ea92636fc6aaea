"""GELUs: quick GELU as a separate pass, and it or the exact one at the end of a linear layer."""

from __future__ import annotations

import triton
import triton.language as tl

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def gate_of(x):
    """1 / (1 + 2^x), by an approximate reciprocal: `/` takes seven more instructions, for denormal numbers."""
    if _INTERPRETED:
        return 1.0 / (1.0 + tl.exp2(x))
    else:
        power = 1.0 + tl.exp2(x)
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [power], tl.float32, is_pure=True, pack=1
        )


@triton.jit
def quick_gelu_of(h):
    return h * gate_of(h * -2.455466959412555)


@triton.jit
def tanh_gelu(h):
    """h * sigmoid(2 * sqrt(2 / pi) * (h + 0.044715 * h^3)), by powers of 2"""
    return h * gate_of(h * (-2.302208198144325 - 0.10294323460941147 * h * h))


@triton.jit
def exact_gelu(h):
    """Within 3e-5 of h * Phi(h), by the logistic function of a polynomial: the error function costs much more."""
    square = tl.minimum(h * h, 25.0)  # the polynomial was fitted up to there
    return h * gate_of(h * ((square * 0.0010145004 - 0.10677685) * square - 2.3011204))


@triton.jit
def quick_gelu(H, OUT, size, BLOCK: tl.constexpr):
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    h = tl.load(H + offset, mask=offset < size, other=0.0).to(tl.float32)
    tl.store(OUT + offset, quick_gelu_of(h).to(OUT.dtype.element_ty), mask=offset < size)


@triton.jit
def gelu_of(h, GELU: tl.constexpr):
    if GELU == "tanh":
        return tanh_gelu(h)
    elif GELU == "quick":
        return quick_gelu_of(h)
    else:
        return exact_gelu(h)


@triton.jit
def gelu_gradient(h, grad, GELU: tl.constexpr):
    """GELU(h) / h, and the gradient of h from that of GELU(h)."""
    if GELU == "tanh":  # h * gate, where gate = sigmoid(2 * sqrt(2 / pi) * (h + 0.044715 * h^3)), by powers of 2
        square = h * h
        gate = gate_of(h * (-2.302208198144325 - 0.10294323460941147 * square))
        gate_slope = h * (1.5957691216057308 + 0.21406443848170365 * square)
        dh = grad * gate * (1.0 + gate_slope * (1.0 - gate))
    elif GELU == "quick":
        gate = gate_of(h * -2.455466959412555)
        dh = grad * gate * (1.0 + 1.702 * h * (1.0 - gate))
    else:
        gate = 0.5 * (1.0 + tl.erf(h * 0.7071067811865476))
        dh = grad * (gate + h * 0.3989422804014327 * tl.exp(-0.5 * h * h))
    return gate, dh


@triton.jit
def _store_columns(
    OUT, BIAS, SCALE, OUT_SCALE, h, row, first, outputs,
    COLUMNS: tl.constexpr, GELU: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    column = first + tl.arange(0, COLUMNS)
    if SCALED:
        h *= tl.load(SCALE + column, mask=column < outputs, other=0.0)[None, :]
    h += tl.load(BIAS + column, mask=column < outputs, other=0.0).to(tl.float32)[None, :]
    out = gelu_of(h, GELU)
    if SCALED:  # to FP8, whose largest number is 448
        out = tl.minimum(tl.maximum(out / tl.load(OUT_SCALE), -448.0), 448.0)
    OUT.store([row, first], out.to(OUT.dtype))


@triton.jit
def linear_gelu(
    X, WEIGHT, OUT, BIAS, SCALE, OUT_SCALE, rows, outputs, inputs,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
    GELU: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """X (rows, inputs), WEIGHT (outputs, inputs) and OUT (rows, outputs) are tensor descriptors.

    SCALED, in FP8: the product is multiplied by SCALE (outputs,), and the output divided by OUT_SCALE.

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
        middle = column + COLUMNS // 2
        _store_columns(OUT, BIAS, SCALE, OUT_SCALE, left, row, column, outputs, COLUMNS // 2, GELU, SCALED)
        _store_columns(OUT, BIAS, SCALE, OUT_SCALE, right, row, middle, outputs, COLUMNS // 2, GELU, SCALED)
