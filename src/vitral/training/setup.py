"""The pieces of a run: readable images, a model with its card, the plan, and what the loop works on."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from vitral import recipe as recipes
from vitral.architecture import ResNetConfig, ViTConfig, as_size
from vitral.checkpoints.adapt import Adaptation, to_classes
from vitral.checkpoints.card import Card, Preprocess
from vitral.checkpoints.weights import assemble, read_adapted
from vitral.data.loader import Batch, default_workers, training_batches
from vitral.data.memory_map import decoded_once
from vitral.data.order import balanced_order, batch_indices, rank_positions, rank_slice
from vitral.data.preprocess import parse_deterministic, parse_pipeline
from vitral.data.sources import DataSet, Split
from vitral.errors import UserError
from vitral.evaluation.predict import Predictions, embed_split, predict_split
from vitral.events import EventHandler, Note, Progress
from vitral.models.build import Model, build
from vitral.models.mimetic import start_mimetic
from vitral.models.vit import ViT
from vitral.recipe import Recipe
from vitral.training.augmentation import parse_augmentation
from vitral.training.device_data import resident, uploading
from vitral.training.evaluator import Evaluator, PlainModel, measure
from vitral.training.masked import (
    MaskedModel,
    MaskedObjective,
    MaskSettings,
    baselines,
    keyed,
    masked_outputs,
    measure_masked,
)
from vitral.training.objective import LossSettings, Objective, recompute_activations
from vitral.training.optimizer import build_optimizer, freeze, parameter_groups
from vitral.training.parallel import World, check_batch, gather_rows, on_rank0, wrap
from vitral.training.resources import first_guess
from vitral.training.state import EMA, TrainState
from vitral.training.step import LoopConfig

Batches = Callable[[int], Iterator[Batch]]
_DROPS = ("dropout", "attention_dropout", "stochastic_depth")


@dataclass(frozen=True)
class Parts:
    """A recipe opened over data."""

    recipe: Recipe
    train: Split
    test: Split
    order: np.ndarray | None  # what an epoch draws from, where it is not simply every image
    card: Card
    plan: LoopConfig
    workers: int
    settings: LossSettings

    @property
    def preprocess(self) -> Preprocess:
        assert self.card.preprocess is not None
        return self.card.preprocess


def readable(
    data: DataSet, channels: int, pixels: Path, workers: int, world: World, on_event: EventHandler
) -> tuple[DataSet, list[tuple[str, str]]]:
    """Small data decoded once into a file of pixels, without the images that cannot be read; those are returned."""
    if data.eval_split is None:
        raise UserError("there are no held-out images to test on: set data.held_out above 0.")

    def decoded(split: Split) -> tuple[Split, list[tuple[str, str]]]:
        options: dict[str, Any] = {
            "channels": channels,
            "workers": workers,
            "on_note": lambda text: on_event(Note(text)),
        }
        progress = _decoding(split.name, on_event)
        found: list[tuple[Split, list[tuple[str, str]]]] = []

        def decode() -> bool:
            found.append(decoded_once(split, pixels, on_progress=progress, **options))
            return found[0][0] is not split

        # The first writes the file and the others find it, where there is one.
        if on_rank0(decode, world) and not found:
            decode()
        return found[0] if found else (split, [])

    train, skipped = decoded(data.train)
    test, problems = decoded(data.eval_split)
    skipped = [*skipped, *problems]
    if skipped:
        some = "; ".join(f"{key}: {reason}" for key, reason in skipped[:3])
        some += f"; and {len(skipped) - 3} more, named in result.json" if skipped[3:] else ""
        on_event(Note(f"left out {len(skipped)} image{'s' * (len(skipped) > 1)} that cannot be read ({some})"))
    lost = np.flatnonzero((train.counts() == 0) & (data.train.counts() > 0))
    if len(lost):
        raise UserError(
            f'no training image of the class "{train.classes[lost[0]]}" can be read: add some, or remove the class.'
        )
    if len(test) == 0:
        raise UserError("none of the test images can be read: see `vitral check`.")
    held_out = replace(data, test=test) if data.val is None else replace(data, val=test)
    return replace(held_out, train=train), skipped


def check_recipe(recipe: Recipe, data: DataSet, card: Card | None) -> None:
    """What cannot work is said here, before there is a run folder; `card` is that of the weights in init."""
    train = data.train
    if recipe.trainable != "full" and card is None:
        raise UserError(
            f"trainable={recipe.trainable} learns on top of trained weights, and none are named: add --init, or leave out trainable."
        )
    architecture = card.architecture if card else recipes.architecture_of(recipe, len(train.classes))
    if recipe.batch > len(train):
        raise UserError(f"batch={recipe.batch} is more than the {len(train)} training images: choose a smaller one.")
    if recipe.objective == "masked" and isinstance(architecture, ResNetConfig):
        raise UserError(f"{recipe.model} has no patches to hide: objective=masked needs a ViT or a hybrid.")
    drops = [name for name in _DROPS if getattr(recipe.regularization, name)]
    if drops and isinstance(architecture, ResNetConfig):
        raise UserError(f"regularization.{drops[0]} does nothing in a ResNet: set it to 0, or name a ViT or a hybrid.")
    if train.multilabel and recipe.loss != "sigmoid":
        raise UserError("images of this data have several labels: set loss=sigmoid.")
    if train.multilabel and recipe.balance == "sampler":
        raise UserError("balance=sampler needs one label an image: use balance=weights.")
    if recipe.image:
        architecture = replace(architecture, image=as_size(recipe.image))
    if len(recipe.data.mean) != architecture.channels:
        raise UserError(f"data.mean needs one number for each of the {architecture.channels} channels.")
    if recipe.data.augment:
        one = torch.zeros(1, architecture.channels, *architecture.image, dtype=torch.uint8)
        with torch.random.fork_rng(devices=[]):
            parse_augmentation(recipe.data.augment)(one)
    train_pipeline, test_pipeline = recipes.pipelines(recipe, architecture.image)
    parse_pipeline(train_pipeline)
    parse_deterministic(test_pipeline)
    with torch.device("meta"):
        model = build(architecture)
        freeze(model, recipe.trainable)
        build_optimizer(parameter_groups(model), name=recipe.optim.name, lr=recipe.optim.lr)


def prepare_model(recipe: Recipe, classes: tuple[str, ...]) -> tuple[Model, Card]:
    """The model to train, and its card with these classes and the recipe's preprocessing."""
    torch.manual_seed(recipe.seed)
    classes = () if recipe.objective == "masked" else classes  # a model without a head: patches have no class
    if recipe.init:
        checkpoint = read_adapted(recipe.init, Adaptation(image=recipe.image or None))
        weights, card = checkpoint.weights, checkpoint.card
        if card.class_names != classes or weights.architecture.classes != len(classes):
            weights = to_classes(weights, len(classes))
        if isinstance(weights.architecture, ViTConfig):
            drops = {name: getattr(recipe.regularization, name) for name in _DROPS}
            weights = replace(weights, architecture=replace(weights.architecture, **drops))
        model, card = assemble(weights), replace(card, changes=weights.changes)
    else:
        model = build(recipes.architecture_of(recipe, len(classes)))
        if recipe.shape.head_bias and model.head.output is not None:
            torch.nn.init.constant_(model.head.output.bias, recipe.shape.head_bias)
        source = "trained from scratch"
        if recipe.shape.weight_init == "mimetic" and isinstance(model, ViT):
            start_mimetic(model)
            source = "trained from scratch, from a mimetic start"
        card = Card(model.config, source=source, format="vitral")
    architecture = model.config
    _, test = recipes.pipelines(recipe, architecture.image)
    return model, replace(
        card,
        architecture=architecture,
        class_names=classes,
        preprocess=Preprocess(test, recipe.data.mean, recipe.data.std),
        multilabel=recipe.loss == "sigmoid",
    )


def open_recipe(recipe: Recipe, data: DataSet, card: Card, world: World) -> Parts:
    """Lengths and loss of a run. The batch shrinks where files that cannot be read leave fewer images than it has."""
    train, test = data.train, data.eval_split
    assert test is not None
    batch = min(recipe.batch, len(train))
    check_batch(batch, world)
    order = balanced_order(train.labels, recipe.seed) if recipe.balance == "sampler" else None
    epoch = (len(train) if order is None else len(order)) / batch  # steps
    steps = recipe.steps or max(round(recipe.epochs * epoch), 1)
    # Each epoch, but not more than ten times: on little data an evaluation takes as long as an epoch.
    evaluate_every = recipe.evaluate_every or max(math.ceil(epoch), math.ceil(steps / 10))
    mixing = 0.0 if recipe.trainable == "head" else 1.0  # features cannot be mixed as pixels are
    settings = LossSettings(
        classes=len(train.classes),
        mean=recipe.data.mean,
        std=recipe.data.std,
        kind=recipe.loss,
        smoothing=recipe.regularization.label_smoothing,
        mixup=recipe.data.mixup * mixing,
        cutmix=recipe.data.cutmix * mixing,
        augment=recipe.data.augment if mixing else "",
        seed=recipe.seed,
    )
    plan = LoopConfig(
        steps=steps,
        batch=batch,
        micro=first_guess(math.ceil(batch / world.size), recipe.micro_batch, world.device),
        seed=recipe.seed,
        clip=recipe.optim.clip,
        evaluate_every=evaluate_every,
        save_every=recipe.save_every or evaluate_every,
        patience=recipe.patience,
        autocast=_autocast(recipe.precision, world.device),
        partners=settings.mixes,
        cuda_graph=recipe.cuda_graph,
    )
    return Parts(recipe, train, test, order, card, plan, workers_of(recipe, world), settings)


def build_train_state(
    model: Model, parts: Parts, world: World, on_event: EventHandler
) -> tuple[TrainState, PlainModel, Evaluator, Batches]:
    """What the loop changes, its weights as a plain model, who judges them, and where batches come from."""
    recipe = parts.recipe
    if parts.plan.batch < recipe.batch:
        on_event(Note(f"only {parts.plan.batch} training images are left: that is the batch, not {recipe.batch}"))
    model.to(world.device)
    freeze(model, recipe.trainable)
    model.to(world.device)  # adapters that were added
    if recipe.grad_checkpointing:
        recompute_activations(model)
    if recipe.compile:
        for block in getattr(model, "blocks", ()) if recipe.objective == "masked" else (model,):
            block.compile()
    learner, objective = _objective(model, parts)
    objective.to(world.device)
    separate = recipe.ema_decay or (world.size > 1 and recipe.parallel == "fsdp")
    plain_model = copy.deepcopy(learner) if separate else learner  # before it is wrapped: shards cannot be copied
    wrapped = wrap(objective, world, recipe.parallel)
    optim = recipe.optim
    groups = parameter_groups(
        learner, weight_decay=optim.weight_decay, layer_decay=optim.layer_decay, head_lr=optim.head_lr
    )
    rule = {"beta1": optim.beta1, "beta2": optim.beta2, "momentum": optim.momentum}
    optimizer = build_optimizer(groups, name=optim.name, lr=optim.lr, **rule)
    average = EMA(learner, recipe.ema_decay) if recipe.ema_decay else None
    train_state = TrainState(wrapped, learner, optimizer, average)
    wrapped.train()
    plain = PlainModel(train_state, plain_model)
    build = _on_features if recipe.trainable == "head" else _on_images
    return train_state, plain, *build(plain, parts, world, on_event)


def _objective(model: Model, parts: Parts) -> tuple[nn.Module, nn.Module]:
    """What learns, and the same with its loss."""
    recipe, settings = parts.recipe, parts.settings
    if recipe.objective == "masked":
        assert isinstance(model, ViT)
        masked = MaskedModel(model, _mask_settings(recipe))
        return masked, MaskedObjective(masked, settings.mean, settings.std)
    reader = model.head if recipe.trainable == "head" else model
    return model, Objective(reader, settings, parts.train.counts(), recipe.balance)


def workers_of(recipe: Recipe, world: World) -> int:
    here = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))  # torchrun's word for the processes of this machine
    return default_workers(world.device.type, here) if recipe.workers < 0 else recipe.workers


def _on_images(plain: PlainModel, parts: Parts, world: World, on_event: EventHandler) -> tuple[Evaluator, Batches]:
    text, _ = recipes.pipelines(parts.recipe, parts.card.architecture.image)
    pipeline, channels = parse_pipeline(text), parts.card.architecture.channels
    masked = parts.recipe.objective == "masked"
    seen = parts.plan.steps * parts.plan.batch
    # A run that is shorter than an epoch would wait for images that it never sees.
    kept = resident(parts.train, pipeline, channels, parts.workers, world) if seen >= len(parts.train) else None

    def batches(step: int) -> Iterator[Batch]:
        plan, order = parts.plan, parts.order
        rows = len(rank_positions(plan.batch, world.rank, world.size, partners=plan.partners))
        drawn: dict[str, Any] = {"batch": plan.batch, "seed": plan.seed, "partners": plan.partners, "order": order}
        if kept is not None:
            found = kept.batches(range(step, plan.steps), world=world, **drawn)
        else:
            found = training_batches(
                parts.train,
                pipeline,
                first_step=step,
                last_step=plan.steps,
                rank=world.rank,
                world=world.size,
                workers=parts.workers,
                channels=channels,
                pin=world.device.type == "cuda",
                resize=uploading(pipeline, rows, channels, world.device),
                **drawn,
            )
        return keyed(found) if masked else found

    def outputs(split: Split) -> Predictions:
        compute = masked_outputs if masked else predict_split
        return compute(plain(), split, parts.preprocess, **_measuring(parts, world, on_event))

    judged = _against_rivals(parts) if masked else _counting(parts)
    return Evaluator(parts.test, world, _rows(parts), outputs, judged), batches


def _counting(parts: Parts) -> Callable[..., dict[str, Any]]:
    return partial(measure, sigmoid=parts.card.multilabel)


def _against_rivals(parts: Parts) -> Callable[..., dict[str, Any]]:
    config = parts.card.architecture
    assert isinstance(config, ViTConfig)
    return measure_masked(
        baselines(parts.train, parts.test, parts.preprocess.pipeline, config, _mask_settings(parts.recipe))
    )


def _mask_settings(recipe: Recipe) -> MaskSettings:
    m = recipe.masked
    return MaskSettings(m.ratio, m.token_ratio, m.random_ratio, m.target, recipe.seed)


def _on_features(plain: PlainModel, parts: Parts, world: World, on_event: EventHandler) -> tuple[Evaluator, Batches]:
    """Only the head learns, so the rest is computed once; the pictures are not augmented then."""
    on_event(Note("only the head is trained: features are computed once, and augmentation is off"))
    features = {}
    for split in (parts.train, parts.test):
        rows = embed_split(plain(), split, parts.preprocess, **_measuring(parts, world, on_event))._asdict()
        rows = gather_rows(rows, world)
        features[split.name] = {
            key: torch.from_numpy(values[np.argsort(rows["indices"])]) for key, values in rows.items()
        }
    train, test = features[parts.train.name], features[parts.test.name]
    labels = torch.from_numpy(parts.train.labels)
    own = rank_slice(parts.plan.batch, world.rank, world.size)

    def batches(step: int) -> Iterator[Batch]:
        count = len(labels) if parts.order is None else len(parts.order)
        for number in range(step, parts.plan.steps):
            places = batch_indices(count, parts.plan.batch, number, parts.plan.seed)[own]
            indices = torch.from_numpy(places if parts.order is None else parts.order[places])
            yield Batch(train["features"][indices], labels[indices], train["valid"][indices], indices)

    def outputs(split: Split) -> Predictions:
        mine = np.arange(len(split))[rank_slice(len(split), world.rank, world.size)]
        head = plain().head.eval()
        with torch.inference_mode():
            logits = head(test["features"][mine].to(world.device)).float().cpu().numpy()
        head.train()
        return Predictions(mine, logits, test["valid"][mine].numpy())

    return Evaluator(parts.test, world, _rows(parts), outputs, _counting(parts)), batches


def _measuring(parts: Parts, world: World, on_event: EventHandler) -> dict[str, Any]:
    """How this run evaluates: the same batch and precision each time."""
    return {
        "batch": _rows(parts),
        "device": world.device,
        "rank": world.rank,
        "world": world.size,
        "workers": parts.workers,
        "precision": "bfloat16" if parts.plan.autocast is not None else "float32",
        "on_progress": lambda done, total: on_event(Progress("evaluating", done, total)),
    }


def _rows(parts: Parts) -> int:
    """Images to evaluate at a time."""
    return min(max(parts.plan.micro, 32), 256)


def _autocast(precision: str, device: torch.device) -> torch.dtype | None:
    """bfloat16 where asked for, or by itself on a GPU that computes in it; never by itself on a CPU."""
    able = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if precision == "bfloat16" or (precision == "auto" and able) else None


def _decoding(name: str, on_event: EventHandler) -> Callable[[int, int], None]:
    def progress(done: int, total: int) -> None:
        on_event(Progress(f"reading {name}", done, total))

    return progress
