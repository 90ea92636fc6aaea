"""One run, one folder: who gets the lock, when it is taken over, and what the others are told."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from patience import wait_until
from runs import Crash, crash_at, make_pictures, outcome, train

from vitral.checkpoints import lock
from vitral.checkpoints.lock import STALE, FolderLock, LockOwner
from vitral.checkpoints.run import RunFolder
from vitral.errors import UserError

CONTENDERS = 8


def forked(action: Callable[[], None]) -> int:
    """A child process that performs an action and ends at once, as after kill -9."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # later Pythons about threads, which torch has
        child = os.fork()
    if child:
        return child
    with contextlib.suppress(Exception):
        action()
    os._exit(0)


def dead_pid() -> int:
    child = forked(lambda: None)
    os.waitpid(child, 0)
    return child


def leave_lock(folder: Path, *, age: float = 0, **changes: Any) -> LockOwner:
    """A lock like ours but for some facts, touched some seconds ago."""
    owner = replace(LockOwner.current(), token="of another run", **changes)
    (folder / ".lock").write_text(json.dumps(asdict(owner)))
    os.utime(folder / ".lock", (time.time() - age,) * 2)
    return owner


def winners(folder: Path) -> int:
    """How many of several processes that start at the same moment get the lock and keep it until all have tried."""
    (ready, start), (tried, tell), (hold, end) = os.pipe(), os.pipe(), os.pipe()

    def contend() -> None:
        os.close(start)
        os.close(end)
        os.read(ready, 1)  # returns when the parent closes its end
        with_lock = FolderLock(folder)
        try:
            with_lock.acquire()
        except Exception as error:
            os.write(tell, f"{type(error).__name__} ".encode())
            return
        os.write(tell, b"won ")
        os.close(tell)
        os.read(hold, 1)
        with_lock.confirm()
        (folder / f"kept-{os.getpid()}").touch()

    children = [forked(contend) for _ in range(CONTENDERS)]
    for number in (ready, start, tell):
        os.close(number)
    outcomes: list[bytes] = []
    while len(outcomes) < CONTENDERS and (read := os.read(tried, 1000)):
        outcomes += read.split()
    for number in (tried, hold, end):
        os.close(number)
    for child in children:
        os.waitpid(child, 0)
    won = len(list(folder.glob("kept-*")))
    assert sorted(outcomes) == [b"UserError"] * (CONTENDERS - won) + [b"won"] * won
    return won


def test_one_of_several_processes_gets_the_lock(tmp_path):
    assert winners(tmp_path) == 1


@pytest.mark.parametrize("repeat", range(3))
def test_one_of_several_processes_takes_a_stale_lock_over(tmp_path, repeat):
    leave_lock(tmp_path, pid=dead_pid())
    assert winners(tmp_path) == 1


def test_also_where_the_file_system_has_neither_links_nor_locks(tmp_path, monkeypatch):
    def refuse(*arguments: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(fcntl, "lockf", refuse)
    (tmp_path / "fresh").mkdir()
    (tmp_path / "stale").mkdir()
    leave_lock(tmp_path / "stale", pid=dead_pid())
    assert winners(tmp_path / "fresh") == 1
    assert winners(tmp_path / "stale") == 1


def test_a_living_process_keeps_its_lock_however_old(tmp_path):
    leave_lock(tmp_path, age=10 * STALE, pid=os.getppid(), born=lock._process_stat(os.getppid())[1])
    with pytest.raises(UserError) as refused:
        FolderLock(tmp_path).acquire()
    assert f"{tmp_path} is in use by process {os.getppid()} since 20" in str(refused.value)
    assert str(refused.value).endswith(": wait until that run ends, or choose another folder with --out.")
    assert list(tmp_path.iterdir()) == [tmp_path / ".lock"]


@pytest.mark.parametrize("changes", [{"born": "1"}, {"pid": os.getpid()}])
def test_a_reused_process_number_is_another_process(tmp_path, changes):
    leave_lock(tmp_path, **{"pid": os.getppid(), **changes})
    FolderLock(tmp_path).acquire()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the state of a process is read from /proc")
def test_a_killed_process_that_nobody_waited_for_is_dead(tmp_path):
    child = forked(lambda: FolderLock(tmp_path).acquire())
    wait_until(lambda: lock._process_stat(child)[0] == "Z")
    assert (tmp_path / ".lock").exists()
    FolderLock(tmp_path).acquire()
    os.waitpid(child, 0)


@pytest.mark.parametrize("changes", [{"host": "elsewhere"}, {"machine": "another boot"}])
def test_another_machine_is_alive_while_its_heartbeat_is_young(tmp_path, changes):
    owner = leave_lock(tmp_path, age=STALE - 30, pid=dead_pid(), **changes)
    with pytest.raises(UserError) as refused:
        FolderLock(tmp_path).acquire()
    assert f"is in use by process {owner.pid} on {owner.host} (last sign of life 27" in str(refused.value)
    assert "if that run is dead, start again in 5 minutes or remove .lock there" in str(refused.value)
    leave_lock(tmp_path, age=STALE + 30, **changes)
    FolderLock(tmp_path).acquire()


def test_a_damaged_lock_is_judged_by_its_age(tmp_path):
    (tmp_path / ".lock").write_text("half")
    with pytest.raises(UserError, match="in use by another run"):
        FolderLock(tmp_path).acquire()
    os.utime(tmp_path / ".lock", (0, 0))
    FolderLock(tmp_path).acquire()


def test_threads_of_one_process_exclude_each_other(tmp_path):
    first, second = FolderLock(tmp_path), FolderLock(tmp_path)
    first.acquire()
    with pytest.raises(UserError, match=f"in use by process {os.getpid()}"):
        second.acquire()
    second.release()  # holds nothing
    first.confirm()
    first.release()
    assert not list(tmp_path.iterdir())
    second.acquire()


def test_a_run_that_lost_its_lock_stops_writing(tmp_path):
    folder = RunFolder(tmp_path)
    folder.make()
    (tmp_path / ".lock").unlink()
    folder.write_text("recipe.toml", "ours")  # nobody else came: the lock is made again
    assert (tmp_path / ".lock").exists()
    leave_lock(tmp_path, host="elsewhere")
    with pytest.raises(UserError, match=r"was taken over by process \d+ on elsewhere"):
        folder.write_text("recipe.toml", "theirs")
    with pytest.raises(UserError, match="was taken over"):
        folder.save_state(1, {}, {}, keep=1)
    folder.unlock()
    assert (tmp_path / ".lock").exists()
    assert (tmp_path / "recipe.toml").read_text() == "ours"


def test_the_lock_is_touched(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "HEARTBEAT", 0.01)
    held = FolderLock(tmp_path)
    held.acquire()
    os.utime(tmp_path / ".lock", (0, 0))
    wait_until(lambda: (tmp_path / ".lock").stat().st_mtime > 1)
    assert (tmp_path / ".lock").stat().st_mtime == pytest.approx(time.time(), abs=60)
    held.release()
    assert not (tmp_path / ".lock").exists()


# Runs


def test_a_second_run_is_refused_and_harms_nothing(tmp_path):
    pictures = make_pictures(tmp_path / "pictures")
    train(pictures, tmp_path / "alone")
    refused: list[str] = []

    def second() -> None:
        part = tmp_path / "run" / "state" / ".step-00000099.safetensors.12345678.part"
        part.touch()
        with pytest.raises(UserError) as error:
            train(pictures, tmp_path / "run", "seed=1")
        refused.append(str(error.value))
        assert part.exists()
        part.unlink()

    def on_event(event: object) -> None:
        if getattr(event, "step", 0) == 4 and not refused:
            thread = threading.Thread(target=second)
            thread.start()
            thread.join()

    train(pictures, tmp_path / "run", on_event=on_event)
    assert len(refused) == 1
    assert f"{tmp_path / 'run'} is in use by process {os.getpid()}" in refused[0]
    assert outcome(tmp_path / "run") == outcome(tmp_path / "alone")
    assert not (tmp_path / "run" / ".lock").exists()


def test_a_run_that_fails_leaves_no_lock(tmp_path):
    pictures = make_pictures(tmp_path / "pictures")
    with pytest.raises(Crash):
        train(pictures, tmp_path / "run", on_event=crash_at(3))
    assert not (tmp_path / "run" / ".lock").exists()
    leave_lock(tmp_path / "run", host=f"not-{socket.gethostname()}")
    with pytest.raises(UserError, match="last sign of life"):
        train(pictures, tmp_path / "run")
