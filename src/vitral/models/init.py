"""Weight initialization, with the distributions of Google's Flax code."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

# Standard deviation of a standard normal truncated at two standard deviations; Flax divides by it.
_TRUNCATED_STD = 0.87962566103423978


@torch.no_grad()
def lecun_normal(weight: Tensor) -> None:
    """Fill an (out, in, ...) weight from a truncated normal of variance 1 / fan_in, Flax's default.

    Draws through the inverse of the distribution function: torch's rejection loop takes half a minute for the largest
    ResNet.
    """
    if weight.is_meta:
        return
    std = math.sqrt(1.0 / weight[0].numel()) / _TRUNCATED_STD
    edge = math.erf(2 / math.sqrt(2))
    weight.uniform_(-edge, edge).erfinv_().mul_(std * math.sqrt(2))


def normal(weight: Tensor, std: float) -> Tensor:
    """Fill and return `weight`. A meta tensor is left alone: torch would import its compiler to fill it."""
    return weight if weight.is_meta else nn.init.normal_(weight, std=std)


def xavier_uniform(weight: Tensor, parts: int = 1) -> None:
    """Glorot uniform for a (parts * out, in) weight that stacks `parts` matrices with fans of their own."""
    rows, columns = weight.shape
    bound = math.sqrt(6.0 / (rows // parts + columns))
    nn.init.uniform_(weight, -bound, bound)


def zero_bias(layer: nn.Linear | nn.Conv2d) -> None:
    """Fill the bias of a layer that has one with zeros."""
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
