"""A small split decoded once: all pixels in one file that every process maps, so that no later epoch decodes.

Beside NAME.bin (the images one after the other, uint8, row by row) lies NAME.npz (their heights and widths, and why
some could not be read). NAME holds the split's stamp, so a changed file means another name; the .npz is written last,
so a .bin without it, or of another length than it states, is a torn one and is made again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vitral.atomic import atomic_write
from vitral.data.images import UnreadableImage, describe
from vitral.data.loader import in_workers, read_pixels
from vitral.data.sources import Split

SAMPLE = 64  # images whose headers tell how large all of them will be
LARGE = 1e9  # bytes that a user is told of
ABANDONED = 3600  # seconds after which an unfinished file is nobody's
Problems = list[tuple[str, str]]


def decoded_once(
    split: Split,
    folder: Path,
    *,
    channels: int = 3,
    workers: int = 0,
    limit_bytes: float = 4e9,
    on_progress: Callable[[int, int], None] | None = None,
    on_note: Callable[[str], None] = lambda text: None,
) -> tuple[Split, Problems]:
    """The split reading from decoded pixels in `folder`, and (key, reason) of the images that had to be left out.

    The split comes back as it was where its pixels would take more than `limit_bytes` or half of the free disk, or are
    in memory anyway. `on_progress` hears how many images of how many are decoded, `on_note` what became of the disk.
    """
    expected = _expected_bytes(split, channels) if len(split) else 0.0
    if not len(split) or expected > limit_bytes:
        return split, []
    path = folder / f"{split.stamp()[:32]}-{channels}.bin"
    index = _intact(path, len(split), channels)
    if index is None:
        try:
            if expected > _free_bytes(folder) / 2:  # a run has other files to write
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            index = _write(split, path, channels, workers, limit_bytes, on_progress)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            on_note(f"no room in {folder} for decoded {split.name} images: they are decoded anew in every epoch")
    if index is not None and index.bytes(channels) > LARGE:
        on_note(f"decoded {split.name} images take {index.bytes(channels) / 1e9:.1f} GB in {folder} until the run ends")
    return (split, []) if index is None else index.apply(split, path, channels)


@dataclass(frozen=True)
class MappedReader:
    """Images out of one file of decoded pixels; each process maps it when it first reads."""

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
    """What the .npz holds: shapes (n, 2), zero where an image could not be read, and the reasons of those in order."""

    shapes: np.ndarray
    reasons: np.ndarray

    def bytes(self, channels: int) -> int:
        return int(self.shapes.astype(np.int64).prod(1).sum()) * channels

    def apply(self, split: Split, path: Path, channels: int) -> tuple[Split, Problems]:
        readable = self.shapes[:, 0] > 0
        shapes = self.shapes[readable]
        sizes = shapes.astype(np.int64).prod(1) * channels
        reader = MappedReader(str(path), np.cumsum(sizes) - sizes, shapes, channels, path.stem)
        missing = [split.keys[index] for index in np.flatnonzero(~readable).tolist()]
        kept = replace(split.select(np.flatnonzero(readable)), reader=reader)
        return kept, list(zip(missing, self.reasons.tolist(), strict=True))


class _TooLarge(Exception):
    """The pixels take more than they may: what is written of them goes away."""


@dataclass(frozen=True)
class _Decoded:
    """A data set for the workers: pixels (h, w, c), or the reason why there are none."""

    split: Split
    channels: int

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, index: int) -> Tensor | str:
        try:
            return torch.from_numpy(np.ascontiguousarray(read_pixels(self.split, index, self.channels)))
        except UnreadableImage as error:
            return str(error)


def _expected_bytes(split: Split, channels: int) -> float:
    """The size of all pixels, judged by the headers of some images; infinite for pixels that need no decoding."""
    sizes = []
    for index in np.unique(np.linspace(0, len(split) - 1, SAMPLE).astype(np.int64)).tolist():
        with contextlib.suppress(UnreadableImage):
            data = split.reader.read(index)
            if isinstance(data, np.ndarray):
                return np.inf
            facts = describe(data)
            sizes.append(facts.width * facts.height * channels)
    return len(split) * float(np.mean(sizes)) if sizes else 0.0


def _free_bytes(folder: Path) -> int:
    """Of the disk that the folder is on, or will be."""
    return shutil.disk_usage(next(place for place in (folder, *folder.parents) if place.exists())).free


def _intact(path: Path, n: int, channels: int) -> _Index | None:
    """The index of a complete file, or None."""
    try:
        with path.with_suffix(".npz").open("rb") as stream, np.load(stream) as arrays:
            index = _Index(arrays["shapes"], arrays["reasons"])
        fits = index.shapes.shape == (n, 2) and path.stat().st_size == index.bytes(channels)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    return index if fits else None


def _write(
    split: Split,
    path: Path,
    channels: int,
    workers: int,
    limit_bytes: float,
    on_progress: Callable[[int, int], None] | None,
) -> _Index | None:
    """Decode everything into `path`; None, and no file, where that would pass the limit."""
    _remove_abandoned(path.parent)
    shapes, reasons, written = np.zeros((len(split), 2), np.int32), [], 0
    try:
        with atomic_write(path) as aside, aside.open("wb") as stream:
            for index, pixels in enumerate(in_workers(_Decoded(split, channels), workers)):
                if isinstance(pixels, str):
                    reasons.append(pixels)
                else:
                    shapes[index] = pixels.shape[:2]
                    written += stream.write(pixels.numpy().data)
                if written > limit_bytes:
                    raise _TooLarge
                if on_progress:
                    on_progress(index + 1, len(split))
    except _TooLarge:
        return None
    found = _Index(shapes, np.array(reasons, dtype=np.str_))
    with atomic_write(path.with_suffix(".npz")) as aside, aside.open("wb") as stream:
        np.savez(stream, shapes=found.shapes, reasons=found.reasons)
    return found


def _remove_abandoned(folder: Path) -> None:
    """What killed processes left; a file that is being written has changed within the hour."""
    for unfinished in folder.glob(".*.part"):  # as `atomic_write` names them
        with contextlib.suppress(OSError):
            if time.time() - unfinished.stat().st_mtime > ABANDONED:
                unfinished.unlink()
