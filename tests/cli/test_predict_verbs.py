"""The command line from end to end: train on a folder of every kind of file, then use the model."""

from __future__ import annotations

import csv
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from journeys import BROKEN, COLOURS, MODEL, ODD, QUICK, SHAPE, colour_folder, mixed_bag, paint
from PIL import Image

import vitral
from vitral.api import evaluation
from vitral.data.preprocess import parse_pipeline
from vitral.recipe import Recipe, from_toml, recipe_hash
from vitral.training import setup


@pytest.fixture(scope="module")
def bag(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mixed_bag(tmp_path_factory.mktemp("data") / "bag")


class Journey:
    """Notes and logits of a run that was trained on every kind of file, without a split and without a recipe."""

    def __init__(self, folder: Path, bag: Path) -> None:
        self.run = folder / "run"
        self.notes: list[str] = []
        self.logits: list[np.ndarray] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(setup, "measure", self._measure)
            began = time.process_time()  # of this process: the machine may be busy
            overrides = [*SHAPE, "shape.depth=1", "optim.lr=0.01", "evaluate_every=100"]
            vitral.train(bag, out=self.run, set=overrides, device="cpu", on_event=self._hear)
            self.seconds = time.process_time() - began

    def _hear(self, event: Any) -> None:
        self.notes += [event.text] if hasattr(event, "text") else []

    def _measure(
        self, logits: np.ndarray, labels: np.ndarray, classes: tuple[str, ...], *, sigmoid: bool
    ) -> dict[str, Any]:
        self.logits.append(logits)
        counted = evaluation.classification_metrics(logits, labels, classes, sigmoid=sigmoid)
        return {"score": counted.top1, **counted.as_dict()}


@pytest.fixture(scope="module")
def journey(bag: Path, tmp_path_factory: pytest.TempPathFactory) -> Journey:
    return Journey(tmp_path_factory.mktemp("runs"), bag)


def test_training_skips_unreadable_files_and_names_them(journey):
    said = "\n".join(journey.notes)
    assert journey.seconds < 60
    assert "Left out 1 file that is no image (.txt 1)." in said
    assert "skipped 3 unreadable images" in said
    assert all(f"red/{name}: " in said for name in BROKEN)
    assert "are held out for testing" in said
    result = json.loads((journey.run / "result.json").read_text())
    assert {image["path"]: True for image in result["unreadable"]} == {f"red/{name}": True for name in BROKEN}
    assert result["metrics"]["top1"] == 1
    # 40 files, of which 8 are held out; of 32 chosen as one batch, those that can be read are left.
    assert any("training images are left: this is the batch" in note for note in journey.notes)


def test_training_evaluation_and_prediction_use_the_same_pixels(journey, bag, monkeypatch):
    model, card = vitral.load(journey.run)
    assert card.preprocess is not None
    seen: list[np.ndarray] = []
    real = evaluation.classification_metrics

    def heard(logits: np.ndarray, *rest: Any, **options: Any) -> Any:
        seen.append(logits)
        return real(logits, *rest, **options)

    monkeypatch.setattr(evaluation, "classification_metrics", heard)
    evaluated = vitral.evaluate(journey.run, bag)
    np.testing.assert_array_equal(seen[0], journey.logits[-1])
    trained = json.loads((journey.run / "result.json").read_text())["metrics"]
    assert {"score": evaluated.metrics["top1"], **evaluated.metrics} == trained

    # The same by hand, from the bytes of a file that needs no policy.
    path = bag / "green" / "3.png"
    pipeline = parse_pipeline(card.preprocess.pipeline)
    pixels = torch.from_numpy(pipeline(np.array(Image.open(path)))).permute(2, 0, 1)[None]
    inputs = (pixels.double() / 255 - 0.5) / 0.5
    with torch.inference_mode():
        expected = (model.double()(inputs) / card.temperature).softmax(-1)[0]
    row = vitral.predict(journey.run, path).rows[0]
    found = dict(zip(row.names, row.probabilities, strict=True))
    assert [found[name] for name in card.class_names] == pytest.approx(expected.tolist(), abs=1e-6)


def test_predict_names_every_file_once(command, journey, bag, tmp_path):
    table = tmp_path / "out.csv"
    said = command("predict", journey.run, bag, "-o", table, "--top", "2")
    assert said.code == 0
    assert "37 images, 3 that cannot be read" in said.out
    with table.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert list(rows[0]) == ["path", "class_1", "probability_1", "class_2", "probability_2", "error"]
    read = {row["path"]: row for row in rows if not row["error"]}
    broken = {Path(row["path"]).name: row["error"] for row in rows if row["error"]}
    assert broken.keys() == BROKEN.keys()
    assert all(BROKEN[name] in reason for name, reason in broken.items())
    assert {Path(path).name for path in read} >= set(ODD)
    right = [Path(path).parent.name == row["class_1"] for path, row in read.items()]
    assert np.mean(right) > 0.9  # grey and 16-bit pictures have lost the colour they are named by
    assert all(float(row["probability_1"]) >= float(row["probability_2"]) for row in read.values())


def test_predict_as_json_and_as_a_table(command, journey, bag):
    files = [bag / "blue/1.png", bag / "red/empty.jpg", bag / "red/2.png"]
    said = command("predict", journey.run, *files, "--json")
    found = json.loads(said.out)
    assert [row["path"] for row in found["predictions"]] == [str(files[0]), str(files[2])]
    assert [row["classes"][0]["name"] for row in found["predictions"]] == ["blue", "red"]
    assert sum(one["probability"] for one in found["predictions"][0]["classes"]) == pytest.approx(1)
    assert found["unreadable"] == [{"path": str(files[1]), "reason": "the file is empty"}]
    shown = command("predict", journey.run, *files).out
    lines = [line.split()[1:] for line in shown.splitlines() if str(bag) in line]
    assert [words[0] for words in lines] == ["blue", "not", "red"]  # in the order of the files
    assert " ".join(lines[1]) == "not read: the file is empty"


def test_evaluate_scores_the_held_out_images_of_a_run(command, journey, bag, tmp_path):
    trained = json.loads((journey.run / "result.json").read_text())["metrics"]
    for source in (journey.run, journey.run / "model.safetensors"):
        found = json.loads(command("evaluate", source, bag, "--json").out)
        assert found["metrics"]["n"] == trained["n"]
        assert found["metrics"]["nll"] == pytest.approx(trained["nll"], rel=1e-6)
        assert "held-out" in found["notes"][0]
    other = colour_folder(tmp_path / "other", 4, seed=1000)
    found = json.loads(command("evaluate", journey.run, other, "--json").out)
    assert (found["metrics"]["n"], found["metrics"]["top1"], found["unreadable"]) == (12, 1, [])
    assert found["notes"][0] == "All 12 images are scored."
    shown = command("evaluate", journey.run, other).out
    assert "100.00%" in shown
    assert "matched by name" in shown


def test_evaluate_names_the_best_temperature_and_says_what_it_was_fitted_on(command, journey, tmp_path):
    optimize = pytest.importorskip("scipy.optimize")
    data = colour_folder(tmp_path / "data", 6, seed=1000)
    for number in range(12):
        paint(data / "green" / f"red-{number}.png", COLOURS["red"], 2000 + number)
    source = with_temperature(journey.run, tmp_path / "model.safetensors", 1.0)
    rows = vitral.predict(source, data, top=3).rows
    labels = [row.names.index(Path(row.path).parent.name) for row in rows]
    logits = np.log([row.probabilities for row in rows])

    def likelihood(temperature: float) -> float:
        chances = np.exp(logits / temperature)
        logs = np.log(chances / chances.sum(1, keepdims=True))
        return float(-logs[np.arange(len(rows)), labels].sum() - logs[:, 1].mean())  # and one mistake more

    found = json.loads(command("evaluate", source, data, "--json").out)
    best = optimize.minimize_scalar(likelihood, bounds=(0.1, 100), method="bounded", options={"xatol": 1e-6})
    assert found["temperature"] == pytest.approx(best.x, rel=1e-3)
    assert found["tempered_ece"] < found["metrics"]["ece"]
    shown = " ".join(command("evaluate", source, data).out.split())
    assert f"{found['temperature']:.3g} (calibration error {found['tempered_ece']:.2%} with it" in shown
    assert "fitted on these same images" in shown


def with_temperature(run: Path, path: Path, temperature: float) -> Path:
    """The weights of a run with another temperature in their card."""
    model, card = vitral.load(run)
    vitral.save(model, path, replace(card, temperature=temperature))
    return path


def test_evaluate_prints_loss_and_calibration_before_and_after(command, journey, bag, tmp_path):
    source = with_temperature(journey.run, tmp_path / "model.safetensors", 2.5)
    metrics = vitral.evaluate(source, bag).metrics
    assert metrics["temperature"] == 2.5
    shown = " ".join(command("evaluate", source, bag).out.split())
    assert f"{metrics['nll_calibrated']:.4f} ({metrics['nll']:.4f} without temperature)" in shown
    assert f"{metrics['ece_calibrated']:.2%} ({metrics['ece']:.2%} without temperature)" in shown


def test_evaluate_lists_unreadable_images(command, journey, bag, tmp_path):
    """Each with the reason that `predict` gives."""
    data = colour_folder(tmp_path / "data", 4, seed=1000)
    assert "cannot be read" not in command("evaluate", journey.run, data).out
    for name in BROKEN:
        content = (bag / "red" / name).read_bytes()
        (data / "red" / name).write_bytes(content and content + b"\0")  # not the bytes that the run has seen
    expected = {f"red/{Path(one.path).name}": one.reason for one in vitral.predict(journey.run, data).unreadable}
    assert len(expected) == len(BROKEN)
    found = json.loads(command("evaluate", journey.run, data, "--json").out)
    assert {one["path"]: one["reason"] for one in found["unreadable"]} == expected
    assert found["metrics"]["n"] == 12
    shown = "".join(command("evaluate", journey.run, data).out.split())
    assert "3imagesthatcannotberead:" in shown
    assert all("".join(f"{name} ({reason})".split()) in shown for name, reason in expected.items())
    for path in data.glob("*/[0-9].png"):
        path.write_bytes(b"")
    refused = command("evaluate", journey.run, data)
    assert (refused.code, refused.out) == (2, "")
    assert "none of these images can be read, blue/0.png first (the file is empty)" in refused.err


def test_a_manifest_of_test_images_alone_is_scored_and_not_trained_on(command, journey, tmp_path):
    data = colour_folder(tmp_path / "data", 4, seed=1000)
    lines = [f"{path.relative_to(tmp_path)},{path.parent.name},test" for path in sorted(data.rglob("*.png"))]
    manifest = tmp_path / "tests.csv"
    manifest.write_text("\n".join(["path,label,split", *lines]))
    found = json.loads(command("evaluate", journey.run, manifest, "--json").out)
    plain = json.loads(command("evaluate", journey.run, data, "--json").out)
    assert found["metrics"] == plain["metrics"]
    assert found["notes"][0] == "The 12 images of the test split are scored."
    checked = json.loads(command("check", manifest, "--json").out)
    assert checked["images"] == {"train": 0, "test": 12}
    assert checked["notes"] == ["No image is of the split train: this is for testing only."]
    refused = command("train", manifest, "--out", tmp_path / "run")
    assert refused.code == 2
    said = f"{manifest} has no images to train on: it is for testing only; pass data with a train split."
    assert refused.err == f"vitral: {said}\n"


def test_data_with_one_of_the_models_classes_is_scored(command, journey, tmp_path):
    for folder in (tmp_path / "one", tmp_path / "tests" / "test"):
        for number in range(3):
            paint(folder / "green" / f"{number}.png", COLOURS["green"], number)
    for data in (tmp_path / "one", tmp_path / "tests"):
        said = command("evaluate", journey.run, data, "--json")
        assert said.code == 0, said.err
        found = json.loads(said.out)
        assert (found["metrics"]["n"], found["metrics"]["top1"]) == (3, 1)


def test_evaluate_maps_classes_by_name_or_number_only(command, journey, tmp_path):
    order = vitral.load(journey.run)[1].class_names
    assert order == ("blue", "green", "red")
    numbered = colour_folder(tmp_path / "numbered", 3, {name: str(order.index(name)) for name in COLOURS}, seed=1000)
    found = json.loads(command("evaluate", journey.run, numbered, "--json").out)
    assert found["metrics"]["top1"] == 1
    assert "output numbers" in found["notes"][1]
    # Half of the classes under other names, or a number that no output has: refused, not scored.
    for names in ({"red": "rouge", "green": "green"}, {"red": "0", "green": "1", "blue": "3"}):
        wrong = colour_folder(tmp_path / f"wrong-{len(names)}", 2, names)
        said = command("evaluate", journey.run, wrong)
        assert said.code == 2
        assert "do not match" in said.err
        assert not said.out
    unequal = colour_folder(tmp_path / "more", 2)
    paint(unequal / "teal" / "0.png", (30, 200, 200))
    paint(unequal / "teal" / "1.png", (30, 200, 200), 1)
    assert '"teal"' in command("evaluate", journey.run, unequal).err


def test_embeddings_are_what_the_head_reads(command, journey, bag, tmp_path):
    target = tmp_path / "features.npz"
    assert command("embed", journey.run, bag / "blue", bag / "red/empty.jpg", "-o", target).code == 0
    none = tmp_path / "none.npz"
    refused = command("embed", journey.run, bag / "red/empty.jpg", "-o", none)
    assert (refused.code, none.exists()) == (2, False)
    assert "none of these images can be read" in refused.err
    with np.load(target) as arrays:
        paths, features = arrays["paths"].tolist(), arrays["features"]
    assert len(paths) == 10
    assert features.shape == (10, 16)
    model, _ = vitral.load(journey.run)
    with torch.inference_mode():
        logits = model.head(torch.from_numpy(features)).softmax(-1).numpy()
    found = vitral.predict(journey.run, bag / "blue").rows
    rows = {row.path: dict(zip(row.names, row.probabilities, strict=True)) for row in found}
    for path, chances in zip(paths, logits, strict=True):
        assert chances[0] == pytest.approx(rows[path]["blue"], abs=1e-6)


def test_embed_and_search_list_unreadable_images(command, journey, bag, tmp_path):
    """Each with the reason that `predict` gives."""
    unread = {one.path: one.reason for one in vitral.predict(journey.run, bag).unreadable}
    assert {Path(path).name for path in unread} == BROKEN.keys()
    read = sum(path.suffix != ".txt" for path in bag.rglob("*.*")) - len(unread)
    target, index = tmp_path / "features.npz", tmp_path / "index.npz"
    search = ("search", journey.run, bag, "--query", bag / "blue" / "0.png", "--top", "2")
    spoken = [command("embed", journey.run, bag, "-o", target).out, command(*search, "--patch", "0", "0").out]
    spoken += [command(*search, "--index", index).out for _ in range(2)]  # made, then read from its file
    answer = command(*search, "--json")
    found = json.loads(answer.out)
    assert len(found["neighbours"]) == 2
    assert {one["path"]: one["reason"] for one in found["unreadable"]} == unread
    for words in spoken:
        words = "".join(words.split())
        assert "3imagesthatcannotberead:" in words
        assert all("".join(f"{path} ({reason})".split()) in words for path, reason in unread.items())
    found = json.loads(command("embed", journey.run, bag, "-o", target, "--json").out)
    assert found["images"] == read
    assert {one["path"]: one["reason"] for one in found["unreadable"]} == unread
    for words in (
        ["embed", journey.run, bag / "blue", "-o", target],
        ["search", journey.run, bag / "blue", *search[3:]],
    ):
        said = command(*words)
        assert "cannot be read" not in said.out + said.err


def test_a_terminal_shows_that_a_page_is_drawn(command, journey, bag, tmp_path, monkeypatch):
    words = ("inspect", journey.run, bag / "blue" / "0.png", "-o", tmp_path / "page.html")
    assert command(*words).err == ""
    monkeypatch.setenv("FORCE_COLOR", "1")  # for rich, a terminal
    assert "drawing the page" in command(*words).err


def test_check_prints_what_is_wrong(command, bag):
    said = command("check", bag)
    assert said.code == 0
    shown = {line.strip().split("  ")[0]: line for line in said.out.splitlines() if "  " in line}
    assert "red/turned.jpg" in shown["rotated (EXIF)"]
    assert "red/deep.png" in shown["over 8 bits"]
    assert "red/cmyk.jpg" in shown["CMYK"]
    assert "red/moving.gif" in shown["animated"]
    assert all(f"red/{name}" in said.out for name in BROKEN)
    counts = [line.split() for line in said.out.splitlines() if line.split()[:1] in (["red"], ["green"], ["blue"])]
    assert counts == [["blue", "10"], ["green", "10"], ["red", "20"]]
    found = json.loads(command("check", bag, "--json").out)
    assert {image["path"].removeprefix("red/") for image in found["unreadable"]} == BROKEN.keys()


def test_show_prints_a_recipe_that_reads_back(command, bag, journey, tmp_path):
    default = command("show")
    assert from_toml(default.out) == Recipe()
    assert from_toml(command("show", "--model", "ViT-B/16", "--set", "optim.lr=0.25").out).optim.lr == 0.25
    chosen = command("show", "--data", bag, "--set", "batch=7")
    recipe = from_toml(chosen.out)
    assert recipe.batch == 7
    assert recipe == vitral.api.recipes.choose_recipe(bag, set=["batch=7"])[1]
    assert json.loads(command("show", "--data", bag, "--json").out)["data"]["held_out"] == 0.2
    again = from_toml(command("show", journey.run).out)
    assert recipe_hash(again) == json.loads((journey.run / "result.json").read_text())["recipe"]
    file = tmp_path / "mine.toml"
    file.write_text('batch = 5\n[optim]\nname = "sgd"\n')
    assert from_toml(command("show", file, "--set", "seed=3").out) == from_toml(
        'batch = 5\nseed = 3\n[optim]\nname = "sgd"\n'
    )


def test_train_prints_progress_and_result(command, tmp_path):
    data = colour_folder(tmp_path / "colours", 6)
    words = ["--model", MODEL, "--out", tmp_path / "run", "--set", *QUICK, "steps=20"]
    said = command("train", data, *words)
    assert said.code == 0
    assert f"run folder: {tmp_path / 'run'}" in said.err
    assert "peak memory about" in said.err
    assert "accuracy" in said.out
    assert f"vitral predict {tmp_path / 'run'}" in said.out
    assert [line.split()[0] for line in said.out.splitlines() if "%" in line][-3:] == ["blue", "green", "red"]
    again = command("train", data, *words[:4], "--json", "--set", *QUICK, "steps=20")
    assert "already finished" in again.err
    found = json.loads(again.out)
    assert found["seeds"] == 1
    assert found["runs"][0]["metrics"]["top1"] == found["score"]


def test_several_seeds_show_their_spread(command, tmp_path):
    data = colour_folder(tmp_path / "colours", 6)
    out = tmp_path / "run"
    words = ["--model", MODEL, "--out", out, "--seeds", "3"]
    found = json.loads(command("train", data, *words, "--json", "--set", *QUICK, "steps=3").out)
    scores = [run["metrics"]["score"] for run in found["runs"]]
    assert found["seeds"] == 3
    assert found["score"] == pytest.approx(np.mean(scores))
    assert found["spread"] == pytest.approx(np.std(scores, ddof=1))
    assert vitral.evaluate(Path(found["runs"][2]["folder"]), data).metrics["top1"] == scores[2]
    shown = command("train", data, *words, "--set", *QUICK, "steps=3").out  # finished already
    assert f"{np.mean(scores):.2%} +- {np.std(scores, ddof=1):.2%} (mean and standard deviation of 3 seeds)" in shown
    assert str(out / "seed-1") in shown


def test_tensorboard_events_are_written(command, tmp_path):
    pytest.importorskip("tensorboardX")
    data = colour_folder(tmp_path / "colours", 6)
    out = tmp_path / "run"
    assert (
        command(
            "train", data, "--model", MODEL, "--out", out, "--track", "tensorboard", "--set", *QUICK, "steps=3"
        ).code
        == 0
    )
    events = list((out / "tensorboard").glob("events*"))
    assert len(events) == 1
    written = events[0].read_bytes()
    assert b"train/loss" in written
    assert b"eval/top1" in written
    assert b"result/score" in written
    assert b"optim.lr = " in written


@pytest.mark.parametrize("verb", ["train", "predict", "evaluate", "embed", "check", "show"])
def test_help_has_no_python_values(command, verb):
    shown = command(verb, "--help").out
    assert not [word for word in ("None", "default: )", "False", "STR", "{None") if word in shown]
