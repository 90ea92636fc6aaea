"""Attention distance (figures 7 and 11) and attention rollout (figures 6 and 14).

An axial block attends twice, along the rows and then along the columns, and counts as two layers here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.architecture import Size, ViTConfig
from vitral.errors import UserError
from vitral.models.build import Model
from vitral.models.capture import AttentionCapture, Axis, capture
from vitral.models.vit import ViT

RESIDUAL = 0.5  # weight of the residual connection in a rollout


def mean_attention_distance(model: Model, batches: Iterable[Tensor]) -> Tensor:
    """The mean attention distance of every layer and head, averaged over all images.

    Attention is reduced layer by layer, so that only that of one layer and one batch is in memory. Normalised images
    (batch, channels, height, width) -> pixels (layers, heads). An axial block has two rows: along the rows of the
    image, then along the columns.
    """
    model = _with_attention(model)
    total, count = torch.zeros((), dtype=torch.float64), 0
    with _evaluating(model):
        for images in batches:
            reduce = partial(_distance_within, model.config, grid_of(model, images))
            with capture(model, rows="all", reduce=reduce) as captured:
                model.encode(model.patchify(images))
            total = total + len(images) * torch.stack([captured[key].cpu().double() for key in captured.keys])
            count += len(images)
    if count == 0:
        raise UserError("there is no image to measure the attention of: give at least one.")
    return (total / count).float()


def attention_distance(attention: Tensor, grid: Size, patch: int) -> Tensor:
    """The mean distance between a query patch and all patches, weighted by its attention.

    The patch itself counts, with a distance of 0. The paper does not say how the class token is treated: here, prefix
    tokens are left out, as queries and as keys, and the rest of a row is scaled to sum to 1. Attention (batch, heads,
    tokens, tokens) over a grid of patches of `patch` pixels -> pixels (heads,), averaged over patches and images.
    """
    n = grid[0] * grid[1]
    patches = _normalised(attention[..., -n:, -n:])
    distance = patch * _distances(grid).to(patches)
    return torch.einsum("bhij,ij->h", patches, distance) / (len(patches) * n)


def rollout_maps(model: Model, images: Tensor) -> Tensor:
    """Attention rollout from the pooled output to the patches: (batch, channels, height, width) -> (batch, h, w)."""
    model = _with_attention(model)
    grid = grid_of(model, images)
    with _evaluating(model), capture(model, rows="all", reduce=merge_heads) as captured:
        model.features(images)
    start = pooling_weights(model, captured, grid)
    return on_grid(rollout(attention_matrices(captured, grid), start), grid)


def rollout(attentions: Sequence[Tensor], start: Tensor) -> Tensor:
    """Attention rollout (Abnar & Zuidema 2020): heads are merged and the matrices of all layers multiplied.

    With the residual connection a layer is RESIDUAL * I + (1 - RESIDUAL) * A. The ViT paper does not mention it.
    Attention (batch, heads, tokens, tokens) per layer, the first layer first, and weights of the output tokens, (batch,
    tokens) or (1, tokens) -> (batch, tokens); rows sum to 1.
    """
    batch, n = len(attentions[0]), attentions[0].shape[-1]
    row = start.to(attentions[0]).expand(batch, n).unsqueeze(1)
    for attention in reversed(attentions):  # row vector times matrix: n^2 per layer, not n^3
        row = RESIDUAL * row + (1 - RESIDUAL) * (row @ merge_heads(attention).squeeze(1))
    return row.squeeze(1)


def merge_heads(attention: Tensor) -> Tensor:
    """(batch, heads, rows, tokens) -> (batch, 1, rows, tokens); rows sum to 1. The paper takes the mean."""
    return _normalised(attention.mean(dim=1, keepdim=True))


def attention_matrices(captured: AttentionCapture, grid: Size) -> list[Tensor]:
    """The attention captured with rows="all" as (batch, heads, tokens, tokens) per layer, the first layer first."""
    return [
        expand_lines(captured[key], grid, key[1]) if isinstance(key, tuple) else captured[key] for key in captured.keys
    ]


def expand_lines(attention: Tensor, grid: Size, axis: Axis) -> Tensor:
    """Axial attention as full matrices (batch, heads, h * w, h * w), with zeros between patches of different lines.

    It is (batch * h, heads, w, w) along rows, (batch * w, heads, h, h) along columns.
    """
    lines = attention.unflatten(0, (-1, grid[0] if axis == "row" else grid[1]))
    # (b, heads, query, key, line) -> (b, heads, query, key, line of the query, line of the key)
    full = torch.diag_embed(lines.permute(0, 2, 3, 4, 1))
    order = (0, 1, 4, 2, 5, 3) if axis == "row" else (0, 1, 2, 4, 3, 5)
    return full.permute(order).flatten(4, 5).flatten(2, 3)


def pooling_weights(model: ViT, captured: AttentionCapture, grid: Size) -> Tensor:
    """The weights of the output tokens in the model's pooling, (batch, tokens), or (1, tokens) if all have the same.

    The capture, of any layers or none, is of a forward pass that computed the features.
    """
    prefix, n = model.config.prefix, grid[0] * grid[1]
    if model.config.pool == "token":
        return _class_row(prefix + n).unsqueeze(0)
    device = model.embed.weight.device
    if model.map is not None:
        probe = captured.pool.mean(dim=(1, 2))
        return probe if model.config.map_prefix else F.pad(probe, (prefix, 0))
    if model.config.pool == "token+register":
        return F.one_hot(torch.tensor([0, 1], device=device), prefix + n).float().mean(dim=0, keepdim=True)
    mean = F.pad(torch.full((1, n), 1 / n, device=device), (prefix, 0))
    return mean if model.config.pool == "mean" else (mean + _class_row(prefix + n).to(device)) / 2


def _class_row(tokens: int) -> Tensor:
    return F.one_hot(torch.tensor(0), tokens)


def on_grid(weights: Tensor, grid: Size) -> Tensor:
    """(..., prefix + h * w) -> (..., h, w)"""
    return weights[..., -grid[0] * grid[1] :].unflatten(-1, grid)


def _distance_within(config: ViTConfig, grid: Size, attention: Tensor) -> Tensor:
    """`attention_distance` of one layer; in an axial one every line is a grid."""
    return attention_distance(attention, (1, attention.shape[-1]) if config.axial else grid, config.stride)


def _distances(grid: Size) -> Tensor:
    """(n, n): the distance between any two patches, in patches."""
    y, x = torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij")
    positions = torch.stack([y, x], dim=-1).flatten(0, 1).float()
    return (positions[:, None] - positions).norm(dim=-1)


def _normalised(rows: Tensor) -> Tensor:
    """(..., n) -> (..., n); rows sum to 1, a row of zeros stays."""
    return rows / rows.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(rows.dtype).tiny)


def grid_of(model: Model, images: Tensor) -> Size:
    return model.config.grid((images.shape[-2], images.shape[-1]))


def _with_attention(model: Model) -> ViT:
    if not isinstance(model, ViT):
        raise UserError("a ResNet has no attention maps: choose a Vision Transformer.")
    return model


@contextmanager
def _evaluating(model: ViT) -> Iterator[None]:
    """Evaluation mode without gradients; the mode is restored afterwards."""
    training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        model.train(training)
