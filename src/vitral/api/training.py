"""`train`: a folder of images in, a run folder with a model out."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vitral.api.data import known_data, open_to_train
from vitral.atomic import check_writable
from vitral.checkpoints.card import Card
from vitral.checkpoints.weights import describe, located
from vitral.data.sources import DataSet, median_short_side
from vitral.data.splits import SPLIT_NAMES
from vitral.errors import Interrupted as Interrupted
from vitral.errors import UserError
from vitral.events import EventHandler, Note, RunDirChosen, ignore_events
from vitral.models.device import check_device, default_device
from vitral.recipe import Recipe, from_toml, with_overrides
from vitral.recipe_defaults import FLIP_REASON, default_recipe
from vitral.recipe_presets import is_preset, preset
from vitral.studies.protocol import final_runs
from vitral.training.run import Result, run
from vitral.training.setup import check_recipe

_NARROWING = ("held_out", "dev", "subset", "subset_seed", "exclude")  # parts of recipe.data
_BEGUN = ("recipe.toml", "protocol.json", "sweep", "seed-*")  # what a run leaves in its folder
_EARLY = tuple(f"{key}=" for key in ("init", *(f"data.{name}" for name in _NARROWING)))


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
    on_event: EventHandler = ignore_events,
) -> Training:
    """Train on a data set; everything that is not said is chosen, and told to `on_event` as notes.

    `recipe` is a TOML file or a `Recipe`, `overrides` are words such as "optim.lr=0.01" on top of it or of what was
    chosen. A second call with the same `out` goes on where the first one stopped. After a signal `on_event` hears from
    another thread that the run will stop.
    """
    if seeds < 1:
        raise UserError(f"seeds must be at least 1, not {seeds}.")
    check_device(device)
    check_out(out, data)
    opened, chosen, reasons = choose_recipe(
        data, model=model, init=init, recipe=recipe, overrides=overrides, device=device
    )
    folder = Path(out) if out else new_folder(data, chosen)
    for sentence in (*opened.messages, *reasons):
        on_event(Note(sentence))
    on_event(RunDirChosen(str(folder)))
    if seeds == 1:
        return Training((run(chosen, opened, folder, device=device, on_event=on_event),), chosen)
    return Training(final_runs(chosen, opened, folder, seeds=seeds, device=device, on_event=on_event), chosen)


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
    written = recipe if isinstance(recipe, Recipe) else read_recipe(recipe, model) if recipe else None
    early = _early(written, overrides)
    opened = open_to_train(data, early)
    start = str(init) or early.init
    place = located(start) if start else None
    card = describe(place).card if place is not None else None
    if written is not None:
        chosen, reasons = replace(written, model=model or written.model, init=start), ("following the recipe given",)
    else:
        chosen, reasons = _suited(opened, card, model, _said(overrides), device)
        chosen = replace(chosen, init=start)
        if place is not None and card is not None:
            chosen, reasons = _prepared_as_before(chosen, reasons, place, card, early, overrides)
    chosen = with_overrides(chosen, overrides)
    check_recipe(chosen, opened, card)
    return opened, chosen, (*reasons, *_asked(overrides))


def _suited(
    opened: DataSet, card: Card | None, model: str, said: dict[str, str], device: str
) -> tuple[Recipe, tuple[str, ...]]:
    """What suits this data and these weights, and why."""
    return default_recipe(
        images=len(opened.train),
        classes=len(opened.train.classes),
        pretrained=card.architecture if card else None,
        device=device.split(":")[0] or default_device().type,
        model=model or said.get("model", ""),
        multilabel=opened.train.multilabel,
        pixels=median_short_side(opened.train),
        muon=_takes_muon(said),
        overrides=said,
    )


def _prepared_as_before(
    chosen: Recipe, reasons: tuple[str, ...], place: Path, card: Card, early: Recipe, overrides: Sequence[str]
) -> tuple[Recipe, tuple[str, ...]]:
    """What the weights were trained with is what they go on with: the data part of their run's recipe, else the pixels
    that their card states."""
    if (place / "recipe.toml").is_file():
        narrow = {name: getattr(early.data, name) for name in _NARROWING}
        chosen = replace(chosen, data=replace(read_recipe(place).data, **narrow))
        as_in_run = (
            f"images are prepared {'' if chosen.trainable == 'head' else 'and augmented '}as in the run it starts from"
        )
        return chosen, (*(reason for reason in reasons if reason != FLIP_REASON), as_in_run)
    stated = card.preprocess
    if stated is None:
        return chosen, (*reasons, *assumed_pixels(overrides))
    image = with_overrides(chosen, overrides).image
    if image:
        stated = stated.adapted(card.architecture.image, (image, image), len(stated.mean))
    test = stated.pipeline
    chosen = replace(chosen, data=replace(chosen.data, mean=stated.mean, std=stated.std, eval_transform=test))
    if _said(overrides).keys().isdisjoint(("data.mean", "data.std", "data.eval_transform")):
        prepared = f"pixels are prepared as the weights say: {test}, mean {stated.mean}, std {stated.std}"
        reasons = (*reasons, prepared)
    return chosen, reasons


def assumed_pixels(overrides: Sequence[str]) -> tuple[str, ...]:
    """What is said where weights do not state their preprocessing, and the user does not either."""
    missing = [name for name in ("mean", "std") if f"data.{name}" not in _said(overrides)]
    if not missing:
        return ()
    assumed = f"{' and '.join(missing)} 0.5 {'are' if missing[1:] else 'is'} assumed"
    fix = " ".join(f"data.{name}=..." for name in missing)
    return (f"the weights do not say how their pixels were prepared: {assumed} (else --set {fix})",)


def _asked(overrides: Sequence[str]) -> tuple[str, ...]:
    return (f"as you say: {', '.join(overrides)}",) if overrides else ()


def read_recipe(path: str | Path, model: str = "") -> Recipe:
    """A recipe by its name (paper:finetune/pets; some need the model's, too), from a TOML file or a run's folder."""
    if is_preset(str(path)):
        return preset(str(path), model).recipe
    file = Path(path).expanduser()
    file = file / "recipe.toml" if file.is_dir() else file
    if not file.is_file():
        raise UserError(f"{file} is not a recipe file: `vitral show` prints one to start from.")
    return from_toml(file.read_text("utf-8"))


def _early(recipe: Recipe | None, overrides: Sequence[str]) -> Recipe:
    """What must be known before the other keys are chosen: which images there are, and the weights to start from."""
    words = [word for word in overrides if word.replace(" ", "").startswith(_EARLY)]
    return with_overrides(recipe or Recipe(), words)


def _said(overrides: Sequence[str]) -> dict[str, str]:
    return {key.strip(): value.strip() for key, _, value in (word.partition("=") for word in overrides)}


def _takes_muon(said: dict[str, str]) -> bool:
    """Whether nothing that was said speaks against Muon, which needs whole matrices; masked patches were not tried with
    it."""
    goes = {"optim.name": "muon", "parallel": "ddp", "objective": "classes"}
    return all(said.get(key, value) == value for key, value in goes.items())


def check_out(out: str | Path, data: str | Path) -> None:
    """Refuse a run folder whose files would count as images of the data, would lie among files of others, or cannot be.

    Without `out` there will be one in runs/.
    """
    name, _, place = str(data).partition(":")
    source = place if name in known_data() else str(data)
    where = Path(source).expanduser()
    check_folder(out, [where] if source and where.is_dir() else [])


def check_folder(out: str | Path, data: Iterable[Path], begun: Sequence[str] = _BEGUN) -> None:
    """The same for several folders of data, there or not; `begun` are patterns of what a run to go on with has."""
    folder = Path(out or "runs")
    for part in (part for where in data for part in _image_folders(where)):
        if folder.resolve().is_relative_to(part.resolve()):
            raise UserError(
                f"the run folder {folder} lies in the data folder {part}, where its files would count as images: "
                "choose another with --out."
            )
    check_writable(folder / "recipe.toml")
    if out and folder.is_dir() and _holds_others(folder, begun):
        raise UserError(f"{folder} holds other files and no run to go on with: choose another folder with --out.")


def _image_folders(data: Path) -> list[Path]:
    """Where class folders are: in those of the splits, or in the data folder itself."""
    inside = data.iterdir() if data.is_dir() else ()
    return [path for path in inside if path.is_dir() and path.name.lower() in SPLIT_NAMES] or [data]


def _holds_others(folder: Path, begun: Sequence[str]) -> bool:
    if any(any(folder.glob(pattern)) for pattern in begun):
        return False
    names = (path.name for path in folder.iterdir() if not path.name.startswith("."))
    return any(name not in ("state", "tensorboard", "vtab-ids") for name in names)


def new_folder(data: str | Path, recipe: Recipe) -> Path:
    """runs/NAME, or runs/NAME-2, ... where that exists: a run is never overwritten by another."""
    name = Path(str(data)).expanduser().name.split(".")[0] or "run"
    start = Path(recipe.init)
    start = start.parent if start.name.startswith("seed-") else start
    model = start.name.split(".")[0] if recipe.init else re.sub("[/+@]", "-", recipe.model)
    base = f"{name}-{model}"
    number = 1
    while (folder := Path("runs") / (base if number == 1 else f"{base}-{number}")).exists():
        number += 1
    return folder
