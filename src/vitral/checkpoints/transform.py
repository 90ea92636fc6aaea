"""The preprocessing of a model as a callable for any PyTorch `Dataset`: images to normalised tensors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from vitral.data.images import ImageError, PILImage, as_tensor, decode, is_pil, pil_to_array
from vitral.data.preprocess import Pipeline
from vitral.errors import UserError
from vitral.models.normalize import normalize

ImageInput = np.ndarray | PILImage | str | Path | bytes


@dataclass(frozen=True)
class ImageTransform:
    """Decode, resize, crop and normalise one image, with exactly the pixels that `vitral.predict` uses.

    Instances can be pickled, as DataLoader workers require.
    """

    pipeline: Pipeline
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, image: ImageInput) -> Tensor:
        """Preprocess an image.

        Args:
            image: a PIL image, uint8 pixels (height, width, channels), a path, or the bytes of an image file.

        Returns:
            A float32 tensor (channels, height, width).
        """
        pixels = as_tensor(self.pipeline(read_pixels(image, self.channels)))
        return normalize(pixels.permute(2, 0, 1).unsqueeze(0), self.mean, self.std)[0]


def read_pixels(image: ImageInput, channels: int) -> np.ndarray:
    """uint8 pixels (height, width, channels) of an image, by the decode policy of `vitral.data.images`."""
    if isinstance(image, np.ndarray):
        return _checked(image, channels)
    name = "this image"
    try:
        if is_pil(image):
            return pil_to_array(image, channels)
        if isinstance(image, str | Path):
            name = str(image)
            image = Path(image).expanduser().read_bytes()
        if isinstance(image, bytes):
            return decode(image, channels)
    except ImageError as error:
        raise UserError(f"{name} cannot be read ({error}): pass a complete image.") from error
    except OSError as error:
        raise UserError(f"{name} cannot be read ({error.strerror}): pass the path of an image file.") from error
    raise UserError(
        f"a {type(image).__name__} is not an image: pass a PIL image, uint8 pixels (height, width, {channels}), "
        "a path, or the bytes of a file."
    )


def _checked(pixels: np.ndarray, channels: int) -> np.ndarray:
    """Grey pixels are repeated for all channels, as those of a file are."""
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.size == 0 or pixels.shape[2] not in (1, channels):
        raise UserError(
            f"these pixels are {pixels.dtype} {pixels.shape}: pass uint8 (height, width, {channels}) from 0 to 255."
        )
    return pixels if pixels.shape[2] == channels else np.repeat(pixels, channels, axis=2)
