"""Files that are never half written: made beside their place, then renamed onto it."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from vitral.errors import UserError


@contextmanager
def written_aside(path: Path, *, folder: bool = False) -> Generator[Path]:
    """Yield a temporary path beside `path`, moved onto `path` when the block ends and removed when it raises.

    A reader sees the old file or the whole new one, also after a power cut. With `folder=True` the temporary path is
    a folder that exists; the target must then be new or empty.
    """
    if path.is_dir() and not folder:
        raise UserError(f"{path} is a folder: name a file inside it.")
    if folder and path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"{path} exists and is not empty: choose another folder, or remove it first.")
    made = [parent for parent in path.parents if not parent.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        if folder:
            aside.mkdir()
        yield aside
        for written in (*aside.rglob("*"), aside):
            _flush(written)
        os.replace(aside, path)
    except BaseException:
        _remove(aside)
        for parent in made:
            parent.rmdir()
        raise
    _flush(path.parent)


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
