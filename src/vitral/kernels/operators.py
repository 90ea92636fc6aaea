"""The block and the final norm as operators of the library `vitral`, for torch.compile.

Nothing inside of an operator is traced, and what the backward pass saves are its outputs. Operators take and return
flat tensors, never None, and no output shares memory with another or with an input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_type_hints

import torch
from torch import Tensor

from vitral.kernels import block
from vitral.kernels.block import (
    BlockGradients,
    BlockInputs,
    BlockOptions,
    BlockOutputs,
    BlockSaved,
    as_drop,
    attention_branch,
    inference_weights,
    mlp_branch,
    product_input,
    to_save,
)
from vitral.kernels.dispatch import E4M3, on_device_of
from vitral.kernels.fp8 import Fp8BlockWeights, Fp8Units
from vitral.kernels.fused_ops import BlockWeights, LinearWeights, NormWeights, add_norm, add_norm_backward
from vitral.kernels.quantize import SPACING, unit_scales


def split_block(arguments: Sequence[Any]) -> tuple[BlockInputs, BlockOptions]:
    count = len(BlockInputs._fields)
    return BlockInputs(*arguments[:count]), BlockOptions(*arguments[count:])


def save_block(ctx: Any, inputs: BlockInputs, options: BlockOptions, outputs: BlockOutputs) -> None:
    ctx.save_for_backward(*to_save(inputs, outputs), *options[:4])
    ctx.numbers, ctx.has_branch = options[4:], inputs.branch is not None


def saved_block(ctx: Any) -> tuple[BlockSaved, BlockOptions]:
    count = len(BlockSaved._fields)
    tensors = ctx.saved_tensors
    return BlockSaved(*tensors[:count]), BlockOptions(*tensors[count:], *ctx.numbers)


def block_input_grads(grads: BlockGradients, *, has_branch: bool) -> tuple[Tensor | None, ...]:
    """One for each of `BlockInputs` and `BlockOptions`."""
    before = (grads.x, grads.branch, grads.bias) if has_branch else (grads.x, None, None)
    attention_grads = (*grads.norm1.unbind(), grads.wqkv, grads.bqkv, grads.wout, grads.bout)
    mlp_grads = (*grads.norm2.unbind(), grads.whidden, grads.bhidden, grads.woutput)
    rest = [None] * (2 + len(BlockOptions._fields))
    return *before, *attention_grads, *mlp_grads, *rest


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
def block_forward(*arguments: Any) -> tuple[Tensor, ...]:
    """`block.forward`, differentiable in the sum and the branch, its first two outputs."""
    inputs, options = split_block(arguments)
    with on_device_of(inputs.x):
        return tuple(block.forward(inputs._replace(x=inputs.x.contiguous()), options))


@block_forward.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    inputs, options = split_block(arguments)
    x, batch, heads = inputs.x, options.batch, options.heads
    (rows, dim), mlp, tokens = x.shape, inputs.whidden.shape[0], x.shape[0] // options.batch
    wide = {"dtype": torch.float32}
    outputs = BlockOutputs(
        total=x.new_empty(rows, dim),
        branch=x.new_empty(rows, dim),
        normed1=x.new_empty(rows, dim),
        moments1=x.new_empty(2, rows, **wide),
        qkv=x.new_empty(rows, 3 * dim),
        attn=x.new_empty(batch, tokens, heads, dim // heads),
        lse=x.new_empty(batch, heads, tokens, **wide),
        normed2=x.new_empty(rows, dim),
        moments2=x.new_empty(2, rows, **wide),
        h=x.new_empty(rows, mlp),
        activated=x.new_empty(rows, mlp) if options.saves_gelu else x.new_empty(0),
        **_fake_weights(x, dim, mlp, fp8=options.fp8),
    )
    return tuple(outputs)


def _fake_weights(x: Tensor, dim: int, mlp: int, *, fp8: bool) -> dict[str, Tensor]:
    """The last fields of BlockOutputs."""
    if not fp8:
        names = ("fp8_out", "fp8_output", "scales", "units")
        folded = {"folded_qkv": x.new_empty(3 * dim, dim), "folded_hidden": x.new_empty(mlp, dim)}
        return folded | {name: x.new_empty(0) for name in names}
    shapes = {
        "folded_qkv": (dim, 3 * dim),
        "folded_hidden": (dim, mlp),
        "fp8_out": (dim, dim),
        "fp8_output": (mlp, dim),
    }
    weights = {name: x.new_empty(shape, dtype=E4M3) for name, shape in shapes.items()}
    sizes = {"scales": 5 * dim + mlp, "units": len(Fp8Units._fields) * SPACING}
    return weights | {name: x.new_empty(size, dtype=torch.float32) for name, size in sizes.items()}


@torch.library.custom_op(
    "vitral::block_backward",
    mutates_args=(),
    schema=(
        f"(Tensor dx, Tensor dbranch, {_fields(BlockSaved, BlockOptions)}) -> {_results(len(BlockGradients._fields))}"
    ),
)
def _block_backward(dx: Tensor, dbranch: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """`block.backward`; the gradient of the branch is empty if it equals that of the sum."""
    count = len(BlockSaved._fields)
    saved, options = BlockSaved(*arguments[:count]), BlockOptions(*arguments[count:])
    with on_device_of(dx):
        grads = block.backward(dx.contiguous(), dbranch.contiguous(), saved, options)
    return tuple(grads if options.drop_before else grads._replace(branch=dx.new_empty(0)))


@_block_backward.register_fake
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


def _save_operator(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    save_block(ctx, *split_block(inputs), BlockOutputs(*output))
    ctx.mark_non_differentiable(*output[2:])


def _block_grads(ctx: Any, dx: Tensor, dbranch: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    saved, options = saved_block(ctx)
    grads = BlockGradients(*_block_backward(dx, dbranch, *saved, *options))
    grads = grads if options.drop_before else grads._replace(branch=grads.x)
    return block_input_grads(grads, has_branch=ctx.has_branch)


block_forward.register_autograd(_block_grads, setup_context=_save_operator)


@torch.library.custom_op(
    "vitral::block_inference", mutates_args=(), schema=f"({_fields(BlockInputs, BlockOptions)}) -> {_results(2)}"
)
def block_inference(*arguments: Any) -> tuple[Tensor, Tensor]:
    """A block without gradients: the sum and the branch after it."""
    inputs, options = split_block(arguments)
    # The bias of the last layer is left to the next block; here the place is taken by another.
    layer: BlockWeights | Fp8BlockWeights = BlockWeights(
        NormWeights(inputs.scale1, inputs.shift1, options.eps1),
        LinearWeights(inputs.wqkv, inputs.bqkv),
        LinearWeights(inputs.wout, inputs.bout),
        NormWeights(inputs.scale2, inputs.shift2, options.eps2),
        LinearWeights(inputs.whidden, inputs.bhidden),
        LinearWeights(inputs.woutput, inputs.bout),
    )
    with on_device_of(inputs.x):
        x = inputs.x.contiguous()
        units = unit_scales(x) if options.fp8 else None
        layer = inference_weights(layer, options, x.dtype)
        output = add_norm(x, inputs.branch, inputs.bias, layer.norm1, options.drop_before, options.formats)
        branch = attention_branch(product_input(output, units), layer, options)
        output = add_norm(output.total, branch, inputs.bout, layer.norm2, options.drop, options.formats)
        return output.total, mlp_branch(product_input(output, units), layer, options)


@block_inference.register_fake
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
def final_norm(
    x: Tensor, branch: Tensor, bias: Tensor, scale: Tensor, shift: Tensor, draws: Tensor | None, eps: float, keep: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The norm of the last residual sum, that sum, and its moments for the backward pass."""
    with on_device_of(x):
        output = add_norm(x, branch, bias, NormWeights(scale, shift, eps), as_drop(draws, keep))
    return output.normed, output.total, output.moments


@final_norm.register_fake
def _(x: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape), x.new_empty(2, x.shape[0], dtype=torch.float32)


@torch.library.custom_op(
    "vitral::final_norm_backward",
    mutates_args=(),
    schema=(
        "(Tensor? dnormed, Tensor? dtotal, Tensor total, Tensor moments, Tensor scale, Tensor? draws, float keep) -> "
        f"{_results(3)}"
    ),
)
def _final_norm_backward(
    dnormed: Tensor | None, dtotal: Tensor | None, total: Tensor, moments: Tensor, scale: Tensor,
    draws: Tensor | None, keep: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dnormed, dtotal = final_norm_grads((dnormed, dtotal), total)
    with on_device_of(total):
        grads = add_norm_backward(total, moments, scale, dtotal, dnormed, as_drop(draws, keep))
    return tuple(grads if draws is not None else grads._replace(dy=total.new_empty(0)))


def final_norm_grads(grads: Sequence[Tensor | None], total: Tensor) -> tuple[Tensor, Tensor | None]:
    """The gradients of the norm and of the sum before it as kernels read them; the second may be missing."""
    dnormed, dtotal = grads
    dnormed = torch.zeros_like(total) if dnormed is None else dnormed.contiguous()
    return dnormed, None if dtotal is None else dtotal.contiguous()


@_final_norm_backward.register_fake
def _(
    dnormed: Tensor | None, dtotal: Tensor | None, total: Tensor, moments: Tensor, scale: Tensor,
    draws: Tensor | None, keep: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    dbranch = total.new_empty(total.shape if draws is not None else (0,))
    return total.new_empty(total.shape), dbranch, scale.new_empty(3, total.shape[1], dtype=torch.float32)


def _save_final_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, _, scale, _, draws, _, keep = inputs
    ctx.save_for_backward(*output[1:], scale, draws)
    ctx.keep = keep
    ctx.set_materialize_grads(False)  # few read the sum
    ctx.mark_non_differentiable(output[2])


def _final_norm_grads(
    ctx: Any, dnormed: Tensor | None, dtotal: Tensor | None, _: Tensor | None
) -> tuple[Tensor | None, ...]:
    dx, dbranch, sums = _final_norm_backward(dnormed, dtotal, *ctx.saved_tensors, ctx.keep)
    return dx, dx if ctx.saved_tensors[3] is None else dbranch, *sums.unbind(), None, None, None


final_norm.register_autograd(_final_norm_grads, setup_context=_save_final_norm)
