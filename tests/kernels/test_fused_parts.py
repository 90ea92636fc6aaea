"""What later Vision Transformers add to a block, on the kernels: RoPE, LayerScale, missing biases, quick GELU. On a GPU
natively, elsewhere in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("triton", reason="the kernels need Triton (pip install triton)")

from vitral.architecture import RopeConfig, ViTConfig
from vitral.kernels import blocks, dispatch, gelu, rotary
from vitral.models.layers import LayerScale
from vitral.models.position import Rotation
from vitral.models.vit import ViT

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # Triton's interpreter computes wrongly in bfloat16
EXACT: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}
# On a GPU the kernels multiply float32 in its fast form of 10 bits; in the interpreter exactly.
CLOSE: dict[str, Any] = {"rtol": 1e-2, "atol": 1e-2} if DEVICE == "cuda" else EXACT

EVA_ROPE = RopeConfig(temperature=10000.0, pairs="adjacent", coordinates="index", reference=(2, 2))
MODELS: dict[str, dict[str, Any]] = {
    "DINOv3": {
        **{"rope": RopeConfig(), "layer_scale": True, "registers": 4, "key_bias": False, "position": "none"},
        **{"gelu": "erf", "norm_eps": 1e-5},
    },
    "CLIP": {"pre_norm": True, "patch_bias": False, "gelu": "quick", "norm_eps": 1e-5},
    "OpenCLIP": {"pre_norm": True, "patch_bias": False, "gelu": "erf", "norm_eps": 1e-5},
    "adjacent pairs": {"rope": EVA_ROPE, "key_bias": False},
    "a key bias before RoPE": {"rope": EVA_ROPE},
    "no qkv bias": {"qkv_bias": False, "layer_scale": True},
}
HALF_MODELS = list(MODELS) if DEVICE == "cuda" else ["CLIP", "a key bias before RoPE"]  # no LayerScale in float16


def make_model(**parts: Any) -> ViT:
    torch.manual_seed(0)
    sizes = {"depth": 2, "width": 32, "mlp": 64, "heads": 2, "patch": 16, "image": (32, 32), "classes": 5}
    model = ViT(ViTConfig(**sizes, **parts)).to(DEVICE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))  # no bias is zero, no norm's weight one
        for module in model.modules():
            if isinstance(module, LayerScale):
                module.scale.add_(0.5)
    return model


def make_images() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(2, 3, 32, 32, device=DEVICE)


def logits_and_gradients(model: nn.Module, images: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    logits = model(images)
    logits.square().sum().backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    return logits.detach(), {name: grad.clone() for name, grad in gradients.items() if grad is not None}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernels are used for float32 on any device; the calls of `blocks.encode` are counted here."""
    counted: list[str] = []
    encode = blocks.encode

    def count(*arguments: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        counted.append("encode")
        return encode(*arguments, **options)

    monkeypatch.setattr(blocks, "encode", count)
    monkeypatch.setattr(dispatch, "HALF_DTYPES", (torch.float32,))
    monkeypatch.setattr(dispatch, "_has_kernels", lambda device: True)
    return counted


@pytest.mark.parametrize(("n", "heads", "d"), [(5, 2, 16), (70, 3, 32)])
@pytest.mark.parametrize("adjacent", [False, True])
@pytest.mark.parametrize("per_head", [False, True])
def test_rotation_matches_the_reference_with_gradients(n, heads, d, adjacent, per_head):
    torch.manual_seed(n)
    qkv, grad = torch.randn(2, 2, n, 3, heads, d, device=DEVICE)
    angles = torch.randn(n, heads if per_head else 1, d // 2, device=DEVICE)
    rotation = Rotation(angles.cos(), angles.sin(), adjacent)
    leaf = qkv.double().requires_grad_()
    expected = rotary.reference(leaf, rotation)
    torch.testing.assert_close(expected[:, :, 1], rotation.apply(leaf[:, :, 1]))  # as the plain path rotates
    (dqkv,) = torch.autograd.grad(expected, leaf, grad.double())
    rotary.rotate_(qkv, rotation)
    sums = rotary.rotate_back_(grad, rotation).sum(0)
    torch.testing.assert_close(qkv.double(), expected.detach(), **EXACT)
    torch.testing.assert_close(grad.double(), dqkv, **EXACT)
    torch.testing.assert_close(sums.double().view(2, heads, d), dqkv[:, :, :2].sum((0, 1)), rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # h / (1 + inf) is 0, as it should be
@pytest.mark.parametrize("shape", [(1, 8), (70, 96), (3, 2048)])
def test_quick_gelu_matches_the_reference(shape):
    torch.manual_seed(0)
    h = torch.randn(shape, device=DEVICE) * 4
    torch.testing.assert_close(gelu.quick_gelu(h).double(), gelu.reference(h.double(), "quick"), **EXACT)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")
def test_exact_gelu_at_the_end_of_a_product_is_exact_to_five_digits():
    dtype, rounding = (torch.float32, 0.0) if DEVICE == "cpu" else (torch.bfloat16, 2**-8)
    h = torch.cat([torch.linspace(-8, 8, 508), torch.tensor([-1e4, -30.0, 30.0, 1e4])]).to(DEVICE, dtype)
    x, weight = h[:, None].repeat(1, 16), torch.zeros(16, 16, device=DEVICE, dtype=dtype)
    weight[:, 0] = 1.0
    found = gelu.fused_linear_gelu(x, weight, torch.zeros_like(weight[0]), "none")
    torch.testing.assert_close(found[:, 3].double(), gelu.reference(h.double(), "none"), rtol=rounding, atol=3e-5)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(8, 16, 32), (130, 72, 264), pytest.param(300, 192, 768, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("linear", [gelu.linear_gelu, gelu.fused_linear_gelu])
@pytest.mark.parametrize("kind", ["quick", "none"])
def test_a_linear_layer_with_a_gelu_matches_the_reference(rows, inputs, outputs, linear, kind):
    torch.manual_seed(0)
    x, weight = torch.randn(rows, inputs, device=DEVICE), torch.randn(outputs, inputs, device=DEVICE)
    bias = 3 * torch.randn(outputs, device=DEVICE)
    found = linear(x.to(HALF), weight.to(HALF), bias.to(HALF), kind)
    x, weight, bias = (tensor.to(HALF).double() for tensor in (x, weight, bias))
    expected = gelu.reference(torch.nn.functional.linear(x, weight, bias), kind)
    torch.testing.assert_close(found.double(), expected, rtol=2e-2 if torch.bfloat16 == HALF else 4e-3, atol=2e-2)


@pytest.mark.skipif(DEVICE == "cpu", reason="the kernel is for large batches on a GPU")
def test_large_batches_have_the_gelu_in_the_product(monkeypatch):
    rows = 128 * gelu._MIN_TILES * torch.cuda.get_device_properties(0).multi_processor_count
    x, weight = torch.randn(rows, 64, device=DEVICE, dtype=HALF), torch.randn(256, 64, device=DEVICE, dtype=HALF)
    expected = gelu.quick_gelu(torch.addmm(weight[:, 0], x, weight.t()))
    monkeypatch.setattr(gelu, "quick_gelu", None)
    found = gelu.linear_gelu(x, weight, weight[:, 0].contiguous(), "quick")
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


OFTEN = ("DINOv3", "CLIP", "adjacent pairs")  # the others with `pytest -m slow`
CASES = [pytest.param(name, marks=[] if name in OFTEN else [pytest.mark.slow]) for name in MODELS]


@pytest.mark.parametrize("name", CASES)
def test_models_on_kernels_match_plain_pytorch(name, calls, monkeypatch):
    model, images = make_model(**MODELS[name]), make_images()
    fast, found = logits_and_gradients(model, images)
    with torch.no_grad():
        inferred = model(images)
    assert len(calls) == 2
    monkeypatch.setattr(dispatch, "_has_kernels", lambda device: False)
    logits, gradients = logits_and_gradients(model, images)
    assert len(calls) == 2
    torch.testing.assert_close(fast, logits, rtol=10 * CLOSE["rtol"], atol=10 * CLOSE["atol"])
    torch.testing.assert_close(inferred, logits, rtol=10 * CLOSE["rtol"], atol=10 * CLOSE["atol"])
    assert set(found) == set(gradients) == {name for name, _ in model.named_parameters()}
    for parameter, gradient in gradients.items():
        difference = (found[parameter] - gradient).norm()
        assert difference <= CLOSE["rtol"] * gradient.norm() + 1e-5, parameter


@pytest.mark.slow
@pytest.mark.parametrize("name", HALF_MODELS)
def test_half_precision_gradients_are_within_rounding(name, calls, monkeypatch):
    monkeypatch.setattr(dispatch, "HALF_DTYPES", (HALF,))
    model, images = make_model(**MODELS[name]), make_images()
    with torch.autocast(DEVICE, HALF):
        _, found = logits_and_gradients(model, images)
    assert calls
    monkeypatch.setattr(dispatch, "_has_kernels", lambda device: False)
    _, exact = logits_and_gradients(model, images)
    with torch.autocast(DEVICE, HALF):
        _, plain = logits_and_gradients(model, images)
    norm = torch.stack([gradient.norm() for gradient in exact.values()]).norm()
    errors = [
        torch.stack([(gradients[name] - gradient).norm() for name, gradient in exact.items()]).norm()
        for gradients in (found, plain)
    ]
    # Random models of this size turn the rounding of bfloat16 into up to 4 % of the norm, with and without kernels.
    # Kernels round rotated queries and keys once more: 1.7 times the error on an H200.
    assert errors[0] < 2 * errors[1] + 1e-3 * norm
    assert all(gradient.dtype == torch.float32 for gradient in found.values())


def test_learned_frequencies_use_the_kernels_in_inference_only(calls, monkeypatch):
    model, images = make_model(rope=RopeConfig(learned=True, coordinates="index")), make_images()
    with torch.no_grad():
        fast = model(images)
    assert len(calls) == 1
    plain, gradients = logits_and_gradients(model, images)
    assert len(calls) == 1
    assert gradients["rope.frequencies"].norm() > 0
    torch.testing.assert_close(fast, plain, rtol=10 * CLOSE["rtol"], atol=10 * CLOSE["atol"])


@pytest.mark.parametrize(
    "parts",
    [
        {"swiglu": True},
        {"qk_norm": True},
        {"attention_norm": True},
        {"mlp_norm": True},
        {"post_norm": True},
        {"position": "bias"},
    ],
)
def test_other_parts_use_plain_pytorch(parts, calls):
    make_model(**parts).train()(make_images())
    assert not calls


def test_layer_scale_in_float16_uses_plain_pytorch(calls, monkeypatch):
    """Its products with the weights are too small for float16."""
    monkeypatch.setattr(dispatch, "HALF_DTYPES", (torch.float16,))
    model, images = make_model(layer_scale=True), make_images()
    with torch.no_grad(), torch.autocast(DEVICE, torch.float16):
        model(images)
    assert not calls
