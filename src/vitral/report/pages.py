"""The pages of `vitral inspect`, of a training run, and of suspicious labels (`vitral check --model`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

import numpy as np

from vitral.data.check import SuspectLabel
from vitral.data.images import UnreadableImage
from vitral.report.charts import dot_chart, heat_map, image_grid, image_tag, line_chart
from vitral.report.evaluation import Reliability, confusion_data, headline, metric_sections
from vitral.report.html import Section, fact_table, headline_numbers, left_out_section, page, panels
from vitral.report.viewer import ViewerImage, viewer, viewer_data, viewer_notes

GRID_PIXELS = 560  # approximate size that a grid of small tiles is enlarged to
_INTRODUCTION = {
    True: "A Vision Transformer splits an image into patches, and every patch attends to all others. "
    "This page shows where the model attends, and the filters and positions it has learned.",
    False: "A ResNet passes an image through layers of convolutions. "
    "This page shows which regions its prediction depends on, and the filters of its first layer.",
}
_GRID = "display:grid;grid-template-columns:repeat(auto-fill,minmax(11rem,1fr));gap:1.25rem 1rem"


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
    left_out: Sequence[UnreadableImage] = (),
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
        left_out: images that could not be read.

    Returns:
        HTML.
    """
    sections = [viewer_section(images, pooled_name)] if images else []
    sections.append(weights_section(learned))
    if distance is not None:
        sections.append(_distance_section(distance))
    sections += left_out_section(left_out)
    sections.append(Section("model", "Model", "", fact_table(model)))
    lead = f'<p class="lead">{_INTRODUCTION[has_attention]}</p>'
    return page(title, lead, sections, viewer_data(images, pooled_name))


def viewer_section(
    images: Sequence[ViewerImage], pooled_name: str, name: str = "maps", title: str = "", about: str = ""
) -> Section:
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
    return Section(name, title, about, viewer(images, pooled_name) + notes)


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
    return Section("filters", title, about, panels(*charts))


def _distance_section(measured: AttentionDistance) -> Section:
    """The right of Figure 7, and Figure 11."""
    layer = "layer (each block: along rows, then along columns)" if measured.axial else "layer"
    chart = dot_chart(measured.distance, x=layer, y="pixels", highest=measured.side / 2, row="layer", dot="head")
    about = (
        "Each dot is one head: the distance between a patch and the patches it attends to, weighted by attention. "
        f"Averaged over {measured.images} image{'s' * (measured.images != 1)} (the paper uses 128). Tokens other than "
        "patches are left out, and the remaining weights of each row are normalised to sum to 1."
    )
    return Section("distance", "Attention distance", about, panels(("Mean attention distance", chart)))


class RunExamples(NamedTuple):
    """Held-out images that the model was evaluated on again for the page."""

    images: Sequence[ViewerImage]
    pooled_name: str
    mistakes: int  # how many of `images`, at the front, are wrong
    reliability: Reliability | None  # None where images have several labels or none
    evaluated: int
    sigmoid: bool = False  # each class has its own probability


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
    reliability, sigmoid = (None, False) if examples is None else (examples.reliability, examples.sigmoid)
    sections += metric_sections(metrics, reliability, fitted=result.get("calibration", ""), sigmoid=sigmoid)
    sections += left_out_section([UnreadableImage(**image) for image in result.get("unreadable", ())])
    sections.append(weights_section(learned))
    details = f"<details><summary>Full recipe</summary><pre>{escape(recipe)}</pre></details>"
    sections.append(Section("model", "Model and recipe", "", fact_table(model) + details))
    data = {} if examples is None else viewer_data(examples.images, examples.pooled_name)
    minutes, seconds = divmod(round(result["seconds"]), 60)
    numbers = {**headline(metrics), "time": f"{minutes} min {seconds} s" if minutes else f"{seconds} s"}
    return page(title, headline_numbers(numbers), sections, {**data, **confusion_data(metrics)})


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
    name, title = "examples", "Examples"
    if examples.reliability is None:
        about = f"{len(examples.images)} {total}."
        about += " A ✓ marks the classes of an image." if examples.images[0].truth else ""
    elif examples.mistakes:
        name, title = "mistakes", "Most confident mistakes"
        about = f"The wrong predictions with the highest probability, {total}: the true class, the predicted class "
        about += "and its probability. Bright patches are the evidence for the predicted class."
        right = len(examples.images) - examples.mistakes
        count = "image is a right prediction" if right == 1 else f"{right} images are right predictions"
        about += f" The last {count} with the lowest probability." if right else ""
    else:
        title, about = "Least confident predictions", f"The lowest probability {total}; none is wrong."
    return viewer_section(examples.images, examples.pooled_name, name, title, about)


def label_errors_page(
    source: str, images: int, suspects: Sequence[SuspectLabel], thumbnails: Sequence[np.ndarray]
) -> str:
    """Write the page.

    Args:
        source: the data set.
        images: how many images were judged.
        suspects: all suspicious labels, the most suspicious first.
        thumbnails: uint8 (h, w, c) of the first of them; the others are left out of the page.

    Returns:
        HTML.
    """
    numbers = {
        "images": f"{images:,}",
        "suspicious labels": f"{len(suspects):,}",
        "likely wrong": f"{sum(suspect.likely for suspect in suspects):,}",
    }
    shown = list(zip(suspects, thumbnails, strict=False))
    about = (
        "The most suspicious first. Each image was judged by a linear classifier of the model's features that was "
        "fitted to other images only; a percentage is its probability. Not every one is an error: unusual images of "
        "a class are listed, too."
    )
    if len(shown) < len(suspects):
        about += f" {len(suspects) - len(shown):,} more are in the JSON output."
    cells = "".join(_figure(suspect, thumbnail) for suspect, thumbnail in shown)
    body = f'<div style="{_GRID}">{cells}</div>' if cells else "<p>No label is suspicious.</p>"
    title = f"Suspicious labels of {source}"
    return page(title, headline_numbers(numbers), [Section("labels", "Suspicious labels", about, body)], {})


def _figure(suspect: SuspectLabel, thumbnail: np.ndarray) -> str:
    description = f"{suspect.image}, labelled {suspect.label}"
    caption = (
        f"<strong>{escape(suspect.label)}</strong> {suspect.confidence:.0%}, looks like "
        f"<strong>{escape(suspect.suggested)}</strong> {suspect.suggested_confidence:.0%}"
        f"{' (likely wrong)' if suspect.likely else ''}<br><small>{escape(suspect.image)}</small>"
    )
    caption = f'<figcaption style="font-weight:400">{caption}</figcaption>'
    return f'<figure style="margin:0;overflow-wrap:anywhere">{image_tag(thumbnail, description)}{caption}</figure>'
