"""Operations of a pre-norm block that share a pass over memory: launchers of the kernels, and references in PyTorch.

- GELU backward, of "tanh", "none" (the exact one) or "quick": the gradient, the output once more if it was not
  saved, and the gradient of the bias before it.
- Residual sum and LayerNorm: x' = x + y + bias;  z = LN(x'), which stands between two branches of a block. With
  stochastic depth, y + bias has a factor per image.
- A LayerNorm's weight and bias folded into the linear layer that reads it:

      W (z * scale + shift) + b  =  (W * scale) z + (b + W shift)

  A sum over the rows of a weight costs next to nothing beside one over a batch: the folded norm saves z alone and
  sums nothing for its own weights in the backward pass; their gradients follow from that of the folded weight.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.kernels.dispatch import E4M3, ceil_div, launch, next_power_of_2
from vitral.kernels.gelu import reference as gelu_reference
from vitral.kernels.jit import fused_ops as jit

E4M3_MAX = 448.0
NormFormats = Literal["half", "fp8", "both"]  # of the output of `add_norm`
# Rows per program, and at a time; tuned on an H200.
_GELU_PROGRAM_ROWS, _GELU_ROWS = 64, 4
_NORM_PROGRAM_ROWS, _NORM_ROWS = 48, 2
_FOLD_PROGRAM_ROWS, _FOLD_ROWS = 32, 4
_SUM_TILE, _SUM_BYTES = 8192, 32  # elements at a time, and the least bytes of a row


class NormWeights(NamedTuple):
    """A LayerNorm, (dim,) and (dim,)"""

    weight: Tensor
    bias: Tensor
    eps: float


class NonAffineNorm(NamedTuple):
    """A LayerNorm without weight and bias."""

    eps: float
    weight: None = None
    bias: None = None


class LinearWeights(NamedTuple):
    """A linear layer, (out, in) and (out,)"""

    weight: Tensor
    bias: Tensor


class BlockWeights(NamedTuple):
    """A pre-norm block."""

    norm1: NormWeights
    qkv: LinearWeights
    out: LinearWeights
    norm2: NormWeights
    hidden: LinearWeights
    output: LinearWeights


class BranchDrop(NamedTuple):
    """Stochastic depth: the branch of an image is multiplied by 1 / keep where its draw is below `keep`, else by 0."""

    draws: Tensor  # uniform in [0, 1), batch elements in any shape
    keep: float


class AddNormOutput(NamedTuple):
    """x + y + bias and its LayerNorm, (rows, dim) each."""

    total: Tensor
    normed: Tensor  # empty if only the one in FP8 is requested
    moments: Tensor  # mean and 1 / std of the rows, (2, rows), for the backward pass
    quantized: Tensor  # times `norm_factor`, in FP8, or empty


class AddNormGradients(NamedTuple):
    """Gradients of `add_norm`."""

    dx: Tensor  # (rows, dim)
    dy: Tensor  # (rows, dim); without stochastic depth it is `dx` itself
    sums: Tensor  # gradients of `bias` and, if the norm has them, of its weight and bias, (1 or 3, dim)


class Fp8Target(NamedTuple):
    """Where a kernel also writes a gradient (rows, dim) in FP8: values * scale = gradient * factor."""

    factor: Tensor  # (dim,)
    values: Tensor  # e4m3 (rows, dim)
    scale: Tensor  # (rows, 1)
    largest: Tensor  # of `scale`; 0 before

    @staticmethod
    def like(grad: Tensor, factor: Tensor, largest: Tensor) -> Fp8Target:
        """For a gradient of this shape; `largest` is a zero on the device."""
        scale = grad.new_empty(grad.shape[0], 1, dtype=torch.float32)
        return Fp8Target(factor, torch.empty_like(grad, dtype=E4M3), scale, largest)


_NO_TARGET = (None, None, None, None)


class FoldGradients(NamedTuple):
    """Gradients of the linear layer's weight (out, in), and of the norm's weight and bias (2, in)"""

    weight: Tensor
    norm: Tensor


def column_sums(x: Tensor, factor: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Sums over the rows of a contiguous x, each times its factor: (rows, ...), (rows,) -> float32 (...).

    For the few thousand rows and columns that the programs of a kernel leave, `x.sum(0)` takes three times as long.
    """
    rows, width = x.shape[0], x[0].numel()
    out = x.new_empty(x.shape[1:], dtype=torch.float32) if out is None else out
    tile = min(next_power_of_2(rows), _SUM_TILE * x.element_size() // _SUM_BYTES)
    columns = _SUM_TILE // tile
    launch(
        jit.column_sums, (ceil_div(width, columns),), x, factor, out, rows, width,
        HAS_FACTOR=factor is not None, ROWS=tile, COLUMNS=columns,
    )  # fmt: skip
    return out


def gelu_backward_reference(h: Tensor, grad: Tensor, gelu: str) -> tuple[Tensor, Tensor, Tensor]:
    """dh (rows, dim), GELU(h) (rows, dim) and the column sums of dh (dim,), from h and the gradient (rows, dim)"""
    with torch.enable_grad():
        leaf = h.detach().requires_grad_()
        out = gelu_reference(leaf, gelu)
    (dh,) = torch.autograd.grad(out, leaf, grad)
    return dh, out.detach(), dh.sum(0, dtype=torch.float32)


def gelu_backward(h: Tensor, grad: Tensor, gelu: str, saved: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """As the reference; a `saved` GELU(h) is not computed again."""
    rows, width = h.shape
    dh = torch.empty_like(h)
    out = torch.empty_like(h) if saved is None else saved
    sums = h.new_empty(ceil_div(rows, _GELU_PROGRAM_ROWS), width, dtype=torch.float32)
    columns = 512 if width % 512 == 0 else 256
    launch(
        jit.gelu_backward, (sums.shape[0], ceil_div(width, columns)),
        h, grad, dh, out, sums, rows, width,
        GELU=gelu, HAS_OUT=saved is None, PROGRAM_ROWS=_GELU_PROGRAM_ROWS, ROWS=_GELU_ROWS, COLUMNS=columns,
        warps=columns // 128,
    )  # fmt: skip
    return dh, out, column_sums(sums)


def add_norm_reference(
    x: Tensor, y: Tensor, bias: Tensor, norm: NormWeights | NonAffineNorm, drop: BranchDrop | None = None
) -> tuple[Tensor, Tensor]:
    """The sum and its LayerNorm: (rows, dim), (rows, dim), (dim,) -> (rows, dim), (rows, dim)"""
    branch = y + bias
    if drop is not None:
        factors = (drop.draws.flatten() < drop.keep) / drop.keep
        branch = branch * factors.repeat_interleave(len(x) // len(factors))[:, None]
    total = x + branch
    return total, F.layer_norm(total, total.shape[-1:], norm.weight, norm.bias, norm.eps)


def add_norm(
    x: Tensor,
    y: Tensor | None,
    bias: Tensor | None,
    norm: NormWeights | NonAffineNorm,
    drop: BranchDrop | None = None,
    formats: NormFormats = "half",
) -> AddNormOutput:
    """As the reference, in the dtype of x; without `y` and `bias` the sum is x itself."""
    rows, width = x.shape
    total = x if y is None else torch.empty_like(x)
    has_normed, has_quantized = formats != "fp8", formats != "half"
    normed = torch.empty_like(x) if has_normed else x.new_empty(0)
    quantized = x.new_empty(x.shape if has_quantized else 0, dtype=E4M3)
    moments = x.new_empty(2, rows, dtype=torch.float32)
    columns = next_power_of_2(width)
    tile = max(4096 // columns, 1)
    draws, tokens, keep = _drop_arguments(drop, rows)
    launch(
        jit.norm_forward, (ceil_div(rows, tile),),
        x, y, bias, draws, norm.weight, norm.bias, total, normed, quantized, moments, rows, width, norm.eps, tokens,
        keep, norm_factor(width),
        HAS_Y=y is not None, HAS_DRAWS=drop is not None, AFFINE=norm.weight is not None,
        HAS_NORMED=has_normed, HAS_QUANTIZED=has_quantized, ROWS=tile, COLUMNS=columns,
    )  # fmt: skip
    return AddNormOutput(total, normed, moments, quantized)


def add_norm_backward(
    saved: Tensor,
    moments: Tensor,
    weight: Tensor | None,
    dtotal: Tensor | None,
    dnormed: Tensor,
    drop: BranchDrop | None = None,
    target: Fp8Target | None = None,
) -> AddNormGradients:
    """Gradients of `add_norm`.

    Args:
        saved: `AddNormOutput.normed` of a norm without weight, else `AddNormOutput.total`.
        moments: `AddNormOutput.moments`.
        weight: of the norm, (dim,).
        dtotal: gradient of the sum, (rows, dim), where anything else reads it.
        dnormed: gradient of the LayerNorm's output, (rows, dim).
        drop: as in the forward pass.
        target: where `dy` is also written.
    """
    rows, width = saved.shape
    dx = torch.empty_like(saved)
    dy = dx if drop is None else torch.empty_like(saved)
    programs = ceil_div(rows, _NORM_PROGRAM_ROWS)
    sums = saved.new_empty(programs, 1 if weight is None else 3, width, dtype=torch.float32)
    columns = next_power_of_2(width)
    draws, tokens, keep = _drop_arguments(drop, rows)
    launch(
        jit.norm_backward, (programs,),
        saved, moments, weight, dtotal, dnormed, draws, dx, dy, sums, *(target or _NO_TARGET), rows, width, tokens,
        keep,
        HAS_TOTAL=dtotal is not None, HAS_DRAWS=drop is not None, AFFINE=weight is not None,
        QUANTIZES=target is not None,
        PROGRAM_ROWS=_NORM_PROGRAM_ROWS, ROWS=_NORM_ROWS, COLUMNS=columns, warps=max(columns // 512, 1),
    )  # fmt: skip
    return AddNormGradients(dx, dy, column_sums(sums))


def norm_factor(width: int) -> float:
    """What the output of a LayerNorm without weights is multiplied by in e4m3: a power of two, so that it is exact."""
    return 2.0 ** math.floor(math.log2(E4M3_MAX / math.sqrt(width)))


def _drop_arguments(drop: BranchDrop | None, rows: int) -> tuple[Tensor | None, int, float]:
    """The draws, the rows of an image and the share of branches that is kept, as the kernels take them."""
    return (None, 1, 1.0) if drop is None else (drop.draws, rows // drop.draws.numel(), drop.keep)


def fold_norm_reference(linear: LinearWeights, norm: NormWeights) -> LinearWeights:
    """The linear layer that reads the norm's output without its weight and bias."""
    return LinearWeights(linear.weight * norm.weight, linear.bias + linear.weight @ norm.bias)


def fold_norm(linear: LinearWeights, norm: NormWeights, dtype: torch.dtype) -> LinearWeights:
    """As the reference, in `dtype`."""
    rows, width = linear.weight.shape
    folded = LinearWeights(torch.empty_like(linear.weight, dtype=dtype), torch.empty_like(linear.bias, dtype=dtype))
    launch(
        jit.fold_norm, (ceil_div(rows, _FOLD_ROWS),), *linear, norm.weight, norm.bias, *folded, rows, width,
        ROWS=_FOLD_ROWS, COLUMNS=next_power_of_2(width),
    )  # fmt: skip
    return folded


def unfold_norm_reference(
    dfolded: Tensor, dbias: Tensor, weight: Tensor, scale: Tensor, shift: Tensor
) -> FoldGradients:
    """From the gradients of the folded weight (out, in) and bias (out,), those of the weights before folding."""
    dnorm = torch.stack([(dfolded * weight).sum(0), dbias @ weight])
    return FoldGradients(dfolded * scale + dbias[:, None] * shift, dnorm)


def unfold_norm(
    dfolded: Tensor, dbias: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, divisor: Tensor | None = None
) -> FoldGradients:
    """As the reference, in float32, of `dfolded`, which is overwritten, divided by a number per row (out,)."""
    rows, width = dfolded.shape
    programs = ceil_div(rows, _FOLD_PROGRAM_ROWS)
    sums = dfolded.new_empty(programs, 2, width)
    launch(
        jit.unfold_norm, (programs,), dfolded, divisor, dbias, weight, scale, shift, sums, rows, width,
        HAS_DIVISOR=divisor is not None, PROGRAM_ROWS=_FOLD_PROGRAM_ROWS, ROWS=_FOLD_ROWS,
        COLUMNS=next_power_of_2(width),
    )  # fmt: skip
    return FoldGradients(dfolded, column_sums(sums))
