"""Linear layers of an exported ONNX file in int8: weights per output channel, activations calibrated or per token.

The scales of weights (`kernels.packed.weight_scales`) let no sum saturate: weights are finer than with 7 bits each, and
give the same integers on every processor and in a browser. No scale depends on other images of the batch. Attention's
products, norms, GELU and convolutions stay in float32.

In a browser sums of floats differ in their last bits: some activations would round to another byte, and the same file
give other classes than in Python. So pages only store weights as integers, see `search_stored`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitral.errors import UserError
from vitral.events import EventHandler, Progress, ignore_events
from vitral.export.int8_graph import (
    TINY,
    Editor,
    Int8Layer,
    LinearLayer,
    linear_layers,
    quantize,
    rounded_weights,
    stored_as_integers,
)
from vitral.export.onnx import import_onnx
from vitral.kernels.packed import weight_scales

INT8 = "vitral.int8"  # metadata: which layers are in int8
CALIBRATION_IMAGES = 128  # at most
_BATCH = 4  # calibration images at once: the inputs of all layers are kept
_ROWS = 4096  # tokens of each layer's input that are kept to choose its scales
_EXPONENTS = (0.5, 0.65, 0.8)  # how far differences between input channels move into the weights


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
    layers, editor = linear_layers(model), Editor(model)
    pixels = pixels[:: -(-len(pixels) // CALIBRATION_IMAGES)]
    rows_per_batch = -(-_ROWS * _BATCH // len(pixels))
    samples: dict[str, list[np.ndarray]] = {}
    for number, inputs in enumerate(_layer_inputs(model, layers, pixels)):
        on_event(Progress("calibrating", min((number + 1) * _BATCH, len(pixels)), len(pixels)))
        for name, values in inputs.items():
            if values.ndim == 2:  # one row per image, as of the head: there is no time to gain
                continue
            rows = values.reshape(-1, values.shape[-1])
            samples.setdefault(name, []).append(rows[:: -(-len(rows) // rows_per_batch)].copy())
    calibrated = {}
    for layer in layers:
        if (name := layer.node.input[0]) in samples:
            choose = layer_after_norm if editor.norm_before(name, len(layer.weight)) else layer_by_token
            calibrated[layer.node.output[0]] = choose(layer.weight, np.concatenate(samples[name]))
    return calibrated


def layer_after_norm(weight: np.ndarray, inputs: np.ndarray) -> Int8Layer:
    """Choose divisors of channels, by the error of the outputs.

    Channels of the input are divided by numbers that the weights are multiplied with, so that no channel with large
    values makes the steps of the others coarse (Xiao et al. 2023, SmoothQuant). A norm includes them at no cost.

    Args:
        weight: (in, out).
        inputs: a sample of its inputs, (n, in).
    """
    largest = np.maximum(np.abs(inputs).max(axis=0), 1e-5)
    of_weight = np.maximum(np.abs(weight).max(axis=1), 1e-5)
    tried = []
    for exponent in _EXPONENTS:
        divisors = largest**exponent / of_weight ** (1 - exponent)
        divisors = (divisors / np.exp(np.log(divisors).mean())).astype(np.float32)
        tried.append(_rounded(weight, inputs, divisors, inputs / divisors))
    return min(tried, key=lambda layer: layer.error)


def layer_by_token(weight: np.ndarray, inputs: np.ndarray) -> Int8Layer:
    """Divide each token by its largest value, so that a few tokens with large ones leave the others as they are.

    Args:
        weight: (in, out).
        inputs: a sample of its inputs, (n, in).
    """
    largest = np.maximum(np.abs(inputs).max(axis=1, keepdims=True), TINY)
    return _rounded(weight, inputs, None, inputs / largest)


def _rounded(weight: np.ndarray, inputs: np.ndarray, divisors: np.ndarray | None, divided: np.ndarray) -> Int8Layer:
    """The layer whose bytes have the range of the divided inputs: clipping costs more than finer steps gain."""
    scaled = weight if divisors is None else weight * divisors[:, None]
    scales, activation = weight_scales(scaled), activation_scale(float(divided.min()), float(divided.max()))
    layer = Int8Layer(divisors, *activation, np.rint(scaled / scales).astype(np.int8), scales, 0.0)
    exact = inputs @ weight
    # Per token, so that a few with large outputs do not hide the error of the others.
    errors = np.linalg.norm(layer.output(inputs) - exact, axis=1)
    return layer._replace(
        error=float(np.sqrt(np.mean((errors / np.maximum(np.linalg.norm(exact, axis=1), TINY)) ** 2)))
    )


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


class Int8Result(NamedTuple):
    """Names of layers, and the share of images with the same top class."""

    int8: tuple[str, ...]
    in_float: tuple[str, ...]  # the worst first, then those that have nothing to gain
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
    _check_linear(model)
    layers = calibrate(path, pixels, on_event)
    names = {layer.node.output[0]: layer.name for layer in linear_layers(model)}
    worst_first = sorted(layers, key=lambda output: -layers[output].error)
    shares: dict[int, float] = {}

    def write(in_float: int) -> None:
        chosen = {output: layers[output] for output in worst_first[in_float:]}
        onnx.save(quantize(model, chosen), path)

    def holds(in_float: int) -> bool:
        write(in_float)
        shares[in_float] = agreement(path)
        return shares[in_float] >= limit

    count = smallest_passing(holds, len(layers) // 2)
    if count is None:
        count = max(shares, key=lambda tried: (shares[tried], -tried))
    write(count)
    int8 = [names[output] for output in worst_first[count:]]
    in_float = [names[output] for output in (*worst_first[:count], *(names.keys() - layers.keys()))]
    return Int8Result(tuple(int8), tuple(in_float), shares[count])


class StoredLayers(NamedTuple):
    """Names of layers by the bits of their integers."""

    int8: tuple[str, ...]
    int16: tuple[str, ...]  # the worst in int8 first


def search_stored(path: Path, holds: Callable[[Path], bool]) -> StoredLayers:
    """Store the weights of a float32 ONNX file as integers, in place: in 8 bits, and in 16 as far as limits need it.

    Args:
        path: the file, which is overwritten.
        holds: whether a file meets the limits.

    Returns:
        What was done; with all layers in 16 bits limits may still not be met.

    Raises:
        UserError: the model consists of convolutions.
    """
    onnx = import_onnx()
    model = onnx.load(path)
    _check_linear(model)
    errors = {layer.node.output[0]: _rounding_error(layer.weight) for layer in linear_layers(model)}
    names = {layer.node.output[0]: layer.name for layer in linear_layers(model)}
    worst_first = sorted(errors, key=lambda output: -errors[output])

    def write(in_16_bits: int) -> None:
        bits = {output: 16 if number < in_16_bits else 8 for number, output in enumerate(worst_first)}
        onnx.save(stored_as_integers(model, bits), path)

    def written_holds(in_16_bits: int) -> bool:
        write(in_16_bits)
        return holds(path)

    count = smallest_passing(written_holds, len(errors))
    count = len(errors) if count is None else count
    write(count)
    ordered = tuple(names[output] for output in worst_first)
    return StoredLayers(ordered[count:], ordered[:count])


def _rounding_error(weight: np.ndarray) -> float:
    """Of weights in 8 bits, relative to them."""
    values, scales = rounded_weights(weight, 8)
    return float(np.linalg.norm(values * scales - weight) / max(np.linalg.norm(weight), TINY))


def _check_linear(model: Any) -> None:
    """Raise UserError unless most weights are those of linear layers."""
    linear = sum(layer.weight.size for layer in linear_layers(model))
    share = linear / sum(math.prod(tensor.dims) for tensor in model.graph.initializer)
    if share < 0.5:
        raise UserError(
            f"int8 is for linear layers, which have {share:.0%} of this model's weights (convolutions stay in "
            "float32): use a format in float32."
        )


def smallest_passing(holds: Callable[[int], bool], most: int) -> int | None:
    """The smallest number up to `most` that holds, by doubling and then halving the interval; None if none does."""
    failed, number = -1, 0
    while not holds(number):
        if number == most:
            return None
        failed, number = number, min(max(1, 2 * number), most)
    while number - failed > 1:
        middle = (failed + number) // 2
        failed, number = (failed, middle) if holds(middle) else (middle, number)
    return number
