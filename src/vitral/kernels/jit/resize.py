"""Images of one size from parts of pictures of any size."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def resize_parts(
    PIXELS, PLACES, IMAGES,
    FIRST_Y, COUNT_Y, WEIGHTS_Y, SHIFT_Y,
    FIRST_X, COUNT_X, WEIGHTS_X, SHIFT_X,
    height, width, most, programs, CHANNELS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Each value weighs pixels of some columns, rounds, and weighs what that gives in some rows. Neighbours compute
    the same columns again: they are on chip. No weight is negative, so nothing leaves 0..255."""
    image = (tl.program_id(0) // programs).to(tl.int64)
    value = tl.program_id(0) % programs * AT_ONCE + tl.arange(0, AT_ONCE)
    inside = value < height * width * CHANNELS
    channel = value % CHANNELS
    x = value // CHANNELS % width
    y = tl.minimum(value // (CHANNELS * width), height - 1)
    start = tl.load(PLACES + image * 4)
    high = tl.load(PLACES + image * 4 + 1).to(tl.int32)
    wide = tl.load(PLACES + image * 4 + 2).to(tl.int32)
    mirrored = tl.load(PLACES + image * 4 + 3)
    x = tl.where(mirrored == 1, width - 1 - x, x)
    shift_y = tl.load(SHIFT_Y + high)
    shift_x = tl.load(SHIFT_X + wide)
    row = tl.load(FIRST_Y + high * height + y)
    column = tl.load(FIRST_X + wide * width + x)
    count_y = tl.load(COUNT_Y + high)
    count_x = tl.load(COUNT_X + wide)
    total = tl.full((AT_ONCE,), 1, tl.int32) << (shift_y - 1)
    for j in range(count_y):
        line = PIXELS + start + tl.minimum(row + j, high - 1) * wide * CHANNELS + channel
        across = tl.full((AT_ONCE,), 1, tl.int32) << (shift_x - 1)
        for k in range(count_x):
            pixel = tl.load(line + tl.minimum(column + k, wide - 1) * CHANNELS, mask=inside, other=0).to(tl.int32)
            across += pixel * tl.load(WEIGHTS_X + (wide * most + k) * width + x).to(tl.int32)
        total += (across >> shift_x) * tl.load(WEIGHTS_Y + (high * most + j) * height + y).to(tl.int32)
    place = image * height * width * CHANNELS + value
    tl.store(IMAGES + place, (total >> shift_y).to(tl.uint8), mask=inside)
