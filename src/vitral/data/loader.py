"""Examples to batches: uint8 images in torch tensors, made by worker processes, in an order that needs no state.

Item i of what the workers read is the whole batch of step `first_step + i`. So the order is that of the steps whatever
the number of workers, and a run that starts at a later step reads what the uninterrupted run would have read there.

Workers write pixels into a few shared blocks in turn, and each batch is copied out before its block's next turn: the
system takes longer to hand out and clear fresh shared memory for every batch than to copy it.
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

from vitral.data.blocks import Layout, Parts, Resize, copied, new_block
from vitral.data.images import UnreadableImage, decode, undecoded
from vitral.data.order import batch_indices, evaluation_indices, example_rng, rank_positions
from vitral.data.preprocess import Picture, Pipeline
from vitral.data.sources import Split
from vitral.errors import UserError

PADDING = -1  # the index of a row that only fills up the last batch
MOST_WORKERS = 32
AHEAD = 2  # batches that each worker makes before they are asked for


class Batch(NamedTuple):
    """images uint8 (b, c, h, w), in memory (b, h, w, c), perhaps on a GPU already, or float features (b, d); labels
    int64 (b,) or uint8 (b, k); valid bool (b,), False for padding and for an image that could not be read; indices
    int64 (b,), the examples' places in the split."""

    images: Tensor
    labels: Tensor
    valid: Tensor
    indices: Tensor


def training_batches(
    split: Split,
    pipeline: Pipeline,
    *,
    batch: int,
    seed: int,
    first_step: int,
    last_step: int,
    rank: int = 0,
    world: int = 1,
    workers: int = 0,
    channels: int = 3,
    partners: bool = False,
    pin: bool = False,
    order: np.ndarray | None = None,
    resize: Resize | None = None,
) -> Iterator[Batch]:
    """This rank's slice of the global batch of each step from `first_step` up to, not including, `last_step`.

    With `partners` one row more stands in front (`rank_positions`): a row can then be mixed with the row before it, on
    any number of ranks alike.
    `order` holds the indices to draw from, some perhaps several times; an epoch is then as long as it is.
    `resize` makes images of parts, where workers shall leave that to it; the pipeline must end in one (`ends_in_part`).
    """
    positions = rank_positions(batch, rank, world, partners=partners)
    examples = len(split) if order is None else len(order)
    rows = _TrainingRows(order, examples, batch, seed, positions, range(first_step, last_step))
    layout = Layout(pipeline, len(positions), channels, parts=resize is not None)
    return _batches(split, layout, rows, workers, pin, resize)


def evaluation_batches(
    split: Split,
    pipeline: Pipeline,
    *,
    batch: int,
    rank: int = 0,
    world: int = 1,
    workers: int = 0,
    channels: int = 3,
    pin: bool = False,
) -> Iterator[Batch]:
    """This rank's share of a split in order, in batches of one size: rows that are not valid fill up the last.

    Every rank gets equally many batches, the last of them perhaps all padding, so that ranks can keep in step.
    """
    indices = evaluation_indices(len(split), rank, world)
    largest_share = -(-len(split) // world)
    batch = min(batch, max(largest_share, 1))  # memory is taken for whole batches
    rows = np.full(-(-largest_share // batch) * batch, PADDING, dtype=np.int64)
    rows[: len(indices)] = indices
    layout = Layout(pipeline, batch, channels, parts=False)
    return _batches(split, layout, _EvaluationRows(rows.reshape(-1, batch)), workers, pin)


def default_workers(device: str, ranks: int = 1) -> int:
    """How many worker processes each of the `ranks` processes of this machine should start, by the type of device.

    Where the model itself computes on the cores, one worker hides the reading; more would only take its turns.
    """
    own = cores() // ranks
    if device == "cpu":
        return 1 if own >= 4 else 0
    return min(max(own - 1, 1), MOST_WORKERS)


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class _TrainingRows:
    """Which examples each step reads, and the random numbers of each."""

    order: np.ndarray | None
    examples: int
    batch: int
    seed: int
    positions: np.ndarray  # (b,) this rank's places in the global batch
    steps: range

    def __len__(self) -> int:
        return len(self.steps)

    def __call__(self, item: int) -> tuple[np.ndarray, Sequence[np.random.Generator | None]]:
        step = self.steps[item]
        indices = batch_indices(self.examples, self.batch, step, self.seed)[self.positions]
        rngs = [example_rng(self.seed, step, int(position)) for position in self.positions]
        return indices if self.order is None else self.order[indices], rngs


@dataclass(frozen=True)
class _EvaluationRows:
    rows: np.ndarray  # (batches, b) indices, PADDING at the end

    def __len__(self) -> int:
        return len(self.rows)

    def __call__(self, item: int) -> tuple[np.ndarray, Sequence[np.random.Generator | None]]:
        return self.rows[item], [None] * len(self.rows[item])


class _Rest(NamedTuple):
    """A batch without its pixels: so small that sharing memory would cost more than sending it does."""

    labels: np.ndarray
    valid: np.ndarray
    indices: np.ndarray
    used: int  # bytes of the block
    places: np.ndarray | None  # of parts, see `Parts`


@dataclass(frozen=True)
class _Batches:
    """A data set for the workers: asked for an item, it writes the pixels into the item's block and gives the rest."""

    split: Split
    layout: Layout
    rows: _TrainingRows | _EvaluationRows
    blocks: Sequence[Tensor]

    def __len__(self) -> int:
        return len(self.rows)

    def block(self, item: int) -> Tensor:
        return self.blocks[item % len(self.blocks)]

    def __getitem__(self, item: int) -> _Rest:
        """Rows without an image are zero and not valid."""
        indices, rngs = self.rows(item)
        writer, valid = self.layout.writer(self.block(item)), np.zeros(len(indices), dtype=bool)
        labels = np.zeros((len(indices), *self.split.labels.shape[1:]), dtype=self.split.labels.dtype)
        for row, (index, rng) in enumerate(zip(indices.tolist(), rngs, strict=True)):
            if index != PADDING:
                labels[row] = self.split.labels[index]
                with contextlib.suppress(UnreadableImage):
                    writer.write(row, _picture(self.split, index, self.layout.channels), rng)
                    valid[row] = True
            if not valid[row]:
                writer.leave_blank(row)
        return _Rest(labels, valid, indices, writer.used, writer.places)


def _batches(
    split: Split,
    layout: Layout,
    rows: _TrainingRows | _EvaluationRows,
    workers: int,
    pin: bool,
    resize: Resize | None = None,
) -> Iterator[Batch]:
    """While a batch is copied the workers make the AHEAD * workers next ones at most, and each of those, like the batch
    itself, has a block of its own. As workers take turns, a block is always filled by the same one: a process that
    writes to shared memory for the first time waits for each of its pages."""
    blocks = [new_block(layout.room, shared=workers > 0) for _ in range(min(blocks_of(workers), len(rows)))]
    batches = _Batches(split, layout, rows, blocks)
    pin = pin and torch.cuda.is_available()
    # Closed in so many words: the first releases of Python 3.12 keep what a closed generator was looping over.
    with contextlib.closing(in_workers(batches, workers)) as rests:
        for item, rest in enumerate(rests):
            images = _images(copied(batches.block(item), rest.used, pin=pin), rest, layout, resize)
            others = (torch.from_numpy(array) for array in (rest.labels, rest.valid, rest.indices))
            yield Batch(images, *(tensor.pin_memory() if pin else tensor for tensor in others))


def _images(pixels: Tensor, rest: _Rest, layout: Layout, resize: Resize | None) -> Tensor:
    if resize is None or rest.places is None:
        return pixels.view(layout.shape).permute(0, 3, 1, 2)
    places = torch.from_numpy(rest.places)
    return resize(Parts(pixels, places.pin_memory() if pixels.is_pinned() else places))


def blocks_of(workers: int) -> int:
    """How many batches a loader has shared memory for."""
    return (AHEAD + 1) * workers or 1


def in_workers(items: Sized, workers: int) -> Generator[Any]:
    """The items of a map-style data set in order, made by worker processes, or here when there are none.

    When the consumer stops early the generator is closed, the loader dies with it, and so do the processes.
    """
    workers = min(workers, len(items))
    if workers:  # once, and before what Python itself does at the end
        atexit.unregister(_end_workers)
        atexit.register(_end_workers)
    for item in DataLoader(
        _Telling(items),  # type: ignore[arg-type]
        batch_size=None,
        num_workers=workers,
        prefetch_factor=AHEAD if workers else None,
        collate_fn=_as_it_is,
        worker_init_fn=_start_worker,
        generator=torch.Generator(),  # without its own, a loader draws from the generator that dropout uses
    ):
        if isinstance(item, UserError):
            raise item
        yield item


@dataclass(frozen=True)
class _Telling:
    """A mistake that a worker finds comes as an item: torch would hand it on with a traceback."""

    items: Any

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, item: int) -> Any:
        try:
            return self.items[item]
        except UserError as mistake:
            return mistake


def read_pixels(split: Split, index: int, channels: int) -> np.ndarray:
    """One example's uint8 (h, w, channels); raises UnreadableImage."""
    found = split.reader.read(index)
    return _bands(split, index, found, channels) if isinstance(found, np.ndarray) else decode(found, channels)


def _picture(split: Split, index: int, channels: int) -> Picture:
    """The same for a pipeline, which may need but a part of it."""
    found = split.reader.read(index)
    return _bands(split, index, found, channels) if isinstance(found, np.ndarray) else undecoded(found, channels)


def _bands(split: Split, index: int, pixels: np.ndarray, channels: int) -> np.ndarray:
    if pixels.shape[2] == channels:
        return pixels
    if pixels.shape[2] != 1:
        raise UserError(
            f"{split.keys[index]} has {pixels.shape[2]} channels and the model takes {channels}: change one."
        )
    return np.repeat(pixels, channels, axis=2)


def _as_it_is(item: Any) -> Any:
    return item


def _end_workers() -> None:
    """At the end of a program that still holds a loader: its workers do not heed being asked (`_start_worker`), and
    Python would wait for them for ever."""
    if hasattr(signal, "SIGCHLD"):  # not on Windows
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's own handler would complain of those that end here
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()


def _start_worker(worker: int) -> None:
    """A Ctrl-C or a scheduler's SIGTERM reaches the whole group of processes, and the training process still wants to
    finish its step and save: only it ends the workers (who also end by themselves when it is gone)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        os._exit(1)  # killed before torch noted whom to watch: this process would wait for ever
