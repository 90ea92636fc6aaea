"""Blocks handed to the kernels that compute a whole stack of them, where nothing about any block is customized."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from vitral.kernels.dispatch import is_plain
from vitral.kernels.fused_ops import BlockWeights, LinearWeights, NormWeights
from vitral.models.layers import Attention, Block, Mlp


@torch.compiler.disable
def fused_blocks(x: Tensor, blocks: nn.ModuleList, final_norm: nn.LayerNorm) -> Tensor | None:
    """All blocks and the final norm in fused kernels: (batch, tokens, dim) -> (batch, tokens, dim).

    Returns:
        None where the kernels would leave something out, so that the blocks must be called one by one: dropout,
        adapters, layer scale, SwiGLU, further norms, relative positions, observers, hooks, weights that are partly
        frozen or not contiguous.
    """
    plain = [block for block in blocks if isinstance(block, Block) and _is_fusible(block)]
    if len(plain) < len(blocks) or not _is_fusible_norm(final_norm):
        return None
    if torch.is_grad_enabled() and not _trains_all_or_none(x, [*blocks.parameters(), *final_norm.parameters()]):
        return None
    from vitral.kernels.blocks import encode

    heads, gelu = plain[0].attention.heads, plain[0].mlp.approximate
    return encode(x, [_block_weights(block) for block in plain], _norm_weights(final_norm), heads=heads, gelu=gelu)


def _is_fusible(block: Block) -> bool:
    attention, mlp = block.attention, block.mlp
    if not (is_plain(block, Block) and is_plain(attention, Attention) and is_plain(mlp, Mlp)):
        return False
    rates = (attention.attention_dropout, attention.dropout.p, mlp.dropout.p, block.drop.rate)
    return (
        not (block.training and any(rates))
        and all(map(_is_fusible_linear, (attention.qkv, attention.out, mlp.hidden, mlp.output)))
        and all(map(_is_fusible_norm, (block.norm1, block.norm2)))
        and isinstance(block.scale1, nn.Identity)
        and not (block.post_norm or mlp.gated or mlp.gelu == "quick")
        and attention.q_norm is None
        and isinstance(attention.norm, nn.Identity)
        and isinstance(mlp.norm, nn.Identity)
        and attention.relative is None
        and not attention.observers
        and all(is_plain(module) for module in block.modules())
    )


def _is_fusible_linear(linear: nn.Linear) -> bool:
    return is_plain(linear, nn.Linear) and linear.bias is not None and linear.weight.is_contiguous()


def _is_fusible_norm(norm: nn.LayerNorm) -> bool:
    return is_plain(norm, nn.LayerNorm) and norm.weight is not None and norm.bias is not None


def _trains_all_or_none(x: Tensor, weights: Iterable[Tensor]) -> bool:
    """Whether all weights are trained, or neither these nor anything before them."""
    trained = {weight.requires_grad for weight in weights}
    return trained == {True} or (trained == {False} and not x.requires_grad)


def _block_weights(block: Block) -> BlockWeights:
    attention, mlp = block.attention, block.mlp
    linears = (attention.qkv, attention.out, mlp.hidden, mlp.output)
    qkv, out, hidden, output = (LinearWeights(linear.weight, linear.bias) for linear in linears)
    return BlockWeights(_norm_weights(block.norm1), qkv, out, _norm_weights(block.norm2), hidden, output)


def _norm_weights(norm: nn.LayerNorm) -> NormWeights:
    return NormWeights(norm.weight, norm.bias, norm.eps)
