"""Starting values, as in Google's Flax code."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

# A normal distribution cut at two standard deviations has this standard deviation; Flax divides by it.
_TRUNCATED_STD = 0.87962566103423978


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
