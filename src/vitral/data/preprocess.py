"""How an image becomes the model's input, as a short string: "decode|resize_small(256)|central_crop(224)".

    decode                                          always first: bytes become uint8 pixels
    resize(h[, w][, method])                        to exactly that size
    resize_small(s[, method])                       the short side to s, the proportions kept
    central_crop(h[, w])  random_crop(h[, w])       an image too small for it is first enlarged until it fits
    inception_crop(h[, w][, min_area][, method])    5 to 100 % of the area, 3:4 to 4:3, resized
    flip                                            left to right, half of the time
    randaugment(layers, magnitude)                  AugReg's operations; (2, 10) is usual
    erase(chance)                                   a rectangle of noise

Methods: bilinear (the default), bicubic, nearest, area. On command lines a last step may state the values that the
model sees: value_range(-1, 1), which is the default, value_range(0, 1), imagenet_norm, or normalise(mean, std).
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from vitral.architecture import Size
from vitral.data.augment import draw_flip, erase, flip, randaugment
from vitral.data.images import METHODS, LazyJpeg, resize
from vitral.errors import UserError

EXAMPLE = '"decode|resize_small(256)|central_crop(224)"'
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# Longer pictures lose their ends before they are enlarged: one of 1 x 10,000 pixels would otherwise take gigabytes.
LONGEST = 16

_VALUES = ("value_range", "imagenet_norm", "normalise", "normalize")
_ELSEWHERE = {
    **{"random_resized_crop": "inception_crop", "flip_lr": "flip", "hflip": "flip", "horizontal_flip": "flip"},
    **{"randaug": "randaugment", "random_erasing": "erase"},
}


ImageInput = np.ndarray | LazyJpeg  # uint8 (h, w, c); a step that needs a part of it has no more decoded


_STEP = re.compile(r"(\w+)\s*(?:\(([^()]*)\))?")


class NumberArgument(NamedTuple):
    """A number that a step takes, from `low` to `high`."""

    name: str
    low: float
    high: float
    default: float | None = None
    whole: bool = False

    def takes(self, value: float) -> bool:
        return self.low <= value <= self.high and (value == int(value) or not self.whole)

    @property
    def wanted(self) -> str:
        return f"a {'whole number' if self.whole else 'number'} from {self.low} to {self.high}"


def split_step(text: str) -> tuple[str, list[str]] | None:
    """ "name(word, word)" to its name and its words; None where the text is no step."""
    match = _STEP.fullmatch(text)
    if not match:
        return None
    inside = (match[2] or "").strip()
    return match[1], [word.strip() for word in inside.split(",")] if inside else []


def as_number(word: str) -> float | None:
    """None where the word is no finite number."""
    try:
        value = float(word)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


@dataclass(frozen=True)
class PipelineStep:
    """One step as it was written, defaults filled in."""

    name: str
    sides: tuple[int, ...] = ()
    numbers: tuple[float, ...] = ()
    method: str = "bilinear"

    @property
    def size(self) -> Size:
        return self.sides[0], self.sides[-1]


@dataclass(frozen=True)
class Pipeline:
    """uint8 images of any size to uint8 images of one size. Only `random` ones draw from the generator."""

    text: str
    steps: tuple[PipelineStep, ...]
    size: Size
    random: bool

    dtype = np.dtype(np.uint8)  # of the results

    def __call__(self, image: ImageInput, rng: np.random.Generator | None = None) -> np.ndarray:
        """(h, w, c) -> (*size, c), contiguous."""
        if rng is None:
            if self.random:
                raise ValueError(f"{self.text} is random and needs a generator")
            rng = _UNUSED
        for step in self.steps:
            image = _STEP_TYPES[step.name].run(image, step, rng)
        return np.ascontiguousarray(whole_image(image))

    @property
    def ends_in_random_crop(self) -> bool:
        """Whether it ends in the bilinear resize of a random part, flipped or not, and so has a `part`."""
        step = self.steps[-self._left]
        return step.name == "inception_crop" and step.method == "bilinear"

    def crop_region(self, image: ImageInput, rng: np.random.Generator) -> CropRegion:
        """(h, w, c) -> what a call would resize, and whether it would mirror that."""
        for step in self.steps[: -self._left]:
            image = _STEP_TYPES[step.name].run(image, step, rng)
        pixels = _random_region(image, self.steps[-self._left], rng)
        return CropRegion(pixels, mirrored=self._left == 2 and draw_flip(rng))

    @property
    def _left(self) -> int:
        """The steps that a part leaves to others."""
        return 2 if self.steps[-1].name == "flip" else 1


class CropRegion(NamedTuple):
    """pixels uint8 (h, w, c), perhaps a view"""

    pixels: np.ndarray
    mirrored: bool


_UNUSED = np.random.default_rng(0)


def parse_pipeline(text: str) -> Pipeline:
    """The pipeline a string stands for; UserError where it is not one, or has no fixed size at its end."""
    steps = tuple(_step(part.strip()) for part in text.split("|"))
    if steps[0].name != "decode" or any(step.name == "decode" for step in steps[1:]):
        raise UserError(f'"{text}": decode must be the first step, and only the first, as in {EXAMPLE}.')
    size = _final_size(text, steps)
    return Pipeline(text.strip(), steps, size, any(_STEP_TYPES[step.name].random for step in steps))


def parse_deterministic(text: str) -> Pipeline:
    """The same, for pixels that must be equal each time."""
    pipeline = parse_pipeline(text)
    if pipeline.random:
        raise UserError(f'"{text}" draws at random: use steps that give the same pixels each time.')
    return pipeline


def parse_preprocess(text: str, channels: int = 3) -> tuple[str, tuple[float, ...], tuple[float, ...]]:
    """A pipeline whose last step may state the values: (pipeline, mean, std) for (pixel / 255 - mean) / std."""
    *steps, last = text.split("|")
    split = split_step(last.strip())
    if split and split[0] in _VALUES:
        mean, std = _values(last.strip(), *split, channels)
        text = "|".join(steps)
    else:
        mean = std = (0.5,) * channels
    return parse_pipeline(text).text, mean, std


def _resize(image: ImageInput, step: PipelineStep, rng: np.random.Generator) -> np.ndarray:
    return resize(whole_image(image), step.size, step.method)


def _resize_small(image: ImageInput, step: PipelineStep, rng: np.random.Generator) -> np.ndarray:
    return _covering(image, step.size, step.method)


def _central_crop(image: ImageInput, step: PipelineStep, rng: np.random.Generator) -> np.ndarray:
    image = _fitting(image, step.size)
    (height, width), (high, wide) = image.shape[:2], step.size
    return _cut(image, (height - high) // 2, (width - wide) // 2, step.size)


def _random_crop(image: ImageInput, step: PipelineStep, rng: np.random.Generator) -> np.ndarray:
    image = _fitting(image, step.size)
    (height, width), (high, wide) = image.shape[:2], step.size
    return _cut(image, int(rng.integers(height - high + 1)), int(rng.integers(width - wide + 1)), step.size)


def _inception_crop(image: ImageInput, step: PipelineStep, rng: np.random.Generator) -> np.ndarray:
    """A random part, then the resize of that part alone."""
    return resize(_random_region(image, step, rng), step.size, step.method)


def _random_region(image: ImageInput, step: PipelineStep, rng: np.random.Generator) -> np.ndarray:
    """The whole image where ten tries gave none that fits."""
    height, width = image.shape[:2]
    for _ in range(10):
        area = height * width * rng.uniform(step.numbers[0], 1)
        aspect = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        high, wide = round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))
        if 0 < high <= height and 0 < wide <= width:
            top, left = int(rng.integers(height - high + 1)), int(rng.integers(width - wide + 1))
            return _cut(image, top, left, (high, wide))
    return whole_image(image)


def whole_image(image: ImageInput) -> np.ndarray:
    """All pixels of an image, decoded if they are not yet."""
    return image if isinstance(image, np.ndarray) else _cut(image, 0, 0, image.shape[:2])


def _cut(image: ImageInput, top: int, left: int, size: Size) -> np.ndarray:
    """A view of what is decoded: nothing is copied."""
    return image[top : top + size[0], left : left + size[1]]


def _fitting(image: ImageInput, size: Size) -> ImageInput:
    """The image, enlarged where it is smaller than the crop to come: a border would be no picture."""
    return image if image.shape[0] >= size[0] and image.shape[1] >= size[1] else _covering(image, size, "bilinear")


def _covering(image: ImageInput, size: Size, method: str) -> np.ndarray:
    """Resized in proportion to the smallest image that covers `size`; the longer side is rounded."""
    (height, width), (high, wide) = image.shape[:2], _trimmed(image.shape[:2])
    middle = _cut(image, (height - high) // 2, (width - wide) // 2, (high, wide))
    return resize(middle, _covering_size((height, width), size), method)


def _trimmed(image: Size) -> Size:
    longest = LONGEST * min(image)
    return min(image[0], longest), min(image[1], longest)


def _covering_size(image: Size, size: Size) -> Size:
    (height, width), (high, wide) = _trimmed(image), size
    if high * width >= wide * height:
        return high, max(wide, round(width * high / height))
    return max(high, round(height * wide / width)), wide


class _StepType(NamedTuple):
    """What a step's name stands for. It takes from `fewest` to `most` side lengths, then numbers, then a method."""

    usage: str
    run: Callable[[ImageInput, PipelineStep, np.random.Generator], ImageInput]
    fewest: int = 0
    most: int = 0
    numbers: tuple[NumberArgument, ...] = ()
    method: bool = False
    random: bool = False


_MIN_AREA = NumberArgument("min_area", 0, 1, 0.05)  # the paper's code; elsewhere 0.08 is common
_STEP_TYPES = {
    "decode": _StepType("decode", lambda image, step, rng: image),
    "resize": _StepType("resize(h[, w][, method])", _resize, 1, 2, method=True),
    "resize_small": _StepType("resize_small(s[, method])", _resize_small, 1, 1, method=True),
    "central_crop": _StepType("central_crop(h[, w])", _central_crop, 1, 2),
    "random_crop": _StepType("random_crop(h[, w])", _random_crop, 1, 2, random=True),
    "inception_crop": _StepType(
        *("inception_crop(h[, w][, min_area][, method])", _inception_crop, 1, 2),
        numbers=(_MIN_AREA,),
        method=True,
        random=True,
    ),
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
    split = split_step(text)
    if not split:
        raise UserError(f'"{text}" is not a step of a pipeline: write steps like those of {EXAMPLE}.')
    name, words = split
    if name not in _STEP_TYPES:
        raise UserError(_unknown(name))
    kind = _STEP_TYPES[name]
    sides: list[int] = []
    while words and len(sides) < kind.most and words[0].isdecimal():
        if sides and kind.numbers and words[0] in ("0", "1"):  # inception_crop(224, 1): an area, not a width
            break
        sides.append(int(words.pop(0)))
    numbers = [_number(text, number, words) for number in kind.numbers]
    method = words.pop(0) if kind.method and words and words[0] in METHODS else "bilinear"
    if words or len(sides) < kind.fewest:
        near = _near(words[0], METHODS) if words and kind.method else ""
        raise UserError(f'"{text}": write {kind.usage}{near or "."}')
    if 0 in sides:
        raise UserError(f'"{text}": a side must be at least 1 pixel.')
    return PipelineStep(name, tuple(sides), tuple(numbers), method)


def _number(text: str, number: NumberArgument, words: list[str]) -> float:
    """Takes the number off the front of `words`, or its default where there is one."""
    value = as_number(words[0]) if words else None
    if value is None:
        if number.default is None:
            raise UserError(f'"{text}" needs {number.name}, {number.wanted}.')
        return number.default
    words.pop(0)
    if not number.takes(value):
        whole = "whole and " if number.whole else ""
        raise UserError(f'"{text}": {number.name} must be {whole}from {number.low} to {number.high}, not {value:g}.')
    return value


def _final_size(text: str, steps: tuple[PipelineStep, ...]) -> Size:
    """The size at the end. On the way `least` is what an image has at least, and `fixed` whether exactly that."""
    least, fixed = (0, 0), False
    for step in steps:
        if step.name == "resize_small":
            least = _covering_size(least, step.size) if fixed else step.size
        elif step.sides:
            crop = step.name in ("central_crop", "random_crop")
            if crop and least != (0, 0) and (step.size[0] > least[0] or step.size[1] > least[1]):
                least_words = f"{least[0]} x {least[1]}"
                raise UserError(f'"{text}": {step.name} is larger than the {least_words} pixels that come to it.')
            least, fixed = step.size, True
    if not fixed:
        crop = f"central_crop({min(least)})" if min(least) else "resize(224)"
        raise UserError(f'"{text}" gives images of different sizes: add a step such as {crop}.')
    return least


def _values(text: str, name: str, words: list[str], channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and std, one number for each channel."""
    stated = [number for word in words if (number := as_number(word)) is not None]
    half = len(stated) // 2
    if name == "imagenet_norm" and not words:
        mean, std = IMAGENET_MEAN, IMAGENET_STD
    elif name == "value_range" and len(words) == len(stated) == 2 and stated[0] < stated[1]:
        low, high = stated
        mean, std = (-low / (high - low),), (1 / (high - low),)
    elif name.startswith("normali") and half and len(words) == len(stated) == 2 * half and min(stated[half:]) > 0:
        mean, std = tuple(stated[:half]), tuple(stated[half:])
    else:
        raise UserError(f'"{text}": write value_range(low, high), imagenet_norm, or normalise(mean, std).')
    if len(mean) == 1:
        return mean * channels, std * channels
    if len(mean) != channels:
        raise UserError(f'"{text}" is for {len(mean)} channels, the images have {channels}: use normalise(mean, std).')
    return mean, std


def _unknown(name: str) -> str:
    if name in _VALUES:
        return f"{name} can only be the last step, and only on command lines: a pipeline keeps to uint8 pixels."
    if name in _ELSEWHERE:
        return f'unknown step "{name}": here it is called {_STEP_TYPES[_ELSEWHERE[name]].usage}.'
    known = f": the steps are {', '.join(_STEP_TYPES)}, and at the end value_range, imagenet_norm or normalise."
    return f'unknown step "{name}"{_near(name, tuple(_STEP_TYPES)) or known}'


def _near(word: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(word.lower(), known, 1, 0.5)
    return f": did you mean {near[0]}?" if near else ""
