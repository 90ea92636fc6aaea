"""Blocks of memory that workers fill with a batch's pixels: finished images, or parts of pictures yet to be resized.

Resizing is a quarter of a worker's time, and nothing to a GPU. As it gives the same pixels on either (`images.resize`),
a part that is too large to be handed over may as well be resized here.
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

from vitral.data.images import resize
from vitral.data.preprocess import Picture, Pipeline

SHRINK = 4  # times that a GPU may make a part smaller: a longer one is resized here
_ROOM = 2  # times the images' bytes: enough for random parts of 500 x 375 pixels where images have 224 x 224


class Parts(NamedTuple):
    """pixels uint8 (n,), those of one part (h, w, c) after the other; places int64 (b, 4): where a part begins, its
    height, its width, and 1 where its image is mirrored."""

    pixels: Tensor
    places: Tensor


Resize = Callable[[Parts], Tensor]  # parts -> images uint8 (b, c, h, w)


@dataclass(frozen=True)
class Layout:
    """What a block holds."""

    pipeline: Pipeline
    rows: int
    channels: int
    parts: bool  # or images

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(b, h, w, c) of the images in the end."""
        return self.rows, *self.pipeline.size, self.channels

    @property
    def room(self) -> int:
        """Bytes of a block."""
        return (_ROOM if self.parts else 1) * math.prod(self.shape)

    def writer(self, block: Tensor) -> ImageWriter | PartWriter:
        return (PartWriter if self.parts else ImageWriter)(self, block.numpy())


class ImageWriter:
    """Fills a block with images."""

    places = None  # an image's is its number

    def __init__(self, layout: Layout, block: np.ndarray) -> None:
        self.pipeline, self.images, self.used = layout.pipeline, block.reshape(layout.shape), len(block)

    def write(self, row: int, picture: Picture, rng: np.random.Generator | None) -> None:
        """Raises UnreadableImage."""
        self.images[row] = self.pipeline(picture, rng)

    def leave_blank(self, row: int) -> None:
        self.images[row] = 0


class PartWriter:
    """Fills a block with parts, row by row."""

    def __init__(self, layout: Layout, block: np.ndarray) -> None:
        self.pipeline, self.block, self.used = layout.pipeline, block, 0
        self.places = np.zeros((layout.rows, 4), np.int64)
        self.blank = np.zeros((1, 1, layout.channels), np.uint8)  # of one pixel, hence of one colour at any size

    def write(self, row: int, picture: Picture, rng: np.random.Generator | None) -> None:
        """Raises UnreadableImage."""
        assert rng is not None  # a part is drawn
        pixels, mirrored = self.pipeline.part(picture, rng)
        height, width = self.pipeline.size
        later = (len(self.places) - row - 1) * height * width * pixels.shape[2]  # room for the rows to come
        shrink = max(pixels.shape[0] / height, pixels.shape[1] / width)
        if shrink > SHRINK or self.used + pixels.size + later > len(self.block):
            pixels = resize(pixels, (height, width))
        self._put(row, pixels, mirrored)

    def leave_blank(self, row: int) -> None:
        self._put(row, self.blank, mirrored=False)

    def _put(self, row: int, pixels: np.ndarray, mirrored: bool) -> None:
        end = self.used + pixels.size
        np.copyto(self.block[self.used : end].reshape(pixels.shape), pixels)
        self.places[row] = self.used, *pixels.shape[:2], mirrored
        self.used = end


def new_block(room: int, *, shared: bool) -> Tensor:
    """uint8 (room,), yet to be filled; what others write to a shared block is seen here."""
    if not shared:
        return torch.empty(room, dtype=torch.uint8)
    if multiprocessing.get_start_method() == "fork":
        # Memory that children inherit. Any other needs room in /dev/shm, of which a container may have 64 MB.
        return torch.frombuffer(mmap.mmap(-1, room), dtype=torch.uint8)
    # Not share_memory_(): it copies, and there is nothing to copy yet.
    return torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(room))


def copied(block: Tensor, used: int, *, pin: bool) -> Tensor:
    """uint8 (used,) of its own memory, so that the block can be filled anew."""
    if pin:
        pixels = torch.empty(used, dtype=torch.uint8, pin_memory=True)
    else:
        # NumPy's comes in huge pages, torch's a small page at a time, which takes longer than to fill it.
        pixels = torch.from_numpy(np.empty(used, np.uint8))
    np.copyto(pixels.numpy(), block.numpy()[:used])  # torch would take the cores that the workers are on
    return pixels
