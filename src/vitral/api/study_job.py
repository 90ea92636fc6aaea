"""A study as work for an engine: its pending runs, the command for some of them, and their records."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from vitral.api.engines import BESIDE
from vitral.api.slurm import LOG
from vitral.api.study_runs import StudyContext, execute, record_of, release_run
from vitral.errors import UserError
from vitral.events import EventHandler
from vitral.studies.definition import PlannedRun, Study
from vitral.studies.planning import Record, append_record, plan, read_records


@dataclass
class StudyJob:
    """A study as it was asked for: what a command for each of its runs needs to know."""

    study: Study
    name: str
    folder: Path
    data: tuple[str, ...] = ()
    init: str = ""
    overrides: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    parallel: int = 0
    keep: bool = False
    device: str = ""
    slurm: Mapping[str, str] = field(default_factory=dict)
    unit: str = "runs"

    def sources(self) -> dict[str, str]:
        """The source of each data set; one that is not given is its own name."""
        return {name: _source(name, self.data, self.study.data_names) for name in self.study.data_names}

    def pending(self) -> list[PlannedRun]:
        """The runs to carry out, as far as they are known."""
        current = plan(self.study, read_records(self.folder))
        unknown = {*self.only} - {run.id for run in current.runs}
        if unknown:
            raise UserError(f"the study has no run {unknown.pop()}: `--print-commands` lists those that are pending.")
        return [run for run in current.pending if not self.only or run.id in self.only]

    @cached_property
    def context(self) -> StudyContext:
        """What the runs of this process share."""
        beside = int(os.environ.get(BESIDE, 0))
        return StudyContext(self.study, self.folder, self.sources(), self.init, self.device, beside)

    @property
    def alone(self) -> bool:
        """A device that is shared says nothing about speed."""
        return any(run.cell.measure == "speed" for run in self.pending())

    def is_done(self, item: str) -> bool:
        """Whether a run has a record, other than of a failure."""
        record = read_records(self.folder).get(item)
        return record is not None and record.status != "failed"

    def carry_out(self, item: str, folder: Path, on_event: EventHandler) -> None:
        """Carry out a run, or resume it, and append its record."""
        release_run(folder / "run")
        record = execute(self.context, self._run(item), folder / "run", on_event)
        if record.status == "failed" and LOG in os.environ:
            record = replace(record, reason=_with_log(record.reason, os.environ[LOG]))
        append_record(self.folder, record)

    def outcome(self, item: str) -> str:
        """The score of a run, or why there is none."""
        return f"{self._run(item).text}: {_outcome(read_records(self.folder)[item], self.study.metric)}"

    def fail(self, item: str, reason: str, log: str) -> None:
        """Append the record of a run whose process ended without one."""
        record = read_records(self.folder).get(item)
        if record is None or not record.reason.endswith(log):
            record = replace(record_of(self.context, self._run(item)), status="failed", reason=_with_log(reason, log))
            append_record(self.folder, record)

    def words(self, items: Sequence[str]) -> list[str]:
        """The words after `vitral` of a command that carries out some runs."""
        words = ["study", "run", self.name, "--out", str(self.folder), "--only", *items]
        options = {"--scale": [self.study.scale] if self.study.scale != "small" else [], "--data": self.data}
        options |= {"--init": [self.init] if self.init else [], "--device": [self.device] if self.device else []}
        options |= {"--set": self.overrides}
        words += [word for option, values in options.items() if values for word in (option, *values)]
        return [*words, *(["--keep"] if self.keep else [])]

    def _run(self, item: str) -> PlannedRun:
        return next(run for run in plan(self.study, read_records(self.folder)).runs if run.id == item)


def _with_log(reason: str, log: str) -> str:
    return f"{reason}; log: {log}"


def _outcome(record: Record, metric: str) -> str:
    if record.status != "ok":
        return f"{record.status} ({record.reason})"
    value = record.metrics.get("score" if record.trial else metric)
    shown = "" if value is None else f"{value:.2%}, " if 0 <= value <= 1 else f"{value:,.1f}, "
    return f"{shown}{record.seconds:.1f} s"


def _source(name: str, given: Sequence[str], names: Sequence[str]) -> str:
    """The source that the user gives for a data set of the study."""
    for word in given:
        label, separator, source = word.partition("=")
        if separator and label == name:
            return source
        if word.partition(":")[0] == name:
            return word
    only = len(given) == 1 and len(names) == 1 and "=" not in given[0]
    return given[0] if only else name
