"""Linear layers in float32 on a CPU, with gradients, by oneDNN's matrix products.

PyTorch gives these products to MKL, which does not use the 512-bit registers of processors that are not Intel's:
there oneDNN takes about half of the time. For inference alone, `packed.py` also keeps the weights in oneDNN's layout.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b: (rows, in), (out, in), (out,) -> (rows, out)

    Matrices must be contiguous or the transpose of such: for others oneDNN has a reference implementation alone, which
    is hundreds of times slower.
    """
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class _Linear(torch.autograd.Function):
    """`F.linear`. Gradients are computed by itself, so that they can be differentiated again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """(rows, in), (out, in), (out,) -> (rows, out)"""
        ctx.save_for_backward(x, weight)
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            _Linear.apply(grad, weight.t(), None) if needs_x else None,
            _Linear.apply(grad.t(), x.t(), None) if needs_weight else None,
            grad.sum(0) if needs_bias else None,
        )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear` of plain float32 tensors on a CPU: (..., in) -> (..., out)"""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    return _Linear.apply(rows, weight.contiguous(), bias).view(*x.shape[:-1], len(weight))
