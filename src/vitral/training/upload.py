"""Images made on the GPU of what workers cut out of files, while it is still busy with the step before."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vitral.data.blocks import SHRINK, Layout, Parts
from vitral.data.preprocess import Pipeline
from vitral.kernels.choice import resizes_parts

_SHARE = 0.05  # of a GPU's memory that parts of a batch, and images of some, may take
_IN_FLIGHT = 2  # batches of images at a time


def uploading(pipeline: Pipeline, rows: int, channels: int, device: torch.device) -> Upload | None:
    """What `training_batches` of so many rows may leave the resizing to; None where the workers should do it.

    The images of a batch that is too large to lie on the GPU as a whole come there piece by piece, as steps take them.
    """
    if not (pipeline.ends_in_part and resizes_parts(device)):
        return None
    layout = Layout(pipeline, rows, channels, parts=True)
    taken = layout.room + _IN_FLIGHT * math.prod(layout.shape)
    fits = taken <= _SHARE * torch.cuda.get_device_properties(device).total_memory
    return Upload(layout, device) if fits else None


class Upload:
    """Copies and resizes on a stream of its own: steps that were queued before need not end first.

    Parts always come to the same memory, one batch after the other: for batches that all differ in size, PyTorch's
    allocator would take more and more.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        from vitral.kernels.resize import PartResize  # needs Triton

        self.device, self.stream = device, torch.cuda.Stream(device)
        with torch.cuda.stream(self.stream):
            self.pixels = torch.empty(layout.room, dtype=torch.uint8, device=device)
        self.resize = PartResize(layout.pipeline.size, layout.channels, SHRINK, device)

    def __call__(self, parts: Parts) -> Tensor:
        """-> uint8 (b, c, h, w) on the device"""
        with torch.cuda.stream(self.stream):
            self.pixels[: len(parts.pixels)].copy_(parts.pixels, non_blocking=True)
            images = self.resize(self.pixels, parts.places.to(self.device, non_blocking=True))
        steps = torch.cuda.current_stream(self.device)
        steps.wait_stream(self.stream)
        images.record_stream(steps)  # whose memory would else be given out again before a step has read it
        return images
