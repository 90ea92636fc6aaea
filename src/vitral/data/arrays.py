"""Arrays as images: the order of their axes, their values, and .npy files, which hold any number of channels."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

NPY = b"\x93NUMPY"  # the first bytes of such a file
CHANNELS = (1, 3, 4)  # of an array or a tensor, which tell the order of its axes
# 16-bit values below keep at most 64 levels in 8 bits: they are those of a sensor of 10, 12 or 14 bits, not scaled.
_DIM = 1 << 14
_READERS = {1: np.lib.format.read_array_header_1_0, 2: np.lib.format.read_array_header_2_0}


class ImageError(ValueError):
    """An image that cannot be read; the message is one short reason."""


def is_transposed(shape: Sequence[int]) -> bool:
    """Whether three axes look like (channels, height, width) instead of (height, width, channels).

    The two are told apart by a common number of channels, or by two sides of one length.
    """
    first, second, third = shape
    return third not in CHANNELS and (first in CHANNELS or first != second == third)


def eight_bits(array: np.ndarray) -> np.ndarray:
    """Floating-point values from 0 to 1 -> uint8; others raise ValueError."""
    low, high = float(array.min()), float(array.max())
    if not (low >= 0 and high <= 1):  # so written that NaN is refused too
        raise ValueError(f"values from {low:.3g} to {high:.3g}, not 0 to 1")
    return np.rint(array * 255).astype(np.uint8)


def dim_note(largest: int) -> str:
    """What 8 bits keep of 16-bit images with values up to `largest`, if that is little; else empty."""
    if not 0 < largest < _DIM:
        return ""
    levels = (largest >> 8) + 1
    kept = f"of which 8 bits keep {levels} level{'s' * (levels > 1)}"
    return f"the values of 16-bit images end at {largest:,} of 65,535, {kept}: scale them to the whole range"


def npy_shape(data: bytes) -> tuple[int, int, int]:
    """Height, width and channels of the image in a .npy file, by its header; raises ImageError."""
    return _header(data).shape


def read_npy(data: bytes) -> np.ndarray:
    """The image in a .npy file -> uint8 (h, w, c); raises ImageError."""
    shape, order, dtype, offset = _header(data)
    array = np.frombuffer(data, dtype, offset=offset).reshape(shape, order=order)
    try:
        return np.ascontiguousarray(array) if dtype == np.uint8 else eight_bits(array)
    except ValueError as error:
        raise ImageError(str(error)) from error


class _Header(NamedTuple):
    shape: tuple[int, int, int]
    order: Literal["C", "F"]
    dtype: np.dtype
    offset: int  # of the values in the file


def _header(data: bytes) -> _Header:
    """The header, checked against the length of the file. Nothing is executed, or allocated by what it says."""
    stream = io.BytesIO(data)
    try:
        version, _ = np.lib.format.read_magic(stream)
        shape, by_columns, dtype = _READERS[min(version, 2)](stream)
    except Exception as error:  # NumPy raises nearly anything on damaged bytes
        raise ImageError("the header of this .npy file is damaged") from error
    if dtype != np.uint8 and dtype.kind != "f":
        raise ImageError(f"it holds values of type {dtype}, not uint8 or floating-point ones from 0 to 1")
    if len(shape) not in (2, 3) or not all(size > 0 for size in shape):
        raise ImageError(f"it holds an array of shape {shape}, not (height, width, channels)")
    if len(shape) == 3 and is_transposed(shape):
        raise ImageError(f"its shape {shape} may begin with the channels: store (height, width, channels)")
    if len(data) - stream.tell() != math.prod(shape) * dtype.itemsize:
        raise ImageError("the file is truncated")
    height, width, channels = (*shape, 1)[:3]
    return _Header((height, width, channels), "F" if by_columns else "C", dtype, stream.tell())
