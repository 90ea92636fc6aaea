"""Batches of images in torch tensors, made by worker processes, in an order that needs no state.

Item i of the dataset that the workers read is the whole batch of step `first_step + i`. So the order is that of the
steps whatever the number of workers, and a run that starts at a later step reads what the uninterrupted run would have
read there.

Workers write pixels into a few shared buffers in turn, and each batch is copied out before its buffer is filled again:
allocating and clearing new shared memory for every batch takes longer than the copy.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import signal
from collections.abc import Generator, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from vitral.data.batch_buffers import BufferLayout, PackedCrops, ResizeCrops, copy_buffer, new_buffer
from vitral.data.geometry import ImageInput
from vitral.data.images import ImageError, decode, open_lazily
from vitral.data.order import batch_indices, evaluation_indices, example_rng, rank_positions
from vitral.data.preprocess import Pipeline
from vitral.data.sources import Split
from vitral.data.transforms import CallableTransform
from vitral.errors import UserError

PADDING = -1  # the index of a row that only fills up the last batch
MAX_WORKERS = 32
PREFETCH = 2  # batches that each worker makes in advance

Transform = Pipeline | CallableTransform


class Batch(NamedTuple):
    """One rank's images of a step.

    Attributes:
        images: uint8 (b, c, h, w), in memory (b, h, w, c), perhaps on a GPU already; float32 where a
            `CallableTransform` gives such; or float features (b, d).
        labels: int64 (b,) or uint8 (b, k).
        valid: bool (b,), False for padding and for an image that could not be read.
        indices: int64 (b,), positions of the examples in the split.
    """

    images: Tensor
    labels: Tensor
    valid: Tensor
    indices: Tensor


def training_batches(
    split: Split,
    transform: Transform,
    *,
    batch: int,
    seed: int,
    first_step: int,
    last_step: int,
    rank: int = 0,
    world: int = 1,
    workers: int = 0,
    channels: int = 3,
    mix_partner: bool = False,
    pin: bool = False,
    order: np.ndarray | None = None,
    resize: ResizeCrops | None = None,
) -> Iterator[Batch]:
    """This rank's slice of the global batch of each step.

    Args:
        split: the images.
        transform: what makes an image of them.
        batch: images of the global batch.
        seed: of the order and of the augmentations.
        first_step: the first step to yield, counted from 0.
        last_step: the step to stop before.
        rank: of this process.
        world: the number of processes.
        workers: worker processes; 0 reads in this one.
        channels: of the images.
        mix_partner: put one more row in front (`rank_positions`), so that each row can be mixed with the row before
            it, alike on any number of ranks.
        pin: return tensors in pinned memory, where there is a GPU.
        order: indices to draw from, some perhaps several times; an epoch is then as long as this array.
        resize: makes images of packed crops, where workers shall leave that to it; the pipeline must end in a random
            crop (`ends_in_random_crop`).
    """
    positions = rank_positions(batch, rank, world, mix_partner=mix_partner)
    examples = len(split) if order is None else len(order)
    sampler = _TrainingSampler(order, examples, batch, seed, positions, range(first_step, last_step))
    layout = BufferLayout(transform, len(positions), channels, packed=resize is not None)
    return _batches(split, layout, sampler, workers, pin, resize)


def evaluation_batches(
    split: Split,
    transform: Transform,
    *,
    batch: int,
    rank: int = 0,
    world: int = 1,
    workers: int = 0,
    channels: int = 3,
    pin: bool = False,
) -> Iterator[Batch]:
    """This rank's share of a split in order, in batches of one size; invalid rows fill up the last batch.

    Every rank gets equally many batches, the last of them perhaps all padding, so that ranks stay in step. The
    parameters are those of `training_batches`.
    """
    indices = evaluation_indices(len(split), rank, world)
    largest_share = -(-len(split) // world)
    batch = min(batch, max(largest_share, 1))  # memory is allocated for whole batches
    padded = np.full(-(-largest_share // batch) * batch, PADDING, dtype=np.int64)
    padded[: len(indices)] = indices
    layout = BufferLayout(transform, batch, channels, packed=False)
    return _batches(split, layout, _EvaluationSampler(padded.reshape(-1, batch)), workers, pin)


def default_workers(device: str, ranks: int = 1) -> int:
    """The number of worker processes that each of `ranks` processes on this machine should start.

    Args:
        device: the type of the model's device. On a CPU the model needs the cores itself: one worker hides the reading.
        ranks: training processes on this machine.
    """
    cores_per_rank = cores() // ranks
    if device == "cpu":
        return 1 if cores_per_rank >= 4 else 0
    return min(max(cores_per_rank - 1, 1), MAX_WORKERS)


def cores() -> int:
    """The number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class _TrainingSampler:
    """Which examples each step reads, and the random generator of each."""

    order: np.ndarray | None
    examples: int
    batch: int
    seed: int
    positions: np.ndarray  # (b,) this rank's positions in the global batch
    steps: range

    def __len__(self) -> int:
        return len(self.steps)

    def __call__(self, item: int) -> tuple[np.ndarray, Sequence[np.random.Generator | None]]:
        step = self.steps[item]
        indices = batch_indices(self.examples, self.batch, step, self.seed)[self.positions]
        rngs = [example_rng(self.seed, step, int(position)) for position in self.positions]
        return indices if self.order is None else self.order[indices], rngs


@dataclass(frozen=True)
class _EvaluationSampler:
    rows: np.ndarray  # (batches, b) indices, PADDING at the end

    def __len__(self) -> int:
        return len(self.rows)

    def __call__(self, item: int) -> tuple[np.ndarray, Sequence[np.random.Generator | None]]:
        return self.rows[item], [None] * len(self.rows[item])


class _BatchMetadata(NamedTuple):
    """A batch without its pixels: so small that it is sent through a pipe rather than shared memory."""

    labels: np.ndarray
    valid: np.ndarray
    indices: np.ndarray
    used: int  # bytes of the buffer
    table: np.ndarray | None  # of packed crops, see `PackedCrops`


@dataclass(frozen=True)
class _BatchDataset:
    """A map-style dataset of batches: an item's pixels go into its buffer, and the metadata is returned."""

    split: Split
    layout: BufferLayout
    sampler: _TrainingSampler | _EvaluationSampler
    buffers: Sequence[Tensor]

    def __len__(self) -> int:
        return len(self.sampler)

    def buffer(self, item: int) -> Tensor:
        return self.buffers[item % len(self.buffers)]

    def __getitem__(self, item: int) -> _BatchMetadata:
        """Rows without a readable image are zero and not valid."""
        indices, rngs = self.sampler(item)
        writer, valid = self.layout.writer(self.buffer(item)), np.zeros(len(indices), dtype=bool)
        labels = np.zeros((len(indices), *self.split.labels.shape[1:]), dtype=self.split.labels.dtype)
        for row, (index, rng) in enumerate(zip(indices.tolist(), rngs, strict=True)):
            if index != PADDING:
                labels[row] = self.split.labels[index]
                with contextlib.suppress(ImageError):
                    writer.write(row, _read_lazily(self.split, index, self.layout.channels), rng)
                    valid[row] = True
            if not valid[row]:
                writer.leave_blank(row)
        return _BatchMetadata(labels, valid, indices, writer.used, writer.table)


def _batches(
    split: Split,
    layout: BufferLayout,
    sampler: _TrainingSampler | _EvaluationSampler,
    workers: int,
    pin: bool,
    resize: ResizeCrops | None = None,
) -> Iterator[Batch]:
    """While a batch is copied the workers make at most the PREFETCH * workers next ones, and each of those, like the
    batch itself, has its own buffer. As workers take turns, a buffer is always filled by the same one: a process that
    writes to shared memory for the first time waits for each of its pages."""
    count = min(buffer_count(workers), len(sampler))
    buffers = [new_buffer(layout.nbytes, shared=workers > 0) for _ in range(count)]
    batches = _BatchDataset(split, layout, sampler, buffers)
    pin = pin and torch.cuda.is_available()
    # Closed explicitly: the first releases of Python 3.12 keep what a closed generator was looping over.
    with contextlib.closing(iterate_in_workers(batches, workers)) as items:
        for item, metadata in enumerate(items):
            pixels = copy_buffer(batches.buffer(item), metadata.used, pin=pin)
            images = _images(pixels, metadata, layout, resize)
            others = (torch.from_numpy(array) for array in (metadata.labels, metadata.valid, metadata.indices))
            yield Batch(images, *(tensor.pin_memory() if pin else tensor for tensor in others))


def _images(pixels: Tensor, metadata: _BatchMetadata, layout: BufferLayout, resize: ResizeCrops | None) -> Tensor:
    if resize is None or metadata.table is None:
        dtype = torch.float32 if layout.pipeline.dtype == np.float32 else torch.uint8
        return pixels.view(dtype).view(layout.shape).permute(0, 3, 1, 2)
    table = torch.from_numpy(metadata.table)
    return resize(PackedCrops(pixels, table.pin_memory() if pixels.is_pinned() else table))


def buffer_count(workers: int) -> int:
    """How many batches a loader has shared memory for."""
    return (PREFETCH + 1) * workers or 1


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
    with _killed_workers():
        for item in loader:
            if isinstance(item, UserError):
                raise item
            yield item


@contextlib.contextmanager
def _killed_workers() -> Iterator[None]:
    """Explain the end of a worker process: the system kills one that needs more memory than there is."""
    try:
        yield
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker"):
            raise
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


def read_pixels(split: Split, index: int, channels: int) -> np.ndarray:
    """One example's uint8 (h, w, channels); raises ImageError."""
    data = split.reader.read(index)
    return _with_channels(split, index, data, channels) if isinstance(data, np.ndarray) else decode(data, channels)


def _read_lazily(split: Split, index: int, channels: int) -> ImageInput:
    """The same for a pipeline, which may need only a part of the image decoded."""
    data = split.reader.read(index)
    return _with_channels(split, index, data, channels) if isinstance(data, np.ndarray) else open_lazily(data, channels)


def _with_channels(split: Split, index: int, pixels: np.ndarray, channels: int) -> np.ndarray:
    if pixels.shape[2] == channels:
        return pixels
    if pixels.shape[2] != 1:
        raise UserError(
            f"{split.keys[index]} has {pixels.shape[2]} channels and the model takes {channels}: change one."
        )
    return np.repeat(pixels, channels, axis=2)


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
