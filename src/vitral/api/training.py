"""`train`: a folder of images in, a run folder with a model out."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vitral.architecture import Architecture
from vitral.checkpoints.weights import describe, located
from vitral.data.sizes import median_short_side
from vitral.data.sources import DataSet, open_data
from vitral.errors import UserError
from vitral.models.device import default_device
from vitral.recipe import DataRecipe, Recipe, from_toml, with_overrides
from vitral.recipe_choice import default_recipe
from vitral.training.assemble import Result, run
from vitral.training.events import Decoding as Decoding
from vitral.training.events import Evaluated as Evaluated
from vitral.training.events import EvaluationProgress as EvaluationProgress
from vitral.training.events import Event as Event
from vitral.training.events import Listener, Note
from vitral.training.events import Saved as Saved
from vitral.training.events import Started as Started
from vitral.training.events import StepDone as StepDone
from vitral.training.loop import Interrupted as Interrupted
from vitral.training.pace import Pace as Pace


@dataclass(frozen=True)
class Training:
    """One run, or several that differ in their seed."""

    results: tuple[Result, ...]
    recipe: Recipe

    @property
    def mean(self) -> float:
        """Of the score: accuracy, or mean average precision where images have several labels."""
        return statistics.fmean(result.metrics["score"] for result in self.results)

    @property
    def spread(self) -> float | None:
        """The standard deviation between seeds."""
        return statistics.stdev(r.metrics["score"] for r in self.results) if len(self.results) > 1 else None


def train(
    data: str | Path,
    *,
    model: str = "",
    init: str | Path = "",
    out: str | Path = "",
    recipe: str | Path | Recipe = "",
    overrides: Sequence[str] = (),
    seeds: int = 1,
    device: str = "",
    listen: Listener = lambda event: None,
) -> Training:
    """Train on a data set; everything that is not said is chosen, and told to `listen` as notes.

    `recipe` is a TOML file or a `Recipe`, `overrides` are words such as "optim.lr=0.01" on top of it or of what was
    chosen. A second call with the same `out` goes on where the first one stopped.
    """
    opened, chosen, reasons = choose_recipe(
        data, model=model, init=init, recipe=recipe, overrides=overrides, device=device
    )
    for sentence in (*opened.notes, *reasons):
        listen(Note(sentence))
    folder = Path(out) if out else _new_folder(data, chosen)
    if seeds == 1:
        return Training((run(chosen, opened, folder, device=device, listen=listen),), chosen)
    results = []
    for seed in range(chosen.seed, chosen.seed + seeds):
        listen(Note(f"seed {seed}"))
        again = replace(chosen, seed=seed)
        results.append(run(again, opened, folder / f"seed-{seed}", device=device, listen=listen))
    return Training(tuple(results), chosen)


def choose_recipe(
    data: str | Path,
    *,
    model: str = "",
    init: str | Path = "",
    recipe: str | Path | Recipe = "",
    overrides: Sequence[str] = (),
    device: str = "",
) -> tuple[DataSet, Recipe, tuple[str, ...]]:
    """The data opened, the recipe that `train` would follow, and why."""
    written = _written(recipe)
    held_out = _held_out(written, overrides)
    # The split is always drawn with seed 0: runs with other seeds are tested on the same images.
    opened = open_data(data, held_out=held_out)
    start = str(init) or (written.init if written else "")
    if written is not None:
        names = {"model": model or written.model, "init": start}
        return opened, with_overrides(replace(written, **names), overrides), ("following the recipe given",)
    card = describe(located(start)).card if start else None
    kind = device.split(":")[0] or default_device().type
    chosen, reasons = default_recipe(
        images=len(opened.train),
        classes=len(opened.train.classes),
        pretrained=card.architecture if card else None,
        device=kind,
        model=model,
        multilabel=opened.train.multilabel,
        pixels=median_short_side(opened.train),
    )
    chosen = replace(chosen, init=start)
    if card is not None and card.preprocess is not None:
        # What the weights were trained with is what they go on with.
        stated = card.preprocess
        test = chosen.data.test if _resized(card.architecture, chosen) else stated.pipeline
        chosen = replace(chosen, data=replace(chosen.data, mean=stated.mean, std=stated.std, test=test))
        reasons = (*reasons, f"pixels are prepared as the weights say: {test}, mean {stated.mean}, std {stated.std}")
    return opened, with_overrides(chosen, overrides), reasons


def _resized(architecture: Architecture, recipe: Recipe) -> bool:
    return bool(recipe.image) and architecture.image != (recipe.image, recipe.image)


def _written(recipe: str | Path | Recipe) -> Recipe | None:
    if isinstance(recipe, Recipe):
        return recipe
    if not recipe:
        return None
    path = Path(recipe).expanduser()
    if not path.is_file():
        raise UserError(f"{path} is not a recipe file: `vitral show` prints one to start from.")
    return from_toml(path.read_text("utf-8"))


def _held_out(recipe: Recipe | None, overrides: Sequence[str]) -> float:
    words = [word for word in overrides if word.replace(" ", "").startswith("data.held_out=")]
    base = recipe or Recipe(data=DataRecipe())
    return with_overrides(base, words).data.held_out


def _new_folder(data: str | Path, recipe: Recipe) -> Path:
    """runs/NAME, or runs/NAME-2, ... where that exists: a run is never overwritten by another."""
    name = Path(str(data)).expanduser().name.split(".")[0] or "run"
    model = (
        Path(recipe.init).name.split(".")[0]
        if recipe.init
        else recipe.model.replace("/", "-").replace("+", "-").replace("@", "-")
    )
    base = f"{name}-{model}"
    number = 1
    while (folder := Path("runs") / (base if number == 1 else f"{base}-{number}")).exists():
        number += 1
    return folder
