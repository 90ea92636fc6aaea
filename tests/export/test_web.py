"""The web export: JavaScript that prepares pixels as Python does, what is refused, and the page in a real browser."""

from __future__ import annotations

import base64
import functools
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vitral
from vitral.api.export import ExportFormat
from vitral.checkpoints.card import Card, Preprocess
from vitral.data.images import decode, encode_jpeg, encode_png
from vitral.data.pixels import METHODS
from vitral.data.preprocess import parse_deterministic
from vitral.errors import UserError
from vitral.export.graph import ExportGraph
from vitral.export.web import BROWSER_METHODS, browser_steps, find_runtime, server_page
from vitral.names import parse

NODE = shutil.which("node")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
WEB = Path(vitral.__file__).parent / "export" / "web"
NAMES = ("ant", "bee", "cat", "<b>dog</b>")
PIPELINE = "decode|resize_small(40, bicubic)|central_crop(32)"
TOKEN = "a-token-of-the-test"

RUN_CASES = """
import { readFileSync } from "node:fs";
const [module, cases] = process.argv.slice(1);
const { preprocess } = await import(module);
const results = JSON.parse(readFileSync(cases)).map(({ steps, height, width, channels, data }) => {
  const image = { data: Uint8ClampedArray.from(Buffer.from(data, "base64")), height, width, channels };
  const result = preprocess(image, steps);
  const shape = [result.image.height, result.image.width, result.image.channels];
  return { shape, box: result.box, data: Buffer.from(result.image.data).toString("base64") };
});
console.log(JSON.stringify(results));
"""


def card(pipeline: str = PIPELINE, channels: int = 3) -> Card:
    architecture = parse("ViT-Ti/8@32", depth=2, width=24, heads=3, mlp=48, channels=channels, classes=4)
    return Card(architecture, NAMES, preprocess=Preprocess(pipeline, (0.5,) * channels, (0.5,) * channels))


def in_node(folder: Path, cases: list[tuple[str, np.ndarray]]) -> list[tuple[np.ndarray, list[float]]]:
    """Pixels (height, width, channels) and boxes that preprocess.js gives for pipelines and images."""
    described = [
        {
            "steps": browser_steps(card(pipeline)),
            **dict(zip(("height", "width", "channels"), image.shape, strict=True)),
            "data": base64.b64encode(image.tobytes()).decode(),
        }
        for pipeline, image in cases
    ]
    (folder / "cases.json").write_text(json.dumps(described))
    module = folder / "preprocess.mjs"  # node takes a .js file for CommonJS
    shutil.copy(WEB / "preprocess.js", module)
    command = [NODE or "", "--input-type=module", "-e", RUN_CASES, module.as_uri(), str(folder / "cases.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    return [
        (np.frombuffer(base64.b64decode(result["data"]), np.uint8).reshape(result["shape"]), result["box"])
        for result in results
    ]


def random_image(rng: np.random.Generator, channels: int) -> np.ndarray:
    """Noise, or black and white, where filters with negative weights leave the range of bytes."""
    height, width = rng.integers(1, 110, 2)
    image = rng.integers(0, 256, (height, width, channels), dtype=np.uint8)
    return np.where(image < 128, 0, 255).astype(np.uint8) if rng.random() < 0.4 else image


@pytest.mark.skipif(NODE is None, reason="needs node")
def test_javascript_prepares_the_same_bits_as_python(tmp_path):
    methods = [*BROWSER_METHODS, "antialias=false"]
    pipelines = [
        *(f"decode|resize({size}, {method})" for method in methods for size in ("24", "37, 20", "50, 61")),
        *(f"decode|resize_small(40, {method})|central_crop(32)" for method in methods),
        *(f"decode|resize_short(41, {method})|center_crop(33)" for method in methods),
        "decode|resize_cover(32, 40, bicubic)|central_crop(32, 40)",
        "decode|resize_fit(40, 30, pil_bicubic)|pad(40, 40, 3, 200, 9)|center_crop(40)",
        "decode|central_crop(48)",
        "decode|center_crop(55)",
    ]
    rng = np.random.default_rng(0)
    cases = [(pipeline, random_image(rng, channels)) for pipeline in pipelines for channels in (1, 3, 3)]
    cases += [("decode|resize_small(40)|central_crop(32)", np.arange(300, dtype=np.uint8).reshape(3, 100, 1))]
    for (pipeline, image), (pixels, box) in zip(cases, in_node(tmp_path, cases), strict=True):
        expected = parse_deterministic(pipeline)
        np.testing.assert_array_equal(pixels, expected(image), err_msg=f"{pipeline} of {image.shape}")
        np.testing.assert_allclose(box, expected.shown_region(image.shape[:2]), atol=1e-9, err_msg=pipeline)


def test_what_javascript_cannot_repeat_is_refused_by_name():
    for method in set(METHODS) - set(BROWSER_METHODS):
        with pytest.raises(UserError, match=rf"resizes by {method}, which the page cannot repeat exactly"):
            browser_steps(card(f"decode|resize_small(40, {method})|central_crop(32)"))
    with pytest.raises(UserError, match=r"1 or 3 channels, and this model takes 4"):
        browser_steps(card(channels=4))


def test_a_missing_runtime_is_one_sentence_and_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"run `npm install onnxruntime-web`, or pass its folder with --runtime\.$"):
        vitral.export_model((tiny_model(), card()), tmp_path / "page", format="web")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_files_is_not_overwritten(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="exists and is not empty"):
        vitral.export_model((tiny_model(), card()), tmp_path, format="web")


def test_a_page_is_complete_in_float32_and_in_int8(tmp_path):
    runtime, photos = tmp_path / "runtime", tmp_path / "photos"
    for folder in (runtime, photos):
        folder.mkdir()
    (runtime / "ort.wasm.bundle.min.mjs").write_text("/*! ONNX Runtime Web v1.2.3 */")
    (runtime / "ort-wasm-simd-threaded.wasm").write_bytes(b"wasm")
    rng = np.random.default_rng(0)
    for number in range(8):
        (photos / f"{number}.png").write_bytes(encode_png(rng.integers(0, 256, (40, 40, 3), dtype=np.uint8)))
    formats: dict[str, tuple[ExportFormat, float | None]] = {
        "float32": ("web", None),
        "int8 (10 layers)": ("web-int8", None),
        "int16": ("web-int8", 1e-3),
    }
    for name, (format, difference) in formats.items():
        folder, model = tmp_path / name, (tiny_model(), card())
        limits: dict[str, Any] = {"difference": difference, "agreement": 0}
        result = vitral.export_model(model, folder, format=format, images=[photos], **limits, runtime=runtime)
        assert result.bytes == sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        page = (folder / "index.html").read_text("utf-8")
        weights = re.search(r'<th scope="row">weights</th><td>(.*?)</td>', page)
        assert weights is not None
        assert name in weights[1]
        assert "onnxruntime-web 1.2.3" in page
        assert "<b>dog</b>" not in page
        listed = re.search(r"FILES = .*?(\[.*\]);", (folder / "service-worker.js").read_text("utf-8"))
        assert listed is not None
        written = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        assert {"./", *written} - set(json.loads(listed[1])) == {"LICENSES.txt", "service-worker.js"}
        assert "Copyright (c) Microsoft Corporation" in (folder / "LICENSES.txt").read_text("utf-8")


def test_the_servers_page_is_self_contained():
    page = server_page()
    assert "src=" not in page.replace('src="data:', "")
    assert "http://" not in page
    assert "https://" not in page


def tiny_model() -> Any:
    torch.manual_seed(0)
    model: Any = vitral.create("ViT-Ti/8@32", depth=2, width=24, heads=3, mlp=48, classes=4)
    torch.nn.init.normal_(model.head.output.weight, std=2)
    for block in model.blocks:  # fresh weights look everywhere alike
        torch.nn.init.normal_(block.attention.qkv.weight, std=0.7)
    return model.eval()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("needs Chromium")
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    with sync_api.sync_playwright() as play:
        opened = play.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", "--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"],
        )
        yield opened
        opened.close()


READ = "Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0))"
CLASSIFY = f"async (text) => backend.classify(new Blob([{READ}]), backend.models[0])"
DECODE = f"""async (text) => {{
  const {{ decode }} = await import(new URL("preprocess.js", location));
  const image = await decode(new Blob([{READ}]), 3);
  return [image.height, image.width, ...image.data];
}}"""
# A file that is pasted or dropped, as the browser's own events bring it.
BRING = f"""([text, kind]) => {{
  const files = new DataTransfer();
  files.items.add(new File([{READ}], `${{kind}}.png`, {{ type: "image/png" }}));
  dispatchEvent(kind === "paste"
    ? new ClipboardEvent(kind, {{ clipboardData: files }}) : new DragEvent(kind, {{ dataTransfer: files }}));
}}"""


class Opened:
    """A page in the browser, ready; what it says on the console and asks of other hosts is kept."""

    def __init__(self, browser: Any, address: str) -> None:
        self.context = browser.new_context(viewport={"width": 1400, "height": 900})
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", lambda dialog: dialog.accept(TOKEN))
        self.outside: list[str] = []
        self.context.on("request", lambda request: self.outside.append(request.url))
        self.address = address
        self.page.goto(address)
        self.wait_until_ready()

    def wait_until_ready(self) -> None:
        self.page.wait_for_selector("#status:has-text('Ready')")

    def labels(self) -> list[str]:
        """Of the pictures, when all are classified."""
        self.page.wait_for_selector(".thumb.waiting", state="detached")
        return self.page.locator(".thumb span").all_inner_texts()

    def outside_requests(self) -> list[str]:
        return [url for url in self.outside if not url.startswith((self.address, "blob:", "data:"))]

    def fits(self, width: int) -> bool:
        self.page.set_viewport_size({"width": width, "height": 900})
        return self.page.evaluate("document.documentElement.scrollWidth") <= width


def photographs(folder: Path) -> list[Path]:
    """PNG and JPEG, wide and tall, turned by EXIF, and one file that is no picture."""
    rng = np.random.default_rng(0)
    smooth = [torch.rand(1, 3, 5, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    sizes = ((60, 90), (70, 44), (48, 52))
    images = [
        (torch.nn.functional.interpolate(noise, size, mode="bicubic").clamp(0, 1) * 255)
        for noise, size in zip(smooth, sizes, strict=True)
    ]
    wide, tall, third = (image[0].permute(1, 2, 0).byte().numpy() for image in images)
    exif = b"\xff\xe1\x00\x22Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"
    jpeg = encode_jpeg(third)
    contents = {
        "wide.png": encode_png(wide),
        "tall.png": encode_png(tall),
        "noise.png": encode_png(rng.integers(0, 256, (40, 100, 3), dtype=np.uint8)),
        "turned.jpg": jpeg[:2] + exif + jpeg[2:],
        "not.png": b"not a picture",
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return [folder / name for name in contents]


def python_answers(model: Any, paths: list[Path]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Probabilities (classes,) and attention (rows * columns,) of the model itself."""
    graph, transform = ExportGraph(model, card(), ["attention"]), parse_deterministic(PIPELINE)
    answers = []
    for path in paths:
        pixels = torch.from_numpy(transform(read(path)))[None]
        with torch.inference_mode():
            probabilities, attention = graph(pixels)
        answers.append((probabilities[0].numpy(), attention[0].flatten().numpy()))
    return answers


def read(path: Path) -> np.ndarray:
    return decode(path.read_bytes())


def encoded(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


def check_answers(opened: Opened, paths: list[Path], answers: list[tuple[np.ndarray, np.ndarray]]) -> None:
    """What the page shows, and the numbers behind it, are Python's."""
    opened.page.set_input_files("#files", paths)
    labels = opened.labels()
    for path, (probabilities, attention), label in zip(paths, answers, labels, strict=False):
        best = NAMES[probabilities.argmax()]
        assert label.startswith(f"{best}, {100 * probabilities.max():.0f}"), path.name
        result = opened.page.evaluate(CLASSIFY, encoded(path))
        found = {one["name"]: one["probability"] for one in result["classes"]}
        np.testing.assert_allclose([found[name] for name in NAMES], probabilities, atol=1e-5, err_msg=path.name)
        np.testing.assert_allclose(result["attention"]["values"], attention, atol=1e-5, err_msg=path.name)
    assert "read" in labels[-1]
    assert len({label.split(",")[0] for label in labels}) > 2, "the pictures must not all look alike to the model"


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> tuple[Any, Path]:
    """A model, and its page below a sub-path of a folder."""
    try:
        find_runtime(os.environ.get("VITRAL_ONNXRUNTIME_WEB"))
    except UserError:
        pytest.skip("needs onnxruntime-web (VITRAL_ONNXRUNTIME_WEB)")
    model, root = tiny_model(), tmp_path_factory.mktemp("host")
    runtime = os.environ.get("VITRAL_ONNXRUNTIME_WEB")
    vitral.export_model((model, card()), root / "some" / "page", format="web", runtime=runtime)
    return model, root


@pytest.mark.xdist_group("browser")
def test_the_exported_page_classifies_as_python_does_without_its_host(browser, exported, tmp_path):
    model, root = exported
    host = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=root))
    threading.Thread(target=host.serve_forever, daemon=True).start()
    opened = Opened(browser, f"http://127.0.0.1:{host.server_port}/some/page/")
    page = opened.page
    page.evaluate("() => navigator.serviceWorker.ready.then(() => true)")
    host.shutdown()
    host.server_close()
    page.reload()
    opened.wait_until_ready()
    *paths, broken = photographs(tmp_path)
    check_answers(opened, [*paths, broken], python_answers(model, paths))
    for path in paths[:3]:
        height, width, *values = page.evaluate(DECODE, encoded(path))
        np.testing.assert_array_equal(np.reshape(values, (height, width, 3)), read(path))
    check_interface(opened, paths[0])
    assert opened.outside_requests() == []
    assert opened.said == []
    opened.context.close()


def check_interface(opened: Opened, picture: Path) -> None:
    """Keys choose pictures, the slider changes the map, and pasted, dropped and camera pictures are classified."""
    page, shown = opened.page, "document.getElementById('stage').toDataURL()"
    page.locator(".thumb input").first.focus()
    first = page.inner_text("#answers")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#answers") != first
    before = page.evaluate(shown)
    page.locator("#strength").focus()
    page.keyboard.press("End")
    assert page.evaluate(shown) != before
    for kind in ("paste", "drop"):
        page.evaluate(BRING, [encoded(picture), kind])
        assert f"{kind}.png" in page.inner_text("#answers")
    page.click("#camera")
    page.wait_for_function("() => document.getElementById('video').videoWidth > 0")
    page.click("#shoot")
    page.wait_for_selector(".thumb:nth-child(8)")
    assert len(opened.labels()) == 8
    assert opened.labels()[0] == opened.labels()[5] == opened.labels()[6]
    assert opened.fits(390)
    assert opened.fits(1400)
    page.click("#clear")
    assert not page.is_visible("#result")
    assert page.evaluate("document.activeElement.id") == "files"


@pytest.mark.xdist_group("browser")
def test_the_servers_page_shows_what_python_computes(browser, tmp_path):
    pytest.importorskip("uvicorn", reason="needs the extra serve")
    model = tiny_model()
    vitral.save(model, tmp_path / "tiny.safetensors", card())
    command = [sys.executable, "-m", "vitral", "serve", str(tmp_path / "tiny.safetensors"), "--port", "0"]
    environment = {**os.environ, "VITRAL_TOKEN": TOKEN, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    assert process.stdout is not None
    try:
        listening = next(line for line in process.stdout if '"listening"' in line)
        opened = Opened(browser, f"http://127.0.0.1:{json.loads(listening)['port']}/")
        *paths, broken = photographs(tmp_path)
        check_answers(opened, [*paths, broken], python_answers(model, paths))
        assert opened.outside_requests() == []
        opened.context.close()
    finally:
        process.terminate()
        process.communicate()
