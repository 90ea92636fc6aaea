"""Starting values: as in Google's Flax code, and one for small data sets."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

# A normal distribution cut at two standard deviations has this standard deviation; Flax divides by it.
_TRUNCATED_STD = 0.87962566103423978
_ALIKE = 0.9  # share that two matrices have in common where one is to be like the other


@torch.no_grad()
def lecun_normal(weight: Tensor) -> None:
    """Truncated normal of variance 1/fan_in for a (out, in, ...) weight: Flax's default for dense and convolution.

    By the inverse of the distribution function; torch's own rejection loop takes half a minute for the largest ResNet.
    """
    if weight.is_meta:
        return
    std = math.sqrt(1.0 / weight[0].numel()) / _TRUNCATED_STD
    edge = math.erf(2 / math.sqrt(2))
    weight.uniform_(-edge, edge).erfinv_().mul_(std * math.sqrt(2))


def normal(weight: Tensor, std: float) -> Tensor:
    """Returns the weight. On "meta" there is nothing to draw, and torch would load its compiler to do so."""
    return weight if weight.is_meta else nn.init.normal_(weight, std=std)


def xavier_uniform(weight: Tensor, parts: int = 1) -> None:
    """Glorot uniform for a (parts * out, in) weight that stacks `parts` matrices, each with its own fans."""
    rows, columns = weight.shape
    bound = math.sqrt(6.0 / (rows // parts + columns))
    nn.init.uniform_(weight, -bound, bound)


def zero_bias(layer: nn.Linear | nn.Conv2d) -> None:
    """For a layer that has one."""
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)


@torch.no_grad()
def mimetic(qkv: Tensor, out: Tensor, heads: int) -> None:
    """Attention that starts as trained attention looks, for weights (3 d, d) and (d, d): Trockman and Kolter, 2023.

    Keys are like queries, so that a token looks at tokens like it, its neighbours for a start; and the output undoes
    the values, so that what it sees is subtracted from it. They take matrices from a singular value decomposition; here
    they are random rotations with most of their numbers in common, which needs none and learnt faster.
    """
    if qkv.is_meta:
        return
    queries, keys, values = qkv.chunk(3)
    for query, key in zip(queries.chunk(heads), keys.chunk(heads), strict=True):
        for weight, rotation in zip((query, key), _alike(query), strict=True):
            weight.copy_(rotation * math.sqrt(0.75))
    value, output = _alike(values)
    values.copy_(value * math.sqrt(0.5))
    out.copy_(output.t() * -math.sqrt(0.5))


def _alike(like: Tensor) -> tuple[Tensor, Tensor]:
    """Two rotations of this shape, each _ALIKE of the same and the rest its own."""
    common, one, other = (nn.init.orthogonal_(torch.empty_like(like)) for _ in range(3))
    rest = math.sqrt(1 - _ALIKE**2)
    return _ALIKE * common + rest * one, _ALIKE * common + rest * other
