"""Atomic writes: a temporary file next to the target, renamed when complete; and early checks of output paths."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import uuid
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from vitral.errors import UserError

_FULL = (errno.ENOSPC, errno.EDQUOT)  # no space left: another path on the same disk would not help


class Unwritable(UserError, OSError):
    """A path that cannot be written: an error for users, and an OSError for caches, which then do without."""


def checked_output(path: str | Path, suffixes: Sequence[str], option: str) -> Path:
    """Check the path of an output file before any work is done; raises UserError.

    The suffix is checked because a forgotten value makes the next argument the file to write, which may be a photo.
    """
    path = Path(path)
    check_writable(path)
    if path.is_dir():
        raise UserError(f"{path} is a folder: name a file inside it.")
    if path.suffix.lower() not in suffixes:
        raise UserError(f"{option} writes a file that ends in {' or '.join(suffixes)}, not {path}: name such a file.")
    return path


def check_writable(path: Path) -> None:
    """Raise if no file or folder can be created at `path`; nothing is left behind."""
    with _errors_name(path):
        tempfile.TemporaryFile(dir=_existing_folder(path)).close()


def check_name(path: Path) -> None:
    """Raise if `path` is not valid UTF-8: neither safetensors nor PyTorch could read weights from there."""
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{path} is not valid UTF-8, and weights cannot be read from such a path: choose another name."
        ) from error


@contextmanager
def atomic_write(path: Path, *, folder: bool = False) -> Generator[Path]:
    """Yield a temporary path beside `path`, moved onto `path` when the block ends and removed if it raises.

    A reader sees the old file or the whole new one, even after a power failure. With `folder=True` the temporary path
    is an existing folder; the target must then be new or empty.
    """
    with _errors_name(path):
        _existing_folder(path)
        if path.is_dir() and not folder:
            raise UserError(f"{path} is a folder: name a file inside it.")
        if folder and path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise UserError(f"{path} exists and is not empty: choose another folder, or remove it first.")
        created = [parent for parent in path.parents if not parent.exists()]
        path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        with _errors_name(path):
            temporary.mkdir() if folder else temporary.touch()
        yield temporary
        for written in (*temporary.rglob("*"), temporary):
            _flush(written)
        with _errors_name(path):
            os.replace(temporary, path)
    except BaseException:
        _remove(temporary)
        for parent in created:
            with suppress(OSError):  # another process has written there; the first error matters more
                parent.rmdir()
        raise
    _flush(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write a text file; a reader sees the old one or the whole new one."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, "utf-8")


@contextmanager
def _errors_name(path: Path) -> Generator[None]:
    """Report errors about temporary files and parent folders with the name that the user gave."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise
        raise Unwritable(f"{path} cannot be written ({error.strerror or error}): choose another place.") from error


def _existing_folder(path: Path) -> Path:
    above = next((parent for parent in path.parents if parent.exists()), path)
    if not above.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, f"{above} is not a folder")
    return above


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    """Flush a file to disk; for a folder, its directory entries."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
