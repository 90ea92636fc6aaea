"""Losses against torch's own and against finite differences; mixing against loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from vitral.training.objective import (
    Mix,
    class_weights,
    draw_mix,
    log_priors,
    mix_batch,
    sigmoid_loss,
    soft_targets,
    softmax_loss,
)


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(7, 4, generator=generator)
    labels = torch.tensor([0, 3, 1, 1, 2, 0, 3])
    shares = torch.rand(7, 4, generator=generator).softmax(dim=1)
    return logits, labels, shares


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.7])
@pytest.mark.parametrize("weights", [None, torch.tensor([0.5, 1.0, 3.0, 0.0])])
def test_softmax_equals_torch(batch, smoothing, weights):
    logits, labels, shares = batch
    for targets in (labels, shares):
        expected = F.cross_entropy(logits, targets, weight=weights, label_smoothing=smoothing, reduction="none")
        ours = softmax_loss(logits, targets, smoothing=smoothing, weights=weights)
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


def test_sigmoid_sums_over_classes(batch):
    logits, labels, _ = batch
    many = torch.tensor([[1, 0, 1, 0]] * 7, dtype=torch.uint8)
    probability = logits.double().sigmoid()
    for targets, hot in ((many, many.double()), (labels, F.one_hot(labels, 4).double())):
        each = -(hot * probability.log() + (1 - hot) * (1 - probability).log())
        torch.testing.assert_close(sigmoid_loss(logits, targets).double(), each.sum(dim=1), rtol=1e-4, atol=1e-5)
        weights = torch.tensor([1.0, 2.0, 0.0, 0.5])
        expected = (each * weights).sum(dim=1)
        torch.testing.assert_close(
            sigmoid_loss(logits, targets, weights=weights).double(), expected, rtol=1e-4, atol=1e-5
        )


def test_gradients_equal_finite_differences(batch):
    logits, labels, shares = batch
    for loss in (
        lambda x: softmax_loss(x, shares, smoothing=0.1, weights=torch.tensor([1.0, 2.0, 0.5, 1.0])).sum(),
        lambda x: sigmoid_loss(x, labels).sum(),
    ):
        x = logits.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(x), x)
        for place in ((0, 0), (3, 1), (6, 2)):
            nudge = torch.zeros_like(logits)
            nudge[place] = 1e-2
            slope = (loss(logits + nudge) - loss(logits - nudge)) / 2e-2
            assert gradient[place].item() == pytest.approx(slope.item(), abs=2e-3)


def test_half_precision_logits_are_summed_in_single_precision(batch):
    logits, labels, _ = batch
    half = logits.bfloat16()
    assert softmax_loss(half, labels).dtype == torch.float32
    assert torch.equal(softmax_loss(half, labels), softmax_loss(half.float(), labels))
    assert torch.equal(sigmoid_loss(half, labels), sigmoid_loss(half.float(), labels))


def test_adjusted_logits_of_a_guess_by_frequency_cost_the_same_as_plain_ones():
    counts = torch.tensor([70, 20, 10])
    priors = log_priors(counts)
    torch.testing.assert_close(priors.exp(), torch.tensor([0.7, 0.2, 0.1]))
    labels = torch.tensor([0, 1, 2])
    zeros = torch.zeros(3, 3)
    torch.testing.assert_close(softmax_loss(zeros, labels, log_priors=priors), -priors)
    logits = torch.randn(3, 3)
    expected = F.cross_entropy(logits + priors, labels, reduction="none")
    torch.testing.assert_close(softmax_loss(logits, labels, log_priors=priors), expected)


def test_class_weights_are_inverse_frequencies_of_mean_one():
    counts = torch.tensor([90, 9, 1])
    weights = class_weights(counts)
    torch.testing.assert_close(weights * counts, torch.full((3,), 100 / 3))
    assert (weights * counts).sum().item() / 100 == pytest.approx(1.0)
    assert torch.isfinite(class_weights(torch.tensor([5, 0]))).all()


def test_soft_targets_are_one_hot_and_padding_is_nothing():
    assert torch.equal(soft_targets(torch.tensor([1, 0]), 3), torch.tensor([[0.0, 1, 0], [1, 0, 0]]))
    assert soft_targets(torch.tensor([-1]), 3).sum() == 0


def rows(count):
    images = torch.arange(count).float()[:, None, None, None] * torch.ones(count, 2, 6, 8)
    return images, torch.eye(count)


def test_mixup_blends_each_row_with_the_one_before():
    images, targets = rows(4)
    mixed, shares = mix_batch(images, targets, Mix(0.75, None).numbers())
    for i in range(3):
        torch.testing.assert_close(mixed[i], torch.full((2, 6, 8), 0.75 * (i + 1) + 0.25 * i))
        assert shares[i, i + 1] == 0.75
        assert shares[i, i] == 0.25


def test_cutmix_pastes_the_box_of_the_row_before():
    images, targets = rows(3)
    before = images.clone()
    mixed, shares = mix_batch(images, targets, Mix(1 - 6 / 48, (1, 3, 4, 7)).numbers())
    assert torch.equal(images, before)
    for i in range(2):
        for y in range(6):
            for x in range(8):
                assert mixed[i, 0, y, x] == (i if 1 <= y < 3 and 4 <= x < 7 else i + 1)
        assert shares[i, i + 1].item() == pytest.approx((mixed[i, 0] == i + 1).float().mean().item())


def test_what_is_drawn_depends_on_seed_and_step_alone():
    draws = [draw_mix(1, step, (32, 48), mixup=0.5, cutmix=1.0) for step in range(400)]
    assert draws == [draw_mix(1, step, (32, 48), mixup=0.5, cutmix=1.0) for step in range(400)]
    assert draws != [draw_mix(2, step, (32, 48), mixup=0.5, cutmix=1.0) for step in range(400)]
    boxes = [mix.box for mix in draws if mix.box is not None]
    assert 150 < len(boxes) < 250
    assert draw_mix(1, 3, (32, 48), mixup=0.0, cutmix=0.0) == Mix(1.0, None)


def test_mixup_shares_follow_the_folded_beta():
    shares = [draw_mix(0, step, (8, 8), mixup=0.2, cutmix=0.0).lam for step in range(3000)]
    assert min(shares) >= 0.5
    draws = np.random.default_rng(7).beta(0.2, 0.2, 100_000)
    assert np.mean(shares) == pytest.approx(np.maximum(draws, 1 - draws).mean(), abs=0.01)


def test_cutmix_boxes_lie_inside_and_their_area_is_the_partners_share():
    height, width = 30, 50
    covered = np.zeros((height, width))
    for step in range(2000):
        mix = draw_mix(0, step, (height, width), mixup=0.0, cutmix=1.0)
        assert mix.box is not None
        top, bottom, left, right = mix.box
        assert 0 <= top <= bottom <= height
        assert 0 <= left <= right <= width
        assert mix.lam == pytest.approx(1 - (bottom - top) * (right - left) / (height * width))
        covered[top:bottom, left:right] += 1
    # A corner is covered if the centre lies within half a side of it on both axes: the mean of U / 4 for a uniform U.
    assert covered[[0, 0, -1, -1], [0, -1, 0, -1]].mean() == pytest.approx(2000 / 8, rel=0.1)
    assert abs(covered[:, ::-1] - covered).max() < 0.08 * 2000  # left and right alike
