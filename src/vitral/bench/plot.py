"""A small chart as SVG, both axes logarithmic: what was measured and what the arithmetic says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from vitral.bench.sweep import Point

_SIDE = 260
_MARGIN = 56
_INSET = 14  # between a panel's frame and its first and last point
_MOST_LINES = 7  # across a panel
_MEASURED, _ARITHMETIC, _FRAME, _GRID = "#1f5fa8", "#8a8a8a", "#bbbbbb", "#eeeeee"
_NAMES = {"image": "image, pixels a side", "batch": "batch, images", "depth": "depth, blocks"}


def chart(points: Sequence[Point], title: str) -> str:
    """One panel for each axis. The arithmetic's line goes through the last point: what lies above it is overhead."""
    axes = list(dict.fromkeys(point.axis for point in points))
    width, height = len(axes) * (_SIDE + _MARGIN) + _MARGIN // 2, _SIDE + 2 * _MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{_MARGIN}" y="20" font-size="13">{escape(title)}</text>',
        f'<text x="{_MARGIN}" y="40" fill="{_MEASURED}">measured, ms a step</text>',
        f'<text x="{_MARGIN + 130}" y="40" fill="{_ARITHMETIC}">- - as the arithmetic grows, to the last point</text>',
    ]
    for place, axis in enumerate(axes):
        own = [point for point in points if point.axis == axis]
        parts.append(f'<g transform="translate({_MARGIN + place * (_SIDE + _MARGIN)} {_MARGIN})">')
        parts += [*_panel(own), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(points: Sequence[Point]) -> list[str]:
    last = points[-1]
    expected = [last.seconds * point.macs / last.macs for point in points]
    times = [*expected, *(point.seconds for point in points)]
    across = _Scale([point.value for point in points], _INSET, _SIDE - _INSET)
    up = _Scale(times, _SIDE - _INSET, _INSET)
    measured = [(across(point.value), up(point.seconds)) for point in points]
    arithmetic = [(across(point.value), up(value)) for point, value in zip(points, expected, strict=True)]
    parts = []
    for tick in ticks(1e3 * min(times), 1e3 * max(times)):
        y = up(tick / 1e3)
        parts.append(f'<line x1="0" x2="{_SIDE}" y1="{y:.1f}" y2="{y:.1f}" stroke="{_GRID}"/>')
        parts.append(f'<text x="-6" y="{y + 4:.1f}" text-anchor="end">{tick:,g}</text>')
    parts += [
        f'<rect width="{_SIDE}" height="{_SIDE}" fill="none" stroke="{_FRAME}"/>',
        _line(arithmetic, f'stroke="{_ARITHMETIC}" stroke-dasharray="4 3"'),
        _line(measured, f'stroke="{_MEASURED}" stroke-width="2"'),
    ]
    for point, (x, y) in zip(points, measured, strict=True):
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{_MEASURED}"/>')
        parts.append(f'<text x="{x:.1f}" y="{_SIDE + 15}" text-anchor="middle">{point.value}</text>')
    name = _NAMES[points[0].axis]
    return [*parts, f'<text x="{_SIDE / 2}" y="{_SIDE + 34}" text-anchor="middle">{name}</text>']


def ticks(low: float, high: float) -> list[float]:
    """Round numbers between two: 1, 2 and 5 of each power of ten, or the powers alone where those are too many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for kinds in ((1, 2, 5), (1,)):
        found = [float(f"{kind}e{power}") for power in powers for kind in kinds]
        found = [value for value in found if low <= value <= high]
        if len(found) <= _MOST_LINES:
            break
    return found or [float(f"{end:.3g}") for end in dict.fromkeys((low, high))]


class _Scale:
    """Logarithms of values to places between two ends."""

    def __init__(self, values: Sequence[float], start: float, end: float) -> None:
        self.low, self.high = math.log(min(values)), math.log(max(values))
        self.start, self.end = start, end

    def __call__(self, value: float) -> float:
        share = (math.log(value) - self.low) / max(self.high - self.low, 1e-9)
        return self.start + share * (self.end - self.start)


def _line(places: Sequence[tuple[float, float]], style: str) -> str:
    text = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return f'<polyline points="{text}" fill="none" {style}/>'
