"""What a model learned before any attention: the filters it reads patches with, and how alike its positions are.

The left and the centre of the paper's Figure 7.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.errors import UserError
from vitral.models.build import Model
from vitral.models.position import Position
from vitral.models.stem import ResNetStem
from vitral.models.vit import ViT


class Filters(NamedTuple):
    """Principal components of the filters that read an image, strongest first."""

    components: Tensor  # (count, p, p, c) float32, each of length 1, its entry of largest magnitude positive
    explained: Tensor  # (count,) float32: the share of the filters' variance along each
    source: str  # which filters these are

    def pictures(self) -> Tensor:
        """(count, p, p, c) from 0 to 1: zero is mid-grey, and each component uses its own full contrast."""
        largest = self.components.abs().amax((1, 2, 3), keepdim=True).clamp_min(1e-12)
        return 0.5 + 0.5 * self.components / largest


@torch.no_grad()
def embedding_filters(model: Model, count: int = 28) -> Filters:
    """The first principal components of the patch embedding's d filters (p, p, c), the mean filter taken off.

    A hybrid embeds the channels of its ResNet, which are no colours: there, and in a ResNet, the components are those
    of the root's 7x7 convolution. Small kernels have fewer components than asked for, and then all of them come.
    """
    if count < 1:
        raise UserError(f"the count of filters must be at least 1, not {count}.")
    kernel, source = _kernel(model)
    rows = kernel.permute(0, 2, 3, 1).flatten(1).cpu().double()  # (d, p * p * c)
    _, strengths, axes = torch.linalg.svd(rows - rows.mean(0), full_matrices=False)
    # Centring takes one direction from d filters.
    axes = axes[: max(min(count, len(rows) - 1), 1)]
    largest = axes.gather(1, axes.abs().argmax(1, keepdim=True))
    explained = strengths.square() / strengths.square().sum().clamp_min(1e-30)
    shape = (len(axes), *kernel.shape[2:], kernel.shape[1])
    return Filters((axes * largest.sign()).view(shape).float(), explained[: len(axes)].float(), source)


@torch.no_grad()
def position_similarity(model: Model) -> Tensor:
    """(h, w, h, w): the cosine of each patch's position embedding with every other, on the grid the model learned.

    The class token's row is left out. Where every block adds a table of its own, this is the first block's.
    """
    if not isinstance(model, ViT):
        raise UserError("a ResNet has no position embeddings: ask for those of a Vision Transformer.")
    if not len(model.positions):
        reason = "offsets, not places," if model.config.position == "relative" else "no positions"
        raise UserError(f"this model embeds {reason} so no two places can be compared: choose position=1d or 2d.")
    grid = model.config.grid(model.config.image)
    patches = torch.empty(1, *grid, model.config.width, device=model.embed.weight.device)
    position = model.positions[0]
    assert isinstance(position, Position)
    rows = F.normalize(position.table_for(patches).double(), dim=-1)
    return torch.einsum("ijd,hwd->ijhw", rows, rows).float()


def _kernel(model: Model) -> tuple[Tensor, str]:
    """(d, c, p, p), as applied to an image, and what it is."""
    if not isinstance(model, ViT):
        root = model.root
    elif isinstance(model.stem, ResNetStem):
        root = model.stem.root.conv
    else:
        return model.embed.weight, "the patch embedding"
    return root.standardised(), "the 7x7 convolution of the ResNet's root"


DARKEST, BRIGHTEST = 0.01, 0.99  # the quantiles of a component that colours span; what lies outside is clipped


@torch.no_grad()
def patch_features(model: Model, images: Tensor) -> Tensor:
    """(b, c, height, width) -> (b, h, w, d): what the encoder gives for each patch, after the last norm.

    A ResNet's are the places of its last feature map.
    """
    tokens = model.encode(model.patchify(images))
    if not isinstance(model, ViT):
        return tokens.unflatten(1, model.config.grid((images.shape[2], images.shape[3])))
    patches = _patches(model, tokens, images)
    return model.norm(patches) if model.config.norm_place == "features" else patches


@torch.no_grad()
def token_norms(model: Model, images: Tensor) -> Tensor:
    """(b, c, height, width) -> (b, h, w): the length of each patch's vector after the last block, before the norm.

    Before, since a LayerNorm makes all lengths nearly alike: the few patches that large models without registers turn
    into notes of their own (Darcet et al. 2023) stand out here only.
    """
    if not isinstance(model, ViT):
        raise UserError("token norms are those of a Vision Transformer: a ResNet has no tokens to compare.")
    seen: list[Tensor] = []
    hook = model.blocks[-1].register_forward_hook(lambda _module, _inputs, tokens: seen.append(tokens))
    try:
        model.encode(model.patchify(images))
    finally:
        hook.remove()
    return _patches(model, seen[-1], images).float().norm(dim=-1)


def feature_colours(model: Model, images: Tensor) -> Tensor:
    """(b, c, height, width) -> (b, h, w, 3) from 0 to 1: the first three principal components as red, green and blue.

    The components are those of all patches of these images together, so one colour means one thing in all of them.
    """
    return colours(patch_features(model, images))


def colours(features: Tensor) -> Tensor:
    """(b, h, w, d) -> (b, h, w, 3) from 0 to 1.

    Each component spans its quantiles from 1 to 99 percent. It points the way in which it is stronger inside than along
    the edge, where photographs tend to have background: the foreground is bright. On grids too thin to have an inside,
    its largest weight is positive.
    """
    rows = features.flatten(0, 2).double()
    centred = rows - rows.mean(0)
    _, axes = torch.linalg.eigh(centred.T @ centred)
    axes = axes.flip(1)[:, :3]  # eigenvalues come in ascending order
    scores = (centred @ axes).unflatten(0, features.shape[:3])
    scores = scores * _directions(scores, axes)
    low, high = (scores.flatten(0, 2).quantile(share, dim=0) for share in (DARKEST, BRIGHTEST))
    # Patches that do not differ shall be one colour, not the rounding errors of one.
    smallest = 1e-6 * rows.norm(dim=1).mean().clamp_min(1e-30)
    return ((scores - low) / (high - low).clamp_min(smallest)).clamp(0, 1).float()


def _directions(scores: Tensor, axes: Tensor) -> Tensor:
    """Scores (b, h, w, 3) and axes (d, 3) -> (3,) of 1 and -1"""
    inside = scores[:, 1:-1, 1:-1].flatten(0, 2)  # the scores sum to zero, so the edge's mean has the other sign
    largest = axes.gather(0, axes.abs().argmax(0, keepdim=True))[0]
    return torch.where((inside.mean(0) if len(inside) else largest) < 0, -1.0, 1.0)


def _patches(model: ViT, tokens: Tensor, images: Tensor) -> Tensor:
    """(b, prefix + h * w, d) -> (b, h, w, d)"""
    return tokens[:, model.config.prefix :].unflatten(1, model.config.grid((images.shape[2], images.shape[3])))
