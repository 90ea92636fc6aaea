"""The last block for the class token alone against whole blocks: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton (pip install triton)")

from vitral.architecture import RopeConfig, ViTConfig
from vitral.kernels import block, class_attention, dispatch
from vitral.models.vit import ViT

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLOSE: dict[str, Any] = {"rtol": 1e-2, "atol": 1e-2} if DEVICE == "cuda" else {"rtol": 1e-4, "atol": 1e-5}
SMALL = ViTConfig(depth=3, width=48, mlp=96, heads=3, patch=16, image=(48, 48), classes=5)


@pytest.fixture
def kernels_on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "HALF_DTYPES", (torch.float32,))
    monkeypatch.setattr(dispatch, "_has_kernels", lambda device: True)


def make_model(**changes: Any) -> ViT:
    torch.manual_seed(0)
    model = ViT(replace(SMALL, **changes)).to(DEVICE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "dim"), [(2, 65, 3, 16), (1, 1, 1, 8), (3, 200, 2, 24), (2, 64, 1, 80)]
)
def test_attention_of_one_query_matches_float64(batch, tokens, heads, dim):
    torch.manual_seed(0)
    q = torch.randn(batch, heads, dim, device=DEVICE, requires_grad=True)
    kv = (3 * torch.randn(batch, tokens, 2, heads, dim, device=DEVICE)).requires_grad_()
    out, _ = class_attention.class_attention(q, kv)
    wide = [tensor.detach().double().requires_grad_() for tensor in (q, kv)]
    expected = class_attention.reference(*wide)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, kv), grad)
    for one, other in zip(found, torch.autograd.grad(expected, wide, grad.double()), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


def test_the_operators_pass_the_checks_of_pytorch():
    torch.manual_seed(0)
    q = torch.randn(2, 3, 16, device=DEVICE, requires_grad=True)
    kv = torch.randn(2, 9, 2, 3, 16, device=DEVICE, requires_grad=True)
    checks = ("test_autograd_registration", "test_faketensor", "test_schema")
    torch.library.opcheck(class_attention.class_attention, (q, kv), test_utils=checks)
    tokens, weight = torch.randn(2, 9, 48, device=DEVICE, requires_grad=True), torch.randn(144, 48, device=DEVICE)
    angles = torch.randn(9, 1, 8, device=DEVICE)
    for tables in ((None, None, False), (angles.cos(), angles.sin(), True)):
        inputs = (tokens, weight.requires_grad_(), torch.randn(144, device=DEVICE, requires_grad=True), *tables, 3)
        torch.library.opcheck(class_attention.class_projection, inputs, test_utils=checks)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"registers": 2, "layer_scale": True},
        {"stochastic_depth": 0.5},
        {"qkv_bias": False},
        {"gelu": "erf"},
        {"rope": RopeConfig()},
        {"rope": RopeConfig(pairs="adjacent"), "registers": 1},
    ],
    ids=str,
)
def test_features_are_those_of_all_tokens(changes, kernels_on_any_device):
    """`encode` computes whole blocks; with the same draws both have the same gradients."""
    model, images = make_model(**changes), torch.randn(2, 3, 48, 48, device=DEVICE)
    results = []
    for features in (model.features, lambda images: model.pool(model.encode(model.patchify(images)))):
        torch.manual_seed(3)
        model.zero_grad()
        out = features(images)
        out.square().sum().backward()
        grads = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
        results.append((out.detach(), grads))
    (found, found_grads), (expected, expected_grads) = results
    torch.testing.assert_close(found, expected, **CLOSE)
    assert found_grads.keys() == expected_grads.keys()
    for name, grad in expected_grads.items():
        assert (found_grads[name] - grad).norm() <= 10 * CLOSE["rtol"] * grad.norm() + 1e-4, name


@pytest.mark.parametrize(
    ("changes", "whole_blocks"),
    [({}, 2), ({"depth": 1}, 1), ({"pool": "mean"}, 3), ({"rope": RopeConfig()}, 2)],
    ids=["token", "one block", "mean", "rope"],
)
def test_the_last_block_is_split_for_a_class_token_only(changes, whole_blocks, kernels_on_any_device, monkeypatch):
    used = []
    forward = block.forward
    monkeypatch.setattr(block, "forward", lambda *arguments: used.append(1) or forward(*arguments))
    make_model(**changes)(torch.randn(2, 3, 48, 48, device=DEVICE))
    assert len(used) == whole_blocks


def test_a_subclass_gets_all_tokens(kernels_on_any_device):
    class Averaged(ViT):
        def pool(self, tokens: torch.Tensor) -> torch.Tensor:
            return tokens.mean(dim=1)

    torch.manual_seed(0)
    model, images = Averaged(SMALL).to(DEVICE), torch.randn(2, 3, 48, 48, device=DEVICE)
    expected = model.encode(model.patchify(images)).mean(dim=1)
    torch.testing.assert_close(model.features(images), expected, **CLOSE)


@pytest.mark.parametrize("changes", [{}, {"rope": RopeConfig()}], ids=["plain", "rope"])
def test_inference_matches_training_and_the_compiled_model(changes, kernels_on_any_device):
    model, images = make_model(**changes).eval(), torch.randn(2, 3, 48, 48, device=DEVICE)
    trained = model(images)
    with torch.no_grad():
        torch.testing.assert_close(model(images), trained.detach(), **CLOSE)
    trained.square().sum().backward()
    expected = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled(images).square().sum().backward()
    torch.compiler.reset()
    for name, weight in model.named_parameters():
        assert weight.grad is not None
        torch.testing.assert_close(weight.grad, expected[name], rtol=10 * CLOSE["rtol"], atol=1e-4)
