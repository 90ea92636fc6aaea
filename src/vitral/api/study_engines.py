"""Where the runs of a study are carried out: on this machine, one after the other or several at a time.

An engine is a function that takes a study as it was asked for and a list of pending runs. It may carry them out itself
(`run_local`) or start `StudyJob.command` for each of them elsewhere; runs do not depend on each other, and each appends
its record to the study's folder.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from vitral.api.study_runs import StudyContext, execute
from vitral.checkpoints.lock import FolderLock
from vitral.data.loader import cores
from vitral.errors import UserError
from vitral.events import EventHandler, Note, Progress, ignore_events
from vitral.studies.definition import PlannedRun, Study
from vitral.studies.planning import Record, append_record, plan, read_records
from vitral.training.device_data import shared_residents

_BESIDE = "VITRAL_STUDY_BESIDE"  # tells a process how many others share its device


@dataclass
class StudyJob:
    """A study as it was asked for: what a command for each of its runs needs to know."""

    study: Study
    name: str
    out: Path
    data: tuple[str, ...] = ()
    init: str = ""
    words: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    parallel: int = 0
    keep: bool = False
    device: str = ""

    def sources(self) -> dict[str, str]:
        """The source of each data set; one that is not given is its own name."""
        return {name: _source(name, self.data, self.study.data_names) for name in self.study.data_names}

    def pending(self) -> list[PlannedRun]:
        """The runs to carry out, as far as they are known."""
        current = plan(self.study, read_records(self.out))
        unknown = {*self.only} - {run.id for run in current.runs}
        if unknown:
            raise UserError(f"the study has no run {unknown.pop()}: `--print-commands` lists those that are pending.")
        return [run for run in current.pending if not self.only or run.id in self.only]

    @cached_property
    def context(self) -> StudyContext:
        """What the runs of this process share."""
        beside = int(os.environ.get(_BESIDE, 0))
        return StudyContext(self.study, self.out, self.sources(), self.init, self.device, beside)

    def command(self, ids: Sequence[str]) -> str:
        """The command that carries out some runs."""
        words = ["vitral", "study", "run", self.name, "--out", str(self.out), "--only", *ids]
        options = {"--scale": [self.study.scale] if self.study.scale != "small" else [], "--data": self.data}
        options |= {"--init": [self.init] if self.init else [], "--device": [self.device] if self.device else []}
        options |= {"--set": self.words}
        words += [word for option, values in options.items() if values for word in (option, *values)]
        return shlex.join([*words, *(["--keep"] if self.keep else [])])


def run_local(job: StudyJob, pending: Sequence[PlannedRun], on_event: EventHandler) -> None:
    """Carry out runs on this machine: one after the other here, or several at a time in processes of their own."""
    gpus = torch.cuda.device_count() if job.device in ("", "cuda") else 0
    count = min(job.parallel or max(gpus, 1), len(pending))
    if any(run.cell.measure == "speed" for run in pending):
        count = min(count, max(gpus, 1))  # a device that is shared says nothing about speed
    if count > 1:
        _run_processes(job, pending, count, gpus, on_event)
        return
    inner = on_event if len(pending) == 1 else ignore_events
    with shared_residents():
        for number, run in enumerate(pending, 1):
            with _claimed(job, run) as folder:
                if folder is None:  # another process has it
                    continue
                record = execute(job.context, run, folder / "run", inner)
                append_record(job.out, record)
            if not job.keep:
                shutil.rmtree(folder, ignore_errors=True)
            on_event(Note(f"{number} of {len(pending)}: {run.text}: {_outcome(record, job.study.metric)}"))
            on_event(Progress("study", number, len(pending), unit="runs"))


ENGINES: dict[str, Callable[[StudyJob, Sequence[PlannedRun], EventHandler], None]] = {"local": run_local}


def _run_processes(job: StudyJob, pending: Sequence[PlannedRun], count: int, gpus: int, on_event: EventHandler) -> None:
    """Start processes that each take the next run that no other has claimed."""
    words = shlex.split(replace(job, parallel=1).command([run.id for run in pending]))[1:]
    on_event(Note(f"{count} processes for {len(pending)} runs"))
    processes = []
    try:
        for number in range(count):
            beside = len(range(number % max(gpus, 1), count, max(gpus, 1))) - 1
            environment = {**os.environ, "OMP_NUM_THREADS": str(max(cores() // count, 1)), _BESIDE: str(beside)}
            if gpus:
                visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpus > 1 else []
                devices = visible if len(visible) == gpus else [str(gpu) for gpu in range(gpus)]
                environment["CUDA_VISIBLE_DEVICES"] = devices[number % gpus]
            command = [sys.executable, "-m", "vitral", *words, "--parallel", "1"]
            processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL))
        codes = [process.wait() for process in processes]
    finally:
        for process in processes:
            process.terminate()
    if any(codes):
        on_event(Note(f"{sum(map(bool, codes))} of {count} processes ended with an error"))


@contextmanager
def _claimed(job: StudyJob, run: PlannedRun) -> Iterator[Path | None]:
    """The folder of a run, locked; None where another process works on it, or has finished it."""
    folder = job.out / "running" / run.id
    folder.mkdir(parents=True, exist_ok=True)
    lock = FolderLock(folder)
    try:
        lock.acquire()
    except UserError:
        yield None
        return
    try:
        record = read_records(job.out).get(run.id)
        yield None if record is not None and record.status != "failed" else folder
    finally:
        lock.release()


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
