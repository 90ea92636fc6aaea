"""The order of examples as a function of (seed, step) alone, so that there is no sampler state to save.

The order of an epoch is a permutation that is computed position by position: a Feistel network (a chain of invertible
steps, each of which changes one half of a number by a hash of the other half) over the smallest power of two that is at
least n, applied again to any result at or above n ("cycle walking"). No array of the size of the data set is kept.
"""

from __future__ import annotations

import hashlib

import numpy as np

from vitral.errors import UserError

SMALL = 4096  # up to here sorting is as fast, and all orders are equally likely, which a network does not achieve


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


def evaluation_indices(n: int, rank: int, world: int) -> np.ndarray:
    """The examples that a rank evaluates, in order: each of n belongs to exactly one rank."""
    part = rank_slice(n, rank, world)
    return np.arange(part.start, part.stop, dtype=np.int64)


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
