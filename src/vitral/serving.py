"""Predictions as rows (the top classes of each image file, or why it is unreadable), and low-latency classification.

On an NVIDIA GPU the whole prediction of a single image, from pixels in host memory to classes in host memory, is one
CUDA graph in bfloat16; on a CPU the weights are packed for prediction.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
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
from vitral.data.images import ImageError, UnreadableImage, as_tensor, channels_of, decode
from vitral.data.preprocess import Pipeline
from vitral.data.sources import Split
from vitral.display import SummaryRepr
from vitral.evaluation.calibration import probabilities
from vitral.evaluation.predict import Precision, Predictions
from vitral.kernels.cuda_graph import CudaGraph
from vitral.kernels.packed import pack
from vitral.models.model import normalize

_WARM_UP = 3  # calls before the CUDA graph is captured


@dataclass(frozen=True)
class ImagePrediction:
    """The top classes of one image and their probabilities, highest first."""

    path: str
    names: tuple[str, ...]
    probabilities: tuple[float, ...]


@dataclass(frozen=True, repr=False)
class PredictionResults(SummaryRepr):
    """The results of all requested images in their order, an `UnreadableImage` where reading failed.

    Several in one folder have one each; a file that is named twice has one.
    """

    images: tuple[ImagePrediction | UnreadableImage, ...]
    precision: Precision = "float32"  # of the computation; an exported file has its own

    def summary(self) -> dict[str, str]:
        first = {row.path: f"{row.names[0]} ({row.probabilities[0]:.1%})" for row in self.rows[:1]}
        unreadable = {"unreadable": f"{len(self.unreadable):,}"} if self.unreadable else {}
        return {"n": f"{len(self.rows):,}", **unreadable, **first}

    def __len__(self) -> int:
        return len(self.images)

    def __iter__(self) -> Iterator[ImagePrediction | UnreadableImage]:
        return iter(self.images)

    def __getitem__(self, index: int) -> ImagePrediction | UnreadableImage:
        return self.images[index]

    @property
    def rows(self) -> tuple[ImagePrediction, ...]:
        return tuple(image for image in self.images if isinstance(image, ImagePrediction))

    @property
    def unreadable(self) -> tuple[UnreadableImage, ...]:
        return tuple(image for image in self.images if isinstance(image, UnreadableImage))

    def as_dict(self) -> dict[str, Any]:
        rows = []
        for row in self.rows:
            pairs = zip(row.names, row.probabilities, strict=True)
            rows.append({"path": row.path, "classes": [{"name": name, "probability": value} for name, value in pairs]})
        precision = {"precision": self.precision} if self.precision != "float32" else {}
        return {"predictions": rows, **precision, "unreadable": [asdict(image) for image in self.unreadable]}


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
    """Find the top classes of each image; without names of classes their indices are used.

    Unreadable images are decoded once more, to this many channels, to find the reason.
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
    """Write a JSON file if the name ends in .json, else CSV; atomically."""
    if path.suffix.lower() == ".json":
        write_json(path, results.as_dict())
    else:
        _write_csv(path, results)


def _write_csv(path: Path, results: PredictionResults) -> None:
    """One line per image, in their order: path, class_1, probability_1, ..., and error, empty for predicted images."""
    top = max((len(row.names) for row in results.rows), default=0)
    columns = [name for rank in range(1, top + 1) for name in (f"class_{rank}", f"probability_{rank}")]
    # File names need not be valid UTF-8; their bytes are written unchanged.
    with (
        atomic_write(path) as temporary,
        temporary.open("w", newline="", encoding="utf-8", errors="surrogateescape") as stream,
    ):
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(["path", *columns, "error"])
        for image in results.images:
            if isinstance(image, UnreadableImage):
                writer.writerow([_inert(image.path), *[""] * len(columns), _inert(image.reason)])
                continue
            pairs = zip(image.names, image.probabilities, strict=True)
            cells = [cell for name, value in pairs for cell in (_inert(name), f"{value:.6f}")]
            writer.writerow([_inert(image.path), *cells, ""])


def _inert(cell: str) -> str:
    """A cell that a spreadsheet does not take for a formula: an apostrophe is put before such a beginning.

    The csv module does not quote a carriage return, which ends a line for most readers.
    """
    plain = cell.replace("\r", "\\r")
    return f"'{plain}" if plain.startswith(("=", "+", "-", "@", "\t")) else plain


def unread(split: Split, index: int, channels: int = 0) -> UnreadableImage:
    """Read an image once more to find the reason why it is unreadable, which batches do not carry.

    `channels` are those of the model; 0 if none reads it.
    """
    reason = "it was unreadable the first time"
    try:
        data = split.reader.read(index)
        if not isinstance(data, np.ndarray):
            decode(data, channels or channels_of(data))
    except (ImageError, OSError) as error:
        reason = str(error)
    return UnreadableImage(split.keys[index], reason)


class BatchRunner:
    """A function of uint8 pixels (batch, height, width, channels), from host memory to host memory.

    On an NVIDIA GPU there is one CUDA graph for each of a few batch sizes, and a batch is padded to the next of them.
    Thread-safe: calls share buffers and run in turn.
    """

    def __init__(
        self,
        function: Callable[[Tensor], tuple[Tensor, ...]],
        device: torch.device,
        *,
        size: Size,
        channels: int,
        batches: Sequence[int] = (1,),
        spin: bool = True,
    ) -> None:
        """Capture the function, of pixels on the device to tensors whose first axis is the batch, on a GPU: for batches
        of these sizes, ascending; the last one is the largest batch. The thread that waits for the GPU keeps a core
        busy (`spin`), or sleeps, which takes some microseconds longer and leaves the core to others."""
        self.function, self.device, self.lock = function, device, Lock()
        self.shape = (*size, channels)
        self.graphs: dict[int, tuple[CudaGraph, tuple[Tensor, ...]]] = {}
        if device.type == "cuda":
            self.pixels = torch.zeros(batches[-1], *self.shape, dtype=torch.uint8, pin_memory=True)
            self.computed = torch.cuda.Event(blocking=not spin)
            with torch.cuda.device(device), torch.inference_mode():
                self.graphs = {batch: self._captured(batch) for batch in batches}

    def __call__(self, pixels: np.ndarray) -> tuple[np.ndarray, ...]:
        """Call the function on a batch; the arrays of the answer are the caller's."""
        if pixels.dtype != np.uint8 or pixels.shape[1:] != self.shape:
            raise ValueError(f"pixels are {pixels.dtype} {pixels.shape}, not uint8 (batch, {self.shape})")
        with self.lock, torch.inference_mode():
            if self.graphs:
                return self._replayed(pixels)
            outputs = self.function(as_tensor(pixels).to(self.device))
            return tuple(output.cpu().numpy() for output in outputs)

    def _captured(self, batch: int) -> tuple[CudaGraph, tuple[Tensor, ...]]:
        """A CUDA graph that reads and writes pinned host memory, and the memory that it writes."""
        results: list[Tensor] = []

        def work() -> tuple[Tensor, ...]:
            outputs = self.function(self.pixels[:batch].to(self.device, non_blocking=True))
            if not results:
                results.extend(torch.zeros(output.shape, dtype=output.dtype, pin_memory=True) for output in outputs)
            for result, output in zip(results, outputs, strict=True):
                result.copy_(output, non_blocking=True)
            return outputs

        for _ in range(_WARM_UP):
            work()
        return CudaGraph(work, []), tuple(results)

    def _replayed(self, pixels: np.ndarray) -> tuple[np.ndarray, ...]:
        count = len(pixels)
        graph, results = self.graphs[min(batch for batch in self.graphs if batch >= count)]
        self.pixels.numpy()[:count] = pixels
        graph.graph.replay()
        self.computed.record(torch.cuda.current_stream(self.device))
        self.computed.synchronize()
        return tuple(result.numpy()[:count].copy() for result in results)


def prepare_model(model: nn.Module, device: torch.device) -> nn.Module:
    """Move a model to a device for prediction: packed weights on a CPU, bfloat16 on an NVIDIA GPU; in place."""
    model.eval().to(device)
    if device.type == "cuda":
        return model.to(torch.bfloat16)
    with torch.inference_mode():
        pack(model)
    return model


def model_input(model: nn.Module, pixels: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """uint8 (batch, height, width, channels) -> (batch, channels, height, width), normalised, of the model's dtype"""
    return normalize(pixels.permute(0, 3, 1, 2), mean, std).to(next(model.parameters()).dtype)


class TopKClassifier:
    """A model that predicts one image of a fixed size at a time. Thread-safe: calls run in turn."""

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
        """Move the model to the device, where its weights are packed (CPU) or converted to bfloat16 (GPU).

        `sigmoid`: classes have independent probabilities (multi-label). Logits are divided by the temperature.
        """
        self.model, self.mean, self.std = prepare_model(model, device), mean, std
        self.top, self.sigmoid, self.temperature = top, sigmoid, temperature
        self.runner = BatchRunner(self._top_classes, device, size=size, channels=channels)

    def __call__(self, pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Predict uint8 (height, width, channels) -> indices of the top classes (top,), their probabilities (top,)"""
        indices, probabilities = self.runner(pixels[None])
        return indices[0], probabilities[0]

    def _top_classes(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """uint8 (batch, height, width, channels) -> (batch, top), (batch, top)"""
        logits = self.model(model_input(self.model, pixels, self.mean, self.std)).float()
        best = logits.topk(self.top).indices  # of the logits: several probabilities may round to 1
        scaled = logits / self.temperature
        probabilities = scaled.sigmoid() if self.sigmoid else scaled.softmax(dim=-1)
        return best, probabilities.gather(1, best)


@dataclass(frozen=True, repr=False)
class NamedClassifier(SummaryRepr):
    """A classifier of images of any size that returns class names."""

    classifier: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]  # a `TopKClassifier`, or an exported file
    pipeline: Pipeline
    channels: int
    names: Sequence[str]

    def summary(self) -> dict[str, str]:
        names = ", ".join([*self.names[:3], *["..."] * (len(self.names) > 3)])
        return {"classes": f"{len(self.names):,} ({names})", "preprocess": self.pipeline.text}

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
