"""What the patches became: features over the grid, the lengths of their vectors, their main directions as colours."""

from __future__ import annotations

import torch
from torch import Tensor

from vitral.errors import UserError
from vitral.models.build import Model
from vitral.models.vit import ViT

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
