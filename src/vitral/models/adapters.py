"""LoRA (Hu et al. 2021): a frozen linear layer plus a product of two thin matrices that learn."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.errors import UserError
from vitral.models.vit import ViT


class LoraLinear(nn.Linear):
    """y = x W' + b + x down' up'. The frozen parts keep their names, so the weights of the plain model still load."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.down = nn.Parameter(linear.weight.new_empty(rank, linear.in_features))
        self.up = nn.Parameter(linear.weight.new_zeros(linear.out_features, rank))
        bound = 1.0 / math.sqrt(linear.in_features)
        nn.init.uniform_(self.down, -bound, bound)

    def forward(self, input: Tensor) -> Tensor:
        """(..., inputs) -> (..., outputs)"""
        return super().forward(input) + F.linear(F.linear(input, self.down), self.up)

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """A plain layer that computes the same."""
        plain = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        # The product is summed in double precision: merging should cost one rounding, not rank of them.
        product = self.up.double() @ self.down.double()
        plain.weight = nn.Parameter((self.weight.double() + product).to(self.weight.dtype))
        if self.bias is not None:
            plain.bias = nn.Parameter(self.bias.detach())
        return plain


def add_lora(model: nn.Module, rank: int) -> None:
    """Puts adapters on every linear layer of the blocks, in place; from then on only they and the head learn.

    `up` starts at zero, so the model computes what it did. No factor alpha / rank: the learning rate does its work.
    """
    if not isinstance(model, ViT):
        raise UserError(
            "LoRA adapts the linear layers of a Vision Transformer: for a ResNet use trainable=last:1 or bias."
        )
    if rank < 1:
        raise UserError(f"the rank of LoRA must be at least 1, not {rank}.")
    if any(isinstance(module, LoraLinear) for module in model.modules()):
        raise UserError("the model has LoRA adapters already: merge them first.")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("head."))
    for block in model.blocks:
        _swap_layers(block, nn.Linear, lambda linear: LoraLinear(linear, rank))


def merge_lora(model: nn.Module) -> None:
    """Adds every adapter into the layer it adapts, in place: the plain model again, and all of it may learn."""
    _swap_layers(model, LoraLinear, LoraLinear.merged)
    model.requires_grad_(True)


def _swap_layers(module: nn.Module, kind: type[nn.Module], change: Callable[[Any], nn.Module]) -> None:
    for name, child in list(module.named_children()):
        if isinstance(child, kind):
            setattr(module, name, change(child))
        else:
            _swap_layers(child, kind, change)
