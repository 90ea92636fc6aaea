"""VTAB-1k: one recipe for all tasks, chosen on their 200 validation images; then 1,000 images, and test once a seed."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vitral.data.vtab import TASKS, TaskSpec, VtabTask
from vitral.events import EventHandler, Note
from vitral.recipe import Recipe
from vitral.studies.protocol import Candidate, choose, final_runs, measured_at_the_end, trial_folder
from vitral.training.run import RunResult, run

_CUTS = re.compile(r"(resize|resize_small|random_crop|central_crop|inception_crop)\(.*\)")


@dataclass(frozen=True)
class SuiteTrial:
    """How a candidate did on the validation images of each task."""

    words: str
    results: Mapping[str, RunResult]  # by task

    @property
    def scores(self) -> dict[str, float]:
        return {name: result.metrics["score"] for name, result in self.results.items()}

    @property
    def score(self) -> float:
        return mean_score(self.scores)


@dataclass(frozen=True)
class Suite:
    """The chosen recipe, how it was chosen, and the results of each task, one a seed. Scores are shares of 1."""

    chosen: Candidate
    trials: tuple[SuiteTrial, ...]
    results: Mapping[str, tuple[RunResult, ...]]
    diverged: tuple[str, ...]  # what was tried and gave no number on some task

    @property
    def scores(self) -> dict[str, float]:
        """Of each task, the mean over seeds."""
        return {
            name: statistics.fmean(result.metrics["score"] for result in results)
            for name, results in self.results.items()
        }

    @property
    def seed_scores(self) -> tuple[float, ...]:
        """Of each seed, the mean over tasks."""
        rounds = zip(*self.results.values(), strict=True)
        names = tuple(self.results)
        return tuple(
            mean_score({name: result.metrics["score"] for name, result in zip(names, results, strict=True)})
            for results in rounds
        )

    @property
    def mean(self) -> float:
        return statistics.fmean(self.seed_scores)

    @property
    def spread(self) -> float | None:
        """The standard deviation of the suite's mean between seeds."""
        return statistics.stdev(self.seed_scores) if len(self.seed_scores) > 1 else None

    @property
    def flops(self) -> float:
        """Of one final run of each task; the trials are counted apart."""
        return sum(results[0].flops for results in self.results.values())

    @property
    def all_flops(self) -> float:
        return sum(result.flops for result in self._all())

    @property
    def device_hours(self) -> float:
        """Of everything, trials included."""
        return sum(result.device_hours for result in self._all())

    def _all(self) -> Iterable[RunResult]:
        tried = (result for trial in self.trials for result in trial.results.values())
        return (*tried, *(result for results in self.results.values() for result in results))


def mean_score(scores: Mapping[str, float]) -> float:
    """VTAB's score: the plain mean over tasks, however many of them a group has."""
    return statistics.fmean(scores.values())


def group_scores(scores: Mapping[str, float]) -> dict[str, float]:
    """The mean over the tasks of each group that has some, in the order of the tasks."""
    groups = dict.fromkeys(TASKS[name].group for name in TASKS if name in scores)
    return {
        group: statistics.fmean(score for name, score in scores.items() if TASKS[name].group == group)
        for group in groups
    }


def for_task(recipe: Recipe, task: TaskSpec) -> Recipe:
    """The recipe without what would change the task's labels: mirroring, or cutting a part out of the image."""
    steps = [step.strip() for step in recipe.data.train_transform.split("|")]
    if not task.flip:
        steps = [step for step in steps if step != "flip"]
    if not task.crop and any(_CUTS.fullmatch(step) for step in steps):
        first = next(place for place, step in enumerate(steps) if _CUTS.fullmatch(step))
        kept = [step for step in steps[first:] if not _CUTS.fullmatch(step)]
        steps = [*steps[:first], "resize({size})", *kept]
    return replace(recipe, data=replace(recipe.data, train_transform="|".join(steps)))


def follow_suite(
    tried: Sequence[Candidate],
    tasks: Sequence[VtabTask],
    folder: Path,
    *,
    seeds: int = 1,
    device: str = "",
    on_event: EventHandler,
) -> Suite:
    """Choose one candidate for all tasks on their validation images, then train it on each task's 1,000 images.

    A test split is measured when a final run ends and never before. Every run has a folder of its own: the same call
    again goes on where it stopped.
    """

    def attempt(candidate: Candidate) -> SuiteTrial:
        return _tried(candidate, tasks, trial_folder(folder, candidate), device, on_event)

    chosen, trials, diverged = choose(tried, attempt, on_event)
    if trials:
        on_event(Note(f"chosen on the validation images of {len(tasks)} tasks: {chosen.words}"))
    results: dict[str, tuple[RunResult, ...]] = {}
    for number, task in enumerate(tasks, 1):
        name = task.task.name
        on_event(Note(f"{name}, task {number} of {len(tasks)}"))
        recipe = measured_at_the_end(for_task(chosen.recipe, task.task))
        results[name] = final_runs(
            recipe, task.with_test_split(), folder / name, seeds=seeds, device=device, on_event=on_event
        )
    return Suite(chosen, trials, results, diverged)


def _tried(
    candidate: Candidate, tasks: Sequence[VtabTask], folder: Path, device: str, on_event: EventHandler
) -> SuiteTrial:
    results: dict[str, RunResult] = {}
    for number, task in enumerate(tasks, 1):
        name = task.task.name
        on_event(Note(f"trying {candidate.words}: {name}, task {number} of {len(tasks)}"))
        recipe = measured_at_the_end(for_task(candidate.recipe, task.task))
        results[name] = run(recipe, task.with_dev_split(), folder / name, device=device, on_event=on_event)
        # Nobody asks for these weights again, and those of 76 trials would fill a disk.
        (folder / name / "model.safetensors").unlink(missing_ok=True)
    return SuiteTrial(candidate.words, results)
