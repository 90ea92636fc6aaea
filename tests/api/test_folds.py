"""`vitral train --folds`: one run per fold, resumed where it stopped, and scores that can be recounted."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import runs

import vitral
from vitral import events
from vitral.api.training import fold_scores
from vitral.evaluation.accuracy import classification_metrics, wilson_interval
from vitral.training.run import RunResult

QUICK = [word for word in runs.TINY if not word.startswith(("steps", "evaluate_every", "save_every"))]


def train(pictures, out, *words: str, on_event: Any = lambda event: None, **options: Any) -> Any:
    return vitral.train(
        pictures, model=runs.MODEL, out=out, device="cpu", set=[*QUICK, "steps=3", *words], on_event=on_event, **options
    )


@pytest.fixture(scope="module")
def cross_validated(tmp_path_factory):
    """Two folds that were interrupted in the second, and resumed."""
    pictures = runs.make_pictures(tmp_path_factory.mktemp("data") / "pictures")
    out, notes = tmp_path_factory.mktemp("runs") / "cv 1", []

    def crash_in_second(event: Any) -> None:
        if isinstance(event, events.Note):
            notes.append(event.text)
        if isinstance(event, events.StepDone) and any("fold 2" in note for note in notes):
            raise runs.Crash

    with pytest.raises(runs.Crash):
        train(pictures, out, folds=2, on_event=crash_in_second)
    assert not (out / "folds.json").exists()
    notes.clear()
    result = train(pictures, out, folds=2, on_event=lambda event: notes.append(getattr(event, "text", "")), seed=None)
    return pictures, out, result, notes


def test_a_resumed_cross_validation_repeats_no_fold(cross_validated):
    _, out, _, notes = cross_validated
    assert f"already finished: {out / 'fold-1'}" in notes
    assert "fold 2 of 2, seed 1: 12 images to train on, 12 to score" in notes
    assert "24 images in 2 folds (drawn with seed 0), evenly by class." in notes


def test_each_image_is_scored_once_by_the_model_that_was_not_trained_on_it(cross_validated):
    pictures, out, result, _ = cross_validated
    splits = [json.loads((out / f"fold-{number}" / "split.json").read_text())["splits"] for number in (1, 2)]
    first, second = (split[f"fold-{number}"]["hashes"] for number, split in enumerate(splits, 1))
    assert sorted(first) == sorted(splits[1]["train"]["hashes"])
    assert sorted(second) == sorted(splits[0]["train"]["hashes"])
    right = 0
    for number in (1, 2):
        found = vitral.evaluate(out / f"fold-{number}", pictures, device="cpu").metrics
        assert found["n"] == 12
        assert found["top1"] == result.folds.scores[number - 1]
        right += round(12 * found["top1"])
    assert result.folds.out_of_fold["top1"] == pytest.approx(right / 24)
    assert result.folds.out_of_fold["n"] == 24
    assert result.folds.seeds == (0, 1)
    assert json.loads((out / "folds.json").read_text())["mean"] == result.mean


def test_the_folder_stands_for_the_average_of_its_models(cross_validated, command):
    pictures, out, result, _ = cross_validated
    assert result.folder == out
    picture = pictures / "class-0" / "0.png"
    together = vitral.predict(out, picture, device="cpu").rows
    assert together == vitral.predict([out / "fold-1", out / "fold-2"], picture, device="cpu").rows
    with pytest.raises(vitral.UserError, match="each image was trained on by one of the models"):
        vitral.evaluate(out, pictures)
    with pytest.raises(vitral.UserError, match="there is one model per fold"):
        result.load()
    words = ["--model", runs.MODEL, "--out", out, "--folds", "2", "--device", "cpu", "--set", *QUICK, "steps=3"]
    shown = " ".join(command("train", pictures, *words).out.split())
    low, high = result.folds.interval
    assert f"{result.mean:.2%}, mean of 2 folds (95 % interval {low:.2%} to {high:.2%}, by Student's t;" in shown
    low, high = wilson_interval(result.folds.out_of_fold["top1"], 24)
    assert f"{result.folds.out_of_fold['top1']:.2%} (95 % interval {low:.2%} to {high:.2%}, Wilson's) of 24" in shown
    assert f"vitral predict {shlex.quote(str(out))} IMAGES... (averages the 2 models)" in shown
    (out / "fold-2" / "model.safetensors").rename(out / "fold-2" / "aside")
    with pytest.raises(vitral.UserError, match="fold-2 is not finished: resume it"):
        vitral.predict(out, picture)
    (out / "fold-2" / "aside").rename(out / "fold-2" / "model.safetensors")


def test_pooled_metrics_are_those_of_all_predictions_together():
    stats = pytest.importorskip("scipy.stats")
    rng, classes = np.random.default_rng(0), ("a", "b", "c", "d")
    labels = [rng.integers(0, 3, 10 + number) for number in range(4)]  # "d" has no image
    logits = [rng.normal(size=(len(part), 4)) for part in labels]
    empty = RunResult("", {}, 1, 1.0, 1.0, 1.0, 1.0, 1, "cpu", 1, 1, [], "", 0)
    metrics = [classification_metrics(z, y, classes).as_dict() for z, y in zip(logits, labels, strict=True)]
    found = fold_scores([replace(empty, metrics={"score": one["top1"], **one}) for one in metrics], classes)
    whole = classification_metrics(np.concatenate(logits), np.concatenate(labels), classes).as_dict()
    assert found.out_of_fold == {name: whole[name] for name in found.out_of_fold or {}}
    assert {"n", "top1", "mean_per_class", "per_class", "confused", "confusion"} == set(found.out_of_fold or {})
    scores = [one["top1"] for one in metrics]
    low, high = stats.t.interval(0.95, 3, loc=np.mean(scores), scale=stats.sem(scores))
    assert found.interval == pytest.approx((max(low, 0), min(high, 1)))
    assert found.mean == pytest.approx(np.mean(scores))
    right = round(whole["top1"] * whole["n"])
    wilson = stats.binomtest(right, whole["n"]).proportion_ci(0.95, method="wilson")
    assert found.out_of_fold_interval == pytest.approx((wilson.low, wilson.high), abs=1e-6)


@pytest.mark.parametrize(
    ("options", "words", "reason"),
    [
        ({"folds": 1}, (), "folds must be at least 2, not 1"),
        ({"folds": 2, "seeds": 2}, (), "pass folds or seeds, not both"),
        ({"folds": 2}, ("patience=2",), "omit patience and data.dev"),
        ({"folds": 2}, ("data.dev=0.2",), "omit patience and data.dev"),
        ({"folds": 2}, ("data.held_out=0.3",), "omit data.held_out, or folds"),
        ({"folds": 2}, ("objective=masked", "data.mixup=0"), "omit objective=masked"),
    ],
)
def test_what_does_not_go_with_folds_is_refused(cross_validated, tmp_path, options, words, reason):
    with pytest.raises(vitral.UserError, match=reason):
        train(cross_validated[0], tmp_path / "out", *words, **options)
    assert not (tmp_path / "out").exists()
