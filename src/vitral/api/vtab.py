"""`vtab1k`: a model's score on VTAB-1k by the paper's protocol, task by task, with the paper's Table 9."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from vitral.api.data import check_folder, new_folder
from vitral.api.prediction import check_numbers
from vitral.api.protocols import ProtocolReport, changed_keys, run_readings, sweep_arguments
from vitral.api.recipes import assumed_pixels, normalised_as
from vitral.atomic import write_text
from vitral.checkpoints.card import Card
from vitral.checkpoints.hub import located
from vitral.checkpoints.weights import describe
from vitral.data.vtab import TASKS, VtabTask, find_task, open_task, write_ids
from vitral.display import displayed, with_deviation
from vitral.errors import UserError
from vitral.events import EventHandler, Note, RunDirChosen
from vitral.models.build import check_device
from vitral.names import name_of
from vitral.paper import VtabRow, table9
from vitral.recipe import Overrides, Recipe, Sweep, keys_of, override_list, with_overrides
from vitral.recipe_presets import Preset, get_preset
from vitral.studies import protocol
from vitral.training.build import check_recipe
from vitral.training.parallel import init_distributed, on_rank0

# Keys that the protocol fixes: they would have no effect, or another one than documented.
_FIXED_KEYS = {
    *("init", "model", "objective", "patience", "evaluate_every"),
    *("data.dev", "data.subset", "data.subset_seed", "data.exclude", "data.held_out"),
}
_COUNTS = (800, 200)  # training and validation images
_BEGUN = ("vtab.json", "sweep", *(f"{name}/seed-*" for name in TASKS))  # files that mark the folder of a suite


@dataclass(frozen=True, repr=False, kw_only=True)
class VtabResult(ProtocolReport):
    """The scores of the suite, the tasks that were evaluated, those that are missing, and the paper's rows."""

    tasks: tuple[VtabTask, ...]
    missing: dict[str, str]  # tasks that cannot be opened, with the reasons
    suite: protocol.SuiteResult
    paper: tuple[VtabRow, ...]  # the rows of the model first
    notes: tuple[str, ...]  # caveats about the numbers

    def summary(self) -> dict[str, str]:
        score = f"{self.suite.mean:.2%}"
        if self.suite.spread is not None:
            score = with_deviation(score, f"{self.suite.spread:.2%}", len(self.suite.seed_scores))
        groups = {name: f"{score:.2%}" for name, score in protocol.group_scores(self.suite.scores).items()}
        return {"score": score, "tasks": self.coverage, **groups, "model": self.model}

    @property
    def coverage(self) -> str:
        """ "17 of 19 tasks; missing: pets, dmlab" """
        missing = f"; missing: {', '.join(self.missing)}" if self.missing else ""
        return f"{len(self.tasks)} of {len(TASKS)} tasks{missing}"

    def as_dict(self) -> dict[str, Any]:
        suite = self.suite
        return {
            **self.score_dict(suite, next(iter(suite.results.values()))),
            "coverage": self.coverage,
            "groups": protocol.group_scores(suite.scores),
            "tasks": {task.task.name: self._task(task) for task in self.tasks},
            "missing": self.missing,
            "trials": [{"name": trial.name, "score": trial.score, "tasks": trial.scores} for trial in suite.trials],
            "paper": [self._paper(row) for row in self.paper],
            "notes": list(self.notes),
        }

    def _task(self, task: VtabTask) -> dict[str, Any]:
        results = self.suite.results[task.task.name]
        return {
            "group": task.task.group,
            "n": results[-1].metrics["n"],
            "score": self.suite.scores[task.task.name],
            "scores": [result.metrics["score"] for result in results],
            "train": len(task.train800),
            "val": len(task.val200),
            "order": task.order,
            "training_flops": results[0].flops,
            "device_hours": sum(result.device_hours for result in results),
            "images_per_second_per_device": results[-1].images_per_second / results[-1].devices,
        }

    def _paper(self, row: VtabRow) -> dict[str, Any]:
        """In percent, as printed; `mean` is over the tasks measured here, so that it can be compared."""
        measured = {task.task.name: row.scores[task.task.name] for task in self.tasks}
        return {
            "model": row.model,
            "pretraining": row.pretraining,
            "source": row.source,
            "label": "other recipe" if self.changed or not self.recipe.startswith("paper:finetune/vtab") else "",
            "tasks": measured,
            "groups": protocol.group_scores(measured),
            "mean": protocol.mean_score(measured),
            "mean_of_all": row.mean,
        }


def vtab1k(
    source: str | Path,
    root: str | Path,
    *,
    tasks: Sequence[str] = (),
    recipe: str = "paper:finetune/vtab",
    sweep: Sweep = (),
    fixed: bool = False,
    seeds: int = 1,
    out: str | Path = "",
    device: str = "",
    train_size: int = 800,
    val_size: int = 200,
    set: Overrides = (),
    on_event: EventHandler | None = None,
) -> VtabResult:
    """Evaluate a model on the 19 tasks of VTAB-1k, as the paper does.

    One recipe is used for all tasks: that of two learning rates by two lengths with the highest mean accuracy on the
    validation images of the tasks. Each test split is evaluated once per seed.

    Args:
        source: weights to start from: a file, a run folder, hf:owner/name or timm:name.
        root: folder with the data of each task, ROOT/TASK or ROOT/DATASET; missing tasks are skipped and listed.
        tasks: names of the tasks to run, such as pets clevr-count; by default all that are found.
        recipe: name of a recipe (`vitral list recipes`), such as paper:finetune/vtab:inception or bit:finetune/small.
        sweep: values to choose from instead of the recipe's own, such as optim.lr=0.003,0.01 steps=500,2500.
        fixed: use the learning rate and the length that the paper chose, without a sweep.
        seeds: number of runs of the chosen recipe on each task.
        out: the run folder; an interrupted run resumes if its folder is given again.
        device: cpu, cuda, cuda:1 or mps; chosen automatically by default.
        train_size: training images per task; with another number the scores are not VTAB-1k's.
        val_size: validation images per task; with another number the scores are not VTAB-1k's.
        set: keys of the recipe to change, such as steps=100 image=224.
        on_event: handler of the events of the runs.

    Returns:
        The score of each task, their mean, the cost, and the paper's own numbers.

    Raises:
        UserError: if an argument is wrong, or no task can be opened.
    """
    overrides, swept = override_list(set), override_list(sweep)
    check_device(device)
    check_numbers(seeds=seeds)
    check_folder(out, _data_folders(Path(root)), _BEGUN)
    card = describe(located(str(source))).card
    model = name_of(replace(card.architecture, classes=1000))
    preset = get_preset(recipe, model)
    if keys := [key for key in keys_of((*overrides, *swept)) if key in _FIXED_KEYS]:
        raise UserError(f"{keys[0]} is fixed by VTAB's protocol: omit it.")
    if fixed and swept:
        raise UserError("fixed uses the paper's choice instead of a sweep: omit one of the two.")
    space = {} if fixed else protocol.choose_search_space(swept, preset.sweep, overrides)
    base = _recipe(preset, source, card, overrides)
    tried = protocol.trial_configs(base, space)
    opened, missing = _open_tasks(tasks, Path(root), train_size, val_size)
    _check(tried, opened, card)
    world = init_distributed(device)
    folder = on_rank0(lambda: Path(out) if out else new_folder(root, tried[0].recipe), world)
    notes = _notes(opened, tried)
    assumed = assumed_pixels(overrides) if card.preprocess is None else ()
    happens, images = {"vtab", *sweep_arguments(preset, space, len(tried))}, len(opened[0].train1000)
    with displayed(on_event) as handler:
        for text in (*missing.values(), *notes, *run_readings(preset, base, space, happens, images), *assumed):
            handler(Note(text))
        handler(RunDirChosen(str(folder)))
        for task in opened:
            handler(Note(on_rank0(partial(_listed, task, folder, beside=(train_size, val_size) == _COUNTS), world)))
        suite = protocol.run_suite(tried, opened, folder, seeds=seeds, device=device, on_event=handler)
    chosen = suite.chosen.recipe
    readings = run_readings(preset, chosen, space, happens, images)
    changed = changed_keys(preset, chosen, swept, space)
    followed = {"readings": readings, "recipe": recipe, "overrides": (*overrides, *swept), "changed": changed}
    numbers = {"tasks": tuple(opened), "missing": missing, "suite": suite, "paper": paper_rows(model), "notes": notes}
    result = VtabResult(model=model, data=str(root), folder=str(folder), **followed, **numbers)
    on_rank0(lambda: write_text(folder / "vtab.json", json.dumps(result.as_dict(), indent=2) + "\n"), world)
    return result


def _data_folders(root: Path) -> list[Path]:
    """The folders that may hold images of the tasks; a run folder must not lie in one of them."""
    return [
        root / name for name in dict.fromkeys(name for task in TASKS.values() for name in (task.name, task.dataset))
    ]


def _recipe(preset: Preset, source: str | Path, card: Card, overrides: Sequence[str]) -> Recipe:
    """The preset with these weights and their normalisation."""
    # Whatever the preset, a task starts from a new head, even if it has the classes of the weights.
    recipe = replace(preset.recipe, init=str(source), reset_head=True)
    return with_overrides(normalised_as(recipe, card), overrides)


def _open_tasks(names: Sequence[str], root: Path, train: int, val: int) -> tuple[list[VtabTask], dict[str, str]]:
    """The tasks whose data is found, in the paper's order, and the reasons for the others."""
    if not root.is_dir():
        raise UserError(f"{root} is not a folder: pass the one that contains the data of the tasks.")
    selected = {find_task(name).name for name in names} if names else set(TASKS)
    opened: list[VtabTask] = []
    missing: dict[str, str] = {}
    for name in TASKS:
        if name not in selected:
            continue
        try:
            opened.append(open_task(name, root, train=train, val=val))
        except UserError as error:
            missing[name] = str(error)
    if not opened:
        reason = next(iter(missing.values()))
        raise UserError(f"none of the tasks can be opened, the first because {reason}")
    return opened, missing


def _check(tried: Sequence[protocol.TrialConfig], tasks: Sequence[VtabTask], card: Card) -> None:
    """Refuse recipes that cannot work before there is a run folder; tasks differ in their pipelines alone."""
    for task in {(task.task.flip, task.task.crop): task for task in tasks}.values():
        for candidate in tried:
            recipe = protocol.for_task(candidate.recipe, task.task)
            # A batch shrinks to the number of images, which is noted.
            batch = min(recipe.batch, len(task.train800))
            check_recipe(replace(recipe, batch=batch, micro_batch=0), task.with_dev_split(), card)


def _notes(tasks: Sequence[VtabTask], tried: Sequence[protocol.TrialConfig]) -> tuple[str, ...]:
    notes = list(dict.fromkeys(note for task in tasks for note in task.notes))
    batch = max(candidate.recipe.batch for candidate in tried)
    images = min(len(task.train800 if len(tried) > 1 else task.train1000) for task in tasks)
    if batch > images:
        notes.append(f"A batch of {batch} is more than {images} training images: the batch is as many as there are.")
    counts = {(len(task.train800), len(task.val200)) for task in tasks}
    if counts != {_COUNTS}:
        few = " and ".join(f"{train} + {val}" for train, val in sorted(counts))
        notes.append(f"Trained on {few} images, not on VTAB-1k's 800 + 200: the numbers are not VTAB's.")
    return tuple(notes)


def _listed(task: VtabTask, folder: Path, beside: bool) -> str:
    """List the images of a task next to the data, or in the run folder if that is not writable or not VTAB's."""
    in_run = folder / "vtab-ids"
    if beside:
        try:
            return f"{write_ids(task)} {task.order}"
        except OSError:
            return f"{write_ids(task, in_run)} {task.order} ({task.root} is not writable)"
    return f"{write_ids(task, in_run)} {task.order}"


def paper_rows(model: str) -> tuple[VtabRow, ...]:
    """Table 9, the rows of the model first."""
    return tuple(sorted(table9(), key=lambda row: row.model != model.partition("@")[0]))
