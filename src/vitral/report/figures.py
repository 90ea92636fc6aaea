"""The paper's figures of a model and its attention, from arrays to SVG, and to PNG where they are made of images."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vitral.atomic import atomic_write
from vitral.data.images import encode_png
from vitral.report.charts import as_rgb, dot_chart, heat_map, image_grid, png_uri, svg_file
from vitral.report.pages import AttentionDistance, LearnedWeights
from vitral.report.viewer import MAPS, ViewerImage

_TILE = 240  # approximate pixels of an image in a figure
_MARGIN, _LINE = 12, 22  # pixels
_LABEL = 14  # least pixels between two numbers of an axis


class Figure(NamedTuple):
    """A figure with its titles as SVG; `image` are its pixels without them, uint8 (height, width, 4)."""

    svg: str
    image: np.ndarray | None  # None for a chart

    def write(self, folder: Path, name: str) -> tuple[Path, ...]:
        """Write NAME.svg, and NAME.png where there is an image; returns the paths."""
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
    """Write all figures of a model and of images into a folder.

    Args:
        folder: Created where it does not exist.
        learned: The model's filters and position embeddings.
        images: Inspected images; may be empty.
        measured: The attention distance, where it was measured.

    Returns:
        The paths of the files.
    """
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
    """Figure 7, left: the principal components of the embedding filters.

    Args:
        filters: (count, height, width, channels) between 0 and 1; other than 3 channels are averaged.
    """
    columns = min(7, len(filters))
    image = image_grid(_as_uint8(filters), columns, 100 * columns)
    return Figure(_svg(image, "Embedding filters (principal components)"), image)


def position_figure(similarity: np.ndarray) -> Figure:
    """Figure 7, centre, and Figure 10: one tile per position, which compares it with all positions.

    Args:
        similarity: Cosines (h, w, h, w).
    """
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
    """Figure 7, right, and Figure 11: the mean attention distance of each head.

    Args:
        distance: Pixels (layers, heads).
        image_size: Pixels of the longer side of the images; the axis reaches to half of it at least.
    """
    chart = dot_chart(distance, x="layer", y="pixels", highest=image_size / 2, row="layer", dot="head")
    svg = chart[: chart.index("</svg>") + len("</svg>")]  # without the legend, which is HTML
    return Figure(
        svg_file([svg], "Mean attention distance", "One dot per head; the line is the mean over heads."), None
    )


def overlay_figure(
    images: Sequence[np.ndarray], maps: np.ndarray, names: Sequence[str] = (), title: str = "Attention"
) -> Figure:
    """Figures 6 and 14: each image, and the same with its brightness scaled by its map.

    Args:
        images: uint8 (height, width, channels) each, of one size.
        maps: (images, h, w). Values below zero (occlusion: patches that lower the probability) are black.
        names: Labels of the images.
        title: Heading of the maps.
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
    """Each image above the principal components of its patch features, as colours.

    Args:
        images: uint8 (height, width, channels) each, of one size.
        colours: (images, h, w, 3) between 0 and 1.
    """
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
