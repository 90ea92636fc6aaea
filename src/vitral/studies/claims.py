"""Claims of a study, tested on its runs: held, not held, or undecided.

All intervals are 95 % confidence intervals of Student's t. Two groups are compared by Welch's interval of the
difference of their means over seeds, where a group of several cells is averaged per seed first. Cells with one run
each, the same number in both groups, are compared by the interval of their paired differences. Slopes are least-squares
fits over the logarithm.

The spread of an accuracy is at least what one test image makes, since seeds can agree by chance where there are few.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from vitral.errors import UserError
from vitral.evaluation.accuracy import student_quantile
from vitral.studies.definition import Claim, Study, Where
from vitral.studies.planning import CellResult, Sample, mean_over_seeds, one_image

Verdict = Literal["held", "not held", "undecided"]


@dataclass(frozen=True)
class ClaimResult:
    """A claim with its verdict and the measured values in words."""

    claim: Claim
    verdict: Verdict
    measured: str


class Estimate(NamedTuple):
    """A difference or a slope, and half the width of its 95 % interval; None if the runs give none."""

    value: float
    half: float | None = None

    def above(self, margin: float) -> Verdict:
        if self.half is None:
            return "undecided"
        return "held" if self.value - self.half > margin else "not held" if self.value + self.half < margin else _OPEN

    def within(self, margin: float) -> Verdict:
        if self.half is None:
            return "undecided"
        low, high = self.value - self.half, self.value + self.half
        return "held" if -margin < low and high < margin else "not held" if low > margin or high < -margin else _OPEN


_OPEN: Verdict = "undecided"


def check_claims(study: Study, cells: Sequence[CellResult]) -> tuple[ClaimResult, ...]:
    tests = {"compare": _compare, "rank": _rank, "trend": _trend, "best": _best}
    done = [cell for cell in cells if cell.records]
    return tuple(tests[claim.kind](claim, study, done) for claim in study.claims)


def select(cells: Sequence[CellResult], where: Where) -> list[CellResult]:
    """The cells whose labels have these values; a list means any of its values."""
    wanted = {key: value if isinstance(value, list) else [value] for key, value in where.items()}
    return [cell for cell in cells if all(cell.labels.get(key) in values for key, values in wanted.items())]


def _compare(claim: Claim, study: Study, cells: Sequence[CellResult]) -> ClaimResult:
    """The difference of two groups; with `along`, of the best value of each."""
    metric = claim.metric or study.metric
    first, second = select(cells, claim.a), select(cells, claim.b or {})
    notes = ""
    if claim.along:
        first, second = (_best_cells(group, claim.along, metric) for group in (first, second))
        values = [group[0].labels[claim.along] if group else "-" for group in (first, second)]
        notes = f", at {claim.along} {values[0]} and {values[1]}"
    if not first or not second:
        return ClaimResult(claim, "undecided", "no runs yet")
    estimate = difference(first, second, metric)
    verdict = _verdict(estimate, claim)
    counts = [sum(map(len, _compared(group, metric))) for group in (first, second)]
    return ClaimResult(claim, verdict, f"{_shown(estimate, metric)}{notes}; {counts[0]} and {counts[1]} runs")


def _verdict(estimate: Estimate, claim: Claim) -> Verdict:
    if claim.expect == "=":
        return estimate.within(claim.margin)
    turned = estimate if claim.expect == ">" else Estimate(-estimate.value, estimate.half)
    return turned.above(claim.margin)


def difference(first: Sequence[CellResult], second: Sequence[CellResult], metric: str) -> Estimate:
    """The difference of the means of two groups of cells."""
    samples = [_per_seed(group, metric) for group in (first, second)]
    means = [statistics.fmean(sample) for sample in samples]
    if min(map(len, samples)) < 2:
        paired = _paired(first, second, metric)
        return Estimate(means[0] - means[1]) if paired is None else paired
    groups = zip(samples, (first, second), strict=True)
    return _welch(*(mean_over_seeds(values, cells, metric) for values, cells in groups))


def _welch(first: Sample, second: Sample) -> Estimate:
    error = math.hypot(first.error, second.error)
    if not error:
        return Estimate(first.mean - second.mean, 0.0)
    shares = sum(sample.error**4 / sample.freedom for sample in (first, second))
    # Whole degrees of freedom, rounded down: the interval is a little wider than it could be.
    freedom = max(math.floor(error**4 / shares), 1)
    return Estimate(first.mean - second.mean, student_quantile(freedom) * error)


def _per_seed(cells: Sequence[CellResult], metric: str) -> list[float]:
    """One mean over the cells per seed that all of them have; without such a seed the mean of all runs."""
    by_cell = _compared(cells, metric)
    if any(values.keys() != by_cell[0].keys() for values in by_cell):
        return [statistics.fmean(value for values in by_cell for value in values.values())]
    return [statistics.fmean(values[seed] for values in by_cell) for seed in by_cell[0]]


def _compared(cells: Sequence[CellResult], metric: str) -> list[dict[int, float]]:
    """The metric of each cell by seed: of the seeds that all cells have or, without such a seed, of all."""
    by_cell = [_values(cell, metric) for cell in cells]
    seeds = sorted(set(by_cell[0]).intersection(*by_cell))
    return [{seed: values[seed] for seed in seeds} for values in by_cell] if seeds else by_cell


def _values(cell: CellResult, metric: str) -> dict[int, float]:
    """A metric by seed; "flops" and "seconds" are those of the run."""
    values = {}
    for run, record in cell.runs:
        if record is None or record.status != "ok":
            continue
        value = getattr(record, metric) if metric in ("flops", "seconds") else record.metrics.get(metric)
        if value is None:
            raise UserError(f'the runs have no metric "{metric}": they have {", ".join(record.metrics)}.')
        values[run.settings["seed"]] = float(value)
    return values


def _paired(first: Sequence[CellResult], second: Sequence[CellResult], metric: str) -> Estimate | None:
    """The mean difference of cells in their order, if there are at least three pairs."""
    if len(first) != len(second) or len(first) < 3:
        return None
    means = [[statistics.fmean(_values(cell, metric).values()) for cell in group] for group in (first, second)]
    differences = [a - b for a, b in zip(*means, strict=True)]
    least = max(one_image([cell], metric) for cell in (*first, *second)) / math.sqrt(len(differences))
    error = max(statistics.stdev(differences), least) / math.sqrt(len(differences))
    return Estimate(statistics.fmean(differences), student_quantile(len(differences) - 1) * error)


def _rank(claim: Claim, study: Study, cells: Sequence[CellResult]) -> ClaimResult:
    """Each group of the order above the next."""
    metric = claim.metric or study.metric
    groups = [select(cells, where) for where in claim.order]
    if len(groups) < 2 or not all(groups):
        return ClaimResult(claim, "undecided", "no runs yet")
    estimates = [difference(a, b, metric) for a, b in itertools.pairwise(groups)]
    verdicts = [estimate.above(claim.margin) for estimate in estimates]
    verdict: Verdict = "not held" if "not held" in verdicts else "held" if set(verdicts) == {"held"} else "undecided"
    return ClaimResult(claim, verdict, "; then ".join(_shown(estimate, metric) for estimate in estimates))


def _trend(claim: Claim, study: Study, cells: Sequence[CellResult]) -> ClaimResult:
    """The slope over the logarithm of `along`, or the difference of two slopes."""
    metric = claim.metric or study.metric
    fits = [_slope(select(cells, where), claim.along, metric) for where in (claim.a, claim.b) if where is not None]
    if any(fit is None for fit in fits):
        return ClaimResult(claim, "undecided", "fewer than three runs at two values")
    slopes = [fit for fit in fits if fit is not None]
    zero = Sample(0.0, 0.0, math.inf)
    estimate = _welch(slopes[0], slopes[1] if len(slopes) > 1 else zero)
    unit = f"{_shown(estimate, metric)} per doubling of {claim.along}"
    each = f" ({_number(slopes[0].mean, metric)} and {_number(slopes[1].mean, metric)})" if len(slopes) > 1 else ""
    return ClaimResult(claim, _verdict(estimate, claim), unit + each)


def _slope(cells: Sequence[CellResult], along: str, metric: str) -> Sample | None:
    """The least-squares slope of the runs of some cells, its standard error, and degrees of freedom."""
    points = list(_points(cells, along, metric))
    if len(points) < 3 or len({x for x, _ in points}) < 2:
        return None
    fit = statistics.linear_regression([x for x, _ in points], [y for _, y in points])
    mean = statistics.fmean(x for x, _ in points)
    spread = sum((x - mean) ** 2 for x, _ in points)
    residuals = sum((y - fit.intercept - fit.slope * x) ** 2 for x, y in points)
    residuals = max(residuals, max(one_image([cell], metric) for cell in cells) ** 2)
    freedom = len(points) - 2
    return Sample(fit.slope, math.sqrt(residuals / freedom / spread), freedom)


def _points(cells: Sequence[CellResult], along: str, metric: str) -> Iterator[tuple[float, float]]:
    for cell in cells:
        x = cell.number(along, metric)
        if not x or x <= 0:
            raise UserError(f'"{along}" is not a positive number in "{cell.labels["name"]}": choose another axis.')
        yield from ((math.log2(x), value) for value in _values(cell, metric).values())


def _best(claim: Claim, study: Study, cells: Sequence[CellResult]) -> ClaimResult:
    """The best values of two groups; those that are not separated from the best one are possible, too."""
    metric = claim.metric or study.metric
    groups = [_possible_best(select(cells, where), claim.along, metric) for where in (claim.a, claim.b or {})]
    if not all(groups):
        return ClaimResult(claim, "undecided", "no runs yet")
    relation = {"<": lambda a, b: a < b, "=": lambda a, b: a == b, ">": lambda a, b: a > b}[claim.expect]
    outcomes = {relation(a, b) for a in groups[0] for b in groups[1]}
    verdict: Verdict = "undecided" if len(outcomes) > 1 else "held" if outcomes.pop() else "not held"
    texts = [" or ".join(map(str, group)) for group in groups]
    return ClaimResult(claim, verdict, f"best {claim.along}: {texts[0]} against {texts[1]}")


def _possible_best(cells: Sequence[CellResult], along: str, metric: str) -> list[Any]:
    """The value with the highest mean, then those whose difference from it may be chance."""
    best = _best_cells(cells, along, metric)
    if not best:
        return []
    chosen, others = best[0].labels[along], {cell.labels[along] for cell in cells}
    near = [
        value
        for value in sorted(others - {chosen})
        if difference(best, select(cells, {along: value}), metric).above(0.0) != "held"
    ]
    return [chosen, *near]


def _best_cells(cells: Sequence[CellResult], along: str, metric: str) -> list[CellResult]:
    """The cells with the value of an axis that has the highest mean."""
    values = {cell.labels[along] for cell in cells if along in cell.labels}
    groups = [select(cells, {along: value}) for value in sorted(values)]
    return max(groups, key=lambda group: statistics.fmean(_per_seed(group, metric)), default=[])


def _shown(estimate: Estimate, metric: str) -> str:
    """+5.72 points (+4.90 to +6.54)"""
    shown = f"{_number(estimate.value, metric)}{'' if is_count(metric) else ' points'}"
    if estimate.half is None:
        return f"{shown} (one run: no interval)"
    low, high = (_number(estimate.value + sign * estimate.half, metric) for sign in (-1, 1))
    return f"{shown} ({low} to {high})"


def _number(value: float, metric: str) -> str:
    if not is_count(metric):
        return f"{100 * value:+.2f}"
    return f"{value:+,.0f}" if 100 <= abs(value) < 1e6 else f"{value:+.3g}"


def is_count(metric: str) -> bool:
    """Whether a metric is a number as it is, not a share of 1."""
    return metric in ("flops", "seconds", "largest_batch", "nll", "loss") or metric.endswith("per_second")
