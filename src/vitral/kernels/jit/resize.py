"""Crops of any size to images of one size."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def resize_crops(
    PIXELS, CROPS, IMAGES,
    FIRST_Y, COUNT_Y, WEIGHTS_Y, SHIFT_Y,
    FIRST_X, COUNT_X, WEIGHTS_X, SHIFT_X,
    height, width, max_taps, programs, CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program computes BLOCK values: weighted sums over columns, rounded, and of these a weighted sum over rows.

    Neighboring values sum the same columns again, from the cache. No weight is negative: sums stay within 0..255."""
    image = (tl.program_id(0) // programs).to(tl.int64)
    value = tl.program_id(0) % programs * BLOCK + tl.arange(0, BLOCK)
    inside = value < height * width * CHANNELS
    channel = value % CHANNELS
    x = value // CHANNELS % width
    y = tl.minimum(value // (CHANNELS * width), height - 1)
    start = tl.load(CROPS + image * 4)
    crop_height = tl.load(CROPS + image * 4 + 1).to(tl.int32)
    crop_width = tl.load(CROPS + image * 4 + 2).to(tl.int32)
    mirrored = tl.load(CROPS + image * 4 + 3)
    x = tl.where(mirrored == 1, width - 1 - x, x)
    shift_y = tl.load(SHIFT_Y + crop_height)
    shift_x = tl.load(SHIFT_X + crop_width)
    row = tl.load(FIRST_Y + crop_height * height + y)
    column = tl.load(FIRST_X + crop_width * width + x)
    count_y = tl.load(COUNT_Y + crop_height)
    count_x = tl.load(COUNT_X + crop_width)
    total = tl.full((BLOCK,), 1, tl.int32) << (shift_y - 1)
    for j in range(count_y):
        row_start = PIXELS + start + tl.minimum(row + j, crop_height - 1) * crop_width * CHANNELS + channel
        row_total = tl.full((BLOCK,), 1, tl.int32) << (shift_x - 1)
        for k in range(count_x):
            pointer = row_start + tl.minimum(column + k, crop_width - 1) * CHANNELS
            pixel = tl.load(pointer, mask=inside, other=0).to(tl.int32)
            row_total += pixel * tl.load(WEIGHTS_X + (crop_width * max_taps + k) * width + x).to(tl.int32)
        total += (row_total >> shift_x) * tl.load(WEIGHTS_Y + (crop_height * max_taps + j) * height + y).to(tl.int32)
    offset = image * height * width * CHANNELS + value
    tl.store(IMAGES + offset, (total >> shift_y).to(tl.uint8), mask=inside)
