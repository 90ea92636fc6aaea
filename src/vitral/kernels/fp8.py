"""Linear layers in FP8 (e4m3): quantised weights and activations, scales, and the product of the two.

An e4m3 number has 4 bits of exponent and 3 of mantissa. Its relative error is the same over 15 powers of two, so that
a scale which is ten times too large costs almost nothing. Hence activations are not searched for their maximum, which
would take a separate pass or another shape of the kernel before; their scale comes from a bound that holds for any
input, and depends on the weights alone:

- |z| <= sqrt(dim) for the output z of a LayerNorm whose weight and bias are folded into the next layer;
- |w z + b| <= |w| sqrt(dim) + |b|, by Cauchy and Schwarz, for the outputs of that layer;
- attention averages values, and |GELU(h)| <= |h|.

Weights have a scale per output channel. Gradients differ between tokens by orders of magnitude, and have a scale per
row, from its maximum. All scales stay on the device.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from vitral.kernels.dispatch import E4M3, ceil_div, launch, next_power_of_2
from vitral.kernels.fused_ops import E4M3_MAX, BlockWeights, Fp8Target, NonAffineNorm, norm_factor
from vitral.kernels.gelu import fused_linear_gelu, is_faster
from vitral.kernels.gelu import reference as gelu_reference
from vitral.kernels.jit import fp8 as jit

_LEAST_SCALE = 1e-30  # of rows of zeros
_BLOCK = 4096  # elements per program
_TILE = 4096  # likewise, of whole rows
_SIDE = 64  # of a tile that is transposed


class Fp8Rows(NamedTuple):
    """Rows that a product reads: values * scale, e4m3 (rows, dim) and float32 (rows, 1)"""

    values: Tensor
    scale: Tensor


class Fp8Weight(NamedTuple):
    """A weight, values * scale, e4m3 (out, in) and float32 (out,)"""

    values: Tensor
    scale: Tensor


class Fp8Linear(NamedTuple):
    """A linear layer in FP8."""

    weight: Fp8Weight
    scale: Tensor  # of the product: that of the weight times that of the activations it reads, float32 (out,)
    bias: Tensor | None  # (out,)
    dtype: torch.dtype  # of its output


def quantize_reference(x: Tensor, scale: Tensor, gelu: str | None = None) -> Tensor:
    """x / scale, or GELU(x) / scale, in e4m3: any shape"""
    values = (x if gelu is None else gelu_reference(x, gelu)).float() / scale
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


def quantize(x: Tensor, scale: Tensor, gelu: str | None = None) -> Tensor:
    """As the reference, in one pass, for a contiguous input."""
    out = torch.empty_like(x, dtype=E4M3)
    launch(jit.quantize, (ceil_div(x.numel(), _BLOCK),), x, out, scale, x.numel(), GELU=gelu or "", BLOCK=_BLOCK)
    return out


def quantize_rows_reference(x: Tensor, factor: Tensor) -> Fp8Rows:
    """x * factor (rows, dim), with a factor per column (dim,), and a scale per row."""
    wide = x.float() * factor
    scale = (wide.abs().amax(1, keepdim=True) / E4M3_MAX).clamp(min=_LEAST_SCALE)
    return Fp8Rows((wide / scale).to(E4M3), scale)


def quantize_rows(x: Tensor, factor: Tensor) -> Fp8Rows:
    """As the reference, in one pass, for a contiguous input."""
    rows, width = x.shape
    out = Fp8Rows(torch.empty_like(x, dtype=E4M3), x.new_empty(rows, 1, dtype=torch.float32))
    columns = next_power_of_2(width)
    tile = max(_TILE // columns, 1)
    launch(
        jit.quantize_rows, (ceil_div(rows, tile),), x, factor, *out, rows, width, ROWS=tile, COLUMNS=columns
    )  # fmt: skip
    return out


def quantize_weight_reference(weight: Tensor) -> Fp8Weight:
    """A weight (out, in) with a scale per row."""
    values, scale = quantize_rows_reference(weight, torch.ones_like(weight[0]))
    return Fp8Weight(values, scale.flatten())


def quantize_weight(weight: Tensor) -> Fp8Weight:
    """As the reference, in one pass."""
    quantized = _empty_weight(weight)
    _launch_weight(weight, (None, None, None), quantized, (None, None))
    return quantized


def quantize_folded(
    weight: Tensor, bias: Tensor, norm_weight: Tensor, norm_bias: Tensor, dtype: torch.dtype
) -> tuple[Fp8Weight, Tensor, Tensor]:
    """A linear layer with the LayerNorm before it folded in, see `fused_ops.fold_norm`, and scales of its outputs.

    Returns:
        The weight, the bias (out,) in `dtype`, and a scale of each output that no input exceeds, (out,).
    """
    quantized, folded = _empty_weight(weight), torch.empty_like(bias, dtype=dtype)
    out_scales = torch.empty_like(quantized.scale)
    _launch_weight(weight, (bias, norm_weight, norm_bias), quantized, (folded, out_scales))
    return quantized, folded, out_scales


def _empty_weight(weight: Tensor) -> Fp8Weight:
    return Fp8Weight(
        torch.empty_like(weight, dtype=E4M3), torch.empty_like(weight[:, 0], dtype=torch.float32).contiguous()
    )


def _launch_weight(
    weight: Tensor,
    folds: tuple[Tensor | None, Tensor | None, Tensor | None],
    quantized: Fp8Weight,
    outputs: tuple[Tensor | None, Tensor | None],
) -> None:
    rows, width = weight.shape
    columns = next_power_of_2(width)
    tile = max(_TILE // columns, 1)
    launch(
        jit.quantize_weight, (ceil_div(rows, tile),),
        weight, *folds, *quantized, *outputs, rows, width, math.sqrt(width),
        FOLDS=folds[0] is not None, ROWS=tile, COLUMNS=columns,
    )  # fmt: skip


def transpose(values: Tensor) -> Tensor:
    """`values.t().contiguous()` in e4m3, which PyTorch copies byte by byte: (out, in) -> (in, out)"""
    rows, width = values.shape
    out = values.new_empty(width, rows)
    programs = (ceil_div(rows, _SIDE), ceil_div(width, _SIDE))
    launch(jit.transpose, programs, values.view(torch.uint8), out.view(torch.uint8), rows, width, TILE=_SIDE)
    return out


def unit_scales(x: Tensor) -> Tensor:
    """Of rows whose scale is part of the product's: (rows, dim) -> (rows, 1)"""
    return torch.ones(x.shape[0], 1, dtype=torch.float32, device=x.device)


def product(x: Fp8Rows, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x weight' * scale + bias: e4m3 (out, in), float32 (out,), (out,) -> (rows, out) in `dtype`"""
    return torch._scaled_mm(
        x.values, weight.t(), scale_a=x.scale, scale_b=scale[None], bias=bias, out_dtype=dtype, use_fast_accum=True
    )


def linear(x: Fp8Rows, layer: Fp8Linear) -> Tensor:
    """(rows, in) -> (rows, out)"""
    return product(x, layer.weight.values, layer.scale, layer.bias, layer.dtype)


def linear_gelu(
    x: Fp8Rows, layer: Fp8Linear, scale: Tensor, gelu: str, *, saves: bool
) -> tuple[Fp8Rows, Tensor | None]:
    """GELU(h) / scale and, if it is saved, h = linear(x); by one kernel if that is faster.

    (rows, in) -> (rows, out), (rows, out)
    """
    if is_faster(x.values, layer.weight.values):
        assert layer.bias is not None
        h = x.values.new_empty(len(x.values), len(layer.scale), dtype=layer.dtype) if saves else None
        out = fused_linear_gelu(x.values, layer.weight.values, layer.bias, gelu, (layer.scale, scale), h)
    else:
        h = linear(x, layer)
        out = quantize(h, scale, gelu)
    return Fp8Rows(out, x.scale), h


def input_grad(grad: Tensor, transposed: Tensor, scale: Tensor, target: Fp8Target | None = None) -> Tensor:
    """The gradient of a layer's input: of its output (rows, out) -> (rows, in).

    The scale of an output channel is a factor of the gradient here, so that the weight's values are those of the
    forward pass.

    Args:
        grad: of the output, (rows, out).
        transposed: values of the weight, e4m3 (in, out), contiguous.
        scale: of the weight, float32 (out,).
        target: the gradient times the scale, if a kernel has already quantised it.
    """
    rows = quantize_rows(grad, scale) if target is None else Fp8Rows(target.values, target.scale)
    ones = torch.ones(transposed.shape[0], dtype=torch.float32, device=grad.device)
    return product(rows, transposed, ones, None, grad.dtype)


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
    attn_scale: Tensor  # of attention's output, a number
    gelu_scale: Tensor


def quantize_block(layer: BlockWeights, dtype: torch.dtype) -> Fp8BlockWeights:
    """The weights of a block in FP8; `dtype` is that of the products."""
    width = layer.qkv.weight.shape[1]
    norm_scale = 1.0 / norm_factor(width)
    qkv, qkv_bias, qkv_scales = quantize_folded(*layer.qkv, layer.norm1.weight, layer.norm1.bias, dtype)
    hidden, hidden_bias, hidden_scales = quantize_folded(*layer.hidden, layer.norm2.weight, layer.norm2.bias, dtype)
    attn_scale, gelu_scale = qkv_scales[2 * width :].amax(), hidden_scales.amax()
    out, output = quantize_weight(layer.out.weight), quantize_weight(layer.output.weight)
    return Fp8BlockWeights(
        NonAffineNorm(layer.norm1.eps),
        Fp8Linear(qkv, qkv.scale * norm_scale, qkv_bias, dtype),
        Fp8Linear(out, out.scale * attn_scale, layer.out.bias, dtype),
        NonAffineNorm(layer.norm2.eps),
        Fp8Linear(hidden, hidden.scale * norm_scale, hidden_bias, dtype),
        Fp8Linear(output, output.scale * gelu_scale, layer.output.bias, dtype),
        attn_scale,
        gelu_scale,
    )
