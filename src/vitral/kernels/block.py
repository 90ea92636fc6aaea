"""One pre-norm block in half precision, forward and backward, in as few passes over memory as possible.

What `models/layers.py` computes layer by layer is computed here with kernels that do several things in one pass: a
residual sum with the LayerNorm after it (and stochastic depth before it), attention that reads the projection as it is,
GELU's gradient with the sums around it. Matrix products stay with cuBLAS. A block saves the outputs of its two norms,
of the qkv projection, of attention and of the MLP's hidden layer; residual sums are not saved, and the GELU's output
only if requested: else it is recomputed in the backward pass.

With rotary position embeddings, queries and keys are rotated in place after the projection, and the rotated ones saved.

In FP8 (`BlockOptions.fp8`, see `fp8.py`) the norms, attention and the GELU also write what the next product reads, and
gradients are quantised. Attention, norms and residual sums stay in half precision.

The last sum of a block is left to the next one, where it shares a pass with a LayerNorm: between blocks the residual
stream is a pair, the sum so far and the branch (with its bias) that is still to be added.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vitral.kernels import attention, fp8, linears, quantize
from vitral.kernels.fp8 import Fp8BlockWeights, Fp8Units, MlpGradients, quantize_block
from vitral.kernels.fused_ops import (
    AddNormOutput,
    BlockWeights,
    BranchDrop,
    Fp8Target,
    LinearWeights,
    NonAffineNorm,
    NormFormats,
    NormWeights,
    add_norm,
    add_norm_backward,
    column_sums,
    fold_norm,
    gelu_backward,
    unfold_norm,
)
from vitral.kernels.quantize import Fp8Rows, Fp8Weight
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
    fp8: bool

    @property
    def drop_before(self) -> BranchDrop | None:
        """Stochastic depth of the branch that the block adds first."""
        return as_drop(self.draws_before, self.keep_before)

    @property
    def drop(self) -> BranchDrop | None:
        """Stochastic depth of the attention branch."""
        return as_drop(self.draws, self.keep)

    @property
    def formats(self) -> NormFormats:
        """What the norms write in inference."""
        return "fp8" if self.fp8 else "half"

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
    # Weights with those of the norms before them folded in, (3 * dim, dim) and (mlp, dim); in FP8 their e4m3 values
    # transposed, those of the other two layers, the scales of qkv, out, hidden and output layer one after another, and
    # the memory of `Fp8Units`.
    folded_qkv: Tensor
    folded_hidden: Tensor
    fp8_out: Tensor  # (dim, dim), or empty
    fp8_output: Tensor  # (mlp, dim), or empty
    scales: Tensor  # (5 * dim + mlp,), or empty
    units: Tensor  # or empty


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
    fp8_out: Tensor
    fp8_output: Tensor
    scales: Tensor
    units: Tensor
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
    """Stochastic depth if there are draws for it."""
    return None if draws is None else BranchDrop(draws, keep)


def to_save(inputs: BlockInputs, outputs: BlockOutputs) -> BlockSaved:
    """What the backward pass reads."""
    weights = (inputs.wqkv, inputs.scale1, inputs.shift1, inputs.whidden, inputs.scale2, inputs.shift2)
    return BlockSaved(*outputs[2:], inputs.half_out, inputs.half_output, *weights)


def inference_weights(
    layer: BlockWeights | Fp8BlockWeights, options: BlockOptions, dtype: torch.dtype
) -> BlockWeights | Fp8BlockWeights:
    """The weights that a block reads in inference: as they are, or quantised now if they were not before."""
    return quantize_block(layer, dtype) if options.fp8 and isinstance(layer, BlockWeights) else layer


def forward(inputs: BlockInputs, options: BlockOptions) -> BlockOutputs:
    """A block in training, with its norms folded into the linear layers after them."""
    x, branch, bias, *_ = inputs
    layer = _training_weights(inputs, options)
    formats: NormFormats = "both" if options.fp8 else "half"
    first = add_norm(x, branch, bias, NonAffineNorm(options.eps1), options.drop_before, formats)
    units = quantize.unit_scales(x) if options.fp8 else None
    qkv = linears.linear(product_input(first, units), layer.qkv)
    if options.rotation is not None:
        rotate_(_split_heads(qkv, options), options.rotation)
    if isinstance(layer, Fp8BlockWeights):
        attn, lse, quantized = attention.forward_fp8(_split_heads(qkv, options), layer.attn_scale, half=True)
        assert attn is not None
        assert units is not None
        attn_branch = linears.linear(Fp8Rows(_merge_heads(quantized), units), layer.out, has_bias=False)
    else:
        attn, lse = attention.forward(_split_heads(qkv, options))
        attn_branch = linears.linear(_merge_heads(attn), layer.out, has_bias=False)
    second = add_norm(first.total, attn_branch, inputs.bout, NonAffineNorm(options.eps2), options.drop, formats)
    if isinstance(layer, Fp8BlockWeights):
        assert units is not None
        quantized = Fp8Rows(second.quantized, units)
        activated, h = fp8.linear_gelu_saved(quantized, layer.hidden, layer.gelu_scale, options.gelu)
    else:
        activated, h = linears.linear_gelu_saved(second.normed, layer.hidden, options.gelu)
    return BlockOutputs(
        second.total,
        linears.linear(activated, layer.output, has_bias=False),
        *(first.normed, first.moments, qkv, attn, lse, second.normed, second.moments, h),
        activated if options.saves_gelu and isinstance(activated, Tensor) else h.new_empty(0),
        *_backward_weights(layer),
    )


def _training_weights(inputs: BlockInputs, options: BlockOptions) -> BlockWeights | Fp8BlockWeights:
    """The weights of the products, in half precision with the norms folded in, or in FP8."""
    norm1 = NormWeights(inputs.scale1, inputs.shift1, options.eps1)
    norm2 = NormWeights(inputs.scale2, inputs.shift2, options.eps2)
    qkv, hidden = LinearWeights(inputs.wqkv, inputs.bqkv), LinearWeights(inputs.whidden, inputs.bhidden)
    # The bias of the last layer is left to the next block; here the place is taken by another.
    out, output = LinearWeights(inputs.half_out, inputs.bout), LinearWeights(inputs.half_output, inputs.bout)
    if options.fp8:
        return quantize_block(BlockWeights(norm1, qkv, out, norm2, hidden, output), inputs.x.dtype)
    qkv, hidden = (fold_norm(*pair, inputs.x.dtype) for pair in ((qkv, norm1), (hidden, norm2)))
    return BlockWeights(norm1, qkv, out, norm2, hidden, output)


def _backward_weights(layer: BlockWeights | Fp8BlockWeights) -> tuple[Tensor, ...]:
    """The last fields of BlockOutputs."""
    if isinstance(layer, BlockWeights):
        none = (layer.qkv.weight.new_empty(0) for _ in range(4))  # no two are the same memory
        return layer.qkv.weight, layer.hidden.weight, *none
    linears = (layer.qkv, layer.hidden, layer.out, layer.output)
    scales = [linear.weight.scale for linear in (layer.qkv, layer.out, layer.hidden, layer.output)]
    values = (quantize.transpose(linear.weight.values) for linear in linears)
    return *values, torch.cat(scales), layer.units


class _BackwardWeights(NamedTuple):
    """What gives the gradients of the inputs of a block's linear layers."""

    qkv: Tensor | Fp8Weight
    out: Tensor | Fp8Weight
    hidden: Tensor | Fp8Weight
    output: Tensor | Fp8Weight
    units: Fp8Units | None = None


def _saved_weights(saved: BlockSaved) -> _BackwardWeights:
    if saved.scales.numel() == 0:
        return _BackwardWeights(saved.folded_qkv, saved.half_out, saved.folded_hidden, saved.half_output)
    values = (saved.folded_qkv, saved.fp8_out, saved.folded_hidden, saved.fp8_output)
    scales = saved.scales.split([weight.shape[1] for weight in values])
    qkv, out, hidden, output = map(Fp8Weight, values, scales)
    return _BackwardWeights(qkv, out, hidden, output, Fp8Units.of(saved.units))


def _linear_backward(
    grad: Tensor, x: Tensor, weight: Tensor | Fp8Weight, unit: Tensor | None, target: Fp8Target | None = None
) -> tuple[Tensor, Tensor]:
    """Gradients of a layer's input (rows, in) and weight (out, in), from that of its output (rows, out); in FP8 the
    second has the scale of the weight as a factor, see `_scale_of`."""
    if isinstance(weight, Fp8Weight):
        assert unit is not None
        return fp8.linear_backward(grad, x, unit, weight, target)
    return linears.input_grad(grad, weight), linears.weight_grad(grad, x)


def _scale_of(weight: Tensor | Fp8Weight) -> Tensor | None:
    """What the gradient of a weight has to be divided by in FP8, (out,)"""
    return weight.scale if isinstance(weight, Fp8Weight) else None


def _mlp_backward(dbranch: Tensor, saved: BlockSaved, weights: _BackwardWeights, options: BlockOptions) -> MlpGradients:
    _, _, hidden, output, units = weights
    if isinstance(hidden, Fp8Weight) and isinstance(output, Fp8Weight):
        assert units is not None
        return fp8.mlp_backward(dbranch, saved.h, saved.normed2, units, (hidden, output), options.gelu)
    assert isinstance(hidden, Tensor)
    assert isinstance(output, Tensor)
    activated = saved.activated if options.saves_gelu else None
    dh, activated, dbias = gelu_backward(saved.h, linears.input_grad(dbranch, output), options.gelu, activated)
    doutput = linears.weight_grad(dbranch, activated)
    del activated
    return MlpGradients(linears.input_grad(dh, hidden), linears.weight_grad(dh, saved.normed2), dbias, doutput)


def backward(dx: Tensor, dbranch: Tensor, saved: BlockSaved, options: BlockOptions) -> BlockGradients:
    """From the gradients of the sum and the branch after the block, (rows, dim) each, those of its inputs."""
    weights = _saved_weights(saved)
    norm_unit, attn_unit = (weights.units.norm, weights.units.attention) if weights.units else (None, None)
    mlp = _mlp_backward(dbranch, saved, weights, options)
    dhidden = unfold_norm(
        mlp.hidden, mlp.hidden_bias, saved.whidden, saved.scale2, saved.shift2, _scale_of(weights.hidden)
    )
    target = None
    if isinstance(weights.out, Fp8Weight):
        target = Fp8Target.like(dx, weights.out.scale, *quantize.numbers(quantize.zeros(1, dx.device)))
    dx, dattn_branch, sums = add_norm_backward(saved.normed2, saved.moments2, None, dx, mlp.x, options.drop, target)
    dbout = sums[0]
    dattn, dwout = _linear_backward(dattn_branch, _merge_heads(saved.attn), weights.out, attn_unit, target)
    if isinstance(weights.out, Fp8Weight):
        dwout.div_(weights.out.scale[:, None])
    del dattn_branch
    dqkv, _, dqkv_sums = attention.backward(
        _split_heads(saved.qkv, options), None, saved.attn, saved.lse, dattn.view(saved.attn.shape)
    )
    if options.rotation is not None:
        dqkv_sums = rotate_back_(dqkv, options.rotation)
    dnormed, dwqkv = _linear_backward(dqkv.view(saved.qkv.shape), saved.normed1, weights.qkv, norm_unit)
    dbqkv = _qkv_bias_grad(dqkv_sums, dbout, saved.half_out)
    dproject = unfold_norm(dwqkv, dbqkv, saved.wqkv, saved.scale1, saved.shift1, _scale_of(weights.qkv))
    dx, dbefore, sums = add_norm_backward(saved.normed1, saved.moments1, None, dx, dnormed, options.drop_before)
    return BlockGradients(
        *(dx, dbefore, sums[0]),
        *(dproject.norm, dproject.weight, dbqkv, dwout, dbout),
        *(dhidden.norm, dhidden.weight, mlp.hidden_bias, mlp.output),
    )


def product_input(output: AddNormOutput, units: Tensor | None) -> Tensor | Fp8Rows:
    """What a linear layer reads of a norm's output; in FP8 if there are scales for it."""
    return output.normed if units is None else Fp8Rows(output.quantized, units)


def attention_branch(normed: Tensor | Fp8Rows, layer: BlockWeights | Fp8BlockWeights, options: BlockOptions) -> Tensor:
    """The attention branch in inference, without its last bias: (rows, dim) -> (rows, dim)"""
    qkv = _split_heads(linears.linear(normed, layer.qkv), options)
    if options.rotation is not None:
        rotate_(qkv, options.rotation)
    if isinstance(normed, Fp8Rows) and isinstance(layer, Fp8BlockWeights):
        *_, attn = attention.forward_fp8(qkv, layer.attn_scale, half=False)
        return linears.linear(normed._replace(values=_merge_heads(attn)), layer.out, has_bias=False)
    attn, _ = attention.forward(qkv)
    return linears.linear(_merge_heads(attn), layer.out, has_bias=False)


def mlp_branch(normed: Tensor | Fp8Rows, layer: BlockWeights | Fp8BlockWeights, options: BlockOptions) -> Tensor:
    """The MLP branch in inference, without its last bias: (rows, dim) -> (rows, dim)"""
    if isinstance(layer, Fp8BlockWeights):
        assert isinstance(normed, Fp8Rows)
        activated = fp8.linear_gelu(normed, layer.hidden, layer.gelu_scale, options.gelu)
        return linears.linear(activated, layer.output, has_bias=False)
    assert isinstance(normed, Tensor)
    return linears.linear(linears.linear_gelu(normed, layer.hidden, options.gelu), layer.output, has_bias=False)


def _split_heads(qkv: Tensor, options: BlockOptions) -> Tensor:
    """(batch * tokens, 3 * dim) -> (batch, tokens, 3, heads, dim / heads)"""
    return qkv.view(options.batch, -1, 3, options.heads, qkv.shape[1] // (3 * options.heads))


def _merge_heads(attn: Tensor) -> Tensor:
    """(batch, tokens, heads, dim / heads) -> (batch * tokens, dim)"""
    return attn.view(attn.shape[0] * attn.shape[1], -1)


def _qkv_bias_grad(dqkv_sums: Tensor, dbout: Tensor, wout: Tensor) -> Tensor:
    """The sum of the gradient of qkv over tokens, of which only the queries' third has to be summed: float32 (3 * dim,)

    Attention weights sum to 1 over the keys. Hence the gradients of the values sum to those of the outputs, a sum which
    the gradient of the output bias is; and those of the keys sum to 0, as a bias common to all keys changes nothing;
    but not where keys are rotated after the bias: then `dqkv_sums` are sums of queries and keys, (parts, 2 * dim), else
    those of the queries, (parts, dim).
    """
    width = wout.shape[1]
    grad = torch.zeros(3 * width, dtype=torch.float32, device=wout.device)
    column_sums(dqkv_sums, out=grad)
    column_sums(wout, dbout, out=grad[2 * width :])
    return grad
