"""Linear layers of an exported ONNX file in int8: weights per output channel, activations per tensor, calibrated.

Weights have 7 bits, -64 to 64: x86 processors without VNNI add pairs of products of unsigned and signed bytes in 16
bits, where 2 * 255 * 64 fits and 2 * 255 * 127 does not. Activations are unsigned bytes with fixed scales, so that a
prediction does not depend on the other images of its batch. Attention, norms, GELU and convolutions stay in float32.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitral.errors import UserError
from vitral.events import EventHandler, Progress, ignore_events
from vitral.export.onnx import import_onnx

INT8 = "vitral.int8"  # metadata: which layers are in int8
WEIGHT_LIMIT = 64
CALIBRATION_IMAGES = 128  # at most: more change neither ranges nor rounding
_BATCH = 4  # calibration images at once: the inputs of all layers are kept
_ROWS = 2048  # tokens of each layer's input that are kept to choose its scales and to round its weights
_EXPONENTS = (0.0, 0.5, 0.65, 0.8)  # how far differences between input channels move into the weights
_SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)  # of the largest value: a few that are clipped make the steps finer for all
_WORTH = 0.97  # divisors cost time where no norm can include them: they must lower the error to this share
_DAMPING = 0.01  # of the mean of the Hessian's diagonal
_BLOCK = 64  # input channels that are rounded before the others are corrected


class LinearLayer(NamedTuple):
    """A product with constant weights."""

    name: str  # of the module
    node: Any  # MatMul or Gemm
    weight: np.ndarray  # (in, out)


class Int8Layer(NamedTuple):
    """A layer as it is computed in int8: (round(x / divisors / scale) + zero) in bytes, times `weight * scales`."""

    rank: int  # axes of its input
    divisors: np.ndarray  # (in,) of the input's channels, float32
    scale: np.float32
    zero: np.uint8
    weight: np.ndarray  # (in, out) int8
    scales: np.ndarray  # (out,) float32
    error: float  # of its outputs: root mean square over tokens, relative to each token's norm


def linear_layers(model: Any) -> list[LinearLayer]:
    """The products of an ONNX model with constant matrices, in order."""
    onnx = import_onnx()
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    layers = []
    for node in model.graph.node:
        if node.op_type not in ("MatMul", "Gemm") or node.input[1] not in constants:
            continue
        attributes = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
        weight = onnx.numpy_helper.to_array(constants[node.input[1]])
        weight = weight.T if attributes.pop("transB", 0) else weight
        plain = all(attributes.get(name, 1) == 1 for name in ("alpha", "beta")) and not attributes.get("transA", 0)
        if plain and weight.ndim == 2 and weight.dtype == np.float32:
            layers.append(LinearLayer(_module_name(node), node, weight))
    return layers


def _module_name(node: Any) -> str:
    """The name of the module that PyTorch's exporter made a node of, or else the node's own."""
    scopes = [entry.value for entry in node.metadata_props if entry.key == "pkg.torch.onnx.name_scopes"]
    modules = ast.literal_eval(scopes[0])[:-1] if scopes else []
    return modules[-1].removeprefix("model.") if modules and modules[-1] else node.name


def weight_scales(weight: np.ndarray) -> np.ndarray:
    """(in, out) -> (out,): the largest weight of each output channel becomes 64"""
    return (np.maximum(np.abs(weight).max(axis=0), 1e-12) / WEIGHT_LIMIT).astype(np.float32)


def round_weight(weight: np.ndarray, inputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Round weights one input channel after the other, and correct those that follow for the error of its outputs.

    Frantar et al. 2023 (GPTQ): the correction is by least squares over the inputs.

    Args:
        weight: (in, out).
        inputs: (n, in), as they will be multiplied.

    Returns:
        int8 (in, out) of at most 64 in size, and scales (out,).
    """
    scales = weight_scales(weight)
    hessian = inputs.T.astype(np.float64) @ inputs
    hessian[np.diag_indices_from(hessian)] += _DAMPING * np.trace(hessian) / len(hessian) + 1e-12
    inverse = np.linalg.cholesky(np.linalg.inv(hessian)).T  # upper triangular
    remaining, rounded = weight.astype(np.float64), np.empty(weight.shape, np.int8)
    for start in range(0, len(weight), _BLOCK):
        stop = min(start + _BLOCK, len(weight))
        errors = np.empty((stop - start, weight.shape[1]))
        for row in range(start, stop):
            rounded[row] = np.clip(np.rint(remaining[row] / scales), -WEIGHT_LIMIT, WEIGHT_LIMIT)
            errors[row - start] = (remaining[row] - rounded[row] * scales) / inverse[row, row]
            remaining[row:stop] -= np.outer(inverse[row, row:stop], errors[row - start])
        remaining[stop:] -= inverse[start:stop, stop:].T @ errors
    return rounded, scales


def activation_scale(low: float, high: float) -> tuple[np.float32, np.uint8]:
    """Scale and zero point of unsigned bytes from `low` to `high`, where 0 is exact."""
    low, high = min(low, 0.0), max(high, 0.0)
    scale = np.float32(max(high - low, 1e-12) / 255)
    return scale, np.uint8(np.clip(np.rint(-low / scale), 0, 255))


def calibrate(path: Path, pixels: np.ndarray, on_event: EventHandler = ignore_events) -> dict[str, Int8Layer]:
    """Run a float32 ONNX file on images and choose scales and rounded weights of its linear layers.

    Args:
        path: the file.
        pixels: n images as the file takes them, (n, ...).
        on_event: handler of progress events.

    Returns:
        Each layer in int8, by the name of its output.
    """
    model = import_onnx().load(path)
    layers = linear_layers(model)
    pixels = pixels[:: -(-len(pixels) // CALIBRATION_IMAGES)]
    rows_per_batch = -(-_ROWS * _BATCH // len(pixels))
    lows, highs, ranks, samples = ({} for _ in range(4))  # by tensor; per channel
    for number, inputs in enumerate(_layer_inputs(model, layers, pixels)):
        on_event(Progress("calibrating", min((number + 1) * _BATCH, len(pixels)), len(pixels)))
        for name, values in inputs.items():
            rows, ranks[name] = values.reshape(-1, values.shape[-1]), values.ndim
            lows[name] = np.minimum(rows.min(axis=0), lows.get(name, 0))
            highs[name] = np.maximum(rows.max(axis=0), highs.get(name, 0))
            samples.setdefault(name, []).append(rows[:: -(-len(rows) // rows_per_batch)].copy())
    found = {}
    for number, layer in enumerate(layers):
        name = layer.node.input[0]
        rows = np.concatenate(samples[name])
        found[layer.node.output[0]] = int8_layer(layer.weight, rows, lows[name], highs[name], ranks[name])
        on_event(Progress("rounding weights", number + 1, len(layers)))
    return found


def int8_layer(weight: np.ndarray, inputs: np.ndarray, low: np.ndarray, high: np.ndarray, rank: int = 2) -> Int8Layer:
    """Choose how a layer is computed in int8.

    Channels of the input are divided by numbers that the weights are multiplied with, so that no channel with large
    values makes the steps of the others coarse (Xiao et al. 2023, SmoothQuant).

    Args:
        weight: (in, out).
        inputs: a sample of its inputs, (n, in).
        low: the smallest value of each channel, over all inputs, (in,).
        high: the largest value, (in,).
        rank: axes of its input.

    Returns:
        The layer, with the divisors and the range of bytes that give the smallest error.
    """
    largest = np.maximum(np.maximum(-low, high), 1e-5)
    of_weight = np.maximum(np.abs(weight).max(axis=1), 1e-5)
    best: Int8Layer | None = None
    for exponent in _EXPONENTS:
        divisors = np.ones(len(weight)) if exponent == 0 else largest**exponent / of_weight ** (1 - exponent)
        divisors = (divisors / np.exp(np.log(divisors).mean())).astype(np.float32)
        scaled = weight * divisors[:, None]
        scales = weight_scales(scaled)
        lowest, highest = float((low / divisors).min()), float((high / divisors).max())
        tried = []
        for share in _SHARES:
            limit = share * max(-lowest, highest)
            scale, zero = activation_scale(max(lowest, -limit), min(highest, limit))
            layer = Int8Layer(rank, divisors, scale, zero, np.rint(scaled / scales).astype(np.int8), scales, 0.0)
            tried.append(layer._replace(error=_output_error(layer, inputs, weight)))
        layer = min(tried, key=lambda layer: layer.error)
        if best is None or layer.error < _WORTH * best.error:
            best = layer
    assert best is not None
    rounded, scales = round_weight(weight * best.divisors[:, None], _as_bytes(best, inputs))
    best = best._replace(weight=rounded, scales=scales)
    return best._replace(error=_output_error(best, inputs, weight))


def _as_bytes(layer: Int8Layer, inputs: np.ndarray) -> np.ndarray:
    """The values that bytes stand for, of inputs (n, in) that are divided by the divisors."""
    return (np.clip(np.rint(inputs / layer.divisors / layer.scale) + layer.zero, 0, 255) - layer.zero) * layer.scale


def _output_error(layer: Int8Layer, inputs: np.ndarray, weight: np.ndarray) -> float:
    """Per token of (n, in), so that a few tokens with large outputs do not hide the error of the others."""
    exact = inputs @ weight
    errors = np.linalg.norm(_as_bytes(layer, inputs) @ (layer.weight * layer.scales) - exact, axis=1)
    return float(np.sqrt(np.mean((errors / np.maximum(np.linalg.norm(exact, axis=1), 1e-12)) ** 2)))


def _layer_inputs(model: Any, layers: Sequence[LinearLayer], pixels: np.ndarray) -> Iterator[dict[str, np.ndarray]]:
    """The inputs of the layers by name, for each batch of images."""
    import onnxruntime  # the gate has opened files with it before

    onnx = import_onnx()
    names = list(dict.fromkeys(layer.node.input[0] for layer in layers))
    observed = onnx.ModelProto()
    observed.CopyFrom(model)
    del observed.graph.output[:]
    observed.graph.output.extend(
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in names
    )
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(observed.SerializeToString(), options, providers=["CPUExecutionProvider"])
    for start in range(0, len(pixels), _BATCH):
        values = session.run(names, {model.graph.input[0].name: pixels[start : start + _BATCH]})
        yield {name: np.asarray(value) for name, value in zip(names, values, strict=True)}


def quantize(model: Any, layers: Mapping[str, Int8Layer]) -> Any:
    """A model with linear layers in int8.

    Args:
        model: float32 ONNX model.
        layers: those that are replaced, by the name of their output.

    Returns:
        Another ONNX model.
    """
    onnx = import_onnx()
    result = onnx.ModelProto()
    result.CopyFrom(model)
    editor = _Editor(result)
    nodes: list[Any] = []
    for node in result.graph.node:
        layer = layers.get(node.output[0])
        nodes += [node] if layer is None else editor.int8_nodes(node, layer)
    nodes = [node for node in nodes if not any(node is merged for merged in editor.merged)]
    _approximate_gelu(nodes)
    used = {name for node in nodes for name in node.input}
    kept = [tensor for tensor in result.graph.initializer if tensor.name in used]
    kept += [onnx.numpy_helper.from_array(np.asarray(values), name) for name, values in editor.added.items()]
    for repeated, values in ((result.graph.node, nodes), (result.graph.initializer, kept)):
        values = [type(value).FromString(value.SerializeToString()) for value in values]
        del repeated[:]
        repeated.extend(values)
    result.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    return result


class _Editor:
    """The nodes of a graph by what they read and write, and what replaces them."""

    def __init__(self, model: Any) -> None:
        self.constants = {tensor.name: tensor for tensor in model.graph.initializer}
        self.producers = {name: node for node in model.graph.node for name in node.output}
        self.users: dict[str, list[Any]] = {output.name: [None] for output in model.graph.output}
        for node in model.graph.node:
            for name in node.input:
                self.users.setdefault(name, []).append(node)
        self.added: dict[str, np.ndarray] = {}  # constants
        self.merged: list[Any] = []  # nodes that are part of others now

    def int8_nodes(self, node: Any, layer: Int8Layer) -> list[Any]:
        """The nodes of a layer, with onnxruntime's product of bytes that returns floats."""
        make, (target,) = import_onnx().helper.make_node, node.output
        source, nodes = node.input[0], []
        if (layer.divisors != 1).any() and not self._fold_into_norm(source, 1 / layer.divisors):
            factors = self._add(f"{target}.factors", 1 / layer.divisors)
            nodes.append(make("Mul", [source, factors], [f"{target}.divided"]))
            source = f"{target}.divided"
        scale, zero = self._add(f"{target}.scale", layer.scale), self._add(f"{target}.zero", layer.zero)
        weight, scales = self._add(f"{target}.weight", layer.weight), self._add(f"{target}.scales", layer.scales)
        zeros = self._add(f"{target}.zeros", np.zeros(len(layer.scales), np.int8))
        nodes.append(make("QuantizeLinear", [source, scale, zero], [f"{target}.bytes"]))
        bias, output = self._merge_bias(target) or (list(node.input[2:]), target)
        inputs = [f"{target}.bytes", weight, scale, scales, zero, zeros, *bias]
        nodes.append(make("MatMulIntegerToFloat", inputs, [output], name=f"{target}.int8", domain="com.microsoft"))
        return nodes

    def _add(self, name: str, values: np.ndarray | np.generic) -> str:
        self.added[name] = np.asarray(values)
        return name

    def _fold_into_norm(self, name: str, factors: np.ndarray) -> bool:
        """Multiply the weight and bias of the LayerNorm that made this tensor, if it made it for one layer alone."""
        to_array = import_onnx().numpy_helper.to_array
        while len(self.users[name]) == 1 and name in self.producers:
            norm = self.producers[name]
            if norm.op_type == "LayerNormalization" and all(part in self.constants for part in norm.input[1:]):
                parts = [to_array(self.constants[part]) for part in norm.input[1:]]
                if parts[0].shape != factors.shape:
                    return False
                for position, part in enumerate(parts):
                    norm.input[1 + position] = self._add(f"{norm.output[0]}.part{position}", part * factors)
                return True
            if norm.op_type != "Reshape":  # which keeps the last axis, as its length is still that of the factors
                return False
            name = norm.input[0]
        return False

    def _merge_bias(self, product: str) -> tuple[list[str], str] | None:
        """The constant vector that is added to a product, and the name of the sum."""
        users = self.users.get(product, [])
        if len(users) != 1 or users[0] is None or users[0].op_type != "Add":
            return None
        bias = next(name for name in users[0].input if name != product)
        if bias not in self.constants or len(self.constants[bias].dims) != 1:
            return None
        self.merged.append(users[0])
        return [bias], users[0].output[0]


def _approximate_gelu(nodes: Sequence[Any]) -> None:
    """Use the approximation by tanh: it differs by at most 0.0005, far less than a step of the bytes after it."""
    helper = import_onnx().helper
    rounded = {node.input[0] for node in nodes if node.op_type in ("Mul", "QuantizeLinear")}
    for node in nodes:
        if node.op_type == "Gelu" and node.output[0] in rounded:
            del node.attribute[:]
            node.attribute.append(helper.make_attribute("approximate", "tanh"))


class Int8Result(NamedTuple):
    """Names of layers, and the share of images with the same top class."""

    int8: tuple[str, ...]
    in_float: tuple[str, ...]  # the worst first
    agreement: float


def search(
    path: Path,
    pixels: np.ndarray,
    agreement: Callable[[Path], float],
    limit: float,
    on_event: EventHandler = ignore_events,
) -> Int8Result:
    """Quantise a float32 ONNX file in place, with as few layers in float as a limit needs.

    Layers are ordered by the error of their outputs on calibration images, and the worst are kept in float: as few as
    the agreement on other images needs, found by bisection.

    Args:
        path: the file, which is overwritten.
        pixels: calibration images, uint8 (n, height, width, channels).
        agreement: measures a file: the share of other images that get the same top class.
        limit: the smallest agreement.
        on_event: handler of progress events.

    Returns:
        What was done; its agreement is below the limit where half of the layers in float are not enough.

    Raises:
        UserError: the model consists of convolutions.
    """
    onnx = import_onnx()
    model = onnx.load(path)
    linear = sum(layer.weight.size for layer in linear_layers(model))
    share = linear / sum(math.prod(tensor.dims) for tensor in model.graph.initializer)
    if share < 0.5:
        raise UserError(
            f"int8 is for linear layers, which have {share:.0%} of this model's weights (convolutions stay in "
            "float32): use --format onnx."
        )
    layers = calibrate(path, pixels, on_event)
    names = {layer.node.output[0]: layer.name for layer in linear_layers(model)}
    worst_first = sorted(layers, key=lambda output: -layers[output].error)
    shares: dict[int, float] = {}

    def holds(in_float: int) -> bool:
        onnx.save(quantize(model, {output: layers[output] for output in worst_first[in_float:]}), path)
        shares[in_float] = agreement(path)
        return shares[in_float] >= limit

    count = fewest(holds, len(layers) // 2)
    if count is None:
        count = max(shares, key=lambda tried: (shares[tried], -tried))
    onnx.save(quantize(model, {output: layers[output] for output in worst_first[count:]}), path)
    outputs = [names[output] for output in worst_first]
    return Int8Result(tuple(outputs[count:]), tuple(outputs[:count]), shares[count])


def fewest(holds: Callable[[int], bool], most: int) -> int | None:
    """The smallest number up to `most` that holds, by doubling and then halving the interval; None where none does."""
    failed, number = -1, 0
    while not holds(number):
        if number == most:
            return None
        failed, number = number, min(max(1, 2 * number), most)
    while number - failed > 1:
        middle = (failed + number) // 2
        failed, number = (failed, middle) if holds(middle) else (middle, number)
    return number
