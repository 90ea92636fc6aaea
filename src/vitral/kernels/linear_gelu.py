"""A linear layer and the exact or quick GELU after it in one kernel, for large batches in inference.

cuBLAS fuses a product with the tanh approximation only, and a GELU as a pass of its own takes a third of the product's
time or more. This product is slower than that of cuBLAS by less than the pass.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from vitral.kernels.dispatch import HALF_DTYPES, launch
from vitral.kernels.fused_ops import gelu_reference
from vitral.kernels.jit import linear_gelu as jit

_ROWS, _COLUMNS, _DEPTH, _GROUP = 128, 256, 64, 8  # of a tile; tuned on an H200
_MIN_TILES = 4  # per multiprocessor: with fewer, some are idle at the end, and cuBLAS has smaller tiles


def reference(x: Tensor, weight: Tensor, bias: Tensor, gelu: str) -> Tensor:
    """(rows, in), (out, in), (out,) -> (rows, out)"""
    return gelu_reference(torch.nn.functional.linear(x, weight, bias), gelu)


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor, gelu: str) -> Tensor:
    """As the reference, for contiguous inputs and the GELU "none" (exact) or "quick"."""
    (rows, inputs), outputs = x.shape, weight.shape[0]
    out = x.new_empty(rows, outputs)
    operands = ((x, (_ROWS, _DEPTH)), (weight, (_COLUMNS, _DEPTH)), (out, (_ROWS, _COLUMNS // 2)))
    descriptors = (TensorDescriptor.from_tensor(tensor, list(tile)) for tensor, tile in operands)
    launch(
        jit.linear_gelu, (min(_tiles(rows, outputs), _multiprocessors(x.device)),),
        *descriptors, bias, rows, outputs, inputs,
        GELU=gelu, ROWS=_ROWS, COLUMNS=_COLUMNS, DEPTH=_DEPTH, GROUP=_GROUP, warps=8,
    )  # fmt: skip
    return out


def is_faster(x: Tensor, weight: Tensor) -> bool:
    """Whether `linear_gelu` supports these inputs and beats a product and a pass after it."""
    if not x.is_cuda or x.dtype not in HALF_DTYPES:
        return False
    aligned = all(tensor.data_ptr() % 16 == 0 and tensor.shape[1] % 8 == 0 for tensor in (x, weight))
    large = _tiles(x.shape[0], weight.shape[0]) >= _MIN_TILES * _multiprocessors(x.device)
    return aligned and large and weight.shape[0] % 8 == 0


def _tiles(rows: int, outputs: int) -> int:
    return triton.cdiv(rows, _ROWS) * triton.cdiv(outputs, _COLUMNS)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
