"""The transformer's parts: attention, MLP, and the pre-norm block (paper, equations 2-3 and 5-8)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from vitral.architecture import Size, ViTConfig
from vitral.errors import UserError
from vitral.kernels.dispatch import attention
from vitral.kernels.packed import linear_gelu
from vitral.models.init import normal, xavier_uniform
from vitral.models.position import RelativePosition


class Watcher(Protocol):
    """Sees what enters and leaves an attention, and changes nothing; `capture.py` sends them."""

    def see(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, output: Tensor) -> None: ...


def attend(qkv: Tensor, watchers: Sequence[Watcher], bias: Tensor | None, dropout: float) -> Tensor:
    """(b, n, 3, heads, d) -> (b, heads, n, d): equations 6 and 7, fused"""
    output = attention(qkv, bias, dropout)
    for watcher in watchers:
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        watcher.see(q, k, v, bias, output)
    return output


class Attention(nn.Module):
    """Multi-head self-attention with one fused projection for queries, keys and values."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.attention_dropout = config.attention_dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.relative = RelativePosition(config) if config.position == "relative" else None
        self.watchers: list[Watcher] = []
        xavier_uniform(self.qkv.weight, parts=3)
        xavier_uniform(self.out.weight)
        nn.init.zeros_(self.qkv.bias)
        nn.init.zeros_(self.out.bias)

    def forward(self, x: Tensor, grid: Size) -> Tensor:
        """(..., n, d) -> (..., n, d): tokens attend to each other along the last axis but one."""
        shape = x.shape
        x = x.reshape(-1, *shape[-2:])
        batch, tokens, width = x.shape
        qkv = self.qkv(x).view(batch, tokens, 3, self.heads, width // self.heads)
        bias = None if self.relative is None else self.relative(qkv[:, :, 0].transpose(1, 2), grid)
        dropout = self.attention_dropout if self.training else 0.0
        x = attend(qkv, self.watchers, bias, dropout).transpose(1, 2).reshape(shape)
        return self.dropout(self.out(x))


class Mlp(nn.Module):
    """Dense, GELU, dense, with dropout after each."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.approximate = "tanh" if config.gelu == "tanh" else "none"
        self.hidden = nn.Linear(config.width, config.mlp)
        self.output = nn.Linear(config.mlp, config.width)
        self.dropout = nn.Dropout(config.dropout)
        for layer in (self.hidden, self.output):
            xavier_uniform(layer.weight)
            normal(layer.bias, std=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        """(..., d) -> (..., d)"""
        x = self.dropout(linear_gelu(self.hidden, x, self.approximate))
        return self.dropout(self.output(x))


class StochasticDepth(nn.Module):
    """Drops a whole residual branch for some images of the batch, and scales up the rest."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        """(b, ...) -> (b, ...)"""
        if not self.training or self.rate == 0.0:
            return x
        keep = 1.0 - self.rate
        kept = torch.rand(x.shape[0], *[1] * (x.ndim - 1), device=x.device) < keep
        return x * kept.to(x.dtype) / keep


class LayerScale(nn.Module):
    """A learned factor per channel on a residual branch; foreign weights (DINOv2, CaiT style) have it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((width,), 1e-5))

    def forward(self, x: Tensor) -> Tensor:
        """(..., d) -> (..., d)"""
        return x * self.scale


class Block(nn.Module):
    """z' = MSA(LN(z)) + z;  z'' = MLP(LN(z')) + z'  (equations 2 and 3)."""

    def __init__(self, config: ViTConfig, drop_rate: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.attention = Attention(config)
        self.scale1 = LayerScale(config.width) if config.layer_scale else nn.Identity()
        self.norm2 = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.mlp = Mlp(config)
        self.scale2 = LayerScale(config.width) if config.layer_scale else nn.Identity()
        self.drop = StochasticDepth(drop_rate)

    def forward(self, x: Tensor, grid: Size) -> Tensor:
        """(b, ..., n, d) -> (b, ..., n, d)"""
        x = x + self.drop(self.scale1(self.attention(self.norm1(x), grid)))
        return x + self.drop(self.scale2(self.mlp(self.norm2(x))))


class AxialBlock(nn.Module):
    """Appendix D.6: a block along every row, then a block along every column."""

    def __init__(self, config: ViTConfig, drop_rate: float) -> None:
        super().__init__()
        self.row = Block(config, drop_rate)
        self.column = Block(config, drop_rate)

    def forward(self, x: Tensor, grid: Size) -> Tensor:
        """(b, h * w, d) -> (b, h * w, d)"""
        x = x.unflatten(1, grid)
        x = self.row(x, grid)
        x = self.column(x.transpose(1, 2), grid).transpose(1, 2)
        return x.flatten(1, 2)


def check_images(images: Tensor, channels: int) -> None:
    """Refuse what is not a batch of images (b, channels, height, width)."""
    if images.ndim != 4 or images.shape[1] != channels:
        raise UserError(
            f"this model reads a batch of {channels}-channel images (b, c, h, w), "
            f"not a tensor of shape {tuple(images.shape)}."
        )
