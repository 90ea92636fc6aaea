"""VTAB-1k as a suite: one recipe for all tasks, chosen on their validation images, and one number at the end."""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs import finished_run
from vtab_files import write_parquet
from vtab_stand_ins import write_real_counts, write_real_locations, write_stand_in

import vitral
from vitral.api.vtab import VtabResult, paper_rows, vtab1k
from vitral.architecture import ViTConfig
from vitral.checkpoints.card import Card, Preprocess
from vitral.cli import main
from vitral.data.images import encode_png
from vitral.data.sources import open_data
from vitral.data.vtab import TASKS, open_task
from vitral.errors import UserError
from vitral.events import Note, StepDone
from vitral.models.build import build
from vitral.paper import readings, table9
from vitral.recipe import Recipe, from_toml
from vitral.recipe_presets import get_preset
from vitral.studies.protocol import TrialConfig, for_task, group_scores, mean_score, run_suite
from vitral.training.run import RunResult

TINY = ViTConfig(depth=1, width=16, mlp=32, heads=2, patch=4, image=(8, 8), classes=3)
WEIGHTS = "data/vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors"
FEW: dict[str, Any] = {"train_size": 40, "val_size": 10}
QUICK = ("image=16", "batch=512", "schedule.warmup=0", "workers=0")
TWO_STEPS = (*QUICK, "steps=2")
RATES = ("optim.lr=0.01,0.1",)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with pixel values of its own."""
    path = tmp_path_factory.mktemp("weights") / "tiny.safetensors"
    torch.manual_seed(0)
    card = Card(TINY, class_names=("a", "b", "c"), preprocess=Preprocess("decode|resize(8)", (0.1,) * 3, (0.3,) * 3))
    vitral.save(build(TINY), path, card)
    return path


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stand-ins for all 19 tasks, which share 16 data sets."""
    folder = tmp_path_factory.mktemp("vtab")
    for name in {task.dataset: name for name, task in TASKS.items()}.values():
        write_stand_in(name, folder, train=150, others=50, shrink=8)
    return folder


@pytest.fixture(scope="module")
def whole(weights: Path, root: Path, tmp_path_factory: pytest.TempPathFactory) -> VtabResult:
    """Every task, two candidates and the chosen one: 57 runs of two steps, some seconds."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    return vtab1k(weights, root, sweep=RATES, set=TWO_STEPS, out=out, device="cpu", **FEW)


# The tests of `whole` run in one worker, so that it is computed once.
of_all_tasks = pytest.mark.xdist_group("vtab")


def quick(weights: Path, root: Path, out: Path, *tasks: str, **options: Any) -> VtabResult:
    settings: dict[str, Any] = {"fixed": True, "set": (*QUICK, "steps=1"), "out": out, "device": "cpu", **FEW}
    return vtab1k(weights, root, tasks=tasks, **(settings | options))


def test_the_score_of_table_9_is_the_plain_mean() -> None:
    """The exact means of the printed numbers; a mean of group means would be 79.6 for the first."""
    means = [mean_score(row.scores) for row in table9()]
    assert means == pytest.approx([77.63, 76.29, 72.71], abs=0.006)
    assert means == pytest.approx([row.mean for row in table9()], abs=0.06)


def test_groups_of_table_9() -> None:
    expected = [(86.7, 87.0, 65.0), (85.6, 86.7, 63.0), (83.3, 84.7, 57.5)]
    for row, means in zip(table9(), expected, strict=True):
        found = group_scores(row.scores)
        assert list(found) == ["natural", "specialized", "structured"]
        assert list(found.values()) == pytest.approx(means, abs=0.06)
    assert group_scores({"svhn": 0.5, "pets": 0.7}) == {"natural": pytest.approx(0.6)}


UNFLIPPED = {"dsprites-location", "dsprites-orientation", "smallnorb-azimuth"}
UNCROPPED = {"clevr-count", "clevr-distance", "dmlab", "kitti-distance", "dsprites-location"}


@pytest.mark.parametrize("name", TASKS)
def test_what_would_change_a_label_is_left_out(name: str) -> None:
    """The lists of BiT's appendix."""
    recipe = get_preset("paper:finetune/vtab", "ViT-L/16").recipe
    found = for_task(recipe, TASKS[name])
    plain = "antialias=false"
    middle = f"resize({{size}}, {plain})" if name in UNCROPPED else f"resize({{wider}}, {plain})|random_crop({{size}})"
    flip = "" if name in UNFLIPPED else "|flip"
    assert found.data.train_transform == f"decode|{middle}{flip}"
    assert replace(found, data=recipe.data) == recipe
    assert found.data.eval_transform == recipe.data.eval_transform


def test_exclusions_hold_for_pipelines_of_ones_own() -> None:
    mine = "decode | inception_crop({size}, 0.3) | flip | randaugment(2, 10)"
    recipe = replace(Recipe(), data=replace(Recipe().data, train_transform=mine))
    assert (
        for_task(recipe, TASKS["dsprites-location"]).data.train_transform == "decode|resize({size})|randaugment(2, 10)"
    )
    assert (
        for_task(recipe, TASKS["kitti-distance"]).data.train_transform
        == "decode|resize({size})|flip|randaugment(2, 10)"
    )
    assert for_task(recipe, TASKS["pets"]).data.train_transform == mine.replace(" | ", "|")


@of_all_tasks
def test_all_tasks_from_choice_to_score(whole: VtabResult) -> None:
    """The numbers again, from what the runs left on disk."""
    folder = Path(whole.folder)
    tried = {}
    for place in sorted((folder / "sweep").iterdir()):
        tried[place.name] = [json.loads((place / name / "result.json").read_text())["metrics"] for name in TASKS]
    assert {metrics["n"] for metrics in tried["optim.lr=0.1"]} == {10}
    means = {words: np.mean([metrics["score"] for metrics in found]) for words, found in tried.items()}
    assert len(means) == 2
    assert {trial.name.replace(" ", ","): trial.score for trial in whole.suite.trials} == pytest.approx(means)
    assert means[whole.suite.chosen.name.replace(" ", ",")] == max(means.values())
    final = [json.loads((folder / name / "seed-0" / "result.json").read_text()) for name in TASKS]
    values = whole.as_dict()
    assert values["score"] == pytest.approx(np.mean([result["metrics"]["score"] for result in final]))
    assert values["all_flops"] > values["training_flops"] == pytest.approx(sum(result["flops"] for result in final))
    assert values["device_hours"] > sum(result["device_hours"] for result in final)
    assert list(values["tasks"]) == list(TASKS)
    assert values["coverage"] == "19 of 19 tasks"
    assert values["paper"][0]["mean"] == pytest.approx(77.63, abs=0.006)
    assert json.loads((folder / "vtab.json").read_text()) == values


@of_all_tasks
def test_each_final_run_sees_all_images_and_measures_test_once(whole: VtabResult, root: Path) -> None:
    for name in TASKS:
        run = Path(whole.folder) / name / "seed-0"
        task = open_task(name, root, train=40, val=10)
        stated = json.loads((run / "data.json").read_text())
        assert stated["train"] == task.train1000.fingerprint()
        assert stated["evaluated"] == task.test.fingerprint()
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert [line["evaluation"]["n"] for line in lines if "evaluation" in line] == [len(task.test)]
        recipe = from_toml((run / "recipe.toml").read_text())
        assert recipe.data.train_transform == for_task(whole.suite.chosen.recipe, TASKS[name]).data.train_transform
        assert (recipe.data.mean, recipe.data.std) == ((0.1,) * 3, (0.3,) * 3)  # what the weights know


@of_all_tasks
def test_only_final_weights_are_kept(whole: VtabResult) -> None:
    kept = sorted(path.relative_to(whole.folder).parts[0] for path in Path(whole.folder).rglob("*.safetensors"))
    assert kept == sorted(TASKS)


@of_all_tasks
def test_what_is_not_vtab_is_said(whole: VtabResult) -> None:
    notes = " ".join(whole.as_dict()["notes"])
    assert "A batch of 512 is more than 40 training images" in notes
    assert "40 + 10 images, not on VTAB-1k's 800 + 200" in notes
    assert {task["order"] for task in whole.as_dict()["tasks"].values()} == {
        "tfds order: not verified (order of the Parquet rows)"
    }


@of_all_tasks
def test_what_is_said_of_the_recipe_is_true(whole: VtabResult, weights: Path, root: Path, tmp_path: Path) -> None:
    said = whole.as_dict()
    assert (said["preset"], said["overrides"]) == ("paper:finetune/vtab", [*TWO_STEPS, *RATES])
    assert {row["label"] for row in said["paper"]} == {"other recipe"}
    assert {"optim.lr", "steps", "image"} <= set(said["changed"])
    why = {name: reading.why for name, reading in readings().items()}
    assert {why["vtab dev"], why["vtab crops"]} <= set(said["readings"])
    assert why["vtab sweep"] not in said["readings"]  # these rates are not the preset's
    assert from_toml((Path(whole.folder) / "svhn" / "seed-0" / "recipe.toml").read_text()).reset_head
    fixed = quick(weights, root, tmp_path / "run", "svhn")
    assert why["vtab crops"] in fixed.readings
    assert not {why["vtab dev"], why["vtab sweep"]} & set(fixed.readings)  # nothing was swept


def test_what_is_to_know_of_the_data_is_said(weights: Path, tmp_path: Path) -> None:
    rows = [{"image": encode_png(np.full((8, 8, 3), label, np.uint8)), "label": np.array(label)} for label in range(10)]
    write_parquet(tmp_path / "data" / "svhn", {"train": [row for row in rows for _ in range(20)], "test": rows})
    found = quick(weights, tmp_path / "data", tmp_path / "run", "svhn")
    said = "svhn is not stored in random order: its images are taken by the hashes of their keys."
    assert said in found.as_dict()["notes"]
    assert f"# {said}" in (tmp_path / "run" / "vtab-ids" / "svhn.txt").read_text().splitlines()


@of_all_tasks
def test_a_second_call_trains_nothing(whole: VtabResult, weights: Path, root: Path) -> None:
    heard: list[Any] = []
    out = Path(whole.folder)
    again = vtab1k(weights, root, sweep=RATES, set=TWO_STEPS, out=out, device="cpu", on_event=heard.append, **FEW)
    assert not [event for event in heard if isinstance(event, StepDone)]
    assert again.as_dict() == whole.as_dict()


def test_a_suite_goes_on_with_what_is_left(weights: Path, root: Path, tmp_path: Path) -> None:
    names = ("svhn", "dmlab")
    before = quick(weights, root, tmp_path / "a", *names)
    (tmp_path / "a" / "dmlab" / "seed-0" / "result.json").unlink()
    (tmp_path / "a" / "dmlab" / "seed-0" / "model.safetensors").unlink()
    heard: list[Any] = []
    after = quick(weights, root, tmp_path / "a", *names, on_event=heard.append)
    assert len([event for event in heard if isinstance(event, StepDone)]) == 1
    assert after.suite.scores == before.suite.scores


def test_a_missing_task_is_named_skipped_and_counted(weights: Path, tmp_path: Path) -> None:
    for name in ("svhn", "dmlab"):
        write_stand_in(name, tmp_path / "data", train=150, others=20, shrink=8)
    write_stand_in("dtd", tmp_path / "data", train=20, others=20, shrink=16)
    heard: list[Any] = []
    found = quick(weights, tmp_path / "data", tmp_path / "run", "dmlab", "pets", "svhn", "dtd", on_event=heard.append)
    assert found.coverage == "2 of 19 tasks; missing: dtd, pets"
    said = [event.text for event in heard if isinstance(event, Note)]
    assert any("has no folder pets or oxford_iiit_pet" in text for text in said)
    assert any("too few: dtd needs 40" in text for text in said)
    values = found.as_dict()
    assert list(values["tasks"]) == ["svhn", "dmlab"]
    assert list(values["missing"]) == ["dtd", "pets"]
    assert values["paper"][0]["mean"] == pytest.approx((88.9 + 53.1) / 2)
    with pytest.raises(UserError, match=r"none of the tasks can be opened, the first because .* has no folder pets"):
        quick(weights, tmp_path / "data", tmp_path / "none", "pets")
    assert not (tmp_path / "none").exists()


def test_mistakes_are_told_before_anything_runs(weights: Path, root: Path, tmp_path: Path) -> None:
    cases: list[tuple[str, dict[str, Any]]] = [
        ("did you mean pets", {"tasks": ["petz"]}),
        ("seeds must be at least 1", {"seeds": 0}),
        ("omit one of the two", {"fixed": True, "sweep": ("steps=1,2",)}),
        ("patience is fixed", {"set": ("patience=3",)}),
        ("data.dev is fixed", {"set": ("data.dev=0.1",)}),
        ("patience is fixed", {"sweep": ("patience=1,2",)}),
        ("draws at random", {"set": (*QUICK, "data.eval_transform=decode|random_crop({size})")}),
        ("no recipe", {"recipe": "paper:finetune/vtb"}),
    ]
    for words, options in cases:
        with pytest.raises(UserError, match=words):
            vtab1k(weights, root, out=tmp_path / "run", device="cpu", **(FEW | options))
    assert not (tmp_path / "run").exists()


def test_a_suite_lies_neither_among_images_nor_among_other_files(
    weights: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "dear.txt").touch()
    cases = {
        tmp_path / "letters": "contains other files and no run to resume",
        root: "contains other files and no run to resume",
        root / "svhn": "is inside the data folder",  # missing, and would be taken for the data, before svhn_cropped
        root / "clevr" / "run": "is inside the data folder",
    }
    for out, words in cases.items():
        before = sorted(out.rglob("*"))
        with pytest.raises(UserError, match=words):
            quick(weights, root, out, "svhn")
        assert sorted(out.rglob("*")) == before
    monkeypatch.chdir(root / "clevr")
    with pytest.raises(UserError, match="runs is inside the data folder"):
        vtab1k(weights, root, tasks=["svhn"], device="cpu", **FEW)


@pytest.mark.parametrize("options", [{}, {"fixed": False, "sweep": ("steps=1,2",), "set": QUICK}])
def test_a_suite_that_was_stopped_goes_on_in_its_folder(
    weights: Path, root: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    """Stopped after its first run, when there is no vtab.json, and with nothing but a list of images."""
    (tmp_path / "vtab-ids").mkdir()

    def stop(event: Any) -> None:
        if isinstance(event, StepDone):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quick(weights, root, tmp_path, "svhn", on_event=stop, **options)
    assert not (tmp_path / "vtab.json").exists()
    assert list(quick(weights, root, tmp_path, "svhn", **options).suite.scores) == ["svhn"]
    assert (tmp_path / "vtab.json").is_file()


class Runs:
    """Instead of training: accuracies that are given by (task, steps), and a record of what was asked for."""

    def __init__(self, scores: dict[tuple[str, int], float]) -> None:
        self.scores = scores
        self.asked: list[tuple[str, str, Recipe]] = []

    def __call__(self, recipe: Recipe, data: Any, path: Path, **options: Any) -> RunResult:
        score = self.scores[data.source, recipe.steps] + recipe.seed / 100
        self.asked.append((data.source, data.eval_split.name, recipe))
        return finished_run(recipe, path, score, len(data.eval_split), step=recipe.steps, device="none")


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    fake = Runs({("svhn", 1): 0.9, ("dmlab", 1): 0.1, ("svhn", 2): 0.6, ("dmlab", 2): 0.5})
    monkeypatch.setattr("vitral.studies.protocol.run", fake)
    monkeypatch.setattr("vitral.studies.protocol.run", fake)
    return fake


def test_one_recipe_is_chosen_by_the_mean_over_tasks(runs: Runs, root: Path, tmp_path: Path) -> None:
    """Alone, svhn would take one step; together two are better."""
    tried = [TrialConfig(f"steps={steps}", Recipe(steps=steps, epochs=0)) for steps in (1, 2)]
    tasks = [open_task(name, root, train=40, val=10) for name in ("svhn", "dmlab")]
    suite = run_suite(tried, tasks, tmp_path, seeds=2, on_event=lambda event: None)
    assert suite.chosen is tried[1]
    assert [trial.score for trial in suite.trials] == pytest.approx([0.5, 0.55])
    assert [(name, split, recipe.steps, recipe.seed) for name, split, recipe in runs.asked] == [
        *(("svhn", "val200", 1, 0), ("dmlab", "val200", 1, 0), ("svhn", "val200", 2, 0), ("dmlab", "val200", 2, 0)),
        *(("svhn", "test", 2, 0), ("svhn", "test", 2, 1), ("dmlab", "test", 2, 0), ("dmlab", "test", 2, 1)),
    ]
    assert suite.scores == pytest.approx({"svhn": 0.605, "dmlab": 0.505})
    assert suite.seed_scores == pytest.approx((0.55, 0.56))
    assert suite.mean == pytest.approx(0.555)
    assert suite.spread == pytest.approx(statistics.stdev((0.55, 0.56)))
    assert (suite.flops, suite.all_flops, suite.device_hours) == (2, 8, 8)


def test_a_single_candidate_is_taken_without_a_trial(runs: Runs, root: Path, tmp_path: Path) -> None:
    only = [TrialConfig("", Recipe(steps=1, epochs=0))]
    suite = run_suite(
        only,
        [open_task("svhn", root, train=FEW["train_size"], val=FEW["val_size"])],
        tmp_path,
        on_event=lambda event: None,
    )
    assert [split for _, split, _ in runs.asked] == ["test"]
    assert (suite.trials, suite.spread) == ((), None)


def test_the_papers_four_candidates_and_its_choice(
    weights: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Runs({("svhn", 500): 0.2, ("svhn", 2500): 0.3})
    monkeypatch.setattr("vitral.studies.protocol.run", fake)
    monkeypatch.setattr("vitral.studies.protocol.run", fake)

    def asked(out: str, **options: Any) -> list[tuple[str, float, int]]:
        fake.asked.clear()
        vtab1k(weights, root, tasks=["svhn"], out=tmp_path / out, device="cpu", **options, **FEW)
        return [(split, recipe.optim.lr, recipe.steps) for _, split, recipe in fake.asked]

    four = [("val200", lr, steps) for lr in (0.003, 0.01) for steps in (500, 2500)]
    assert asked("a") == [*four, ("test", 0.003, 2500)]
    assert asked("b", fixed=True) == [("test", 0.01, 2500)]
    # A key that is set is not tried.
    two = [("val200", lr, 500) for lr in (0.003, 0.01)]
    assert asked("c", set=["steps=500"]) == [*two, ("test", 0.003, 500)]
    assert (tmp_path / "c" / "vtab-ids" / "svhn.txt").is_file()


def test_the_models_own_rows_come_first() -> None:
    found = [(row.model, row.pretraining) for row in paper_rows("ViT-L/16@384")]
    assert found == [("ViT-L/16", "jft300m"), ("ViT-L/16", "imagenet21k"), ("ViT-H/14", "jft300m")]
    assert [row.model for row in paper_rows("ViT-B/16")] == ["ViT-H/14", "ViT-L/16", "ViT-L/16"]


def test_the_command_line_at_full_count(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """800 and 200 images, listed beside the data; then in the run folder, where the data's own cannot be written."""
    write_stand_in("camelyon", tmp_path / "data", train=800, others=200, layout="tfrecord", shrink=8)

    def call(out: str, *words: str) -> str:
        given = [str(weights), str(tmp_path / "data"), "--device", "cpu", "--out", str(tmp_path / out)]
        monkeypatch.setattr(sys, "argv", ["vitral", "vtab", *given, "--set", *QUICK, "steps=1", *words])
        main()
        return capsys.readouterr().out

    shown = call("a", "--seeds", "2", "--sweep", "optim.lr=0.01,0.03")
    tried = [line.split()[0] for line in shown.splitlines() if "optim.lr" in line]
    assert tried[:2] == ["optim.lr=0.01", "optim.lr=0.03"]
    score, cost = (line.split() for line in shown.splitlines() if line.strip().startswith("camelyon "))
    assert (score[:2], score[3:]) == (["camelyon", "200"], ["83.3", "83.6", "82.5"])
    row = json.loads((tmp_path / "a" / "vtab.json").read_text())["tasks"]["camelyon"]
    assert cost[1:3] == [f"{row['training_flops']:.3g}", f"{row['device_hours']:.3g}"]
    assert all(len(line) <= 80 for line in shown[: shown.index("\nscore ")].splitlines())
    assert "1 of 19 tasks; missing: caltech101, cifar100" in shown
    assert "(mean and standard deviation of 2 seeds)" in " ".join(shown.split())
    assert "in TFDS's own order in 1 of 1 tasks" in shown
    ids = tmp_path / "data" / "vtab-ids"
    listed = (ids / "camelyon.txt").read_text()
    assert "# tfds order: yes" in listed
    assert len(listed.splitlines()) == 2 + 1200
    (ids / "camelyon.txt").unlink()
    ids.rmdir()
    ids.write_text("in the way")
    values = json.loads(call("b", "--fixed", "--json", "--tasks", "camelyon", "pets"))
    assert list(values["missing"]) == ["pets"]
    assert values["tasks"]["camelyon"]["train"] == 800
    assert (tmp_path / "b" / "vtab-ids" / "camelyon.txt").read_text() == listed


@pytest.mark.slow
def test_three_tasks_of_real_photographs(assets: Path, tmp_path: Path) -> None:
    """A released ViT-Ti/16 at 64 pixels learns all three in 16 steps; about 25 seconds on one thread.

    The pets are 12 of the 37 breeds, so the copy names the others too: a task must have its number of classes.
    """
    pets = open_data(assets / "data" / "pets_mini")
    assert pets.test is not None
    rng = np.random.default_rng(0)
    records = {
        split.name: [
            {"image": split.reader.read(index), "label": np.array(split.labels[index])}
            for index in rng.permutation(len(split)).tolist()
        ]
        for split in (pets.train, pets.test)
    }
    names = [*pets.train.classes, *(f"absent {number}" for number in range(25))]
    write_parquet(tmp_path / "data" / "pets", records, names)  # type: ignore[arg-type]
    photographs = open_data(assets / "data" / "imagenet_val_1000", held_out=0).train.select(np.arange(0, 1000, 5))
    write_real_counts(photographs, tmp_path / "data", train=800, test=200)
    write_real_locations(photographs, tmp_path / "data", train=1600)
    found = vtab1k(
        assets / WEIGHTS,
        tmp_path / "data",
        fixed=True,
        set=["image=64", "steps=16", "batch=32", "schedule.warmup=2", "optim.lr=0.06", "workers=0"],
        out=tmp_path / "run",
        device="cpu",
        train_size=300,
        val_size=50,
    )
    tasks = found.as_dict()["tasks"]
    assert {name: task["n"] for name, task in tasks.items()} == {
        "pets": 300,
        "clevr-count": 200,
        "dsprites-location": 160,
    }
    # By chance 1 in 12, 8 and 16.
    assert tasks["pets"]["score"] > 0.2
    assert tasks["clevr-count"]["score"] > 0.22
    assert tasks["dsprites-location"]["score"] > 0.16
