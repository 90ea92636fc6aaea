"""The paper's way to a number: choose on dev, train on all of train, measure test once; and the chain of all verbs."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from journeys import MODEL, PLAIN, SHAPE, Command
from runs import finished_run, make_pictures

import vitral
from vitral import events
from vitral.api.data import open_to_choose
from vitral.api.protocols import paper_numbers
from vitral.architecture import ResNetConfig, ViTConfig
from vitral.checkpoints.card import Card, Preprocess
from vitral.checkpoints.run import RunFolder
from vitral.cost import training_flops
from vitral.data import catalog
from vitral.data.images import encode_png
from vitral.data.loader import read_pixels
from vitral.data.sources import DataSet, open_data
from vitral.errors import UserError
from vitral.models.build import build
from vitral.recipe import Recipe, from_toml, recipe_hash, with_overrides
from vitral.studies import protocol as studies
from vitral.studies.protocol import ProtocolRuns, evaluated_once, parse_search_space, run_protocol, trial_configs
from vitral.training.run import RunResult


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pictures(tmp_path_factory.mktemp("data") / "pictures", images=20)


# What is tried


def test_every_combination_is_tried_in_order():
    tried = trial_configs(Recipe(), parse_search_space(["optim.lr=0.1, 0.2", "steps=10,20,30"]))
    assert [candidate.name for candidate in tried] == [
        f"optim.lr={rate} steps={steps}" for rate in ("0.1", "0.2") for steps in (10, 20, 30)
    ]
    assert [(one.recipe.optim.lr, one.recipe.steps, one.recipe.epochs) for one in tried] == [
        (rate, steps, 0) for rate in (0.1, 0.2) for steps in (10, 20, 30)
    ]


def test_without_a_grid_there_is_the_recipe_itself():
    recipe = with_overrides(Recipe(), ["steps=3"])
    assert [(one.name, one.recipe) for one in trial_configs(recipe, {})] == [("", recipe)]


def test_values_of_a_book_are_tried_as_they_are():
    tried = trial_configs(Recipe(), {"optim.lr": (0.003, 0.01), "data.mean": ((0.5, 0.5, 0.4),)})
    assert [one.recipe.optim.lr for one in tried] == [0.003, 0.01]
    assert tried[0].recipe.data.mean == (0.5, 0.5, 0.4)


@pytest.mark.parametrize(
    "word, says",
    [
        ("optim.lr", "cannot sweep over"),
        ("optim.lr=", "cannot sweep over"),
        ("data.mean=0.5,0.5,0.5", "cannot sweep over"),  # its commas belong to one value
        ("optim.rate=1,2", 'unknown key "optim.rate"'),
        ("optim.lr=fast,slow", "optim.lr must be a number"),
        ("data.subset=100,200", "data.subset must be the same in all trials"),  # data is opened before
        ("init=a.npz,b.npz", "init must be the same in all trials"),
        ("steps=1,2 steps=3", "steps is swept twice"),
    ],
)
def test_what_cannot_be_swept_is_one_sentence(word, says):
    with pytest.raises(UserError, match=re.escape(says)):
        trial_configs(Recipe(), parse_search_space(word.split()))


def test_a_value_is_tried_once():
    assert parse_search_space(["optim.lr=0.1,0.2,0.1"]) == {"optim.lr": ("0.1", "0.2")}


def test_a_value_may_need_others_of_its_recipe():
    stairs = with_overrides(Recipe(), ["schedule.drops=0.5", "schedule.factors=0.1"])
    tried = trial_configs(stairs, parse_search_space(["schedule.kind=multistep,cosine"]))
    assert [one.recipe.schedule.kind for one in tried] == ["multistep", "cosine"]


def test_the_last_run_looks_at_its_test_images_once():
    recipe = evaluated_once(with_overrides(Recipe(), ["steps=100000", "evaluate_every=10"]))
    assert recipe.evaluate_every > recipe.steps
    assert recipe.save_every == 500  # it may still be interrupted
    assert evaluated_once(replace(recipe, save_every=7)).save_every == 7


# How it is chosen


class Runs:
    """Stands in for training: remembers what was run on what, and scores by a function of (recipe, split)."""

    def __init__(self, score: Callable[[Recipe, str], float]) -> None:
        self.score = score
        self.calls: list[tuple[Recipe, DataSet, Path]] = []

    def __call__(self, recipe: Recipe, data: DataSet, path: Path, *, device: str, on_event: Any) -> RunResult:
        reported = data.reported_split(recipe.patience > 0)
        assert reported is not None
        self.calls.append((recipe, data, path))
        score = self.score(recipe, reported.name)
        return finished_run(recipe, path, score, len(reported), seconds=3600.0, flops=10.0)


def followed(
    runs: Runs,
    monkeypatch: pytest.MonkeyPatch,
    pictures: Path,
    *words: str,
    grid: Sequence[str] = ("optim.lr=0.1,0.2,0.3",),
    dev: float = 0.25,
    seeds: int = 3,
) -> ProtocolRuns:
    monkeypatch.setattr(studies, "run", runs)
    recipe = with_overrides(Recipe(), words)
    opened, choosing = open_to_choose(pictures, recipe, dev)
    tried = trial_configs(recipe, parse_search_space(grid))
    return run_protocol(
        tried, opened, Path("out"), choosing=choosing, dev=dev, seeds=seeds, device="cpu", on_event=lambda event: None
    )


def test_dev_chooses_and_test_is_measured_once_a_seed(pictures, monkeypatch):
    # The best on dev is the worst on test: whoever looks at test would choose another one.
    runs = Runs(lambda recipe, split: recipe.optim.lr if split == "dev" else 1 - recipe.optim.lr + recipe.seed / 100)
    found = followed(runs, monkeypatch, pictures)
    assert found.chosen.name == "optim.lr=0.3"
    assert [trial.score for trial in found.trials] == [0.1, 0.2, 0.3]
    assert found.seed_scores == pytest.approx((0.7, 0.71, 0.72))
    assert found.mean == pytest.approx(0.71)
    assert found.spread == pytest.approx(statistics.stdev([0.7, 0.71, 0.72]))
    assert (found.split, found.dev) == ("test", "dev")
    assert (found.flops, found.all_flops, found.device_hours) == (10, 60, 6)
    assert [data.eval_split.name for _, data, _ in runs.calls if data.eval_split] == ["dev"] * 3 + ["test"] * 3
    assert [path.as_posix() for _, _, path in runs.calls] == [
        *(f"out/sweep/optim.lr={rate}" for rate in (0.1, 0.2, 0.3)),
        *(f"out/seed-{seed}" for seed in range(3)),
    ]


def test_final_runs_train_on_all_of_train(pictures, monkeypatch):
    runs = Runs(lambda recipe, split: recipe.optim.lr)
    followed(runs, monkeypatch, pictures)
    whole = open_data(pictures)
    assert whole.test is not None
    for recipe, data, _ in runs.calls[:3]:
        assert data.val is not None
        assert data.eval_split is data.val
        assert recipe.data.dev == 0.25
        assert set(data.train.keys) | set(data.val.keys) == set(whole.train.keys)
        assert set(data.train.keys).isdisjoint(data.val.keys)
    for recipe, data, _ in runs.calls[3:]:
        assert recipe.data.dev == 0
        assert recipe.evaluate_every > 1_000_000
        assert data.train.keys == whole.train.keys
        assert data.test is not None
        assert data.eval_split is data.test
        assert data.test.keys == whole.test.keys


def test_patience_chooses_on_dev_and_reports_test(pictures, monkeypatch):
    runs = Runs(lambda recipe, split: recipe.optim.lr if split == "dev" else 1 - recipe.optim.lr)
    found = followed(runs, monkeypatch, pictures, "patience=2", "data.subset=20")
    assert (found.split, found.dev, found.chosen.name) == ("test", "dev", "optim.lr=0.3")
    assert [trial.score for trial in found.trials] == [0.1, 0.2, 0.3]
    assert found.mean == pytest.approx(0.7)
    assert {data.test is None for _, data, _ in runs.calls[:3]} == {True}  # a trial cannot even see it
    assert {data.eval_split.name for _, data, _ in runs.calls if data.eval_split} == {"dev"}
    assert {(recipe.data.dev, recipe.evaluate_every, len(data.train)) for recipe, data, _ in runs.calls} == {
        (0.25, 0, 20)
    }


def test_what_diverges_is_out_and_the_others_go_on(pictures, tmp_path):
    words = SWEPT | {"set": [*SWEPT["set"], "optim.name=sgd", "optim.clip=0"], "seeds": 1}
    rates = ("optim.lr=1e30,0.001",)
    found = vitral.pretrain(pictures, out=tmp_path / "run", **(words | {"sweep": rates}))
    assert found.as_dict()["diverged"] == ["optim.lr=1e30"]
    assert (found.outcome.chosen.name, len(found.outcome.trials)) == ("optim.lr=0.001", 1)
    with pytest.raises(UserError, match="all trials diverged"):
        vitral.pretrain(pictures, out=tmp_path / "none", **(words | {"sweep": ("optim.lr=1e30,1e31",)}))


def test_equals_go_to_the_first(pictures, monkeypatch):
    assert followed(Runs(lambda recipe, split: 0.5), monkeypatch, pictures).chosen.name == "optim.lr=0.1"


def test_one_candidate_is_not_tried(pictures, monkeypatch):
    runs = Runs(lambda recipe, split: 0.5)
    found = followed(runs, monkeypatch, pictures, grid=(), dev=0.0, seeds=1)
    assert found.trials == ()
    assert found.spread is None
    assert len(runs.calls) == 1


@pytest.mark.parametrize("words, grid", [((), ("optim.lr=0.1,0.2",)), (("patience=1",), ())])
def test_there_must_be_images_to_choose_on(pictures, monkeypatch, words, grid):
    with pytest.raises(UserError, match=r"set data\.dev, such as data\.dev=0\.1"):
        followed(Runs(lambda recipe, split: 0.5), monkeypatch, pictures, *words, grid=grid, dev=0.0)


# By the verbs


TINY = (*SHAPE, *PLAIN, "steps=3", "batch=6")
SWEPT: dict[str, Any] = {
    "model": MODEL,
    "set": [*TINY, "data.dev=0.2"],
    "sweep": ("optim.lr=1e-30,0.01",),
    "seeds": 2,
    "device": "cpu",
}


@pytest.fixture(scope="module")
def swept(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> vitral.ProtocolResult:
    """Two rates tried on dev, two seeds on test."""
    out = tmp_path_factory.mktemp("runs") / "swept"
    return vitral.pretrain(pictures, out=out, **SWEPT)


def shape_of(run: str) -> ViTConfig:
    config = vitral.load(run)[1].architecture
    assert isinstance(config, ViTConfig)
    return config


def test_the_row_holds_what_is_needed_to_trust_it(pictures, swept):
    row = swept.as_dict()
    assert row == json.loads((Path(swept.folder) / "protocol.json").read_text())
    last = json.loads((Path(swept.folder) / "seed-1" / "result.json").read_text())
    architecture = shape_of(f"{swept.folder}/seed-0")
    assert architecture.representation == 16  # the paper's head for pre-training
    assert row["training_flops"] == training_flops(architecture, images=6, epochs=3)
    assert row["all_flops"] == 4 * row["training_flops"]
    assert row["n"] == last["metrics"]["n"] == 12
    assert row["seeds"] == [0, 1]
    assert row["scores"][1] == last["metrics"]["score"]
    assert row["score"] == pytest.approx(statistics.fmean(row["scores"]))
    assert row["spread"] == pytest.approx(statistics.stdev(row["scores"]))
    assert row["recipe"] == recipe_hash(swept.outcome.chosen.recipe)
    assert (row["split"], row["devices"], row["device"]) == ("test", 1, last["device"])
    assert row["device_hours"] > last["device_hours"] > 0
    assert {trial["name"] for trial in row["trials"]} == {"optim.lr=1e-30", "optim.lr=0.01"}
    assert row["chosen"] == max(row["trials"], key=lambda trial: trial["score"])["name"]


def test_test_images_are_measured_once_a_run(swept):
    for seed in (0, 1):
        lines = RunFolder(Path(swept.folder) / f"seed-{seed}").metrics()
        assert [line["step"] for line in lines if "evaluation" in line] == [3]


def test_the_same_call_again_trains_nothing(pictures, swept):
    heard: list[events.Event] = []
    again = vitral.pretrain(pictures, out=swept.folder, on_event=heard.append, **SWEPT)
    assert again.as_dict() == swept.as_dict()
    assert not any(isinstance(event, events.StepDone) for event in heard)
    said = [event.text for event in heard if isinstance(event, events.Note)]
    assert sum(text.startswith("already finished: ") for text in said) == 4


def test_a_run_is_evaluated_on_what_it_was_measured_on(tmp_path):
    for split, images in (("train", 4), ("val", 2), ("test", 3)):
        make_pictures(tmp_path / "data" / split, images=images)
    found = vitral.pretrain(tmp_path / "data", out=tmp_path / "run", **SWEPT)
    assert found.as_dict()["chosen_on"] == "val"
    assert [trial["n"] for trial in found.as_dict()["trials"]] == [6, 6]
    notes = json.loads((tmp_path / "run" / "seed-1" / "data.json").read_text())["notes"]
    assert notes[0] == "Evaluated on test (9 images)."
    for run, split, score in (
        ("seed-1", "test", found.outcome.seed_scores[1]),
        ("sweep/optim.lr=0.01", "val", found.outcome.trials[1].score),
    ):
        again = vitral.evaluate(tmp_path / "run" / run, tmp_path / "data", device="cpu")
        assert (again.metrics["n"], again.metrics["top1"]) == ({"test": 9, "val": 6}[split], score)
        assert f"held-out images of its {split} split" in again.notes[0]


def test_the_row_names_the_model_that_was_chosen(pictures, tmp_path, monkeypatch):
    monkeypatch.setattr(studies, "run", Runs(lambda recipe, split: float(recipe.shape.depth)))
    found = vitral.pretrain(pictures, out=tmp_path / "run", **(SWEPT | {"sweep": ("shape.depth=1,3",)}))
    assert found.outcome.chosen.name == "shape.depth=3"
    assert "3 layers" in found.model


@pytest.mark.parametrize(
    "recipe, model, numbers",
    [
        ("paper:finetune/pets:resmall", "ViT-L/16@384", [97.32, 97.11, 96.81, 97.11, 94.67, 94.73, 93.64]),
        ("paper:finetune/imagenet-512", "ViT-B/16", [84.15, 84.15, 83.97, 77.91, 79.9]),
        ("paper:finetune/vtab", "ViT-L/16", []),  # a mean over 19 tasks
        ("paper:finetune/pets", "ViT-Ti/16", []),
        ("bit:finetune/small", "ViT-L/16", []),
        ("", "ViT-L/16", []),
    ],
)
def test_the_papers_numbers_are_those_of_the_recipes_data_set(recipe, model, numbers):
    assert [entry.number.value for entry in paper_numbers(recipe, model, "")] == numbers


def test_the_result_stands_beside_the_papers(swept, pictures, monkeypatch, capsys):
    monkeypatch.setattr(
        "vitral.api.protocols.paper_numbers", lambda *_, **__: paper_numbers("paper:finetune/pets", "ViT-L/16", "")
    )
    words = ["--out", swept.folder, "--seeds", "2", "--device", "cpu", "--sweep", *SWEPT["sweep"]]
    said = Command(monkeypatch, capsys)("pretrain", pictures, "--model", MODEL, *words, "--set", *SWEPT["set"])
    assert said.code == 0
    row = swept.as_dict()
    n = row["trials"][0]["n"]
    assert f"on dev (n = {n})" in said.out
    facts = dict(re.findall(r"^(\S.*?)  +(\S.*?) *$", said.out, re.MULTILINE))
    mean = f"{row['score']:.2%} +- {row['spread']:.2%}"
    assert facts["result"] == f"{mean} on test (n = 12; mean and standard deviation of 2 seeds)"
    assert facts["the paper"].startswith("97.32 +- 0.11 % on pets from jft300m (Table 2")
    assert facts["FLOPs"] == f"{row['training_flops']:.3g} per run, {row['all_flops']:.3g} in all"
    assert facts["run folders"] == f"{swept.folder}/seed-0, {swept.folder}/seed-1"
    paper = json.loads((Path(swept.folder) / "protocol.json").read_text())["paper"]
    assert [(entry["data"], entry["pretraining"]) for entry in paper][3:5] == [
        ("pets", "jft300m"),
        ("pets", "imagenet21k"),
    ]


def test_an_early_end_says_where_weights_were_selected(pictures, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(studies, "run", Runs(lambda recipe, split: 0.5))
    said = Command(monkeypatch, capsys)(
        *("pretrain", pictures, "--model", MODEL, "--out", tmp_path / "run", "--device", "cpu"),
        *("--set", *TINY, "patience=1", "data.dev=0.2"),
    )
    assert said.code == 0
    assert re.search(r"result +50\.00% on test \(n = 12; 1 seed; weights selected on dev\)", said.out)


def test_a_run_that_was_interrupted_goes_on(pictures, swept, tmp_path):
    def crash(event: events.Event) -> None:
        if isinstance(event, events.RunStarted) and (tmp_path / "run" / "seed-0" / "result.json").exists():
            raise InterruptedError  # when the second seed begins

    heard: list[events.Event] = []
    with pytest.raises(InterruptedError):
        vitral.pretrain(pictures, out=tmp_path / "run", on_event=crash, **SWEPT)
    found = vitral.pretrain(pictures, out=tmp_path / "run", on_event=heard.append, **SWEPT)
    assert sum(isinstance(event, events.RunStarted) for event in heard) == 1
    assert found.as_dict()["scores"] == swept.as_dict()["scores"]


def test_finetuning_keeps_the_weights_pixels_and_the_papers_rates(pictures, swept, tmp_path, monkeypatch):
    runs = Runs(lambda recipe, split: -recipe.optim.lr)
    monkeypatch.setattr(studies, "run", runs)
    weights = Path(swept.folder) / "seed-0"
    words = ["steps=2", "batch=6", "image=16", "data.held_out=0.2"]
    found = vitral.finetune(weights, pictures, recipe="paper:finetune/pets", set=words, out=tmp_path / "ft")
    assert [trial.name for trial in found.outcome.trials] == [f"optim.lr={r}" for r in (0.001, 0.003, 0.01, 0.03)]
    assert found.outcome.chosen.name == "optim.lr=0.001"
    assert [result.seed for result in found.outcome.results] == [0, 1, 2]
    assert {recipe.init for recipe, _, _ in runs.calls} == {str(weights)}
    assert found.readings
    fixed = vitral.finetune(
        weights, pictures, recipe="paper:finetune/vtab", set=[*words[1:], "epochs=1"], out=tmp_path / "vtab"
    )
    assert {(recipe.steps, recipe.epochs) for recipe, data, path in runs.calls[7:]} == {(0, 1.0)}
    assert len(fixed.outcome.trials) == 2  # rates alone: the length was given


@pytest.fixture(scope="module")
def resnet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ResNet of the least depth, as weights that know how their pixels were prepared."""
    torch.manual_seed(0)
    config = ResNetConfig(blocks=(1, 1, 1, 1), width=1, image=(32, 32), classes=3)
    card = Card(config, preprocess=Preprocess("decode|resize(32)", (0.4,) * 3, (0.3,) * 3))
    path = tmp_path_factory.mktemp("weights") / "resnet.safetensors"
    vitral.save(build(config), path, card)
    return path


@pytest.mark.parametrize("winner", ["bit:finetune/small", "paper:finetune/pets"])
def test_a_resnet_tries_bits_recipe_too(pictures, resnet, tmp_path, monkeypatch, winner):
    runs = Runs(lambda recipe, split: float((recipe.schedule.kind == "multistep") == winner.startswith("bit")))
    monkeypatch.setattr(studies, "run", runs)
    words = ["optim.lr=0.01", "batch=6", "steps=2"]
    found = vitral.finetune(resnet, pictures, recipe="paper:finetune/pets", set=words, out=tmp_path / "run")
    assert [trial.name for trial in found.outcome.trials] == ["paper:finetune/pets", "bit:finetune/small"]
    assert found.outcome.chosen.name == winner
    assert {path.relative_to(tmp_path / "run").as_posix() for _, _, path in runs.calls[:2]} == {
        "sweep/paper:finetune-pets",
        "sweep/bit:finetune-small",
    }
    for recipe, _, _ in runs.calls:
        assert (recipe.data.mean, recipe.data.std) == ((0.4,) * 3, (0.3,) * 3)
        assert (recipe.init, recipe.optim.lr, recipe.steps) == (str(resnet), 0.01, 2)


def test_only_the_papers_finetuning_of_a_resnet_has_a_rival(pictures, resnet, swept, tmp_path, monkeypatch):
    runs = Runs(lambda recipe, split: 0.5)
    monkeypatch.setattr(studies, "run", runs)
    words = {"set": ["batch=6", "steps=2"], "sweep": ("optim.lr=0.1,0.2",), "seeds": 1}
    plain: dict[str, Any] = {"recipe": "paper:finetune/pets", "out": tmp_path / "run", **words}
    for weights in (resnet, Path(swept.folder) / "seed-0"):
        assert len(vitral.finetune(weights, pictures, **plain).outcome.trials) == 2
    own: dict[str, Any] = {**plain, "recipe": "bit:finetune/small", "sweep": ()}
    assert vitral.finetune(resnet, pictures, **own).outcome.trials == ()


def test_a_mistake_is_said_before_there_is_a_folder(pictures, swept, tmp_path):
    weights = Path(swept.folder) / "seed-0"
    with pytest.raises(UserError, match="batch=512 is more than the 48 training images"):
        vitral.finetune(weights, pictures, recipe="paper:finetune/pets", out=tmp_path / "run")
    with pytest.raises(UserError, match="seeds must be at least 1"):
        vitral.finetune(weights, pictures, recipe="paper:finetune/pets", seeds=0, out=tmp_path / "run")
    with pytest.raises(UserError, match='there is no recipe "paper:finetune/cats"'):
        vitral.finetune(weights, pictures, recipe="paper:finetune/cats", out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_dev_split_of_flowers_is_a_share_of_train(tmp_path, swept, monkeypatch):
    """The paper's, although the data has a validation split."""
    data = tmp_path / "data"
    for split in ("train", "val", "test"):
        make_pictures(data / split, images=10)
    runs = Runs(lambda recipe, split: 0.5)
    monkeypatch.setattr(studies, "run", runs)
    words: dict[str, Any] = {"set": ["batch=6", "steps=2"], "sweep": ("optim.lr=0.1,0.2",), "seeds": 1}
    for recipe, dev, trained in (("paper:finetune/flowers", "dev", 27), ("paper:finetune/pets", "val", 30)):
        runs.calls.clear()
        found = vitral.finetune(Path(swept.folder) / "seed-0", data, recipe=recipe, out=tmp_path / recipe[15:], **words)
        assert (found.outcome.dev, found.outcome.split) == (dev, "test")
        assert [len(opened.train) for _, opened, _ in runs.calls] == [trained, trained, 30]


def test_imagenet_reports_real_where_the_labels_are(tmp_path, swept, monkeypatch, capsys):
    monkeypatch.setattr(catalog, "CLASSES", 3)
    data, real = tmp_path / "data", [[0, 2], [1], [], [2, 0]]
    make_pictures(data / "train", images=6)
    for label in range(3):
        (data / "train" / f"class-{label}").rename(data / "train" / f"n0000000{label}")
    for number in range(4):
        path = data / "val" / f"n0000000{number % 3}" / f"ILSVRC2012_val_{number + 1:08d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((data / "train" / f"n0000000{number % 3}" / f"{number}.png").read_bytes())
    words = ("finetune", Path(swept.folder) / "seed-0", f"imagenet:{data}", "--recipe", "paper:finetune/imagenet")
    quick = ("--seeds", "2", "--device", "cpu", "--set", "batch=6", "steps=2", "optim.lr=0.01", "workers=0", "image=12")
    command = Command(monkeypatch, capsys)
    said = command(*words, "--out", tmp_path / "without", *quick)
    assert said.code == 0
    assert "ReaL accuracy is not reported: put real.json" in said.err
    assert "ReaL  " not in said.out
    (data / "real.json").write_text(json.dumps(real))
    said = command(*words, "--out", tmp_path / "with", *quick)
    row = json.loads((tmp_path / "with" / "protocol.json").read_text())
    expected = []
    for seed in range(2):
        answers = vitral.predict(tmp_path / "with" / f"seed-{seed}", sorted((data / "val").glob("*/*"))).rows
        numbers = {Path(answer.path).stem[-1]: int(answer.names[0][-1]) for answer in answers}
        expected.append(sum(numbers[str(i + 1)] in labels for i, labels in enumerate(real) if labels) / 3)
    assert (row["real"], row["real_n"]) == (expected, 3)
    assert f"{statistics.fmean(expected):.2%} (n = 3)" in said.out


def test_real_stands_beside_the_papers() -> None:
    numbers = paper_numbers("paper:finetune/imagenet", "ViT-L/32", "", real=True)
    assert {(number.data, number.pretraining): number.number.value for number in numbers}[
        "real", "imagenet21k"
    ] == 85.65


# The chain


def write_digits(folder: Path) -> None:
    """Handwritten digits as pictures: low/ has 0 to 4, high/ has 5 to 9."""
    digits = open_data("digits", held_out=0.0).train
    for place in range(len(digits)):
        pixels, name = read_pixels(digits, place, 3), digits.classes[digits.labels[place]]
        path = folder / ("low" if int(name) < 5 else "high") / name / f"{place}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        assert pixels is not None
        path.write_bytes(encode_png(pixels))


@pytest.mark.slow
def test_the_whole_chain_on_the_digits(tmp_path, monkeypatch, capsys):
    """Learn five digits, then the five others at a higher resolution: about 25 s alone, six runs and two probes."""
    pytest.importorskip("sklearn")
    monkeypatch.setenv("VITRAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    write_digits(tmp_path)
    vitral_ = Command(monkeypatch, capsys)
    pixels = (
        "data.train_transform=decode|inception_crop({size}, 0.75)",
        "data.eval_transform=decode|resize({size})",
        "workers=0",
    )
    small = ("shape.depth=2", "shape.width=48", "shape.heads=4", "optim.lr=2e-3", "optim.weight_decay=0.05")
    said = vitral_(
        *("pretrain", "low", "--model", "ViT-Ti/2@8", "--out", "pre", "--device", "cpu", "--json", "--set"),
        *("steps=300", "batch=64", "schedule.warmup=30", *small, *pixels),
    )
    assert said.code == 0
    learned = json.loads(said.out)
    assert learned["score"] > 0.85
    assert shape_of("pre/seed-0").representation == 48

    said = vitral_(
        *("finetune", "pre/seed-0", "high", "--recipe", "paper:finetune/pets", "--sweep", "optim.lr=0.03,0.1"),
        *("--out", "tuned", "--device", "cpu", "--set"),
        *("steps=80", "batch=48", "image=12", "schedule.warmup=10", *pixels),
    )
    assert said.code == 0
    row = json.loads(Path("tuned/protocol.json").read_text())
    tuned = shape_of("tuned/seed-2")
    assert (tuned.image, tuned.classes, tuned.representation) == ((12, 12), 5, 0)
    assert row["training_flops"] == training_flops(tuned, images=48, epochs=80)
    assert f"{row['score']:.2%} +- {row['spread']:.2%} on test (n = 179; " in said.out
    assert row["n"] == 179
    assert row["score"] > 0.8
    assert len(re.findall(r"^ optim\.lr=\S+ +\S+%", said.out, re.MULTILINE)) == 2

    said = vitral_("fewshot", "pre/seed-0", "high", "--shots", "1", "10", "--seeds", "3", "--device", "cpu", "--json")
    assert said.code == 0
    shots = json.loads(said.out)["shots"]
    assert 0.3 < shots[0]["mean"] < shots[1]["mean"]

    said = vitral_("evaluate", "tuned/seed-0", "high", "--device", "cpu", "--json")
    assert said.code == 0
    assert json.loads(said.out)["metrics"]["top1"] == row["scores"][0]
    recipe = from_toml(Path("tuned/seed-0/recipe.toml").read_text())
    assert f"optim.lr={recipe.optim.lr}" == row["chosen"]
