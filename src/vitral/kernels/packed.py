"""Linear layers for inference on a CPU: oneDNN's matrix products, with weights packed once into its layout.

PyTorch gives a float32 product on a CPU to MKL, which reads weights row by row and does not use the widest vector
registers of processors that are not Intel's. oneDNN uses them everywhere, takes weights in a layout of its own, and
applies the GELU while the product is still in the cache.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.kernels.dispatch import is_plain

_OPS = ("_reorder_linear_weight", "_linear_pointwise")


class PackedLinear(nn.Module):
    """`nn.Linear`, and optionally a GELU after it, in float32 on a CPU and without gradients."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: Tensor, gelu: str = "") -> Tensor:
        """(..., in) -> (..., out); `gelu`: "tanh", "none" (exact), or "" for the linear layer alone"""
        activation = "gelu" if gelu else "none"
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, activation, [], gelu)


def linear_gelu(linear: nn.Module, x: Tensor, gelu: str) -> Tensor:
    """A linear layer and the GELU after it, fused where the layer is packed: (..., in) -> (..., out)"""
    if isinstance(linear, PackedLinear):
        return linear(x, gelu)
    return F.gelu(linear(x), approximate=gelu)


def pack(model: nn.Module) -> None:
    """Replace every plain float32 linear layer on the CPU by a packed one, in place.

    From then on the model can neither be trained nor moved. Layers with hooks, adapters or parametrizations are left.
    """
    if not _is_supported():
        return
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and is_plain(child, nn.Linear) and _is_packable(child.weight):
                setattr(module, name, PackedLinear(child))


def _is_packable(weight: Tensor) -> bool:
    return weight.dtype == torch.float32 and weight.device.type == "cpu"


def _is_supported() -> bool:
    """Whether this PyTorch has oneDNN and the operators, which are not part of its public interface."""
    return torch.backends.mkldnn.is_available() and all(hasattr(torch.ops.mkldnn, name) for name in _OPS)
