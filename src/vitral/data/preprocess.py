"""Preprocessing as a short string: "decode|resize_small(256)|central_crop(224)".

    decode                                          always first: bytes become uint8 pixels
    resize(h[, w][, method])                        to exactly that size
    resize_small(s[, method])                       the short side to s, the proportions kept
    central_crop(h[, w])  random_crop(h[, w])       an image that is too small is enlarged first
    resize_short(s[, method])                       as resize_small, with torchvision's rounding
    resize_cover(h[, w][, method])  resize_fit      timm's: just covers that size, or just fits into it
    pad(h, w[, red, green, blue])                   to at least that size, black unless stated
    center_crop(h[, w])                             torchvision's: one that is too small is padded with black
    inception_crop(h[, w][, min_area][, method])    TensorFlow's: a random crop of at least 5 % of the area, resized
    random_resized_crop(h[, w][, min_area][, method])    torchvision's: the same of at least 8 %, drawn otherwise
    flip                                            left to right, half of the time
    randaugment(layers, magnitude)                  AugReg's operations; (2, 10) is usual
    erase(chance)                                   a rectangle of noise

Methods: bilinear (the default), bicubic, nearest: as torchvision resizes uint8 tensors; float_bilinear: rounded once;
area; Pillow's own: pil_bilinear, pil_bicubic, pil_nearest, pil_lanczos, pil_box, pil_hamming. antialias=false in place
of a method is bilinear from the four nearest pixels even where the image shrinks, as TensorFlow's tf.image.resize and
with it Google's recipes. On command lines a last step may give the normalisation: value_range(-1, 1), the default,
value_range(0, 1), imagenet_norm, or normalise(mean, std).
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from vitral.architecture import Size
from vitral.data import pixels
from vitral.data.augment import draw_flip, erase, flip, randaugment
from vitral.data.pixels import (
    METHODS,
    SIDE_RULES,
    ImageInput,
    center_crop,
    central_crop,
    cut,
    resize,
    trimmed,
    whole_image,
)
from vitral.errors import UserError

EXAMPLE = '"decode|resize_small(256)|central_crop(224)"'
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

_NORMALISATIONS = ("value_range", "imagenet_norm", "normalise", "normalize")
_OTHER_NAMES = {
    **{"flip_lr": "flip", "hflip": "flip", "horizontal_flip": "flip"},
    **{"randaug": "randaugment", "random_erasing": "erase"},
}


_STEP = re.compile(r"(\w+)\s*(?:\(([^()]*)\))?")


class NumberArgument(NamedTuple):
    """A numeric argument of a step, from `low` to `high`."""

    name: str
    low: float
    high: float
    default: float | None = None
    whole: bool = False

    def accepts(self, value: float) -> bool:
        return self.low <= value <= self.high and (value == int(value) or not self.whole)

    @property
    def expected(self) -> str:
        return f"a {'whole number' if self.whole else 'number'} from {self.low} to {self.high}"


def split_step(text: str) -> tuple[str, list[str]] | None:
    """ "name(argument, argument)" to its name and its arguments; None if the text has another form."""
    match = _STEP.fullmatch(text)
    if not match:
        return None
    arguments = (match[2] or "").strip()
    return match[1], [argument.strip() for argument in arguments.split(",")] if arguments else []


def as_number(text: str) -> float | None:
    """The finite number in a text, or None."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


@dataclass(frozen=True)
class PipelineStep:
    """One parsed step, defaults filled in."""

    name: str
    sides: tuple[int, ...] = ()
    numbers: tuple[float, ...] = ()
    method: str = "bilinear"
    antialias: bool = True

    @property
    def size(self) -> Size:
        return self.sides[0], self.sides[-1]


@dataclass(frozen=True)
class Pipeline:
    """uint8 images of any size to uint8 images of one size."""

    text: str  # the string that was parsed
    steps: tuple[PipelineStep, ...] = field(repr=False)
    size: Size = field(repr=False)  # of the results
    random: bool = field(repr=False)  # whether a step draws from the generator

    dtype = np.dtype(np.uint8)  # of the results

    def __call__(self, image: ImageInput, rng: np.random.Generator | None = None) -> np.ndarray:
        """(h, w, c) -> (*size, c), contiguous."""
        if rng is None:
            if self.random:
                raise ValueError(f"{self.text} is random and needs a generator")
            rng = _UNUSED_RNG
        for step in self.steps:
            image = _STEP_TYPES[step.name].run(image, step, rng)
        return np.ascontiguousarray(whole_image(image))

    def shown_region(self, image: Size) -> tuple[float, float, float, float]:
        """The part of an image of this size that the result shows, without flips: as `pixels.shown_region`."""
        return pixels.shown_region(image, [(step.name, step.size) for step in self.steps if step.sides])

    @property
    def ends_in_random_crop(self) -> bool:
        """Whether it ends in the bilinear resize of a random crop, flipped or not: `crop_region` can then be used."""
        return self._final_crop.name in _BOXES and self._final_crop.method == "bilinear"

    @property
    def antialias(self) -> bool:
        """Whether that resize has antialiasing."""
        return self._final_crop.antialias

    def crop_region(self, image: ImageInput, rng: np.random.Generator) -> CropRegion:
        """(h, w, c) -> the region that a call would resize, and whether it would mirror it."""
        for step in self.steps[: -self._final_steps]:
            image = _STEP_TYPES[step.name].run(image, step, rng)
        pixels = _random_region(image, self._final_crop, rng)
        return CropRegion(pixels, mirrored=self._final_steps == 2 and draw_flip(rng))

    @property
    def _final_crop(self) -> PipelineStep:
        return self.steps[-self._final_steps]

    @property
    def _final_steps(self) -> int:
        """The number of steps that `crop_region` leaves out: the resize of the crop, and possibly a flip."""
        return 2 if self.steps[-1].name == "flip" else 1


class CropRegion(NamedTuple):
    """pixels: uint8 (h, w, c), possibly a view."""

    pixels: np.ndarray
    mirrored: bool


_UNUSED_RNG = np.random.default_rng(0)


def parse_pipeline(text: str) -> Pipeline:
    """Parse a preprocessing string; a UserError says what is unknown or wrong, or that results have no fixed size."""
    steps = tuple(_step(part.strip()) for part in text.split("|"))
    if steps[0].name != "decode" or any(step.name == "decode" for step in steps[1:]):
        raise UserError(f'"{text}": decode must be the first step, and only the first, as in {EXAMPLE}.')
    size = _final_size(text, steps)
    return Pipeline(text.strip(), steps, size, any(_STEP_TYPES[step.name].random for step in steps))


def parse_deterministic(text: str) -> Pipeline:
    """As `parse_pipeline`, for evaluation: raises UserError if a step is random."""
    pipeline = parse_pipeline(text)
    if pipeline.random:
        raise UserError(f'"{text}" draws at random: use steps that give the same pixels each time.')
    return pipeline


def parse_preprocess(text: str, channels: int = 3) -> tuple[str, tuple[float, ...], tuple[float, ...]]:
    """A pipeline without its last step if that is a normalisation, and mean and std for (pixel / 255 - mean) / std."""
    *steps, last = text.split("|")
    split = split_step(last.strip())
    if split and split[0] in _NORMALISATIONS:
        mean, std = _normalisation(last.strip(), *split, channels)
        text = "|".join(steps)
    else:
        mean = std = (0.5,) * channels
    return parse_pipeline(text).text, mean, std


def _resize(image: ImageInput, step: PipelineStep, rng: np.random.Generator) -> np.ndarray:
    return resize(whole_image(image), step.size, step.method, antialias=step.antialias)


def _resize_in_proportion(image: ImageInput, step: PipelineStep, rng: np.random.Generator) -> np.ndarray:
    return pixels.resized_to(image, SIDE_RULES[step.name], step.size, step.method, antialias=step.antialias)


def _random_crop(image: ImageInput, step: PipelineStep, rng: np.random.Generator) -> np.ndarray:
    image = pixels.fitting(image, step.size)
    (height, width), (high, wide) = image.shape[:2], step.size
    return cut(image, int(rng.integers(height - high + 1)), int(rng.integers(width - wide + 1)), step.size)


def _random_region_resized(image: ImageInput, step: PipelineStep, rng: np.random.Generator) -> np.ndarray:
    return resize(_random_region(image, step, rng), step.size, step.method, antialias=step.antialias)


def _random_region(image: ImageInput, step: PipelineStep, rng: np.random.Generator) -> np.ndarray:
    """A crop of random area and aspect ratio."""
    return cut(image, *_BOXES[step.name](image.shape[:2], step.numbers[0], rng))


class _StepType(NamedTuple):
    """A kind of step. Its arguments are `min_sides` to `max_sides` side lengths, then numbers, then a method."""

    usage: str
    run: Callable[[ImageInput, PipelineStep, np.random.Generator], ImageInput]
    min_sides: int = 0
    max_sides: int = 0
    numbers: tuple[NumberArgument, ...] = ()
    method: bool = False
    random: bool = False


_BOXES = {"inception_crop": pixels.inception_box, "random_resized_crop": pixels.random_resized_box}
_MIN_AREAS = {"inception_crop": 0.05, "random_resized_crop": 0.08}  # Google's and torchvision's defaults
_STEP_TYPES = {
    "decode": _StepType("decode", lambda image, step, rng: image),
    "resize": _StepType("resize(h[, w][, method])", _resize, 1, 2, method=True),
    "resize_small": _StepType("resize_small(s[, method])", _resize_in_proportion, 1, 1, method=True),
    "resize_short": _StepType("resize_short(s[, method])", _resize_in_proportion, 1, 1, method=True),
    "resize_cover": _StepType("resize_cover(h[, w][, method])", _resize_in_proportion, 1, 2, method=True),
    "resize_fit": _StepType("resize_fit(h[, w][, method])", _resize_in_proportion, 1, 2, method=True),
    "pad": _StepType(
        "pad(h, w[, red, green, blue])",
        lambda image, step, rng: pixels.padded(image, step.size, step.numbers),
        *(2, 2),
        numbers=tuple(NumberArgument(colour, 0, 255, 0, whole=True) for colour in ("red", "green", "blue")),
    ),
    "central_crop": _StepType("central_crop(h[, w])", lambda image, step, rng: central_crop(image, step.size), 1, 2),
    "center_crop": _StepType("center_crop(h[, w])", lambda image, step, rng: center_crop(image, step.size), 1, 2),
    "random_crop": _StepType("random_crop(h[, w])", _random_crop, 1, 2, random=True),
    **{
        name: _StepType(
            *(f"{name}(h[, w][, min_area][, method])", _random_region_resized, 1, 2),
            numbers=(NumberArgument("min_area", 0, 1, min_area),),
            method=True,
            random=True,
        )
        for name, min_area in _MIN_AREAS.items()
    },
    "flip": _StepType("flip", lambda image, step, rng: flip(whole_image(image), rng), random=True),
    "randaugment": _StepType(
        "randaugment(layers, magnitude)",
        lambda image, step, rng: randaugment(whole_image(image), rng, int(step.numbers[0]), step.numbers[1]),
        numbers=(NumberArgument("layers", 1, 16, whole=True), NumberArgument("magnitude", 0, 30)),
        random=True,
    ),
    "erase": _StepType(
        "erase(chance)",
        lambda image, step, rng: erase(whole_image(image), rng, step.numbers[0]),
        numbers=(NumberArgument("chance", 0, 1),),
        random=True,
    ),
}


def _step(text: str) -> PipelineStep:
    parsed = split_step(text)
    if not parsed:
        raise UserError(f'"{text}" is not a step of a pipeline: write steps like those of {EXAMPLE}.')
    name, arguments = parsed
    if name not in _STEP_TYPES:
        raise UserError(_unknown(name))
    step_type = _STEP_TYPES[name]
    sides: list[int] = []
    while arguments and len(sides) < step_type.max_sides and arguments[0].isdecimal():
        if sides and step_type.numbers and arguments[0] in ("0", "1"):  # inception_crop(224, 1): an area, not a width
            break
        sides.append(int(arguments.pop(0)))
    numbers = [_number(text, number, arguments) for number in step_type.numbers]
    method = arguments.pop(0) if step_type.method and arguments and arguments[0] in METHODS else "bilinear"
    antialias = not (step_type.method and method == "bilinear" and arguments == ["antialias=false"])
    arguments = arguments if antialias else []
    if arguments or len(sides) < step_type.min_sides:
        suggestion = _suggestion(arguments[0], METHODS) if arguments and step_type.method else ""
        raise UserError(f'"{text}": write {step_type.usage}{suggestion or "."}')
    if 0 in sides:
        raise UserError(f'"{text}": a side must be at least 1 pixel.')
    return PipelineStep(name, tuple(sides), tuple(numbers), method, antialias)


def _number(text: str, number: NumberArgument, arguments: list[str]) -> float:
    """Takes the number off the front of `arguments`, or its default if there is one."""
    value = as_number(arguments[0]) if arguments else None
    if value is None:
        if number.default is None:
            raise UserError(f'"{text}" needs {number.name}, {number.expected}.')
        return number.default
    arguments.pop(0)
    if not number.accepts(value):
        whole = "whole and " if number.whole else ""
        raise UserError(f'"{text}": {number.name} must be {whole}from {number.low} to {number.high}, not {value:g}.')
    return value


def _final_size(text: str, steps: tuple[PipelineStep, ...]) -> Size:
    """The size of the results. `least` is the smallest size at each step, and `fixed` whether all have exactly that."""
    least, fixed = (0, 0), False
    for step in steps:
        if step.name in SIDE_RULES:
            unknown = (0, 0) if step.name == "resize_fit" else step.size
            least = SIDE_RULES[step.name](trimmed(least), step.size) if fixed else unknown
        elif step.name == "pad":
            least = max(least[0], step.size[0]), max(least[1], step.size[1])
        elif step.sides:
            crop = step.name in ("central_crop", "random_crop")
            if crop and least != (0, 0) and (step.size[0] > least[0] or step.size[1] > least[1]):
                pixels = f"{least[0]} x {least[1]}"
                raise UserError(f'"{text}": {step.name} is larger than its input of {pixels} pixels: crop less.')
            least, fixed = step.size, True
    if not fixed:
        crop = f"central_crop({min(least)})" if min(least) else "resize(224)"
        raise UserError(f'"{text}" gives images of different sizes: add a step such as {crop}.')
    return least


def _normalisation(
    text: str, name: str, arguments: list[str], channels: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and std, one number per channel."""
    numbers = [number for argument in arguments if (number := as_number(argument)) is not None]
    half = len(numbers) // 2
    if name == "imagenet_norm" and not arguments:
        mean, std = IMAGENET_MEAN, IMAGENET_STD
    elif name == "value_range" and len(arguments) == len(numbers) == 2 and numbers[0] < numbers[1]:
        low, high = numbers
        mean, std = (-low / (high - low),), (1 / (high - low),)
    elif name.startswith("normali") and half and len(arguments) == len(numbers) == 2 * half and min(numbers[half:]) > 0:
        mean, std = tuple(numbers[:half]), tuple(numbers[half:])
    else:
        raise UserError(f'"{text}": write value_range(low, high), imagenet_norm, or normalise(mean, std).')
    if len(mean) == 1:
        return mean * channels, std * channels
    if len(mean) != channels:
        raise UserError(f'"{text}" is for {len(mean)} channels, the images have {channels}: use normalise(mean, std).')
    return mean, std


def _unknown(name: str) -> str:
    if name in _NORMALISATIONS:
        return f"{name} can only be the last step, and only on command lines: a pipeline gives uint8 pixels."
    if name in _OTHER_NAMES:
        return f'unknown step "{name}": use {_STEP_TYPES[_OTHER_NAMES[name]].usage}.'
    listing = f": the steps are {', '.join(_STEP_TYPES)}, and at the end value_range, imagenet_norm or normalise."
    return f'unknown step "{name}"{_suggestion(name, tuple(_STEP_TYPES)) or listing}'


def _suggestion(name: str, options: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(name.lower(), options, 1, 0.5)
    return f": did you mean {close[0]}?" if close else ""
