"""The order of examples: a permutation for every (seed, epoch), made place by place, and slices of it for the ranks."""

from __future__ import annotations

import itertools
import math
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats

from vitral.data.loader import (
    SMALL,
    balanced_order,
    batch_indices,
    example_rng,
    permute,
    rank_slice,
)
from vitral.errors import UserError

SEEDS = st.integers(0, 2**63)


@settings(deadline=None, max_examples=60)
@given(n=st.integers(1, 3 * SMALL), seed=SEEDS, epoch=st.integers(0, 10**6))
@example(n=SMALL, seed=0, epoch=0)
@example(n=SMALL + 1, seed=0, epoch=0)
@example(n=2**14, seed=0, epoch=0)
@example(n=2**14 - 1, seed=0, epoch=0)
def test_every_epoch_is_a_permutation(n: int, seed: int, epoch: int):
    assert np.array_equal(np.sort(permute(np.arange(n), n, seed, epoch)), np.arange(n))


@settings(deadline=None)
@given(n=st.integers(1, 10**12), seed=SEEDS, data=st.data())
def test_a_position_does_not_depend_on_the_other_positions(n: int, seed: int, data: st.DataObject):
    if n <= SMALL:
        n += SMALL
    places = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=2, max_size=20, unique=True)))
    found = permute(places, n, seed, 0)
    assert found.min() >= 0
    assert found.max() < n
    assert len(set(found.tolist())) == len(places)
    alone = [permute(places[[row]], n, seed, 0)[0] for row in range(len(places))]
    assert found.tolist() == alone


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_every_order_of_a_few_examples_is_equally_likely(n: int):
    seeds = 4000
    counts = Counter(tuple(permute(np.arange(n), n, seed, 0).tolist()) for seed in range(seeds))
    observed = [counts[order] for order in itertools.permutations(range(n))]
    assert stats.chisquare(observed, [seeds / math.factorial(n)] * len(observed)).pvalue > 1e-4


@pytest.mark.parametrize("n", [SMALL - 7, SMALL + 1, 2**14, 50_000])
def test_two_positions_of_an_order_are_uniform_and_independent(n: int):
    """Over many seeds the examples at two places fill a 12 x 12 table evenly, and so do their differences and xors."""
    seeds, cells = 3000, 12
    for first, second in ((0, 1), (7, 4000)):
        found = np.array([permute(np.array([first, second]), n, seed, 0) for seed in range(seeds)])
        table = np.zeros((cells, cells))
        np.add.at(table, tuple((found * cells // n).T), 1)
        assert stats.chisquare(table.ravel()).pvalue > 1e-4
        apart = (found[:, 0] - found[:, 1]) % n * 64 // n
        assert stats.chisquare(np.bincount(apart, minlength=64)).pvalue > 1e-4
        assert stats.chisquare(np.bincount((found[:, 0] ^ found[:, 1]) % 64, minlength=64)).pvalue > 1e-4


@pytest.mark.parametrize("n", [1000, 20_000])
def test_orders_differ_from_each_other_and_from_the_files(n: int):
    """A random order keeps one example in its place on average (Poisson), and correlates like 1 / sqrt(n)."""
    base = permute(np.arange(n), n, 1, 0)
    others = (np.arange(n), permute(np.arange(n), n, 1, 1), permute(np.arange(n), n, 2, 0), np.roll(base, 1))
    for other in others:
        assert (base == other).sum() < 10
        assert abs(np.corrcoef(base, other)[0, 1]) < 5 / math.sqrt(n)


@settings(deadline=None, max_examples=60)
@given(n=st.integers(1, 60), batch=st.integers(1, 90), seed=SEEDS, first=st.integers(0, 30))
@example(n=SMALL + 4, batch=1000, seed=3, first=2)
def test_each_epoch_visits_each_example_once_whatever_the_batch(n: int, batch: int, seed: int, first: int):
    steps = -(-n // batch) + 2
    stream = np.concatenate([batch_indices(n, batch, step, seed) for step in range(first, first + steps)])
    assert stream.dtype == np.int64
    assert len(stream) == steps * batch
    start = -(first * batch) % n  # where the first whole epoch of this stretch begins
    while start + n <= len(stream):
        assert np.array_equal(np.sort(stream[start : start + n]), np.arange(n))
        start += n


def test_the_batch_size_does_not_change_the_order():
    small = np.concatenate([batch_indices(5000, 10, step, 9) for step in range(1200)])
    large = np.concatenate([batch_indices(5000, 1200, step, 9) for step in range(10)])
    assert np.array_equal(small, large)


def test_the_order_is_the_same_on_every_machine_and_version():
    """Written down once: a change here breaks the resuming of every run made before it."""
    assert batch_indices(10, 10, 0, 0).tolist() == [7, 2, 0, 3, 9, 4, 6, 8, 5, 1]
    assert batch_indices(1_281_167, 4, 1000, 42).tolist() == [51016, 11179, 244495, 1032982]
    assert example_rng(42, 7, 3).bit_generator.random_raw(2).tolist() == [18217715729908452340, 13557488655669795248]


def test_a_large_data_set_takes_no_memory():
    batch_indices(10**12, 64, 5, 0)
    tracemalloc.start()
    batch_indices(10**12, 64, 5, 0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000


@given(total=st.integers(0, 1000), world=st.integers(1, 40))
def test_slices_of_the_ranks_cover_the_batch_evenly(total: int, world: int):
    parts = [range(total)[rank_slice(total, rank, world)] for rank in range(world)]
    assert [place for part in parts for place in part] == list(range(total))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_random_numbers_belong_to_seed_step_and_position_alone():
    keys = [(seed, step, position) for seed in (0, 1, -1) for step in range(4) for position in range(4)]
    draws = [tuple(example_rng(*key).random(4)) for key in keys]
    assert len(set(draws)) == len(keys)
    assert draws == [tuple(example_rng(*key).random(4)) for key in keys]
    firsts = [example_rng(5, step, position).random() for step in range(40) for position in range(50)]
    assert stats.kstest(firsts, "uniform").pvalue > 1e-4
    assert abs(np.corrcoef(firsts[:-1], firsts[1:])[0, 1]) < 0.1


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), SEEDS)
def test_balanced_order_has_every_class_as_often_as_the_largest(labels: list[int], seed: int):
    array = np.array(labels)
    order = balanced_order(array, seed)
    largest = max(Counter(labels).values())
    assert set(Counter(array[order].tolist()).values()) == {largest}
    visits = Counter(order.tolist())
    assert set(visits) == set(range(len(labels)))
    for label in set(labels):
        own = [visits[index] for index in range(len(labels)) if labels[index] == label]
        assert max(own) - min(own) <= 1


def test_balanced_order_uses_the_seed_and_refuses_several_labels():
    labels = np.array([0] * 50 + [1] * 30)
    assert not np.array_equal(np.sort(balanced_order(labels, 0)), np.sort(balanced_order(labels, 1)))
    assert np.array_equal(balanced_order(labels, 1), balanced_order(labels, 1))
    with pytest.raises(UserError, match="one label per image"):
        balanced_order(np.ones((4, 2), np.uint8), 0)
