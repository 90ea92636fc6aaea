"""Fused blocks for long rows, unusual heads and stochastic depth, eager and compiled, against the plain model. On a GPU
natively (in half precision), elsewhere in Triton's interpreter (in float32)."""

from __future__ import annotations

import logging
import shutil
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton", reason="the kernels need Triton (pip install triton)")

from vitral.architecture import RopeConfig, ViTConfig
from vitral.kernels import attention, block, blocks, dispatch, fused_ops, operators
from vitral.kernels.fused_ops import BranchDrop, NonAffineNorm, NormWeights
from vitral.models.layers import Block, LayerScale, StochasticDepth
from vitral.models.model import normalize
from vitral.models.vit import ViT

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
TOLERANCE = 3e-2 if ON_GPU else 1e-4  # relative to the norm
MODEL_TOLERANCE = 2 * TOLERANCE  # on a GPU both models round to eight bits after every layer
CAN_BUILD = bool(shutil.which("g++")) and Path(sysconfig.get_path("include"), "Python.h").exists()
DINO: dict[str, Any] = {
    **{"rope": RopeConfig(), "layer_scale": True, "registers": 4, "key_bias": False, "position": "none"},
    **{"gelu": "erf", "stochastic_depth": 0.5},
}


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / (expected.double().norm() + 1e-4))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Switches the kernels on (for float32, too, off a GPU) or off; they are on."""

    def switch(on: bool) -> None:
        monkeypatch.setattr(dispatch, "_has_kernels", lambda device: on)

    monkeypatch.setattr(dispatch, "HALF_DTYPES", (DTYPE,))
    switch(True)
    return switch


@pytest.fixture
def forget_graphs(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.WARNING, logger="torch.__trace")  # pytest would collect every step of the compiler
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def make_model(**parts: Any) -> ViT:
    """Four patches, and heads of 24 channels, for which there is no kernel for short rows."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "depth": 2,
        "width": 48,
        "mlp": 64,
        "heads": 2,
        "patch": 16,
        "image": (32, 32),
        "classes": 5,
    }
    model = ViT(ViTConfig(**(sizes | parts))).to(DEVICE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))  # no bias is zero, no norm's weight one
        for module in model.modules():
            if isinstance(module, LayerScale):
                module.scale.add_(0.5)
    return model.train()


def make_images(model: ViT, batch: int = 3) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(batch, 3, *model.config.image, device=DEVICE)


def logits_and_gradients(model: nn.Module, run: Callable[[Tensor], Tensor], images: Tensor) -> dict[str, Tensor]:
    """The logits, once with gradients and once without, and the gradients, with the same random draws."""
    model.zero_grad()
    torch.manual_seed(2)
    with torch.autocast(DEVICE, DTYPE, enabled=ON_GPU):
        logits = run(images)
    logits.float().square().sum().backward()
    torch.manual_seed(2)
    with torch.no_grad(), torch.autocast(DEVICE, DTYPE, enabled=ON_GPU):
        inferred = run(images)
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    return {"logits": logits.detach(), "inference": inferred, **gradients}


def assert_equal_up_to_rounding(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    scale = torch.stack([tensor.double().norm() for tensor in expected.values()]).norm()
    for name, tensor in expected.items():
        difference = (found[name].double() - tensor.double()).norm()
        assert difference <= MODEL_TOLERANCE * (tensor.double().norm() + 1e-2 * scale), name


@pytest.mark.parametrize(("n", "d"), [(257, 16), (300, 32), (5, 24), (70, 80)])
def test_long_attention_matches_the_reference_with_gradients(n, d):
    torch.manual_seed(n)
    qkv = torch.randn(2, n, 3, 2, d, device=DEVICE, dtype=DTYPE)
    out, lse = attention.forward(qkv)
    grad = torch.randn_like(out)
    dqkv, _, sums = attention.backward(qkv, None, out, lse, grad)
    leaf = qkv.double().requires_grad_()
    expected = attention.reference(leaf)
    (gradient,) = torch.autograd.grad(expected, leaf, grad.double())
    q, k, _ = leaf.detach().permute(2, 0, 3, 1, 4).unbind(0)
    assert relative(out, expected.detach()) < TOLERANCE
    assert relative(lse, (q @ k.transpose(2, 3) * d**-0.5).logsumexp(-1)) < TOLERANCE
    assert relative(dqkv, gradient) < TOLERANCE
    assert sums is not None
    assert relative(sums.sum(0), gradient[:, :, 0].sum((0, 1)).flatten()) < TOLERANCE
    assert all(tensor.is_contiguous() for tensor in (out, lse, dqkv))


@pytest.mark.parametrize("layouts", ["tokens first", "heads first", "both"])
@pytest.mark.parametrize(("n", "heads", "d"), [(37, 4, 64), (70, 3, 24), (1, 1, 8)])
def test_packed_gradients_are_those_of_queries_keys_and_values(n, heads, d, layouts):
    torch.manual_seed(0)
    grads = [torch.randn(2, n, heads, d, device=DEVICE, dtype=DTYPE).transpose(1, 2) for _ in range(3)]
    changed = {"tokens first": [], "heads first": [0, 1, 2], "both": [1]}[layouts]
    grads = [grad.contiguous() if index in changed else grad for index, grad in enumerate(grads)]
    found, parts = attention.pack_gradients(*grads)
    sums = fused_ops.column_sums(parts)[None]
    expected, expected_sums = attention.pack_gradients_reference(*grads)
    assert torch.equal(found, expected)
    assert found.is_contiguous()
    torch.testing.assert_close(sums, expected_sums, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("affine", [False, True])
def test_stochastic_depth_in_the_norm_matches_the_reference_with_gradients(affine):
    torch.manual_seed(0)
    x, y, dtotal, dnormed = torch.randn(4, 21, 20, device=DEVICE)
    bias, weight, shift = torch.randn(3, 20, device=DEVICE)
    drop = BranchDrop(torch.tensor([0.1, 0.7, 0.69], device=DEVICE).view(3, 1, 1), 0.7)  # the second image is dropped
    norm = NormWeights(weight, shift, 1e-6) if affine else NonAffineNorm(1e-6)
    found = fused_ops.add_norm(x, y, bias, norm, drop)
    leaves = [tensor.double().requires_grad_() for tensor in (x, y, bias, *((weight, shift) if affine else ()))]
    wide_norm = NormWeights(leaves[3], leaves[4], 1e-6) if affine else norm
    total, normed = fused_ops.add_norm_reference(leaves[0], leaves[1], leaves[2], wide_norm, drop)
    torch.testing.assert_close(total[7:14], leaves[0][7:14])
    torch.testing.assert_close(found.total.double(), total, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.normed.double(), normed, rtol=1e-4, atol=1e-5)
    expected = torch.autograd.grad([total, normed], leaves, [dtotal.double(), dnormed.double()])
    saved = found.total if affine else found.normed
    dx, dy, sums = fused_ops.add_norm_backward(saved, found.moments, norm.weight, dtotal, dnormed, drop)
    for one, other in zip((dx, dy, *sums), expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("parts", [{"stochastic_depth": 0.6}, DINO], ids=["stochastic depth", "DINO"])
def test_models_match_the_plain_one_with_the_same_draws(parts, kernels, monkeypatch):
    used = []
    forward = block.forward
    monkeypatch.setattr(block, "forward", lambda *arguments: used.append(1) or forward(*arguments))
    model = make_model(**parts)
    images = make_images(model)
    found = logits_and_gradients(model, model, images)
    assert len(used) == model.config.depth - 1  # in the last one the class token is computed alone
    kernels(False)
    expected = logits_and_gradients(model, model, images)
    assert_equal_up_to_rounding(found, expected)
    with torch.no_grad(), torch.autocast(DEVICE, DTYPE, enabled=ON_GPU):
        assert relative(found["inference"], model.eval()(images)) > 10 * TOLERANCE  # branches were dropped


def test_a_model_of_257_tokens_matches_the_plain_one(kernels, monkeypatch):
    model = make_model(depth=1, width=16, mlp=16, heads=1, patch=1, image=(16, 16))
    images = make_images(model, 1)
    found = logits_and_gradients(model, model, images)
    monkeypatch.setattr(blocks, "encode", None)
    kernels(False)
    assert_equal_up_to_rounding(found, logits_and_gradients(model, model, images))


def test_draws_are_those_of_the_blocks_one_by_one():
    drop = StochasticDepth(0.25)
    x = torch.ones(64, 3, 2)
    torch.manual_seed(0)
    draws = drop.draw(x)
    torch.manual_seed(0)
    dropped = drop(x)
    assert draws is not None
    torch.testing.assert_close(dropped, x * (draws < 0.75) / 0.75)
    assert 0 < (dropped == 0).sum() < x.numel()
    assert drop.eval().draw(x) is None


@pytest.mark.usefixtures("forget_graphs")
def test_compiled_models_match_eager_ones_without_break_or_warning(kernels, monkeypatch):
    model = make_model(**DINO)
    images = make_images(model, 2)
    eager = logits_and_gradients(model, model, images)
    used = []
    forward = block.forward
    monkeypatch.setattr(block, "forward", lambda *arguments: used.append(1) or forward(*arguments))
    monkeypatch.setattr(blocks, "_Block", None)  # only the operators are left
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        found = logits_and_gradients(model, compiled, images)
    assert len(used) == model.config.depth - 1  # in the last one the class token is computed alone
    assert_equal_up_to_rounding(found, eager)


@pytest.mark.usefixtures("forget_graphs")
def test_autocast_inside_of_a_compiled_function_gives_no_warning(kernels, monkeypatch):
    half = torch.bfloat16 if ON_GPU else torch.float16  # Triton's interpreter computes wrongly in bfloat16
    monkeypatch.setattr(dispatch, "HALF_DTYPES", (half,))
    model = make_model(depth=1)
    images = make_images(model)

    def forward(images: Tensor) -> Tensor:
        with torch.autocast(DEVICE, half):
            return model(images)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = torch.compile(forward, fullgraph=True, backend="eager")(images)
    assert found.dtype == half
    assert (
        relative(found.detach(), forward(images).detach()) < 1e-2
    )  # PyTorch 2.11 compiles the patch embedding with other roundings


@pytest.mark.skipif(not CAN_BUILD, reason="needs a C++ compiler (g++) and Python's headers")
@pytest.mark.slow
@pytest.mark.usefixtures("forget_graphs")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # inductor itself imports what it deprecates
def test_inductor_matches_eager(kernels):
    model = make_model(layer_scale=True)
    images = make_images(model)
    eager = logits_and_gradients(model, model, images)
    assert_equal_up_to_rounding(logits_and_gradients(model, torch.compile(model, fullgraph=True), images), eager)


@pytest.mark.usefixtures("forget_graphs")
def test_the_choice_of_kernels_compiles_without_a_warning(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    dispatch._compute_capability.cache_clear()
    device = torch.device("cuda", 7)

    def chosen(x: Tensor) -> Tensor:
        return x + 1 if dispatch._has_kernels(device) else x

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.compile(chosen, fullgraph=True, backend="eager")(torch.zeros(1)).item() == 1.0
    dispatch._compute_capability.cache_clear()


def test_exported_programs_have_no_operators_of_ours(kernels):
    model = make_model().eval()
    images = make_images(model)
    with torch.no_grad():
        program = torch.export.export(model, (images,))
    assert not [node for node in program.graph.nodes if "vitral" in str(node.target)]


CHECKS = ("test_autograd_registration", "test_faketensor", "test_schema")


@pytest.mark.parametrize(
    ("dropped", "fp8"), [(True, False), (False, True), pytest.param(False, False, marks=pytest.mark.slow)]
)
def test_operators_follow_the_rules_of_torch_library(dropped, fp8):
    torch.manual_seed(0)
    model = make_model(stochastic_depth=0.5 if dropped else 0.0, rope=RopeConfig(), position="none")
    layers = [layer for layer in model.blocks if isinstance(layer, Block)]
    x, branch = (torch.randn(10, 48, device=DEVICE, dtype=DTYPE, requires_grad=True) for _ in range(2))
    bias = torch.randn(48, device=DEVICE, requires_grad=True)
    draws = torch.rand(2, 1, 1, device=DEVICE) if dropped else None
    angles = torch.randn(5, 1, 12, device=DEVICE)
    options = block.BlockOptions(
        *(draws, draws, angles.cos(), angles.sin(), False, 2, 2, "none", 1e-6, 1e-6, 0.5, 0.5, dropped, fp8)
    )
    layer = layers[0]
    weights = [
        *(layer.norm1.weight, layer.norm1.bias, layer.attention.qkv.weight, layer.attention.qkv.bias),
        *(layer.attention.out.weight, layer.attention.out.bias, layer.norm2.weight, layer.norm2.bias),
        *(layer.mlp.hidden.weight, layer.mlp.hidden.bias, layer.mlp.output.weight),
    ]
    halves = [weight.detach().to(DTYPE) for weight in (layer.attention.out.weight, layer.mlp.output.weight)]
    inputs = block.BlockInputs(x, branch, bias, *weights, *halves)
    checks = CHECKS[:2] if fp8 else CHECKS  # the last one multiplies tensors, which PyTorch cannot in FP8
    torch.library.opcheck(operators.block_forward, (*inputs, *options), test_utils=checks)
    outputs = block.BlockOutputs(*operators.block_forward(*inputs, *options))
    with torch.no_grad():
        torch.library.opcheck(operators.block_inference, (*inputs, *options), test_utils=checks)
        saved = [tensor.detach() for tensor in block.to_save(inputs, outputs)]
        gradients = [torch.randn_like(x) for _ in range(2)]
        torch.library.opcheck(operators._block_backward, (*gradients, *saved, *options), test_utils=checks)
    final = (x, branch, bias, layer.norm1.weight, layer.norm1.bias, draws, 1e-6, 0.5)
    torch.library.opcheck(operators.final_norm, final, test_utils=CHECKS)


@pytest.mark.usefixtures("forget_graphs")
def test_normalize_compiles_without_a_warning():
    images = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8, device=DEVICE)

    def normalized(images: Tensor) -> Tensor:
        return normalize(images, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = torch.compile(normalized, fullgraph=True, backend="aot_eager")(images)
    torch.testing.assert_close(found, normalized(images))
