"""`train` and `show_recipe`: a folder of images in, a run folder with a model out; and the recipe it would follow."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file
from torch import nn

from vitral.api.checkpoints import load
from vitral.api.data import Data, check_out, new_folder, open_to_train
from vitral.api.folds import FoldScores, check_folds, open_for_folds, run_folds
from vitral.checkpoints.card import Card, Preprocess
from vitral.checkpoints.hub import located
from vitral.checkpoints.weights import describe
from vitral.data.augment import mirrored_labels
from vitral.data.sources import DataSet, median_short_side
from vitral.display import SummaryRepr, displayed, interval_text, score_summary, with_deviation
from vitral.errors import UserError
from vitral.events import EventHandler, Note, RunDirChosen
from vitral.models.build import check_device, default_device
from vitral.recipe import (
    Overrides,
    Recipe,
    check_given_once,
    flips,
    from_toml,
    override_words,
    with_dev,
    with_overrides,
    without_flip,
)
from vitral.recipe_defaults import FLIP_REASON, default_recipe
from vitral.recipe_presets import get_preset, is_preset
from vitral.trackers import Tracker, TrackerName, Tracking
from vitral.training.build import check_recipe, flip_warning, keeps_head, own_card
from vitral.training.callbacks import Callback, Loss, OptimizerFactory, OwnParts, Transform
from vitral.training.run import RunResult, run

if TYPE_CHECKING:
    from vitral.models.build import Model

_DATA_KEYS = ("held_out", "dev", "subset", "subset_seed", "exclude")  # of recipe.data: which images there are
_EARLY = tuple(f"{key}=" for key in ("init", "patience", *(f"data.{name}" for name in _DATA_KEYS)))


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
        """Mean score: accuracy, or mean average precision where images have several labels."""
        return statistics.fmean(result.metrics["score"] for result in self.results)

    @property
    def spread(self) -> float | None:
        """Standard deviation of the score between seeds, or between folds."""
        return statistics.stdev(r.metrics["score"] for r in self.results) if len(self.results) > 1 else None

    @property
    def folder(self) -> Path:
        """The run folder; of the last seed where there are several; that of all folds, which `predict` averages."""
        last = Path(self.results[-1].folder)
        return last if self.folds is None else last.parent

    def load(self) -> tuple[Model, Card]:
        """Load the trained model and its card; a module of your own is in `module`."""
        if self.folds is not None:
            raise UserError(f"there is one model per fold: average them with predict({str(self.folder)!r}, ...).")
        return load(self.folder)


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
    callbacks: Sequence[Callback] = (),
    track: TrackerName | Tracker | Sequence[TrackerName | Tracker] = (),
    on_event: EventHandler | None = None,
) -> TrainResult:
    """Train a model on images, or fine-tune one.

    What is not given is chosen to suit the data and the weights, and the reasons are printed.

    Args:
        data: a folder with one sub-folder per class, a CSV or JSONL manifest, Parquet, tar shards, or a known name
            (`vitral list data`). In Python also a torch Dataset, a pair (train, test) of them, a datasets.Dataset, or a
            list of (image or path, label).
        model: name of the model to train from scratch, such as ViT-Ti/16. In Python also an nn.Module that maps images
            (batch, channels, height, width) to logits (batch, classes).
        init: weights to start from: a file, a run folder, hf:owner/name or timm:name.
        out: the run folder; a run that was interrupted resumes when its folder is given again.
        recipe: name of a recipe (`vitral list recipes`) or a TOML file; `vitral show` prints one to start from.
        epochs: passes over the training images.
        trainable: which parameters are trained: full, head, last:K, bias or lora:R.
        balance: how uneven classes are balanced: none, weights, sampler or logit-adjust.
        seed: seed of weights, data order, augmentation and dropout.
        seeds: number of runs, with seeds counted up from `seed`; the result is their mean and standard deviation.
        folds: cross-validate: divide the images into so many folds, and train as many models, each scored on the fold
            that it was not trained on; seeds are counted up from `seed`.
        device: cpu, cuda, cuda:1 or mps; chosen when not given.
        set: other keys of the recipe, such as optim.lr=0.01 data.mixup=0.2.
        loss: a function of logits and targets that gives one loss per image, or their mean.
        optimizer: a function of parameter groups that gives a torch.optim.Optimizer; its learning rates are the peaks
            of the recipe's schedule.
        transform: a function of a PIL image, for training and evaluation, or a pair of them; it gives a uint8 image
            that is then normalised, or a float tensor (channels, height, width) that is used as it is.
        callbacks: objects derived from vitral.Callback; they can add metrics and stop the run.
        track: experiment trackers that also record each run.
        on_event: handler of the events of the run; they are displayed in terminals and notebooks when not given.

    Returns:
        The results, the recipe that was followed, and the run folder.

    Raises:
        UserError: what cannot work, before anything is written.
        Interrupted: after Ctrl-C or SIGTERM, once the state is saved.
    """
    if seeds < 1:
        raise UserError(f"seeds must be at least 1, not {seeds}.")
    if folds and seeds > 1:
        raise UserError("each fold has a seed of its own: give folds or seeds, not both.")
    check_device(device)
    check_out(out, data)
    own = _own_parts(model, loss, optimizer, transform, callbacks)
    if own.model is not None and (seeds > 1 or folds):
        raise UserError("seeds and folds train new models, and model= is one module: call train once for each module.")
    words = override_words(set)
    source: Any = open_for_folds(data, folds, _keys(words)) if folds else data
    parameters = {"epochs": epochs, "trainable": trainable or None, "balance": balance or None, "seed": seed}
    check_given_once({**parameters, "model": model, "init": str(init)}, words)
    overrides = [*(f"{key}={value}" for key, value in parameters.items() if value is not None), *words]
    with displayed(on_event) as shown, Tracking(track, shown) as handler:
        opened, chosen, reasons = choose_recipe(
            source, model=model, init=init, recipe=recipe, set=overrides, device=device, own=own
        )
        folder = Path(out) if out else new_folder(opened.source, chosen)
        for message in (*opened.messages, *reasons):
            handler(Note(message))
        if folds:
            check_folds(chosen)
        handler(RunDirChosen(str(folder)))
        if folds:
            options = {"folds": folds, "device": device, "on_event": handler, "own": own}
            results, scores = run_folds(chosen, opened, folder, **options)
            return TrainResult(results, chosen, folds=scores)
        results = []
        for number in range(chosen.seed, chosen.seed + seeds):
            if seeds > 1:
                handler(Note(f"seed {number}"))
            path = folder / f"seed-{number}" if seeds > 1 else folder
            results.append(run(replace(chosen, seed=number), opened, path, device=device, on_event=handler, own=own))
    if own.model is not None:
        own.model.load_state_dict(load_file(Path(results[0].folder) / "model.safetensors"))
    return TrainResult(tuple(results), chosen, own.model)


def show_recipe(
    recipe: str | Path | Recipe = "",
    *,
    data: str | Path = "",
    model: str = "",
    init: str | Path = "",
    device: str = "",
    set: Overrides = (),
) -> Recipe:
    """Show a training recipe, every key with its meaning.

    Without arguments it has the default values; with `data` it is the recipe that `vitral train DATA` would follow.

    Args:
        recipe: name of a recipe (`vitral list recipes`), a TOML file or a run folder.
        data: data set to choose a recipe for.
        model: name of the model to train from scratch.
        init: weights to start from.
        device: device to choose a recipe for; chosen when not given.
        set: keys of the recipe to change, such as optim.lr=0.01.

    Returns:
        The complete recipe.
    """
    words = override_words(set)
    check_given_once({"model": model, "init": str(init)}, words)
    if data:
        return choose_recipe(data, model=model, init=init, recipe=recipe, set=words, device=device)[1]
    chosen = recipe if isinstance(recipe, Recipe) else read_recipe(recipe, model) if recipe else Recipe()
    return with_overrides(replace(chosen, model=model or chosen.model, init=str(init) or chosen.init), words)


def _own_parts(
    model: str | nn.Module,
    loss: Loss | None,
    optimizer: OptimizerFactory | None,
    transform: Transform | tuple[Transform | None, Transform | None] | None,
    callbacks: Sequence[Callback],
) -> OwnParts:
    train_transform, eval_transform = transform if isinstance(transform, tuple) else (transform, transform)
    return OwnParts(
        model=model if isinstance(model, nn.Module) else None,
        loss=loss,
        optimizer=optimizer,
        train_transform=train_transform,
        eval_transform=eval_transform,
        callbacks=tuple(callbacks),
    )


def choose_recipe(
    data: Data,
    *,
    model: str | nn.Module = "",
    init: str | Path = "",
    recipe: str | Path | Recipe = "",
    set: Sequence[str] = (),
    device: str = "",
    own: OwnParts | None = None,
) -> tuple[DataSet, Recipe, tuple[str, ...]]:
    """Open the data and choose the recipe that `train` would follow, with the reasons."""
    own, name = own or OwnParts(), "" if isinstance(model, nn.Module) else model
    written = recipe if isinstance(recipe, Recipe) else read_recipe(recipe, name) if recipe else None
    early = _early_recipe(written, set)
    opened, dev = open_to_train(data, early)
    start = str(init) or early.init
    path = located(start) if start else None
    card = describe(path).card if path is not None else None
    if written is not None:
        chosen, reasons = replace(written, model=name or written.model, init=start), ("following the recipe given",)
        if card is not None and card.preprocess and isinstance(recipe, str) and is_preset(recipe):
            # A preset's are those of the paper's own weights; a recipe file states what the user wants.
            chosen = replace(chosen, data=replace(chosen.data, mean=card.preprocess.mean, std=card.preprocess.std))
    elif own.model is not None:
        chosen, reasons = _recipe_for_module(opened, own.model, _keys(set), device)
    else:
        fixed = {} if own.optimizer is None else {"optim.name": "adamw"}  # lengths that suit an optimizer unlike Muon
        fixed |= {} if own.loss is None else {"balance": "none"}  # balances change vitral's own loss
        if own.train_transform is not None or own.eval_transform is not None:
            fixed["trainable"] = "full"  # a head alone is trained on features, without own transforms
        chosen, reasons = _suited_recipe(opened, card, name, {**fixed, **_keys(set)}, device)
        chosen = replace(chosen, init=start)
        if path is not None and card is not None:
            chosen, reasons = _with_preprocessing_of(chosen, reasons, path, card, early, set)
    chosen = with_dev(with_overrides(chosen, set), dev)
    if dev and not early.data.dev:
        share = f"a share of {dev:g} of train (data.dev) is the dev split for that"
        reasons = (*reasons, f"patience selects weights by their evaluations: {share}, and the result is on test")
    if own.model is not None:
        classes = 0 if chosen.objective == "masked" else len(opened.train.classes)
        card = own_card(own.model, chosen, classes)
        chosen = replace(chosen, model=type(own.model).__name__)
    check_recipe(chosen, opened, card, own)
    reasons = (*reasons, *_head_reason(chosen, opened, card))
    reasons += flip_warning(chosen, opened) if own.train_transform is None else ()
    return opened, chosen, (*reasons, *((f"overridden: {', '.join(set)}",) if set else ()))


def _head_reason(recipe: Recipe, data: DataSet, card: Card | None) -> tuple[str, ...]:
    """That the run starts from the head of the weights, where it does."""
    reset = not recipe.init or card is None or recipe.reset_head or recipe.objective == "masked"
    if reset or not keeps_head(card, data.train.classes):
        return ()
    return ("the weights have a head for the same classes, which is kept (reset_head=true starts from zeros)",)


def _suited_recipe(
    opened: DataSet, card: Card | None, model: str, overrides: dict[str, str], device: str
) -> tuple[Recipe, tuple[str, ...]]:
    """The recipe that suits this data and these weights, and why."""
    recipe, reasons = default_recipe(
        images=len(opened.train),
        class_counts=opened.train.counts().tolist(),
        pretrained=card.architecture if card else None,
        device=device.split(":")[0] or default_device().type,
        model=model or overrides.get("model", ""),
        multilabel=opened.train.multilabel,
        pixels=median_short_side(opened.train),
        muon=_allows_muon(overrides),
        overrides=overrides,
    )
    mirrored = mirrored_labels(opened.source, opened.train.classes)
    if not mirrored or not flips(recipe):
        return recipe, reasons
    kept = (reason.replace("flips, ", "") for reason in reasons if reason != FLIP_REASON)
    return without_flip(recipe), (*kept, f"no flips, which would change the labels of {mirrored}")


def _recipe_for_module(
    opened: DataSet, module: nn.Module, overrides: dict[str, str], device: str
) -> tuple[Recipe, tuple[str, ...]]:
    """The recipe for a user's own module: length, batch and augmentation by the data, AdamW without layer decay."""
    pixels = median_short_side(opened.train)
    config = getattr(module, "config", None)
    recipe, _ = _suited_recipe(opened, None, "", {**overrides, "optim.name": "adamw"}, device)
    image = (
        0 if config is not None and hasattr(module, "patchify") else int(overrides.get("image") or _image_size(pixels))
    )
    recipe = replace(recipe, image=image, shape=Recipe().shape)
    return recipe, (
        f"a module of your own: AdamW at a rate of {recipe.optim.lr:g}, images of {image or 'its own'} pixels",
    )


def _image_size(pixels: int) -> int:
    return max(pixels - pixels % 2, 4) if pixels <= 16 else 32 if pixels <= 40 else 64 if pixels <= 96 else 224


def _with_preprocessing_of(
    chosen: Recipe, reasons: tuple[str, ...], path: Path, card: Card, early: Recipe, overrides: Sequence[str]
) -> tuple[Recipe, tuple[str, ...]]:
    """The recipe with the preprocessing that the weights were trained with: the data part of their run's recipe, else
    what their card states."""
    if (path / "recipe.toml").is_file():
        images = {name: getattr(early.data, name) for name in _DATA_KEYS}
        chosen = replace(chosen, data=replace(read_recipe(path).data, **images))
        augmented = "" if chosen.trainable == "head" else " and augmented"
        reason = f"images are preprocessed{augmented} as in the run it starts from"
        return chosen, (*(other for other in reasons if other != FLIP_REASON), reason)
    stated = card.preprocess or Preprocess.assumed(card.architecture.image, card.architecture.channels)
    image = with_overrides(chosen, overrides).image
    if image:
        stated = stated.adapted(card.architecture.image, (image, image), len(stated.mean))
    data = replace(chosen.data, mean=stated.mean, std=stated.std, eval_transform=stated.pipeline)
    chosen = replace(chosen, data=data)
    if card.preprocess is None:
        reasons = (*reasons, *assumed_pixels(overrides))
    elif _keys(overrides).keys().isdisjoint(("data.mean", "data.std", "data.eval_transform")):
        reason = f"preprocessing as the weights state: {stated.pipeline}, mean {stated.mean}, std {stated.std}"
        reasons = (*reasons, reason)
    return chosen, reasons


def assumed_pixels(overrides: Sequence[str]) -> tuple[str, ...]:
    """The note about weights that do not state their preprocessing, where the user does not either."""
    missing = [name for name in ("mean", "std") if f"data.{name}" not in _keys(overrides)]
    if not missing:
        return ()
    assumed = f"{' and '.join(missing)} 0.5 {'are' if missing[1:] else 'is'} assumed"
    fix = " ".join(f"data.{name}=..." for name in missing)
    return (f"the weights do not state their preprocessing: {assumed} (else --set {fix})",)


def read_recipe(path: str | Path, model: str = "") -> Recipe:
    """A recipe by its name (paper:finetune/pets; some need the model's, too), from a TOML file or a run's folder."""
    if is_preset(str(path)):
        return get_preset(str(path), model).recipe
    file = Path(path).expanduser()
    file = file / "recipe.toml" if file.is_dir() else file
    if not file.is_file():
        raise UserError(f"{file} is not a recipe file: `vitral show` prints one to start from.")
    return from_toml(file.read_text("utf-8"))


def _early_recipe(recipe: Recipe | None, overrides: Sequence[str]) -> Recipe:
    """The keys that are needed before the others are chosen: which images there are, and the weights to start from."""
    words = [word for word in overrides if word.replace(" ", "").startswith(_EARLY)]
    return with_overrides(recipe or Recipe(), words)


def _keys(overrides: Sequence[str]) -> dict[str, str]:
    return {key.strip(): value.strip() for key, _, value in (word.partition("=") for word in overrides)}


def _allows_muon(overrides: dict[str, str]) -> bool:
    """Whether no override rules out Muon, which needs unsharded matrices and was not tried with masked patches."""
    required = {"optim.name": "muon", "parallel": "ddp", "objective": "classes"}
    return all(overrides.get(key, value) == value for key, value in required.items())
