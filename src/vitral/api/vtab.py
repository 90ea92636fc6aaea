"""`vtab1k`: a model's score on VTAB-1k by the paper's protocol, task by task beside the paper's Table 9."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from vitral.api.protocols import write_row
from vitral.api.run_folder import check_folder, new_folder
from vitral.checkpoints.card import Card
from vitral.checkpoints.weights import describe, located
from vitral.data.vtab import TASKS, VtabTask, find_task, open_task, write_ids
from vitral.errors import UserError
from vitral.events import EventHandler, Note, RunDirChosen, ignore_events
from vitral.models.device import check_device
from vitral.names import name_of
from vitral.paper import VtabRow, table9
from vitral.recipe import Recipe, recipe_hash, with_overrides
from vitral.recipe_presets import Preset, preset
from vitral.studies.protocol import TrialConfig, choose_search_space, trial_configs
from vitral.studies.vtab import SuiteResult, for_task, group_scores, mean_score, run_suite
from vitral.training.build import check_recipe
from vitral.training.parallel import init_distributed, on_rank0
from vitral.version import __version__

# What the protocol itself decides: these keys would do nothing here, or something else than they say.
_SETTLED = {
    *("init", "model", "objective", "patience", "evaluate_every"),
    *("data.dev", "data.subset", "data.subset_seed", "data.exclude", "data.held_out"),
}
_COUNTS = (800, 200)  # images to train on and to choose on
_BEGUN = ("vtab.json", "sweep", *(f"{name}/seed-*" for name in TASKS))  # what a suite leaves in its folder


@dataclass(frozen=True)
class VtabScore:
    """The suite's result with the tasks it was measured on, those that are missing, and the paper's rows."""

    model: str
    data: str
    folder: str
    tasks: tuple[VtabTask, ...]
    missing: dict[str, str]  # tasks that were asked for and cannot be opened, and why
    suite: SuiteResult
    paper: tuple[VtabRow, ...]  # the model's own first
    readings: tuple[str, ...]  # where the paper is silent
    notes: tuple[str, ...]  # what to know before the numbers are trusted

    @property
    def coverage(self) -> str:
        """ "17 of 19 tasks; missing: pets, dmlab" """
        missing = f"; missing: {', '.join(self.missing)}" if self.missing else ""
        return f"{len(self.tasks)} of {len(TASKS)} tasks{missing}"

    def as_dict(self) -> dict[str, Any]:
        """One JSON object: the score with everything that is needed to trust or repeat it."""
        suite, scores = self.suite, self.suite.scores
        first = next(iter(suite.results.values()))
        return {
            "model": self.model,
            "data": self.data,
            "score": suite.mean,
            "spread": suite.spread,
            "scores": list(suite.seed_scores),
            "seeds": [result.seed for result in first],
            "coverage": self.coverage,
            "groups": group_scores(scores),
            "tasks": {task.task.name: self._task(task) for task in self.tasks},
            "missing": self.missing,
            "chosen": suite.chosen.name,
            "trials": [{"name": trial.name, "score": trial.score, "tasks": trial.scores} for trial in suite.trials],
            "diverged": list(suite.diverged),
            "training_flops": suite.flops,
            "all_flops": suite.all_flops,
            "device_hours": suite.device_hours,
            "device": first[-1].device,
            "devices": first[-1].devices,
            "recipe": recipe_hash(suite.chosen.recipe),
            "paper": [self._paper(row) for row in self.paper],
            "readings": list(self.readings),
            "notes": list(self.notes),
            "version": __version__,
            "folder": self.folder,
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
            "tasks": measured,
            "groups": group_scores(measured),
            "mean": mean_score(measured),
            "mean_of_all": row.mean,
        }


def vtab1k(
    weights: str | Path,
    root: str | Path,
    *,
    tasks: Sequence[str] = (),
    recipe: str = "paper:finetune/vtab",
    overrides: Sequence[str] = (),
    sweep: Sequence[str] = (),
    fixed: bool = False,
    seeds: int = 1,
    out: str | Path = "",
    device: str = "",
    train: int = _COUNTS[0],
    val: int = _COUNTS[1],
    on_event: EventHandler = ignore_events,
) -> VtabScore:
    """Fine-tune on each task of VTAB-1k whose data lies under `root`, with one recipe for all, and measure test once.

    What of the recipe is used is chosen by the mean accuracy on the tasks' validation images: two rates by two lengths,
    or `sweep`; `fixed` takes what the paper chose. Other counts than 800 and 200 images are for trying things out.
    """
    check_device(device)
    if seeds < 1:
        raise UserError(f"seeds must be at least 1, not {seeds}.")
    check_folder(out, _data_folders(Path(root)), _BEGUN)
    card = describe(located(str(weights))).card
    model = name_of(replace(card.architecture, classes=1000))
    book = preset(recipe, model)
    _check_settled((*overrides, *sweep))
    tried = _candidates(_recipe(book, weights, card, overrides), book, overrides, sweep, fixed)
    opened, missing = _opened(tasks, Path(root), train, val)
    _check(tried, opened, card)
    world = init_distributed(device)
    folder = on_rank0(lambda: Path(out) if out else new_folder(root, tried[0].recipe), world)
    notes = _notes(opened, tried)
    for sentence in (*missing.values(), *notes, *book.readings):
        on_event(Note(sentence))
    on_event(RunDirChosen(str(folder)))
    for task in opened:
        on_event(Note(on_rank0(partial(_listed, task, folder, beside=(train, val) == _COUNTS), world)))
    suite = run_suite(tried, opened, folder, seeds=seeds, device=device, on_event=on_event)
    found = VtabScore(
        model, str(root), str(folder), tuple(opened), missing, suite, paper_rows(model), book.readings, notes
    )
    on_rank0(lambda: write_row(folder / "vtab.json", found.as_dict()), world)
    return found


def _data_folders(root: Path) -> list[Path]:
    """Where the tasks' images are looked for; beside these folders a run is in nobody's way."""
    return [
        root / name for name in dict.fromkeys(name for task in TASKS.values() for name in (task.name, task.dataset))
    ]


def _check_settled(words: Sequence[str]) -> None:
    for key in (word.partition("=")[0].strip() for word in words):
        if key in _SETTLED:
            raise UserError(f"{key} is settled by VTAB's protocol: leave it out.")


def _recipe(book: Preset, weights: str | Path, card: Card, overrides: Sequence[str]) -> Recipe:
    """The paper's, over these weights and the pixel values they know."""
    data = book.recipe.data
    if card.preprocess is not None:
        data = replace(data, mean=card.preprocess.mean, std=card.preprocess.std)
    return with_overrides(replace(book.recipe, init=str(weights), data=data), overrides)


def _candidates(
    recipe: Recipe, book: Preset, overrides: Sequence[str], sweep: Sequence[str], fixed: bool
) -> list[TrialConfig]:
    """What is tried: the sweep that was asked for, else the book's without the keys that overrides set."""
    if fixed and sweep:
        raise UserError("fixed takes the paper's choice and a sweep makes another: ask for one of the two.")
    return trial_configs(recipe, {} if fixed else choose_search_space(sweep, book.sweep, overrides))


def _opened(names: Sequence[str], root: Path, train: int, val: int) -> tuple[list[VtabTask], dict[str, str]]:
    """The tasks whose data is there, in the paper's order, and why the others are not."""
    if not root.is_dir():
        raise UserError(f"{root} is no folder: name the one that holds the tasks' data.")
    asked = {find_task(name).name for name in names} if names else set(TASKS)
    opened: list[VtabTask] = []
    missing: dict[str, str] = {}
    for name in TASKS:
        if name not in asked:
            continue
        try:
            opened.append(open_task(name, root, train=train, val=val))
        except UserError as error:
            missing[name] = str(error)
    if not opened:
        reason = next(iter(missing.values()))
        raise UserError(f"none of the tasks can be opened, the first because {reason}")
    return opened, missing


def _check(tried: Sequence[TrialConfig], tasks: Sequence[VtabTask], card: Card) -> None:
    """What cannot work is said before there is a run folder; tasks differ in their pipelines alone."""
    for task in {(task.task.flip, task.task.crop): task for task in tasks}.values():
        for candidate in tried:
            recipe = for_task(candidate.recipe, task.task)
            # A batch shrinks to the images there are, and that is told.
            batch = min(recipe.batch, len(task.train800))
            check_recipe(replace(recipe, batch=batch, micro_batch=0), task.with_dev_split(), card)


def _notes(tasks: Sequence[VtabTask], tried: Sequence[TrialConfig]) -> tuple[str, ...]:
    notes = list(dict.fromkeys(note for task in tasks for note in task.notes))
    batch = max(candidate.recipe.batch for candidate in tried)
    images = min(len(task.train800 if len(tried) > 1 else task.train1000) for task in tasks)
    if batch > images:
        notes.append(f"A batch of {batch} is more than {images} training images: a step sees as many as there are.")
    counts = {(len(task.train800), len(task.val200)) for task in tasks}
    if counts != {_COUNTS}:
        few = " and ".join(f"{train} + {val}" for train, val in sorted(counts))
        notes.append(f"Trained on {few} images, not on VTAB-1k's 800 + 200: the numbers are not VTAB's.")
    return tuple(notes)


def _listed(task: VtabTask, folder: Path, beside: bool) -> str:
    """Which images the task takes, listed beside the data; in the run folder where that cannot be, or is not VTAB's."""
    own = folder / "vtab-ids"
    if beside:
        try:
            return f"{write_ids(task)} {task.order}"
        except OSError:
            return f"{write_ids(task, own)} {task.order} ({task.root} cannot be written)"
    return f"{write_ids(task, own)} {task.order}"


def paper_rows(model: str) -> tuple[VtabRow, ...]:
    """Table 9, the model's own rows first."""
    return tuple(sorted(table9(), key=lambda row: row.model != model.partition("@")[0]))
