"""A small chart as SVG, both axes logarithmic: what was measured and what the arithmetic says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from vitral.bench.growth import Point

_SIDE = 260
_MARGIN = 52
_MEASURED, _ARITHMETIC = "#1f5fa8", "#999999"


def chart(points: Sequence[Point], title: str) -> str:
    """One panel for each axis. The arithmetic's line goes through the last point: below it is overhead."""
    axes = list(dict.fromkeys(point.axis for point in points))
    width, height = len(axes) * (_SIDE + _MARGIN) + _MARGIN, _SIDE + 2 * _MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{_MARGIN}" y="20" font-size="13">{escape(title)}</text>',
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
    across = _Scale([point.value for point in points], 0, _SIDE)
    up = _Scale(times, _SIDE, 0)
    measured = [(across(point.value), up(point.seconds)) for point in points]
    arithmetic = [(across(point.value), up(value)) for point, value in zip(points, expected, strict=True)]
    parts = [
        f'<rect width="{_SIDE}" height="{_SIDE}" fill="none" stroke="#cccccc"/>',
        _line(arithmetic, f'stroke="{_ARITHMETIC}" stroke-dasharray="4 3"'),
        _line(measured, f'stroke="{_MEASURED}" stroke-width="2"'),
    ]
    for point, (x, y) in zip(points, measured, strict=True):
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{_MEASURED}"/>')
        parts.append(f'<text x="{x:.1f}" y="{_SIDE + 15}" text-anchor="middle">{point.value}</text>')
    for value in (min(times), max(times)):
        parts.append(f'<text x="-4" y="{up(value) + 4:.1f}" text-anchor="end">{1e3 * value:.3g}</text>')
    parts.append(f'<text x="{_SIDE / 2}" y="{_SIDE + 32}" text-anchor="middle">{points[0].axis}</text>')
    parts.append(f'<text x="6" y="14" fill="{_MEASURED}">ms a step</text>')
    parts.append(f'<text x="6" y="28" fill="{_ARITHMETIC}">as the arithmetic grows</text>')
    return parts


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
