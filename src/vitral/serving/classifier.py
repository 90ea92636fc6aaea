"""One picture in, its likeliest classes out, as soon as the device can.

On an NVIDIA GPU the whole way, from pixels in the host's memory to answers there, is one CUDA graph in half precision;
on a CPU the weights are laid out for prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import overload

import numpy as np
import torch
from torch import Tensor, nn

from vitral.architecture import Size
from vitral.data.images import PILImage, UnreadableImage, decode, pixels_of
from vitral.data.preprocess import Pipeline
from vitral.errors import UserError
from vitral.kernels.cuda_graph import CudaGraph
from vitral.kernels.packed import pack
from vitral.models.normalise import normalise

Picture = np.ndarray | PILImage | bytes | str | Path  # uint8 pixels (h, w, c), the bytes of an image file, its path

_BEFORE_RECORDING = 3  # calls


class Classifier:
    """Threads may share one: calls share their buffers, so each waits for the one before."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        *,
        size: Size,
        channels: int,
        mean: Sequence[float],
        std: Sequence[float],
        top: int,
        sigmoid: bool = False,
    ) -> None:
        """`model` is taken over: it moves to the device, and its weights are packed or halved there. `top` is at most
        the number of its classes; `sigmoid`: multi-label."""
        self.model, self.device, self.mean, self.std = model.eval().to(device), device, mean, std
        self.top, self.sigmoid = top, sigmoid
        self.pixels = torch.zeros(*size, channels, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.turn = Lock()
        self.answer: Callable[[], tuple[Tensor, Tensor]]
        with torch.inference_mode():
            if device.type == "cuda":
                with torch.cuda.device(device):
                    self.answer = self._recorded()
            else:
                pack(self.model)
                self.answer = self._computed

    def __call__(self, pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """uint8 (h, w, c) of the size it was made for -> the likeliest outputs (top,), their probabilities (top,)"""
        with self.turn, torch.inference_mode():
            np.copyto(self.pixels.numpy(), pixels, casting="no")
            indices, shares = self.answer()
            return indices.numpy().copy(), shares.numpy().copy()

    def _computed(self) -> tuple[Tensor, Tensor]:
        indices, shares = self._likeliest(self.pixels.to(self.device))
        return indices.cpu(), shares.cpu()

    def _recorded(self) -> Callable[[], tuple[Tensor, Tensor]]:
        """The graph reads and writes pinned memory of the host by itself."""
        self.model.to(torch.bfloat16)
        indices = torch.zeros(self.top, dtype=torch.int64, pin_memory=True)
        shares = torch.zeros(self.top, pin_memory=True)

        def work() -> tuple[Tensor, ...]:
            found = self._likeliest(self.pixels.to(self.device, non_blocking=True))
            for host, answer in zip((indices, shares), found, strict=True):
                host.copy_(answer, non_blocking=True)
            return found

        for _ in range(_BEFORE_RECORDING):
            work()
        recording = CudaGraph(work, [])

        def replay() -> tuple[Tensor, Tensor]:
            recording.graph.replay()
            torch.cuda.current_stream(self.device).synchronize()
            return indices, shares

        return replay

    def _likeliest(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """uint8 (h, w, c) -> (top,), (top,)"""
        images = normalise(pixels.permute(2, 0, 1).unsqueeze(0), self.mean, self.std)
        logits = self.model(images.to(next(self.model.parameters()).dtype))[0].float()
        best = logits.topk(self.top).indices  # of the logits: several probabilities may round to 1
        chances = logits.sigmoid() if self.sigmoid else logits.softmax(dim=-1)
        return best, chances.gather(0, best)


@dataclass(frozen=True)
class NamedClassifier:
    """A classifier for pictures of any size, which answers in words."""

    classifier: Classifier
    pipeline: Pipeline
    channels: int
    names: Sequence[str]

    @overload
    def __call__(self, picture: Picture) -> list[tuple[str, float]]: ...

    @overload
    def __call__(self, picture: list[Picture]) -> list[list[tuple[str, float]]]: ...

    def __call__(self, picture: Picture | list[Picture]) -> list[tuple[str, float]] | list[list[tuple[str, float]]]:
        """The likeliest classes and their probabilities, likeliest first; of each picture where there is a list."""
        if isinstance(picture, list):
            return [self(each) for each in picture]
        indices, shares = self.classifier(self.pipeline(_pixels(picture, self.channels)))
        return [(self.names[index], share) for index, share in zip(indices.tolist(), shares.tolist(), strict=True)]


def _pixels(picture: Picture, channels: int) -> np.ndarray:
    """-> uint8 (h, w, channels)"""
    if isinstance(picture, np.ndarray):
        return _checked(picture, channels)
    if isinstance(picture, bytes):
        return _decoded(picture, channels, "this picture")
    if not isinstance(picture, str | Path):
        return _checked(pixels_of(picture), channels)
    try:
        data = Path(picture).expanduser().read_bytes()
    except OSError as error:
        raise UserError(f"{picture} cannot be read ({error.strerror}): name an image file.") from error
    return _decoded(data, channels, str(picture))


def _decoded(data: bytes, channels: int, name: str) -> np.ndarray:
    try:
        return decode(data, channels)
    except UnreadableImage as error:
        raise UserError(f"{name} cannot be read ({error}): hand over a whole image file.") from error


def _checked(pixels: np.ndarray, channels: int) -> np.ndarray:
    """Pixels that may mean what the model takes; grey is copied to all channels, as it is from a file."""
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.size == 0 or pixels.shape[2] not in (1, channels):
        raise UserError(
            f"these pixels are {pixels.dtype} {pixels.shape}: hand over uint8 (height, width, {channels}) of 0 to 255."
        )
    return pixels if pixels.shape[2] == channels else np.repeat(pixels, channels, axis=2)
