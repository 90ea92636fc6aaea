"""GroupNorm with what follows it (a residual sum, a ReLU), for images with channels last: (batch, pixels, channels).

A group is spread over the rows of an image, so sums are taken per channel: each program adds up some rows, and one
program per group combines them. Within a program, threads add up what they load and combine their sums once, at the
end: doing so for every tile would take longer than loading it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def channel_sums(
    X, SUMS, pixels, width, PROGRAM_ROWS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Of x - pivot and of its square, where the pivot, the first pixel, keeps large means from cancelling.

    SUMS is (batch, programs, 2, channels).
    """
    image, column = tl.program_id(0).to(tl.int64), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    exists = column < width
    base = X + image * pixels * width + column[None, :]
    pivot = tl.load(X + image * pixels * width + column, mask=exists, other=0.0).to(tl.float32)[None, :]
    first = tl.program_id(1) * PROGRAM_ROWS
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    squares = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(first, first + PROGRAM_ROWS, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        inside = (row < pixels) & exists[None, :]
        x = tl.load(base + row * width, mask=inside, other=0.0).to(tl.float32)
        x = tl.where(inside, x - pivot, 0.0)
        total += x
        squares += x * x
    pointer = SUMS + (image * tl.num_programs(1) + tl.program_id(1)) * 2 * width + column
    tl.store(pointer, tl.sum(total, 0), mask=exists)
    tl.store(pointer + width, tl.sum(squares, 0), mask=exists)


@triton.jit
def _add_programs(SUMS, image, column, exists, programs, width, COLUMNS: tl.constexpr):
    """Both sums of an image, over its programs: (channels,) each"""
    first = tl.zeros((COLUMNS,), tl.float32)
    second = tl.zeros((COLUMNS,), tl.float32)
    for program in range(programs):
        pointer = SUMS + (image * programs + program) * 2 * width + column
        first += tl.load(pointer, mask=exists, other=0.0)
        second += tl.load(pointer + width, mask=exists, other=0.0)
    return first, second


@triton.jit
def group_moments(X, SUMS, MOMENTS, programs, pixels, width, eps, GROUP: tl.constexpr, COLUMNS: tl.constexpr):
    """MOMENTS, (batch, groups, 2), are the mean and 1 / std of a group of GROUP channels."""
    image, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    member = tl.arange(0, COLUMNS)
    column, exists = group * GROUP + member, member < GROUP
    pivot = tl.load(X + image * pixels * width + column, mask=exists, other=0.0).to(tl.float32)
    total, squares = _add_programs(SUMS, image, column, exists, programs, width, COLUMNS)
    means = tl.where(exists, pivot + total / pixels, 0.0)
    mean = tl.sum(means, 0) / GROUP
    away = tl.where(exists, means - mean, 0.0)
    variance = tl.sum((squares - total * total / pixels) / pixels + away * away, 0) / GROUP
    pointer = MOMENTS + (image * tl.num_programs(1) + group) * 2
    tl.store(pointer, mean)
    tl.store(pointer + 1, tl.rsqrt(variance + eps))


@triton.jit
def _load_affine(MOMENTS, WEIGHT, BIAS, image, column, exists, groups, GROUP: tl.constexpr):
    """Mean, 1 / std, weight and bias of channels: (1, channels) each"""
    pointer = MOMENTS + (image * groups + column // GROUP) * 2
    mean = tl.load(pointer, mask=exists, other=0.0)[None, :]
    scale = tl.load(pointer + 1, mask=exists, other=0.0)[None, :]
    weight = tl.load(WEIGHT + column, mask=exists, other=0.0).to(tl.float32)[None, :]
    bias = tl.load(BIAS + column, mask=exists, other=0.0).to(tl.float32)[None, :]
    return mean, scale, weight, bias


@triton.jit
def normalize(
    X, RESIDUAL, MOMENTS, WEIGHT, BIAS, OUT, pixels, width, groups,
    GROUP: tl.constexpr, HAS_RESIDUAL: tl.constexpr, RELU: tl.constexpr,
    PROGRAM_ROWS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    image, column = tl.program_id(0).to(tl.int64), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    exists = column < width
    mean, scale, weight, bias = _load_affine(MOMENTS, WEIGHT, BIAS, image, column, exists, groups, GROUP)
    first = tl.program_id(1) * PROGRAM_ROWS
    for start in range(first, first + PROGRAM_ROWS, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        inside = (row < pixels) & exists[None, :]
        offset = (image * pixels + row) * width + column[None, :]
        out = (tl.load(X + offset, mask=inside, other=0.0).to(tl.float32) - mean) * scale * weight + bias
        if HAS_RESIDUAL:
            out += tl.load(RESIDUAL + offset, mask=inside, other=0.0).to(tl.float32)
        if RELU:
            out = tl.maximum(out, 0.0)
        tl.store(OUT + offset, out.to(OUT.dtype.element_ty), mask=inside)


@triton.jit
def _load_gradient(X, GRAD, offset, inside, mean, scale, weight, bias, RELU: tl.constexpr):
    """The normalized input and the gradient before the ReLU, (rows, channels) each"""
    z = (tl.load(X + offset, mask=inside, other=0.0).to(tl.float32) - mean) * scale
    grad = tl.load(GRAD + offset, mask=inside, other=0.0).to(tl.float32)
    if RELU:
        grad = tl.where(z * weight + bias > 0.0, grad, 0.0)
    return z, grad


@triton.jit
def gradient_sums(
    X, GRAD, MOMENTS, WEIGHT, BIAS, SUMS, pixels, width, groups,
    GROUP: tl.constexpr, RELU: tl.constexpr, PROGRAM_ROWS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Of the gradient times the normalized input, and of the gradient: SUMS is (batch, programs, 2, channels)."""
    image, column = tl.program_id(0).to(tl.int64), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    exists = column < width
    mean, scale, weight, bias = _load_affine(MOMENTS, WEIGHT, BIAS, image, column, exists, groups, GROUP)
    first = tl.program_id(1) * PROGRAM_ROWS
    dweight = tl.zeros((ROWS, COLUMNS), tl.float32)
    dbias = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(first, first + PROGRAM_ROWS, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        inside = (row < pixels) & exists[None, :]
        offset = (image * pixels + row) * width + column[None, :]
        z, grad = _load_gradient(X, GRAD, offset, inside, mean, scale, weight, bias, RELU)
        dweight += z * grad
        dbias += grad
    pointer = SUMS + (image * tl.num_programs(1) + tl.program_id(1)) * 2 * width + column
    tl.store(pointer, tl.sum(dweight, 0), mask=exists)
    tl.store(pointer + width, tl.sum(dbias, 0), mask=exists)


@triton.jit
def group_gradients(
    SUMS, WEIGHT, IMAGE_SUMS, MEANS, programs, pixels, width, GROUP: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """IMAGE_SUMS (batch, 2, channels) are SUMS over programs; MEANS (batch, groups, 2) theirs, weighted, of a group."""
    image, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    member = tl.arange(0, COLUMNS)
    column, exists = group * GROUP + member, member < GROUP
    dweight, dbias = _add_programs(SUMS, image, column, exists, programs, width, COLUMNS)
    tl.store(IMAGE_SUMS + image * 2 * width + column, dweight, mask=exists)
    tl.store(IMAGE_SUMS + (image * 2 + 1) * width + column, dbias, mask=exists)
    weight = tl.load(WEIGHT + column, mask=exists, other=0.0).to(tl.float32)
    pointer = MEANS + (image * tl.num_programs(1) + group) * 2
    tl.store(pointer, tl.sum(weight * dweight, 0) / (GROUP * pixels))
    tl.store(pointer + 1, tl.sum(weight * dbias, 0) / (GROUP * pixels))


@triton.jit
def input_gradient(
    X, GRAD, MOMENTS, WEIGHT, BIAS, MEANS, DX, pixels, width, groups,
    GROUP: tl.constexpr, RELU: tl.constexpr, PROGRAM_ROWS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    image, column = tl.program_id(0).to(tl.int64), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    exists = column < width
    mean, scale, weight, bias = _load_affine(MOMENTS, WEIGHT, BIAS, image, column, exists, groups, GROUP)
    pointer = MEANS + (image * groups + column // GROUP) * 2
    along = tl.load(pointer, mask=exists, other=0.0)[None, :]
    constant = tl.load(pointer + 1, mask=exists, other=0.0)[None, :]
    first = tl.program_id(1) * PROGRAM_ROWS
    for start in range(first, first + PROGRAM_ROWS, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        inside = (row < pixels) & exists[None, :]
        offset = (image * pixels + row) * width + column[None, :]
        z, grad = _load_gradient(X, GRAD, offset, inside, mean, scale, weight, bias, RELU)
        dx = (grad * weight - constant - z * along) * scale
        tl.store(DX + offset, dx.to(DX.dtype.element_ty), mask=inside)
