"""Sides and crops of images, by two conventions of rounding; and how random crops are drawn.

big_vision's, which the paper's pipelines have: the longer side is rounded, an odd margin is larger at the bottom and
right, and an image that is too small is enlarged. That of torchvision and timm: the longer side is truncated, halves of
an odd margin are rounded to even, and an image that is too small is padded.

In both, an image of more than `MAX_ASPECT` times its shorter side is cut before it is enlarged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from vitral.architecture import Size
from vitral.data.images import LazyJpeg, resize

ImageInput = np.ndarray | LazyJpeg  # uint8 (h, w, c); of a lazy one only what a crop needs is decoded
Box = tuple[int, int, Size]  # top, left, and (height, width) of a crop
MAX_ASPECT = 16  # an image of 1 x 10,000 pixels would otherwise take gigabytes


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
    """The image, enlarged where it is smaller than the crop to come: a border would be no picture."""
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


def shown_region(image: Size, steps: Sequence[tuple[str, Size]]) -> tuple[float, float, float, float]:
    """The part of an image that deterministic steps keep.

    Args:
        image: its height and width.
        steps: names and sizes, as a pipeline has them.

    Returns:
        Left, top, width and height as fractions of the image; what is padded lies below 0 or above 1.
    """
    spans = [_axis_span(image, steps, axis) for axis in (0, 1)]
    (top, height), (left, width) = spans
    return left, top, width, height


def _axis_span(image: Size, steps: Sequence[tuple[str, Size]], axis: int) -> tuple[float, float]:
    """Start and length along an axis, as fractions of the image."""
    size, start, length = image, 0.0, 1.0

    def cropped(offset: int, after: Size) -> None:
        nonlocal size, start, length
        start, length = start + length * offset / size[axis], length * after[axis] / size[axis]
        size = after

    def resized(rule: Callable[[Size, Size], Size], to: Size) -> None:
        nonlocal size
        kept = trimmed(size)
        cropped((size[axis] - kept[axis]) // 2, kept)
        size = rule(size, to)

    for name, to in steps:
        if name == "resize":
            size = to
        elif name in SIDE_RULES:
            resized(SIDE_RULES[name], to)
        elif name == "central_crop":
            if size[0] < to[0] or size[1] < to[1]:
                resized(rounded_cover, to)
            cropped((size[axis] - to[axis]) // 2, to)
        else:  # center_crop and pad
            canvas = max(size[0], to[0]), max(size[1], to[1])
            cropped(-((canvas[axis] - size[axis]) // 2), canvas)
            if name == "center_crop":
                cropped(round((size[axis] - to[axis]) / 2), to)
    return start, length
