"""Charts as SVG and pictures as data URIs, drawn here so that a page needs no plotting library.

Colours come from the page's style sheet (classes s1, s2, ...), so that a chart follows the light or the dark theme.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from html import escape

import numpy as np

from vitral.data.images import encode_png
from vitral.evaluation.calibration import Bin

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 480, 270
LEFT, RIGHT, TOP, BOTTOM = 72, 24, 14, 46
DARK_TO_BRIGHT = np.array([(4, 4, 20), (72, 18, 104), (176, 46, 94), (244, 128, 42), (252, 246, 170)], np.float64)


def line_chart(series: Mapping[str, Points], *, x: str, y: str, percent: bool = False) -> str:
    """Lines by their names; long ones are drawn faint, with their running mean in front."""
    frame = _Frame([point for points in series.values() for point in points], x, y, percent)
    parts = []
    for number, (name, points) in enumerate(series.items(), 1):
        smooth = running_mean(points)
        if len(smooth) < len(points):
            parts.append(f'<polyline class="s{number} faint" points="{frame.places(points)}"/>')
        parts.append(f'<polyline class="s{number}" points="{frame.places(smooth)}"/>')
        if len(points) <= 30:
            parts += [frame.dot(point, number, f"{name}: {frame.said(point)}") for point in points]
    return frame.svg(parts, f"{y} over {x}: {', '.join(series)}") + _legend(list(series))


def dot_chart(rows: np.ndarray, *, x: str, y: str, highest: float, row: str, dot: str) -> str:
    """(rows, dots) -> a column of dots for each row, counted from 1."""
    points = [(i + 1, float(value)) for i, values in enumerate(rows) for value in values]
    frame = _Frame([*points, (1, 0.0), (len(rows), highest)], x, y, percent=False, margin=0.5)
    parts = [
        frame.dot((i + 1, float(value)), 1, f"{row} {i + 1}, {dot} {j + 1}: {value:.1f}")
        for i, values in enumerate(rows)
        for j, value in enumerate(values)
    ]
    parts.append(
        f'<polyline class="s2" points="{frame.places([(i + 1, float(v)) for i, v in enumerate(rows.mean(1))])}"/>'
    )
    return frame.svg(parts, f"{y} by {x}") + _legend([f"one {dot}", f"mean over {dot}s"])


def reliability_chart(bins: Sequence[Bin]) -> str:
    """How often an answer is right, by how sure the model was; a calibrated model stays on the diagonal."""
    frame = _Frame([(0, 0), (1, 1)], "confidence", "right answers", percent=True, percent_x=True)
    parts = [f'<polyline class="guide" points="{frame.places([(0, 0), (1, 1)])}"/>']
    most = max(row.count for row in bins)
    for row in bins:
        if not row.count:
            continue
        (left, base), (right, top) = frame.place((row.low, 0)), frame.place((row.high, row.accuracy))
        strength = 0.25 + 0.75 * row.count / most
        said = f"{row.count:,} images, confidence {row.confidence:.1%}, right {row.accuracy:.1%}"
        parts.append(
            f'<rect class="s1" x="{left + 1:.1f}" y="{top:.1f}" width="{right - left - 2:.1f}" '
            f'height="{base - top:.1f}" fill-opacity="{strength:.2f}"><title>{said}</title></rect>'
        )
    return frame.svg(parts, "Share of right answers by confidence, beside the diagonal of perfect calibration")


def confusion_table(matrix: np.ndarray, names: Sequence[str]) -> str:
    """(k, k) counts -> a table of a row for each true class; where it would be too large, a picture of it."""
    shares = matrix / np.maximum(matrix.sum(1, keepdims=True), 1)
    if len(names) > 25:
        side = max(1, 640 // len(names))
        return picture_tag(enlarged(heat(np.sqrt(shares)), side), "Confusion matrix: true classes down, answers across")
    labels = [f'<span title="{escape(name)}">{escape(name)}</span>' for name in names]
    head = "".join(f'<th scope="col">{label}</th>' for label in labels)
    rows = []
    for true, (counts, parts) in enumerate(zip(matrix.tolist(), shares.tolist(), strict=True)):
        cells = "".join(
            f'<td class="{"right" if guess == true else "wrong"}" style="--share:{part:.3f}" '
            f'title="{escape(names[true])} taken for {escape(names[guess])}: {count}">{count or ""}</td>'
            for guess, (count, part) in enumerate(zip(counts, parts, strict=True))
        )
        rows.append(f'<tr><th scope="row">{labels[true]}</th>{cells}</tr>')
    corner = "<td class='corner'>true \\ answer</td>"
    table = f'<table class="confusion"><tr>{corner}{head}</tr>{"".join(rows)}</table>'
    return f'<div class="scroll" tabindex="0" role="region" aria-label="Confusion matrix">{table}</div>'


def heat(values: np.ndarray) -> np.ndarray:
    """(..., h, w) from 0 to 1 -> uint8 (..., h, w, 3), dark to bright"""
    place = values.clip(0, 1) * (len(DARK_TO_BRIGHT) - 1)
    low = np.minimum(place.astype(int), len(DARK_TO_BRIGHT) - 2)
    part = (place - low)[..., None]
    return np.rint((1 - part) * DARK_TO_BRIGHT[low] + part * DARK_TO_BRIGHT[low + 1]).astype(np.uint8)


def tiled(tiles: np.ndarray, columns: int, size: int) -> np.ndarray:
    """uint8 (count, h, w, c) -> one uint8 (H, W, 4), the longer side about `size`: tiles row by row, clear between them

    A pixel of a tile becomes at most 32 wide: few and small tiles make a small sheet.
    """
    rows = -(-len(tiles) // columns)
    times = min(max(1, round(size / max(columns * tiles.shape[2], rows * tiles.shape[1])) - 1), 32)
    height, side = times * tiles.shape[1], times * tiles.shape[2]
    gap = max(2, side // 16)
    sheet = np.zeros((rows * (height + gap) - gap, columns * (side + gap) - gap, 4), np.uint8)
    for number, tile in enumerate(tiles):
        top, left = number // columns * (height + gap), number % columns * (side + gap)
        place = sheet[top : top + height, left : left + side]
        place[..., :3], place[..., 3] = enlarged(_three(tile), times), 255
    return sheet


def enlarged(image: np.ndarray, times: int) -> np.ndarray:
    """uint8 (h, w, c) -> (times * h, times * w, c), pixels kept crisp"""
    return image.repeat(times, 0).repeat(times, 1)


def picture_uri(image: np.ndarray) -> str:
    """uint8 (h, w, c) -> a data URI; four channels are colours and opacity"""
    return f"data:image/png;base64,{base64.b64encode(encode_png(np.ascontiguousarray(image))).decode()}"


def photo_uri(image: np.ndarray) -> str:
    """uint8 (h, w, c), whatever the channels are -> a data URI"""
    return picture_uri(_three(image))


def picture_tag(image: np.ndarray, said: str) -> str:
    """uint8 (h, w, c) -> an image that grows to the width it has"""
    height, width = image.shape[:2]
    return f'<img class="sheet" src="{picture_uri(image)}" width="{width}" height="{height}" alt="{escape(said)}">'


def running_mean(points: Points) -> Points:
    """Windows of a 25th of a long line; a short one stays as it is."""
    size = len(points) // 25
    if size < 2:
        return points
    values = np.array([y for _, y in points], np.float64)
    ends = range(size, len(points) + 1, max(size // 2, 1))
    return [(points[end - 1 - size // 2][0], float(values[end - size : end].mean())) for end in ends]


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers from at least `low` to at most `high`, `most` + 1 of them at the utmost."""
    span = (high - low) or 1.0
    power = 10.0 ** math.floor(math.log10(span / most))
    step = next(power * times for times in (1, 2, 5, 10, 20) if span / (power * times) <= most)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


class _Frame:
    """Axes around points, and where a point lies between them."""

    def __init__(
        self, points: Points, x: str, y: str, percent: bool, *, margin: float = 0.0, percent_x: bool = False
    ) -> None:
        xs, ys = [point[0] for point in points] or [0.0], [point[1] for point in points] or [0.0]
        self.x, self.y, self.percent, self.percent_x = x, y, percent, percent_x
        self.low_x, self.high_x = min(xs) - margin, max(xs) + margin
        bottom, top = min(ys), max(ys)
        self.low_y = 0.0 if 0 <= bottom < 0.5 * top or 0 < bottom == top else bottom
        self.high_y = top if top > self.low_y else self.low_y + 1

    def place(self, point: tuple[float, float]) -> tuple[float, float]:
        across = (point[0] - self.low_x) / ((self.high_x - self.low_x) or 1)
        up = (point[1] - self.low_y) / (self.high_y - self.low_y)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    def places(self, points: Points) -> str:
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in map(self.place, points))

    def dot(self, point: tuple[float, float], number: int, said: str) -> str:
        x, y = self.place(point)
        return f'<circle class="s{number}" cx="{x:.1f}" cy="{y:.1f}" r="3.2"><title>{escape(said)}</title></circle>'

    def said(self, point: tuple[float, float]) -> str:
        return f"{_number(point[1], self.percent)} at {self.x} {_number(point[0], self.percent_x)}"

    def svg(self, parts: Sequence[str], label: str) -> str:
        lines = []
        for value in ticks(self.low_y, self.high_y):
            _, y = self.place((self.low_x, value))
            lines.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            said = _number(value, self.percent)
            lines.append(f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{said}</text>')
        for value in ticks(self.low_x, self.high_x, 8):
            if not (self.percent_x or value.is_integer()):  # steps and layers are counted
                continue
            x, _ = self.place((value, self.low_y))
            said = _number(value, self.percent_x)
            lines.append(
                f'<text class="tick" x="{x:.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{said}</text>'
            )
        middle, centre = (LEFT + WIDTH - RIGHT) / 2, (TOP + HEIGHT - BOTTOM) / 2
        lines.append(f'<text class="axis" x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(self.x)}</text>')
        turned = f'transform="translate(13 {centre}) rotate(-90)" text-anchor="middle"'
        lines.append(f'<text class="axis" {turned}>{escape(self.y)}</text>')
        inside = "".join((*lines, *parts))
        return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">{inside}</svg>'


def _three(image: np.ndarray) -> np.ndarray:
    """uint8 (h, w, c) -> (h, w, 3): what are no colours is shown as its mean"""
    return image if image.shape[2] == 3 else image.mean(2, keepdims=True).repeat(3, 2).astype(np.uint8)


def _legend(names: Sequence[str]) -> str:
    if len(names) < 2:
        return ""
    items = "".join(f'<span><i class="s{i}"></i>{escape(name)}</span>' for i, name in enumerate(names, 1))
    return f'<p class="key">{items}</p>'


def _number(value: float, percent: bool) -> str:
    if percent:
        return f"{100 * value:.3g} %"
    size = abs(value)
    if size >= 10_000:
        return f"{value / 1000:.4g}k"
    return f"{value:.4g}" if size >= 1e-3 or value == 0 else f"{value:.1e}".replace(".0e", "e").replace("e-0", "e-")
