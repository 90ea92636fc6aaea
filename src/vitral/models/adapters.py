"""LoRA (Hu et al. 2021): a frozen linear layer plus a trained product of two low-rank matrices."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.errors import UserError
from vitral.models.layers import TOKEN_WISE
from vitral.models.vit import ViT


class LoraLinear(nn.Linear):
    """y = x W' + b + x down' up'. The frozen parameters keep their names, so weights of the plain model still load."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.down = nn.Parameter(linear.weight.new_empty(rank, linear.in_features))
        self.up = nn.Parameter(linear.weight.new_zeros(linear.out_features, rank))
        bound = 1.0 / math.sqrt(linear.in_features)
        nn.init.uniform_(self.down, -bound, bound)

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., out)"""
        return super().forward(input) + F.linear(F.linear(input, self.down), self.up)

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """A plain linear layer that computes the same."""
        plain = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        # In double precision, so that merging costs one rounding instead of `rank` of them.
        product = self.up.double() @ self.down.double()
        plain.weight = nn.Parameter((self.weight.double() + product).to(self.weight.dtype))
        if self.bias is not None:
            plain.bias = nn.Parameter(self.bias.detach())
        return plain


TOKEN_WISE.add(LoraLinear)


def add_lora(model: nn.Module, rank: int) -> None:
    """Put adapters of a rank on every linear layer of a ViT's blocks, in place, and freeze all but these and the head.

    `up` starts at zero, so that the outputs do not change. There is no factor alpha / rank: tune the learning rate.
    Raises UserError if it is not a ViT, has adapters already, or the rank is below 1.
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
        _replace_layers(block, nn.Linear, lambda linear: LoraLinear(linear, rank))


def merge_lora(model: nn.Module) -> None:
    """Add every adapter to its layer's weight, in place, and make all parameters trainable: a plain model again."""
    _replace_layers(model, LoraLinear, LoraLinear.merged)
    model.requires_grad_(True)


def _replace_layers(module: nn.Module, layer_type: type[nn.Module], change: Callable[[Any], nn.Module]) -> None:
    for name, child in list(module.named_children()):
        if isinstance(child, layer_type):
            setattr(module, name, change(child))
        else:
            _replace_layers(child, layer_type, change)
