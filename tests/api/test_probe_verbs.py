"""`vitral fewshot` and `vitral dedupe` as a person meets them: tables, JSON, files, mistakes in one sentence."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from journeys import MODEL, PLAIN, SHAPE, colour_folder, paint
from PIL import Image

import vitral
from vitral.architecture import ViTConfig
from vitral.checkpoints.card import Card, Preprocess
from vitral.cost import cost
from vitral.data.images import encode_png
from vitral.data.sources import Split, open_data
from vitral.evaluation import predict
from vitral.evaluation.duplicates import read_exclusions
from vitral.evaluation.probes import fewshot
from vitral.models.build import build

TINY = ViTConfig(depth=1, width=16, mlp=32, heads=2, patch=4, image=(8, 8), classes=3, representation=16)


@pytest.fixture(scope="module")
def colours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return colour_folder(tmp_path_factory.mktemp("data") / "colours", 10)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has learned nothing: even so its features tell colours apart."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "tiny.safetensors"
    card = Card(TINY, preprocess=Preprocess("decode|resize(8)", (0.5,) * 3, (0.5,) * 3))
    vitral.save(build(TINY), path, card)
    return path


# Few-shot


def test_a_table_of_shots_and_a_line_for_each_classifier(command, weights, colours):
    said = command(
        *("fewshot", weights, colours, "--shots", "1", "5", "--seeds", "3", "--device", "cpu"),
        *("--methods", "ridge", "knn", "linear"),
    )
    assert said.code == 0
    rows = re.findall(r"^ *(\d+) +([\d.]+)% +([\d.]+% to [\d.]+)% +(\d+)", said.out, re.MULTILINE)
    assert [(row[0], row[3]) for row in rows] == [("1", "3"), ("5", "15")]
    assert "95 % interval of the mean" in said.out
    assert "24 training images, 6 (test) to test on" in said.out
    assert "No test split was given: 6 of 30 images" in said.out
    assert re.search(r"nearest neighbours +100\.00% \(k = 20, all of train\)", said.out)
    assert re.search(r"linear probe +[\d.]+% \(all of train\)", said.out)


def test_json_is_what_the_algorithm_gives(command, weights, colours):
    said = command("fewshot", weights, colours, "--shots", "2", "--l2", "0.5", "--device", "cpu", "--json")
    found = json.loads(said.out)
    opened = open_data(colours)
    assert opened.test is not None
    model, card = vitral.load(weights)
    assert card.preprocess is not None
    both = [
        predict.cached_features(model, split, card.preprocess, folder=Path(found["kept"]).parent)
        for split in (opened.train, opened.test)
    ]
    expected = fewshot(*both[0].readable(), *both[1].readable(), classes=3, shots=(2,), seeds=5, l2=0.5)[0]
    shots = found["shots"][0]
    assert shots["accuracies"] == list(expected.accuracies)
    assert shots["mean"] == pytest.approx(np.mean(expected.accuracies))
    assert shots["interval"] == expected.interval
    assert (found["train"], found["test"], found["features"]) == (24, 6, 16)
    assert found["flops"] == 2 * cost(TINY).macs * 30
    assert (found["knn"], found["linear"]) == (None, None)


def test_the_strength_may_be_chosen(command, weights, colours):
    words = ("fewshot", weights, colours, "--shots", "3", "--seeds", "2", "--device", "cpu", "--json", "--l2")
    chosen = json.loads(command(*words, "choose").out)["shots"][0]
    assert all(np.log2(strength).is_integer() for strength in chosen["l2"])
    fixed = json.loads(command(*words, "7").out)["shots"][0]
    assert fixed["l2"] == [7, 7]


def test_features_are_computed_once(command, weights, colours, monkeypatch, tmp_path):
    computed: list[int] = []
    real = predict.embed_split

    def counting(model: Any, split: Split, *rest: Any, **named: Any) -> Any:
        computed.append(len(split))
        return real(model, split, *rest, **named)

    monkeypatch.setattr(predict, "embed_split", counting)
    words = ("fewshot", weights, colours, "--device", "cpu", "--json", "--shots")
    first = json.loads(command(*words, "1").out)
    assert computed == [24, 6]
    assert Path(first["kept"]).is_relative_to(tmp_path / "cache")
    again = json.loads(command(*words, "1", "2").out)
    assert computed == [24, 6]
    assert again["shots"][0] == first["shots"][0]
    command(*words, "1", "--preprocess", "decode|resize(8)|value_range(0, 1)")
    assert computed == [24, 6, 24, 6]  # other pixels, other features


def test_a_run_is_not_tested_on_what_it_was_trained_on(command, colours, tmp_path):
    words = (*SHAPE, *PLAIN, "steps=1", "batch=4", "data.held_out=0.1")
    said = command("train", colours, "--model", MODEL, "--out", tmp_path / "run", "--device", "cpu", "--set", *words)
    assert said.code == 0
    for source in ("run", "run/model.safetensors"):
        found = json.loads(command("fewshot", tmp_path / source, colours, "--shots", "1", "--json").out)
        assert (found["train"], found["test"], found["split"]) == (27, 3, "test")


def test_val_is_not_what_few_shots_are_tested_on(command, weights, tmp_path):
    for split, count in {"train": 4, "val": 2, "test": 3}.items():
        colour_folder(tmp_path / "data" / split, count)
    found = json.loads(command("fewshot", weights, tmp_path / "data", "--shots", "1", "--json").out)
    assert (found["train"], found["test"]) == (12, 9)


def several_labels(folder: Path) -> Path:
    rows = ["path,label", *(f"{number}.png,{'a|b' if number % 2 else 'a'}" for number in range(8))]
    for number in range(8):
        paint(folder / f"{number}.png", (100, 100, 100), number)
    (folder / "labels.csv").write_text("\n".join(rows))
    return folder / "labels.csv"


def for_testing_only(folder: Path) -> str:
    """ImageNet's validation images alone."""
    for place, name in enumerate(("n01440764", "n01443537")):
        paint(folder / "val" / name / f"ILSVRC2012_val_{place + 1:08d}.png", (90, 90, 90), place)
    return f"imagenet:{folder}"


@pytest.mark.parametrize(
    "words, says",
    [
        (["WEIGHTS", "MANY", "--shots", "1"], "few-shot classification needs one label per image."),
        (["WEIGHTS", "TESTING"], "has no images to learn from, or none to test on"),
        (["nowhere.npz", "COLOURS"], "nowhere.npz does not exist"),
        (["WEIGHTS", "nowhere"], "nowhere does not exist"),
        (["WEIGHTS", "COLOURS", "--l2", "strong"], '--l2 takes a number or choose, not "strong"'),
        (["WEIGHTS", "COLOURS", "--seeds", "0"], "shots, seeds and batch must be at least 1."),
        (["WEIGHTS", "COLOURS", "--shots", "0"], "shots, seeds and batch must be at least 1."),
        (["WEIGHTS", "COLOURS", "--device", "abacus"], "abacus"),
    ],
)
def test_a_mistake_in_few_shot_is_one_sentence(command, weights, colours, tmp_path, words, says):
    known = {
        "WEIGHTS": str(weights),
        "COLOURS": str(colours),
        "MANY": str(several_labels(tmp_path / "many")),
        "TESTING": for_testing_only(tmp_path / "testing"),
    }
    said = command("fewshot", *(known.get(word, word) for word in words))
    assert (said.code, said.out) == (2, "")
    assert says in said.err
    assert said.err.count("\n") == 1


# Copies


def scene(seed: int, side: int = 64) -> np.ndarray:
    """A picture with details that no other has, uint8 (side, side, 3)."""
    coarse = np.random.default_rng(seed).integers(0, 256, (9, 9, 3), dtype=np.uint8)
    return np.array(Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC))


@pytest.fixture(scope="module")
def leaky(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A training set of 24, and a test set in which two of its images are: one as it is, one smaller and as JPEG."""
    root = tmp_path_factory.mktemp("copies")
    for number in range(24):
        path = root / "train" / f"class-{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode_png(scene(number)))
    for number in range(6):
        path = root / "other" / f"kind-{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode_png(scene(100 + number)))
    shutil.copy(root / "train" / "class-1" / "5.png", root / "other" / "kind-0" / "same.png")
    Image.fromarray(scene(8)).resize((48, 48)).save(root / "other" / "kind-1" / "again.jpg", quality=90)
    return root / "train", root / "other"


def test_copies_are_listed_and_training_leaves_them_out(command, leaky, tmp_path):
    train, other = leaky
    exclusions = tmp_path / "copies.txt"
    said = command("dedupe", train, "--against", other, "-o", exclusions)
    assert said.code == 0
    assert re.search(r"copies +2 of 24 training images", said.out)
    assert re.search(r"class-1/5\.png +kind-0/same\.png +.* exact \(bytes\) +1\.000", said.out)
    assert re.search(r"class-0/8\.png +kind-1/again\.jpg +.* near \(hash\) +[01]\.\d+", said.out)
    assert sorted(read_exclusions(exclusions)) == ["class-0/8.png", "class-1/5.png"]
    words = [*SHAPE, *PLAIN, "steps=1", "batch=4", f"data.exclude={exclusions}"]
    said = command("train", train, "--model", MODEL, "--out", tmp_path / "run", "--device", "cpu", "--set", *words)
    assert said.code == 0
    opened = open_data(train).train
    kept = [place for place, key in enumerate(opened.keys) if key not in ("class-0/8.png", "class-1/5.png")]
    assert f"Left out {len(opened) - len(kept)} training images that data.exclude names." in said.err
    facts = json.loads((tmp_path / "run" / "data.json").read_text())
    assert facts["train"] == opened.select(np.array(kept)).fingerprint()
    assert len(kept) < len(opened)


def test_json_names_each_pair_and_the_thresholds(command, leaky):
    train, other = leaky
    found = json.loads(command("dedupe", train, "--against", other, other, "--json").out)
    assert (found["train"], found["against"], found["unreadable"]) == (24, [8, 8], 0)
    assert len(found["pairs"]) == 4
    exact = [pair for pair in found["pairs"] if pair["kind"] == "exact"]
    assert [(pair["train"], pair["test"], pair["split"], pair["method"]) for pair in exact] == [
        ("class-1/5.png", "kind-0/same.png", split, "bytes") for split in (0, 1)
    ]
    assert found["thresholds"]["min_correlation"] == 0.88


def test_a_models_features_look_too(command, leaky, weights):
    train, other = leaky
    said = command("dedupe", train, "--against", other, "--weights", weights, "--device", "cpu")
    assert said.code == 0
    assert re.search(r"copies +2 of 24 training images", said.out)


def test_weights_that_do_not_say_how_pixels_are_prepared_can_look(command, leaky, tmp_path):
    train, other = leaky
    vitral.save(build(TINY), tmp_path / "bare.safetensors", Card(TINY))
    words = ("dedupe", train, "--against", other, "--weights", tmp_path / "bare.safetensors", "--device", "cpu")
    assert "the weights do not state their preprocessing: mean and std 0.5 are assumed" in command(*words).err
    said = command(*words, "--preprocess", "decode|resize(8)|value_range(-1, 1)")
    assert said.code == 0
    assert "assumed" not in said.err
    assert re.search(r"copies +2 of 24 training images", said.out)


def test_only_test_images_are_compared_with(command, leaky, tmp_path):
    """What a data set trains on may be in another one's training set."""
    train, other = leaky
    shutil.copytree(train, tmp_path / "set" / "train")
    shutil.copytree(other, tmp_path / "set" / "test")
    shutil.rmtree(tmp_path / "set" / "test" / "kind-0")
    (tmp_path / "set" / "test" / "kind-1").rename(tmp_path / "set" / "test" / "class-0")
    (tmp_path / "set" / "test" / "class-1").mkdir()
    (tmp_path / "set" / "test" / "class-1" / "new.png").write_bytes(encode_png(scene(200)))
    found = json.loads(command("dedupe", train, "--against", tmp_path / "set", "--json").out)
    assert found["against"] == [5]
    assert [pair["train"] for pair in found["pairs"]] == ["class-0/8.png"]


def test_a_test_set_of_one_class_or_without_train_is_compared_with(command, leaky, tmp_path):
    train, other = leaky
    shutil.copytree(other / "kind-0", tmp_path / "one" / "kind-0")
    shutil.copytree(other, tmp_path / "tests" / "test")
    said = command("dedupe", train, "--against", tmp_path / "one", tmp_path / "tests", "--json")
    assert said.code == 0, said.err
    found = json.loads(said.out)
    assert found["against"] == [4, 8]
    assert sorted((pair["train"], pair["split"]) for pair in found["pairs"]) == [
        ("class-0/8.png", 1),
        ("class-1/5.png", 0),
        ("class-1/5.png", 1),
    ]


def test_a_set_is_compared_with_its_own_test_split_and_with_a_copy_of_itself(command, leaky, tmp_path):
    """Other files, or other images: only the very same ones are refused."""
    train, _ = leaky
    for name in ("set/train", "set/test", "copy"):
        shutil.copytree(train, tmp_path / name)
    for against in (tmp_path / "set", tmp_path / "copy"):
        found = json.loads(command("dedupe", tmp_path / "set", "--against", against, "--json").out)
        assert len(found["pairs"]) == 24


def test_no_copies_are_no_table(command, colours, leaky):
    said = command("dedupe", leaky[0], "--against", colours)
    assert said.code == 0
    assert re.search(r"copies +0 of 24 training images", said.out)
    assert "how" not in said.out


@pytest.mark.parametrize(
    "words, says",
    [
        (["TRAIN", "--against", "nowhere"], "nowhere does not exist"),
        (["nowhere", "--against", "OTHER"], "nowhere does not exist"),
        (["TRAIN", "--against", "OTHER", "--weights", "nowhere.npz"], "nowhere.npz does not exist"),
        (["TRAIN", "--against", "OTHER", "--output", "FOLDER"], "is a folder: name a file inside it."),
        (["TRAIN", "--against", "OTHER", "--preprocess", "decode"], "name its weights, too"),
        (
            ["TRAIN", "--against", "OTHER", "TRAIN"],
            "are the same files: `vitral check` finds copies inside one data set",
        ),
        (["TESTS", "--against", "OTHER"], "there is no training image to look for copies in: name a data set with"),
    ],
)
def test_a_mistake_in_dedupe_is_one_sentence(command, leaky, tmp_path, words, says):
    shutil.copytree(leaky[1], tmp_path / "tests" / "test")
    known = {"TRAIN": leaky[0], "OTHER": leaky[1], "TESTS": tmp_path / "tests", "FOLDER": tmp_path}
    said = command("dedupe", *(known.get(word, word) for word in words))
    assert (said.code, said.out) == (2, "")
    assert says in said.err
    assert said.err.count("\n") == 1
