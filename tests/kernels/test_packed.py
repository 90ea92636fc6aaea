"""Inference on a CPU: packed layers and models compute the same as plain ones, and padding is skipped."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from scipy.special import erf
from torch import Tensor, nn

from vitral.api import inference, prediction
from vitral.architecture import ResNetConfig, StemConfig, ViTConfig
from vitral.checkpoints.adapt import Weights
from vitral.checkpoints.card import Card, Preprocess
from vitral.checkpoints.weights import write
from vitral.kernels import packed
from vitral.kernels.packed import PackedLinear, linear_gelu, pack
from vitral.models.adapters import LoraLinear, add_lora
from vitral.models.build import Model, build

NEAR = 1e-5  # of the norm
TINY = ViTConfig(depth=2, width=48, mlp=96, heads=3, patch=8, image=(32, 32), classes=11)
SHAPES: dict[str, dict[str, Any]] = {
    "token": {"representation": 24},
    "mean": {"pool": "mean", "class_token": False, "gelu": "erf"},
    "map": {"pool": "map", "class_token": False, "registers": 2},
    "relative": {"position": "relative", "layer_scale": True},
    "axial": {"pool": "mean", "class_token": False, "axial": True},
    "hybrid": {"patch": 1, "stem": StemConfig(blocks=(1, 1))},
}
MODELS = {name: replace(TINY, **changes) for name, changes in SHAPES.items()}
RESNET = ResNetConfig(blocks=(1, 1, 1, 1), image=(32, 32), classes=11)

onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch was built without oneDNN")


def trained(config: ViTConfig | ResNetConfig, dtype: torch.dtype = torch.float32) -> Model:
    """Weights that are nowhere zero, so that every output differs."""
    torch.manual_seed(0)
    model = build(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.to(dtype).eval()


def layers_of_type(model: nn.Module, kind: type[nn.Module]) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, kind)]


def logits(model: nn.Module, images: int = 3) -> Tensor:
    pixels = torch.randn(images, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        return model(pixels)


def apart(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@onednn
@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 70)),
    widths=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    bias=st.booleans(),
    cut=st.booleans(),
    gelu=st.sampled_from(["", "tanh", "none"]),
)
def test_a_packed_layer_matches_the_formula(shape, widths, bias, cut, gelu):
    rng = np.random.default_rng([*shape, *widths])
    x, weight = rng.normal(size=(*shape, widths[0])), rng.normal(size=widths[::-1])
    x = x[:, ::2] if cut else x  # rows that do not lie together
    linear = nn.Linear(*widths, bias=bias)
    with torch.no_grad():
        linear.weight.copy_(torch.from_numpy(weight))
    shift = linear.bias.detach().double().numpy() if bias else 0.0
    h = x.astype(np.float32).astype(np.float64) @ weight.astype(np.float32).astype(np.float64).T + shift
    share = {
        "": np.ones_like(h),
        "none": (1 + erf(h / math.sqrt(2))) / 2,
        "tanh": (1 + np.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3))) / 2,
    }
    layer, rows = PackedLinear(linear), torch.from_numpy(x).float()
    found = linear_gelu(layer, rows, gelu) if gelu else layer(rows)
    np.testing.assert_allclose(found.numpy(), h * share[gelu], rtol=1e-5, atol=1e-5 * math.sqrt(widths[0]))


@onednn
@pytest.mark.parametrize("config", [*MODELS.values(), RESNET], ids=[*MODELS, "resnet"])
def test_a_packed_model_keeps_its_logits(config):
    model = trained(config)
    expected, linears = logits(model), layers_of_type(model, nn.Linear)
    pack(model)
    assert layers_of_type(model, PackedLinear) == linears
    assert layers_of_type(model, nn.Linear) == []
    assert apart(logits(model), expected) < NEAR
    assert apart(logits(model, images=1), expected[:1]) < NEAR


@onednn
@pytest.mark.parametrize("gelu", ["tanh", "erf"])
def test_the_gelu_variant_of_the_model_is_used(gelu):
    other = "tanh" if gelu == "erf" else "erf"
    model = trained(replace(TINY, gelu=gelu))
    expected, wrong = logits(model), logits(trained(replace(TINY, gelu=other)))
    pack(model)
    assert apart(logits(model), expected) < NEAR < apart(wrong, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_are_not_packed(dtype):
    model = trained(TINY, dtype)
    pack(model)
    assert layers_of_type(model, PackedLinear) == []


@onednn
def test_lora_layers_are_not_packed():
    model = trained(TINY)
    add_lora(model, rank=2)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, LoraLinear):
                module.up.normal_()
    expected, adapted = logits(model), layers_of_type(model, LoraLinear)
    pack(model)
    assert layers_of_type(model, LoraLinear) == adapted != []
    assert layers_of_type(model, PackedLinear) == ["head.output"]
    assert apart(logits(model), expected) < NEAR


@pytest.mark.parametrize("missing", ["oneDNN", "an operator"])
def test_without_onednn_nothing_is_packed(missing, monkeypatch):
    if missing == "oneDNN":
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    else:
        monkeypatch.setattr(packed, "_OPS", ("_linear_pointwise", "_no_such_operator"))
    model = trained(TINY)
    expected = logits(model)
    pack(model)
    assert layers_of_type(model, PackedLinear) == []
    assert torch.equal(logits(model), expected)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Path]:
    """Weights with their card, and a folder of five pictures."""
    preprocess = Preprocess("decode|resize(32)", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    weights, folder = tmp_path / "model.safetensors", tmp_path / "pictures"
    state = {name: array.detach() for name, array in trained(TINY).state_dict().items()}
    write(Weights(TINY, state, ()), Card(TINY, tuple("abcdefghijk"), preprocess=preprocess), weights, "vitral")
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number in range(5):
        Image.fromarray(rng.integers(0, 256, (40, 40, 3), np.uint8)).save(folder / f"{number}.png")
    return weights, folder


class CallRecorder:
    """Whether models were packed, and how many rows each batch had, in calls of a module's function."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str) -> None:
        self.packed: list[bool] = []
        self.rows: list[int] = []
        real = getattr(module, name)

        def watched(model: Model, *arguments: Any, **options: Any) -> Any:
            self.packed.append(bool(layers_of_type(model, PackedLinear)))
            model.norm.register_forward_pre_hook(lambda _, values: self.rows.append(len(values[0])))
            return real(model, *arguments, **options)

        monkeypatch.setattr(module, name, watched)


@onednn
def test_predict_and_embed_pack_and_return_the_same(saved, monkeypatch):
    weights, folder = saved
    seen = CallRecorder(monkeypatch, prediction, "embed_split")
    _, fast = prediction.embed(weights, folder, batch=2, device="cpu")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    _, plain = prediction.embed(weights, folder, batch=2, device="cpu")
    assert seen.packed == [True, False]
    assert apart(torch.from_numpy(fast), torch.from_numpy(plain)) < NEAR


def test_padding_is_not_computed(saved, monkeypatch):
    weights, folder = saved
    seen = CallRecorder(monkeypatch, inference, "predict_split")
    found = prediction.predict(weights, folder, batch=4, device="cpu")
    assert seen.packed == [torch.backends.mkldnn.is_available()]
    assert seen.rows == [4, 1]
    assert len(found.rows) == 5
