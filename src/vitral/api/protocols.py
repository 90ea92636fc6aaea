"""`pretrain` and `finetune`: the paper's protocols, from a recipe to one row beside the paper's own number."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from vitral.api.data import open_to_choose
from vitral.api.run_folder import check_out, new_folder
from vitral.api.training import assumed_pixels, read_recipe
from vitral.architecture import ResNetConfig
from vitral.atomic import atomic_write
from vitral.checkpoints.card import Card
from vitral.checkpoints.weights import describe, located
from vitral.data.sources import DataSet
from vitral.errors import UserError
from vitral.events import EventHandler, Note, RunDirChosen, ignore_events
from vitral.models.device import check_device
from vitral.names import name_of
from vitral.paper import Reported, reported
from vitral.paper.results import PRETRAININGS
from vitral.recipe import Recipe, architecture_of, recipe_hash, with_overrides
from vitral.recipe_presets import Preset, hyperrule, is_preset, preset
from vitral.studies.protocol import (
    ProtocolResult,
    TrialConfig,
    choose_search_space,
    run_protocol,
    trial_configs,
)
from vitral.training.build import check_recipe
from vitral.training.parallel import init_distributed, on_rank0
from vitral.version import __version__


@dataclass(frozen=True)
class Printed:
    """A number of the paper, with the data set and the pre-training that it is for."""

    data: str
    pretraining: str
    number: Reported

    def as_dict(self) -> dict[str, Any]:
        return {"data": self.data, "pretraining": self.pretraining, **asdict(self.number)}


@dataclass(frozen=True)
class Protocol:
    """One row: what came out, at what cost, and what the paper got."""

    model: str
    data: str
    folder: str
    outcome: ProtocolResult
    reported: tuple[Printed, ...]
    readings: tuple[str, ...]  # where the paper is silent or contradicts itself

    def as_dict(self) -> dict[str, Any]:
        """One JSON line: the value with everything that is needed to trust or repeat it."""
        outcome, last = self.outcome, self.outcome.results[-1]
        return {
            "model": self.model,
            "data": self.data,
            "split": outcome.split,
            "score": outcome.mean,
            "spread": outcome.spread,
            "scores": list(outcome.scores),
            "seeds": [result.seed for result in outcome.results],
            "n": last.metrics["n"],
            "chosen": outcome.chosen.name,
            "chosen_on": outcome.dev if outcome.trials else "",
            "trials": [
                {"name": trial.name, "score": trial.score, "n": trial.result.metrics["n"]} for trial in outcome.trials
            ],
            "diverged": list(outcome.diverged),
            "training_flops": outcome.flops,
            "all_flops": outcome.all_flops,
            "device_hours": outcome.device_hours,
            "images_per_second_per_device": last.images_per_second / last.devices,
            "device": last.device,
            "devices": last.devices,
            "recipe": recipe_hash(outcome.chosen.recipe),
            "paper": [row.as_dict() for row in self.reported],
            "readings": list(self.readings),
            "version": __version__,
            "folder": self.folder,
        }


def pretrain(
    data: str | Path,
    *,
    model: str,
    recipe: str | Path | Recipe = "",
    overrides: Sequence[str] = (),
    sweep: Sequence[str] = (),
    seeds: int = 1,
    out: str | Path = "",
    device: str = "",
    on_event: EventHandler = ignore_events,
) -> Protocol:
    """Pre-train from scratch by a recipe of the paper, or by your own; a sweep and early stopping choose on data.dev.

    Without a recipe it is the paper's for ImageNet: Adam, warm-up, cosine decay, clipping, the head with a tanh layer.
    """
    book = _book(recipe or "paper:pretrain/imagenet", model)
    base = replace(book.recipe, model=model)
    return _followed(book, base, data, overrides, sweep, seeds, out, device, on_event)


def finetune(
    weights: str | Path,
    data: str | Path,
    *,
    recipe: str | Path | Recipe,
    overrides: Sequence[str] = (),
    sweep: Sequence[str] = (),
    seeds: int | None = None,
    out: str | Path = "",
    device: str = "",
    on_event: EventHandler = ignore_events,
) -> Protocol:
    """Fine-tune by the paper's protocol: the rate chosen on a dev split, then all of train, several seeds, test once.

    A ResNet also tries BiT's own recipe, and the better of the two on the dev split is kept (section 4.1). Without
    `seeds` there are as many as the recipe says.
    """
    card = describe(located(str(weights))).card
    book = _book(recipe, name_of(replace(card.architecture, classes=1000)))
    seen = card.preprocess or book.recipe.data  # pixels go on as the weights know them
    base = replace(book.recipe, init=str(weights), data=replace(book.recipe.data, mean=seen.mean, std=seen.std))
    return _followed(book, base, data, overrides, sweep, seeds, out, device, on_event)


def _book(recipe: str | Path | Recipe, model: str) -> Preset:
    """A recipe of the book, or one's own as if it stood there."""
    if isinstance(recipe, str) and is_preset(recipe):
        return preset(recipe, model)
    own = recipe if isinstance(recipe, Recipe) else read_recipe(recipe)
    return Preset("", own, {}, own.data.dev, 1, ())


def _followed(
    book: Preset,
    base: Recipe,
    data: str | Path,
    overrides: Sequence[str],
    sweep: Sequence[str],
    seeds: int | None,
    out: str | Path,
    device: str,
    on_event: EventHandler,
) -> Protocol:
    check_device(device)
    if seeds is not None and seeds < 1:
        raise UserError(f"seeds must be at least 1, not {seeds}.")
    check_out(out, data)
    base = with_overrides(base, overrides)
    dev = base.data.dev or book.dev
    opened, choosing = open_to_choose(data, base, dev)
    tried = trial_configs(base, choose_search_space(sweep, book.sweep, overrides))
    card = describe(located(base.init)).card if base.init else None
    rule = _of_bit(book, base, opened, card, sweep, overrides)
    if rule is not None:
        tried = [*(replace(one, name=one.name or book.name) for one in tried), rule]
    for candidate in tried:
        check_recipe(candidate.recipe, opened, card)
    world = init_distributed(device)
    folder = on_rank0(lambda: Path(out) if out else new_folder(data, base), world)
    assumed = assumed_pixels(overrides) if book.name and card and card.preprocess is None else ()
    for sentence in (*opened.messages, *book.readings, *assumed):
        on_event(Note(sentence))
    on_event(RunDirChosen(str(folder)))
    outcome = run_protocol(
        tried, opened, folder, choosing=choosing, dev=dev, seeds=seeds or book.seeds, device=device, on_event=on_event
    )
    followed = outcome.chosen.recipe
    architecture = card.architecture if card else architecture_of(followed, len(opened.train.classes))
    model = name_of(replace(architecture, classes=1000))
    found = Protocol(model, str(data), str(folder), outcome, printed(book.name, model), book.readings)
    on_rank0(lambda: write_row(folder / "protocol.json", found.as_dict()), world)
    return found


def write_row(path: Path, row: dict[str, Any]) -> None:
    with atomic_write(path) as aside:
        aside.write_text(json.dumps(row, indent=2) + "\n", "utf-8")


def _of_bit(
    book: Preset,
    base: Recipe,
    data: DataSet,
    card: Card | None,
    sweep: Sequence[str],
    overrides: Sequence[str],
) -> TrialConfig | None:
    """BiT's recipe for transfer, beside the paper's, where a ResNet is fine-tuned."""
    if card is None or not isinstance(card.architecture, ResNetConfig) or sweep:
        return None
    if not book.name.startswith("paper:finetune/"):
        return None
    name = hyperrule(len(data.train))
    rule = preset(name, base.model).recipe
    rule = replace(rule, init=base.init, data=replace(rule.data, mean=base.data.mean, std=base.data.std))
    return TrialConfig(name, with_overrides(rule, overrides))


def printed(recipe: str, model: str) -> tuple[Printed, ...]:
    """What the paper got with this model on the data set that the recipe is for, from each pre-training."""
    data = recipe.partition("paper:finetune/")[2].partition(":")[0].partition("-")[0]
    if data in ("", "vtab"):  # VTAB's number is a mean over tasks, and here there is one
        return ()
    plain = model.partition("@")[0]
    return tuple(Printed(data, source, row) for source in PRETRAININGS for row in reported(plain, source, data))
