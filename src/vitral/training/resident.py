"""Images that stay on the GPU: where the host has nothing random to do to them, they are prepared once.

A small model takes tens of thousands of small images a second, more than workers can hand over one by one; what is
random then happens on the device, in `augmentation.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vitral.data.loader import PADDING, Batch, evaluation_batches
from vitral.data.order import batch_indices, rank_positions
from vitral.data.preprocess import Pipeline
from vitral.data.sources import Split
from vitral.training.parallel import World

_SHARE = 0.25  # of the GPU's free memory that images may take
_AT_ONCE = 512


@dataclass(frozen=True)
class Resident:
    """A split on the device: images uint8 (n, c, h, w), labels (n,) or (n, k), valid (n,)."""

    images: Tensor
    labels: Tensor
    valid: Tensor

    def batches(
        self, steps: range, *, batch: int, seed: int, world: World, partners: bool, order: np.ndarray | None
    ) -> Iterator[Batch]:
        """What `training_batches` yields with the same arguments, on the device but for the indices."""
        positions = rank_positions(batch, world.rank, world.size, partners=partners)
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
    if world.device.type != "cuda" or pipeline.random or size > _SHARE * torch.cuda.mem_get_info(world.device)[0]:
        return None
    images = torch.empty(len(split), channels, *pipeline.size, dtype=torch.uint8, device=world.device)
    valid = torch.zeros(len(split), dtype=torch.bool, device=world.device)
    for part in evaluation_batches(split, pipeline, batch=_AT_ONCE, workers=workers, channels=channels, pin=True):
        real = part.indices != PADDING
        places = part.indices[real].to(world.device)
        images[places] = part.images[real].to(world.device)
        valid[places] = part.valid[real].to(world.device)
    return Resident(images, torch.from_numpy(split.labels).to(world.device), valid)
