"""Attention distance, maps and rollout against loops over patches; the real ViT-Ti/16 against the paper's findings."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import gap, outside, pictures
from torch import Tensor, nn

import vitral
from vitral.architecture import ResNetConfig, RopeConfig, Size, StemConfig, ViTConfig
from vitral.data.loader import evaluation_batches
from vitral.data.preprocess import parse_pipeline
from vitral.data.sources import Split, open_data
from vitral.errors import UserError
from vitral.inspection.attention import (
    attention_distance,
    expand_lines,
    mean_attention_distance,
    pooling_weights,
    rollout,
    rollout_maps,
)
from vitral.inspection.image_inspection import inspect_images
from vitral.models.build import build
from vitral.models.capture import capture
from vitral.models.model import normalize
from vitral.models.vit import ViT

SMALL = ViTConfig(depth=2, width=16, mlp=24, heads=2, patch=4, image=(12, 8), classes=5)
GRID: dict[str, Any] = {"class_token": False, "pool": "mean"}
MODELS: dict[str, ViTConfig] = {
    "paper": SMALL,
    "registers": replace(SMALL, registers=2),
    "mean": replace(SMALL, **GRID),
    "mean beside a class token": replace(SMALL, pool="mean"),
    "map": replace(SMALL, pool="map", registers=1),
    "axial": replace(SMALL, axial=True, **GRID),
    "hybrid": replace(SMALL, stem=StemConfig(blocks=(1,)), patch=1),
    "rope": replace(SMALL, rope=RopeConfig(), registers=1, key_bias=False, position="none"),
    "relative bias": replace(SMALL, position="bias", qk_norm=True, swiglu=True),
    "token and mean": replace(SMALL, pool="token+mean"),
}
each_model = pytest.mark.parametrize("config", MODELS.values(), ids=MODELS.keys())
IMAGE: Size = (21, 16)  # five by four patches of 4 pixels, six by four with the stem; a row is left over


def random_model(config: ViTConfig) -> ViT:
    torch.manual_seed(0)
    model = ViT(config).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def random_attention(*shape: int, seed: int = 0) -> Tensor:
    return (3 * pictures(*shape, seed=seed)).softmax(dim=-1)


def distance_by_loops(attention: Tensor, grid: Size, patch: int) -> list[float]:
    """(b, heads, n, n), patches only: for each head, the mean over images and queries of the expected distance."""
    height, width = grid
    indices = [(patch * y, patch * x) for y in range(height) for x in range(width)]
    found = []
    for head in range(attention.shape[1]):
        total = 0.0
        for image in attention[:, head].tolist():
            for index, row in zip(indices, image, strict=True):
                total += sum(w * math.dist(index, other) for w, other in zip(row, indices, strict=True)) / sum(row)
        found.append(total / (len(attention) * len(indices)))
    return found


def test_uniform_attention_has_a_distance_of_116_pixels() -> None:
    uniform = torch.full((1, 1, 196, 196), 1 / 196)
    assert attention_distance(uniform, (14, 14), 16).item() == pytest.approx(116.5, abs=0.05)
    rows = torch.eye(196).reshape(1, 1, 196, 196)
    assert attention_distance(rows, (14, 14), 16).item() == 0  # all look at themselves
    assert attention_distance(rows.roll(14, dims=-1), (14, 14), 16).item() == pytest.approx((182 * 16 + 14 * 208) / 196)


@given(
    height=st.integers(1, 4),
    width=st.integers(1, 4),
    prefix=st.integers(0, 3),
    patch=st.integers(1, 32),
    seed=st.integers(0, 9),
)
def test_distance_equals_that_of_loops(height: int, width: int, prefix: int, patch: int, seed: int) -> None:
    tokens = prefix + height * width
    attention = random_attention(2, 3, tokens, tokens, seed=seed)
    expected = distance_by_loops(attention[..., prefix:, prefix:], (height, width), patch)
    assert attention_distance(attention, (height, width), patch).tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_a_patch_that_attends_to_the_class_token_only_counts_as_0() -> None:
    attention = torch.eye(5).roll(1, dims=0).reshape(1, 1, 5, 5).clone()
    attention[0, 0, 1] = torch.tensor([1.0, 0, 0, 0, 0])
    assert torch.isfinite(attention_distance(attention, (2, 2), 16)).all()


@each_model
def test_mean_distance_is_the_mean_over_images(config: ViTConfig) -> None:
    model, images = random_model(config).train(), pictures(5, 3, *IMAGE)
    found = mean_attention_distance(model, images.split(2))
    assert model.training
    grid = config.grid(IMAGE)
    with torch.no_grad(), capture(model.eval(), rows="all") as seen:
        model(images)
    expected = []
    for key in seen.keys:
        n = grid[0] * grid[1] if not config.axial else seen[key].shape[-1]
        lines = grid if not config.axial else (1, n)
        expected.append(distance_by_loops(seen[key][..., -n:, -n:], lines, 4))
    assert found.shape == (len(seen.keys), 2)
    assert gap(found, torch.tensor(expected)) <= 1e-4


def test_mean_distance_takes_images_of_several_sizes() -> None:
    model, small, large = random_model(SMALL), pictures(1, 3, 8, 12), pictures(2, 3, 16, 20)
    apart = [mean_attention_distance(model, [images]) for images in (small, large)]
    assert gap(mean_attention_distance(model, [small, large]), (apart[0] + 2 * apart[1]) / 3) <= 1e-5


def test_a_patch_of_a_hybrid_has_the_width_of_its_stride() -> None:
    assert [MODELS[name].stride for name in ("paper", "hybrid")] == [4, 4]
    assert replace(SMALL, stem=StemConfig(blocks=(1, 1, 1)), patch=2, image=(32, 32)).stride == 32


def product_by_loops(matrices: list[list[list[float]]]) -> list[list[float]]:
    """The last matrix times ... times the first."""
    n = range(len(matrices[0]))
    result = [[float(i == j) for j in n] for i in n]
    for matrix in matrices:
        result = [[sum(matrix[i][k] * result[k][j] for k in n) for j in n] for i in n]
    return result


def rollout_by_loops(attentions: list[Tensor], image: int) -> list[list[float]]:
    """(n, n): the mean of each layer's heads, rows summing to 1, mixed with the identity; then all multiplied."""
    matrices = []
    for attention in attentions:
        maps = attention[image].tolist()
        n = range(len(maps[0]))
        merged = [[sum(one[i][j] for one in maps) / len(maps) for j in n] for i in n]
        matrices.append([[0.5 * (i == j) + 0.5 * merged[i][j] / sum(merged[i]) for j in n] for i in n])
    return product_by_loops(matrices)


@given(depth=st.integers(1, 3), n=st.integers(1, 5))
def test_rollout_equals_that_of_loops(depth: int, n: int) -> None:
    attentions = [random_attention(2, 3, n, n, seed=seed) for seed in range(depth)]
    found, means = (rollout(attentions, start) for start in (torch.eye(n)[:1], torch.full((1, n), 1 / n)))
    for image in range(2):
        expected = torch.tensor(rollout_by_loops(attentions, image))
        assert gap(found[image], expected[0]) <= 1e-5
        assert gap(means[image], expected.mean(dim=0)) <= 1e-5
    assert gap(found.sum(-1), torch.ones(2)) <= 1e-5


def pooling_by_hand(model: ViT, images: Tensor) -> Tensor:
    """(b, tokens): the weights by which the model's output tokens are pooled."""
    prefix, tokens = model.config.prefix, model.config.tokens((images.shape[2], images.shape[3]))
    weights = torch.zeros(len(images), tokens)
    if model.config.pool == "token":
        weights[:, 0] = 1
    elif model.config.pool == "mean":
        weights[:, prefix:] = 1 / (tokens - prefix)
    elif model.config.pool == "token+mean":
        weights[:, 0], weights[:, prefix:] = 1 / 2, 1 / 2 / (tokens - prefix)
    else:
        with torch.no_grad(), capture(model) as seen:
            model(images)
        weights[:, prefix:] = seen.pool.mean(dim=1).squeeze(1)
    return weights


def full_matrices(model: ViT, images: Tensor, layers: list[int] | None = None) -> list[Tensor]:
    """(b, heads, tokens, tokens) of each attention; those of an axial model patch by patch."""
    grid = model.config.grid((images.shape[2], images.shape[3]))
    with torch.no_grad(), capture(model, layers=layers, rows="all") as seen:
        model(images)
    return [spread(seen[key], grid, key[1]) if isinstance(key, tuple) else seen[key] for key in seen.keys]


def spread(lines: Tensor, grid: Size, axis: str) -> Tensor:
    height, width = grid
    along = height if axis == "row" else width
    full = torch.zeros(len(lines) // along, lines.shape[1], height * width, height * width)
    for image in range(len(full)):
        for y, x in ((y, x) for y in range(height) for x in range(width)):
            for other in range(width if axis == "row" else height):
                key = y * width + other if axis == "row" else other * width + x
                line, query = (y, x) if axis == "row" else (x, y)
                full[image, :, y * width + x, key] = lines[image * along + line, :, query, other]
    return full


@pytest.mark.parametrize("axis", ["row", "column"])
def test_lines_become_a_matrix(axis: Any) -> None:
    grid = (3, 2)
    lines = random_attention(2 * 3, 2, 2, 2) if axis == "row" else random_attention(2 * 2, 2, 3, 3)
    assert torch.equal(expand_lines(lines, grid, axis), spread(lines, grid, axis))


@each_model
def test_rollout_maps_lead_from_the_pooled_output_to_the_patches(config: ViTConfig) -> None:
    model, images = random_model(config), pictures(2, 3, *IMAGE)
    found = rollout_maps(model, images)
    matrices, start = full_matrices(model, images), pooling_by_hand(model, images)
    assert found.shape == (2, *config.grid(IMAGE))
    for image in range(2):
        full = torch.tensor(rollout_by_loops(matrices, image))
        assert gap(found[image].flatten(), (start[image] @ full)[config.prefix :]) <= 1e-5


@each_model
def test_the_attention_of_the_pooled_output(config: ViTConfig) -> None:
    model, images = random_model(config), pictures(2, 3, *IMAGE)
    inspections = inspect_images(model, images)
    for layer in range(config.depth):
        expected = pooling_by_hand(model, images)[:, None].expand(-1, 2, -1)
        for matrix in reversed(full_matrices(model, images, [layer])):
            expected = torch.einsum("bhi,bhij->bhj", expected, matrix)
        for image, inspection in enumerate(inspections):
            assert inspection.pooled is not None
            assert gap(torch.from_numpy(inspection.pooled[layer]), expected[image, :, config.prefix :]) <= 1e-5


def test_models_without_attention_and_invalid_arguments_are_errors() -> None:
    resnet = build(ResNetConfig(blocks=(1, 1, 1, 1), image=(32, 32)))
    images = pictures(1, 3, 32, 32)
    for look in (rollout_maps, mean_attention_distance):
        with pytest.raises(UserError, match="choose a Vision Transformer"):
            look(resnet, images)
    with pytest.raises(UserError, match="at least one"):
        mean_attention_distance(random_model(SMALL), [])


@pytest.fixture(scope="module")
def real_distances(assets: Path) -> Tensor:
    """(12, 3): ViT-Ti/16 over every 32nd of the 1,000 photographs."""
    folder = assets / "data"
    model, _ = vitral.load(folder / "vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors")
    split = open_data(folder / "imagenet_val_1000", held_out=0).train
    return mean_attention_distance(model, photographs(split.select(np.arange(0, 1000, 32), "some")))


def photographs(split: Split) -> Iterator[Tensor]:
    steps = parse_pipeline("decode|resize_small(248, bicubic)|central_crop(224)")
    for batch in evaluation_batches(split, steps, batch=8, channels=3):
        yield normalize(batch.images, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


# The first four layers as timm computes them: its unfused attention, the same photographs, NumPy's distances.
BY_TIMM = [[51.0, 86.0, 27.5], [22.5, 78.4, 22.5], [41.3, 22.5, 71.7], [54.2, 114.6, 37.7]]


def test_distance_equals_that_of_timm(real_distances: Tensor) -> None:
    assert gap(real_distances[:4], torch.tensor(BY_TIMM)) <= 0.1


def test_distance_grows_with_depth(real_distances: Tensor) -> None:
    """Section 4.5, Figure 7; found: 0.94."""
    stats = outside("scipy.stats")
    assert real_distances.shape == (12, 3)
    assert stats.spearmanr(range(12), real_distances.mean(dim=1).tolist()).statistic > 0.9


def test_early_layers_have_local_and_global_heads(real_distances: Tensor) -> None:
    """Figure 7: some of the lowest heads already look far, others stay near.

    Of this model's three heads a layer, the widest reaches 86 pixels in the first three layers; half of the image's
    224 are first reached in the fourth. The paper's ViT-L/16 has sixteen heads a layer.
    """
    first = real_distances[:3]
    assert 80 < first.max() < 112 < real_distances[3].max()
    assert first.max() > 3 * first.min()


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"pool": "token+mean"}, [0.5, 0.0, *[0.125] * 4]),
        ({"pool": "token+register"}, [0.5, 0.5, *[0.0] * 4]),
        ({"pool": "mean"}, [0.0, 0.0, *[0.25] * 4]),
    ],
)
def test_pooling_weights_are_the_shares_of_the_tokens(changes: dict[str, Any], expected: list[float]) -> None:
    config = ViTConfig(depth=1, width=16, mlp=32, heads=2, patch=4, image=(8, 8), classes=3, registers=1, **changes)
    model = ViT(config).eval()
    images = torch.randn(2, 3, 8, 8)
    with torch.inference_mode(), capture(model, rows="all") as captured:
        model(images)
    torch.testing.assert_close(pooling_weights(model, captured, (2, 2)).float(), torch.tensor([expected]))


def test_attention_pooling_may_read_the_tokens_before_the_patches() -> None:
    config = ViTConfig(
        depth=1, width=16, mlp=32, heads=2, patch=4, image=(8, 8), classes=3, pool="map", map_prefix=True, map_heads=4
    )
    model = ViT(config).eval()
    with torch.inference_mode(), capture(model, rows="all") as captured:
        model(torch.randn(2, 3, 8, 8))
    weights = pooling_weights(model, captured, (2, 2))
    assert weights.shape == (2, 5)
    torch.testing.assert_close(weights.sum(dim=1), torch.ones(2))
