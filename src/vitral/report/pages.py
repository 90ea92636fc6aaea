"""The pages of `vitral inspect`, of a run and of suspicious labels, and the paper's figures as SVG and PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitral.atomic import atomic_write
from vitral.data.check import SuspectLabel
from vitral.data.images import UnreadableImage, encode_png
from vitral.report.charts import as_rgb, dot_chart, heat_map, image_grid, image_tag, line_chart, png_uri, svg_file
from vitral.report.evaluation import Reliability, confusion_data, headline, metric_sections
from vitral.report.html import Section, fact_table, headline_numbers, left_out_section, page, panels
from vitral.report.viewer import MAPS, ViewerImage, viewer, viewer_data, viewer_notes

GRID_PIXELS = 560  # approximate size that a grid of small tiles is enlarged to
_INTRODUCTION = {
    True: "A Vision Transformer splits an image into patches, and every patch attends to all others. "
    "This page shows where the model attends, and the filters and positions it has learned.",
    False: "A ResNet passes an image through layers of convolutions. "
    "This page shows which regions its prediction depends on, and the filters of its first layer.",
}
_GRID = "display:grid;grid-template-columns:repeat(auto-fill,minmax(11rem,1fr));gap:1.25rem 1rem;margin-top:1rem"
_TILE = 240  # approximate pixels of an image in a figure
_MARGIN, _LINE = 12, 22  # pixels
_LABEL = 14  # least pixels between two numbers of an axis


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

    `pooled_name` is what the model pools at the end, such as "the class token"; `distance` is None for a ResNet.
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
        "The sentence next to the image states the numbers."
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
        about += " Next to them, one tile per patch position: its cosine similarity to all positions."
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
    reliability: Reliability | None  # None if images have several labels or none
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
    """Write the page of a run, of its result.json, the lines of metrics.jsonl and recipe.toml."""
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
    about = "Held-out images are never trained on." if drawn else "The run has too few steps for curves."
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
    """Write the page of suspicious labels among this many images, the most suspicious first.

    Thumbnails, uint8 (h, w, c), are of the first of them; the others are left out of the page.
    """
    numbers = {
        "images": f"{images:,}",
        "suspicious labels": f"{len(suspects):,}",
        "likely wrong": f"{sum(suspect.likely for suspect in suspects):,}",
    }
    shown = list(zip(suspects, thumbnails, strict=False))
    about = (
        "The most suspicious first. Each image was scored by a linear classifier on the model's features that was "
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
    caption = f'<figcaption style="font-weight:400;margin-top:.4rem">{caption}</figcaption>'
    return (
        f'<figure style="margin:0;overflow-wrap:anywhere">{image_tag(as_rgb(thumbnail), description)}{caption}</figure>'
    )


class Figure(NamedTuple):
    """A figure with its titles as SVG; `image` are its pixels without them, uint8 (height, width, 4)."""

    svg: str
    image: np.ndarray | None  # None for a chart

    def write(self, folder: Path, name: str) -> tuple[Path, ...]:
        """Write NAME.svg, and NAME.png if there is an image; returns the paths."""
        files = {folder / f"{name}.svg": self.svg.encode("utf-8", "replace")}
        if self.image is not None:
            files[folder / f"{name}.png"] = encode_png(np.ascontiguousarray(self.image))
        for path, data in files.items():
            with atomic_write(path) as temporary:
                temporary.write_bytes(data)
        return tuple(files)


def write_figures(
    folder: Path, learned: LearnedWeights, images: Sequence[ViewerImage], measured: AttentionDistance | None
) -> tuple[Path, ...]:
    """Write all figures of a model, and of images if there are any, into a folder; returns the paths."""
    figures = {"filters": filter_figure(learned.filters)}
    if learned.similarity is not None:
        figures["positions"] = position_figure(learned.similarity)
    if measured is not None:
        figures["distance"] = distance_figure(measured.distance, measured.side)
    if images:
        first = images[0].inspection
        height, width = first.side * first.grid[0], first.side * first.grid[1]
        pixels, names = [image.picture[:height, :width] for image in images], [image.name for image in images]
        figures["colours"] = colour_figure(pixels, np.stack([image.inspection.colours for image in images]))
        for name in first.maps:
            maps = np.stack([image.inspection.maps[name] for image in images])
            figures[name] = overlay_figure(pixels, maps, names, MAPS[name][0])
    return tuple(path for name, figure in figures.items() for path in figure.write(folder, name))


def filter_figure(filters: np.ndarray) -> Figure:
    """Figure 7, left: principal components of the embedding filters, (count, height, width, channels) from 0 to 1."""
    columns = min(7, len(filters))
    image = image_grid(_as_uint8(filters), columns, 100 * columns)
    return Figure(_svg(image, "Embedding filters (principal components)"), image)


def position_figure(similarity: np.ndarray) -> Figure:
    """Figure 7, centre, and Figure 10: one tile per position, with its cosines to all positions, (h, w, h, w)."""
    rows, columns = similarity.shape[:2]
    image = image_grid(heat_map((similarity.reshape(-1, rows, columns) + 1) / 2), columns, 640)
    height, width = image.shape[:2]
    parts = [
        _text((i + 0.5) * width / columns, height + 14, str(i + 1), size=10, anchor="middle")
        for i in range(0, columns, _every(width / columns))
    ]
    parts += [
        _text(-8, (i + 0.5) * height / rows + 4, str(i + 1), size=10, anchor="end")
        for i in range(0, rows, _every(height / rows))
    ]
    parts.append(_text(width / 2, height + 32, "input patch column", anchor="middle"))
    parts.append(_vertical(-30, height / 2, "input patch row"))
    scale = heat_map(np.linspace(1, 0, 128)[:, None])
    parts.append(_image(scale, width + 16, 0, 14, height))
    for value, y in ((1, 10), (0, height / 2 + 4), (-1, height)):
        parts.append(_text(width + 36, y, str(value), size=10))
    parts.append(_vertical(width + 66, height / 2, "cosine similarity"))
    title = "Similarity of the position embeddings"
    return Figure(_svg(image, title, parts, left=48, right=72, bottom=40), image)


def distance_figure(distance: np.ndarray, image_size: int = 0) -> Figure:
    """Figure 7, right, and Figure 11: the mean attention distance of each head, in pixels (layers, heads)."""
    chart = dot_chart(distance, x="layer", y="pixels", highest=image_size / 2, row="layer", dot="head")
    svg = chart[: chart.index("</svg>") + len("</svg>")]  # without the legend, which is HTML
    return Figure(
        svg_file([svg], "Mean attention distance", "One dot per head; the line is the mean over heads."), None
    )


def overlay_figure(
    images: Sequence[np.ndarray], maps: np.ndarray, names: Sequence[str] = (), title: str = "Attention"
) -> Figure:
    """Figures 6 and 14: each image, uint8 (height, width, channels), beside itself darkened by its map.

    Maps are (images, h, w). Values below zero (occlusion: patches that lower the probability) are black.
    """
    tiles = []
    for image, values in zip(images, maps, strict=True):
        brightness = _interpolated(values.clip(min=0) / max(float(values.max()), 1e-30), image.shape[:2])
        tiles += [image, _as_uint8(image / 255 * brightness[:, :, None])]
    grid = image_grid(np.stack(tiles), 2, _TILE * max(2, len(images)))
    height, width = grid.shape[:2]
    parts = [_text(0, -8, "Input"), _text(width / 2 + 4, -8, title)]
    parts += [_vertical(-8, (i + 0.5) * height / len(images), name, size=10) for i, name in enumerate(names)]
    return Figure(_svg(grid, "", parts, left=24 if names else 0), grid)


def colour_figure(images: Sequence[np.ndarray], colours: np.ndarray) -> Figure:
    """Each image above the principal components of its patch features as colours, (images, h, w, 3) from 0 to 1."""
    height, width = images[0].shape[:2]
    rows = np.arange(height) * colours.shape[1] // height
    columns = np.arange(width) * colours.shape[2] // width
    enlarged = _as_uint8(colours[:, rows][:, :, columns])
    grid = image_grid(np.stack([*map(as_rgb, images), *enlarged]), len(images), _TILE * max(2, len(images)))
    return Figure(_svg(grid, "First three principal components of the patch features"), grid)


def _svg(
    image: np.ndarray, title: str, parts: Sequence[str] = (), *, left: int = 0, right: int = 0, bottom: int = 0
) -> str:
    """An SVG file of an image below its title; `parts` are placed relative to the image's top left corner."""
    height, width = image.shape[:2]
    size = (width + left + right + 2 * _MARGIN, height + _LINE + bottom + 2 * _MARGIN)
    body = "".join([_text(0, -8, title) if title else "", _image(image, 0, 0, width, height), *parts])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{size[0]}" height="{size[1]}" '
        f'viewBox="0 0 {size[0]} {size[1]}" font-family="system-ui, sans-serif" fill="#333">'
        f'<rect width="100%" height="100%" fill="#fff"/>'
        f'<g transform="translate({left + _MARGIN} {_LINE + _MARGIN})">{body}</g></svg>\n'
    )


def _image(image: np.ndarray, x: float, y: float, width: float, height: float) -> str:
    box = f'x="{x}" y="{y}" width="{width}" height="{height}" preserveAspectRatio="none"'
    return f'<image {box} href="{png_uri(image)}" style="image-rendering: pixelated"/>'


def _text(x: float, y: float, text: str, *, size: int = 13, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{escape(text)}</text>'


def _vertical(x: float, y: float, text: str, size: int = 13) -> str:
    turned = f'transform="translate({x:.1f} {y:.1f}) rotate(-90)"'
    return f'<text {turned} font-size="{size}" text-anchor="middle">{escape(text)}</text>'


def _every(pixels: float) -> int:
    """Label every n-th tile of this size."""
    return max(1, -(-_LABEL // max(int(pixels), 1)))


def _as_uint8(image: np.ndarray) -> np.ndarray:
    return np.rint(255 * image).astype(np.uint8)


def _interpolated(values: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """(h, w) -> size, linear between the centres of the patches"""
    for axis, length in enumerate(size):
        count = values.shape[axis]
        position = ((np.arange(length) + 0.5) * count / length - 0.5).clip(0, count - 1)
        low = np.minimum(position.astype(int), max(count - 2, 0))
        high = np.minimum(low + 1, count - 1)
        fraction = np.expand_dims(position - low, 1 - axis)
        values = (1 - fraction) * values.take(low, axis) + fraction * values.take(high, axis)
    return values
