"""Files that are never half written: made beside their place, then renamed onto it; a bad place is told at once."""

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

_FULL = (errno.ENOSPC, errno.EDQUOT)  # another place on the same disk would not help


class Unwritable(UserError, OSError):
    """Nothing can be written there: a user chooses another place; a cache, which expects an OSError, does without."""


def checked_output(path: str | Path, suffixes: Sequence[str], option: str) -> Path:
    """The place of a file that `option` names, before any work is done for it.

    A forgotten value makes the next word the file to write, which may be a photograph: only names that end as the
    file's kind does are taken.
    """
    path = Path(path)
    check_writable(path)
    if path.is_dir():
        raise UserError(f"{path} is a folder: name a file inside it.")
    if path.suffix.lower() not in suffixes:
        raise UserError(f"{option} writes a file that ends in {' or '.join(suffixes)}, not {path}: name such a file.")
    return path


def check_writable(path: Path) -> None:
    """Refuse a place where no file or folder could be made; nothing is left behind."""
    with _told_by_name(path):
        tempfile.TemporaryFile(dir=_existing_folder(path)).close()


def check_name(path: Path) -> None:
    """Refuse a place for weights that neither safetensors nor PyTorch would find again."""
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{path} is not valid UTF-8, and no weights can be read under such a name: choose another name."
        ) from error


@contextmanager
def atomic_write(path: Path, *, folder: bool = False) -> Generator[Path]:
    """Yield a temporary path beside `path`, moved onto `path` when the block ends and removed when it raises.

    A reader sees the old file or the whole new one, also after a power cut. With `folder=True` the temporary path is
    a folder that exists; the target must then be new or empty.
    """
    with _told_by_name(path):
        _existing_folder(path)
        if path.is_dir() and not folder:
            raise UserError(f"{path} is a folder: name a file inside it.")
        if folder and path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise UserError(f"{path} exists and is not empty: choose another folder, or remove it first.")
        made = [parent for parent in path.parents if not parent.exists()]
        path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        with _told_by_name(path):
            aside.mkdir() if folder else aside.touch()
        yield aside
        for written in (*aside.rglob("*"), aside):
            _flush(written)
        with _told_by_name(path):
            os.replace(aside, path)
    except BaseException:
        _remove(aside)
        for parent in made:
            with suppress(OSError):  # somebody else has put something there, and what went wrong is more important
                parent.rmdir()
        raise
    _flush(path.parent)


@contextmanager
def _told_by_name(path: Path) -> Generator[None]:
    """What the system says about a temporary file or a folder above, told of the name that the user knows."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise
        raise Unwritable(f"{path} cannot be written ({error.strerror or error}): choose another place.") from error


def _existing_folder(path: Path) -> Path:
    """The nearest one above."""
    above = next((parent for parent in path.parents if parent.exists()), path)
    if not above.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, f"{above} is no folder")
    return above


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    """Wait until the disk has it; a folder is flushed for the names in it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
