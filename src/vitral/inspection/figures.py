"""The paper's figures of a model's inside, each from arrays to a matplotlib figure; an extra, 'vitral[report]'.

    figure = distance_figure(mean_attention_distance(model, batches).numpy())
    figure.savefig("distance.svg")

Figures belong to no window and no global state; a notebook shows the last one of a cell.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vitral.errors import UserError

try:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ImportError as error:
    raise UserError("figures need matplotlib: pip install 'vitral[report]' to have it.") from error

INK = "#2f5fb3"


def filter_figure(components: np.ndarray, columns: int = 7) -> Figure:
    """(count, p, p, c) from 0 to 1 -> Figure 7, left; channels other than 3 are averaged."""
    rows = -(-len(components) // columns)
    figure = Figure(figsize=(columns, rows + 0.5), layout="constrained")
    figure.suptitle("RGB embedding filters (principal components)")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis in axes:
        axis.set_axis_off()
    for axis, component in zip(axes, components, strict=False):
        _show(axis, component)
    return figure


def position_figure(similarity: np.ndarray) -> Figure:
    """(h, w, h, w) cosines -> Figure 7, centre, and Figure 10: tile (i, j) compares place (i, j) with all places."""
    rows, columns = similarity.shape[:2]
    # One image with gaps: axes for each of hundreds of tiles take half a minute to lay out.
    tiles = np.pad(similarity, ((0, 0), (0, 0), (0, 1), (0, 1)), constant_values=np.nan)
    sheet = tiles.transpose(0, 2, 1, 3).reshape(rows * (rows + 1), columns * (columns + 1))[:-1, :-1]
    figure = Figure(figsize=(6.6, 6 * rows / columns), layout="constrained")
    axis = figure.subplots()
    image = axis.imshow(sheet, cmap="viridis", vmin=-1, vmax=1, interpolation="nearest")
    for ticks, count in ((axis.set_xticks, columns), (axis.set_yticks, rows)):
        ticks(np.arange(count) * (count + 1) + (count - 1) / 2, np.arange(1, count + 1), fontsize=7)
    axis.set(xlabel="input patch column", ylabel="input patch row")
    axis.set_frame_on(False)
    figure.colorbar(image, label="cosine similarity", shrink=0.8)
    return figure


def distance_figure(distance: np.ndarray) -> Figure:
    """(layers, heads) pixels -> Figure 7, right, and Figure 11: a dot for each head, the first layer is 0."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axis = figure.subplots()
    layers = np.repeat(np.arange(len(distance)), distance.shape[1])
    axis.scatter(layers, distance.ravel(), s=16, color=INK, alpha=0.8)
    axis.set(xlabel="network depth (layer)", ylabel="mean attention distance (pixels)", ylim=(0, None))
    return figure


def rollout_figure(
    pictures: Sequence[np.ndarray], maps: np.ndarray, names: Sequence[str] = (), title: str = "Attention"
) -> Figure:
    """uint8 (height, width, c) each and (b, h, w) -> Figures 6 and 14: each picture, and lit by its map.

    What lies below zero (occlusion: a patch that spoke against the class) stays dark.
    """
    figure = Figure(figsize=(4, 2 * len(pictures)), layout="constrained")
    axes = figure.subplots(len(pictures), 2, squeeze=False)
    axes[0, 0].set_title("Input")
    axes[0, 1].set_title(title)
    for number, (picture, found) in enumerate(zip(pictures, maps, strict=True)):
        light = _grown(found.clip(min=0) / max(float(found.max()), 1e-30), picture.shape[:2])
        _show(axes[number, 0], picture / 255)
        _show(axes[number, 1], picture / 255 * light[:, :, None])
        if number < len(names):
            axes[number, 0].set_ylabel(names[number], fontsize=7)
    return figure


def colour_figure(pictures: Sequence[np.ndarray], colours: np.ndarray) -> Figure:
    """uint8 (height, width, c) each and (b, h, w, 3) from 0 to 1 -> each picture above the colours of its features."""
    figure = Figure(figsize=(2 * len(pictures), 4), layout="constrained")
    axes = figure.subplots(2, len(pictures), squeeze=False)
    for number, (picture, tint) in enumerate(zip(pictures, colours, strict=True)):
        _show(axes[0, number], picture / 255)
        _show(axes[1, number], tint)
    return figure


def _show(axis: Axes, picture: np.ndarray) -> None:
    """(h, w, c) from 0 to 1"""
    plain = picture if picture.shape[2] == 3 else picture.mean(2, keepdims=True).repeat(3, 2)
    axis.imshow(plain, interpolation="nearest")
    axis.set(xticks=[], yticks=[])


def _grown(values: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """(h, w) -> size, linearly between the centres of the patches"""
    for axis, length in enumerate(size):
        count = values.shape[axis]
        places = ((np.arange(length) + 0.5) * count / length - 0.5).clip(0, count - 1)
        low = np.minimum(places.astype(int), max(count - 2, 0))
        high = np.minimum(low + 1, count - 1)
        part = np.expand_dims(places - low, 1 - axis)
        values = (1 - part) * values.take(low, axis) + part * values.take(high, axis)
    return values
