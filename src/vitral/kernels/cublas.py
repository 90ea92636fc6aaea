"""A linear layer with a GELU that also returns the GELU's input for the backward pass, by cuBLASLt.

PyTorch fuses the product and the GELU as well, but drops the GELU's input; a GELU as a separate pass costs one to two
percent of a training step. The library is the one that PyTorch has loaded; it is called through its C interface, and
only where `is_available`.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# From cublasLt.h and cublas_api.h.
_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
_COMPUTE_32F = 68
_TRANSA, _EPILOGUE, _BIAS, _AUX, _AUX_LD = 3, 7, 8, 11, 12  # attributes of a product
_MAX_WORKSPACE = 1  # attribute of a preference
_GELU_AUX_BIAS = 164  # epilogue
_TRANSPOSE = 1
_WORKSPACE = 32 * 2**20  # bytes, NVIDIA's recommendation for Hopper


class _Algorithm(ctypes.Structure):
    _fields_ = (("data", c_uint64 * 8),)


class _Heuristic(ctypes.Structure):
    _fields_ = (
        ("algorithm", _Algorithm),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


class _MatmulPlan(NamedTuple):
    """Descriptors of the products of one shape, and the algorithm that cuBLASLt chose."""

    product: c_void_p
    left: c_void_p
    right: c_void_p
    out: c_void_p
    algorithm: _Algorithm


class _MatmulShape(NamedTuple):
    """Column-major, as in cuBLAS: out (m, n) = left (k, m)' right (k, n)"""

    m: int
    n: int
    k: int
    dtype: torch.dtype


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """GELU(h) by the tanh approximation, and h = x weight' + bias.

    (rows, in), (out, in), (out,) in half precision -> (rows, out), (rows, out)
    """
    out, h = x.new_empty(x.shape[0], weight.shape[0]), x.new_empty(x.shape[0], weight.shape[0])
    shape = _MatmulShape(weight.shape[0], x.shape[0], x.shape[1], x.dtype)
    _run_matmul(shape, weight, x, out, bias, h)
    return out, h


def linear_gelu_reference(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """What `linear_gelu` computes, in plain PyTorch."""
    h = F.linear(x, weight, bias)
    return F.gelu(h, approximate="tanh"), h


@cache
def is_available(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `linear_gelu` works on the device: tried once, on a small example."""
    x, weight = torch.ones(16, 16, device=device, dtype=dtype), torch.eye(16, device=device, dtype=dtype)
    try:
        outputs = linear_gelu(x, weight, x[0])
    except (OSError, RuntimeError, AttributeError):
        return False
    pairs = zip(outputs, linear_gelu_reference(x, weight, x[0]), strict=True)
    return all(torch.allclose(output, expected, rtol=2e-2) for output, expected in pairs)


def _run_matmul(shape: _MatmulShape, left: Tensor, right: Tensor, out: Tensor, bias: Tensor, aux: Tensor) -> None:
    device = out.device.index or 0
    plan = _plan(shape, device)
    _set_attribute(plan.product, _BIAS, c_void_p(bias.data_ptr()))
    _set_attribute(plan.product, _AUX, c_void_p(aux.data_ptr()))
    # Not kept: memory that outlives the call would be lost to a CUDA graph that torch.compile records meanwhile.
    workspace = torch.empty(_WORKSPACE, dtype=torch.uint8, device=out.device)
    one, zero = c_float(1.0), c_float(0.0)
    _check(
        _library().cublasLtMatmul(
            _handle(device), plan.product, byref(one), c_void_p(left.data_ptr()), plan.left,
            c_void_p(right.data_ptr()), plan.right, byref(zero), c_void_p(out.data_ptr()), plan.out,
            c_void_p(out.data_ptr()), plan.out, byref(plan.algorithm), c_void_p(workspace.data_ptr()),
            c_size_t(_WORKSPACE), c_void_p(torch.cuda.current_stream(out.device).cuda_stream),
        )
    )  # fmt: skip


@cache
def _plan(shape: _MatmulShape, device: int) -> _MatmulPlan:
    library, dtype_code = _library(), _TYPES[shape.dtype]
    product, preference = c_void_p(), c_void_p()
    _check(library.cublasLtMatmulDescCreate(byref(product), c_int(_COMPUTE_32F), c_int(_TYPES[torch.float32])))
    _set_attribute(product, _TRANSA, c_int32(_TRANSPOSE))
    _set_attribute(product, _EPILOGUE, c_int32(_GELU_AUX_BIAS))
    _set_attribute(product, _AUX_LD, c_int64(shape.m))
    # Any address with the alignment of tensors, on which the choice of the algorithm depends.
    for attribute in (_BIAS, _AUX):
        _set_attribute(product, attribute, c_void_p(256))
    sizes = ((shape.k, shape.m), (shape.k, shape.n), (shape.m, shape.n))
    left, right, out = (_layout(dtype_code, *size) for size in sizes)
    _check(library.cublasLtMatmulPreferenceCreate(byref(preference)))
    size = c_size_t(_WORKSPACE)
    _check(library.cublasLtMatmulPreferenceSetAttribute(preference, _MAX_WORKSPACE, byref(size), c_size_t(8)))
    heuristic, count = _Heuristic(), c_int()
    _check(
        library.cublasLtMatmulAlgoGetHeuristic(
            _handle(device), product, left, right, out, out, preference, 1, byref(heuristic), byref(count)
        )
    )
    library.cublasLtMatmulPreferenceDestroy(preference)
    if count.value == 0:
        raise RuntimeError(f"cuBLASLt has no algorithm for {shape}")
    return _MatmulPlan(product, left, right, out, heuristic.algorithm)


def _layout(dtype_code: int, rows: int, columns: int) -> c_void_p:
    layout = c_void_p()
    sizes = (c_uint64(rows), c_uint64(columns), c_int64(rows))
    _check(_library().cublasLtMatrixLayoutCreate(byref(layout), c_int(dtype_code), *sizes))
    return layout


def _set_attribute(product: c_void_p, attribute: int, value: c_void_p | c_int32 | c_int64) -> None:
    size = c_size_t(ctypes.sizeof(value))
    _check(_library().cublasLtMatmulDescSetAttribute(product, c_int(attribute), byref(value), size))


@cache
def _library() -> ctypes.CDLL:
    """The library that torch has loaded."""
    version = (torch.version.cuda or "0").split(".")[0]
    return ctypes.CDLL(f"libcublasLt.so.{version}")


@cache
def _handle(device: int) -> c_void_p:
    handle = c_void_p()
    with torch.cuda.device(device):
        _check(_library().cublasLtCreate(byref(handle)))
    return handle


def _check(status: int) -> None:
    if status != 0:
        raise RuntimeError(f"cuBLASLt failed with status {status}")
