"""Position embeddings: against loops that spell Table 8 out, and other libraries' resizing; then images of any size."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import scipy.ndimage
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from vitral.architecture import ResizeRule, Size, ViTConfig
from vitral.models import position
from vitral.models.position import (
    FactorizedPosition,
    LearnedPosition,
    RelativePosition,
    resize_offsets,
    resize_table,
    sincos2d,
)
from vitral.models.vit import ViT

SMALL = ViTConfig(depth=1, width=16, mlp=24, heads=2, patch=4, image=(12, 16), classes=5)
AXIAL: dict[str, Any] = {"axial": True, "class_token": False, "pool": "mean"}
KINDS: dict[str, dict[str, Any]] = {
    "1d": {},
    "2d": {"position": "2d"},
    "sincos2d": {"position": "sincos2d"},
    "none": {"position": "none"},
    "axial": AXIAL,
    "registers": {"registers": 2, "class_position": False},
}
GRIDS = [((4, 4), (7, 7)), ((7, 5), (3, 9)), ((5, 8), (5, 3)), ((3, 4), (1, 1)), ((1, 1), (3, 2)), ((2, 3), (1, 6))]
RULES: list[ResizeRule] = ["google", "torchvision", "hf", "dino", "timm"]


def random_model(config: ViTConfig) -> ViT:
    torch.manual_seed(0)
    model = ViT(config).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize(("grid", "width"), [((3, 5), 16), ((1, 1), 8), ((14, 9), 64)])
def test_sincos2d_is_the_formula(grid: Size, width: int) -> None:
    table = sincos2d(grid, width)
    quarter = width // 4
    for y in range(grid[0]):
        for x in range(grid[1]):
            for k in range(quarter):
                omega = 10_000 ** (-k / (quarter - 1))
                four = [math.sin(x * omega), math.cos(x * omega), math.sin(y * omega), math.cos(y * omega)]
                assert table[y, x, k::quarter].tolist() == pytest.approx(four, abs=2e-6)


@pytest.mark.parametrize("changes", [{}, {"registers": 2}, {"class_token": False, "pool": "mean"}])
def test_relative_bias_is_the_double_loop(changes: dict[str, Any]) -> None:
    config = replace(SMALL, position="relative", **changes)
    module, prefix = RelativePosition(config), config.prefix
    nn.init.normal_(module.table)
    q = torch.randn(2, 2, prefix + 12, 8)
    expected = torch.zeros(2, 2, prefix + 12, prefix + 12)
    for i in range(12):
        for j in range(12):
            offset = module.table[(i - j) + 11]  # 2 * 12 - 1 offsets, from -11 to 11
            expected[:, :, prefix + i, prefix + j] = (q[:, :, prefix + i] * offset).sum(-1) / math.sqrt(8)
    torch.testing.assert_close(module(q, (3, 4)), expected)


@given(old=st.integers(1, 30), new=st.integers(1, 30))
def test_offsets_are_interpolated_with_centre_and_ends_in_place(old: int, new: int) -> None:
    table = torch.randn(2 * old - 1, 3, dtype=torch.float64)
    found = resize_offsets(table, 2 * new - 1)
    assert found.shape == (2 * new - 1, 3)
    torch.testing.assert_close(found[new - 1], table[old - 1])
    for i in range(2 * new - 1 if new > 1 else 0):
        at = i * (2 * old - 2) / (2 * new - 2)
        low, high = math.floor(at), min(math.ceil(at), 2 * old - 2)
        expected = table[low] + (at - low) * (table[high] - table[low])
        torch.testing.assert_close(found[i], expected, rtol=0, atol=1e-9)


def other_resize(table: Tensor, grid: Size, rule: ResizeRule) -> Tensor:
    """What the library that a rule is named after calls."""
    if rule == "google":
        zoom = (grid[0] / table.shape[0], grid[1] / table.shape[1], 1)
        return torch.from_numpy(scipy.ndimage.zoom(table.numpy(), zoom, order=1))
    options: dict[str, Any] = {"mode": "bicubic", "size": grid}
    if rule == "torchvision":
        options |= {"align_corners": True}
    elif rule == "timm":
        options |= {"antialias": True}
    elif rule == "dino":
        scale = tuple((new + 0.1) / old for new, old in zip(grid, table.shape, strict=False))
        options |= {"size": None, "scale_factor": scale, "recompute_scale_factor": False}
    return F.interpolate(table.permute(2, 0, 1)[None], **options)[0].permute(1, 2, 0)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("old", "new"), GRIDS)
def test_resizing_is_the_other_librarys(rule: ResizeRule, old: Size, new: Size) -> None:
    table = torch.randn(*old, 6, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(resize_table(table, new, rule), other_resize(table, new, rule), rtol=0, atol=2e-5)


@pytest.mark.parametrize("rule", RULES)
def test_the_same_grid_gives_the_table_itself(rule: ResizeRule) -> None:
    table = torch.randn(3, 4, 6)
    assert resize_table(table, (3, 4), rule) is table
    assert resize_offsets(table[0], 4) is table[0] or torch.equal(resize_offsets(table[0], 4), table[0])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("grid", [(3, 4), (5, 2), (1, 9)])
def test_a_2d_table_resizes_each_axis(rule: ResizeRule, grid: Size) -> None:
    module = FactorizedPosition(replace(SMALL, position="2d", resize=rule)).double()
    table = module.table_for(torch.empty(1, *grid, 16))
    x = resize_table(module.x.unsqueeze(0), (1, grid[1]), rule)
    y = resize_table(module.y.unsqueeze(1), (grid[0], 1), rule)
    torch.testing.assert_close(table[..., :8], x.expand(grid[0], -1, -1))
    torch.testing.assert_close(table[..., 8:], y.expand(-1, grid[1], -1))


@pytest.mark.parametrize("rule", RULES)
def test_half_precision_does_not_coarsen_a_resized_table(rule: ResizeRule) -> None:
    module, patches = LearnedPosition(replace(SMALL, resize=rule)), torch.empty(1, 5, 7, 16)
    expected = module(patches)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(module(patches), expected)
    table = torch.randn(3, 4, 6).bfloat16()
    exact = resize_table(table.float(), (5, 7), rule)
    assert torch.equal(resize_table(table, (5, 7), rule), exact.bfloat16())


SIDES = st.integers(1, 40)


@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS.keys())
@given(rows=SIDES, columns=SIDES, patch=st.integers(2, 4), right=st.integers(0, 3), below=st.integers(0, 3))
@settings(max_examples=20)
def test_any_size_works(changes: dict[str, Any], rows: int, columns: int, patch: int, right: int, below: int) -> None:
    config = replace(SMALL, patch=patch, image=(3 * patch, 4 * patch), **changes)
    model = random_model(config)
    whole = torch.randn(1, 3, rows * patch, columns * patch)
    # A remainder of NaN shows wherever one of its pixels is read.
    ragged = F.pad(whole, (0, right % patch, 0, below % patch), value=math.nan)
    patches = model.patchify(ragged)
    assert patches.shape == (1, rows, columns, 16)
    assert model.encode(patches).shape == (1, config.prefix + rows * columns, 16)
    logits = model(ragged)
    assert logits.isfinite().all()
    torch.testing.assert_close(logits, model(whole))


@given(rows=st.integers(1, 9), columns=st.integers(1, 9))
@settings(max_examples=15)
def test_any_size_works_with_relative_positions(rows: int, columns: int) -> None:
    model = random_model(replace(SMALL, position="relative"))
    assert model(torch.randn(1, 3, 4 * rows + 1, 4 * columns + 3)).isfinite().all()


@pytest.mark.parametrize("changes", [*KINDS.values(), {"position": "relative"}], ids=[*KINDS, "relative"])
def test_the_native_size_resizes_nothing(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = random_model(replace(SMALL, **changes)), torch.randn(2, 3, 12, 16)
    expected = model(images)

    def refuse(*_: Any) -> Tensor:
        raise AssertionError("a table was resized")

    monkeypatch.setattr(position, "resize_matrix", refuse)
    assert torch.equal(model(images), expected)
    assert torch.equal(model(F.pad(images, (0, 3, 0, 2))), expected)  # the same grid
    if model.config.position in ("1d", "2d", "relative"):
        with pytest.raises(AssertionError, match="resized"):
            model(F.pad(images, (0, 4)))
