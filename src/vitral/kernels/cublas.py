"""Products of linear layers by cuBLASLt: the GELU with its input for the backward pass, and the fastest algorithm.

PyTorch fuses a product and the GELU as well, but drops the GELU's input; a GELU as a separate pass costs one to two
percent of a training step. And it takes the first algorithm that cuBLASLt proposes, while another one of eight is often
10 to 30 percent faster. Here the first large product of a shape times them all, once per process. Only algorithms with
the same bits as the first one (in thousands of rows) take part, so that the choice does not show in a result.

The library is the one that PyTorch has loaded; it is called through its C interface, and only where it `fits`.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from functools import cache
from threading import Lock
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.kernels.dispatch import E4M3, HALF_DTYPES

# From cublasLt.h and cublas_api.h.
_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14, E4M3: 28}
_COMPUTE_32F = 68
# Attributes of a product.
_TRANSA, _EPILOGUE, _BIAS, _AUX, _AUX_LD, _SCALE_A, _SCALE_B = 3, 7, 8, 11, 12, 17, 18
_MAX_WORKSPACE = 1  # attribute of a preference
_PLAIN, _ADD_BIAS, _GELU_BIAS, _GELU_AUX_BIAS = 1, 4, 36, 164  # epilogues
_WORKSPACE = 32 * 2**20  # bytes, NVIDIA's recommendation for Hopper
_MIN_PRODUCT = 1 << 33  # multiply-accumulates: below, calling cuBLASLt from Python costs what another algorithm gains
_CANDIDATES = 8
_SAMPLE, _LAST = 4096, 256  # rows whose bits are compared: spread over the output, and its last
_ALIGNMENT = 256  # bytes
_ROUNDS, _REPEATS = 3, 4  # of timing
_MIN_GAIN = 0.98  # share of the first algorithm's time that another one must stay below
_USING = Lock()  # a plan holds the addresses of one call


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


class _Shape(NamedTuple):
    """Column-major, as in cuBLAS: out (m, n) = left right (k, n), where left is (m, k), or (k, m) to be transposed"""

    m: int
    n: int
    k: int
    dtype: torch.dtype  # of left and right
    out_dtype: torch.dtype
    transposes: bool
    epilogue: int


class _Operands(NamedTuple):
    """The memory of one product."""

    left: Tensor
    right: Tensor
    out: Tensor
    bias: Tensor | None = None
    aux: Tensor | None = None  # what the GELU reads
    scales: tuple[Tensor, Tensor] | None = None  # of left and right in FP8, a number each


class _Matmul:
    """Products of one shape: descriptors, and the algorithms that cuBLASLt proposes, the best guess first."""

    def __init__(self, shape: _Shape, device: int) -> None:
        self.device = device
        self.product = c_void_p()
        _check(_library().cublasLtMatmulDescCreate(byref(self.product), c_int(_COMPUTE_32F), c_int(0)))
        self._set(_TRANSA, c_int32(shape.transposes))
        self._set(_EPILOGUE, c_int32(shape.epilogue))
        # Any address with the alignment of tensors, on which the choice of the algorithm depends.
        if shape.epilogue != _PLAIN:
            self._set(_BIAS, c_void_p(_ALIGNMENT))
        if shape.epilogue == _GELU_AUX_BIAS:
            self._set(_AUX, c_void_p(_ALIGNMENT))
            self._set(_AUX_LD, c_int64(shape.m))
        if shape.dtype == E4M3:
            self._set(_SCALE_A, c_void_p(_ALIGNMENT))
            self._set(_SCALE_B, c_void_p(_ALIGNMENT))
        left = (shape.k, shape.m) if shape.transposes else (shape.m, shape.k)
        sizes = (left, (shape.k, shape.n), (shape.m, shape.n))
        dtypes = (shape.dtype, shape.dtype, shape.out_dtype)
        self.layouts = [_layout(_TYPES[dtype], *size) for dtype, size in zip(dtypes, sizes, strict=True)]
        self.algorithms = self._propose()
        if shape.epilogue != _PLAIN:  # many of those for a plain product support the epilogue, too, and are faster
            self._set(_EPILOGUE, c_int32(_PLAIN))
            self.algorithms += self._propose()
            self._set(_EPILOGUE, c_int32(shape.epilogue))
        if not self.algorithms:
            raise RuntimeError(f"cuBLASLt has no algorithm for {shape}")
        self.fastest: _Algorithm | None = None

    def _propose(self) -> list[_Algorithm]:
        library, preference, count = _library(), c_void_p(), c_int()
        _check(library.cublasLtMatmulPreferenceCreate(byref(preference)))
        size = c_size_t(_WORKSPACE)
        _check(library.cublasLtMatmulPreferenceSetAttribute(preference, _MAX_WORKSPACE, byref(size), c_size_t(8)))
        heuristics, (left, right, out) = (_Heuristic * _CANDIDATES)(), self.layouts
        _check(
            library.cublasLtMatmulAlgoGetHeuristic(
                _handle(self.device), self.product, left, right, out, out, preference, _CANDIDATES, heuristics,
                byref(count),
            )
        )  # fmt: skip
        library.cublasLtMatmulPreferenceDestroy(preference)
        return [heuristic.algorithm for heuristic in heuristics[: count.value]]

    def __call__(self, operands: _Operands, *, tunes: bool) -> None:
        """Multiply; if it `tunes`, after choosing the fastest algorithm, unless a CUDA graph is captured."""
        if tunes and self.fastest is None and not torch.cuda.is_current_stream_capturing():
            try:
                self.fastest = self._choose(operands)
            except torch.OutOfMemoryError:  # the sample did not fit
                self.fastest = self.algorithms[0]
        self._run(operands, self.fastest or self.algorithms[0])

    def _choose(self, operands: _Operands) -> _Algorithm:
        """The fastest of those that give the same bits as the first."""
        first, candidates = self.algorithms[0], []
        self._run(operands, first)
        expected = _sample(operands)
        for algorithm in self.algorithms:
            try:
                self._run(operands, algorithm)
            except RuntimeError:
                continue
            if torch.equal(_sample(operands), expected):
                candidates.append(algorithm)
        seconds = [[self._time(operands, algorithm) for algorithm in candidates] for _ in range(_ROUNDS)]
        medians = [sorted(times)[_ROUNDS // 2] for times in zip(*seconds, strict=True)]
        index = min(range(len(medians)), key=medians.__getitem__)
        return candidates[index] if medians[index] < _MIN_GAIN * medians[0] else first

    def _time(self, operands: _Operands, algorithm: _Algorithm) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(_REPEATS):
            self._run(operands, algorithm)
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    def _run(self, operands: _Operands, algorithm: _Algorithm) -> None:
        left, right, out, bias, aux, scales = operands
        if scales is not None:
            self._set(_SCALE_A, c_void_p(scales[0].data_ptr()))
            self._set(_SCALE_B, c_void_p(scales[1].data_ptr()))
        if bias is not None:
            self._set(_BIAS, c_void_p(bias.data_ptr()))
        if aux is not None:
            self._set(_AUX, c_void_p(aux.data_ptr()))
        # Not kept: memory that outlives the call would be lost to a CUDA graph that torch.compile records meanwhile.
        workspace = torch.empty(_WORKSPACE, dtype=torch.uint8, device=out.device)
        one, zero = c_float(1.0), c_float(0.0)
        left_layout, right_layout, out_layout = self.layouts
        _check(
            _library().cublasLtMatmul(
                _handle(self.device), self.product, byref(one), c_void_p(left.data_ptr()), left_layout,
                c_void_p(right.data_ptr()), right_layout, byref(zero), c_void_p(out.data_ptr()), out_layout,
                c_void_p(out.data_ptr()), out_layout, byref(algorithm), c_void_p(workspace.data_ptr()),
                c_size_t(_WORKSPACE), c_void_p(torch.cuda.current_stream(out.device).cuda_stream),
            )
        )  # fmt: skip

    def _set(self, attribute: int, value: c_void_p | c_int32 | c_int64) -> None:
        size = c_size_t(ctypes.sizeof(value))
        _check(_library().cublasLtMatmulDescSetAttribute(self.product, c_int(attribute), byref(value), size))


def _sample(operands: _Operands) -> Tensor:
    """Bits of rows of the outputs, which show how an algorithm sums; the last ones may fill a tile in part."""
    outputs = [output.view(torch.int16) for output in (operands.out, operands.aux) if output is not None]
    return torch.cat([rows for output in outputs for rows in (output[:: len(output) // _SAMPLE + 1], output[-_LAST:])])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, gelu: bool = False) -> Tensor:
    """x weight' + bias, or the tanh approximation of its GELU, which needs a bias.

    (rows, in), (out, in), (out,) in half precision -> (rows, out)
    """
    rows, inputs = x.shape
    out = x.new_empty(rows, weight.shape[0])
    epilogue = _PLAIN if bias is None else _GELU_BIAS if gelu else _ADD_BIAS
    shape = _Shape(weight.shape[0], rows, inputs, x.dtype, x.dtype, True, epilogue)
    _multiply(shape, _Operands(weight, x, out, bias))
    return out


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """GELU(h) by the tanh approximation, and h = x weight' + bias.

    (rows, in), (out, in), (out,) in half precision -> (rows, out), (rows, out)
    """
    rows, inputs = x.shape
    out, h = x.new_empty(rows, weight.shape[0]), x.new_empty(rows, weight.shape[0])
    shape = _Shape(weight.shape[0], rows, inputs, x.dtype, x.dtype, True, _GELU_AUX_BIAS)
    _multiply(shape, _Operands(weight, x, out, bias, h))
    return out, h


def linear_gelu_reference(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """What `linear_gelu` computes, in plain PyTorch."""
    h = F.linear(x, weight, bias)
    return F.gelu(h, approximate="tanh"), h


def input_grad(grad: Tensor, weight: Tensor) -> Tensor:
    """grad weight, the gradient of a layer's input: (rows, out), (out, in) in half precision -> (rows, in)"""
    rows, outputs = grad.shape
    out = grad.new_empty(rows, weight.shape[1])
    shape = _Shape(weight.shape[1], rows, outputs, grad.dtype, grad.dtype, False, _PLAIN)
    _multiply(shape, _Operands(weight, grad, out))
    return out


def fp8_weight_grad(grad: Tensor, x: Tensor, scales: tuple[Tensor, Tensor]) -> Tensor:
    """grad x' times two scales, numbers on the device: e4m3 (out, rows), (in, rows) -> float32 (out, in)"""
    (outputs, rows), inputs = grad.shape, x.shape[0]
    out = grad.new_empty(outputs, inputs, dtype=torch.float32)
    shape = _Shape(inputs, outputs, rows, x.dtype, out.dtype, True, _PLAIN)
    _multiply(shape, _Operands(x, grad, out, scales=(scales[1], scales[0])))
    return out


def is_large(x: Tensor, weight: Tensor) -> bool:
    """Whether a product with x (rows, ...) is large enough for `linear` and `input_grad` to be faster, and `fits`."""
    return x.shape[0] * weight.numel() >= _MIN_PRODUCT and fits(x, weight)


def fits(x: Tensor, weight: Tensor) -> bool:
    """Whether the functions of this module support contiguous matrices of this device, precision and size."""
    if not x.is_cuda or x.dtype not in (*HALF_DTYPES, E4M3):
        return False
    # What cuBLAS assumes when it proposes algorithms, and its requirement for the memory of h.
    aligned = x.data_ptr() % _ALIGNMENT == weight.data_ptr() % _ALIGNMENT == 0
    aligned = aligned and all(size * weight.element_size() % 16 == 0 for size in weight.shape)
    return aligned and x.is_contiguous() and weight.is_contiguous() and is_available(x.device, x.dtype)


@cache
def is_available(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the products work on the device: tried once, on a small example."""
    x, weight = torch.ones(16, 16, device=device).to(dtype), torch.eye(16, device=device).to(dtype)
    try:
        if dtype == E4M3:
            two = torch.full((1,), 2.0, device=device)
            return torch.equal(fp8_weight_grad(x, weight, (two, two)), 4.0 * x.float())
        outputs = [*linear_gelu(x, weight, x[0]), linear(x, weight, x[0], gelu=True), linear(x, weight, x[0])]
        outputs += [linear(x, weight, None), input_grad(x, weight)]
    except (OSError, RuntimeError, AttributeError):
        return False
    gelu, h = linear_gelu_reference(x, weight, x[0])
    expected = [gelu, h, gelu, h, x, x]
    return all(torch.allclose(*pair, rtol=2e-2) for pair in zip(outputs, expected, strict=True))


def _multiply(shape: _Shape, operands: _Operands) -> None:
    with _USING:
        matmul = _matmul(shape, operands.out.device.index or 0)
        matmul(operands, tunes=shape.m * shape.n * shape.k >= _MIN_PRODUCT)


_matmul = cache(_Matmul)


def _layout(dtype_code: int, rows: int, columns: int) -> c_void_p:
    layout = c_void_p()
    sizes = (c_uint64(rows), c_uint64(columns), c_int64(rows))
    _check(_library().cublasLtMatrixLayoutCreate(byref(layout), c_int(dtype_code), *sizes))
    return layout


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
