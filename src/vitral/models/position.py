"""Position embeddings (Table 8), and how their tables are resized to another grid."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.architecture import ResizeRule, Size, ViTConfig
from vitral.models.init import normal


class Position(nn.Module):
    """What is added to the tokens: a table over the grid; for prefix tokens zeros, or a row for the class token."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.rule: ResizeRule = config.resize
        self.prefix = config.prefix
        self.class_row = nn.Parameter(_small_normal(config.width)) if config.class_row else None

    def table_for(self, patches: Tensor) -> Tensor:
        """The table for the grid of the patches: (batch, h, w, dim) -> (h, w, dim)"""
        raise NotImplementedError

    def forward(self, patches: Tensor) -> Tensor:
        """(batch, h, w, dim) -> (prefix + h * w, dim)"""
        table = self.table_for(patches).flatten(0, 1)
        if self.class_row is None:
            return F.pad(table, (0, 0, self.prefix, 0))
        registers = self.prefix - 1
        return torch.cat([self.class_row.unsqueeze(0), F.pad(table, (0, 0, registers, 0))])


class LearnedPosition(Position):
    """ "1-D" in the paper: one learned row per patch in raster order. Stored as a grid, so that it can be resized."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.table = nn.Parameter(_small_normal(*config.grid(config.image), config.width))

    def table_for(self, patches: Tensor) -> Tensor:
        return resize_table(self.table, grid_of(patches), self.rule)


class FactorizedPosition(Position):
    """ "2-D" in the paper: a learned X and a learned Y table of half the width each, concatenated (D.4)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        height, width = config.grid(config.image)
        self.x = nn.Parameter(_small_normal(width, config.width // 2))
        self.y = nn.Parameter(_small_normal(height, config.width // 2))

    def table_for(self, patches: Tensor) -> Tensor:
        height, width = len(self.y), len(self.x)
        x = self.x.expand(height, -1, -1)
        y = self.y.unsqueeze(1).expand(-1, width, -1)
        # Each half varies along one axis only, so resizing the joint table resizes each axis by itself.
        return resize_table(torch.cat([x, y], dim=-1), grid_of(patches), self.rule)


class SinCosPosition(Position):
    """Fixed sines and cosines of the column and the row, as in big_vision, computed for the grid of the patches."""

    def table_for(self, patches: Tensor) -> Tensor:
        return sincos2d(grid_of(patches), patches.shape[-1], patches.device)


class RelativePosition(nn.Module):
    """One embedding per raster offset between two patches, read by the content query (D.4).

    The paper does not say what the class token does here: pairs with a class or register token get no bias.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        height, width = config.grid(config.image)
        self.prefix = config.prefix
        self.table = nn.Parameter(_small_normal(2 * height * width - 1, config.width // config.heads))

    def forward(self, q: Tensor, grid: Size) -> Tensor:
        """Queries (batch, heads, prefix + n, dim) -> attention bias (batch, heads, prefix + n, prefix + n)"""
        n = grid[0] * grid[1]
        table = resize_offsets(self.table, 2 * n - 1)
        logits = q[:, :, self.prefix :] @ (table * q.shape[-1] ** -0.5).to(q.dtype).T  # (batch, heads, n, 2n - 1)
        index = torch.arange(n, device=q.device)
        offset = index[:, None] - index[None, :] + n - 1  # (n, n), query minus key
        bias = logits.gather(-1, offset.expand(*logits.shape[:2], -1, -1))
        return F.pad(bias, (self.prefix, 0, self.prefix, 0))


def build_position(config: ViTConfig) -> Position | None:
    """The module whose output is added to the tokens; None where nothing is added."""
    classes = {"1d": LearnedPosition, "2d": FactorizedPosition, "sincos2d": SinCosPosition}
    return classes[config.position](config) if config.position in classes else None


def grid_of(patches: Tensor) -> Size:
    """Height and width of patches (batch, h, w, dim)."""
    return patches.shape[1], patches.shape[2]


def sincos2d(grid: Size, width: int, device: torch.device | None = None) -> Tensor:
    """(h, w, width): sin(x), cos(x), sin(y), cos(y), each with width/4 frequencies from 1 down to 1/10000."""
    quarter = width // 4
    omega = 10_000.0 ** -(torch.arange(quarter, device=device) / max(quarter - 1, 1))
    rows = torch.arange(grid[0], device=device)[:, None] * omega
    columns = torch.arange(grid[1], device=device)[:, None] * omega
    x = torch.cat([columns.sin(), columns.cos()], dim=-1).expand(grid[0], -1, -1)
    y = torch.cat([rows.sin(), rows.cos()], dim=-1).unsqueeze(1).expand(-1, grid[1], -1)
    return torch.cat([x, y], dim=-1)


def resize_table(table: Tensor, grid: Size, rule: ResizeRule) -> Tensor:
    """(h, w, dim) -> (h', w', dim) by a named rule; the same grid returns the table itself."""
    height, width, _ = table.shape
    if (height, width) == grid:
        return table
    with _full_precision(table):
        exact = _at_least_float32(table)
        rows = _resize_matrix(height, grid[0], rule, exact)
        columns = _resize_matrix(width, grid[1], rule, exact)
        return torch.einsum("ih,jw,hwd->ijd", rows, columns, exact).to(table.dtype)


def resize_offsets(table: Tensor, length: int) -> Tensor:
    """(2n - 1, dim) -> (2n' - 1, dim), linear, ends and offset 0 aligned; n' = 1 has offset 0 alone."""
    if len(table) == length:
        return table
    if length == 1:
        return table[len(table) // 2 :][:1]
    with _full_precision(table):
        exact = _at_least_float32(table)
        return (_resize_matrix(len(table), length, "google", exact) @ exact).to(table.dtype)


def _resize_matrix(old: int, new: int, rule: ResizeRule, like: Tensor) -> Tensor:
    """(new, old): the weight of each old row in each new one. All rules are linear and separable.

    google       linear, corners aligned (scipy.ndimage.zoom of order 1)
    torchvision  cubic (a = -3/4), corners aligned
    hf           cubic (a = -3/4), pixel centers aligned
    dino         as hf, but with DINO's scale factor (new + 0.1) / old
    timm         cubic (a = -1/2), pixel centers aligned, widened against aliasing when it shrinks
    """
    row = torch.arange(new, dtype=like.dtype, device=like.device)
    if rule in ("google", "torchvision"):
        center = row * ((old - 1) / (new - 1) if new > 1 else 0.0)
    else:
        center = (row + 0.5) * (old / (new + 0.1) if rule == "dino" else old / new) - 0.5
    if rule == "timm":
        distance = (torch.arange(old, dtype=like.dtype, device=like.device) - center[:, None]) / max(old / new, 1.0)
        weights = _cubic(distance, -0.5)
        return weights / weights.sum(dim=1, keepdim=True)
    taps = torch.arange(-1, 3, device=like.device)
    index = center.floor()[:, None] + taps  # (new, 4)
    distance = index - center[:, None]
    weights = (1 - distance.abs()).clamp(min=0) if rule == "google" else _cubic(distance, -0.75)
    one_hot = F.one_hot(index.long().clamp(0, old - 1), old).to(like.dtype)  # clamping repeats the edge
    return torch.einsum("nt,nto->no", weights, one_hot)


def _cubic(x: Tensor, a: float) -> Tensor:
    """Keys' convolution kernel, non-zero for |x| < 2."""
    x = x.abs()
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return torch.where(x <= 1, near, torch.where(x < 2, far, torch.zeros_like(x)))


def _full_precision(table: Tensor) -> AbstractContextManager[object]:
    """Switch autocast off: half precision is too coarse to interpolate in."""
    device = table.device.type
    enabled = device != "meta" and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if enabled else nullcontext()


def _at_least_float32(table: Tensor) -> Tensor:
    return table if table.dtype == torch.float64 else table.float()


def _small_normal(*shape: int) -> Tensor:
    return normal(torch.empty(shape), std=0.02)
