"""Pixels, patches and positions by kernels against PyTorch: on a GPU natively, elsewhere in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="the kernels need Triton (pip install triton)")

from vitral import create
from vitral.architecture import ViTConfig
from vitral.kernels import dispatch, embedding
from vitral.models.model import normalize
from vitral.models.vit import ViT

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def kernels_on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "HALF_DTYPES", (torch.float32,))
    monkeypatch.setattr(dispatch, "_has_kernels", lambda device: True)


@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (1, 1, 80, 70), (3, 4, 1, 1)])
def test_pixels_are_normalized_as_by_pytorch(shape, kernels_on_any_device):
    torch.manual_seed(0)
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE)
    mean, std = torch.rand(2, shape[1]).add(0.1)
    view = (-1, 1, 1)
    expected = (pixels.double() / 255 - mean.to(DEVICE).double().view(view)) / std.to(DEVICE).double().view(view)
    found = normalize(pixels, mean.tolist(), std.tolist())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("channels", "height", "width", "side"), [(3, 32, 48, 16), (1, 30, 29, 14), (5, 9, 100, 2), (3, 7, 7, 7)]
)
def test_patches_are_those_of_unfold(channels, height, width, side):
    torch.manual_seed(0)
    images = torch.randn(2, channels, height, width, device=DEVICE)
    grid = (height // side, width // side)
    found = embedding.extract_patches(images, side, grid, torch.float32)
    expected = F.unfold(images, side, stride=side).transpose(1, 2).unflatten(1, grid)
    assert torch.equal(found, expected)
    half = embedding.extract_patches(images, side, grid, torch.float16)
    assert torch.equal(half, expected.half())


@pytest.mark.parametrize(
    ("batch", "count", "prefix", "dim"), [(1, 1, 0, 1), (3, 7, 1, 40), (70, 3, 5, 24), (9, 64, 2, 32)]
)
def test_positions_are_added_with_gradients(batch, count, prefix, dim):
    torch.manual_seed(0)
    patches = torch.randn(batch, count, dim, device=DEVICE).half().requires_grad_()
    table = torch.randn(prefix + count, dim, device=DEVICE, requires_grad=True)
    found, expected = embedding.add_positions(patches, table), embedding.add_positions_reference(patches, table)
    assert torch.equal(found, expected)
    grad = torch.randn(expected.shape, device=DEVICE).half()
    dpatches, dtable = torch.autograd.grad(found, (patches, table), grad)
    assert torch.equal(dpatches, grad[:, prefix:])
    assert dtable.dtype == torch.float32
    torch.testing.assert_close(dtable.double(), grad.double().sum(0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"registers": 3},
        {"class_token": False, "pool": "mean"},
        {"position": "none"},
        {"dropout": 0.1},
        {"pre_norm": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("training", [False, True])
def test_a_model_reads_the_same_tokens_with_and_without_kernels(changes: dict[str, Any], training, request):
    torch.manual_seed(0)
    small = ViTConfig(depth=1, width=48, mlp=96, heads=3, patch=16, image=(48, 48), classes=5)
    model = ViT(replace(small, **changes)).to(DEVICE).train(training)
    images = torch.randn(2, 3, 50, 48, device=DEVICE)  # two rows of pixels fill no patch

    def tokens() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        torch.manual_seed(1)  # of dropout
        model.zero_grad()
        patches = model.patchify(images)
        x = model._input_tokens(patches, model._position_rows(patches))
        (x * torch.linspace(-1, 1, x.numel(), device=DEVICE).view(x.shape)).sum().backward()
        return x, {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}

    expected, expected_grads = tokens()
    request.getfixturevalue("kernels_on_any_device")
    found, found_grads = tokens()
    torch.testing.assert_close(found, expected)
    assert found_grads.keys() == expected_grads.keys()
    for name, grad in found_grads.items():
        torch.testing.assert_close(grad, expected_grads[name], rtol=1e-4, atol=1e-4)


def test_gradients_of_pixels_take_the_plain_path(kernels_on_any_device):
    torch.manual_seed(0)
    model = create("ViT-Ti/16@32", classes=2).to(DEVICE)
    images = torch.randn(1, 3, 32, 32, device=DEVICE, requires_grad=True)
    model.patchify(images).square().sum().backward()
    assert images.grad is not None
    assert images.grad.abs().sum() > 0
