"""Attention on the fused qkv projection without copies: custom kernels for short sequences, cuDNN's for long ones.

General flash kernels are built for long sequences; at 197 tokens they spend time on what short rows do not need. Here
the keys and values of a head stay on chip, a row of logits is never split, so the softmax needs a single pass, and
lengths are padded to a multiple of 16 instead of a power of two. Inputs and gradients keep the layout of the fused qkv
projection: nothing is transposed or copied around the kernels. The backward pass computes the logits twice, once along
the queries and once along the keys: that costs less than accumulating a gradient across programs.

Beyond 256 tokens, and for other head dimensions, `forward` and `backward` call cuDNN's attention through PyTorch, or
its flash attention where cuDNN's does not apply. They read queries, keys and values as views of the projection; their
three gradients are packed into one in a pass, which also sums those of the queries for the bias of the projection.
Without dropout nothing in them is random or read on the host, so that a CUDA graph can record them.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.kernels import quantize
from vitral.kernels.dispatch import E4M3, ceil_div, is_short, launch, on_device_of
from vitral.kernels.jit import attention as jit

Spans = tuple[tuple[int, int], ...]  # (first, size) of each part of a sequence
_ROWS = 64  # that a program computes at a time; tuned on an H200
_PACK_PROGRAM_ROWS, _PACK_ROWS, _PACK_COLUMNS = 32, 4, 1024  # per program, and at a time
_aten = torch.ops.aten


class AttentionGradients(NamedTuple):
    """Gradients of attention."""

    qkv: Tensor  # (batch, tokens, 3, heads, dim)
    bias: Tensor  # (batch, heads, tokens, tokens); without a bias it is empty
    query_sums: Tensor  # those of the queries over the tokens of each program, float32 (programs, heads * dim)


def reference(qkv: Tensor, bias: Tensor | None = None) -> Tensor:
    """(batch, tokens, 3, heads, dim), bias (batch, heads, tokens, tokens) -> (batch, tokens, heads, dim)"""
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2)


def split_sequence(n: int, max_size: int) -> Spans:
    """Split a sequence, padded to a multiple of 16, into powers of two up to `max_size`: 197 -> 128 + 64 + 16."""
    spans, first = [], 0
    while first < n:
        remaining = -(-(n - first) // 16) * 16
        size = min(max_size, 1 << (remaining.bit_length() - 1))
        spans.append((first, size))
        first += size
    return tuple(spans)


def _launch(
    kernel: Any, tensors: tuple[Any, ...], qkv: Tensor, bias: Tensor | None, max_size: int, **constants: bool
) -> None:
    b, n, _, heads, d = qkv.shape
    launch(
        kernel, (b * heads, _programs_per_head(qkv)), *tensors, heads, d**-0.5,
        N=n, D=d, ROWS=_ROWS, PARTS=split_sequence(n, max_size), HAS_BIAS=bias is not None, stages=2, **constants,
    )  # fmt: skip


def _programs_per_head(qkv: Tensor) -> int:
    b, n, _, heads, _ = qkv.shape
    return ceil_div(n, _ROWS) if b * heads < 256 else 1  # a GPU has about 132 multiprocessors


def forward(qkv: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As the reference, for contiguous inputs; and the log-sum-exp for the backward pass, (batch, heads, tokens)

    A bias is for short sequences only.
    """
    if not is_short(qkv.shape[1], qkv.shape[4]):
        return _long_forward(qkv)
    out, lse = _empty(qkv)
    outputs = {"HAS_OUT": True, "HAS_QUANTIZED": False}
    _launch(jit.attention_forward, (qkv, bias, out, None, None, lse), qkv, bias, 128, **outputs)
    return out, lse


def forward_fp8(qkv: Tensor, scale: Tensor, *, half: bool) -> tuple[Tensor | None, Tensor, Tensor]:
    """As `forward` without a bias, and the output divided by `scale`, a number on the device, in FP8.

    Without `half` the first output is None.
    """
    if not is_short(qkv.shape[1], qkv.shape[4]):
        out, lse = _long_forward(qkv)
        return out, lse, quantize.quantize(out, scale)
    out, lse = _empty(qkv)
    quantized = torch.empty_like(out, dtype=E4M3)
    outputs = {"HAS_OUT": half, "HAS_QUANTIZED": True}
    tensors = (qkv, None, out if half else None, quantized, scale, lse)
    _launch(jit.attention_forward, tensors, qkv, None, 128, **outputs)
    return out if half else None, lse, quantized


def backward(qkv: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor, grad: Tensor) -> AttentionGradients:
    """Gradients of `forward`, from its outputs and the gradient of the first."""
    if not is_short(qkv.shape[1], qkv.shape[4]):
        dqkv, query_sums = pack_gradients(*_long_backward(qkv, out, lse, grad))
        return AttentionGradients(dqkv, qkv.new_empty(0), query_sums)
    dqkv, dbias = _empty_gradients(qkv, bias)
    delta, (b, *_, heads, d) = torch.empty_like(lse), qkv.shape
    sums = lse.new_empty(b * _programs_per_head(qkv), heads * d)
    _launch(jit.attention_queries, (qkv, bias, out, grad, lse, delta, dqkv, dbias, sums), qkv, bias, 64)
    _launch(jit.attention_keys, (qkv, bias, grad, lse, delta, dqkv), qkv, bias, 128)
    return AttentionGradients(dqkv, dbias, sums)


def _long_forward(qkv: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    if not qkv.is_cuda:
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
    elif _uses_cudnn(q, k, v):
        out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True)
    else:
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(q, k, v)
    # Already in this layout on a GPU, where the output has that of the queries.
    return out.transpose(1, 2).contiguous(), lse.reshape(q.shape[:3]).contiguous()


def _long_backward(qkv: Tensor, out: Tensor, lse: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, (batch, heads, tokens, dim) each"""
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    grad, out, n = grad.transpose(1, 2), out.transpose(1, 2), qkv.shape[1]
    if not qkv.is_cuda:
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, False)
    if _uses_cudnn(q, k, v):
        seed = torch.empty((), dtype=torch.int64, device=qkv.device)  # of dropout, which there is none of
        lse = lse.unsqueeze(-1) if _cudnn_lse_dims(q.device, q.dtype, q.shape[3]) == 4 else lse
        return _aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, out, lse, seed, seed, None, None, None, n, n, 0.0, False
        )
    seed = torch.empty(2, dtype=torch.uint64, device=qkv.device)
    return _aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, None, None, n, n, 0.0, False, seed, seed
    )


def pack_gradients_reference(dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
    """From (batch, heads, tokens, dim) each: (batch, tokens, 3, heads, dim), and the sums of `dq`, (1, heads * dim)"""
    dqkv = torch.stack([grad.transpose(1, 2) for grad in (dq, dk, dv)], dim=2)
    return dqkv, dqkv[:, :, 0].sum((0, 1), dtype=torch.float32).view(1, -1)


def pack_gradients(dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
    """As the reference, in one pass, with one row of sums per program.

    The three have the same layout, as attention kernels return them.
    """
    if any(grad.stride() != dq.stride() for grad in (dk, dv)) or dq.stride(3) != 1:
        dq, dk, dv = (grad.contiguous() for grad in (dq, dk, dv))
    b, heads, n, d = dq.shape
    rows, width = b * n, heads * d
    dqkv = dq.new_empty(b, n, 3, heads, d)
    programs = ceil_div(rows, _PACK_PROGRAM_ROWS)
    sums = dq.new_empty(programs, width, dtype=torch.float32)
    launch(
        jit.pack_gradients, (programs, ceil_div(width, _PACK_COLUMNS)),
        dq, dk, dv, dqkv, sums, *dq.stride()[:3], n, rows, width,
        D=d, PROGRAM_ROWS=_PACK_PROGRAM_ROWS, ROWS=_PACK_ROWS, COLUMNS=_PACK_COLUMNS,
    )  # fmt: skip
    return dqkv, sums


def _uses_cudnn(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether PyTorch allows cuDNN's attention for these inputs (batch, heads, tokens, dim), and it works."""
    params = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, False, False)
    return torch.backends.cuda.can_use_cudnn_attention(params) and _cudnn_lse_dims(q.device, q.dtype, q.shape[3]) > 0


@cache
def _cudnn_lse_dims(device: torch.device, dtype: torch.dtype, head_dim: int) -> int:
    """Dimensions of cuDNN's log-sum-exp, 3 or 4 by PyTorch's version; 0 where cuDNN fails on a small example."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        wide = torch.linspace(-1, 1, 2 * 320 * head_dim, device=device).view(1, 2, 320, head_dim).sin()
        tokens = wide.to(dtype)
        try:
            out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(tokens, tokens, tokens, None, True)
        except RuntimeError:
            return 0
        expected = (wide @ wide.transpose(2, 3) * head_dim**-0.5).softmax(-1) @ wide
        return lse.ndim if torch.allclose(out.float(), expected, rtol=5e-2, atol=5e-2) else 0


def _empty(qkv: Tensor) -> tuple[Tensor, Tensor]:
    b, n, _, heads, d = qkv.shape
    return qkv.new_empty(b, n, heads, d), qkv.new_empty(b, heads, n, dtype=torch.float32)


def _empty_gradients(qkv: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    dqkv = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    if bias is None:
        return dqkv, qkv.new_empty(0)
    return dqkv, torch.empty_like(bias, memory_format=torch.contiguous_format)


# Custom operators, so that torch.compile calls them as they are and does not trace into them.
@torch.library.custom_op("vitral::short_attention", mutates_args=())
def short_attention(qkv: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """`forward` as a differentiable operator."""
    with on_device_of(qkv):
        return forward(qkv.contiguous(), _contiguous(bias))


@short_attention.register_fake
def _(qkv: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return _empty(qkv)


@torch.library.custom_op("vitral::short_attention_backward", mutates_args=())
def short_attention_backward(
    qkv: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    return backward(qkv.contiguous(), _contiguous(bias), out, lse, grad.contiguous())[:2]


@short_attention_backward.register_fake
def _(qkv: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    return _empty_gradients(qkv, bias)


def _contiguous(bias: Tensor | None) -> Tensor | None:
    """A bias that all images share comes as a view that repeats it."""
    return None if bias is None else bias.contiguous()


def _save(ctx: Any, inputs: tuple[Tensor, Tensor | None], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _gradients(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor | None]:
    qkv, bias, out, lse = ctx.saved_tensors
    dqkv, dbias = short_attention_backward(qkv, bias, out, lse, grad)
    return dqkv, dbias if bias is not None else None


short_attention.register_autograd(_gradients, setup_context=_save)
