"""One training run, from a recipe to a result: set-up, resource estimate, loop, result."""

from __future__ import annotations

import copy
import json
import math
import shutil
import time
from contextlib import ExitStack
from dataclasses import MISSING, asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor, nn

from vitral import recipe as recipes
from vitral.architecture import ModuleConfig
from vitral.checkpoints.adapt import Weights
from vitral.checkpoints.card import Card
from vitral.checkpoints.mae import unsupported_reason, write_mae
from vitral.checkpoints.run import RunFolder
from vitral.checkpoints.weights import write
from vitral.checkpoints.write import write_safetensors
from vitral.cost import run_flops
from vitral.data.images import UnreadableImage
from vitral.data.sources import DataSet
from vitral.errors import Interrupted, UserError
from vitral.events import Event, EventHandler, Note, Progress, RunFinished, RunStarted, StepDone, ignore_events
from vitral.models.adapters import merge_lora
from vitral.models.mae import MaskedAutoencoder
from vitral.recipe import Recipe
from vitral.training.build import build_model, check_same_run, record_run
from vitral.training.callbacks import CallbackRunner, OwnParts, RunHandle
from vitral.training.loop import shorten, train_loop
from vitral.training.masked import MaeModel, MaskedModel
from vitral.training.metrics import (
    MetricsLogger,
    PlainModel,
    calibrated_card,
    describe_calibration,
    describe_selection,
    metrics_on_test,
)
from vitral.training.optimizer import learning_rate
from vitral.training.parallel import (
    StopRequests,
    World,
    all_ranks,
    gather_rows,
    init_distributed,
    on_rank0,
    stop_requests,
)
from vitral.training.resources import ResourceEstimate, estimate_resources, peak_bytes, reset_peak
from vitral.training.setup import RunSetup, build_training, plan_run, read_data, worker_count
from vitral.training.state import TrainState, restore_state, save_state
from vitral.validation import read_object


@dataclass(frozen=True)
class RunResult:
    """The result of a finished run; also written to RUN/result.json."""

    folder: str
    metrics: dict[str, Any]
    step: int  # of the weights that were kept
    seconds: float  # over all sessions of an interrupted run
    images_per_second: float  # on all devices together; 0 if a head was trained on cached features
    flops: float  # of the training, by the paper's rule; 0 for a user's own module, whose cost is unknown
    device_hours: float
    devices: int
    device: str
    predicted_peak_bytes: int
    peak_bytes: int
    unreadable: list[dict[str, str]]  # images that could not be read: path and reason
    recipe: str  # its hash
    seed: int
    calibration: str = ""  # the temperature in the model's card: what it was fitted on
    split: str = ""  # on which the metrics were computed
    selection: str = ""  # how the weights were selected among evaluations; empty: they are the last


def run(
    recipe: Recipe,
    data: DataSet,
    path: Path,
    *,
    device: str = "",
    on_event: EventHandler,
    own_parts: OwnParts | None = None,
) -> RunResult:
    """Train by a recipe, or resume the run in the folder. Every process of a torchrun calls this.

    Raises Interrupted after a stop request (Ctrl-C, SIGTERM), once the state is saved.
    """
    began = time.perf_counter()
    own_parts = own_parts or OwnParts()
    world = init_distributed(device)
    reset_peak(world.device)
    on_event = on_event if world.first else ignore_events
    stopping_note = Note("stopping after this step; press Ctrl-C again to stop immediately")
    with stop_requests(lambda: on_event(stopping_note)) as stopping, ExitStack() as on_exit:
        # Set-up
        folder = RunFolder(on_rank0(lambda: path, world))  # a name free for one process may be taken for the next
        on_exit.push(lambda kind, error, trace: folder.discard() if isinstance(error, UserError) else None)
        on_exit.callback(folder.unlock)
        finished = on_rank0(lambda: _claim(folder, recipe, data, own_parts, on_event), world)
        if finished is not None:
            on_event(Note(f"already finished: {folder.path}"))
            return finished
        model, card = build_model(recipe, data.train.classes, own_parts)
        if card.changes:
            on_event(Note(f"weights adapted: {'; '.join(card.changes)}"))
        pixels = folder.path / "pixels"
        data, unreadable = read_data(
            data,
            card.architecture.channels,
            pixels,
            worker_count(recipe, world),
            world,
            on_event,
            selects=recipe.patience > 0,
        )
        setup = plan_run(recipe, data, card, world, own_parts)
        interruptible = _interruptible(on_event, stopping, world)
        training = build_training(model, setup, world, interruptible)
        state = training.state
        logger = MetricsLogger(folder if world.first else None, interruptible)
        # Resource estimate
        estimate = estimate_resources(
            state,
            setup.config,
            world,
            training.batches,
            training.evaluator.estimate_seconds,
            lambda indices: _nonfinite_reason(_image_names(indices, setup, world), setup),
        )
        estimate = _with_mapped_pixels(estimate, setup, pixels, world)
        _resume(state, own_parts, folder, world, on_event)
        handle = RunHandle(folder.path, training.plain_model, lambda: state.step)
        callbacks = CallbackRunner(own_parts.callbacks, handle, training.evaluator.evaluate, logger, world)
        logger(_started(state, estimate, world, folder, recipe))
        callbacks.on_run_start()
        # Loop
        earlier = state.progress.seconds

        def seconds() -> float:
            return earlier + time.perf_counter() - began

        def save() -> None:
            state.progress.seconds = seconds()
            state.progress.callbacks = callbacks.state_dicts()
            save_state(state, folder, world, recipe.keep)

        train_loop(
            state,
            estimate.config,
            world,
            lr=partial(learning_rate, base=recipe.optim.lr, total=estimate.config.steps, **asdict(recipe.schedule)),
            batches=training.batches,
            evaluate=callbacks.evaluate,
            save=save,
            keep_best=lambda: _keep_best(training.plain_model, folder, world) if recipe.patience else None,
            image_names=lambda indices: _image_names(indices, setup, world),
            on_event=callbacks,
            should_stop=stopping,
            stop_early=callbacks.stop_reason,
        )
        callbacks.on_run_end()
        # Result
        metrics = state.progress.metrics or {}
        if recipe.patience:
            training.plain_model.select(load_file(folder.best))
            metrics = metrics_on_test(training.test_evaluator, metrics)
        result = _result(metrics, state, setup, estimate, logger, world, folder, seconds(), unreadable)
        _write_final_model(training.plain_model, setup, folder.model, world)
        on_rank0(lambda: _close(result, folder), world)
        on_event(RunFinished(asdict(result)))
        return result


def _interruptible(on_event: EventHandler, stopping: StopRequests, world: World) -> EventHandler:
    """An event handler that ends an evaluation in all processes as soon as one of them received a stop request.

    They synchronise after every batch, of which all have the same number. Before the first step they do not: a signal
    then ends a process immediately, and the others would wait for it.
    """
    stepped = False

    def handle(event: Event) -> None:
        nonlocal stepped
        on_event(event)
        stepped = stepped or isinstance(event, StepDone)
        evaluating = isinstance(event, Progress) and event.task == "evaluating"
        if stepped and evaluating and not all_ranks(not stopping.requested, world):
            raise Interrupted

    return handle


def _claim(
    folder: RunFolder, recipe: Recipe, data: DataSet, own_parts: OwnParts, on_event: EventHandler
) -> RunResult | None:
    """Claim the folder for this run, or check that it contains the same run; returns the result of a finished run."""
    folder.make()
    if folder.begun:
        check_same_run(folder, recipe, data, own_parts)
    elif folder.model.exists():
        raise UserError(f"{folder.path} contains weights of another run: choose another folder.")
    else:
        folder.best.unlink(missing_ok=True)  # of a run that ended before it saved a state
        record_run(folder, recipe, data, own_parts, on_event)
    path = folder.path / "result.json"
    if not path.exists():
        return None
    values = read_object(path, *(item.name for item in fields(RunResult) if item.default is MISSING))
    _clean_up(folder)
    known = {item.name for item in fields(RunResult)}  # another version of vitral may write more
    return RunResult(**{name: value for name, value in values.items() if name in known})


def _resume(state: TrainState, own_parts: OwnParts, folder: RunFolder, world: World, on_event: EventHandler) -> None:
    """Restore the newest saved state, if there is one, and drop the metrics of steps that will be repeated."""
    saved = on_rank0(folder.newest_state, world)
    if saved is not None:
        restore_state(state, saved)
        on_event(Note(f"resuming from step {saved.step}"))
        for callback, callback_state in zip(own_parts.callbacks, state.progress.callbacks, strict=True):
            if callback_state is not None:
                callback.load_state_dict(callback_state)  # type: ignore[attr-defined]
    elif world.first and folder.begun:
        on_event(Note("none of the saved states can be read: starting from the beginning"))
    if world.first:
        folder.rewind_metrics(state.step)
        if state.progress.evaluation_due:  # the evaluation is repeated, and its line written again
            lines = [line for line in folder.metrics() if line["step"] < state.step or "evaluation" not in line]
            folder.write_text("metrics.jsonl", "".join(f"{json.dumps(line)}\n" for line in lines))


def _started(
    state: TrainState, estimate: ResourceEstimate, world: World, folder: RunFolder, recipe: Recipe
) -> RunStarted:
    config = estimate.config
    evaluations = math.ceil(config.steps / config.evaluate_every) - state.step // config.evaluate_every
    return RunStarted(
        step=state.step,
        steps=config.steps,
        evaluations=evaluations + state.progress.evaluation_due,
        batch=config.batch,
        processes=world.size,
        microbatch=config.microbatch,
        step_seconds=estimate.step_seconds,
        evaluation_seconds=estimate.evaluation_seconds,
        peak_bytes=estimate.peak_bytes,
        folder=str(folder.path),
        recipe=recipes.values(recipe),
    )


def _keep_best(plain_model: PlainModel, folder: RunFolder, world: World) -> None:
    """Store the weights of the best evaluation so far; they are loaded at the end of the run."""
    weights = {key: value.detach().cpu() for key, value in plain_model().state_dict().items()}
    on_rank0(lambda: write_safetensors(folder.best, weights), world)


def _result(
    metrics: dict[str, Any],
    state: TrainState,
    setup: RunSetup,
    estimate: ResourceEstimate,
    logger: MetricsLogger,
    world: World,
    folder: RunFolder,
    seconds: float,
    unreadable: list[UnreadableImage],
) -> RunResult:
    """The result of a finished run."""
    recipe, images_seen, architecture = setup.recipe, state.step * setup.config.batch, setup.card.architecture
    flops = 0.0
    if not isinstance(architecture, ModuleConfig):
        flops = run_flops(architecture, seen=images_seen, images=len(setup.train), trainable=recipe.trainable)
    evaluation = state.progress.metrics or {}
    reported = setup.test_split or setup.eval_split
    return RunResult(
        folder=str(folder.path),
        metrics=metrics,
        step=state.progress.best_step if recipe.patience else state.step,
        seconds=seconds,
        images_per_second=logger.images_per_second(),
        flops=flops,
        device_hours=seconds * world.size / 3600,
        devices=world.size,
        device=world.name,
        predicted_peak_bytes=estimate.peak_bytes,
        peak_bytes=peak_bytes(world.device),
        unreadable=[asdict(image) for image in unreadable],
        recipe=recipes.recipe_hash(recipe),
        seed=recipe.seed,
        calibration=describe_calibration(
            setup.card, evaluation, setup.eval_split, reported=reported is setup.eval_split
        ),
        split=reported.name,
        selection=describe_selection(state.progress, setup.eval_split, reported) if recipe.patience else "",
    )


def _with_mapped_pixels(estimate: ResourceEstimate, setup: RunSetup, pixels: Path, world: World) -> ResourceEstimate:
    """The estimate including memory-mapped pixels that this process has not read yet."""
    if world.device.type != "cpu" or setup.workers or setup.recipe.trainable == "head":
        return estimate  # workers read them, or they were read for the features
    mapped = sum(file.stat().st_size for file in pixels.glob("*.bin"))
    unread = round(mapped * (1 - setup.config.batch / len(setup.train)))
    return replace(estimate, peak_bytes=estimate.peak_bytes + unread)


def _image_names(indices: Tensor, setup: RunSetup, world: World) -> list[str]:
    """The images of a step, over all processes."""
    rows = gather_rows({"indices": indices.numpy()}, world)["indices"]
    return [setup.train.keys[index] for index in dict.fromkeys(rows.tolist())]


def _nonfinite_reason(names: list[str], setup: RunSetup) -> str:
    """The error for a first step on these images whose loss is not finite, with what this run has that may cause it."""
    recipe, own_parts = setup.recipe, setup.own_parts
    advice = {
        "check what loss= returns for them": own_parts.loss is not None,
        "check the weights of model=": own_parts.model is not None,
        "check the tensors that transform= returns": own_parts.train_transform is not None,
        "check the weights in init": bool(recipe.init),
        "set precision=float32": setup.config.autocast is not None,
    }
    applicable = [text for text, applies in advice.items() if applies] or ["check data.mean and data.std"]
    problem = f"the loss is not finite (NaN or Inf) at step 1 (images {shorten(names)})"
    return f"{problem}: {', or '.join(applicable)}."


def _write_final_model(plain_model: PlainModel, setup: RunSetup, path: Path, world: World) -> None:
    model = plain_model()
    card = calibrated_card(setup.card, plain_model.state.progress.metrics or {}, setup.eval_split)
    if isinstance(model, MaeModel) and not unsupported_reason(model.autoencoder):
        autoencoder = model.autoencoder
        on_rank0(lambda: _write_autoencoder(autoencoder, path.with_name("mae"), card), world)
    if isinstance(model, MaskedModel | MaeModel):
        model = model.model  # without the layers that only masked prediction needs
    on_rank0(lambda: _write_model(model, setup, card, path), world)


def _write_autoencoder(model: MaskedAutoencoder, folder: Path, card: Card) -> None:
    """Write the encoder with its decoder, replacing an earlier one."""
    shutil.rmtree(folder, ignore_errors=True)
    write_mae(model, folder, card)


def _write_model(model: nn.Module, setup: RunSetup, card: Card, path: Path) -> None:
    """Write the weights as an ordinary file with its card; adapters are merged into their layers."""
    if setup.recipe.trainable.startswith("lora"):
        model = copy.deepcopy(model)
        merge_lora(model)
    weights = {key: value.detach().cpu() for key, value in model.state_dict().items()}
    if setup.own_parts.eval_transform is not None:  # not stored in the file, which must not claim another preprocessing
        card = replace(card, preprocess=None, changes=(*card.changes, "evaluated with a transform of the user's own"))
    if isinstance(card.architecture, ModuleConfig):
        write_safetensors(path, weights, {"vitral.card": card.to_json()})
    else:
        write(Weights(card.architecture, weights, card.changes), card, path, "vitral")


def _close(result: RunResult, folder: RunFolder) -> None:
    """Write the result, after the model file; only then are the saved states removed."""
    folder.write_text("result.json", json.dumps(asdict(result), indent=2) + "\n")
    _clean_up(folder)


def _clean_up(folder: RunFolder) -> None:
    """Remove what only a resumed run needs."""
    folder.forget_states()
    folder.best.unlink(missing_ok=True)
    shutil.rmtree(folder.path / "pixels", ignore_errors=True)
