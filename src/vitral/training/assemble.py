"""Open a recipe over data, call the loop, keep the result: one run, from its folder to its folder."""

from __future__ import annotations

import copy
import json
import math
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vitral import recipe as recipes
from vitral.checkpoints.adapt import Weights
from vitral.checkpoints.run import RunFolder
from vitral.checkpoints.weights import write
from vitral.data.sources import DataSet
from vitral.errors import UserError
from vitral.models.adapters import merge_lora
from vitral.recipe import Recipe
from vitral.training.events import Listener, Note, Started
from vitral.training.judge import Judge, PlainModel
from vitral.training.loop import train
from vitral.training.parallel import World, joined, wait
from vitral.training.preflight import Forecast, peak_bytes, preflight
from vitral.training.prepare import (
    Batches,
    Parts,
    open_recipe,
    prepare_model,
    prepare_trainee,
    readable,
    workers_of,
)
from vitral.training.record import Recorder
from vitral.training.schedule import learning_rate
from vitral.training.signals import stop_requests
from vitral.training.state import Trainee, restore, save


@dataclass(frozen=True)
class Result:
    """What a finished run leaves; also RUN/result.json."""

    folder: str
    metrics: dict[str, Any]
    step: int  # of the weights that were kept
    seconds: float
    images_per_second: float
    predicted_peak_bytes: int
    peak_bytes: int
    skipped: list[list[str]]  # images that could not be read, and why
    recipe: str  # its hash
    seed: int


def run(recipe: Recipe, data: DataSet, path: Path, *, device: str = "", listen: Listener) -> Result:
    """Train as the recipe says, or go on with what the folder holds; every process of a torchrun calls this."""
    began = time.perf_counter()
    with joined(device) as world, stop_requests() as stopping:
        listen = listen if world.first else lambda event: None
        folder = RunFolder(path)
        finished = _claim(folder, recipe, data, world)
        if finished is not None:
            listen(Note(f"{path} holds this run, finished: choose another folder to train again"))
            return finished
        model, card = prepare_model(recipe, data.train.classes)
        data, skipped = readable(
            data, card.architecture.channels, path / "pixels", workers_of(recipe, world), world, listen
        )
        parts = open_recipe(recipe, data, card, world)
        trainee, plain, judge, batches = prepare_trainee(model, parts, world, listen)
        recorder = Recorder(folder if world.first else None, listen)
        forecast = _start(trainee, judge, batches, parts, folder, world, recorder)
        train(
            trainee,
            forecast.plan,
            world,
            rate=lambda step: learning_rate(
                step, base=recipe.optim.lr, total=parts.plan.steps, **asdict(recipe.schedule)
            ),
            batches=batches,
            evaluate=judge.evaluate,
            save=lambda: save(trainee, folder, world, recipe.keep),
            keep_best=lambda: _keep(plain, parts, folder.best, world) if recipe.patience else None,
            name_rows=lambda indices: [parts.train.keys[index] for index in indices.tolist()],
            listen=recorder.hear,
            stopping=stopping,
        )
        result = Result(
            folder=str(path),
            metrics=trainee.facts["metrics"],
            step=trainee.facts["best_step"] if recipe.patience else trainee.step,
            seconds=time.perf_counter() - began,
            images_per_second=recorder.images_per_second(),
            predicted_peak_bytes=forecast.peak_bytes,
            peak_bytes=peak_bytes(world.device),
            skipped=[list(pair) for pair in skipped],
            recipe=recipes.recipe_hash(recipe),
            seed=recipe.seed,
        )
        _finish(result, plain, parts, folder, world)
        return result


def _claim(folder: RunFolder, recipe: Recipe, data: DataSet, world: World) -> Result | None:
    """Make the folder ours, or check that it holds this very run; a finished one comes back as its result."""
    if world.first:
        folder.make()
        facts = {"source": data.source, "train": data.train.fingerprint(), "notes": list(data.notes)}
        _same(folder, "recipe.toml", recipes.to_toml(recipe), "recipe")
        _same(folder, "data.json", json.dumps(facts, indent=2) + "\n", "data")
    wait(world)
    text = folder.read_text("result.json")
    return None if text is None else Result(**json.loads(text))


def _same(folder: RunFolder, name: str, text: str, what: str) -> None:
    before = folder.read_text(name)
    if before is None:
        folder.write_text(name, text)
    elif before != text:
        old, new = before.splitlines(), text.splitlines()
        line = next((mine for mine, theirs in zip(new, old, strict=False) if mine != theirs), "its length")
        raise UserError(
            f"{folder.path} holds another run (its {what} differs: {line.split('#')[0].strip()}): "
            "choose another folder, or remove it."
        )


def _start(
    trainee: Trainee,
    judge: Judge,
    batches: Batches,
    parts: Parts,
    folder: RunFolder,
    world: World,
    recorder: Recorder,
) -> Forecast:
    """Preflight, then the saved state if there is one."""
    forecast = preflight(trainee, parts.plan, world, batches, judge.seconds_for_all)
    saved = folder.newest_state()
    if saved is not None:
        restore(trainee, saved)
        recorder.listen(Note(f"going on from step {saved.step}"))
    if world.first:
        folder.rewind_metrics(trainee.step)
    plan = forecast.plan
    evaluations = math.ceil(plan.steps / plan.evaluate_every) - trainee.step // plan.evaluate_every
    recorder.hear(
        Started(
            step=trainee.step,
            steps=plan.steps,
            evaluations=evaluations,
            batch=plan.batch,
            processes=world.size,
            micro=plan.micro,
            step_seconds=forecast.step_seconds,
            evaluation_seconds=forecast.evaluation_seconds,
            peak_bytes=forecast.peak_bytes,
        )
    )
    return forecast


def _keep(plain: PlainModel, parts: Parts, path: Path, world: World) -> None:
    """Write the weights as an ordinary file with its card; adapters are merged into what they adapt."""
    model = plain()
    if not world.first:
        return
    if parts.recipe.tune.startswith("lora"):
        model = copy.deepcopy(model)
        merge_lora(model)
    state = {key: value.detach().cpu() for key, value in model.state_dict().items()}
    write(Weights(parts.card.architecture, state, parts.card.changes), parts.card, path, "vitral")


def _finish(result: Result, plain: PlainModel, parts: Parts, folder: RunFolder, world: World) -> None:
    """The model file, then the result; only then does the state go."""
    if parts.recipe.patience and folder.best.exists():
        wait(world)
        if world.first:
            folder.best.replace(folder.model)
    else:
        _keep(plain, parts, folder.model, world)
    if world.first:
        folder.write_text("result.json", json.dumps(asdict(result), indent=2) + "\n")
        folder.forget_states()
        shutil.rmtree(folder.path / "pixels", ignore_errors=True)
    wait(world)
