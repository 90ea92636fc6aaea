"""Linear layers of a block and their gradients, in half precision or FP8: for each product the fastest way."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.kernels import cublas, fp8, gelu
from vitral.kernels.fp8 import Fp8Linear
from vitral.kernels.fused_ops import LinearWeights
from vitral.kernels.quantize import Fp8Rows


def linear(x: Tensor | Fp8Rows, layer: LinearWeights | Fp8Linear, *, has_bias: bool = True) -> Tensor:
    """A linear layer, with or without its bias: (rows, in) -> (rows, out)"""
    if isinstance(x, Fp8Rows) and isinstance(layer, Fp8Linear):
        return fp8.linear(x, layer if has_bias else layer._replace(bias=None))
    assert isinstance(x, Tensor)
    assert isinstance(layer, LinearWeights)
    weight = layer.weight.to(x.dtype)
    bias = layer.bias.to(x.dtype) if has_bias else None
    if cublas.is_large(x, weight):
        return cublas.linear(x, weight, bias)
    return x @ weight.t() if bias is None else torch.addmm(bias, x, weight.t())


def linear_gelu(x: Tensor, layer: LinearWeights, kind: str) -> Tensor:
    """GELU(x weight' + bias), "tanh", "none" (exact) or "quick": (rows, in) -> (rows, out)"""
    weight, bias = layer.weight.to(x.dtype), layer.bias.to(x.dtype)
    if kind != "tanh":
        return gelu.linear_gelu(x, weight, bias, kind)
    if cublas.is_large(x, weight):
        return cublas.linear(x, weight, bias, gelu=True)
    if x.is_cuda:  # PyTorch hands this to cuBLAS as one product
        return torch._addmm_activation(bias, x, weight.t(), use_gelu=True)
    return F.gelu(torch.addmm(bias, x, weight.t()), approximate="tanh")


def linear_gelu_saved(x: Tensor, layer: LinearWeights, kind: str) -> tuple[Tensor, Tensor]:
    """GELU(h) and h = x weight' + bias: (rows, in) -> (rows, out), (rows, out)"""
    if kind == "tanh" and cublas.fits(x, layer.weight):
        return cublas.linear_gelu(x, *layer)
    h = torch.addmm(layer.bias, x, layer.weight.t())
    return (gelu.quick_gelu(h) if kind == "quick" else F.gelu(h, approximate=kind)), h


def input_grad(grad: Tensor, weight: Tensor) -> Tensor:
    """The gradient of a layer's input: (rows, out), (out, in) -> (rows, in)"""
    return cublas.input_grad(grad, weight) if cublas.is_large(grad, weight) else grad @ weight


def weight_grad(left: Tensor, right: Tensor) -> Tensor:
    """left' right in float32, the gradient of a weight: (rows, i), (rows, j) -> (i, j)"""
    if left.is_cuda and left.dtype != torch.float32:
        return torch.mm(left.t(), right, out_dtype=torch.float32)
    return (left.t() @ right).float()
