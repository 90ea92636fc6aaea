"""Records of runs; from them, the pending runs of a study, their cost, and its table.

A record is one JSON line in any .jsonl file of a study's folder. It is appended in one write, and a line that is cut
short by a power failure is ignored. Records of several machines merge by copying their files into one folder: a run
that two of them made counts once.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from vitral.cost import cost, training_flops
from vitral.errors import UserError
from vitral.evaluation.accuracy import student_quantile
from vitral.recipe import Recipe, architecture_of
from vitral.studies.definition import Cell, PlannedRun, Study, planned_run, settings_text

_STATE_BYTES = 16  # per parameter: weights, gradients and two moments in single precision
_SHARES = {  # metrics that are shares of the test images, or means of such shares
    *("score", "top1", "top5", "real", "mean_per_class", "mean_average_precision"),
    *("micro_f1", "macro_f1", "micro_f1_at_thresholds", "macro_f1_at_thresholds"),
}
FILE = "runs.jsonl"
Status = Literal["ok", "diverged", "failed"]
_BETTER: dict[str, int] = {"ok": 2, "diverged": 1, "failed": 0}


@dataclass(frozen=True)
class Record:
    """The record of a run."""

    id: str
    study: str
    changes: Mapping[str, Any]  # what the study varies, with the seed
    trial: bool = False  # made to choose a setting, on the dev split
    status: Status = "ok"
    reason: str = ""  # of a run that diverged or failed
    metrics: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    flops: float = 0.0
    peak_bytes: int = 0
    images_per_second: float = 0.0
    beside: int = 0  # other runs that shared the device, and took a part of its time
    recipe: str = ""  # hash of the complete recipe
    device: str = ""
    version: str = ""

    def to_json(self) -> str:
        needed = ("id", "study", "changes")
        return json.dumps({key: value for key, value in asdict(self).items() if value or key in needed})


def read_records(folder: Path) -> dict[str, Record]:
    """The records of a folder by run: of several for one run the first that is ok, else the first that diverged, else
    the last failure."""
    records: dict[str, Record] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            try:
                values = json.loads(line)
            except ValueError:  # cut short by a kill while it was written
                continue
            try:
                record = Record(**values)
            except TypeError as error:
                raise UserError(f"line {number} of {path} is not the record of a run: remove it.") from error
            earlier = records.get(record.id)
            if earlier is None or earlier.status == "failed" or _BETTER[record.status] > _BETTER[earlier.status]:
                records[record.id] = record
    return records


def append_record(folder: Path, record: Record) -> None:
    """Add a record; after a line that was cut short, it starts on a separate line."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(handle).st_size
        os.lseek(handle, max(size - 1, 0), os.SEEK_SET)
        start = "\n" if size and os.read(handle, 1) != b"\n" else ""
        os.write(handle, f"{start}{record.to_json()}\n".encode())
        os.fsync(handle)
    finally:
        os.close(handle)


Records = Mapping[str, Record]


@dataclass(frozen=True)
class Plan:
    """The runs of a study: those that are known, and the number that wait for a choice among trials."""

    runs: tuple[PlannedRun, ...]  # trials and final runs, each once
    pending: tuple[PlannedRun, ...]  # without a record, or with that of a failure
    waiting: int  # final runs whose settings are not chosen yet

    @property
    def total(self) -> int:
        """All runs, chosen or not."""
        return len(self.runs) + self.waiting


class Sample(NamedTuple):
    """A mean, its standard error and the degrees of freedom of that."""

    mean: float
    error: float
    freedom: float


@dataclass(frozen=True)
class CellResult:
    """A cell with the records of its final runs."""

    cell: Cell
    chosen: Mapping[str, Any]  # values of the keys that were chosen
    runs: tuple[tuple[PlannedRun, Record | None], ...]

    @property
    def records(self) -> tuple[Record, ...]:
        """Of the runs that came to an end."""
        return tuple(record for _, record in self.runs if record is not None and record.status == "ok")

    @property
    def labels(self) -> dict[str, Any]:
        """What tables and claims know the cell by."""
        return {**self.cell.labels, **self.chosen}

    def edges(self) -> list[str]:
        """The chosen values that are the lowest or highest of those tried: a better one may lie beyond."""
        ends = {key: (min(values), max(values)) for key, values in self.cell.choose.items() if len(values) > 2}
        return [f"{key} {value}" for key, value in self.chosen.items() if value in ends.get(key, ())]

    def values(self, metric: str) -> tuple[float, ...]:
        return tuple(record.metrics[metric] for record in self.records if metric in record.metrics)

    def mean(self, metric: str) -> float | None:
        values = self.values(metric)
        return statistics.fmean(values) if values else None

    def interval(self, metric: str) -> float | None:
        """Half the width of the 95 % confidence interval of the mean; None for fewer than two runs."""
        values = self.values(metric)
        if len(values) < 2:
            return None
        return student_quantile(len(values) - 1) * mean_over_seeds(values, [self], metric).error

    def bounds(self, metric: str) -> tuple[float, float] | None:
        """The ends of the interval; a share of images is neither below 0 nor above 1."""
        mean, half = self.mean(metric), self.interval(metric)
        if mean is None or half is None:
            return None
        return (max(mean - half, 0.0), min(mean + half, 1.0)) if _is_share(metric) else (mean - half, mean + half)

    def seconds(self) -> float | None:
        """The median over seeds."""
        return statistics.median(record.seconds for record in self.records) if self.records else None

    def flops(self) -> float | None:
        """Of one run, on average."""
        return statistics.fmean(record.flops for record in self.records) if self.records else None

    def number(self, name: str, metric: str) -> float | None:
        """A coordinate of a figure: a numeric label, or "flops" or "seconds" of a run."""
        if name in ("flops", "seconds"):
            return self.flops() if name == "flops" else self.seconds()
        value = self.labels.get(name)
        return float(value) if isinstance(value, int | float) else self.mean(name) if name != metric else None


def mean_over_seeds(values: Sequence[float], cells: Sequence[CellResult], metric: str) -> Sample:
    """The mean of some cells from their values by seed, at least two.

    The deviation between seeds is at least the one of a single test image that one of them gets right: seeds that tie
    on few images do not show that others would.
    """
    deviation = max(statistics.stdev(values), one_image(cells, metric) / math.sqrt(len(values)))
    return Sample(statistics.fmean(values), deviation / math.sqrt(len(values)), len(values) - 1)


def one_image(cells: Sequence[CellResult], metric: str) -> float:
    """What one test image contributes to the mean of some cells; 0 for other metrics than shares of the test images,
    and if their number is not recorded."""
    counts = [min(cell.values("n"), default=0) for cell in cells]
    return 1 / (min(counts) * len(counts)) if _is_share(metric) and all(counts) else 0.0


def _is_share(metric: str) -> bool:
    return metric in _SHARES or metric.endswith("-shot")


def plan(study: Study, records: Records) -> Plan:
    """The runs of a study: those with the first seed of every cell, and trials, come first, so that a part of a study
    has a part of each cell. Runs after a choice are known once all its trials are recorded."""
    runs: dict[str, PlannedRun] = {}
    seed_numbers: dict[str, int] = {}
    waiting: set[tuple[str, ...]] = set()
    for cell in study.cells:
        trials = _trials(study, cell)
        runs |= {run.id: run for run in trials}
        finals = final_runs(study, cell, records)
        runs |= {run.id: run for run in finals}
        seed_numbers |= {run.id: number for number, run in enumerate(finals)}
        if trials and not finals:
            waiting |= {(*(run.id for run in trials), str(seed)) for seed in cell.seeds}
    ordered = sorted(runs.values(), key=lambda run: seed_numbers.get(run.id, 0))
    pending = [run for run in ordered if not is_done(records.get(run.id))]
    return Plan(tuple(ordered), tuple(pending), len(waiting))


def final_runs(study: Study, cell: Cell, records: Records) -> tuple[PlannedRun, ...]:
    """The runs of a cell on the test split, one per seed; none while its trials are not all recorded."""
    chosen: Mapping[str, Any] | None = {}
    if cell.choose:
        chosen = chosen_settings(study, cell, records)
    if chosen is None:
        return ()
    return tuple(planned_run(study, cell, {**chosen, "seed": seed}) for seed in cell.seeds)


def chosen_settings(study: Study, cell: Cell, records: Records) -> Mapping[str, Any] | None:
    """The settings with the highest score on the dev split, the first of equal ones; None while trials are missing."""
    trials = [(run, records.get(run.id)) for run in _trials(study, cell)]
    if not all(is_done(record) for _, record in trials):
        return None
    finished = [(run, record) for run, record in trials if record is not None and record.status == "ok"]
    best = max(finished, key=lambda trial: trial[1].metrics["score"], default=trials[0])[0]  # all may have diverged
    return {key: best.settings[key] for key in cell.choose}


def _trials(study: Study, cell: Cell) -> list[PlannedRun]:
    """One run per combination of the values to choose from, with the first seed."""
    if not cell.choose:
        return []
    combinations = itertools.product(*cell.choose.values())
    changes = [dict(zip(cell.choose, values, strict=True)) for values in combinations]
    return [planned_run(study, cell, {**change, "seed": cell.seeds[0]}, trial=True) for change in changes]


def is_done(record: Record | None) -> bool:
    """Diverging is a result; a failure (no memory, no disk) may be the machine's, and is tried again."""
    return record is not None and record.status != "failed"


def results(study: Study, records: Records) -> tuple[CellResult, ...]:
    return tuple(_result(study, cell, records) for cell in study.cells)


def _result(study: Study, cell: Cell, records: Records) -> CellResult:
    runs = final_runs(study, cell, records)
    chosen = {key: runs[0].settings[key] for key in cell.choose} if runs else {}
    return CellResult(cell, chosen, tuple((run, records.get(run.id)) for run in runs))


@dataclass(frozen=True)
class PlanCost:
    """What pending runs take. Time and memory are of recorded runs, scaled by FLOPs if there is none of a cell."""

    runs: int
    flops: float | None  # None if the number of training images is unknown
    seconds: float | None  # None without a record to go by
    peak_bytes: int
    state_bytes: int  # the largest model's weights, gradients and moments


def plan_cost(study: Study, current: Plan, records: Records, sizes: Mapping[str, tuple[int, int]]) -> PlanCost:
    """The cost of the pending runs, and of those that wait for a choice; `sizes` are training images and classes by
    data set."""
    runs = [*current.pending, *_stand_ins(study, records)]
    each: list[float | None] = []
    state = 0
    for run in runs:
        images, classes = sizes.get(run.cell.data, (study.images, study.classes))
        recipe = study.recipe_of(run)
        each.append(run_flops_of(recipe, images, classes))
        state = max(state, _STATE_BYTES * cost(architecture_of(recipe, classes or 1000)).params)
    flops = None if None in each else sum(filter(None, each))
    timed = [record for record in records.values() if record.seconds and record.flops]
    rate = sum(record.flops for record in timed) / sum(record.seconds for record in timed) if timed else 0.0
    peak = max((record.peak_bytes for record in timed), default=0)
    return PlanCost(len(runs), flops, flops / rate if rate and flops else None, peak, state)


def _stand_ins(study: Study, records: Records) -> Iterator[PlannedRun]:
    """For each final run that waits for a choice, one with the first value to choose from."""
    for cell in study.cells:
        if cell.choose and not final_runs(study, cell, records):
            first = {key: values[0] for key, values in cell.choose.items()}
            yield from (planned_run(study, cell, {**first, "seed": seed}) for seed in cell.seeds)


def run_flops_of(recipe: Recipe, images: int, classes: int) -> float | None:
    """FLOPs of a training run by the paper's rule; None if the number of images is unknown, or the model's shape,
    which weights to start from determine."""
    images = recipe.data.subset or images
    if recipe.init or not (images or recipe.steps):
        return None
    seen = recipe.steps * recipe.batch if recipe.steps else recipe.epochs * images
    return training_flops(architecture_of(recipe, classes or 1000), images=seen, epochs=1)


def table(study: Study, cells: Sequence[CellResult]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows: what varies, the metric with its interval, the paper's value, cost."""
    varied = [key for key in dict.fromkeys(key for cell in cells for key in cell.labels) if key != "name"]
    varied = [key for key in varied if len({str(cell.labels.get(key)) for cell in cells}) > 1]
    names = any(cell.cell.labels["name"] != settings_text(cell.cell.changes) for cell in cells)
    if names:  # which stand for the other settings of their points
        settable = {key for cell in cells for key in (*cell.cell.axes, *cell.chosen, "data")}
        varied = [key for key in varied if key in settable]
    paper = any(cell.cell.paper is not None for cell in cells)
    head = [*(["point"] if names else []), *varied, study.metric, *study.columns, "runs"]
    head += [*(["the paper"] if paper else []), "seconds", "FLOPs per run"]
    rows = []
    for cell in cells:
        row = [cell.labels["name"]] if names else []
        row += [str(cell.labels.get(key, "")) for key in varied]
        row += [*(_score(cell, metric) for metric in (study.metric, *study.columns)), _counted(cell)]
        row += [f"{cell.cell.paper:.2f}" if cell.cell.paper is not None else ""] if paper else []
        seconds, flops = cell.seconds(), cell.flops()
        rows.append([*row, "" if seconds is None else f"{seconds:.1f}", "" if not flops else f"{flops:.2e}"])
    return head, rows


def _score(cell: CellResult, metric: str) -> str:
    mean, bounds = cell.mean(metric), cell.bounds(metric)
    if mean is None:
        return ""
    if 0 <= mean <= 1:
        return f"{mean:.2%}" + (f" ({100 * bounds[0]:.2f} to {100 * bounds[1]:.2f})" if bounds else "")
    digits = 0 if float(mean).is_integer() else 1  # a largest batch, a rate
    shown = [f"{value:,.{digits}f}" for value in (mean, *(bounds or ()))]
    return shown[0] + (f" ({shown[1]} to {shown[2]})" if bounds else "")


def _counted(cell: CellResult) -> str:
    """3 of 3; with those that diverged or failed."""
    statuses = [record.status for _, record in cell.runs if record is not None]
    bad = [f"{statuses.count(status)} {status}" for status in ("diverged", "failed") if status in statuses]
    total = len(cell.cell.seeds)
    return "; ".join([f"{statuses.count('ok')} of {total}", *bad])
