"""Two ResNets with weight standardization and GroupNorm.

    ResNet      the paper's baseline "ResNet (BiT)", version 2: norm and ReLU before each convolution
    ResNetStem  the network in front of a hybrid (section 3.1), version 1: norm and ReLU after each convolution

They differ in paddings and epsilons as well, and the released weights of each need its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.architecture import Epsilons, ResNetConfig, Size, StemConfig
from vitral.kernels.dispatch import group_norm, prefers_channels_last
from vitral.models.layers import AxialAttention2d
from vitral.models.model import Head, VisionModel, check_images, layer_indices, lecun_normal

Convention = Literal["hybrid", "bit"]


class StdConv2d(nn.Conv2d):
    """A convolution whose filters are standardized (mean 0, std 1) in each forward pass. Odd square kernels, no bias.

    Google's two ResNets disagree, and the released weights of each need its own `convention`:

    - `"hybrid"` (section 3.1, the stem of R50+ViT): (w - mean) / (std + 1e-5), SAME padding;
    - `"bit"` (the baseline ResNets): (w - mean) / sqrt(var + 1e-10), `kernel // 2` zeros on every side.

    With timm's `epsilons`, it is (w - mean) / sqrt(var + 1e-8) in both.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int,
        stride: int = 1,
        *,
        convention: Convention,
        epsilons: Epsilons = "google",
    ) -> None:
        # At stride 1 SAME padding is symmetric for any size, so only a strided hybrid pads explicitly.
        pads_same = convention == "hybrid" and stride > 1
        padding = 0 if pads_same else kernel // 2
        super().__init__(inputs, outputs, kernel, stride=stride, padding=padding, bias=False)
        self.additive = convention == "hybrid" and epsilons == "google"  # the epsilon is added to std, not to var
        self.eps = 1e-5 if self.additive else 1e-10 if epsilons == "google" else 1e-8
        self.pads_same = pads_same

    def reset_parameters(self) -> None:
        lecun_normal(self.weight)

    def standardized(self) -> Tensor:
        """(outputs, inputs, kernel, kernel): the filters as they are applied, in the dtype of the weight."""
        # The epsilons vanish in half precision.
        weight = self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))
        if not self.additive:
            weight = F.layer_norm(weight, weight.shape[1:], eps=self.eps)  # the same formula, in one kernel
        else:
            weight = weight - weight.mean((1, 2, 3), keepdim=True)
            variance = weight.square().mean((1, 2, 3), keepdim=True)
            # The floor is far below the epsilon; it keeps the gradient of a constant filter finite.
            weight = weight / (variance.clamp_min(1e-30).sqrt() + self.eps)
        return weight.to(self.weight.dtype)

    def forward(self, input: Tensor) -> Tensor:
        """(batch, inputs, h, w) -> (batch, outputs, ceil(h / stride), ceil(w / stride))"""
        if self.pads_same:
            input = pad_same(input, self.kernel_size[0], self.stride[0])
        return self._conv_forward(input, self.standardized(), None)


def _zeros_around(x: Tensor) -> Tensor:
    """(batch, channels, h, w) -> (batch, channels, h + 2, w + 2)"""
    if not torch.compiler.is_exporting():
        return F.pad(x, (1, 1, 1, 1))
    # onnxruntime makes a Pad before a MaxPool part of it, and so minus infinity of the zeros.
    for axis in (2, 3):
        zeros = torch.zeros_like(x.narrow(axis, 0, 1))
        x = torch.cat([zeros, x, zeros], dim=axis)
    return x


def pad_same(x: Tensor, kernel: int, stride: int, value: float = 0.0) -> Tensor:
    """Pad (batch, channels, h, w) to ceil(h / stride) windows, as TensorFlow: an odd pixel goes right and below."""
    top, bottom = _same_padding(x.shape[-2], kernel, stride)
    left, right = _same_padding(x.shape[-1], kernel, stride)
    return F.pad(x, (left, right, top, bottom), value=value)


def _same_padding(size: int, kernel: int, stride: int) -> tuple[int, int]:
    """Pixels to pad before and after one axis."""
    total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
    return total // 2, total - total // 2


class ResNet(VisionModel[ResNetConfig]):
    """The paper's baseline ResNet (BiT), and with axial attention in its bottlenecks the AxialResNet."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.config = config
        width = 64 * config.width
        self.root = _conv_v2(config.channels, width, 7, 2, config.epsilons)
        self.stages = nn.ModuleList()
        inputs = width
        for stage, depth in enumerate(config.blocks):
            hidden, stride = width * 2**stage, 1 if stage == 0 else 2
            # An axial bottleneck attends before it strides, so the first of a stage has the grid of the stage before.
            before, after = (config.stage_grid(config.image, at) if config.axial else None for at in (stage - 1, stage))
            first = BottleneckV2(inputs, hidden, stride, grid=before, project=True, epsilons=config.epsilons)
            rest = (BottleneckV2(4 * hidden, hidden, grid=after, epsilons=config.epsilons) for _ in range(depth - 1))
            self.stages.append(nn.Sequential(first, *rest))
            inputs = 4 * hidden
        self.norm = _norm_v2(inputs)
        self.head = Head(inputs, config.classes)

    def patchify(self, images: Tensor) -> Tensor:
        """The root, with channels last: (batch, channels, height, width) -> (batch, h, w, dim)"""
        check_images(images, self.config.channels)
        x = self.root(_in_fastest_layout(images))
        if self.config.root_pool == "zero":
            x = F.max_pool2d(_zeros_around(x), 3, 2)  # not max_pool2d's own padding, which is minus infinity
        else:
            x = F.max_pool2d(x, 3, 2, padding=1)
        return x.permute(0, 2, 3, 1)

    def encode(self, patches: Tensor) -> Tensor:
        """The four stages, final norm and ReLU, row by row: (batch, h, w, dim) -> (batch, tokens, features)"""
        x = patches.permute(0, 3, 1, 2)
        for stage in self.stages:
            x = stage(x)
        return group_norm(self.norm, x).flatten(2).transpose(1, 2)

    def intermediates(
        self, images: Tensor, layers: Sequence[int] | None = None, *, norm: bool = False, reshape: bool = True
    ) -> list[Tensor]:
        """Outputs of chosen stages, with their gradients; stages after the last chosen one are not computed.

        Args:
            images: (batch, channels, height, width), normalized.
            layers: stages, counted from 0 or, negative, from the end; None for all four (strides 4, 8, 16 and 32).
            norm: apply the final GroupNorm and ReLU to the last stage, the only one with its number of channels.
            reshape: False returns sequences instead of maps.

        Returns:
            One tensor per entry of `layers`, in that order: maps (batch, dim, h, w) or, with `reshape=False`,
            (batch, h * w, dim), row by row.

        Raises:
            UserError: the model has no such stage.
        """
        indices = layer_indices(layers, len(self.stages))
        x = self.patchify(images).permute(0, 3, 1, 2)
        outputs: dict[int, Tensor] = {}
        for i in range(max(indices, default=-1) + 1):
            x = self.stages[i](x)
            last = i == len(self.stages) - 1
            if i in indices:
                maps = group_norm(self.norm, x) if norm and last else x
                outputs[i] = maps if reshape else maps.flatten(2).transpose(1, 2)
        return [outputs[i] for i in indices]

    def pool(self, tokens: Tensor) -> Tensor:
        """(batch, n, features) -> (batch, features)"""
        return tokens.mean(1)

    def _checkpointed_layers(self) -> Iterable[nn.Module]:
        return [bottleneck for stage in self.stages for bottleneck in stage.children()]


class BottleneckV2(nn.Module):
    """A pre-activation bottleneck; with a `grid`, axial attention built for that grid replaces the 3x3 convolution."""

    def __init__(
        self,
        inputs: int,
        hidden: int,
        stride: int = 1,
        *,
        grid: Size | None = None,
        project: bool = False,
        epsilons: Epsilons = "google",
    ) -> None:
        super().__init__()
        self.norm1 = _norm_v2(inputs)
        self.conv1 = _conv_v2(inputs, hidden, 1, 1, epsilons)
        self.norm2 = _norm_v2(hidden)
        self.conv2 = AxialAttention2d(hidden, grid, stride) if grid else _conv_v2(hidden, hidden, 3, stride, epsilons)
        self.norm3 = _norm_v2(hidden)
        self.conv3 = _conv_v2(hidden, 4 * hidden, 1, 1, epsilons)
        self.projection = _conv_v2(inputs, 4 * hidden, 1, stride, epsilons) if project else None

    def forward(self, x: Tensor) -> Tensor:
        """(batch, inputs, h, w) -> (batch, 4 * hidden, ceil(h / stride), ceil(w / stride))"""
        y = group_norm(self.norm1, x)
        if self.projection is not None:
            x = self.projection(y)
        y = self.conv1(y)
        y = self.conv2(group_norm(self.norm2, y))
        y = self.conv3(group_norm(self.norm3, y))
        return x + y


class ResNetStem(nn.Module):
    """Images to a feature map: the root, then stages of bottlenecks; every stage but the first halves the grid."""

    def __init__(self, config: StemConfig, channels: int) -> None:
        super().__init__()
        width = 64 * config.width
        self.root = StemRoot(channels, width, config.epsilons)
        self.stages = nn.ModuleList()
        inputs = width
        for stage, depth in enumerate(config.blocks):
            hidden, stride = width * 2**stage, 1 if stage == 0 else 2
            first = StemBottleneck(inputs, hidden, stride, project=True, epsilons=config.epsilons)
            rest = (StemBottleneck(4 * hidden, hidden, epsilons=config.epsilons) for _ in range(depth - 1))
            self.stages.append(nn.Sequential(first, *rest))
            inputs = 4 * hidden

    def forward(self, images: Tensor) -> Tensor:
        """(batch, channels, height, width) -> (batch, StemConfig.channels, *StemConfig.grid)"""
        x = self.root(_in_fastest_layout(images))
        for stage in self.stages:
            x = stage(x)
        return x


class StemRoot(nn.Module):
    """7x7 convolution and max-pool: a quarter of the height and of the width."""

    def __init__(self, inputs: int, outputs: int, epsilons: Epsilons) -> None:
        super().__init__()
        self.conv = _stem_conv(inputs, outputs, 7, 2, epsilons)
        self.norm = _stem_norm(outputs, epsilons)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, inputs, h, w) -> (batch, outputs, ceil(h / 4), ceil(w / 4))"""
        x = group_norm(self.norm, self.conv(x))
        return F.max_pool2d(pad_same(x, 3, 2, value=-torch.inf), 3, 2)


class StemBottleneck(nn.Module):
    """A post-activation bottleneck: 1x1, 3x3 (with the stride) and 1x1 convolutions with a shortcut."""

    def __init__(self, inputs: int, hidden: int, stride: int = 1, *, project: bool = False, epsilons: Epsilons) -> None:
        super().__init__()
        self.conv1 = _stem_conv(inputs, hidden, 1, 1, epsilons)
        self.norm1 = _stem_norm(hidden, epsilons)
        self.conv2 = _stem_conv(hidden, hidden, 3, stride, epsilons)
        self.norm2 = _stem_norm(hidden, epsilons)
        self.conv3 = _stem_conv(hidden, 4 * hidden, 1, 1, epsilons)
        self.norm3 = _stem_norm(4 * hidden, epsilons)
        nn.init.zeros_(self.norm3.weight)  # starts as its shortcut alone
        self.projection = _stem_conv(inputs, 4 * hidden, 1, stride, epsilons) if project else None
        self.projection_norm = _stem_norm(4 * hidden, epsilons) if project else None

    def forward(self, x: Tensor) -> Tensor:
        """(batch, inputs, h, w) -> (batch, 4 * hidden, ceil(h / stride), ceil(w / stride))"""
        y = group_norm(self.norm1, self.conv1(x))
        y = group_norm(self.norm2, self.conv2(y))
        if self.projection is not None and self.projection_norm is not None:
            x = group_norm(self.projection_norm, self.projection(x), relu=False)
        return group_norm(self.norm3, self.conv3(y), residual=x)


def _in_fastest_layout(images: Tensor) -> Tensor:
    """In memory; the shape stays. What is computed from the images inherits it."""
    return images.contiguous(memory_format=torch.channels_last) if prefers_channels_last(images) else images


def _conv_v2(inputs: int, outputs: int, kernel: int, stride: int, epsilons: Epsilons) -> StdConv2d:
    return StdConv2d(inputs, outputs, kernel, stride, convention="bit", epsilons=epsilons)


def _norm_v2(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(32, channels, eps=1e-5)


def _stem_conv(inputs: int, outputs: int, kernel: int, stride: int, epsilons: Epsilons) -> StdConv2d:
    return StdConv2d(inputs, outputs, kernel, stride, convention="hybrid", epsilons=epsilons)


def _stem_norm(channels: int, epsilons: Epsilons) -> nn.GroupNorm:
    return nn.GroupNorm(32, channels, eps=1e-6 if epsilons == "google" else 1e-5)
