"""Where a Vision Transformer looks: attention distance (figures 7 and 11), attention maps and rollout (figures 6, 14).

An axial block attends twice, along the rows and then along the columns, and counts as two layers here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.architecture import Size, ViTConfig
from vitral.errors import UserError
from vitral.models.build import Model
from vitral.models.capture import AttentionCapture, Axis, Rows, capture
from vitral.models.vit import ViT

Heads = Literal["mean", "max", "min"]

_OVER_HEADS = {"mean": Tensor.mean, "max": Tensor.amax, "min": Tensor.amin}


def mean_attention_distance(model: Model, batches: Iterable[Tensor]) -> Tensor:
    """Batches of images (b, c, h, w), ready for the model -> (layers, heads): pixels, averaged over all images.

    Each layer's maps are reduced as soon as they are made, so that those of one layer and one batch are held at a time.
    An axial block has two rows, its distance along the rows of the image and the one along the columns.
    """
    model = _with_attention(model)
    total, count = torch.zeros((), dtype=torch.float64), 0
    with _evaluating(model):
        for images in batches:
            reduce = partial(_distance_within, model.config, _grid(model, images))
            with capture(model, rows="all", reduce=reduce) as seen:
                model.encode(model.patchify(images))
            total = total + len(images) * torch.stack([seen[key].cpu().double() for key in seen.keys])
            count += len(images)
    if count == 0:
        raise UserError("there is no image to measure the attention of: give at least one.")
    return (total / count).float()


def attention_distance(attention: Tensor, grid: Size, patch: int) -> Tensor:
    """(b, heads, tokens, tokens) -> (heads,): how far attention reaches, in pixels; a patch has `patch` of them a side.

    For each patch, the distances to all patches weighted by its attention, its own distance of 0 among them; then the
    mean over patches and images. The paper does not say what the class token does: tokens before the patches are left
    out, as queries and as keys, and what is left of a row is scaled to sum to 1 again.
    """
    n = grid[0] * grid[1]
    patches = _normalised(attention[..., -n:, -n:])
    distance = patch * _distances(grid).to(patches)
    return torch.einsum("bhij,ij->h", patches, distance) / (len(patches) * n)


def attention_maps(model: Model, images: Tensor, *, layer: int = -1) -> Tensor:
    """(b, c, height, width) -> (b, heads, h, w): how one layer's output, as it is pooled, reads the patches.

    That is the row of the class token; without one, the mean over the rows of the patches, weighted by the probe's
    attention where attention pools. In an axial block, through its columns and then its rows, head by head. What goes
    to the class token and to registers is missing from the sum.
    """
    model = _with_attention(model)
    grid = _grid(model, images)
    with _evaluating(model), capture(model, layers=[layer], rows=_pooled_rows(model.config)) as seen:
        model.features(images)
    if model.config.pool == "token":
        weights = seen[layer]
    else:
        weights = pooling(model, seen, grid)[:, None, None]
        for matrix in reversed(attention_matrices(seen, grid)):
            weights = weights @ matrix
    return _on_grid(weights.squeeze(2), grid)


def rollout_maps(model: Model, images: Tensor, *, residual: float = 0.5, heads: Heads = "mean") -> Tensor:
    """(b, c, height, width) -> (b, h, w): `rollout` from the pooled output to the patches (figures 6 and 14)."""
    model = _with_attention(model)
    grid = _grid(model, images)
    with _evaluating(model), capture(model, rows="all", reduce=partial(merge_heads, heads=heads)) as seen:
        model.features(images)
    start = pooling(model, seen, grid)
    return _on_grid(rollout(attention_matrices(seen, grid), start=start, residual=residual), grid)


def rollout(
    attentions: Sequence[Tensor], *, start: Tensor | None = None, residual: float = 0.5, heads: Heads = "mean"
) -> Tensor:
    """Each layer's attention (b, heads, n, n), the first layer's first -> (b, n), which sums to 1.

    After Abnar & Zuidema (2020): heads are merged, then the matrices of all layers multiplied. A residual path leads
    past each attention, so a layer is residual * I + (1 - residual) * A, with their 0.5; the paper names no identity.
    `start` (b, n) or (n,) says how the output tokens are weighted; without it, token 0, the class token, counts alone.
    """
    if not attentions:
        raise UserError("rollout needs the attention of at least one layer.")
    if not 0 <= residual <= 1:
        raise UserError(f"the residual share of rollout lies between 0 and 1: {residual} does not.")
    batch, n = len(attentions[0]), attentions[0].shape[-1]
    if start is None:
        start = _class_row(n)
    row = start.to(attentions[0]).expand(batch, n).unsqueeze(1)
    for attention in reversed(attentions):  # a row times the last matrix, and so on: n^2 a layer, not n^3
        row = residual * row + (1 - residual) * (row @ merge_heads(attention, heads).squeeze(1))
    return row.squeeze(1)


def merge_heads(attention: Tensor, heads: Heads = "mean") -> Tensor:
    """(b, heads, rows, n) -> (b, 1, rows, n), each row summing to 1; the paper takes the mean."""
    if heads not in _OVER_HEADS:
        raise UserError(f'heads="{heads}" is not one of {", ".join(_OVER_HEADS)}.')
    return _normalised(_OVER_HEADS[heads](attention, dim=1, keepdim=True))


def attention_matrices(seen: AttentionCapture, grid: Size) -> list[Tensor]:
    """All that was captured with rows="all" as (b, heads, tokens, tokens), the first layer's first."""
    return [expand_lines(seen[key], grid, key[1]) if isinstance(key, tuple) else seen[key] for key in seen.keys]


def expand_lines(attention: Tensor, grid: Size, axis: Axis) -> Tensor:
    """Along rows (b * h, heads, w, w), or along columns (b * w, heads, h, h) -> (b, heads, h * w, h * w)

    Patches of two different lines do not see each other, so that there are zeros between them.
    """
    lines = attention.unflatten(0, (-1, grid[0] if axis == "row" else grid[1]))
    # (b, heads, query, key, line) -> (b, heads, query, key, line of the query, line of the key)
    full = torch.diag_embed(lines.permute(0, 2, 3, 4, 1))
    order = (0, 1, 4, 2, 5, 3) if axis == "row" else (0, 1, 2, 4, 3, 5)
    return full.permute(order).flatten(4, 5).flatten(2, 3)


def pooling(model: ViT, seen: AttentionCapture, grid: Size) -> Tensor:
    """(b, tokens) or (1, tokens): how the model weights its output tokens where it pools them.

    `seen` needs to have watched a pass as far as the features, of any layers or of none.
    """
    prefix, n = model.config.prefix, grid[0] * grid[1]
    if model.config.pool == "token":
        return _class_row(prefix + n).unsqueeze(0)
    device = model.embed.weight.device
    patches = torch.full((1, n), 1 / n, device=device) if model.map is None else seen.pool.mean(dim=(1, 2))
    return F.pad(patches, (prefix, 0))


def _class_row(tokens: int) -> Tensor:
    return F.one_hot(torch.tensor(0), tokens)


def _pooled_rows(config: ViTConfig) -> Rows:
    return "cls" if config.pool == "token" else "all"


def _on_grid(weights: Tensor, grid: Size) -> Tensor:
    """(..., prefix + h * w) -> (..., h, w)"""
    return weights[..., -grid[0] * grid[1] :].unflatten(-1, grid)


def _distance_within(config: ViTConfig, grid: Size, attention: Tensor) -> Tensor:
    """`attention_distance` of what a layer shows; an axial one shows lines, each a grid by itself."""
    return attention_distance(attention, (1, attention.shape[-1]) if config.axial else grid, config.stride)


def _distances(grid: Size) -> Tensor:
    """(n, n): from each patch to each, counted in patches."""
    y, x = torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij")
    places = torch.stack([y, x], dim=-1).flatten(0, 1).float()
    return (places[:, None] - places).norm(dim=-1)


def _normalised(rows: Tensor) -> Tensor:
    """(..., n) -> (..., n), sums of 1; a row of zeros stays."""
    return rows / rows.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(rows.dtype).tiny)


def _grid(model: ViT, images: Tensor) -> Size:
    return model.config.grid((images.shape[-2], images.shape[-1]))


def _with_attention(model: Model) -> ViT:
    if not isinstance(model, ViT):
        raise UserError("a ResNet has no attention maps: choose a Vision Transformer.")
    return model


@contextmanager
def _evaluating(model: ViT) -> Iterator[None]:
    """No gradients and no dropout; the model comes back in the mode it came in."""
    before = model.training
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        model.train(before)
