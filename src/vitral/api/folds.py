"""K-fold cross-validation: one run per fold, and what they say together."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vitral.api.data import Data
from vitral.checkpoints.write import write_json
from vitral.data.loader import default_workers
from vitral.data.sources import DataSet, fold_data, open_data
from vitral.data.splits import too_few_classes
from vitral.errors import UserError
from vitral.evaluation.accuracy import confusion_metrics, tables_as_dict, wilson_interval
from vitral.evaluation.accuracy import interval as half_interval
from vitral.events import EventHandler, Note
from vitral.recipe import Recipe
from vitral.training.callbacks import OwnParts
from vitral.training.run import RunResult, run


@dataclass(frozen=True)
class FoldScores:
    """The scores of all folds; also OUT/folds.json."""

    scores: tuple[float, ...]  # one per fold
    seeds: tuple[int, ...]
    mean: float
    # Of the mean, by Student's t over the folds. Their models share most training images, so that it is approximate.
    interval: tuple[float, float]
    # Of all images, each predicted by the model that did not see it: n, top1, mean_per_class, ...; None for several
    # labels per image.
    out_of_fold: dict[str, Any] | None
    out_of_fold_interval: tuple[float, float] | None  # Wilson's, by the number of images

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"folds": len(self.scores), **asdict(self)}


def open_for_folds(data: Data, folds: int, overrides: Collection[str]) -> DataSet:
    """All images of data without splits, which a single run would hold some of out; else the splits as they are.

    Args:
        data: what `vitral train` takes.
        folds: how many.
        overrides: keys of the recipe that the user sets.
    """
    if folds < 2:
        raise UserError(f"folds must be at least 2, not {folds}.")
    if "data.held_out" in overrides:
        raise UserError("each fold is held out once: leave out data.held_out, or folds.")
    opened = open_data(data, held_out=0.0)
    if reason := too_few_classes(opened.source, opened.train):
        raise UserError(reason)
    return opened


def check_folds(recipe: Recipe) -> None:
    """Refuse what does not go together with folds."""
    if recipe.objective == "masked":
        raise UserError("folds compare predictions of classes: leave out objective=masked, or folds.")
    if recipe.patience or recipe.data.dev:
        raise UserError("a fold is scored once, after training: leave out patience and data.dev, or folds.")


def run_folds(
    recipe: Recipe, data: DataSet, folder: Path, *, folds: int, device: str, on_event: EventHandler, own: OwnParts
) -> tuple[tuple[RunResult, ...], FoldScores]:
    """Train once per fold, each with its own seed, and write folds.json; finished folds are not repeated."""
    results = []
    for number, fold in enumerate(fold_data(data, folds, workers=default_workers("cuda"), on_event=on_event)):
        seed = recipe.seed + number
        for note in fold.notes if not number else ():
            on_event(Note(note))
        assert fold.test is not None
        images = f"{len(fold.train):,} images to train on, {len(fold.test):,} to score"
        on_event(Note(f"fold {number + 1} of {folds}, seed {seed}: {images}"))
        path = folder / f"fold-{number + 1}"
        results.append(run(replace(recipe, seed=seed), fold, path, device=device, on_event=on_event, own=own))
    scores = fold_scores(results, data.train.classes)
    write_json(folder / "folds.json", scores.as_dict())
    return tuple(results), scores


def fold_scores(results: Sequence[RunResult], classes: Sequence[str]) -> FoldScores:
    """What the runs of all folds say together."""
    values = tuple(result.metrics["score"] for result in results)
    mean, half = statistics.fmean(values), half_interval(values) or 0.0
    pooled = None
    if all("confusion" in result.metrics for result in results):
        rows = [np.array(result.metrics["confusion"], np.int64).reshape(-1, 3) for result in results]
        pooled = confusion_metrics(np.concatenate(rows), classes)
        pooled |= tables_as_dict(pooled)
    return FoldScores(
        scores=values,
        seeds=tuple(result.seed for result in results),
        mean=mean,
        interval=(max(mean - half, 0.0), min(mean + half, 1.0)),
        out_of_fold=pooled,
        out_of_fold_interval=wilson_interval(pooled["top1"], pooled["n"]) if pooled else None,
    )
