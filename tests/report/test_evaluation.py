"""The page of an evaluation: confusions cell by cell, intervals, remedies of a bad calibration, files left out."""

from __future__ import annotations

import base64
import dataclasses
import html
import io
import json
import re
import xml.etree.ElementTree as ET
from typing import Any

import numpy as np
import pytest
from PIL import Image

import vitral
from vitral.checkpoints.card import Card
from vitral.data.images import UnreadableImage
from vitral.evaluation.accuracy import classification_metrics, multilabel_metrics, wilson_interval
from vitral.evaluation.calibration import BINS, ReliabilityBin, calibration_error, reliability
from vitral.recipe import with_overrides
from vitral.recipe_schema import Recipe
from vitral.report import evaluation
from vitral.report.evaluation import Mistake, Reliability, TemperatureAdvice, confusion_table, evaluation_page


def text_of(page: str) -> str:
    """What a reader sees, with single spaces."""
    body = re.sub(r"<(style|script).*?</\1>", "", page, flags=re.S)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", body)).split())


def drawn(n: int, k: int, sharpness: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Logits (n, k) times `sharpness`, and labels drawn from their softmax at 1: calibrated where `sharpness` is 1."""
    rng = np.random.default_rng(seed)
    logits = 2 * rng.normal(size=(n, k))
    chances = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    labels = (chances.cumsum(1) < rng.random((n, 1))).sum(1)
    return sharpness * logits, labels


def test_confusion_tables_count_each_cell_and_escape_names():
    cells = np.array([[0, 0, 3], [0, 1, 1], [1, 1, 2]])
    table: Any = ET.fromstring(confusion_table(cells, ["<b>", "dog & cat"])).find("table")
    head, *rows = table.iter("tr")
    assert [cell.find("span").text for cell in head.findall("th")] == ["<b>", "dog & cat"]
    assert [[cell.text or "" for cell in row.findall("td")] for row in rows] == [["3", "1"], ["", "2"]]
    alike = confusion_table(cells, ["crane", "crane"])  # ImageNet has two
    assert re.findall('class="(right|wrong)"', alike) == ["right", "wrong", "right"]


@pytest.mark.parametrize(("classes", "block"), [(41, 1), (250, 1), (251, 2), (1000, 4)])
def test_a_matrix_of_many_classes_is_an_image_of_blocks(classes, block):
    metrics = synthetic_metrics(classes)
    page = evaluation_page("many", metrics)
    match = re.search(r'<img id="matrix"[^>]*src="data:image/png;base64,([^"]*)"', page)
    assert match is not None
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(match[1]))))
    side = -(-classes // block)
    expected = np.zeros((side, side), bool)
    for true, predicted, _ in metrics["confusion"]:
        expected[true // block, predicted // block] = True
    assert pixels.shape == (side, side, 4)
    assert np.array_equal(pixels[..., 3] > 90, expected)
    assert (pixels[..., 3][~expected] == 0).all()
    own = np.eye(side, dtype=bool)
    assert {tuple(colour) for colour in pixels[own][:, :3]} == {evaluation._RIGHT}
    assert {tuple(colour) for colour in pixels[expected & ~own][:, :3]} == {evaluation._WRONG}
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])["confusion"]
    assert (data["block"], data["cells"]) == (block, metrics["confusion"])


def synthetic_metrics(classes: int, images: int = 10) -> dict[str, Any]:
    """Metrics of classes of which each is taken for the next one twice, and once for one far away."""
    labels = np.arange(classes).repeat(images)
    guesses = labels.copy()
    guesses[::images] = guesses[1::images] = (labels[::images] + 1) % classes
    guesses[2::images] = (labels[2::images] * 7 + 3) % classes
    codes, counts = np.unique(labels * classes + guesses, return_counts=True)
    rows = [{"name": f"a class {i}", "support": images, "recall": 0.7, "precision": 0.7} for i in range(classes)]
    shares = {"top1": 0.7, "top5": 0.9, "mean_per_class": 0.7, "ece": 0.1, "ece_calibrated": 0.02, "temperature": 1.3}
    cells = np.stack([codes // classes, codes % classes, counts], 1).tolist()
    return {"n": len(labels), "nll": 1.0, "nll_calibrated": 0.9, **shares, "per_class": rows, "confusion": cells}


def test_the_table_of_classes_names_what_each_is_taken_for():
    metrics = synthetic_metrics(5)
    page = evaluation_page("five", metrics)
    rows = re.findall(r'<tr><td data-value="(a class \d)">.*?</tr>', page)
    taken = re.findall(r'<td class="words" data-value="a class \d">(a class \d) \((\d)\)</td></tr>', page)
    assert len(rows) == 5
    for true, (name, count) in enumerate(taken):
        row = {guess: n for t, guess, n in metrics["confusion"] if t == true != guess}
        assert row[int(name[-1])] == int(count) == max(row.values())


def test_of_very_many_classes_the_worst_are_listed():
    metrics = synthetic_metrics(1002)
    metrics["per_class"][5]["recall"], metrics["per_class"][7]["recall"] = 0.8, None  # better than the others
    page = evaluation_page("many", metrics)
    listed = re.findall(r'<tr><td data-value="(a class \d+)">', page)
    assert listed == [f"a class {i}" for i in range(1002) if i not in (5, 7)]
    assert "The 1,000 of 1,002 classes with the lowest recall." in page
    assert len(page) < 1e6


def test_intervals_are_wilsons():
    """Against the roots of (p - share)^2 = z^2 p (1 - p) / n, which define it, and the published 4 of 20 example."""
    for share, n in ((0.2, 20), (0.0, 5), (1.0, 300), (0.911, 300)):
        z2 = 1.959963984540054**2
        roots = np.roots([1 + z2 / n, -(2 * share + z2 / n), share**2])
        assert wilson_interval(share, n) == pytest.approx(sorted(roots.real), abs=1e-6)
    page = text_of(evaluation_page("a", {"top1": 0.2, "n": 20}))
    assert "accuracy (95 % interval) 20.0 % (8.1 to 41.6)" in page


def test_raw_and_calibrated_probabilities_are_named():
    logits, labels = drawn(2000, 5, sharpness=3)
    metrics = classification_metrics(logits, labels, list("abcde"))
    both = Reliability(reliability(logits, labels), reliability(logits, labels, temperature=metrics.temperature))
    page = text_of(evaluation_page("a", metrics.as_dict(), reliability=both))
    raw, calibrated = f"{metrics.ece:.1%}".replace("%", " %"), f"{metrics.ece_calibrated:.1%}".replace("%", " %")
    assert f"raw (softmax of the logits) {raw} {metrics.nll:.3f}" in page
    assert f"calibrated (logits / {metrics.temperature:.3g}) {calibrated} {metrics.nll_calibrated:.3f}" in page
    assert "Raw probabilities" in page
    assert f"Calibrated probabilities: logits / {metrics.temperature:.3g}" in page
    assert f"must divide them by {metrics.temperature:.3g} before the softmax" in page


@pytest.mark.parametrize(("sharpness", "word"), [(4, "overconfident"), (0.25, "underconfident")])
def test_a_bad_calibration_names_its_remedy(sharpness, word):
    """Raw probabilities alone, as of weights without a temperature: with a fitted one, without, and of a sigmoid."""
    logits, labels = drawn(3000, 5, sharpness)
    metrics = classification_metrics(logits, labels, list("abcde"), temperature=1.0).as_dict()
    raw = Reliability(reliability(logits, labels))

    def remedy(**options: Any) -> str:
        page = text_of(evaluation_page("a", metrics, reliability=raw, **options))
        return page[page.index(f"Bad: the model is {word} on these 3,000 images. Remedy: ") :].partition(" Raw p")[0]

    assert "divide the logits by the temperature 1.5, which lowers the error to 1.0 %" in remedy(
        advice=TemperatureAdvice(1.5, 0.01)
    )
    assert "temperature alone does not repair it" in remedy(advice=TemperatureAdvice(1.5, 0.5))
    setting = "label_smoothing=0.1" if word == "overconfident" else "data.mixup=0"
    assert setting in remedy()
    assert "loss=softmax" in remedy(sigmoid=True)


def test_settings_of_a_remedy_exist():
    words = re.findall(r"--set (.*?)</code>", " ".join(_remedies()))
    assert len(words) == 3
    for settings in words:
        with_overrides(Recipe(), settings.split())


def _remedies() -> list[str]:
    over, under = (ReliabilityBin(0.4, 0.6, 9000, 0.5, accuracy) for accuracy in (0.1, 0.9))
    bad = {"n": 9000, "ece_calibrated": 0.4}
    cases = ((over, False), (under, False), (over, True))
    return [evaluation._remedy(Reliability((row,)), bad, None, sigmoid) for row, sigmoid in cases]


def test_the_advised_code_saves_a_calibrated_model(tmp_path):
    """The two statements of the remedy, run as they are printed."""
    model = vitral.create("ViT-Ti/4@8", depth=1, width=16, heads=2, mlp=32, classes=3)
    vitral.save(model, tmp_path / "a.safetensors", Card(model.config))
    row = ReliabilityBin(0.4, 0.6, 9000, 0.5, 0.1)
    said = evaluation._remedy(
        Reliability((row,)), {"n": 9000, "ece_calibrated": 0.4}, TemperatureAdvice(1.75, 0.01), False
    )
    code = re.findall(r"<code>(model, card.*?)</code>", said)[0]
    names = {"vitral": vitral, "dataclasses": dataclasses}
    exec(code, {**names, "SOURCE": tmp_path / "a.safetensors", "FILE": tmp_path / "b.safetensors"})
    assert vitral.load(tmp_path / "b.safetensors")[1].temperature == 1.75


def test_the_error_by_chance_is_that_of_calibrated_predictions():
    """Against 200 draws of labels from the probabilities themselves."""
    errors, chances = [], []
    for seed in range(200):
        logits, labels = drawn(300, 4, 1, seed)
        bins = reliability(logits, labels)
        errors.append(calibration_error(bins))
        chances.append(evaluation.error_by_chance(bins))
    assert np.mean(chances) == pytest.approx(np.mean(errors), rel=0.15)
    logits, labels = drawn(60, 4, 1)
    metrics = classification_metrics(logits, labels, list("abcd"), temperature=1.0).as_dict()
    page = text_of(evaluation_page("a", metrics, reliability=Reliability(reliability(logits, labels))))
    assert "Too few images to tell: with these 60 " in page
    assert "Bad:" not in page
    empty = tuple(ReliabilityBin(i / BINS, (i + 1) / BINS, int(i == 3), 0.25, 0.0) for i in range(BINS))
    assert evaluation.error_by_chance(empty) > 0


def test_mistakes_have_captions_and_files_left_out_are_listed():
    picture = np.zeros((8, 8, 3), np.uint8)
    mistakes = [Mistake("x/<a>.jpg", picture, "cat & co", "dog", 0.4375)]
    left_out = [UnreadableImage(f"{i} <b>.jpg", "truncated JPEG") for i in range(202)]
    page = evaluation_page("a", {"top1": 0.5, "n": 4}, mistakes=mistakes, left_out=left_out, notes=("All < none.",))
    said = text_of(page)
    assert "cat & co → dog , 44 %" in said
    assert "All < none." in said
    assert "202 files could not be read" in said
    assert "199 <b>.jpg truncated JPEG" in said
    assert "200 <b>.jpg" not in said
    assert "And 2 more." in said
    assert "could not be read" not in text_of(evaluation_page("a", {"top1": 0.5, "n": 4}))


def test_metrics_of_several_labels_have_a_page():
    rng = np.random.default_rng(0)
    metrics = multilabel_metrics(rng.random((20, 3)), rng.integers(0, 2, (20, 3)), list("abc"))
    said = text_of(evaluation_page("a", metrics.as_dict()))
    assert "mean average precision" in said
    assert "Average precision: " in said
    assert "Confusion" not in said
    assert "Calibration" not in said
