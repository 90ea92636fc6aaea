"""GELU backwards: its gradient, its output once more so that nobody has to keep that, and a sum; and what it must be.

The output of a block's GELU is its largest tensor. Here it is computed again beside the gradient, while the input is
on chip anyway, and the gradient of the bias before it is added up on the way.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from vitral.kernels.jit import gelu as jit
from vitral.kernels.launch import launch

_EACH, _TILE = 128, 2048  # rows of a program, and numbers that it holds at a time


def reference(h: Tensor, grad: Tensor, gelu: str) -> tuple[Tensor, Tensor, Tensor]:
    """What the kernel computes, in plain PyTorch: (r, f), (r, f) -> dh (r, f), GELU(h) (r, f), the sum of dh (f,)"""
    with torch.enable_grad():
        leaf = h.detach().requires_grad_()
        out = F.gelu(leaf, approximate=gelu)
    (dh,) = torch.autograd.grad(out, leaf, grad)
    return dh, out.detach(), dh.sum(0, dtype=torch.float32)


def backward(h: Tensor, grad: Tensor, gelu: str) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference`"""
    rows, width = h.shape
    dh, out = torch.empty_like(h), torch.empty_like(h)
    sums = h.new_empty(triton.cdiv(rows, _EACH), width, dtype=torch.float32)
    columns = next(size for size in (1024, 512, 256) if width % size == 0 or size == 256)
    launch(
        jit.gelu_backward, (sums.shape[0], triton.cdiv(width, columns)), h, grad, dh, out, sums, rows, width,
        TANH=gelu == "tanh", EACH=_EACH, ROWS=_TILE // columns, COLUMNS=columns,
    )  # fmt: skip
    return dh, out, sums.sum(0)
