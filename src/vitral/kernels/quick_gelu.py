"""Quick GELU, h * sigmoid(1.702 * h): a pass of its own and, for large batches in inference, with the linear layer.

cuBLAS fuses a product with the tanh approximation only, and a pass takes half of the product's time. The product here
is slower than that of cuBLAS by less. For the exact GELU it was not: its error function costs too much there.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from vitral.kernels.dispatch import HALF_DTYPES, ceil_div, launch
from vitral.kernels.jit import quick_gelu as jit

_BLOCK = 4096  # elements per program of the pass
_ROWS, _COLUMNS, _DEPTH, _GROUP = 128, 256, 64, 8  # of a tile; tuned on an H200
_MIN_TILES = 8  # per multiprocessor: with fewer, some are idle at the end, and cuBLAS has smaller tiles


def reference(h: Tensor) -> Tensor:
    """Any shape"""
    return h * torch.sigmoid(1.702 * h)


def quick_gelu(h: Tensor) -> Tensor:
    """As the reference, in one pass, for a contiguous input."""
    out = torch.empty_like(h)
    launch(jit.quick_gelu, (ceil_div(h.numel(), _BLOCK),), h, out, h.numel(), BLOCK=_BLOCK)
    return out


def linear_quick_gelu_reference(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """(rows, in), (out, in), (out,) -> (rows, out)"""
    return reference(F.linear(x, weight, bias))


def linear_quick_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """As the reference, for contiguous inputs; by one kernel where that is faster."""
    if _is_faster(x, weight):
        return fused_linear(x, weight, bias)
    return quick_gelu(torch.addmm(bias, x, weight.t()))


def fused_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`linear_quick_gelu` by one kernel, for rows that a multiple of 16 bytes separates."""
    (rows, inputs), outputs = x.shape, weight.shape[0]
    out = x.new_empty(rows, outputs)
    operands = ((x, (_ROWS, _DEPTH)), (weight, (_COLUMNS, _DEPTH)), (out, (_ROWS, _COLUMNS // 2)))
    descriptors = (TensorDescriptor.from_tensor(tensor, list(tile)) for tensor, tile in operands)
    launch(
        jit.linear_quick_gelu, (min(_tiles(rows, outputs), _multiprocessors(x.device)),),
        *descriptors, bias, rows, outputs, inputs,
        ROWS=_ROWS, COLUMNS=_COLUMNS, DEPTH=_DEPTH, GROUP=_GROUP, warps=8,
    )  # fmt: skip
    return out


def _is_faster(x: Tensor, weight: Tensor) -> bool:
    """Whether `fused_linear` supports these inputs and beats a product and a pass after it."""
    if not x.is_cuda or x.dtype not in HALF_DTYPES:
        return False
    aligned = all(tensor.data_ptr() % 16 == 0 and tensor.shape[1] % 8 == 0 for tensor in (x, weight))
    large = _tiles(x.shape[0], weight.shape[0]) >= _MIN_TILES * _multiprocessors(x.device)
    return aligned and large and weight.shape[0] % 8 == 0


def _tiles(rows: int, outputs: int) -> int:
    return ceil_div(rows, _ROWS) * ceil_div(outputs, _COLUMNS)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
