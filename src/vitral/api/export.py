"""`export_model`: a model as a file that runs without vitral, written only if its outputs agree with the model."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from vitral.api.checkpoints import Source, load_source, source_name
from vitral.api.data import eval_images
from vitral.api.inference import check_head, named_card, resolve_preprocessing
from vitral.atomic import atomic_write, check_writable, checked_output
from vitral.checkpoints.card import Card
from vitral.checkpoints.files import open_weights, sha256
from vitral.checkpoints.hub import located
from vitral.checkpoints.weights import assemble, weights_of
from vitral.data.sources import open_images
from vitral.display import SummaryRepr, displayed
from vitral.errors import UserError
from vitral.evaluation.mapping import class_mapping
from vitral.events import EventHandler, Note
from vitral.export.exported import CARD, GATE, OUTPUTS, SOURCE, VERSION, open_exported, write_metadata
from vitral.export.gate import ExportRefused, Gate, GateImages, GateReport, Limits, decoded_images
from vitral.export.graph import ExportGraph, Output, has_attention
from vitral.export.int8 import INT8, search, search_stored
from vitral.export.onnx import add_metadata, write_onnx
from vitral.export.pt2 import append_metadata, write_pt2
from vitral.export.web import WebRuntime, browser_steps, find_runtime, write_page
from vitral.version import __version__

ExportFormat = Literal["onnx", "onnx-int8", "pt2", "web", "web-int8"]

# Of formats that compute in float32, as the model does, with sums in another order.
FLOAT_LIMITS = Limits(difference=1e-4, log_difference=1e-3, outputs=1e-3)
_FEWEST_CALIBRATED = 8


@dataclass(frozen=True)
class ExportJob:
    """The input of a format's writer."""

    graph: ExportGraph
    metadata: dict[str, str]  # of every file; the gate's report is added to it after the comparison
    gate: Gate
    dynamic_size: bool
    calibration: GateImages | None  # images for a format with `calibrated`
    on_event: EventHandler
    web_runtime: WebRuntime | None = None  # of a page


class FormatEntry(NamedTuple):
    """A format of `vitral export`."""

    write: Callable[[ExportJob, Path], Path]  # writes the file or folder, and returns the file that the gate opens
    suffix: str  # of the target; "" for a folder
    limits: Limits  # by default
    calibrated: bool = False  # whether it needs images, of which half are compared
    finish: Callable[[ExportJob, Path], None] | None = None  # completes a folder when the gate has passed its file


def _write_onnx(job: ExportJob, path: Path) -> Path:
    write_onnx(job.graph, path, dynamic_size=job.dynamic_size)
    add_metadata(path, job.metadata)
    return path


def _write_int8(job: ExportJob, path: Path) -> Path:
    _write_onnx(job, path)
    assert job.calibration is not None
    limit = job.gate.limits.agreement

    def agreement(file: Path) -> float:
        return job.gate.agreement(open_exported(file))

    quantised = search(path, job.calibration.pixels, agreement, limit, job.on_event)
    if quantised.agreement < limit:
        raise ExportRefused(
            f"in int8 the top class is the model's on {quantised.agreement:.1%} of images at best, with "
            f"{len(quantised.in_float)} layers in float32: lower --agreement; nothing was written."
        )
    names = (
        f" ({', '.join(quantised.in_float[:4])}{', ...' if len(quantised.in_float) > 4 else ''})"
        if quantised.in_float
        else ""
    )
    job.on_event(Note(f"int8: {len(quantised.int8)} linear layers; float32: {len(quantised.in_float)}{names}"))
    layers = {"calibration images": len(job.calibration.pixels), "int8": quantised.int8, "float32": quantised.in_float}
    add_metadata(path, {INT8: json.dumps(layers)})
    return path


def _write_pt2(job: ExportJob, path: Path) -> Path:
    write_pt2(job.graph, path, dynamic_size=job.dynamic_size)
    append_metadata(path, job.metadata)
    return path


def _write_web(job: ExportJob, folder: Path) -> Path:
    return _write_onnx(job, folder / "model.onnx")


def _write_web_int8(job: ExportJob, folder: Path) -> Path:
    if job.gate.images.pixels is job.gate.generated:
        raise UserError(
            "web-int8 chooses its numbers of bits on images: pass some like those it will get with --images."
        )
    path = _write_onnx(job, folder / "model.onnx")
    quantised = search_stored(path, lambda file: job.gate.holds(open_exported(file)))
    job.on_event(
        Note(f"weights of {len(quantised.int8)} linear layers are in int8, of {len(quantised.int16)} in int16")
    )
    add_metadata(path, {INT8: json.dumps(quantised._asdict())})
    return path


def _finish_web(job: ExportJob, written: Path) -> None:
    assert job.web_runtime is not None
    exported = open_exported(written)
    stored = json.loads(exported.metadata.get(INT8, "{}"))
    precision = ", ".join(f"{name} ({len(layers)} layers)" for name, layers in stored.items() if layers)
    write_page(exported, job.web_runtime, precision or "float32")


FORMATS: dict[str, FormatEntry] = {
    "onnx": FormatEntry(_write_onnx, ".onnx", FLOAT_LIMITS),
    "onnx-int8": FormatEntry(_write_int8, ".onnx", Limits(), calibrated=True),
    "pt2": FormatEntry(_write_pt2, ".pt2", FLOAT_LIMITS),
    "web": FormatEntry(_write_web, "", FLOAT_LIMITS, finish=_finish_web),
    "web-int8": FormatEntry(_write_web_int8, "", Limits(), finish=_finish_web),
}


@dataclass(frozen=True, repr=False)
class ExportResult(SummaryRepr):
    """What was written, and how it compares with the model."""

    source: str
    target: Path
    format: str
    outputs: tuple[str, ...]
    bytes: int  # of the file, or of all files in the folder
    report: GateReport

    def summary(self) -> dict[str, str]:
        return {
            "agreement": f"{self.report.agreement:.2%}",
            "difference": f"{self.report.difference:.2g}",
            "target": str(self.target),
            "format": self.format,
        }


def export_model(
    source: Source,
    target: str | Path,
    *,
    format: ExportFormat = "onnx",
    images: Sequence[str | Path] = (),
    agreement: float = 0.99,
    difference: float | None = None,
    outputs: Sequence[Output] = (),
    dynamic_size: bool = False,
    classes: str | Path = "",
    preprocess: str = "",
    runtime: str | Path | None = None,
    on_event: EventHandler | None = None,
) -> ExportResult:
    """Export a model to a file that runs without vitral, compared with the model first.

    The file takes uint8 pixels (batch, height, width, channels), already resized and cropped, and returns
    probabilities. It includes normalisation and temperature, and its metadata has class names and preprocessing. Both
    models are run on images, and nothing is written if they do not agree. The formats web and web-int8 write a folder
    with a page that runs the model in a browser, for any static host.

    Args:
        source: a run folder, weights, hf:owner/name or timm:name.
        target: the file or, for a page, the folder to write.
        format: format to write.
        images: image files and folders to compare the models on, or a labelled data set; generated images by
            default. Required for int8 formats; onnx-int8 calibrates with every second image and compares the others.
        agreement: smallest accepted share of images with the same top class.
        difference: largest accepted difference of a probability; by default 0.0001 for float32 formats, which also
            limits log-probabilities and additional outputs.
        outputs: additional outputs, the input of the head (features) and the last block's attention (attention).
        dynamic_size: accept images of any height and width.
        classes: file with the names of the model's outputs in order: one per line, a table or JSON.
        preprocess: preprocessing pipeline, for weights that do not state theirs.
        runtime: folder of the npm package onnxruntime-web, for a page; by default ./node_modules/onnxruntime-web.
        on_event: handler of progress events.

    Returns:
        What was written, and the comparison.

    Raises:
        UserError: if an argument is wrong, or the model cannot be exported; its subclass ExportRefused if the
            exported file does not agree with the model.
    """
    if format not in FORMATS:
        raise UserError(f'format="{format}" is not one of {", ".join(FORMATS)}.')
    if not 0 <= agreement <= 1:
        raise UserError(f"agreement is a share of images from 0 to 1, not {agreement:g}.")
    entry = FORMATS[format]
    path = checked_output(target, (entry.suffix,), "TARGET") if entry.suffix else _checked_folder(target)
    web_runtime = find_runtime(runtime) if entry.finish else None
    model, card = load_source(source, on_event)
    check_head(source, card)
    if isinstance(source, tuple):
        model = assemble(weights_of(model))  # in float32 on the CPU, whatever the given one is
    card = replace(named_card(card, classes), architecture=model.config)
    with displayed(on_event) as handler:
        card = replace(card, preprocess=resolve_preprocessing(card, preprocess, handler))
        limits = entry.limits._replace(agreement=agreement)
        limits = limits if difference is None else Limits(agreement, difference)
        if web_runtime is not None:
            browser_steps(card)
            outputs = ("attention",) if has_attention(model.config) else ()
        given = _gate_images(source, images, card, handler)
        calibration, given = _halves(given, format) if entry.calibrated else (None, given)
        graph = ExportGraph(model, card, outputs)
        gate = Gate(graph, card, given, limits, handler)
        metadata = _metadata(source, card, graph)
        job = ExportJob(graph, metadata, gate, dynamic_size, calibration, handler, web_runtime)
        with atomic_write(path, folder=not entry.suffix) as temporary:
            written = entry.write(job, temporary)
            report = gate.measure(open_exported(written))
            if report.failures:
                handler(Note("\n".join("  ".join(filter(None, row)) for row in report.rows())))
                raise ExportRefused(
                    f"the {format} file does not compute what the model does: {'; '.join(report.failures[:2])}; "
                    "nothing was written.",
                    report,
                )
            write_metadata(written, {GATE: json.dumps(report.as_dict())})
            if entry.finish:
                entry.finish(job, written)
    return ExportResult(source_name(source), path, format, graph.names, _bytes(path), report)


def _checked_folder(target: str | Path) -> Path:
    """The path of a folder that can be written: a new one, or an empty one."""
    path = Path(target)
    check_writable(path)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"{path} exists and is not empty: choose another folder, or remove it first.")
    return path


def _bytes(path: Path) -> int:
    """The size of a file, or of all files in a folder."""
    return sum(file.stat().st_size for file in (path, *path.rglob("*")) if file.is_file())


def _metadata(source: Source, card: Card, graph: ExportGraph) -> dict[str, str]:
    digest = card.sha256 if isinstance(source, tuple) else sha256(open_weights(located(source)).path)
    origin = {"name": source_name(source), "sha256": digest}
    return {CARD: card.to_json(), SOURCE: json.dumps(origin), OUTPUTS: json.dumps(graph.names), VERSION: __version__}


def _halves(images: GateImages | None, format: str) -> tuple[GateImages, GateImages]:
    """Images to calibrate with, and others to compare on: every other one, since data sets are sorted by class."""
    if images is None or len(images.pixels) < _FEWEST_CALIBRATED:
        raise UserError(
            f"{format} is calibrated on images like those it will be used on: pass at least {_FEWEST_CALIBRATED} with "
            "--images; half of them are compared."
        )
    first, second = (GateImages(images.pixels[i::2], images.labels[i::2], "") for i in (0, 1))
    name = f"{len(second.pixels):,} images; {len(first.pixels):,} others calibrated it"
    return first, second._replace(name=name)


def _gate_images(source: Source, images: Sequence[str | Path], card: Card, on_event: EventHandler) -> GateImages | None:
    """The user's images, with labels if they are one data set whose classes are the model's."""
    if not images:
        return None
    if len(images) == 1 and not Path(images[0]).is_file():
        try:
            split = eval_images([source], images[0], "").split
            mapping, _ = class_mapping(split.classes, card.class_names, card.architecture.classes)
            if not split.multilabel:
                return decoded_images(split, mapping[split.labels], card, on_event)
        except UserError as error:
            on_event(Note(f"the images are compared without labels: {error}"))
    split = open_images(images)
    return decoded_images(split, np.full(len(split), -1, np.int64), card, on_event)
