"""Augmentations of uint8 images (h, w, c) with an explicit random generator, and user functions as transforms.

RandAugment is AugReg's: sixteen operations, each equally likely, with that code's strengths. Its scale is kept so that
settings mean the same here: magnitude 10 is the unit, larger values are allowed, 0 is not the identity, and posterize
and solarize get weaker as the magnitude grows.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitral.architecture import Size
from vitral.data.images import array_to_pil, as_tensor
from vitral.data.pixels import ImageInput, image_array, whole_image
from vitral.errors import UserError

FILL = 128  # the value of pixels that an operation leaves empty
LUMINANCE = 19595, 38470, 7471  # of red, green and blue: ITU-R 601 in 1/65536, as Pillow rounds it

# Data sets whose labels a mirror image does not keep, by a word of their name, and what is in the images.
ORIENTED = {
    **dict.fromkeys(("digits", "mnist", "svhn"), "digits"),
    **dict.fromkeys(("emnist", "kmnist", "qmnist", "omniglot"), "characters"),
    **{"gtsrb": "traffic signs", "dsprites": "positions and orientations", "smallnorb": "directions"},
}
_SIDE = re.compile("(?<![a-z])(left|right)(?![a-z])")
_ALPHABET = 10  # classes that are single letters; fewer may be names of anything
_TRIAL_SIZE = (256, 320)  # of the blank image that a function is tried on

Operation = Callable[[np.ndarray, float, np.random.Generator], np.ndarray]


def flip(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """(h, w, c) -> the same, mirrored left to right half of the time."""
    # Torch mirrors pixels of a few bytes some fifteen times faster than numpy.
    return as_tensor(image).flip(1).numpy() if draw_flip(rng) else image


def draw_flip(rng: np.random.Generator) -> bool:
    return rng.random() < 0.5


def mirrored_labels(source: str, classes: Sequence[str]) -> str:
    """What a mirror image would get the wrong label of, in data as the user names it; empty if nothing is known."""
    name = source.partition(":")[0] if ":" in source and not source.startswith("hf:") else Path(source).name
    words = re.split("[^a-z]+", name.lower())
    oriented = next((ORIENTED[word] for word in words if word in ORIENTED and "fashion" not in words), "")
    if oriented:
        return f"the {oriented} in {name}"
    lower = {label.lower(): label for label in classes}
    for label in lower:
        other = _SIDE.sub(lambda match: "right" if match[0] == "left" else "left", label)
        if other != label and other in lower:
            return f'"{lower[label]}" and "{lower[other]}"'
    if len(classes) >= _ALPHABET and all(len(label) == 1 and label.isalpha() for label in classes):
        return "single letters"
    return ""


def erase(image: np.ndarray, rng: np.random.Generator, chance: float) -> np.ndarray:
    """(h, w, c) -> the same, with `chance` one rectangle of 2 to 33 % of the area full of noise (arXiv:1708.04896)."""
    if rng.random() >= chance:
        return image
    height, width, channels = image.shape
    for _ in range(10):
        area = height * width * rng.uniform(0.02, 0.33)
        aspect = np.exp(rng.uniform(np.log(0.3), np.log(1 / 0.3)))
        high, wide = round(np.sqrt(area * aspect)), round(np.sqrt(area / aspect))
        if 0 < high < height and 0 < wide < width:
            top, left = rng.integers(height - high + 1), rng.integers(width - wide + 1)
            image = image.copy()
            image[top : top + high, left : left + wide] = rng.integers(0, 256, (high, wide, channels), np.uint8)
            break
    return image


def randaugment(image: np.ndarray, rng: np.random.Generator, layers: int, magnitude: float) -> np.ndarray:
    """(h, w, c) -> the same after `layers` operations drawn with replacement; magnitude 10 is common."""
    for _ in range(layers):
        operation = OPERATIONS[rng.integers(len(OPERATIONS))]
        image = operation(image, magnitude / 10, rng)
    return image


def autocontrast(image: np.ndarray, level: float, rng: np.random.Generator) -> np.ndarray:
    """Each channel is stretched to 0..255."""
    return _each_channel(image, _autocontrast_table)


def equalize(image: np.ndarray, level: float, rng: np.random.Generator) -> np.ndarray:
    """Each channel's histogram is made flat."""
    return _each_channel(image, _equalize_table)


def invert(image: np.ndarray, level: float, rng: np.random.Generator) -> np.ndarray:
    return 255 - image


def posterize(image: np.ndarray, level: float, rng: np.random.Generator) -> np.ndarray:
    """Keeps the high 4 * level bits, at least one."""
    bits = min(max(int(4 * level), 1), 8)
    return image & np.uint8(256 - (1 << (8 - bits)))


def solarize(image: np.ndarray, level: float, rng: np.random.Generator) -> np.ndarray:
    """Inverts what is at or above 256 * level."""
    values = np.arange(256)
    return _apply_table(image, np.where(values < int(256 * level), values, 255 - values))


def solarize_add(image: np.ndarray, level: float, rng: np.random.Generator) -> np.ndarray:
    """Brightens the darker half by 110 * level."""
    values = np.arange(256)
    return _apply_table(image, np.where(values < 128, values + int(110 * level), values))


def brightness(image: np.ndarray, level: float, rng: np.random.Generator) -> np.ndarray:
    return _apply_table(image, np.arange(256) * strength(level))


def contrast(image: np.ndarray, level: float, rng: np.random.Generator) -> np.ndarray:
    """Away from the mean grey, or towards it."""
    mean = int(_grey(image).mean() + 0.5)
    return _apply_table(image, mean + strength(level) * (np.arange(256) - mean))


def color(image: np.ndarray, level: float, rng: np.random.Generator) -> np.ndarray:
    """Away from each pixel's own grey, or towards it."""
    return _blend(_grey(image)[:, :, None], image, strength(level))


def sharpness(image: np.ndarray, level: float, rng: np.random.Generator) -> np.ndarray:
    """Away from a smoothed copy, or towards it; the border is neither."""
    height, width = image.shape[:2]
    if min(height, width) < 3:
        return image
    wide = image.astype(np.uint16)
    sums = sum(wide[y : y + height - 2, x : x + width - 2] for y in range(3) for x in range(3))
    smooth = (sums + 4 * wide[1:-1, 1:-1] + 6) // 13
    sharp = image.copy()
    sharp[1:-1, 1:-1] = _blend(smooth, image[1:-1, 1:-1], strength(level))
    return sharp


def rotate(image: np.ndarray, level: float, rng: np.random.Generator) -> np.ndarray:
    """About the centre, by 30 degrees * level to either side."""
    angle = np.deg2rad(30 * level) * _sign(rng)
    height, width = image.shape[:2]
    x, y = np.arange(width) - (width - 1) / 2, np.arange(height)[:, None] - (height - 1) / 2
    column = np.cos(angle) * x + np.sin(angle) * y + (width - 1) / 2
    row = np.cos(angle) * y - np.sin(angle) * x + (height - 1) / 2
    return _sample_nearest(image, row, column)


def shear_x(image: np.ndarray, level: float, rng: np.random.Generator) -> np.ndarray:
    """Row y moves by 0.3 * level * y to either side."""
    height, width = image.shape[:2]
    row = np.arange(height)[:, None]
    return _sample_nearest(image, row, np.arange(width) + 0.3 * level * _sign(rng) * row)


def shear_y(image: np.ndarray, level: float, rng: np.random.Generator) -> np.ndarray:
    """Column x moves by 0.3 * level * x up or down."""
    return shear_x(image.swapaxes(0, 1), level, rng).swapaxes(0, 1)


def translate_x(image: np.ndarray, level: float, rng: np.random.Generator) -> np.ndarray:
    """To either side by `translation`."""
    width = image.shape[1]
    move = translation(level, width)
    moved = np.full_like(image, FILL)
    if _sign(rng) > 0:
        moved[:, move:] = image[:, : width - move]
    else:
        moved[:, : width - move] = image[:, move:]
    return moved


def translate_y(image: np.ndarray, level: float, rng: np.random.Generator) -> np.ndarray:
    """Up or down, as `translate_x`."""
    return translate_x(image.swapaxes(0, 1), level, rng).swapaxes(0, 1)


def cutout(image: np.ndarray, level: float, rng: np.random.Generator) -> np.ndarray:
    """A grey square that reaches `cutout_reach` in each direction from a random pixel."""
    height, width = image.shape[:2]
    reach = cutout_reach(level, height, width)
    y, x = rng.integers(height), rng.integers(width)
    image = image.copy()
    image[max(y - reach, 0) : y + reach, max(x - reach, 0) : x + reach] = FILL
    return image


OPERATIONS: tuple[Operation, ...] = (
    *(autocontrast, equalize, invert, rotate, posterize, solarize, color, contrast, brightness, sharpness),
    *(shear_x, shear_y, translate_x, translate_y, cutout, solarize_add),
)


def strength(level: float) -> float:
    """0 is the plain end (black, grey or smooth), 1 the image as it is, more the opposite."""
    return 0.1 + 1.8 * level


def translation(level: float, side: int) -> int:
    """How far an image moves along a side: AugReg's 100 pixels, at its size of 224."""
    return min(round(100 / 224 * level * side), side)


def cutout_reach(level: float, height: int, width: int) -> int:
    """Half a side of the square: AugReg's 40 pixels, at its size of 224."""
    return round(40 / 224 * level * min(height, width))


def _sign(rng: np.random.Generator) -> int:
    return 1 if rng.random() < 0.5 else -1


def _grey(image: np.ndarray) -> np.ndarray:
    """(h, w, c) -> (h, w): the luminance of three channels, the mean of any other number."""
    if image.shape[2] != 3:
        return image.mean(axis=2, dtype=np.float32)
    weighted = [image[:, :, band] * np.uint32(weight) for band, weight in enumerate(LUMINANCE)]
    return (weighted[0] + weighted[1] + weighted[2] + 0x8000) >> 16


def _blend(plain: np.ndarray, image: np.ndarray, factor: float) -> np.ndarray:
    """From `plain` (factor 0) through `image` (1) and beyond."""
    start = plain.astype(np.float32)
    return (start + np.float32(factor) * (image - start)).clip(0, 255).astype(np.uint8)


def _apply_table(image: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Every pixel value v becomes values[v]."""
    return np.take(values.clip(0, 255).astype(np.uint8), image)


def _each_channel(image: np.ndarray, table: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """As `_apply_table`, by a table for each channel, made from that channel's histogram (256,)."""
    channels = [image[:, :, band] for band in range(image.shape[2])]
    return np.stack([_apply_table(one, table(np.bincount(one.ravel(), minlength=256))) for one in channels], axis=2)


def _autocontrast_table(histogram: np.ndarray) -> np.ndarray:
    present = histogram.nonzero()[0]
    low, high = present[0], present[-1]
    return np.arange(256) if low == high else (np.arange(256) - low) * (255 / (high - low))


def _equalize_table(histogram: np.ndarray) -> np.ndarray:
    step = (histogram.sum() - histogram[histogram.nonzero()[0][-1]]) // 255
    return np.arange(256) if step == 0 else (step // 2 + histogram.cumsum() - histogram) // step


def _sample_nearest(image: np.ndarray, row: np.ndarray, column: np.ndarray) -> np.ndarray:
    """The nearest pixel at each position: row and column broadcast to (h, w); outside the image it is FILL."""
    height, width, channels = image.shape
    y, x = np.floor(row + 0.5).astype(np.int32), np.floor(column + 0.5).astype(np.int32)
    inside = (y >= 0) & (y < height) & (x >= 0) & (x < width)
    pixels = np.concatenate([image.reshape(-1, channels), np.full((1, channels), FILL, np.uint8)])
    return np.take(pixels, np.where(inside, y * width + x, height * width), axis=0)


class CallableTransform:
    """A user's function from a PIL image to a model's input, used like a `Pipeline`.

    The function returns a PIL image, a uint8 array (h, w) or (h, w, c), a uint8 tensor (c, h, w), or a float tensor
    (c, h, w), which the model takes as it is: it must be normalised already. All results must have one size.

    Before each call the global random generators of Python, NumPy and torch (CPU) are seeded with a number drawn from
    the example's own generator, and restored afterwards. So augmentations are repeatable and a resumed run continues
    exactly, whatever the number of workers.
    """

    random = True  # it is unknown whether a function is random, so its results are never cached
    ends_in_random_crop = False  # the function resizes its crops by itself

    def __init__(self, function: Callable[[Any], Any], size: Size | None = None, *, channels: int = 3) -> None:
        """Try the function on a blank image to find its dtype, and its size unless that is given.

        It is a UserError if the function fails on the blank image, or returns no image, or one of another size.
        """
        self.function, self.channels = function, channels
        self.text = f"transform={getattr(function, '__name__', type(function).__name__)}"
        blank = np.full((*_TRIAL_SIZE, channels), 128, np.uint8)
        try:
            trial = self._result(blank, seed=0)
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"{self.text} fails on a blank image of {_TRIAL_SIZE[1]} x {_TRIAL_SIZE[0]} pixels "
                f"({type(error).__name__}: {error}): it must take any PIL image."
            ) from error
        height, width = trial.shape[:2]
        self.size: Size = size or (height, width)
        self.dtype = trial.dtype
        self._check(trial)

    def __call__(self, image: ImageInput, rng: np.random.Generator | None = None) -> np.ndarray:
        """uint8 (h, w, c) -> `dtype` (*size, c); without a generator the seed is always 0. Raises ImageError."""
        result = self._result(whole_image(image), seed=0 if rng is None else int(rng.integers(2**63)))
        self._check(result)
        return result

    def _result(self, pixels: np.ndarray, seed: int) -> np.ndarray:
        with seeded(seed):
            value = self.function(array_to_pil(pixels))
        return image_array(value, f"the result of {self.text}")

    def _check(self, result: np.ndarray) -> None:
        height, width, channels = result.shape
        if (height, width) != tuple(self.size):
            expected = f"{self.size[1]} x {self.size[0]}"
            raise UserError(f"{self.text} returns {width} x {height} pixels, not {expected}: resize to one size.")
        if channels not in (1, self.channels):
            raise UserError(f"{self.text} returns {channels} channels and the model takes {self.channels}: change one.")
        if result.dtype != self.dtype:
            raise UserError(f"{self.text} returns {result.dtype} and {self.dtype} images: return one of them.")


@contextmanager
def seeded(seed: int) -> Generator[None]:
    """Seed the global random generators of Python, NumPy and torch's CPU for a block, and restore them after it."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the GPUs too
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
