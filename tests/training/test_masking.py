"""Masked patch prediction: exact counts, uniform draws that nothing but the key moves, targets by loops, learning."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from vitral.architecture import StemConfig, ViTConfig
from vitral.errors import UserError
from vitral.evaluation.masked_baselines import histogram_entropy
from vitral.models.model import normalize
from vitral.models.vit import ViT
from vitral.training.masked import (
    Corruption,
    MaskedModel,
    MaskSettings,
    Target,
    colour_targets,
    corrupt,
    cut_patches,
    draw_corruption,
    mean_colours,
)

HALF = (0.5, 0.5, 0.5)
TINY = ViTConfig(depth=1, width=16, mlp=32, heads=2, patch=4, image=(16, 16), classes=0)


def keys(count: int, first: int = 0) -> Tensor:
    return torch.arange(first, first + count)


def pictures(seed: int, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, shape, np.uint8))


# --- which patches are hidden ---


@given(
    patches=st.integers(2, 80),
    share=st.floats(0.01, 1),
    token=st.floats(0, 1),
    seed=st.integers(0, 2**80),
    step=st.integers(0, 10**7),
)
def test_counts_are_exact_in_every_image(patches, share, token, seed, step):
    settings = MaskSettings(share, token, (1 - token) / 2, seed=seed)
    drawn = draw_corruption(keys(5, 2**40), step, patches, settings)
    hidden = max(round(share * patches), 1)
    masked = round(token * hidden)
    assert drawn.hidden.sum(dim=1).tolist() == [hidden] * 5
    assert drawn.masked.sum(dim=1).tolist() == [masked] * 5
    assert set(drawn.swapped.sum(dim=1).tolist()) == {min(round((1 - token) / 2 * hidden), hidden - masked)}
    assert not (drawn.masked & drawn.swapped).any()
    assert (drawn.hidden | ~(drawn.masked | drawn.swapped)).all()
    assert [sorted(row.tolist()) for row in drawn.indices] == [row.nonzero().flatten().tolist() for row in drawn.hidden]
    own = torch.arange(patches).expand(5, -1)
    assert torch.equal(drawn.source != own, drawn.swapped)
    assert drawn.source.min() >= 0
    assert drawn.source.max() < patches


def test_the_papers_shares():
    drawn = draw_corruption(keys(3), 0, 196, MaskSettings())
    counts = [mask.sum(dim=1).tolist() for mask in (drawn.hidden, drawn.masked, drawn.swapped)]
    assert counts == [[98] * 3, [78] * 3, [10] * 3]


@given(rows=st.lists(st.integers(0, 10**12), min_size=1, max_size=8), seed=st.integers(0, 9), step=st.integers(0, 99))
def test_a_row_depends_on_its_key_alone(rows, seed, step):
    settings = MaskSettings(seed=seed)
    together = draw_corruption(torch.tensor(rows), step, 24, settings)
    again = draw_corruption(torch.tensor(rows), step, 24, settings)
    for row, key in enumerate(rows):
        alone = draw_corruption(torch.tensor([key]), step, 24, settings)
        for all_rows, repeated, one in zip(together, again, alone, strict=True):
            assert torch.equal(all_rows[row], one[0])
            assert torch.equal(all_rows, repeated)


def test_torchs_random_state_is_neither_read_nor_moved():
    before = torch.get_rng_state()
    first = draw_corruption(keys(4), 3, 16, MaskSettings())
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(123)
    assert torch.equal(draw_corruption(keys(4), 3, 16, MaskSettings()).source, first.source)


def even(counts: Counter, cells: int) -> bool:
    observed = [counts[cell] for cell in counts] + [0] * (cells - len(counts))
    return stats.chisquare(observed).pvalue > 1e-4


def test_every_set_of_hidden_patches_is_equally_likely():
    drawn = draw_corruption(keys(14_000), 5, 8, MaskSettings(seed=1))
    assert even(Counter(tuple(sorted(row)) for row in drawn.indices.tolist()), math.comb(8, 4))


def test_every_hidden_patch_is_masked_swapped_and_replaced_equally_often():
    drawn = draw_corruption(keys(20_000), 5, 6, MaskSettings(share=1.0, token=0.5, random=1 / 6))
    roles = torch.cat([drawn.masked, drawn.swapped], dim=1)
    assert even(Counter(map(tuple, roles.tolist())), math.comb(6, 3) * 3)
    rows, places = drawn.swapped.nonzero(as_tuple=True)
    assert even(Counter(zip(places.tolist(), drawn.source[rows, places].tolist(), strict=True)), 6 * 5)


@pytest.mark.parametrize("what", ["key", "step", "seed"])
def test_rows_steps_and_seeds_are_independent(what):
    def hidden(i: int) -> Tensor:
        one = {"key": 0, "step": 0, "seed": 0} | {what: i}
        found = draw_corruption(torch.tensor([one["key"]]), one["step"], 4, MaskSettings(seed=one["seed"]))
        return found.hidden[0]

    sets = [tuple(hidden(i).tolist()) for i in range(3000)]
    assert even(Counter(itertools.pairwise(sets)), 6 * 6)


def test_one_patch_is_refused():
    with pytest.raises(UserError, match="choose smaller patches or larger images"):
        draw_corruption(keys(1), 0, 1, MaskSettings())


# --- what corruption does ---


def test_corruption_by_loops():
    patches = torch.randn(5, 3, 4, 6)
    token = torch.randn(6)
    drawn = draw_corruption(keys(5), 0, 12, MaskSettings(token=0.5, random=0.3))
    corrupted = corrupt(patches, drawn, token)
    for row, place in itertools.product(range(5), range(12)):
        expected = patches[row].reshape(12, 6)[place]
        if drawn.masked[row, place]:
            expected = token
        elif drawn.swapped[row, place]:
            expected = patches[row].reshape(12, 6)[drawn.source[row, place]]
            assert not torch.equal(expected, patches[row].reshape(12, 6)[place])
        assert torch.equal(corrupted[row, place // 4, place % 4], expected)


def test_gradients_reach_the_token_and_the_patches_that_are_shown():
    patches = torch.ones(1, 2, 2, 3, requires_grad=True)
    token = torch.zeros(3, requires_grad=True)
    masked = torch.tensor([[True, False, False, False]])
    swapped = torch.tensor([[False, True, False, False]])
    source = torch.tensor([[0, 3, 2, 3]])
    corrupt(
        patches, Corruption(torch.tensor([[0, 1]]), masked | swapped, masked, swapped, source), token
    ).sum().backward()
    assert patches.grad is not None
    assert token.grad is not None
    assert patches.grad[0, :, :, 0].tolist() == [[0, 0], [1, 2]]
    assert token.grad.tolist() == [1, 1, 1]


# --- what is predicted ---


def test_patches_are_cut_in_the_order_of_the_tokens():
    images = pictures(0, (2, 3, 11, 13))
    cut = cut_patches(images, 4, (2, 3))
    assert cut.shape == (2, 6, 3, 4, 4)
    for y, x in itertools.product(range(2), range(3)):
        assert torch.equal(cut[:, 3 * y + x], images[:, :, 4 * y : 4 * y + 4, 4 * x : 4 * x + 4])


def test_a_patch_is_what_the_models_embedding_reads():
    model = ViT(TINY)  # whose embedding starts without bias
    images = normalize(pictures(0, (2, 3, 18, 23)), HALF, HALF)
    patches = model.patchify(images)
    cut = cut_patches(images, TINY.stride, (4, 5)).flatten(2)
    expected = cut @ model.embed.weight.flatten(1).T
    torch.testing.assert_close(patches.flatten(1, 2), expected, rtol=1e-4, atol=1e-5)


def test_where_a_stem_rounds_its_grid_up_the_last_pixels_are_repeated():
    images = pictures(0, (1, 1, 6, 8))
    cut = cut_patches(images, 4, (2, 2))
    assert torch.equal(cut[0, 2, 0, :2], images[0, 0, 4:, :4])
    assert torch.equal(cut[0, 2, 0, 2:], images[0, 0, 5:, :4].expand(2, -1))


def slow_colour(area: np.ndarray) -> int:
    """uint8 (c, h, w) -> the class of its mean, in exact whole numbers."""
    number = 0
    for channel in area:
        number = 8 * number + sum(int(value) for value in channel.flat) // (32 * channel.size)
    return number


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("side", [4, 5, 7, 14, 16])
def test_colours_by_loops(channels, side):
    patches = pictures(side, (2, 3, channels, side, side))
    patches[0] = patches[0] // 2 + 40
    mean, grid = colour_targets(patches, "mean"), colour_targets(patches, "grid")
    assert mean.shape == (2, 3, 1)
    assert grid.shape == (2, 3, 16)
    for b, n in itertools.product(range(2), range(3)):
        patch = patches[b, n].numpy()
        assert mean[b, n].item() == slow_colour(patch)
        areas = [slice(math.floor(i * side / 4), math.ceil((i + 1) * side / 4)) for i in range(4)]
        expected = [slow_colour(patch[:, rows, columns]) for rows in areas for columns in areas]
        assert grid[b, n].tolist() == expected


@given(value=st.integers(0, 255), side=st.integers(4, 20))
def test_a_plain_patch_has_its_own_colour_however_large(value, side):
    plain = torch.full((1, 1, 3, side, side), value, dtype=torch.uint8)
    assert mean_colours(plain).tolist() == [[[[value] * 3]]]
    assert colour_targets(plain, "grid").unique().tolist() == [(value // 32) * 73]


def test_areas_of_uneven_patches_are_torchs_adaptive_ones():
    patches = pictures(0, (4, 5, 3, 14, 14))
    expected = torch.nn.functional.adaptive_avg_pool2d(patches.flatten(0, 1).double(), 4)
    assert torch.equal(mean_colours(patches, 4).transpose(2, 3).reshape(20, 3, 4, 4), (expected + 1e-9).long())


# --- the model ---


def by_hand(masked: MaskedModel, raw: Tensor, step: int) -> tuple[list[float], list[float]]:
    """Losses and right answers, image by image and patch by patch."""
    model, settings = masked.model, masked.settings
    if not masked.training:  # then every hidden patch is the mask token
        settings = replace(settings, token=1.0, random=0.0)
    images = normalize(raw, HALF, HALF)
    losses, shares = [], []
    for row in range(len(raw)):
        patches = model.patchify(images[row : row + 1])
        grid = (patches.shape[1], patches.shape[2])
        drawn = draw_corruption(torch.tensor([row]), step, grid[0] * grid[1], settings)
        tokens = model.encode(corrupt(patches, drawn, masked.mask_token))
        tokens = model.norm(tokens) if model.config.norm_place == "features" else tokens
        costs, right = [], []
        for place in drawn.hidden[0].nonzero().flatten().tolist():
            outputs = masked.predict(tokens[0, model.config.prefix + place])
            side = model.config.stride
            y, x = side * (place // grid[1]), side * (place % grid[1])
            window = (row, slice(None), slice(y, y + side), slice(x, x + side))
            if settings.target == "pixels":
                costs.append(float((outputs - images[window].flatten()).square().mean()))
                continue
            cells = 4 if settings.target == "grid" else 1
            length = side // cells
            for cell, scores in enumerate(outputs.view(cells * cells, 512)):
                top, left = length * (cell // cells), length * (cell % cells)
                target = slow_colour(raw[window][:, top : top + length, left : left + length].numpy())
                costs.append(float(-scores.log_softmax(dim=0)[target]))
                right.append(float(scores.argmax() == target))
        losses.append(sum(costs) / len(costs))
        shares.append(sum(right) / len(right) if right else -1.0)
    return losses, shares


KINDS = {
    "plain": {},
    "norm after pooling": {"norm_place": "features", "pool": "mean", "class_token": False},
    "registers": {"registers": 2},
    "attention pooling": {"pool": "map", "class_token": False},
    "axial": {"axial": True, "pool": "mean", "class_token": False},
    "hybrid": {"stem": StemConfig(blocks=()), "patch": 1},
    "relative positions": {"position": "relative"},
    "positions in every block": {"position": "2d", "injection": "every", "depth": 2},
    "head and tanh": {"classes": 7, "representation": 5},
}


def build(target: Target, **changes: object) -> MaskedModel:
    torch.manual_seed(0)
    config = ViTConfig(**{**vars(TINY), **changes})  # type: ignore[arg-type]
    masked = MaskedModel(ViT(config), MaskSettings(target=target, seed=3)).eval()
    torch.nn.init.normal_(masked.predict.weight, std=0.3)
    return masked


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("target", "kind"), [("grid", "plain"), ("pixels", "plain"), *(("mean", kind) for kind in KINDS)]
)
def test_the_loss_by_hand(target, kind, training):
    masked = build(target, **KINDS[kind]).train(training)
    raw = pictures(1, (3, 3, 16, 20))
    raw[:, :, :8] //= 4
    with torch.no_grad():
        losses, right = masked(normalize(raw, HALF, HALF), raw, keys(3), 7)
        expected_losses, expected_right = by_hand(masked, raw, 7)
    assert losses.tolist() == pytest.approx(expected_losses, rel=1e-4)
    assert right.tolist() == pytest.approx(expected_right)


@pytest.mark.parametrize("kind", KINDS)
def test_what_learns_gets_a_gradient_and_the_rest_is_frozen(kind):
    masked = build("mean", **KINDS[kind])
    raw = pictures(1, (2, 3, 16, 16))
    masked(normalize(raw, HALF, HALF), raw, keys(2), 0)[0].sum().backward()
    for name, parameter in masked.named_parameters():
        unused = name.startswith(("model.head.", "model.map."))
        assert parameter.requires_grad == (not unused), name
        assert (parameter.grad is None) == unused, name
    assert masked.mask_token.grad is not None
    assert masked.mask_token.grad.abs().sum() > 0


@pytest.mark.parametrize(("channels", "blind"), [(3, math.log(512)), (1, math.log(8))])
def test_the_first_loss_is_that_of_a_blind_guess(channels, blind):
    config = ViTConfig(**{**vars(TINY), "channels": channels})
    raw = pictures(1, (2, channels, 16, 16))
    images = normalize(raw, HALF[:channels], HALF[:channels])
    for target in ("mean", "grid"):
        losses, _ = MaskedModel(ViT(config), MaskSettings(target=target))(images, raw, keys(2), 0)
        assert losses.tolist() == pytest.approx([blind, blind])


def test_the_batch_does_not_change_a_rows_loss():
    masked = build("mean")
    raw = pictures(1, (6, 3, 16, 16))
    images = normalize(raw, HALF, HALF)
    with torch.no_grad():
        together = masked(images, raw, keys(6, 10), 4)
        parts = [masked(images[rows], raw[rows], keys(6, 10)[rows], 4) for rows in (slice(0, 2), slice(2, 6))]
    for whole, first, second in zip(together, *parts, strict=True):
        torch.testing.assert_close(whole, torch.cat([first, second]))


def test_half_precision_gives_losses_in_single_precision():
    masked = build("mean")
    raw = pictures(1, (2, 3, 16, 16))
    images = normalize(raw, HALF, HALF)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        losses, _ = masked(images, raw, keys(2), 0)
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses, masked(images, raw, keys(2), 0)[0], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("side", [1, 2, 3])
def test_patches_too_small_for_the_grid_are_refused(side):
    config = ViTConfig(**{**vars(TINY), "patch": side})
    with pytest.raises(UserError, match=r"cannot be shrunk to 4 x 4: set masked\.target to mean or pixels"):
        MaskedModel(ViT(config), MaskSettings(target="grid"))
    MaskedModel(ViT(config), MaskSettings(target="mean"))


def two_halves(count: int, rng: np.random.Generator) -> Tensor:
    """uint8 (count, 3, 8, 8): a left half in one of 8 colours, which says what colour the right half has."""
    left = rng.integers(0, 8, count)
    bits = np.stack([left >> 2 & 1, left >> 1 & 1, left & 1], axis=1)
    images = np.empty((count, 3, 8, 8), np.uint8)
    images[..., :4] = (40 + 160 * bits)[:, :, None, None]
    images[..., 4:] = (200 - 130 * bits[:, ::-1])[:, :, None, None]
    return torch.from_numpy(images)


def test_a_tiny_model_learns_what_colour_goes_with_what():
    # A few seconds: the only proof that token, corruption, tokens and targets meet at the same patches.
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    config = ViTConfig(depth=2, width=32, mlp=64, heads=2, patch=2, image=(8, 8), classes=0)
    masked = MaskedModel(ViT(config), MaskSettings())
    optimizer = torch.optim.AdamW([one for one in masked.parameters() if one.requires_grad], lr=1e-2)
    for step in range(100):
        raw = two_halves(32, rng)
        losses, _ = masked(normalize(raw, HALF, HALF), raw, keys(32), step)
        optimizer.zero_grad()
        losses.mean().backward()
        optimizer.step()
    raw = two_halves(200, rng)
    with torch.no_grad():
        losses, right = masked(normalize(raw, HALF, HALF), raw, keys(200), 0)
    hidden = draw_corruption(keys(200), 0, 16, masked.settings).hidden
    constant = histogram_entropy(colour_targets(cut_patches(raw, 2, (4, 4)), "mean")[hidden].numpy())
    assert constant > 2
    assert losses.mean() < constant / 2
    assert right.mean() > 0.5  # the commonest colour has an eighth of the patches
