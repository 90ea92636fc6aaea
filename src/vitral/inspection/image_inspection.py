"""Inspect images with a model: logits, attention by layer and head, attribution maps, colours of patch features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from vitral.architecture import Size
from vitral.inspection.attention import expand_lines, pooling_weights, rollout_maps
from vitral.inspection.attribution import gradient_rollout, occlusion
from vitral.inspection.representations import feature_colours, token_norms
from vitral.models.build import Model
from vitral.models.capture import AttentionCapture, Axis, capture
from vitral.models.vit import ViT

_AXES: tuple[Axis, Axis] = ("column", "row")


@dataclass(frozen=True)
class ImageInspection:
    """The inspection of one image of n = h * w patches. Layers are blocks, counted from 0; an axial block is one."""

    grid: Size
    side: int  # pixels per side of a patch; a remainder at the right and at the bottom is not used by the model
    logits: np.ndarray  # (k,); without a head, the features
    colours: np.ndarray  # (h, w, 3) between 0 and 1: principal components of the patch features
    maps: dict[str, np.ndarray]  # (h, w): rollout, evidence and norms; occlusion for a ResNet
    pooled: np.ndarray | None = None  # (layers, heads, n): attention of the pooled output; None for a ResNet
    # By layer: attention between patches (heads, n, n), or its mean over heads (1, n, n).
    rows: dict[int, np.ndarray] = field(default_factory=dict)


def inspect_images(
    model: Model, images: Tensor, *, headed: Sequence[int] = (), averaged: Sequence[int] = (), sigmoid: bool = False
) -> list[ImageInspection]:
    """Inspect images one by one.

    Args:
        model: In evaluation mode.
        images: (batch, channels, height, width), normalised, on the model's device.
        headed: Layers whose attention between patches is kept by head.
        averaged: Layers whose attention between patches is kept as the mean over heads.
        sigmoid: Whether the model is multi-label.

    Returns:
        One inspection per image.
    """
    colours = feature_colours(model, images).cpu().numpy()  # components are common to all images
    pairs = zip(images, colours, strict=True)
    return [_inspect(model, image[None], colour, headed, averaged, sigmoid) for image, colour in pairs]


def _inspect(
    model: Model, image: Tensor, colours: np.ndarray, headed: Sequence[int], averaged: Sequence[int], sigmoid: bool
) -> ImageInspection:
    with torch.inference_mode():
        logits = _host(model(image))
    grid, side = model.config.grid((image.shape[2], image.shape[3])), model.config.stride
    if not isinstance(model, ViT):
        maps = {"occlusion": _host(occlusion(model, image, sigmoid=sigmoid))} if model.config.classes else {}
        return ImageInspection(grid, side, logits, colours, maps)
    maps = {"rollout": _host(rollout_maps(model, image)), "norms": _host(token_norms(model, image))}
    if model.config.classes:
        maps["evidence"] = _host(gradient_rollout(model, image, sigmoid=sigmoid))
    pooled, rows = (_axial if model.config.axial else _plain)(model, image, grid, headed, averaged)
    return ImageInspection(grid, side, logits, colours, maps, pooled, rows)


def _plain(
    model: ViT, image: Tensor, grid: Size, headed: Sequence[int], averaged: Sequence[int]
) -> tuple[np.ndarray, dict[int, np.ndarray]]:
    """Pooled attention of all layers, and attention between patches of the chosen ones."""
    first = model.config.prefix
    token = model.config.pool == "token"
    reduce = None if token else partial(_merge_rows, _pooling_weights(model, image, grid))
    with (
        torch.inference_mode(),
        capture(model, rows="cls" if token else "all", reduce=reduce) as pool,
        capture(model, layers=headed, rows="all") as by_head,
        capture(model, layers=averaged, rows="all", reduce=lambda attention: attention.mean(1, keepdim=True)) as mean,
    ):
        model.encode(model.patchify(image))
    pooled = np.stack([_host(pool[key])[:, 0, first:] for key in pool.keys])
    rows = {
        layer: _host(captured[layer])[:, first:, first:] for captured in (mean, by_head) for layer in _layers(captured)
    }
    return pooled, rows


def _axial(
    model: ViT, image: Tensor, grid: Size, headed: Sequence[int], averaged: Sequence[int]
) -> tuple[np.ndarray, dict[int, np.ndarray]]:
    """As `_plain`; the attention of a block is the product of that along columns and that along rows."""
    with torch.inference_mode(), capture(model, rows="all") as captured:
        model.features(image)
    weights = pooling_weights(model, captured, grid)
    pooled, rows = [], {}
    for layer in range(model.config.depth):
        column, row = (expand_lines(captured[layer, axis], grid, axis) for axis in _AXES)
        attention = column @ row
        pooled.append(_host(_merge_rows(weights, attention))[:, 0])
        if layer in headed:
            rows[layer] = _host(attention)
        elif layer in averaged:
            rows[layer] = _host(attention.mean(1, keepdim=True))
    return np.stack(pooled), rows


def _pooling_weights(model: ViT, image: Tensor, grid: Size) -> Tensor:
    """(1, tokens), by a separate pass: pooling comes after the layers whose rows it weights."""
    with torch.inference_mode(), capture(model, layers=[], rows="all") as captured:
        model.features(image)
    return pooling_weights(model, captured, grid)


def _merge_rows(weights: Tensor, attention: Tensor) -> Tensor:
    """(1, n), (1, heads, n, m) -> (1, heads, 1, m)"""
    return weights[:, None, None] @ attention


def _layers(captured: AttentionCapture) -> list[int]:
    return [key for key in captured.keys if isinstance(key, int)]


def _host(tensor: Tensor) -> np.ndarray:
    """(1, ...) -> (...) float32"""
    return tensor[0].float().cpu().numpy()
