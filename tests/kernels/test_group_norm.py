"""GroupNorm with channels last against PyTorch's, natively on a GPU, elsewhere in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton (pip install triton)")

from vitral.architecture import ResNetConfig, StemConfig, ViTConfig
from vitral.kernels import dispatch, group_norm
from vitral.models.build import build

operator = group_norm._group_norm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize(("shape", "groups"), [((2, 8, 3, 5), 4), ((1, 160, 17, 17), 8), ((3, 12, 1, 1), 4)])
def test_it_matches_the_reference_with_gradients(shape, groups, has_residual, relu):
    torch.manual_seed(0)
    x, residual, grad = (torch.randn(shape, device=DEVICE).to(memory_format=torch.channels_last) for _ in range(3))
    x = x * 2 + 30  # a mean far from zero
    weight, bias = torch.randn(2, shape[1], device=DEVICE)
    leaves = [x, weight, bias, *([residual] if has_residual else [])]
    found_leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    leaves = [leaf.double().requires_grad_() for leaf in leaves]
    outputs = []
    for function, (x, weight, bias, *rest) in ((group_norm.group_norm, found_leaves), (group_norm.reference, leaves)):
        outputs.append(function(x, weight, bias, groups, 1e-5, relu=relu, residual=rest[0] if rest else None))
    found, expected = outputs
    assert found.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
    found_grads = torch.autograd.grad(found, found_leaves, grad)
    for one, other in zip(found_grads, torch.autograd.grad(expected, leaves, grad.double()), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=2e-4, atol=2e-4)


def test_it_follows_the_rules_of_torch_library():
    x = torch.randn(2, 8, 3, 3, device=DEVICE).to(memory_format=torch.channels_last).requires_grad_()
    weight, bias = torch.randn(8, device=DEVICE, requires_grad=True), torch.randn(8, device=DEVICE, requires_grad=True)
    torch.library.opcheck(group_norm._group_norm, (x, weight, bias, None, 4, 1e-5, True))


@pytest.mark.parametrize(
    "name", [pytest.param("ResNet", marks=[] if DEVICE == "cuda" else [pytest.mark.slow]), "hybrid"]
)
def test_models_on_kernels_match_plain_pytorch(name, monkeypatch):
    """In float32: in bfloat16 rounding flips ReLUs, and the gradients of two right computations differ by half."""
    torch.manual_seed(0)
    stem = StemConfig(blocks=(1,))
    config = {
        "ResNet": ResNetConfig(blocks=(1, 1, 1, 1), width=1, image=(32, 32), classes=5),
        "hybrid": ViTConfig(depth=1, width=32, mlp=32, heads=2, patch=2, image=(32, 32), classes=5, stem=stem),
    }[name]
    model = build(config).to(DEVICE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))  # no norm has weight zero
    images = torch.randn(2, 3, 32, 32, device=DEVICE)

    def logits_and_gradients() -> list[torch.Tensor]:
        model.zero_grad()
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            logits = model(images)
            logits.square().sum().backward()
        return [logits.detach(), *(weight.grad.clone() for weight in model.parameters() if weight.grad is not None)]

    monkeypatch.setattr(dispatch, "_has_kernels", lambda device: False)
    expected = logits_and_gradients()
    monkeypatch.setattr(dispatch, "_has_kernels", lambda device: True)
    monkeypatch.setattr(dispatch, "HALF_DTYPES", (torch.float32,))
    monkeypatch.setattr(dispatch, "fits_blocks", lambda *_: False)
    used = []
    monkeypatch.setattr(group_norm, "_group_norm", lambda *arguments: used.append(1) or operator(*arguments))
    found = logits_and_gradients()
    assert len(used) == sum(isinstance(module, torch.nn.GroupNorm) for module in model.modules())
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= 1e-3 * (other.norm() + 1e-3)
