"""TrainResult does what the recipe says: it learns, changes only what it may, and keeps what it should."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from journeys import COLOURS, MODEL, QUICK, colour_folder, paint
from torch import Tensor

import vitral
from vitral import TrainResult
from vitral.api.recipes import choose_recipe
from vitral.architecture import ViTConfig
from vitral.checkpoints.card import Card, Preprocess
from vitral.data.images import encode_png
from vitral.errors import UserError
from vitral.events import Evaluated, Event, Note
from vitral.models.build import build
from vitral.recipe import from_toml
from vitral.training.metrics import measure


def train(data: Path, out: Path, *words: str, seeds: int = 1, heard: list[Event] | None = None) -> TrainResult:
    on_event = (lambda event: None) if heard is None else heard.append
    overrides = [*QUICK, *words]
    return vitral.train(data, model=MODEL, out=out, set=overrides, device="cpu", seeds=seeds, on_event=on_event)


def trainable(data: Path, init: Path, out: Path, *words: str, heard: list[Event] | None = None) -> TrainResult:
    """From weights, with what belongs to a model from scratch left out."""
    on_event = (lambda event: None) if heard is None else heard.append
    quick = [word for word in QUICK if not word.startswith("shape")]
    return vitral.train(data, init=init, out=out, set=[*quick, *words], device="cpu", on_event=on_event)


def weights(run: Path) -> dict[str, Tensor]:
    return vitral.load(run)[0].state_dict()


def changed(before: Path, after: Path) -> set[str]:
    old, new = weights(before), weights(after)
    assert old.keys() == new.keys()
    return {name for name in old if old[name].shape != new[name].shape or not torch.equal(old[name], new[name])}


def notes(heard: Sequence[Event]) -> str:
    return "\n".join(event.text for event in heard if isinstance(event, Note))


def lines(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in lines(run) if "loss" in line]


@pytest.fixture(scope="module")
def colours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return colour_folder(tmp_path_factory.mktemp("data") / "colours")


@pytest.fixture(scope="module")
def started(colours: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on three colours."""
    out = tmp_path_factory.mktemp("runs") / "colours"
    assert train(colours, out).mean == 1
    return out


@pytest.fixture(scope="module")
def pastels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other classes than the run knows, which its features tell apart."""
    folder = tmp_path_factory.mktemp("data") / "pastels"
    for number in range(16):
        paint(folder / "pink" / f"{number}.png", (220, 120, 120), number)
        paint(folder / "mint" / f"{number}.png", (120, 220, 120), 50 + number)
    return folder


def test_a_run_learns_and_says_what_it_did(started):
    first, last = losses(started)[0], losses(started)[-1]
    assert first == pytest.approx(math.log(3), abs=1e-5)  # a zero head knows nothing
    assert last < 0.1
    result = json.loads((started / "result.json").read_text())
    assert result["metrics"]["top1"] == 1
    assert result["step"] == 40
    assert not (started / "pixels").exists()
    recipe = from_toml((started / "recipe.toml").read_text())
    assert (recipe.steps, recipe.batch, recipe.optim.lr) == (40, 12, 0.01)
    assert recipe.data.eval_transform == "decode|resize({size})"


HEAD = {"head.output.weight", "head.output.bias"}


@pytest.mark.parametrize("part", ["full", "head", "last:1", "bias", "lora:2"])
def test_only_what_is_tuned_changes_and_learns(started, pastels, tmp_path, part):
    heard: list[Event] = []
    out = tmp_path / "run"
    result = trainable(pastels, started, out, f"trainable={part}", heard=heard)
    assert result.mean == 1
    assert losses(out)[-1] < 0.5 * losses(out)[0]
    moved, names = changed(started, out), set(weights(started))
    later = {name for name in names if name.startswith(("blocks.1.", "norm.", "head."))}
    biases = {name for name in names if name.endswith(".bias")}
    kernels = {name for name in names if name.startswith("blocks.") and name.endswith(".weight") and "norm" not in name}
    expected = {"full": names, "head": HEAD, "last:1": later, "bias": biases | HEAD, "lora:2": kernels | HEAD}[part]
    assert moved == expected
    assert ("augmentation is off" in notes(heard)) == (part == "head")


def test_a_plain_file_comes_out_of_lora(started, pastels, tmp_path):
    trainable(pastels, started, tmp_path / "run", "trainable=lora:2")
    model, card = vitral.load(tmp_path / "run")
    assert card.class_names == ("mint", "pink")
    assert set(model.state_dict()) == set(weights(started))
    assert vitral.evaluate(tmp_path / "run", pastels).metrics["top1"] == 1


def test_the_head_is_kept_for_the_same_classes_and_new_for_others(started, colours, pastels, tmp_path):
    still = ("steps=1", "optim.lr=1e-12", "evaluate_every=1")
    trainable(colours, started, tmp_path / "same", *still)
    before, same = weights(started), weights(tmp_path / "same")
    for name in HEAD:
        torch.testing.assert_close(same[name], before[name], rtol=0, atol=1e-9)
    trainable(pastels, started, tmp_path / "other", *still)
    other, card = weights(tmp_path / "other"), vitral.load(tmp_path / "other")[1]
    assert other["head.output.weight"].shape == (2, 16)
    assert other["head.output.weight"].abs().max() < 1e-9
    assert any("3 -> 2 classes" in change for change in card.changes)
    # The same number of classes under other names is another task too.
    renamed = colour_folder(tmp_path / "renamed", 4, {"red": "a", "green": "b", "blue": "c"})
    trainable(renamed, started, tmp_path / "renamed-run", *still, "batch=9")
    assert weights(tmp_path / "renamed-run")["head.output.weight"].abs().max() < 1e-9


@pytest.mark.parametrize("source", ["", "model.safetensors"])
def test_a_larger_image_resizes_the_positions(started, colours, tmp_path, source):
    out = tmp_path / "run"
    # Only this: what the weights say about preparing pixels must follow the size by itself.
    words = ["steps=1", "optim.lr=1e-12", "evaluate_every=1", "batch=12", "workers=0", "image=16"]
    done = vitral.train(colours, init=started / source, out=out, set=words, device="cpu")
    model, card = vitral.load(out)
    assert model.config.image == (16, 16)
    assert model.state_dict()["positions.0.table"].shape == (4, 4, 16)
    assert card.preprocess is not None
    assert "16" in card.preprocess.pipeline
    assert "8" not in card.preprocess.pipeline
    assert done.results[0].metrics["n"] == 6


def colliding(folder: Path) -> Path:
    """Bright and dark pictures that overlap, 19 to 1 in train and even in test."""
    rng = np.random.default_rng(0)
    for split, counts in {"train": {"dark": 190, "light": 10}, "test": {"dark": 40, "light": 40}}.items():
        for name, count in counts.items():
            for number in range(count):
                grey = round(rng.normal(100 if name == "dark" else 155, 30))
                paint(folder / split / name / f"{number}.png", (grey, grey, grey), number)
    return folder


def test_balancing_finds_the_rare_class(tmp_path):
    data = colliding(tmp_path / "data")
    recall = {}
    for balance in ("none", "weights", "sampler", "logit-adjust"):
        done = train(data, tmp_path / balance, f"balance={balance}", "batch=32", "steps=30", "optim.lr=0.001")
        recall[balance] = done.results[0].metrics["per_class"][1]["recall"]
    # With 19 dark ones of 20, light is the better guess only far out; evenly weighted, beyond the middle (82 %).
    assert recall["none"] < 0.2
    assert min(recall[balance] for balance in ("weights", "sampler", "logit-adjust")) > 0.5


def several_labels(folder: Path) -> Path:
    """A manifest of pictures whose upper half may be red and whose lower half may be green, or both."""
    rows = ["path,label"]
    rng = np.random.default_rng(0)
    folder.mkdir()
    for number in range(48):
        red, green = [(True, False), (False, True), (True, True)][number % 3]
        pixels = rng.integers(0, 60, (8, 8, 3))
        pixels[:4, :, 0] += 180 * red
        pixels[4:, :, 1] += 180 * green
        (folder / f"{number}.png").write_bytes(encode_png(pixels.astype(np.uint8)))
        rows.append(f"{number}.png,{'|'.join(['red'] * red + ['green'] * green)}")
    (folder / "labels.csv").write_text("\n".join(rows))
    return folder / "labels.csv"


def test_several_labels_are_found_out_and_answered_with_yes_or_no(tmp_path):
    heard: list[Event] = []
    data = several_labels(tmp_path / "data")
    done = train(data, tmp_path / "run", "steps=80", "evaluate_every=80", heard=heard)
    assert done.recipe.loss == "sigmoid"
    assert "several labels" in notes(heard)
    assert done.results[0].metrics["mean_average_precision"] == 1
    assert done.mean == 1
    assert vitral.load(tmp_path / "run")[1].multilabel
    found = vitral.predict(tmp_path / "run", tmp_path / "data")
    truth = {f"{number}.png": number % 3 for number in range(48)}
    for row in found.rows:
        chances = dict(zip(row.names, row.probabilities, strict=True))
        kind = truth[Path(row.path).name]
        assert (chances["red"] > 0.5, chances["green"] > 0.5) == (kind != 1, kind != 0)
    assert vitral.evaluate(tmp_path / "run", data).metrics["mean_average_precision"] == 1


def test_answers_beyond_the_range_of_an_exponential_are_scored():
    """Warnings are errors here: e to the 1000 is none of float64's numbers."""
    logits, labels = np.array([[1000.0, -1000.0], [-1000.0, 1000.0]], np.float32), np.eye(2, dtype=np.uint8)
    assert measure(logits, labels, ("a", "b"))["score"] == 1
    assert measure(logits, 1 - labels, ("a", "b"))["score"] == 0.5


def test_early_stopping_keeps_the_best(colours, tmp_path):
    heard: list[Event] = []
    steady = ("schedule.kind=constant", "schedule.warmup=0", "evaluate_every=4", "data.dev=0.2")
    done = train(colours, tmp_path / "early", *steady, "steps=400", "patience=3", heard=heard).results[0]
    lasted = max(line["step"] for line in lines(tmp_path / "early"))
    assert lasted == done.step + 3 * 4
    assert "no improvement in 3 evaluations" in notes(heard)
    scores = {line["step"]: line["evaluation"]["score"] for line in lines(tmp_path / "early") if "evaluation" in line}
    assert done.step == min(step for step, score in scores.items() if score == max(scores.values()))
    assert [event.step for event in heard if isinstance(event, Evaluated) and event.best][-1] == done.step
    heard.clear()
    train(colours, tmp_path / "short", *steady, f"steps={done.step}", heard=heard)
    assert not any(event.best for event in heard if isinstance(event, Evaluated))  # it keeps the last, not the best
    assert not changed(tmp_path / "early", tmp_path / "short")
    assert vitral.evaluate(tmp_path / "early", colours).metrics["top1"] == done.metrics["top1"]


def test_several_seeds_are_several_runs(colours, tmp_path):
    done = train(colours, tmp_path / "run", "steps=6", seeds=3)
    scores = [result.metrics["score"] for result in done.results]
    assert [result.seed for result in done.results] == [0, 1, 2]
    assert [result.folder for result in done.results] == [str(tmp_path / "run" / f"seed-{seed}") for seed in range(3)]
    assert done.mean == pytest.approx(sum(scores) / 3)
    assert done.spread == pytest.approx(statistics.stdev(scores))
    assert changed(tmp_path / "run/seed-0", tmp_path / "run/seed-1")
    alone = train(colours, tmp_path / "alone", "steps=6", "seed=1")
    assert not changed(tmp_path / "run/seed-1", tmp_path / "alone")
    assert alone.results[0].metrics == done.results[1].metrics


def test_smoothed_labels_have_a_least_loss(colours, tmp_path):
    train(colours, tmp_path / "run", "regularization.label_smoothing=0.1", "steps=80", "evaluate_every=80")
    target = [0.9 + 0.1 / 3, 0.1 / 3, 0.1 / 3]
    least = -sum(share * math.log(share) for share in target)
    assert least <= losses(tmp_path / "run")[-1] < least + 0.05


@pytest.mark.parametrize("words", [["data.cutmix=1"], ["data.mixup=0.4"], ["optim.name=sgd", "optim.lr=0.3"]])
def test_other_ways_of_training_learn_too(colours, tmp_path, words):
    done = train(colours, tmp_path / "run", "steps=60", "evaluate_every=60", *words)
    assert done.mean == 1
    accuracies = [line["accuracy"] for line in lines(tmp_path / "run") if "loss" in line]
    mixes = "data" in words[0]
    assert all((value is None) == mixes for value in accuracies)  # a mixed target is neither right nor wrong


def test_recomputed_activations_give_the_same_weights(colours, tmp_path):
    drop = ("regularization.dropout=0.1", "regularization.stochastic_depth=0.2", "steps=6")
    train(colours, tmp_path / "kept", *drop)
    train(colours, tmp_path / "computed", *drop, "grad_checkpointing=true")
    assert not changed(tmp_path / "kept", tmp_path / "computed")


def test_the_average_is_the_formula(colours, tmp_path):
    steady = ("schedule.kind=constant", "schedule.warmup=0")
    total: dict[str, torch.Tensor] = {}
    for step in (1, 2, 3):
        train(colours, tmp_path / str(step), *steady, f"steps={step}")
        total = {name: 0.6 * total.get(name, 0) + value for name, value in weights(tmp_path / str(step)).items()}
    expected = {name: value / (0.36 + 0.6 + 1) for name, value in total.items()}
    train(colours, tmp_path / "ema_decay", *steady, "steps=3", "ema_decay=0.6")
    found = weights(tmp_path / "ema_decay")
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-7)


def test_classes_are_in_natural_order_and_saved(tmp_path):
    names = dict(zip(COLOURS, ("class 10", "class 9", "Class 1"), strict=True))
    train(colour_folder(tmp_path / "data", 6, names), tmp_path / "run")
    _, card = vitral.load(tmp_path / "run")
    assert card.class_names == ("Class 1", "class 9", "class 10")
    red = paint(tmp_path / "new.png", COLOURS["red"], 999)
    assert vitral.predict(tmp_path / "run", red).rows[0].names[0] == "class 10"


def test_a_class_that_only_one_split_has(tmp_path):
    data = tmp_path / "data"
    colour_folder(data / "train", 5)
    for number in range(2):
        paint(data / "test" / "red" / f"{number}.png", COLOURS["red"], 500 + number)
    heard: list[Event] = []
    train(data, data / "run", "steps=2", heard=heard)  # beside the splits it is in nobody's way
    assert '2 of 3 classes have no image in test: "blue" (5 in train), "green" (5 in train).' in notes(heard)
    paint(data / "test" / "teal" / "0.png", (40, 200, 200))
    with pytest.raises(vitral.UserError, match=r'test has classes that train lacks: "teal" \(1 image\)'):
        train(data, tmp_path / "other", "steps=2")
    assert not (tmp_path / "other").exists()


def test_runs_without_a_folder_get_one_each(colours, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = [
        vitral.train(colours, model=MODEL, set=[*QUICK, "steps=1"], device="cpu").results[0].folder for _ in range(2)
    ]
    assert folders == ["runs/colours-ViT-Ti-4-8", "runs/colours-ViT-Ti-4-8-2"]


def listing(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


@pytest.mark.parametrize("inside", ["", "run", "blue/run", "../colours"])
def test_a_run_does_not_lie_among_its_images(colours, inside):
    before = listing(colours)
    with pytest.raises(UserError, match="is inside the data folder"):
        train(colours, colours / inside)
    with pytest.raises(UserError, match="is inside the data folder"):
        vitral.pretrain(colours, model=MODEL, out=colours / inside)
    assert listing(colours) == before


def test_a_folder_of_runs_is_not_made_among_images(colours, monkeypatch):
    before = listing(colours)
    monkeypatch.chdir(colours)
    with pytest.raises(UserError, match=r"runs is inside the data folder \., "):
        vitral.train(".", model=MODEL, set=QUICK, device="cpu")
    assert listing(colours) == before


def test_a_run_does_not_lie_among_other_files(colours, tmp_path):
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "dear.txt").touch()
    for folder in (tmp_path, tmp_path / "letters", colours.parent):
        before = listing(folder)
        with pytest.raises(UserError, match="contains other files and no run to resume"):
            train(colours, folder)
        assert listing(folder) == before


@pytest.mark.parametrize("left", [(), ("state",), ("state", "tensorboard", ".DS_Store")])
def test_a_folder_with_nothing_of_others_is_free(colours, tmp_path, left):
    for name in left:
        (tmp_path / name).mkdir()
    assert train(colours, tmp_path, "steps=1").results[0].folder == str(tmp_path)


def test_a_run_goes_on_where_its_data_lies_too(tmp_path):
    data, words = colour_folder(tmp_path / "run" / "colours", 4), ("steps=2", "batch=4")
    with pytest.raises(UserError, match="contains other files"):
        train(data, tmp_path / "run", *words)
    train(data, tmp_path / "first", *words)
    (tmp_path / "first" / "recipe.toml").rename(tmp_path / "run" / "recipe.toml")
    train(data, tmp_path / "run", *words)
    heard: list[Event] = []
    train(data, tmp_path / "run", *words, heard=heard)
    assert "already finished" in notes(heard)


def test_seeds_go_on_in_their_folder(colours, tmp_path):
    train(colours, tmp_path, "steps=1", seeds=2)
    heard: list[Event] = []
    train(colours, tmp_path, "steps=1", seeds=2, heard=heard)
    assert notes(heard).count("already finished") == 2


TINY = ViTConfig(depth=1, width=16, mlp=32, heads=2, patch=4, image=(8, 8), classes=3)


def bare(folder: Path, preprocess: Preprocess | None = None) -> Path:
    """Weights that have not seen anything, and say how pixels are prepared only where they are told to."""
    vitral.save(build(TINY), folder / "w.safetensors", Card(TINY, class_names=("a", "b", "c"), preprocess=preprocess))
    return folder / "w.safetensors"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "mean and std 0.5 are assumed (else --set data.mean=... data.std=...)"),
        (("data.std=1,1,1",), "mean 0.5 is assumed (else --set data.mean=...)"),
        (("data.mean=0,0,0", "data.std=1,1,1"), ""),
    ],
)
def test_pixels_that_are_guessed_are_said(colours, tmp_path, words, says):
    _, recipe, reasons = choose_recipe(colours, init=bare(tmp_path), set=words)
    said = [reason for reason in reasons if "the weights do not state their preprocessing" in reason]
    assert [reason.partition(": ")[2] for reason in said] == ([says] if says else [])
    assert "data.mean=0,0,0" in words or recipe.data.mean == (0.5, 0.5, 0.5)


def test_finetuning_says_what_it_guesses_too(colours, tmp_path):
    words, heard = ["steps=1", "batch=4", "image=8", "workers=0", "optim.lr=0.01"], []
    weights = bare(tmp_path)
    vitral.finetune(
        weights,
        colours,
        recipe="paper:finetune/pets",
        set=words,
        seeds=1,
        out=tmp_path / "run",
        device="cpu",
        on_event=heard.append,
    )
    assert notes(heard).count("mean and std 0.5 are assumed") == 1


def test_reasons_do_not_contradict_what_is_said(colours, tmp_path):
    weights = bare(tmp_path, Preprocess("decode|resize(8)", (0.1,) * 3, (0.2,) * 3))

    def reasons(*words: str, init: Path | str = weights) -> str:
        return "\n".join(choose_recipe(colours, init=init, set=words, device="cpu")[2])

    plain = reasons()
    assert "all layers" in plain
    assert "horizontal flips" in plain
    assert "mean (0.1" in plain
    assert "all layers" not in reasons("trainable=head")
    assert "horizontal flips" not in reasons("trainable=head")
    assert "all layers" not in reasons("trainable=bias")
    assert "horizontal flips" in reasons("trainable=bias")
    assert "horizontal flips" not in reasons("data.train_transform=decode|resize({size})")
    assert "mean (0.1" not in reasons("data.mean=0,0,0")
    assert "4 layers" in reasons(init="")
    assert "4 layers" not in reasons("shape.depth=2", init="")
    assert "mild crops" in reasons(init="")
    assert "mild crops" not in reasons("data.train_transform=decode|resize({size})", init="")
    assert "Muon" in reasons(init="")
    assert "Muon" not in reasons("shape.weight_init=paper", init="")


def test_few_images_give_no_reason_against_what_is_said(tmp_path):
    data = colour_folder(tmp_path / "few", 3)
    weights = bare(tmp_path, Preprocess("decode|resize(8)", (0.1,) * 3, (0.2,) * 3))
    assert "only a new head" in "\n".join(choose_recipe(data, init=weights)[2])
    assert "only a new head" not in "\n".join(choose_recipe(data, init=weights, set=["trainable=full"])[2])


def test_what_a_run_did_is_said_without_what_a_head_leaves_out(started, pastels):
    assert "preprocessed and augmented as in the run" in "\n".join(choose_recipe(pastels, init=started)[2])
    alone = "\n".join(choose_recipe(pastels, init=started, set=["trainable=head"])[2])
    assert "preprocessed as in the run" in alone
    assert "augment" not in alone


def test_digits_from_scratch_reach_97_percent(tmp_path):
    """The recipe of the demo, all of it: 1,438 real images, 359 to test on."""
    pytest.importorskip("sklearn")
    done = vitral.train("digits", out=tmp_path / "run")
    assert done.results[0].metrics["n"] == 359
    assert done.mean >= 0.97
