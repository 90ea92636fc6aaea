"""Layers of the transformer: attention, MLP, the pre-norm block (paper, equations 2-3 and 5-8), and attention pooling;
axial attention for the AxialResNet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.architecture import AXIAL_HEADS, Size, ViTConfig
from vitral.kernels.dispatch import apply_linear, attention, is_plain, is_plain_tensor
from vitral.kernels.packed import Int8Linear, PackedLinear, linear_gelu
from vitral.models.model import lecun_normal, normal, xavier_uniform
from vitral.models.position import RelativeBias, RelativePosition, Rotation, resize_offsets


class AttentionObserver(Protocol):
    """Receives the inputs and the output of an attention layer, and changes nothing; see `capture.py`."""

    def observe(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, output: Tensor) -> None:
        """q, k, v, output (batch, heads, tokens, dim), bias (batch, heads, tokens, tokens)"""


def attend(
    qkv: Tensor,
    observers: Sequence[AttentionObserver],
    bias: Tensor | None,
    dropout: float,
    queries: int | None = None,
) -> Tensor:
    """Equations 6 and 7, fused: (batch, tokens, 3, heads, dim) -> (batch, heads, tokens or `queries`, dim)"""
    output = attention(qkv, bias, dropout, queries)
    for observer in observers:
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        observer.observe(q, k, v, bias, output)
    return output


class Attention(nn.Module):
    """Multi-head self-attention with one fused projection for queries, keys and values."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.attention_dropout = config.attention_dropout
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=config.qkv_bias and config.key_bias)
        separate = config.qkv_bias and not config.key_bias
        self.qv_bias = nn.Parameter(torch.zeros(2, config.width)) if separate else None
        dim = config.width // config.heads
        self.q_norm = nn.LayerNorm(dim, eps=config.norm_eps) if config.qk_norm else None
        self.k_norm = nn.LayerNorm(dim, eps=config.norm_eps) if config.qk_norm else None
        self.norm = _optional_norm(config.width, config, config.attention_norm)
        self.out = nn.Linear(config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)
        relative = {"relative": RelativePosition, "bias": RelativeBias}.get(config.position)
        self.relative = None if relative is None else relative(config)
        self.observers: list[AttentionObserver] = []
        xavier_uniform(self.qkv.weight, parts=3)
        xavier_uniform(self.out.weight)
        if self.qkv.bias is not None:
            nn.init.zeros_(self.qkv.bias)
        nn.init.zeros_(self.out.bias)

    def forward(self, x: Tensor, grid: Size, rotation: Rotation | None = None, queries: int | None = None) -> Tensor:
        """Tokens attend to each other along the last axis but one: (..., tokens, dim) -> (..., tokens, dim); with
        `queries`, only the first tokens attend to all: (..., queries, dim); without relative positions or observers."""
        shape = x.shape
        qkv = self._project(x.reshape(-1, *shape[-2:]), rotation)
        bias = None if self.relative is None else self.relative(qkv[:, :, 0].transpose(1, 2), grid)
        dropout = self.attention_dropout if self.training else 0.0
        x = attend(qkv, self.observers, bias, dropout, queries).transpose(1, 2)
        x = x.reshape(*shape[:-2], x.shape[1], shape[-1])
        return self.dropout(apply_linear(self.out, self.norm(x)))

    def full_bias(self) -> Tensor:
        """The bias of queries, keys (zero) and values where keys have none: (3 * dim,)"""
        assert self.qv_bias is not None
        q, v = self.qv_bias
        return torch.cat([q, torch.zeros_like(q), v])

    def _project(self, x: Tensor, rotation: Rotation | None) -> Tensor:
        """(batch, tokens, dim) -> queries, keys and values (batch, tokens, 3, heads, dim)"""
        batch, tokens, width = x.shape
        qkv = apply_linear(self.qkv, x)
        if self.qv_bias is not None:
            qkv = qkv + self.full_bias().to(qkv.dtype)
        qkv = qkv.view(batch, tokens, 3, self.heads, width // self.heads)
        if rotation is None and self.q_norm is None:
            return qkv
        q, k, v = qkv.unbind(2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotation is not None:
            q, k = rotation.apply(q), rotation.apply(k)
        return torch.stack([q.to(v.dtype), k.to(v.dtype), v], dim=2)


class Mlp(nn.Module):
    """Linear, GELU (or SwiGLU), linear, with dropout after each linear layer."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.gelu = config.gelu
        self.approximate = "tanh" if config.gelu == "tanh" else "none"
        self.gated = config.swiglu
        self.hidden = nn.Linear(config.width, config.mlp * (2 if config.swiglu else 1))
        self.norm = _optional_norm(config.mlp, config, config.mlp_norm)
        self.output = nn.Linear(config.mlp, config.width)
        self.dropout = nn.Dropout(config.dropout)
        for layer in (self.hidden, self.output):
            xavier_uniform(layer.weight)
            normal(layer.bias, std=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) -> (..., dim)"""
        return self.dropout(apply_linear(self.output, self.norm(self.dropout(self._activate(x)))))

    def _activate(self, x: Tensor) -> Tensor:
        if self.gated:
            gate, value = apply_linear(self.hidden, x).chunk(2, dim=-1)
            return F.silu(gate) * value
        if self.gelu == "quick":
            x = apply_linear(self.hidden, x)
            return x * torch.sigmoid(1.702 * x)
        return linear_gelu(self.hidden, x, self.approximate)


def _optional_norm(width: int, config: ViTConfig, present: bool) -> nn.Module:
    return nn.LayerNorm(width, eps=config.norm_eps) if present else nn.Identity()


class StochasticDepth(nn.Module):
    """Drop a whole residual branch for random images of the batch, and scale up the others (DropPath)."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        """(batch, ...) -> (batch, ...)"""
        draws = self.draw(x)
        if draws is None:
            return x
        keep = 1.0 - self.rate
        return x * (draws < keep).to(x.dtype) / keep

    def draw(self, x: Tensor) -> Tensor | None:
        """A uniform number per image, (batch, 1, ...): it keeps the branch where that is below 1 - rate; or None."""
        if not self.training or self.rate == 0.0:
            return None
        # Not in the default dtype, which may be bfloat16 and too coarse.
        return torch.rand(x.shape[0], *[1] * (x.ndim - 1), device=x.device, dtype=torch.float32)


class LayerScale(nn.Module):
    """A learned factor per channel on a residual branch, as in CaiT and DINOv2."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((width,), 1e-5))

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) -> (..., dim)"""
        return x * self.scale


class Block(nn.Module):
    """z' = MSA(LN(z)) + z;  z'' = MLP(LN(z')) + z'  (equations 2 and 3).

    With `post_norm`, the branches are LN(MSA(z)) and LN(MLP(z')) instead.
    """

    def __init__(self, config: ViTConfig, drop_rate: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.attention = Attention(config)
        self.scale1 = LayerScale(config.width) if config.layer_scale else nn.Identity()
        self.norm2 = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.mlp = Mlp(config)
        self.scale2 = LayerScale(config.width) if config.layer_scale else nn.Identity()
        self.drop = StochasticDepth(drop_rate)
        self.post_norm = config.post_norm

    def forward(self, x: Tensor, grid: Size, rotation: Rotation | None = None, queries: int | None = None) -> Tensor:
        """(batch, ..., tokens, dim) -> (batch, ..., tokens, dim); of the first `queries` tokens if it is given"""
        kept, only = (x, {}) if queries is None else (x[..., :queries, :], {"queries": queries})
        if self.post_norm:
            x = kept + self.drop(self.norm1(self.attention(x, grid=grid, rotation=rotation, **only)))
            return x + self.drop(self.norm2(self.mlp(x)))
        x = kept + self.drop(self.scale1(self.attention(self.norm1(x), grid=grid, rotation=rotation, **only)))
        return x + self.drop(self.scale2(self.mlp(self.norm2(x))))


# Parts of a block that compute every token by itself, apart from the attention.
TOKEN_WISE: set[type[nn.Module]] = {
    *(Block, Attention, Mlp, StochasticDepth, LayerScale, PackedLinear, Int8Linear),
    *(nn.Linear, nn.LayerNorm, nn.Identity, nn.Dropout),
}


def computes_tokens_alone(module: nn.Module) -> bool:
    """Whether a block or a norm computes some tokens as it computes all: it is evaluated, nothing in it draws random
    numbers, and no part was replaced, quantised, hooked or observed by others."""
    for part in module.modules():
        if part.training or type(part) not in TOKEN_WISE or not is_plain(part, type(part)):
            return False
        if isinstance(part, Attention) and part.observers:
            return False
        if isinstance(part, nn.LayerNorm) and len(part.normalized_shape) != 1:
            return False
    return all(is_plain_tensor(parameter) for parameter in module.parameters())


class AxialBlock(nn.Module):
    """Appendix D.6: a block along every row, then a block along every column."""

    def __init__(self, config: ViTConfig, drop_rate: float) -> None:
        super().__init__()
        self.row = Block(config, drop_rate)
        self.column = Block(config, drop_rate)

    def forward(self, x: Tensor, grid: Size, rotation: None = None) -> Tensor:
        """(batch, h * w, dim) -> (batch, h * w, dim)"""
        x = x.unflatten(1, grid)
        x = self.row(x, grid=grid)
        x = self.column(x.transpose(1, 2), grid=grid).transpose(1, 2)
        return x.flatten(1, 2)


class MapPool(nn.Module):
    """Multi-head attention pooling: a learned query reads the patches, then an MLP, without dropout (big_vision's)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.heads = config.map_heads or config.heads
        self.probe = nn.Parameter(torch.empty(1, config.width))
        self.q = nn.Linear(config.width, config.width)
        self.kv = nn.Linear(config.width, 2 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        mlp = config.map_mlp or config.mlp
        self.mlp = Mlp(replace(config, mlp=mlp, swiglu=False, mlp_norm=False, dropout=0.0))
        self.observers: list[AttentionObserver] = []
        xavier_uniform(self.probe)
        xavier_uniform(self.kv.weight, parts=2)
        for layer in (self.q, self.out):
            xavier_uniform(layer.weight)
        for layer in (self.q, self.kv, self.out):
            nn.init.zeros_(layer.bias)

    def forward(self, patches: Tensor) -> Tensor:
        """(batch, tokens, dim) -> (batch, dim)"""
        batch, n, width = patches.shape
        dim = width // self.heads
        q = self.q(self.probe).view(1, 1, self.heads, dim).transpose(1, 2).expand(batch, -1, -1, -1)
        k, v = apply_linear(self.kv, patches).view(batch, n, 2, self.heads, dim).permute(2, 0, 3, 1, 4).unbind(0)
        output = F.scaled_dot_product_attention(q, k, v)
        for observer in self.observers:
            observer.observe(q, k, v, None, output)
        x = self.out(output.transpose(1, 2).reshape(batch, width))
        return x + self.mlp(self.norm(x))


class AxialAttention2d(nn.Module):
    """Attention along the height, then along the width, in place of a 3x3 convolution: an AxialResNet (appendix D.6).

    After the position-sensitive attention of Axial-DeepLab (Wang et al. 2020), which the paper ported. As there: 8
    heads, queries and keys half as wide as values, offset tables that the heads share, no output projection (the 1x1
    convolution that follows is one). Departures: no BatchNorm inside the attention, since this network normalizes
    without the batch right before and right after; the logits are divided by the square root of the key width instead.
    With stride 2, a 2x2 average pool follows; an odd row or column is averaged over the pixels that exist, so grids
    round up as those of the convolutions do.
    """

    def __init__(self, channels: int, grid: Size, stride: int = 1) -> None:
        super().__init__()
        self.height = AxisAttention(channels, grid[0])
        self.width = AxisAttention(channels, grid[1])
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, h, w) -> (batch, channels, ceil(h / stride), ceil(w / stride))"""
        x = self.height(x.permute(0, 3, 2, 1))  # (b, w, h, c)
        x = self.width(x.transpose(1, 2))  # (b, h, w, c)
        x = x.permute(0, 3, 1, 2)
        return F.avg_pool2d(x, self.stride, ceil_mode=True) if self.stride > 1 else x


class AxisAttention(nn.Module):
    """Self-attention over one axis, with learned vectors for the offset from a query to a key.

    logit(i, j) = (q_i . k_j + q_i . a[j - i] + k_j . b[j - i]) / sqrt(key width)
    output(i)   = sum over j of softmax(logit)(i, j) * (v_j + c[j - i])
    """

    def __init__(self, channels: int, length: int) -> None:
        super().__init__()
        if channels % (2 * AXIAL_HEADS):
            raise ValueError(f"axial attention needs a multiple of {2 * AXIAL_HEADS} channels, not {channels}.")
        dim = channels // AXIAL_HEADS
        self.widths = (dim // 2, dim // 2, dim)  # query, key, value of a head
        self.projection = nn.Linear(channels, 2 * channels, bias=False)
        self.offsets = nn.Parameter(torch.empty(2 * length - 1, sum(self.widths)))  # 1 - length .. length - 1
        lecun_normal(self.projection.weight)
        normal(self.offsets, std=math.sqrt(1 / self.widths[2]))  # Axial-DeepLab's

    def forward(self, x: Tensor) -> Tensor:
        """Each line by itself: (batch, lines, length, channels) -> (batch, lines, length, channels)"""
        q, k, v = self.projection(x).unflatten(-1, (AXIAL_HEADS, -1)).transpose(2, 3).split(self.widths, dim=-1)
        a, b, c = self._relative(x.shape[2]).split(self.widths, dim=-1)
        logits = q @ k.transpose(-1, -2)  # (b, lines, heads, query, key)
        logits = logits + torch.einsum("blhqd,qkd->blhqk", q, a) + torch.einsum("blhkd,qkd->blhqk", k, b)
        attention = (logits / math.sqrt(self.widths[1])).softmax(dim=-1)
        output = attention @ v + torch.einsum("blhqk,qkd->blhqd", attention, c)
        return output.transpose(2, 3).flatten(3)

    def _relative(self, length: int) -> Tensor:
        """(query, key, dim): the row of the offset from each query to each key"""
        index = torch.arange(length, device=self.offsets.device)
        return resize_offsets(self.offsets, 2 * length - 1)[index[None, :] - index[:, None] + length - 1]
