"""Axial attention in place of a 3x3 convolution: what makes a ResNet an AxialResNet (appendix D.6)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.architecture import AXIAL_HEADS, Size
from vitral.models.init import lecun_normal, normal
from vitral.models.position import resize_offsets


class AxialAttention2d(nn.Module):
    """Attention along the height, then along the width; with stride 2, a 2x2 average pool follows.

    After the position-sensitive attention of Axial-DeepLab (Wang et al. 2020), which the paper ported. As there: 8
    heads, queries and keys half as wide as values, offset tables that the heads share, no output projection (the 1x1
    convolution that follows is one). Departures: no BatchNorm inside the attention, since this network normalises
    without the batch, right before and right after; the logits are divided by the root of the key width instead. An
    odd row or column is averaged over the pixels that exist, so grids round up as those of the convolutions do.
    """

    def __init__(self, channels: int, grid: Size, stride: int = 1) -> None:
        super().__init__()
        self.height = AxisAttention(channels, grid[0])
        self.width = AxisAttention(channels, grid[1])
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        """(b, c, h, w) -> (b, c, ceil(h / stride), ceil(w / stride))"""
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
        self.widths = (
            channels // AXIAL_HEADS // 2,
            channels // AXIAL_HEADS // 2,
            channels // AXIAL_HEADS,
        )  # query, key, value of a head
        self.projection = nn.Linear(channels, 2 * channels, bias=False)
        self.offsets = nn.Parameter(torch.empty(2 * length - 1, sum(self.widths)))  # 1 - length .. length - 1
        lecun_normal(self.projection.weight)
        normal(self.offsets, std=math.sqrt(1 / self.widths[2]))  # Axial-DeepLab's

    def forward(self, x: Tensor) -> Tensor:
        """(b, lines, length, c) -> the same: each line by itself"""
        q, k, v = self.projection(x).unflatten(-1, (AXIAL_HEADS, -1)).transpose(2, 3).split(self.widths, dim=-1)
        a, b, c = self._relative(x.shape[2]).split(self.widths, dim=-1)
        logits = q @ k.transpose(-1, -2)  # (b, lines, heads, query, key)
        logits = logits + torch.einsum("blhqd,qkd->blhqk", q, a) + torch.einsum("blhkd,qkd->blhqk", k, b)
        attention = (logits / math.sqrt(self.widths[1])).softmax(dim=-1)
        output = attention @ v + torch.einsum("blhqk,qkd->blhqd", attention, c)
        return output.transpose(2, 3).flatten(3)

    def _relative(self, length: int) -> Tensor:
        """(query, key, d): the row of the offset from each query to each key."""
        place = torch.arange(length, device=self.offsets.device)
        return resize_offsets(self.offsets, 2 * length - 1)[place[None, :] - place[:, None] + length - 1]
