"""Examples to batches: uint8 images in torch tensors, made by worker processes, in an order that needs no state.

Item i of what the workers read is the whole batch of step `first_step + i`. So the order is that of the steps whatever
the number of workers, and a run that starts at a later step reads what the uninterrupted run would have read there.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from vitral.data.images import UnreadableImage, decode
from vitral.data.order import batch_indices, evaluation_indices, example_rng, rank_slice
from vitral.data.preprocess import Pipeline
from vitral.data.sources import Split
from vitral.errors import UserError

PADDING = -1  # the index of a row that only fills up the last batch
MOST_WORKERS = 32


class Batch(NamedTuple):
    """images uint8 (b, c, h, w) or float features (b, d); labels int64 (b,) or uint8 (b, k); valid bool (b,), False
    for padding and for an image that could not be read; indices int64 (b,), the examples' places in the split."""

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
) -> Iterator[Batch]:
    """This rank's slice of the global batch of each step from `first_step` up to, not including, `last_step`.

    With `partners` one row more stands in front: the example before the slice's first one in the global batch (before
    its first comes its last). A row can then be mixed with the row before it, on any number of ranks alike.
    `order` holds the indices to draw from, some perhaps several times; an epoch is then as long as it is.
    """
    own = rank_slice(batch, rank, world)
    positions = np.arange(own.start - partners, own.stop) % batch
    steps = range(first_step, last_step)
    batches = _TrainingBatches(split, pipeline, channels, batch, seed, positions, steps, order)
    return in_workers(batches, workers, pin=pin)


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
    rows = np.full(-(-largest_share // batch) * batch, PADDING, dtype=np.int64)
    rows[: len(indices)] = indices
    return in_workers(_EvaluationBatches(split, pipeline, channels, rows.reshape(-1, batch)), workers, pin=pin)


def default_workers(device: str, ranks: int = 1) -> int:
    """How many worker processes each of the `ranks` processes of this machine should start, by the type of device.

    Where the model itself computes on the cores, one worker hides the reading; more would only take its turns.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    own = cores // ranks
    if device == "cpu":
        return 1 if own >= 4 else 0
    return min(max(own - 1, 1), MOST_WORKERS)


@dataclass(frozen=True)
class _TrainingBatches:
    split: Split
    pipeline: Pipeline
    channels: int
    batch: int
    seed: int
    positions: np.ndarray  # (b,) this rank's places in the global batch
    steps: range
    order: np.ndarray | None

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, item: int) -> Batch:
        step = self.steps[item]
        n = len(self.split) if self.order is None else len(self.order)
        indices = batch_indices(n, self.batch, step, self.seed)[self.positions]
        indices = indices if self.order is None else self.order[indices]
        rngs = [example_rng(self.seed, step, int(position)) for position in self.positions]
        return _read_batch(self.split, self.pipeline, self.channels, indices, rngs)


@dataclass(frozen=True)
class _EvaluationBatches:
    split: Split
    pipeline: Pipeline
    channels: int
    rows: np.ndarray  # (batches, b) indices, PADDING at the end

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, item: int) -> Batch:
        indices = self.rows[item]
        return _read_batch(self.split, self.pipeline, self.channels, indices, [None] * len(indices))


def in_workers(items: Sized, workers: int, *, pin: bool = False) -> Iterator[Any]:
    """The items of a map-style data set in order, made by worker processes, or here when there are none.

    When the consumer stops early the generator is closed, the loader dies with it, and so do the processes.
    """
    yield from DataLoader(
        items,  # type: ignore[arg-type]
        batch_size=None,
        num_workers=min(workers, len(items)),
        collate_fn=_as_it_is,
        pin_memory=pin and torch.cuda.is_available(),
        worker_init_fn=_start_worker,
        generator=torch.Generator(),  # without its own, a loader draws from the generator that dropout uses
    )


def read_pixels(split: Split, index: int, channels: int) -> np.ndarray:
    """One example's uint8 (h, w, channels); raises UnreadableImage."""
    found = split.reader.read(index)
    if not isinstance(found, np.ndarray):
        return decode(found, channels)
    if found.shape[2] == channels:
        return found
    if found.shape[2] != 1:
        raise UserError(
            f"{split.keys[index]} has {found.shape[2]} channels and the model takes {channels}: change one."
        )
    return np.repeat(found, channels, axis=2)


def _as_it_is(item: Any) -> Any:
    return item


def _start_worker(worker: int) -> None:
    """A Ctrl-C or a scheduler's SIGTERM reaches the whole group of processes, and the training process still wants to
    finish its step and save: only it ends the workers (who also end by themselves when it is gone)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        os._exit(1)  # killed before torch noted whom to watch: this process would wait for ever


def _read_batch(
    split: Split,
    pipeline: Pipeline,
    channels: int,
    indices: np.ndarray,
    rngs: Sequence[np.random.Generator | None],
) -> Batch:
    """The rows of a batch one after the other; rows without an image are zero and not valid."""
    height, width = pipeline.size
    images = torch.empty(len(indices), channels, height, width, dtype=torch.uint8)
    valid = torch.zeros(len(indices), dtype=torch.bool)
    labels = np.zeros((len(indices), *split.labels.shape[1:]), dtype=split.labels.dtype)
    for row, (index, rng) in enumerate(zip(indices.tolist(), rngs, strict=True)):
        if index == PADDING:
            continue
        labels[row] = split.labels[index]
        with contextlib.suppress(UnreadableImage):
            pixels = pipeline(read_pixels(split, index, channels), rng)
            images[row] = torch.from_numpy(pixels).permute(2, 0, 1)
            valid[row] = True
    images[~valid] = 0
    return Batch(images, torch.from_numpy(labels), valid, torch.from_numpy(indices))
