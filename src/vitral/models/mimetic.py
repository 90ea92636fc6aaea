"""Weights that start as trained ones look, for data sets too small to teach it: after Trockman and Kolter, "Mimetic
Initialization of Self-Attention Layers", 2023.

    keys       like queries, so that a patch looks at patches like it
    outputs    like the negative of values, so that a patch is set off from what it sees
    positions  sines and cosines (2d), so that patches are like their neighbours; they learn from there on

The authors take the matrices of attention from a singular value decomposition. Here they are random rotations that
have most of their numbers in common.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.architecture import ViTConfig
from vitral.models.layers import Attention
from vitral.models.position import FactorisedPosition, LearnedPosition, sincos2d
from vitral.models.vit import ViT

_COMMON = 0.9  # share of a rotation that another has, too
_LOOK, _SEE = 0.75, 0.5  # how large products of queries and keys are, and of values and outputs


@torch.no_grad()
def start_mimetic(model: ViT) -> None:
    """Attention in all blocks, and the positions that are added to the patches where they are learned."""
    for module in model.blocks.modules():
        if isinstance(module, Attention):
            _start_attention(module)
    for position in model.positions[:1]:
        if isinstance(position, LearnedPosition | FactorisedPosition):
            _start_position(position, model.config)


def _start_position(position: LearnedPosition | FactorisedPosition, config: ViTConfig) -> None:
    """What all places have in common tells none from another, and is left out."""
    table = sincos2d(config.grid(config.image), config.width)
    table -= table.mean(dim=(0, 1))
    half = config.width // 2  # columns where 4 does not divide it are left at zero
    x, y = (F.pad(part, (0, half - part.shape[-1])) for part in table.chunk(2, dim=-1))
    if isinstance(position, LearnedPosition):
        position.table.copy_(F.pad(torch.cat([x, y], dim=-1), (0, config.width % 2)))
    else:
        position.x.copy_(x[0])
        position.y.copy_(y[:, 0])


def _start_attention(attention: Attention) -> None:
    queries, keys, values = attention.qkv.weight.chunk(3)
    for query, key in zip(queries.chunk(attention.heads), keys.chunk(attention.heads), strict=True):
        for weight, rotation in zip((query, key), _alike(query), strict=True):
            weight.copy_(rotation * math.sqrt(_LOOK))
    value, output = _alike(values)
    values.copy_(value * math.sqrt(_SEE))
    attention.out.weight.copy_(output.t() * -math.sqrt(_SEE))


def _alike(like: Tensor) -> tuple[Tensor, Tensor]:
    """Two rotations of this shape with _COMMON of both, each with a rest of its own."""
    common, one, other = (nn.init.orthogonal_(torch.empty_like(like)) for _ in range(3))
    rest = math.sqrt(1 - _COMMON**2)
    return _COMMON * common + rest * one, _COMMON * common + rest * other
