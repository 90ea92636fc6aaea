"""What comes before the blocks: normalized pixels, patches as rows of a matrix, and tokens with their positions."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def normalize_pixels(PIXELS, SCALE, SHIFT, OUT, size, channels, BLOCK: tl.constexpr):
    """OUT = PIXELS * SCALE + SHIFT, with one number of each per channel; a channel of an image has `size` pixels."""
    plane = tl.program_id(0)
    pixel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    offset = plane.to(tl.int64) * size + pixel
    scale, shift = tl.load(SCALE + plane % channels), tl.load(SHIFT + plane % channels)
    value = tl.load(PIXELS + offset, mask=pixel < size, other=0).to(tl.float32)
    tl.store(OUT + offset, value * scale + shift, mask=pixel < size)


@triton.jit
def extract_patches(
    IMAGES, OUT, channels, height, width, rows, columns,
    SIDE: tl.constexpr, PATCHES: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """IMAGES (batch, channels, height, width) -> OUT (batch * rows * columns, channels * SIDE * SIDE)

    A program copies PIXELS of PATCHES beside each other.
    """
    groups = tl.cdiv(columns, PATCHES)
    group = tl.program_id(0)
    column = group % groups * PATCHES + tl.arange(0, PATCHES)
    row, image = group // groups % rows, group // groups // rows
    pixel = tl.program_id(1) * PIXELS + tl.arange(0, PIXELS)
    channel, y, x = pixel // (SIDE * SIDE), pixel // SIDE % SIDE, pixel % SIDE
    inside = (column[:, None] < columns) & (pixel[None, :] < channels * SIDE * SIDE)
    line = (image * channels + channel).to(tl.int64) * height + row * SIDE + y
    source = line[None, :] * width + column[:, None] * SIDE + x[None, :]
    patch = ((image * rows + row) * columns + column).to(tl.int64)
    value = tl.load(IMAGES + source, mask=inside, other=0.0)
    target = patch[:, None] * (channels * SIDE * SIDE) + pixel[None, :]
    tl.store(OUT + target, value.to(OUT.dtype.element_ty), mask=inside)


@triton.jit
def add_positions(PATCHES, TABLE, OUT, batch, size, prefix, IMAGES: tl.constexpr, BLOCK: tl.constexpr):
    """OUT (batch, size) = TABLE (size,) and, after the first `prefix` numbers, PATCHES (batch, size - prefix)."""
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    table = tl.load(TABLE + number, mask=number < size, other=0.0).to(tl.float32)
    first = tl.program_id(1) * IMAGES
    for image in range(first, tl.minimum(first + IMAGES, batch)):
        source = PATCHES + tl.cast(image, tl.int64) * (size - prefix) + number - prefix
        patch = tl.load(source, mask=(number >= prefix) & (number < size), other=0.0).to(tl.float32)
        target = OUT + tl.cast(image, tl.int64) * size + number
        tl.store(target, (patch + table).to(OUT.dtype.element_ty), mask=number < size)


@triton.jit
def add_positions_backward(
    GRAD, DPATCHES, SUMS, batch, size, prefix, IMAGES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """DPATCHES (batch, size - prefix) of GRAD (batch, size); SUMS are those of GRAD over IMAGES, ROWS at a time."""
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    first = tl.program_id(1) * IMAGES
    for start in range(first, first + IMAGES, ROWS):
        image = start + tl.arange(0, ROWS)[:, None].to(tl.int64)
        inside = (image < batch) & (number < size)[None, :]
        grad = tl.load(GRAD + image * size + number[None, :], mask=inside, other=0.0)
        target = DPATCHES + image * (size - prefix) + (number - prefix)[None, :]
        tl.store(target, grad, mask=inside & (number >= prefix)[None, :])
        total += grad.to(tl.float32)
    tl.store(SUMS + tl.program_id(1).to(tl.int64) * size + number, tl.sum(total, 0), mask=number < size)
