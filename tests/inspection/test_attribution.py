"""Attribution maps: against computation by hand and loops, a planted patch, and deletion on the real ViT-Ti/16."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from oracles import ARCHITECTURES, SMALL, outside, pictures, randomised
from torch import Tensor

import vitral
from vitral.architecture import Architecture, ViTConfig
from vitral.data.loader import evaluation_batches
from vitral.data.preprocess import parse_pipeline, parse_preprocess
from vitral.data.sources import open_images
from vitral.errors import UserError
from vitral.inspection import image_inspection
from vitral.inspection.image_inspection import deletion_area, deletion_curve, gradient_rollout, occlusion, random_maps
from vitral.models.build import Model, build
from vitral.models.capture import capture
from vitral.models.model import normalize
from vitral.models.vit import ViT

Method = Callable[..., Tensor]
METHODS: dict[str, Method] = {"gradient_rollout": gradient_rollout, "occlusion": occlusion}
WEIGHTS = "data/vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors"
PREPROCESS = "decode|resize_small(248, bicubic)|central_crop(224)|value_range(-1, 1)"


def made(architecture: Architecture) -> Any:
    """A model of random weights; Any, since kinds of models differ in what they hold."""
    return randomised(build(architecture))


def test_two_layers_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class token and two patches. With the layers in the wrong order, nothing would come from the second patch."""
    first = torch.tensor([[0.0, 0.1, 0.0], [0.0, 0.0, 0.3], [0.0, 0.0, 0.0]])
    second = torch.tensor([[0.0, 0.4, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    evidence = image_inspection._GradientAttention(
        {0: first[None], 1: second[None]}, torch.tensor([[1.0, 0, 0]]), (1, 2)
    )
    monkeypatch.setattr(image_inspection, "_gradient_attention", lambda *_: evidence)
    model, image = made(SMALL), pictures(1, 3, 8, 16)
    # The class token reads patch 1 in both layers (0.1 / 0.3 + 0.4 / 0.4), and patch 2 through patch 1 (1 * 0.3 / 0.3).
    torch.testing.assert_close(gradient_rollout(model, image), torch.tensor([[[4 / 3, 1.0]]]))


def explicit(
    model: Any, images: Tensor, classes: Tensor, sigmoid: bool = False
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Attention (b, heads, n, n) of each layer as part of the graph, its gradient, and token times gradient (b, n)."""
    patches = model.patchify(images)
    x = model._with_prefix(patches.flatten(1, 2)) + model.positions[0](patches)
    attentions = []
    for block in model.blocks:
        b, n, d = x.shape
        qkv = block.attention.qkv(block.norm1(x)).view(b, n, 3, model.config.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attention = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1)
        attention.retain_grad()
        attentions.append(attention)
        x = x + block.attention.out((attention @ v).transpose(1, 2).reshape(b, n, d))
        x = x + block.mlp(block.norm2(x))
    tokens = model.norm(x)
    tokens.retain_grad()
    logits = model.head(model.pool(tokens))
    common = 0 if sigmoid else logits.mean(1)
    (logits[torch.arange(len(classes)), classes] - common).sum().backward()
    return attentions, [attention.grad for attention in attentions], (tokens * tokens.grad).sum(-1)


@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize("changes", [{}, {"registers": 3}, {"pool": "mean"}, {"pool": "map", "class_token": False}])
def test_rollout_equals_a_loop_over_explicit_attention(changes: dict[str, Any], sigmoid: bool) -> None:
    config = replace(SMALL, depth=3, image=(24, 40), **changes)
    model, images = made(config), pictures(2, 3, 24, 40)
    classes = model(images).argmax(1)
    attentions, gradients, read = explicit(model, images, classes, sigmoid)

    def loop(gradients: list[Tensor], image: int) -> np.ndarray:
        relevance = np.eye(attentions[0].shape[-1])
        for attention, gradient in zip(attentions, gradients, strict=True):
            step = np.zeros_like(relevance)
            for a, g in zip(attention[image].detach().numpy(), gradient[image].numpy(), strict=True):
                step += np.maximum(a * g, 0) / config.heads
            relevance = relevance + step / step.sum(1).max() @ relevance
        row = relevance[0] if config.pool == "token" else read[image].clamp(min=0).detach().numpy() @ relevance
        return row[config.prefix :].reshape(3, 5)

    result = gradient_rollout(model, images, classes, sigmoid=sigmoid)
    for image in range(2):
        expected = loop(gradients, image)
        np.testing.assert_allclose(result[image], expected, rtol=1e-3, atol=1e-6 * expected.max())
        wrong = loop(gradients[::-1], image)  # each layer with the gradient of its mirror image, a well-known mistake
        assert np.abs(wrong - expected).max() > 0.03 * expected.max()


def test_axial_relevance_propagates_along_rows_and_columns():
    config = replace(SMALL, axial=True, pool="mean", class_token=False, image=(24, 40))
    model, images, classes = made(config), pictures(2, 3, 24, 40), torch.tensor([0, 3])
    with capture(model, rows="all", gradients=True) as seen:
        tokens = model.encode(model.patchify(images))
        logits = model.head(model.pool(tokens))
        score = (logits[torch.arange(2), classes] - logits.mean(1)).sum()
    gradients = seen.gradients(score)
    read = (tokens * torch.autograd.grad(score, tokens)[0]).sum(-1).clamp(min=0).detach().numpy()
    result = gradient_rollout(model, images, classes)
    for image in range(2):
        relevance = np.eye(15)
        for layer in range(config.depth):
            for axis in ("row", "column"):
                small = (seen[layer, axis] * gradients[layer, axis]).clamp(min=0).mean(1).numpy()
                step = np.zeros((15, 15))
                for i, j, h, w in np.ndindex(3, 5, 3, 5):
                    if axis == "row" and i == h:
                        step[i * 5 + j, h * 5 + w] = small[image * 3 + i, j, w]
                    if axis == "column" and j == w:
                        step[i * 5 + j, h * 5 + w] = small[image * 5 + j, i, h]
                relevance = relevance + step / step.sum(1).max() @ relevance
        expected = (read[image] @ relevance).reshape(3, 5)
        np.testing.assert_allclose(result[image], expected, rtol=1e-3, atol=1e-6 * expected.max())


@pytest.mark.parametrize("name", ["tanh", "hybrid", "BiT"])
@pytest.mark.parametrize("sigmoid", [False, True])
def test_occlusion_equals_a_loop_over_occluded_images(name: str, sigmoid: bool, monkeypatch) -> None:
    """Sides that the cells do not divide: a ViT drops the remainder, a hybrid and a ResNet have a cell for it."""
    model, side = made(ARCHITECTURES[name]), {"tanh": 8, "hybrid": 8, "BiT": 32}[name]
    images, classes = pictures(2, 3, 2 * side + 3, side + 5), torch.tensor([2, 2])
    chances = Tensor.sigmoid if sigmoid else partial(torch.softmax, dim=1)
    monkeypatch.setattr(image_inspection, "OCCLUDED", 5)
    result = occlusion(model, images, classes, sigmoid=sigmoid)
    assert result.shape[1:] == ((2, 1) if name == "tanh" else (3, 2))
    with torch.no_grad():
        before = chances(model(images))[:, 2]
        for i, row, column in np.ndindex(*result.shape):
            painted = images[i : i + 1].clone()
            painted[..., row * side : (row + 1) * side, column * side : (column + 1) * side] = images[i].mean((1, 2))[
                :, None, None
            ]
            drop = before[i] - chances(model(painted))[0, 2]
            assert result[i, row, column].item() == pytest.approx(drop.item(), abs=1e-5)


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if "DINOv2" not in name])
def test_every_architecture_has_maps(name: str) -> None:
    config = ARCHITECTURES[name]
    model, images = made(config), pictures(2, config.channels, 33, 48)
    for method in METHODS.values():
        if isinstance(model, ViT):
            result = method(model, images)
            assert result.shape == (2, *config.grid((33, 48)))
            assert result.isfinite().all()
            assert result.abs().max() > 0
        elif method is not occlusion:
            with pytest.raises(UserError, match="a ResNet has no attention"):
                method(model, images)


@pytest.mark.parametrize("name", METHODS)
def test_multi_label_maps_do_not_depend_on_other_classes(name: str) -> None:
    """The head's other rows are turned around, which a softmax over all of them must notice."""
    method, model, images, classes = METHODS[name], made(SMALL), pictures(2, 3, 32, 40), torch.tensor([1, 1])

    def answers() -> list[Tensor]:
        curves = [
            deletion_curve(model, images, random_maps(model, images), 4, classes, sigmoid=s) for s in (True, False)
        ]
        return [*curves, *(method(model, images, classes, sigmoid=s) for s in (True, False))]

    before = answers()
    with torch.no_grad():
        others = torch.arange(5) != 1
        model.head.output.weight[others] *= -3
        model.head.output.bias[others] += 2
    for kind, (first, second) in enumerate(zip(before, answers(), strict=True)):
        moved = float((second - first).abs().max() / first.abs().max())
        assert moved < 1e-5 if kind % 2 == 0 else moved > 0.1


def test_a_single_class_uses_its_sigmoid():
    """The softmax of a single logit is always 1."""
    model, images = made(replace(SMALL, classes=1)), pictures(2, 3, 32, 40)
    for method in METHODS.values():
        result = method(model, images)
        assert result.abs().max() > 0
        assert torch.equal(result, method(model, images, sigmoid=True))


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_map_depends_on_its_image_and_class_only_and_leaves_the_model_unchanged(method: Method) -> None:
    config = replace(SMALL, registers=2)
    model, images = made(config), pictures(3, 3, 32, 40)
    model.requires_grad_(False)
    images.requires_grad_()
    with torch.no_grad():
        result = method(model, images)
        predicted = model(images).argmax(1)
    assert not result.requires_grad
    torch.testing.assert_close(method(model, images, predicted), result)
    for i in range(3):
        torch.testing.assert_close(method(model, images[i : i + 1])[0], result[i], rtol=1e-4, atol=1e-6)
    other = method(model, images, (predicted + 1) % 5)
    assert all((other[i] - result[i]).abs().max() > 0.05 * result[i].abs().max() for i in range(3))
    assert images.grad is None
    assert not any(block.attention.observers for block in model.blocks)


def test_invalid_arguments_are_errors():
    model, images = made(SMALL), pictures(2, 3, 32, 32)
    for classes in (torch.tensor([1]), torch.tensor([0, 5]), torch.tensor([-1, 0])):
        for method in METHODS.values():
            with pytest.raises(UserError, match="one number from 0 to 4 for each of 2 images"):
                method(model, images, classes)
    bare = build(replace(SMALL, classes=0))
    for method in METHODS.values():
        with pytest.raises(UserError, match="no head"):
            method(bare, images)
    for maps, steps in ((torch.rand(2, 4, 3), 4), (torch.rand(1, 4, 4), 4), (torch.rand(2, 4, 4), 0)):
        with pytest.raises(UserError, match="do not fit"):
            deletion_curve(model, images, maps, steps)


def test_a_deletion_curve_equals_a_loop():
    model, images = made(SMALL), pictures(3, 3, 19, 35)  # a grid of 2 by 4, and a remainder of pixels
    maps = random_maps(model, images, seed=1)
    assert maps.shape == (3, 2, 4)
    assert torch.equal(maps, random_maps(model, images, seed=1))
    assert not torch.equal(maps, random_maps(model, images, seed=2))
    result = deletion_curve(model, images, maps, 4)
    assert result.shape == (5,)
    with torch.no_grad():
        chosen = model(images).argmax(1)
        expected = torch.zeros(5)
        for i in range(3):
            order = sorted(np.ndindex(2, 4), key=lambda index: -maps[i][index])
            for step in range(5):
                painted = images[i : i + 1].clone()
                for row, column in order[: 2 * step]:
                    cell = (..., slice(8 * row, 8 * row + 8), slice(8 * column, 8 * column + 8))
                    painted[cell] = images[i].mean((1, 2))[:, None, None]
                expected[step] += model(painted).softmax(1)[0, chosen[i]] / 3
    torch.testing.assert_close(result, expected)
    assert deletion_area(result) == pytest.approx(np.trapezoid(expected.numpy(), np.linspace(0, 1, 5)), abs=1e-6)


TOY = ViTConfig(depth=2, width=32, mlp=32, heads=2, patch=4, image=(16, 24), classes=3)
TOYS: dict[str, ViTConfig] = {
    "class token": TOY,
    "registers": replace(TOY, registers=2, position="sincos2d"),
    "mean": replace(TOY, pool="mean", class_token=False),
    "map": replace(TOY, pool="map", class_token=False),
}


def planted(count: int, seed: int, first: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Patches of slightly different colours (count, 3, 16, 24), one of them much greener (class 1) or bluer (2); labels
    from `first` on, and places by chance.

    Class 0 has no such patch: else its absence would be the evidence for one of two colours. The tints keep the answer
    uncertain: where a LayerNorm is saturated, a patch may be all that counts and yet have no gradient.
    """
    draw = torch.Generator().manual_seed(seed)
    images = 0.3 * torch.randn(count, 3, 16, 24, generator=draw)
    images += 0.4 * torch.randn(count, 3, 4, 6, generator=draw).repeat_interleave(4, 2).repeat_interleave(4, 3)
    labels, indices = torch.randint(first, 3, (count,), generator=draw), torch.randint(24, (count,), generator=draw)
    for image, label, index in zip(images, labels, indices, strict=True):
        row, column = 4 * (index // 6), 4 * (index % 6)
        image[label, row : row + 4, column : column + 4] += 2.0 * (label > 0)
    return images, labels, indices


@pytest.fixture(scope="module", params=TOYS)
def toy(request: pytest.FixtureRequest) -> Model:
    """A model that learned to look for the planted patch, in a second or two."""
    torch.manual_seed(0)
    model = build(TOYS[request.param])
    learner = torch.optim.Adam(model.parameters(), 3e-3)
    for step in range(150):
        images, labels, _ = planted(64, step)
        learner.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        learner.step()
    return model.eval()


def test_a_planted_patch_is_found(toy: Model) -> None:
    images, labels, indices = planted(60, 1000, first=1)
    with torch.no_grad():
        right = toy(images).argmax(1) == labels
    assert right.float().mean() > 0.8
    images, indices = images[right], indices[right]
    chance = deletion_area(deletion_curve(toy, images, random_maps(toy, images), 12))
    for name, method in METHODS.items():
        maps = method(toy, images)
        assert (maps.flatten(1).argmax(1) == indices).float().mean() >= 0.85, name
        assert deletion_area(deletion_curve(toy, images, maps, 12)) < 0.7 * chance, name


@pytest.fixture(scope="module")
def released(assets: Path) -> tuple[Model, Tensor]:
    """The real ViT-Ti/16 and eight photographs of ImageNet, a hundred and twenty classes apart."""
    pipeline, mean, std = parse_preprocess(PREPROCESS, 3)
    files = sorted((assets / "data" / "imagenet_val_1000").glob("*/*"))[7::120][:8]
    batch = next(evaluation_batches(open_images(files), parse_pipeline(pipeline), batch=8))
    return vitral.load(assets / WEIGHTS)[0], normalize(batch.images, mean, std)


def test_deletion_beats_chance_on_photographs(released: tuple[Model, Tensor]) -> None:
    """Areas measured in 14 steps: chance 0.52 to 0.56 (four seeds), gradient rollout 0.28."""
    model, images = released
    chance, result = (
        deletion_area(deletion_curve(model, images, maps, 3))
        for maps in (random_maps(model, images), gradient_rollout(model, images))
    )
    assert result < chance - 0.15


def test_occlusion_beats_chance_on_small_photographs(released: tuple[Model, Tensor]) -> None:
    """At half the side, since occlusion takes one pass per patch."""
    model, images = released
    small = F.interpolate(images[:3], size=(112, 112), mode="bilinear", antialias=True)
    chance, result = (
        deletion_area(deletion_curve(model, small, maps, 7))
        for maps in (random_maps(model, small), occlusion(model, small))
    )
    assert result < chance


def test_random_weights_give_another_map(released: tuple[Model, Tensor]) -> None:
    """The sanity check of Adebayo et al. 2018: a map that survives random weights shows the image, not the model."""
    model, images = released
    spearman = outside("scipy.stats").spearmanr
    torch.manual_seed(0)
    fresh = made(model.config)
    pairs = zip(gradient_rollout(model, images[:4]), gradient_rollout(fresh, images[:4]), strict=True)
    result = [spearman(real.flatten(), random.flatten()).statistic for real, random in pairs]
    assert abs(np.mean(result)) < 0.3
    assert max(result) < 0.6
