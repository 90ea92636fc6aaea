"""Learned representations: embedding filters and position embeddings (Figure 7), patch features and token norms."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.errors import UserError
from vitral.models.build import Model
from vitral.models.position import Position
from vitral.models.resnet import ResNetStem
from vitral.models.vit import ViT

_QUANTILES = (0.01, 0.99)  # of a component, which become 0 and 1; values outside are clipped


class EmbeddingFilters(NamedTuple):
    """Principal components of the filters applied to an image, in order of their variance."""

    components: Tensor  # (count, p, p, c) float32, each of length 1, its entry of largest magnitude positive
    explained: Tensor  # (count,) float32: share of the filters' variance
    source: str  # which filters these are

    def images(self) -> Tensor:
        """(count, p, p, c) between 0 and 1: zero is mid-grey, and each component has full contrast."""
        largest = self.components.abs().amax((1, 2, 3), keepdim=True).clamp_min(1e-12)
        return 0.5 + 0.5 * self.components / largest


@torch.no_grad()
def embedding_filters(model: Model, count: int = 28) -> EmbeddingFilters:
    """The first principal components of the filters of the patch embedding, after subtracting the mean filter.

    In a hybrid, which embeds feature maps and not colours, and in a ResNet, these are the filters of the root's 7x7
    convolution.

    Args:
        model: Any model.
        count: Number of components; all where there are fewer.
    """
    if count < 1:
        raise UserError(f"count must be at least 1, not {count}.")
    kernel, source = _kernel(model)
    rows = kernel.permute(0, 2, 3, 1).flatten(1).cpu().double()  # (d, p * p * c)
    _, strengths, axes = torch.linalg.svd(rows - rows.mean(0), full_matrices=False)
    # d centred filters span at most d - 1 directions.
    axes = axes[: max(min(count, len(rows) - 1), 1)]
    largest = axes.gather(1, axes.abs().argmax(1, keepdim=True))
    explained = strengths.square() / strengths.square().sum().clamp_min(1e-30)
    shape = (len(axes), *kernel.shape[2:], kernel.shape[1])
    return EmbeddingFilters((axes * largest.sign()).view(shape).float(), explained[: len(axes)].float(), source)


@torch.no_grad()
def position_similarity(model: Model) -> Tensor:
    """Cosine similarities (h, w, h, w) between the position embeddings of all patches, at the trained resolution.

    The class token is left out. Where every block adds position embeddings, these are the first block's.
    """
    if not isinstance(model, ViT):
        raise UserError("a ResNet has no position embeddings: choose a Vision Transformer.")
    if not len(model.positions):
        reason = "relative" if model.config.position in ("relative", "bias") else "no"
        raise UserError(f"this model has {reason} position embeddings: choose a model with position=1d or 2d.")
    grid = model.config.grid(model.config.image)
    patches = torch.empty(1, *grid, model.config.width, device=model.embed.weight.device)
    position = model.positions[0]
    assert isinstance(position, Position)
    rows = F.normalize(position.table_for(patches).double(), dim=-1)
    return torch.einsum("ijd,hwd->ijhw", rows, rows).float()


def _kernel(model: Model) -> tuple[Tensor, str]:
    """The convolution kernel applied to an image, (d, c, p, p), and its description."""
    if not isinstance(model, ViT):
        root = model.root
    elif isinstance(model.stem, ResNetStem):
        root = model.stem.root.conv
    else:
        return model.embed.weight, "the patch embedding"
    return root.standardized(), "the 7x7 convolution of the ResNet's root"


@torch.no_grad()
def patch_features(model: Model, images: Tensor) -> Tensor:
    """The output of the encoder for each patch, after the last norm; for a ResNet, its last feature map.

    Args:
        model: Any model.
        images: (batch, channels, height, width).

    Returns:
        (batch, h, w, d).
    """
    tokens = model.encode(model.patchify(images))
    if not isinstance(model, ViT):
        return tokens.unflatten(1, model.config.grid((images.shape[2], images.shape[3])))
    patches = _patches(model, tokens, images)
    return model.norm(patches) if model.config.norm_place == "features" else patches


@torch.no_grad()
def token_norms(model: Model, images: Tensor) -> Tensor:
    """The norm of each patch token after the last block, before the last LayerNorm, which would equalise the norms.

    In large models without registers a few patches are outliers (Darcet et al. 2023).

    Args:
        model: A Vision Transformer.
        images: (batch, channels, height, width).

    Returns:
        (batch, h, w).
    """
    if not isinstance(model, ViT):
        raise UserError("a ResNet has no tokens: choose a Vision Transformer.")
    outputs: list[Tensor] = []
    hook = model.blocks[-1].register_forward_hook(lambda _module, _inputs, tokens: outputs.append(tokens))
    try:
        model.encode(model.patchify(images))
    finally:
        hook.remove()
    return _patches(model, outputs[-1], images).float().norm(dim=-1)


def feature_colours(model: Model, images: Tensor) -> Tensor:
    """The first three principal components of the patch features as red, green and blue.

    The components are common to all images, so colours can be compared between them.

    Args:
        model: Any model.
        images: (batch, channels, height, width).

    Returns:
        (batch, h, w, 3) between 0 and 1.
    """
    return pca_colours(patch_features(model, images))


def pca_colours(features: Tensor) -> Tensor:
    """(batch, h, w, d) -> (batch, h, w, 3) between 0 and 1.

    Each component is scaled by its 1 % and 99 % quantiles. Its sign is chosen so that the mean is larger inside than
    along the edge, where photographs tend to have background: the foreground is bright. On grids without an inside the
    largest weight is positive.
    """
    rows = features.flatten(0, 2).double()
    centred = rows - rows.mean(0)
    _, axes = torch.linalg.eigh(centred.T @ centred)
    axes = axes.flip(1)[:, :3]  # eigenvalues come in ascending order
    scores = (centred @ axes).unflatten(0, features.shape[:3])
    scores = scores * _signs(scores, axes)
    low, high = (scores.flatten(0, 2).quantile(share, dim=0) for share in _QUANTILES)
    # Equal patches get one colour, not their rounding errors.
    smallest = 1e-6 * rows.norm(dim=1).mean().clamp_min(1e-30)
    return ((scores - low) / (high - low).clamp_min(smallest)).clamp(0, 1).float()


def _signs(scores: Tensor, axes: Tensor) -> Tensor:
    """Scores (b, h, w, 3) and axes (d, 3) -> (3,) of 1 and -1"""
    inside = scores[:, 1:-1, 1:-1].flatten(0, 2)  # scores sum to zero, so the mean along the edge has the opposite sign
    largest = axes.gather(0, axes.abs().argmax(0, keepdim=True))[0]
    return torch.where((inside.mean(0) if len(inside) else largest) < 0, -1.0, 1.0)


def _patches(model: ViT, tokens: Tensor, images: Tensor) -> Tensor:
    """(b, prefix + h * w, d) -> (b, h, w, d)"""
    return tokens[:, model.config.prefix :].unflatten(1, model.config.grid((images.shape[2], images.shape[3])))
