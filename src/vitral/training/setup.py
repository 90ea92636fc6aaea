"""The set-up of a run: readable images, a model with its card, the loop's configuration, state, batches, evaluator."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from vitral import recipe as recipes
from vitral.architecture import ViTConfig
from vitral.checkpoints.card import Card, Preprocess
from vitral.checkpoints.mae import read_decoder, unsupported_reason
from vitral.data.augment import CallableTransform
from vitral.data.cache import decode_once
from vitral.data.images import UnreadableImage
from vitral.data.loader import (
    Batch,
    balanced_order,
    batch_indices,
    default_workers,
    rank_positions,
    rank_slice,
    training_batches,
)
from vitral.data.preprocess import Pipeline, parse_pipeline
from vitral.data.sources import DataSet, Split
from vitral.data.splits import unreadable_refusal
from vitral.errors import UserError
from vitral.evaluation.predict import Predictions, embed_split, predict_split
from vitral.events import EventHandler, Note
from vitral.models.build import use_fp8
from vitral.models.mae import MaeConfig
from vitral.models.resnet import ResNet
from vitral.models.vit import ViT
from vitral.recipe import Recipe
from vitral.training.build import own_transform
from vitral.training.callbacks import OwnParts
from vitral.training.device_data import crop_uploader, load_resident_split
from vitral.training.loop import LoopConfig
from vitral.training.masked import (
    MaeModel,
    MaskedModel,
    MaskedObjective,
    MaskSettings,
    baselines,
    masked_outputs,
    measure_masked,
    with_image_keys,
)
from vitral.training.metrics import Evaluator, PlainModel, measure
from vitral.training.objective import LossSettings, Objective
from vitral.training.optimizer import build_optimizer, freeze, own_optimizer, parameter_groups, warmup_steps
from vitral.training.parallel import World, all_ranks, check_batch, gather_rows, on_rank0, wrap
from vitral.training.resources import autocast_dtype, initial_microbatch
from vitral.training.state import EMA, TrainState

Batches = Callable[[int], Iterator[Batch]]
Predict = Callable[[Split], Predictions]  # this process's share of a split


@dataclass(frozen=True)
class RunSetup:
    """A recipe applied to data: everything that is determined before the state of a run is built."""

    recipe: Recipe
    train: Split
    eval_split: Split
    test_split: Split | None  # scored once, with the weights selected on `eval_split`; None: nothing is selected
    order: np.ndarray | None  # indices of an epoch's examples; None: every image once
    card: Card
    config: LoopConfig
    workers: int
    settings: LossSettings
    own_parts: OwnParts

    @property
    def preprocess(self) -> Preprocess:
        """The preprocessing of evaluation and prediction."""
        assert self.card.preprocess is not None
        return self.card.preprocess

    @property
    def eval_batch(self) -> int:
        """Images to evaluate at a time."""
        return min(max(self.config.microbatch, 32), 256)


class Training(NamedTuple):
    """The components that the loop uses."""

    state: TrainState
    plain_model: PlainModel
    evaluator: Evaluator
    test_evaluator: Evaluator | None
    batches: Batches


def read_data(
    data: DataSet, channels: int, folder: Path, workers: int, world: World, on_event: EventHandler, *, selects: bool
) -> tuple[DataSet, list[UnreadableImage]]:
    """Decode small data once into a file of pixels in `folder`.

    `selects`: weights are selected by val, and test is reported. Returns the data without the images that cannot be
    read, and those with the reasons.
    """
    if data.eval_split is None:
        raise UserError("there are no held-out images to evaluate on: set data.held_out above 0.")
    if selects and data.val is None:
        raise UserError("patience needs images other than test to select weights on: set data.dev, such as 0.1.")

    def decoded(split: Split) -> tuple[Split, list[UnreadableImage]]:
        results: list[tuple[Split, list[UnreadableImage]]] = []

        def decode() -> bool:
            results.append(decode_once(split, folder, channels=channels, workers=workers, on_event=on_event))
            return results[0][0] is not split

        # The first process writes the file, if the data is small enough, and the others open it.
        if on_rank0(decode, world) and not results:
            decode()
        return results[0] if results else (split, [])

    train, unreadable = decoded(data.train)
    eval_split, more = decoded(data.eval_split)
    unreadable = [*unreadable, *more]
    if selects and data.test is not None:
        test, more = decoded(data.test)
        data, unreadable = replace(data, test=test), [*unreadable, *more]
    all_ranks(True, world)  # a first process that refuses the run next would remove the folder that others read
    refusal = unreadable_refusal(data.train, train, eval_split)
    if unreadable:
        listed = "; ".join(f"{image.path}: {image.reason}" for image in unreadable[:3])
        where = "`vitral check` lists them" if refusal else "listed in result.json"
        listed += f"; and {len(unreadable) - 3} more, {where}" if unreadable[3:] else ""
        on_event(Note(f"skipped {len(unreadable)} unreadable image{'s' * (len(unreadable) > 1)} ({listed})"))
    if refusal:
        raise UserError(refusal)
    readable = replace(data, test=eval_split) if data.val is None else replace(data, val=eval_split)
    return replace(readable, train=train), unreadable


def plan_run(recipe: Recipe, data: DataSet, card: Card, world: World, own_parts: OwnParts) -> RunSetup:
    """Length, batch and loss of a run. The batch is reduced if fewer images are readable."""
    train, eval_split = data.train, data.eval_split
    assert eval_split is not None
    batch = min(recipe.batch, len(train))
    check_batch(batch, world)
    order = balanced_order(train.labels, recipe.seed) if recipe.balance == "sampler" else None
    epoch = (len(train) if order is None else len(order)) / batch  # steps
    steps = recipes.steps_of_run(recipe, epoch)
    # Each epoch, but not more than ten times: on little data an evaluation takes as long as an epoch.
    evaluate_every = recipe.evaluate_every or max(math.ceil(epoch), math.ceil(steps / 10))
    from_images = 0.0 if recipe.trainable == "head" else 1.0  # cached features cannot be mixed as pixels are
    settings = LossSettings(
        classes=len(train.classes),
        mean=recipe.data.mean,
        std=recipe.data.std,
        kind=recipe.loss,
        smoothing=recipe.regularization.label_smoothing,
        mixup=recipe.data.mixup * from_images,
        cutmix=recipe.data.cutmix * from_images,
        augment=recipe.data.augment if from_images else "",
        seed=recipe.seed,
    )
    config = LoopConfig(
        steps=steps,
        batch=batch,
        microbatch=initial_microbatch(math.ceil(batch / world.size), recipe.micro_batch, world.device),
        seed=recipe.seed,
        clip=recipe.optim.clip,
        evaluate_every=evaluate_every,
        save_every=recipe.save_every or evaluate_every,
        patience=recipe.patience,
        autocast=autocast_dtype(recipe.precision, world.device),
        mix_partner=settings.mixes,
        cuda_graph=recipe.cuda_graph
        and own_parts.optimizer is None,  # whether a user's optimizer can be captured is unknown
    )
    workers, test_split = worker_count(recipe, world), data.test if recipe.patience else None
    return RunSetup(recipe, train, eval_split, test_split, order, card, config, workers, settings, own_parts)


def build_training(model: nn.Module, setup: RunSetup, world: World, on_event: EventHandler) -> Training:
    """Build the state that the loop updates, its weights as a plain model, the evaluators, and the batches."""
    recipe = setup.recipe
    schedule, steps = recipe.schedule, setup.config.steps
    warmup = warmup_steps(schedule.warmup, steps, schedule.full_steps)
    if warmup < schedule.warmup and schedule.warmup >= 1:
        on_event(Note(f"warmup of {schedule.warmup:g} steps is scaled to {warmup:g}: the run has only {steps:,}"))
    if setup.config.batch < recipe.batch:
        on_event(Note(f"only {setup.config.batch} training images are left: this is the batch, not {recipe.batch}"))
    model.to(world.device)
    freeze(model, recipe.trainable)
    model.to(world.device)  # adapters that were added
    if recipe.grad_checkpointing:
        if not isinstance(model, ViT | ResNet):
            raise UserError("grad_checkpointing=true needs a model of vitral: set it to false for your own module.")
        model.set_grad_checkpointing()
    if recipe.precision == "fp8":
        if recipe.parallel == "fsdp" and world.size > 1:
            raise UserError("precision=fp8 needs whole weights, which parallel=fsdp shards: use one or the other.")
        use_fp8(model.train(), on_event, freeze=False)
    if recipe.compile:
        modules = model.get_submodule("blocks").children() if recipe.objective == "masked" else (model,)
        for module in modules:
            module.compile()
    learner, objective = _objective(model, setup)
    if isinstance(learner, MaeModel) and recipe.init and not read_decoder(recipe.init, learner.autoencoder):
        on_event(Note(f"{recipe.init} has no decoder of a masked autoencoder: a new one is trained"))
    if isinstance(learner, MaeModel) and (reason := unsupported_reason(learner.autoencoder)):
        on_event(Note(f"the decoder will not be saved, since format hf-mae cannot represent it: {reason}"))
    objective.to(world.device)
    separate = recipe.ema_decay or (world.size > 1 and recipe.parallel == "fsdp")
    plain = copy.deepcopy(learner) if separate else learner  # before it is wrapped: shards cannot be copied
    wrapped = wrap(objective, world, recipe.parallel)
    ema = EMA(learner, recipe.ema_decay) if recipe.ema_decay else None
    state = TrainState(wrapped, learner, _optimizer(learner, setup), ema)
    wrapped.train()
    plain_model = PlainModel(state, plain)
    connect = _train_on_features if recipe.trainable == "head" else _train_on_images
    predict, batches = connect(plain_model, setup, world, on_event)

    def evaluator(split: Split) -> Evaluator:
        return Evaluator(split, world, setup.eval_batch, predict, _metrics(setup, split))

    test = evaluator(setup.test_split) if setup.test_split is not None else None
    return Training(state, plain_model, evaluator(setup.eval_split), test, batches)


def _objective(model: nn.Module, setup: RunSetup) -> tuple[nn.Module, nn.Module]:
    """The module to train, and the objective: the same module with its loss."""
    recipe, settings = setup.recipe, setup.settings
    if recipe.objective == "masked":
        assert isinstance(model, ViT)
        masked = _masked_model(model, recipe)
        return masked, MaskedObjective(masked, settings.mean, settings.std)
    reader = model.head if recipe.trainable == "head" else model
    assert isinstance(reader, nn.Module)
    return model, Objective(reader, settings, setup.train.counts(), recipe.balance, setup.own_parts.loss)


def _masked_model(model: ViT, recipe: Recipe) -> MaskedModel | MaeModel:
    m = recipe.masked
    if m.target != "mae":
        return MaskedModel(model, MaskSettings(m.ratio, m.token_ratio, m.random_ratio, m.target, recipe.seed))
    sizes = {"width": m.decoder_width, "depth": m.decoder_depth, "heads": m.decoder_heads, "mlp": 4 * m.decoder_width}
    return MaeModel(model, MaeConfig(**sizes, ratio=m.ratio, norm_pixels=m.norm_pixels), recipe.seed)


def _optimizer(learner: nn.Module, setup: RunSetup) -> torch.optim.Optimizer:
    optim = setup.recipe.optim
    groups = parameter_groups(
        learner, weight_decay=optim.weight_decay, layer_decay=optim.layer_decay, head_lr=optim.head_lr
    )
    if setup.own_parts.optimizer is not None:
        return own_optimizer(setup.own_parts.optimizer, groups, optim.lr)
    rule = {"beta1": optim.beta1, "beta2": optim.beta2, "momentum": optim.momentum}
    return build_optimizer(groups, name=optim.name, lr=optim.lr, **rule)


def worker_count(recipe: Recipe, world: World) -> int:
    """Number of loader workers of this process."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))  # of this machine, set by torchrun
    return default_workers(world.device.type, processes) if recipe.workers < 0 else recipe.workers


def _train_on_images(
    plain_model: PlainModel, setup: RunSetup, world: World, on_event: EventHandler
) -> tuple[Predict, Batches]:
    pipeline, channels = _train_pipeline(setup), setup.card.architecture.channels
    masked = setup.recipe.objective == "masked"
    images = setup.config.steps * setup.config.batch
    # A run shorter than an epoch would load images that it never uses.
    on_device = (
        load_resident_split(setup.train, pipeline, channels, setup.workers, world)
        if images >= len(setup.train)
        else None
    )

    def batches(step: int) -> Iterator[Batch]:
        config = setup.config
        rows = len(rank_positions(config.batch, world.rank, world.size, mix_partner=config.mix_partner))
        drawn: dict[str, Any] = {
            "batch": config.batch,
            "seed": config.seed,
            "mix_partner": config.mix_partner,
            "order": setup.order,
        }
        if on_device is not None:
            stream = on_device.batches(range(step, config.steps), world=world, **drawn)
        else:
            stream = training_batches(
                setup.train,
                pipeline,
                first_step=step,
                last_step=config.steps,
                rank=world.rank,
                world=world.size,
                workers=setup.workers,
                channels=channels,
                pin=world.device.type == "cuda",
                resize=crop_uploader(pipeline, rows, channels, world.device),
                **drawn,
            )
        return with_image_keys(stream) if masked else stream

    def predict(split: Split) -> Predictions:
        compute = masked_outputs if masked else predict_split
        return compute(plain_model(), split, _eval_preprocess(setup), **_evaluation_options(setup, world, on_event))

    return predict, batches


def _train_pipeline(setup: RunSetup) -> Pipeline | CallableTransform:
    if setup.own_parts.train_transform is not None:
        return own_transform(setup.own_parts.train_transform, setup.card)
    text, _ = recipes.pipelines(setup.recipe, setup.card.architecture.image)
    return parse_pipeline(text)


def _eval_preprocess(setup: RunSetup) -> Any:
    """The card's preprocessing, with the user's own transform as its pipeline if there is one."""
    if setup.own_parts.eval_transform is None:
        return setup.preprocess
    transform: Any = own_transform(setup.own_parts.eval_transform, setup.card)
    return replace(setup.preprocess, pipeline=transform)


def _metrics(setup: RunSetup, split: Split) -> Callable[..., dict[str, Any]]:
    if setup.recipe.objective != "masked":
        return partial(measure, sigmoid=setup.card.multilabel)
    config = setup.card.architecture
    assert isinstance(config, ViTConfig)
    m = setup.recipe.masked
    if m.target != "mean":  # one colour per patch; the other targets have no such simple baselines
        return measure_masked({})
    settings = MaskSettings(m.ratio, m.token_ratio, m.random_ratio, m.target, setup.recipe.seed)
    return measure_masked(baselines(setup.train, split, setup.preprocess.pipeline, config, settings))


def _train_on_features(
    plain_model: PlainModel, setup: RunSetup, world: World, on_event: EventHandler
) -> tuple[Predict, Batches]:
    """Only the head is trained, so the features are computed once, of images that are not augmented."""
    on_event(Note("only the head is trained: features are computed once, and augmentation is off"))
    features = {}
    options = _evaluation_options(setup, world, on_event)
    for split in filter(None, (setup.train, setup.eval_split, setup.test_split)):
        rows = gather_rows(embed_split(plain_model(), split, setup.preprocess, **options)._asdict(), world)
        order = np.argsort(rows["indices"])
        features[split.name] = {key: torch.from_numpy(values[order]) for key, values in rows.items()}
    train, labels = features[setup.train.name], torch.from_numpy(setup.train.labels)
    share = rank_slice(setup.config.batch, world.rank, world.size)

    def batches(first_step: int) -> Iterator[Batch]:
        examples = len(labels) if setup.order is None else len(setup.order)
        for step in range(first_step, setup.config.steps):
            drawn = batch_indices(examples, setup.config.batch, step, setup.config.seed)[share]
            indices = torch.from_numpy(drawn if setup.order is None else setup.order[drawn])
            yield Batch(train["features"][indices], labels[indices], train["valid"][indices], indices)

    def predict(split: Split) -> Predictions:
        held_out = features[split.name]
        indices = np.arange(len(split))[rank_slice(len(split), world.rank, world.size)]
        head = plain_model().head.eval()
        with torch.inference_mode():
            logits = head(held_out["features"][indices].to(world.device)).float().cpu().numpy()
        head.train()
        return Predictions(indices, logits, held_out["valid"][indices].numpy())

    return predict, batches


def _evaluation_options(setup: RunSetup, world: World, on_event: EventHandler) -> dict[str, Any]:
    """Options of all evaluations of a run: the same batch and precision each time."""
    return {
        "batch": setup.eval_batch,
        "device": world.device,
        "rank": world.rank,
        "world": world.size,
        "workers": setup.workers,
        "precision": "bfloat16" if setup.config.autocast is not None else "float32",
        "on_event": on_event,
    }
