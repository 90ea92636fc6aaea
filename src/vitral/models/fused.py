"""Blocks handed to the kernels that compute a whole stack of them, where there is nothing unusual about any."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from vitral.kernels.weights import Dense, Layer, Norm
from vitral.models.layers import Block


@torch.compiler.disable
def fused_blocks(x: Tensor, blocks: nn.ModuleList, last: nn.LayerNorm) -> Tensor | None:
    """What the blocks and the norm after them make of (b, n, d), or None where they must be called one by one.

    Unusual is all that the kernels would pass over: dropout, adapters, factors on branches, a position's part in the
    attention, somebody who watches, hooks, weights that are partly frozen or not laid out row by row.
    """
    plain = [block for block in blocks if isinstance(block, Block)]
    if len(plain) < len(blocks) or not _all_plain(plain) or type(last) is not nn.LayerNorm or _is_watched(last):
        return None
    if torch.is_grad_enabled() and not _learn_together(x, [*blocks.parameters(), *last.parameters()]):
        return None
    from vitral.kernels.blocks import encode

    heads, gelu = plain[0].attention.heads, plain[0].mlp.approximate
    return encode(x, [_layer(block) for block in plain], _norm(last), heads=heads, gelu=gelu)


def _all_plain(blocks: list[Block]) -> bool:
    return not any(_is_unusual(block) for block in blocks)


def _is_unusual(block: Block) -> bool:
    attention, mlp = block.attention, block.mlp
    rates = (attention.attention_dropout, attention.dropout.p, mlp.dropout.p, block.drop.rate)
    linears = (attention.qkv, attention.out, mlp.hidden, mlp.output)
    return (
        (block.training and any(rates))
        or any(type(linear) is not nn.Linear or not linear.weight.is_contiguous() for linear in linears)
        or not isinstance(block.scale1, nn.Identity)
        or attention.relative is not None
        or bool(attention.watchers)
        or any(_is_watched(module) for module in block.modules())
    )


def _is_watched(module: nn.Module) -> bool:
    """Whether calling it does more than its class says: hooks, or another `forward`, as recomputation sets it."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or "forward" in vars(module)


def _learn_together(x: Tensor, weights: Iterable[Tensor]) -> bool:
    """All weights learn, or none does and nothing before them."""
    learns = {weight.requires_grad for weight in weights}
    return learns == {True} or (learns == {False} and not x.requires_grad)


def _layer(block: Block) -> Layer:
    attention, mlp = block.attention, block.mlp
    dense = (Dense(layer.weight, layer.bias) for layer in (attention.qkv, attention.out, mlp.hidden, mlp.output))
    qkv, out, hidden, output = dense
    return Layer(_norm(block.norm1), qkv, out, _norm(block.norm2), hidden, output)


def _norm(layer: nn.LayerNorm) -> Norm:
    return Norm(layer.weight, layer.bias, layer.eps)
