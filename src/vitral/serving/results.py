"""Predictions as rows: each picture with its likeliest classes, or with the reason why it could not be read."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitral.atomic import atomic_write
from vitral.checkpoints.write import write_json
from vitral.data.images import UnreadableImage, decode
from vitral.data.sources import Split
from vitral.evaluation.calibration import probabilities
from vitral.evaluation.predict import Predictions
from vitral.reprs import SummaryRepr


@dataclass(frozen=True)
class Row:
    """One picture: class names and their probabilities, likeliest first."""

    path: str
    names: tuple[str, ...]
    probabilities: tuple[float, ...]


@dataclass(frozen=True)
class Unreadable:
    """A picture without a prediction."""

    path: str
    reason: str


@dataclass(frozen=True, repr=False)
class Results(SummaryRepr):
    """All pictures that were asked for, in the order they were named."""

    pictures: tuple[Row | Unreadable, ...]

    def summary(self) -> dict[str, str]:
        first = {row.path: f"{row.names[0]} ({row.probabilities[0]:.1%})" for row in self.rows[:1]}
        unreadable = {"unreadable": f"{len(self.unreadable):,}"} if self.unreadable else {}
        return {"n": f"{len(self.rows):,}", **unreadable, **first}

    @property
    def rows(self) -> tuple[Row, ...]:
        return tuple(one for one in self.pictures if isinstance(one, Row))

    @property
    def unreadable(self) -> tuple[Unreadable, ...]:
        return tuple(one for one in self.pictures if isinstance(one, Unreadable))

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
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
            "unreadable": [asdict(one) for one in self.unreadable],
        }


def results(
    predictions: Predictions,
    split: Split,
    classes: Sequence[str],
    *,
    top: int = 5,
    sigmoid: bool = False,
    channels: int = 3,
) -> Results:
    """The `top` classes of each picture; a model that names no classes gets their numbers. `sigmoid`: multi-label."""
    names = classes or tuple(map(str, range(predictions.logits.shape[1])))
    pictures: list[Row | Unreadable] = []
    for index, logits, valid in zip(*predictions, strict=True):
        path = split.keys[index]
        if valid:
            chances = probabilities(logits[None], sigmoid=sigmoid)[0]
            best = np.argsort(-chances, kind="stable")[:top]  # equal ones in the order of the classes
            pictures.append(Row(path, tuple(names[i] for i in best), tuple(chances[best].tolist())))
        else:
            pictures.append(unread(split, int(index), channels))
    return Results(tuple(pictures))


def write_results(path: Path, found: Results) -> None:
    """A `.json` file, or CSV under any other name; all of the file or none of it."""
    if path.suffix.lower() == ".json":
        write_json(path, found.as_dict())
    else:
        _write_csv(path, found)


def _write_csv(path: Path, found: Results) -> None:
    """One line a picture: path, class_1, probability_1, class_2, ... and error, which is empty where all went well."""
    top = max((len(row.names) for row in found.rows), default=0)
    heading = [word for place in range(1, top + 1) for word in (f"class_{place}", f"probability_{place}")]
    # File names need not be valid UTF-8; their bytes are written back as they were.
    with (
        atomic_write(path) as aside,
        aside.open("w", newline="", encoding="utf-8", errors="surrogateescape") as stream,
    ):
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(["path", *heading, "error"])
        for row in found.rows:
            pairs = zip(row.names, row.probabilities, strict=True)
            writer.writerow([row.path, *(value for name, chance in pairs for value in (name, f"{chance:.6f}")), ""])
        for one in found.unreadable:
            writer.writerow([one.path, *[""] * len(heading), one.reason])


def unread(split: Split, index: int, channels: int) -> Unreadable:
    """With the reason, for which it is read once more, alone: batches carry no sentences."""
    reason = "it could not be read the first time"
    try:
        found = split.reader.read(index)
        if not isinstance(found, np.ndarray):
            decode(found, channels)
    except (UnreadableImage, OSError) as error:
        reason = str(error)
    return Unreadable(split.keys[index], reason)
