"""Augmentation of whole batches on the device that holds them, as a short string: "shift(4)|flip|randaugment(2, 10)".

    shift(pixels)                     up to that far in both directions, mirrored at the border: pad and random crop
    flip                              left to right, half of the time
    randaugment(layers, magnitude)    AugReg's sixteen operations, as data/augment.py has them; (2, 10) is usual
    erase(chance)                     a rectangle of noise, 2 to 33 % of the area
    cutout(side)                      a grey square about a random pixel, cut off at the border

A small model on a GPU eats images faster than the CPU can augment them one by one. Every image draws for itself, from
torch's own generator of that device, so that `torch.manual_seed` fixes all of it; compiled code draws other numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vitral.data.augment import FILL, OPERATIONS
from vitral.data.preprocess import NumberArgument, as_number, split_step
from vitral.errors import UserError
from vitral.training.augmentation_steps import box, mirrored, operated, shifted, square

_TRIES = 10  # at a rectangle that fits, as data/augment.py


@dataclass(frozen=True)
class Augmentation:
    """uint8 (b, c, h, w) -> uint8 (b, c, h, w), what `normalize` takes; pixels are rounded down after each step."""

    text: str
    steps: tuple[tuple[str, tuple[float, ...]], ...]  # names and numbers

    def __call__(self, images: Tensor) -> Tensor:
        for name, numbers in self.steps:
            images = _KINDS[name].run(images, *numbers)
        return images


def parse_augmentation(text: str) -> Augmentation:
    """The augmentation a string stands for; UserError where it is not one."""
    return Augmentation(text.strip(), tuple(_step(part.strip()) for part in text.split("|")))


def _shift(images: Tensor, pixels: float) -> Tensor:
    most = _fitting(images, "shift", pixels)
    return shifted(images, _integers(images, -most, most + 1), _integers(images, -most, most + 1))


def _flip(images: Tensor) -> Tensor:
    return mirrored(images, _integers(images, 0, 2) == 1)


def _randaugment(images: Tensor, layers: float, magnitude: float) -> Tensor:
    height, width = images.shape[-2:]
    for _ in range(int(layers)):
        kinds, signs = _integers(images, 0, len(OPERATIONS)), 2 * _integers(images, 0, 2) - 1
        row, column = _integers(images, 0, height), _integers(images, 0, width)
        images = operated(images, kinds, signs, row, column, magnitude / 10)
    return images


def _erase(images: Tensor, chance: float) -> Tensor:
    """The first of ten drawn rectangles that fits is taken, as one image after the other would."""
    height, width = images.shape[-2:]
    area = height * width * _uniform(images, _TRIES, 0.02, 0.33)
    aspect = _uniform(images, _TRIES, math.log(0.3), -math.log(0.3)).exp()
    high, wide = (area * aspect).sqrt().round(), (area / aspect).sqrt().round()
    fits = (high > 0) & (high < height) & (wide > 0) & (wide < width)
    first = fits.int().argmax(dim=1, keepdim=True)
    high, wide = high.gather(1, first).squeeze(1), wide.gather(1, first).squeeze(1)
    top, left, pick = _uniform(images, 3, 0, 1).unbind(1)
    top, left = (top * (height - high + 1)).floor(), (left * (width - wide + 1)).floor()
    erased = ((pick < chance) & fits.any(dim=1)).view(-1, 1, 1, 1) & box(images, top, left, high, wide)
    noise = torch.randint(256, images.shape, dtype=torch.uint8, device=images.device)
    return torch.where(erased, noise, images)


def _cutout(images: Tensor, side: float) -> Tensor:
    height, width = images.shape[-2:]
    row, column = _integers(images, 0, height), _integers(images, 0, width)
    return images.masked_fill(square(images, row, column, _fitting(images, "cutout", side)), FILL)


def _integers(images: Tensor, low: int, high: int) -> Tensor:
    """-> int64 (b,), from low up to but without high."""
    return torch.randint(low, high, images.shape[:1], device=images.device)


def _uniform(images: Tensor, count: int, low: float, high: float) -> Tensor:
    """-> float (b, count)"""
    return low + (high - low) * torch.rand(images.shape[0], count, device=images.device)


def _fitting(images: Tensor, name: str, pixels: float) -> int:
    height, width = images.shape[-2:]
    if pixels >= min(height, width):
        raise UserError(
            f"{name}({pixels:g}) leaves nothing of images of {height} x {width} pixels: "
            f"write a number below {min(height, width)}."
        )
    return int(pixels)


class _Kind(NamedTuple):
    """What a step's name stands for: a change of the batch, and the numbers that it takes."""

    run: Callable[..., Tensor]
    numbers: tuple[NumberArgument, ...] = ()


_KINDS = {
    "shift": _Kind(_shift, (NumberArgument("pixels", 1, 1024, whole=True),)),
    "flip": _Kind(_flip),
    "randaugment": _Kind(
        _randaugment, (NumberArgument("layers", 1, 16, whole=True), NumberArgument("magnitude", 0, 30))
    ),
    "erase": _Kind(_erase, (NumberArgument("chance", 0, 1),)),
    "cutout": _Kind(_cutout, (NumberArgument("side", 1, 1024, whole=True),)),
}


def _step(text: str) -> tuple[str, tuple[float, ...]]:
    split = split_step(text)
    if not split or split[0] not in _KINDS:
        steps = ", ".join(_usage(name) for name in _KINDS)
        raise UserError(f'"{text}" is no step that the device augments with: the steps are {steps}.')
    name, words = split
    known = _KINDS[name].numbers
    read = [(number, as_number(word)) for number, word in zip(known, words, strict=False)]
    values = [value for number, value in read if value is not None and number.accepts(value)]
    if not len(words) == len(known) == len(values):
        wanted = " and ".join(f"{number.name} {number.expected}" for number in known)
        raise UserError(f'"{text}": write {_usage(name)}{", with " if known else ""}{wanted}.')
    return name, tuple(values)


def _usage(name: str) -> str:
    numbers = ", ".join(number.name for number in _KINDS[name].numbers)
    return f"{name}({numbers})" if numbers else name
