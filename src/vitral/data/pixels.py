"""Pixels (h, w, c): checks of image values, resizing and cropping, with two rounding conventions.

big_vision's, which the paper's pipelines have: the longer side is rounded, an odd margin is larger at the bottom and
right, and an image that is too small is enlarged. That of torchvision and timm: the longer side is truncated, halves of
an odd margin are rounded to even, and an image that is too small is padded.

In both, an image of more than `MAX_ASPECT` times its shorter side is cut before it is enlarged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from vitral.architecture import Size
from vitral.data.arrays import eight_bits, is_transposed
from vitral.data.images import PILLOW_METHODS, LazyJpeg, as_tensor, is_pil, pil_to_array, pillow_resize
from vitral.errors import UserError

ImageInput = np.ndarray | LazyJpeg  # uint8 (h, w, c); of a lazy one only what a crop needs is decoded
Box = tuple[int, int, Size]  # top, left, and (height, width) of a crop
MAX_ASPECT = 16  # an image of 1 x 10,000 pixels would otherwise take gigabytes
METHODS = ("bilinear", "bicubic", "nearest", "area", "float_bilinear", *PILLOW_METHODS)


def image_array(value: Any, name: str) -> np.ndarray:
    """A PIL image, an array (h, w) or (h, w, c), or a tensor (h, w) or (c, h, w) -> uint8 or float32 (h, w, c).

    Any other value is a UserError, which calls it `name`; a PIL image whose file is damaged is an ImageError.
    """
    if is_pil(value):
        return pil_to_array(value)
    if isinstance(value, Tensor):
        array, order = value.detach().cpu(), "(channels, height, width)"
        array = np.asarray(array.float() if array.is_floating_point() else array)
        if array.ndim == 3 and not is_transposed(array.shape[::-1]):
            array = array.transpose(1, 2, 0)
        elif array.ndim != 2:
            raise UserError(f"{name} is a tensor of shape {tuple(value.shape)}: return {order}.")
    elif isinstance(value, np.ndarray):
        array = value.astype(np.float32) if np.issubdtype(value.dtype, np.floating) else value
        if array.ndim != 2 and (array.ndim != 3 or is_transposed(array.shape)):
            raise UserError(f"{name} is an array of shape {value.shape}: return (height, width, channels).")
    else:
        type_name = "None" if value is None else f"a {type(value).__name__}"
        raise UserError(f"{name} is {type_name}, not a PIL image, a uint8 array or a tensor.")
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
    try:
        return eight_bits(array)
    except ValueError as error:
        raise UserError(
            f"{name} has {error}: pass images that are not normalised; in training, transform= may normalise them."
        ) from error


def whole_image(image: ImageInput) -> np.ndarray:
    """All pixels of an image, decoded if they are not yet."""
    return image if isinstance(image, np.ndarray) else cut(image, 0, 0, image.shape[:2])


def cut(image: ImageInput, top: int, left: int, size: Size) -> np.ndarray:
    """A view of what is decoded: nothing is copied."""
    return image[top : top + size[0], left : left + size[1]]


def central_crop(image: ImageInput, size: Size) -> np.ndarray:
    """(h, w, c) -> the middle (*size, c), enlarged first if it does not fit."""
    image = fitting(image, size)
    return cut(image, (image.shape[0] - size[0]) // 2, (image.shape[1] - size[1]) // 2, size)


def fitting(image: ImageInput, size: Size) -> ImageInput:
    """The image, enlarged if it is smaller than the crop to come: a border would be no picture."""
    small = image.shape[0] < size[0] or image.shape[1] < size[1]
    return resized_to(image, rounded_cover, size, "bilinear") if small else image


def center_crop(image: ImageInput, size: Size) -> np.ndarray:
    """(h, w, c) -> the middle (*size, c), with black borders if it does not fit: torchvision's CenterCrop."""
    image = padded(image, size)
    return cut(image, round((image.shape[0] - size[0]) / 2), round((image.shape[1] - size[1]) / 2), size)


def padded(image: ImageInput, size: Size, fill: Sequence[float] = (0,)) -> ImageInput:
    """(h, w, c) -> the image in the middle of a canvas of at least `size`; `fill` is its colour, cycled."""
    height, width, channels = image.shape
    canvas = max(height, size[0]), max(width, size[1])
    if canvas == (height, width):
        return image
    pixels = np.empty((*canvas, channels), np.uint8)
    pixels[:] = np.resize(fill, channels)
    cut(pixels, (canvas[0] - height) // 2, (canvas[1] - width) // 2, (height, width))[:] = whole_image(image)
    return pixels


def inception_box(image: Size, min_area: float, rng: np.random.Generator) -> Box:
    """A random crop as TensorFlow's SampleDistortedBoundingBox draws it, with the defaults of Google's code.

    The aspect ratio is drawn linearly from 0.75 to 1.33, then a height uniformly from those that it and the area allow.
    An image that does not fit 100 of them is used whole. As there, no crop touches the lower or right border unless it
    is as long as the image.
    """
    height, width = image
    smallest = min_area * height * width
    for _ in range(100):
        aspect = rng.uniform(0.75, 1.33)
        tallest = min(round(math.sqrt(height * width / aspect)), int((width + 0.5 - 1e-7) / aspect), height)
        high = int(rng.integers(min(round(math.sqrt(smallest / aspect)), tallest), tallest + 1))
        high += high * round(high * aspect) < smallest  # by rounding
        high -= high * round(high * aspect) > height * width
        wide = round(high * aspect)
        if smallest <= high * wide and 0 < high <= height and 0 < wide <= width:
            return _offset(height, high, rng), _offset(width, wide, rng), (high, wide)
    return 0, 0, image


def _offset(length: int, crop: int, rng: np.random.Generator) -> int:
    return int(rng.integers(length - crop)) if crop < length else 0


def random_resized_box(image: Size, min_area: float, rng: np.random.Generator) -> Box:
    """A random crop as torchvision's RandomResizedCrop draws it: areas uniformly, aspect ratios by their logarithm.

    An image that does not fit ten of them is used whole, where torchvision takes its middle.
    """
    height, width = image
    for _ in range(10):
        area = height * width * rng.uniform(min_area, 1)
        aspect = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        high, wide = round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))
        if 0 < high <= height and 0 < wide <= width:
            return int(rng.integers(height - high + 1)), int(rng.integers(width - wide + 1)), (high, wide)
    return 0, 0, image


def resized_to(
    image: ImageInput, rule: Callable[[Size, Size], Size], size: Size, method: str, *, antialias: bool = True
) -> np.ndarray:
    """Resized to `rule(the image's size, size)`; a very long image is cut to its middle before."""
    (height, width), (high, wide) = image.shape[:2], trimmed(image.shape[:2])
    middle = cut(image, (height - high) // 2, (width - wide) // 2, (high, wide))
    return resize(middle, rule((high, wide), size), method, antialias=antialias)


def trimmed(image: Size) -> Size:
    """The size of what is left of a very long image."""
    longest = MAX_ASPECT * min(image)
    return min(image[0], longest), min(image[1], longest)


def rounded_cover(image: Size, size: Size) -> Size:
    """big_vision's: in proportion, the smallest that covers `size`."""
    (height, width), (high, wide) = image, size
    if high * width >= wide * height:
        return high, max(wide, round(width * high / height))
    return max(high, round(height * wide / width)), wide


def truncated_cover(image: Size, size: Size) -> Size:
    """torchvision's Resize of the shorter side, to a square `size`."""
    (height, width), short = image, size[0]
    return (int(short * height / width), short) if width <= height else (short, int(short * width / height))


def ratio_cover(image: Size, size: Size) -> Size:
    """timm's ResizeKeepRatio: as big_vision's, but computed from the ratio."""
    return _by_ratio(image, min(image[0] / size[0], image[1] / size[1]))


def ratio_fit(image: Size, size: Size) -> Size:
    """timm's ResizeKeepRatio with longest=1: in proportion, the largest that fits into `size`."""
    return _by_ratio(image, max(image[0] / size[0], image[1] / size[1]))


def _by_ratio(image: Size, ratio: float) -> Size:
    return max(round(image[0] / ratio), 1), max(round(image[1] / ratio), 1)


SIDE_RULES: dict[str, Callable[[Size, Size], Size]] = {
    "resize_small": rounded_cover,
    "resize_short": truncated_cover,
    "resize_cover": ratio_cover,
    "resize_fit": ratio_fit,
}


def resize(image: np.ndarray, size: Size, method: str = "bilinear", *, antialias: bool = True) -> np.ndarray:
    """uint8 (h, w, c) -> (*size, c); `image` may be a view. Only `bilinear` has no antialiasing if requested.

    `bilinear` and `bicubic` are PyTorch's for bytes, close to Pillow's but not equal; `pil_...` are Pillow's own.
    `float_bilinear` is PyTorch's in float32, rounded at the end. `area` is the exact mean of what each pixel covers, as
    TensorFlow's method of that name.
    """
    if image.shape[:2] == size:
        return image
    if method in PILLOW_METHODS:
        return pillow_resize(image, size, method)
    if method == "area":
        return _area(image, size)
    if method == "nearest":
        rows, columns = (_nearest(before, after) for before, after in zip(image.shape, size, strict=False))
        return image.take(rows, 0).take(columns, 1)
    # Torch recognises channels_last, which is twice as fast, only if the batch axis is added before the permutation.
    batch = as_tensor(image)[None].permute(0, 3, 1, 2)
    if method == "float_bilinear":
        exact = F.interpolate(batch.float(), size, mode="bilinear", antialias=True)
        return exact[0].permute(1, 2, 0).round().byte().numpy()
    # Antialias when enlarging, too: it costs nothing there, and bicubic would use another kernel than Pillow's.
    resized = F.interpolate(batch, size, mode=method, antialias=antialias)
    return resized[0].permute(1, 2, 0).numpy()


def _nearest(before: int, after: int) -> np.ndarray:
    """(after,): the source pixels that contain the centres of the new pixels."""
    return ((np.arange(after) + 0.5) * before / after).astype(int)


def _area(image: np.ndarray, size: Size) -> np.ndarray:
    """Means over cells with fractional borders, one axis after the other."""
    means = image.astype(np.float32)
    for axis, length in enumerate(size):
        means = _cell_means(means, length, axis)
    return np.rint(means).astype(np.uint8)


def _cell_means(image: np.ndarray, length: int, axis: int) -> np.ndarray:
    """float32 (h, w, c) -> the same with `length` along the axis: the k-th pixels of all cells are added at a time."""
    before = image.shape[axis]
    start, end = np.arange(length) * before / length, np.arange(1, length + 1) * before / length
    shape = [-1 if dimension == axis else 1 for dimension in range(3)]
    means = np.zeros([length if dimension == axis else side for dimension, side in enumerate(image.shape)], np.float32)
    for k in range(math.ceil(before / length) + 1):
        pixel = start.astype(int) + k
        share = (np.minimum(end, pixel + 1) - np.maximum(start, pixel)).clip(0) * length / before
        means += share.astype(np.float32).reshape(shape) * image.take(pixel, axis, mode="clip")
    return means


def shown_region(image: Size, steps: Sequence[tuple[str, Size]]) -> tuple[float, float, float, float]:
    """The part of an image of this size that deterministic steps, names and sizes, keep: left, top, width and height as
    fractions of the image; what is padded lies below 0 or above 1."""
    size, start, length = np.array(image), np.zeros(2), np.ones(2)

    def crop(offset: np.ndarray, after: np.ndarray) -> None:
        nonlocal size, start, length
        start, length, size = start + length * offset / size, length * after / size, after

    for name, sides in steps:
        to = np.array(sides)
        enlarged = name == "central_crop" and (size < to).any()
        if rule := rounded_cover if enlarged else SIDE_RULES.get(name):
            kept = np.array(trimmed((size[0], size[1])))
            crop((size - kept) // 2, kept)
            size = np.array(rule((size[0], size[1]), sides))
        if name == "resize":
            size = to
        elif name == "central_crop":
            crop((size - to) // 2, to)
        elif name in ("center_crop", "pad"):
            canvas = np.maximum(size, to)
            crop(-((canvas - size) // 2), canvas)
            if name == "center_crop":
                crop(np.rint((size - to) / 2), to)
    (top, left), (height, width) = start.tolist(), length.tolist()
    return left, top, width, height
