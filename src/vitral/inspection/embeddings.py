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
