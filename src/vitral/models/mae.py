"""Masked autoencoder (MAE, He et al. 2022): a ViT encodes the visible patches, a small decoder predicts the others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.architecture import ViTConfig
from vitral.errors import UserError
from vitral.models.layers import Block
from vitral.models.model import normal, xavier_uniform
from vitral.models.position import sincos2d
from vitral.models.vit import ViT, gather_rows


@dataclass(frozen=True)
class MaeConfig:
    """The decoder, by default the paper's, and the task."""

    width: int = 512
    depth: int = 8
    heads: int = 16
    mlp: int = 2048
    ratio: float = 0.75  # of the patches that the encoder does not see
    norm_pixels: bool = True  # predict pixels that are normalised by the mean and std of their patch

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in ("width", "depth", "heads", "mlp")}
        wrong = [name for name, size in sizes.items() if type(size) is not int or size < 1]
        if wrong or self.width % self.heads or self.width % 4:
            stated = ", ".join(f"{name}={size}" for name, size in sizes.items())
            raise UserError(f"a decoder of {stated} is not possible: its width is a multiple of its heads and of 4.")
        if type(self.ratio) not in (int, float) or not 0 < self.ratio < 1:
            raise UserError(f"a masked autoencoder hides a part of the patches, not a ratio of {self.ratio}.")

    def blocks(self, encoder: ViTConfig) -> ViTConfig:
        """The configuration of the decoder's blocks, which are the encoder's in other sizes."""
        sizes = {"width": self.width, "depth": self.depth, "heads": self.heads, "mlp": self.mlp}
        return replace(encoder, **sizes, layer_scale=False, position="none", dropout=0.0, attention_dropout=0.0)

    def visible(self, patches: int) -> int:
        """How many of an image's patches the encoder sees."""
        return int(patches * (1 - self.ratio))


class Reconstruction(NamedTuple):
    """What a masked autoencoder makes of b images with n patches."""

    losses: Tensor  # (b,): the mean square over the pixels of the hidden patches
    pixels: Tensor  # (b, n, patch * patch * channels): predicted, in the order row, column, channel
    hidden: Tensor  # (b, n) bool: the patches that the encoder did not see


class MaeDecoder(nn.Module):
    """Tokens of the visible patches to the pixels of all patches."""

    def __init__(self, encoder: ViTConfig, config: MaeConfig) -> None:
        super().__init__()
        blocks = config.blocks(encoder)
        rows, columns = encoder.grid(encoder.image)
        self.prefix = encoder.prefix
        self.grid = rows, columns
        self.embed = nn.Linear(encoder.width, config.width)
        self.mask_token = nn.Parameter(normal(torch.empty(config.width), std=0.02))
        fixed = sincos2d(self.grid, config.width).flatten(0, 1)
        self.register_buffer("positions", F.pad(fixed, (0, 0, self.prefix, 0)))
        self.blocks = nn.ModuleList([Block(blocks, 0.0) for _ in range(config.depth)])
        self.norm = nn.LayerNorm(config.width, eps=encoder.norm_eps)
        self.predict = nn.Linear(config.width, encoder.patch**2 * encoder.channels)
        for layer in (self.embed, self.predict):
            xavier_uniform(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, tokens: Tensor, order: Tensor) -> Tensor:
        """Predict the pixels of all patches, (b, n, patch * patch * channels).

        Tokens (b, prefix + visible, dim) are those of the encoder, the visible patches in the order of `order`, (b, n):
        the visible ones, then the hidden ones.
        """
        x = self.embed(tokens)
        prefix, visible = x[:, : self.prefix], x[:, self.prefix :]
        hidden = self.mask_token.to(x.dtype).expand(len(x), order.shape[1] - visible.shape[1], -1)
        patches = gather_rows(torch.cat([visible, hidden], dim=1), order.argsort(dim=1))
        x = torch.cat([prefix, patches], dim=1) + self.positions.to(x.dtype)
        for block in self.blocks:
            x = block(x, self.grid)
        return self.predict(self.norm(x))[:, self.prefix :]


class MaskedAutoencoder(nn.Module):
    """An encoder, any plain ViT, and the decoder that it is pre-trained with."""

    def __init__(self, encoder: ViT, config: MaeConfig) -> None:
        super().__init__()
        c = encoder.config
        if c.stem or c.axial or c.rope or c.injection != "input" or c.position in ("relative", "bias"):
            raise UserError(
                "a masked autoencoder needs a plain ViT: without a ResNet in front, axial blocks, RoPE, relative "
                "positions or positions in every layer."
            )
        patches = c.grid(c.image)[0] * c.grid(c.image)[1]
        if not 0 < config.visible(patches) < patches:
            raise UserError(f"of {patches} patches, a ratio of {config.ratio:g} leaves none visible, or none hidden.")
        self.config = config
        self.encoder = encoder
        self.decoder = MaeDecoder(c, config)

    def forward(self, images: Tensor, noise: Tensor) -> Reconstruction:
        """Hide patches of normalised images and predict them; those with the smallest noise (b, n) stay visible.

        Raises UserError for images that are not of the encoder's size, for which its decoder has positions.
        """
        c = self.encoder.config
        if tuple(images.shape[2:]) != c.image:
            raise UserError(f"the decoder has positions for images of {c.image[0]}x{c.image[1]} pixels only.")
        patches = self.encoder.patchify(images)
        order = noise.argsort(dim=1)
        visible = self.config.visible(order.shape[1])
        tokens = self.encoder.encode(patches, order[:, :visible])
        tokens = self.encoder.norm(tokens) if c.norm_place == "features" else tokens
        pixels = self.decoder(tokens, order).float()
        hidden = torch.ones_like(order, dtype=torch.bool).scatter(1, order[:, :visible], value=False)
        squares = (pixels - self.targets(images)).square().mean(dim=2)
        return Reconstruction((squares * hidden).sum(dim=1) / hidden.sum(dim=1), pixels, hidden)

    def targets(self, images: Tensor) -> Tensor:
        """(b, channels, height, width) -> (b, n, patch * patch * channels): the pixels that are predicted"""
        c = self.encoder.config
        rows, columns = c.grid(c.image)
        cut = images[:, :, : rows * c.patch, : columns * c.patch].unflatten(3, (columns, c.patch))
        pixels = cut.unflatten(2, (rows, c.patch)).permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2).float()
        if not self.config.norm_pixels:
            return pixels
        return (pixels - pixels.mean(dim=2, keepdim=True)) / (pixels.var(dim=2, keepdim=True) + 1e-6).sqrt()
