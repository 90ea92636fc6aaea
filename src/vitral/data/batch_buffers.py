"""Memory that workers fill with the pixels of a batch: finished images, or crops that are yet to be resized.

Resizing takes a quarter of a worker's time and almost none of a GPU's. Both give the same pixels (`images.resize`), so
a crop that is too large to be handed over is resized by the worker.
"""

from __future__ import annotations

import math
import mmap
import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitral.data.geometry import ImageInput, resize
from vitral.data.preprocess import Pipeline
from vitral.data.transforms import CallableTransform

MAX_SHRINK = 4  # the factor by which a GPU may shrink a crop: a larger crop is resized by the worker
_PACKED_FACTOR = 2  # times the images' bytes: enough for random crops of 500 x 375 pixels where images have 224 x 224


class PackedCrops(NamedTuple):
    """pixels uint8 (n,), one crop (h, w, c) after the other; table int64 (b, 4): offset, height, width, and 1 where the
    crop is to be mirrored."""

    pixels: Tensor
    table: Tensor


ResizeCrops = Callable[[PackedCrops], Tensor]  # crops -> images uint8 (b, c, h, w)


@dataclass(frozen=True)
class BufferLayout:
    """What a buffer holds: `rows` images of the pipeline's size and dtype, or packed crops."""

    pipeline: Pipeline | CallableTransform
    rows: int
    channels: int
    packed: bool

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(b, h, w, c) of the final images."""
        return self.rows, *self.pipeline.size, self.channels

    @property
    def nbytes(self) -> int:
        return (_PACKED_FACTOR if self.packed else 1) * math.prod(self.shape) * self.pipeline.dtype.itemsize

    def writer(self, buffer: Tensor) -> ImageWriter | CropWriter:
        return (CropWriter if self.packed else ImageWriter)(self, buffer.numpy())


class ImageWriter:
    """Fills a buffer with finished images."""

    table = None

    def __init__(self, layout: BufferLayout, buffer: np.ndarray) -> None:
        self.pipeline, self.used = layout.pipeline, len(buffer)
        self.images = buffer.view(layout.pipeline.dtype).reshape(layout.shape)

    def write(self, row: int, image: ImageInput, rng: np.random.Generator | None) -> None:
        """Raises ImageError."""
        self.images[row] = self.pipeline(image, rng)

    def leave_blank(self, row: int) -> None:
        self.images[row] = 0


class CropWriter:
    """Fills a buffer with crops, row by row."""

    def __init__(self, layout: BufferLayout, buffer: np.ndarray) -> None:
        assert isinstance(layout.pipeline, Pipeline)
        self.pipeline, self.buffer, self.used = layout.pipeline, buffer, 0
        self.table = np.zeros((layout.rows, 4), np.int64)
        self.blank = np.zeros((1, 1, layout.channels), np.uint8)  # one pixel: resized, it is of one colour

    def write(self, row: int, image: ImageInput, rng: np.random.Generator | None) -> None:
        """Raises ImageError."""
        assert rng is not None  # the crop is random
        pixels, mirrored = self.pipeline.crop_region(image, rng)
        height, width = self.pipeline.size
        reserved = (len(self.table) - row - 1) * height * width * pixels.shape[2]  # bytes for the rows to come
        shrink = max(pixels.shape[0] / height, pixels.shape[1] / width)
        if shrink > MAX_SHRINK or self.used + pixels.size + reserved > len(self.buffer):
            pixels = resize(pixels, (height, width), antialias=self.pipeline.antialias)
        self._append(row, pixels, mirrored)

    def leave_blank(self, row: int) -> None:
        self._append(row, self.blank, mirrored=False)

    def _append(self, row: int, pixels: np.ndarray, mirrored: bool) -> None:
        end = self.used + pixels.size
        np.copyto(self.buffer[self.used : end].reshape(pixels.shape), pixels)
        self.table[row] = self.used, *pixels.shape[:2], mirrored
        self.used = end


def new_buffer(nbytes: int, *, shared: bool) -> Tensor:
    """uint8 (nbytes,), uninitialised; what other processes write to a shared buffer is visible here."""
    if not shared:
        return torch.empty(nbytes, dtype=torch.uint8)
    if multiprocessing.get_start_method() == "fork":
        # Memory that children inherit. Any other takes space in /dev/shm, of which a container may have 64 MB.
        return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
    # Not share_memory_(): it copies, and there is nothing to copy yet.
    return torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(nbytes))


def copy_buffer(buffer: Tensor, used: int, *, pin: bool) -> Tensor:
    """uint8 (used,) in memory of its own, so that the buffer can be filled again."""
    if pin:
        pixels = torch.empty(used, dtype=torch.uint8, pin_memory=True)
    else:
        # NumPy allocates huge pages; torch allocates small ones, which take longer to map than to fill.
        pixels = torch.from_numpy(np.empty(used, np.uint8))
    np.copyto(pixels.numpy(), buffer.numpy()[:used])  # torch would use the cores that the workers run on
    return pixels
