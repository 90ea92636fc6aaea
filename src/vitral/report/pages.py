"""Self-contained HTML pages: about a model and images (`vitral inspect`), and about a training run."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any, NamedTuple

import numpy as np

from vitral.evaluation.calibration import ReliabilityBin, calibration_error
from vitral.report.charts import (
    confusion_table,
    dot_chart,
    heat_map,
    image_grid,
    image_tag,
    line_chart,
    reliability_chart,
)
from vitral.report.viewer import ViewerImage, viewer, viewer_data, viewer_notes
from vitral.version import __version__

GRID_PIXELS = 560  # approximate size that a grid of small tiles is enlarged to
_INTRODUCTION = {
    True: "A Vision Transformer splits an image into patches, and every patch attends to all others. "
    "This page shows where the model attends, and the filters and positions it has learned.",
    False: "A ResNet passes an image through layers of convolutions. "
    "This page shows which regions its prediction depends on, and the filters of its first layer.",
}
_METRICS = {
    "recall": "Recall: the share of the class's images that are predicted as this class.",
    "precision": "Precision: the share of predictions of this class that are right.",
    "average_precision": "Average precision: how well images of the class are ranked above all others.",
    "threshold": "Threshold: the probability from which on predicting the class gives the best F1 score.",
}


class Section(NamedTuple):
    """A part of a page with its heading and an introduction for first-time readers."""

    name: str
    title: str
    about: str  # HTML
    body: str  # HTML


def page(title: str, lead: str, sections: Sequence[Section], data: Mapping[str, Any]) -> str:
    """Write a self-contained HTML file.

    Args:
        title: heading of the page.
        lead: HTML below the heading.
        sections: the parts of the page, linked from its head.
        data: JSON-ready values that the script reads.

    Returns:
        HTML.
    """
    links = "".join(f'<a href="#{section.name}">{escape(section.title)}</a>' for section in sections)
    body = "".join(_section(section) for section in sections)
    html = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>
{_resource("page.css")}</style>
</head>
<body>
<a class="skip" href="#main">Skip to the content</a>
<header>
<div class="bar">{_logo()}<span class="brand">vitral</span><nav aria-label="Sections">{links}</nav>
<button type="button" id="theme" aria-label="Switch between light and dark">◐</button></div>
<h1>{escape(title)}</h1>
{lead}
</header>
<main id="main">
{body}</main>
<footer>Made by vitral {__version__}. This file is self-contained: it loads nothing and sends nothing.</footer>
<script type="application/json" id="data">{_embedded(data)}</script>
<script>
{_resource("page.js")}</script>
</body>
</html>
"""
    # File names need not be valid UTF-8, but the page must be.
    return re.sub("[\ud800-\udfff]", "\N{REPLACEMENT CHARACTER}", html)


def fact_table(rows: Mapping[str, str]) -> str:
    """A table of names and values; empty values are left out."""
    cells = (
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>' for name, value in rows.items() if value
    )
    return f'<div class="scroll"><table class="facts">{"".join(cells)}</table></div>'


def headline_numbers(numbers: Mapping[str, str]) -> str:
    """A few numbers in large type; empty ones are left out."""
    cells = (f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in numbers.items() if value)
    return f'<dl class="numbers">{"".join(cells)}</dl>'


def panels(*charts: tuple[str, str]) -> str:
    """Captions with their charts, side by side as far as they fit."""
    parts = (f"<figure><figcaption>{escape(name)}</figcaption>{chart}</figure>" for name, chart in charts)
    return f'<div class="panels">{"".join(parts)}</div>'


def _section(section: Section) -> str:
    about = f'<p class="about">{section.about}</p>' if section.about else ""
    head = f'<h2 id="{section.name}-title">{escape(section.title)}</h2>{about}'
    return f'<section id="{section.name}" aria-labelledby="{section.name}-title">{head}{section.body}</section>\n'


def _embedded(data: Mapping[str, Any]) -> str:
    """JSON that cannot close the script element around it."""
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")


def _resource(name: str) -> str:
    return files("vitral.report").joinpath(name).read_text("utf-8")


def _logo() -> str:
    """A stained-glass window of four by four panes."""
    panes = "bcyrcbryyrbcrycb"
    colours = {"b": "#2f5fb3", "c": "#2a9d8f", "y": "#e9b44c", "r": "#c8553d"}
    cells = (
        f'<rect x="{i % 4 * 7}" y="{i // 4 * 7}" width="6" height="6" rx="1" fill="{colours[letter]}"/>'
        for i, letter in enumerate(panes)
    )
    return f'<svg class="glass" viewBox="0 0 27 27" aria-hidden="true">{"".join(cells)}</svg>'


class LearnedWeights(NamedTuple):
    """What a model's weights show without any image."""

    filters: np.ndarray  # (count, p, p, c) from 0 to 1
    explained: float  # share of the filters' variance that these components explain together
    source: str  # which filters they are
    similarity: np.ndarray | None  # (h, w, h, w), where positions are embedded


class AttentionDistance(NamedTuple):
    """Mean attention distance of every layer and head."""

    distance: np.ndarray  # (layers, heads) in pixels
    images: int  # averaged over
    side: int  # pixels of the longer side of an image
    axial: bool


def inspect_page(
    title: str,
    model: Mapping[str, str],
    learned: LearnedWeights,
    images: Sequence[ViewerImage] = (),
    pooled_name: str = "",
    distance: AttentionDistance | None = None,
    has_attention: bool = True,
) -> str:
    """Write the page about a model and images.

    Args:
        title: heading of the page.
        model: facts for the table of the model.
        learned: filters and position similarities.
        images: images with their predictions and maps.
        pooled_name: what the model pools at the end, such as "the class token".
        distance: mean attention distance over the images; None for a ResNet or without images.
        has_attention: False for a ResNet.

    Returns:
        HTML.
    """
    sections = [viewer_section(images, pooled_name)] if images else []
    sections.append(weights_section(learned))
    if distance is not None:
        sections.append(_distance_section(distance))
    sections.append(Section("model", "Model", "", fact_table(model)))
    lead = f'<p class="lead">{_INTRODUCTION[has_attention]}</p>'
    return page(title, lead, sections, viewer_data(images, pooled_name))


def viewer_section(images: Sequence[ViewerImage], pooled_name: str, title: str = "", about: str = "") -> Section:
    """The viewer of attention and attribution maps; without `title` and `about` they follow from the model."""
    has_attention = images[0].inspection.pooled is not None
    if not about and not has_attention:
        about = "Choose an image: bright regions are those that the prediction depends on."
    about = about or (
        "Choose an image, a layer and a head: bright patches get the most attention. "
        "The sentence beside the image states the numbers."
    )
    notes = f'<p class="hint">{escape(viewer_notes(images, pooled_name))}</p>'
    title = title or ("Attention maps" if has_attention else "Occlusion maps")
    return Section("look", title, about, viewer(images, pooled_name) + notes)


def weights_section(learned: LearnedWeights) -> Section:
    """Embedding filters and position similarity: the left and the centre of the paper's Figure 7."""
    tiles = np.rint(255 * learned.filters).astype(np.uint8)
    grid = image_grid(tiles, min(7, len(tiles)), GRID_PIXELS)
    caption = f"The first {len(tiles)} principal components of {learned.source}"
    charts = [(f"{caption}, {learned.explained:.0%} of the variance", image_tag(grid, caption))]
    title, about = "Learned filters", "The patterns that the first layer responds to, strongest first."
    if learned.similarity is not None and learned.similarity[0, 0].size > 1:
        title = "Learned filters and position embeddings"
        about += " Beside them, one tile per patch position: its cosine similarity to all positions."
        rows, columns = learned.similarity.shape[:2]
        tiles = heat_map((learned.similarity.reshape(-1, rows, columns) + 1) / 2)
        caption = (
            f"Position similarity: {rows} by {columns} tiles, one per position, bright where embeddings are similar"
        )
        grid = image_grid(tiles, columns, GRID_PIXELS)
        charts.append(("Similarity of the position embeddings", image_tag(grid, caption)))
    return Section("learned", title, about, panels(*charts))


def _distance_section(measured: AttentionDistance) -> Section:
    """The right of Figure 7, and Figure 11."""
    layer = "layer (each block: along rows, then along columns)" if measured.axial else "layer"
    chart = dot_chart(measured.distance, x=layer, y="pixels", highest=measured.side / 2, row="layer", dot="head")
    about = (
        "Each dot is one head: the distance between a patch and the patches it attends to, weighted by attention. "
        f"Averaged over {measured.images} image{'s' * (measured.images != 1)} (the paper uses 128). Tokens other than "
        "patches are left out, and the remaining weights of each row are normalised to sum to 1."
    )
    return Section("reach", "Attention distance", about, panels(("Mean attention distance", chart)))


class RunExamples(NamedTuple):
    """Held-out images that the model was evaluated on again for the page."""

    images: Sequence[ViewerImage]
    pooled_name: str
    mistakes: int  # how many of `images`, at the front, are wrong
    bins: tuple[ReliabilityBin, ...]  # reliability; empty where images have several labels or none
    evaluated: int


def run_page(
    title: str,
    result: Mapping[str, Any],
    lines: Sequence[Mapping[str, Any]],
    model: Mapping[str, str],
    recipe: str,
    learned: LearnedWeights,
    examples: RunExamples | None,
) -> str:
    """Write the page of a run.

    Args:
        title: heading of the page.
        result: the contents of result.json.
        lines: the lines of metrics.jsonl.
        model: facts for the table of the model.
        recipe: the recipe as TOML.
        learned: filters and position similarities.
        examples: held-out images with predictions; None where there are none.

    Returns:
        HTML.
    """
    metrics = result["metrics"]
    sections = [_curves_section(lines)]
    if examples is not None and examples.images:
        sections.append(_examples_section(examples))
    if metrics.get("confusion"):
        sections.append(_confusion_section(metrics))
    if examples is not None and examples.bins:
        sections.append(_calibration_section(examples, metrics, result.get("calibration", "")))
    if metrics.get("per_class"):
        sections.append(_classes_section(metrics["per_class"]))
    sections.append(weights_section(learned))
    details = f"<details><summary>Full recipe</summary><pre>{escape(recipe)}</pre></details>"
    sections.append(Section("model", "Model and recipe", "", fact_table(model) + details))
    data = {} if examples is None else viewer_data(examples.images, examples.pooled_name)
    return page(title, headline_numbers(headline(result)), sections, data)


def headline(result: Mapping[str, Any]) -> dict[str, str]:
    """The numbers in large type below the title."""
    metrics = result["metrics"]
    score = "mean average precision" if "mean_average_precision" in metrics else "accuracy"
    error = metrics.get("ece_calibrated", metrics.get("ece"))
    shares = {score: metrics.get("score"), "top 5": metrics.get("top5"), "calibration error": error}
    if "masked_loss" in metrics:
        shares = {"masked patch accuracy": metrics.get("masked_accuracy")}
    numbers = {name: f"{value:.1%}" for name, value in shares.items() if value is not None}
    if "masked_loss" in metrics:
        numbers["held-out loss"] = f"{metrics['masked_loss']:.3f}"
    minutes, seconds = divmod(round(result["seconds"]), 60)
    numbers["held-out images"] = f"{metrics['n']:,}" if metrics.get("n") else ""
    numbers["time"] = f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
    return numbers


def _curves_section(lines: Sequence[Mapping[str, Any]]) -> Section:
    """Loss, score and learning rate by step, as far as metrics.jsonl has them."""
    evaluations = [(line["step"], line["evaluation"]) for line in lines if "evaluation" in line]
    masked = any("masked_loss" in metrics for _, metrics in evaluations)  # the score is a loss then
    scores = _series(evaluations, "masked_accuracy" if masked else "score")
    charts = {
        "Training loss": {"training": _column(lines, "loss")},
        "Held-out loss": {"held-out": _series(evaluations, "nll") or _series(evaluations, "masked_loss")},
        "Score": {"held-out": scores, "training batch": _column(lines, "accuracy")},
        "Learning rate": {"learning rate": _column(lines, "lr")},
    }
    drawn = []
    for name, series in charts.items():
        filled = {label: points for label, points in series.items() if points}
        if any(len(points) > 1 for points in filled.values()):  # one point makes no curve
            drawn.append((name, line_chart(filled, x="step", y=name.lower(), percent=name == "Score")))
    about = "Held-out images are never trained on."
    return Section("curves", "Training curves", about, panels(*drawn))


def _series(evaluations: Sequence[tuple[int, Mapping[str, Any]]], name: str) -> list[tuple[float, float]]:
    return [(step, metrics[name]) for step, metrics in evaluations if name in metrics]


def _column(lines: Sequence[Mapping[str, Any]], name: str) -> list[tuple[float, float]]:
    return [(line["step"], line[name]) for line in lines if line.get(name) is not None]


def _examples_section(examples: RunExamples) -> Section:
    total = f"of {examples.evaluated:,} held-out images"
    if not examples.bins:
        title, about = "Examples", f"{len(examples.images)} {total}."
        about += " A ✓ marks the classes of an image." if examples.images[0].truth else ""
    elif examples.mistakes:
        title = "Most confident mistakes"
        about = f"The wrong predictions with the highest confidence, {total}; a ✓ marks the right class."
        right = len(examples.images) - examples.mistakes
        count = "image is a right prediction" if right == 1 else f"{right} images are right predictions"
        about += f" The last {count} with the lowest confidence." if right else ""
    else:
        title, about = "Least confident predictions", f"The lowest confidence {total}; none is wrong."
    return viewer_section(examples.images, examples.pooled_name, title, about)


def _confusion_section(metrics: Mapping[str, Any]) -> Section:
    names = [row["name"] for row in metrics["per_class"]]
    matrix = np.zeros((len(names), len(names)), np.int64)
    for true, guess, count in metrics["confusion"]:
        matrix[true, guess] = count
    pairs = "; ".join(
        f"<bdi>{escape(pair['true'])}</bdi> predicted as <bdi>{escape(pair['predicted'])}</bdi> "
        f"({pair['count']} of {pair['support']})"
        for pair in metrics.get("confused", [])[:3]
    )
    about = "Rows are true classes, columns are predictions: everything off the diagonal is a mistake."
    about += f" Most frequent: {pairs}." if pairs else " There is none."
    return Section("confusion", "Confusion matrix", about, confusion_table(matrix, names))


def _calibration_section(examples: RunExamples, metrics: Mapping[str, Any], calibration: str) -> Section:
    about = (
        "Accuracy by confidence: bars below the dashed line are overconfident, above it underconfident; "
        f"stronger colour means more images. The expected calibration error of these {examples.evaluated:,} images "
        f"is {calibration_error(examples.bins):.1%}."
    )
    if metrics.get("temperature", 1.0) != 1.0:
        before, crossed = f"{metrics['ece']:.1%}", f"{metrics['ece_calibrated']:.1%}"
        about += f" Of all images {before} before and {crossed} after calibration: {escape(calibration)}."
    return Section("calibration", "Calibration", about, panels(("", reliability_chart(examples.bins))))


def _classes_section(rows: Sequence[Mapping[str, Any]]) -> Section:
    """One row per class; a click on a column header sorts by it."""
    columns = [key for key in rows[0] if key != "name"]
    head = "".join(
        f'<th scope="col"><button type="button">{escape(name.replace("_", " "))}</button></th>'
        for name in ("class", *columns)
    )
    body = "".join(
        f'<tr><td data-value="{escape(str(row["name"]))}">{escape(str(row["name"]))}</td>'
        + "".join(_cell(row[key]) for key in columns)
        + "</tr>"
        for row in rows
    )
    table = f'<table class="classes sortable"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    about = "Click a column header to sort. " + " ".join(_METRICS[key] for key in columns if key in _METRICS)
    body = f'<div class="scroll tall" tabindex="0" role="region" aria-label="Classes">{table}</div>'
    return Section("classes", "Per-class metrics", about, body)


def _cell(value: float | int | None) -> str:
    text = "-" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.1%}"
    return f'<td data-value="{-1 if value is None else value}">{text}</td>'
