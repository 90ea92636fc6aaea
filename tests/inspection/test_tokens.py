"""Patch features over the grid: their norms before the last LayerNorm, their principal components as colours."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import ARCHITECTURES, SMALL, outside, pictures, randomised
from torch import Tensor

from vitral.architecture import Architecture, ViTConfig
from vitral.errors import UserError
from vitral.inspection.representations import feature_colours, patch_features, pca_colours, token_norms
from vitral.models.build import build
from vitral.models.vit import ViT


def made(architecture: Architecture) -> Any:
    """A model of random weights; Any, since kinds of models differ in what they hold."""
    return randomised(build(architecture))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_has_features_of_its_grid(name: str) -> None:
    config = ARCHITECTURES[name]
    model, images = made(config), pictures(2, config.channels, 33, 72)
    features = patch_features(model, images)
    assert features.shape[:3] == (2, *config.grid((33, 72)))
    assert not features.requires_grad
    with torch.no_grad():
        mean = features.mean((1, 2))
        if config == replace(SMALL, pool="mean", class_token=False):
            torch.testing.assert_close(mean, model.features(images))
        if not isinstance(model, ViT):
            torch.testing.assert_close(mean, model.features(images), rtol=1e-4, atol=1e-5)
    painted = feature_colours(model, images)
    assert painted.shape == (*features.shape[:3], 3)
    assert (painted.min(), painted.max()) == (0, 1)


def test_features_are_at_the_position_of_their_pixels():
    """Without attention and positions, a patch's features depend on its own pixels alone."""
    model = made(replace(SMALL, registers=2, position="none", norm_place="features"))
    with torch.no_grad():
        for block in model.blocks:
            block.attention.out.weight.zero_()
    images = pictures(1, 3, 24, 40)
    changed = images.clone()
    changed[..., 8:16, 32:40] += 1
    different = (patch_features(model, images) - patch_features(model, changed)).abs().amax(-1)[0] > 1e-4
    assert different.nonzero().tolist() == [[1, 4]]
    assert ((token_norms(model, images) - token_norms(model, changed)).abs()[0] > 1e-4).nonzero().tolist() == [[1, 4]]
    # Also where the model pools before it normalises, the features of patches are normalised.
    with torch.no_grad():
        torch.testing.assert_close(
            patch_features(model, images)[0], model.norm(model.encode(model.patchify(images)))[0, 3:].view(3, 5, 32)
        )


@pytest.mark.parametrize(
    "name", ["tanh", "DINOv2 with registers", "axial", "hybrid", "mean beside a class token, norm after"]
)
def test_norms_are_taken_before_the_last_layer_norm(name: str) -> None:
    config = ARCHITECTURES[name]
    assert isinstance(config, ViTConfig)
    model, images = made(config), pictures(2, 3, 32, 48)
    result = token_norms(model, images)
    model.norm = torch.nn.Identity()
    with torch.no_grad():
        tokens = model.encode(model.patchify(images))
    rows, columns = config.grid((32, 48))
    for i, row, column in np.ndindex(2, rows, columns):
        expected = np.sqrt((tokens[i, config.prefix + row * columns + column].numpy() ** 2).sum())
        assert result[i, row, column].item() == pytest.approx(expected, rel=1e-5)
    assert result.std() > 1e-3 * result.mean()
    assert not model.blocks[-1]._forward_hooks


def test_a_resnet_has_no_tokens():
    with pytest.raises(UserError, match="a ResNet has no tokens"):
        token_norms(build(ARCHITECTURES["BiT"]), pictures(1, 3, 32, 32))


def features(*shape: int, seed: int = 0) -> Tensor:
    """Correlated, so that the components differ in strength."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draw) @ torch.randn(shape[-1], shape[-1], generator=draw)


def test_colours_are_three_principal_components():
    given_features = features(3, 5, 6, 10)
    result = pca_colours(given_features)
    rows = given_features.flatten(0, 2).double().numpy()
    scores = outside("sklearn.decomposition").PCA(n_components=3, svd_solver="full").fit_transform(rows)
    for channel in range(3):
        score = scores[:, channel].reshape(3, 5, 6)
        inside = np.zeros((3, 5, 6), bool)
        inside[:, 1:-1, 1:-1] = True
        if score[inside].mean() < score[~inside].mean():
            score = -score
        low, high = np.quantile(score, 0.01), np.quantile(score, 0.99)
        np.testing.assert_allclose(result[..., channel], np.clip((score - low) / (high - low), 0, 1), atol=1e-5)


@given(rows=st.integers(1, 5), columns=st.integers(1, 5), count=st.integers(1, 3), seed=st.integers(0, 50))
@settings(max_examples=40)
def test_colours_are_invariant_to_rotated_and_shifted_features(rows: int, columns: int, count: int, seed: int) -> None:
    """A rotation and a shift of all features are invisible: no sign or order is left to chance."""
    given_features = features(count, rows, columns, 6, seed=seed).double()
    result = pca_colours(given_features)
    assert result.shape == (count, rows, columns, 3)
    assert result.min() >= 0
    assert result.max() <= 1
    assert torch.equal(result, pca_colours(given_features))
    if min(rows, columns) < 3 or count * rows * columns < 12:
        return  # without an inside the sign is that of the largest weight, which a rotation moves
    turn = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))).Q
    torch.testing.assert_close(pca_colours(given_features @ turn + 3), result, rtol=0, atol=1e-4)


def test_the_foreground_is_bright_and_equal_patches_have_one_colour():
    scene = 0.01 * features(2, 6, 7, 8)
    scene[:, 2:4, 2:5] += torch.randn(8, generator=torch.Generator().manual_seed(3))
    red = pca_colours(scene)[..., 0]
    assert red[:, 2:4, 2:5].min() > 0.8
    assert red[:, [0, -1]].max() < 0.2
    flat = pca_colours(torch.ones(2, 4, 4, 8) * torch.randn(8))
    assert (flat - flat[0, 0, 0]).abs().max() < 1e-3
