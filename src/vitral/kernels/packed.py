"""Linear layers for prediction on a CPU: oneDNN's products, with weights laid out once the way they are read.

PyTorch gives a float32 product on a CPU to MKL, which reads the weights row by row and, on other makers' processors,
does not use the widest registers. oneDNN uses them everywhere, takes weights in its own order, and applies the GELU
while a product is still in the cache.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_OPS = ("_reorder_linear_weight", "_linear_pointwise")


class PackedLinear(nn.Module):
    """What `nn.Linear` and a GELU after it compute, in float32 on a CPU and without gradients."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: Tensor, gelu: str = "") -> Tensor:
        """(..., inputs) -> (..., outputs); `gelu`: "tanh", "none" (exact), or "" for the product alone"""
        kind = "gelu" if gelu else "none"
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, kind, [], gelu)


def linear_gelu(linear: nn.Module, x: Tensor, gelu: str) -> Tensor:
    """A layer and the GELU after it, in one go where the layer is packed: (..., inputs) -> (..., outputs)"""
    if isinstance(linear, PackedLinear):
        return linear(x, gelu)
    return F.gelu(linear(x), approximate=gelu)


def pack(model: nn.Module) -> None:
    """Packs every float32 linear layer on the CPU, in place: from then on the model stays there, and only predicts."""
    if not _is_built_in():
        return
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            # A layer that adapts another one does more than its class says.
            if type(child) is nn.Linear and child.weight.dtype == torch.float32 and child.weight.device.type == "cpu":
                setattr(module, name, PackedLinear(child))


def _is_built_in() -> bool:
    """Whether this PyTorch has oneDNN and the operators, which are not part of its public interface."""
    return torch.backends.mkldnn.is_available() and all(hasattr(torch.ops.mkldnn, name) for name in _OPS)
