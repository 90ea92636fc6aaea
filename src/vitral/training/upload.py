"""Images made on the GPU of what workers cut out of files, while it is still busy with the step before."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vitral.architecture import Size
from vitral.data.blocks import LONGEST, Layout, Parts, Resize
from vitral.data.preprocess import Pipeline
from vitral.kernels.choice import resizes_parts

_SHARE = 0.05  # of a GPU's memory that what is not yet trained on may take
_IN_FLIGHT = 2  # batches at a time


def uploading(pipeline: Pipeline, rows: int, channels: int, device: torch.device) -> Resize | None:
    """What `training_batches` of so many rows may leave the resizing to; None where the workers should do it: they hand
    over a batch in pieces, should all of it be too large for the GPU."""
    if not (pipeline.ends_in_part and resizes_parts(device)):
        return None
    layout = Layout(pipeline, rows, channels, parts=True)
    taken = _IN_FLIGHT * (layout.room + math.prod(layout.shape))
    fits = taken <= _SHARE * torch.cuda.get_device_properties(device).total_memory
    return Upload(pipeline.size, channels, device) if fits else None


class Upload:
    """Copies and resizes on a stream of its own: steps that were queued before need not end first."""

    def __init__(self, size: Size, channels: int, device: torch.device) -> None:
        from vitral.kernels.resize import PartResize  # needs Triton

        self.device, self.stream = device, torch.cuda.Stream(device)
        self.resize = PartResize(size, channels, LONGEST, device)

    def __call__(self, parts: Parts) -> Tensor:
        """-> uint8 (b, c, h, w) on the device"""
        with torch.cuda.stream(self.stream):
            images = self.resize(*(tensor.to(self.device, non_blocking=True) for tensor in parts))
        steps = torch.cuda.current_stream(self.device)
        steps.wait_stream(self.stream)
        images.record_stream(steps)  # whose memory would else be given out again before a step has read it
        return images
