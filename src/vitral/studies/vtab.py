"""VTAB-1k: one recipe for all tasks, selected on their 200 validation images; final runs on 1,000, test per seed."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vitral.data.vtab import TASKS, TaskSpec, VtabTask
from vitral.events import EventHandler, Note
from vitral.recipe import Recipe
from vitral.studies.protocol import TrialConfig, evaluated_once, final_runs, select_best, trial_folder
from vitral.training.run import RunResult, run

_CROPS = re.compile(r"(resize|resize_\w+|pad|\w+_crop)\(.*\)")


@dataclass(frozen=True)
class SuiteTrial:
    """Runs with one configuration on all tasks, evaluated on their validation images."""

    name: str
    results: Mapping[str, RunResult]  # by task

    @property
    def scores(self) -> dict[str, float]:
        return {name: result.metrics["score"] for name, result in self.results.items()}

    @property
    def score(self) -> float:
        return mean_score(self.scores)


@dataclass(frozen=True)
class SuiteResult:
    """The selected configuration, its trials, and the final runs per task and seed. Scores are between 0 and 1."""

    chosen: TrialConfig
    trials: tuple[SuiteTrial, ...]
    results: Mapping[str, tuple[RunResult, ...]]
    diverged: tuple[str, ...]  # names of trials without a score on some task

    @property
    def scores(self) -> dict[str, float]:
        """By task, the mean over seeds."""
        return {
            name: statistics.fmean(result.metrics["score"] for result in results)
            for name, results in self.results.items()
        }

    @property
    def seed_scores(self) -> tuple[float, ...]:
        """By seed, the mean over tasks."""
        seeds = zip(*self.results.values(), strict=True)
        return tuple(statistics.fmean(result.metrics["score"] for result in results) for results in seeds)

    @property
    def mean(self) -> float:
        """Mean score over tasks and seeds."""
        return statistics.fmean(self.seed_scores)

    @property
    def spread(self) -> float | None:
        """Standard deviation of the mean score over seeds; None for one seed."""
        return statistics.stdev(self.seed_scores) if len(self.seed_scores) > 1 else None

    @property
    def flops(self) -> float:
        """Of one final run per task, without the trials."""
        return sum(results[0].flops for results in self.results.values())

    @property
    def all_flops(self) -> float:
        """Of all runs, trials included."""
        return sum(result.flops for result in self._all_runs())

    @property
    def device_hours(self) -> float:
        """Of all runs, trials included."""
        return sum(result.device_hours for result in self._all_runs())

    def _all_runs(self) -> Iterable[RunResult]:
        trial_runs = (result for trial in self.trials for result in trial.results.values())
        return (*trial_runs, *(result for results in self.results.values() for result in results))


def mean_score(scores: Mapping[str, float]) -> float:
    """VTAB's score: the plain mean over tasks, whatever their groups."""
    return statistics.fmean(scores.values())


def group_scores(scores: Mapping[str, float]) -> dict[str, float]:
    """The mean over the tasks of each group, in the order of the tasks."""
    groups = dict.fromkeys(TASKS[name].group for name in TASKS if name in scores)
    return {
        group: statistics.fmean(score for name, score in scores.items() if TASKS[name].group == group)
        for group in groups
    }


def for_task(recipe: Recipe, task: TaskSpec) -> Recipe:
    """The recipe without augmentations that would change the task's labels: flips or crops."""
    steps = [step.strip() for step in recipe.data.train_transform.split("|")]
    if not task.flip:
        steps = [step for step in steps if step != "flip"]
    if not task.crop and any(_CROPS.fullmatch(step) for step in steps):
        first = next(index for index, step in enumerate(steps) if _CROPS.fullmatch(step))
        kept = [step for step in steps[first:] if not _CROPS.fullmatch(step)]
        steps = [*steps[:first], "resize({size})", *kept]
    return replace(recipe, data=replace(recipe.data, train_transform="|".join(steps)))


def run_suite(
    configs: Sequence[TrialConfig],
    tasks: Sequence[VtabTask],
    folder: Path,
    *,
    seeds: int = 1,
    device: str = "",
    on_event: EventHandler,
) -> SuiteResult:
    """Select one configuration for all tasks on their validation images, then train it on 1,000 images of each task.

    The test splits are evaluated at the end of the final runs and never before. Every run has its own folder: the same
    call resumes where an earlier one stopped.

    Args:
        configs: the configurations to select from; a single one needs no trial.
        tasks: the tasks.
        folder: where the runs are written.
        seeds: final runs per task.
        device: where to compute; by default a GPU where there is one.
        on_event: called with notes and the events of the runs.

    Returns:
        The trials and the final runs.
    """

    def run_trial(config: TrialConfig) -> SuiteTrial:
        return _run_trial(config, tasks, trial_folder(folder, config), device, on_event)

    chosen, trials, diverged = select_best(configs, run_trial, on_event)
    if trials:
        on_event(Note(f"selected on the validation images of {len(tasks)} tasks: {chosen.name}"))
    results: dict[str, tuple[RunResult, ...]] = {}
    for number, task in enumerate(tasks, 1):
        name = task.task.name
        on_event(Note(f"{name}, task {number} of {len(tasks)}"))
        recipe = evaluated_once(for_task(chosen.recipe, task.task))
        results[name] = final_runs(
            recipe, task.with_test_split(), folder / name, seeds=seeds, device=device, on_event=on_event
        )
    return SuiteResult(chosen, trials, results, diverged)


def _run_trial(
    config: TrialConfig, tasks: Sequence[VtabTask], folder: Path, device: str, on_event: EventHandler
) -> SuiteTrial:
    results: dict[str, RunResult] = {}
    for number, task in enumerate(tasks, 1):
        name = task.task.name
        on_event(Note(f"trial {config.name}: {name}, task {number} of {len(tasks)}"))
        recipe = evaluated_once(for_task(config.recipe, task.task))
        results[name] = run(recipe, task.with_dev_split(), folder / name, device=device, on_event=on_event)
        # These weights are not used again, and those of 76 trials would fill a disk.
        (folder / name / "model.safetensors").unlink(missing_ok=True)
    return SuiteTrial(config.name, results)
