"""int8 export: rounded weights, bytes, the search for layers in float, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import vitral
from vitral.api import export as verb
from vitral.architecture import ViTConfig
from vitral.checkpoints.card import Card, Preprocess
from vitral.data.images import encode_png
from vitral.errors import UserError
from vitral.export.exported import open_exported
from vitral.export.gate import ExportRefused
from vitral.export.int8 import (
    INT8,
    activation_scale,
    calibrate,
    layer_after_norm,
    layer_by_token,
    search,
    search_stored,
    smallest_passing,
    weight_scales,
)
from vitral.export.int8_graph import Int8Layer, linear_layers, quantize, stored_as_integers
from vitral.models.build import build

RNG = np.random.default_rng(0)
START = RNG.bit_generator.state


@pytest.fixture(autouse=True)
def same_numbers_in_any_order() -> None:
    """Tests draw from one generator, in whatever order a worker runs them."""
    RNG.bit_generator.state = START


def test_scales_are_those_of_the_formula() -> None:
    weight = np.array([[0.5, -2.0], [1.0, 4.0], [-3.0, 3.0]], np.float32)
    # 3 alone is the largest; 4 as well, as its neighbour has the other sign
    np.testing.assert_allclose(weight_scales(weight), [3 / 127, 4 / 127], rtol=1e-6)
    np.testing.assert_allclose(weight_scales(np.abs(weight)), [3 / 127, 6 / 127], rtol=1e-6)
    scale, zero = activation_scale(-1.0, 4.1)
    assert (scale, zero) == (np.float32(5.1 / 255), 50)
    assert activation_scale(0.5, 2.55) == (np.float32(0.01), 0)  # 0 is always exact


def test_no_pair_of_products_can_overflow_16_bits() -> None:
    for rows in (2, 7, 64):
        weight = RNG.standard_normal((rows, 500)).astype(np.float32)
        rounded = np.rint(weight / weight_scales(weight)).astype(np.int64)
        padded = np.concatenate([rounded, np.zeros((rows % 2, 500), np.int64)])
        for sign in (1, -1):
            pairs = np.maximum(sign * padded, 0).reshape(-1, 2, 500).sum(axis=1)
            assert 255 * pairs.max() <= 32767
        assert np.abs(rounded).max() > 64  # finer than 7 bits


def linear_model(weight: np.ndarray, bias: np.ndarray, *, norm: bool) -> onnx.ModelProto:
    """LayerNorm (or nothing), product, sum with a bias, GELU."""
    inner = "normed" if norm else "images"
    nodes = [helper.make_node("LayerNormalization", ["images", "gain", "offset"], ["normed"])] if norm else []
    nodes.append(helper.make_node("MatMul", [inner, "weight"], ["product"], name="product"))
    nodes.append(helper.make_node("Add", ["product", "bias"], ["sum"]))
    constants = {"weight": weight, "bias": bias}
    constants |= {"gain": np.linspace(0.5, 9, len(weight)), "offset": np.linspace(-1, 1, len(weight))} if norm else {}
    graph = helper.make_graph(
        nodes,
        "linear",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, ["batch", 5, len(weight)])],
        [helper.make_tensor_value_info("sum", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(values.astype(np.float32), name) for name, values in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def run(model: onnx.ModelProto, images: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"images": images})[0])


def integers(layer: Int8Layer, inputs: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """A layer by integer arithmetic, which cannot saturate."""
    largest = np.abs(inputs).max(axis=-1, keepdims=True) if layer.divisors is None else np.ones(1, np.float32)
    divided = inputs / (largest if layer.divisors is None else layer.divisors)
    values = np.clip(np.rint(divided / layer.scale) + layer.zero, 0, 255).astype(np.int64)
    sums = (values - int(layer.zero)) @ layer.weight.astype(np.int64)
    return sums * (layer.scale.astype(np.float64) * layer.scales) * largest + bias


@pytest.mark.parametrize("norm", [False, True])
def test_a_layer_computes_what_integer_arithmetic_does(norm: bool, tmp_path: Path) -> None:
    """Large bytes beside the largest weights: pairs of products overflow 16 bits where all weights have 8."""
    weight, bias = np.full((32, 6), 0.7, np.float32), RNG.standard_normal(6).astype(np.float32)
    weight[::5] *= RNG.standard_normal((7, 6)).astype(np.float32)
    images = np.abs(RNG.standard_normal((16, 5, 32))).astype(np.float32) + 3
    images[..., 3] *= 4
    model = linear_model(weight, bias, norm=norm)
    onnx.save(model, tmp_path / "model.onnx")
    layers = calibrate(tmp_path / "model.onnx", images)
    assert list(layers) == ["product"]
    assert (layers["product"].divisors is not None) == norm
    int8 = quantize(model, layers)
    operators = {node.op_type for node in int8.graph.node}
    assert "MatMul" not in operators
    assert ("Div" in operators) != norm  # a LayerNorm takes the divisors
    inputs = images
    if norm:
        centred = images - images.mean(axis=-1, keepdims=True)
        inputs = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-5) * np.linspace(0.5, 9, 32)
        inputs += np.linspace(-1, 1, 32)
    expected = integers(layers["product"], inputs, bias)
    # A byte may round the other way, where the division gives a half.
    step = float(
        layers["product"].scale * (np.abs(layers["product"].weight).max(axis=0) * layers["product"].scales).max()
    )
    assert np.abs(run(int8, images) - expected).max() < (2 * step if norm else 1e-3 * np.abs(expected).max())
    relative = np.linalg.norm(run(int8, images) - run(model, images)) / np.linalg.norm(run(model, images))
    assert relative < 0.02


def test_a_token_with_large_values_or_none_leaves_the_others_as_they_are(tmp_path: Path) -> None:
    weight, bias = RNG.standard_normal((16, 4)).astype(np.float32), np.zeros(4, np.float32)
    images = RNG.standard_normal((8, 5, 16)).astype(np.float32)
    images[:, 0] *= 1000
    images[:, 1] = 0
    model = linear_model(weight, bias, norm=False)
    onnx.save(model, tmp_path / "model.onnx")
    outputs = run(quantize(model, calibrate(tmp_path / "model.onnx", images)), images)
    assert not outputs[:, 1].any()
    exact = images @ weight
    for token in (0, 2, 4):
        assert np.linalg.norm(outputs[:, token] - exact[:, token]) < 0.015 * np.linalg.norm(exact[:, token])


def test_divisors_help_a_channel_with_large_values() -> None:
    inputs, weight = RNG.standard_normal((256, 16)).astype(np.float32), RNG.standard_normal((16, 4)).astype(np.float32)
    inputs[:, 2] *= 200
    weight[2] /= 200
    layer = layer_after_norm(weight, inputs)
    assert layer.error < 0.02 < layer_by_token(weight, inputs).error
    assert layer.divisors is not None
    assert layer.divisors[2] == layer.divisors.max()


def test_the_fewest_is_found_and_none_where_none_holds() -> None:
    for least, most in product(range(9), range(8)):
        tried: list[int] = []

        def holds(number: int, least: int = least, tried: list[int] = tried) -> bool:
            tried.append(number)
            return number >= least

        assert smallest_passing(holds, most) == (least if least <= most else None)
        assert len(tried) == len(set(tried))


CONFIG = ViTConfig(depth=2, width=32, mlp=64, heads=2, patch=4, image=(16, 16), classes=4, gelu="erf")
PREPROCESS = Preprocess("decode|resize(16, 16)", (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))


@pytest.fixture(scope="module")
def source() -> tuple[torch.nn.Module, Card]:
    torch.manual_seed(0)
    model = build(CONFIG).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model, Card(CONFIG, tuple("abcd"), preprocess=PREPROCESS)


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    for number in range(48):
        colours = RNG.integers(0, 256, (2, 2, 3), np.uint8)
        (folder / f"{number}.png").write_bytes(encode_png(np.kron(colours, np.ones((8, 8, 1), np.uint8))))
    return folder


def test_a_model_is_exported_in_int8(source, images, tmp_path: Path) -> None:
    target = tmp_path / "model.onnx"
    result = vitral.export_model(source, target, format="onnx-int8", images=[images], agreement=0.9)
    assert result.report.n == 24
    assert "24 others" in result.report.images
    exported = open_exported(target)
    stored = json.loads(exported.metadata[INT8])
    assert len(linear_layers(onnx.load(target))) == len(stored["float32"])
    assert "blocks.0.mlp.hidden" in stored["int8"]
    assert stored["calibration images"] == 24
    operators = [node.op_type for node in onnx.load(target).graph.node]
    assert operators.count("QAttention") == CONFIG.depth
    assert operators.count("Softmax") == 1  # of the probabilities
    assert operators.count("MatMulIntegerToFloat") + CONFIG.depth == len(stored["int8"]) >= 4 * CONFIG.depth
    assert stored["float32"] == ["head.output"]
    pixels = RNG.integers(0, 256, (3, 16, 16, 3), np.uint8)
    alone = np.concatenate([exported(pixels[i : i + 1]) for i in range(3)])
    np.testing.assert_allclose(exported(pixels), alone, atol=1e-5)  # other images of a batch have no effect
    assert exported(pixels[:0]).shape == (0, CONFIG.classes)


def test_int8_needs_images(source, images, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--images"):
        vitral.export_model(source, tmp_path / "model.onnx", format="onnx-int8")
    with pytest.raises(UserError, match="at least 8"):
        vitral.export_model(source, tmp_path / "model.onnx", format="onnx-int8", images=[images / "1.png"])


def test_nothing_is_written_where_the_limit_cannot_be_met(source, images, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(verb.Gate, "agreement", lambda gate, exported: 0.5)
    with pytest.raises(ExportRefused, match=r"50.0% of images at best, with 1 layers"):
        vitral.export_model(source, tmp_path / "model.onnx", format="onnx-int8", images=[images], agreement=0.9)
    assert list(tmp_path.iterdir()) == []


def test_a_model_of_convolutions_is_refused(tmp_path: Path) -> None:
    model = linear_model(np.ones((4, 4), np.float32), np.ones(4, np.float32), norm=False)
    model.graph.initializer.append(numpy_helper.from_array(np.ones((3, 2, 3, 3), np.float32), "convolution"))
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(UserError, match="22% of this model's weights"):
        search(tmp_path / "model.onnx", np.ones((8, 5, 4), np.float32), lambda path: 1.0, 0.9)


def test_layers_are_kept_in_float_until_the_limit_holds(tmp_path: Path) -> None:
    """The one with the largest error first."""
    path = tmp_path / "model.onnx"
    model = linear_model(RNG.standard_normal((16, 8)).astype(np.float32), np.zeros(8, np.float32), norm=False)
    for number in range(4):
        weight = numpy_helper.from_array(RNG.standard_normal((16, 8)).astype(np.float32), f"weight{number}")
        model.graph.initializer.append(weight)
        model.graph.node.append(
            helper.make_node("MatMul", ["images", f"weight{number}"], [f"more{number}"], name=f"{number}")
        )
        model.graph.output.append(helper.make_tensor_value_info(f"more{number}", TensorProto.FLOAT, None))
    images = RNG.standard_normal((16, 5, 16)).astype(np.float32)

    def share(needed: int) -> Callable[[Path], float]:
        return lambda file: min(1.0, len(linear_layers(onnx.load(file))) / needed)

    onnx.save(model, path)
    errors = {output: layer.error for output, layer in calibrate(path, images).items()}
    result = search(path, images, share(2), 1.0)
    names = {layer.node.output[0]: layer.name for layer in linear_layers(model)}
    assert list(result.in_float) == [names[output] for output in sorted(errors, key=lambda output: -errors[output])[:2]]
    assert len(linear_layers(onnx.load(path))) == 2
    onnx.save(model, path)
    assert search(path, images, share(4), 1.0) == (result.in_float[2:] + result.int8, result.in_float, 0.5)


def test_weights_that_are_stored_as_integers_are_those_of_the_formula(source, tmp_path: Path) -> None:
    """Products are computed in float32, with weights that were rounded to steps of their output channel."""
    path, pixels = tmp_path / "model.onnx", RNG.integers(0, 256, (8, 16, 16, 3), np.uint8)
    vitral.export_model(source, path, outputs=["attention"])
    model, exact, errors = onnx.load(path), open_exported(path).outputs(pixels, ["probabilities", "attention"]), {}
    layers = {layer.node.output[0]: layer for layer in linear_layers(model)}
    assert {layer.node.op_type for layer in layers.values()} == {"MatMul", "Gemm"}
    for bits in (8, 16):
        onnx.save(stored_as_integers(model, dict.fromkeys(layers, bits)), path)
        stored = {t.name: numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}
        for name, layer in layers.items():
            values = stored[f"{name}.weight.integers"]
            assert values.dtype == f"int{bits}"
            values = values.T if layer.node.op_type == "Gemm" else values
            steps = np.abs(layer.weight).max(axis=0) / (2 ** (bits - 1) - 1)
            assert np.abs(values * steps - layer.weight).max() <= 0.5001 * steps.max()
            assert layer.node.input[1] not in stored
        found = open_exported(path).outputs(pixels, ["probabilities", "attention"])
        errors[bits] = [np.abs(found[name] - exact[name]).max() for name in exact]
    assert max(errors[16]) < 2e-5
    assert 2e-5 < min(errors[8]) < max(errors[8]) < 0.02


def test_weights_get_16_bits_until_the_limit_holds(source, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    vitral.export_model(source, path)
    model = path.read_bytes()

    def in_16_bits() -> int:
        return sum(tensor.data_type == TensorProto.INT16 for tensor in onnx.load(path).graph.initializer)

    layers = len(linear_layers(onnx.load(path)))
    for needed, expected in ((0, 0), (3, 3), (layers + 1, layers)):
        path.write_bytes(model)
        found = search_stored(path, lambda _, needed=needed: in_16_bits() >= needed)
        assert in_16_bits() == len(found.int16) == expected
        assert len(found.int8) + len(found.int16) == layers
    with pytest.raises(UserError, match="--images"):
        vitral.export_model(source, tmp_path / "page", format="web-int8", runtime=web_runtime(tmp_path))
    assert not (tmp_path / "page").exists()


def web_runtime(folder: Path) -> Path:
    (folder / "ort.wasm.bundle.min.mjs").write_text("")
    (folder / "ort-wasm-simd-threaded.wasm").write_bytes(b"")
    return folder


def test_attention_is_fused_where_it_is_the_usual_one(source, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    vitral.export_model(source, path)
    model, pixels = onnx.load(path), RNG.integers(0, 256, (8, 16, 16, 3), np.uint8)
    layers = calibrate(path, pixels)

    def probabilities(model: onnx.ModelProto) -> np.ndarray:
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        return np.asarray(session.run(["probabilities"], {"pixels": pixels})[0])

    fused = quantize(model, layers)
    assert sum(node.op_type == "QAttention" for node in fused.graph.node) == 2
    np.testing.assert_allclose(probabilities(fused), probabilities(model), atol=0.02)
    softmax = next(node for node in model.graph.node if node.op_type == "Softmax")
    queries = next(node for node in model.graph.node if node.output[0] == softmax.input[0]).input[0]
    scaled = next(node for node in model.graph.node if node.output[0] == queries)
    scaled.input[1] = "doubled"  # another temperature than that of the operator, in the first block
    model.graph.initializer.append(numpy_helper.from_array(np.array(2, np.float32), "doubled"))
    other = quantize(model, layers)
    assert sum(node.op_type == "QAttention" for node in other.graph.node) == 1
