"""GELU backwards: its gradient, its output once more where nobody kept that, and a sum; and what it must be.

The output of a block's GELU is its largest tensor. Where it was not kept it is computed again beside the gradient,
while the input is on chip anyway; the gradient of the bias before it is added up on the way.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from vitral.kernels.dispatch import launch
from vitral.kernels.jit import gelu as jit

_EACH = 64  # rows of a program, one at a time


def reference(h: Tensor, grad: Tensor, gelu: str) -> tuple[Tensor, Tensor, Tensor]:
    """What the kernel computes, in plain PyTorch: (r, f), (r, f) -> dh (r, f), GELU(h) (r, f), the sum of dh (f,)"""
    with torch.enable_grad():
        leaf = h.detach().requires_grad_()
        out = F.gelu(leaf, approximate=gelu)
    (dh,) = torch.autograd.grad(out, leaf, grad)
    return dh, out.detach(), dh.sum(0, dtype=torch.float32)


def backward(h: Tensor, grad: Tensor, gelu: str, kept: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference`; GELU(h), where somebody `kept` it, is not computed again."""
    rows, width = h.shape
    dh = torch.empty_like(h)
    out = torch.empty_like(h) if kept is None else kept
    sums = h.new_empty(triton.cdiv(rows, _EACH), width, dtype=torch.float32)
    columns = 512 if width % 512 == 0 else 256
    launch(
        jit.gelu_backward, (sums.shape[0], triton.cdiv(width, columns)), h, grad, dh, out, sums, rows, width,
        TANH=gelu == "tanh", HAS_OUT=kept is None, EACH=_EACH, COLUMNS=columns,
        warps=columns // 256,
    )  # fmt: skip
    return dh, out, sums.sum(0)
