"""A stack of pre-norm blocks and the norm after it, with gradients: eagerly, and as operators for torch.compile.

Eager code calls `block.py` through `torch.autograd.Function`, which takes the host less time per call. While
torch.compile traces, each block is one operator of the library `vitral` (and one more in the backward pass): nothing
inside of it is traced, its outputs are what the backward pass saves, and the compiled graph has no break.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_type_hints

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from vitral.kernels import block
from vitral.kernels.block import (
    BlockGradients,
    BlockInputs,
    BlockOptions,
    BlockOutputs,
    BlockSaved,
    as_drop,
    attention_branch,
    mlp_branch,
    to_save,
)
from vitral.kernels.dispatch import on_device_of
from vitral.kernels.fused_ops import BlockWeights, BranchDrop, LinearWeights, NormWeights, add_norm, add_norm_backward
from vitral.kernels.rotary import RotaryTables

Drops = Sequence[tuple[BranchDrop | None, BranchDrop | None]]  # of each block's attention and MLP


def encode(
    x: Tensor,
    layers: Sequence[BlockWeights],
    final_norm: NormWeights,
    *,
    heads: int,
    gelu: str,
    rotations: Sequence[RotaryTables | None],
    drops: Drops,
) -> Tensor:
    """All blocks and the final norm; with a gradient where the weights are trained.

    Args:
        x: (batch, tokens, dim) in half precision.
        layers: weights of the blocks.
        final_norm: weights of the norm after them.
        heads: of the attention.
        gelu: "tanh", "none" (exact) or "quick".
        rotations: how each block rotates its queries and keys, if it does; the tables get no gradient.
        drops: stochastic depth of each block's two branches, where it is trained with.

    Returns:
        (batch, tokens, dim)
    """
    trained = torch.is_grad_enabled() and final_norm.weight.requires_grad
    options = _block_options(x.shape[0], heads, gelu, layers, rotations, drops)
    rows = x.flatten(0, 1).contiguous()
    last_drop = drops[-1][1]
    if torch.compiler.is_compiling():
        run = _encode_trained if trained else _encode_compiled_inference
        return run(rows, layers, final_norm, options, last_drop).view(x.shape)
    with on_device_of(x):
        run = _encode_trained if trained else _encode_inference
        return run(rows, layers, final_norm, options, last_drop).view(x.shape)


def _block_options(
    batch: int,
    heads: int,
    gelu: str,
    layers: Sequence[BlockWeights],
    rotations: Sequence[RotaryTables | None],
    drops: Drops,
) -> list[BlockOptions]:
    options = []
    before: BranchDrop | None = None
    for index, (layer, rotation, (drop, drop_after)) in enumerate(zip(layers, rotations, drops, strict=True)):
        saves_gelu = index % 2 == 1  # saving all of them takes twice the memory, recomputing all of them twice the time
        draws_before, keep_before = before or (None, 1.0)
        draws, keep = drop or (None, 1.0)
        cos, sin, adjacent = rotation or (None, None, False)
        tensors = (draws_before, draws, cos, sin)
        numbers = (layer.norm1.eps, layer.norm2.eps, keep_before, keep)
        options.append(BlockOptions(*tensors, adjacent, batch, heads, gelu, *numbers, saves_gelu))
        before = drop_after
    return options


def _encode_inference(
    x: Tensor,
    layers: Sequence[BlockWeights],
    final_norm: NormWeights,
    options: Sequence[BlockOptions],
    last_drop: BranchDrop | None,
) -> Tensor:
    """Nothing is saved for a backward pass: (rows, dim) -> (rows, dim)"""
    branch, bias = None, None
    for layer, option in zip(layers, options, strict=True):
        x, normed, _ = add_norm(x, branch, bias, layer.norm1, option.drop_before)
        del branch  # part of the sum by now; frees memory before the peak
        x, normed, _ = add_norm(
            x, attention_branch(normed, layer, option), layer.out.bias, layer.norm2, option.drop
        )
        branch = mlp_branch(normed, layer, option)
        bias = layer.output.bias
    return add_norm(x, branch, bias, final_norm, last_drop).normed


def _encode_compiled_inference(
    x: Tensor,
    layers: Sequence[BlockWeights],
    final_norm: NormWeights,
    options: Sequence[BlockOptions],
    last_drop: BranchDrop | None,
) -> Tensor:
    branch, bias = None, None
    for layer, option in zip(layers, options, strict=True):
        inputs = _block_inputs(x, branch, bias, layer, (layer.out.weight, layer.output.weight))
        x, branch = _inference_operator(*inputs, *option)
        bias = layer.output.bias
    return _final_norm_operator(x, branch, bias, *_norm_arguments(final_norm, last_drop))[0]


def _encode_trained(
    x: Tensor,
    layers: Sequence[BlockWeights],
    final_norm: NormWeights,
    options: Sequence[BlockOptions],
    last_drop: BranchDrop | None,
) -> Tensor:
    branch, bias = None, None
    compiling = torch.compiler.is_compiling()
    half_weights = _to_half([weight for layer in layers for weight in (layer.out.weight, layer.output.weight)], x.dtype)
    half_pairs = zip(half_weights[::2], half_weights[1::2], strict=True)
    for layer, option, half_pair in zip(layers, options, half_pairs, strict=True):
        inputs = _block_inputs(x, branch, bias, layer, half_pair)
        outputs = _block_operator(*inputs, *option) if compiling else _Block.apply(*inputs, *option)
        x, branch, bias = outputs[0], outputs[1], layer.output.bias
    arguments = _norm_arguments(final_norm, last_drop)
    if compiling:
        return _final_norm_operator(x, branch, bias, *arguments)[0]
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
    weights = (*layer.norm1[:2], *layer.qkv, *layer.out, *layer.norm2[:2], *layer.hidden, layer.output.weight)
    return BlockInputs(x, branch, bias, *weights, *half_pair)


def _norm_arguments(norm: NormWeights, drop: BranchDrop | None) -> tuple[Tensor, Tensor, Tensor | None, float, float]:
    """Weight, bias, draws, eps, keep"""
    draws, keep = drop or (None, 1.0)
    return norm.weight, norm.bias, draws, norm.eps, keep


def _split(arguments: Sequence[Any]) -> tuple[BlockInputs, BlockOptions]:
    count = len(BlockInputs._fields)
    return BlockInputs(*arguments[:count]), BlockOptions(*arguments[count:])


def _save_block(ctx: Any, inputs: BlockInputs, options: BlockOptions, outputs: BlockOutputs) -> None:
    ctx.save_for_backward(*to_save(inputs, outputs), *options[:4])
    ctx.numbers, ctx.has_branch = options[4:], inputs.branch is not None


def _saved_block(ctx: Any) -> tuple[BlockSaved, BlockOptions]:
    count = len(BlockSaved._fields)
    tensors = ctx.saved_tensors
    return BlockSaved(*tensors[:count]), BlockOptions(*tensors[count:], *ctx.numbers)


def _block_input_grads(grads: BlockGradients, *, has_branch: bool) -> tuple[Tensor | None, ...]:
    """One for each of `BlockInputs` and `BlockOptions`."""
    before = (grads.x, grads.branch, grads.bias) if has_branch else (grads.x, None, None)
    attention_grads = (*grads.norm1.unbind(), grads.wqkv, grads.bqkv, grads.wout, grads.bout)
    mlp_grads = (*grads.norm2.unbind(), grads.whidden, grads.bhidden, grads.woutput)
    rest = [None] * (2 + len(BlockOptions._fields))
    return *before, *attention_grads, *mlp_grads, *rest


class _Block(torch.autograd.Function):
    """`block.forward` and `block.backward`: the fields of BlockInputs and BlockOptions -> sum and branch."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        inputs, options = _split(arguments)
        outputs = block.forward(inputs, options)
        _save_block(ctx, inputs, options, outputs)
        return outputs.total, outputs.branch

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        dx, dbranch = (grad.contiguous() for grad in grads)
        return _block_input_grads(block.backward(dx, dbranch, *_saved_block(ctx)), has_branch=ctx.has_branch)


class _FinalNorm(torch.autograd.Function):
    """The last residual sum and the norm after the blocks: (rows, dim), (rows, dim), (dim,) -> (rows, dim)"""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, branch: Tensor, bias: Tensor, scale: Tensor, shift: Tensor, draws: Tensor | None,
        eps: float, keep: float,
    ) -> Tensor:  # fmt: skip
        output = add_norm(x, branch, bias, NormWeights(scale, shift, eps), as_drop(draws, keep))
        ctx.save_for_backward(output.total, output.moments, scale, draws)
        ctx.keep = keep
        return output.normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        total, moments, scale, draws = ctx.saved_tensors
        drop = as_drop(draws, ctx.keep)
        dx, dbranch, (dbias, dscale, dshift) = add_norm_backward(
            total, moments, scale, None, grads[0].contiguous(), drop
        )
        return dx, dbranch, dbias, dscale, dshift, None, None, None


# Operators for torch.compile.

_TYPES = {Tensor: "Tensor", Tensor | None: "Tensor?", int: "SymInt", bool: "bool", float: "float", str: "str"}


def _fields(*kinds: type) -> str:
    """The fields of named tuples as the arguments of an operator's schema."""
    return ", ".join(f"{_TYPES[hint]} {name}" for kind in kinds for name, hint in get_type_hints(kind).items())


def _results(count: int) -> str:
    return f"({', '.join(['Tensor'] * count)})"


@torch.library.custom_op(
    "vitral::block",
    mutates_args=(),
    schema=f"({_fields(BlockInputs, BlockOptions)}) -> {_results(len(BlockOutputs._fields))}",
)
def _block_operator(*arguments: Any) -> tuple[Tensor, ...]:
    """`block.forward`, differentiable in the sum and the branch, its first two outputs."""
    inputs, options = _split(arguments)
    with on_device_of(inputs.x):
        return tuple(block.forward(inputs._replace(x=inputs.x.contiguous()), options))


@_block_operator.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    inputs, options = _split(arguments)
    x, batch, heads = inputs.x, options.batch, options.heads
    (rows, dim), mlp = x.shape, inputs.whidden.shape[0]

    def moments() -> Tensor:
        return x.new_empty(2, rows, dtype=torch.float32)

    def like_x(count: int) -> list[Tensor]:
        return [x.new_empty(rows, dim) for _ in range(count)]

    tokens = rows // batch
    return tuple(
        BlockOutputs(
            *(*like_x(3), moments(), x.new_empty(rows, 3 * dim)),
            x.new_empty(batch, tokens, heads, dim // heads),
            x.new_empty(batch, heads, tokens, dtype=torch.float32),
            *(*like_x(1), moments(), x.new_empty(rows, mlp)),
            x.new_empty(rows, mlp) if options.saves_gelu else x.new_empty(0),
            *(x.new_empty(3 * dim, dim), x.new_empty(mlp, dim)),
        )
    )


@torch.library.custom_op(
    "vitral::block_backward",
    mutates_args=(),
    schema=(
        f"(Tensor dx, Tensor dbranch, {_fields(BlockSaved, BlockOptions)}) -> {_results(len(BlockGradients._fields))}"
    ),
)
def _block_backward_operator(dx: Tensor, dbranch: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """`block.backward`; the gradient of the branch is empty where it equals that of the sum."""
    count = len(BlockSaved._fields)
    saved, options = BlockSaved(*arguments[:count]), BlockOptions(*arguments[count:])
    with on_device_of(dx):
        grads = block.backward(dx.contiguous(), dbranch.contiguous(), saved, options)
    return tuple(grads if options.drop_before else grads._replace(branch=dx.new_empty(0)))


@_block_backward_operator.register_fake
def _(dx: Tensor, dbranch: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    count = len(BlockSaved._fields)
    saved, options = BlockSaved(*arguments[:count]), BlockOptions(*arguments[count:])
    dim, mlp = dx.shape[1], saved.whidden.shape[0]

    def weight(*shape: int) -> Tensor:
        return dx.new_empty(shape, dtype=torch.float32)

    return tuple(
        BlockGradients(
            dx.new_empty(dx.shape),
            dx.new_empty(dx.shape if options.drop_before else (0,)),
            *(weight(dim), weight(2, dim), weight(3 * dim, dim), weight(3 * dim), weight(dim, dim), weight(dim)),
            *(weight(2, dim), weight(mlp, dim), weight(mlp), weight(dim, mlp)),
        )
    )


def _save_block_operator(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _save_block(ctx, *_split(inputs), BlockOutputs(*output))
    ctx.mark_non_differentiable(*output[2:])


def _block_operator_grads(ctx: Any, dx: Tensor, dbranch: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    saved, options = _saved_block(ctx)
    grads = BlockGradients(*_block_backward_operator(dx, dbranch, *saved, *options))
    grads = grads if options.drop_before else grads._replace(branch=grads.x)
    return _block_input_grads(grads, has_branch=ctx.has_branch)


_block_operator.register_autograd(_block_operator_grads, setup_context=_save_block_operator)


@torch.library.custom_op(
    "vitral::block_inference", mutates_args=(), schema=f"({_fields(BlockInputs, BlockOptions)}) -> {_results(2)}"
)
def _inference_operator(*arguments: Any) -> tuple[Tensor, Tensor]:
    """A block without gradients: the sum and the branch after it."""
    inputs, options = _split(arguments)
    norm1 = NormWeights(inputs.scale1, inputs.shift1, options.eps1)
    norm2 = NormWeights(inputs.scale2, inputs.shift2, options.eps2)
    # The bias of the last layer is left to the next block; here the place is taken by another.
    layer = BlockWeights(
        norm1,
        LinearWeights(inputs.wqkv, inputs.bqkv),
        LinearWeights(inputs.wout, inputs.bout),
        norm2,
        LinearWeights(inputs.whidden, inputs.bhidden),
        LinearWeights(inputs.woutput, inputs.bout),
    )
    with on_device_of(inputs.x):
        x, normed, _ = add_norm(inputs.x.contiguous(), inputs.branch, inputs.bias, norm1, options.drop_before)
        x, normed, _ = add_norm(x, attention_branch(normed, layer, options), inputs.bout, norm2, options.drop)
        return x, mlp_branch(normed, layer, options)


@_inference_operator.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    x = arguments[0]
    return x.new_empty(x.shape), x.new_empty(x.shape)


@torch.library.custom_op(
    "vitral::final_norm",
    mutates_args=(),
    schema=(
        "(Tensor x, Tensor branch, Tensor bias, Tensor scale, Tensor shift, Tensor? draws, float eps, float keep) -> "
        f"{_results(3)}"
    ),
)
def _final_norm_operator(
    x: Tensor, branch: Tensor, bias: Tensor, scale: Tensor, shift: Tensor, draws: Tensor | None, eps: float, keep: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The norm of the last residual sum; and that sum and its moments for the backward pass."""
    with on_device_of(x):
        output = add_norm(x, branch, bias, NormWeights(scale, shift, eps), as_drop(draws, keep))
    return output.normed, output.total, output.moments


@_final_norm_operator.register_fake
def _(x: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape), x.new_empty(2, x.shape[0], dtype=torch.float32)


@torch.library.custom_op(
    "vitral::final_norm_backward",
    mutates_args=(),
    schema=(
        f"(Tensor grad, Tensor total, Tensor moments, Tensor scale, Tensor? draws, float keep) -> {_results(3)}"
    ),
)
def _final_norm_backward_operator(
    grad: Tensor, total: Tensor, moments: Tensor, scale: Tensor, draws: Tensor | None, keep: float
) -> tuple[Tensor, Tensor, Tensor]:
    with on_device_of(grad):
        grads = add_norm_backward(total, moments, scale, None, grad.contiguous(), as_drop(draws, keep))
    return tuple(grads if draws is not None else grads._replace(dy=grad.new_empty(0)))


@_final_norm_backward_operator.register_fake
def _(grad: Tensor, total: Tensor, moments: Tensor, scale: Tensor, draws: Tensor | None, keep: float) -> tuple[Tensor, ...]:
    dbranch = total.new_empty(total.shape if draws is not None else (0,))
    return total.new_empty(total.shape), dbranch, scale.new_empty(3, total.shape[1], dtype=torch.float32)


def _save_final_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, _, scale, _, draws, _, keep = inputs
    ctx.save_for_backward(*output[1:], scale, draws)
    ctx.keep = keep
    ctx.mark_non_differentiable(*output[1:])


def _final_norm_grads(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    dx, dbranch, sums = _final_norm_backward_operator(grad, *ctx.saved_tensors, ctx.keep)
    return dx, dx if ctx.saved_tensors[3] is None else dbranch, *sums.unbind(), None, None, None


_final_norm_operator.register_autograd(_final_norm_grads, setup_context=_save_final_norm)
