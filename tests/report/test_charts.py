"""Charts show their numbers, tables count cell by cell, pictures come back from their bytes."""

from __future__ import annotations

import base64
import io
import re
import xml.etree.ElementTree as ET
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vitral.evaluation.calibration import reliability
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


@pytest.mark.parametrize("points", [[(0, 1.0), (5, 3.0), (10, 2.0)], [(1, 5.0)], [(0, 0.0), (1, 0.0)]])
def test_a_line_goes_through_its_points(points):
    svg = parsed(charts.line_chart({"a <b>": points}, x="step", y="loss"))
    places = [tuple(map(float, pair.split(","))) for pair in svg.find("polyline").get("points").split()]
    assert len(places) == len(points)
    heights = [-y for _, y in places]
    assert np.argsort(heights).tolist() == np.argsort([y for _, y in points]).tolist()
    assert all(charts.LEFT <= x <= charts.WIDTH and 0 <= y <= charts.HEIGHT for x, y in places)


def test_a_long_line_is_smoothed_without_a_shift():
    points = [(i, float(i)) for i in range(1000)]
    smooth = charts.running_mean(points)
    assert len(smooth) < 60
    assert max(abs(x - y) for x, y in smooth) <= 1
    assert charts.running_mean(points[:20]) == points[:20]


def test_reliability_bars_say_their_numbers():
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


def test_confusions_are_counted_cell_by_cell_and_names_are_text():
    matrix = np.array([[3, 1], [0, 2]])
    table = parsed(charts.confusion_table(matrix, ["<b>", "dog & cat"])).find("table")
    rows = table.findall("tr")
    assert [cell.find("span").text for cell in rows[0].findall("th")] == ["<b>", "dog & cat"]
    assert [[cell.text or "" for cell in row.findall("td")] for row in rows[1:]] == [["3", "1"], ["", "2"]]
    alike = charts.confusion_table(matrix, ["crane", "crane"])  # ImageNet has two
    assert re.findall('class="(right|wrong)"', alike) == ["right", "wrong", "wrong", "right"]
    assert charts.confusion_table(np.eye(40, dtype=int), [str(i) for i in range(40)]).startswith("<img")


def test_heat_goes_from_dark_to_bright():
    shades = charts.heat(np.linspace(0, 1, 64)[None])[0].astype(int)
    light = shades @ [299, 587, 114]
    assert (np.diff(light) > 0).all()
    assert shades[0].tolist() == charts.DARK_TO_BRIGHT[0].tolist()
    assert shades[-1].tolist() == charts.DARK_TO_BRIGHT[-1].tolist()


def test_tiles_keep_their_order_and_nothing_lies_between():
    tiles = np.random.default_rng(0).integers(0, 256, (5, 2, 3, 3), dtype=np.uint8)
    sheet = charts.tiled(tiles, 3, 60)
    seen = sheet[sheet[..., 3] == 255][:, :3]
    assert sorted(map(tuple, np.unique(seen, axis=0))) == sorted(map(tuple, np.unique(tiles.reshape(-1, 3), axis=0)))
    assert sheet[0, 0, :3].tolist() == tiles[0, 0, 0].tolist()
    assert sheet[-1, -1, 3] == 0


@given(st.integers(1, 40), st.integers(1, 40))
def test_sheets_of_positions_are_of_one_size_whatever_the_grid(rows, columns):
    sheet = charts.tiled(np.zeros((rows * columns, rows, columns, 1), np.uint8), columns, 560)
    gaps = 2 * (rows + columns) + max(rows**2, columns**2) * 2
    assert max(sheet.shape) <= max(560, rows**2, columns**2) * 17 // 16 + gaps


def test_small_numbers_on_an_axis_differ():
    svg = parsed(charts.line_chart({"rate": [(1, 0.0), (2, 2e-4), (3, 1e-4)]}, x="step", y="rate"))
    said = [text.text for text in svg.findall("text[@class='tick']")]
    assert len(said) == len(set(said))
    assert [value for value in said if "e-" in value] == ["5e-5", "1e-4", "1.5e-4", "2e-4"]
    assert [value for value in said if "." in value and "e-" not in value] == []


def test_pictures_come_back_from_their_uri():
    image = np.random.default_rng(0).integers(0, 256, (5, 4, 3), dtype=np.uint8)
    for uri, expected in (
        (charts.photo_uri(image), image),
        (charts.photo_uri(image[:, :, :1]), image[:, :, :1].repeat(3, 2)),
        (charts.photo_uri(np.full((2, 2, 5), 9, np.uint8)), np.full((2, 2, 3), 9)),
    ):
        data = base64.b64decode(uri.partition(",")[2])
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(data))), expected)
