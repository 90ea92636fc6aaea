"""The lock of a run folder: one run at a time writes there, also on a network file system.

The lock is the file `.lock`, created in one atomic step, which names its owner. The owner touches it twice a minute.
A lock is stale, and the next run takes it over, where its process no longer exists or, if that was on another machine,
if it was not touched for some minutes.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import threading
import time
import uuid
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from vitral.errors import UserError

HEARTBEAT = 30.0  # seconds between two touches of the lock
STALE = 300.0  # seconds without one after which a process of another machine counts as dead
_SETTLE = 1.0  # seconds after which simultaneous takeovers are decided, on file systems without locks
_TRIES = 50
_WAIT = 2.0  # seconds between two looks at a lock that is waited for
_held: set[str] = set()  # tokens of the locks that this process holds


@dataclass(frozen=True)
class LockOwner:
    """The process that holds a lock."""

    host: str
    machine: str  # identifies the space of process numbers, if the system states it
    pid: int
    born: str  # tells the process from a later one with the same number, if the system states it
    since: str  # UTC
    token: str  # of this one lock

    @classmethod
    def current(cls) -> LockOwner:
        since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        pid = os.getpid()
        return cls(socket.gethostname(), _machine(), pid, _process_stat(pid)[1], since, uuid.uuid4().hex)

    @classmethod
    def from_json(cls, text: bytes) -> LockOwner | None:
        """The owner, or None if the file is damaged."""
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError):
            return None

    @property
    def is_local(self) -> bool:
        """Whether this process sees the owner under its process number; on Windows it cannot ask without harm."""
        return os.name != "nt" and (self.host, self.machine) == (socket.gethostname(), _machine())

    def is_alive(self) -> bool:
        """Whether the process of a local owner still exists."""
        if self.pid == os.getpid():
            return self.token in _held
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True  # another user's
        state, born = _process_stat(self.pid)
        return state not in ("Z", "X") and born == self.born


class FolderLock:
    """The lock of one folder, held from `acquire` to `release`."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / ".lock"
        self._owner: LockOwner | None = None
        self._released = threading.Event()

    def acquire(self, *, wait: bool = False) -> None:
        """Take the lock; nothing happens if it is held already. UserError, or `wait`, while another run holds it."""
        while wait:
            try:
                return self.acquire()
            except UserError:
                time.sleep(_WAIT)
        if self._owner is not None:
            return
        owner = LockOwner.current()
        temporary = self.path.with_name(f".lock.{owner.token}.part")
        try:
            for attempt in range(_TRIES):
                time.sleep(0.02 if attempt else 0)
                if self._place(temporary, owner):
                    break
            else:
                raise UserError(f"{self.path} cannot be created: remove it if no run uses the folder, and try again.")
        finally:
            temporary.unlink(missing_ok=True)
        self._owner = owner
        _held.add(owner.token)
        self._released = threading.Event()
        threading.Thread(target=self._beat, args=(owner, self._released), daemon=True).start()

    def confirm(self) -> None:
        """Raise UserError if another run has taken the lock over; nothing happens if it is not held."""
        if self._owner is None:
            return
        current = self._read()
        if current is None and not self.path.exists():  # removed by somebody
            _create(self.path, self._owner)
            current = self._read()
        if current is None or current.token != self._owner.token:
            by = f"process {current.pid} on {current.host}" if current else "another run"
            raise UserError(f"{self.path.parent} was taken over by {by}: this run ends, and leaves the folder to it.")

    def release(self) -> None:
        """Give the lock back; nothing happens if it is not held."""
        if self._owner is None:
            return
        self._released.set()
        with contextlib.suppress(OSError):  # the folder may be gone
            current = self._read()
            if current is not None and current.token == self._owner.token:
                self.path.unlink()
        _held.discard(self._owner.token)
        self._owner = None

    def _place(self, temporary: Path, owner: LockOwner) -> bool:
        """Try once to make the lock ours; False if it must be tried again."""
        temporary.write_text(json.dumps(asdict(owner)), encoding="utf-8")
        now = temporary.stat().st_mtime  # by the clock that also dates the lock, on a network that of the server
        try:
            os.link(temporary, self.path)
            return True
        except FileExistsError:
            return self._take_over(temporary, owner, now)
        except FileNotFoundError:  # the new owner has removed our temporary file
            return False
        except OSError:  # a file system without hard links
            return _create(self.path, owner) or self._take_over(temporary, owner, now)

    def _take_over(self, temporary: Path, owner: LockOwner, now: float) -> bool:
        """Replace a stale lock by ours; raises UserError if it is not stale."""
        try:
            stream = self.path.open("r+b")
        except FileNotFoundError:  # released in this moment
            return False
        except PermissionError as error:
            raise UserError(f"{self.path.parent} is in use by another user's run: choose another folder.") from error
        with stream:
            guarded = _guard(stream)
            stat = os.fstat(stream.fileno())
            if guarded is None or not _is_at(stat, self.path):
                return False  # another process has just taken it over
            current = LockOwner.from_json(stream.read())
            if current is not None and current.token == owner.token:
                return True  # a network file system reported a link that it had made as existing
            if _is_live(current, now - stat.st_mtime):
                raise UserError(_sentence(self.path, current, now - stat.st_mtime))
            if guarded:
                os.replace(temporary, self.path)
        if not guarded:  # closed first, for Windows; the last of several takeovers stays
            os.replace(temporary, self.path)
            time.sleep(_SETTLE)
        placed = self._read()
        return placed is not None and placed.token == owner.token

    def _read(self) -> LockOwner | None:
        try:
            return LockOwner.from_json(self.path.read_bytes())
        except FileNotFoundError:
            return None

    def _beat(self, owner: LockOwner, released: threading.Event) -> None:
        while not released.wait(HEARTBEAT):
            with contextlib.suppress(OSError):  # the next beat may succeed
                current = self._read()
                if current is not None and current.token == owner.token:
                    os.utime(self.path)


def _create(path: Path, owner: LockOwner) -> bool:
    """Create the lock without a hard link; False if there is one."""
    try:
        with path.open("x", encoding="utf-8") as stream:
            stream.write(json.dumps(asdict(owner)))
    except FileExistsError:
        return False
    return True


def _guard(stream: BinaryIO) -> bool | None:
    """Whether this process has the file to itself while it is open: None if another has, False if it is unknown.

    A POSIX lock, unlike flock, also works on NFS and does not pass to forked workers.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        return False
    try:
        fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError as error:
        return None if error.errno in (errno.EAGAIN, errno.EACCES) else False


def _is_at(stat: os.stat_result, path: Path) -> bool:
    try:
        return os.path.samestat(stat, path.stat())
    except FileNotFoundError:
        return False


def _is_live(owner: LockOwner | None, age: float) -> bool:
    if owner is not None and owner.is_local:
        return owner.is_alive()
    return age < STALE


def _sentence(path: Path, owner: LockOwner | None, age: float) -> str:
    if owner is not None and owner.is_local:
        used = f"{path.parent} is in use by process {owner.pid} since {owner.since}"
        return f"{used}: wait until that run ends, or choose another folder with --out."
    by = f"process {owner.pid} on {owner.host}" if owner is not None else "another run"
    return (
        f"{path.parent} is in use by {by} (last sign of life {max(age, 0):.0f} s ago): choose another folder with "
        f"--out or, if that run is dead, start again in {STALE / 60:.0f} minutes or remove {path.name} there."
    )


def _machine() -> str:
    """The system's boot and the process namespace: containers may share a host's name, and two hosts as well."""
    facts = []
    with contextlib.suppress(OSError):
        facts.append(Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip())
        facts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(facts)


def _process_stat(pid: int) -> tuple[str, str]:
    """The state of a process, Z for a zombie, and its start in clock ticks since boot; empty where unknown."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]
