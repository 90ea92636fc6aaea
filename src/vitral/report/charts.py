"""Charts as SVG and images as data URIs, drawn without a plotting library.

Colours come from a style sheet (classes s1, s2, ...), so that a chart follows the light or the dark theme: that of the
page it is part of, or the one that `svg_file` adds to a file of charts.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from vitral.data.images import encode_jpeg, encode_png
from vitral.evaluation.calibration import ReliabilityBin

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 480, 270
LEFT, RIGHT, TOP, BOTTOM = 72, 24, 14, 46
COLOUR_MAP = np.array([(4, 4, 20), (72, 18, 104), (176, 46, 94), (244, 128, 42), (252, 246, 170)], np.float64)
_DOTTED_UP_TO = 30  # points of a line that has a dot for each
_LOW_BAR = 4.0  # height below which a bar has a dot, so that it is seen
_FILE_STYLE = """
svg { --s1: #2f5fb3; --s2: #c8553d; --s3: #2a8a7e; --ink: #5c6270; --line: #dfdbd1; --paper: #fffefb; }
@media (prefers-color-scheme: dark) {
  svg { --s1: #7fa8f2; --s2: #ef8b70; --s3: #5fc7b8; --ink: #a4a8b4; --line: #343946; --paper: #1d2028; } }
.paper { fill: var(--paper); } text { fill: var(--ink); font: 13px system-ui, sans-serif; }
.title { font-weight: 600; } .grid { stroke: var(--line); } polyline { fill: none; stroke-width: 2.4; }
.guide { stroke: var(--ink); stroke-width: 1.2; stroke-dasharray: 5 5; }
polyline.s1 { stroke: var(--s1); } polyline.s2 { stroke: var(--s2); } polyline.s3 { stroke: var(--s3); }
circle.s1, rect.s1 { fill: var(--s1); } circle.s2 { fill: var(--s2); } circle.s3 { fill: var(--s3); }
"""


def line_chart(
    series: Mapping[str, Points], *, x: str, y: str, percent: bool = False, log: bool = False, guide: Points = ()
) -> str:
    """Draw lines of points (x, y) by name as SVG, with an HTML legend of several; long ones are faint behind their
    running mean. `guide` is a dashed line; `percent`: y is a share of 1; `log`: both axes, with a tick at every x."""
    points = [*guide, *(point for points in series.values() for point in points)]
    panel = Panel(points, x, y, percent=percent, log=log)
    parts = [f'<polyline class="guide" points="{panel.polyline(guide)}"/>'] if guide else []
    for number, (name, line) in enumerate(series.items(), 1):
        smooth = running_mean(line)
        if len(smooth) < len(line):
            parts.append(f'<polyline class="s{number} faint" points="{panel.polyline(line)}"/>')
        parts.append(f'<polyline class="s{number}" points="{panel.polyline(smooth)}"/>')
        if len(line) <= _DOTTED_UP_TO:
            parts += [panel.dot(point, number, f"{name}: {panel.describe(point)}") for point in line]
    return panel.svg(parts, f"{y} over {x}: {', '.join(series)}") + _legend(list(series))


def dot_chart(rows: np.ndarray, *, x: str, y: str, highest: float, row: str, dot: str) -> str:
    """Draw a column of dots per row of (rows, dots), and the line of their means, as SVG and an HTML legend.

    The vertical axis includes `highest`; `row` and `dot` are the words for them in tooltips.
    """
    points = [(i + 1, float(value)) for i, values in enumerate(rows) for value in values]
    panel = Panel([*points, (1, 0.0), (len(rows), highest)], x, y, margin=0.5)
    parts = [
        panel.dot((i + 1, float(value)), 1, f"{row} {i + 1}, {dot} {j + 1}: {value:.1f}")
        for i, values in enumerate(rows)
        for j, value in enumerate(values)
    ]
    means = [(i + 1, float(mean)) for i, mean in enumerate(rows.mean(1))]
    parts.append(f'<polyline class="s2" points="{panel.polyline(means)}"/>')
    return panel.svg(parts, f"{y} by {x}") + _legend([f"one {dot}", f"mean over {dot}s"])


def reliability_chart(bins: Sequence[ReliabilityBin]) -> str:
    """Draw accuracy by confidence as bars, or dots if about 0 % (SVG); a calibrated model stays on the diagonal."""
    panel = Panel([(0, 0), (1, 1)], "confidence", "accuracy", percent=True, percent_x=True)
    parts = [f'<polyline class="guide" points="{panel.polyline([(0, 0), (1, 1)])}"/>']
    most = max(row.count for row in bins)
    for row in bins:
        if not row.count:
            continue
        (left, base), (right, top) = panel.position((row.low, 0)), panel.position((row.high, row.accuracy))
        opacity = 0.25 + 0.75 * row.count / most
        tooltip = f"{row.count:,} images, confidence {row.confidence:.1%}, accuracy {row.accuracy:.1%}"
        parts.append(
            f'<rect class="s1" x="{left + 1:.1f}" y="{top:.1f}" width="{right - left - 2:.1f}" '
            f'height="{base - top:.1f}" fill-opacity="{opacity:.2f}"><title>{tooltip}</title></rect>'
        )
        if base - top < _LOW_BAR:
            parts.append(panel.dot(((row.low + row.high) / 2, row.accuracy), 1, tooltip))
    return panel.svg(parts, "Accuracy by confidence, with the diagonal of perfect calibration")


def svg_file(charts: Sequence[str], title: str, note: str = "") -> str:
    """Put SVG charts without legends side by side into one file with its own style, for light and dark themes."""
    top, width = 60, len(charts) * WIDTH
    panels = "\n".join(
        chart.replace("<svg ", f'<svg x="{number * WIDTH}" y="{top}" width="{WIDTH}" height="{HEIGHT}" ', 1)
        for number, chart in enumerate(charts)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top + HEIGHT}">\n<style>{_FILE_STYLE}</style>\n'
        f'<rect class="paper" width="100%" height="100%"/>\n<text class="title" x="16" y="24">{escape(title)}</text>\n'
        f'<text x="16" y="46">{escape(note)}</text>\n{panels}\n</svg>\n'
    )


def heat_map(values: np.ndarray) -> np.ndarray:
    """Colour values between 0 and 1, dark to bright: (..., h, w) -> uint8 (..., h, w, 3)"""
    position = values.clip(0, 1) * (len(COLOUR_MAP) - 1)
    low = np.minimum(position.astype(int), len(COLOUR_MAP) - 2)
    fraction = (position - low)[..., None]
    return np.rint((1 - fraction) * COLOUR_MAP[low] + fraction * COLOUR_MAP[low + 1]).astype(np.uint8)


def image_grid(tiles: np.ndarray, columns: int, size: int) -> np.ndarray:
    """Arrange tiles uint8 (count, h, w, c) row by row with transparent gaps: uint8 (height, width, 4).

    The longer side has about `size` pixels; one pixel of a tile becomes at most 32 wide.
    """
    rows = -(-len(tiles) // columns)
    scale = min(max(1, round(size / max(columns * tiles.shape[2], rows * tiles.shape[1])) - 1), 32)
    height, width = scale * tiles.shape[1], scale * tiles.shape[2]
    gap = max(2, width // 16)
    grid = np.zeros((rows * (height + gap) - gap, columns * (width + gap) - gap, 4), np.uint8)
    for number, tile in enumerate(tiles):
        top, left = number // columns * (height + gap), number % columns * (width + gap)
        cell = grid[top : top + height, left : left + width]
        cell[..., :3], cell[..., 3] = enlarge(as_rgb(tile), scale), 255
    return grid


def enlarge(image: np.ndarray, scale: int) -> np.ndarray:
    """Repeat pixels: uint8 (h, w, c) -> (scale * h, scale * w, c)"""
    return image.repeat(scale, 0).repeat(scale, 1)


def as_rgb(image: np.ndarray) -> np.ndarray:
    """(h, w, c) -> (h, w, 3); other than 3 channels are averaged"""
    return image if image.shape[2] == 3 else image.mean(2, keepdims=True).repeat(3, 2).astype(image.dtype)


def png_uri(image: np.ndarray) -> str:
    """Encode uint8 (h, w, c) as the data URI of a PNG; a fourth channel is opacity."""
    return f"data:image/png;base64,{base64.b64encode(encode_png(np.ascontiguousarray(image))).decode()}"


def photo_uri(image: np.ndarray) -> str:
    """Encode uint8 (h, w, c) as a data URI: exactly as a PNG, or as a JPEG if that is a third of its size."""
    rgb = np.ascontiguousarray(as_rgb(image))
    exact, close = encode_png(rgb), encode_jpeg(rgb)
    if len(exact) < 3 * len(close):
        return png_uri(rgb)
    return f"data:image/jpeg;base64,{base64.b64encode(close).decode()}"


def image_tag(image: np.ndarray, description: str) -> str:
    """An HTML image of uint8 (h, w, c) that shrinks to the width it has."""
    height, width = image.shape[:2]
    size = f'width="{width}" height="{height}"'
    return f'<img class="sheet" src="{png_uri(image)}" {size} alt="{escape(description)}">'


def running_mean(points: Points) -> Points:
    """Average windows of a 25th of a long line; a short one stays as it is."""
    size = len(points) // 25
    if size < 2:
        return points
    values = np.array([y for _, y in points], np.float64)
    ends = range(size, len(points) + 1, max(size // 2, 1))
    return [(points[end - 1 - size // 2][0], float(values[end - size : end].mean())) for end in ends]


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Evenly spaced round numbers between `low` and `high`, at most `most` + 1."""
    span = (high - low) or 1.0
    power = 10.0 ** math.floor(math.log10(span / most))
    step = next(power * factor for factor in (1, 2, 5, 10, 20) if span / (power * factor) <= most)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten between `low` and `high`; only the powers if those are more than seven."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    values: list[float] = []
    for factors in ((1, 2, 5), (1,)):
        values = [float(f"{factor}e{power}") for power in powers for factor in factors]
        values = [value for value in values if low <= value <= high]
        if len(values) <= 7:
            break
    return values or [float(f"{end:.3g}") for end in dict.fromkeys((low, high))]


@dataclass(frozen=True)
class Scale:
    """Maps values between `low` and `high`, or their logarithms, to pixels between `start` and `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = (math.log(number) if self.log else number for number in (self.low, self.high, value))
        return self.start + (at - low) / ((high - low) or 1) * (self.end - self.start)

    def ticks(self, most: int) -> list[float]:
        return log_ticks(self.low, self.high) if self.log else ticks(self.low, self.high, most)


class Panel:
    """Axes around points, both linear or both logarithmic."""

    def __init__(
        self,
        points: Points,
        x: str,
        y: str,
        *,
        percent: bool = False,
        percent_x: bool = False,
        margin: float = 0.0,
        log: bool = False,
    ) -> None:
        """Fit the axes to all points that will be drawn, with a `margin` to the left and the right."""
        xs, ys = [point[0] for point in points] or [0.0], [point[1] for point in points] or [0.0]
        self.labels, self.percent, self.percent_x = (x, y), percent, percent_x
        bottom, top = min(ys), max(ys)
        if not log:
            bottom = 0.0 if 0 <= bottom < 0.5 * top or 0 < bottom == top else bottom
            top = top if top > bottom else bottom + 1
        inset = 14 if log else 0  # a logarithmic axis has no zero to start from: keep points off the frame
        self.x = Scale(min(xs) - margin, max(xs) + margin, LEFT + inset, WIDTH - RIGHT - inset, log)
        self.y = Scale(bottom, top, HEIGHT - BOTTOM - inset, TOP + inset, log)
        self.x_ticks = sorted(set(xs)) if log else self.x.ticks(8)

    def position(self, point: tuple[float, float]) -> tuple[float, float]:
        return self.x(point[0]), self.y(point[1])

    def polyline(self, points: Points) -> str:
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in map(self.position, points))

    def dot(self, point: tuple[float, float], series: int, tooltip: str) -> str:
        """A circle in the colour of a series, counted from 1."""
        x, y = self.position(point)
        return f'<circle class="s{series}" cx="{x:.1f}" cy="{y:.1f}" r="3.2"><title>{escape(tooltip)}</title></circle>'

    def describe(self, point: tuple[float, float]) -> str:
        return f"{_number(point[1], self.percent)} at {self.labels[0]} {_number(point[0], self.percent_x)}"

    def svg(self, parts: Sequence[str], description: str) -> str:
        """The panel with its axes and SVG elements inside."""
        lines = []
        for value in self.y.ticks(5):
            y = self.y(value)
            text = _number(value, self.percent)
            lines.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            lines.append(f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
        for value in self.x_ticks:
            counted = self.x.high >= 1  # steps and layers are, learning rates are not
            if counted and not (self.percent_x or float(value).is_integer()):
                continue
            text, y = _number(value, self.percent_x), HEIGHT - BOTTOM + 20
            lines.append(f'<text class="tick" x="{self.x(value):.1f}" y="{y}" text-anchor="middle">{text}</text>')
        centre_x, centre_y = (LEFT + WIDTH - RIGHT) / 2, (TOP + HEIGHT - BOTTOM) / 2
        label_x, label_y = map(escape, self.labels)
        lines.append(f'<text class="axis" x="{centre_x}" y="{HEIGHT - 6}" text-anchor="middle">{label_x}</text>')
        rotated = f'transform="translate(13 {centre_y}) rotate(-90)" text-anchor="middle"'
        lines.append(f'<text class="axis" {rotated}>{label_y}</text>')
        inside = "".join((*lines, *parts))
        return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(description)}">{inside}</svg>'


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
