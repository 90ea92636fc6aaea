"""Crops, each of its own size, to images of one size: bilinear, with or without antialiasing where they shrink.

The images are PyTorch's on a CPU, bit for bit: it rounds the weights of an axis to 16-bit integers, and the pixels to
bytes after the columns and after the rows. Integer sums are the same in any order and on any device.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.kernels.dispatch import ceil_div, launch, on_device_of
from vitral.kernels.jit import resize as jit

_WEIGHT_BITS = 15  # of a rounded weight, without its sign
_MAX_SHIFT = 22
_BLOCK = 1024  # values per program


def reference(pixels: Tensor, crops: Tensor, size: tuple[int, int], channels: int, *, antialias: bool = True) -> Tensor:
    """What the kernel computes, in plain PyTorch.

    Args:
        pixels: crops one after another, (height, width, channels) each, flattened, uint8.
        crops: (batch, 4), int64: where a crop starts in `pixels`, its height, its width, and 1 to mirror its image.
        size: height and width of the images.
        channels: of crops and images.
        antialias: whether a pixel is a mean of all that it covers, not of the four nearest.

    Returns:
        uint8 (batch, channels, *size)
    """
    images = []
    for start, height, width, mirrored in crops.tolist():
        crop = pixels[start : start + height * width * channels].view(1, height, width, channels)
        image = F.interpolate(crop.permute(0, 3, 1, 2).cpu(), size, mode="bilinear", antialias=antialias)
        images.append(image.flip(3) if mirrored else image)
    return torch.cat(images).to(pixels.device)


class CropResize:
    """As the reference, on a GPU, for crops that shrink at most by the factor `shrink` along either side."""

    def __init__(
        self, size: tuple[int, int], channels: int, shrink: int, device: torch.device, *, antialias: bool = True
    ) -> None:
        self.size, self.channels = size, channels
        self.taps = {side: axis_taps(shrink * side, side, antialias).to(device) for side in set(size)}

    def __call__(self, pixels: Tensor, crops: Tensor) -> Tensor:
        """(batch, channels, height, width), channels last in memory, as images that come from files."""
        (height, width), rows = self.size, len(crops)
        images = torch.empty(rows, height, width, self.channels, dtype=torch.uint8, device=pixels.device)
        programs = ceil_div(images[0].numel(), _BLOCK)  # per image
        max_taps = self.taps[height].weights.shape[1]  # of either axis
        with on_device_of(pixels):
            launch(
                jit.resize_crops, (programs * rows,), pixels, crops, images, *self.taps[height], *self.taps[width],
                height, width, max_taps, programs, CHANNELS=self.channels, BLOCK=_BLOCK,
            )  # fmt: skip
        return images.permute(0, 3, 1, 2)


class AxisTaps(NamedTuple):
    """How an axis of any length is resized to `after` pixels; row n of each tensor is for n pixels before."""

    first: Tensor  # int32 (longest + 1, after): the first pixel with a weight
    count: Tensor  # int32 (longest + 1,): pixels that may have a weight
    weights: Tensor  # int16 (longest + 1, max_taps, after), in units of 1 / 2^shift
    shift: Tensor  # int32 (longest + 1,)

    def to(self, device: torch.device) -> AxisTaps:
        return AxisTaps(*(tensor.to(device) for tensor in self))


def axis_taps(longest: int, after: int, antialias: bool = True) -> AxisTaps:
    """Taps for all lengths from 1 to `longest`."""
    first = np.zeros((longest + 1, after), np.int32)
    weights = np.zeros((longest + 1, _max_taps(longest, after, antialias), after), np.int16)
    count, shift = np.zeros((2, longest + 1), np.int32)
    for before in range(1, longest + 1):
        count[before] = _max_taps(before, after, antialias)
        first[before], weights[before, : count[before]], shift[before] = _rounded_taps(before, after, antialias)
    return AxisTaps(*map(torch.from_numpy, (first, count, weights, shift)))


def _rounded_taps(before: int, after: int, antialias: bool) -> tuple[np.ndarray, np.ndarray, int]:
    """The first pixels (after,), weights (taps, after) and their shift, computed in float64 as in PyTorch."""
    scale = before / after
    reach = max(scale, 1.0) if antialias else 1.0  # half the width of the triangle filter
    center = scale * (np.arange(after) + 0.5)
    first = np.maximum((center - reach + 0.5).astype(int), 0)
    end = np.minimum((center + reach + 0.5).astype(int), before)
    pixel = first + np.arange(_max_taps(before, after, antialias))[:, None]
    weights = np.maximum(1 - np.abs((pixel - center + 0.5) * (1 / reach)), 0) * (pixel < end)
    weights /= weights.sum(0)
    shift = _finest_shift(weights.max())
    return first, (0.5 + weights * (1 << shift)).astype(np.int16), shift


def _max_taps(before: int, after: int, antialias: bool) -> int:
    return 2 * math.ceil(max(before / after, 1)) + 1 if antialias else 3


def _finest_shift(largest: float) -> int:
    """The largest shift whose rounded largest weight fits its bits."""
    return max(shift for shift in range(_MAX_SHIFT + 1) if int(0.5 + largest * (1 << shift)) < 1 << _WEIGHT_BITS)
