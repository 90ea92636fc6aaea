"""Functions of the user's in place of a pipeline, five crops in place of one, and the values that count as an image."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitral.architecture import Size
from vitral.data.geometry import ImageInput, center_crop, central_crop, cut, fitting, padded, whole_image
from vitral.data.images import array_to_pil, is_pil, pil_to_array
from vitral.data.preprocess import Pipeline
from vitral.errors import UserError

_TRIAL_SIZE = (256, 320)  # of the blank image that a function is tried on
_CHANNELS = (1, 3, 4)


class CallableTransform:
    """A function that makes a model's input of a PIL image, used where a `Pipeline` is.

    The function returns a PIL image, a uint8 array (h, w) or (h, w, c), a uint8 tensor (c, h, w), or a float tensor
    (c, h, w), which the model takes as it is: it must be normalised already. All results must have one size.

    Before each call the global random generators of Python, NumPy and torch (CPU) are seeded with a number drawn from
    the example's own generator, and restored afterwards. So augmentations are repeatable and a resumed run continues
    exactly, whatever the number of workers.

    Attributes:
        size: height and width of the results.
        dtype: uint8, or float32 where the function returns floating-point tensors.
        text: the function's name, for messages.
        random: True: nobody knows whether a function is random, so its results are never cached.
        ends_in_random_crop: False: the function resizes its crops by itself.
    """

    random = True
    ends_in_random_crop = False

    def __init__(self, function: Callable[[Any], Any], size: Size | None = None, *, channels: int = 3) -> None:
        """Try the function on a blank image to find its size and dtype.

        Args:
            function: takes a PIL image.
            size: what the height and width must be; whatever the trial gives if None.
            channels: of the images, 1, 3 or 4.

        Raises:
            UserError: the function fails on the blank image, or returns no image, or one of another size.
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


@dataclass(frozen=True)
class FiveCrops(Pipeline):
    """A pipeline that gives five crops where another gives the central one: the corners, then the centre.

    The crops of an image are stacked along its height: `size` is (5 * height, width). An image of one size that the
    other pipeline does not crop is resized to 8/7 of it first.
    """

    crop: Size
    pads: bool  # as torchvision's center_crop does; big_vision's central_crop enlarges

    @classmethod
    def of(cls, pipeline: Pipeline) -> FiveCrops:
        """The crops of a pipeline that ends in central_crop, center_crop or resize.

        Raises:
            UserError: it ends in another step.
        """
        *before, last = pipeline.steps
        (height, width), name = pipeline.size, last.name
        if name == "resize":
            before.append(replace(last, sides=(round(height * 8 / 7), round(width * 8 / 7))))
        elif name not in ("central_crop", "center_crop"):
            raise UserError(f'"{pipeline.text}" does not end in a crop or a resize that five crops replace: use flip.')
        return cls(pipeline.text, tuple(before), (5 * height, width), False, (height, width), name == "center_crop")

    def __call__(self, image: ImageInput, rng: np.random.Generator | None = None) -> np.ndarray:
        """(h, w, c) -> (*size, c)"""
        pixels = super().__call__(image, rng)
        pixels = whole_image(padded(pixels, self.crop) if self.pads else fitting(pixels, self.crop))
        bottom, right = pixels.shape[0] - self.crop[0], pixels.shape[1] - self.crop[1]
        corners = [cut(pixels, top, left, self.crop) for top in (0, bottom) for left in (0, right)]
        middle = center_crop(pixels, self.crop) if self.pads else central_crop(pixels, self.crop)
        return np.concatenate([*corners, middle])


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


def image_array(value: Any, name: str) -> np.ndarray:
    """An image value -> uint8 or float32 (h, w, c), contiguous.

    Args:
        value: a PIL image, an array (h, w) or (h, w, c), or a tensor (h, w) or (c, h, w).
        name: what to call it in messages.

    Raises:
        UserError: it is none of these.
        ImageError: it is a PIL image whose file is damaged.
    """
    if is_pil(value):
        return pil_to_array(value)
    if isinstance(value, Tensor):
        array, order = value.detach().cpu(), "(channels, height, width)"
        array = np.asarray(array.float() if array.is_floating_point() else array)
        if array.ndim == 3 and not (array.shape[0] not in _CHANNELS and array.shape[2] in _CHANNELS):
            array = array.transpose(1, 2, 0)
        elif array.ndim != 2:
            raise UserError(f"{name} is a tensor of shape {tuple(value.shape)}: return {order}.")
    elif isinstance(value, np.ndarray):
        array = value.astype(np.float32) if np.issubdtype(value.dtype, np.floating) else value
        if array.ndim != 2 and (array.ndim != 3 or (array.shape[2] not in _CHANNELS and array.shape[0] in _CHANNELS)):
            raise UserError(f"{name} is an array of shape {value.shape}: return (height, width, channels).")
    else:
        raise UserError(f"{name} is {_type_name(value)}: return a PIL image, a uint8 array or a tensor.")
    if array.dtype not in (np.uint8, np.float32):
        raise UserError(f"{name} is of dtype {array.dtype}: return uint8, or floating-point values.")
    if not array.size:
        raise UserError(f"{name} has the shape {tuple(value.shape)} and no pixels: return an image.")
    return np.ascontiguousarray(array if array.ndim == 3 else array[:, :, None])


def eight_bit_array(value: Any, name: str) -> np.ndarray:
    """As `image_array`, with floating-point values in [0, 1] rounded to uint8; others are refused."""
    array = image_array(value, name)
    if array.dtype == np.uint8:
        return array
    low, high = float(array.min()), float(array.max())
    if not (low >= 0 and high <= 1):  # so written that NaN is refused too
        raise UserError(
            f"{name} has values from {low:.3g} to {high:.3g}, not 0 to 1: return images without normalisation, "
            "or pass it as transform=."
        )
    return np.rint(array * 255).astype(np.uint8)


def _type_name(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
