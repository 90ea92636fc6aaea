"""Where work is carried out: in this process, in several on this machine, or by Slurm.

Work is a list of items, the runs of a study or the parts of a large list of images, that do not depend on each other.
Each leaves a record or a file in a folder that all machines share. A process claims an item by a lock, so that any
number of processes may take the same list; what is done stays done, and the same command goes on with the rest.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Protocol

import torch

from vitral.api.slurm import RESTARTED, run_slurm
from vitral.checkpoints.lock import FolderLock
from vitral.data.loader import cores
from vitral.errors import UserError
from vitral.events import EventHandler, Note, Progress, ignore_events
from vitral.training.device_data import shared_residents

Engine = Literal["local", "slurm"]
BESIDE = "VITRAL_BESIDE"  # tells a process how many others share its device


class Work(Protocol):
    """Items to carry out, each known by a word."""

    @property
    def folder(self) -> Path:
        """The folder that all processes and machines share."""
        ...

    @property
    def unit(self) -> str:
        """What the items are called."""
        ...

    @property
    def parallel(self) -> int:
        """Items at a time; 0: as many as the engine likes."""
        ...

    @property
    def device(self) -> str:
        """The device that the user names."""
        ...

    @property
    def alone(self) -> bool:
        """Whether an item must not share its device."""
        ...

    @property
    def keep(self) -> bool:
        """Whether the folders of items are kept."""
        ...

    @property
    def slurm(self) -> Mapping[str, str]:
        """Options of sbatch."""
        ...

    def is_done(self, item: str) -> bool:
        """Whether an item has its result."""
        ...

    def carry_out(self, item: str, folder: Path, on_event: EventHandler) -> None:
        """Carry out an item and write its result; the folder is for its state until then."""
        ...

    def outcome(self, item: str) -> str:
        """What became of an item, in words."""
        ...

    def fail(self, item: str, reason: str, log: str) -> None:
        """Note that the process of an item ended without a result; `log` is the file of what it printed."""
        ...

    def words(self, items: Sequence[str]) -> list[str]:
        """The words after `vitral` of a command that carries out some items in one process."""
        ...


def run_local(work: Work, items: Sequence[str], on_event: EventHandler) -> None:
    """Carry out items on this machine: one after the other here, or several at a time in processes of their own."""
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


ENGINES: dict[str, Callable[[Work, Sequence[str], EventHandler], None]] = {"local": run_local, "slurm": run_slurm}


def command(words: Sequence[str]) -> str:
    """Words after `vitral` as a command for a shell."""
    return shlex.join(["vitral", *words])


def _run_processes(work: Work, items: Sequence[str], count: int, gpus: int, on_event: EventHandler) -> None:
    """Start processes that each take the next item that no other has claimed."""
    words = [sys.executable, "-m", "vitral", *work.words(items), "--parallel", "1"]
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
            processes.append(subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL))
        codes = [process.wait() for process in processes]
    finally:
        for process in processes:
            process.terminate()
    if any(codes):
        on_event(Note(f"{sum(map(bool, codes))} of {count} processes ended with an error"))


@contextmanager
def _claimed(work: Work, item: str) -> Iterator[Path | None]:
    """The folder of an item, locked; None where another process works on it, or has finished it.

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
