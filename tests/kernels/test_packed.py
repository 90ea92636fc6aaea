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
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from scipy.special import erf
from torch import Tensor, nn

from vitral.api import inference, prediction
from vitral.api.inference import in_precision
from vitral.architecture import ResNetConfig, StemConfig, ViTConfig
from vitral.checkpoints.adapt import Weights
from vitral.checkpoints.card import Card, Preprocess
from vitral.checkpoints.weights import write
from vitral.errors import UserError
from vitral.events import Event, Note
from vitral.export.exported import PixelLogits
from vitral.kernels import packed
from vitral.kernels.packed import Int8Linear, PackedLinear, gelu_tanh_, linear_gelu, pack, pack_int8, weight_scales
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
        monkeypatch.setattr(packed, "_OPS", ("mkldnn._linear_pointwise", "mkldnn._no_such_operator"))
    model = trained(TINY)
    expected = logits(model)
    pack(model)
    assert layers_of_type(model, PackedLinear) == []
    assert torch.equal(logits(model), expected)


def int8_layer(weight: np.ndarray, bias: np.ndarray) -> Int8Linear:
    """A layer in int8 of weights (out, in) and biases (out,)."""
    linear = nn.Linear(*weight.shape[::-1])
    with torch.no_grad():
        linear.weight.copy_(torch.from_numpy(weight))
        linear.bias.copy_(torch.from_numpy(bias))
    return Int8Linear(linear)


@onednn
@pytest.mark.parametrize("tokens", [1, 5, 600])
def test_int8_products_are_those_of_integers(tokens):
    """Weights and tokens that are integers times a power of two need no rounding, so that every digit is known."""
    rng = np.random.default_rng(tokens)
    weight = rng.integers(-63, 64, (40, 36))
    weight[:, :2] = (64, 63)  # the largest pair: its products with 255 just fit into 16 bits
    weight[::2] *= -1
    numbers = rng.integers(0, 256, (tokens, 36))
    numbers[:, 0], numbers[:, 1], numbers[:, 2] = 255, 255, 0  # a token's range is the whole of a byte
    least, bias = rng.integers(-90, 90, (tokens, 1)), rng.integers(-9, 9, 40)
    expected = (numbers * 4 + least) @ weight.T / 64 + bias
    found = int8_layer(weight / 64, bias)(torch.from_numpy(numbers * 4.0 + least).float())
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-6 * np.abs(expected).max())


@onednn
@given(
    shape=st.tuples(st.integers(1, 2), st.integers(1, 300)),
    widths=st.tuples(st.integers(1, 20), st.integers(1, 70)),
    gelu=st.sampled_from(["", "tanh", "none"]),
)
def test_int8_differs_by_no_more_than_its_rounding(shape, widths, gelu):
    inputs, outputs = 4 * widths[0], widths[1]
    rng = np.random.default_rng([*shape, *widths])
    x, weight = rng.normal(size=(*shape, inputs)).astype(np.float32), rng.normal(size=(outputs, inputs))
    x *= rng.lognormal(sigma=2, size=(*shape, 1)).astype(np.float32)  # tokens of very different sizes
    bias, weight = rng.normal(size=outputs), weight.astype(np.float32)
    scales, steps = weight_scales(weight.T), np.ptp(x, axis=-1, keepdims=True) / 255
    # Half a step of each number, times the other factor.
    bound = steps / 2 * (np.abs(weight).sum(1) + inputs * scales / 2) + np.abs(x).sum(-1, keepdims=True) * scales / 2
    exact = torch.from_numpy(x.astype(np.float64) @ weight.T.astype(np.float64) + bias)
    found = linear_gelu(int8_layer(weight, bias), torch.from_numpy(x), gelu) if gelu else None
    layer = int8_layer(weight, bias)(torch.from_numpy(x))
    assert ((layer.double() - exact).abs().numpy() <= bound * (1 + 1e-4) + 1e-5).all()
    if found is not None:
        torch.testing.assert_close(found, nn.functional.gelu(layer, approximate=gelu), rtol=1e-5, atol=1e-6)


@onednn
def test_a_token_in_int8_does_not_depend_on_the_others():
    rng = np.random.default_rng(0)
    layer, x = int8_layer(rng.normal(size=(64, 96)), rng.normal(size=64)), torch.randn(300, 96) * 10
    together = layer(x)
    assert torch.equal(torch.cat([layer(row[None]) for row in x]), together)
    assert torch.equal(layer(x.view(3, 100, 96).transpose(0, 1)).transpose(0, 1).reshape(300, 64), together)


@pytest.fixture
def small_in_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the layers of a tiny model are computed in int8."""
    monkeypatch.setattr(packed, "_MIN_INT8_WEIGHTS", 0)


@onednn
@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_a_model_in_int8_is_near_its_own(config, small_in_int8):
    model = trained(config)
    expected = logits(model)
    linears = {name for name in layers_of_type(model, nn.Linear) if name.startswith("blocks.")}
    assert pack_int8(model.get_submodule("blocks")) == len(linears)
    pack(model)
    assert set(layers_of_type(model, Int8Linear)) == linears
    assert 1e-4 < apart(logits(model), expected) < 0.05


def test_the_gelu_in_place_is_the_one_with_tanh():
    x = torch.cat([torch.linspace(-12, 12, 4001), torch.tensor([-0.0, 1e-30, -3e38, 3e38, math.inf, math.nan])])
    expected = F.gelu(x.double(), approximate="tanh").float()
    torch.testing.assert_close(gelu_tanh_(x.clone()), expected, rtol=1e-6, atol=1e-6, equal_nan=True)


@onednn
def test_only_large_layers_are_in_int8():
    model = build(ViTConfig(depth=1, width=192, mlp=768, heads=3, patch=8, image=(16, 16), classes=5))
    pack_int8(model.get_submodule("blocks"))
    names = ["blocks.0.attention.qkv", "blocks.0.mlp.hidden", "blocks.0.mlp.output"]
    assert layers_of_type(model, Int8Linear) == names


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


@onednn
def test_verbs_compute_in_int8_and_say_so(saved, small_in_int8):
    weights, folder = saved
    events: list[Event] = []
    options: dict[str, Any] = {"device": "cpu", "precision": "int8", "on_event": events.append}
    exact, found = prediction.predict(weights, folder, device="cpu"), prediction.predict(weights, folder, **options)
    assert any(isinstance(event, Note) and "vitral evaluate" in event.text for event in events)
    assert (found.as_dict()["precision"], "precision" in exact.as_dict()) == ("int8", False)
    pairs = zip(exact.rows, found.rows, strict=True)
    differences = [abs(one.probabilities[0] - two.probabilities[0]) for one, two in pairs]
    assert 0 < max(differences) < 0.05
    assert inference.open_ensemble(weights, device="cpu", precision="int8").notes() == ("Computed in int8.",)
    features = prediction.embed(weights, folder, **options)
    assert features.as_dict()["precision"] == "int8"
    plain = prediction.embed(weights, folder, device="cpu").features
    assert 1e-4 < apart(torch.from_numpy(features.features), torch.from_numpy(plain)) < 0.05
    classify = prediction.classifier(weights, precision="int8", device="cpu", top=5)
    for row in found.rows:
        assert dict(classify(Path(row.path))) == pytest.approx(dict(zip(row.names, row.probabilities, strict=True)))


@onednn
def test_a_model_of_the_user_is_not_changed_by_int8(saved, small_in_int8):
    _, folder = saved
    model = trained(TINY)
    card = Card(TINY, tuple("abcdefghijk"), preprocess=Preprocess("decode|resize(32)", (0.5,) * 3, (0.5,) * 3))
    assert prediction.predict((model, card), folder, device="cpu", precision="int8").precision == "int8"
    assert layers_of_type(model, Int8Linear) == []


@pytest.mark.parametrize(
    ("model", "precision", "device", "message"),
    [
        (trained(RESNET), "int8", "cpu", "cannot be computed in int8"),
        (trained(TINY), "int8", "cpu", "cannot be computed in int8"),  # its layers are too small
        (trained(TINY), "int8", "cuda:0", "on a CPU, not on cuda:0"),
        (trained(TINY), "int4", "cpu", "not one of float32, bfloat16, fp8, int8"),
        (PixelLogits.__new__(PixelLogits), "int8", "cpu", "fixed precision"),
    ],
)
def test_models_that_cannot_be_in_int8_are_refused(model, precision, device, message):
    with pytest.raises(UserError, match=message):
        in_precision(model, precision, "weights.safetensors", device)
