"""ONNX graphs with linear layers in int8, by operators of onnxruntime's domain com.microsoft, or stored as integers."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from vitral.export.onnx import import_onnx

DOMAIN = "com.microsoft"
TINY = 1e-12  # instead of 0, as a divisor
_OF_ATTENTION = {"Concat", "MatMul", "Mul", "Reshape", "Shape", "Slice", "Softmax", "Squeeze", "Transpose"}


class LinearLayer(NamedTuple):
    """A product with constant weights."""

    name: str  # of the module
    node: Any  # MatMul or Gemm
    weight: np.ndarray  # (in, out)


class Int8Layer(NamedTuple):
    """A layer as it is computed in int8: (round(x / divisors / scale) + zero) in bytes, times `weight * scales`."""

    divisors: np.ndarray | None  # (in,) of the input's channels, float32; None: each token is divided by its largest
    scale: np.float32
    zero: np.uint8
    weight: np.ndarray  # (in, out) int8
    scales: np.ndarray  # (out,) float32
    error: float  # of its outputs: root mean square over tokens, relative to each token's norm

    def output(self, inputs: np.ndarray) -> np.ndarray:
        """(n, in) -> (n, out), without the bias"""
        steps = self.scale * (
            np.maximum(np.abs(inputs).max(axis=1, keepdims=True), TINY) if self.divisors is None else self.divisors
        )
        integers = np.clip(np.rint(inputs / steps) + self.zero, 0, 255) - self.zero
        by_row = steps if self.divisors is None else self.scale
        return integers @ self.weight.astype(np.float32) * self.scales * by_row


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
    editor = Editor(result)
    nodes: list[Any] = []
    for node in result.graph.node:
        layer = layers.get(node.output[0])
        nodes += [node] if layer is None else editor.int8_nodes(node, layer)
    nodes = [node for node in nodes if not any(node is merged for merged in editor.merged)]
    _approximate_gelu(nodes)
    _set_nodes(result, nodes, editor.added)
    result.opset_import.append(onnx.helper.make_opsetid(DOMAIN, 1))
    return result


def stored_as_integers(model: Any, bits: Mapping[str, int]) -> Any:
    """A model that computes in float32 with rounded weights, which onnxruntime makes of integers when it loads it.

    Args:
        model: float32 ONNX model.
        bits: of the integers, 8 or 16, by the name of a layer's output.

    Returns:
        Another ONNX model.
    """
    onnx = import_onnx()
    result = onnx.ModelProto()
    result.CopyFrom(model)
    layers = {layer.node.output[0]: layer for layer in linear_layers(result)}
    nodes: list[Any] = []
    added: dict[str, np.ndarray] = {}
    for node in result.graph.node:
        if (target := node.output[0]) in bits:
            values, scales = rounded_weights(layers[target].weight, bits[target])
            stored, name = ((values, scales), f"{target}.weight")
            if any(attribute.name == "transB" and attribute.i for attribute in node.attribute):
                stored = (values.T, scales[:, None])
            added[f"{name}.integers"], added[f"{name}.scales"] = map(np.ascontiguousarray, stored)
            nodes.append(onnx.helper.make_node("Cast", [f"{name}.integers"], [f"{name}.cast"], to=1))  # to float32
            nodes.append(onnx.helper.make_node("Mul", [f"{name}.cast", f"{name}.scales"], [name]))
            node.input[1] = name
        nodes.append(node)
    _set_nodes(result, nodes, added)
    return result


def rounded_weights(weight: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """(in, out) -> integers (in, out), scales of the output channels (out,) float32"""
    scales = np.maximum(np.abs(weight).max(axis=0), TINY) / (2 ** (bits - 1) - 1)
    return np.rint(weight / scales).astype(f"int{bits}"), scales.astype(np.float32)


def _set_nodes(model: Any, nodes: Sequence[Any], added: Mapping[str, np.ndarray]) -> None:
    """Replace the nodes of a model; constants that none reads are dropped, and others added."""
    used = {name for node in nodes for name in node.input}
    kept = [tensor for tensor in model.graph.initializer if tensor.name in used]
    kept += [import_onnx().numpy_helper.from_array(values, name) for name, values in added.items()]
    for repeated, values in ((model.graph.node, nodes), (model.graph.initializer, kept)):
        values = [type(value).FromString(value.SerializeToString()) for value in values]
        del repeated[:]
        repeated.extend(values)


class Editor:
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
        make, (target,), source = import_onnx().helper.make_node, node.output, node.input[0]
        scale, zero = self._add(f"{target}.scale", layer.scale), self._add(f"{target}.zero", layer.zero)
        weight, scales = self._add(f"{target}.weight", layer.weight), self._add(f"{target}.scales", layer.scales)
        zeros = self._add(f"{target}.zeros", np.zeros(len(layer.scales), np.int8))
        bias, output = self._merge_bias(target) or (list(node.input[2:]), target)
        tensors = [f"{target}.bytes", weight, scale, scales, zero, zeros]
        options = {"name": f"{target}.int8", "domain": DOMAIN}
        if layer.divisors is not None:
            self._fold_into_norm(source, 1 / layer.divisors)
            rounded = make("QuantizeLinear", [source, scale, zero], [f"{target}.bytes"])
            if bias and (attention := self._attention_after(output)) is not None:
                heads, merged = attention
                self.merged += merged
                tensors = [f"{target}.bytes", weight, *bias, scale, scales, "", zero, zeros]
                return [rounded, make("QAttention", tensors, merged[-1].output, num_heads=heads, **options)]
            return [rounded, make("MatMulIntegerToFloat", tensors + bias, [output], **options)]
        axis, tiny = self._add("last axis", np.array([-1])), self._add("tiny", np.float32(TINY))
        high, low, largest = f"{target}.high", f"{target}.low", f"{target}.largest"
        return [
            make("ReduceMax", [source, axis], [high]),
            make("ReduceMin", [source, axis], [low]),
            make("Neg", [low], [f"{low}.negative"]),
            make("Max", [high, f"{low}.negative", tiny], [largest]),
            make("Div", [source, largest], [f"{target}.divided"]),
            make("QuantizeLinear", [f"{target}.divided", scale, zero], [f"{target}.bytes"]),
            make("MatMulIntegerToFloat", tensors, [f"{target}.product"], **options),
            make("Mul", [f"{target}.product", largest], [f"{target}.scaled" if bias else output]),
            *([make("Add", [f"{target}.scaled", *bias], [output])] if bias else []),
        ]

    def _add(self, name: str, values: np.ndarray | np.generic) -> str:
        self.added[name] = np.asarray(values)
        return name

    def norm_before(self, name: str, channels: int) -> Any | None:
        """The LayerNorm with constant weights that made this tensor, if it made it for one layer alone."""
        while len(self.users[name]) == 1 and name in self.producers:
            norm = self.producers[name]
            if norm.op_type == "LayerNormalization":
                constant = all(part in self.constants for part in norm.input[1:])
                return norm if constant and list(self.constants[norm.input[1]].dims) == [channels] else None
            if norm.op_type != "Reshape":  # which keeps the last axis, as its length is still that of the channels
                return None
            name = norm.input[0]
        return None

    def _fold_into_norm(self, name: str, factors: np.ndarray) -> None:
        norm, to_array = self.norm_before(name, len(factors)), import_onnx().numpy_helper.to_array
        assert norm is not None
        for position, part in enumerate(norm.input[1:]):
            folded = to_array(self.constants[part]) * factors
            norm.input[1 + position] = self._add(f"{norm.output[0]}.part{position}", folded)

    def _attention_after(self, product: str) -> tuple[int, list[Any]] | None:
        """Heads and nodes, the last at the end, if all that follows queries, keys and values is their attention.

        onnxruntime's own attention reads (batch, n, 3 * heads * dim) as it is, which saves six copies and the nodes
        that compute shapes.
        """
        nodes, pending, end = [], [product], None
        while pending:
            name = pending.pop()
            for user in self.users.get(name, []):
                if user is None or user.op_type not in _OF_ATTENTION:
                    return None
                if user.op_type == "Reshape" and self._transposed(name) == [0, 2, 1, 3]:
                    end = user  # (batch, n, heads * dim)
                elif not any(user is node for node in nodes):
                    nodes.append(user)
                    pending += user.output
        produced = {product, *(name for node in nodes for name in node.output)}
        if end is None or any(name not in produced | set(self.constants) for node in nodes for name in node.input):
            return None
        first, softmax = nodes[0], [node for node in nodes if node.op_type == "Softmax"]
        shape = self._constant(first.input[-1])
        if first.op_type != "Reshape" or shape.shape != (5,) or shape[2] != 3 or len(softmax) != 1:
            return None
        second = self.users[first.output[0]][0]
        scores, context = self.producers[softmax[0].input[0]], self.users[softmax[0].output[0]][0]
        scale = math.prod(float(self._constant(node.input[1]).max()) for node in nodes if node.op_type == "Mul")
        usual = (
            self._transposed(second.output[0]) == [2, 0, 3, 1, 4]
            and [node.op_type for node in (scores, context)] == ["MatMul"] * 2
            and [self._part(name) for name in (*scores.input, context.input[1])] == [0, 1, 2]
            and math.isclose(scale, shape[4] ** -0.5, rel_tol=1e-5)
        )
        return (int(shape[3]), [*nodes, end]) if usual else None

    def _constant(self, name: str) -> np.ndarray:
        """A constant's values; empty if the tensor is none."""
        tensor = self.constants.get(name)
        return np.empty(0) if tensor is None else import_onnx().numpy_helper.to_array(tensor)

    def _transposed(self, name: str) -> list[int] | None:
        """The permutation that made a tensor."""
        node = self.producers.get(name)
        return list(node.attribute[0].ints) if node is not None and node.op_type == "Transpose" else None

    def _part(self, name: str) -> int | None:
        """Which of queries, keys and values a tensor was made of: 0, 1 or 2."""
        while (node := self.producers.get(name)) is not None and node.op_type != "Slice":
            name = node.input[0]
        return int(self._constant(node.input[1]).ravel()[0]) if node is not None else None

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
    rounded = {node.input[0] for node in nodes if node.op_type == "ReduceMax"}
    for node in nodes:
        if node.op_type == "Gelu" and node.output[0] in rounded:
            del node.attribute[:]
            node.attribute.append(helper.make_attribute("approximate", "tanh"))
