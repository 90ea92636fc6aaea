"""The weights of a pre-norm block, as plain tensors."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Norm(NamedTuple):
    """A LayerNorm, (d,) and (d,)"""

    weight: Tensor
    bias: Tensor
    eps: float


class PlainNorm(NamedTuple):
    """A LayerNorm with neither weight nor bias of its own."""

    eps: float
    weight: None = None
    bias: None = None


class Dense(NamedTuple):
    """A linear layer, (out, in) and (out,)"""

    weight: Tensor
    bias: Tensor


class Layer(NamedTuple):
    """A block."""

    norm1: Norm
    qkv: Dense
    out: Dense
    norm2: Norm
    hidden: Dense
    output: Dense
