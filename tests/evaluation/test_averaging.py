"""Averages over views and models, against plain loops over torchvision's crops and torch's softmax."""

from __future__ import annotations

import copy
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitral
from vitral.architecture import ViTConfig
from vitral.data.preprocess import parse_pipeline
from vitral.evaluation.mapping import class_order
from vitral.evaluation.predict import FiveCrops, mean_logits
from vitral.models.build import build
from vitral.report.evaluation import percent

NAMES = ("ant", "bee", "cat", "dog")


def model_and_card(seed: int, names=NAMES, temperature=1.0, pipeline="decode|resize(20, 24)|center_crop(16)", **card):
    torch.manual_seed(seed)
    model = build(ViTConfig(depth=1, width=16, mlp=32, heads=2, patch=8, image=(16, 16), classes=len(NAMES)))
    assert model.head.output is not None
    torch.nn.init.normal_(model.head.output.weight)
    how = vitral.Preprocess(pipeline, (0.4,) * 3, (0.3,) * 3)
    return model.eval(), vitral.Card(model.config, names, temperature=temperature, preprocess=how, **card)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    """A picture of noise of each class, of 24 x 20 pixels: nothing is left to a resize."""
    folder, rng = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for name in NAMES:
        (folder / name).mkdir()
        Image.fromarray(rng.integers(0, 256, (20, 24, 3), np.uint8)).save(folder / name / "0.png")
    return folder


def crops(path: Path, tta: str | None) -> torch.Tensor:
    """The views of an image as torchvision makes them, normalised, (views, 3, 16, 16)."""
    functional: Any = pytest.importorskip("torchvision.transforms.functional")
    image = Image.open(path)
    middle = functional.center_crop(image, 16)
    views = {
        None: [middle],
        "flip": [middle, functional.hflip(middle)],
        "five-crop": functional.five_crop(image, 16),
        "ten-crop": functional.ten_crop(image, 16),
    }[tta]
    return torch.stack([(functional.pil_to_tensor(view).double() / 255 - 0.4) / 0.3 for view in views])


def expected(sources, path: Path, tta: str | None, sigmoid: bool = False) -> dict[str, float]:
    """The mean over models of the mean over views of probabilities, by class."""
    total = dict.fromkeys(NAMES, 0.0)
    for model, card in sources:
        with torch.inference_mode():
            logits = copy.deepcopy(model).double()(crops(path, tta)) / card.temperature
        chances = (logits.sigmoid() if sigmoid else logits.softmax(-1)).mean(0)
        for name, chance in zip(card.class_names, chances.tolist(), strict=True):
            total[name] += chance / len(sources)
    return total


@pytest.mark.parametrize(
    ("tta", "several", "sigmoid"),
    [
        *[(tta, True, False) for tta in (None, "flip", "five-crop", "ten-crop")],
        *(("flip", False, True), ("ten-crop", True, True), (None, True, True)),
    ],
)
def test_predictions_are_the_mean_of_a_plain_loop(pictures, tta, several, sigmoid):
    sources = [model_and_card(0, temperature=2.0, multilabel=sigmoid)]
    if several:
        sources.append(model_and_card(1, names=("dog", "ant", "cat", "bee"), temperature=0.5, multilabel=sigmoid))
    rows = vitral.predict(sources if several else sources[0], pictures, tta=tta, top=4, device="cpu").rows
    assert len(rows) == 4
    for row in rows:
        chances = expected(sources, Path(row.path), tta, sigmoid)
        assert dict(zip(row.names, row.probabilities, strict=True)) == pytest.approx(chances, abs=1e-6)
        assert list(row.probabilities) == sorted(row.probabilities, reverse=True)


def test_evaluation_scores_the_same_average(pictures):
    sources = [model_and_card(0), model_and_card(1, names=("dog", "ant", "cat", "bee"))]
    found = vitral.evaluate(sources, pictures, tta="flip", device="cpu")
    chances = [expected(sources, path, "flip") for path in sorted(pictures.glob("*/*.png"))]
    labels = [path.parent.name for path in sorted(pictures.glob("*/*.png"))]
    right = [max(row, key=row.__getitem__) == label for row, label in zip(chances, labels, strict=True)]
    assert found.metrics["top1"] == np.mean(right)
    losses = [-np.log(row[label]) for row, label in zip(chances, labels, strict=True)]
    assert found.metrics["nll"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert "averaged over 2 models and 2 views of each image (flip)" in " ".join(found.notes)


def test_files_are_averaged_on_the_command_line(command, pictures, tmp_path):
    paths = []
    for seed in (0, 1):
        model, card = model_and_card(seed)
        vitral.save(model, tmp_path / f"{seed}.safetensors", card)
        paths.append(tmp_path / f"{seed}.safetensors")
    picture = pictures / "ant" / "0.png"
    said = command("predict", paths[0], picture, "--ensemble", paths[1], "--tta", "flip", "--json", "--device", "cpu")
    assert said.code == 0, said.err
    rows = vitral.predict(paths, picture, tta="flip", device="cpu").rows
    assert f'"probability": {rows[0].probabilities[0]}' in said.out
    names = tmp_path / "names.txt"
    names.write_text("red\ngreen\nblue\ngrey\n")
    said = command("predict", paths[0], picture, "--classes", names, "--device", "cpu")
    assert set(said.out.split()) > {"red", "green", "blue", "grey"}
    assert {name for name, _ in vitral.classifier(paths[0], classes=names, device="cpu")(picture)} == {
        *("red", "green", "blue", "grey")
    }
    said = command("evaluate", paths[0], pictures, "--classes", names, "-o", tmp_path / "x.html", "--device", "cpu")
    assert ">grey<" in (tmp_path / "x.html").read_text()  # matched by the model's own names, and shown by the table's
    said = command("evaluate", paths[0], pictures, "--ensemble", paths[1], "-o", tmp_path / "x.html", "--device", "cpu")
    assert f"wrote {tmp_path}/x.html" in " ".join(said.out.split())
    found, page = vitral.evaluate(paths, pictures, device="cpu"), (tmp_path / "x.html").read_text()
    assert f"<h1>2 models on {pictures.name}</h1>" in page
    assert percent(found.metrics["top1"]) in page
    low, high = found.interval or (0, 0)
    assert f"({found.metrics['top1']:.2%} (95 % interval {low:.2%} to {high:.2%}".strip("(") in said.out
    assert all(escape(note) in page for note in found.notes)
    said = command("evaluate", paths[0], pictures, "--ensemble", paths[1], "--tta", "crops")
    assert (said.code, 'takes flip or five-crop or ten-crop, not "crops"' in said.err) == (2, True)


def test_models_of_other_classes_are_refused(pictures):
    first = model_and_card(0)
    others = {
        'has other classes than the first model (such as "cow")': model_and_card(1, names=("ant", "bee", "cat", "cow")),
        "has other outputs": model_and_card(1, multilabel=True),
        'has other classes than the first model (such as "ant")': model_and_card(1, names=()),
    }
    for reason, other in others.items():
        with pytest.raises(vitral.UserError) as caught:
            vitral.predict([first, other], pictures, device="cpu")
        assert reason in str(caught.value)
    with pytest.raises(vitral.UserError, match='tta="mirror" is not one of flip, five-crop, ten-crop'):
        vitral.predict(first, pictures, tta="mirror")  # type: ignore[arg-type]


def test_a_table_names_the_classes_of_models_that_have_none(pictures, tmp_path):
    names = tmp_path / "names.txt"
    names.write_text("\n".join(NAMES))
    nameless = model_and_card(1, names=())
    reordered = model_and_card(0, names=("dog", "ant", "cat", "bee"))
    rows = vitral.predict([nameless, reordered], pictures, classes=names, top=4, device="cpu").rows
    sources = [(nameless[0], replace(nameless[1], class_names=NAMES)), reordered]
    chances = expected(sources, Path(rows[0].path), None)
    assert dict(zip(rows[0].names, rows[0].probabilities, strict=True)) == pytest.approx(chances, abs=1e-6)


def test_mean_probabilities_do_not_underflow():
    logits = [torch.tensor([[800.0, 0.0, -300.0]]), torch.tensor([[500.0, 0.0, -500.0]])]
    mean = mean_logits(logits)
    assert torch.isfinite(mean).all()
    assert mean.softmax(-1).tolist() == [[1.0, 0.0, 0.0]]
    assert mean.diff(dim=-1)[0, 1] == pytest.approx(-500, abs=1)  # log((e^-1100 + e^-1000) / (e^-800 + e^-500))
    assert torch.isfinite(mean_logits(logits, sigmoid=True)).all()


def test_crops_of_a_pipeline_that_does_not_crop_are_of_a_larger_image():
    pixels = np.random.default_rng(0).integers(0, 256, (40, 30, 3), np.uint8)
    views = FiveCrops.of(parse_pipeline("decode|resize(14, 21, bicubic)"))
    larger = parse_pipeline("decode|resize(16, 24, bicubic)")(pixels)
    assert views.size == (70, 21)
    found = views(pixels).reshape(5, 14, 21, 3)
    np.testing.assert_array_equal(found[0], larger[:14, :21])
    np.testing.assert_array_equal(found[3], larger[2:, 3:])
    np.testing.assert_array_equal(found[4], larger[1:15, 1:22])
    with pytest.raises(vitral.UserError, match="does not end in a crop or a resize"):
        FiveCrops.of(parse_pipeline("decode|resize_fit(8)|pad(8, 8)|resize(8)|pad(9, 9)"))


def test_classes_that_occur_twice_need_the_same_order():
    assert class_order(("crane", "crane"), ("crane", "crane"), "b").tolist() == [0, 1]
    with pytest.raises(vitral.UserError, match="other classes"):
        class_order(("crane", "ant", "crane"), ("ant", "crane", "crane"), "b")
