"""Quantisation to FP8 (e4m3), each in one pass over memory: launchers of the kernels, and references in PyTorch.

`fp8.py` says how scales are chosen. What is quantised is read by products of cuBLAS, which sum over the last dimension
of both of their operands: for the gradients of weights, copies are transposed.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from vitral.kernels.dispatch import E4M3, ceil_div, launch, next_power_of_2
from vitral.kernels.fused_ops import E4M3_MAX
from vitral.kernels.gelu import reference as gelu_reference
from vitral.kernels.jit import fp8 as jit

_LEAST_SCALE, _LEAST_WEIGHT_SCALE = 1e-30, 1e-7  # of rows of zeros
_BLOCK = 4096  # elements per program
_TILE, _MIN_ROWS = 4096, 2  # likewise, of whole rows; and the fewest of those
_TRANSPOSED_TILE = (64, 128, 4)  # rows, columns and warps; tuned on an H200
_MULTIPLE = 16  # of the numbers that a product sums over
SPACING = 4  # floats between numbers that cuBLAS reads, which takes them at multiples of 16 bytes


class Fp8Rows(NamedTuple):
    """Rows that a product reads: values * scale, e4m3 (rows, dim) and float32 (rows, 1)"""

    values: Tensor
    scale: Tensor


class Fp8Weight(NamedTuple):
    """A weight, values * scale, e4m3 (out, in) and float32 (out,)"""

    values: Tensor
    scale: Tensor


def zeros(count: int, device: torch.device) -> Tensor:
    """The memory of numbers that become the largest of what kernels write, see `numbers`."""
    return torch.zeros(count * SPACING, dtype=torch.float32, device=device)


def numbers(memory: Tensor) -> tuple[Tensor, ...]:
    """The numbers in that memory, each where cuBLAS can read it."""
    return memory[::SPACING].unbind()


def unit_scales(x: Tensor) -> Tensor:
    """Of rows whose scale is part of the product's: (rows, dim) -> (rows, 1)"""
    return torch.ones(x.shape[0], 1, dtype=torch.float32, device=x.device)


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


def quantize_rows(x: Tensor, factor: Tensor, largest: Tensor) -> tuple[Fp8Rows, Tensor]:
    """As the reference, in one pass, for a contiguous input; and the Euclidean length of each row, (rows,).

    `largest`, a zero, becomes the largest scale.
    """
    rows, width = x.shape
    out = Fp8Rows(torch.empty_like(x, dtype=E4M3), x.new_empty(rows, 1, dtype=torch.float32))
    lengths = torch.empty_like(out.scale[:, 0])
    columns = next_power_of_2(width)
    tile = max(_TILE // columns, _MIN_ROWS)
    launch(
        jit.quantize_rows, (ceil_div(rows, tile),), x, factor, *out, lengths, largest, rows, width,
        ROWS=tile, COLUMNS=columns,
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


def quantize_transposed_reference(x: Tensor, scale: Tensor, unit: Tensor, gelu: str = "") -> Tensor:
    """x or GELU(x), times scale / (largest scale * unit) in e4m3, with a scale per row (rows, 1).

    (rows, dim) -> (dim, rows)
    """
    value = gelu_reference(x.float(), gelu) if gelu else x.float()
    return quantize_reference(value * (scale / scale.amax()), unit).float().t().to(E4M3)


def quantize_transposed(x: Tensor, scale: Tensor, largest: Tensor, unit: Tensor, gelu: str = "") -> Tensor:
    """As the reference, in one pass, and with zeros as in `transpose`; `largest` is the largest scale."""
    out = _empty_transposed(x)
    _launch_transpose(x, (scale, largest, unit), out, gelu)
    return out


def _empty_transposed(x: Tensor) -> Tensor:
    rows, width = x.shape
    return x.new_empty(width, ceil_div(rows, _MULTIPLE) * _MULTIPLE, dtype=E4M3)


def _launch_transpose(
    x: Tensor, scales: tuple[Tensor | None, Tensor | None, Tensor | None], out: Tensor, gelu: str = ""
) -> None:
    (rows, width), (tile_rows, columns, warps) = x.shape, _TRANSPOSED_TILE
    launch(
        jit.transpose, (ceil_div(width, columns), ceil_div(rows, tile_rows)),
        x, *scales, out, rows, width, out.shape[1],
        SCALED=scales[0] is not None, GELU=gelu, ROWS=tile_rows, COLUMNS=columns, warps=warps,
    )  # fmt: skip
