"""GroupNorm of images with channels last, together with the residual sum and the ReLU after it.

cuDNN's convolutions are fastest with channels last, PyTorch's GroupNorm is for channels first, and under autocast it
returns float32. Here statistics are in float32, and inputs and outputs stay in half precision: two passes over memory
forward, two backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.kernels.dispatch import ceil_div, launch, next_power_of_2, on_device_of
from vitral.kernels.jit import group_norm as jit

_PROGRAM_ROWS = 256  # pixels of a program
_TILE, _COLUMNS = 4096, 128  # elements at a time, and how many of them in a row
_SUMS_TILE = 2048  # where every element of a tile has two sums in registers


def reference(
    x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, *, relu: bool, residual: Tensor | None = None
) -> Tensor:
    """(batch, channels, h, w), (channels,), (channels,) -> (batch, channels, h, w)"""
    out = F.group_norm(x, groups, weight, bias, eps)
    out = out if residual is None else out + residual
    return F.relu(out) if relu else out


def group_norm(
    x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, *, relu: bool, residual: Tensor | None = None
) -> Tensor:
    """As the reference, in the dtype of x, which has channels last in memory."""
    return _group_norm(x, weight, bias, residual, groups, eps, relu)[0]


@torch.library.custom_op("vitral::group_norm", mutates_args=())
def _group_norm(
    x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, groups: int, eps: float, relu: bool
) -> tuple[Tensor, Tensor]:
    """The output, and mean and 1 / std of the groups for the backward pass, (batch, groups, 2)"""
    x, residual = _channels_last(x), None if residual is None else _channels_last(residual)
    out, moments = torch.empty_like(x), _empty(x, groups, 2)
    batch, pixels, width = _sizes(x)
    grid = _grid(x)
    sums = _empty(x, grid[1], 2, width)
    group: dict[str, Any] = {"GROUP": width // groups}
    with on_device_of(x):
        launch(jit.channel_sums, grid, x, sums, pixels, width, **_tiles(width, _SUMS_TILE))
        launch(
            jit.group_moments, (batch, groups), x, sums, moments, grid[1], pixels, width, eps,
            **group, COLUMNS=next_power_of_2(width // groups), warps=1,
        )  # fmt: skip
        launch(
            jit.normalize, grid, x, residual, moments, weight, bias, out, pixels, width, groups,
            **group, HAS_RESIDUAL=residual is not None, RELU=relu, **_tiles(width),
        )  # fmt: skip
    return out, moments


@_group_norm.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, groups: int, eps: float, relu: bool
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, memory_format=torch.channels_last), _empty(x, groups, 2)


@torch.library.custom_op("vitral::group_norm_backward", mutates_args=())
def _group_norm_backward(
    grad: Tensor, x: Tensor, moments: Tensor, weight: Tensor, bias: Tensor, relu: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of x, and of weight and bias, (2, channels)"""
    x, grad = _channels_last(x), _channels_last(grad)
    dx, groups = torch.empty_like(x), moments.shape[1]
    batch, pixels, width = _sizes(x)
    grid = _grid(x)
    sums, image_sums, means = _empty(x, grid[1], 2, width), _empty(x, 2, width), torch.empty_like(moments)
    affine = (x, grad, moments, weight, bias)
    group: dict[str, Any] = {"GROUP": width // groups}
    with on_device_of(x):
        launch(
            jit.gradient_sums, grid, *affine, sums, pixels, width, groups,
            **group, RELU=relu, **_tiles(width, _SUMS_TILE),
        )  # fmt: skip
        launch(
            jit.group_gradients, (batch, groups), sums, weight, image_sums, means, grid[1], pixels, width,
            **group, COLUMNS=next_power_of_2(width // groups), warps=1,
        )  # fmt: skip
        launch(jit.input_gradient, grid, *affine, means, dx, pixels, width, groups, **group, RELU=relu, **_tiles(width))
    return dx, image_sums.sum(0)


@_group_norm_backward.register_fake
def _(grad: Tensor, x: Tensor, moments: Tensor, weight: Tensor, bias: Tensor, relu: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, memory_format=torch.channels_last), weight.new_empty(2, x.shape[1], dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, residual, _, _, ctx.relu = inputs
    # With a residual, only the output tells where the ReLU was open.
    ctx.save_for_backward(x, output[1], weight, bias, output[0] if ctx.relu and residual is not None else None)
    ctx.has_residual = residual is not None
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    x, moments, weight, bias, out = ctx.saved_tensors
    if out is not None:
        grad = torch.where(out > 0, grad, 0)
    relu = ctx.relu and not ctx.has_residual
    dx, (dweight, dbias) = _group_norm_backward(grad, x, moments, weight, bias, relu)
    return dx, dweight, dbias, grad if ctx.has_residual else None, None, None, None


_group_norm.register_autograd(_gradients, setup_context=_save)


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _sizes(x: Tensor) -> tuple[int, int, int]:
    """Images, pixels and channels"""
    return x.shape[0], x.shape[2] * x.shape[3], x.shape[1]


def _grid(x: Tensor) -> tuple[int, int, int]:
    batch, pixels, width = _sizes(x)
    return batch, ceil_div(pixels, _PROGRAM_ROWS), ceil_div(width, _tiles(width)["COLUMNS"])


def _tiles(width: int, tile: int = _TILE) -> dict[str, int]:
    columns = min(_COLUMNS, next_power_of_2(width))
    return {"PROGRAM_ROWS": _PROGRAM_ROWS, "ROWS": min(tile // columns, _PROGRAM_ROWS), "COLUMNS": columns}


def _empty(x: Tensor, *shape: int) -> Tensor:
    """float32 (batch, ...)"""
    return x.new_empty(x.shape[0], *shape, dtype=torch.float32)
