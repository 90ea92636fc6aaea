"""Studies of many runs: the paper's protocol (choose on a dev split, train on all, test once per seed), and VTAB-1k.

VTAB-1k has one recipe for all tasks, selected on their 200 validation images; final runs train on 1,000.
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from vitral.data.sources import DataSet, with_test_split
from vitral.data.vtab import TASKS, TaskSpec, VtabTask
from vitral.errors import UserError
from vitral.events import EventHandler, Note
from vitral.recipe import Recipe, keys, keys_of, with_dev, with_overrides, without_flip
from vitral.training.loop import Diverged
from vitral.training.run import RunResult, run

SearchSpace = Mapping[str, Sequence[Any]]  # keys of a recipe and the values to try

# All trials are compared on the same images and start from the same weights, which are opened before the trials.
_SHARED_KEYS = ("init", "data.held_out", "data.dev", "data.subset", "data.subset_seed", "data.exclude")
_NEVER = 1 << 40  # steps between evaluations; the end of a run is always evaluated
T = TypeVar("T", "Trial", "SuiteTrial")
_CROPS = re.compile(r"(resize|resize_\w+|pad|\w+_crop)\(.*\)")


@dataclass(frozen=True)
class TrialConfig:
    """A recipe that may be selected, named by its values of the searched keys."""

    name: str
    recipe: Recipe


@dataclass(frozen=True)
class Trial:
    """A run with one configuration, evaluated on the dev split."""

    name: str
    score: float
    result: RunResult


class StudyResult:
    """The common fields of protocol results. Scores are between 0 and 1."""

    @property
    def seed_scores(self) -> tuple[float, ...]:
        """One score per seed."""
        raise NotImplementedError

    def all_runs(self) -> tuple[RunResult, ...]:
        """Trials and final runs."""
        raise NotImplementedError

    @property
    def mean(self) -> float:
        return statistics.fmean(self.seed_scores)

    @property
    def spread(self) -> float | None:
        """Standard deviation over seeds; None for one seed."""
        return statistics.stdev(self.seed_scores) if len(self.seed_scores) > 1 else None

    @property
    def all_flops(self) -> float:
        return sum(result.flops for result in self.all_runs())

    @property
    def device_hours(self) -> float:
        """Of all runs, trials included."""
        return sum(result.device_hours for result in self.all_runs())


@dataclass(frozen=True)
class ProtocolRuns(StudyResult):
    """The selected configuration, its trials, and one final run per seed."""

    chosen: TrialConfig
    trials: tuple[Trial, ...]
    results: tuple[RunResult, ...]
    split: str  # that the final runs were evaluated on
    dev: str  # the split that the trials were evaluated on
    diverged: tuple[str, ...]  # names of trials without a score

    @property
    def seed_scores(self) -> tuple[float, ...]:
        return tuple(result.metrics["score"] for result in self.results)

    @property
    def flops(self) -> float:
        """Of one final run, on average, since early stopping may end some earlier; without the trials."""
        return statistics.fmean(result.flops for result in self.results)

    def all_runs(self) -> tuple[RunResult, ...]:
        return (*(trial.result for trial in self.trials), *self.results)


def trial_configs(recipe: Recipe, space: SearchSpace) -> list[TrialConfig]:
    """Every combination of the values of a search space; the recipe itself if the space is empty."""
    overrides = [[f"{key}={_text(value)}" for value in values] for key, values in space.items()]
    return [
        TrialConfig(" ".join(combination), with_overrides(recipe, combination))
        for combination in itertools.product(*overrides)
    ]


def parse_search_space(texts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Parse texts such as `optim.lr=0.003,0.01` to values by key, which `trial_configs` checks; raises UserError for a
    key that is given twice, cannot be searched, or has no values."""
    space: dict[str, tuple[str, ...]] = {}
    for text in texts:
        key, _, value_text = text.partition("=")
        key = key.strip()
        values = tuple(dict.fromkeys(value.strip() for value in value_text.split(",") if value.strip()))
        if key in _SHARED_KEYS:
            raise UserError(f"{key} must be the same in all trials: run the command once per value, with --set.")
        if key in space:
            raise UserError(f"{key} is swept twice: write all its values together, as in optim.lr=0.003,0.01.")
        if not values or isinstance(keys().get(key, keys()["seed"]).default, tuple):
            raise UserError(f'cannot sweep over "{text}": write a key and its values, as in optim.lr=0.003,0.01.')
        space[key] = values
    return space


def choose_search_space(sweep: Sequence[str], default: SearchSpace, overrides: Iterable[str]) -> SearchSpace:
    """The requested sweep, else the default one without the keys that are overridden."""
    if sweep:
        return parse_search_space(sweep)
    fixed = set(keys_of(overrides))
    fixed |= {"steps"} if "epochs" in fixed else set()  # both set the length of a run
    return {key: values for key, values in default.items() if key not in fixed}


def run_protocol(
    configs: Sequence[TrialConfig],
    data: DataSet,
    folder: Path,
    *,
    choosing: DataSet | None,
    dev: float,
    seeds: int = 1,
    device: str = "",
    on_event: EventHandler,
) -> ProtocolRuns:
    """Select a configuration on the dev split, then train it on all of train, once per seed.

    The test split is evaluated at the end of a final run and never before. A recipe with patience selects weights by
    the dev split, so its final runs keep that out of train, too. Every run has its own folder: the same call resumes
    where an earlier one stopped. `choosing` is the same data with a dev split as `val`, a share `dev` of train, or 0
    if the data has its own. Raises UserError if there is something to select but no dev split, or if all trials
    diverge.
    """
    if choosing is None and (len(configs) > 1 or configs[0].recipe.patience):
        raise UserError("selecting hyper-parameters needs a dev split: set data.dev, such as data.dev=0.1.")

    def run_trial(config: TrialConfig) -> Trial:
        assert choosing is not None
        on_event(Note(f"trial {config.name}"))
        recipe = with_dev(config.recipe, dev)
        data = replace(choosing, test=None)  # a trial with patience would report test
        result = run(recipe, data, trial_folder(folder, config), device=device, on_event=on_event)
        return Trial(config.name, result.metrics["score"], result)

    chosen, trials, diverged = select_best(configs, run_trial, on_event)
    dev_split = choosing.eval_split.name if choosing is not None and choosing.eval_split is not None else ""
    if trials:
        on_event(Note(f"selected on {dev_split}: {chosen.name}"))
    if chosen.recipe.patience and choosing is not None:
        final, recipe = choosing, with_dev(chosen.recipe, dev)
    else:
        final, recipe = _final_data(data), evaluated_once(with_dev(chosen.recipe, 0.0))
    results = final_runs(recipe, final, folder, seeds=seeds, device=device, on_event=on_event)
    reported = final.reported_split(chosen.recipe.patience > 0)
    assert reported is not None
    return ProtocolRuns(chosen, trials, results, reported.name, dev_split, diverged)


def _final_data(data: DataSet) -> DataSet:
    """The data with test as its only held-out split; a note says so if there is a val split too."""
    final = with_test_split(data)
    if data.val is None or data.test is None:
        return final
    return replace(final, notes=(*final.notes, f"Evaluated on {data.test.name} ({len(data.test):,} images)."))


def trial_folder(folder: Path, config: TrialConfig) -> Path:
    return folder / "sweep" / config.name.replace("/", "-").replace(" ", ",")


def select_best(
    configs: Sequence[TrialConfig], run_trial: Callable[[TrialConfig], T], on_event: EventHandler
) -> tuple[TrialConfig, tuple[T, ...], tuple[str, ...]]:
    """Run a trial per configuration, which may raise `Diverged`, and select the one with the highest score, the first
    of equal ones; a single one is selected without a trial. Returns it, the trials, and the names of those that
    diverged."""
    if len(configs) == 1:
        return configs[0], (), ()
    trials: dict[TrialConfig, T] = {}
    for config in configs:
        try:
            trials[config] = run_trial(config)
        except Diverged as error:
            on_event(Note(f"trial {config.name} failed: {error}"))
    if not trials:
        raise UserError("all trials diverged: sweep over lower learning rates, or set optim.clip=1.")
    diverged = tuple(config.name for config in configs if config not in trials)
    return max(trials, key=lambda config: trials[config].score), tuple(trials.values()), diverged


def final_runs(
    recipe: Recipe, data: DataSet, folder: Path, *, seeds: int, device: str, on_event: EventHandler
) -> tuple[RunResult, ...]:
    """Run the recipe once per seed, starting with its own."""
    results = []
    for seed in range(recipe.seed, recipe.seed + seeds):
        if seeds > 1:
            on_event(Note(f"seed {seed}"))
        seeded = replace(recipe, seed=seed)
        results.append(run(seeded, data, folder / f"seed-{seed}", device=device, on_event=on_event))
    return tuple(results)


def evaluated_once(recipe: Recipe) -> Recipe:
    """The recipe with a single evaluation, at the end of the run."""
    return replace(recipe, evaluate_every=_NEVER, save_every=recipe.save_every or 500)


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


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
class SuiteResult(StudyResult):
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
    def flops(self) -> float:
        """Of one final run per task, without the trials."""
        return sum(results[0].flops for results in self.results.values())

    def all_runs(self) -> tuple[RunResult, ...]:
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
    recipe = recipe if task.flip else without_flip(recipe)
    steps = [step.strip() for step in recipe.data.train_transform.split("|")]
    if not task.crop and any(_CROPS.fullmatch(step) for step in steps):
        first = next(index for index, step in enumerate(steps) if _CROPS.fullmatch(step))
        kept = [step for step in steps[first:] if not _CROPS.fullmatch(step)]
        plain = ", antialias=false" if "antialias=false" in steps[first] else ""
        steps = [*steps[:first], f"resize({{size}}{plain})", *kept]
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
    """

    def run_trial(config: TrialConfig) -> SuiteTrial:
        results: dict[str, RunResult] = {}
        for number, task in enumerate(tasks, 1):
            name = task.task.name
            on_event(Note(f"trial {config.name}: {name}, task {number} of {len(tasks)}"))
            recipe, path = evaluated_once(for_task(config.recipe, task.task)), trial_folder(folder, config) / name
            results[name] = run(recipe, task.with_dev_split(), path, device=device, on_event=on_event)
            # These weights are not used again, and those of 76 trials would fill a disk.
            (path / "model.safetensors").unlink(missing_ok=True)
        return SuiteTrial(config.name, results)

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
