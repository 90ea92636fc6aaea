"""Predictions of image files: the top classes of each image, or the reason why it is unreadable."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitral.atomic import atomic_write
from vitral.checkpoints.write import write_json
from vitral.data.images import ImageError, UnreadableImage, decode
from vitral.data.sources import Split
from vitral.evaluation.calibration import probabilities
from vitral.evaluation.predict import Predictions
from vitral.reprs import SummaryRepr


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
    channels: int = 3,
) -> PredictionResults:
    """Find the top classes of each image.

    Args:
        predictions: logits and validity of the images of `split`.
        split: the images.
        classes: names of the classes; without them their indices are used.
        top: how many classes per image.
        sigmoid: whether classes have independent probabilities (multi-label).
        channels: channels that unreadable images are decoded to once more, to find the reason.

    Returns:
        One result per image.
    """
    names = classes or tuple(map(str, range(predictions.logits.shape[1])))
    images: list[ImagePrediction | UnreadableImage] = []
    for index, logits, valid in zip(*predictions, strict=True):
        path = split.keys[index]
        if valid:
            values = probabilities(logits[None], sigmoid=sigmoid)[0]
            best = np.argsort(-values, kind="stable")[:top]  # ties in the order of the classes
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
            writer.writerow([row.path, *(cell for name, value in pairs for cell in (name, f"{value:.6f}")), ""])
        for image in results.unreadable:
            writer.writerow([image.path, *[""] * len(columns), image.reason])


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
