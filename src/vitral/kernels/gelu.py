"""GELU backwards: its gradient, its output once more so that nobody has to keep that, and a sum; and what it must be.

The output of a block's GELU is its largest tensor. Here it is computed again beside the gradient, while the input is
on chip anyway, and the gradient of the bias before it is added up on the way.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

_EACH, _TILE = 128, 4096  # rows of a program, and numbers that it holds at a time; measured on an H200


def reference(h: Tensor, grad: Tensor, gelu: str) -> tuple[Tensor, Tensor, Tensor]:
    """What the kernel computes, in plain PyTorch: (r, f), (r, f) -> dh (r, f), GELU(h) (r, f), the sum of dh (f,)"""
    with torch.enable_grad():
        leaf = h.detach().requires_grad_()
        out = F.gelu(leaf, approximate=gelu)
    (dh,) = torch.autograd.grad(out, leaf, grad)
    return dh, out.detach(), dh.sum(0, dtype=torch.float32)


@triton.jit
def _backward(
    H, GRAD, DH, OUT, SUMS, rows, width,
    TANH: tl.constexpr, EACH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.program_id(0) * EACH
    total = tl.zeros((COLUMNS,), tl.float32)
    for start in range(first, first + EACH, ROWS):
        row = start + tl.arange(0, ROWS)
        place = row[:, None].to(tl.int64) * width + column[None, :]
        inside = (row[:, None] < rows) & (column[None, :] < width)
        h = tl.load(H + place, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(GRAD + place, mask=inside, other=0.0).to(tl.float32)
        if TANH:  # h * sigmoid(2 * sqrt(2 / pi) * (h + 0.044715 * h^3))
            share = tl.sigmoid(h * (1.5957691216057308 + 0.07135481282723455 * h * h))
            slope = share * (1.0 - share) * (1.5957691216057308 + 0.21406443848170365 * h * h)
        else:
            share = 0.5 * (1.0 + tl.erf(h * 0.7071067811865476))
            slope = 0.3989422804014327 * tl.exp(-0.5 * h * h)
        dh = grad * (share + h * slope)
        tl.store(DH + place, dh.to(DH.dtype.element_ty), mask=inside)
        tl.store(OUT + place, (h * share).to(OUT.dtype.element_ty), mask=inside)
        total += tl.sum(dh, 0)
    tl.store(SUMS + tl.program_id(0) * width + column, total, mask=column < width)


def backward(h: Tensor, grad: Tensor, gelu: str) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference`"""
    rows, width = h.shape
    dh, out = torch.empty_like(h), torch.empty_like(h)
    sums = h.new_empty(triton.cdiv(rows, _EACH), width, dtype=torch.float32)
    columns = next(size for size in (1024, 512, 256) if width % size == 0 or size == 256)
    _backward[(sums.shape[0], triton.cdiv(width, columns))](
        h, grad, dh, out, sums, rows, width,
        TANH=gelu == "tanh", EACH=_EACH, ROWS=_TILE // columns, COLUMNS=columns, num_warps=4,
    )  # fmt: skip
    return dh, out, sums.sum(0)
