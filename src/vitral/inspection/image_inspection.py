"""All that a page shows of images, computed together: answers, attention by layer and head, maps over the patches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from vitral.architecture import Size
from vitral.inspection.attention import expand_lines, pooling, rollout_maps
from vitral.inspection.attribution import gradient_rollout, occlusion
from vitral.inspection.representations import feature_colours, token_norms
from vitral.models.build import Model
from vitral.models.capture import Seen, capture
from vitral.models.vit import ViT


@dataclass(frozen=True)
class ImageInspection:
    """One image seen by a model, of n = h * w patches. Layers count from 0; the axial block, two attentions, is one."""

    grid: Size
    side: int  # pixels of a patch along a side; what fills no patch at the right and at the bottom is not seen
    logits: np.ndarray  # (k,); without a head, the features
    colours: np.ndarray  # (h, w, 3) from 0 to 1
    maps: dict[str, np.ndarray]  # (h, w): rollout, evidence and norms; of a ResNet, occlusion
    pooled: np.ndarray | None = None  # (layers, heads, n): how the pooled output reads the patches; None in a ResNet
    # By layer, (heads, n, n) or the mean over heads (1, n, n).
    rows: dict[int, np.ndarray] = field(default_factory=dict)


def look_at(
    model: Model,
    images: Tensor,
    *,
    headed: Sequence[int] = (),
    averaged: Sequence[int] = (),
    sigmoid: bool = False,
) -> list[ImageInspection]:
    """(b, c, height, width), normalised, on the model's device -> what each image shows.

    The rows of single patches are kept by head for the layers `headed`, as a mean over heads for those `averaged`.
    `sigmoid`: multi-label.
    """
    colours = feature_colours(model, images).cpu().numpy()  # of all images together: one colour, one meaning
    each = zip(images, colours, strict=True)
    return [_look(model, image[None], tint, headed, averaged, sigmoid) for image, tint in each]


def _look(
    model: Model,
    image: Tensor,
    colours: np.ndarray,
    headed: Sequence[int],
    averaged: Sequence[int],
    sigmoid: bool,
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
    """The class token's row of each layer, or the rows of all patches as another pool weights them."""
    first = model.config.prefix
    token = model.config.pool == "token"
    wanted = None if token else partial(_merge_rows, _pooling(model, image, grid))
    with (
        torch.inference_mode(),
        capture(model, rows="cls" if token else "all", reduce=wanted) as pool,
        capture(model, layers=headed, rows="all") as each,
        capture(model, layers=averaged, rows="all", reduce=lambda attention: attention.mean(1, keepdim=True)) as mean,
    ):
        model.encode(model.patchify(image))
    pooled = np.stack([_host(pool[key])[:, 0, first:] for key in pool.keys])
    return pooled, {layer: _host(seen[layer])[:, first:, first:] for seen in (mean, each) for layer in _layers(seen)}


def _axial(
    model: ViT, image: Tensor, grid: Size, headed: Sequence[int], averaged: Sequence[int]
) -> tuple[np.ndarray, dict[int, np.ndarray]]:
    """A patch looks along its column, and what it finds there has looked along the rows: both as one matrix."""
    with torch.inference_mode(), capture(model, rows="all") as seen:
        model.features(image)
    weights = pooling(model, seen, grid)
    pooled, rows = [], {}
    for layer in range(model.config.depth):
        whole = expand_lines(seen[layer, "column"], grid, "column") @ expand_lines(seen[layer, "row"], grid, "row")
        pooled.append(_host(_merge_rows(weights, whole))[:, 0])
        if layer in headed:
            rows[layer] = _host(whole)
        elif layer in averaged:
            rows[layer] = _host(whole.mean(1, keepdim=True))
    return np.stack(pooled), rows


def _pooling(model: ViT, image: Tensor, grid: Size) -> Tensor:
    """(1, tokens), by a pass of its own: a probe speaks after the layers whose rows it weights."""
    with torch.inference_mode(), capture(model, layers=[], rows="all") as seen:
        model.features(image)
    return pooling(model, seen, grid)


def _merge_rows(weights: Tensor, attention: Tensor) -> Tensor:
    """(1, n), (1, heads, n, m) -> (1, heads, 1, m)"""
    return weights[:, None, None] @ attention


def _layers(seen: Seen) -> list[int]:
    return [key for key in seen.keys if isinstance(key, int)]


def _host(tensor: Tensor) -> np.ndarray:
    """(1, ...) -> (...) float32"""
    return tensor[0].float().cpu().numpy()
