"""Results on disk that are computed once: decoded pixels, shard indexes, features.

`DiskCache` is a folder of files. A file's name is its key, a hash of everything that decides its content (`cache_key`),
so a changed input means another file and no entry is ever out of date. Nothing is locked: an entry that another process
removes is computed again.

The file of a split decoded once (`decode_once`) holds the images one after the other (uint8, row-major), then an .npz
archive of their heights and widths and of the reasons why some could not be read, then the length of that archive (8
bytes, little-endian). Every process maps it, so that later epochs decode nothing.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import itertools
import json
import math
import os
import re
import shutil
import time
import zipfile
import zlib
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np

from vitral.atomic import atomic_write
from vitral.data.images import ImageError, UnreadableImage, describe
from vitral.data.loader import read_pixels
from vitral.data.splits import Split, evenly
from vitral.data.workers import CHUNK, map_images
from vitral.events import EventHandler, Note, Progress, ignore_events

IN_USE = 3600  # seconds: an entry that was used within them stays, and so does a temporary file that was written to
# What reading a missing, truncated or foreign JSON or NumPy file raises.
DAMAGE = (OSError, ValueError, TypeError, KeyError, EOFError, RecursionError, zipfile.BadZipFile, zlib.error)

SAMPLE = 64  # images whose headers give the estimated size of all
LARGE = 1e9  # bytes of decoded images from which the user is informed
_LENGTH = 8  # bytes of the archive's length
_CHUNK_BYTES = 4e6  # of decoded images that a worker sends together

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
        """The entry as `load` returns it; None if the file is missing, damaged, or refused by `load`, which returns
        None or raises one of `DAMAGE` for an invalid one."""
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
        """Yield a temporary path that becomes the entry when the block ends; raises OSError if nothing can be
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


def decode_once(
    split: Split,
    folder: Path,
    *,
    channels: int = 3,
    workers: int = 0,
    limit_bytes: float = 4e9,
    on_event: EventHandler = ignore_events,
) -> tuple[Split, list[UnreadableImage]]:
    """Decode all images of a split into one memory-mapped file in a folder, or find the file of an earlier call.

    Returns the split without its unreadable images, and these. The split comes back unchanged if the pixels would
    take more than `limit_bytes` or half of the free disk space, or are in memory anyway. `on_event` receives `Progress`
    while images are decoded, and a `Note` about the disk space.
    """
    expected = _expected_bytes(split, channels) if len(split) else 0.0
    if not len(split) or expected > limit_bytes:
        return split, []
    cache = DiskCache(folder, ".bin")
    key = cache_key({"stamp": split.stamp(), "channels": channels})[:32]
    index = cache.read(key, lambda path: _load(path, len(split), channels))
    if index is None:
        try:
            if expected > _free_bytes(folder) / 2:  # a run has other files to write
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            # Small images travel together: one by one, each takes longer to send than to decode.
            chunk = int(min(max(_CHUNK_BYTES * len(split) / max(expected, 1.0), 1), CHUNK))
            decoded = map_images(partial(_decoded, channels), [split], workers, chunk)
            index = _write(split, decoded, cache, key, limit_bytes, on_event)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            on_event(
                Note(
                    f"not enough disk space in {folder} for decoded {split.name} images: "
                    "they are decoded again in every epoch"
                )
            )
    if index is None:
        return split, []
    if index.nbytes(channels) > LARGE:
        size = f"{index.nbytes(channels) / 1e9:.1f} GB"
        on_event(Note(f"decoded {split.name} images take {size} in {folder} until the run ends"))
    return index.apply(split, cache.path(key), channels)


@dataclass(frozen=True)
class MappedReader:
    """Images in one file of decoded pixels; each process maps the file when it first reads."""

    path: str
    offsets: np.ndarray  # (n,) int64
    shapes: np.ndarray  # (n, 2) height and width
    channels: int
    version: str
    _maps: list[np.ndarray] = field(default_factory=list, compare=False, repr=False)

    def read(self, index: int) -> np.ndarray:
        if not self._maps:
            # Copy on write: torch warns about arrays that cannot be written to, and the file must not change.
            self._maps.append(np.asarray(np.memmap(self.path, np.uint8, mode="c")))
        height, width = self.shapes[index].tolist()
        start = int(self.offsets[index])
        return self._maps[0][start : start + height * width * self.channels].reshape(height, width, self.channels)

    def mark(self, index: int) -> str:
        return f"{self.version} {index}"

    def __reduce__(self) -> tuple[type[MappedReader], tuple[str, np.ndarray, np.ndarray, int, str]]:
        return MappedReader, (self.path, self.offsets, self.shapes, self.channels, self.version)


@dataclass(frozen=True)
class _Index:
    """shapes (n, 2), zero for an unreadable image, and the reasons of those in order."""

    shapes: np.ndarray
    reasons: np.ndarray

    def nbytes(self, channels: int) -> int:
        return int(self.shapes.astype(np.int64).prod(1).sum()) * channels

    def apply(self, split: Split, path: Path, channels: int) -> tuple[Split, list[UnreadableImage]]:
        readable = self.shapes[:, 0] > 0
        shapes = self.shapes[readable]
        sizes = shapes.astype(np.int64).prod(1) * channels
        reader = MappedReader(str(path), np.cumsum(sizes) - sizes, shapes, channels, path.stem)
        missing = [split.keys[index] for index in np.flatnonzero(~readable).tolist()]
        kept = replace(split.select(np.flatnonzero(readable)), reader=reader)
        return kept, [UnreadableImage(key, reason) for key, reason in zip(missing, self.reasons.tolist(), strict=True)]


class _TooLarge(Exception):
    """The pixels take more than the limit: the temporary file is removed."""


def _decoded(channels: int, split: Split, index: int) -> np.ndarray | str:
    """Pixels (h, w, c), or the reason why there are none."""
    try:
        return np.ascontiguousarray(read_pixels(split, index, channels))
    except ImageError as error:
        return str(error)


def _expected_bytes(split: Split, channels: int) -> float:
    """The size of all pixels, estimated from the headers of a sample; infinite for pixels that need no decoding."""
    sizes = []
    for index in evenly(len(split), SAMPLE).tolist():
        with contextlib.suppress(ImageError):
            data = split.reader.read(index)
            if isinstance(data, np.ndarray):
                return np.inf
            header = describe(data)
            sizes.append(header.width * header.height * channels)
    return len(split) * float(np.mean(sizes)) if sizes else 0.0


def _free_bytes(folder: Path) -> int:
    """Of the disk that the folder is on, or will be."""
    return shutil.disk_usage(next(parent for parent in (folder, *folder.parents) if parent.exists())).free


def _load(path: Path, n: int, channels: int) -> _Index | None:
    """The index of a complete file of n images, or None."""
    with path.open("rb") as stream:
        stream.seek(-_LENGTH, os.SEEK_END)
        length = int.from_bytes(stream.read(_LENGTH), "little")
        stream.seek(-_LENGTH - length, os.SEEK_END)
        pixel_bytes = stream.tell()
        with np.load(io.BytesIO(stream.read(length))) as arrays:
            index = _Index(arrays["shapes"], arrays["reasons"])
    return index if index.shapes.shape == (n, 2) and pixel_bytes == index.nbytes(channels) else None


def _write(
    split: Split,
    decoded: Generator[list[np.ndarray | str]],
    cache: DiskCache,
    key: str,
    limit_bytes: float,
    on_event: EventHandler,
) -> _Index | None:
    """Decode everything into the cache; None, and no file, if that would exceed the limit."""
    images = contextlib.closing(decoded)
    with contextlib.suppress(_TooLarge), images as chunks, cache.write(key) as path, path.open("wb") as stream:
        index = _write_pixels(stream, itertools.chain.from_iterable(chunks), split, limit_bytes, on_event)
        archive = io.BytesIO()
        np.savez(archive, shapes=index.shapes, reasons=index.reasons)
        stream.write(archive.getvalue() + len(archive.getvalue()).to_bytes(_LENGTH, "little"))
        return index
    return None


def _write_pixels(
    stream: BinaryIO, images: Iterable[np.ndarray | str], split: Split, limit_bytes: float, on_event: EventHandler
) -> _Index:
    shapes, reasons, written = np.zeros((len(split), 2), np.int32), [], 0
    for index, pixels in enumerate(images):
        if isinstance(pixels, str):
            reasons.append(pixels)
        else:
            shapes[index] = pixels.shape[:2]
            written += stream.write(pixels.data)
        if written > limit_bytes:
            raise _TooLarge
        on_event(Progress(f"reading {split.name}", index + 1, len(split)))
    return _Index(shapes, np.array(reasons, dtype=np.str_))
