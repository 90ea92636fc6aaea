"""VTAB-1k's rules: which images a split expression takes, and what each task's label is."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitral.data.splits import hashed_order
from vitral.data.vtab.tasks import RULES, TASKS, bin_of, fairly_drawn, find_task, flattened, positions, stored_split
from vitral.errors import UserError

# Images of each split as TFDS's catalogue states them, of the data sets whose splits are cut by percentages.
SIZES = {
    "caltech101": 3059,
    "cifar100": 50_000,
    "pets": 3680,
    "svhn": 73_257,
    "eurosat": 27_000,
    "resisc45": 31_500,
    "clevr-count": 70_000,
    "clevr-distance": 70_000,
    "dsprites-location": 737_280,
    "dsprites-orientation": 737_280,
    "smallnorb-azimuth": 24_300,
    "smallnorb-elevation": 24_300,
}
BOUNDARY = st.none() | st.integers(-120, 120)


def words(first: int | None, last: int | None, unit: str) -> str:
    return "[" + ":".join("" if value is None else f"{value}{unit}" for value in (first, last)) + "]"


@given(st.integers(0, 100), st.lists(st.tuples(BOUNDARY, BOUNDARY), max_size=3))
def test_counts_slice_as_python_does(count, slices):
    expected = list(range(count))
    for first, last in slices:
        expected = expected[first:last]
    assert list(positions("train" + "".join(words(first, last, "") for first, last in slices), count)) == expected


@given(st.integers(0, 5000), st.integers(-100, 100), st.integers(-100, 100), st.integers(0, 300))
def test_percentages_are_rounded_to_the_closest_count(count, first, last, then):
    def closest(percent: int) -> int:
        below, rest = divmod(abs(percent) * count, 100)
        below += rest > 50 or (rest == 50 and below % 2 == 1)
        return below if percent >= 0 else -below

    expected = list(range(count))[closest(first) : closest(last)][:then]
    assert list(positions(f"train{words(first, last, '%')}[:{then}]", count)) == expected


def test_a_part_and_the_rest_are_the_whole():
    for count in range(260):
        for percent in (10, 50, 60, 90):
            parts = [*positions(f"train[:{percent}%]", count), *positions(f"train[{percent}%:]", count)]
            assert parts == list(range(count))


@pytest.mark.parametrize("text", ["", "train[", "train[:]x", "train[5]", "train[a:b]", "train[:10.5%]", "train[::2]"])
def test_invalid_expressions_are_refused(text):
    with pytest.raises(ValueError, match="is not a split expression"):
        positions(text, 10)


def test_the_closest_count_is_the_one_task_adaptation_rounds_down_to():
    """It writes numbers where we write percentages: `train[{90 * n // 100}:...]`."""
    for name, count in SIZES.items():
        for expression in TASKS[name].expressions().values():
            numbers = re.sub("([0-9]+)%", lambda match, n=count: str(int(match[1]) * n // 100), expression)
            assert positions(expression, count) == positions(numbers, count), (name, expression)


def test_every_task_takes_a_thousand_images_once():
    for name, count in SIZES.items():
        expressions = TASKS[name].expressions()
        places = {key: positions(text, count) for key, text in expressions.items()}
        assert (len(places["train800"]), len(places["val200"])) == (800, 200)
        for first, second in (("train800", "val200"), ("train800", "test"), ("val200", "test")):
            if stored_split(expressions[first]) == stored_split(expressions[second]):
                assert not set(places[first]).intersection(places[second]), name


@pytest.mark.parametrize(
    ("name", "dataset", "setting", "expressions"),
    [
        ("pets", "oxford_iiit_pet", "", ("train[:800]", "train[80%:][:200]", "test")),
        ("sun397", "sun397", "tfds", ("train[:800]", "validation[:200]", "test")),
        ("eurosat", "eurosat", "rgb", ("train[:800]", "train[60%:80%][:200]", "train[80%:]")),
        ("clevr-count", "clevr", "", ("train[:800]", "train[90%:][:200]", "validation")),
        ("dsprites-orientation", "dsprites", "", ("train[:800]", "train[80%:][:200]", "train[90%:]")),
        ("smallnorb-elevation", "smallnorb", "", ("train[:800]", "test[:200]", "test[50%:]")),
    ],
)
def test_a_row_states_its_data_set_and_its_splits(name, dataset, setting, expressions):
    task = find_task(name)
    assert (task.dataset, task.setting, tuple(task.expressions().values())) == (dataset, setting, expressions)


def test_counts_may_be_smaller():
    expected = {"train800": "train[:40]", "val200": "train[90%:][:10]", "test": "test"}
    assert find_task("svhn").expressions(40, 10) == expected


def test_some_tasks_are_not_mirrored_and_some_not_cropped():
    """BiT, supplement: what would change the label is left out."""
    assert {name for name, task in TASKS.items() if not task.flip} == {
        *("dsprites-orientation", "smallnorb-azimuth", "dsprites-location")
    }
    assert {name for name, task in TASKS.items() if not task.crop} == {
        *("clevr-count", "clevr-distance", "dmlab", "kitti-distance", "dsprites-location")
    }
    assert Counter(task.group for task in TASKS.values()) == {"natural": 7, "specialized": 4, "structured": 8}


def test_a_misspelt_task_is_answered_with_the_nearest():
    with pytest.raises(UserError, match=r"did you mean clevr-count\?"):
        find_task("clevr-counts")


def coordinates(*depths: float) -> list[float]:
    return [value for place, depth in enumerate(depths) for value in (10.0 * place, 20.0, depth)]


def test_clevr_is_counted_from_three():
    rule = RULES["clevr-count"]
    assert [rule.label(coordinates(*[9.0] * count)) for count in range(3, 11)] == list(range(8))
    assert rule.names[0] == "3 objects"
    assert rule.names[7] == "10 objects"


@pytest.mark.parametrize(
    ("depth", "label"),
    [(0.1, 0), (7.99, 0), (8.0, 0), (8.01, 1), (8.5, 1), (8.6, 2), (9.0, 2), (9.5, 3), (9.51, 4), (10.0, 4), (10.1, 5)],
)
def test_clevr_distance_is_the_bin_of_the_nearest_object(depth, label):
    """As `max(where(edges - depth < 0))` has it: an object exactly on an edge is before it."""
    assert RULES["clevr-distance"].label(coordinates(12.0, depth, 50.0)) == label
    edges = np.array([0.0, 8.0, 8.5, 9.0, 9.5, 10.0, 100.0], np.float32)
    assert np.where(edges - np.float32(depth) < 0)[0].max() == label


@pytest.mark.parametrize(
    ("kinds", "depths", "label"),
    [
        ([0], [7.9], 0),
        ([1], [8.0], 0),
        ([2], [8.1], 1),
        ([0, 1], [30.0, 20.0], 1),
        ([0], [20.5], 2),
        ([0], [-3.0], 0),  # a car beside the camera may begin behind it
        ([3, 0], [1.0, 25.0], 2),  # people do not count
        ([3, 4, 7], [1.0, 2.0, 3.0], 3),
        ([], [], 3),
        (["Pedestrian", "Van"], [1.0, 9.0], 1),
        (["Tram"], [5.0], 3),
    ],
)
def test_kitti_distance_is_the_bin_of_the_nearest_vehicle(kinds, depths, label):
    assert RULES["kitti-distance"].label(kinds, coordinates(*depths)) == label


def test_depths_are_compared_in_single_precision():
    """TFDS stores float32, in which this depth lies on the edge."""
    assert bin_of(8.0 + 1e-8, (0, 8, 100)) == 0
    assert bin_of(8.0 + 1e-6, (0, 8, 100)) == 1


@pytest.mark.parametrize(("task", "before"), [("dsprites-location", 32), ("dsprites-orientation", 40)])
def test_sprites_have_sixteen_classes(task, before):
    labels = [RULES[task].label([label]) for label in range(before)]
    assert labels == [int(np.floor(np.float32(label) / np.float32(before / 16))) for label in range(before)]
    assert sorted(set(labels)) == list(range(16))


def test_small_norb_keeps_its_labels():
    assert [RULES["smallnorb-azimuth"].label([label]) for label in range(18)] == list(range(18))
    assert [RULES["smallnorb-elevation"].label([label]) for label in range(9)] == list(range(9))


def test_nested_values_are_flattened_in_order():
    assert flattened([{"a": [1, 2]}, {"a": [3]}]) == [1, 2, 3]
    assert flattened(None) == []
    assert flattened(5) == [5]


@pytest.mark.parametrize("classes", [2, 10, 100, 397])
def test_a_random_sample_is_distinguished_from_sorted_classes(classes):
    rng = np.random.default_rng(classes)
    labels = np.sort(rng.choice(classes, 20_000, p=rng.dirichlet(np.full(classes, 5.0))))
    stored = np.bincount(labels, minlength=classes)
    for images in (200, 800):
        assert not fairly_drawn(np.bincount(labels[:images], minlength=classes), stored)
        for _ in range(50):
            some = rng.permutation(labels)[:images]
            assert fairly_drawn(np.bincount(some, minlength=classes), stored)


def test_the_stored_order_of_sprites_is_not_a_random_sample():
    """y runs fastest, then x: the first 800 images have 25 of 32 x positions, all with one orientation."""
    across = np.arange(32 * 32 * 40) // 32 % 32 // 2
    assert not fairly_drawn(np.bincount(across[:800], minlength=16), np.bincount(across))


@given(st.lists(st.text(), unique=True), st.randoms())
def test_the_order_by_hashes_depends_on_the_keys_alone(keys, random):
    mixed = random.sample(keys, len(keys))
    assert [keys[place] for place in hashed_order(keys)] == [mixed[place] for place in hashed_order(mixed)]
    assert sorted(hashed_order(keys).tolist()) == list(range(len(keys)))
