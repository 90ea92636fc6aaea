"""One picture in, its likeliest classes out, as soon as the device can.

On an NVIDIA GPU the whole way, from pixels in the host's memory to answers there, is one CUDA graph in half precision;
on a CPU the weights are laid out for prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from vitral.architecture import Size
from vitral.kernels.packed import pack
from vitral.kernels.recording import Recording
from vitral.models.normalise import normalise

_BEFORE_RECORDING = 3  # calls


class Classifier:
    """Calls may not overlap: they share their buffers."""

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
    ) -> None:
        """`model` is taken over: it moves to the device, and its weights are packed or halved there."""
        self.model, self.mean, self.std, self.top = model.eval().to(device), mean, std, top
        self.pixels = torch.zeros(*size, channels, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.answer: Callable[[], tuple[Tensor, Tensor]]
        with torch.inference_mode():
            if device.type == "cuda":
                self.answer = self._recorded(device)
            else:
                pack(self.model)
                self.answer = self._computed

    def __call__(self, pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """uint8 (h, w, c) of the size it was made for -> the likeliest outputs (top,), their probabilities (top,)"""
        self.pixels.numpy()[...] = pixels
        with torch.inference_mode():
            indices, shares = self.answer()
        return indices.numpy().copy(), shares.numpy().copy()

    def _computed(self) -> tuple[Tensor, Tensor]:
        return self._likeliest(self.pixels)

    def _recorded(self, device: torch.device) -> Callable[[], tuple[Tensor, Tensor]]:
        """The graph reads and writes pinned memory of the host by itself."""
        self.model.to(torch.bfloat16)
        indices = torch.zeros(self.top, dtype=torch.int64, pin_memory=True)
        shares = torch.zeros(self.top, pin_memory=True)

        def work() -> tuple[Tensor, ...]:
            found = self._likeliest(self.pixels.to(device, non_blocking=True))
            for host, answer in zip((indices, shares), found, strict=True):
                host.copy_(answer, non_blocking=True)
            return found

        for _ in range(_BEFORE_RECORDING):
            work()
        recording = Recording(work, [])

        def replay() -> tuple[Tensor, Tensor]:
            recording.graph.replay()
            torch.cuda.current_stream(device).synchronize()
            return indices, shares

        return replay

    def _likeliest(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """uint8 (h, w, c) -> (top,), (top,)"""
        images = normalise(pixels.permute(2, 0, 1).unsqueeze(0), self.mean, self.std)
        logits = self.model(images.to(next(self.model.parameters()).dtype))[0]
        found = logits.float().softmax(dim=-1).topk(self.top)
        return found.indices, found.values
