"""Open a recipe over data, call the loop, keep the result: one run, from its folder to its folder."""

from __future__ import annotations

import copy
import json
import math
import shutil
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from vitral import recipe as recipes
from vitral.checkpoints.adapt import Weights
from vitral.checkpoints.run import RunFolder
from vitral.checkpoints.weights import write
from vitral.cost import run_flops
from vitral.data.images import UnreadableImage
from vitral.data.sources import DataSet
from vitral.errors import Interrupted, UserError
from vitral.events import Event, EventHandler, Note, Progress, RunStarted, StepDone, ignore_events
from vitral.models.adapters import merge_lora
from vitral.models.build import Model
from vitral.recipe import Recipe
from vitral.training.evaluator import Evaluator, PlainModel
from vitral.training.loop import train
from vitral.training.masked import MaskedModel
from vitral.training.metrics import MetricsLogger
from vitral.training.optimizer import learning_rate
from vitral.training.parallel import World, all_ranks, gather_rows, init_distributed, on_rank0
from vitral.training.resources import ResourceEstimate, forget_peak, peak_bytes, preflight
from vitral.training.setup import (
    Batches,
    Parts,
    build_train_state,
    open_recipe,
    prepare_model,
    readable,
    workers_of,
)
from vitral.training.signals import StopRequests, stop_requests
from vitral.training.state import TrainState, restore, save

# May change when a run goes on: memory, speed and disk depend on them, what is computed does not.
_FREE = {"workers", "micro_batch", "grad_checkpointing", "compile", "cuda_graph", "parallel", "keep", "save_every"}


@dataclass(frozen=True)
class Result:
    """What a finished run leaves; also RUN/result.json."""

    folder: str
    metrics: dict[str, Any]
    step: int  # of the weights that were kept
    seconds: float  # of all its parts, where it was interrupted
    images_per_second: float  # on all devices together; 0 where a head learned from features
    flops: float  # of the training, by the paper's rule
    device_hours: float
    devices: int
    device: str
    predicted_peak_bytes: int
    peak_bytes: int
    skipped: list[list[str]]  # images that could not be read, and why
    recipe: str  # its hash
    seed: int


def run(recipe: Recipe, data: DataSet, path: Path, *, device: str = "", on_event: EventHandler) -> Result:
    """Train as the recipe says, or go on with what the folder holds; every process of a torchrun calls this."""
    began = time.perf_counter()
    world = init_distributed(device)
    forget_peak(world.device)
    on_event = on_event if world.first else ignore_events
    with stop_requests(lambda: on_event(Note("stopping after this step; Ctrl-C again stops at once"))) as stopping:
        folder = RunFolder(on_rank0(lambda: path, world))  # a name free for one process may be taken for the next
        finished = on_rank0(lambda: _claim(folder, recipe, data), world)
        if finished is not None:
            on_event(Note(f"already done: {folder.path}"))
            return finished
        model, card = prepare_model(recipe, data.train.classes)
        if card.changes:
            on_event(Note(f"weights adapted: {'; '.join(card.changes)}"))
        data, skipped = readable(
            data, card.architecture.channels, folder.path / "pixels", workers_of(recipe, world), world, on_event
        )
        parts = open_recipe(recipe, data, card, world)
        ending = _ending(on_event, stopping, world)
        train_state, plain, judge, batches = build_train_state(model, parts, world, ending)
        logger = MetricsLogger(folder if world.first else None, ending)
        estimate = _start(train_state, judge, batches, parts, folder, world, logger)
        before = train_state.facts.get("seconds", 0.0)

        def spent() -> float:
            return before + time.perf_counter() - began

        def save_state() -> None:
            train_state.facts["seconds"] = spent()
            save(train_state, folder, world, recipe.keep)

        train(
            train_state,
            estimate.plan,
            world,
            rate=lambda step: learning_rate(
                step, base=recipe.optim.lr, total=parts.plan.steps, **asdict(recipe.schedule)
            ),
            batches=batches,
            evaluate=judge.evaluate,
            save=save_state,
            keep_best=lambda: _keep(plain, parts, folder.best, world) if recipe.patience else None,
            name_rows=lambda indices: _names(indices, parts, world),
            on_event=logger,
            stopping=stopping,
        )
        result = _result(train_state, parts, estimate, logger, world, folder, spent(), skipped)
        _finish(result, plain, parts, folder, world)
        return result


def _ending(on_event: EventHandler, stopping: StopRequests, world: World) -> EventHandler:
    """The listener of a run, which ends an evaluation in all processes as soon as one of them was asked to stop.

    They ask each other after every batch, of which all have equally many. Before the first step they do not: there a
    signal ends a process at once, and the others would wait for its answer.
    """
    stepped = False

    def hear(event: Event) -> None:
        nonlocal stepped
        on_event(event)
        stepped = stepped or isinstance(event, StepDone)
        if (
            stepped
            and isinstance(event, Progress)
            and event.task == "evaluating"
            and not all_ranks(not stopping.heard, world)
        ):
            raise Interrupted

    return hear


def _claim(folder: RunFolder, recipe: Recipe, data: DataSet) -> Result | None:
    """Make the folder ours, or check that it holds this very run; a finished one comes back as its result."""
    folder.make()
    images = {"train": data.train.fingerprint(), "evaluated": data.eval_split.fingerprint() if data.eval_split else ""}
    if folder.begun:
        _check_same(folder, recipe, images)
    elif folder.model.exists():
        raise UserError(f"{folder.path} holds weights that are not of this run: choose another folder.")
    else:
        facts = {"source": data.source, **images, "notes": list(data.messages)}
        folder.best.unlink(missing_ok=True)  # of a run that ended before it saved a state
        folder.write_text("recipe.toml", recipes.to_toml(recipe))
        folder.write_text("data.json", json.dumps(facts, indent=2) + "\n")
    text = folder.read_text("result.json")
    if text is None:
        return None
    _tidy(folder)
    return Result(**json.loads(text))


def _check_same(folder: RunFolder, recipe: Recipe, images: dict[str, str]) -> None:
    """A run goes on with the images and the maths it began with."""
    before, now = recipes.values(recipes.from_toml(folder.read_text("recipe.toml") or "")), recipes.values(recipe)
    keys = [key for key in now if key not in _FREE and before[key] != now[key]]
    changed = [f"{key} was {before[key]} and is {now[key]}" for key in keys]
    stated = json.loads(folder.read_text("data.json") or "{}")
    changed += [f"its {name} images were others" for name in images if images[name] != stated.get(name)]
    if changed:
        raise UserError(f"{folder.path} holds another run ({changed[0]}): choose another folder, or remove it.")


def _start(
    train_state: TrainState,
    judge: Evaluator,
    batches: Batches,
    parts: Parts,
    folder: RunFolder,
    world: World,
    logger: MetricsLogger,
) -> ResourceEstimate:
    """Preflight, then the saved state if there is one."""
    estimate = preflight(train_state, parts.plan, world, batches, judge.seconds_for_all)
    if world.device.type == "cpu":
        estimate = replace(estimate, peak_bytes=estimate.peak_bytes + _unread_bytes(parts, folder.path / "pixels"))
    saved = on_rank0(folder.newest_state, world)
    if saved is not None:
        restore(train_state, saved)
        logger.on_event(Note(f"going on from step {saved.step}"))
    elif world.first and folder.begun:
        logger.on_event(Note("none of the saved states can be read: starting from the beginning"))
    owed = "owed" in train_state.facts
    if world.first:
        _rewind_metrics(folder, train_state.step, owed)
    plan = estimate.plan
    evaluations = math.ceil(plan.steps / plan.evaluate_every) - train_state.step // plan.evaluate_every + owed
    logger(
        RunStarted(
            step=train_state.step,
            steps=plan.steps,
            evaluations=evaluations,
            batch=plan.batch,
            processes=world.size,
            microbatch=plan.micro,
            step_seconds=estimate.step_seconds,
            evaluation_seconds=estimate.evaluation_seconds,
            peak_bytes=estimate.peak_bytes,
        )
    )
    return estimate


def _rewind_metrics(folder: RunFolder, step: int, owed: bool) -> None:
    """Forget what the run will write down again; `owed`: the evaluation of that step, too."""
    folder.rewind_metrics(step)
    if owed:
        lines = [line for line in folder.metrics() if line["step"] < step or "evaluation" not in line]
        folder.write_text("metrics.jsonl", "".join(f"{json.dumps(line)}\n" for line in lines))


def _result(
    train_state: TrainState,
    parts: Parts,
    estimate: ResourceEstimate,
    logger: MetricsLogger,
    world: World,
    folder: RunFolder,
    seconds: float,
    skipped: list[UnreadableImage],
) -> Result:
    """What a run that is done came to."""
    recipe, seen = parts.recipe, train_state.step * parts.plan.batch
    return Result(
        folder=str(folder.path),
        metrics=train_state.facts["metrics"],
        step=train_state.facts["best_step"] if recipe.patience else train_state.step,
        seconds=seconds,
        images_per_second=logger.images_per_second(),
        flops=run_flops(parts.card.architecture, seen=seen, images=len(parts.train), trainable=recipe.trainable),
        device_hours=seconds * world.size / 3600,
        devices=world.size,
        device=world.name,
        predicted_peak_bytes=estimate.peak_bytes,
        peak_bytes=peak_bytes(world.device),
        skipped=[[image.path, image.reason] for image in skipped],
        recipe=recipes.recipe_hash(recipe),
        seed=recipe.seed,
    )


def _unread_bytes(parts: Parts, pixels: Path) -> int:
    """Mapped pixels that this process reads only after the preflight, and that count as its memory from then on."""
    if parts.workers or parts.recipe.trainable == "head":  # others read them; all were read for the features
        return 0
    mapped = sum(file.stat().st_size for file in pixels.glob("*.bin"))
    return round(mapped * (1 - parts.plan.batch / len(parts.train)))


def _names(indices: Tensor, parts: Parts, world: World) -> list[str]:
    """The images of a step, over all processes."""
    rows = gather_rows({"indices": indices.numpy()}, world)["indices"]
    return [parts.train.keys[index] for index in dict.fromkeys(rows.tolist())]


def _keep(plain: PlainModel, parts: Parts, path: Path, world: World) -> None:
    model = plain()
    model = model.model if isinstance(model, MaskedModel) else model  # without what only the prediction needs
    on_rank0(lambda: _write(model, parts, path), world)


def _write(model: Model, parts: Parts, path: Path) -> None:
    """The weights as an ordinary file with its card; adapters are merged into what they adapt."""
    if parts.recipe.trainable.startswith("lora"):
        model = copy.deepcopy(model)
        merge_lora(model)
    state = {key: value.detach().cpu() for key, value in model.state_dict().items()}
    write(Weights(parts.card.architecture, state, parts.card.changes), parts.card, path, "vitral")


def _finish(result: Result, plain: PlainModel, parts: Parts, folder: RunFolder, world: World) -> None:
    """The model file, then the result; only then does the state go."""
    kept = on_rank0(lambda: parts.recipe.patience and (folder.best.exists() or folder.model.exists()), world)
    if not kept:
        _keep(plain, parts, folder.model, world)
    on_rank0(lambda: _close(result, folder), world)


def _close(result: Result, folder: RunFolder) -> None:
    if folder.best.exists():  # else there is no patience, or an earlier start ended right after this renaming
        folder.best.replace(folder.model)
    folder.write_text("result.json", json.dumps(asdict(result), indent=2) + "\n")
    _tidy(folder)


def _tidy(folder: RunFolder) -> None:
    """Remove what only a run that goes on needs."""
    folder.forget_states()
    shutil.rmtree(folder.path / "pixels", ignore_errors=True)
