"""Pages that classify pictures: a folder that runs the model in a browser, and the page of `vitral serve`.

Both have the same HTML, CSS and JavaScript (`web/`). What differs is where the model runs: `local.js` hands pictures to
a worker, which decodes and preprocesses them and calls onnxruntime-web; `remote.js` sends them to the server.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from vitral.checkpoints.card import Card
from vitral.data.preprocess import parse_deterministic
from vitral.errors import UserError
from vitral.export.exported import ExportedModel
from vitral.names import name_of
from vitral.report.html import PageKind, Section, fact_table, page

TOP = 5
# Methods that `preprocess.js` repeats bit for bit. Sums of floats whose order a library chooses, as float_bilinear's,
# cannot be repeated; sums of integers can.
BROWSER_METHODS = (
    *("bilinear", "bicubic", "nearest", "area", "pil_nearest", "pil_box", "pil_bilinear", "pil_hamming"),
    *("pil_bicubic", "pil_lanczos"),
)
_PACKAGE = Path("node_modules", "onnxruntime-web")
_SCRIPT, _WASM = "ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm"
_COPIED = ("worker.js", "preprocess.js")
_SHARED_POLICY = (
    "img-src data: blob:; media-src blob:; style-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'"
)


class WebRuntime(NamedTuple):
    """The files of onnxruntime-web that a page needs."""

    script: Path
    wasm: Path
    version: str


def find_runtime(folder: str | Path | None = None) -> WebRuntime:
    """Find onnxruntime-web.

    Args:
        folder: the npm package, or its folder `dist`; node_modules/onnxruntime-web by default.

    Raises:
        UserError: it is not there.
    """
    path = Path(folder).expanduser() if folder else _PACKAGE
    for dist in (path / "dist", path):
        if (dist / _SCRIPT).is_file() and (dist / _WASM).is_file():
            return WebRuntime(dist / _SCRIPT, dist / _WASM, _runtime_version(dist / _SCRIPT))
    raise UserError(
        f"{path} does not contain onnxruntime-web ({_SCRIPT} and {_WASM}): run `npm install onnxruntime-web`, or pass "
        "its folder with --runtime."
    )


def browser_steps(card: Card) -> list[dict[str, Any]]:
    """The card's pipeline as `preprocess.js` takes it.

    Raises:
        UserError: a step or the number of channels cannot be repeated in a browser.
    """
    assert card.preprocess is not None
    channels = card.architecture.channels
    if channels not in (1, 3):
        raise UserError(f"a browser decodes pictures to 1 or 3 channels, and this model takes {channels}: use onnx.")
    pillow_13 = int(version("pillow").split(".")[0]) >= 13  # it starts with the rows if that is less work
    steps = []
    for step in parse_deterministic(card.preprocess.pipeline).steps:
        if step.method not in BROWSER_METHODS:
            raise UserError(
                f'the preprocessing "{card.preprocess.pipeline}" resizes by {step.method}, which the page cannot '
                "repeat exactly: use --format onnx, or give another --preprocess."
            )
        rows_first = pillow_13 and step.method.startswith("pil_")
        size = list(step.size) if step.sides else []
        values = {"name": step.name, "size": size, "numbers": list(step.numbers), "method": step.method}
        steps.append({**values, "antialias": step.antialias, "rows_first": rows_first})
    return steps


def write_page(exported: ExportedModel, runtime: WebRuntime, precision: str) -> None:
    """Complete a folder that any static host serves; the exported file in it is renamed after its contents.

    Args:
        exported: an ONNX file, alone in its folder.
        runtime: onnxruntime-web, which is copied.
        precision: of the weights, as the page states it.
    """
    card, folder = exported.card, exported.path.parent
    steps = browser_steps(card)
    # A page in a browser's cache must not meet another model than its own: each has its own file name.
    model = f"model-{_digest([exported.path])}.onnx"
    exported.path.rename(folder / model)
    (folder / "runtime").mkdir()
    (folder / "runtime" / "ort.js").write_bytes(runtime.script.read_bytes())
    (folder / "runtime" / "ort.wasm").write_bytes(runtime.wasm.read_bytes())
    for name in _COPIED:
        (folder / name).write_text(_resource(name), "utf-8")
    (folder / "LICENSES.txt").write_text(_licences(card, runtime), "utf-8")
    loaded = sum((folder / name).stat().st_size for name in ("runtime/ort.wasm", model))
    settings = {"model": model, "steps": steps, "channels": card.architecture.channels, "top": TOP, "bytes": loaded}
    names = card.class_names or tuple(f"class {index}" for index in range(card.architecture.classes))
    data = {"settings": settings, "classes": names, "model": {"name": name_of(card.architecture)}}
    files_of_page = (*_COPIED, "runtime/ort.js", "runtime/ort.wasm", model)
    total = sum((folder / name).stat().st_size for name in files_of_page)
    facts = {
        "model": name_of(card.architecture),
        "classes": f"{len(names):,}",
        "weights": precision,
        "preprocessing": card.preprocess.pipeline if card.preprocess else "",
        "size": f"{total / 1e6:,.1f} MB, loaded once",
        "runtime": f"onnxruntime-web {runtime.version}",
        "licence of the weights": card.licence,
    }
    (folder / "index.html").write_text(_local_page(card, facts, data), "utf-8")
    cached = ["./", "index.html", *files_of_page]
    worker = _filled(
        _resource("service-worker.js"), files=cached, version=_digest(folder / name for name in cached[1:])
    )
    (folder / "service-worker.js").write_text(worker, "utf-8")


@cache
def server_page() -> str:
    """The page of `vitral serve`, as HTML that loads nothing but the answers of the server."""
    kind = PageKind(
        _resource("remote.js") + _resource("page.js"),
        _resource("page.css"),
        f"{_SHARED_POLICY}; script-src 'unsafe-inline'",
        "Pictures are sent to this server, and nowhere else.",
    )
    lead = '<p class="lead">Show the model a picture: it answers with its classes, and with where it looked.</p>'
    return page("What is in this picture?", lead, _sections(), {"top": TOP}, kind)


def _local_page(card: Card, facts: dict[str, str], data: dict[str, Any]) -> str:
    kind = PageKind(
        _resource("local.js") + _resource("page.js"),
        _resource("page.css"),
        f"{_SHARED_POLICY}; script-src 'self' 'unsafe-inline' 'wasm-unsafe-eval'; worker-src 'self' blob:",
        'Pictures stay on this device. <a href="LICENSES.txt">Licences</a>.',
    )
    lead = (
        '<p class="lead">Show the model a picture: it answers with its classes, and with where it looked. It runs in '
        "this browser, and no picture leaves it.</p>"
    )
    about = Section("about", "About the model", "", fact_table(facts))
    return page(name_of(card.architecture), lead, [*_sections(), about], data, kind)


def _sections() -> list[Section]:
    return [
        Section("pictures", "Pictures", "", _resource("add.html")),
        Section("result", "What the model sees", "", _resource("result.html")),
    ]


def _licences(card: Card, runtime: WebRuntime) -> str:
    """The licences of what is in the folder; those of onnxruntime are in its Python package, of the same source."""
    parts = [
        "index.html, worker.js, preprocess.js and service-worker.js were made by vitral and are licensed under the\n"
        "Apache License 2.0: https://www.apache.org/licenses/LICENSE-2.0\n",
        f"The weights in model-*.onnx: {card.licence or 'no licence is stated'}.\n",
        f"runtime/ort.js and runtime/ort.wasm are onnxruntime-web {runtime.version}, under the licence that follows.\n",
    ]
    parts += [files("onnxruntime").joinpath(name).read_text("utf-8") for name in ("LICENSE", "ThirdPartyNotices.txt")]
    return f"\n{'-' * 100}\n\n".join(parts)


def _filled(script: str, **values: Any) -> str:
    """A script with the values that follow the comments /* name */ replaced."""
    for name, value in values.items():
        script = re.sub(rf"(?<=/\* {name} \*/ ).*(?=;)", lambda _, value=value: json.dumps(value), script, count=1)
    return script


def _digest(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _runtime_version(script: Path) -> str:
    match = re.search(r"ONNX Runtime Web v([\w.-]+)", script.read_text("utf-8")[:400])
    return match[1] if match else ""


def _resource(name: str) -> str:
    return files("vitral.export").joinpath("web", name).read_text("utf-8")
