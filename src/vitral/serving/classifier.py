"""Low-latency prediction of single images.

On an NVIDIA GPU the whole prediction, from pixels in host memory to classes in host memory, is one CUDA graph in
bfloat16; on a CPU the weights are packed for prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import overload

import numpy as np
import torch
from torch import Tensor, nn

from vitral.architecture import Size
from vitral.checkpoints.transform import ImageInput, read_pixels
from vitral.data.preprocess import Pipeline
from vitral.kernels.cuda_graph import CudaGraph
from vitral.kernels.packed import pack
from vitral.models.normalize import normalize

_WARM_UP = 3  # calls before the CUDA graph is captured


class TopKClassifier:
    """A model that predicts one image of a fixed size at a time. Thread-safe: calls share buffers and run in turn."""

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
        """Move the model to the device and prepare it there.

        Args:
            model: the model, which is modified: its weights are packed (CPU) or converted to bfloat16 (GPU).
            device: where to compute.
            size: height and width of the images.
            channels: channels of the images.
            mean: per-channel mean of pixel values scaled to [0, 1].
            std: per-channel standard deviation of the same.
            top: how many classes to return, at most as many as the model has.
            sigmoid: whether classes have independent probabilities (multi-label).
        """
        self.model, self.device, self.mean, self.std = model.eval().to(device), device, mean, std
        self.top, self.sigmoid = top, sigmoid
        self.pixels = torch.zeros(*size, channels, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.lock = Lock()
        self.predict: Callable[[], tuple[Tensor, Tensor]]
        with torch.inference_mode():
            if device.type == "cuda":
                with torch.cuda.device(device):
                    self.predict = self._captured()
            else:
                pack(self.model)
                self.predict = self._eager

    def __call__(self, pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Predict uint8 (height, width, channels) -> indices of the top classes (top,), their probabilities (top,)"""
        with self.lock, torch.inference_mode():
            np.copyto(self.pixels.numpy(), pixels, casting="no")
            indices, probabilities = self.predict()
            return indices.numpy().copy(), probabilities.numpy().copy()

    def _eager(self) -> tuple[Tensor, Tensor]:
        indices, probabilities = self._top_classes(self.pixels.to(self.device))
        return indices.cpu(), probabilities.cpu()

    def _captured(self) -> Callable[[], tuple[Tensor, Tensor]]:
        """Capture a CUDA graph that reads and writes pinned host memory."""
        self.model.to(torch.bfloat16)
        indices = torch.zeros(self.top, dtype=torch.int64, pin_memory=True)
        probabilities = torch.zeros(self.top, pin_memory=True)

        def work() -> tuple[Tensor, ...]:
            outputs = self._top_classes(self.pixels.to(self.device, non_blocking=True))
            for host, output in zip((indices, probabilities), outputs, strict=True):
                host.copy_(output, non_blocking=True)
            return outputs

        for _ in range(_WARM_UP):
            work()
        graph = CudaGraph(work, [])

        def replay() -> tuple[Tensor, Tensor]:
            graph.graph.replay()
            torch.cuda.current_stream(self.device).synchronize()
            return indices, probabilities

        return replay

    def _top_classes(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """uint8 (height, width, channels) -> (top,), (top,)"""
        images = normalize(pixels.permute(2, 0, 1).unsqueeze(0), self.mean, self.std)
        logits = self.model(images.to(next(self.model.parameters()).dtype))[0].float()
        best = logits.topk(self.top).indices  # of the logits: several probabilities may round to 1
        probabilities = logits.sigmoid() if self.sigmoid else logits.softmax(dim=-1)
        return best, probabilities.gather(0, best)


@dataclass(frozen=True)
class NamedClassifier:
    """A classifier of images of any size that returns class names."""

    classifier: TopKClassifier
    pipeline: Pipeline
    channels: int
    names: Sequence[str]

    @overload
    def __call__(self, image: ImageInput) -> list[tuple[str, float]]: ...

    @overload
    def __call__(self, image: list[ImageInput]) -> list[list[tuple[str, float]]]: ...

    def __call__(self, image: ImageInput | list[ImageInput]) -> list[tuple[str, float]] | list[list[tuple[str, float]]]:
        """Predict an image, or each of a list.

        Args:
            image: a PIL image, uint8 pixels (height, width, channels), the path of an image file, or its bytes; or a
                list of them.

        Returns:
            The top classes and their probabilities, highest first; a list of these for a list.

        Raises:
            UserError: if the image cannot be read or has the wrong type or shape.
        """
        if isinstance(image, list):
            return [self(each) for each in image]
        indices, probabilities = self.classifier(self.pipeline(read_pixels(image, self.channels)))
        return [
            (self.names[index], value) for index, value in zip(indices.tolist(), probabilities.tolist(), strict=True)
        ]
