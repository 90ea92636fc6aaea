"""Mixup and cutmix: each example is mixed with the one before it in the global batch.

A batch has one more row than it trains on, the mixing partner of its first example, so any number of ranks mixes the
same pairs; how they are mixed is a function of (seed, step), so every rank and every resumed run draws the same.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitral.architecture import Size

Box = tuple[int, int, int, int]  # top, bottom, left, right
_STREAM = 0x6D6978  # a random stream apart from others that (seed, step) seeds


class Mix(NamedTuple):
    """How a batch is mixed: an example keeps the share `own`; the rest is its partner's, blended or inside `box`."""

    own: float
    box: Box | None

    def numbers(self) -> Tensor:
        """As a tensor (6,), an input of the captured CUDA graph: the share of an example in its targets, that in its
        pixels outside the box, and the box, which is empty where there is none."""
        return torch.tensor([self.own, self.own if self.box is None else 1.0, *(self.box or (0, 0, 0, 0))])


def draw_mix(seed: int, step: int, image: Size, *, mixup: float, cutmix: float) -> Mix:
    """One share per batch, from Beta(p, p); with both kinds on, each step takes either with equal chance.

    Mixup folds the share to at least a half, so that an example stays the main part of its own row (big_vision).
    """
    generator = np.random.default_rng((seed, step, _STREAM))
    pick = generator.random()
    if cutmix and (not mixup or pick < 0.5):
        box = _draw_box(generator, image, float(generator.beta(cutmix, cutmix)))
        top, bottom, left, right = box
        return Mix(1.0 - (bottom - top) * (right - left) / (image[0] * image[1]), box)
    if not mixup:
        return Mix(1.0, None)
    own = float(generator.beta(mixup, mixup))
    return Mix(max(own, 1.0 - own), None)


def mix_batch(images: Tensor, targets: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """float (b + 1, c, h, w), float (b + 1, k), Mix.numbers -> (b, c, h, w), (b, k): rows mixed with those before."""
    own, blend, top, bottom, left, right = numbers.unbind()
    row, column = (torch.arange(side, device=images.device) for side in images.shape[-2:])
    boxed = ((row >= top) & (row < bottom)).unsqueeze(1) & (column >= left) & (column < right)
    share = torch.where(boxed, 0.0, blend)
    return _blended(images, share), _blended(targets, own)


def _blended(rows: Tensor, share: Tensor) -> Tensor:
    return share * rows[1:] + (1.0 - share) * rows[:-1]


def _draw_box(generator: np.random.Generator, image: Size, own: float) -> Box:
    """A box of the image's aspect and (1 - own) of its area around a uniform centre, cut off at the borders."""
    side = math.sqrt(1.0 - own)
    (top, bottom), (left, right) = (_draw_span(generator, length, side) for length in image)
    return top, bottom, left, right


def _draw_span(generator: np.random.Generator, length: int, share: float) -> tuple[int, int]:
    centre, extent = int(generator.integers(length)), round(length * share)
    return max(centre - extent // 2, 0), min(centre - extent // 2 + extent, length)
