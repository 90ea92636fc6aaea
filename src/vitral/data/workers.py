"""Worker processes: ordered results, and shared memory for the pixels of a batch.

A buffer holds finished images, or crops that are yet to be resized: resizing takes a quarter of a worker's time and
almost none of a GPU's. Both give the same pixels (`pixels.resize`), so a crop that is too large to be handed over is
resized by the worker.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import mmap
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from vitral.data.augment import CallableTransform
from vitral.data.pixels import ImageInput, resize
from vitral.data.preprocess import Pipeline
from vitral.data.splits import Split
from vitral.errors import UserError

PREFETCH = 2  # items that each worker makes in advance
CHUNK = 64  # images per item of `map_images`
MAX_SHRINK = 4  # the factor by which a GPU may shrink a crop: a larger crop is resized by the worker
_PACKED_FACTOR = 2  # times the images' bytes: enough for random crops of 500 x 375 pixels if images have 224 x 224

ReadImage = Callable[[Split, int], Any]


def map_images(read: ReadImage, splits: Sequence[Split], workers: int, chunk: int = CHUNK) -> Generator[list[Any]]:
    """`read(split, index)` of every image of some splits in order, in lists of `chunk`, made by worker processes."""
    return iterate_in_workers(_Chunks(read, splits, chunk), workers)


@dataclass(frozen=True)
class _Chunks:
    """A map-style dataset of lists of results, for the workers."""

    read: ReadImage
    splits: Sequence[Split]
    chunk: int

    def __len__(self) -> int:
        return -(-sum(map(len, self.splits)) // self.chunk)

    def __getitem__(self, item: int) -> list[Any]:
        ends = np.cumsum([len(split) for split in self.splits])
        results = []
        for index in range(item * self.chunk, min((item + 1) * self.chunk, int(ends[-1]))):
            number = int(np.searchsorted(ends, index, "right"))
            split = self.splits[number]
            results.append(self.read(split, index - int(ends[number]) + len(split)))
        return results


def iterate_in_workers(dataset: Sized, workers: int) -> Generator[Any]:
    """The items of a map-style dataset in order, made by worker processes, or in this process if `workers` is 0.

    When the consumer stops early and closes the generator, the loader and its processes end.
    """
    workers = min(workers, len(dataset))
    if workers:  # registered once, and to run before Python's own handlers
        atexit.unregister(_end_workers)
        atexit.register(_end_workers)
    loader = DataLoader(
        _ErrorsAsItems(dataset),  # type: ignore[arg-type]
        batch_size=None,
        num_workers=workers,
        prefetch_factor=PREFETCH if workers else None,
        collate_fn=_identity,
        worker_init_fn=_start_worker,
        generator=torch.Generator(),  # by default a loader draws from the global generator, which dropout uses
    )
    items: Any = iter(loader)
    exiting = sys.is_finalizing  # a local name: at the end of the program those of modules are gone
    try:
        with _explained_end(items):
            for item in items:
                if isinstance(item, UserError):
                    raise item
                yield item
    finally:
        if workers and not exiting():  # else `_end_workers` has killed them
            items._shutdown_workers()  # as when the iterator is deleted, which an exception's traceback may delay
            for process in items._workers:  # torch sends SIGTERM to those that are late, and they ignore it
                process.kill()
                process.join()


@contextlib.contextmanager
def _explained_end(items: Any) -> Iterator[None]:
    """Explain the end of a worker process: the system kills one that needs more memory than there is.

    One that is started from scratch (the default of macOS and Windows) imports the user's script, and may fail at that.
    The processes have the exit codes; PyTorch's error names one only if it noticed the end by a signal.
    """
    try:
        yield
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker"):
            raise
        codes = [process.exitcode for process in getattr(items, "_workers", ())]
        if "exit code" in f"{error} {error.__cause__}" or any(code is not None and code > 0 for code in codes):
            raise UserError(
                "a worker process that reads images failed, with its error printed above: set workers=0, or, in a "
                'script, put the calls that start work under `if __name__ == "__main__":`.'
            ) from error
        raise UserError(
            "a worker process that reads images was killed, as happens when memory runs out: "
            "set fewer workers or a smaller batch, or free some memory."
        ) from error


@dataclass(frozen=True)
class _ErrorsAsItems:
    """Returns a UserError as an item: torch would raise it with a worker's traceback in its message."""

    dataset: Any

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, item: int) -> Any:
        try:
            return self.dataset[item]
        except UserError as error:
            return error


def _identity(item: Any) -> Any:
    return item


def _end_workers() -> None:
    """At the end of a program that still holds a loader: its workers ignore signals (`_start_worker`), and Python would
    wait for them for ever."""
    if hasattr(signal, "SIGCHLD"):  # not on Windows
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's own handler would report the workers killed here
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()


def _start_worker(worker: int) -> None:
    """Ignore Ctrl-C and SIGTERM, which reach the whole process group: the training process still has to finish its step
    and save, and ends the workers itself (they also end by themselves when it is gone)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        os._exit(1)  # the parent died before torch recorded its id: this process would wait for ever


class PackedCrops(NamedTuple):
    """pixels uint8 (n,), one crop (h, w, c) after the other; table int64 (b, 4): offset, height, width, and 1 if the
    crop is to be mirrored."""

    pixels: Tensor
    table: Tensor


ResizeCrops = Callable[[PackedCrops], Tensor]  # crops -> images uint8 (b, c, h, w)


@dataclass(frozen=True)
class BufferLayout:
    """What a buffer holds: `rows` images of the pipeline's size and dtype, or packed crops."""

    pipeline: Pipeline | CallableTransform
    rows: int
    channels: int
    packed: bool

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(b, h, w, c) of the final images."""
        return self.rows, *self.pipeline.size, self.channels

    @property
    def nbytes(self) -> int:
        return (_PACKED_FACTOR if self.packed else 1) * math.prod(self.shape) * self.pipeline.dtype.itemsize

    def writer(self, buffer: Tensor) -> ImageWriter | CropWriter:
        return (CropWriter if self.packed else ImageWriter)(self, buffer.numpy())


class ImageWriter:
    """Fills a buffer with finished images."""

    table = None

    def __init__(self, layout: BufferLayout, buffer: np.ndarray) -> None:
        self.pipeline, self.used = layout.pipeline, len(buffer)
        self.images = buffer.view(layout.pipeline.dtype).reshape(layout.shape)

    def write(self, row: int, image: ImageInput, rng: np.random.Generator | None) -> None:
        """Raises ImageError."""
        self.images[row] = self.pipeline(image, rng)

    def leave_blank(self, row: int) -> None:
        self.images[row] = 0


class CropWriter:
    """Fills a buffer with crops, row by row."""

    def __init__(self, layout: BufferLayout, buffer: np.ndarray) -> None:
        assert isinstance(layout.pipeline, Pipeline)
        self.pipeline, self.buffer, self.used = layout.pipeline, buffer, 0
        self.table = np.zeros((layout.rows, 4), np.int64)
        self.blank = np.zeros((1, 1, layout.channels), np.uint8)  # one pixel: resized, it is of one colour

    def write(self, row: int, image: ImageInput, rng: np.random.Generator | None) -> None:
        """Raises ImageError."""
        assert rng is not None  # the crop is random
        pixels, mirrored = self.pipeline.crop_region(image, rng)
        height, width = self.pipeline.size
        reserved = (len(self.table) - row - 1) * height * width * pixels.shape[2]  # bytes for the rows to come
        shrink = max(pixels.shape[0] / height, pixels.shape[1] / width)
        if shrink > MAX_SHRINK or self.used + pixels.size + reserved > len(self.buffer):
            pixels = resize(pixels, (height, width), antialias=self.pipeline.antialias)
        self._append(row, pixels, mirrored)

    def leave_blank(self, row: int) -> None:
        self._append(row, self.blank, mirrored=False)

    def _append(self, row: int, pixels: np.ndarray, mirrored: bool) -> None:
        end = self.used + pixels.size
        np.copyto(self.buffer[self.used : end].reshape(pixels.shape), pixels)
        self.table[row] = self.used, *pixels.shape[:2], mirrored
        self.used = end


def new_buffer(nbytes: int, *, shared: bool) -> Tensor:
    """uint8 (nbytes,), uninitialised; what other processes write to a shared buffer is visible here."""
    if not shared:
        return torch.empty(nbytes, dtype=torch.uint8)
    if multiprocessing.get_start_method() == "fork":
        # Memory that children inherit. Any other takes space in /dev/shm, of which a container may have 64 MB.
        return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
    # Not share_memory_(): it copies, and there is nothing to copy yet.
    return torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(nbytes))


def copy_buffer(buffer: Tensor, used: int, *, pin: bool) -> Tensor:
    """uint8 (used,) in separate memory, so that the buffer can be filled again."""
    if pin:
        pixels = torch.empty(used, dtype=torch.uint8, pin_memory=True)
    else:
        # NumPy allocates huge pages; torch allocates small ones, which take longer to map than to fill.
        pixels = torch.from_numpy(np.empty(used, np.uint8))
    np.copyto(pixels.numpy(), buffer.numpy()[:used])  # torch would use the cores that the workers run on
    return pixels
