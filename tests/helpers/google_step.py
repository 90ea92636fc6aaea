"""Google's training step in plain NumPy, float64: forward, backward, clipping, SGD and Adam; and cases to compare.

The definitions are those of google-research/vision_transformer (models_vit.py, models_resnet.py, train.py) and of
big_vision's optax chain, with parameters by their Flax Linen names and in their layouts (kernels HWIO, images NHWC).
The backward pass is a tape of ten operations, each with its own gradient; `test_google_step.py` checks it by finite
differences, benchmarks/step_in_jax.py by Google's own code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
from oracles import SMALL, random_weights

from vitral.architecture import StemConfig, ViTConfig
from vitral.checkpoints.formats.google import GOOGLE_LINEN
from vitral.checkpoints.formats.table import write_entries
from vitral.checkpoints.weights import assemble
from vitral.models.vit import ViT
from vitral.recipe import Recipe

Array = np.ndarray
Params = dict[str, Array]
Loss = Literal["softmax", "sigmoid"]


class Var:
    """An array with the gradient functions to what it was computed from."""

    def __init__(self, value: Array, *parents: tuple[Var, Callable[[Array], Array]]) -> None:
        self.value, self.parents = value, parents
        self.grad: Array | None = None

    def __add__(self, other: Var | float) -> Var:
        b = _var(other)
        return Var(self.value + b.value, (self, lambda g: _reduced(g, self)), (b, lambda g: _reduced(g, b)))

    def __mul__(self, other: Var | float) -> Var:
        b = _var(other)
        left, right = self.value, b.value
        return Var(left * right, (self, lambda g: _reduced(g * right, self)), (b, lambda g: _reduced(g * left, b)))

    def __sub__(self, other: Var) -> Var:
        return self + other * -1.0

    def __truediv__(self, other: Var) -> Var:
        return self * power(other, -1.0)


def _var(value: Var | float) -> Var:
    return value if isinstance(value, Var) else Var(np.asarray(value, np.float64))


def _reduced(gradient: Array, to: Var) -> Array:
    """The gradient summed over the axes that broadcasting added or stretched."""
    shape = np.shape(to.value)
    gradient = gradient.sum(tuple(range(gradient.ndim - len(shape))))
    return gradient.sum(tuple(i for i, n in enumerate(shape) if n == 1 and gradient.shape[i] > 1), keepdims=True)


def elementwise(x: Var, function: Callable[[Array], Array], derivative: Callable[[Array], Array]) -> Var:
    return Var(function(x.value), (x, lambda g: g * derivative(x.value)))


def power(x: Var, exponent: float) -> Var:
    return elementwise(x, lambda v: v**exponent, lambda v: exponent * v ** (exponent - 1.0))


def einsum(spec: str, a: Var, b: Var) -> Var:
    """Every index of an operand is in the output or in the other operand."""
    (left, right), out = spec.split("->")[0].split(","), spec.split("->")[1]
    return Var(
        np.einsum(spec, a.value, b.value, optimize=True),
        (a, lambda g: np.einsum(f"{out},{right}->{left}", g, b.value, optimize=True)),
        (b, lambda g: np.einsum(f"{out},{left}->{right}", g, a.value, optimize=True)),
    )


def mean(x: Var, axes: tuple[int, ...]) -> Var:
    """Over these axes, which stay with length 1."""
    count = math.prod(x.value.shape[axis] for axis in axes)
    return Var(x.value.mean(axes, keepdims=True), (x, lambda g: np.broadcast_to(g / count, x.value.shape)))


def reshape(x: Var, *shape: int) -> Var:
    return Var(x.value.reshape(shape), (x, lambda g: g.reshape(x.value.shape)))


def concatenate(a: Var, b: Var) -> Var:
    """Along the second axis."""
    rows = a.value.shape[1]
    joined = np.concatenate([a.value, b.value], 1)
    return Var(joined, (a, lambda g: g[:, :rows]), (b, lambda g: g[:, rows:]))


def windows(x: Var, size: int, stride: int, padding: float | None) -> Var:
    """(b, h, w, c) -> (b, h', w', size, size, c); TensorFlow's SAME padding with this value, or None for VALID."""
    h, w = x.value.shape[1:3]
    (top, bottom), (left, right) = ((0, 0), (0, 0)) if padding is None else (_same(n, size, stride) for n in (h, w))
    padded = np.pad(x.value, ((0, 0), (top, bottom), (left, right), (0, 0)), constant_values=padding or 0.0)
    view = np.lib.stride_tricks.sliding_window_view(padded, (size, size), (1, 2))[:, ::stride, ::stride]
    rows, columns = view.shape[1:3]

    def backward(g: Array) -> Array:
        total = np.zeros(padded.shape)
        for i in range(size):
            for j in range(size):
                part = total[:, i : i + stride * rows : stride, j : j + stride * columns : stride]
                part[:, :rows, :columns] += g[:, :, :, i, j]
        return total[:, top : top + h, left : left + w]

    return Var(view.transpose(0, 1, 2, 4, 5, 3), (x, backward))


def _same(length: int, size: int, stride: int) -> tuple[int, int]:
    total = max((math.ceil(length / stride) - 1) * stride + size - length, 0)
    return total // 2, total - total // 2


def largest(x: Var) -> Var:
    """(b, h, w, size, size, c) -> (b, h, w, c): the maximum of each window, to whose place its gradient goes."""
    b, h, w, size, _, c = x.value.shape
    flat = x.value.reshape(b, h, w, size * size, c)
    index = flat.argmax(3)[:, :, :, None]

    def backward(g: Array) -> Array:
        spread = np.zeros(flat.shape)
        np.put_along_axis(spread, index, g[:, :, :, None], 3)
        return spread.reshape(x.value.shape)

    return Var(np.take_along_axis(flat, index, 3)[:, :, :, 0], (x, backward))


def gradients(loss: Var, leaves: Mapping[str, Var]) -> Params:
    """The gradient of a scalar with respect to the leaves."""
    order: list[Var] = []
    seen: set[int] = set()
    stack = [(loss, False)]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif id(node) not in seen:
            seen.add(id(node))
            stack += [(node, True), *((parent, False) for parent, _ in node.parents)]
    loss.grad = np.ones_like(loss.value)
    for node in reversed(order):
        for parent, back in node.parents:
            part = back(node.grad)  # type: ignore[arg-type]
            parent.grad = part if parent.grad is None else parent.grad + part
    return {name: np.zeros_like(leaf.value) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}


def relu(x: Var) -> Var:
    return elementwise(x, lambda v: np.maximum(v, 0), lambda v: (v > 0).astype(np.float64))


def tanh(x: Var) -> Var:
    return elementwise(x, np.tanh, lambda v: 1 - np.tanh(v) ** 2)


def exp(x: Var) -> Var:
    return elementwise(x, np.exp, np.exp)


def log(x: Var) -> Var:
    return elementwise(x, np.log, lambda v: 1 / v)


def gelu(x: Var) -> Var:
    """The tanh approximation, the default of jax.nn.gelu."""
    inner = (x + x * x * x * 0.044715) * math.sqrt(2 / math.pi)
    return x * (tanh(inner) + 1.0) * 0.5


def total(x: Var, axis: int) -> Var:
    return mean(x, (axis % x.value.ndim,)) * float(x.value.shape[axis])


def softmax(x: Var) -> Var:
    exponents = exp(x + Var(-x.value.max(-1, keepdims=True)))
    return exponents / total(exponents, -1)


def standardised(x: Var, axes: tuple[int, ...], eps: float) -> Var:
    centred = x - mean(x, axes)
    return centred / power(mean(centred * centred, axes) + eps, 0.5)


class Model:
    """The ViT and hybrid of models_vit.py with class token, in training mode without dropout."""

    def __init__(self, params: Params) -> None:
        self.leaves = {name: Var(value) for name, value in params.items()}

    def __getitem__(self, name: str) -> Var:
        return self.leaves[name]

    def logits(self, images: Array) -> Var:
        """(b, h, w, c) -> (b, classes)"""
        x = Var(images)
        if "conv_root/kernel" in self.leaves:
            x = self.resnet(x)
        kernel = self["embedding/kernel"]
        patch, width = kernel.value.shape[0], kernel.value.shape[3]
        x = einsum("bhwijc,ijcd->bhwd", windows(x, patch, patch, None), kernel) + self["embedding/bias"]
        batch, rows, columns, _ = x.value.shape
        x = reshape(x, batch, rows * columns, width)
        token = self["cls"] * Var(np.ones((batch, 1, 1)))
        x = concatenate(token, x) + self["Transformer/posembed_input/pos_embedding"]
        depth = sum(name.endswith("MlpBlock_0/Dense_0/bias") for name in self.leaves)
        for layer in range(depth):
            block = f"Transformer/encoderblock_{layer}"
            x = x + self.attention(
                self.layer_norm(x, f"{block}/LayerNorm_0"), f"{block}/MultiHeadDotProductAttention_0"
            )
            hidden = gelu(self.dense(self.layer_norm(x, f"{block}/LayerNorm_1"), f"{block}/MlpBlock_0/Dense_0"))
            x = x + self.dense(hidden, f"{block}/MlpBlock_0/Dense_1")
        x = self.layer_norm(x, "Transformer/encoder_norm")
        first = np.zeros((rows * columns + 1, 1))
        first[0] = 1.0
        x = reshape(einsum("bnd,no->bod", x, Var(first)), batch, width)
        if "pre_logits/kernel" in self.leaves:
            x = tanh(self.dense(x, "pre_logits"))
        return self.dense(x, "head")

    def dense(self, x: Var, name: str) -> Var:
        kernel = self[f"{name}/kernel"]
        return einsum("bd,de->be" if x.value.ndim == 2 else "bnd,de->bne", x, kernel) + self[f"{name}/bias"]

    def layer_norm(self, x: Var, name: str) -> Var:
        return standardised(x, (2,), 1e-6) * self[f"{name}/scale"] + self[f"{name}/bias"]

    def attention(self, x: Var, name: str) -> Var:
        q, k, v = (
            einsum("bnd,dhk->bnhk", x, self[f"{name}/{part}/kernel"]) + self[f"{name}/{part}/bias"]
            for part in ("query", "key", "value")
        )
        weights = softmax(einsum("bqhd,bkhd->bhqk", q * (1 / math.sqrt(q.value.shape[3])), k))
        mixed = einsum("bhqk,bkhd->bqhd", weights, v)
        return einsum("bqhd,hdm->bqm", mixed, self[f"{name}/out/kernel"]) + self[f"{name}/out/bias"]

    def resnet(self, x: Var) -> Var:
        x = relu(self.group_norm(self.conv(x, "conv_root", 2), "gn_root"))
        x = largest(windows(x, 3, 2, -np.inf))
        units = [name.removesuffix("/conv1/kernel") for name in self.leaves if name.endswith("/conv1/kernel")]
        for unit in units:
            stride = 2 if unit.endswith("/unit1") and unit != "block1/unit1" else 1
            shortcut = x
            if f"{unit}/conv_proj/kernel" in self.leaves:
                shortcut = self.group_norm(self.conv(x, f"{unit}/conv_proj", stride), f"{unit}/gn_proj")
            y = relu(self.group_norm(self.conv(x, f"{unit}/conv1", 1), f"{unit}/gn1"))
            y = relu(self.group_norm(self.conv(y, f"{unit}/conv2", stride), f"{unit}/gn2"))
            x = relu(shortcut + self.group_norm(self.conv(y, f"{unit}/conv3", 1), f"{unit}/gn3"))
        return x

    def conv(self, x: Var, name: str, stride: int) -> Var:
        """With standardised kernels: the epsilon is added to the deviation, not to the variance."""
        kernel = self[f"{name}/kernel"]
        centred = kernel - mean(kernel, (0, 1, 2))
        deviation = power(mean(centred * centred, (0, 1, 2)), 0.5)
        patches = windows(x, kernel.value.shape[0], stride, 0.0)
        return einsum("bhwijc,ijcd->bhwd", patches, centred / (deviation + 1e-5))

    def group_norm(self, x: Var, name: str) -> Var:
        b, h, w, c = x.value.shape
        normed = standardised(reshape(x, b, h, w, 32, c // 32), (1, 2, 4), 1e-6)
        return reshape(normed, b, h, w, c) * self[f"{name}/scale"] + self[f"{name}/bias"]


def loss_of(model: Model, images: Array, labels: Array, kind: Loss) -> Var:
    """The mean over images (b, h, w, c) of softmax or, summed over classes, sigmoid cross-entropy with labels (b,)."""
    logits = model.logits(images)
    targets = np.eye(logits.value.shape[1])[labels]
    if kind == "softmax":
        shifted = logits + Var(-logits.value.max(1, keepdims=True))
        losses = (shifted - log(total(exp(shifted), 1))) * Var(-targets)
    else:  # -t log s(x) - (1 - t) log s(-x), with log s(x) = -log(1 + exp(-x))
        yes, no = log(exp(logits * -1.0) + 1.0), log(exp(logits) + 1.0)
        losses = yes * Var(targets) + no * Var(1 - targets)
    return mean(total(losses, 1), (0, 1))


def loss_gradients(params: Params, images: Array, labels: Array, kind: Loss) -> Params:
    """The gradient of `loss_of` with respect to every parameter."""
    model = Model(params)
    return gradients(loss_of(model, images, labels, kind), model.leaves)


def global_norm(tree: Params) -> float:
    return math.sqrt(sum(float((leaf**2).sum()) for leaf in tree.values()))


def clipped(tree: Params, largest_norm: float) -> Params:
    """optax.clip_by_global_norm; 0: as they are."""
    norm = global_norm(tree)
    if not largest_norm or norm < largest_norm:
        return tree
    return {name: leaf / norm * largest_norm for name, leaf in tree.items()}


@dataclass
class Sgd:
    """optax.sgd with momentum, as in train.py (whose buffer is bfloat16, which only later steps see)."""

    momentum: float
    trace: Params = field(default_factory=dict)

    def step(self, params: Params, grads: Params, lr: float) -> Params:
        self.trace = {name: grad + self.momentum * self.trace.get(name, 0.0) for name, grad in grads.items()}
        return {name: value - lr * self.trace[name] for name, value in params.items()}


@dataclass
class Adam:
    """big_vision's chain: scale_by_adam, times the rate, plus the decay of kernels.

    Its `wd` is the paper's decay times the peak rate, and the schedule scales both, so kernels shrink by rate times
    decay: Flax's own Adam of 2020 had its `weight_decay` relative to the rate, too.
    """

    beta1: float
    beta2: float
    weight_decay: float
    mu: Params = field(default_factory=dict)
    nu: Params = field(default_factory=dict)
    count: int = 0

    def step(self, params: Params, grads: Params, lr: float) -> Params:
        self.count += 1
        self.mu = {n: (1 - self.beta1) * g + self.beta1 * self.mu.get(n, 0.0) for n, g in grads.items()}
        self.nu = {n: (1 - self.beta2) * g**2 + self.beta2 * self.nu.get(n, 0.0) for n, g in grads.items()}
        stepped = {}
        for name, value in params.items():
            mean_hat = self.mu[name] / (1 - self.beta1**self.count)
            square_hat = self.nu[name] / (1 - self.beta2**self.count)
            decay = self.weight_decay if name.endswith("/kernel") else 0.0
            stepped[name] = value - lr * (mean_hat / (np.sqrt(square_hat) + 1e-8) + decay * value)
        return stepped


BATCH, STEPS = 3, 2
MODELS = {
    "ViT": SMALL,
    "hybrid": replace(SMALL, stem=StemConfig(blocks=(1, 2)), patch=1, depth=1),
}
# A preset of Table 3 or 4, and the rates of two steps.
RUNS = {
    "SGD, clipped": ("paper:finetune/imagenet", (0.03, 0.02)),
    "Adam with decay, clipped": ("paper:pretrain/imagenet", (3e-3, 2e-3)),
    "Adam with decay, sigmoid": ("paper:pretrain/imagenet21k", (1e-3, 7e-4)),
}


def linen(model: torch.nn.Module, config: ViTConfig) -> Params:
    """The weights by Google's names and in their layouts."""
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return {name: value.numpy() for name, value in write_entries(GOOGLE_LINEN.entries(config), state).items()}


def a_model(config: ViTConfig, recipe: Recipe) -> ViT:
    """Random weights in float64; the pre-training head has its tanh layer."""
    config = replace(config, representation=config.width if recipe.shape.head == "tanh" else 0)
    model = assemble(random_weights(config)).double().train()
    assert isinstance(model, ViT)
    return model


def a_batch(config: ViTConfig, seed: int) -> tuple[Array, Array]:
    """Images (b, h, w, c) in float64, and labels."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(BATCH, *config.image, config.channels)), rng.integers(0, config.classes, BATCH)
