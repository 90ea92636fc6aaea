"""The one step from stored pixels to a model's input, the same in training, evaluation and prediction."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from vitral.errors import UserError


def normalise(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """uint8 (b, c, h, w) -> float32 (b, c, h, w): (pixel / 255 - mean) / std, on the device that holds the images.

    Only uint8 is taken: dividing pixels by 255 a second time is silent, and costs a model most of its accuracy.
    """
    if images.dtype != torch.uint8:
        kind = str(images.dtype).removeprefix("torch.")
        raise UserError(
            f"these images are {kind}, so their pixels may have been rescaled already: "
            "hand over uint8 pixels from 0 to 255 (for 0 to 1: (x * 255).round().to(torch.uint8))."
        )
    channels = images.shape[1]
    if len(mean) != channels or len(std) != channels:
        raise UserError(
            f"images of {channels} channels need as many values of mean and std, not {len(mean)} and {len(std)}."
        )
    scale, shift = _constants(tuple(mean), tuple(std), images.device)
    return torch.addcmul(shift, images.to(torch.float32, memory_format=torch.contiguous_format), scale)


@cache
@torch.inference_mode(False)
def _constants(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """In double precision until the last rounding: one multiplication and one addition for each pixel remain.

    Made once: a step that is recorded as a CUDA graph must not copy anything from the host.
    """
    centre, spread = (torch.tensor(values, dtype=torch.float64).view(-1, 1, 1) for values in (mean, std))
    scale, shift = 1 / (255 * spread), -centre / spread
    return scale.to(device, torch.float32), shift.to(device, torch.float32)
