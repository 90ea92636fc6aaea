"""Engines: execute work in this process, in several processes on this machine, or through Slurm.

Work is a list of items, the runs of a study or the parts of a large list of images, that do not depend on each other.
Each leaves a record or a file in a folder that all machines share. A process claims an item by a lock, so that any
number of processes may take the same list; what is done stays done, and the same command goes on with the rest.

For Slurm, submitit writes the script of an array of jobs, each a plain command of `vitral`, and calls sbatch; nothing
is pickled. Which items are queued is known from the names of the jobs, so that a command that was killed and is given
again submits nothing twice. A job that is preempted, or is about to reach its time limit, gets SIGTERM: it saves its
state and exits, and its script puts it back into the queue. One whose node fails is put back by Slurm.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from vitral.atomic import write_text
from vitral.checkpoints.lock import FolderLock
from vitral.data.loader import cores
from vitral.errors import UserError
from vitral.events import EventHandler, Note, Progress, ignore_events
from vitral.training.device_data import shared_residents

Engine = Literal["local", "slurm"]
SlurmOptions = Sequence[str] | Mapping[str, Any]  # ["partition=gpu"] or {"partition": "gpu"}
BESIDE = "VITRAL_BESIDE"  # tells a process how many others share its device
LOG = "VITRAL_LOG"  # tells a job where its output goes
RESTARTED = "SLURM_RESTART_COUNT"  # set by Slurm where a job was requeued
SLURM_FOLDER = "slurm"  # of scripts and logs
_OURS = ("array", "chdir", "error", "input", "job-name", "open-mode", "output", "parsable", "requeue", "wait", "wrap")
_LARGEST = 1000  # tasks of an array; Slurm's own limit is 1001 unless a cluster changes it
_AT_A_TIME = 256  # tasks of an array, unless the user says otherwise
_ITEM = "@ITEM@"
# 130: stopped by Ctrl-C; 143: by SIGTERM, with or without a saved state. A job that never gets on must end.
_REQUEUE = (
    "code=$?",
    f'case $code in 130|143) [ "${{{RESTARTED}:-0}}" -lt 100 ] && scontrol requeue "$SLURM_JOB_ID" ;; esac',
    "exit $code",
)


@dataclass
class Work:
    """Items to execute, each identified by a string."""

    folder: Path  # that all processes and machines share
    parallel: int = 0  # items at a time; 0: as many as the engine likes
    device: str = ""  # that the user names
    keep: bool = False  # the folders of items
    slurm: Mapping[str, str] = field(default_factory=dict)  # options of sbatch
    unit = "items"  # what they are called

    @property
    def alone(self) -> bool:
        """Whether an item must not share its device."""
        return False

    def is_done(self, item: str) -> bool:
        """Whether an item has its result."""
        raise NotImplementedError

    def carry_out(self, item: str, folder: Path, on_event: EventHandler) -> None:
        """Carry out an item and write its result; the folder is for its state until then."""
        raise NotImplementedError

    def outcome(self, item: str) -> str:
        """What became of an item, in words."""
        raise NotImplementedError

    def fail(self, item: str, reason: str, log: str) -> None:
        """Note that the process of an item ended without a result; `log` is the file of what it printed."""
        raise NotImplementedError

    def arguments(self, items: Sequence[str]) -> list[str]:
        """The command-line arguments of `vitral` that execute these items in one process."""
        raise NotImplementedError


def run_local(work: Work, items: Sequence[str], on_event: EventHandler) -> None:
    """Execute items on this machine: one after the other here, or several at a time in separate processes."""
    gpus = torch.cuda.device_count() if work.device in ("", "cuda") else 0
    count = min(work.parallel or max(gpus, 1), len(items))
    if work.alone:
        count = min(count, max(gpus, 1))
    if count > 1:
        _run_processes(work, items, count, gpus, on_event)
        return
    inner = on_event if len(items) == 1 else ignore_events
    with shared_residents():
        for number, item in enumerate(items, 1):
            with _claimed(work, item) as folder:
                if folder is None:  # another process has it
                    continue
                work.carry_out(item, folder, inner)
            if not work.keep:
                shutil.rmtree(folder, ignore_errors=True)
            on_event(Note(f"{number} of {len(items)}: {work.outcome(item)}"))
            on_event(Progress("running", number, len(items), unit=work.unit))


def _run_processes(work: Work, items: Sequence[str], count: int, gpus: int, on_event: EventHandler) -> None:
    """Start processes that each take the next item that no other has claimed."""
    command = [sys.executable, "-m", "vitral", *work.arguments(items), "--parallel", "1"]
    on_event(Note(f"{count} processes for {len(items)} {work.unit}"))
    processes = []
    try:
        for number in range(count):
            beside = len(range(number % max(gpus, 1), count, max(gpus, 1))) - 1
            environment = {**os.environ, "OMP_NUM_THREADS": str(max(cores() // count, 1)), BESIDE: str(beside)}
            if gpus:
                visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpus > 1 else []
                devices = visible if len(visible) == gpus else [str(gpu) for gpu in range(gpus)]
                environment["CUDA_VISIBLE_DEVICES"] = devices[number % gpus]
            processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL))
        codes = [process.wait() for process in processes]
    finally:
        for process in processes:
            process.terminate()
    if any(codes):
        on_event(Note(f"{sum(map(bool, codes))} of {count} processes ended with an error"))


@contextmanager
def _claimed(work: Work, item: str) -> Iterator[Path | None]:
    """The folder of an item, locked; None if another process works on it, or has finished it.

    A job that Slurm has started again waits for the lock: a node that was lost leaves it behind.
    """
    folder = work.folder / "running" / item.replace("/", "-of-")
    folder.mkdir(parents=True, exist_ok=True)
    lock = FolderLock(folder)
    try:
        lock.acquire(wait=RESTARTED in os.environ)
    except UserError:
        yield None
        return
    try:
        yield None if work.is_done(item) else folder
    finally:
        lock.release()


def sbatch_options(given: SlurmOptions) -> dict[str, str]:
    """Options of sbatch as the user gives them; raises UserError if the engine sets one."""
    options = {}
    for word in [f"{key}={value}" for key, value in given.items()] if isinstance(given, Mapping) else given:
        key, separator, value = word.partition("=")
        name = key.strip().lstrip("-").replace("_", "-")
        if not (separator and re.fullmatch(r"[a-z][a-z-]*", name) and value.isprintable()):
            raise UserError(f'--slurm takes KEY=VALUE with an option of sbatch, such as partition=gpu, not "{word}".')
        if name in _OURS:
            raise UserError(f"--slurm {name}=... is set by vitral: omit it.")
        options[name] = value
    return options


def run_slurm(work: Work, items: Sequence[str], on_event: EventHandler) -> None:
    """Submit the items that are not queued yet, and wait until no item is; raises UserError without a Slurm."""
    folder = work.folder / SLURM_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    lock = FolderLock(folder)
    lock.acquire(wait=True)  # of two commands at once, the second finds the first one's jobs
    try:
        jobs = {item: job for item, job in _queued(folder).items() if item in items}
        new = [item for item in items if item not in jobs]
        before = len(jobs)
        for start in range(0, len(new), _LARGEST):
            jobs |= _submit(work, new[start : start + _LARGEST], folder)
    finally:
        lock.release()
    earlier = f", {before} were queued before" if before else ""
    on_event(Note(f"{len(new)} jobs submitted{earlier}; logs in {folder}; jobs continue if this command is stopped"))
    _wait(work, jobs, folder, on_event)


def _submit(work: Work, items: Sequence[str], folder: Path) -> dict[str, str]:
    """Submit an array, and return the job of each item."""
    try:
        from submitit import SlurmExecutor
        from submitit.core.utils import FailedJobError, FailedSubmissionError
    except ImportError as error:
        raise UserError("the engine slurm needs submitit: pip install 'vitral[slurm]'.") from error
    token = uuid.uuid4().hex[:12]
    write_text(folder / f"{token}.json", json.dumps(list(items)))
    command = shlex.join([sys.executable, "-m", "vitral", *work.arguments([_ITEM])]).replace(_ITEM, '"$item"')
    log = shlex.quote(str(folder.absolute())) + "/${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}_0_log.out"
    setup = [
        f"items=({shlex.join(items)})",
        'item="${items[$SLURM_ARRAY_TASK_ID]}"',
        f"export {LOG}={log}",
        'export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$SLURM_CPUS_ON_NODE}"',
        # Since 22.05, srun does not take it from sbatch.
        '[ -z "$SLURM_CPUS_PER_TASK" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"',
    ]
    name = f"vitral-{re.sub('[^A-Za-z0-9.]+', '-', work.folder.absolute().name)}-{token}"
    try:
        executor = SlurmExecutor(folder)
        executor.update_parameters(
            job_name=name,
            time=None,  # the partition's
            array_parallelism=work.parallel or _AT_A_TIME,
            stderr_to_stdout=True,
            setup=setup,
            teardown=list(_REQUEUE),
            additional_parameters={"signal": "TERM@90", "requeue": True, **work.slurm},
        )
        executor.parameters["map_count"] = len(items)
        array = executor._submit_command(command).job_id  # submit() would pickle
    except (FailedJobError, FailedSubmissionError) as error:
        reason = (str(error).strip().splitlines() or [""])[-1]
        raise UserError(f"Slurm refuses the jobs ({reason}): change --slurm.") from error
    except (RuntimeError, OSError) as error:
        raise UserError("this machine has no Slurm (srun, sbatch): run it on a machine that submits jobs.") from error
    return {item: f"{array}_{index}" for index, item in enumerate(items)}


def _queued(folder: Path) -> dict[str, str]:
    """The jobs of a folder's items that wait or run, by item; raises UserError where Slurm does not respond."""
    command = ["squeue", "--me", "--noheader", "--array", "--format=%i|%j"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError("Slurm does not respond (squeue): run this on a machine that submits jobs.") from error
    if answer.returncode:
        raise UserError(f"Slurm does not respond ({answer.stderr.strip()[-150:]}): run the same command again later.")
    items = {path.stem: json.loads(path.read_text("utf-8")) for path in folder.glob("*.json")}
    queued = {}
    for line in answer.stdout.splitlines():
        job, _, name = line.strip().partition("|")
        token, index = name.rpartition("-")[2], job.rpartition("_")[2]
        if token in items and index.isdecimal():
            queued[items[token][int(index)]] = job
    return queued


def _wait(work: Work, jobs: Mapping[str, str], folder: Path, on_event: EventHandler) -> None:
    """Wait until no job is left; items whose job has ended without a result have failed."""
    began, waiting, gone = time.monotonic(), dict(jobs), set[str]()
    while waiting:
        time.sleep(min(15.0, 1.0 + (time.monotonic() - began) / 20))
        try:
            queued = _queued(folder)
        except UserError:  # a controller that is busy or restarts
            continue
        for item, job in list(waiting.items()):
            if item in queued:
                gone.discard(item)
                continue
            if not work.is_done(item) and item not in gone:
                gone.add(item)  # its file may come late on a network: look again
                continue
            del waiting[item]
            if not work.is_done(item):
                work.fail(item, _reason(job), str(folder.absolute() / f"{job}_0_log.out"))
            done = len(jobs) - len(waiting)
            on_event(Note(f"{done} of {len(jobs)}: {work.outcome(item)}"))
            on_event(Progress("running", done, len(jobs), unit=work.unit))


def _reason(job: str) -> str:
    """Why a job has ended, as far as Slurm still knows."""
    command = ["scontrol", "show", "job", "--oneliner", job]
    text = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    facts = dict(word.split("=", 1) for word in text.split() if "=" in word)
    state = facts.get("JobState", "")
    return f"job {job} ended as {state}, exit code {facts.get('ExitCode', '?')}" if state else f"job {job} has ended"


ENGINES: dict[str, Callable[[Work, Sequence[str], EventHandler], None]] = {"local": run_local, "slurm": run_slurm}
