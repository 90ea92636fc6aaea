"""Position embeddings (Table 8), and how their tables are resized to another grid."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.architecture import ResizeRule, RopeConfig, Size, ViTConfig
from vitral.models.model import normal


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


class RelativeBias(nn.Module):
    """A learned number per head for every offset (rows, columns) between two patches, added to the logits (BEiT).

    The class token has three more: as query, as key, and for itself. Registers get no bias.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        height, width = config.grid(config.image)
        self.rule: ResizeRule = config.resize
        self.registers = config.registers
        self.table = nn.Parameter(torch.zeros(2 * height - 1, 2 * width - 1, config.heads))
        self.class_table = nn.Parameter(torch.zeros(3, config.heads)) if config.class_token else None

    def forward(self, q: Tensor, grid: Size) -> Tensor:
        """Queries (batch, heads, prefix + n, dim) -> attention bias (batch, heads, prefix + n, prefix + n)"""
        height, width = grid
        table = resize_table(self.table, (2 * height - 1, 2 * width - 1), self.rule)
        row, column = (torch.arange(side, device=q.device) for side in grid)
        rows = (row[:, None] - row[None, :] + height - 1)[:, None, :, None]  # query minus key
        columns = (column[:, None] - column[None, :] + width - 1)[None, :, None, :]
        bias = table[rows, columns].reshape(height * width, height * width, -1).permute(2, 0, 1)  # (heads, n, n)
        bias = F.pad(bias, (self.registers, 0, self.registers, 0))
        if self.class_table is not None:
            as_query, as_key, itself = self.class_table.unsqueeze(-1).unsqueeze(-1)  # (heads, 1, 1) each
            tokens = bias.shape[-1]
            bias = torch.cat([as_key.expand(-1, tokens, 1), bias], dim=2)
            bias = torch.cat([torch.cat([itself, as_query.expand(-1, 1, tokens)], dim=2), bias], dim=1)
        return bias.to(q.dtype).expand(q.shape[0], -1, -1, -1)


class Rotation(NamedTuple):
    """What RoPE does to the queries and keys of one block."""

    cos: Tensor  # (tokens, 1 or heads, dim / 2)
    sin: Tensor
    adjacent: bool  # whether channels 2i and 2i + 1 are a pair, not i and i + dim / 2

    def apply(self, x: Tensor) -> Tensor:
        """Rotate every pair of channels: (batch, tokens, heads, dim) -> (batch, tokens, heads, dim), float32"""
        first, second = x.unflatten(-1, (-1, 2)).unbind(-1) if self.adjacent else x.chunk(2, dim=-1)
        turned = (first * self.cos - second * self.sin, second * self.cos + first * self.sin)
        return torch.stack(turned, dim=-1).flatten(-2) if self.adjacent else torch.cat(turned, dim=-1)


class RotaryPosition(nn.Module):
    """RoPE in two dimensions: how queries and keys are rotated. Tokens before the patches are not."""

    def __init__(self, config: ViTConfig, rope: RopeConfig) -> None:
        super().__init__()
        self.rope = rope
        self.depth, self.prefix, self.dim = config.depth, config.prefix, config.width // config.heads
        shape = (2, config.depth, config.heads, self.dim // 2)
        self.frequencies = nn.Parameter(_mixed_frequencies(shape, rope.temperature)) if rope.learned else None

    def forward(self, patches: Tensor) -> list[Rotation]:
        """(batch, h, w, dim) -> the rotation of each block"""
        device = patches.device
        y, x = (self._coordinates(side, axis, device) for axis, side in enumerate(grid_of(patches)))
        grids = torch.meshgrid(y, x, indexing="ij")
        first, second = (grid.flatten() for grid in (grids if self.rope.axes == "yx" else grids[::-1]))
        if self.frequencies is None:
            bands = self._bands(device)
            angles = torch.cat([first[:, None] * bands, second[:, None] * bands], dim=-1).unsqueeze(1)
            return [self._rotation(angles)] * self.depth
        with _full_precision(self.frequencies):
            exact = self.frequencies.float()
            angles = first[:, None, None, None] * exact[0] + second[:, None, None, None] * exact[1]
        return [self._rotation(angles[:, i]) for i in range(self.depth)]

    def _rotation(self, angles: Tensor) -> Rotation:
        """(n, 1 or heads, dim / 2) -> the rotation of all tokens: those before the patches turn by 0."""
        angles = F.pad(angles, (0, 0, 0, 0, self.prefix, 0))
        return Rotation(angles.cos(), angles.sin(), self.rope.pairs == "adjacent")

    def _coordinates(self, side: int, axis: int, device: torch.device) -> Tensor:
        index = torch.arange(side, dtype=torch.float32, device=device)
        if self.rope.coordinates == "center":
            return 2 * math.pi * (2 * (index + 0.5) / side - 1)
        index = index + self.rope.offset
        return index if self.rope.reference is None else index / side * self.rope.reference[axis]

    def _bands(self, device: torch.device) -> Tensor:
        """The frequency of each pair that turns with one coordinate: (dim / 4,)"""
        quarter = self.dim // 4
        periods = self.rope.temperature ** (torch.arange(quarter, dtype=torch.float32, device=device) / quarter)
        if self.rope.periods == "bfloat16":
            periods = periods.bfloat16().float()
        return 1 / periods


def _mixed_frequencies(shape: tuple[int, int, int, int], temperature: float) -> Tensor:
    """Frequencies of both coordinates, (2, depth, heads, dim / 2): every head turns in a random direction."""
    if torch.get_default_device().type == "meta":
        return torch.empty(shape)
    _, depth, heads, half = shape
    size = temperature ** -(torch.arange(half // 2) / (half // 2))
    direction = 2 * math.pi * torch.rand(depth, heads, 1)
    x = torch.cat([size * direction.cos(), -size * direction.sin()], dim=-1)
    y = torch.cat([size * direction.sin(), size * direction.cos()], dim=-1)
    return torch.stack([x, y])


def build_position(config: ViTConfig) -> Position | None:
    """The module whose output is added to the tokens; None if nothing is added."""
    classes = {"1d": LearnedPosition, "2d": FactorizedPosition, "sincos2d": SinCosPosition}
    return classes[config.position](config) if config.position in classes else None


def grid_of(patches: Tensor) -> Size:
    """Height and width of patches (batch, h, w, dim)."""
    return patches.shape[1], patches.shape[2]


def sincos2d(grid: Size, width: int, device: torch.device | None = None) -> Tensor:
    """(h, w, width): sin(x), cos(x), sin(y), cos(y), each with width/4 frequencies from 1 down to 1/10000."""
    quarter = width // 4
    # Not in the default dtype, which may be bfloat16 and too coarse.
    numbers = partial(torch.arange, dtype=torch.float32, device=device)
    omega = 10_000.0 ** -(numbers(quarter) / max(quarter - 1, 1))
    rows = numbers(grid[0])[:, None] * omega
    columns = numbers(grid[1])[:, None] * omega
    x = torch.cat([columns.sin(), columns.cos()], dim=-1).expand(grid[0], -1, -1)
    y = torch.cat([rows.sin(), rows.cos()], dim=-1).unsqueeze(1).expand(-1, grid[1], -1)
    return torch.cat([x, y], dim=-1)


def resize_table(table: Tensor, grid: Size, rule: ResizeRule) -> Tensor:
    """(h, w, dim) -> (h', w', dim) by a named rule; the same grid returns the table itself."""
    height, width, _ = table.shape
    if not _is_symbolic(*grid) and (height, width) == grid:
        return table
    # Where the grid is symbolic, 0 if it is that of the table, else 1: some rules are not the identity there.
    moved: Any = 1
    if _is_symbolic(*grid):
        distance = sum(_larger(new - old, old - new) for new, old in zip(grid, (height, width), strict=True))
        moved = torch.sym_min(distance, 1)
    sides = grid
    if rule.startswith("naflex"):
        # NaFlexVit's aspect-ratio preserving rules: what a square of the longer side has at the top and left.
        longer = _larger(*grid)
        sides = grid[0] + moved * (longer - grid[0]), grid[1] + moved * (longer - grid[1])
    with _full_precision(table):
        exact = _at_least_float32(table)
        rows = resize_matrix(height, sides[0], rule, exact, moved)[: grid[0]]
        columns = resize_matrix(width, sides[1], rule, exact, moved)[: grid[1]]
        return torch.einsum("ih,jw,hwd->ijd", rows, columns, exact).to(table.dtype)


def resize_offsets(table: Tensor, length: int) -> Tensor:
    """(2n - 1, dim) -> (2n' - 1, dim), linear, ends and offset 0 aligned; n' = 1 has offset 0 alone."""
    if not _is_symbolic(length) and len(table) == length:
        return table
    if length == 1:
        return table[len(table) // 2 :][:1]
    with _full_precision(table):
        exact = _at_least_float32(table)
        return (resize_matrix(len(table), length, "google", exact) @ exact).to(table.dtype)


def _is_symbolic(*sizes: int) -> bool:
    """Whether one of the sizes is unknown, as dynamic sizes of `torch.export` are, so that no branch may ask for it."""
    return any(isinstance(size, torch.SymInt) for size in sizes)


def _larger(a: Any, b: Any) -> Any:
    """`max` of two numbers, of which one may be symbolic."""
    return torch.sym_max(a, b)


def resize_matrix(old: int, new: int, rule: ResizeRule, like: Tensor, moved: Any = 1) -> Tensor:
    """(new, old): the weight of each old row in each new one. All rules are linear and separable.

    google       linear, corners aligned (scipy.ndimage.zoom of order 1)
    torchvision  cubic (a = -3/4), corners aligned
    hf           cubic (a = -3/4), pixel centers aligned
    dino         as hf, but with DINO's scale factor (new + 0.1) / old
    timm         cubic (a = -1/2), pixel centers aligned, widened against aliasing when it shrinks; also naflex-par
    siglip       linear, pixel centers aligned, widened against aliasing when it shrinks
    linear       linear, pixel centers aligned; also naflex-parfac
    """
    row = torch.arange(new, dtype=like.dtype, device=like.device)
    if rule in ("google", "torchvision"):
        center = row * ((old - 1) / _larger(new - 1, 1))
    else:
        center = (row + 0.5) * (old / (new + 0.1 * moved) if rule == "dino" else old / new) - 0.5
    if rule in ("timm", "naflex-par", "siglip"):
        distance = (torch.arange(old, dtype=like.dtype, device=like.device) - center[:, None]) / _larger(old / new, 1.0)
        weights = _linear(distance) if rule == "siglip" else _cubic(distance, -0.5)
        return weights / weights.sum(dim=1, keepdim=True)
    taps = torch.arange(-1, 3, device=like.device)
    index = center.floor()[:, None] + taps  # (new, 4)
    distance = index - center[:, None]
    weights = _linear(distance) if rule in ("google", "linear", "naflex-parfac") else _cubic(distance, -0.75)
    one_hot = F.one_hot(index.long().clamp(0, old - 1), old).to(like.dtype)  # clamping repeats the edge
    return torch.einsum("nt,nto->no", weights, one_hot)


def _linear(x: Tensor) -> Tensor:
    """The triangle, non-zero for |x| < 1."""
    return (1 - x.abs()).clamp(min=0)


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
