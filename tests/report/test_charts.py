"""Charts draw their numbers, images survive the data URI."""

from __future__ import annotations

import base64
import io
import xml.etree.ElementTree as ET
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vitral.evaluation.calibration import ReliabilityBin, reliability
from vitral.report import charts


def parsed(text: str) -> Any:
    return ET.fromstring(text)


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6), st.integers(2, 9))
def test_ticks_are_round_numbers_inside(low, span, most):
    found = charts.ticks(low, low + span, most)
    assert len(found) <= most + 1
    assert all(low - 1e-6 * span <= value <= low + span + 1e-6 * span for value in found)
    steps = np.diff(found)
    assert len(found) >= 1
    assert np.allclose(steps, steps[:1], rtol=1e-3) if len(steps) else True


@given(st.floats(1e-3, 1e6), st.floats(3, 1e9))
def test_log_ticks_are_few_round_and_inside(low, factor):
    values = charts.log_ticks(low, low * factor)
    assert 1 <= len(values) <= 10
    assert all(low <= value <= low * factor for value in values)
    assert {f"{value:e}"[:8] for value in values} <= {"1.000000", "2.000000", "5.000000"}


@pytest.mark.parametrize(("low", "high", "values"), [(2.1, 4.9, [2.1, 4.9]), (3, 3, [3]), (1.9, 2.1, [2])])
def test_a_log_axis_without_a_round_number_has_ticks_at_its_ends(low, high, values):
    assert charts.log_ticks(low, high) == values


def test_a_power_law_is_a_straight_line_on_log_axes():
    points = [(x, 3.0 * x**2) for x in (1, 4, 16, 64)]
    svg = parsed(charts.line_chart({"square": points}, x="size", y="time", log=True, guide=points))
    guide, line = (element.get("points") for element in svg.findall("polyline"))
    assert guide == line
    places = np.array([tuple(map(float, pair.split(","))) for pair in line.split()])
    assert np.allclose(np.diff(places, axis=0), np.diff(places, axis=0)[0], atol=0.11)
    labels = [text.text for text in svg.findall("text[@text-anchor='middle']")]
    assert labels[:4] == ["1", "4", "16", "64"]


def test_a_file_of_charts_is_one_svg_with_escaped_texts():
    chart = charts.line_chart({"a": [(1, 1.0), (2, 2.0)]}, x="x", y="y")
    root = parsed(charts.svg_file([chart, chart], "a < b", "note"))
    space = "{http://www.w3.org/2000/svg}"
    assert [panel.get("x") for panel in root.findall(f"{space}svg")] == ["0", str(charts.WIDTH)]
    assert [text.text for text in root.findall(f"{space}text")] == ["a < b", "note"]


@pytest.mark.parametrize("points", [[(0, 1.0), (5, 3.0), (10, 2.0)], [(1, 5.0)], [(0, 0.0), (1, 0.0)]])
def test_a_line_goes_through_its_points(points):
    svg = parsed(charts.line_chart({"a <b>": points}, x="step", y="loss"))
    places = [tuple(map(float, pair.split(","))) for pair in svg.find("polyline").get("points").split()]
    assert len(places) == len(points)
    heights = [-y for _, y in places]
    assert np.argsort(heights).tolist() == np.argsort([y for _, y in points]).tolist()
    assert all(charts.LEFT <= x <= charts.WIDTH and 0 <= y <= charts.HEIGHT for x, y in places)


def test_the_running_mean_does_not_shift_a_line():
    points = [(i, float(i)) for i in range(1000)]
    smooth = charts.running_mean(points)
    assert len(smooth) < 60
    assert max(abs(x - y) for x, y in smooth) <= 1
    assert charts.running_mean(points[:20]) == points[:20]


def test_reliability_bars_have_the_height_of_their_accuracy():
    rng = np.random.default_rng(0)
    bins = reliability(rng.normal(size=(200, 4)), rng.integers(0, 4, 200))
    svg = parsed(charts.reliability_chart(bins))
    bars = svg.findall("rect")
    filled = [row for row in bins if row.count]
    assert len(bars) == len(filled)
    inner = charts.HEIGHT - charts.TOP - charts.BOTTOM
    for bar, row in zip(bars, filled, strict=True):
        assert float(bar.get("height")) == pytest.approx(row.accuracy * inner, abs=0.06)
        assert f"{row.count:,} images" in bar.find("title").text


def test_bars_that_are_too_low_to_be_seen_have_a_dot():
    shares = (0.0, 0.005, 0.05, 0.5)
    bins = [ReliabilityBin(i / 4, (i + 1) / 4, 10, (i + 0.5) / 4, share) for i, share in enumerate(shares)]
    dots = parsed(charts.reliability_chart([*bins, ReliabilityBin(0.9, 1.0, 0, 0.0, 0.0)])).findall("circle")
    assert [dot.find("title").text for dot in dots] == [
        "10 images, confidence 12.5%, accuracy 0.0%",
        "10 images, confidence 37.5%, accuracy 0.5%",
    ]
    assert float(dots[0].get("cy")) == charts.HEIGHT - charts.BOTTOM


def test_heat_goes_from_dark_to_bright():
    shades = charts.heat_map(np.linspace(0, 1, 64)[None])[0].astype(int)
    light = shades @ [299, 587, 114]
    assert (np.diff(light) > 0).all()
    assert shades[0].tolist() == charts.COLOUR_MAP[0].tolist()
    assert shades[-1].tolist() == charts.COLOUR_MAP[-1].tolist()


def test_an_image_grid_keeps_the_order_of_tiles_with_transparent_gaps():
    tiles = np.random.default_rng(0).integers(0, 256, (5, 2, 3, 3), dtype=np.uint8)
    sheet = charts.image_grid(tiles, 3, 60)
    seen = sheet[sheet[..., 3] == 255][:, :3]
    assert sorted(map(tuple, np.unique(seen, axis=0))) == sorted(map(tuple, np.unique(tiles.reshape(-1, 3), axis=0)))
    assert sheet[0, 0, :3].tolist() == tiles[0, 0, 0].tolist()
    assert sheet[-1, -1, 3] == 0


@given(st.integers(1, 40), st.integers(1, 40))
def test_image_grids_have_about_the_requested_size(rows, columns):
    sheet = charts.image_grid(np.zeros((rows * columns, rows, columns, 1), np.uint8), columns, 560)
    gaps = 2 * (rows + columns) + max(rows**2, columns**2) * 2
    assert max(sheet.shape) <= max(560, rows**2, columns**2) * 17 // 16 + gaps


def test_small_numbers_on_an_axis_differ():
    svg = parsed(charts.line_chart({"rate": [(1, 0.0), (2, 2e-4), (3, 1e-4)]}, x="step", y="rate"))
    said = [text.text for text in svg.findall("text[@class='tick']")]
    assert len(said) == len(set(said))
    assert [value for value in said if "e-" in value] == ["5e-5", "1e-4", "1.5e-4", "2e-4"]
    assert [value for value in said if "." in value and "e-" not in value] == []


def test_images_survive_the_data_uri():
    image = np.random.default_rng(0).integers(0, 256, (5, 4, 3), dtype=np.uint8)
    for uri, expected in (
        (charts.png_uri(charts.as_rgb(image)), image),
        (charts.png_uri(charts.as_rgb(image[:, :, :1])), image[:, :, :1].repeat(3, 2)),
        (charts.png_uri(charts.as_rgb(np.full((2, 2, 5), 9, np.uint8))), np.full((2, 2, 3), 9)),
    ):
        data = base64.b64decode(uri.partition(",")[2])
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(data))), expected)


def test_photographs_are_jpegs_and_drawings_are_exact():
    noise = np.random.default_rng(0).integers(0, 256, (8, 8, 3)).repeat(28, 0).repeat(28, 1)
    photo = (noise + np.random.default_rng(1).integers(-9, 9, noise.shape)).clip(0, 255).astype(np.uint8)
    for image, kind in ((photo, "jpeg"), (noise.astype(np.uint8), "png"), (photo[:8, :8, :1], "png")):
        uri = charts.photo_uri(image)
        assert uri.startswith(f"data:image/{kind};")
        seen = np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))), np.int64)
        assert np.abs(seen - charts.as_rgb(image)).mean() < (8 if kind == "jpeg" else 1e-9)
