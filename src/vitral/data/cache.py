"""Results on disk that are computed once: decoded pixels, shard indexes, features.

`DiskCache` is a folder of files. A file's name is its key, a hash of everything that decides its content (`cache_key`),
so a changed input means another file and no entry is ever out of date:

    cache = DiskCache(cache_folder("features"), ".npz", limit_bytes=20e9)
    key = cache_key({"model": digest, "split": split.stamp()})
    arrays = cache.read(key, load)      # None if there is no entry, or a damaged one
    if arrays is None:
        arrays = compute()
        with cache.write(key) as path:  # a temporary file, renamed when the block ends without an error
            save(path, arrays)

Nothing is locked: an entry that another process removes is computed again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import time
import zipfile
import zlib
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from vitral.atomic import atomic_write

IN_USE = 3600  # seconds: an entry that was used within them stays, and so does a temporary file that was written to
# What reading a missing, truncated or foreign JSON or NumPy file raises.
DAMAGE = (OSError, ValueError, TypeError, KeyError, EOFError, RecursionError, zipfile.BadZipFile, zlib.error)

T = TypeVar("T")


def cache_folder(name: str) -> Path:
    """The folder of one cache: $VITRAL_CACHE/name if the variable is set, else in the user's cache folder."""
    root = os.environ.get("VITRAL_CACHE")
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vitral"
    return (Path(root).expanduser() if root else default) / name


def cache_key(parts: dict[str, Any]) -> str:
    """sha256, in hexadecimal digits, of JSON-ready values by name."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class DiskCache:
    """Files `key + suffix` in one folder.

    Above `limit_bytes` in total, the least recently used entries are removed after a write; the new entry and those
    used within the last hour stay whatever their size. Only files whose names are hexadecimal keys are ever removed, as
    the folder may be shared with other files.
    """

    folder: Path
    suffix: str
    limit_bytes: float = math.inf

    def path(self, key: str) -> Path:
        """The file of an entry, which need not exist."""
        return self.folder / f"{key}{self.suffix}"

    def read(self, key: str, load: Callable[[Path], T | None]) -> T | None:
        """The entry as `load` returns it; None if the file is missing, damaged or refused by `load`.

        Args:
            key: the entry's name.
            load: reads and validates the file; it returns None, or raises one of `DAMAGE`, for an invalid one.
        """
        path = self.path(key)
        try:
            value = load(path)
        except DAMAGE:
            return None
        if value is not None and self.limit_bytes < math.inf:
            with contextlib.suppress(OSError):  # a read-only cache
                os.utime(path)  # most file systems do not record reads
        return value

    @contextlib.contextmanager
    def write(self, key: str) -> Generator[Path]:
        """Yield a temporary path that becomes the entry when the block ends; raises OSError where nothing can be
        written."""
        self._evict(None)
        with atomic_write(self.path(key)) as temporary:
            yield temporary
        self._evict(self.path(key))

    def _evict(self, newest: Path | None) -> None:
        """Remove temporary files of killed processes and, above the limit, the least recently used entries."""
        entries = self._entries()
        total = sum(size for _, _, size, _ in entries)
        for unfinished, age, size, path in sorted(entries, reverse=True):
            if path != newest and age > IN_USE and (unfinished or total > self.limit_bytes):
                with contextlib.suppress(OSError):  # another user's, or open on a system that keeps open files
                    path.unlink(missing_ok=True)
                    total -= size

    def _entries(self) -> list[tuple[bool, float, int, Path]]:
        """Whether each file is a temporary one, the seconds since it was used, its bytes and its path."""
        suffix = re.escape(self.suffix)
        # The second form is how `atomic_write` names its temporary files.
        pattern = re.compile(rf"[0-9a-f]{{16,64}}{suffix}|\.[0-9a-f]{{16,64}}{suffix}\.[0-9a-f]{{8}}\.part")
        entries, now = [], time.time()
        for path in self.folder.glob("*"):
            if pattern.fullmatch(path.name):
                with contextlib.suppress(OSError):  # removed since
                    stat = path.stat()
                    entries.append((path.suffix == ".part", now - stat.st_mtime, stat.st_size, path))
        return entries
