"""Batches of images in torch tensors, made by worker processes, in an order that needs no state.

The order of examples is a function of (seed, step) alone, so a run that starts at a later step reads what the
uninterrupted run would have read there. The order of an epoch is a permutation that is computed position by position: a
Feistel network (a chain of invertible steps, each of which changes one half of a number by a hash of the other half)
over the smallest power of two that is at least n, applied again to any result at or above n ("cycle walking").

Item i of the dataset that the workers read is the whole batch of step `first_step + i`. Workers write pixels into a few
shared buffers in turn, and each batch is copied out before its buffer is filled again: allocating and clearing new
shared memory for every batch takes longer than the copy.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitral.data.augment import CallableTransform
from vitral.data.images import ImageError, decode, open_lazily
from vitral.data.pixels import ImageInput
from vitral.data.preprocess import Pipeline
from vitral.data.splits import Split
from vitral.data.workers import (
    PREFETCH,
    BufferLayout,
    PackedCrops,
    ResizeCrops,
    copy_buffer,
    iterate_in_workers,
    new_buffer,
)
from vitral.errors import UserError

PADDING = -1  # the index of a row that only fills up the last batch
MAX_WORKERS = 32
SMALL = 4096  # up to here sorting is as fast, and all orders are equally likely, which a network does not achieve

Transform = Pipeline | CallableTransform


class Batch(NamedTuple):
    """One rank's images of a step.

    Attributes:
        images: uint8 (b, c, h, w), in memory (b, h, w, c), possibly on a GPU already; float32 where a
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
    """This rank's slice of the global batch, of `batch` images, of each step from `first_step` to before `last_step`.

    Args:
        mix_partner: put one more row in front (`rank_positions`), so that each row can be mixed with the row before
            it, the same for any number of ranks.
        pin: return tensors in pinned memory, if there is a GPU.
        order: indices to draw from, some possibly several times; an epoch is then as long as this array.
        resize: resizes packed crops to images, instead of the workers; the pipeline must end in a random
            crop (`ends_in_random_crop`).
    """
    positions = rank_positions(batch, rank, world, mix_partner=mix_partner)
    examples = len(split) if order is None else len(order)
    rows = partial(_training_rows, order, examples, batch, seed, positions, first_step)
    layout = BufferLayout(transform, len(positions), channels, packed=resize is not None)
    return _batches(split, layout, rows, max(last_step - first_step, 0), workers, pin, resize)


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

    Every rank gets the same number of batches, the last of them possibly all padding, so that ranks stay in step. The
    parameters are those of `training_batches`.
    """
    indices = np.arange(len(split))[rank_slice(len(split), rank, world)]
    largest_share = -(-len(split) // world)
    batch = min(batch, max(largest_share, 1))  # memory is allocated for whole batches
    padded = np.full(-(-largest_share // batch) * batch, PADDING, dtype=np.int64)
    padded[: len(indices)] = indices
    rows = partial(_evaluation_rows, padded.reshape(-1, batch))
    layout = BufferLayout(transform, batch, channels, packed=False)
    return _batches(split, layout, rows, len(padded) // batch, workers, pin)


Rows = tuple[np.ndarray, Sequence[np.random.Generator | None]]  # indices of a batch, and a generator for each


def _training_rows(
    order: np.ndarray | None, examples: int, batch: int, seed: int, positions: np.ndarray, first_step: int, item: int
) -> Rows:
    indices = batch_indices(examples, batch, first_step + item, seed)[positions]
    rngs = [example_rng(seed, first_step + item, int(position)) for position in positions]
    return indices if order is None else order[indices], rngs


def _evaluation_rows(indices: np.ndarray, item: int) -> Rows:
    return indices[item], [None] * indices.shape[1]


def default_workers(device: str, ranks: int = 1) -> int:
    """The number of worker processes that each of `ranks` processes on this machine should start."""
    cores_per_rank = cores() // ranks
    if device == "cpu":  # the model needs the cores itself: one worker hides the reading
        return 1 if cores_per_rank >= 4 else 0
    return min(max(cores_per_rank - 1, 1), MAX_WORKERS)


def cores() -> int:
    """The number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def permute(positions: np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """The examples at these positions of an epoch's order: (m,) below n -> (m,) int64 below n, one-to-one."""
    keys = np.frombuffer(hashlib.blake2b(f"order {seed} {epoch}".encode()).digest(), dtype="<u8").astype(np.uint64)
    if n <= SMALL:
        hashes = _mix(_mix(np.arange(n, dtype=np.uint64) + keys[0]) + keys[1])
        return np.argsort(hashes, kind="stable")[positions]
    low = (n - 1).bit_length() // 2
    high = (n - 1).bit_length() - low
    values = positions.astype(np.uint64)
    outside = np.arange(len(values))
    # A value that leaves the range comes back to it: the cycle it is on began inside.
    while len(outside):
        values[outside] = _feistel(values[outside], low, high, keys)
        outside = outside[values[outside] >= np.uint64(n)]
    return values.astype(np.int64)


def batch_indices(n: int, batch: int, step: int, seed: int) -> np.ndarray:
    """The examples of the global batch of a step, (batch,) int64.

    Each epoch visits each of n examples once; batches continue across epochs, so none is short and none is dropped.
    """
    epochs, positions = np.divmod(step * batch + np.arange(batch, dtype=np.int64), n)
    parts = [permute(positions[epochs == epoch], n, seed, int(epoch)) for epoch in np.unique(epochs)]
    return np.concatenate(parts)


def rank_slice(batch: int, rank: int, world: int) -> slice:
    """The slice of the global batch that a rank computes; the lengths of two ranks differ by at most one."""
    return slice(batch * rank // world, batch * (rank + 1) // world)


def rank_positions(batch: int, rank: int, world: int, *, mix_partner: bool) -> np.ndarray:
    """The positions of a rank's slice in the global batch.

    With `mix_partner` one more comes first: the position before the slice, or the batch's last if there is none.
    """
    local = rank_slice(batch, rank, world)
    return np.arange(local.start - mix_partner, local.stop) % batch


def example_rng(seed: int, step: int, position: int) -> np.random.Generator:
    """The random generator of one example of one step; `position` is its position in the global batch.

    Philox is counter-based: (position, step) in the upper words of its counter gives streams that never overlap.
    """
    return np.random.Generator(np.random.Philox(key=seed % 2**128, counter=[0, 0, position, step]))


def balanced_order(labels: np.ndarray, seed: int) -> np.ndarray:
    """Indices in which every class occurs as often as the largest one: (n,) labels -> (classes * largest,).

    Within a class all examples occur equally often, up to one; the seed chooses those that occur once more.
    """
    if labels.ndim != 1:
        raise UserError("a balanced sampler needs one label per image: use class weights for several labels.")
    rng = np.random.default_rng(seed % 2**128)
    _, counts = np.unique(labels, return_counts=True)
    by_class = np.split(np.argsort(labels, kind="stable"), np.cumsum(counts)[:-1])
    return np.concatenate([np.resize(rng.permutation(members), counts.max()) for members in by_class])


def _feistel(values: np.ndarray, low: int, high: int, keys: np.ndarray) -> np.ndarray:
    """A permutation of the numbers of `low + high` bits: (m,) uint64 -> (m,) uint64."""
    shift, low_mask, high_mask = np.uint64(low), np.uint64(2**low - 1), np.uint64(2**high - 1)
    left, right = values >> shift, values & low_mask
    for first, second in keys.reshape(-1, 2):
        left = left ^ (_mix(right + first) & high_mask)
        right = right ^ (_mix(left + second) & low_mask)
    return (left << shift) | right


def _mix(values: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64: every bit of the input flips half of the output. (m,) uint64 -> (m,) uint64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


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
    rows: Callable[[int], Rows]
    count: int
    buffers: Sequence[Tensor]

    def __len__(self) -> int:
        return self.count

    def buffer(self, item: int) -> Tensor:
        return self.buffers[item % len(self.buffers)]

    def __getitem__(self, item: int) -> _BatchMetadata:
        """Rows without a readable image are zero and not valid."""
        indices, rngs = self.rows(item)
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
    rows: Callable[[int], Rows],
    count: int,
    workers: int,
    pin: bool,
    resize: ResizeCrops | None = None,
) -> Iterator[Batch]:
    """While a batch is copied the workers make at most the PREFETCH * workers next ones, and each of those, like the
    batch itself, has its own buffer. As workers take turns, a buffer is always filled by the same one: a process that
    writes to shared memory for the first time waits for each of its pages."""
    buffers = [new_buffer(layout.nbytes, shared=workers > 0) for _ in range(min(buffer_count(workers), count))]
    batches = _BatchDataset(split, layout, rows, count, buffers)
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
            f"{split.keys[index]} has {pixels.shape[2]} channels and the model takes {channels}: pass other images, or "
            "a model for theirs."
        )
    return np.repeat(pixels, channels, axis=2)
