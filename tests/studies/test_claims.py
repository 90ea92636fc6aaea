"""Verdicts against scipy's intervals, and against data made to hold, not to hold, or to decide nothing."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from vitral.studies.claims import check_claims, difference, select
from vitral.studies.definition import Cell, Claim, Study, planned_run
from vitral.studies.planning import CellResult, Record, _score

EMPTY = Study("mine", "Mine", "top1", {}, ())


def cell(values: list[float], flops: float = 1.0, images: int = 0, **labels: Any) -> CellResult:
    labels = {"name": "", **labels}
    counted = {"n": images} if images else {}
    planned = Cell(labels, {}, "digits", tuple(range(len(values))))
    runs = [planned_run(EMPTY, planned, {"seed": seed}) for seed in planned.seeds]
    records = [
        Record(run.id, "mine", {}, metrics={"top1": v, **counted}, flops=flops)
        for run, v in zip(runs, values, strict=True)
    ]
    return CellResult(planned, {}, tuple(zip(runs, records, strict=True)))


def verdict(cells: list[CellResult], **claim: Any) -> str:
    study = Study("mine", "Mine", "top1", {}, (), claims=(Claim("text", **claim),))
    return check_claims(study, cells)[0].verdict


@pytest.mark.parametrize("seed", range(5))
def test_the_difference_has_welchs_interval(seed):
    """At least as wide as scipy's, which keeps fractions of degrees of freedom, and equal to it with whole ones."""
    rng = np.random.default_rng(seed)
    a, b = rng.normal(0.5, 0.01, 5), rng.normal(0.48, 0.03, 4)
    estimate = difference([cell(a.tolist())], [cell(b.tolist())], "top1")
    test = stats.ttest_ind(a, b, equal_var=False)
    interval = test.confidence_interval(0.95)
    assert estimate.value == pytest.approx(a.mean() - b.mean())
    assert estimate.half is not None
    assert estimate.half >= (interval.high - interval.low) / 2
    error = math.hypot(a.std(ddof=1) / math.sqrt(5), b.std(ddof=1) / 2)
    assert estimate.half == pytest.approx(stats.t.ppf(0.975, math.floor(test.df)) * error)


def test_a_group_of_cells_is_averaged_per_seed():
    a = [cell([0.1, 0.3, 0.2], k=1), cell([0.3, 0.5, 0.6], k=2)]
    alone = difference([cell([0.2, 0.4, 0.4])], [cell([0.1, 0.2, 0.1])], "top1")
    assert difference(a, [cell([0.1, 0.2, 0.1])], "top1") == pytest.approx(alone)


def test_only_seeds_that_all_cells_of_a_group_have_are_compared_and_counted():
    """As while a study runs: a third seed of one cell says nothing about the mean of both."""
    cells = [cell([0.1, 0.3, 0.9], k=1), cell([0.3, 0.5], k=2), cell([0.1, 0.2, 0.1], k=3)]
    two, one = cells[:2], cells[2:]
    expected = difference([cell([0.2, 0.4])], one, "top1")
    assert difference(two, one, "top1") == pytest.approx(expected)
    study = Study("mine", "Mine", "top1", {}, (), claims=(Claim("text", "compare", a={"k": [1, 2]}, b={"k": 3}),))
    assert check_claims(study, cells)[0].measured.endswith("; 4 and 3 runs")


def test_single_runs_are_compared_in_pairs():
    a, b = [0.5, 0.61, 0.7], [0.4, 0.5, 0.62]
    estimate = difference([cell([v]) for v in a], [cell([v]) for v in b], "top1")
    paired = stats.ttest_rel(a, b).confidence_interval(0.95)
    assert estimate.half is not None
    assert (estimate.value - estimate.half, estimate.value + estimate.half) == pytest.approx((paired.low, paired.high))
    assert difference([cell([0.5])], [cell([0.4])], "top1").half is None


HIGH, LOW, WIDE = [0.60, 0.61, 0.62], [0.50, 0.51, 0.52], [0.3, 0.5, 0.8]


@pytest.mark.parametrize(
    ("a", "b", "expect", "margin", "expected"),
    [
        (HIGH, LOW, ">", 0.0, "held"),
        (HIGH, LOW, ">", 0.2, "not held"),
        (LOW, HIGH, ">", 0.0, "not held"),
        (LOW, HIGH, "<", 0.0, "held"),
        (HIGH, WIDE, ">", 0.0, "undecided"),
        (HIGH, [0.61, 0.60, 0.62], "=", 0.05, "held"),
        (HIGH, LOW, "=", 0.01, "not held"),
        (HIGH, WIDE, "=", 0.05, "undecided"),
        ([0.6], [0.5], ">", 0.0, "undecided"),
    ],
)
def test_compare(a, b, expect, margin, expected):
    cells = [cell(a, k="a"), cell(b, k="b")]
    assert verdict(cells, kind="compare", a={"k": "a"}, b={"k": "b"}, expect=expect, margin=margin) == expected


def test_compare_at_the_best_value_of_each():
    cells = [cell(LOW, k="a", lr=1), cell(HIGH, k="a", lr=2), cell(HIGH, k="b", lr=1), cell(WIDE, k="b", lr=2)]
    options = {"kind": "compare", "a": {"k": "a"}, "b": {"k": "b"}, "expect": "=", "margin": 0.05}
    assert verdict(cells, **options, along="lr") == "held"
    assert verdict(cells, **options) != "held"


def test_rank():
    cells = [cell(HIGH, k="a"), cell(LOW, k="b"), cell([0.1, 0.11, 0.12], k="c"), cell(WIDE, k="d")]
    orders = {"abc": "held", "acb": "not held", "abd": "undecided", "ax": "undecided"}
    for order, expected in orders.items():
        assert verdict(cells, kind="rank", order=tuple({"k": k} for k in order)) == expected


def test_trend_has_the_interval_of_the_slope():
    rng = np.random.default_rng(0)
    sizes, values = [100, 1000, 10_000], [[0.1, 0.12], [0.2, 0.23], [0.31, 0.33]]
    cells = [cell(v, size=s, k="a") for s, v in zip(sizes, values, strict=True)]
    flat = [cell((0.2 + 0.01 * rng.normal(size=2)).tolist(), size=s, k="b") for s in sizes]
    study = Study("mine", "Mine", "top1", {}, (), claims=(Claim("t", "trend", a={"k": "a"}, along="size"),))
    fit = stats.linregress(np.repeat(np.log2(sizes), 2), np.ravel(values))
    half = stats.t.ppf(0.975, 4) * fit.stderr
    shown = f"{100 * fit.slope:+.2f} points ({100 * (fit.slope - half):+.2f} to {100 * (fit.slope + half):+.2f})"
    assert check_claims(study, [*cells, *flat])[0].measured.startswith(shown)
    assert verdict([*cells, *flat], kind="trend", a={"k": "a"}, along="size") == "held"
    assert verdict([*cells, *flat], kind="trend", a={"k": "a"}, along="size", expect="<") == "not held"
    assert verdict([*cells, *flat], kind="trend", a={"k": "a"}, b={"k": "b"}, along="size") == "held"
    assert verdict([*cells, *flat], kind="trend", a={"k": "b"}, along="size") == "undecided"
    assert verdict(cells[:1], kind="trend", a={"k": "a"}, along="size") == "undecided"


def test_one_test_image_is_no_evidence():
    """Two seeds of each cell agree on 15 and 14 of 17 images."""
    tied = [cell([15 / 17] * 2, images=17, k="a", size=2), cell([14 / 17] * 2, images=17, k="b", size=1)]
    sides: dict[str, Any] = {"a": {"k": "a"}, "b": {"k": "b"}}
    assert verdict(tied, kind="compare", **sides) == "undecided"
    assert verdict(tied, kind="compare", expect="=", margin=0.1, **sides) == "undecided"
    assert verdict(tied, kind="rank", order=(sides["a"], sides["b"])) == "undecided"
    assert verdict(tied, kind="trend", a={}, along="size") == "undecided"
    one_better = [cell([right / 17], images=17, k=k) for k, right in (("a", 15), ("b", 14)) for _ in range(3)]
    assert verdict(one_better, kind="compare", **sides) == "undecided"  # paired differences that are all one image


def test_tied_seeds_decide_with_many_test_images():
    tied = [cell([0.9] * 2, images=10_000, k="a", size=2), cell([0.8] * 2, images=10_000, k="b", size=1)]
    assert verdict(tied, kind="compare", a={"k": "a"}, b={"k": "b"}) == "held"
    assert verdict(tied, kind="trend", a={}, along="size") == "held"


def test_a_spread_of_one_image_is_never_narrower_than_none():
    """The interval is the one of seeds of which one differs by an image."""
    for seeds in (2, 3, 5):
        tie, others = [15 / 17] * seeds, [[15 / 17] * (seeds - 1) + [right / 17] for right in (16, 14, 13)]
        first, *rest = (cell(values, images=17).interval("top1") or 0.0 for values in (tie, *others))
        assert first == pytest.approx(stats.t.ppf(0.975, seeds - 1) * np.std(others[0], ddof=1) / math.sqrt(seeds))
        assert all(first <= 1.0001 * half for half in rest)


def test_a_shown_interval_of_an_accuracy_ends_at_100_percent():
    text = _score(cell([1.0, 1.0], images=17), "top1")
    assert text.startswith("100.00% (")
    assert text.endswith(" to 100.00)")


def test_a_tie_of_a_count_or_a_spread_between_seeds_is_taken_as_it_is():
    cells = [cell([0.5, 0.6], flops=2.0, images=17, k="a"), cell([0.5, 0.6], flops=1.0, images=17, k="b")]
    assert difference(cells[:1], cells[1:], "flops") == (1.0, 0.0)
    assert cell([0.8] * 3, images=96).interval("n") == 0
    assert cell([0.8], images=96).interval("top1") is None
    assert cell([0.5, 0.6], images=17).interval("top1") == pytest.approx(stats.t.ppf(0.975, 1) * 0.05)


def test_best_is_undecided_where_the_best_values_may_be_others():
    cells = [cell(LOW, k="a", lr=1), cell(HIGH, k="a", lr=2), cell(HIGH, k="b", lr=1), cell(LOW, k="b", lr=2)]
    options: dict[str, Any] = {"kind": "best", "a": {"k": "b"}, "b": {"k": "a"}, "along": "lr"}
    assert verdict(cells, **options, expect="<") == "held"
    assert verdict(cells, **options, expect=">") == "not held"
    assert verdict(cells, **options, expect="=") == "not held"
    assert verdict([*cells[:3], cell(WIDE, k="b", lr=2)], **options, expect="<") == "undecided"


def test_selection_by_lists_and_missing_labels():
    cells = [cell(LOW, k="a"), cell(LOW, k="b"), cell(LOW)]
    assert len(select(cells, {"k": ["a", "b"]})) == 2
    assert len(select(cells, {})) == 3
    assert verdict(cells, kind="compare", a={"k": "a"}, b={"k": "z"}) == "undecided"
