"""Linear layers by oneDNN on a CPU: values and gradients of the definition, and where PyTorch's own are used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from vitral.architecture import ViTConfig
from vitral.kernels import dispatch, onednn
from vitral.kernels.dispatch import apply_linear, has_onednn_linear, linear
from vitral.models.build import build

pytestmark = pytest.mark.skipif(not has_onednn_linear(), reason="this PyTorch was built without oneDNN")

TINY = ViTConfig(depth=2, width=48, mlp=96, heads=3, patch=8, image=(32, 32), classes=11)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """oneDNN for products of any size, as on a processor that MKL is slow on; a number for each of them."""
    numbers: list[int] = []
    original = onednn.linear

    def counted(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        numbers.append(x.numel() * len(weight))
        return original(x, weight, bias)

    monkeypatch.setattr(onednn, "linear", counted)
    monkeypatch.setattr(dispatch, "_mkl_is_slow", lambda: True)
    monkeypatch.setattr(dispatch, "_MIN_ONEDNN_PRODUCT", 0)
    return numbers


def tensors(shape: tuple[int, ...], out: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape), torch.randn(out, shape[-1]), torch.randn(out)]


def gradients(function: Any, inputs: list[Tensor], upstream: Tensor) -> list[Tensor]:
    """Output, first and second gradients, of the inputs and of the upstream gradient."""
    leaves = [tensor.clone().requires_grad_() for tensor in (*inputs, upstream)]
    *leaves, grad = leaves
    output = function(*leaves)
    first = torch.autograd.grad(output, leaves, grad, create_graph=True)
    energy = torch.cat([part.flatten() for part in first]).pow(3).sum()
    return [output, *first, *torch.autograd.grad(energy, [leaves[0], leaves[1], grad])]


@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 8), (1, 16)])
def test_values_and_gradients_are_those_of_the_definition(calls: list[int], shape: tuple[int, ...]) -> None:
    inputs = tensors(shape, 6)
    upstream = torch.randn(*shape[:-1], 6)
    expected = gradients(F.linear, [tensor.double() for tensor in inputs], upstream.double())
    for ours, exact in zip(gradients(linear, inputs, upstream), expected, strict=True):
        assert (ours - exact).norm() <= 1e-6 * exact.norm()
    assert calls


def is_dense(matrix: Tensor) -> bool:
    return matrix.is_contiguous() or matrix.t().is_contiguous()


@pytest.mark.parametrize("layout", ["rows of a table", "one token", "transposed", "expanded"])
def test_every_layout_is_made_contiguous(calls: list[int], layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strided matrices take a path of oneDNN's that is hundreds of times slower."""
    strided = {
        "rows of a table": torch.randn(6, 24)[:, 8:16],
        "one token": torch.randn(6, 3, 8)[:, 0],
        "transposed": torch.randn(8, 6).t(),
        "expanded": torch.randn(1, 8).expand(6, 8),
    }[layout]
    assert not strided.is_contiguous()
    layouts: list[bool] = []
    operator = onednn.product
    monkeypatch.setattr(onednn, "product", lambda *args: layouts.extend(map(is_dense, args[:2])) or operator(*args))
    weight = torch.randn(8, 16)[:, ::2].requires_grad_()
    output = linear(strided, weight, None)
    output.sum().backward()  # an expanded gradient
    assert len(layouts) == 4
    assert all(layouts)
    torch.testing.assert_close(output, strided @ weight.t())
    torch.testing.assert_close(weight.grad, strided.sum(0).expand(8, 8))


def test_frozen_weights_get_no_gradient(calls: list[int]) -> None:
    x, weight, bias = tensors((4, 8), 8)
    bias.requires_grad_()
    linear(x, weight, bias).sum().backward()
    assert weight.grad is None
    assert x.grad is None
    torch.testing.assert_close(bias.grad, torch.full((8,), 4.0))


def step(model: nn.Module, images: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss = F.cross_entropy(model(images), torch.tensor([1, 2, 3]))
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("changes", [{}, {"pool": "map", "class_token": False}, {"swiglu": True}, {"gelu": "quick"}])
def test_a_model_trains_as_with_pytorchs_products(
    calls: list[int], changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = build(ViTConfig(**{**vars(TINY), **changes}))
    images = torch.randn(3, 3, 32, 32)
    ours = step(model, images)
    products = len(calls)
    assert products >= 1 + 4 * TINY.depth  # patches, and the layers of the blocks
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    expected = step(model, images)
    assert len(calls) == products
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_hooks_are_called(calls: list[int]) -> None:
    layer, seen = nn.Linear(8, 8), []
    layer.register_forward_hook(lambda *args: seen.append(args))
    apply_linear(layer, torch.randn(4, 8))
    assert seen
    assert not calls


def test_tools_that_know_pytorchs_operators_alone_get_them(calls: list[int]) -> None:
    x, weight, bias = tensors((4, 8), 6)
    expected = F.linear(x, weight, bias)
    assert torch.equal(torch.func.vmap(linear, (0, None, None))(x, weight, bias), expected)
    torch.func.grad(lambda w: linear(x, w, bias).sum())(weight)
    torch.func.jvp(lambda w: linear(x, w, bias), (weight,), (weight,))
    with torch.autograd.forward_ad.dual_level():
        linear(torch.autograd.forward_ad.make_dual(x, x), weight, bias)
    with FlopCounterMode(display=False) as counter:
        linear(x, weight, bias)
    assert counter.get_total_flops() == 2 * 4 * 8 * 6
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x, weight, bias).dtype == torch.bfloat16
    linear(x.double(), weight.double(), bias.double())
    torch.jit.trace(lambda x: linear(x, weight, bias), x, check_trace=False)
    assert not calls
    program = torch.export.export(build(TINY).eval(), (torch.randn(1, 3, 32, 32),))
    assert not calls
    assert "mkldnn" not in str(program.graph)


@pytest.mark.parametrize(
    ("capability", "vendor", "slow"),
    [("AVX512", "AuthenticAMD", True), ("AVX512", "GenuineIntel", False), ("AVX2", "AuthenticAMD", False)],
)
def test_it_is_chosen_by_the_processor(
    monkeypatch: pytest.MonkeyPatch, capability: str, vendor: str, slow: bool
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: f"vendor_id\t: {vendor}\n")
    assert dispatch._mkl_is_slow.__wrapped__() == slow


def test_small_products_stay_with_mkl(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_MIN_ONEDNN_PRODUCT", 4 * 8 * 6)
    x, weight, bias = tensors((4, 8), 6)
    linear(x[:3], weight, bias)
    assert not calls
    linear(x, weight, bias)
    assert calls == [4 * 8 * 6]
