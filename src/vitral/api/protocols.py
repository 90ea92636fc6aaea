"""`pretrain` and `finetune`: the paper's protocols, each result with the paper's own number."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from vitral.api.data import check_out, new_folder, open_to_choose
from vitral.api.evaluation import real_scores
from vitral.api.prediction import check_numbers
from vitral.api.recipes import assumed_pixels, normalised_as, read_recipe
from vitral.architecture import ResNetConfig
from vitral.atomic import write_text
from vitral.checkpoints.card import Card
from vitral.checkpoints.hub import located
from vitral.checkpoints.weights import describe
from vitral.data.sources import DataSet
from vitral.display import SummaryRepr, displayed, with_deviation
from vitral.events import EventHandler, Note, RunDirChosen
from vitral.models.build import check_device
from vitral.names import name_of
from vitral.paper import PRETRAININGS, Reported, reported
from vitral.recipe import (
    Overrides,
    Recipe,
    Sweep,
    architecture_of,
    check_given_once,
    override_list,
    recipe_hash,
    steps_of_run,
    with_overrides,
)
from vitral.recipe_presets import Preset, get_preset, hyperrule, is_preset
from vitral.studies import protocol
from vitral.training.build import FREE_KEYS, check_recipe, flip_warning
from vitral.training.optimizer import warmup_steps
from vitral.training.parallel import init_distributed, on_rank0
from vitral.training.run import RunResult
from vitral.version import __version__

_SAME_RECIPE = {*FREE_KEYS, "seed", "evaluate_every"}  # keys that change no result but by chance


@dataclass(frozen=True)
class PaperNumber:
    """A number of the paper, with its data set and pre-training."""

    data: str
    pretraining: str
    number: Reported
    label: str = ""  # "other recipe" if the run does not follow the one that gave the number

    def as_dict(self) -> dict[str, Any]:
        return {"data": self.data, "pretraining": self.pretraining, "label": self.label, **asdict(self.number)}


@dataclass(frozen=True, repr=False, kw_only=True)
class ProtocolReport(SummaryRepr):
    """The common fields of protocol results: what was run, and how it differs from the paper."""

    model: str
    data: str
    folder: str
    readings: tuple[str, ...]  # where the paper is silent or contradicts itself, as far as they are true of the runs
    recipe: str  # name of the preset, or ""
    overrides: tuple[str, ...]  # of its keys, and the user's own sweep, as key=value
    changed: tuple[str, ...]  # keys in which the runs differ from the preset

    def score_dict(
        self, outcome: protocol.ProtocolRuns | protocol.SuiteResult, runs: Sequence[RunResult]
    ) -> dict[str, Any]:
        """JSON-ready: the score with everything that is needed to trust or repeat it; of the runs, one per seed."""
        return {
            "model": self.model,
            "data": self.data,
            "score": outcome.mean,
            "spread": outcome.spread,
            "scores": list(outcome.seed_scores),
            "seeds": [result.seed for result in runs],
            "chosen": outcome.chosen.name,
            "diverged": list(outcome.diverged),
            "training_flops": outcome.flops,
            "all_flops": outcome.all_flops,
            "device_hours": outcome.device_hours,
            "device": runs[-1].device,
            "devices": runs[-1].devices,
            "recipe": recipe_hash(outcome.chosen.recipe),
            "preset": self.recipe,
            "overrides": list(self.overrides),
            "changed": list(self.changed),
            "readings": list(self.readings),
            "version": __version__,
            "folder": self.folder,
        }


@dataclass(frozen=True, repr=False, kw_only=True)
class ProtocolResult(ProtocolReport):
    """The result of a protocol: scores, cost, and the paper's own numbers."""

    outcome: protocol.ProtocolRuns
    reported: tuple[PaperNumber, ...]
    real: tuple[float, ...] = ()  # ImageNet's ReaL accuracy of each seed, if the data has real.json
    real_n: int = 0  # images with a ReaL label

    def summary(self) -> dict[str, str]:
        outcome = self.outcome
        metrics = outcome.results[-1].metrics
        score = f"{-outcome.mean:.4f}" if "masked_loss" in metrics else f"{outcome.mean:.2%}"
        if outcome.spread is not None and "masked_loss" not in metrics:
            score = with_deviation(score, f"{outcome.spread:.2%}", len(outcome.results))
        runs = {"seeds": f"{len(outcome.results):,}", "model": self.model, "data": self.data, "folder": self.folder}
        return {"masked_loss" if "masked_loss" in metrics else "score": score, "n": f"{metrics['n']:,}", **runs}

    def as_dict(self) -> dict[str, Any]:
        outcome, last = self.outcome, self.outcome.results[-1]
        trials = [(trial.name, trial.score, trial.result.metrics["n"]) for trial in outcome.trials]
        return {
            **self.score_dict(outcome, outcome.results),
            "split": outcome.split,
            "n": last.metrics["n"],
            "real": list(self.real),
            "real_n": self.real_n,
            "chosen_on": outcome.dev if outcome.trials else "",
            "trials": [{"name": name, "score": score, "n": n} for name, score, n in trials],
            "images_per_second_per_device": last.images_per_second / last.devices,
            "paper": [row.as_dict() for row in self.reported],
        }


def pretrain(
    data: str | Path,
    *,
    model: str,
    recipe: str | Path | Recipe = "paper:pretrain/imagenet",
    sweep: Sweep = (),
    seeds: int = 1,
    out: str | Path = "",
    device: str = "",
    set: Overrides = (),
    on_event: EventHandler | None = None,
) -> ProtocolResult:
    """Pre-train from scratch as the paper does: Table 3, masked patches, sweeps.

    A sweep and early stopping use the dev split of the recipe, data.dev.

    Args:
        data: any data that `vitral train` accepts, cifar10:FOLDER, imagenet:FOLDER, ...
        model: name of the model, such as ViT-B/16; with the recipe's name it selects the row of the table.
        recipe: name of a recipe (`vitral list recipes`), or a TOML file.
        sweep: values to choose from on the dev split, such as regularization.dropout=0,0.1 optim.weight_decay=0.03,0.1.
        seeds: number of runs of the chosen recipe.
        out: the run folder; an interrupted run resumes if its folder is given again.
        device: cpu, cuda, cuda:1 or mps; chosen automatically by default.
        set: keys of the recipe to change, such as data.subset=9000000 data.exclude=FILE data.dev=0.01 patience=3.
        on_event: handler of the events of the runs.

    Returns:
        Scores, cost, and the paper's own numbers.

    Raises:
        UserError: if an argument is wrong, or the data cannot be trained on.
    """
    overrides = override_list(set)
    check_given_once({"model": model}, overrides)
    preset = _preset(recipe, model)
    base = replace(preset.recipe, model=model)
    with displayed(on_event) as handler:
        return _follow(preset, base, data, overrides, override_list(sweep), seeds, out, device, handler)


def finetune(
    source: str | Path,
    data: str | Path,
    *,
    recipe: str | Path | Recipe,
    sweep: Sweep = (),
    seeds: int | None = None,
    out: str | Path = "",
    device: str = "",
    set: Overrides = (),
    on_event: EventHandler | None = None,
) -> ProtocolResult:
    """Fine-tune as the paper does: learning-rate sweep, several seeds, test once.

    The learning rate is chosen on a dev split, then all of train is used. A ResNet also tries BiT's own recipe, and the
    better of the two on the dev split is kept (section 4.1).

    Args:
        source: weights to start from: a file, a run folder, hf:owner/name or timm:name.
        data: any data that `vitral train` accepts, pets:FOLDER, cifar100:FOLDER, ...
        recipe: name of a recipe (`vitral list recipes`), such as paper:finetune/pets, or a TOML file.
        sweep: values to choose from instead of the recipe's own, such as optim.lr=0.003,0.01.
        seeds: number of runs of the chosen recipe; by default the recipe's own number.
        out: the run folder; an interrupted run resumes if its folder is given again.
        device: cpu, cuda, cuda:1 or mps; chosen automatically by default.
        set: keys of the recipe to change, such as steps=100 image=224.
        on_event: handler of the events of the runs.

    Returns:
        Scores, cost, and the paper's own numbers.

    Raises:
        UserError: if an argument is wrong, or the data cannot be trained on.
    """
    overrides = override_list(set)
    check_given_once({"init": source}, overrides)
    card = describe(located(str(source))).card
    preset = _preset(recipe, name_of(replace(card.architecture, classes=1000)))
    base = normalised_as(replace(preset.recipe, init=str(source)), card)
    with displayed(on_event) as handler:
        return _follow(preset, base, data, overrides, override_list(sweep), seeds, out, device, handler)


def _preset(recipe: str | Path | Recipe, model: str) -> Preset:
    """A preset by its name, or the user's recipe as one."""
    if isinstance(recipe, str) and is_preset(recipe):
        return get_preset(recipe, model)
    given = recipe if isinstance(recipe, Recipe) else read_recipe(recipe)
    return Preset("", given, {}, given.data.dev, 1, ())


def _follow(
    preset: Preset,
    base: Recipe,
    data: str | Path,
    overrides: Sequence[str],
    sweep: Sequence[str],
    seeds: int | None,
    out: str | Path,
    device: str,
    on_event: EventHandler,
) -> ProtocolResult:
    check_device(device)
    name = preset.name
    check_numbers(seeds=preset.seeds if seeds is None else seeds)
    check_out(out, data)
    base = with_overrides(base, overrides)
    dev = base.data.dev or preset.dev
    opened, choosing = open_to_choose(data, base, dev, uses_val=preset.uses_val)
    space = protocol.choose_search_space(sweep, preset.sweep, overrides)
    tried = protocol.trial_configs(base, space)
    card = describe(located(base.init)).card if base.init else None
    bit = _bit_candidate(preset, base, opened, card, sweep, overrides)
    if bit is not None:
        tried = [*(replace(candidate, name=candidate.name or preset.name) for candidate in tried), bit]
    happens = {*sweep_arguments(preset, space, len(tried)), *(["bit trial"] if bit else [])}
    readings = run_readings(preset, base, space, happens, len(opened.train))
    for candidate in tried:
        check_recipe(candidate.recipe, opened, card)
    world = init_distributed(device)
    folder = on_rank0(lambda: Path(out) if out else new_folder(data, base), world)
    assumed = assumed_pixels(overrides) if preset.name and card and card.preprocess is None else ()
    for text in (*opened.messages, *readings, *assumed, *flip_warning(tried[0].recipe, opened)):
        on_event(Note(text))
    on_event(RunDirChosen(str(folder)))
    outcome = protocol.run_protocol(
        tried, opened, folder, choosing=choosing, dev=dev, seeds=seeds or preset.seeds, device=device, on_event=on_event
    )
    recipe = outcome.chosen.recipe
    if bit is not None and outcome.chosen.name == bit.name:
        preset, space = get_preset(bit.name, base.model), {}
    readings = run_readings(preset, recipe, space, happens, len(opened.train))
    changed = changed_keys(preset, recipe, sweep, space)
    architecture = card.architecture if card else architecture_of(recipe, len(opened.train.classes))
    model = name_of(replace(architecture, classes=1000))
    folders, classes = [run.folder for run in outcome.results], len(opened.train.classes)
    real, real_n = on_rank0(lambda: real_scores(folders, data, classes, device, on_event), world) if card else ((), 0)
    rows = paper_numbers(name, model, "other recipe" if changed else "", real=bool(real))
    followed = {"readings": readings, "recipe": name, "overrides": (*overrides, *sweep), "changed": changed}
    numbers = {"outcome": outcome, "reported": rows, "real": real, "real_n": real_n}
    result = ProtocolResult(model=model, data=str(data), folder=str(folder), **followed, **numbers)
    on_rank0(lambda: write_text(folder / "protocol.json", json.dumps(result.as_dict(), indent=2) + "\n"), world)
    return result


def sweep_arguments(preset: Preset, space: protocol.SearchSpace, tried: int) -> list[str]:
    """What `Reading.requires` calls a sweep, if there is one."""
    return ["sweep", *(["preset sweep"] if space == preset.sweep else [])] if tried > 1 else []


def run_readings(
    preset: Preset, recipe: Recipe, swept: Collection[str], happens: Collection[str], images: int
) -> tuple[str, ...]:
    """The readings that are true of a run on this many training images, which may be too short for its warmup."""
    schedule, steps = recipe.schedule, steps_of_run(recipe, images / min(recipe.batch, images))
    warmup = warmup_steps(schedule.warmup, steps, schedule.full_steps)
    if not preset.name or schedule.warmup < 1 or warmup == schedule.warmup:
        return preset.true_readings(recipe, swept, happens)
    recipe = replace(recipe, schedule=replace(schedule, warmup=warmup))
    sentence = f"Warmup takes {warmup:g} of {steps:,} steps, in proportion to the full run: {schedule.warmup:g} of them"
    return (*preset.true_readings(recipe, swept, happens), f"{sentence} would not fit.")


def changed_keys(preset: Preset, recipe: Recipe, sweep: Sequence[str], space: protocol.SearchSpace) -> tuple[str, ...]:
    """The keys in which a run differs from its preset, or that were swept over instead of the preset's own."""
    own_sweep = space if sweep else {}
    by_preset = set(space) - set(own_sweep)
    return tuple(sorted(preset.changed(recipe, own_sweep) - by_preset - _SAME_RECIPE))


def _bit_candidate(
    preset: Preset, base: Recipe, data: DataSet, card: Card | None, sweep: Sequence[str], overrides: Sequence[str]
) -> protocol.TrialConfig | None:
    """BiT's transfer recipe, tried in addition to the paper's if a ResNet is fine-tuned."""
    if card is None or not isinstance(card.architecture, ResNetConfig) or sweep:
        return None
    if not preset.name.startswith("paper:finetune/"):
        return None
    name = hyperrule(len(data.train))
    recipe = get_preset(name, base.model).recipe
    recipe = replace(recipe, init=base.init, data=replace(recipe.data, mean=base.data.mean, std=base.data.std))
    return protocol.TrialConfig(name, with_overrides(recipe, overrides))


def paper_numbers(recipe: str, model: str, label: str, *, real: bool = False) -> tuple[PaperNumber, ...]:
    """The paper's numbers for this model on the recipe's data set, from each pre-training; with those for ReaL."""
    data = recipe.partition("paper:finetune/")[2].partition(":")[0].partition("-")[0]
    if data in ("", "vtab"):  # VTAB's number is a mean over tasks, and this is one task
        return ()
    plain, names = model.partition("@")[0], (data, "real") if real else (data,)
    return tuple(
        PaperNumber(name, source, row, label)
        for name in names
        for source in PRETRAININGS
        for row in reported(plain, source, name)
    )
