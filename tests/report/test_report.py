"""Pages: embedded attention decodes to the weights, numbers match the model, files are self-contained."""

from __future__ import annotations

import base64
import json
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from journeys import COLOURS, MODEL, QUICK, SHAPE, Command, colour_folder, paint
from PIL import Image

import vitral
from vitral.api.features import search
from vitral.api.inspection import inspect, most_confident_mistakes, reliabilities, write_run_page
from vitral.checkpoints.card import Card
from vitral.data.sources import open_data
from vitral.errors import UserError
from vitral.evaluation.calibration import reliability
from vitral.evaluation.predict import predict_split
from vitral.events import Note
from vitral.inspection.attention import mean_attention_distance, rollout_maps
from vitral.inspection.image_inspection import ImageInspection, gradient_rollout, inspect_images, occlusion
from vitral.models.capture import capture
from vitral.report.html import Section, page
from vitral.report.pages import LearnedWeights, inspect_page
from vitral.report.viewer import ViewerImage, choose_layers, opening, quantized

PLAIN = "decode|resize(8)|value_range(-1, 1)"
TEENY = "decode|resize(32)|value_range(-1, 1)"


def group(pattern: str, text: str) -> str:
    """The group of the first match; there must be one."""
    match = re.search(pattern, text, re.S)
    assert match is not None
    return match[1]


def embedded(path: Path) -> dict:
    """What the page's script reads."""
    text = path.read_text("utf-8")
    return json.loads(group(r'<script type="application/json" id="data">(.*?)</script>', text))


def unpacked(part: dict, n: int) -> np.ndarray:
    """The inverse of `quantized`, as the page's script does it: (rows, n)"""
    steps = np.frombuffer(base64.b64decode(part["steps"]), np.uint8).reshape(-1, n)
    return steps / 255 * np.frombuffer(base64.b64decode(part["high"]), "<f4")[:, None]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    return colour_folder(tmp_path_factory.mktemp("pictures"), images=6)


@pytest.fixture(scope="module")
def run(pictures, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    vitral.train(pictures, model=MODEL, out=folder, set=[*QUICK, "steps=12"], device="cpu")
    return folder


def saved(tmp_path: Path, name: str, multilabel: bool = False, **shape) -> Path:
    torch.manual_seed(0)
    model: Any = vitral.create(name, **shape)
    if model.config.classes:
        torch.nn.init.normal_(model.head.output.weight)  # heads start at zero, where all classes are alike
    path = tmp_path / "model.safetensors"
    vitral.save(model, path, Card(model.config, multilabel=multilabel))
    return path


def test_quantized_rows_are_within_half_a_step():
    rows = np.random.default_rng(0).dirichlet(np.full(9, 0.3), (2, 4)).astype(np.float32)
    back = unpacked(quantized(rows), 9).reshape(rows.shape)
    assert (np.abs(back - rows) <= rows.max(-1, keepdims=True) / 510 * 1.0001).all()
    assert np.array_equal(unpacked(quantized(np.zeros((1, 3))), 3), np.zeros((1, 3)))


@given(st.integers(1, 32), st.integers(1, 16), st.integers(1, 900), st.integers(1, 64), st.integers(0, 10**8))
def test_chosen_layers_fit_into_the_budget(depth, heads, patches, images, budget):
    layers = choose_layers(depth, heads, patches, images, budget=budget)
    one = images * (4 * -(-patches * patches // 3) + 4 * -(-4 * patches // 3))
    pooled = images * (4 * -(-depth * heads * patches // 3) + 4 * -(-4 * depth * heads // 3))
    assert (heads * len(layers.per_head) + len(layers.averaged)) * one <= max(budget - pooled, 0)
    assert not {*layers.per_head} & {*layers.averaged}
    assert {*layers.per_head, *layers.averaged} <= set(range(depth))
    if budget >= pooled + depth * heads * one:
        assert layers.per_head == tuple(range(depth))
    requested = choose_layers(depth, heads, patches, images, requested=[depth - 1], budget=budget)
    assert requested.per_head == (depth - 1,)


def test_eight_images_of_a_base_model_have_most_layers_and_four_have_all():
    eight, four = (choose_layers(12, 12, 196, images) for images in (8, 4))
    assert {8, 11, 0} < set(eight.averaged)  # the layer that the viewer usually opens on, the last and the first
    assert len(eight.averaged) >= 8
    assert {*four.per_head, *four.averaged} == set(range(12))


def seen(brightest: list[int], grid: tuple[int, int] = (4, 4), **words: Any) -> ViewerImage:
    """An image with a head per layer, each with its brightest patch; the next brightest ones are 5, 6, 9, 10."""
    n = grid[0] * grid[1]
    pooled = np.full((len(brightest), 1, n), 0.1)
    pooled[..., [i for i in (5, 6, 9, 10) if i < n]] = 0.2
    for layer, patch in enumerate(brightest):
        pooled[layer, 0, patch] = 0.9
    maps = (
        {"rollout": np.zeros(grid)} if "predictions" not in words else {name: np.zeros(grid) for name in ("evidence",)}
    )
    inspection = ImageInspection(grid, 4, np.zeros(2), np.zeros((*grid, 3)), maps, pooled)
    words = {"predictions": (), **words}
    return ViewerImage("a.png", np.zeros((16, 16, 3), np.uint8), inspection, **words)


def test_the_viewer_opens_on_no_layer_with_bright_corners():
    """Of 8 layers the sixth, unless a corner of 4 x 4 patches is brightest there; then the nearest without one."""
    inside = [7] * 8
    assert opening([seen(inside)]) == ("attention", 5)
    for corner in (0, 3, 12, 15):
        assert opening([seen([*inside[:5], corner, *inside[6:]])]) == ("attention", 4)
    assert opening([seen([7, 7, 7, 7, 0, 3, 12, 15])]) == ("attention", 3)
    assert opening([seen(inside), seen([*inside[:5], 0, *inside[6:]])]) == ("attention", 4)  # of the second image
    assert opening([seen([7] + [0] * 7), seen([0] + [7] * 7)]) == ("attention", 0)  # the first image is what is shown
    assert opening([seen([0] * 8)]) == ("rollout", 5)
    assert opening([seen([0] * 8, grid=(2, 2))]) == ("attention", 5)  # all patches are corners
    two = seen(inside)
    assert two.inspection.pooled is not None
    two.inspection.pooled[5, 0, [0, 15]] = 0.8  # the brightest is none, the next two are
    assert opening([two]) == ("attention", 4)


def test_the_viewer_opens_mistakes_on_the_evidence():
    mistake = seen([7] * 8, predictions=(("dog", 0.44), ("cat", 0.4)), truth=("cat",))
    assert opening([mistake]) == ("evidence", 5)
    assert opening([mistake._replace(truth=())]) == ("attention", 5)


@pytest.mark.parametrize(("depth", "heads", "side"), [(12, 3, 16), (12, 12, 16), (24, 16, 16), (32, 16, 14)])
def test_a_page_of_eight_photographs_is_at_most_5_mb(depth, heads, side):
    """With the attention of a Ti/16, B/16, L/16 and H/14, and photographs as noise, which compresses worst."""
    rng, rows = np.random.default_rng(0), 224 // side
    n = rows * rows
    layers = choose_layers(depth, heads, n, 8)
    attention = rng.random((heads, n, n), dtype=np.float32)
    kept = {layer: attention for layer in layers.per_head} | {layer: attention[:1] for layer in layers.averaged}
    maps = {name: rng.random((rows, rows)) for name in ("rollout", "evidence", "norms")}
    pooled = rng.random((depth, heads, n))
    inspection = ImageInspection((rows, rows), side, np.zeros(9), rng.random((rows, rows, 3)), maps, pooled, kept)
    photos = rng.integers(0, 256, (8, 224, 224, 3), dtype=np.uint8)
    images = [ViewerImage(f"{i}.jpg", photo, inspection, (("cat", 0.5),)) for i, photo in enumerate(photos)]
    learned = LearnedWeights(rng.random((28, side, side, 3)), 0.5, "filters", rng.random((rows, rows, rows, rows)))
    html = inspect_page("eight", {}, learned, images, "the class token")
    assert 3.5e6 < len(html.encode()) < 5e6


def test_text_is_escaped():
    html = page("<i>", "", [Section("a", "</script>", "", "")], data={"name": "</script><b>"})
    assert "<i>" not in html
    assert html.count("</script>") == 2
    assert json.loads(group(r'id="data">(.*?)</script>', html)) == {"name": "</script><b>"}


def test_a_page_is_utf_8_whatever_the_names():
    html = page("caf\udce9", "", [Section("a", "\ud800", "", "crème")], data={"caf\udce9": "crème"})
    assert html.encode().decode() == html
    assert "<h1>caf\ufffd</h1>" in html
    assert json.loads(group(r'id="data">(.*?)</script>', html)) == {"caf\ufffd": "crème"}


@pytest.mark.parametrize("pool", ["token", "mean", "map"])
def test_an_inspection_holds_the_attention_that_capture_computes(pool):
    torch.manual_seed(0)
    shape = {"depth": 3, "width": 16, "heads": 2, "mlp": 32, "classes": 5, "pool": pool, "registers": 2}
    model: Any = vitral.create("ViT-Ti/4@8", **shape, class_token=pool == "token").eval()
    images = torch.randn(2, 3, 8, 12)
    looks = inspect_images(model, images, headed=[2], averaged=[0])
    first = model.config.prefix
    with capture(model, rows="all") as seen, torch.inference_mode():
        logits = model(images)
    for i, look in enumerate(looks):
        np.testing.assert_allclose(look.logits, logits[i], atol=1e-5)
        np.testing.assert_allclose(look.rows[2], seen[2][i, :, first:, first:], atol=1e-6)
        np.testing.assert_allclose(look.rows[0][0], seen[0][i].mean(0)[first:, first:], atol=1e-6)
        assert set(look.rows) == {0, 2}
        np.testing.assert_allclose(look.maps["rollout"], rollout_maps(model, images)[i], atol=1e-6)


def test_an_axial_block_is_one_layer():
    torch.manual_seed(0)
    model = vitral.create("Axial-ViT-B/4@8", depth=2, width=16, heads=2, mlp=32, classes=3).eval()
    images = torch.randn(1, 3, 8, 12)
    (look,) = inspect_images(model, images, headed=[1], averaged=[0])
    assert look.pooled is not None
    assert look.pooled.shape == (2, 2, 6)
    np.testing.assert_allclose(look.rows[1].sum(-1), 1, atol=1e-5)
    np.testing.assert_allclose(look.rows[1].mean(1), look.pooled[1], atol=1e-6)


def test_a_page_is_self_contained(run, pictures, tmp_path):
    done = inspect(run, [pictures / "red" / "0.png", pictures / "blue" / "1.png"], output=tmp_path / "a.html")
    text = done.page.read_text("utf-8")
    assert done.bytes == len(text.encode()) < 1e6
    assert done.images == 2
    assert not re.findall(r'(?:src|href)="(?!data:|#)', text)
    assert "http://" not in text
    assert "https://" not in text
    data = embedded(done.page)
    assert [image["name"] for image in data["images"]] == ["0.png", "1.png"]
    rows, columns = data["grid"]
    found = vitral.predict(run, pictures / "red" / "0.png", top=3).rows[0]
    assert [name for name, _ in data["images"][0]["answers"]] == list(found.names)
    assert [share for _, share in data["images"][0]["answers"]] == pytest.approx(found.probabilities, abs=1e-5)
    for image in data["images"]:
        kept = unpacked(image["rows"]["1"], rows * columns)
        assert kept.shape == (2 * rows * columns, rows * columns)


def test_distances_and_norms_on_a_page_match_the_model(tmp_path):
    """The reach of a head and the norm of a token, by loops over what the layers computed."""
    path = saved(tmp_path, "ViT-Ti/4@12", depth=2, width=16, heads=2, classes=3)
    picture = paint(tmp_path / "a.png", COLOURS["red"], side=12)
    text = inspect(path, picture, output=tmp_path / "a.html", preprocess=PLAIN.replace("8", "12")).page.read_text()
    model: Any = vitral.load(path)[0]
    pixels = torch.from_numpy(np.array(Image.open(picture))).permute(2, 0, 1)[None] / 127.5 - 1
    norms: list[torch.Tensor] = []
    hook = model.blocks[-1].register_forward_hook(lambda _module, _inputs, out: norms.append(out[0, 1:].norm(dim=-1)))
    with capture(model, rows="all") as seen, torch.inference_mode():
        model(pixels)
    hook.remove()
    said = dict(re.findall(r"<title>(layer \d, head \d): ([\d.]+)</title>", text))
    for layer in range(2):
        for head in range(2):
            weights, reach = seen[layer][0, head, 1:, 1:], 0.0
            for i in range(9):
                for j in range(9):
                    far = 4 * np.hypot(i // 3 - j // 3, i % 3 - j % 3)
                    reach += float(weights[i, j] / weights[i].sum() * far / 9)
            assert float(said[f"layer {layer + 1}, head {head + 1}"]) == pytest.approx(reach, abs=0.051)
    assert embedded(tmp_path / "a.html")["images"][0]["maps"]["norms"] == pytest.approx(norms[0].tolist(), rel=1e-3)


def test_a_single_class_has_evidence():
    torch.manual_seed(0)
    model: Any = vitral.create(MODEL, depth=2, width=16, heads=2, classes=1).eval()
    torch.nn.init.normal_(model.head.output.weight)
    (look,) = inspect_images(model, torch.randn(1, 3, 8, 8))
    assert look.maps["evidence"].max() > 0


@pytest.mark.parametrize("multilabel", [False, True])
def test_a_page_states_whether_probabilities_are_sigmoid_or_softmax(tmp_path, multilabel):
    path = saved(tmp_path, "ViT-Ti/16@32", multilabel, depth=1, width=16, heads=2, mlp=32, classes=3)
    picture = paint(tmp_path / "a.png", COLOURS["red"], side=32)
    done = inspect(path, picture, output=tmp_path / "a.html", preprocess=TEENY)
    pixels = torch.from_numpy(np.array(Image.open(picture))).permute(2, 0, 1)[None] / 127.5 - 1
    model = vitral.load(path)[0]
    with torch.inference_mode():
        logits = model(pixels)[0].double().numpy()
    chances = 1 / (1 + np.exp(-logits)) if multilabel else np.exp(logits) / np.exp(logits).sum()
    (image,) = embedded(done.page)["images"]
    assert dict(image["answers"]) == pytest.approx({f"class {i}": chances[i] for i in range(3)}, abs=1e-4)
    evidence = gradient_rollout(model, pixels, sigmoid=multilabel).flatten().tolist()
    assert image["maps"]["evidence"] == pytest.approx(evidence, rel=1e-3, abs=1e-6)
    text = done.page.read_text("utf-8")
    assert ("by itself (sigmoid)" in text, "sum to 1 (softmax)" in text) == (multilabel, not multilabel)


def test_a_model_alone_has_a_page(tmp_path):
    done = inspect(saved(tmp_path, "ViT-Ti/4@8", depth=1, width=16, heads=2), output=tmp_path / "a.html")
    assert (done.images, done.unreadable, done.figures) == (0, (), ())
    text = done.page.read_text("utf-8")
    assert "Learned filters" in text
    assert 'id="stage"' not in text
    assert embedded(done.page) == {}


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("R50x1@32", {"classes": 3, "blocks": (1, 1, 1, 1)}, {"no attention", 'value="occlusion"'}),
        ("R+ViT-Ti/16@32", {"depth": 1, "width": 16, "heads": 2, "mlp": 32}, {"7x7 convolution", 'value="rollout"'}),
    ],
)
def test_convolutions_are_shown_too(tmp_path, name, shape, words):
    """Of a ResNet by occlusion, each class by itself where the weights say so."""
    path, picture = saved(tmp_path, name, multilabel=True, **shape), paint(tmp_path / "a.png", COLOURS["red"], side=32)
    done = inspect(path, picture, output=tmp_path / "a.html", preprocess=TEENY)
    text = done.page.read_text("utf-8")
    assert all(word in text for word in words)
    if name == "R50x1@32":
        pixels = torch.from_numpy(np.array(Image.open(picture))).permute(2, 0, 1)[None] / 127.5 - 1
        model, shown = vitral.load(path)[0], embedded(done.page)["images"][0]["maps"]["occlusion"]
        alone, shared = (occlusion(model, pixels, sigmoid=sigmoid).flatten().tolist() for sigmoid in (True, False))
        assert shown == pytest.approx(alone, abs=1e-4)
        assert shown != pytest.approx(shared, abs=1e-2)


def test_figures_and_unreadable_images(tmp_path):
    (tmp_path / "bad.png").write_text("no picture")
    pictures = [paint(tmp_path / "a.png", COLOURS["red"]), tmp_path / "bad.png"]
    model = saved(tmp_path, "ViT-Ti/4@8", depth=1, width=16, heads=2, classes=0)
    done = inspect(model, pictures, output=tmp_path / "a.html", figures=tmp_path / "figures", preprocess=PLAIN)
    assert done.unreadable == (str(tmp_path / "bad.png"),)
    assert f"<td>{tmp_path / 'bad.png'}</td><td>not an image in a known format</td>" in done.page.read_text("utf-8")
    assert {path.name for path in done.figures} == {
        f"{name}.{kind}" for name in ("filters", "positions", "colours", "rollout", "norms") for kind in ("png", "svg")
    } | {"distance.svg"}
    assert all(path.stat().st_size > 500 for path in done.figures)
    assert embedded(done.page)["images"][0]["answers"] == []


def test_attention_distance_is_over_all_images_and_the_page_shows_64(tmp_path):
    """The paper's 128; the distance is that of the whole batch."""
    model = saved(tmp_path, "ViT-Ti/4@8", depth=1, width=16, heads=2, classes=0)
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 256, (8, 8, 3), np.uint8) for _ in range(128)]
    notes = []
    done = inspect(model, images, output=tmp_path / "a.html", preprocess=PLAIN, on_event=notes.append)
    text = done.page.read_text("utf-8")
    assert (done.images, len(embedded(done.page)["images"])) == (64, 64)
    said = [note.text for note in notes if isinstance(note, Note)]
    assert said == ["the page shows the first 64 images; attention distances are over all 128"]
    assert "128 images" in text
    loaded = vitral.load(model)[0]
    pixels = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2) / 127.5 - 1
    (layer,) = mean_attention_distance(loaded, [pixels]).tolist()
    assert all(f"{distance:.1f}" in text for distance in layer)
    (first,) = mean_attention_distance(loaded, [pixels[:64]]).tolist()
    assert layer != first


def test_usage_errors_are_one_sentence(run, pictures, tmp_path):
    picture = pictures / "red" / "0.png"
    (tmp_path / "bad.png").write_text("no picture")
    for images, layers, expected in (
        (picture, [7, 1], "there is no layer 7: the model has 2, counted from 0"),
        (picture, [-1, 1], "there is no layer -1: the model has 2, counted from 0"),
        (tmp_path / "bad.png", [], "none of these images can be read"),
        ([paint(tmp_path / "many" / f"{i}.png", (1, 2, 3)) for i in range(1025)], [], "at most 1,024 images"),
    ):
        with pytest.raises(UserError, match=expected):
            inspect(run, images, output=tmp_path / "a.html", layers=layers)
        assert not (tmp_path / "a.html").exists()


def test_the_command_line_counts_layers_from_zero(run, pictures, tmp_path, command):
    words = ("inspect", run, pictures / "red" / "0.png", "-o", tmp_path / "a.html", "--layers")
    for layer in ("2", "-1"):
        said = command(*words, layer)
        assert (said.code, said.err) == (2, f"vitral: there is no layer {layer}: the model has 2, counted from 0.\n")
    assert command(*words, "1").code == 0


def test_random_preprocessing_is_refused(run, pictures, tmp_path, command):
    drawn = ("--preprocess", "decode|inception_crop(8)")
    said = command("inspect", run, pictures / "red" / "0.png", "-o", tmp_path / "a.html", *drawn)
    assert said.code == 2
    assert "draws at random" in said.err
    said = command("search", run, pictures, "--query", pictures / "red" / "0.png", *drawn)
    assert said.code == 2
    assert "draws at random" in said.err


def test_a_run_has_a_page_of_its_mistakes(run, pictures):
    began = time.process_time()  # of this process: the machine may be busy
    path = write_run_page(run, pictures, device="cpu")
    assert time.process_time() - began < 5
    assert path == run / "page.html"
    text, data = path.read_text("utf-8"), embedded(path)
    result = json.loads((run / "result.json").read_text())
    for title in ("Training curves", "Confusion matrix", "Calibration", "Per-class metrics", "Full recipe"):
        assert title in text
    answers = [(image["truth"][0], *image["answers"][0]) for image in data["images"]]
    wrong = [share for truth, name, share in answers if truth != name]
    shown = re.findall(r"<span><bdi>(\w+)</bdi> → <bdi>(\w+)</bdi>, (\d+)\s%</span>", text)
    assert [(truth, name) for truth, name, _ in shown] == [(truth, name) for truth, name, _ in answers]
    assert [int(share) for *_, share in shown] == pytest.approx([100 * share for *_, share in answers], abs=0.51)
    assert re.search(r'value="evidence" checked', text)
    n = result["metrics"]["n"]
    assert len(wrong) == min(8, n - round(n * result["metrics"]["top1"]))
    assert wrong == sorted(wrong, reverse=True)
    assert [truth != name for truth, name, _ in answers] == sorted(
        (truth != name for truth, name, _ in answers), reverse=True
    )
    steps = len({line["step"] for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())})
    assert all(f"{name} over step" in text for name in ("training loss", "score", "learning rate"))
    loss = group(r'training loss over step.*?<polyline class="s1" points="([^"]*)"', text)
    assert len(loss.split()) == steps


def test_the_most_confident_mistakes_are_those_of_predict(pictures, tmp_path):
    """Of a model that was hardly trained, with a temperature, against `predict` image by image."""
    vitral.train(pictures, model=MODEL, out=tmp_path / "run", set=[*QUICK, "steps=1"], device="cpu")
    model, card = vitral.load(tmp_path / "run")
    card = replace(card, temperature=0.5)
    split = open_data(pictures, held_out=0.0).train
    assert card.preprocess is not None
    done = predict_split(model, split, card.preprocess, batch=4, device="cpu")
    words = (split, done.indices, done.logits, split.labels[done.indices], split.classes, card, card.preprocess)
    rows = vitral.predict((model, card), pictures, top=1).rows
    wrong = [(Path(row.path), row) for row in rows if row.names[0] != Path(row.path).parent.name]
    wrong.sort(key=lambda pair: -pair[1].probabilities[0])
    assert len(wrong) > 4
    found = most_confident_mistakes(*words, most=4)
    assert [one.probability for one in found] == pytest.approx([row.probabilities[0] for _, row in wrong[:4]])
    every = {Path(one.name).parts[-2:]: one for one in most_confident_mistakes(*words)}
    assert set(every) == {path.parts[-2:] for path, _ in wrong}
    for path, row in wrong:
        one = every[path.parts[-2:]]
        assert (one.true, one.predicted) == (path.parent.name, row.names[0])
        assert one.picture.shape == (8, 8, 3)
    bins = reliabilities(done.logits, split.labels[done.indices], card)
    assert bins.raw == reliability(done.logits, split.labels[done.indices])
    assert bins.calibrated == reliability(done.logits, split.labels[done.indices], temperature=0.5)
    assert reliabilities(done.logits, split.labels[done.indices], replace(card, temperature=1.0)).calibrated == ()


def test_a_multi_label_run_shows_the_true_classes(pictures, tmp_path):
    table = tmp_path / "several.jsonl"
    names = {
        path: [path.parent.name, *(["even"] if int(path.stem) % 2 == 0 else [])] for path in pictures.rglob("*.png")
    }
    lines = [
        {"path": str(path), "labels": labels, "split": "test" if int(path.stem) > 3 else "train"}
        for path, labels in names.items()
    ]
    table.write_text("\n".join(map(json.dumps, lines)))
    vitral.train(table, model=MODEL, out=tmp_path / "run", set=[*QUICK, "steps=4"], device="cpu")
    path = write_run_page(tmp_path / "run", table, device="cpu")
    text, images = path.read_text("utf-8"), embedded(path)["images"]
    truths = {tuple(sorted(image["truth"])) for image in images}
    assert truths == {tuple(sorted(labels)) for path, labels in names.items() if int(path.stem) > 3}
    assert "6 of 6 held-out images. A ✓ marks" in text
    assert "Average precision: " in text
    assert "Recall: " not in text


def test_a_sigmoid_run_is_calibrated_per_class(pictures, tmp_path):
    """One label per image, but trained with a sigmoid loss: its confidences are sigmoid outputs."""
    words = [*QUICK, "steps=4", "loss=sigmoid", "regularization.label_smoothing=0"]
    vitral.train(pictures, model=MODEL, out=tmp_path / "run", set=words, device="cpu")
    path = write_run_page(tmp_path / "run", pictures, device="cpu")
    text = path.read_text("utf-8")
    assert "by itself (sigmoid)" in text
    assert "Predictions (sigmoid, per class)" in text
    images = embedded(path)["images"]
    assert len(images) == json.loads((tmp_path / "run" / "result.json").read_text())["metrics"]["n"] <= 8
    rows = [(image["answers"][0][1], image["answers"][0][0] == image["truth"][0]) for image in images]
    bins = np.digitize([sure for sure, _ in rows], np.linspace(0, 1, 16)[1:-1], right=True)
    gaps = [
        abs(sum(sure - right for (sure, right), own in zip(rows, bins, strict=True) if own == i)) for i in range(15)
    ]
    said = group(r"raw \(sigmoid of the logits\)</td><td>([\d.]+)\s%", text)
    assert float(said) / 100 == pytest.approx(sum(gaps) / len(rows), abs=6e-4)
    evaluated = vitral.evaluate(tmp_path / "run", pictures, device="cpu")
    for metrics in (json.loads((tmp_path / "run" / "result.json").read_text())["metrics"], evaluated.metrics):
        assert metrics["ece"] == pytest.approx(sum(gaps) / len(rows), abs=1e-5)
    assert evaluated.temperature is None  # it would be that of a softmax
    for image in images:
        key = Path(image["name"])
        row = vitral.predict(tmp_path / "run", key if key.is_absolute() else pictures / key).rows[0]
        assert [share for _, share in image["answers"]] == pytest.approx(row.probabilities, abs=1e-4)


def test_the_page_of_a_run_counts_the_images_that_can_be_read(pictures, tmp_path):
    shutil.copytree(pictures, tmp_path / "data/train")
    shutil.copytree(pictures, tmp_path / "data/test")
    next((tmp_path / "data/test").rglob("*.png")).write_bytes(b"no picture")
    done = vitral.train(tmp_path / "data", model=MODEL, out=tmp_path / "run", set=[*QUICK, "steps=4"], device="cpu")
    text = write_run_page(tmp_path / "run", tmp_path / "data", device="cpu").read_text("utf-8")
    assert {int(n) for n in re.findall(r"(?:of|these) (\d+) (?:held-out )?images", text)} == {
        done.results[0].metrics["n"]
    }
    (left_out,) = done.results[0].unreadable
    assert f"<td>{left_out['path']}</td><td>{left_out['reason']}</td>" in text


def test_a_run_without_classes_shows_losses_not_percents(pictures, tmp_path):
    words = ["objective=masked", "steps=4", "batch=6", "evaluate_every=2", "data.mixup=0", "schedule.warmup=0", *SHAPE]
    result = vitral.train(pictures, model=MODEL, out=tmp_path / "run", set=words, device="cpu").results[0]
    path = write_run_page(tmp_path / "run", pictures, device="cpu")
    text, data = path.read_text("utf-8"), embedded(path)
    assert f"<dt>held-out loss</dt><dd>{result.metrics['masked_loss']:.3f}</dd>" in text
    assert not re.search(r"-\d[\d.]* ?%", text)
    assert "Examples" in text
    assert all(image["answers"] == image["truth"] == [] for image in data["images"])
    assert [len(image["maps"]["rollout"]) for image in data["images"]] == [4] * len(data["images"])


def test_search_finds_the_nearest_features(run, pictures, tmp_path):
    query = pictures / "green" / "2.png"
    index = tmp_path / "index.npz"
    found = search(run, pictures, query=query, top=3, index=index)
    paths, features = vitral.embed(run, pictures)
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    own = paths.index(str(query))
    order = [i for i in np.argsort(-(unit @ unit[own]), kind="stable") if i != own][:3]
    assert [one.path for one in found] == [paths[i] for i in order]
    assert [one.score for one in found] == pytest.approx((unit @ unit[own])[order], abs=1e-5)
    again = search(run, pictures, query=query, top=3, index=index)  # from the file: sums may round otherwise
    assert [one.path for one in again] == [one.path for one in found]
    assert [one.score for one in again] == pytest.approx([one.score for one in found], abs=1e-6)
    other = saved(tmp_path, MODEL, depth=2, width=16, heads=2)
    vitral.embed(run, pictures, output=tmp_path / "embedded.npz")
    for source, folder, how, file in (
        (run, pictures / "red", "", index),
        (other, pictures, PLAIN, index),
        (run, pictures, "decode|resize(12)|value_range(-1, 1)", index),
        (run, pictures, "", tmp_path / "embedded.npz"),
    ):
        with pytest.raises(UserError, match="not the index of these images, as they are now, by this model"):
            search(source, folder, query=query, index=file, preprocess=how)
    with pytest.raises(UserError, match="contains 18 images: name the one"):
        search(run, pictures, query=pictures)


def test_an_index_knows_when_its_folder_has_changed(run, tmp_path):
    folder, index = colour_folder(tmp_path / "pictures", images=2), tmp_path / "index.npz"
    words = {"query": folder / "red" / "0.png", "index": index, "top": 9}
    assert len(search(run, folder, **words)) == 5
    paint(folder / "red" / "new.png", COLOURS["red"], 77)
    with pytest.raises(UserError, match="remove it"):
        search(run, folder, **words)
    index.unlink()
    assert len(search(run, folder, **words)) == 6


def test_search_finds_the_nearest_patches(run, pictures):
    query = pictures / "green" / "2.png"
    found = search(run, pictures, query=query, patch=(1, 0), top=4)
    assert len(found) == 4
    assert all(one.path != str(query) and one.row is not None for one in found)
    assert [one.score for one in found] == sorted((one.score for one in found), reverse=True)
    with pytest.raises(UserError, match="2 rows and 2 columns"):
        search(run, pictures, query=query, patch=(0, 2))


@pytest.mark.parametrize("patch", [None, (1, 0)])
def test_a_search_reports_its_progress(run, pictures, tmp_path, patch):
    folder, heard = tmp_path / "more", []
    shutil.copytree(pictures, folder)
    for number in range(16):  # a whole batch that cannot be read, the first one
        (folder / "blue" / f"+{number}.png").write_bytes(b"no picture")
    words = {"query": pictures / "green" / "2.png", "patch": patch, "index": tmp_path / "index.npz"}

    def progress(event: Any) -> None:
        heard.append((event.done, event.total))

    found = search(run, folder, **words, on_event=progress)
    assert heard == [(16, 34), (32, 34), (34, 34)]
    again = search(run, folder, **words, on_event=progress)
    assert [one.path for one in again] == [one.path for one in found]
    assert len(heard) == 3  # the second time nothing is computed


@pytest.mark.parametrize("patch", [None, (1, 0)])
def test_a_folder_without_an_image_has_no_neighbours(run, pictures, tmp_path, patch):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "bad.png").write_bytes(b"no picture")
    index = tmp_path / "index.npz"
    with pytest.raises(UserError, match=r"none of these images can be read, .*bad\.png first"):
        search(run, tmp_path / "folder", query=pictures / "red" / "0.png", patch=patch, index=index)
    assert not index.exists()


def test_inspect_and_search_commands(run, pictures, tmp_path, monkeypatch, capsys):
    command = Command(monkeypatch, capsys)
    target = tmp_path / "a.html"
    said = command("inspect", run, pictures / "red" / "0.png", "-o", target, "--layers", "1", "--json")
    assert said.code == 0
    assert json.loads(said.out)["bytes"] == target.stat().st_size
    assert list(embedded(target)["images"][0]["rows"]) == ["0", "1"]
    assert "open it in a browser" in command("inspect", run, "-o", target).out
    words = ("search", run, pictures, "--query", pictures / "red" / "0.png", "--top", "2")
    (first, _) = json.loads(command(*words, "--patch", "0", "1", "--json").out)["neighbours"]
    assert first["row"] in (0, 1)
    assert "similarity" in command(*words).out
    monkeypatch.setenv("FORCE_COLOR", "1")  # for rich, a terminal
    assert "18 of 18 images" in command(*words, "--patch", "0", "1").err


def test_real_weights_make_a_page_in_time(assets, tmp_path):
    """A real model and eight photographs stay within the limits of time and size."""
    data = assets / "data"
    weights = data / "vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors"
    photos = [next((data / "imagenet_val_1000" / f"{label:03d}").iterdir()) for label in range(281, 289)]
    began = time.process_time()  # of this process: the machine may be busy
    how = {
        "classes": data / "imagenet_classes.tsv",
        "preprocess": "decode|resize_small(248, bicubic)|central_crop(224)|value_range(-1, 1)",
    }
    done = inspect(weights, photos, output=tmp_path / "a.html", device="cpu", **how)
    assert time.process_time() - began < 30
    assert done.bytes < 5e6
    names = [image["answers"][0][0] for image in embedded(done.page)["images"]]
    assert sum("cat" in name or name in ("tabby", "cougar", "lynx", "leopard") for name in names) >= 5


def test_python_writes_the_page_of_data_in_memory(pictures, tmp_path):
    rows = [(path, path.parent.name) for path in sorted(pictures.rglob("*.png"))]
    done = vitral.train(rows, model=MODEL, out=tmp_path / "run", set=[*QUICK, "steps=4"], device="cpu")
    path = done.write_page(rows, device="cpu")
    assert path == tmp_path / "run" / "page.html"
    shown = embedded(path)["images"]
    assert len(shown) == done.results[0].metrics["n"]
    assert {image["truth"][0] for image in shown} <= {name for _, name in rows}
    with pytest.raises(vitral.UserError, match=r"was scored on other images than those of .*: pass its own data"):
        done.write_page(rows[::2])


def test_a_page_shows_the_images_that_were_scored(run, pictures, tmp_path):
    """Others may have the same names."""
    moved = Path(shutil.copytree(pictures, tmp_path / "moved"))
    assert write_run_page(run, moved, device="cpu").read_text("utf-8").count("held-out") > 1
    for path in moved.rglob("*.png"):
        Image.new("RGB", (8, 8)).save(path)
    with pytest.raises(vitral.UserError, match=r"was scored on other images than those of .*moved: pass its own data"):
        write_run_page(run, moved, device="cpu")


def test_a_module_of_ones_own_and_folds_have_no_page(pictures, tmp_path):
    class Mean(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = torch.nn.Linear(3, 3)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.out(images.mean((2, 3)))

    words = [word for word in QUICK if not word.startswith("shape.")]
    own = vitral.train(pictures, model=Mean(), out=tmp_path / "own", set=[*words, "image=8", "steps=1"], device="cpu")
    with pytest.raises(vitral.UserError, match=r"plot your module's metrics\.jsonl"):
        own.write_page(pictures)
    folds = vitral.train(pictures, model=MODEL, out=tmp_path / "folds", folds=2, set=[*QUICK, "steps=1"], device="cpu")
    with pytest.raises(vitral.UserError, match=r"their scores are in .*folds\.json\.$"):
        folds.write_page(pictures)
