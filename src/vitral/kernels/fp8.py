"""Linear layers in FP8 (e4m3): quantised weights and activations, scales, and the product of the two.

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
from vitral.kernels.dispatch import E4M3, ceil_div, launch, next_power_of_2
from vitral.kernels.fused_ops import E4M3_MAX, BlockWeights, Fp8Target, NonAffineNorm, column_sums, norm_factor
from vitral.kernels.gelu import fused_linear_gelu, is_faster
from vitral.kernels.gelu import reference as gelu_reference
from vitral.kernels.jit import fp8 as jit

_LEAST_SCALE, _LEAST_WEIGHT_SCALE = 1e-30, 1e-7  # of rows of zeros
_BLOCK = 4096  # elements per program
_TILE, _MIN_ROWS = 4096, 2  # likewise, of whole rows; and the fewest of those
_PROGRAM_TILES = 4  # of gradients per program
_SPACING = 4  # floats between numbers that cuBLAS reads, which takes them at multiples of 16 bytes
# Rows, columns and warps of tiles that are transposed; tuned on an H200.
_TRANSPOSED_TILE, _GELU_TILE = (64, 128, 4), (128, 32, 4)
_MULTIPLE = 16  # of the numbers that a product sums over
# The derivative of a GELU is at most 1.13, and a gradient in e4m3 at most 1/16 larger than before.
_MAX_SLOPE = 1.25


class Fp8Rows(NamedTuple):
    """Rows that a product reads: values * scale, e4m3 (rows, dim) and float32 (rows, 1)"""

    values: Tensor
    scale: Tensor


class Fp8Weight(NamedTuple):
    """A weight, values * scale, e4m3 (out, in) and float32 (out,)"""

    values: Tensor
    scale: Tensor


class Fp8Units(NamedTuple):
    """Scales of what norms, attention and the GELU write, and the largest one of the hidden layer's weight."""

    norm: Tensor
    attention: Tensor
    gelu: Tensor
    hidden_largest: Tensor


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


def zeros(count: int, device: torch.device) -> Tensor:
    """The memory of numbers that become the largest of what kernels write, see `numbers`."""
    return torch.zeros(count * _SPACING, dtype=torch.float32, device=device)


def numbers(memory: Tensor) -> tuple[Tensor, ...]:
    """The numbers in that memory, each where cuBLAS can read it."""
    return memory[::_SPACING].unbind()


def quantize_rows(x: Tensor, factor: Tensor, largest: Tensor) -> tuple[Fp8Rows, Tensor]:
    """As the reference, in one pass, for a contiguous input; and the Euclidean length of each row, (rows,).

    `largest`, a zero, becomes the largest scale.
    """
    rows, width = x.shape
    out = Fp8Rows(torch.empty_like(x, dtype=E4M3), x.new_empty(rows, 1, dtype=torch.float32))
    lengths = torch.empty_like(out.scale[:, 0])
    columns = next_power_of_2(width)
    tile = max(_TILE // columns, _MIN_ROWS)
    program_rows = _PROGRAM_TILES * tile
    launch(
        jit.quantize_rows, (ceil_div(rows, program_rows),), x, factor, *out, lengths, largest, rows, width,
        PROGRAM_ROWS=program_rows, ROWS=tile, COLUMNS=columns,
    )  # fmt: skip
    return out, lengths


def quantize_weight_reference(weight: Tensor) -> Fp8Weight:
    """A weight (out, in) with a scale per row."""
    scale = (weight.float().abs().amax(1) / E4M3_MAX).clamp(min=_LEAST_WEIGHT_SCALE)
    return Fp8Weight((weight.float() / scale[:, None]).to(E4M3), scale)


def quantize_weight(weight: Tensor) -> Fp8Weight:
    """As the reference, in one pass."""
    quantized = _empty_weight(weight)
    _launch_weight(weight, (None, None, None), quantized, (None, None, None))
    return quantized


def quantize_folded(
    weight: Tensor,
    bias: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    largest: tuple[Tensor, Tensor],
    dtype: torch.dtype,
    first: int = 0,
) -> tuple[Fp8Weight, Tensor]:
    """A linear layer with the LayerNorm before it folded in, see `fused_ops.fold_norm`.

    Args:
        weight: (out, in).
        bias: (out,).
        norm_weight: (in,).
        norm_bias: (in,).
        largest: zeros, which become the largest scale of the weight, and a scale that no output from `first` on
            exceeds, whatever the input is.
        dtype: of the bias that is returned.
        first: see `largest`.

    Returns:
        The weight, and the bias (out,).
    """
    quantized, folded = _empty_weight(weight), torch.empty_like(bias, dtype=dtype)
    _launch_weight(weight, (bias, norm_weight, norm_bias), quantized, (folded, *largest), first)
    return quantized, folded


def _empty_weight(weight: Tensor) -> Fp8Weight:
    return Fp8Weight(
        torch.empty_like(weight, dtype=E4M3), torch.empty_like(weight[:, 0], dtype=torch.float32).contiguous()
    )


def _launch_weight(
    weight: Tensor,
    folds: tuple[Tensor | None, Tensor | None, Tensor | None],
    quantized: Fp8Weight,
    outputs: tuple[Tensor | None, Tensor | None, Tensor | None],
    first: int = 0,
) -> None:
    rows, width = weight.shape
    columns = next_power_of_2(width)
    tile = max(_TILE // columns, _MIN_ROWS)
    launch(
        jit.quantize_weight, (ceil_div(rows, tile),),
        weight, *folds, *quantized, *outputs, rows, width, math.sqrt(width), first,
        FOLDS=folds[0] is not None, ROWS=tile, COLUMNS=columns,
    )  # fmt: skip


def transpose(values: Tensor) -> Tensor:
    """In e4m3, which PyTorch copies byte by byte: (rows, dim) -> (dim, rows), and zeros up to a multiple of 16 rows"""
    out = _empty_transposed(values)
    _launch_transpose(values.view(torch.uint8), (None, None, None), out.view(torch.uint8))
    return out


def quantize_transposed_reference(x: Tensor, scale: Tensor, unit: Tensor) -> Tensor:
    """x * scale / (largest scale * unit) in e4m3, with a scale per row (rows, 1): (rows, dim) -> (dim, rows)"""
    return quantize_reference(x.float() * (scale / scale.amax()), unit).float().t().to(E4M3)


def quantize_transposed(x: Tensor, scale: Tensor, largest: Tensor, unit: Tensor) -> Tensor:
    """As the reference, in one pass, and with zeros as in `transpose`; `largest` is the largest scale."""
    out = _empty_transposed(x)
    _launch_transpose(x, (scale, largest, unit), out)
    return out


def _empty_transposed(x: Tensor) -> Tensor:
    rows, width = x.shape
    return x.new_empty(width, ceil_div(rows, _MULTIPLE) * _MULTIPLE, dtype=E4M3)


def _launch_transpose(x: Tensor, scales: tuple[Tensor | None, Tensor | None, Tensor | None], out: Tensor) -> None:
    (rows, width), (tile_rows, columns, warps) = x.shape, _TRANSPOSED_TILE
    launch(
        jit.transpose, (ceil_div(width, columns), ceil_div(rows, tile_rows)),
        x, *scales, out, rows, width, out.shape[1],
        SCALED=scales[0] is not None, ROWS=tile_rows, COLUMNS=columns, warps=warps,
    )  # fmt: skip


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
    dh, activated, dbias = gelu_backward(
        h, _input_grad(rows, output, h.dtype), (lengths, grad.shape[1]), (hidden.scale, units.hidden_largest),
        (rows.scale, largest, units.gelu), dh_largest, gelu,
    )  # fmt: skip
    doutput = _weight_grad(transpose(rows.values), activated, (largest, units.gelu)).div_(output.scale[:, None])
    del activated
    inputs = quantize_transposed(x, dh.scale, dh_largest, units.norm)
    dhidden = _weight_grad(transpose(dh.values), inputs, (dh_largest, units.norm))
    return MlpGradients(_input_grad(dh, hidden, x.dtype), dhidden, dbias, doutput)


def gelu_backward(
    h: Tensor,
    grad: Tensor,
    lengths: tuple[Tensor, int],
    factor: tuple[Tensor, Tensor],
    out_scales: tuple[Tensor, Tensor, Tensor],
    largest: Tensor,
    gelu: str,
) -> tuple[Fp8Rows, Tensor, Tensor]:
    """The gradient of the GELU's input, from that of its output, in one pass.

    Args:
        h: what the GELU reads, (rows, mlp).
        grad: of its output, (rows, mlp): the product of gradients (rows, dim) and a weight's values in e4m3 (dim, mlp).
        lengths: of the rows of those gradients, float32 (rows,), and `dim`: they bound the product.
        factor: of each column of the result, float32 (mlp,), and the largest of them.
        out_scales: `scale`, `largest` and `unit` of `quantize_transposed` for the GELU's output.
        largest: a zero, which becomes the largest scale of the result.
        gelu: "tanh", "none" (exact) or "quick".

    Returns:
        The gradient times the factor (rows, mlp), the GELU's output transposed (mlp, rows), and the column sums of the
        gradient (mlp,).
    """
    (rows, width), (row_lengths, dim) = h.shape, lengths
    dh = Fp8Rows(torch.empty_like(h, dtype=E4M3), torch.empty_like(out_scales[0]))
    activated = _empty_transposed(h)
    tile_rows, columns, warps = _GELU_TILE
    sums = h.new_empty(ceil_div(rows, tile_rows), width, dtype=torch.float32)
    launch(
        jit.gelu_backward, (ceil_div(width, columns), sums.shape[0]),
        h, h, grad, row_lengths, factor[1], factor[0], *out_scales, dh.values, dh.scale, largest, activated, sums,
        rows, width, activated.shape[1], math.sqrt(dim) * _MAX_SLOPE,
        GELU=gelu, ROWS=tile_rows, COLUMNS=columns, warps=warps,
    )  # fmt: skip
    return dh, activated, column_sums(sums)


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
        return numbers(self.units)[1]

    @property
    def gelu_scale(self) -> Tensor:
        """Of the output of the GELU."""
        return numbers(self.units)[2]


def quantize_block(layer: BlockWeights, dtype: torch.dtype) -> Fp8BlockWeights:
    """The weights of a block in FP8; `dtype` is that of the products."""
    width = layer.qkv.weight.shape[1]
    norm_scale = 1.0 / norm_factor(width)
    units = zeros(len(Fp8Units._fields) + 1, layer.qkv.weight.device)
    norm_unit, attn_scale, gelu_scale, hidden_largest, qkv_largest = numbers(units)
    norm_unit.fill_(norm_scale)
    norm1, norm2 = (norm[:2] for norm in (layer.norm1, layer.norm2))
    # Of the outputs of qkv, attention averages the values.
    qkv, qkv_bias = quantize_folded(*layer.qkv, *norm1, (qkv_largest, attn_scale), dtype, first=2 * width)
    hidden, hidden_bias = quantize_folded(*layer.hidden, *norm2, (hidden_largest, gelu_scale), dtype)
    out, output = quantize_weight(layer.out.weight), quantize_weight(layer.output.weight)
    return Fp8BlockWeights(
        NonAffineNorm(layer.norm1.eps),
        Fp8Linear(qkv, qkv.scale * norm_scale, qkv_bias, dtype),
        Fp8Linear(out, out.scale * attn_scale, layer.out.bias, dtype),
        NonAffineNorm(layer.norm2.eps),
        Fp8Linear(hidden, hidden.scale * norm_scale, hidden_bias, dtype),
        Fp8Linear(output, output.scale * gelu_scale, layer.output.bias, dtype),
        units,
    )
