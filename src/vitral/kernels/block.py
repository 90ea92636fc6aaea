"""One pre-norm block in half precision, forward and backward, in as few passes over memory as possible.

What `models/layers.py` computes layer by layer is computed here with kernels that do several things in one pass: a
residual sum with the LayerNorm after it (and stochastic depth before it), attention that reads the projection as it is,
GELU's gradient with the sums around it. Matrix products stay with cuBLAS. A block saves the outputs of its two norms,
of the qkv projection, of attention and of the MLP's hidden layer; residual sums are not saved, and the GELU's output
only where asked for: else it is recomputed in the backward pass.

With rotary position embeddings, queries and keys are rotated in place after the projection, and the rotated ones saved.

The last sum of a block is left to the next one, where it shares a pass with a LayerNorm: between blocks the residual
stream is a pair, the sum so far and the branch (with its bias) that is still to be added.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.kernels import attention, cublas
from vitral.kernels.fused_ops import (
    BlockWeights,
    BranchDrop,
    LinearWeights,
    NonAffineNorm,
    NormWeights,
    add_norm,
    add_norm_backward,
    fold_norm,
    gelu_backward,
    unfold_norm,
)
from vitral.kernels.gelu import linear_gelu, quick_gelu
from vitral.kernels.rotary import RotaryTables, rotate_, rotate_back_


class BlockInputs(NamedTuple):
    """Tensors that a block reads, flat as an operator takes them."""

    x: Tensor  # the sum so far, (rows, dim)
    branch: Tensor | None  # to be added to it, (rows, dim)
    bias: Tensor | None  # of that branch, (dim,)
    scale1: Tensor  # from here on the weights, without the bias of the last layer, which the next block adds
    shift1: Tensor
    wqkv: Tensor
    bqkv: Tensor
    wout: Tensor
    bout: Tensor
    scale2: Tensor
    shift2: Tensor
    whidden: Tensor
    bhidden: Tensor
    woutput: Tensor
    half_out: Tensor  # two of the weights in the dtype of x
    half_output: Tensor


class BlockOptions(NamedTuple):
    """What describes a block besides its weights, flat as an operator takes it; tensors get no gradient."""

    draws_before: Tensor | None  # of stochastic depth on the branch before the block
    draws: Tensor | None  # of stochastic depth on attention
    cos: Tensor | None  # of RoPE
    sin: Tensor | None
    adjacent: bool
    batch: int
    heads: int
    gelu: str  # "tanh", "none" (exact) or "quick"
    eps1: float
    eps2: float
    keep_before: float
    keep: float
    saves_gelu: bool

    @property
    def drop_before(self) -> BranchDrop | None:
        """Stochastic depth of the branch that the block adds first."""
        return as_drop(self.draws_before, self.keep_before)

    @property
    def drop(self) -> BranchDrop | None:
        """Stochastic depth of the attention branch."""
        return as_drop(self.draws, self.keep)

    @property
    def rotation(self) -> RotaryTables | None:
        """How queries and keys are rotated."""
        return None if self.cos is None or self.sin is None else (self.cos, self.sin, self.adjacent)


class BlockOutputs(NamedTuple):
    """The residual stream after a block, and what is saved for its backward pass; (rows, dim) unless noted."""

    total: Tensor
    branch: Tensor
    normed1: Tensor
    moments1: Tensor  # (2, rows)
    qkv: Tensor  # (rows, 3 * dim)
    attn: Tensor  # output of attention, (batch, tokens, heads, dim / heads)
    lse: Tensor  # (batch, heads, tokens)
    normed2: Tensor
    moments2: Tensor  # (2, rows)
    h: Tensor  # the MLP's hidden layer before its GELU, (rows, mlp)
    activated: Tensor  # and after it, or empty
    folded_qkv: Tensor  # weights with those of the norms before them folded in, (3 * dim, dim)
    folded_hidden: Tensor  # (mlp, dim)


class BlockSaved(NamedTuple):
    """What the backward pass of a block reads: of its outputs, and of its inputs."""

    normed1: Tensor
    moments1: Tensor
    qkv: Tensor
    attn: Tensor
    lse: Tensor
    normed2: Tensor
    moments2: Tensor
    h: Tensor
    activated: Tensor
    folded_qkv: Tensor
    folded_hidden: Tensor
    half_out: Tensor
    half_output: Tensor
    wqkv: Tensor
    scale1: Tensor
    shift1: Tensor
    whidden: Tensor
    scale2: Tensor
    shift2: Tensor


class BlockGradients(NamedTuple):
    """Gradients of a block's inputs; norms have (2, dim) for weight and bias."""

    x: Tensor
    branch: Tensor  # `x` itself without stochastic depth
    bias: Tensor
    norm1: Tensor
    wqkv: Tensor
    bqkv: Tensor
    wout: Tensor
    bout: Tensor
    norm2: Tensor
    whidden: Tensor
    bhidden: Tensor
    woutput: Tensor


def as_drop(draws: Tensor | None, keep: float) -> BranchDrop | None:
    """Stochastic depth where there are draws for it."""
    return None if draws is None else BranchDrop(draws, keep)


def to_save(inputs: BlockInputs, outputs: BlockOutputs) -> BlockSaved:
    """What the backward pass reads."""
    weights = (inputs.wqkv, inputs.scale1, inputs.shift1, inputs.whidden, inputs.scale2, inputs.shift2)
    return BlockSaved(*outputs[2:], inputs.half_out, inputs.half_output, *weights)


def forward(inputs: BlockInputs, options: BlockOptions) -> BlockOutputs:
    """A block in training, with its norms folded into the linear layers after them."""
    x, branch, bias, *_ = inputs
    norm1 = NormWeights(inputs.scale1, inputs.shift1, options.eps1)
    norm2 = NormWeights(inputs.scale2, inputs.shift2, options.eps2)
    folded_qkv = fold_norm(LinearWeights(inputs.wqkv, inputs.bqkv), norm1, x.dtype)
    folded_hidden = fold_norm(LinearWeights(inputs.whidden, inputs.bhidden), norm2, x.dtype)
    first = add_norm(x, branch, bias, NonAffineNorm(norm1.eps), options.drop_before)
    qkv = torch.addmm(folded_qkv.bias, first.normed, folded_qkv.weight.t())
    if options.rotation is not None:
        rotate_(_split_heads(qkv, options), options.rotation)
    attn, lse = attention.forward(_split_heads(qkv, options))
    second = add_norm(
        first.total, _merge_heads(attn) @ inputs.half_out.t(), inputs.bout, NonAffineNorm(norm2.eps), options.drop
    )
    activated, h = _linear_gelu_saved(second.normed, folded_hidden, options.gelu)
    return BlockOutputs(
        second.total,
        activated @ inputs.half_output.t(),
        *(first.normed, first.moments, qkv, attn, lse, second.normed, second.moments, h),
        activated if options.saves_gelu else h.new_empty(0),
        *(folded_qkv.weight, folded_hidden.weight),
    )


def backward(dx: Tensor, dbranch: Tensor, saved: BlockSaved, options: BlockOptions) -> BlockGradients:
    """From the gradients of the sum and the branch after the block, (rows, dim) each, those of its inputs."""
    activated = saved.activated if options.saves_gelu else None
    dh, activated, dbhidden = gelu_backward(saved.h, dbranch @ saved.half_output, options.gelu, activated)
    dwoutput = _weight_grad(dbranch, activated)
    del activated
    dx, dattn_branch, sums = add_norm_backward(
        saved.normed2, saved.moments2, None, dx, dh @ saved.folded_hidden, options.drop
    )
    dhidden = unfold_norm(_weight_grad(dh, saved.normed2), dbhidden, saved.whidden, saved.scale2, saved.shift2)
    dbout = sums[0]
    dwout = _weight_grad(dattn_branch, _merge_heads(saved.attn))
    dattn = (dattn_branch @ saved.half_out).view(saved.attn.shape)
    del dattn_branch
    dqkv, _ = attention.backward(_split_heads(saved.qkv, options), None, saved.attn, saved.lse, dattn)
    dqkv_sums = None if options.rotation is None else rotate_back_(dqkv, options.rotation)
    dqkv = dqkv.view(saved.qkv.shape)
    dx, dbefore, sums = add_norm_backward(
        saved.normed1, saved.moments1, None, dx, dqkv @ saved.folded_qkv, options.drop_before
    )
    dbqkv = _qkv_bias_grad(dqkv, dqkv_sums, dbout, saved.half_out)
    dproject = unfold_norm(_weight_grad(dqkv, saved.normed1), dbqkv, saved.wqkv, saved.scale1, saved.shift1)
    return BlockGradients(
        *(dx, dbefore, sums[0]),
        *(dproject.norm, dproject.weight, dbqkv, dwout, dbout),
        *(dhidden.norm, dhidden.weight, dbhidden, dwoutput),
    )


def attention_branch(normed: Tensor, layer: BlockWeights, options: BlockOptions) -> Tensor:
    """The attention branch in inference, without its last bias: (rows, dim) -> (rows, dim)"""
    qkv = _split_heads(_linear(normed, layer.qkv), options)
    if options.rotation is not None:
        rotate_(qkv, options.rotation)
    attn, _ = attention.forward(qkv)
    return _matmul(_merge_heads(attn), layer.out.weight)


def mlp_branch(normed: Tensor, layer: BlockWeights, options: BlockOptions) -> Tensor:
    """The MLP branch in inference, without its last bias: (rows, dim) -> (rows, dim)"""
    return _matmul(_linear_gelu(normed, layer.hidden, options.gelu), layer.output.weight)


def _split_heads(qkv: Tensor, options: BlockOptions) -> Tensor:
    """(batch * tokens, 3 * dim) -> (batch, tokens, 3, heads, dim / heads)"""
    return qkv.view(options.batch, -1, 3, options.heads, qkv.shape[1] // (3 * options.heads))


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
    weight, bias = linear.weight.to(x.dtype), linear.bias.to(x.dtype)
    if gelu != "tanh":
        return linear_gelu(x, weight, bias, gelu)
    if x.is_cuda:  # PyTorch hands this to cuBLAS as one product
        return torch._addmm_activation(bias, x, weight.t(), use_gelu=True)
    return F.gelu(torch.addmm(bias, x, weight.t()), approximate="tanh")
