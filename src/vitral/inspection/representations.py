"""Learned representations: embedding filters and position embeddings (Figure 7), patch features and token norms.

And search by them: exact nearest neighbours among the features of images, or of all their patches.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.atomic import atomic_write
from vitral.data.neighbours import nearest, unit_vectors
from vitral.errors import UserError
from vitral.inspection.attention import grid_of
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
    convolution. There may be fewer than `count` components.
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
    """The encoder's output for each patch, after the last norm, (batch, h, w, d); of a ResNet the last feature map."""
    tokens = model.encode(model.patchify(images))
    if not isinstance(model, ViT):
        return tokens.unflatten(1, grid_of(model, images))
    patches = _patches(model, tokens, images)
    return model.norm(patches) if model.config.norm_place == "features" else patches


@torch.no_grad()
def token_norms(model: Model, images: Tensor) -> Tensor:
    """The norm of each patch token after the last block, before the last LayerNorm, which would equalise the norms.

    In large models without registers a few patches are outliers (Darcet et al. 2023). Returns (batch, h, w).
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
    """The first three principal components of the patch features as red, green and blue, (batch, h, w, 3) in 0..1.

    The components are common to all images, so colours can be compared between them.
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
    return tokens[:, model.config.prefix :].unflatten(1, grid_of(model, images))


@dataclass(frozen=True)
class FeatureIndex:
    """Images and their features, each vector of length 1 (a vector of zeros stays one, and is similar to nothing).

    Whole images: (n, d) float32. Patches: (n, h, w, d) float16, that is 2 * h * w * d bytes per image, 300 MB for 1,000
    images by ViT-B/16; rounding to float16 changes a score by less than 0.001.
    """

    paths: list[str]
    features: np.ndarray
    origin: str = ""  # what the features depend on (weights, preprocessing, images), in the words of the creator

    def __post_init__(self) -> None:
        if len(self.paths) != len(self.features):
            raise UserError(f"{len(self.paths)} paths do not fit {len(self.features)} features: give one for each.")


class PatchMatch(NamedTuple):
    """A patch similar to the query."""

    image: int  # index into `FeatureIndex.paths`
    row: int
    column: int
    score: float  # cosine similarity


def index_images(paths: Sequence[str], features: np.ndarray) -> FeatureIndex:
    """An index of whole images from their features (n, d), as `embed` returns them."""
    if features.ndim != 2:
        raise UserError(f"features of shape {features.shape} are not one vector per image: give an array (n, d).")
    return FeatureIndex(list(paths), unit_vectors(_check_finite(features)).numpy())


def index_patches(model: Model, batches: Iterable[tuple[Sequence[str], Tensor]], max_images: int) -> FeatureIndex:
    """An index of every patch of every image: of paths, and normalised images (batch, channels, height, width).

    There are `max_images`, all of one size, at most: the array is allocated once, so memory stays that of the index.
    """
    paths, features = [], np.empty((0, 0, 0, 0), np.float16)
    for names, images in batches:
        patches = patch_features(model, images).float().cpu().numpy()
        if not paths:
            features = np.zeros((max_images, *patches.shape[1:]), np.float16)
        end = len(paths) + len(patches)
        if patches.shape[1:] != features.shape[1:] or len(names) != len(patches) or end > max_images:
            raise UserError("patches are compared among images of one size, with a path for each: prepare all equally.")
        features[len(paths) : end] = unit_vectors(_check_finite(patches)).numpy()
        paths.extend(names)
    return FeatureIndex(paths, features[: len(paths)])


def save_index(path: Path, index: FeatureIndex) -> None:
    """Write an index as npz with `paths`, `features` and `origin`, atomically."""
    with atomic_write(path) as temporary, temporary.open("wb") as stream:
        paths = np.array(index.paths, np.str_)
        np.savez(stream, paths=paths, features=index.features, origin=np.array(index.origin))


def load_index(path: Path) -> FeatureIndex:
    """Read what `save_index` wrote, or `vitral embed`, which states no origin."""
    try:
        with np.load(path, allow_pickle=False) as file:
            paths, features = file["paths"].tolist(), file["features"]
            origin = str(file["origin"]) if "origin" in file else ""
    except (OSError, ValueError, TypeError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} is not an index of images: `vitral search --index` writes one.") from error
    index = FeatureIndex(paths, _check_finite(features)) if features.ndim == 4 else index_images(paths, features)
    return replace(index, origin=origin)


def nearest_images(index: FeatureIndex, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k images, or all if there are fewer, most similar to each query (q, d); every image is compared.

    Returns cosine similarities (q, k) float32, the best first, and indices into `index.paths` (q, k) int64; among equal
    similarities the lower index comes first.
    """
    if index.features.ndim != 2:
        raise UserError("this index contains patches: search it by a patch, or make one of whole images.")
    return _search(index.features, queries, k)


def nearest_patches(index: FeatureIndex, query: np.ndarray, k: int, *, skip: int | None = None) -> list[PatchMatch]:
    """The k patches most similar to a query (d,), such as `index.features[image, row, column]`, the best first.

    The image `skip` is left out: that of the query, whose neighbouring patches would come first.
    """
    if index.features.ndim != 4:
        raise UserError("this index contains whole images: make one of patches to search by a patch.")
    _, height, width, depth = index.features.shape
    extra = 0 if skip is None else height * width  # at most this many patches are left out
    scores, flat_indices = _search(index.features.reshape(-1, depth), query[None], k + extra)
    positions = np.unravel_index(flat_indices[0], index.features.shape[:3])
    columns = (axis.tolist() for axis in (*positions, scores[0]))
    matches = [PatchMatch(*values) for values in zip(*columns, strict=True)]
    return [match for match in matches if match.image != skip][:k]


def _search(stored: np.ndarray, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    if k < 1:
        raise UserError(f"the number of neighbours must be at least 1, not {k}.")
    if queries.ndim != 2 or queries.shape[1] != stored.shape[1]:
        raise UserError(
            f"queries of shape {queries.shape} do not fit features of width {stored.shape[1]}: "
            "make them with the model that made the index."
        )
    scores, indices = nearest(unit_vectors(_check_finite(queries)), torch.from_numpy(stored), k)
    return scores.numpy(), indices.numpy()


def _check_finite(features: np.ndarray) -> np.ndarray:
    if not np.isfinite(features).all():
        raise UserError("some features are not finite (NaN or Inf): check the weights that made them.")
    return features
