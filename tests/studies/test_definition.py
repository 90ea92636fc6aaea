"""Studies as data: what TOML files say, which runs that makes, and what the shipped ones say of the paper."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from vitral import paper
from vitral.cost import cost as model_cost
from vitral.errors import UserError
from vitral.names import name_of, parse
from vitral.studies.claims import select
from vitral.studies.definition import definition_of, parse_study, read_study, shipped
from vitral.studies.planning import (
    Record,
    append_record,
    chosen_settings,
    plan,
    plan_cost,
    read_records,
    results,
    run_flops_of,
    table,
)

RESULTS = Path(__file__).parents[2] / "results"
TEXT = """
title = "Two optimizers"
data = "digits"
images = 1000
classes = 10
seeds = [0, 1]
metric = "top1"
[recipe]
model = "ViT-Ti/4@8"
steps = 10
[axes]
shape.depth = [1, 2]
[[points]]
name = "adam"
choose.optim.lr = [0.1, 0.01]
[[points]]
name = "sgd"
optim.name = "sgd"
optim.lr = 0.5
[scales.long]
seeds = [7]
recipe.steps = 100
"""


def study(text: str = TEXT, scale: str = "small"):
    return parse_study(tomllib.loads(text), "mine", scale)


def ok(run, score: float) -> Record:
    return Record(run.id, "mine", {}, trial=run.trial, metrics={"score": score, "top1": score}, seconds=2.0, flops=4.0)


def test_axes_and_points_are_combined():
    cells = study().cells
    names = [(cell.labels["name"], cell.labels["shape.depth"]) for cell in cells]
    assert names == [("adam", 1), ("adam", 2), ("sgd", 1), ("sgd", 2)]
    long = study(scale="long")
    assert (long.recipe["steps"], long.recipe["model"], long.cells[0].seeds) == (100, "ViT-Ti/4@8", (7,))


def test_final_runs_follow_the_best_trial():
    mine = study()
    first = plan(mine, {})
    assert (len(first.runs), first.waiting, first.total) == (8, 4, 12)  # 2 x 2 trials and 2 x 2 of sgd; 2 x 2 wait
    trials = [run for run in first.runs if run.trial]
    assert {run.settings["seed"] for run in trials} == {0}
    assert all(mine.recipe_of(run).data.dev == 0.1 for run in trials)
    scores = {(1, 0.1): 0.3, (1, 0.01): 0.4, (2, 0.1): 0.6, (2, 0.01): 0.5}
    records = {r.id: ok(r, scores[r.settings["shape.depth"], r.settings["optim.lr"]]) for r in trials[:3]}
    assert plan(mine, records).waiting == 2  # of the depth whose trials are not all there
    records[trials[3].id] = ok(trials[3], 0.5)
    assert chosen_settings(mine, mine.cells[0], records) == {"optim.lr": 0.01}
    assert chosen_settings(mine, mine.cells[1], records) == {"optim.lr": 0.1}
    final = [run for run in plan(mine, records).pending if run.cell.choose]
    assert {(run.settings["shape.depth"], run.settings["optim.lr"]) for run in final} == {(1, 0.01), (2, 0.1)}
    assert all(mine.recipe_of(run).data.dev == 0.0 for run in final)
    diverged = {**records, trials[2].id: replace(records[trials[2].id], status="diverged", metrics={})}
    assert chosen_settings(mine, mine.cells[1], diverged) == {"optim.lr": 0.01}


def test_the_first_seed_of_every_cell_comes_first():
    order = [(run.trial, run.settings["shape.depth"], run.settings["seed"]) for run in plan(study(), {}).runs]
    trials = [(True, 1, 0)] * 2 + [(True, 2, 0)] * 2
    assert order == [*trials, (False, 1, 0), (False, 2, 0), (False, 1, 1), (False, 2, 1)]


def test_trials_have_settings_of_their_own():
    short = study(TEXT.replace("[axes]", "[trials]\nsteps = 3\n[axes]"))
    steps = {(run.trial, run.settings["steps"]) for run in plan(short, {}).runs}
    assert steps == {(True, 3), (False, 10)}
    assert {run.id for run in plan(short, {}).runs if not run.trial} <= {run.id for run in plan(study(), {}).runs}


def test_overrides_win_and_a_run_has_one_length():
    mine = parse_study(tomllib.loads(TEXT.replace("steps = 10", "epochs = 3")), "mine", overrides={"steps": "2"})
    run = plan(mine, {}).runs[0]
    assert "epochs" not in run.settings
    assert (mine.recipe_of(run).steps, mine.recipe_of(run).epochs) == (2, 0)


def test_runs_are_identified_by_what_the_study_sets():
    """Not by the order of keys, by names, claims or seeds; but by data and values."""
    first = plan(study(), {}).runs
    other = TEXT.replace('name = "sgd"\noptim.name = "sgd"\noptim.lr = 0.5', 'optim.lr = 0.5\noptim.name = "sgd"')
    more = plan(study(other.replace("[0, 1]", "[0, 1, 2]")), {}).runs
    assert {run.id for run in first} < {run.id for run in more}
    for old, new in (("digits", "cifar10"), ("steps = 10\n", "steps = 11\n")):
        assert not {run.id for run in plan(study(TEXT.replace(old, new, 1)), {}).runs} & {run.id for run in first}
    assert len({run.id for run in first}) == len(first)


def test_records_merge_and_survive_a_cut_line(tmp_path):
    runs = plan(study(), {}).runs
    append_record(tmp_path, ok(runs[0], 0.5))
    with (tmp_path / "runs.jsonl").open("a") as stream:
        stream.write('{"id": "cut sho')  # a power failure
    assert list(read_records(tmp_path)) == [runs[0].id]
    append_record(tmp_path, Record(runs[1].id, "mine", {}, status="failed", reason="no memory"))
    assert list(read_records(tmp_path)) == [runs[0].id, runs[1].id]  # on a line of its own
    append_record(tmp_path, Record(runs[1].id, "mine", {}, status="failed", reason="no space"))
    assert read_records(tmp_path)[runs[1].id].reason == "no space"  # why it failed when it was last tried
    other = tmp_path / "other machine.jsonl"
    other.write_text("".join(f"{ok(run, 0.9).to_json()}\n" for run in runs[:2]))
    records = read_records(tmp_path)
    assert records[runs[1].id].metrics["score"] == 0.9  # better than a failure
    assert len(records) == 2
    other.write_text('{"step": 1, "loss": 2.0}\n')
    with pytest.raises(UserError, match=r"line 1 of .*other machine.jsonl is not the record of a run"):
        read_records(tmp_path)


def test_failed_runs_are_tried_again_and_diverged_ones_are_results():
    mine = study()
    runs = plan(mine, {}).runs
    failed = Record(runs[0].id, "mine", {}, status="failed", reason="no memory")
    records = {runs[0].id: failed, runs[1].id: replace(failed, id=runs[1].id, status="diverged")}
    pending = {run.id for run in plan(mine, records).pending}
    assert runs[0].id in pending
    assert runs[1].id not in pending
    finals = [run for run in runs if not run.trial and run.settings["shape.depth"] == 1]
    shown = {finals[0].id: ok(finals[0], 0.25), finals[1].id: replace(ok(finals[1], 0.0), status="diverged")}
    columns, rows = table(mine, results(mine, shown))
    row = next(row for row in rows if row[columns.index("runs")] == "1 of 2; 1 diverged")
    assert row[columns.index("top1")] == "25.00%"


def test_the_cost_counts_waiting_runs_and_uses_recorded_speed():
    mine = study()
    cost = plan_cost(mine, plan(mine, {}), {}, {})
    assert (cost.runs, cost.seconds) == (12, None)
    architecture = parse("ViT-Ti/4@8", classes=10, depth=1)
    assert (
        run_flops_of(mine.recipe_of(plan(mine, {}).runs[0]), 1000, 10) == 6 * 10 * 256 * model_cost(architecture).macs
    )
    records = {run.id: ok(run, 0.5) for run in plan(mine, {}).runs[:1]}
    later = plan_cost(mine, plan(mine, records), records, {})
    assert later.runs == 11
    assert later.flops is not None
    assert later.seconds == pytest.approx(later.flops / (4.0 / 2.0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("metric =", "metrics ="), "unknown key"),
        (('metric = "top1"\n', ""), "lacks its metric"),
        (("shape.depth = [1", "shape.deepness = [1"), "not a key of a recipe"),
        (('name = "sgd"', 'name = "sgd"\nstart = "x"'), 'has no start "x"'),
        (('name = "sgd"', 'name = "sgd"\nmeasure = "x"'), 'has no measure "x"'),
        (("[scales.long]", '[[claims]]\ntext = "t"\nkind = "x"\n[scales.long]'), "kinds are compare"),
        (("[scales.long]", '[[claims]]\ntext = "t"\nkind = "compare"\n[scales.long]'), "lacks what it compares"),
        (("[axes]", "[trials]\nstep = 3\n[axes]"), 'sets "step" of its trials'),
        (("seeds = [0, 1]", "seeds = 3"), r"are 3, not a list of whole numbers: write seeds = \[0, 1, 2\]"),
        (("seeds = [0, 1]", "seeds = []"), r"are \[\], not a list of whole numbers: write seeds = "),
        (("seeds = [0, 1]", 'seeds = "01"'), "are '01', not a list of whole numbers"),
        (("seeds = [0, 1]", "seeds = [0, true]"), "not a list of whole numbers"),
        (("seeds = [0, 1]", "seeds = [1, 1]"), "which repeats a seed"),
        (
            ("shape.depth = [1, 2]", "shape.depth = 1"),
            r"shape.depth of the study mine is 1, not a list .*: write \[1\]",
        ),
        (("shape.depth = [1, 2]", "shape.depth = []"), r"is \[\], not a list .*: write at least one, or remove"),
        (("choose.optim.lr = [0.1, 0.01]", "choose.optim.lr = 0.1"), r"choose.optim.lr of .* write \[0.1\]"),
        (("shape.depth = [1, 2]", 'shape.pool = "mean"'), r'write \["mean"\]'),
        (("title =", "title"), "not valid TOML"),
    ],
)
def test_mistakes_in_a_study_are_named(tmp_path, change, message):
    path = tmp_path / "mine.toml"
    old, new = change
    path.write_text(TEXT.replace(old, new, 1))
    with pytest.raises(UserError, match=message):
        read_study(path)


def test_unknown_studies_and_scales():
    with pytest.raises(UserError, match='no study "position"'):
        read_study("position")
    with pytest.raises(UserError, match=r"gone\.toml does not exist: check the path"):
        read_study("gone.toml")
    with pytest.raises(UserError, match='no scale "huge": it has small, paper'):
        read_study("heads", "huge")


SCALES = [(name, scale) for name in shipped() for scale in ("small", *definition_of(name).get("scales", {}))]


@pytest.mark.parametrize(("name", "scale"), SCALES)
def test_shipped_studies_are_complete(name, scale):
    """Every recipe is valid, every claim selects cells, and the cost is known where models are trained from scratch."""
    mine = read_study(name, scale)
    current = plan(mine, {})
    for run in current.runs:
        mine.recipe_of(run)
    cells = results(mine, {})
    assert plan_cost(mine, current, {}, {}).runs == current.total
    if scale == "small":
        for claim in mine.claims:
            for where in (claim.a, claim.b, *claim.order):
                assert where is None or select(cells, where), claim.text


def test_paper_scale_costs_what_table_6_says():
    mine = read_study("compute", "paper")
    rows = {(name_of(parse(row.model)), row.epochs): row for row in paper.table6()}
    assert len(mine.cells) == len(rows) == 18
    for run in plan(mine, {}).runs:
        recipe = mine.recipe_of(run)
        row = rows[name_of(parse(recipe.model)), round(recipe.epochs)]
        flops = run_flops_of(recipe, mine.images, mine.classes)
        assert flops is not None
        assert flops / 1e18 == pytest.approx(row.exaflops, rel=0.05), row.model
        assert run.cell.paper == row.imagenet


def test_values_of_the_paper_are_those_of_its_tables():
    places = ("input", "every", "shared")
    table8 = {(row.position, place): getattr(row, place) for row in paper.table8() for place in places}
    cells = read_study("positions").cells
    ours = {(c.labels["shape.position"], c.labels["shape.injection"]): c.paper for c in cells}
    assert len(ours) == 8
    printed = {key: 100 * value for key, value in table8.items() if value}
    assert ours == pytest.approx(printed)
    table7 = {(row.model, row.optimizer): row.average for row in paper.table7()}
    for cell in read_study("optimizers", "paper").cells:
        assert table7[cell.labels["model"], cell.labels["name"].lower()] == cell.paper
    for cell in read_study("transfer").cells:
        if cell.paper is not None:
            assert cell.paper in [row.value for row in paper.reported("ViT-B/16", "imagenet21k", cell.data)]


@pytest.mark.parametrize("name", ["positions", "heads", "shape"])
def test_recorded_runs_belong_to_their_studies(name):
    """All committed records are of runs that the shipped study plans, so that none would be repeated."""
    records = read_records(RESULTS / name)
    ids = {run.id for run in plan(read_study(name), records).runs}
    assert records.keys() <= ids
    assert json.loads((RESULTS / name / "study.json").read_text())["study"] == name
