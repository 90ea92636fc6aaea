"""Kernels against what they must compute: on a GPU natively, elsewhere in Triton's interpreter, both in any shape."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

pytest.importorskip("triton", reason="the kernels need Triton (pip install triton)")

from vitral import capture, create
from vitral.errors import UserError
from vitral.kernels import attention, blocks, cublas, dispatch, fused_ops
from vitral.kernels.fused_ops import LinearWeights, NonAffineNorm, NormWeights
from vitral.models.adapters import add_lora
from vitral.models.vit import ViT

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # Triton's interpreter computes wrongly in bfloat16
EXACT: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}
# On a GPU the kernels multiply float32 in its fast form of 10 bits; in the interpreter exactly.
CLOSE: dict[str, Any] = {"rtol": 1e-2, "atol": 1e-2} if DEVICE == "cuda" else EXACT


def as_double(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """In double precision, with gradients."""
    return [tensor.detach().double().requires_grad_() for tensor in tensors]


@pytest.fixture
def kernels_on_any_device(monkeypatch):
    """Kernels are used for float32 on any device, so that they can be held against plain PyTorch closely."""
    monkeypatch.setattr(dispatch, "HALF_DTYPES", (torch.float32,))
    monkeypatch.setattr(dispatch, "_has_kernels", lambda device: True)


def small_vit(depth: int = 2, **changes: object) -> ViT:
    torch.manual_seed(0)
    config = create("ViT-Ti/16@48", classes=5).config
    narrow = {} if DEVICE == "cuda" else {"width": 48, "mlp": 96}  # the interpreter takes seconds for more
    model = ViT(replace(config, depth=depth, **narrow, **changes)).to(DEVICE)  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))  # no bias is zero, no norm's weight one
    return model


def pictures(batch: int = 2) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(batch, 3, 48, 48, device=DEVICE)


def logits_and_gradients(model: ViT, images: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    logits = model(images)
    logits.square().sum().backward()
    return logits.detach(), {name: torch.clone(weight.grad) for name, weight in model.named_parameters()}  # type: ignore[arg-type]


@given(st.integers(1, 256), st.sampled_from([16, 32, 64, 128]))
def test_split_sequences_cover_all_tokens_with_little_padding(n, max_size):
    found = attention.split_sequence(n, max_size)
    ends = [first + size for first, size in found]
    assert [first for first, _ in found] == [0, *ends[:-1]]
    assert n <= ends[-1] < n + 16
    assert all(size in (16, 32, 64, 128) and size <= max_size for _, size in found)


@pytest.mark.parametrize(
    ("n", "heads", "d"), [(1, 1, 16), (5, 2, 16), (16, 1, 32), (16, 1, 64), (50, 2, 16), (130, 1, 16), (197, 1, 16)]
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_attention_matches_the_reference_with_gradients(n, heads, d, has_bias):
    torch.manual_seed(n)
    qkv = torch.randn(2, n, 3, heads, d, device=DEVICE, requires_grad=True)
    bias = torch.randn(2, heads, n, n, device=DEVICE, requires_grad=True) if has_bias else None
    out, _ = attention.short_attention(qkv, bias)
    grad = torch.randn_like(out)
    inputs = [tensor for tensor in (qkv, bias) if tensor is not None]
    found = torch.autograd.grad(out, inputs, grad)
    leaves = as_double(*inputs)
    expected = attention.reference(*leaves)
    torch.testing.assert_close(out.double(), expected, **CLOSE)
    gradients = torch.autograd.grad(expected, leaves, grad.double())
    for one, other in zip(found, gradients, strict=True):
        torch.testing.assert_close(one.double(), other, **CLOSE)


@pytest.mark.parametrize(("batch", "n", "heads"), [(2, 130, 3), (128, 5, 2)], ids=["many programs", "one per head"])
def test_attention_sums_the_gradients_of_queries(batch, n, heads):
    torch.manual_seed(n)
    qkv = torch.randn(batch, n, 3, heads, 16, device=DEVICE)
    out, lse = attention.forward(qkv)
    gradients = attention.backward(qkv, None, out, lse, torch.randn_like(out))
    expected = gradients.qkv[:, :, 0].double().sum((0, 1)).flatten()
    sums = fused_ops.column_sums(gradients.query_sums)
    torch.testing.assert_close(sums.double(), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("shape", [(1, 1), (3, 5000), (700, 3, 40), (9000, 7)])
@pytest.mark.parametrize("weighted", [False, True])
def test_column_sums_match_those_of_float64(shape, weighted):
    torch.manual_seed(0)
    x = torch.randn(shape, device=DEVICE, dtype=HALF if weighted else torch.float32)
    factor = torch.randn(shape[0], device=DEVICE) if weighted else None
    expected = x.double().sum(0) if factor is None else torch.tensordot(factor.double(), x.double(), 1)
    found = fused_ops.column_sums(x, factor)
    assert found.shape == x.shape[1:]
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-3)


def test_attention_takes_a_bias_that_all_images_share():
    torch.manual_seed(0)
    qkv = torch.randn(3, 5, 3, 2, 16, device=DEVICE)
    bias = torch.randn(2, 5, 5, device=DEVICE, requires_grad=True)
    out, _ = attention.short_attention(qkv, bias.expand(3, -1, -1, -1))
    grad = torch.randn_like(out)
    leaf = bias.detach().double().requires_grad_()
    expected = attention.reference(qkv.double(), leaf.expand(3, -1, -1, -1))
    torch.testing.assert_close(out.double(), expected, **CLOSE)
    (found,), (gradient,) = torch.autograd.grad(out, bias, grad), torch.autograd.grad(expected, leaf, grad.double())
    torch.testing.assert_close(found.double(), gradient, **CLOSE)


@pytest.mark.skipif(DEVICE == "cpu", reason="cuBLAS needs an NVIDIA GPU")
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(8, 16, 32), (197, 192, 768), (1000, 384, 1536)])
def test_cublas_linear_gelu_matches_the_reference(rows, inputs, outputs):
    x, weight = (torch.randn(n, inputs, device=DEVICE, dtype=HALF) for n in (rows, outputs))
    bias = torch.randn(outputs, device=DEVICE, dtype=HALF)
    assert cublas.is_available(x.device, HALF)
    for one, other in zip(
        cublas.linear_gelu(x, weight, bias), cublas.linear_gelu_reference(x, weight, bias), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


@pytest.mark.skipif(DEVICE == "cpu", reason="cuBLAS needs an NVIDIA GPU")
def test_large_products_by_the_chosen_algorithm_have_pytorchs_bits():
    torch.manual_seed(0)
    x, weight = torch.randn(20_000, 768, device=DEVICE, dtype=HALF), torch.randn(768, 768, device=DEVICE, dtype=HALF)
    assert cublas.is_large(x, weight)
    assert torch.equal(cublas.linear(x, weight, weight[0]), torch.addmm(weight[0], x, weight.t()))
    assert torch.equal(cublas.linear(x, weight, None), x @ weight.t())
    assert torch.equal(cublas.input_grad(x, weight), x @ weight)
    assert not cublas.fits(x[:, 8:].contiguous()[1:], weight)  # not where cuBLAS assumes the memory to begin


class FakeMatmul(cublas._Matmul):
    """Algorithms of which one fails and one rounds differently; each takes `times` of the first."""

    def __init__(self, times: list[float], result: float) -> None:
        self.algorithms, self.fastest = [cublas._Algorithm() for _ in times], None
        self.times, self.result, self.used = times, result, []

    def _run(self, operands: cublas._Operands, algorithm: cublas._Algorithm) -> None:
        index = next(index for index, other in enumerate(self.algorithms) if other is algorithm)
        if index == 1:
            raise RuntimeError("not supported")
        operands.out.fill_(2.0 if index == 2 else self.result)
        self.used.append(index)

    def _time(self, operands: cublas._Operands, algorithm: cublas._Algorithm) -> float:
        return self.times[next(index for index, other in enumerate(self.algorithms) if other is algorithm)]


@pytest.mark.parametrize(
    ("times", "chosen"), [([1.0, 0.1, 0.2, 0.9, 0.8], 4), ([1.0, 0.1, 0.2, 0.99, 1.2], 0), ([1.0], 0)]
)
@pytest.mark.parametrize("result", [1.0, float("nan")])
def test_the_fastest_algorithm_with_the_same_bits_is_chosen_once(times, chosen, result, monkeypatch):
    capturing = [True]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    matmul, operands = (
        FakeMatmul(times, result),
        cublas._Operands(torch.empty(2, 2), torch.empty(2, 2), torch.empty(2, 2)),
    )
    matmul(operands, tunes=False)
    matmul(operands, tunes=True)
    assert matmul.used == [0, 0]  # not while a graph is captured
    capturing[0] = False
    matmul(operands, tunes=True)
    assert matmul.used[-1] == chosen
    tried = len(matmul.used)
    matmul(operands, tunes=True)
    assert matmul.used[tried:] == [chosen]
    torch.testing.assert_close(operands.out, torch.full((2, 2), result), equal_nan=True)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # 1 / (1 + inf) is 0, as it should be
@pytest.mark.parametrize("kind", ["tanh", "none", "quick"])
@pytest.mark.parametrize("shape", [(1, 8), (70, 96), (65, 1030), (3, 2048)])
def test_gelu_backward_matches_the_reference(kind, shape):
    torch.manual_seed(0)
    h, grad = torch.randn(2, *shape, device=DEVICE) * 3
    expected = fused_ops.gelu_backward_reference(h.double(), grad.double(), kind)
    for kept in (None, expected[1].to(h)):
        for one, other in zip(fused_ops.gelu_backward(h, grad, kind, kept), expected, strict=True):
            torch.testing.assert_close(one.double(), other.double(), **EXACT)


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(1, 16), (70, 48), (9, 192), (130, 20)])
def test_add_norm_matches_the_reference_with_gradients(rows, width, affine):
    torch.manual_seed(0)
    x, y, dtotal, dnormed = torch.randn(4, rows, width, device=DEVICE) + 0.5
    bias, weight, shift = torch.randn(3, width, device=DEVICE)
    how = NormWeights(weight, shift, 1e-6) if affine else NonAffineNorm(1e-6)
    found = fused_ops.add_norm(x, y, bias, how)
    leaves = as_double(x, y, bias, weight, shift)
    used = leaves if affine else leaves[:3]
    wide_norm = NormWeights(leaves[3], leaves[4], 1e-6) if affine else NonAffineNorm(1e-6)

    def expected() -> tuple[torch.Tensor, torch.Tensor]:
        return fused_ops.add_norm_reference(leaves[0], leaves[1], leaves[2], wide_norm)

    total, normed = expected()
    torch.testing.assert_close(found.total.double(), total, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.normed.double(), normed, rtol=1e-4, atol=1e-5)
    gradients = torch.autograd.grad([total, normed], used, [dtotal.double(), dnormed.double()])
    kept = found.total if affine else found.normed
    dx, dy, sums = fused_ops.add_norm_backward(kept, found.moments, how.weight, dtotal, dnormed)
    for one, other in zip((dx, dy, *sums), gradients, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-3, atol=1e-4)
    # Alone: nothing is added, and nobody else uses the sum.
    torch.testing.assert_close(fused_ops.add_norm(found.total, None, None, how).normed, found.normed)
    only = torch.autograd.grad(expected()[1], leaves[0], dnormed.double())
    dx, *_ = fused_ops.add_norm_backward(kept, found.moments, how.weight, None, dnormed)
    torch.testing.assert_close(dx.double(), only[0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("rows", "width"), [(1, 16), (70, 48), (33, 20)])
def test_fold_and_unfold_norm_match_the_unfolded_layers(rows, width):
    """By what it is for, and by the chain rule: the layer after the norm computes the same, with the same gradients."""
    torch.manual_seed(0)
    weight, z = torch.randn(rows, width, device=DEVICE), torch.randn(7, width, device=DEVICE)
    bias, grad = torch.randn(rows, device=DEVICE), torch.randn(7, rows, device=DEVICE)
    scale, shift = torch.randn(2, width, device=DEVICE)
    dense, how = LinearWeights(weight, bias), NormWeights(scale, shift, 1e-6)
    folded = fused_ops.fold_norm(dense, how, torch.float32)
    leaves = as_double(weight, bias, scale, shift)
    out = F.linear(z.double() * leaves[2] + leaves[3], leaves[0], leaves[1])
    torch.testing.assert_close(F.linear(z, *folded).double(), out, rtol=1e-3, atol=1e-4)
    for one, other in zip(folded, fused_ops.fold_norm_reference(dense, how), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    dweight, dbias, dscale, dshift = torch.autograd.grad(out, leaves, grad.double())
    gradient = grad.t() @ z
    by_formula = fused_ops.unfold_norm_reference(gradient, grad.sum(0), weight, scale, shift)
    found = fused_ops.unfold_norm(gradient, grad.sum(0), weight, scale, shift)
    for one, other, truth in zip(found, by_formula, (dweight, torch.stack([dscale, dshift])), strict=True):
        torch.testing.assert_close(one.double(), truth, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(other.double(), truth, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(dbias, grad.double().sum(0))


@pytest.mark.parametrize(
    "changes", [{}, {"gelu": "erf"}, {"pool": "mean", "class_token": False}, {"position": "relative"}, {"registers": 2}]
)
def test_a_model_on_kernels_matches_plain_pytorch(changes, kernels_on_any_device, monkeypatch):
    model, images = small_vit(**changes), pictures()
    fast, found = logits_and_gradients(model, images)
    with torch.no_grad():
        quick = model(images)
    monkeypatch.setattr(dispatch, "_has_kernels", lambda device: False)
    logits, gradients = logits_and_gradients(model, images)
    torch.testing.assert_close(fast, logits, rtol=10 * CLOSE["rtol"], atol=10 * CLOSE["atol"])
    torch.testing.assert_close(quick, logits, rtol=10 * CLOSE["rtol"], atol=10 * CLOSE["atol"])
    for name, gradient in gradients.items():
        assert (found[name] - gradient).norm() <= CLOSE["rtol"] * gradient.norm() + 1e-6, name


def test_half_precision_gradients_are_within_rounding(kernels_on_any_device, monkeypatch):
    monkeypatch.setattr(dispatch, "HALF_DTYPES", (HALF,))
    model, images = small_vit(), pictures()
    with torch.autocast(DEVICE, HALF):
        _, found = logits_and_gradients(model, images)
    monkeypatch.setattr(dispatch, "_has_kernels", lambda device: False)
    _, gradients = logits_and_gradients(model, images)
    whole = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    apart = torch.stack([(found[name] - gradient).norm() for name, gradient in gradients.items()]).norm()
    assert apart < (2e-2 if torch.bfloat16 == HALF else 5e-3) * whole
    assert all(gradient.dtype == torch.float32 for gradient in found.values())


class KernelsUsed(Exception):
    pass


class Subclass(torch.Tensor):
    pass


@pytest.fixture
def raising_kernels(kernels_on_any_device, monkeypatch):
    """`blocks.encode` raises KernelsUsed."""

    def raise_used(*_: object, **__: object) -> None:
        raise KernelsUsed

    monkeypatch.setattr(blocks, "encode", raise_used)


def test_only_plain_blocks_use_the_kernels(raising_kernels):
    images = pictures(1)
    with pytest.raises(KernelsUsed):
        small_vit()(images)
    dropped = small_vit(dropout=0.1)
    dropped.train()(images)
    with pytest.raises(KernelsUsed):
        dropped.eval()(images)
    small_vit(axial=True, pool="mean", class_token=False)(images)
    small_vit(injection="every")(images)
    small_vit(position="relative")(images)
    small_vit(swiglu=True)(images)
    adapted = small_vit()
    add_lora(adapted, 2)
    adapted.to(DEVICE)(images)
    half_frozen = small_vit()
    half_frozen.blocks[0].requires_grad_(False)
    half_frozen(images)
    with pytest.raises(KernelsUsed), torch.no_grad():
        half_frozen(images)
    hooked = small_vit()
    hooked.blocks[1].register_forward_hook(lambda *_: None)
    hooked(images)
    calls = []
    hooked = small_vit()
    hooked.norm.register_forward_hook(lambda *_: calls.append(1))
    hooked(images)
    assert calls == [1]
    transposed = small_vit()
    linear = transposed.get_submodule("blocks.0.mlp.hidden")
    assert isinstance(linear, nn.Linear)
    linear.weight = nn.Parameter(linear.weight.detach().t().contiguous().t())
    transposed(images)
    quantised = small_vit()  # what a library for quantisation does to layers that it leaves in place
    for module in quantised.blocks[0].modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(module.weight.detach().as_subclass(Subclass))
    quantised(images)
    swapped = small_vit()
    swapped.blocks[0].norm1 = nn.Identity()
    swapped(images)
    assert small_vit()(pictures(1)[:0]).shape == (0, small_vit().config.classes)
    recomputed = small_vit()
    recomputed.set_grad_checkpointing()
    recomputed(images)
    watched = small_vit()
    with capture(watched, layers=[0]) as seen:
        watched(images)
    assert seen[0].shape == (1, 3, 1, 10)


def test_pixel_gradients_with_frozen_weights_use_plain_pytorch(raising_kernels):
    model = small_vit().requires_grad_(False)
    images = pictures(1).requires_grad_()
    model(images).sum().backward()
    assert images.grad is not None


def test_unsupported_shapes_use_plain_pytorch(monkeypatch):
    def refuse(*_: object) -> None:
        raise AssertionError("a kernel was used")

    monkeypatch.setattr(attention, "short_attention", refuse)
    monkeypatch.setattr(dispatch, "_has_kernels", lambda device: True)
    half = {"dtype": torch.bfloat16, "device": DEVICE}
    for shape in ((1, 257, 3, 1, 16), (1, 8, 3, 1, 80)):
        assert dispatch.attention(torch.randn(*shape, **half), None, 0.0).shape == (1, 1, shape[1], shape[4])
    dispatch.attention(torch.randn(1, 8, 3, 1, 16, **half), None, 0.1)
    dispatch.attention(torch.randn(1, 8, 3, 1, 16, device=DEVICE), None, 0.0)
    assert not dispatch.fits_blocks(torch.randn(1, 8, 8192, **half), 128)
    dispatch.attention(torch.randn(1, 8, 3, 1, 128, **half), torch.zeros(1, 1, 8, 8, **half), 0.0)


@pytest.mark.parametrize("part", ["logits", "features", "tokens", "mean"])
def test_second_derivatives_raise_an_error(part, kernels_on_any_device):
    """Also of what has a constant gradient, which PyTorch's `once_differentiable` would let through as constants."""
    model, images = small_vit(pool="mean" if part == "mean" else "token"), pictures(1).requires_grad_()
    model.head.requires_grad_(part == "logits")
    output = {"features": model.features, "tokens": lambda x: model.encode(model.patchify(x))}.get(part, model)(images)
    with pytest.raises(UserError, match="second derivatives"):
        torch.autograd.grad(output.sum(), images, create_graph=True, retain_graph=True)
    if part in ("tokens", "mean"):  # else the class token's attention comes first, which PyTorch refuses
        with pytest.raises(UserError, match="batched gradients"):
            torch.autograd.grad(output, images, torch.ones(2, *output.shape, device=DEVICE), is_grads_batched=True)


@pytest.mark.parametrize("name", ["ViT-Ti/16@48", "R26x1@32"])
def test_second_derivatives_of_single_kernels_raise_an_error(name, kernels_on_any_device):
    model, images = create(name, classes=2), pictures(1)[..., :32, :32].requires_grad_()
    model.get_submodule("blocks.0.norm1" if "ViT" in name else "stages.0").register_forward_hook(lambda *_: None)
    [gradient] = torch.autograd.grad(model(images).sum(), images, create_graph=True)
    with pytest.raises(RuntimeError, match=r"no autograd formula|once_differentiable"):
        gradient.square().sum().backward()


@pytest.mark.parametrize(("capability", "fits"), [((9, 0), True), ((10, 0), True), ((12, 0), False), ((8, 0), False)])
def test_kernels_run_on_supported_compute_capabilities(capability, fits, monkeypatch):
    """Blackwell's consumer cards are newer than Hopper, and a row of 197 tokens does not fit on their chip."""
    monkeypatch.setattr(dispatch, "_compute_capability", lambda device: capability)
    assert dispatch._has_kernels(torch.device("cuda", 0)) is fits
