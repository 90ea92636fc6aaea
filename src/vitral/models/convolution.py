"""What the two ResNets share: a convolution with standardised weights, and TensorFlow's SAME padding."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.models.init import lecun_normal

Convention = Literal["hybrid", "bit"]


class StandardisedConv2d(nn.Conv2d):
    """A convolution whose filters get mean 0 and deviation 1 each time they are used. Odd square kernels, no bias.

    Google's two ResNets disagree, and the released weights of each need its own `convention`:

    - `"hybrid"` (section 3.1, the stem of R50+ViT): (w - mean) / (std + 1e-5), SAME padding;
    - `"bit"` (the baseline ResNets): (w - mean) / sqrt(var + 1e-10), `kernel // 2` zeros on every side.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, *, convention: Convention) -> None:
        # At stride 1 SAME is symmetric whatever the size, so only a strided hybrid pads by itself.
        uneven = convention == "hybrid" and stride > 1
        padding = 0 if uneven else kernel // 2
        super().__init__(inputs, outputs, kernel, stride=stride, padding=padding, bias=False)
        self.convention = convention
        self.uneven = uneven

    def reset_parameters(self) -> None:
        lecun_normal(self.weight)

    def standardised(self) -> Tensor:
        """(outputs, inputs, kernel, kernel): the filters as they are applied, in the dtype of the weight."""
        # The epsilons vanish in half precision.
        weight = self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))
        if self.convention == "bit":
            weight = F.layer_norm(weight, weight.shape[1:], eps=1e-10)  # the same formula, in one kernel
        else:
            weight = weight - weight.mean((1, 2, 3), keepdim=True)
            variance = weight.square().mean((1, 2, 3), keepdim=True)
            # The floor is far below the epsilon; it keeps the gradient of a constant filter finite.
            weight = weight / (variance.clamp_min(1e-30).sqrt() + 1e-5)
        return weight.to(self.weight.dtype)

    def forward(self, input: Tensor) -> Tensor:
        """(b, inputs, h, w) -> (b, outputs, ceil(h / stride), ceil(w / stride))"""
        if self.uneven:
            input = pad_same(input, self.kernel_size[0], self.stride[0])
        return self._conv_forward(input, self.standardised(), None)


def pad_same(x: Tensor, kernel: int, stride: int, value: float = 0.0) -> Tensor:
    """(b, c, h, w) grows until it has ceil(h / stride) windows, as in TensorFlow: an odd pixel goes right and below."""
    top, bottom = _same(x.shape[-2], kernel, stride)
    left, right = _same(x.shape[-1], kernel, stride)
    return F.pad(x, (left, right, top, bottom), value=value)


def _same(size: int, kernel: int, stride: int) -> tuple[int, int]:
    """Pixels before and after one axis."""
    total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
    return total // 2, total - total // 2
