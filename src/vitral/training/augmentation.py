"""Augmentation of whole batches on the device that holds them, as a short string: "shift(4)|flip|randaugment(2, 10)".

    shift(pixels)                     up to that far in both directions, mirrored at the border: pad and random crop
    flip                              left to right, half of the time
    randaugment(layers, magnitude)    AugReg's sixteen operations, as data/augment.py has them; (2, 10) is usual
    erase(chance)                     a rectangle of noise, 2 to 33 % of the area
    cutout(side)                      a grey square about a random pixel, cut off at the border

A small model on a GPU eats images faster than the CPU can augment them one by one. Every image draws for itself, from
torch's own generator of that device, so that `torch.manual_seed` fixes all of it; compiled code draws other numbers.
All images of a batch take the same way through the same shapes, and no drawn number comes back to the host: a CUDA
graph or a compiler can take the whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vitral.data.augment import FILL, LUMINANCE, OPERATIONS, cutout_reach, strength, translation
from vitral.data.preprocess import NumberArgument, as_number, split_step
from vitral.errors import UserError

_TRIES = 10  # at a rectangle that fits, as data/augment.py
_NUMBERS = {operation.__name__: number for number, operation in enumerate(OPERATIONS)}


@dataclass(frozen=True)
class Augmentation:
    """uint8 (b, c, h, w) -> uint8 (b, c, h, w), what `normalize` takes; pixels are rounded down after each step."""

    text: str
    steps: tuple[tuple[str, tuple[float, ...]], ...]  # names and numbers

    def __call__(self, images: Tensor) -> Tensor:
        for name, numbers in self.steps:
            images = _STEPS[name].run(images, *numbers)
        return images


def parse_augmentation(text: str) -> Augmentation:
    """The augmentation described by a string; UserError if it is not one."""
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
        images = apply_operations(images, kinds, signs, row, column, magnitude / 10)
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


class _StepType(NamedTuple):
    """A kind of step: its function, and its numeric arguments."""

    run: Callable[..., Tensor]
    numbers: tuple[NumberArgument, ...] = ()


_STEPS = {
    "shift": _StepType(_shift, (NumberArgument("pixels", 1, 1024, whole=True),)),
    "flip": _StepType(_flip),
    "randaugment": _StepType(
        _randaugment, (NumberArgument("layers", 1, 16, whole=True), NumberArgument("magnitude", 0, 30))
    ),
    "erase": _StepType(_erase, (NumberArgument("chance", 0, 1),)),
    "cutout": _StepType(_cutout, (NumberArgument("side", 1, 1024, whole=True),)),
}


def _step(text: str) -> tuple[str, tuple[float, ...]]:
    split = split_step(text)
    if not split or split[0] not in _STEPS:
        steps = ", ".join(_usage(name) for name in _STEPS)
        raise UserError(f'"{text}" is not an augmentation on the device: the steps are {steps}.')
    name, arguments = split
    parameters = _STEPS[name].numbers
    pairs = [(number, as_number(word)) for number, word in zip(parameters, arguments, strict=False)]
    values = [value for number, value in pairs if value is not None and number.accepts(value)]
    if not len(arguments) == len(parameters) == len(values):
        expected = " and ".join(f"{number.name} {number.expected}" for number in parameters)
        raise UserError(f'"{text}": write {_usage(name)}{", with " if parameters else ""}{expected}.')
    return name, tuple(values)


def _usage(name: str) -> str:
    numbers = ", ".join(number.name for number in _STEPS[name].numbers)
    return f"{name}({numbers})" if numbers else name


def shifted(images: Tensor, down: Tensor, right: Tensor) -> Tensor:
    """(b, c, h, w), int64 (b,), int64 (b,) -> (b, c, h, w): moved by less than a side; what is missing is mirrored in.

    In a small picture a band of grey would be a large part, with an edge that no picture has when the model is tested.
    """
    height, width = images.shape[-2:]
    row = _reflected(_places(images, height) - _per_image(down, 2), height)
    column = _reflected(_places(images, width) - _per_image(right, 2), width)
    return _found(images, row.unsqueeze(2), column.unsqueeze(1))


def mirrored(images: Tensor, chosen: Tensor) -> Tensor:
    """(b, c, h, w), bool (b,) -> (b, c, h, w): those chosen, left to right."""
    return torch.where(_per_image(chosen, 4), images.flip(-1), images)


def box(images: Tensor, top: Tensor, left: Tensor, high: Tensor, wide: Tensor) -> Tensor:
    """(b, c, h, w), each number (b,) -> bool (b, 1, h, w): where each image's own rectangle lies."""
    height, width = images.shape[-2:]
    row, column = _places(images, height) - _per_image(top, 2), _places(images, width) - _per_image(left, 2)
    rows = (row >= 0) & (row < _per_image(high, 2))
    columns = (column >= 0) & (column < _per_image(wide, 2))
    return (rows.unsqueeze(2) & columns.unsqueeze(1)).unsqueeze(1)


def square(images: Tensor, row: Tensor, column: Tensor, side: int) -> Tensor:
    """(b, c, h, w), int64 (b,), int64 (b,) -> bool (b, 1, h, w): the square about a pixel, cut off at the borders."""
    sides = torch.full_like(row, side)
    return box(images, row - side // 2, column - side // 2, sides, sides)


def affine(images: Tensor, matrices: Tensor) -> Tensor:
    """(b, c, h, w), float (b, 2, 3) -> (b, c, h, w): at (y, x) the pixel nearest to matrix @ (y, x, 1), or FILL."""
    height, width = images.shape[-2:]
    y, x = _places(images, height).unsqueeze(1), _places(images, width)
    across = matrices.unflatten(2, (3, 1, 1))
    row, column = (across[:, axis, 0] * y + across[:, axis, 1] * x + across[:, axis, 2] for axis in (0, 1))
    row, column = (row + 0.5).floor().int(), (column + 0.5).floor().int()
    near_row, near_column = row.clamp(0, height - 1), column.clamp(0, width - 1)
    outside = (row != near_row) | (column != near_column)
    return _found(images, near_row, near_column).masked_fill(outside.unsqueeze(1), FILL)


def apply_operations(images: Tensor, kinds: Tensor, signs: Tensor, row: Tensor, column: Tensor, level: float) -> Tensor:
    """(b, c, h, w) -> (b, c, h, w): each image after its own one of data/augment.py's operations.

    kinds (b,) counts in OPERATIONS, signs (b,) of -1 and 1 are the sides that things move to, row and column (b,) the
    middle of what is cut out. Every image meets every operation, and changes in its own. On a GPU that is passes over
    memory, so numbers for each pixel are as narrow as they can be: places are int32, not int64.
    """
    pixels, grey, factor = images.flatten(2).int(), _grey(images), strength(level)
    images = _tables(pixels, grey, kinds, level, factor).gather(2, pixels).view(images.shape)
    # Where a later operation is chosen the table changes nothing, so the grey from before is still the image's own.
    plain = torch.where(_chosen(kinds, "color", 4), grey, images)
    plain = torch.where(_chosen(kinds, "sharpness", 4), _smoothed(images), plain)
    images = _blended(plain, images, factor)
    images = affine(images, _matrices(images, kinds, signs, level))
    side = 2 * cutout_reach(level, *images.shape[-2:])
    return images.masked_fill(_chosen(kinds, "cutout", 4) & square(images, row, column, side), FILL)


def _tables(pixels: Tensor, grey: Tensor, kinds: Tensor, level: float, factor: float) -> Tensor:
    """int32 (b, c, n), (b, 1, h, w) -> uint8 (b, c, 256): what each image's operation makes of every pixel value.

    A value stays itself where the operation is no such map.
    """
    values = torch.arange(256, dtype=torch.float32, device=pixels.device)
    counts = pixels.new_zeros(*pixels.shape[:2], 256).scatter_add(2, pixels, pixels.new_ones(()).expand_as(pixels))
    mean = (grey.mean(dim=(1, 2, 3), dtype=torch.float32) + 0.5).floor().view(-1, 1, 1)
    lost = 2 ** (8 - min(max(int(4 * level), 1), 8))
    tables = {
        "autocontrast": _stretched(counts, values),
        "equalize": _flattened(counts, values),
        "invert": 255 - values,
        "posterize": values - values % lost,
        "solarize": torch.where(values < int(256 * level), values, 255 - values),
        "solarize_add": torch.where(values < 128, values + int(110 * level), values),
        "brightness": factor * values,
        "contrast": mean + factor * (values - mean),
    }
    table = values.expand_as(counts)
    for name, one in tables.items():
        table = torch.where(_chosen(kinds, name, 3), one, table)
    return table.clamp(0, 255).to(torch.uint8)


def _stretched(counts: Tensor, values: Tensor) -> Tensor:
    """int32 (b, c, 256) -> float (b, c, 256): the table that stretches each channel to 0..255, from its histogram."""
    low = torch.where(counts > 0, values, 255).amin(dim=2, keepdim=True)
    high = torch.where(counts > 0, values, 0).amax(dim=2, keepdim=True)
    return torch.where(low == high, values, (values - low) * 255 / (high - low).clamp(min=1))


def _flattened(counts: Tensor, values: Tensor) -> Tensor:
    """int32 (b, c, 256) -> float (b, c, 256): the table that makes each channel's histogram flat."""
    darker = counts.cumsum(dim=2) - counts
    step = torch.where(counts > 0, darker, 0).amax(dim=2, keepdim=True) // 255
    return torch.where(step == 0, values, (step // 2 + darker) // step.clamp(min=1))


def _grey(images: Tensor) -> Tensor:
    """(b, c, h, w) -> (b, 1, h, w): the luminance of three channels, the mean, in float, of any other number."""
    if images.shape[1] != 3:
        return images.float().mean(dim=1, keepdim=True)
    grey = torch.full_like(images[:, :1], 0x8000, dtype=torch.int32)
    for channel, weight in zip(images.split(1, dim=1), LUMINANCE, strict=True):
        grey = grey.add(channel, alpha=weight)
    return (grey >> 16).to(torch.uint8)


def _smoothed(images: Tensor) -> Tensor:
    """Pixels with some of their neighbours; the border, and an image of less than three pixels, stays as it is."""
    wide = images.to(torch.int16)
    sums = wide[..., :-2, :] + wide[..., 1:-1, :] + wide[..., 2:, :]
    sums = sums[..., :-2] + sums[..., 1:-1] + sums[..., 2:]
    smooth = images.clone()
    smooth[..., 1:-1, 1:-1] = (sums.add(images[..., 1:-1, 1:-1], alpha=4) + 6) // 13
    return smooth


def _blended(plain: Tensor, images: Tensor, factor: float) -> Tensor:
    """From `plain` (factor 0) through `images` (1) and beyond."""
    start = plain.float()
    return (start + factor * (images - start)).clamp(0, 255).to(torch.uint8)


def _matrices(images: Tensor, kinds: Tensor, signs: Tensor, level: float) -> Tensor:
    """-> float (b, 2, 3): where `affine` finds a pixel; its own place where an image's operation moves nothing."""
    height, width = images.shape[-2:]
    y, x = (height - 1) / 2, (width - 1) / 2
    angle = math.radians(30 * level)
    turn, shear_x, shear_y, move_x, move_y = (
        torch.where(_chosen(kinds, name, 1), signs, 0).float()
        for name in ("rotate", "shear_x", "shear_y", "translate_x", "translate_y")
    )
    cosine, sine = 1 + (math.cos(angle) - 1) * turn.abs(), math.sin(angle) * turn
    shear_x, shear_y = 0.3 * level * shear_x, 0.3 * level * shear_y
    move_x, move_y = translation(level, width) * move_x, translation(level, height) * move_y
    down = (1 - cosine) * y + sine * x - move_y
    right = (1 - cosine) * x - sine * y - move_x
    rows = (cosine, shear_y - sine, down), (shear_x + sine, cosine, right)
    return torch.stack([torch.stack(row, dim=1) for row in rows], dim=1)


def _found(images: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """(b, c, h, w), row and column that broadcast to (b, h, w) -> (b, c, h, w): the pixels at those places."""
    position = (row.int() * images.shape[3] + column.int()).flatten(1).unsqueeze(1)
    return images.flatten(2).gather(2, position.expand(-1, images.shape[1], -1)).view(images.shape)


def _reflected(position: Tensor, side: int) -> Tensor:
    """Places up to a side beyond the border, mirrored at the outermost pixel."""
    return side - 1 - (side - 1 - position.abs()).abs()


def _places(images: Tensor, side: int) -> Tensor:
    return torch.arange(side, device=images.device)


def _chosen(kinds: Tensor, name: str, axes: int) -> Tensor:
    """int64 (b,) -> bool (b, 1, ...) of that many axes: the images whose operation is the one of that name."""
    return _per_image(kinds == _NUMBERS[name], axes)


def _per_image(drawn: Tensor, axes: int) -> Tensor:
    """(b,) -> (b, 1, ...) of that many axes, one number for each image."""
    return drawn.view(-1, *(1,) * (axes - 1))
