"""GELUs that cuBLAS cannot fuse: for inference with large batches, a linear layer with quick or exact GELU.

Quick GELU is h * sigmoid(1.702 * h). cuBLAS fuses a product with the tanh approximation only, and a pass takes half of
the product's time. The product here is slower than that of cuBLAS by less.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from vitral.kernels.dispatch import E4M3, HALF_DTYPES, ceil_div, launch
from vitral.kernels.jit import gelu as jit

_BLOCK = 4096  # elements per program of the pass
_ROWS, _COLUMNS, _DEPTH, _GROUP = 128, 256, 64, 8  # of a tile; tuned on an H200
_MIN_TILES = 8  # per multiprocessor: with fewer, some are idle at the end, and cuBLAS has smaller tiles


def reference(h: Tensor, gelu: str) -> Tensor:
    """GELU, "tanh", "none" (exact) or "quick": any shape"""
    return h * torch.sigmoid(1.702 * h) if gelu == "quick" else F.gelu(h, approximate=gelu)


def quick_gelu(h: Tensor) -> Tensor:
    """As the reference, in one pass, for a contiguous input."""
    out = torch.empty_like(h)
    launch(jit.quick_gelu, (ceil_div(h.numel(), _BLOCK),), h, out, h.numel(), BLOCK=_BLOCK)
    return out


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor, gelu: str) -> Tensor:
    """A linear layer and "quick" or ("none") exact GELU, for contiguous inputs; by one kernel if that is faster.

    (rows, in), (out, in), (out,) -> (rows, out)
    """
    if is_faster(x, weight):
        return fused_linear_gelu(x, weight, bias, gelu)
    h = torch.addmm(bias, x, weight.t())
    return quick_gelu(h) if gelu == "quick" else F.gelu(h)


def fused_linear_gelu(
    x: Tensor, weight: Tensor, bias: Tensor, gelu: str, scales: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """`linear_gelu` by one kernel, for rows that a multiple of 16 bytes separates.

    For x and weight in FP8, `scales` are those of the product (out,) and of the output, which is in FP8, too.
    """
    (rows, inputs), outputs = x.shape, weight.shape[0]
    out = x.new_empty(rows, outputs)
    depth = _DEPTH * 2 // x.element_size()  # of the same bytes
    operands = ((x, (_ROWS, depth)), (weight, (_COLUMNS, depth)), (out, (_ROWS, _COLUMNS // 2)))
    launch(
        jit.linear_gelu, (min(_tiles(rows, outputs), _multiprocessors(x.device)),),
        *(TensorDescriptor.from_tensor(tensor, list(tile)) for tensor, tile in operands), bias,
        *(scales or (None, None)), rows, outputs, inputs,
        ROWS=_ROWS, COLUMNS=_COLUMNS, DEPTH=depth, GROUP=_GROUP, GELU=gelu, SCALED=scales is not None, warps=8,
    )  # fmt: skip
    return out


def is_faster(x: Tensor, weight: Tensor) -> bool:
    """Whether `fused_linear_gelu` supports these inputs and beats a product and a pass after it."""
    if not x.is_cuda or x.dtype not in (*HALF_DTYPES, E4M3):
        return False
    multiple = 16 // x.element_size()
    aligned = all(tensor.data_ptr() % 16 == 0 and tensor.shape[1] % multiple == 0 for tensor in (x, weight))
    large = _tiles(x.shape[0], weight.shape[0]) >= _MIN_TILES * _multiprocessors(x.device)
    return aligned and large and weight.shape[0] % multiple == 0


def _tiles(rows: int, outputs: int) -> int:
    return ceil_div(rows, _ROWS) * ceil_div(outputs, _COLUMNS)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
