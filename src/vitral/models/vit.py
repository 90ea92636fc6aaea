"""The Vision Transformer (paper, section 3.1), its hybrids and its axial variant, in four verbs.

    patches  = model.patchify(images)   # (b, c, height, width) -> (b, h, w, d)
    tokens   = model.encode(patches)    # (b, h, w, d)          -> (b, prefix + h * w, d)
    features = model.pool(tokens)       # (b, prefix + n, d)    -> (b, d)
    logits   = model.head(features)     # (b, d)                -> (b, classes)

Patches keep their grid, so that no verb has to guess it from a count.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.architecture import ViTConfig
from vitral.kernels.dispatch import fits_blocks
from vitral.models.heads import Head, MapPool
from vitral.models.init import lecun_normal, normal, zero_bias
from vitral.models.layers import AxialBlock, Block, check_images
from vitral.models.position import build_position, grid_of
from vitral.models.stem import ResNetStem


class ViT(nn.Module):
    """Images of any height and width in, logits out."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        self.stem = ResNetStem(config.stem, config.channels) if config.stem else nn.Identity()
        channels = config.stem.channels if config.stem else config.channels
        self.embed = nn.Conv2d(channels, config.width, kernel_size=config.patch, stride=config.patch)
        self.class_token = nn.Parameter(torch.zeros(config.width)) if config.class_token else None
        registers = normal(torch.empty(config.registers, config.width), std=1e-6)
        self.registers = nn.Parameter(registers) if config.registers else None
        tables = config.depth if config.injection == "every" else 1
        positions = [build_position(config) for _ in range(tables)]
        self.positions = nn.ModuleList([position for position in positions if position is not None])
        self.dropout = nn.Dropout(config.dropout)
        kind = AxialBlock if config.axial else Block
        last = max(config.depth - 1, 1)
        self.blocks = nn.ModuleList([kind(config, config.stochastic_depth * i / last) for i in range(config.depth)])
        self.norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.map = MapPool(config) if config.pool == "map" else None
        self.head = Head(config.width, config.classes, config.representation)
        lecun_normal(self.embed.weight)
        zero_bias(self.embed)

    def patchify(self, images: Tensor) -> Tensor:
        """(b, c, height, width) -> (b, h, w, d); pixels at the right and bottom that fill no patch are dropped."""
        check_images(images, self.config.channels)
        self.config.grid((images.shape[2], images.shape[3]))
        if self.config.stem is not None:
            return self.embed(self.stem(images)).permute(0, 2, 3, 1)
        return self._cut(images)

    def _cut(self, images: Tensor) -> Tensor:
        """(b, c, height, width) -> (b, h, w, d): the embedding as one matrix product, which is what its convolution is
        and several times as fast on a GPU."""
        p = self.config.patch
        (h, w), channels = self.config.grid((images.shape[2], images.shape[3])), images.shape[1]
        pixels = images[:, :, : h * p, : w * p].unflatten(3, (w, p)).unflatten(2, (h, p))
        pixels = pixels.permute(0, 2, 4, 1, 3, 5)
        if half := _autocast_dtype(images.device.type):  # converted and laid out in one pass
            pixels = pixels.to(half, memory_format=torch.contiguous_format)
        pixels = pixels.reshape(-1, h, w, channels * p * p)
        return F.linear(pixels, self.embed.weight.flatten(1), self.embed.bias)

    def encode(self, patches: Tensor) -> Tensor:
        """(b, h, w, d) -> (b, prefix + h * w, d): class token, registers, positions, blocks, norm."""
        grid = grid_of(patches)
        # Sines are computed in single precision; weights in half precision go on in theirs.
        added = [position(patches).to(self.embed.weight.dtype) for position in self.positions]
        x = self._with_prefix(patches.flatten(1, 2))
        x = self.dropout(x + added[0] if added else x)
        if half := _autocast_dtype(x.device.type):
            x = x.to(half)  # the sum over blocks, too: it is what every block reads and writes
        plain = self.config.injection == "input" and self.config.norm_place == "tokens"
        if plain and fits_blocks(x, self.config.heads):
            from vitral.models.fused import fused_blocks  # with it comes torch's compiler, which few runs need

            tokens = fused_blocks(x, self.blocks, self.norm)
            if tokens is not None:
                return tokens
        for i, block in enumerate(self.blocks):
            if i > 0 and self.config.injection != "input":
                x = x + added[i % len(added)]
            x = block(x, grid)
        return self.norm(x) if self.config.norm_place == "tokens" else x

    def pool(self, tokens: Tensor) -> Tensor:
        """(b, prefix + n, d) -> (b, d): the class token, the mean of the patches, or attention over them."""
        if self.config.pool == "token":
            features = tokens[:, 0]
        else:
            patches = tokens[:, self.config.prefix :]
            features = patches.mean(dim=1) if self.map is None else self.map(patches)
        return self.norm(features) if self.config.norm_place == "features" else features

    def features(self, images: Tensor) -> Tensor:
        """(b, c, height, width) -> (b, d)"""
        return self.pool(self.encode(self.patchify(images)))

    def forward(self, images: Tensor) -> Tensor:
        """(b, c, height, width) -> (b, classes)"""
        patches = self.patchify(images)
        tokens = self.encode(patches)
        features = self.pool(tokens)
        return self.head(features)

    def _with_prefix(self, x: Tensor) -> Tensor:
        """(b, n, d) -> (b, prefix + n, d)"""
        front = [] if self.class_token is None else [self.class_token.unsqueeze(0)]
        front += [] if self.registers is None else [self.registers]
        return torch.cat([*(rows.expand(x.shape[0], -1, -1) for rows in front), x], dim=1)


def _autocast_dtype(device: str) -> torch.dtype | None:
    """The half precision that is switched on for a type of device; "meta" knows none."""
    on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if on else None
