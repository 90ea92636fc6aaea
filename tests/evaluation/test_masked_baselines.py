"""The predictors that a masked model must beat, against loops, scipy and the entropies of known distributions."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from vitral.evaluation.masked_baselines import (
    BACKOFF,
    colour_class,
    histogram_entropy,
    neighbour_colours,
    neighbour_loss,
)


def drawn(seed: int, shape: tuple[int, ...], share: float = 0.5) -> tuple[np.ndarray, np.ndarray]:
    """Random colours (m, h, w, c) and hidden patches (m, h, w)."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, shape), rng.random(shape[:3]) < share


def test_a_class_is_three_bits_of_each_channel():
    for colour, expected in (((0, 0, 0), 0), ((31, 31, 31), 0), ((32, 0, 0), 64), ((0, 32, 0), 8), ((0, 0, 32), 1)):
        assert colour_class(np.array(colour)) == expected
    assert colour_class(np.array([255, 255, 255])) == 511
    assert colour_class(np.array([[255], [64]])).tolist() == [7, 2]
    reached = {int(colour_class(np.array(colour) * 32)) for colour in itertools.product(range(8), repeat=3)}
    assert reached == set(range(512))


def test_torch_and_numpy_give_the_same_classes():
    colours = np.random.default_rng(0).integers(0, 256, (50, 3))
    assert colour_class(torch.from_numpy(colours)).tolist() == colour_class(colours).tolist()


@given(st.lists(st.integers(0, 511), min_size=1, max_size=200))
def test_the_entropy_equals_that_of_scipy(targets: list[int]):
    counts = np.bincount(targets)
    assert histogram_entropy(np.array(targets)) == pytest.approx(stats.entropy(counts), abs=1e-12)


def test_entropies_of_known_histograms():
    assert histogram_entropy(np.arange(512).reshape(2, 256)) == pytest.approx(math.log(512))
    assert math.log(512) == pytest.approx(6.2383, abs=1e-4)
    assert histogram_entropy(np.full(9, 300)) == 0
    assert histogram_entropy(np.array([1, 1, 1, 4])) == pytest.approx(0.75 * math.log(4 / 3) + 0.25 * math.log(4))


def slow_around(colours: np.ndarray, hidden: np.ndarray) -> list[list[int]]:
    """Ring by ring, in loops."""
    images, height, width, channels = colours.shape
    result = []
    for m, y, x in itertools.product(range(images), range(height), range(width)):
        if not hidden[m, y, x]:
            continue
        rings: dict[int, list[np.ndarray]] = {}
        for v, u in itertools.product(range(height), range(width)):
            if not hidden[m, v, u]:
                rings.setdefault(max(abs(v - y), abs(u - x)), []).append(colours[m, v, u])
        nearest = rings[min(rings)] if rings else [np.zeros(channels)]
        result.append([math.floor(sum(int(one[band]) for one in nearest) / len(nearest)) for band in range(channels)])
    return result


@given(
    seed=st.integers(0, 10**6),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(1, 6), st.integers(1, 3)),
    share=st.sampled_from([0.0, 0.2, 0.5, 0.9, 1.0]),
)
def test_neighbour_colours_are_those_of_the_nearest_visible_ring(seed, shape, share):
    colours, hidden = drawn(seed, shape, share)
    assert neighbour_colours(colours, hidden).tolist() == slow_around(colours, hidden)


def test_the_probabilities_are_counted_on_training_images_only():
    train, train_hidden = drawn(1, (6, 4, 5, 1))
    test, test_hidden = drawn(2, (3, 4, 5, 1))
    pairs = list(zip(slow_around(train, train_hidden), train[train_hidden].tolist(), strict=True))
    pairs = [(seen[0] // 32, own[0] // 32) for seen, own in pairs]
    costs = []
    for seen, own in zip(slow_around(test, test_hidden), test[test_hidden].tolist(), strict=True):
        row = [target for bin_, target in pairs if bin_ == seen[0] // 32]
        plain = (sum(target == own[0] // 32 for _, target in pairs) + 1) / (len(pairs) + 8)
        costs.append(-math.log((row.count(own[0] // 32) + BACKOFF * plain) / (len(row) + BACKOFF)))
    loss = neighbour_loss(train, train_hidden, test, test_hidden)
    assert loss == pytest.approx(sum(costs) / len(costs))


def test_uniform_images_have_almost_no_loss_and_noise_has_its_entropy():
    rng = np.random.default_rng(0)
    _, hidden = drawn(3, (800, 4, 4, 3))
    plain = np.broadcast_to(32 * rng.integers(0, 8, (800, 1, 1, 1)), (800, 4, 4, 3))
    halves = [plain[:400], hidden[:400], plain[400:], hidden[400:]]
    assert neighbour_loss(*halves) < 0.1 < math.log(8) - 0.1 < histogram_entropy(colour_class(plain[400:]))
    noise = np.repeat(32 * rng.integers(0, 8, (800, 4, 4, 1)), 3, axis=-1)
    assert neighbour_loss(noise[:400], hidden[:400], noise[400:], hidden[400:]) == pytest.approx(math.log(8), abs=0.05)


def test_fully_masked_images_have_the_loss_of_the_histogram():
    train, test = 32 * np.random.default_rng(0).integers(0, 3, (2, 40, 3, 3, 1))
    hidden = np.ones((40, 3, 3), bool)
    counts = np.bincount(train.ravel() // 32, minlength=8)
    shares = (counts + BACKOFF * (counts + 1) / (train.size + 8)) / (train.size + BACKOFF)
    expected = -np.log(shares[test.ravel() // 32]).mean()
    assert neighbour_loss(train, hidden, test, hidden) == pytest.approx(expected)
    assert expected == pytest.approx(math.log(3), abs=0.02)
