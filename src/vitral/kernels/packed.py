"""Linear layers for inference on a CPU: oneDNN's matrix products, with weights packed once into its layout.

PyTorch gives a float32 product on a CPU to MKL, which reads weights row by row and does not use the widest vector
registers of processors that are not Intel's. oneDNN uses them everywhere, takes weights in a layout of its own, and
applies the GELU while the product is still in the cache.

In int8, weights have a scale per output channel and activations a range per token, so that neither images to calibrate
with are needed nor a result depends on other images of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.kernels.dispatch import apply_linear, is_plain, is_plain_tensor

# Operators that are not part of PyTorch's public interface.
_OPS = ("mkldnn._reorder_linear_weight", "mkldnn._linear_pointwise")
_INT8_OPS = ("onednn.qlinear_prepack", "onednn.qlinear_pointwise", "quantized.embedding_bag_byte_prepack")
_WEIGHT_LIMIT, _PAIR_LIMIT = 127, 128
_MIN_INT8_WEIGHTS = 1 << 16  # of a layer: below, rounding the activations takes the time that the product gains
_INT8_ROWS = 256  # tokens at once, so that they are still in the cache after the product
_GELU_SLOPE, _GELU_CUBE = math.sqrt(8 / math.pi), 0.044715
_RANGE_BYTES = 8  # behind the bytes of each token: its step and its smallest value, float32


class PackedLinear(nn.Module):
    """`nn.Linear`, and optionally a GELU after it, in float32 on a CPU and without gradients."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: Tensor, gelu: str = "") -> Tensor:
        """(..., in) -> (..., out); `gelu`: "tanh", "none" (exact), or "" for the linear layer alone"""
        activation = "gelu" if gelu else "none"
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, activation, [], gelu)


class Int8Linear(nn.Module):
    """`nn.Linear`, and optionally a GELU after it, with weights and activations rounded to bytes, on a CPU.

    A token x is stored as bytes u = round((x - least) / step), with 255 steps between its least and largest value:
    W x + b = step * (W u) + least * (W 1) + b.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        self.scales = torch.from_numpy(weight_scales(weight.numpy().T))
        rounded = (weight / self.scales[:, None]).round()
        self.sums = rounded.sum(1) * self.scales
        self.bias = torch.zeros_like(self.sums) if linear.bias is None else linear.bias.detach()
        # Weights of zero for the bytes of a token's range, which then need not be cut off.
        padded = F.pad(rounded.to(torch.int8), (0, _RANGE_BYTES))
        self.weight = torch.ops.onednn.qlinear_prepack(padded, None)
        self.zeros = torch.zeros(len(padded), dtype=torch.int32)

    def forward(self, x: Tensor, gelu: str = "") -> Tensor:
        """(..., in) -> (..., out); `gelu`: "tanh", "none" (exact), or "" for the linear layer alone"""
        rows = x.reshape(-1, x.shape[-1])
        output = rows.new_empty(len(rows), len(self.scales))
        for some, result in zip(rows.split(_INT8_ROWS), output.split(_INT8_ROWS), strict=True):
            self._compute(some, result)
            if gelu == "tanh":
                gelu_tanh_(result)
            elif gelu:
                torch.ops.aten.gelu.out(result, approximate=gelu, out=result)
        return output.view(*x.shape[:-1], -1)

    def _compute(self, rows: Tensor, result: Tensor) -> None:
        """(n, in), (n, out), which is written"""
        tokens = torch.ops.quantized.embedding_bag_byte_prepack(rows)  # (n, in + 8) uint8
        step, least = tokens.view(torch.float32)[:, -2:].unbind(1)
        products = torch.ops.onednn.qlinear_pointwise(
            tokens, 1.0, 0, self.weight, self.scales, self.zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        torch.addcmul(self.bias, least[:, None], self.sums, out=result).addcmul_(step[:, None], products)


def gelu_tanh_(x: Tensor) -> Tensor:
    """`F.gelu(x, approximate="tanh")` in place, as x * sigmoid(slope * (x + cube * x^3)).

    PyTorch's own takes longer, most of it in its tanh.
    """
    exponent = x * x
    exponent.mul_(_GELU_SLOPE * _GELU_CUBE).add_(_GELU_SLOPE).mul_(x)
    return x.mul_(exponent.sigmoid_())


def weight_scales(weight: np.ndarray) -> np.ndarray:
    """(in, out) -> (out,): the finest scales at which rounded weights and their pairs stay within the limits.

    x86 processors without VNNI add pairs of products of unsigned and signed bytes in 16 bits, where 2 * 255 * 127 does
    not fit. So the weights of two input channels that are added have 128 as the largest sum of either sign.
    """
    signs = np.stack([np.maximum(weight, 0), np.maximum(-weight, 0)])  # (2, in, out)
    pairs = np.add.reduceat(signs, range(0, len(weight), 2), axis=1).max(axis=(0, 1))
    largest = np.maximum(pairs / (_PAIR_LIMIT - 1), np.abs(weight).max(axis=0) / _WEIGHT_LIMIT)  # both may round up
    return np.maximum(largest, 1e-12).astype(np.float32)


def linear_gelu(linear: nn.Module, x: Tensor, gelu: str) -> Tensor:
    """A linear layer and the GELU after it, fused where the layer is packed: (..., in) -> (..., out)"""
    if isinstance(linear, PackedLinear | Int8Linear):
        return linear(x, gelu)
    return F.gelu(apply_linear(linear, x), approximate=gelu)


def pack(model: nn.Module) -> None:
    """Replace every plain float32 linear layer on the CPU by a packed one, in place.

    From then on the model can neither be trained nor moved. Layers with hooks, adapters or parametrizations are left.
    """
    if _is_supported(_OPS):
        _replace_linears(model, PackedLinear)


def pack_int8(blocks: nn.Module) -> int:
    """Replace the large ones among the layers that `pack` replaces by layers in int8, and return their number."""
    return _replace_linears(blocks, Int8Linear, _gains_from_int8) if _is_supported(_INT8_OPS) else 0


def _replace_linears(
    model: nn.Module, packed: type[PackedLinear | Int8Linear], suits: Callable[[Tensor], bool] = lambda _: True
) -> int:
    count = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            plain = isinstance(child, nn.Linear) and is_plain(child, nn.Linear)
            if plain and _is_packable(child.weight) and suits(child.weight):
                setattr(module, name, packed(child).train(child.training))
                count += 1
    return count


def _is_packable(weight: Tensor) -> bool:
    return is_plain_tensor(weight) and weight.dtype == torch.float32 and weight.device.type == "cpu"


def _gains_from_int8(weight: Tensor) -> bool:
    """Whether it is large enough, and a token's range begins at a multiple of four bytes, as a float32 must."""
    return weight.numel() >= _MIN_INT8_WEIGHTS and weight.shape[1] % 4 == 0


def _is_supported(operators: tuple[str, ...]) -> bool:
    """Whether this PyTorch has oneDNN and operators that are not part of its public interface."""
    spaces = [(getattr(torch.ops, space), name) for space, name in (operator.split(".") for operator in operators)]
    return torch.backends.mkldnn.is_available() and all(hasattr(space, name) for space, name in spaces)
