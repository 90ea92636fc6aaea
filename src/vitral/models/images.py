"""What a model asks of its input."""

from __future__ import annotations

from torch import Tensor

from vitral.errors import UserError


def check_images(images: Tensor, channels: int) -> None:
    """Refuse what is not a batch of images (b, channels, height, width)."""
    if images.ndim != 4 or images.shape[1] != channels:
        raise UserError(
            f"this model reads a batch of {channels}-channel images (b, c, h, w), "
            f"not a tensor of shape {tuple(images.shape)}."
        )
