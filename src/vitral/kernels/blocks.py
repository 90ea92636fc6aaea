"""A stack of pre-norm blocks in half precision, forward and backward, in as few passes over memory as possible.

What `models/layers.py` computes block by block is computed here with kernels that do several things in one pass: a
residual sum with the LayerNorm after it, attention with whole rows on chip, GELU's gradient with the sums around it.
Matrix products stay with cuBLAS. A block saves the outputs of its two norms, of the qkv projection, of attention and
of the MLP's hidden layer; residual sums are not saved, and in every second block the GELU is recomputed in the
backward pass.

With rotary position embeddings, queries and keys are rotated in place after the projection, and the rotated ones saved.

The last sum of a block is left to the next one, where it shares a pass with a LayerNorm: between blocks the residual
stream is a pair, the sum so far and the branch (with its bias) that is still to be added.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from vitral.kernels import attention, cublas
from vitral.kernels.dispatch import on_device_of
from vitral.kernels.fused_ops import (
    BlockWeights,
    LinearWeights,
    NonAffineNorm,
    NormWeights,
    add_norm,
    add_norm_backward,
    fold_norm,
    gelu_backward,
    unfold_norm,
)
from vitral.kernels.quick_gelu import linear_quick_gelu, quick_gelu
from vitral.kernels.rotary import RotaryTables, rotate_, rotate_back_


class BlockShape(NamedTuple):
    """What describes a block besides its weights."""

    batch: int
    heads: int
    gelu: str  # "tanh", "none" (exact) or "quick"


def encode(
    x: Tensor,
    layers: Sequence[BlockWeights],
    final_norm: NormWeights,
    *,
    heads: int,
    gelu: str,
    rotations: Sequence[RotaryTables | None],
) -> Tensor:
    """All blocks and the final norm; with a gradient where the weights are trained.

    Args:
        x: (batch, tokens, dim) in half precision.
        layers: weights of the blocks.
        final_norm: weights of the norm after them.
        heads: of the attention.
        gelu: "tanh", "none" (exact) or "quick".
        rotations: how each block rotates its queries and keys, if it does; the tables get no gradient.

    Returns:
        (batch, tokens, dim)
    """
    shape = BlockShape(x.shape[0], heads, gelu)
    run = _encode_trained if torch.is_grad_enabled() and final_norm.weight.requires_grad else _encode_inference
    with on_device_of(x):
        return run(x.flatten(0, 1).contiguous(), layers, final_norm, shape, rotations).view(x.shape)


def _encode_inference(
    x: Tensor,
    layers: Sequence[BlockWeights],
    final_norm: NormWeights,
    shape: BlockShape,
    rotations: Sequence[RotaryTables | None],
) -> Tensor:
    """Nothing is saved for a backward pass: (rows, dim) -> (rows, dim)"""
    branch, bias = None, None
    for layer, rotation in zip(layers, rotations, strict=True):
        x, normed, _ = add_norm(x, branch, bias, layer.norm1)
        del branch  # part of the sum by now; frees memory before the peak
        x, normed, _ = add_norm(x, _attention_branch(normed, layer, shape, rotation), layer.out.bias, layer.norm2)
        branch = _matmul(_linear_gelu(normed, layer.hidden, shape.gelu), layer.output.weight)
        bias = layer.output.bias
    return add_norm(x, branch, bias, final_norm).normed


def _attention_branch(normed: Tensor, layer: BlockWeights, shape: BlockShape, rotation: RotaryTables | None) -> Tensor:
    """The attention branch without its last bias: (rows, dim) -> (rows, dim)"""
    qkv = _split_heads(_linear(normed, layer.qkv), shape)
    if rotation is not None:
        rotate_(qkv, rotation)
    attn, _ = attention.forward(qkv)
    return _matmul(_merge_heads(attn), layer.out.weight)


def _encode_trained(
    x: Tensor,
    layers: Sequence[BlockWeights],
    final_norm: NormWeights,
    shape: BlockShape,
    rotations: Sequence[RotaryTables | None],
) -> Tensor:
    branch, bias = None, None
    half_weights = _to_half([weight for layer in layers for weight in (layer.out.weight, layer.output.weight)], x.dtype)
    half_pairs = zip(half_weights[::2], half_weights[1::2], strict=True)
    for index, (layer, half_pair, rotation) in enumerate(zip(layers, half_pairs, rotations, strict=True)):
        weights = (*layer.norm1[:2], *layer.qkv, *layer.out, *layer.norm2[:2], *layer.hidden, layer.output.weight)
        saves_gelu = index % 2 == 1  # saving all of them takes twice the memory, recomputing all of them twice the time
        x, branch = _Block.apply(x, branch, bias, *weights, layer, half_pair, shape, rotation, saves_gelu)
        bias = layer.output.bias
    return _FinalNorm.apply(x, branch, bias, *final_norm)


@torch.no_grad()
def _to_half(weights: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """All in one kernel: one per weight would take longer to launch than to run."""
    half_weights = [torch.empty_like(weight, dtype=dtype) for weight in weights]
    torch._foreach_copy_(half_weights, weights)
    return half_weights


class _SavedTensors(NamedTuple):
    """What a block saves for its backward pass, (rows, dim) unless noted."""

    normed1: Tensor
    moments1: Tensor  # (2, rows)
    qkv: Tensor  # (rows, 3 * dim)
    attn: Tensor  # output of attention, (batch, tokens, heads, dim / heads)
    lse: Tensor  # (batch, heads, tokens)
    normed2: Tensor
    moments2: Tensor  # (2, rows)
    h: Tensor  # the MLP's hidden layer before its GELU, (rows, mlp)


class _MatmulWeights(NamedTuple):
    """The weights of a block's matrix products in half precision; those of the norms are folded into two of them."""

    qkv: Tensor
    out: Tensor
    hidden: Tensor
    output: Tensor


class _Block(torch.autograd.Function):
    """Sum so far (rows, dim), branch to be added (rows, dim) and its bias (dim,) -> sum and branch after the block.

    The weights are arguments so that they get gradients: those of `layer` in order, without the bias of `output`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, branch: Tensor | None, bias: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
        *_, layer, (wout, woutput), shape, rotation, saves_gelu = rest
        qkv_folded = fold_norm(layer.qkv, layer.norm1, x.dtype)
        hidden_folded = fold_norm(layer.hidden, layer.norm2, x.dtype)
        first = add_norm(x, branch, bias, NonAffineNorm(layer.norm1.eps))
        qkv = torch.addmm(qkv_folded.bias, first.normed, qkv_folded.weight.t())
        if rotation is not None:
            rotate_(_split_heads(qkv, shape), rotation)
        attn, lse = attention.forward(_split_heads(qkv, shape))
        second = add_norm(first.total, _merge_heads(attn) @ wout.t(), layer.out.bias, NonAffineNorm(layer.norm2.eps))
        activated, h = _linear_gelu_saved(second.normed, hidden_folded, shape.gelu)
        ctx.save_for_backward(
            *_SavedTensors(first.normed, first.moments, qkv, attn, lse, second.normed, second.moments, h),
            *_MatmulWeights(qkv_folded.weight, wout, hidden_folded.weight, woutput),
            activated if saves_gelu else None,
        )
        ctx.block = (layer, shape, rotation, branch is not None)
        return second.total, activated @ woutput.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        dx, dbranch = (grad.contiguous() for grad in grads)
        tensors = ctx.saved_tensors
        saved, half, activated = _SavedTensors(*tensors[:8]), _MatmulWeights(*tensors[8:12]), tensors[12]
        layer, shape, rotation, has_branch = ctx.block
        dh, activated, dbhidden = gelu_backward(saved.h, dbranch @ half.output, shape.gelu, activated)
        dwoutput = _weight_grad(dbranch, activated)
        del activated
        dx, sums = add_norm_backward(saved.normed2, saved.moments2, None, dx, dh @ half.hidden)
        hidden = unfold_norm(_weight_grad(dh, saved.normed2), dbhidden, layer.hidden, layer.norm2)
        dbout = sums[0]
        dwout = _weight_grad(dx, _merge_heads(saved.attn))
        dattn = (dx @ half.out).view(saved.attn.shape)
        dqkv, _ = attention.backward(_split_heads(saved.qkv, shape), None, saved.attn, saved.lse, dattn)
        dqkv_sums = None if rotation is None else rotate_back_(dqkv, rotation)
        dqkv = dqkv.view(saved.qkv.shape)
        dx, sums = add_norm_backward(saved.normed1, saved.moments1, None, dx, dqkv @ half.qkv)
        dbqkv = _qkv_bias_grad(dqkv, dqkv_sums, dbout, half.out)
        qkv = unfold_norm(_weight_grad(dqkv, saved.normed1), dbqkv, layer.qkv, layer.norm1)
        before = (dx, dx, sums[0]) if has_branch else (dx, None, None)
        attention_grads = (qkv.scale, qkv.shift, qkv.weight, dbqkv, dwout, dbout)
        mlp_grads = (hidden.scale, hidden.shift, hidden.weight, dbhidden, dwoutput)
        return *before, *attention_grads, *mlp_grads, None, None, None, None, None


class _FinalNorm(torch.autograd.Function):
    """The last residual sum and the norm after the blocks: (rows, dim), (rows, dim), (dim,) -> (rows, dim)"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, branch: Tensor, bias: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
        output = add_norm(x, branch, bias, NormWeights(scale, shift, eps))
        ctx.save_for_backward(output.total, output.moments, scale)
        return output.normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        total, moments, scale = ctx.saved_tensors
        dx, (dbias, dscale, dshift) = add_norm_backward(total, moments, scale, None, grads[0].contiguous())
        return dx, dx, dbias, dscale, dshift, None


def _split_heads(qkv: Tensor, shape: BlockShape) -> Tensor:
    """(batch * tokens, 3 * dim) -> (batch, tokens, 3, heads, dim / heads)"""
    return qkv.view(shape.batch, -1, 3, shape.heads, qkv.shape[1] // (3 * shape.heads))


def _merge_heads(attn: Tensor) -> Tensor:
    """(batch, tokens, heads, dim / heads) -> (batch * tokens, dim)"""
    return attn.view(attn.shape[0] * attn.shape[1], -1)


def _linear_gelu_saved(x: Tensor, linear: LinearWeights, gelu: str) -> tuple[Tensor, Tensor]:
    """GELU(h) and h = x weight' + bias: (rows, in) -> (rows, out), (rows, out)"""
    aligned = linear.weight.shape[0] % 8 == 0  # cuBLAS's requirement for the memory of h
    if gelu == "tanh" and x.is_cuda and aligned and cublas.is_available(x.device, x.dtype):
        return cublas.linear_gelu(x, *linear)
    h = torch.addmm(linear.bias, x, linear.weight.t())
    return (quick_gelu(h) if gelu == "quick" else F.gelu(h, approximate=gelu)), h


def _qkv_bias_grad(dqkv: Tensor, dqkv_sums: Tensor | None, dbout: Tensor, wout: Tensor) -> Tensor:
    """The sum of dqkv over tokens, of which only the queries' third has to be summed: (rows, 3 dim) -> float32 (3 dim,)

    Attention weights sum to 1 over the keys. Hence the gradients of the values sum to those of the outputs, a sum which
    the gradient of the output bias is; and those of the keys sum to 0, as a bias common to all keys changes nothing;
    but not where keys are rotated after the bias: then `dqkv_sums` are the sums of queries and keys, (2, dim).
    """
    width = wout.shape[1]
    grad = torch.zeros(3, width, dtype=torch.float32, device=dqkv.device)
    if dqkv_sums is None:
        grad[0] = dqkv[:, :width].sum(0, dtype=torch.float32)
    else:
        grad[:2] = dqkv_sums
    grad[2] = dbout.to(wout.dtype) @ wout
    return grad.flatten()


def _weight_grad(left: Tensor, right: Tensor) -> Tensor:
    """left' right in float32, the gradient of a weight: (rows, i), (rows, j) -> (i, j)"""
    if left.is_cuda and left.dtype != torch.float32:
        return torch.mm(left.t(), right, out_dtype=torch.float32)
    return (left.t() @ right).float()


def _matmul(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.to(x.dtype).t()


def _linear(x: Tensor, linear: LinearWeights) -> Tensor:
    return torch.addmm(linear.bias.to(x.dtype), x, linear.weight.to(x.dtype).t())


def _linear_gelu(x: Tensor, linear: LinearWeights, gelu: str) -> Tensor:
    if gelu == "quick":
        return linear_quick_gelu(x, linear.weight.to(x.dtype), linear.bias.to(x.dtype))
    if gelu == "tanh" and x.is_cuda:  # PyTorch hands this to cuBLAS as one product
        return torch._addmm_activation(linear.bias.to(x.dtype), x, linear.weight.to(x.dtype).t(), use_gelu=True)
    return F.gelu(_linear(x, linear), approximate=gelu)
