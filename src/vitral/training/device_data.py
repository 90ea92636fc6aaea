"""Images on the GPU: small data sets that stay there, and crops that are resized there.

A small model takes tens of thousands of small images per second, more than workers can deliver one by one. Where the
host has nothing random to do, images are decoded once and stay; augmentation then runs on the device
(`augmentation.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vitral.data.loader import PADDING, Batch, Transform, batch_indices, evaluation_batches, rank_positions
from vitral.data.preprocess import Pipeline
from vitral.data.sources import Split
from vitral.data.workers import MAX_SHRINK, BufferLayout, PackedCrops
from vitral.kernels.dispatch import supports_crop_resize
from vitral.training.parallel import World

_RESIDENT_SHARE = 0.25  # of the GPU's free memory that images may take
_UPLOAD_SHARE = 0.05  # of a GPU's memory that the crops of a batch and the resized images may take
_READ_BATCH = 512
_BATCHES_IN_FLIGHT = 2
_shared: dict[tuple[str, ...], ResidentSplit] | None = None  # by images and transform, while `shared_residents` lasts


@dataclass(frozen=True)
class ResidentSplit:
    """A split on the device: images uint8 (n, channels, height, width), labels (n,) or (n, classes), valid (n,)."""

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
            drawn = batch_indices(examples, batch, step, seed)[positions]
            indices = torch.from_numpy(drawn if order is None else order[drawn])
            on_device = indices.to(self.images.device, non_blocking=True)
            yield Batch(self.images[on_device], self.labels[on_device], self.valid[on_device], indices)


@contextmanager
def shared_residents() -> Iterator[None]:
    """Keep splits on the GPU between runs of this process, as long as the context lasts."""
    global _shared
    _shared = {}
    try:
        yield
    finally:
        _shared = None


def load_resident_split(
    split: Split, transform: Transform, channels: int, workers: int, world: World
) -> ResidentSplit | None:
    """Load a split onto the GPU, or reuse the loaded one; None without a GPU, if the images would take too much of its
    memory, or if the transform is random."""
    if world.device.type != "cuda" or transform.random:
        return None
    key = () if _shared is None else (split.stamp(), transform.text, str(channels), str(world.device))
    if _shared is not None and key in _shared:
        return _shared[key]
    loaded = _load(split, transform, channels, workers, world)
    if _shared is not None and loaded is not None:
        _shared[key] = loaded
    return loaded


def _load(split: Split, transform: Transform, channels: int, workers: int, world: World) -> ResidentSplit | None:
    nbytes = len(split) * channels * transform.size[0] * transform.size[1]
    if nbytes > _RESIDENT_SHARE * torch.cuda.mem_get_info(world.device)[0]:
        return None
    images = torch.empty(len(split), channels, *transform.size, dtype=torch.uint8, device=world.device)
    valid = torch.zeros(len(split), dtype=torch.bool, device=world.device)
    for batch in evaluation_batches(split, transform, batch=_READ_BATCH, workers=workers, channels=channels, pin=True):
        real = batch.indices != PADDING
        indices = batch.indices[real].to(world.device)
        images[indices] = batch.images[real].to(world.device)
        valid[indices] = batch.valid[real].to(world.device)
    return ResidentSplit(images, torch.from_numpy(split.labels).to(world.device), valid)


def crop_uploader(transform: Transform, rows: int, channels: int, device: torch.device) -> CropUploader | None:
    """The uploader to which `training_batches` of this many rows may leave the resizing; None if workers resize.

    A batch that is too large to be on the GPU as a whole is resized by the workers and copied there per microbatch.
    """
    if not (isinstance(transform, Pipeline) and transform.ends_in_random_crop and supports_crop_resize(device)):
        return None
    layout = BufferLayout(transform, rows, channels, packed=True)
    nbytes = layout.nbytes + _BATCHES_IN_FLIGHT * math.prod(layout.shape)
    fits = nbytes <= _UPLOAD_SHARE * torch.cuda.get_device_properties(device).total_memory
    return CropUploader(layout, device) if fits else None


class CropUploader:
    """Copies crops to the GPU and resizes them there, on a separate stream: queued steps need not end first.

    The crops of every batch are copied to the same buffer: for batches that all differ in size, PyTorch's caching
    allocator would take more and more memory.
    """

    def __init__(self, layout: BufferLayout, device: torch.device) -> None:
        from vitral.kernels.resize import CropResize  # needs Triton

        self.device, self.stream = device, torch.cuda.Stream(device)
        with torch.cuda.stream(self.stream):
            self.pixels = torch.empty(layout.nbytes, dtype=torch.uint8, device=device)
        assert isinstance(layout.pipeline, Pipeline)
        self.resize = CropResize(
            layout.pipeline.size, layout.channels, MAX_SHRINK, device, antialias=layout.pipeline.antialias
        )

    def __call__(self, crops: PackedCrops) -> Tensor:
        """The images of packed crops, uint8 (batch, channels, height, width) on the device."""
        with torch.cuda.stream(self.stream):
            self.pixels[: len(crops.pixels)].copy_(crops.pixels, non_blocking=True)
            images = self.resize(self.pixels, crops.table.to(self.device, non_blocking=True))
        compute = torch.cuda.current_stream(self.device)
        compute.wait_stream(self.stream)
        images.record_stream(compute)  # else its memory would be reused before a step has read it
        return images
