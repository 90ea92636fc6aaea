"""Figures of the paper, from arrays to matplotlib: what is drawn is what was given."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from vitral.inspection import figures


def drawn(figure: Any) -> list[np.ndarray]:
    """The arrays that the figure's axes show, in their order."""
    return [np.asarray(image.get_array()) for axis in figure.axes for image in axis.get_images()]


@pytest.mark.parametrize(("count", "channels"), [(28, 3), (5, 3), (9, 1)])
def test_filters_are_shown_in_order_and_empty_places_stay_empty(count, channels):
    components = np.random.default_rng(0).random((count, 4, 4, channels))
    shown = drawn(figures.filter_figure(components))
    assert len(shown) == count
    for picture, component in zip(shown, components, strict=True):
        np.testing.assert_allclose(picture, np.broadcast_to(component, (4, 4, 3)))


def test_every_place_has_its_tile_on_one_scale():
    similarity = np.random.default_rng(0).uniform(-1, 1, (2, 3, 2, 3))
    image: Any = figures.position_figure(similarity).axes[0].get_images()[0]
    sheet = np.ma.filled(image.get_array(), np.nan)
    assert sheet.shape == (2 * 3 - 1, 3 * 4 - 1)
    for i in range(2):
        for j in range(3):
            np.testing.assert_allclose(sheet[3 * i : 3 * i + 2, 4 * j : 4 * j + 3], similarity[i, j])
    assert np.isnan(sheet[2]).all()
    assert image.get_clim() == (-1, 1)


def test_a_dot_stands_for_each_head():
    distance = np.random.default_rng(0).uniform(0, 100, (3, 2))
    (axis,) = figures.distance_figure(distance).axes
    places = np.asarray(axis.collections[0].get_offsets())
    assert places.tolist() == [[layer, distance[layer, head]] for layer in range(3) for head in range(2)]


def test_a_picture_is_lit_by_its_map():
    rng = np.random.default_rng(0)
    pictures, maps = [rng.integers(0, 256, (12, 8, 3), dtype=np.uint8)], rng.random((1, 3, 2))
    plain, lit = drawn(figures.rollout_figure(pictures, maps, ["a"]))
    light = F.interpolate(torch.from_numpy(maps[None] / maps.max()), (12, 8), mode="bilinear")[0, 0].numpy()
    np.testing.assert_allclose(plain, pictures[0] / 255)
    np.testing.assert_allclose(lit, pictures[0] / 255 * light[:, :, None], atol=1e-12)
    _, lit = drawn(figures.rollout_figure(pictures, np.array([[[-1.0, -1.0], [0.5, 0.5], [0.5, 0.5]]])))
    assert (lit[:2] == 0).all()  # occlusion has places that spoke against the class
    np.testing.assert_allclose(lit[5:7], pictures[0][5:7] / 255 * [[[0.875]], [[1]]])


def test_figures_become_files():
    tints = np.random.default_rng(0).random((2, 3, 3, 3))
    figure = figures.colour_figure([np.zeros((6, 6, 3), np.uint8)] * 2, tints)
    stream = io.BytesIO()
    figure.savefig(stream, format="svg")
    assert b"<svg" in stream.getvalue()
    np.testing.assert_allclose(drawn(figure)[2:], tints)
