"""The pages of `vitral export --format web` and `vitral serve` in headless Chromium, compared with Python.

    python benchmarks/web_pages.py WEIGHTS PHOTOS --classes FILE [--runtime FOLDER] [--n 50] [--shots FOLDER]

Four pages are driven: the web export in float32 (web), the one with rounded weights (web-int8), that with a limit of
0.001 for probabilities, and the page of the server. PHOTOS are sampled; others of them are the gate's images. The
exported folder is served below a sub-path by a plain file server without any special headers, which is shut down after
the first visit: pictures are classified by the page that its service worker kept. No page may ask another host for
anything. Classes are read from the page after its file chooser was used; probabilities, attention and decoded pixels
come from the functions that the page itself calls. They are compared with Python's float32 model, and with the exported
file itself, run by onnxruntime in Python.
"""

from __future__ import annotations

import argparse
import base64
import functools
import http.server
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from playwright.sync_api import BrowserContext, Page, sync_playwright
from rich.console import Console
from rich.table import Table

import vitral
from vitral.api.export import ExportFormat
from vitral.data.images import decode
from vitral.data.preprocess import parse_deterministic
from vitral.export.exported import ExportedModel, open_exported
from vitral.export.graph import ExportGraph

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
SIZES = ((1400, 1000), (390, 844))
READ = "Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0))"
CLASSIFY = f"async (text) => backend.classify(new Blob([{READ}]), backend.models[0])"
DECODE = f"""async (text) => {{
  const {{ decode }} = await import(new URL("preprocess.js", location));
  const image = await decode(new Blob([{READ}]), 3);
  let letters = "";
  for (let i = 0; i < image.data.length; i += 8192) letters += String.fromCharCode(...image.data.subarray(i, i + 8192));
  return btoa(letters);
}}"""


@dataclass(frozen=True)
class Answer:
    """What Python says about a photograph."""

    pixels: np.ndarray  # (height, width, channels) uint8, decoded
    input: np.ndarray  # (height, width, channels) uint8, resized and cropped
    names: list[str]  # of the top classes
    probabilities: list[float]
    attention: np.ndarray  # (rows, columns)


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights")
    parser.add_argument("photos", type=Path)
    parser.add_argument("--classes", required=True, help="a line for each output of the model")
    parser.add_argument("--runtime", default=None)
    parser.add_argument("--n", type=int, default=50)
    parser.add_argument("--gate", type=int, default=300, help="photographs that the int8 export is compared on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shots", type=Path, default=None)
    options = parser.parse_args()
    paths = sorted(path for path in options.photos.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg", ".png"))
    random.Random(options.seed).shuffle(paths)
    photos, gate_images = paths[: options.n], paths[options.n : options.n + options.gate]
    table = Table(
        *("page", "top-1 as Python", "probability", "attention", "top-1, same file", "attention, same file"),
        *("decoded pixels", "MB", "ms per picture"),
    )
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as play:
        answers = python_answers(options.weights, options.classes, photos)
        browser = play.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"], ignore_default_args=["--hide-scrollbars"]
        )
        formats: list[tuple[ExportFormat, float | None]] = [("web", None), ("web-int8", None), ("web-int8", 1e-3)]
        for format, difference in formats:
            name = format if difference is None else f"{format} --difference {difference}"
            site = Path(folder, name, "some", "where")
            result = vitral.export_model(
                options.weights,
                site,
                format=format,
                images=gate_images if format == "web-int8" else [],
                difference=difference,
                classes=options.classes,
                runtime=options.runtime,
            )
            exported = open_exported(next(site.glob("*.onnx")))
            with browser.new_context() as context:
                page = offline_page(context, site.parent.parent, "some/where/", problems)
                row = compare(page, photos, answers, exported)
                take_shots(page, options.shots, name)
            table.add_row(name, *row[:-1], f"{result.bytes / 1e6:.1f}", row[-1])
        with server(options.weights, options.classes) as address, browser.new_context() as context:
            page = opened(context, address, problems)
            row = compare(page, photos, answers, None)
            take_shots(page, options.shots, "server")
            table.add_row("server", *row[:-1], "", row[-1])
        browser.close()
    console = Console()
    console.print(f"{len(photos)} photographs (seed {options.seed}), {platform.machine()}, {os.cpu_count()} cores")
    console.print(table)
    if problems:
        sys.exit("\n".join(problems))


def python_answers(weights: str, classes: str, photos: list[Path]) -> list[Answer]:
    """The float32 model on Python's pixels."""
    rows = vitral.predict(weights, photos, classes=classes, device="cpu").rows
    model, card = vitral.load(weights)
    assert card.preprocess is not None
    pipeline, graph = parse_deterministic(card.preprocess.pipeline), ExportGraph(model, card, ["attention"])
    answers = []
    for photo, row in zip(photos, rows, strict=True):
        pixels = decode(photo.read_bytes())
        prepared = pipeline(pixels)
        with torch.inference_mode():
            _, attention = graph(torch.from_numpy(prepared)[None])
        answers.append(Answer(pixels, prepared, list(row.names), list(row.probabilities), attention[0].numpy()))
    return answers


def offline_page(context: BrowserContext, root: Path, path: str, problems: list[str]) -> Page:
    """A page that was loaded from a server once, and again when that was gone."""
    host = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=root))
    threading.Thread(target=host.serve_forever, daemon=True).start()
    page = opened(context, f"http://127.0.0.1:{host.server_port}/{path}", problems)
    page.evaluate("() => navigator.serviceWorker.ready.then(() => true)")
    host.shutdown()
    host.server_close()
    page.reload()
    page.wait_for_selector("#status:has-text('Ready')", timeout=120_000)
    return page


def opened(context: BrowserContext, address: str, problems: list[str]) -> Page:
    """The page at an address, ready; `problems` collects its messages and what it asks of other hosts."""
    page = context.new_page()
    page.set_default_timeout(120_000)

    def check(url: str) -> None:
        if not url.startswith((address, "blob:", "data:")):
            problems.append(f"{address} asked for {url}")

    context.on("request", lambda request: check(request.url))
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(address)
    page.wait_for_selector("#status:has-text('Ready')")
    return page


def compare(page: Page, photos: list[Path], answers: list[Answer], exported: ExportedModel | None) -> list[str]:
    """Cells of the table; of differences, the largest. Without an exported file, the page decodes nothing itself."""
    page.set_input_files("#files", photos)
    page.wait_for_selector(".thumb.waiting", state="detached")
    labels = [label.rsplit(",", 1)[0] for label in page.locator(".thumb span").all_inner_texts()]
    same = sum(label == answer.names[0] for label, answer in zip(labels, answers, strict=True))
    differences, times, same_file = [], [], 0
    for photo, answer in zip(photos, answers, strict=True):
        text = base64.b64encode(photo.read_bytes()).decode()
        started = time.perf_counter()
        result = page.evaluate(CLASSIFY, text)
        times.append(time.perf_counter() - started)
        probabilities = [one["probability"] for one in result["classes"]]
        attention = np.reshape(result["attention"]["values"], answer.attention.shape)
        row = [np.subtract(probabilities, answer.probabilities), attention - answer.attention]
        if exported:
            outputs = exported.outputs(answer.input[None], ["probabilities", "attention"])
            best = exported.card.class_names[outputs["probabilities"][0].argmax()]
            same_file += result["classes"][0]["name"] == best
            row.append(attention - outputs["attention"][0])
            row.append(pixels_of(page, text, answer) - answer.pixels)
        differences.append([float(np.abs(values).max()) for values in row])
    largest = [f"{value:.1e}" for value in np.max(differences, axis=0)]
    of_file = [f"{same_file} of {len(photos)}", largest[2], f"{float(largest[3]):.0f} levels"] if exported else [""] * 3
    return [f"{same} of {len(photos)}", *largest[:2], *of_file, f"{1000 * np.median(times):.0f}"]


def pixels_of(page: Page, text: str, answer: Answer) -> np.ndarray:
    """What the page decodes: (height, width, channels), as integers with a sign."""
    values = np.frombuffer(base64.b64decode(page.evaluate(DECODE, text)), np.uint8)
    return values.reshape(answer.pixels.shape).astype(int)


@contextmanager
def server(weights: str, classes: str) -> Iterator[str]:
    """The address of `vitral serve` with one model."""
    named = ["--classes", classes]
    command = [sys.executable, "-m", "vitral", "serve", weights, "--port", "0", "--device", "cpu", *named]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        events = (json.loads(line) for line in process.stdout if line.startswith("{"))
        port = next(event["port"] for event in events if event["event"] == "listening")
        threading.Thread(target=process.stdout.read, daemon=True).start()  # its log must not block it
        yield f"http://127.0.0.1:{port}/"
    finally:
        process.terminate()
        process.wait()


def take_shots(page: Page, folder: Path | None, name: str) -> None:
    """The page with its pictures, light and dark, wide and narrow."""
    if folder is None:
        return
    schemes: tuple[Literal["light", "dark"], ...] = ("light", "dark")
    for scheme in schemes:
        for width, height in SIZES:
            page.emulate_media(color_scheme=scheme)
            page.set_viewport_size({"width": width, "height": height})
            page.screenshot(path=folder / f"{name.replace(' ', '-')}-{scheme}-{width}.png", full_page=True)


if __name__ == "__main__":
    main()
