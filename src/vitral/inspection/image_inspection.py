"""Inspect images with a model: logits, attention by layer and head, attribution maps, colours of patch features.

Attribution maps show the patches that support the prediction of a class; a deletion curve tests them. They take a model
in evaluation mode, as `vitral.load` returns it, and normalised images (batch, channels, height, width) of any size:

classes  (batch,) int64: the classes to explain; by default those that the model predicts
sigmoid  for multi-label models (`Card.multilabel`): the map of a class then depends on no other class

Maps are (batch, h, w), larger where a patch supports the class more, without a common scale. Those of attention contain
positive support only, and are zero if there is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.architecture import Size
from vitral.errors import UserError
from vitral.inspection.attention import expand_lines, grid_of, on_grid, pooling_weights, rollout_maps
from vitral.inspection.representations import feature_colours, token_norms
from vitral.models.build import Model
from vitral.models.capture import AttentionCapture, Axis, LayerKey, capture
from vitral.models.vit import ViT

OCCLUDED = 64  # images per forward pass
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
    """Inspect images, normalised and on the model's device, one by one; the model is in evaluation mode.

    Attention between patches is kept by head of the layers `headed`, and as the mean over heads of those `averaged`.
    """
    colours = feature_colours(model, images).cpu().numpy()  # components are common to all images
    pairs = zip(images, colours, strict=True)
    return [_inspect(model, image[None], colour, headed, averaged, sigmoid) for image, colour in pairs]


def _inspect(
    model: Model, image: Tensor, colours: np.ndarray, headed: Sequence[int], averaged: Sequence[int], sigmoid: bool
) -> ImageInspection:
    with torch.inference_mode():
        logits = _host(model(image))
    grid, side = grid_of(model, image), model.config.stride
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


def gradient_rollout(model: Model, images: Tensor, classes: Tensor | None = None, *, sigmoid: bool = False) -> Tensor:
    """Gradient-weighted attention rollout.

    After Chefer et al. 2021 ("Generic Attention-model Explainability"): the relevance R starts as the identity, and
    each layer from the first to the last adds S R, where S is the mean over heads of the positive part of
    A * dscore/dA. The map is R weighted by `_GradientAttention.output_weights`. One departure: S is divided by its
    largest row sum. Gradients shrink with the number of pooled tokens, so that beside the identity a layer of a
    mean-pooled model would not count.
    """
    result = _gradient_attention(model, images, classes, sigmoid)
    batch, tokens = result.output_weights.shape
    relevance = torch.eye(tokens, device=images.device).expand(batch, -1, -1)
    for key, attention in result.attentions.items():
        relevance = _add_layer(relevance, attention, key, result.grid)
    return on_grid(torch.einsum("bn,bnm->bm", result.output_weights, relevance), result.grid)


@torch.no_grad()
def occlusion(model: Model, images: Tensor, classes: Tensor | None = None, *, sigmoid: bool = False) -> Tensor:
    """The drop in the probability of the class when a patch is filled with the image's mean colour.

    Works without attention: for a ResNet, a patch is a cell of the last feature map.
    """
    height, width = grid_of(model, images)
    patches = torch.eye(height * width, device=images.device, dtype=torch.bool).view(-1, height, width)
    logits = model(images)
    chosen = _classes(model, logits, classes)
    before = _probabilities(logits, chosen, sigmoid)
    drops = []
    for image, label, probability in zip(images, chosen, before, strict=True):
        parts = patches.split(OCCLUDED)
        after = [_occluded_probabilities(model, image[None], cells, label[None], sigmoid) for cells in parts]
        drops.append((probability - torch.cat(after)).view(height, width))
    return torch.stack(drops)


@torch.no_grad()
def deletion_curve(
    model: Model, images: Tensor, maps: Tensor, steps: int = 20, classes: Tensor | None = None, *, sigmoid: bool = False
) -> Tensor:
    """The mean probability of the class as patches are occluded in the order of `maps` (Petsiuk et al. 2018).

    Step i fills the fraction i / steps of the patches with the image's mean colour. The better the map, the earlier the
    curve falls.

    Args:
        maps: (batch, h, w); patches with the largest values are occluded first.
        steps: Number of steps.

    Returns:
        (steps + 1,); the first entry is that of the unoccluded images.
    """
    height, width = grid_of(model, images)
    if maps.shape != (len(images), height, width) or steps < 1:
        raise UserError(
            f"maps of shape {tuple(maps.shape)} and steps={steps} do not fit: "
            f"give maps of shape {(len(images), height, width)} and at least one step."
        )
    chosen = _classes(model, model(images), classes)
    ranks = maps.flatten(1).argsort(dim=1, descending=True, stable=True).argsort(dim=1).view_as(maps)
    counts = [round(height * width * step / steps) for step in range(steps + 1)]
    return torch.stack(
        [_occluded_probabilities(model, images, ranks < count, chosen, sigmoid).mean() for count in counts]
    )


def deletion_area(curve: Tensor) -> float:
    """The area under a deletion curve over fractions from 0 to 1 (trapezoidal rule); smaller is better."""
    return float(torch.trapezoid(curve.double(), dx=1 / (len(curve) - 1)))


def random_maps(model: Model, images: Tensor, seed: int = 0) -> Tensor:
    """Random maps (batch, h, w), the baseline of a deletion curve."""
    shape = (len(images), *grid_of(model, images))
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)).to(images.device)


class _GradientAttention(NamedTuple):
    """Attention times its gradient, from one forward and one backward pass."""

    # In the order of the forward pass; a backward pass meets the layers in reverse order. (batch, n, n), in axial
    # blocks (batch * lines, n, n).
    attentions: dict[LayerKey, Tensor]
    # (batch, n): the share of each output token in the score. The class token alone if it is pooled; otherwise the
    # positive part of token times gradient, that is weight times gradient of pooling seen as attention.
    output_weights: Tensor
    grid: Size


def _gradient_attention(model: Model, images: Tensor, classes: Tensor | None, sigmoid: bool) -> _GradientAttention:
    if not isinstance(model, ViT):
        raise UserError("a ResNet has no attention: use occlusion.")
    # An input with a gradient makes autograd record the pass even if all weights are frozen.
    with torch.enable_grad(), capture(model, rows="all", gradients=True) as captured:
        tokens = model.encode(model.patchify(images.detach().clone().requires_grad_()))
        logits = model.head(model.pool(tokens))
        # A softmax is invariant to a constant added to all logits, so that their mean is no support; a sigmoid is not.
        centred = logits if _is_sigmoid(logits, sigmoid) else logits - logits.mean(1, keepdim=True)
        score = centred.gather(1, _classes(model, logits, classes)[:, None]).sum()
    gradients = captured.gradients(score)
    attentions = {key: (captured[key] * gradients[key]).clamp(min=0).mean(1) for key in captured.keys}
    (gradient,) = torch.autograd.grad(score, tokens)
    output_weights = (tokens.detach() * gradient).float().sum(-1).clamp(min=0)
    if model.config.pool == "token":
        output_weights = torch.zeros_like(output_weights)
        output_weights[:, 0] = 1.0
    return _GradientAttention(attentions, output_weights, grid_of(model, images))


def _add_layer(relevance: Tensor, attention: Tensor, key: LayerKey, grid: Size) -> Tensor:
    """R (b, n, m) -> R + S R; axial attention connects patches of one row or one column only."""
    groups = attention.unflatten(0, (len(relevance), -1))  # (b, lines, n, n); one line unless the attention is axial
    groups = groups / groups.sum(-1).amax((1, 2)).clamp_min(1e-30)[:, None, None, None]
    if isinstance(key, int):
        return relevance + groups[:, 0] @ relevance
    lines = relevance.unflatten(1, grid)
    lines = lines if key[1] == "row" else lines.transpose(1, 2)  # (b, lines, patches, m)
    lines = lines + groups @ lines
    lines = lines if key[1] == "row" else lines.transpose(1, 2)
    return lines.flatten(1, 2)


def _occluded_probabilities(model: Model, images: Tensor, cells: Tensor, classes: Tensor, sigmoid: bool) -> Tensor:
    """Images (b or 1, c, height, width) and cells (b, h, w) to occlude -> probabilities (b,)"""
    side = model.config.stride
    covered = cells.repeat_interleave(side, 1).repeat_interleave(side, 2)
    # A ResNet's last cells extend beyond the image; pixels outside the patches are not used, and stay.
    height, width = images.shape[2:]
    covered = F.pad(covered, (0, max(width - covered.shape[2], 0), 0, max(height - covered.shape[1], 0)))
    colour = images.mean((2, 3), keepdim=True)
    occluded = torch.where(covered[:, None, :height, :width], colour, images)
    return _probabilities(model(occluded), classes.expand(len(occluded)), sigmoid)


def _probabilities(logits: Tensor, classes: Tensor, sigmoid: bool) -> Tensor:
    """(b, k), (b,) -> (b,)"""
    logits32 = logits.float()
    probabilities = logits32.sigmoid() if _is_sigmoid(logits, sigmoid) else logits32.softmax(1)
    return probabilities.gather(1, classes[:, None])[:, 0]


def _is_sigmoid(logits: Tensor, sigmoid: bool) -> bool:
    """Whether classes are independent; the softmax of a single logit is always 1."""
    return sigmoid or logits.shape[1] == 1


def _classes(model: Model, logits: Tensor, classes: Tensor | None) -> Tensor:
    """(b,) int64: the given classes, else the predicted ones"""
    if not model.config.classes:
        raise UserError("this model has no head and so no class to explain: load weights with a head, or train one.")
    if classes is None:
        return logits.argmax(1)
    if classes.shape != logits.shape[:1] or classes.min() < 0 or classes.max() >= logits.shape[1]:
        raise UserError(f"classes must be one number from 0 to {logits.shape[1] - 1} for each of {len(logits)} images.")
    return classes.to(logits.device, torch.int64)
