"""What comes before the blocks, each in one pass over memory: launchers of the kernels, and references in PyTorch.

PyTorch converts, copies, concatenates and adds one after another, partly in float32, which takes three times as long.
torch.compile fuses these operations, too, so that the kernels are for eager code only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from vitral.kernels.dispatch import ceil_div, launch, next_power_of_2
from vitral.kernels.fused_ops import column_sums
from vitral.kernels.jit import embedding as jit

_PIXELS = 4096  # per program
_PATCHES, _PATCH_PIXELS = 16, 256  # likewise
_TOKEN_BLOCK = 1024  # channels of all tokens, likewise
_IMAGES, _GRADIENT_IMAGES, _GRADIENT_ROWS = 8, 32, 4  # per program, and at a time


def normalize_pixels(pixels: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """pixels * scale + shift, as `torch.addcmul` computes it.

    uint8 (batch, channels, height, width), contiguous, and float32 (channels, 1, 1) each -> float32, the same shape
    """
    batch, channels, height, width = pixels.shape
    out = torch.empty_like(pixels, dtype=torch.float32)
    size = height * width
    launch(
        jit.normalize_pixels, (batch * channels, ceil_div(size, _PIXELS)), pixels, scale, shift, out, size, channels,
        BLOCK=_PIXELS,
    )  # fmt: skip
    return out


def extract_patches(images: Tensor, side: int, grid: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """The pixels of each patch as a row, in `dtype`, of contiguous images; those that fill no patch are left out.

    (batch, channels, height, width) -> (batch, h, w, channels * side * side)
    """
    (batch, channels, height, width), (h, w) = images.shape, grid
    pixels = channels * side * side
    out = images.new_empty(batch, h, w, pixels, dtype=dtype)
    patches = min(_PATCHES, next_power_of_2(w))
    launch(
        jit.extract_patches, (batch * h * ceil_div(w, patches), ceil_div(pixels, _PATCH_PIXELS)),
        images, out, channels, height, width, h, w,
        SIDE=side, PATCHES=patches, PIXELS=_PATCH_PIXELS,
    )  # fmt: skip
    return out


def add_positions_reference(patches: Tensor, table: Tensor) -> Tensor:
    """Rows of the table, from the prefix on plus patches: (b, n, dim), (prefix + n, dim) -> (b, prefix + n, dim)"""
    prefix = len(table) - patches.shape[1]
    rows = table[:prefix].expand(len(patches), -1, -1)
    return torch.cat([rows, patches + table[prefix:]], dim=1).to(patches.dtype)


def add_positions(patches: Tensor, table: Tensor) -> Tensor:
    """As the reference, with gradients."""
    return _AddPositions.apply(patches.contiguous(), table.contiguous())


class _AddPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, patches: Tensor, table: Tensor) -> Tensor:
        (batch, count, dim), tokens = patches.shape, len(table)
        ctx.shape, ctx.table_dtype = patches.shape, table.dtype
        out = patches.new_empty(batch, tokens, dim)
        size = tokens * dim
        launch(
            jit.add_positions, (ceil_div(size, _TOKEN_BLOCK), ceil_div(batch, _IMAGES)),
            patches, table, out, batch, size, size - count * dim, IMAGES=_IMAGES, BLOCK=_TOKEN_BLOCK,
        )  # fmt: skip
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        grad = grads[0].contiguous()
        (batch, count, dim), size = ctx.shape, grad[0].numel()
        dpatches = grad.new_empty(ctx.shape)
        groups = ceil_div(batch, _GRADIENT_IMAGES)
        sums = grad.new_empty(groups, *grad.shape[1:], dtype=torch.float32)
        launch(
            jit.add_positions_backward, (ceil_div(size, _TOKEN_BLOCK), groups),
            grad, dpatches, sums, batch, size, size - count * dim,
            IMAGES=_GRADIENT_IMAGES, ROWS=_GRADIENT_ROWS, BLOCK=_TOKEN_BLOCK,
        )  # fmt: skip
        return dpatches, column_sums(sums).to(ctx.table_dtype)
