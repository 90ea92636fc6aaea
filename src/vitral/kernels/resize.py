"""Parts of pictures, each of its own size, to images of one size: bilinear, averaging where they shrink.

The images are those that PyTorch makes on a CPU, bit for bit: it rounds the weights of an axis to 16-bit integers, and
the pixels to bytes after the rows and after the columns. All integers, hence the same in any order and on any device.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from vitral.kernels.dispatch import launch, on_device_of
from vitral.kernels.jit import resize as jit

_MOST_BITS = 15  # of a rounded weight, its sign not counted
_MOST_SHIFT = 22
_AT_ONCE = 1024  # values that a program makes


def reference(pixels: Tensor, places: Tensor, size: tuple[int, int], channels: int) -> Tensor:
    """What the kernel computes, in plain PyTorch: uint8 (n,), int64 (b, 4) -> uint8 (b, channels, *size).

    A place is where a part begins, its height, its width, and 1 where its image is mirrored.
    """
    images = []
    for start, height, width, mirrored in places.tolist():
        part = pixels[start : start + height * width * channels].view(1, height, width, channels)
        image = F.interpolate(part.permute(0, 3, 1, 2).cpu(), size, mode="bilinear", antialias=True)
        images.append(image.flip(3) if mirrored else image)
    return torch.cat(images).to(pixels.device)


class PartResize:
    """The same on a GPU, for parts that become at most `shrink` times smaller along either side."""

    def __init__(self, size: tuple[int, int], channels: int, shrink: int, device: torch.device) -> None:
        self.size, self.channels = size, channels
        self.taps = {side: axis_taps(shrink * side, side).to(device) for side in set(size)}

    def __call__(self, pixels: Tensor, places: Tensor) -> Tensor:
        """Laid out as images are that come from files: (b, h, w, c) in memory."""
        (height, width), rows = self.size, len(places)
        images = torch.empty(rows, height, width, self.channels, dtype=torch.uint8, device=pixels.device)
        programs = triton.cdiv(images[0].numel(), _AT_ONCE)  # of an image
        most = self.taps[height].weights.shape[1]  # of either axis
        with on_device_of(pixels):
            launch(
                jit.resize_parts, (programs * rows,), pixels, places, images, *self.taps[height], *self.taps[width],
                height, width, most, programs, CHANNELS=self.channels, AT_ONCE=_AT_ONCE,
            )  # fmt: skip
        return images.permute(0, 3, 1, 2)


class AxisTaps(NamedTuple):
    """How an axis of any length becomes one of `after`; row n of each tensor is for n pixels before."""

    first: Tensor  # int32 (longest + 1, after): the first pixel that counts
    count: Tensor  # int32 (longest + 1,): the pixels that may count
    weights: Tensor  # int16 (longest + 1, most, after): theirs, in 1 / 2^shift
    shift: Tensor  # int32 (longest + 1,)

    def to(self, device: torch.device) -> AxisTaps:
        return AxisTaps(*(tensor.to(device) for tensor in self))


def axis_taps(longest: int, after: int) -> AxisTaps:
    """For all lengths from 1 to `longest`."""
    first = np.zeros((longest + 1, after), np.int32)
    weights = np.zeros((longest + 1, _most_taps(longest, after), after), np.int16)
    count, shift = np.zeros((2, longest + 1), np.int32)
    for before in range(1, longest + 1):
        count[before] = _most_taps(before, after)
        first[before], weights[before, : count[before]], shift[before] = _rounded_taps(before, after)
    return AxisTaps(*map(torch.from_numpy, (first, count, weights, shift)))


def _rounded_taps(before: int, after: int) -> tuple[np.ndarray, np.ndarray, int]:
    """The first pixels (after,), weights (taps, after) and their shift, in double precision as in PyTorch."""
    scale = before / after
    reach = max(scale, 1.0)  # of the triangle by which pixels are weighed, to either side
    centre = scale * (np.arange(after) + 0.5)
    first = np.maximum((centre - reach + 0.5).astype(int), 0)
    end = np.minimum((centre + reach + 0.5).astype(int), before)
    pixel = first + np.arange(_most_taps(before, after))[:, None]
    weights = np.maximum(1 - np.abs((pixel - centre + 0.5) * (1 / reach)), 0) * (pixel < end)
    weights /= weights.sum(0)
    shift = _finest(weights.max())
    return first, (0.5 + weights * (1 << shift)).astype(np.int16), shift


def _most_taps(before: int, after: int) -> int:
    return 2 * math.ceil(max(before / after, 1)) + 1


def _finest(largest: float) -> int:
    """The shift that leaves the largest weight, rounded, within its bits."""
    return max(shift for shift in range(_MOST_SHIFT + 1) if int(0.5 + largest * (1 << shift)) < 1 << _MOST_BITS)
