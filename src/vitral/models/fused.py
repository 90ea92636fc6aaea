"""Passes a stack of blocks to the kernels that compute it as a whole, if no block is customized."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vitral.kernels.dispatch import (
    FP8_MIN_WIDTH,
    is_exporting,
    is_inactive_dropout,
    is_plain,
    is_plain_tensor,
    on_device_of,
)
from vitral.kernels.fused_ops import BlockWeights, BranchDrop, LinearWeights, NormWeights
from vitral.models.layers import Attention, Block, LayerScale, Mlp, StochasticDepth
from vitral.models.position import Rotation
from vitral.models.vit import ViT


def fused_blocks(
    x: Tensor,
    blocks: nn.ModuleList,
    final_norm: nn.Module,
    rotations: Sequence[Rotation | None],
    fp8: bool | list[Any] = False,
    *,
    only_class_token: bool = False,
) -> Tensor | None:
    """All blocks and the final norm in fused kernels: (batch, tokens, dim) -> (batch, tokens, dim).

    Any length, any GELU, LayerScale (not in float16, where its products with the weights underflow), stochastic depth,
    RoPE with fixed frequencies and projections without some or all of the qkv bias are supported. Stochastic depth
    draws what the blocks would draw one by one.

    Args:
        x: what the first block reads.
        blocks: of the model.
        final_norm: the norm after them.
        rotations: of each block's queries and keys, if the model has RoPE.
        fp8: whether products are in FP8, or the weights of all blocks in FP8 for inference.
        only_class_token: return (batch, 1, dim), the first token alone, if that is faster: of the others, the last
            block then computes no more than keys and values.

    Returns:
        None if the kernels would leave something out, so that the blocks must be called one by one: dropout in
        training, adapters, SwiGLU, norms inside of attention or MLP (QK norm, too), relative positions, learned
        frequencies of RoPE in training, observers, hooks, weights that are partly frozen, not contiguous or of a
        subclass of Tensor, blocks with different heads or GELUs; and for torch.export, so that its programs need no
        operators of ours.
    """
    plain = [block for block in blocks if isinstance(block, Block) and _is_fusible(block, x.dtype)]
    if not plain or len(plain) < len(blocks) or not _are_alike(plain) or is_exporting():
        return None
    if not isinstance(final_norm, nn.LayerNorm) or not _is_fusible_norm(final_norm):
        return None
    weights = [weight for block in plain for weight in _weights(block)]
    if not _are_readable([*weights, final_norm.weight, final_norm.bias]):
        return None
    if torch.is_grad_enabled():
        learned = any(rotation.cos.requires_grad for rotation in rotations if rotation is not None)
        if learned or not _trains_all_or_none(x, [*weights, final_norm.weight, final_norm.bias]):
            return None
    from vitral.kernels.blocks import encode

    mlp = plain[0].mlp
    frozen = fp8 if isinstance(fp8, list) and not (torch.is_grad_enabled() or torch.compiler.is_compiling()) else None
    splits = only_class_token and len(plain) > 1
    whole = plain[:-1] if splits else plain
    normed, total = encode(
        x,
        frozen[: len(whole)] if frozen else [_block_weights(block) for block in whole],
        _norm_weights(plain[-1].norm1 if splits else final_norm),
        heads=plain[0].attention.heads,
        gelu="quick" if mlp.gelu == "quick" else mlp.approximate,
        rotations=rotations[: len(whole)],
        drops=[(_draw(block.drop, x), _draw(block.drop, x)) for block in whole],
        fp8=bool(fp8),
    )
    return final_norm(_class_token_block(normed, total, plain[-1], rotations[len(whole)])) if splits else normed


def _class_token_block(normed: Tensor, total: Tensor, block: Block, rotation: Rotation | None) -> Tensor:
    """The class token after a block that nothing but it is read of: (batch, 1, dim).

    Args:
        normed: output of the block's first norm, (batch, tokens, dim).
        total: its input, (batch, tokens, dim).
        block: plain, as for `fused_blocks`.
        rotation: of its keys; that of a class token is the identity.
    """
    from vitral.kernels.class_attention import class_attention, class_projection

    attention, tables = block.attention, rotation or (None, None, False)
    q, kv = class_projection(normed, attention.qkv.weight, _qkv_bias(attention), *tables, attention.heads)
    attn, _ = class_attention(q, kv)
    x = total[:, :1] + block.drop(block.scale1(attention.out(attn.flatten(1).unsqueeze(1))))
    return x + block.drop(block.scale2(block.mlp(block.norm2(x))))


def enable_fp8(model: nn.Module, *, freeze: bool) -> str:
    """Compute the products of a model's blocks in FP8 from now on, if that is faster; see `kernels/fp8.py`.

    Args:
        model: on its device.
        freeze: quantise the weights now and once, for inference: it can then neither be trained nor moved.

    Returns:
        Why it does not, as the end of a sentence; empty if it does.
    """
    if not isinstance(model, ViT):
        return "only Vision Transformers have it"
    config = model.config
    if config.width < FP8_MIN_WIDTH:
        return f"its width of {config.width} is below {FP8_MIN_WIDTH}, where FP8 is not faster"
    plain = [block for block in model.blocks if isinstance(block, Block) and _is_fusible(block, torch.bfloat16)]
    blocks = [block for block in plain if _are_readable(_weights(block))]
    trained = {weight.requires_grad for weight in [*model.blocks.parameters(), *model.norm.parameters()]}
    if (
        len(blocks) < len(model.blocks)
        or not model.fuses_blocks
        or config.width % 16
        or config.mlp % 16
        or len(trained) > 1
    ):
        return "its blocks are not plain ones that are all trained, or all not (see docs/architecture.md)"
    if freeze:
        from vitral.kernels.fp8 import quantize_block

        with torch.no_grad(), on_device_of(blocks[0].norm1.weight):
            model.fp8 = [quantize_block(_block_weights(block), torch.bfloat16) for block in blocks]
    else:
        model.fp8 = True
    return ""


def _is_fusible(block: Block, dtype: torch.dtype) -> bool:
    attention, mlp = block.attention, block.mlp
    if not (is_plain(block, Block) and is_plain(attention, Attention) and is_plain(mlp, Mlp)):
        return False
    return (
        not (attention.training and attention.attention_dropout)
        and not (block.post_norm or mlp.gated or attention.observers)
        and attention.q_norm is None
        and attention.relative is None
        and is_plain(attention.norm, nn.Identity)
        and is_plain(mlp.norm, nn.Identity)
        and is_inactive_dropout(attention.dropout)
        and is_inactive_dropout(mlp.dropout)
        and is_plain(block.drop, StochasticDepth)
        and is_plain(attention.qkv, nn.Linear)
        and all(map(_is_fusible_linear, (attention.out, mlp.hidden, mlp.output)))
        and all(map(_is_fusible_norm, (block.norm1, block.norm2)))
        and all(_is_fusible_scale(scale, dtype) for scale in (block.scale1, block.scale2))
    )


def _are_alike(blocks: Sequence[Block]) -> bool:
    """Whether what is not a tensor is the same in all blocks: they may have been exchanged."""
    first, mlp = blocks[0].attention, blocks[0].mlp
    return all(
        block.attention.heads == first.heads and (block.mlp.gelu, block.mlp.approximate) == (mlp.gelu, mlp.approximate)
        for block in blocks
    )


def _is_fusible_linear(linear: nn.Linear) -> bool:
    return is_plain(linear, nn.Linear) and linear.bias is not None


def _is_fusible_norm(norm: nn.LayerNorm) -> bool:
    return is_plain(norm, nn.LayerNorm) and norm.weight is not None and norm.bias is not None


def _are_readable(weights: Iterable[Tensor]) -> bool:
    """Whether the memory of all is a plain array."""
    return all(is_plain_tensor(weight) and weight.is_contiguous() for weight in weights)


def _is_fusible_scale(scale: nn.Module, dtype: torch.dtype) -> bool:
    return is_plain(scale, nn.Identity) or (is_plain(scale, LayerScale) and dtype != torch.float16)


def _weights(block: Block) -> list[Tensor]:
    """What the kernels read of its modules, which need not be parameters."""
    attention, mlp = block.attention, block.mlp
    layers = (block.norm1, attention.qkv, attention.out, block.norm2, mlp.hidden, mlp.output)
    weights = [weight for layer in layers for weight in (layer.weight, layer.bias) if weight is not None]
    scales = [scale.scale for scale in (block.scale1, block.scale2) if isinstance(scale, LayerScale)]
    return [*weights, *scales, *([] if attention.qv_bias is None else [attention.qv_bias])]


def _trains_all_or_none(x: Tensor, weights: Iterable[Tensor]) -> bool:
    """Whether all weights are trained, or neither these nor anything before them."""
    trained = {weight.requires_grad for weight in weights}
    return trained == {True} or (trained == {False} and not x.requires_grad)


def _draw(drop: StochasticDepth, x: Tensor) -> BranchDrop | None:
    draws = drop.draw(x)
    return None if draws is None else BranchDrop(draws, 1.0 - drop.rate)


def _block_weights(block: Block) -> BlockWeights:
    attention, mlp = block.attention, block.mlp
    return BlockWeights(
        _norm_weights(block.norm1),
        LinearWeights(attention.qkv.weight, _qkv_bias(attention)),
        _scaled(attention.out, block.scale1),
        _norm_weights(block.norm2),
        LinearWeights(mlp.hidden.weight, mlp.hidden.bias),
        _scaled(mlp.output, block.scale2),
    )


def _qkv_bias(attention: Attention) -> Tensor:
    """(3 * dim,), zeros if the projection has no bias"""
    if attention.qv_bias is not None:
        return attention.full_bias()
    weight = attention.qkv.weight
    return weight.new_zeros(weight.shape[0]) if attention.qkv.bias is None else attention.qkv.bias


def _scaled(linear: nn.Linear, scale: nn.Module) -> LinearWeights:
    """The layer with a LayerScale after it in one, s * (W x + b) = (s W) x + s b; the products have their gradients."""
    if not isinstance(scale, LayerScale):
        return LinearWeights(linear.weight, linear.bias)
    return LinearWeights(linear.weight * scale.scale[:, None], linear.bias * scale.scale)


def _norm_weights(norm: nn.LayerNorm) -> NormWeights:
    return NormWeights(norm.weight, norm.bias, norm.eps)
