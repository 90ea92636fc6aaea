"""The one step from stored pixels to a model's input, the same in training, evaluation and prediction."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from vitral.errors import UserError


def normalize(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Scale uint8 pixels to 0..1 and normalize them per channel; floating-point images pass through unchanged.

    Floating-point images come out of a user's own transform, which has normalized them already: scaling them a second
    time would cost a model most of its accuracy without an error.

    Args:
        images: (batch, channels, height, width), uint8 pixels or normalized floating-point values.
        mean: one value per channel, for pixels scaled to 0..1.
        std: likewise.

    Returns:
        `images` itself if floating point, else float32 (pixel / 255 - mean) / std on the same device.

    Raises:
        UserError: another dtype, or `mean` and `std` for another number of channels.
    """
    if images.is_floating_point():
        return images
    if images.dtype != torch.uint8:
        dtype = str(images.dtype).removeprefix("torch.")
        raise UserError(
            f"cannot normalize {dtype} images: pass uint8 pixels from 0 to 255, or normalized floating-point images."
        )
    channels = images.shape[1]
    if len(mean) != channels or len(std) != channels:
        raise UserError(
            f"images of {channels} channels need as many values of mean and std, not {len(mean)} and {len(std)}."
        )
    scale, shift = scale_and_shift(tuple(mean), tuple(std), images.device)
    return torch.addcmul(shift, images.to(torch.float32, memory_format=torch.contiguous_format), scale)


@cache
@torch.inference_mode(False)
def scale_and_shift(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Scale and shift, (channels, 1, 1) each, in double precision until the last rounding.

    Cached: a step that is captured as a CUDA graph must not copy anything from the host.
    """
    mean64, std64 = (torch.tensor(values, dtype=torch.float64).view(-1, 1, 1) for values in (mean, std))
    scale, shift = 1 / (255 * std64), -mean64 / std64
    return scale.to(device, torch.float32), shift.to(device, torch.float32)
