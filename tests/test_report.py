"""Pages: charts that show their numbers, bytes that come back as weights, and files that need nothing else."""

from __future__ import annotations

import base64
import io
import json
import re
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from journeys import COLOURS, MODEL, QUICK, Command, colour_folder, paint
from PIL import Image

import vitral
from vitral import api
from vitral.api.inspection import inspect, write_run_page
from vitral.api.neighbours import search
from vitral.checkpoints.card import Card
from vitral.errors import UserError
from vitral.evaluation.calibration import reliability
from vitral.inspection.attention import attention_maps, rollout_maps
from vitral.inspection.looks import look_at
from vitral.models.capture import capture
from vitral.report import charts
from vitral.report.page import Section, page
from vitral.report.viewer import packed, plan_layers

PLAIN = "decode|resize(8)|value_range(-1, 1)"
TEENY = "decode|resize(32)|value_range(-1, 1)"


def group(pattern: str, text: str) -> str:
    """The group of the first match; there must be one."""
    match = re.search(pattern, text, re.S)
    assert match is not None
    return match[1]


def parsed(text: str) -> Any:
    return ET.fromstring(text)


def embedded(path: Path) -> dict:
    """What the page's script reads."""
    text = path.read_text("utf-8")
    return json.loads(group(r'<script type="application/json" id="data">(.*?)</script>', text))


def unpacked(part: dict, n: int) -> np.ndarray:
    """The inverse of `packed`, as the page's script does it: (rows, n)"""
    steps = np.frombuffer(base64.b64decode(part["steps"]), np.uint8).reshape(-1, n)
    return steps / 255 * np.frombuffer(base64.b64decode(part["high"]), "<f4")[:, None]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    return colour_folder(tmp_path_factory.mktemp("pictures"), images=6)


@pytest.fixture(scope="module")
def run(pictures, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    vitral.train(pictures, model=MODEL, out=folder, overrides=[*QUICK, "steps=12"], device="cpu")
    return folder


def saved(tmp_path: Path, name: str, **shape) -> Path:
    torch.manual_seed(0)
    model = api.create(name, **shape)
    path = tmp_path / "model.safetensors"
    api.save(model, Card(model.config), path)
    return path


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6), st.integers(2, 9))
def test_ticks_are_round_numbers_inside(low, span, most):
    found = charts.ticks(low, low + span, most)
    assert len(found) <= most + 1
    assert all(low - 1e-6 * span <= value <= low + span + 1e-6 * span for value in found)
    steps = np.diff(found)
    assert len(found) >= 1
    assert np.allclose(steps, steps[:1], rtol=1e-3) if len(steps) else True


@pytest.mark.parametrize("points", [[(0, 1.0), (5, 3.0), (10, 2.0)], [(1, 5.0)], [(0, 0.0), (1, 0.0)]])
def test_a_line_goes_through_its_points(points):
    svg = parsed(charts.line_chart({"a <b>": points}, x="step", y="loss"))
    places = [tuple(map(float, pair.split(","))) for pair in svg.find("polyline").get("points").split()]
    assert len(places) == len(points)
    heights = [-y for _, y in places]
    assert np.argsort(heights).tolist() == np.argsort([y for _, y in points]).tolist()
    assert all(charts.LEFT <= x <= charts.WIDTH and 0 <= y <= charts.HEIGHT for x, y in places)


def test_a_long_line_is_smoothed_without_a_shift():
    points = [(i, float(i)) for i in range(1000)]
    smooth = charts.running_mean(points)
    assert len(smooth) < 60
    assert max(abs(x - y) for x, y in smooth) <= 1
    assert charts.running_mean(points[:20]) == points[:20]


def test_reliability_bars_say_their_numbers():
    rng = np.random.default_rng(0)
    bins = reliability(rng.normal(size=(200, 4)), rng.integers(0, 4, 200))
    svg = parsed(charts.reliability_chart(bins))
    bars = svg.findall("rect")
    filled = [row for row in bins if row.count]
    assert len(bars) == len(filled)
    inner = charts.HEIGHT - charts.TOP - charts.BOTTOM
    for bar, row in zip(bars, filled, strict=True):
        assert float(bar.get("height")) == pytest.approx(row.accuracy * inner, abs=0.06)
        assert f"{row.count:,} images" in bar.find("title").text


def test_confusions_are_counted_cell_by_cell_and_names_are_text():
    matrix = np.array([[3, 1], [0, 2]])
    table = parsed(charts.confusion_table(matrix, ["<b>", "dog & cat"])).find("table")
    rows = table.findall("tr")
    assert [cell.find("span").text for cell in rows[0].findall("th")] == ["<b>", "dog & cat"]
    assert [[cell.text or "" for cell in row.findall("td")] for row in rows[1:]] == [["3", "1"], ["", "2"]]
    assert charts.confusion_table(np.eye(40, dtype=int), [str(i) for i in range(40)]).startswith("<img")


def test_heat_goes_from_dark_to_bright():
    shades = charts.heat(np.linspace(0, 1, 64)[None])[0].astype(int)
    light = shades @ [299, 587, 114]
    assert (np.diff(light) > 0).all()
    assert shades[0].tolist() == charts.DARK_TO_BRIGHT[0].tolist()
    assert shades[-1].tolist() == charts.DARK_TO_BRIGHT[-1].tolist()


def test_tiles_keep_their_order_and_nothing_lies_between():
    tiles = np.random.default_rng(0).integers(0, 256, (5, 2, 3, 3), dtype=np.uint8)
    sheet = charts.tiled(tiles, 3, 60)
    seen = sheet[sheet[..., 3] == 255][:, :3]
    assert sorted(map(tuple, np.unique(seen, axis=0))) == sorted(map(tuple, np.unique(tiles.reshape(-1, 3), axis=0)))
    assert sheet[0, 0, :3].tolist() == tiles[0, 0, 0].tolist()
    assert sheet[-1, -1, 3] == 0


def test_pictures_come_back_from_their_uri():
    image = np.random.default_rng(0).integers(0, 256, (5, 4, 3), dtype=np.uint8)
    for uri, expected in (
        (charts.photo_uri(image), image),
        (charts.photo_uri(image[:, :, :1]), image[:, :, :1].repeat(3, 2)),
        (charts.photo_uri(np.full((2, 2, 5), 9, np.uint8)), np.full((2, 2, 3), 9)),
    ):
        data = base64.b64decode(uri.partition(",")[2])
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(data))), expected)


def test_packed_rows_are_within_half_a_step():
    rows = np.random.default_rng(0).dirichlet(np.full(9, 0.3), (2, 4)).astype(np.float32)
    back = unpacked(packed(rows), 9).reshape(rows.shape)
    assert (np.abs(back - rows) <= rows.max(-1, keepdims=True) / 510 * 1.0001).all()
    assert np.array_equal(unpacked(packed(np.zeros((1, 3))), 3), np.zeros((1, 3)))


@given(st.integers(1, 32), st.integers(1, 16), st.integers(1, 900), st.integers(1, 64), st.integers(0, 10**8))
def test_chosen_layers_fit_into_the_budget(depth, heads, patches, images, budget):
    plan = plan_layers(depth, heads, patches, images, budget=budget)
    one = images * (4 * -(-patches * patches // 3) + 4 * -(-4 * patches // 3))
    assert (heads * len(plan.headed) + len(plan.averaged)) * one <= budget
    assert not {*plan.headed} & {*plan.averaged}
    assert {*plan.headed, *plan.averaged} <= set(range(depth))
    if budget >= depth * heads * one:
        assert plan.headed == tuple(range(depth))
    asked = plan_layers(depth, heads, patches, images, asked=[depth - 1], budget=budget)
    assert asked.headed == (depth - 1,)


def test_eight_images_of_a_base_model_have_every_layer_and_the_heads_of_the_last():
    plan = plan_layers(12, 12, 196, 8)
    assert 11 in plan.headed
    assert {*plan.headed, *plan.averaged} == set(range(12))


def test_text_cannot_leave_its_place():
    html = page("<i>", "", [Section("a", "</script>", "", "")], {"name": "</script><b>"})
    assert "<i>" not in html
    assert html.count("</script>") == 2
    assert json.loads(group(r'id="data">(.*?)</script>', html)) == {"name": "</script><b>"}


@pytest.mark.parametrize("pool", ["token", "mean", "map"])
def test_a_look_holds_the_attention_that_others_compute(pool):
    torch.manual_seed(0)
    shape = {"depth": 3, "width": 16, "heads": 2, "mlp": 32, "classes": 5, "pool": pool, "registers": 2}
    model: Any = api.create("ViT-Ti/4@8", **shape, class_token=pool == "token").eval()
    images = torch.randn(2, 3, 8, 12)
    looks = look_at(model, images, headed=[2], averaged=[0])
    first = model.config.prefix
    with capture(model, rows="all") as seen, torch.inference_mode():
        logits = model(images)
    for i, look in enumerate(looks):
        np.testing.assert_allclose(look.logits, logits[i], atol=1e-5)
        np.testing.assert_allclose(look.rows[2], seen[2][i, :, first:, first:], atol=1e-6)
        np.testing.assert_allclose(look.rows[0][0], seen[0][i].mean(0)[first:, first:], atol=1e-6)
        assert set(look.rows) == {0, 2}
        np.testing.assert_allclose(look.maps["rollout"], rollout_maps(model, images)[i], atol=1e-6)
        assert look.pooled is not None
        if pool != "map":
            for layer in range(3):
                expected = attention_maps(model, images, layer=layer)[i].flatten(1)
                np.testing.assert_allclose(look.pooled[layer], expected, atol=1e-6)


def test_an_axial_block_is_one_layer():
    torch.manual_seed(0)
    model = api.create("Axial-ViT-B/4@8", depth=2, width=16, heads=2, mlp=32, classes=3).eval()
    images = torch.randn(1, 3, 8, 12)
    (look,) = look_at(model, images, headed=[1], averaged=[0])
    assert look.pooled is not None
    assert look.pooled.shape == (2, 2, 6)
    np.testing.assert_allclose(look.rows[1].sum(-1), 1, atol=1e-5)
    np.testing.assert_allclose(look.rows[1].mean(1), look.pooled[1], atol=1e-6)
    np.testing.assert_allclose(look.pooled[1], attention_maps(model, images, layer=1)[0].flatten(1), atol=1e-6)


def test_a_page_needs_nothing_else(run, pictures, tmp_path):
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


def test_a_model_alone_has_a_page(tmp_path):
    done = inspect(saved(tmp_path, "ViT-Ti/4@8", depth=1, width=16, heads=2), output=tmp_path / "a.html")
    assert (done.images, done.unreadable, done.figures) == (0, (), ())
    text = done.page.read_text("utf-8")
    assert "What it has learned" in text
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
    picture = paint(tmp_path / "a.png", COLOURS["red"], side=32)
    done = inspect(saved(tmp_path, name, **shape), picture, output=tmp_path / "a.html", preprocess=TEENY)
    text = done.page.read_text("utf-8")
    assert all(word in text for word in words)


def test_figures_and_what_cannot_be_read(tmp_path):
    (tmp_path / "bad.png").write_text("no picture")
    pictures = [paint(tmp_path / "a.png", COLOURS["red"]), tmp_path / "bad.png"]
    model = saved(tmp_path, "ViT-Ti/4@8", depth=1, width=16, heads=2, classes=0)
    done = inspect(model, pictures, output=tmp_path / "a.html", figures=tmp_path / "figures", preprocess=PLAIN)
    assert done.unreadable == (str(tmp_path / "bad.png"),)
    assert {path.name for path in done.figures} == {
        f"{name}.{kind}"
        for name in ("filters", "positions", "distance", "colours", "rollout", "norms")
        for kind in ("png", "svg")
    }
    assert all(path.stat().st_size > 500 for path in done.figures)
    assert embedded(done.page)["images"][0]["answers"] == []


def test_mistakes_of_the_user_are_one_sentence(run, pictures, tmp_path):
    picture = pictures / "red" / "0.png"
    (tmp_path / "bad.png").write_text("no picture")
    for images, layers, expected in (
        (picture, [7], "there is no layer 8"),
        (tmp_path / "bad.png", [], "none of these images can be read"),
        ([paint(tmp_path / "many" / f"{i}.png", (1, 2, 3)) for i in range(65)], [], "at most 64 images"),
    ):
        with pytest.raises(UserError, match=expected):
            inspect(run, images, output=tmp_path / "a.html", layers=layers)
        assert not (tmp_path / "a.html").exists()


def test_a_run_has_a_page_of_its_mistakes(run, pictures):
    began = time.perf_counter()
    path = write_run_page(run, pictures, device="cpu")
    assert time.perf_counter() - began < 5
    assert path == run / "page.html"
    text, data = path.read_text("utf-8"), embedded(path)
    result = json.loads((run / "result.json").read_text())
    for title in ("How it learned", "What it confuses", "Does it know when it knows?", "Class by class", "The recipe"):
        assert title in text
    answers = [(image["truth"], *image["answers"][0]) for image in data["images"]]
    wrong = [share for truth, name, share in answers if truth != name]
    n = result["metrics"]["n"]
    assert len(wrong) == min(8, n - round(n * result["metrics"]["top1"]))
    assert wrong == sorted(wrong, reverse=True)
    assert [truth != name for truth, name, _ in answers] == sorted(
        (truth != name for truth, name, _ in answers), reverse=True
    )
    steps = len({line["step"] for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())})
    loss = group(r'training loss over step.*?<polyline class="s1" points="([^"]*)"', text)
    assert len(loss.split()) == steps


def test_what_looks_alike_is_found(run, pictures, tmp_path):
    query = pictures / "green" / "2.png"
    index = tmp_path / "index.npz"
    found = search(run, pictures, query=query, top=3, index=index)
    paths, features = vitral.embed(run, pictures)
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    own = paths.index(str(query))
    order = [i for i in np.argsort(-(unit @ unit[own]), kind="stable") if i != own][:3]
    assert [one.path for one in found] == [paths[i] for i in order]
    assert [one.score for one in found] == pytest.approx((unit @ unit[own])[order], abs=1e-5)
    assert search(run, pictures, query=query, top=3, index=index) == found
    with pytest.raises(UserError, match="index of other images"):
        search(run, pictures / "red", query=query, index=index)


def test_patches_that_look_alike_are_found(run, pictures):
    query = pictures / "green" / "2.png"
    found = search(run, pictures, query=query, patch=(1, 0), top=4)
    assert len(found) == 4
    assert all(one.path != str(query) and one.row is not None for one in found)
    assert [one.score for one in found] == sorted((one.score for one in found), reverse=True)
    with pytest.raises(UserError, match="2 rows and 2 columns"):
        search(run, pictures, query=query, patch=(0, 2))


def test_the_verbs(run, pictures, tmp_path, monkeypatch, capsys):
    command = Command(monkeypatch, capsys)
    target = tmp_path / "a.html"
    said = command("inspect", run, pictures / "red" / "0.png", "-o", target, "--layers", "2", "--json")
    assert said.code == 0
    assert json.loads(said.out)["bytes"] == target.stat().st_size
    assert list(embedded(target)["images"][0]["rows"]) == ["0", "1"]
    assert "open it in a browser" in command("inspect", run, "-o", target).out
    words = ("search", run, pictures, "--query", pictures / "red" / "0.png", "--top", "2")
    (first, _) = json.loads(command(*words, "--patch", "1", "2", "--json").out)
    assert first["row"] in (1, 2)
    assert "similarity" in command(*words).out


def test_real_weights_make_a_page_in_time(assets, tmp_path):
    """Slower by a real model, eight photographs: what the page promises about time and size."""
    data = assets / "data"
    weights = data / "vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors"
    photos = [next((data / "imagenet_val_1000" / f"{label:03d}").iterdir()) for label in range(281, 289)]
    began = time.perf_counter()
    how = {
        "classes": data / "imagenet_classes.tsv",
        "preprocess": "decode|resize_small(248, bicubic)|central_crop(224)|value_range(-1, 1)",
    }
    done = inspect(weights, photos, output=tmp_path / "a.html", device="cpu", **how)
    assert time.perf_counter() - began < 30
    assert done.bytes < 15e6
    names = [image["answers"][0][0] for image in embedded(done.page)["images"]]
    assert sum("cat" in name or name in ("tabby", "cougar", "lynx", "leopard") for name in names) >= 5
