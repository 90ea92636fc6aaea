"""Which implementation fits the shape, the device and the precision: a kernel, or plain PyTorch."""

from __future__ import annotations

import importlib.util
import platform
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from torch.utils.checkpoint import checkpoint

from vitral.errors import UserError

HALF_DTYPES = (torch.bfloat16, torch.float16)
E4M3 = torch.float8_e4m3fn
_MAX_TOKENS = 256  # of a sequence whose rows stay on chip
_HEAD_DIMS = (16, 32, 64, 128)
_MAX_HEAD_DIM = 128  # of cuDNN's attention, for multiples of 8
_MAX_DIM = 4096  # channels that a LayerNorm's program holds at once
# Major numbers of compute capabilities: Hopper, where the kernels were measured, and data-center Blackwell. There a
# program may use 227 KiB of shared memory; the 99 KiB of consumer Blackwell, with a higher number, are too few.
_COMPUTE_CAPABILITIES = (9, 10)
FP8_MIN_WIDTH: int = 768  # of a model: below, quantising costs more than the products gain
_MIN_TRITON_CAPABILITY = (7, 0)
_MIN_ONEDNN_PRODUCT = 1 << 23  # multiply-accumulates: below, calling oneDNN from Python costs what it gains
_HAS_TRITON = importlib.util.find_spec("triton") is not None


def is_plain(module: nn.Module, expected: type[nn.Module] | None = None) -> bool:
    """Whether calling `module` does no more than the `forward` of its class, so that a fast path may replace the call.

    Args:
        module: has hooks or a `forward` of its own, or not. That of gradient checkpointing counts with gradients only.
        expected: its class, exactly: an adapter or a parametrization has another one, or a class whose `forward` was
            replaced.
    """
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    if hooks or _has_global_hooks():
        return False
    if "forward" in module.__dict__ and (torch.is_grad_enabled() or not _checkpoints_own_forward(module)):
        return False
    return expected is None or (type(module) is expected and _has_own_forward(expected))


def is_checkpointed(module: nn.Module) -> bool:
    """Whether `set_grad_checkpointing` is on for a block."""
    forward = module.__dict__.get("forward")
    return isinstance(forward, partial) and forward.func is checkpoint


def _checkpoints_own_forward(module: nn.Module) -> bool:
    """Whether it is on, and recomputes the `forward` of the block's class, not one that a user has set."""
    if not is_checkpointed(module):
        return False
    forward = module.__dict__["forward"].args[0]
    return getattr(forward, "__func__", None) is type(module).forward and forward.__self__ is module


def _has_global_hooks() -> bool:
    forward = nn_module._global_forward_hooks or nn_module._global_forward_pre_hooks
    return bool(forward or nn_module._global_backward_hooks or nn_module._global_backward_pre_hooks)


_OWN_FORWARDS: dict[type[nn.Module], Any] = {}  # of classes that were looked at, if it is unmodified


def _has_own_forward(module_type: type[nn.Module]) -> bool:
    """Whether `forward` is the one in the definition of the class."""
    forward: Any = module_type.forward
    if _OWN_FORWARDS.get(module_type) is forward:
        return True
    if not isinstance(forward, FunctionType) or "__wrapped__" in vars(forward):
        return False
    name = forward.__module__, forward.__code__.co_qualname  # the code's own, which no decorator copies
    own = name == (module_type.__module__, f"{module_type.__qualname__}.forward")
    if own:
        _OWN_FORWARDS[module_type] = forward
    return own


def is_inactive_dropout(module: nn.Module) -> bool:
    """Whether it is a plain dropout that returns its input."""
    return isinstance(module, nn.Dropout) and is_plain(module, nn.Dropout) and not (module.training and module.p)


def is_plain_tensor(x: Tensor) -> bool:
    """Whether `x` is no subclass of Tensor, such as a quantised or a distributed one."""
    return type(x) in (Tensor, nn.Parameter)


def _has_own_dispatch(x: Tensor) -> bool:
    """Whether `x` is of a subclass that computes in its own way, as distributed and quantised tensors do."""
    return type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__


def is_exporting() -> bool:
    """Whether torch.export traces the model. `torch.compiler.is_exporting()` is also true for whatever torch.compile
    traces with PyTorch 2.11, where no fused block would be compiled."""
    return torch.compiler._is_exporting_flag


def apply_linear(layer: nn.Module, x: Tensor) -> Tensor:
    """A linear layer, or what replaces it: (..., in) -> (..., out)"""
    on_cpu = x.device.type == "cpu" and not torch.compiler.is_compiling()
    if on_cpu and isinstance(layer, nn.Linear) and is_plain(layer, nn.Linear):
        return linear(x, layer.weight, layer.bias)
    return layer(x)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear`: (..., in), (out, in), (out,) -> (..., out)"""
    if not torch.compiler.is_compiling() and _fits_onednn(x, weight):
        from vitral.kernels import onednn

        return onednn.linear(x, weight, bias)
    return F.linear(x, weight, bias)


def attention(qkv: Tensor, bias: Tensor | None, dropout: float, queries: int | None = None) -> Tensor:
    """Scaled dot-product attention.

    Args:
        qkv: queries, keys and values, (batch, tokens, 3, heads, dim).
        bias: added to the logits, (batch, heads, tokens or `queries`, tokens).
        dropout: rate for the attention weights.
        queries: number of tokens, from the first on, that attend to all; None for all of them.

    Returns:
        (batch, heads, tokens or `queries`, dim)
    """
    dim = qkv.shape[4]
    bias_fits = bias is None or dim < _HEAD_DIMS[-1]  # a bias with the widest heads is too large for some GPUs
    if queries is None and dropout == 0.0 and bias_fits and fits_short_attention(qkv, dim):
        from vitral.kernels.attention import short_attention

        return short_attention(qkv, None if bias is None else bias.to(qkv.dtype))[0].transpose(1, 2)
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    q = q if queries is None else q[:, :, :queries]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout)


def fits_blocks(x: Tensor, heads: int) -> bool:
    """Whether `blocks.encode` supports tokens (batch, tokens, dim)."""
    dim = x.shape[2] // heads
    fits = x.dtype in HALF_DTYPES and x.shape[2] <= _MAX_DIM and x.shape[0] > 0
    return fits and (is_short(x.shape[1], dim) or (dim <= _MAX_HEAD_DIM and dim % 8 == 0)) and _runs_kernels(x)


def is_short(tokens: int, head_dim: int) -> bool:
    """Whether our own attention kernels are built for the length and the width of the heads."""
    return tokens <= _MAX_TOKENS and head_dim in _HEAD_DIMS


def fits_short_attention(tokens: Tensor, head_dim: int) -> bool:
    """Whether the attention kernels support tokens (batch, tokens, ...) with heads of this width."""
    fits = tokens.dtype in HALF_DTYPES and is_short(tokens.shape[1], head_dim) and tokens.shape[0] > 0
    return fits and _runs_kernels(tokens)


def fits_embedding(x: Tensor) -> bool:
    """Whether the kernels of `embedding.py` support x: a contiguous one on their device, in code that is not traced."""
    traced = torch.compiler.is_compiling() or is_exporting()
    return x.is_contiguous() and x.numel() > 0 and not traced and _runs_kernels(x)


def fits_add_positions(patches: Tensor) -> bool:
    """Whether `embedding.add_positions` supports patches (batch, h, w, dim): those that it may return as they are."""
    half = autocast_dtype(patches.device.type) or patches.dtype
    return patches.dtype == half and half in HALF_DTYPES and fits_embedding(patches)


def prefers_channels_last(images: Tensor) -> bool:
    """Whether convolutions and norms of images (batch, channels, height, width) are fastest with channels last."""
    half = images.dtype in HALF_DTYPES or autocast_dtype(images.device.type) in HALF_DTYPES
    return half and _runs_kernels(images)


def group_norm(norm: nn.GroupNorm, x: Tensor, *, relu: bool = True, residual: Tensor | None = None) -> Tensor:
    """GroupNorm, the sum with a residual and ReLU: (batch, channels, height, width) -> the same shape"""
    fits = x.dtype in HALF_DTYPES and x.is_contiguous(memory_format=torch.channels_last) and x.shape[0] > 0
    if fits and is_plain(norm, nn.GroupNorm) and _runs_kernels(x):
        from vitral.kernels import group_norm as kernels

        parameters = (norm.weight, norm.bias, norm.num_groups, norm.eps)
        return kernels.group_norm(x, *parameters, relu=relu, residual=residual)
    x = norm(x) if residual is None else norm(x) + residual
    return F.relu(x) if relu else x


def _fits_onednn(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN's product in float32 on a CPU is faster than MKL's, which PyTorch uses."""
    if x.device.type != "cpu" or not _mkl_is_slow() or _is_transformed():
        return False
    plain = is_plain_tensor(x) and is_plain_tensor(weight) and bool(torch.backends.mkldnn.enabled)
    fits = x.dtype == weight.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    return plain and fits and x.numel() * weight.shape[0] >= _MIN_ONEDNN_PRODUCT


def _is_transformed() -> bool:
    """Whether operators are traced, counted, mapped or differentiated forward, all of which need PyTorch's own."""
    return torch.jit.is_tracing() or torch._C._len_torch_dispatch_stack() > 0 or _is_mapped_or_dual()


def _is_mapped_or_dual() -> bool:
    """Whether functions are transformed by torch.func, or differentiated forward; also while torch.compile traces."""
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


@cache
def _mkl_is_slow() -> bool:
    """Whether MKL leaves the 512-bit registers of this processor unused, as it does on AMD's."""
    try:
        vendor = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        vendor = platform.processor()
    is_wide = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return is_wide and "AuthenticAMD" in vendor and torch.backends.mkl.is_available() and has_onednn_linear()


def has_onednn_linear() -> bool:
    """Whether this PyTorch has oneDNN's linear layer, which is not part of its public interface."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def autocast_dtype(device: str) -> torch.dtype | None:
    """The half precision of an enabled autocast; the "meta" device has none."""
    enabled = device != "meta" and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if enabled else None


@cache
def supports_crop_resize(device: torch.device) -> bool:
    """Whether `resize.CropResize` runs on the device."""
    return device.type == "cuda" and _HAS_TRITON and torch.cuda.get_device_capability(device) >= _MIN_TRITON_CAPABILITY


def _runs_kernels(x: Tensor) -> bool:
    """Whether kernels may compute what operators of PyTorch would: the GPU has them, and nothing looks at operators."""
    if not _has_kernels(x.device) or _is_mapped_or_dual():
        return False
    return torch.compiler.is_compiling() or not (_is_transformed() or _has_own_dispatch(x))


def _has_kernels(device: torch.device) -> bool:
    return device.type == "cuda" and _HAS_TRITON and _compute_capability(device)[0] in _COMPUTE_CAPABILITIES


def has_fp8(device: torch.device) -> bool:
    """Whether our kernels multiply in FP8 on the device."""
    return _has_kernels(device)


def check_fp8(device: torch.device) -> None:
    """Raise UserError unless our kernels multiply in FP8 on the device."""
    if not has_fp8(device):
        this = f"this is {torch.cuda.get_device_name(device)}" if device.type == "cuda" else f"this is {device.type}"
        raise UserError(
            f"FP8 needs a data-center GPU of NVIDIA's Hopper or Blackwell generation and Triton; {this}: "
            "use the precision bfloat16 or float32."
        )


# As `torch.compiler.assume_constant_result` does, which would import the compiler here: dynamo calls the functions and
# does not trace into them, where it would warn of a cache, and not know the names of methods.
setattr(_has_kernels, "_dynamo_marked_constant", True)  # noqa: B010
setattr(_has_own_forward, "_dynamo_marked_constant", True)  # noqa: B010
setattr(_is_mapped_or_dual, "_dynamo_marked_constant", True)  # noqa: B010


@cache
def _compute_capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def on_device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Make the tensor's GPU the current one, where kernels are launched; autograd does so in backward passes."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def ceil_div(total: int, part: int) -> int:
    """Number of parts that cover the total, as an `int` (for type checkers, `triton.cdiv` may be a `constexpr`)."""
    return -(-total // part)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least `n`."""
    return 1 << (n - 1).bit_length()


def launch(
    kernel: Any, programs: tuple[int, ...], *arguments: Any, warps: int = 4, stages: int = 3, **constants: Any
) -> None:
    """Launch a Triton kernel.

    Args:
        kernel: decorated with `triton.jit`.
        programs: the launch grid.
        arguments: tensors and numbers.
        warps: per program.
        stages: of the software pipelining of loops that multiply.
        constants: its `tl.constexpr` parameters.
    """
    kernel[programs](*arguments, **constants, num_warps=warps, num_stages=stages)
