"""Figures of the paper, from arrays to SVG and PNG: the pixels drawn are the arrays given."""

from __future__ import annotations

import base64
import io
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from vitral.report.charts import heat_map
from vitral.report.pages import Figure, colour_figure, distance_figure, filter_figure, overlay_figure, position_figure


def tile(figure: Figure, row: int, column: int, shape: tuple[int, int], tiles: tuple[int, int]) -> np.ndarray:
    """One tile of a figure of (rows, columns) tiles, at its own resolution (shape)."""
    assert figure.image is not None
    height, width = figure.image.shape[:2]
    scale = next(
        scale
        for scale in range(32, 0, -1)
        if tiles[1] * (scale * shape[1] + max(2, scale * shape[1] // 16)) - max(2, scale * shape[1] // 16) == width
    )
    gap = max(2, scale * shape[1] // 16)
    assert height == tiles[0] * (scale * shape[0] + gap) - gap
    top, left = row * (scale * shape[0] + gap), column * (scale * shape[1] + gap)
    cells = figure.image[top : top + scale * shape[0], left : left + scale * shape[1]]
    small = cells[scale // 2 :: scale, scale // 2 :: scale]
    np.testing.assert_array_equal(cells, small.repeat(scale, 0).repeat(scale, 1))  # nothing is blurred
    return small


@pytest.mark.parametrize(("count", "channels"), [(28, 3), (5, 3), (9, 1)])
def test_filters_are_shown_in_order_and_empty_cells_are_transparent(count, channels):
    filters = np.random.default_rng(0).random((count, 4, 4, channels))
    figure = filter_figure(filters)
    columns = min(7, count)
    rows = -(-count // columns)
    for number in range(rows * columns):
        cell = tile(figure, number // columns, number % columns, (4, 4), (rows, columns))
        if number < count:
            expected = np.rint(255 * filters[number])
            np.testing.assert_array_equal(cell[:, :, :3], np.broadcast_to(expected, (4, 4, 3)))
        assert (cell[:, :, 3] == (255 if number < count else 0)).all()


def test_every_position_has_its_tile_on_one_scale():
    similarity = np.random.default_rng(0).uniform(-1, 1, (2, 3, 2, 3))
    figure = position_figure(similarity)
    for i in range(2):
        for j in range(3):
            cell = tile(figure, i, j, (2, 3), (2, 3))
            np.testing.assert_array_equal(cell[:, :, :3], heat_map((similarity[i, j] + 1) / 2))
    texts = [element.text for element in ET.fromstring(figure.svg).iter() if element.tag.endswith("text")]
    assert {"1", "2", "3", "0", "-1", "input patch row", "input patch column", "cosine similarity"} <= set(texts)


def test_one_dot_per_head():
    distance = np.random.default_rng(0).uniform(1, 100, (3, 2))
    dots = re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', distance_figure(distance).svg)
    places = np.array(dots, float).reshape(3, 2, 2)
    assert (places[:, 0, 0] == places[:, 1, 0]).all()  # a column per layer
    assert (np.diff(places[:, 0, 0]) > 0).all()
    slope, offset = np.polyfit(distance.ravel(), places[:, :, 1].ravel(), 1)
    assert slope < 0
    np.testing.assert_allclose(places[:, :, 1], slope * distance + offset, atol=0.1)


def test_an_image_is_lit_by_its_map():
    rng = np.random.default_rng(0)
    images, maps = [rng.integers(0, 256, (12, 8, 3), dtype=np.uint8)], rng.random((1, 3, 2))
    figure = overlay_figure(images, maps, ["a & b"])
    brightness = F.interpolate(torch.from_numpy(maps[None] / maps.max()), (12, 8), mode="bilinear")[0, 0].numpy()
    np.testing.assert_array_equal(tile(figure, 0, 0, (12, 8), (1, 2))[:, :, :3], images[0])
    lit = tile(figure, 0, 1, (12, 8), (1, 2))[:, :, :3]
    np.testing.assert_allclose(lit, images[0] * brightness[:, :, None], atol=0.51)
    assert "a &amp; b" in figure.svg
    figure = overlay_figure(images, np.array([[[-1.0, -1.0], [0.5, 0.5], [0.5, 0.5]]]))
    lit = tile(figure, 0, 1, (12, 8), (1, 2))[:, :, :3]
    assert (lit[:2] == 0).all()  # occlusion: these patches lower the probability of the class
    np.testing.assert_allclose(lit[5:7], images[0][5:7] * [[[0.875]], [[1]]], atol=0.51)


@pytest.mark.parametrize("channels", [1, 3])
def test_figures_become_files(tmp_path: Path, channels: int) -> None:
    rng = np.random.default_rng(0)
    colours, image = rng.random((2, 3, 3, 3)), rng.integers(0, 256, (6, 6, channels), dtype=np.uint8)
    figure = colour_figure([image] * 2, colours)
    for number in range(2):
        np.testing.assert_array_equal(
            tile(figure, 0, number, (6, 6), (2, 2))[:, :, :3], np.broadcast_to(image, (6, 6, 3))
        )
        shown = tile(figure, 1, number, (6, 6), (2, 2))[::2, ::2, :3]
        np.testing.assert_array_equal(shown, np.rint(255 * colours[number]))
    assert figure.write(tmp_path / "new", "x") == (tmp_path / "new" / "x.svg", tmp_path / "new" / "x.png")
    png = (tmp_path / "new" / "x.png").read_bytes()
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(png))), figure.image)
    svg = ET.parse(tmp_path / "new" / "x.svg").getroot()
    (embedded,) = [element for element in svg.iter() if element.tag.endswith("image")]
    assert base64.b64decode(embedded.attrib["href"].partition(",")[2]) == png
    assert distance_figure(np.ones((2, 2))).write(tmp_path, "y") == (tmp_path / "y.svg",)
    ET.parse(tmp_path / "y.svg")
