"""A stack of pre-norm blocks and the norm after it, with gradients: eagerly, and as operators for torch.compile.

Eager code calls `block.py` through `torch.autograd.Function`, which takes the host less time per call. While
torch.compile traces, each block is one operator of the library `vitral` (and one more in the backward pass): nothing
inside of it is traced, its outputs are what the backward pass saves, and the compiled graph has no break.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, cast

import torch
from torch import Tensor

from vitral.errors import UserError
from vitral.kernels import block, operators
from vitral.kernels.block import (
    BlockInputs,
    BlockOptions,
    as_drop,
    attention_branch,
    inference_weights,
    mlp_branch,
    product_input,
)
from vitral.kernels.dispatch import on_device_of
from vitral.kernels.fp8 import Fp8BlockWeights
from vitral.kernels.fused_ops import BlockWeights, BranchDrop, NormWeights, add_norm, add_norm_backward
from vitral.kernels.quantize import unit_scales
from vitral.kernels.rotary import RotaryTables

Drops = Sequence[tuple[BranchDrop | None, BranchDrop | None]]  # of each block's attention and MLP


def encode(
    x: Tensor,
    layers: Sequence[BlockWeights] | Sequence[Fp8BlockWeights],
    final_norm: NormWeights,
    *,
    heads: int,
    gelu: str,
    rotations: Sequence[RotaryTables | None],
    drops: Drops,
    fp8: bool = False,
) -> tuple[Tensor, Tensor]:
    """All blocks and the norm after them; with a gradient if the weights are trained.

    Args:
        x: (batch, tokens, dim) in half precision.
        layers: weights of the blocks; only in eager inference they may be quantised already.
        final_norm: weights of the norm after them.
        heads: of the attention.
        gelu: "tanh", "none" (exact) or "quick".
        rotations: how each block rotates its queries and keys, if it does; the tables get no gradient.
        drops: stochastic depth of each block's two branches, if it is trained with.
        fp8: multiply in FP8, with weights that are quantised here unless they are already.

    Returns:
        The norm of the residual stream after the blocks, and that stream itself, (batch, tokens, dim) each.
    """
    trained = torch.is_grad_enabled() and final_norm.weight.requires_grad
    options = _block_options(x.shape[0], heads, gelu, layers, rotations, drops, fp8=fp8)
    rows = x.flatten(0, 1).contiguous()
    last_drop = drops[-1][1]
    weights = cast("Sequence[BlockWeights]", layers)  # quantised ones are for `_encode_inference` only
    if torch.compiler.is_compiling():
        run = _encode_trained if trained else _encode_compiled_inference
        normed, total = run(rows, weights, final_norm, options, last_drop)
        return normed.view(x.shape), total.view(x.shape)
    with on_device_of(x):
        if trained:
            normed, total = _encode_trained(rows, weights, final_norm, options, last_drop)
        else:
            normed, total = _encode_inference(rows, layers, final_norm, options, last_drop)
    return normed.view(x.shape), total.view(x.shape)


def _block_options(
    batch: int,
    heads: int,
    gelu: str,
    layers: Sequence[BlockWeights] | Sequence[Fp8BlockWeights],
    rotations: Sequence[RotaryTables | None],
    drops: Drops,
    *,
    fp8: bool,
) -> list[BlockOptions]:
    options = []
    before: BranchDrop | None = None
    for index, (layer, rotation, (drop, drop_after)) in enumerate(zip(layers, rotations, drops, strict=True)):
        # Saving all takes twice the memory, recomputing all twice the time; in FP8 none is written in half precision.
        saves_gelu = index % 2 == 1 and not fp8
        draws_before, keep_before = before or (None, 1.0)
        draws, keep = drop or (None, 1.0)
        cos, sin, adjacent = rotation or (None, None, False)
        tensors = (draws_before, draws, cos, sin)
        numbers = (layer.norm1.eps, layer.norm2.eps, keep_before, keep)
        options.append(BlockOptions(*tensors, adjacent, batch, heads, gelu, *numbers, saves_gelu, fp8))
        before = drop_after
    return options


def _encode_inference(
    x: Tensor,
    layers: Sequence[BlockWeights] | Sequence[Fp8BlockWeights],
    final_norm: NormWeights,
    options: Sequence[BlockOptions],
    last_drop: BranchDrop | None,
) -> tuple[Tensor, Tensor]:
    """Nothing is saved for a backward pass: (rows, dim) -> (rows, dim), (rows, dim)"""
    branch, bias = None, None
    units = unit_scales(x) if options[0].fp8 else None
    for layer, option in zip(layers, options, strict=True):
        layer = inference_weights(layer, option, x.dtype)
        output = add_norm(x, branch, bias, layer.norm1, option.drop_before, option.formats)
        del branch, x  # part of the sum by now; frees memory before the peak
        branch = attention_branch(product_input(output, units), layer, option)
        output = add_norm(output.total, branch, layer.out.bias, layer.norm2, option.drop, option.formats)
        x, branch = output.total, mlp_branch(product_input(output, units), layer, option)
        bias = layer.output.bias
    output = add_norm(x, branch, bias, final_norm, last_drop)
    return output.normed, output.total


def _encode_compiled_inference(
    x: Tensor,
    layers: Sequence[BlockWeights],
    final_norm: NormWeights,
    options: Sequence[BlockOptions],
    last_drop: BranchDrop | None,
) -> tuple[Tensor, Tensor]:
    branch, bias = None, None
    for layer, option in zip(layers, options, strict=True):
        inputs = _block_inputs(x, branch, bias, layer, (layer.out.weight, layer.output.weight))
        x, branch = operators.block_inference(*inputs, *option)
        bias = layer.output.bias
    return operators.final_norm(x, branch, bias, *_norm_arguments(final_norm, last_drop))[:2]


def _encode_trained(
    x: Tensor,
    layers: Sequence[BlockWeights],
    final_norm: NormWeights,
    options: Sequence[BlockOptions],
    last_drop: BranchDrop | None,
) -> tuple[Tensor, Tensor]:
    branch, bias = None, None
    compiling = torch.compiler.is_compiling()
    half_weights = _to_half([weight for layer in layers for weight in (layer.out.weight, layer.output.weight)], x.dtype)
    half_pairs = zip(half_weights[::2], half_weights[1::2], strict=True)
    for layer, option, half_pair in zip(layers, options, half_pairs, strict=True):
        inputs = _block_inputs(x, branch, bias, layer, half_pair)
        outputs = operators.block_forward(*inputs, *option) if compiling else _Block.apply(*inputs, *option)
        x, branch, bias = outputs[0], outputs[1], layer.output.bias
    arguments = _norm_arguments(final_norm, last_drop)
    if compiling:
        return operators.final_norm(x, branch, bias, *arguments)[:2]
    return _FinalNorm.apply(x, branch, bias, *arguments)


@torch.no_grad()
def _to_half(weights: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """All in one kernel: one per weight would take longer to launch than to run."""
    half_weights = [torch.empty_like(weight, dtype=dtype) for weight in weights]
    torch._foreach_copy_(half_weights, weights)
    return half_weights


def _block_inputs(
    x: Tensor, branch: Tensor | None, bias: Tensor | None, layer: BlockWeights, half_pair: tuple[Tensor, Tensor]
) -> BlockInputs:
    return BlockInputs(
        x, branch, bias,
        layer.norm1.weight, layer.norm1.bias, layer.qkv.weight, layer.qkv.bias, layer.out.weight, layer.out.bias,
        layer.norm2.weight, layer.norm2.bias, layer.hidden.weight, layer.hidden.bias, layer.output.weight,
        half_pair[0], half_pair[1],
    )  # fmt: skip


def _norm_arguments(norm: NormWeights, drop: BranchDrop | None) -> tuple[Tensor, Tensor, Tensor | None, float, float]:
    """Weight, bias, draws, eps, keep"""
    draws, keep = drop or (None, 1.0)
    return norm.weight, norm.bias, draws, norm.eps, keep


def _first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse second derivatives and several gradients at once.

    PyTorch's `once_differentiable` takes the result for a constant if the incoming gradient is one, although the saved
    tensors are not.
    """

    @wraps(backward)
    def checked(ctx: Any, *grads: Tensor | None) -> Any:
        batched = any(grad is not None and torch._C._functorch.is_legacy_batchedtensor(grad) for grad in grads)
        if torch.is_grad_enabled() or batched or torch._C._are_functorch_transforms_active():
            raise UserError(
                "the kernels for half precision have no second derivatives (create_graph) and no batched gradients "
                "(is_grads_batched): compute the model in float32, without autocast."
            )
        return backward(ctx, *grads)

    return checked


class _Block(torch.autograd.Function):
    """`block.forward` and `block.backward`: the fields of BlockInputs and BlockOptions -> sum and branch."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        inputs, options = operators.split_block(arguments)
        outputs = block.forward(inputs, options)
        operators.save_block(ctx, inputs, options, outputs)
        return outputs.total, outputs.branch

    @staticmethod
    @_first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        dx, dbranch = (grad.contiguous() for grad in grads)
        return operators.block_input_grads(
            block.backward(dx, dbranch, *operators.saved_block(ctx)), has_branch=ctx.has_branch
        )


class _FinalNorm(torch.autograd.Function):
    """The norm after the blocks, and the last residual sum: (rows, dim), (rows, dim), (dim,) -> (rows, dim) each"""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, branch: Tensor, bias: Tensor, scale: Tensor, shift: Tensor, draws: Tensor | None,
        eps: float, keep: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        output = add_norm(x, branch, bias, NormWeights(scale, shift, eps), as_drop(draws, keep))
        ctx.save_for_backward(output.total, output.moments, scale, draws)
        ctx.keep = keep
        ctx.set_materialize_grads(False)  # few read the sum
        return output.normed, output.total

    @staticmethod
    @_first_order
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        total, moments, scale, draws = ctx.saved_tensors
        dnormed, dtotal = operators.final_norm_grads(grads, total)
        dx, dbranch, (dbias, dscale, dshift) = add_norm_backward(
            total, moments, scale, dtotal, dnormed, as_drop(draws, ctx.keep)
        )
        return dx, dbranch, dbias, dscale, dshift, None, None, None
