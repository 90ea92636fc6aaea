"""The paper's protocol: select hyper-parameters on a dev split, train on all of train, test once per seed."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from vitral.data.sources import DataSet, with_test_split
from vitral.errors import UserError
from vitral.events import EventHandler, Note
from vitral.recipe import Recipe, keys, with_dev, with_overrides
from vitral.training.loop import Diverged
from vitral.training.run import RunResult, run

SearchSpace = Mapping[str, Sequence[Any]]  # keys of a recipe and the values to try

# All trials are compared on the same images and start from the same weights, which are opened before the trials.
_SHARED_KEYS = ("init", "data.held_out", "data.dev", "data.subset", "data.subset_seed", "data.exclude")
_NEVER = 1 << 40  # steps between evaluations; the end of a run is always evaluated


class ScoredTrial(Protocol):
    """A finished trial."""

    @property
    def score(self) -> float: ...


T = TypeVar("T", bound=ScoredTrial)


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


@dataclass(frozen=True)
class ProtocolRuns:
    """The selected configuration, its trials, and one final run per seed."""

    chosen: TrialConfig
    trials: tuple[Trial, ...]
    results: tuple[RunResult, ...]
    split: str  # that the final runs were evaluated on
    dev: str  # the split that the trials were evaluated on
    diverged: tuple[str, ...]  # names of trials without a score

    @property
    def scores(self) -> tuple[float, ...]:
        """One score per seed."""
        return tuple(result.metrics["score"] for result in self.results)

    @property
    def mean(self) -> float:
        """Mean score over seeds."""
        return statistics.fmean(self.scores)

    @property
    def spread(self) -> float | None:
        """Standard deviation over seeds; None for one seed."""
        return statistics.stdev(self.scores) if len(self.scores) > 1 else None

    @property
    def flops(self) -> float:
        """Of one final run, on average, since early stopping may end some earlier; without the trials."""
        return statistics.fmean(result.flops for result in self.results)

    @property
    def all_flops(self) -> float:
        """Of all runs, trials included."""
        return sum(result.flops for result in self._all_runs())

    @property
    def device_hours(self) -> float:
        """Of all runs, trials included."""
        return sum(result.device_hours for result in self._all_runs())

    def _all_runs(self) -> tuple[RunResult, ...]:
        return (*(trial.result for trial in self.trials), *self.results)


def trial_configs(recipe: Recipe, space: SearchSpace) -> list[TrialConfig]:
    """Every combination of the values of a search space; the recipe itself where the space is empty."""
    overrides = [[f"{key}={_text(value)}" for value in values] for key, values in space.items()]
    return [
        TrialConfig(" ".join(combination), with_overrides(recipe, combination))
        for combination in itertools.product(*overrides)
    ]


def parse_search_space(texts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Parse texts such as `optim.lr=0.003,0.01`.

    Args:
        texts: a key and its values each; the values are checked by `trial_configs`.

    Returns:
        The values by key.

    Raises:
        UserError: if a key is given twice, cannot be searched, or has no values.
    """
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
    fixed = {override.partition("=")[0].strip() for override in overrides}
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

    The test split is evaluated at the end of a final run and never before. A recipe with patience stops by the dev
    split, so its final runs keep the dev split too, and the best value on it is reported. Every run has its own folder:
    the same call resumes where an earlier one stopped.

    Args:
        configs: the configurations to select from; a single one needs no trial.
        data: the data of the final runs.
        folder: where the runs are written.
        choosing: the same data with a dev split as `val`; None where there is none.
        dev: the share of train that the dev split is; 0 where the data has its own val split.
        seeds: final runs.
        device: where to compute; by default a GPU where there is one.
        on_event: called with notes and the events of the runs.

    Returns:
        The trials and the final runs.

    Raises:
        UserError: if there is something to select but no dev split, or if all trials diverge.
    """
    if choosing is None and (len(configs) > 1 or configs[0].recipe.patience):
        raise UserError("selecting hyper-parameters needs a dev split: set data.dev, such as data.dev=0.1.")

    def run_trial(config: TrialConfig) -> Trial:
        assert choosing is not None
        on_event(Note(f"trial {config.name}"))
        recipe = with_dev(config.recipe, dev)
        result = run(recipe, choosing, trial_folder(folder, config), device=device, on_event=on_event)
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
    assert final.eval_split is not None
    return ProtocolRuns(chosen, trials, results, final.eval_split.name, dev_split, diverged)


def _final_data(data: DataSet) -> DataSet:
    """The data with test as its only held-out split; a note says so where there is a val split too."""
    final = with_test_split(data)
    if data.val is None or data.test is None:
        return final
    return replace(final, notes=(*final.notes, f"Evaluated on {data.test.name} ({len(data.test):,} images)."))


def trial_folder(folder: Path, config: TrialConfig) -> Path:
    """The folder of a trial's run."""
    return folder / "sweep" / config.name.replace("/", "-").replace(" ", ",")


def select_best(
    configs: Sequence[TrialConfig], run_trial: Callable[[TrialConfig], T], on_event: EventHandler
) -> tuple[TrialConfig, tuple[T, ...], tuple[str, ...]]:
    """Run a trial per configuration and select the one with the highest score.

    Args:
        configs: the configurations; a single one is selected without a trial.
        run_trial: runs a trial; it may raise `Diverged`.
        on_event: called with a note for each trial that diverges.

    Returns:
        The best configuration, the first of equal ones; the trials; the names of those that diverged.

    Raises:
        UserError: if all trials diverge.
    """
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
