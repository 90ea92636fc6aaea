"""The ResNet in front of a hybrid (section 3.1), as Google's code builds it: version 1, with ReLU after the sum.

The baseline ResNets of the paper are another network (`resnet.py`): version 2, with other paddings and epsilons.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.architecture import StemConfig
from vitral.models.convolution import StandardisedConv2d, pad_same


class ResNetStem(nn.Module):
    """Images to a feature map: the root, then stages of bottleneck units; every stage but the first halves the grid."""

    def __init__(self, config: StemConfig, channels: int) -> None:
        super().__init__()
        width = 64 * config.width
        self.root = Root(channels, width)
        self.stages = nn.ModuleList()
        inputs = width
        for stage, units in enumerate(config.blocks):
            hidden, stride = width * 2**stage, 1 if stage == 0 else 2
            first = Unit(inputs, hidden, stride, project=True)
            self.stages.append(nn.Sequential(first, *(Unit(4 * hidden, hidden) for _ in range(units - 1))))
            inputs = 4 * hidden

    def forward(self, images: Tensor) -> Tensor:
        """(b, c, h, w) -> (b, c', h', w'), the sizes that `StemConfig.channels` and `StemConfig.grid` tell"""
        x = self.root(images)
        for stage in self.stages:
            x = stage(x)
        return x


class Root(nn.Module):
    """7x7 convolution and max-pool: a quarter of the height and of the width."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = _conv(inputs, outputs, 7, 2)
        self.norm = _norm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """(b, inputs, h, w) -> (b, outputs, ceil(h / 4), ceil(w / 4))"""
        x = F.relu(self.norm(self.conv(x)))
        return F.max_pool2d(pad_same(x, 3, 2, value=-torch.inf), 3, 2)


class Unit(nn.Module):
    """A bottleneck: 1x1, 3x3 (which strides) and 1x1 convolutions beside a shortcut."""

    def __init__(self, inputs: int, hidden: int, stride: int = 1, *, project: bool = False) -> None:
        super().__init__()
        self.conv1 = _conv(inputs, hidden, 1)
        self.norm1 = _norm(hidden)
        self.conv2 = _conv(hidden, hidden, 3, stride)
        self.norm2 = _norm(hidden)
        self.conv3 = _conv(hidden, 4 * hidden, 1)
        self.norm3 = _norm(4 * hidden)
        nn.init.zeros_(self.norm3.weight)  # a unit starts as its shortcut
        self.projection = _conv(inputs, 4 * hidden, 1, stride) if project else None
        self.projection_norm = _norm(4 * hidden) if project else None

    def forward(self, x: Tensor) -> Tensor:
        """(b, inputs, h, w) -> (b, 4 * hidden, ceil(h / stride), ceil(w / stride))"""
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        y = self.norm3(self.conv3(y))
        if self.projection is not None and self.projection_norm is not None:
            x = self.projection_norm(self.projection(x))
        return F.relu(x + y)


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> StandardisedConv2d:
    return StandardisedConv2d(inputs, outputs, kernel, stride, convention="hybrid")


def _norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(32, channels, eps=1e-6)
