"""Linear layers and blocks in FP8 (e4m3): scales, products and gradients. `quantize.py` has the quantisation.

An e4m3 number has 4 bits of exponent and 3 of mantissa. Its relative error is the same over 15 powers of two, so that
a scale which is ten times too large costs almost nothing. Hence activations are not searched for their maximum, which
would take a separate pass or another shape of the kernel before; their scale comes from a bound that holds for any
input, and depends on the weights alone:

- |z| <= sqrt(dim) for the output z of a LayerNorm whose weight and bias are folded into the next layer;
- |w z + b| <= |w| sqrt(dim) + |b|, by Cauchy and Schwarz, for the outputs of that layer;
- attention averages values, and |GELU(h)| <= |h|.

Weights have a scale per output channel. Gradients differ between tokens by orders of magnitude, and have a scale per
row: from its maximum or, for the MLP's hidden layer, from a bound like the above. All scales stay on the device.

A product sums over the last dimension of both of its operands, so that the gradient of a weight reads transposed copies
of gradient and input. A scale per row cannot be taken out of a sum over rows, and is a factor of the input there:

    dW = sum over rows of dy x' = sum of (dy / scale) (scale x)'
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from vitral.kernels import cublas
from vitral.kernels.dispatch import E4M3, ceil_div, launch
from vitral.kernels.fused_ops import BlockWeights, Fp8Target, NonAffineNorm, column_sums, norm_factor
from vitral.kernels.gelu import fused_linear_gelu, is_faster
from vitral.kernels.jit import fp8 as jit
from vitral.kernels.quantize import (
    Fp8Rows,
    Fp8Weight,
    numbers,
    quantize,
    quantize_folded,
    quantize_rows,
    quantize_transposed,
    quantize_weight,
    transpose,
    zeros,
)

_GELU_TILE = (64, 4, 512, 4)  # rows per program, rows at a time, columns and warps; tuned on an H200
# The derivative of a GELU is at most 1.13, and a gradient in e4m3 at most 1/16 larger than before.
_MAX_SLOPE = 1.25


class Fp8Units(NamedTuple):
    """Scales of what norms, attention and the GELU write, and the largest ones of two weights; on the device."""

    norm: Tensor
    attention: Tensor
    gelu: Tensor
    qkv_largest: Tensor
    hidden_largest: Tensor

    @staticmethod
    def of(memory: Tensor) -> Fp8Units:
        """Those in the memory that `quantize_block` has filled."""
        return Fp8Units(*numbers(memory))


class MlpGradients(NamedTuple):
    """Gradients of an MLP: of its input (rows, dim), and of its parameters in float32."""

    x: Tensor
    hidden: Tensor  # (mlp, dim); in FP8, times the scale of the weight
    hidden_bias: Tensor  # (mlp,)
    output: Tensor  # (dim, mlp)


class Fp8Linear(NamedTuple):
    """A linear layer in FP8."""

    weight: Fp8Weight
    scale: Tensor  # of the product: that of the weight times that of the activations it reads, float32 (out,)
    bias: Tensor | None  # (out,)
    dtype: torch.dtype  # of its output


def product(x: Fp8Rows, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x weight' * scale + bias: e4m3 (out, in), float32 (out,), (out,) -> (rows, out) in `dtype`"""
    return torch._scaled_mm(
        x.values, weight.t(), scale_a=x.scale, scale_b=scale[None], bias=bias, out_dtype=dtype, use_fast_accum=True
    )


def linear(x: Fp8Rows, layer: Fp8Linear) -> Tensor:
    """(rows, in) -> (rows, out)"""
    return product(x, layer.weight.values, layer.scale, layer.bias, layer.dtype)


def linear_gelu(x: Fp8Rows, layer: Fp8Linear, scale: Tensor, gelu: str) -> Fp8Rows:
    """GELU(linear(x)) / scale, by one kernel if that is faster: (rows, in) -> (rows, out)"""
    if not is_faster(x.values, layer.weight.values):
        return linear_gelu_saved(x, layer, scale, gelu)[0]
    assert layer.bias is not None
    return Fp8Rows(fused_linear_gelu(x.values, layer.weight.values, layer.bias, gelu, (layer.scale, scale)), x.scale)


def linear_gelu_saved(x: Fp8Rows, layer: Fp8Linear, scale: Tensor, gelu: str) -> tuple[Fp8Rows, Tensor]:
    """GELU(h) / scale, and h = linear(x): (rows, in) -> (rows, out), (rows, out)"""
    h = linear(x, layer)
    return Fp8Rows(quantize(h, scale, gelu), x.scale), h


def linear_backward(
    grad: Tensor, x: Tensor, unit: Tensor, weight: Fp8Weight, target: Fp8Target | None = None
) -> tuple[Tensor, Tensor]:
    """Gradients of a layer's input (rows, in), in its dtype, and of its weight times its scale, float32 (out, in).

    The scale of an output channel is a factor of the gradient here, so that the weight's values are those of the
    forward pass.

    Args:
        grad: of the output, (rows, out).
        x: the input, (rows, in).
        unit: the scale of the input in e4m3, a number on the device.
        weight: its values transposed, e4m3 (in, out), contiguous.
        target: the gradient times the scale of the weight, if a kernel has already quantised it.
    """
    if target is None:
        (largest,) = numbers(zeros(1, grad.device))
        rows, _ = quantize_rows(grad, weight.scale, largest)
    else:
        rows, largest = Fp8Rows(target.values, target.scale), target.largest
    dweight = _weight_grad(transpose(rows.values), quantize_transposed(x, rows.scale, largest, unit), (largest, unit))
    return _input_grad(rows, weight, grad.dtype), dweight


def mlp_backward(
    grad: Tensor,
    h: Tensor,
    x: Tensor,
    units: Fp8Units,
    weights: tuple[Fp8Weight, Fp8Weight],
    gelu: str,
) -> MlpGradients:
    """Gradients of an MLP without the bias of its last layer.

    Args:
        grad: of the output, (rows, dim).
        h: what the GELU reads, (rows, mlp).
        x: the input, (rows, dim).
        units: of the block.
        weights: hidden and output layer as in `linear_backward`.
        gelu: "tanh", "none" (exact) or "quick".
    """
    hidden, output = weights
    largest, dh_largest = numbers(zeros(2, grad.device))
    rows, lengths = quantize_rows(grad, output.scale, largest)
    activated = quantize_transposed(h, rows.scale, largest, units.gelu, gelu)
    doutput = _weight_grad(transpose(rows.values), activated, (largest, units.gelu)).div_(output.scale[:, None])
    del activated
    factor = (hidden.scale, units.hidden_largest)
    dactivated = _input_grad(rows, output, h.dtype)
    dh, dbias = gelu_backward(h, dactivated, (lengths, grad.shape[1]), factor, dh_largest, gelu)
    del dactivated
    inputs = quantize_transposed(x, dh.scale, dh_largest, units.norm)
    dhidden = _weight_grad(transpose(dh.values), inputs, (dh_largest, units.norm))
    return MlpGradients(_input_grad(dh, hidden, x.dtype), dhidden, dbias, doutput)


def gelu_backward(
    h: Tensor, grad: Tensor, lengths: tuple[Tensor, int], factor: tuple[Tensor, Tensor], largest: Tensor, gelu: str
) -> tuple[Fp8Rows, Tensor]:
    """The gradient of the GELU's input, from that of its output, in one pass.

    Args:
        h: what the GELU reads, (rows, mlp).
        grad: of its output, (rows, mlp): the product of gradients (rows, dim) and a weight's values in e4m3 (dim, mlp).
        lengths: of the rows of those gradients, float32 (rows,), and `dim`: they bound the product.
        factor: of each column of the result, float32 (mlp,), and the largest of them.
        largest: a zero, which becomes the largest scale of the result.
        gelu: "tanh", "none" (exact) or "quick".

    Returns:
        The gradient times the factor (rows, mlp), and the column sums of the gradient (mlp,).
    """
    (rows, width), (row_lengths, dim) = h.shape, lengths
    dh = Fp8Rows(torch.empty_like(h, dtype=E4M3), h.new_empty(rows, 1, dtype=torch.float32))
    program_rows, tile_rows, columns, warps = _GELU_TILE
    sums = h.new_empty(ceil_div(rows, program_rows), width, dtype=torch.float32)
    launch(
        jit.gelu_backward, (sums.shape[0], ceil_div(width, columns)),
        h, grad, row_lengths, factor[1], factor[0], *dh, largest, sums, rows, width, math.sqrt(dim) * _MAX_SLOPE,
        GELU=gelu, PROGRAM_ROWS=program_rows, ROWS=tile_rows, COLUMNS=columns, warps=warps,
    )  # fmt: skip
    return dh, column_sums(sums)


def _input_grad(rows: Fp8Rows, weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
    """The gradient of a layer's input: (rows, out) -> (rows, in)"""
    ones = torch.ones(weight.values.shape[0], dtype=torch.float32, device=rows.scale.device)
    return product(rows, weight.values, ones, None, dtype)


def _weight_grad(grad: Tensor, x: Tensor, scales: tuple[Tensor, Tensor]) -> Tensor:
    """(out, rows), (in, rows) in e4m3 -> (out, in); not with fast accumulation, which is for short sums."""
    if cublas.is_large(grad, x):
        return cublas.fp8_weight_grad(grad, x, scales)
    scale_a, scale_b = (scale.view(1, 1) for scale in scales)
    return torch._scaled_mm(grad, x.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=torch.float32)


def product_reference(x: Fp8Rows, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """As `product`, in float32 by plain PyTorch."""
    out = (x.values.float() * x.scale) @ weight.float().t() * scale
    return (out if bias is None else out + bias.float()).to(dtype)


class Fp8BlockWeights(NamedTuple):
    """`BlockWeights` in FP8, with its norms folded into the linear layers after them."""

    norm1: NonAffineNorm
    qkv: Fp8Linear
    out: Fp8Linear
    norm2: NonAffineNorm
    hidden: Fp8Linear
    output: Fp8Linear
    units: Tensor  # memory of `Fp8Units`

    @property
    def attn_scale(self) -> Tensor:
        """Of the output of attention."""
        return Fp8Units.of(self.units).attention

    @property
    def gelu_scale(self) -> Tensor:
        """Of the output of the GELU."""
        return Fp8Units.of(self.units).gelu


def quantize_block(layer: BlockWeights, dtype: torch.dtype) -> Fp8BlockWeights:
    """The weights of a block in FP8; `dtype` is that of the products."""
    width = layer.qkv.weight.shape[1]
    norm_scale = 1.0 / norm_factor(width)
    memory = zeros(len(Fp8Units._fields), layer.qkv.weight.device)
    units = Fp8Units.of(memory)
    units.norm.fill_(norm_scale)
    norm1, norm2 = (norm[:2] for norm in (layer.norm1, layer.norm2))
    # Of the outputs of qkv, attention averages the values.
    qkv, qkv_bias = quantize_folded(*layer.qkv, *norm1, (units.qkv_largest, units.attention), dtype, first=2 * width)
    hidden, hidden_bias = quantize_folded(*layer.hidden, *norm2, (units.hidden_largest, units.gelu), dtype)
    out, output = quantize_weight(layer.out.weight), quantize_weight(layer.output.weight)
    return Fp8BlockWeights(
        NonAffineNorm(layer.norm1.eps),
        Fp8Linear(qkv, qkv.scale * norm_scale, qkv_bias, dtype),
        Fp8Linear(out, out.scale * units.attention, layer.out.bias, dtype),
        NonAffineNorm(layer.norm2.eps),
        Fp8Linear(hidden, hidden.scale * norm_scale, hidden_bias, dtype),
        Fp8Linear(output, output.scale * units.gelu, layer.output.bias, dtype),
        memory,
    )
