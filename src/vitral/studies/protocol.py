"""The paper's way to a number: choose on a dev split, train on all of train, measure on test once a seed."""

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


class Scored(Protocol):
    """What a candidate's trial came to."""

    @property
    def score(self) -> float: ...


T = TypeVar("T", bound=Scored)
Grid = Mapping[str, Sequence[Any]]  # keys of a recipe and the values to try

# Candidates are told apart on the same images, and the data and the weights are opened before there are any.
_SHARED = ("init", "data.held_out", "data.dev", "data.subset", "data.subset_seed", "data.exclude")


@dataclass(frozen=True)
class Candidate:
    """A recipe that may be chosen, and the words that tell it from the others."""

    words: str
    recipe: Recipe


@dataclass(frozen=True)
class Trial:
    """How a candidate did on the dev split."""

    words: str
    score: float
    result: RunResult


@dataclass(frozen=True)
class Outcome:
    """The chosen recipe, how it was chosen, and one result a seed."""

    chosen: Candidate
    trials: tuple[Trial, ...]
    results: tuple[RunResult, ...]
    split: str  # what the results were measured on
    dev: str  # what the trials were measured on
    diverged: tuple[str, ...]  # what was tried and gave no number

    @property
    def scores(self) -> tuple[float, ...]:
        return tuple(result.metrics["score"] for result in self.results)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.scores)

    @property
    def spread(self) -> float | None:
        """The standard deviation between seeds."""
        return statistics.stdev(self.scores) if len(self.scores) > 1 else None

    @property
    def flops(self) -> float:
        """Of one run of the chosen recipe, by the mean, as patience ends some early; the trials are counted apart."""
        return statistics.fmean(result.flops for result in self.results)

    @property
    def all_flops(self) -> float:
        return sum(result.flops for result in self._all())

    @property
    def device_hours(self) -> float:
        """Of everything, trials included."""
        return sum(result.device_hours for result in self._all())

    def _all(self) -> tuple[RunResult, ...]:
        return (*(trial.result for trial in self.trials), *self.results)


def candidates(recipe: Recipe, grid: Grid) -> list[Candidate]:
    """Every combination of the grid's values; the recipe itself where there is no grid."""
    words = [[f"{key}={_text(value)}" for value in values] for key, values in grid.items()]
    return [Candidate(" ".join(chosen), with_overrides(recipe, chosen)) for chosen in itertools.product(*words)]


def read_grid(words: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """`optim.lr=0.003,0.01` and the like to a grid; whether a recipe takes the values is for `candidates` to say."""
    grid: dict[str, tuple[str, ...]] = {}
    for word in words:
        key, _, values = word.partition("=")
        key = key.strip()
        tried = tuple(dict.fromkeys(value.strip() for value in values.split(",") if value.strip()))
        if key in _SHARED:
            raise UserError(
                f"{key} is the same for all that is tried: give the command once for each value, with --set."
            )
        if key in grid:
            raise UserError(f"{key} is swept twice: write all its values in one word, as in optim.lr=0.003,0.01.")
        if not tried or isinstance(keys().get(key, keys()["seed"]).default, tuple):
            raise UserError(
                f'"{word}" is nothing to sweep over: write a key and its values, as in optim.lr=0.003,0.01.'
            )
        grid[key] = tried
    return grid


def grid_of(sweep: Sequence[str], usual: Grid, overrides: Iterable[str]) -> Grid:
    """The sweep that was asked for, else the usual one without the keys that overrides settle."""
    if sweep:
        return read_grid(sweep)
    own = {word.partition("=")[0].strip() for word in overrides}
    own |= {"steps"} if "epochs" in own else set()  # a run has one length
    return {key: values for key, values in usual.items() if key not in own}


def follow(
    tried: Sequence[Candidate],
    data: DataSet,
    folder: Path,
    *,
    choosing: DataSet | None,
    dev: float,
    seeds: int = 1,
    device: str = "",
    on_event: EventHandler,
) -> Outcome:
    """Choose among candidates on the dev split, then train the chosen one on all of train, once for each seed.

    `data` is what final runs take; `choosing` is the same with a share `dev` of train, or a val split, to choose on.
    The test split is measured when a final run ends and never before. A recipe with patience stops by the dev split, so
    its final runs go without it too, and the value reported is the best one there. Every run has a folder of its own:
    the same call again goes on where it stopped.
    """
    if choosing is None and (len(tried) > 1 or tried[0].recipe.patience):
        raise UserError("to choose something there must be images to choose on: set data.dev, such as data.dev=0.1.")

    def attempt(candidate: Candidate) -> Trial:
        assert choosing is not None
        on_event(Note(f"trying {candidate.words}"))
        place = trial_folder(folder, candidate)
        result = run(with_dev(candidate.recipe, dev), choosing, place, device=device, on_event=on_event)
        return Trial(candidate.words, result.metrics["score"], result)

    chosen, trials, diverged = choose(tried, attempt, on_event)
    name = choosing.eval_split.name if choosing is not None and choosing.eval_split is not None else ""
    if trials:
        on_event(Note(f"chosen on {name}: {chosen.words}"))
    patient = bool(chosen.recipe.patience)
    final = choosing if patient and choosing is not None else with_test_split(data)
    recipe = with_dev(chosen.recipe, dev) if patient else measured_at_the_end(with_dev(chosen.recipe, 0.0))
    results = final_runs(recipe, final, folder, seeds=seeds, device=device, on_event=on_event)
    assert final.eval_split is not None
    return Outcome(chosen, trials, results, final.eval_split.name, name, diverged)


def trial_folder(folder: Path, candidate: Candidate) -> Path:
    return folder / "sweep" / candidate.words.replace("/", "-").replace(" ", ",")


def choose(
    tried: Sequence[Candidate], attempt: Callable[[Candidate], T], on_event: EventHandler
) -> tuple[Candidate, tuple[T, ...], tuple[str, ...]]:
    """The candidate whose trial has the highest score, among equals the first; all trials; and those that diverged.

    A single candidate needs no trial.
    """
    if len(tried) == 1:
        return tried[0], (), ()
    trials: dict[Candidate, T] = {}
    for candidate in tried:
        try:
            trials[candidate] = attempt(candidate)
        except Diverged as error:
            on_event(Note(f"{candidate.words} is out: {error}"))
    if not trials:
        raise UserError("all that was tried diverged: sweep over lower rates, or set optim.clip=1.")
    diverged = tuple(candidate.words for candidate in tried if candidate not in trials)
    return max(trials, key=lambda candidate: trials[candidate].score), tuple(trials.values()), diverged


def final_runs(
    recipe: Recipe, data: DataSet, folder: Path, *, seeds: int, device: str, on_event: EventHandler
) -> tuple[RunResult, ...]:
    """One run for each seed from the recipe's on."""
    results = []
    for seed in range(recipe.seed, recipe.seed + seeds):
        if seeds > 1:
            on_event(Note(f"seed {seed}"))
        again = replace(recipe, seed=seed)
        results.append(run(again, data, folder / f"seed-{seed}", device=device, on_event=on_event))
    return tuple(results)


def measured_at_the_end(recipe: Recipe) -> Recipe:
    """The same run, looking at its test images once."""
    return replace(recipe, evaluate_every=_NEVER, save_every=recipe.save_every or 500)


_NEVER = 1 << 40  # steps between evaluations; the end of a run is always evaluated


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
