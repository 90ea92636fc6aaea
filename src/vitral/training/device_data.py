"""Images that stay on the GPU: where the host has nothing random to do to them, they are prepared once.

A small model takes tens of thousands of small images a second, more than workers can hand over one by one; what is
random then happens on the device, in `augmentation.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vitral.data.batch_buffers import MAX_SHRINK, BufferLayout, PackedCrops
from vitral.data.loader import PADDING, Batch, evaluation_batches
from vitral.data.order import batch_indices, rank_positions
from vitral.data.preprocess import Pipeline
from vitral.data.sources import Split
from vitral.kernels.dispatch import resizes_parts
from vitral.training.parallel import World

_RESIDENT_SHARE = 0.25  # of the GPU's free memory that images may take
_AT_ONCE = 512


@dataclass(frozen=True)
class Resident:
    """A split on the device: images uint8 (n, c, h, w), labels (n,) or (n, k), valid (n,)."""

    images: Tensor
    labels: Tensor
    valid: Tensor

    def batches(
        self, steps: range, *, batch: int, seed: int, world: World, mix_partner: bool, order: np.ndarray | None
    ) -> Iterator[Batch]:
        """What `training_batches` yields with the same arguments, on the device but for the indices."""
        positions = rank_positions(batch, world.rank, world.size, mix_partner=mix_partner)
        examples = len(self.images) if order is None else len(order)
        for step in steps:
            places = batch_indices(examples, batch, step, seed)[positions]
            indices = torch.from_numpy(places if order is None else order[places])
            there = indices.to(self.images.device, non_blocking=True)
            yield Batch(self.images[there], self.labels[there], self.valid[there], indices)


def resident(split: Split, pipeline: Pipeline, channels: int, workers: int, world: World) -> Resident | None:
    """The split on the GPU; None where there is no GPU, where it would take too much of it, or where the pipeline draws
    anew each time."""
    size = len(split) * channels * pipeline.size[0] * pipeline.size[1]
    if (
        world.device.type != "cuda"
        or pipeline.random
        or size > _RESIDENT_SHARE * torch.cuda.mem_get_info(world.device)[0]
    ):
        return None
    images = torch.empty(len(split), channels, *pipeline.size, dtype=torch.uint8, device=world.device)
    valid = torch.zeros(len(split), dtype=torch.bool, device=world.device)
    for part in evaluation_batches(split, pipeline, batch=_AT_ONCE, workers=workers, channels=channels, pin=True):
        real = part.indices != PADDING
        places = part.indices[real].to(world.device)
        images[places] = part.images[real].to(world.device)
        valid[places] = part.valid[real].to(world.device)
    return Resident(images, torch.from_numpy(split.labels).to(world.device), valid)


_UPLOAD_SHARE = 0.05  # of a GPU's memory that parts of a batch, and images of some, may take
_IN_FLIGHT = 2  # batches of images at a time


def uploading(pipeline: Pipeline, rows: int, channels: int, device: torch.device) -> Upload | None:
    """What `training_batches` of so many rows may leave the resizing to; None where the workers should do it.

    The images of a batch that is too large to lie on the GPU as a whole come there piece by piece, as steps take them.
    """
    if not (pipeline.ends_in_random_crop and resizes_parts(device)):
        return None
    layout = BufferLayout(pipeline, rows, channels, packed=True)
    taken = layout.nbytes + _IN_FLIGHT * math.prod(layout.shape)
    fits = taken <= _UPLOAD_SHARE * torch.cuda.get_device_properties(device).total_memory
    return Upload(layout, device) if fits else None


class Upload:
    """Copies and resizes on a stream of its own: steps that were queued before need not end first.

    Parts always come to the same memory, one batch after the other: for batches that all differ in size, PyTorch's
    allocator would take more and more.
    """

    def __init__(self, layout: BufferLayout, device: torch.device) -> None:
        from vitral.kernels.resize import PartResize  # needs Triton

        self.device, self.stream = device, torch.cuda.Stream(device)
        with torch.cuda.stream(self.stream):
            self.pixels = torch.empty(layout.nbytes, dtype=torch.uint8, device=device)
        self.resize = PartResize(layout.pipeline.size, layout.channels, MAX_SHRINK, device)

    def __call__(self, parts: PackedCrops) -> Tensor:
        """-> uint8 (b, c, h, w) on the device"""
        with torch.cuda.stream(self.stream):
            self.pixels[: len(parts.pixels)].copy_(parts.pixels, non_blocking=True)
            images = self.resize(self.pixels, parts.table.to(self.device, non_blocking=True))
        steps = torch.cuda.current_stream(self.device)
        steps.wait_stream(self.stream)
        images.record_stream(steps)  # whose memory would else be given out again before a step has read it
        return images
