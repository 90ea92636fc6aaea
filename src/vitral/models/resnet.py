"""The paper's "ResNet (BiT)": version 2 (norm and ReLU before each convolution), GroupNorm, standardised weights."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from vitral.architecture import ResNetConfig, Size
from vitral.models.axial import AxialAttention2d
from vitral.models.convolution import StandardisedConv2d
from vitral.models.heads import Head
from vitral.models.layers import check_images


class ResNet(nn.Module):
    """Offers the four verbs of the Vision Transformer, so that whatever evaluates one evaluates the other."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.config = config
        width = 64 * config.width
        self.root = _conv(config.channels, width, 7, 2)
        self.stages = nn.ModuleList()
        inputs = width
        for stage, units in enumerate(config.blocks):
            hidden, stride = width * 2**stage, 1 if stage == 0 else 2
            # An axial unit attends before it strides, so the first one of a stage sees the grid of the stage before.
            before, after = (config.stage_grid(config.image, at) if config.axial else None for at in (stage - 1, stage))
            first = Unit(inputs, hidden, stride, grid=before, project=True)
            rest = (Unit(4 * hidden, hidden, grid=after) for _ in range(units - 1))
            self.stages.append(nn.Sequential(first, *rest))
            inputs = 4 * hidden
        self.norm = _norm(inputs)
        self.head = Head(inputs, config.classes)

    def patchify(self, images: Tensor) -> Tensor:
        """(b, c, h, w) -> (b, h', w', d): the root. Channels come last; the grid travels with the tensor."""
        check_images(images, self.config.channels)
        x = self.root(images)
        if self.config.root_pool == "zero":
            x = F.max_pool2d(F.pad(x, (1, 1, 1, 1)), 3, 2)  # not max_pool2d's own padding, which is minus infinity
        else:
            x = F.max_pool2d(x, 3, 2, padding=1)
        return x.permute(0, 2, 3, 1)

    def encode(self, patches: Tensor) -> Tensor:
        """(b, h, w, d) -> (b, n, features): the four stages; the map that comes out is read row by row."""
        x = patches.permute(0, 3, 1, 2)
        for stage in self.stages:
            x = stage(x)
        return F.relu(self.norm(x)).flatten(2).transpose(1, 2)

    def pool(self, tokens: Tensor) -> Tensor:
        """(b, n, features) -> (b, features)"""
        return tokens.mean(1)

    def features(self, images: Tensor) -> Tensor:
        """(b, c, h, w) -> (b, features)"""
        return self.pool(self.encode(self.patchify(images)))

    def forward(self, images: Tensor) -> Tensor:
        """(b, c, h, w) -> (b, classes)"""
        patches = self.patchify(images)
        tokens = self.encode(patches)
        features = self.pool(tokens)
        return self.head(features)


class Unit(nn.Module):
    """A pre-activation bottleneck. With a `grid`, axial attention of that native size replaces the 3x3 convolution."""

    def __init__(
        self, inputs: int, hidden: int, stride: int = 1, *, grid: Size | None = None, project: bool = False
    ) -> None:
        super().__init__()
        self.norm1 = _norm(inputs)
        self.conv1 = _conv(inputs, hidden, 1)
        self.norm2 = _norm(hidden)
        self.conv2 = AxialAttention2d(hidden, grid, stride) if grid else _conv(hidden, hidden, 3, stride)
        self.norm3 = _norm(hidden)
        self.conv3 = _conv(hidden, 4 * hidden, 1)
        self.projection = _conv(inputs, 4 * hidden, 1, stride) if project else None

    def forward(self, x: Tensor) -> Tensor:
        """(b, inputs, h, w) -> (b, 4 * hidden, ceil(h / stride), ceil(w / stride))"""
        y = F.relu(self.norm1(x))
        if self.projection is not None:
            x = self.projection(y)
        y = self.conv1(y)
        y = self.conv2(F.relu(self.norm2(y)))
        y = self.conv3(F.relu(self.norm3(y)))
        return x + y


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> StandardisedConv2d:
    return StandardisedConv2d(inputs, outputs, kernel, stride, convention="bit")


def _norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(32, channels, eps=1e-5)
