"""Predictions as rows (the top classes of each image file, or why it is unreadable), and of single images, quickly.

On an NVIDIA GPU the whole prediction of a single image, from pixels in host memory to classes in host memory, is one
CUDA graph in bfloat16; on a CPU the weights are packed for prediction.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor, nn

from vitral.architecture import Size
from vitral.atomic import atomic_write
from vitral.checkpoints.card import ImageInput, read_pixels
from vitral.checkpoints.write import write_json
from vitral.data.images import ImageError, UnreadableImage, decode
from vitral.data.preprocess import Pipeline
from vitral.data.sources import Split
from vitral.display import SummaryRepr
from vitral.evaluation.calibration import probabilities
from vitral.evaluation.predict import Predictions
from vitral.kernels.cuda_graph import CudaGraph
from vitral.kernels.packed import pack
from vitral.models.normalize import normalize

_WARM_UP = 3  # calls before the CUDA graph is captured


@dataclass(frozen=True)
class ImagePrediction:
    """The top classes of one image and their probabilities, highest first."""

    path: str
    names: tuple[str, ...]
    probabilities: tuple[float, ...]


@dataclass(frozen=True, repr=False)
class PredictionResults(SummaryRepr):
    """The results of all requested images, in their order."""

    images: tuple[ImagePrediction | UnreadableImage, ...]

    def summary(self) -> dict[str, str]:
        first = {row.path: f"{row.names[0]} ({row.probabilities[0]:.1%})" for row in self.rows[:1]}
        unreadable = {"unreadable": f"{len(self.unreadable):,}"} if self.unreadable else {}
        return {"n": f"{len(self.rows):,}", **unreadable, **first}

    @property
    def rows(self) -> tuple[ImagePrediction, ...]:
        """The images that were predicted."""
        return tuple(image for image in self.images if isinstance(image, ImagePrediction))

    @property
    def unreadable(self) -> tuple[UnreadableImage, ...]:
        """The images that could not be read."""
        return tuple(image for image in self.images if isinstance(image, UnreadableImage))

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        return {
            "predictions": [
                {
                    "path": row.path,
                    "classes": [
                        {"name": name, "probability": value}
                        for name, value in zip(row.names, row.probabilities, strict=True)
                    ],
                }
                for row in self.rows
            ],
            "unreadable": [asdict(image) for image in self.unreadable],
        }


def collect_predictions(
    predictions: Predictions,
    split: Split,
    classes: Sequence[str],
    *,
    top: int = 5,
    sigmoid: bool = False,
    temperature: float = 1.0,
    channels: int = 3,
) -> PredictionResults:
    """Find the top classes of each image.

    Args:
        predictions: logits and validity of the images of `split`.
        split: the images.
        classes: names of the classes; without them their indices are used.
        top: how many classes per image.
        sigmoid: whether classes have independent probabilities (multi-label).
        temperature: what the logits are divided by.
        channels: channels that unreadable images are decoded to once more, to find the reason.

    Returns:
        One result per image.
    """
    names = classes or tuple(map(str, range(predictions.logits.shape[1])))
    images: list[ImagePrediction | UnreadableImage] = []
    for index, logits, valid in zip(*predictions, strict=True):
        path = split.keys[index]
        if valid:
            values = probabilities(logits[None], sigmoid=sigmoid, temperature=temperature)[0]
            # Of the logits, since several probabilities may round to 0 or 1; ties in the order of the classes.
            best = np.argsort(-logits, kind="stable")[:top]
            images.append(ImagePrediction(path, tuple(names[i] for i in best), tuple(values[best].tolist())))
        else:
            images.append(unread(split, int(index), channels))
    return PredictionResults(tuple(images))


def write_results(path: Path, results: PredictionResults) -> None:
    """Write a JSON file where the name ends in .json, else CSV; atomically."""
    if path.suffix.lower() == ".json":
        write_json(path, results.as_dict())
    else:
        _write_csv(path, results)


def _write_csv(path: Path, results: PredictionResults) -> None:
    """One line per image: path, class_1, probability_1, class_2, ..., and error, empty for predicted images."""
    top = max((len(row.names) for row in results.rows), default=0)
    columns = [name for rank in range(1, top + 1) for name in (f"class_{rank}", f"probability_{rank}")]
    # File names need not be valid UTF-8; their bytes are written unchanged.
    with (
        atomic_write(path) as temporary,
        temporary.open("w", newline="", encoding="utf-8", errors="surrogateescape") as stream,
    ):
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(["path", *columns, "error"])
        for row in results.rows:
            pairs = zip(row.names, row.probabilities, strict=True)
            cells = [cell for name, value in pairs for cell in (_inert(name), f"{value:.6f}")]
            writer.writerow([_inert(row.path), *cells, ""])
        for image in results.unreadable:
            writer.writerow([_inert(image.path), *[""] * len(columns), _inert(image.reason)])


def _inert(cell: str) -> str:
    """A cell that a spreadsheet does not take for a formula: an apostrophe is put before such a beginning.

    The csv module does not quote a carriage return, which ends a line for most readers.
    """
    plain = cell.replace("\r", "\\r")
    return f"'{plain}" if plain.startswith(("=", "+", "-", "@", "\t")) else plain


def unread(split: Split, index: int, channels: int) -> UnreadableImage:
    """Read an image once more to find the reason why it is unreadable, which batches do not carry."""
    reason = "it was unreadable the first time"
    try:
        data = split.reader.read(index)
        if not isinstance(data, np.ndarray):
            decode(data, channels)
    except (ImageError, OSError) as error:
        reason = str(error)
    return UnreadableImage(split.keys[index], reason)


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
        temperature: float = 1.0,
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
            temperature: what the logits are divided by.
        """
        self.model, self.device, self.mean, self.std = model.eval().to(device), device, mean, std
        self.top, self.sigmoid, self.temperature = top, sigmoid, temperature
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
        scaled = logits / self.temperature
        probabilities = scaled.sigmoid() if self.sigmoid else scaled.softmax(dim=-1)
        return best, probabilities.gather(0, best)


@dataclass(frozen=True)
class NamedClassifier:
    """A classifier of images of any size that returns class names."""

    classifier: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]  # a `TopKClassifier`, or an exported file
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
