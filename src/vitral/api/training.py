"""`train`: from images to a run folder with a model, or one per seed or fold; and `demo`."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.torch import load_file
from torch import nn

from vitral.api.checkpoints import load
from vitral.api.data import Data, check_out, new_folder
from vitral.api.inspection import write_run_page
from vitral.api.prediction import check_numbers, predict
from vitral.api.recipes import choose_recipe
from vitral.atomic import atomic_write
from vitral.checkpoints.card import Card
from vitral.checkpoints.write import write_json
from vitral.data.images import encode_png
from vitral.data.loader import default_workers, read_pixels
from vitral.data.sources import DataSet, fold_data, open_data
from vitral.data.splits import too_few_classes
from vitral.display import SummaryRepr, displayed, headline, interval_text, score_summary, with_deviation
from vitral.errors import UserError
from vitral.evaluation.accuracy import confusion_metrics, tables_as_dict, wilson_interval
from vitral.evaluation.accuracy import interval as half_interval
from vitral.events import EventHandler, Note, RunDirChosen
from vitral.models.build import check_device
from vitral.recipe import Overrides, Recipe, check_given_once, keys_of, override_list
from vitral.serving import PredictionResults
from vitral.trackers import Tracker, TrackerName, Tracking
from vitral.training.callbacks import Callback, Loss, OptimizerFactory, OwnParts, Transform, as_callbacks
from vitral.training.run import RunResult, run

if TYPE_CHECKING:
    from vitral.models.build import Model


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
        return {"folds": len(self.scores), **asdict(self)}


@dataclass(frozen=True, repr=False)
class TrainResult(SummaryRepr):
    """One run, or several that differ in their seed, or in the fold that they are scored on."""

    results: tuple[RunResult, ...]
    recipe: Recipe
    module: nn.Module | None = None  # the user's own module, with the weights that were kept
    folds: FoldScores | None = None

    def summary(self) -> dict[str, str]:
        score = score_summary(self.results[-1].metrics)
        if self.folds is not None:
            mean = f"{self.mean:.2%} (mean of {len(self.results)} folds, {interval_text(*self.folds.interval)})"
            pooled = self.folds.out_of_fold
            score = {"score": mean, **({"out_of_fold": f"{pooled['top1']:.2%}"} if pooled else {})}
        elif self.spread is not None:
            score = {"score": with_deviation(f"{self.mean:.2%}", f"{self.spread:.2%}", len(self.results)), **score}
        seconds = sum(result.seconds for result in self.results)
        return {**score, "seconds": f"{seconds:.0f}", "folder": str(self.folder)}

    @property
    def mean(self) -> float:
        """Mean score: accuracy, or mean average precision if images have several labels."""
        return statistics.fmean(result.metrics["score"] for result in self.results)

    @property
    def spread(self) -> float | None:
        """Standard deviation of the score between seeds, or between folds."""
        return statistics.stdev(r.metrics["score"] for r in self.results) if len(self.results) > 1 else None

    @property
    def folder(self) -> Path:
        """The run folder; of the last seed if there are several; that of all folds, which `predict` averages."""
        last = Path(self.results[-1].folder)
        return last if self.folds is None else last.parent

    def load(self) -> tuple[Model, Card]:
        """Load the trained model and its card; a module of your own is in `module`."""
        if self.folds is not None:
            raise UserError(f"there is one model per fold: average them with predict({str(self.folder)!r}, ...).")
        return load(self.folder)

    def write_page(self, data: Data, *, device: str = "") -> Path:
        """Write page.html, which `vitral train` writes by itself, into `folder`: curves, the most confident mistakes,
        calibration, and what the model learned. After a training with your own `transform` it has neither mistakes nor
        calibration, since nothing states how images are preprocessed.

        Args:
            data: what the model was trained on.
            device: cpu, cuda or mps; chosen automatically by default.

        Returns:
            The path of the page.

        Raises:
            UserError: `data` holds out other images than those that were scored, or the model is one per fold or a
                module of your own.
        """
        if self.module is not None:
            raise UserError("pages show vitral's own models: plot your module's metrics.jsonl instead.")
        if self.folds is not None:
            raise UserError(
                f"a page shows one model, not one per fold: their scores are in {self.folder / 'folds.json'}."
            )
        return write_run_page(self.folder, data, device=device)


def train(
    data: Data,
    *,
    model: str | nn.Module = "",
    init: str | Path = "",
    out: str | Path = "",
    recipe: str | Path | Recipe = "",
    epochs: float | None = None,
    trainable: str = "",
    balance: str = "",
    seed: int | None = None,
    seeds: int = 1,
    folds: int = 0,
    device: str = "",
    set: Overrides = (),
    loss: Loss | None = None,
    optimizer: OptimizerFactory | None = None,
    transform: Transform | tuple[Transform | None, Transform | None] | None = None,
    callbacks: Callback | Sequence[Callback] = (),
    track: TrackerName | Tracker | Sequence[TrackerName | Tracker] = (),
    on_event: EventHandler | None = None,
) -> TrainResult:
    """Train a model on images, or fine-tune one.

    Settings that are not given are chosen for the data and the weights, and the reasons are printed.

    Args:
        data: a folder with one sub-folder per class, a CSV or JSONL manifest, Parquet, tar shards, or a known name
            (`vitral list data`). In Python also a torch Dataset, a pair (train, test) of them, a datasets.Dataset, or a
            list of (image or path, label).
        model: name of the model to train from scratch, such as ViT-Ti/16. In Python also an nn.Module that maps images
            (batch, channels, height, width) to logits (batch, classes).
        init: weights to start from: a file, a run folder, hf:owner/name or timm:name.
        out: the run folder; an interrupted run resumes if its folder is given again.
        recipe: name of a recipe (`vitral list recipes`) or a TOML file; `vitral show` prints one to start from.
        epochs: passes over the training images.
        trainable: which parameters are trained: full, head, last:K, bias or lora:R.
        balance: how imbalanced classes are handled: none, weights, sampler or logit-adjust.
        seed: seed of weights, data order, augmentation and dropout.
        seeds: number of runs, with seeds counted up from `seed`; the result is their mean and standard deviation.
        folds: number of folds of a cross-validation: one model per fold is trained on the other folds and scored on
            it; seeds are counted up from `seed`.
        device: cpu, cuda, cuda:1 or mps; chosen automatically by default.
        set: other keys of the recipe, such as optim.lr=0.01 data.mixup=0.2.
        loss: a function of logits and targets that returns one loss per image, or their mean.
        optimizer: a function of parameter groups that returns a torch.optim.Optimizer; its learning rates are the peaks
            of the recipe's schedule.
        transform: a function of a PIL image, for training and evaluation, or a pair of them; it returns a uint8 image
            that is then normalised, or a float tensor (channels, height, width) that is used as is.
        callbacks: one or several objects derived from vitral.Callback; they can add metrics and stop the run.
        track: experiment trackers that also record each run.
        on_event: handler of the events of the run; by default they are displayed, in a log file line by line.

    Returns:
        The results, the recipe and the run folder.

    Raises:
        UserError: if an argument is wrong or the run cannot work, before anything is written.
        Interrupted: after Ctrl-C or SIGTERM, once the state is saved.
    """
    check_numbers(seeds=seeds)
    if folds and seeds > 1:
        raise UserError("each fold has its own seed: pass folds or seeds, not both.")
    check_device(device)
    check_out(out, data)
    train_transform, eval_transform = transform if isinstance(transform, tuple) else (transform, transform)
    module = model if isinstance(model, nn.Module) else None
    own_parts = OwnParts(module, loss, optimizer, train_transform, eval_transform, as_callbacks(callbacks))
    if own_parts.model is not None and (seeds > 1 or folds):
        raise UserError("seeds and folds train new models, and model= is one module: call train once for each module.")
    set_overrides = override_list(set)
    source: Any = _open_for_folds(data, folds, keys_of(set_overrides)) if folds else data
    parameters = {"epochs": epochs, "trainable": trainable or None, "balance": balance or None, "seed": seed}
    check_given_once({**parameters, "model": model, "init": str(init)}, set_overrides)
    overrides = [*(f"{key}={value}" for key, value in parameters.items() if value is not None), *set_overrides]
    with displayed(on_event) as shown, Tracking(track, shown) as handler:
        opened, chosen, reasons = choose_recipe(
            source, model=model, init=init, recipe=recipe, set=overrides, device=device, own_parts=own_parts
        )
        folder = Path(out) if out else new_folder(opened.source, chosen)
        for message in (*opened.messages, *reasons):
            handler(Note(message))
        if folds:
            _check_folds(chosen)
        handler(RunDirChosen(str(folder)))
        if folds:
            options = {"folds": folds, "device": device, "on_event": handler, "own_parts": own_parts}
            results, scores = _run_folds(chosen, opened, folder, **options)
            return TrainResult(results, chosen, folds=scores)
        results = []
        for number in range(chosen.seed, chosen.seed + seeds):
            if seeds > 1:
                handler(Note(f"seed {number}"))
            path = folder / f"seed-{number}" if seeds > 1 else folder
            results.append(
                run(replace(chosen, seed=number), opened, path, device=device, on_event=handler, own_parts=own_parts)
            )
    if own_parts.model is not None:
        own_parts.model.load_state_dict(load_file(Path(results[0].folder) / "model.safetensors"))
    return TrainResult(tuple(results), chosen, own_parts.model)


def _open_for_folds(data: Data, folds: int, overrides: Collection[str]) -> DataSet:
    """All images of data without splits, which a single run would hold some of out; else the splits as they are."""
    if folds < 2:
        raise UserError(f"folds must be at least 2, not {folds}.")
    if "data.held_out" in overrides:
        raise UserError("each fold is held out once: omit data.held_out, or folds.")
    opened = open_data(data, held_out=0.0)
    if reason := too_few_classes(opened.source, opened.train):
        raise UserError(reason)
    return opened


def _check_folds(recipe: Recipe) -> None:
    if recipe.objective == "masked":
        raise UserError("folds compare predictions of classes: omit objective=masked, or folds.")
    if recipe.patience or recipe.data.dev:
        raise UserError("a fold is scored once, after training: omit patience and data.dev, or folds.")


def _run_folds(
    recipe: Recipe, data: DataSet, folder: Path, *, folds: int, device: str, on_event: EventHandler, own_parts: OwnParts
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
        results.append(
            run(replace(recipe, seed=seed), fold, path, device=device, on_event=on_event, own_parts=own_parts)
        )
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


@dataclass(frozen=True, repr=False)
class DemoResult(SummaryRepr):
    """The run folders of the demo, its predictions and its page."""

    folders: tuple[str, str]  # trained from scratch, fine-tuned
    accuracy: float
    n: int
    predictions: PredictionResults
    page: Path

    def summary(self) -> dict[str, str]:
        return {"top1": f"{self.accuracy:.2%}", "n": f"{self.n:,}", "page": str(self.page)}


def demo(*, on_event: EventHandler | None = None) -> DemoResult:
    """Train, fine-tune and predict in two minutes, on handwritten digits.

    Args:
        on_event: handler of the events of the runs.

    Returns:
        The run folders, predictions of held-out images, and a page about the model.
    """
    changes = {"image": 16, "epochs": 10, "optim.lr": 5e-4, "optim.layer_decay": 1}
    with displayed(on_event) as handler:
        handler(Note("1. Train a Vision Transformer from scratch on 1,438 handwritten digits of 8x8 pixels"))
        first = train("digits", on_event=handler).results[0]
        handler(Note(f"   {headline(first.metrics)} after {first.seconds:.0f} s"))
        handler(Note("2. Fine-tune it at 16x16 pixels: position embeddings are resized, patches stay 2x2"))
        second = train("digits", init=first.folder, set=changes, on_event=handler).results[0]
        handler(Note(f"   {headline(second.metrics)} after {second.seconds:.0f} s"))
        handler(Note("3. Predict digits that it was not trained on"))
        images = _write_digits(Path(second.folder) / "pictures")
        predictions = predict(second.folder, images, top=2, on_event=handler)
        handler(Note("4. Write a page about what it has learned"))
        page = write_run_page(second.folder, "digits")
    metrics = second.metrics
    return DemoResult((first.folder, second.folder), metrics["top1"], metrics["n"], predictions, page)


def _write_digits(folder: Path) -> list[Path]:
    """Write a held-out image of each digit from 0 to 7 as a PNG file named by its class."""
    split = open_data("digits").eval_split
    assert split is not None
    paths = [folder / f"{split.classes[label]}-{label}.png" for label in range(8)]
    for label, path in enumerate(paths):
        index = int(np.flatnonzero(split.labels == label)[0])
        with atomic_write(path) as temporary:
            temporary.write_bytes(encode_png(read_pixels(split, index, 3)))
    return paths
