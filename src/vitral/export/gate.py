"""The gate: an exported file is compared with its model on images, and is kept only if both agree.

Photographs alone miss some mistakes: grey ones those of the channels' order, confident ones that of the temperature,
tiny probabilities a permutation of rare classes. So generated images are always compared as well, logarithms of
probabilities beside probabilities, batches of several sizes, other image sizes where these are dynamic, and the card.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import interpolate

from vitral.architecture import Size
from vitral.checkpoints.card import Card
from vitral.data.loader import PADDING, evaluation_batches
from vitral.data.preprocess import parse_deterministic
from vitral.data.sources import Split
from vitral.errors import UserError, shorten
from vitral.evaluation.calibration import probabilities
from vitral.events import EventHandler, Progress, ignore_events
from vitral.export.exported import ExportedModel
from vitral.export.graph import PROBABILITIES, ExportGraph
from vitral.models.model import normalize

BATCHES = (1, 3, 8)
GENERATED = 24
MOST_IMAGES = 10_000  # decoded images are kept in memory
_SMALLEST = 1e-30  # probabilities below are rounded differently by every library

Predict = Callable[[np.ndarray], np.ndarray]


class Limits(NamedTuple):
    """What an exported file must meet; None is no limit."""

    agreement: float = 0.99  # share of images with the same top class
    difference: float | None = None  # largest difference of a probability
    log_difference: float | None = None  # largest difference of the logarithm of a probability
    outputs: float | None = None  # largest difference of a further output, relative to its largest value


class GateImages(NamedTuple):
    """Images of the user's that both models run on."""

    pixels: np.ndarray  # (n, height, width, channels) uint8
    labels: np.ndarray  # (n,) int64, outputs of the model; -1 if there is no label
    name: str  # what they are called in the report


class ExportRefused(UserError):
    """An exported file that does not agree with its model: an answer, not a mistake. `report` has the numbers."""

    exit_code = 1

    def __init__(self, sentence: object = "", report: GateReport | None = None) -> None:
        super().__init__(sentence)
        self.report = report


@dataclass(frozen=True)
class GateReport:
    """What the gate measured; of pairs, the model's value is first."""

    images: str  # which images were compared
    n: int
    agreement: float  # share of images with the same top class
    accuracy: tuple[float, float] | None  # top-1, if images are labelled
    labelled: int
    difference: float  # largest difference of a probability, over all images, generated ones included
    log_difference: float  # of its logarithm
    outputs: dict[str, float]  # largest difference of each further output, relative to its largest value
    size: tuple[int, int]  # bytes
    milliseconds: dict[int, tuple[float, float]]  # per image, by batch
    limits: Limits
    failures: tuple[str, ...]  # what does not meet the limits, each as a clause

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {**asdict(self), "limits": self.limits._asdict()}

    def rows(self) -> list[list[str]]:
        """The table as text: what, the model's value, the file's, and the limit."""
        limits = self.limits
        pairs = {f"ms per image, batch {batch}": pair for batch, pair in self.milliseconds.items()}
        accuracy = [f"{value:.2%}" for value in self.accuracy or ()]
        return [
            ["top-1 agreement", "", f"{self.agreement:.2%} of {self.n:,}", f"at least {limits.agreement:.2%}"],
            *([[f"top-1 of {self.labelled:,} labelled", *accuracy, ""]] if accuracy else []),
            ["probability, largest difference", "", f"{self.difference:.2g}", _at_most(limits.difference)],
            ["its logarithm", "", f"{self.log_difference:.2g}", _at_most(limits.log_difference)],
            *(
                [f"{name}, largest relative difference", "", f"{value:.2g}", _at_most(limits.outputs)]
                for name, value in self.outputs.items()
            ),
            ["MB", *(f"{size / 1e6:,.1f}" for size in self.size), ""],
            *([title, *(f"{value:,.1f}" for value in pair), ""] for title, pair in pairs.items()),
        ]


class Gate:
    """A model and the images that exported files are compared with it on; its own outputs are computed once."""

    def __init__(
        self,
        graph: ExportGraph,
        card: Card,
        images: GateImages | None = None,
        limits: Limits | None = None,
        on_event: EventHandler = ignore_events,
    ) -> None:
        """Run the model on all images.

        Args:
            graph: the model, with the outputs that are exported.
            card: its card, which states the preprocessing.
            images: the user's images; without them, generated ones alone are compared.
            limits: what an exported file must meet; by default those of `Limits`.
            on_event: handler of progress events.
        """
        self.graph, self.card, self.limits, self.on_event = graph, card, limits or Limits(), on_event
        self.generated = generated_images(graph.image, card)
        self.images = images or GateImages(
            self.generated, np.full(len(self.generated), -1, np.int64), f"{GENERATED} generated images"
        )
        self._of_generated = self._predict(self.model_probabilities, self.generated, "")
        self._of_images = self._of_generated
        if images is not None:
            self._of_images = self._predict(self.model_probabilities, self.images.pixels, "the model")

    def model_probabilities(self, pixels: np.ndarray) -> np.ndarray:
        """The model as `vitral predict` runs it: uint8 (batch, height, width, channels) -> (batch, classes), float64"""
        preprocessing = self.card.preprocess
        assert preprocessing is not None
        images = normalize(torch.from_numpy(pixels).permute(0, 3, 1, 2), preprocessing.mean, preprocessing.std)
        with torch.inference_mode():
            logits = self.graph.model(images).numpy()
        return probabilities(logits, sigmoid=self.card.multilabel, temperature=self.card.temperature)

    def agreement(self, exported: ExportedModel) -> float:
        """The share of images that get the model's top class, of those seen until the limit cannot be met any more."""
        pixels, same, seen = self.images.pixels, 0, 0
        while seen < len(pixels) and seen - same <= (1 - self.limits.agreement) * len(pixels):
            outputs = exported(pixels[seen : seen + BATCHES[-1]])
            same += int((outputs.argmax(axis=1) == self._of_images[seen : seen + len(outputs)].argmax(axis=1)).sum())
            seen += len(outputs)
            self.on_event(Progress("comparing", seen, len(pixels)))
        return same / seen

    def holds(self, exported: ExportedModel) -> bool:
        """Whether a file meets the limits that `measure` compares, of generated images first, which are few."""
        limits, images = self.limits, [(self.generated, self._of_generated), (self.images.pixels, self._of_images)]
        if limits.outputs is not None and any(
            value > limits.outputs for value in self._output_differences(exported).values()
        ):
            return False
        if limits.difference is not None and any(
            _largest(self._predict(exported, pixels, "") - ours) > limits.difference for pixels, ours in images
        ):
            return False
        return self.agreement(exported) >= limits.agreement

    def measure(self, exported: ExportedModel) -> GateReport:
        """Compare an exported file with the model; failures are in the report.

        Raises:
            ExportRefused: the file does not run on a batch of 1, 3 or 8 images.
        """
        pairs, milliseconds = [], {}
        for batch in BATCHES:
            with _refused_unless_it_runs(f"a batch of {batch}"):
                pairs.append((self._of_generated, self._predict(exported, self.generated, "", batch)))
                sample = self.generated[:batch]
                milliseconds[batch] = (_milliseconds(self.model_probabilities, sample), _milliseconds(exported, sample))
        outputs = pairs[-1][1]
        for size in _other_sizes(self.graph) if exported.size == (None, None) else []:
            pixels = generated_images(size, self.card)[:3]
            with _refused_unless_it_runs(f"images of {size[0]}x{size[1]} pixels"):
                pairs.append((self.model_probabilities(pixels), exported(pixels)))
        if self.images.pixels is not self.generated:
            outputs = self._predict(exported, self.images.pixels, "the exported file")
            pairs.append((self._of_images, outputs))
        labels = self.images.labels
        report = GateReport(
            images=self.images.name,
            n=len(outputs),
            agreement=float((self._of_images.argmax(axis=1) == outputs.argmax(axis=1)).mean()),
            accuracy=(_accuracy(self._of_images, labels), _accuracy(outputs, labels)) if (labels >= 0).any() else None,
            labelled=int((labels >= 0).sum()),
            difference=max(_largest(theirs - ours) for ours, theirs in pairs),
            log_difference=max(_log_difference(ours, theirs) for ours, theirs in pairs),
            outputs=self._output_differences(exported),
            size=(_bytes_of(self.graph), exported.path.stat().st_size),
            milliseconds=milliseconds,
            limits=self.limits,
            failures=(),
        )
        return replace(report, failures=tuple(self._failures(report, exported.card)))

    def _failures(self, report: GateReport, card: Card) -> Iterator[str]:
        """What does not meet the limits, each as a clause."""
        limits = report.limits
        for name in (field.name for field in fields(Card)):
            if getattr(card, name) != getattr(self.card, name):
                yield f"its card has another {name.replace('_', ' ')}"
        if not report.agreement >= limits.agreement:
            yield f"its top class is the model's on {report.agreement:.2%} of {report.n:,} images only"
        if limits.difference is not None and not report.difference <= limits.difference:
            yield f"a probability differs by {report.difference:.2g}"
        if limits.log_difference is not None and not report.log_difference <= limits.log_difference:
            yield f"the logarithm of a probability differs by {report.log_difference:.2g}"
        for name, value in report.outputs.items():
            if limits.outputs is not None and not value <= limits.outputs:
                yield f"its output {name} differs by {value:.2g} of the largest value"

    def _predict(self, model: Predict, pixels: np.ndarray, name: str, batch: int = BATCHES[-1]) -> np.ndarray:
        """Run either model in batches, with progress if it is named: (n, h, w, channels) -> (n, classes)"""
        rows = []
        for start in range(0, len(pixels), batch):
            rows.append(model(pixels[start : start + batch]))
            if name:
                self.on_event(Progress(f"running {name}", min(start + batch, len(pixels)), len(pixels)))
        return np.concatenate(rows)

    def _output_differences(self, exported: ExportedModel) -> dict[str, float]:
        ours = self._outputs_of_generated
        theirs = exported.outputs(self.generated, list(ours)) if ours else {}
        return {name: _largest(theirs[name] - ours[name]) / float(np.abs(ours[name]).max()) for name in ours}

    @cached_property
    def _outputs_of_generated(self) -> dict[str, np.ndarray]:
        """The model's further outputs by name."""
        names = self.graph.names
        if len(names) == 1:
            return {}
        with torch.inference_mode():
            outputs = dict(zip(names, self.graph(torch.from_numpy(self.generated)), strict=True))
        return {name: outputs[name].numpy() for name in names if name != PROBABILITIES}


def decoded_images(split: Split, labels: np.ndarray, card: Card, on_event: EventHandler = ignore_events) -> GateImages:
    """Decode images as the card states.

    Args:
        split: the images; those that cannot be read are left out.
        labels: (n,) int64, the model's output that is right for each image, or -1.
        card: states the preprocessing.
        on_event: handler of progress events.

    Raises:
        UserError: there are too many, or none can be read.
    """
    assert card.preprocess is not None
    if len(split) > MOST_IMAGES:
        raise UserError(f"{len(split):,} images are too many to compare: choose at most {MOST_IMAGES:,}.")
    pipeline = parse_deterministic(card.preprocess.pipeline)
    pixels, indices = [], []
    for batch in evaluation_batches(split, pipeline, batch=32, channels=card.architecture.channels):
        kept = (batch.valid & (batch.indices != PADDING)).numpy()
        pixels.append(batch.images.permute(0, 2, 3, 1).numpy()[kept])
        indices.append(batch.indices.numpy()[kept])
        on_event(Progress("decoding", sum(map(len, indices)), len(split)))
    order = np.concatenate(indices)
    if not len(order):
        raise UserError(f"none of these images can be read, {split.keys[0]} first: choose others.")
    left_out = f", {len(split) - len(order):,} more cannot be read" if len(order) < len(split) else ""
    return GateImages(np.concatenate(pixels), labels[order], f"{len(order):,} images{left_out}")


def generated_images(size: Size, card: Card) -> np.ndarray:
    """Images of random colours and shapes, and three of one colour: (24, height, width, channels) uint8.

    Smooth and rough noise, brighter towards one corner, differs along both axes and between channels; an image of the
    mean colour, black and white reach the smallest and largest activations.
    """
    assert card.preprocess is not None
    channels, generator = len(card.preprocess.mean), torch.Generator().manual_seed(0)
    images = []
    for number in range(GENERATED - 3):
        grid = [max(1, min(side, 2 + number * number // 3)) for side in size]
        noise = torch.rand(1, channels, *grid, generator=generator)
        images.append(interpolate(noise, size=size, mode="bilinear", align_corners=False)[0])
    ramp = torch.linspace(0.5, 1, size[0])[:, None] * torch.linspace(0.6, 1, size[1])
    flat = [torch.tensor(card.preprocess.mean)[:, None, None].expand(channels, *size).clamp(0, 1)]
    flat += [torch.zeros(channels, *size), torch.ones(channels, *size)]
    stacked = torch.stack([*(image * ramp for image in images), *flat])
    return (stacked * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()


@contextmanager
def _refused_unless_it_runs(images_name: str) -> Generator[None]:
    try:
        yield
    except Exception as error:  # whatever the runtime raises
        raise ExportRefused(
            f"the exported file does not run on {images_name} ({shorten(error)}): nothing was written."
        ) from error


def _other_sizes(graph: ExportGraph) -> list[Size]:
    """Sizes in whole patches below and above the exported one, and below in one direction and above in the other."""
    stride = graph.model.config.stride
    low, high = ([max(2, round(side * factor / stride)) * stride for side in graph.image] for factor in (0.6, 1.4))
    return [(low[0], low[1]), (high[0], high[1]), (low[0], high[1])]


def _accuracy(scores: np.ndarray, labels: np.ndarray) -> float:
    labelled = labels >= 0
    return float((scores[labelled].argmax(axis=1) == labels[labelled]).mean())


def _largest(difference: np.ndarray) -> float:
    """The largest absolute value; NaN counts as infinite."""
    return float(np.nan_to_num(np.abs(difference), nan=np.inf).max())


def _log_difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    return _largest(np.log(np.maximum(theirs, _SMALLEST)) - np.log(np.maximum(ours, _SMALLEST)))


def _milliseconds(model: Predict, pixels: np.ndarray) -> float:
    """Per image, the best of three after one call."""
    model(pixels)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        model(pixels)
        times.append(time.perf_counter() - start)
    return 1000 * min(times) / len(pixels)


def _bytes_of(graph: ExportGraph) -> int:
    return sum(tensor.nbytes for tensor in graph.state_dict().values())


def _at_most(limit: float | None) -> str:
    return "" if limit is None else f"at most {limit:g}"
