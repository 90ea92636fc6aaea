"""The figure and the sentences of a study's report."""

from __future__ import annotations

import math
import re
import tomllib

import pytest

from vitral.studies import report
from vitral.studies.definition import Study, parse_study
from vitral.studies.planning import Record, plan, results

BUDGETS = """
title = "Budgets"
metric = "top1"
x = "flops"
recipe = { model = "ViT-Ti/16", batch = 8, steps = 0 }
axes = { epochs = [1, 2, 4] }
points = [
    { group = "ViT", model = "ViT-Ti/16" },
    { group = "ViT", model = "ViT-S/16" },
    { group = "ResNet", model = "R26x1" },
]
"""
PATHS = """
title = "Paths"
metric = "top1"
x = "flops"
recipe = { model = "ViT-Ti/16", batch = 8, steps = 9 }
points = [
    { group = "depth", shape.depth = 4, shape.width = 64 },
    { group = "depth", shape.depth = 8, shape.width = 64 },
    { group = "width", shape.depth = 4, shape.width = 64 },
    { group = "width", shape.depth = 4, shape.width = 96 },
]
"""


def recorded(text: str, flops: float = 1e9) -> tuple[Study, dict[str, Record]]:
    """A study with a record of each of its runs, each with other FLOPs."""
    study = parse_study(tomllib.loads(text), "mine")
    runs = plan(study, {}).runs
    values = [{"metrics": {"top1": 0.1 + number / 100}, "flops": flops * (number + 1)} for number in range(len(runs))]
    return study, {run.id: Record(run.id, "mine", {}, **value) for run, value in zip(runs, values, strict=True)}


def lines(text: str) -> list[int]:
    """The number of points of each line of the figure."""
    study, records = recorded(text)
    ((_, chart),) = report.figures(study, results(study, records))
    joined = re.findall(r'<polyline points="([^"]+)" style="[^"]*stroke-width:1.6"', chart)
    return [len(points.split()) for points in joined]


def test_a_line_joins_the_budgets_of_a_model_or_else_the_points_of_a_group():
    assert lines(BUDGETS) == [3, 3, 3]  # of two ViTs in one colour, and a ResNet
    assert lines(PATHS) == [2, 2]  # both begin at the same cell


def test_the_legend_has_one_entry_per_group():
    study, records = recorded(BUDGETS)
    ((_, chart),) = report.figures(study, results(study, records))
    assert re.findall(r"</i>(\w+)</span>", chart) == ["ViT", "ResNet"]


def test_what_was_not_measured_is_not_written():
    study, records = recorded(BUDGETS, flops=0.0)
    assert "FLOPs" not in report.cost_sentence(records)
    assert "Bars are" not in report.html(study, results(study, records), records)  # one run each has no interval


def test_an_unfinished_study_says_how_many_runs_it_has():
    study, records = recorded(PATHS)
    assert "Incomplete" not in report.markdown(study, results(study, records), records)
    del records[plan(study, {}).runs[2].id]
    text = report.markdown(study, results(study, records), records)
    assert "Incomplete: 2 of 3 runs. " in text  # two cells are the same run
    assert "Incomplete: 2 of 3 runs. " in report.html(study, results(study, records), records)


@pytest.mark.parametrize(("axis", "drawn"), [("", r"\(0.00 to 100.00\)<"), ('x = "epochs"', r">0 %<.*>100 %<")])
def test_intervals_of_accuracies_end_at_0_and_100_percent(axis, drawn):
    """Of seeds that differ much, in figures as in tables."""
    settings = 'title = "Few"\nmetric = "top1"\nseeds = [0, 1]\nrecipe = { model = "ViT-Ti/16", batch = 8, steps = 0 }'
    study = parse_study(tomllib.loads(f"{settings}\naxes = {{ epochs = [1, 2] }}\n{axis}"), "mine")
    runs = plan(study, {}).runs
    records = {run.id: Record(run.id, "mine", {}, metrics={"top1": 0.2 + 0.5 * run.settings["seed"]}) for run in runs}
    cells = results(study, records)
    assert "45.00% (0.00 to 100.00)" in report.markdown(study, cells, records)
    ((_, chart),) = report.figures(study, cells)
    assert re.search(drawn, chart), chart
    percentages = [float(number) for number in re.findall(r">(-?[\d.]+) %<", chart)]
    assert all(0 <= number <= 100 for number in percentages)


def test_counts_have_a_figure_each_and_logarithmic_axes_if_they_differ_by_orders_of_magnitude():
    head = 'title = "Speed"\nmetric = "images_per_second"\ncolumns = ["largest_batch", "real"]\nx = "image"\n'
    axes = (
        'seeds = [0, 1]\nrecipe = { batch = 8, steps = 9 }\naxes = { model = ["ViT-Ti/16"], image = [64, 128, 512] }\n'
    )
    study = parse_study(tomllib.loads(head + axes), "mine")
    speeds = {64: (1e5, 1e5), 128: (1e4, 1e4), 512: (10, 4000)}  # the last interval goes far below zero
    records = {}
    for run in plan(study, {}).runs:
        value = speeds[run.settings["image"]][run.settings["seed"]]
        metrics = {"images_per_second": value, "largest_batch": 4 + run.settings["seed"]}
        records[run.id] = Record(run.id, "mine", {}, metrics=metrics)
    cells = results(study, records)
    (caption, speed), (other, _) = report.figures(study, cells)
    assert (caption, other) == ("Ours: images_per_second", "Ours: largest_batch")
    (joined,) = re.findall(r'<polyline points="([^"]+)" style="[^"]*stroke-width:1.6"', speed)
    xs, ys = zip(*(map(float, point.split(",")) for point in joined.split()), strict=True)
    assert (xs[1] - xs[0]) * 2 == pytest.approx(xs[2] - xs[1], abs=0.2)  # 64 to 128, 128 to 512
    assert (ys[1] - ys[0]) / math.log(10) == pytest.approx((ys[2] - ys[1]) / math.log(1e4 / 2005), rel=0.01)
    assert "nan" not in speed
    assert "4.5 (" in report.markdown(study, cells, records)  # largest batches 4 and 5
    assert "| 2,005 (" in report.markdown(study, cells, records)
