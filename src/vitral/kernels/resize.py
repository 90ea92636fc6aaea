"""Parts of pictures, each of its own size, to images of one size: bilinear, averaging where they shrink.

The images are those that PyTorch makes on a CPU, bit for bit: it rounds the weights of an axis to 16-bit integers, and
the pixels to bytes after the rows and after the columns. All integers, hence the same in any order and on any device.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from vitral.kernels.jit import resize as jit
from vitral.kernels.launch import launch, on_device_of

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
    """The same on a GPU, for parts no side of which is longer than `longest` times the image's."""

    def __init__(self, size: tuple[int, int], channels: int, longest: int, device: torch.device) -> None:
        self.size, self.channels = size, channels
        self.axes = [axis_taps(longest * side, side).to(device) for side in size]

    def __call__(self, pixels: Tensor, places: Tensor) -> Tensor:
        """Laid out as images are that come from files: (b, h, w, c) in memory."""
        (height, width), rows = self.size, len(places)
        images = torch.empty(rows, height, width, self.channels, dtype=torch.uint8, device=pixels.device)
        vertical, horizontal = self.axes
        with on_device_of(pixels):
            launch(
                jit.resize_parts, (triton.cdiv(images[0].numel(), _AT_ONCE), rows),
                pixels, places, images,
                vertical.first, vertical.count, vertical.weights, vertical.shift, vertical.weights.shape[1],
                horizontal.first, horizontal.count, horizontal.weights, horizontal.shift, horizontal.weights.shape[1],
                height, width, CHANNELS=self.channels, AT_ONCE=_AT_ONCE,
            )  # fmt: skip
        return images.permute(0, 3, 1, 2)


class AxisTaps(NamedTuple):
    """How an axis of any length before becomes one of `after`; row n of each tensor is for n pixels before."""

    first: Tensor  # int32 (longest + 1, after): the first pixel that counts
    count: Tensor  # int32 (longest + 1,): the pixels that may count
    weights: Tensor  # int16 (longest + 1, most, after): theirs, in 1 / 2^shift
    shift: Tensor  # int32 (longest + 1,)

    def to(self, device: torch.device) -> AxisTaps:
        return AxisTaps(*(tensor.to(device) for tensor in self))


def axis_taps(longest: int, after: int) -> AxisTaps:
    """For all lengths up to `longest`, in double precision as PyTorch computes them."""
    before = np.arange(longest + 1)
    scale = before / after
    reach = np.maximum(scale, 1)  # of the triangle by which pixels are weighed, to either side
    centre = scale[:, None] * (np.arange(after) + 0.5)
    first = np.maximum((centre - reach[:, None] + 0.5).astype(int), 0)
    end = np.minimum((centre + reach[:, None] + 0.5).astype(int), before[:, None])
    count = np.ceil(reach).astype(int) * 2 + 1
    pixel = np.arange(count.max())[None, :, None]  # counted from the first
    distance = (pixel + first[:, None] - centre[:, None] + 0.5) * (1 / reach)[:, None, None]
    weights = np.where(pixel < (end - first)[:, None], np.maximum(1 - np.abs(distance), 0), 0)
    weights /= np.maximum(weights.sum(1, keepdims=True), np.finfo(float).tiny)
    shift = _shift(weights.max((1, 2)))
    rounded = (0.5 + weights * 2.0 ** shift[:, None, None]).astype(np.int16)
    arrays = first.astype(np.int32), count.astype(np.int32), rounded, shift
    return AxisTaps(*map(torch.from_numpy, arrays))


def _shift(largest: np.ndarray) -> np.ndarray:
    """The finest rounding that leaves the largest weight within its bits: (n,) -> int32 (n,)"""
    candidates = np.arange(1, _MOST_SHIFT + 1)
    fits = (0.5 + largest[:, None] * 2.0**candidates).astype(np.int64) < 1 << _MOST_BITS
    return fits.sum(1).astype(np.int32)
