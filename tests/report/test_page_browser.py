"""The page in a real browser: it loads from disk without console messages and reacts to sliders, clicks and keys."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from journeys import COLOURS, MODEL, QUICK, colour_folder, paint

import vitral
from vitral.api.inspection import inspect, write_run_page
from vitral.checkpoints.card import Card
from vitral.data.images import UnreadableImage, decode, encode_png
from vitral.evaluation.calibration import ReliabilityBin
from vitral.models.capture import capture
from vitral.report.evaluation import Mistake, Reliability, evaluation_page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium"),
    pytest.mark.xdist_group("browser"),  # one browser, however many workers there are
]
sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")

PREPROCESS = "decode|resize(48)|value_range(-1, 1)"
WIDE, NARROW = (1280, 900), (390, 800)
# Elements that reach beyond the window, unless something around them scrolls.
OUTSIDE = """() => [...document.body.querySelectorAll('*')].filter(element => {
  const box = element.getBoundingClientRect();
  if (!box.width || (box.right <= innerWidth + 1 && box.left >= -1) || element.matches('.skip, input')) return false;
  return !element.closest('.scroll');
}).map(element => element.outerHTML.slice(0, 120))"""
# What scrolls sideways: its label, whether it has more, whether its edge fades, and the height of its scrollbar.
SCROLLING = """() => [...document.querySelectorAll('.scroll')].filter(box => box.scrollWidth > box.clientWidth + 1)
  .map(box => [box.ariaLabel, box.classList.contains('more-right'), box.offsetHeight - box.clientHeight])"""
# WCAG contrast of each text with what is painted behind it, where it is below 4.5.
PALE = """() => {
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const paint = colours => {
    canvas.clearRect(0, 0, 1, 1);
    for (const colour of colours) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
    const light = [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map(value => value / 255)
      .map(value => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4));
    return 0.2126 * light[0] + 0.7152 * light[1] + 0.0722 * light[2];
  };
  const pale = [];
  for (const element of document.body.querySelectorAll('*')) {
    const own = [...element.childNodes].some(node => node.nodeType === 3 && node.data.trim());
    if (!own || !element.getClientRects().length || element.closest('script, style, svg')) continue;
    const behind = [];
    for (let up = element; up; up = up.parentElement) behind.unshift(getComputedStyle(up).backgroundColor);
    const ground = paint(behind), ink = paint([...behind, getComputedStyle(element).color]);
    const contrast = (Math.max(ground, ink) + 0.05) / (Math.min(ground, ink) + 0.05);
    if (contrast < 4.5) pale.push(`${contrast.toFixed(2)} ${element.outerHTML.slice(0, 100)}`);
  }
  return pale;
}"""


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as play:
        # Scrollbars are a part of what a reader sees; Playwright hides them by default.
        opened = play.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"], ignore_default_args=["--hide-scrollbars"]
        )
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def shots(tmp_path_factory) -> Path:
    """Where screenshots are kept for whoever wants to look at them."""
    folder = Path(os.environ.get("VITRAL_ARTEFACTS") or tmp_path_factory.mktemp("screenshots"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def inspected(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("inspected")
    torch.manual_seed(0)
    model: Any = vitral.create("ViT-Ti/8@48", depth=3, width=24, heads=3, mlp=48, classes=4)
    torch.nn.init.normal_(model.head.output.weight)
    for block in model.blocks:  # fresh weights look everywhere alike, and a test wants to see a change
        block.attention.qkv.weight.data *= 8
    vitral.save(model, folder / "model.safetensors", Card(model.config))
    y, x = np.mgrid[:48, :48]
    pictures = []
    for i in range(2):
        pixels = np.stack([5 * x, 5 * y, 127 + 100 * np.sin((x + y) / (3 + i))], axis=-1).clip(0, 255)
        pictures.append(folder / f"{i}.png")
        pictures[-1].write_bytes(encode_png(pixels.astype(np.uint8)))
    inspect(folder / "model.safetensors", pictures, output=folder / "page.html", preprocess=PREPROCESS, device="cpu")
    return folder / "page.html"


class Tab:
    """A page in the browser, with its console messages, errors and network requests."""

    def __init__(self, browser, path, size=WIDE, scheme="light"):
        self.context = browser.new_context(
            viewport={"width": size[0], "height": size[1]}, color_scheme=scheme, offline=True
        )
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self._asked(request.url, path))
        self.page.goto(path.as_uri())

    def _asked(self, url, path):
        if not url.startswith("data:") and url != path.as_uri():
            self.complaints.append(url)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.context.close()
        assert self.complaints == []

    def pixels(self, canvas="stage"):
        return self.page.evaluate("id => document.getElementById(id).toDataURL()", canvas)

    def says(self):
        return self.page.locator("#says").inner_text()

    def slide(self, name, value):
        self.page.locator(f"#{name}").fill(str(value))


def test_sliders_and_pictures_change_what_is_shown(browser, inspected):
    with Tab(browser, inspected) as tab:
        seen = {tab.pixels()}
        for name, value in (("layer", 1), ("head", 1), ("head", 3), ("strength", 20)):
            tab.slide(name, value)
            assert tab.pixels() not in seen
            seen.add(tab.pixels())
        assert tab.says().startswith("Layer 1, head 3: the class token attends most to row")
        assert "3 of 3" in tab.page.locator("#head-said").inner_text()
        tab.page.locator("#smooth").check()
        assert tab.pixels() not in seen
        before = tab.pixels("overview")
        tab.page.locator("label.thumb").nth(1).click()
        assert tab.pixels() not in seen
        assert tab.pixels("overview") != before


def test_hovering_and_clicking_a_patch_shows_its_attention(browser, inspected):
    with Tab(browser, inspected) as tab:
        stage = tab.page.locator("#stage")
        box = stage.bounding_box()
        alone = tab.pixels()
        stage.hover(position={"x": box["width"] * 0.9, "y": box["height"] * 0.1})
        assert "the patch at row 1, column 6" in tab.says()
        tab.page.mouse.move(1, 1)
        assert tab.pixels() == alone
        stage.click(position={"x": box["width"] * 0.1, "y": box["height"] * 0.4})
        tab.page.mouse.move(1, 1)
        kept = tab.pixels()
        assert kept != alone
        assert "the patch at row 3, column 1" in tab.says()
        tab.page.locator("#pooled").click()
        assert tab.pixels() == alone


def test_weights_on_the_screen_are_the_models(browser, inspected):
    """What the sentence says about a patch is computed again from the weights."""
    model, _ = vitral.load(inspected.parent / "model.safetensors")
    pixels = torch.from_numpy(decode((inspected.parent / "0.png").read_bytes())).permute(2, 0, 1)[None]
    with capture(model, layers=[1], rows="all") as seen, torch.inference_mode():
        model(pixels.float() / 127.5 - 1)
    row = seen[1][0, 2, 1 + 8, 1:]  # head 3, the patch at row 2, column 3 of 6 by 6
    best = int(row.argmax())
    with Tab(browser, inspected) as tab:
        tab.slide("layer", 2)
        tab.slide("head", 3)
        box = tab.page.locator("#stage").bounding_box()
        tab.page.locator("#stage").click(position={"x": box["width"] * 2.5 / 6, "y": box["height"] * 1.5 / 6})
        said = (
            f"Layer 2, head 3: the patch at row 2, column 3 attends most to row {best // 6 + 1}, column {best % 6 + 1}"
        )
        assert tab.says().startswith(said)


def test_the_keyboard_is_enough(browser, inspected):
    with Tab(browser, inspected) as tab:
        tab.page.locator("#stage").focus()
        alone = tab.pixels()
        tab.page.keyboard.press("ArrowRight")
        assert "row 4, column 5" in tab.says()
        for _ in range(9):
            tab.page.keyboard.press("ArrowUp")
        assert "row 1, column 5" in tab.says()
        tab.page.keyboard.press("Escape")
        assert tab.pixels() == alone
        tab.page.locator("#layer").focus()
        tab.page.keyboard.press("Home")
        assert tab.says().startswith("Layer 1,")
        tab.page.locator("input[name=mode]:checked").focus()
        tab.page.keyboard.press("ArrowRight")
        assert tab.says().startswith("Highest at row")
        names = tab.page.evaluate(
            "[...document.querySelectorAll('input, button, canvas[tabindex]')].filter("
            "e => !(e.labels && e.labels.length) && !e.ariaLabel && !e.textContent.trim()).map(e => e.outerHTML)"
        )
        assert names == []


@pytest.mark.parametrize("mode", ["rollout", "evidence", "norms", "colours"])
def test_every_map_can_be_seen(browser, inspected, mode):
    with Tab(browser, inspected) as tab:
        before = tab.pixels()
        tab.page.locator(f"input[value={mode}] + span").click()
        assert tab.pixels() != before
        assert tab.page.locator("#attention-controls").is_hidden()


def test_the_overview_chooses_a_layer_and_a_head(browser, inspected):
    with Tab(browser, inspected) as tab:
        box = tab.page.locator("#overview").bounding_box()
        tab.page.locator("#overview").click(position={"x": box["width"] * 0.1, "y": box["height"] * 0.9})
        assert tab.says().startswith("Layer 1, head 3:")
        assert tab.page.locator("#layer").input_value() == "1"


def test_the_patch_below_the_pointer_is_found(browser, tmp_path):
    """A picture taller than the window, with pixels at its edges that fill no patch: 150 x 31 for 10 x 2 of 14."""
    model = vitral.create("ViT-Ti/14@150x31", depth=1, width=24, heads=3, mlp=48, classes=4)
    vitral.save(model, tmp_path / "model.safetensors", Card(model.config))
    (tmp_path / "a.png").write_bytes(encode_png(np.zeros((150, 31, 3), np.uint8)))
    words = {"output": tmp_path / "a.html", "preprocess": "decode|resize(150, 31)|value_range(-1, 1)"}
    inspect(tmp_path / "model.safetensors", tmp_path / "a.png", device="cpu", **words)
    with Tab(browser, tmp_path / "a.html") as tab:
        box = tab.page.locator("#stage").bounding_box()
        assert box["height"] / box["width"] == pytest.approx(150 / 31, rel=0.01)
        stage = tab.page.locator("#stage")
        stage.hover(position={"x": box["width"] * 27 / 31, "y": box["height"] * 139 / 150})
        assert "the patch at row 10, column 2" in tab.says()
        stage.hover(position={"x": box["width"] * 15 / 31, "y": box["height"] * 1 / 150})
        assert "the patch at row 1, column 2" in tab.says()
        for x, y in ((30, 70), (10, 145)):  # in no patch
            stage.hover(position={"x": box["width"] * x / 31, "y": box["height"] * y / 150})
            assert "the class token" in tab.says()


def test_names_stay_text(browser, tmp_path):
    """Markup, quotes, a turn from right to left, and words of a hundred letters, in the middle of sentences too."""
    evil = f"<img src=x onerror=alert(1)>\"'{'x' * 99}"
    turned, odd = "\u202eשלום" + "y" * 120, "a\N{FIRE} &amp;" + "z" * 99
    folder = tmp_path / evil
    for i, name in enumerate([evil, turned, odd] * 6):  # all of one kind, so that there are mistakes
        paint(folder / name / f"{i}.png", COLOURS["red"], i)
    vitral.train(folder, model=MODEL, out=tmp_path / "run", set=[*QUICK, "steps=4"], device="cpu")
    path = write_run_page(tmp_path / "run", folder, device="cpu")
    with Tab(browser, path, NARROW) as tab:
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= NARROW[0]
        assert evil in tab.page.locator("h1").text_content()
        assert "predicted as" in tab.page.locator("#confusion").text_content()
        assert set(tab.page.locator(".classes td:first-child").all_text_contents()) == {evil, turned, odd}
        assert evil in tab.page.locator("#answers").text_content()
        assert tab.page.evaluate("[...document.images].every(image => image.src.startsWith('data:'))")


def test_a_page_prints_black_on_white(browser, inspected):
    with Tab(browser, inspected, scheme="dark") as tab:
        tab.page.emulate_media(media="print")
        ink = "getComputedStyle(document.body).color.match(/\\d+/g).map(Number)"
        assert max(tab.page.evaluate(ink)) < 80
        assert tab.page.locator("#theme").is_hidden()


def test_light_and_dark_wide_and_narrow(browser, inspected, shots):
    grounds = {}
    for size, scheme in ((WIDE, "light"), (WIDE, "dark"), (NARROW, "light"), (NARROW, "dark")):
        with Tab(browser, inspected, size, scheme) as tab:
            assert tab.page.evaluate("document.documentElement.scrollWidth") <= size[0]
            ground = "getComputedStyle(document.body).backgroundColor"
            grounds[size, scheme] = tab.page.evaluate(ground)
            tab.page.screenshot(path=shots / f"inspect-{size[0]}-{scheme}.png", full_page=True)
            tab.page.locator("#theme").click()
            assert tab.page.evaluate(ground) != grounds[size, scheme]
    assert grounds[WIDE, "light"] == grounds[NARROW, "light"] != grounds[WIDE, "dark"]
    assert len(list(shots.glob("inspect-*.png"))) >= 4


def test_the_page_of_a_run(browser, tmp_path, shots):
    pictures = colour_folder(tmp_path / "pictures", images=6)
    vitral.train(pictures, model=MODEL, out=tmp_path / "run", set=[*QUICK, "steps=12"], device="cpu")
    path = write_run_page(tmp_path / "run", pictures, device="cpu")
    with Tab(browser, path) as tab:
        tab.page.screenshot(path=shots / "run.png", full_page=True)
        column = "[...document.querySelectorAll('.classes tbody tr')].map(r => Number(r.children[2].dataset.value))"
        tab.page.get_by_role("button", name="recall").click()
        assert (rising := tab.page.evaluate(column)) == sorted(rising)
        tab.page.get_by_role("button", name="recall").click()
        assert tab.page.evaluate(column) == rising[::-1]
    with Tab(browser, path, NARROW, "dark") as tab:
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= NARROW[0]


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """Pages of evaluations by their number of classes."""
    folder = tmp_path_factory.mktemp("evaluated")
    rng = np.random.default_rng(0)
    photos = rng.integers(0, 256, (8, 64, 64, 3), dtype=np.uint8)

    def path(classes: int) -> Path:
        target = folder / f"{classes}.html"
        if not target.exists():
            names = [f"a class with a long name {i}" for i in range(classes)]
            bins = tuple(ReliabilityBin(i / 15, (i + 1) / 15, 9, (i + 0.5) / 15, i / 20) for i in range(15))
            html = evaluation_page(
                f"{classes} classes",
                synthetic_metrics(names),
                facts={"model": "ViT-Ti/16"},
                mistakes=[Mistake("a.png", photo, names[0], names[1], 0.44) for photo in photos],
                reliability=Reliability(bins, bins),
                left_out=[UnreadableImage("a/long/path/" + "x" * 99 + ".jpg", "truncated JPEG")],
            )
            target.write_text(html, encoding="utf-8")
        return target

    return path


def synthetic_metrics(names: list[str]) -> dict[str, Any]:
    """Each class is right 17 times, and is taken for the next one thrice."""
    k = len(names)
    cells = [cell for i in range(k) for cell in ([i, i, 17], [i, (i + 1) % k, 3])]
    rows = [{"name": name, "support": 20, "recall": 0.85, "precision": 0.85} for name in names]
    shares = {
        "top1": 0.85,
        "top5": 0.99,
        "mean_per_class": 0.85,
        "ece": 0.1,
        "ece_calibrated": 0.03,
        "temperature": 1.3,
    }
    return {"n": 20 * k, **shares, "nll": 1.0, "nll_calibrated": 0.9, "per_class": rows, "confusion": cells}


@pytest.mark.parametrize("classes", [5, 12, 37, 100, 1000])
def test_a_confusion_matrix_fits_or_scrolls_visibly(browser, evaluated, classes):
    for width in (390, 1400, 1920):
        with Tab(browser, evaluated(classes), (width, 900)) as tab:
            assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
            assert tab.page.evaluate(OUTSIDE) == []
            tops = tab.page.evaluate("[...document.querySelectorAll('nav a')].map(a => a.offsetTop)")
            assert len(tops) >= 6
            assert len(set(tops)) == 1
            scrolling = tab.page.evaluate(SCROLLING)
            assert all(fades for _, fades, _ in scrolling)
            assert all(bar >= 8 for name, _, bar in scrolling if name != "Sections")
            sideways = "Confusion matrix" in {name for name, *_ in scrolling}
            assert sideways == (width == 390 and classes in (12, 37))
            if classes > 40:
                assert tab.page.locator("#matrix").bounding_box()["width"] >= min(classes, 250)


def test_a_scrolled_matrix_keeps_the_names_of_its_rows(browser, evaluated):
    with Tab(browser, evaluated(12), NARROW) as tab:
        box = tab.page.get_by_role("group", name="Confusion matrix")
        before = tab.page.locator(".confusion th[scope=row]").first.bounding_box()
        box.evaluate("box => { box.scrollLeft = 1e6; }")
        # Not wait_for_function: after its first look it needs eval, which the page forbids.
        tab.page.wait_for_selector(".scroll.more-left:not(.more-right) .confusion")
        after = tab.page.locator(".confusion th[scope=row]").first.bounding_box()
        assert tab.page.locator(".tall.more-below .classes").count() == 1
        assert (after["x"], after["y"]) == pytest.approx((before["x"], before["y"]), abs=1.5)


def test_a_cell_of_a_large_matrix_is_described(browser, evaluated):
    with Tab(browser, evaluated(100)) as tab:
        side = tab.page.locator("#matrix").bounding_box()["width"] / 100
        tab.page.locator("#matrix").hover(position={"x": 8.5 * side, "y": 7.5 * side})
        said = "a class with a long name 7 predicted as a class with a long name 8: 3 of 20"
        assert tab.page.locator("#cell").inner_text() == said
        tab.page.locator("#matrix").hover(position={"x": 2.5 * side, "y": 50.5 * side})
        assert tab.page.locator("#cell").inner_text().endswith("name 50 predicted as a class with a long name 2: 0")
    with Tab(browser, evaluated(1000), NARROW) as tab:
        side = tab.page.locator("#matrix").bounding_box()["width"] / 250
        tab.page.locator("#matrix").click(position={"x": 100.5 * side, "y": 100.5 * side})
        said = tab.page.locator("#cell").inner_text().split("; ")
        assert [words[-8:] for words in said] == ["17 of 20"] * 4
        assert "name 400 predicted" in said[0]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_can_be_read(browser, evaluated, inspected, scheme):
    for path in (evaluated(12), evaluated(37), inspected):
        with Tab(browser, path, scheme=scheme) as tab:
            assert tab.page.evaluate(PALE) == []
