"""Image search: exact nearest neighbours among the features of images, or of all their patches."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitral.atomic import atomic_write
from vitral.data.nearest import nearest, unit_vectors
from vitral.errors import UserError
from vitral.inspection.representations import patch_features
from vitral.models.build import Model


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
    """An index of every patch of every image.

    Args:
        model: Computes the features.
        batches: Paths and their images (batch, channels, height, width), normalised, all of one size.
        max_images: Images in all batches at most: the array is allocated once, so memory stays that of the index.

    Returns:
        The index.
    """
    paths, features = [], np.empty((0, 0, 0, 0), np.float16)
    for names, images in batches:
        patches = patch_features(model, images).float().cpu().numpy()
        if not paths:
            features = np.zeros((max_images, *patches.shape[1:]), np.float16)
        end = len(paths) + len(patches)
        if patches.shape[1:] != features.shape[1:] or len(names) != len(patches) or end > max_images:
            raise UserError("patches are compared among images of one size, with a path for each: prepare all alike.")
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
    """The k images most similar to each query; every image is compared.

    Args:
        index: An index of whole images.
        queries: (q, d).
        k: Neighbours per query; all images where there are fewer.

    Returns:
        Cosine similarities (q, k) float32, the best first, and indices into `index.paths` (q, k) int64. Among equal
        similarities the lower index comes first.
    """
    if index.features.ndim != 2:
        raise UserError("this index holds patches: search it by a patch, or make one of whole images.")
    return _search(index.features, queries, k)


def nearest_patches(index: FeatureIndex, query: np.ndarray, k: int, *, skip: int | None = None) -> list[PatchMatch]:
    """The k patches most similar to a query, the best first.

    Args:
        index: An index of patches.
        query: (d,), such as `index.features[image, row, column]`.
        k: Number of patches.
        skip: Index of an image to leave out: that of the query, whose neighbouring patches would come first.
    """
    if index.features.ndim != 4:
        raise UserError("this index holds whole images: make one of patches to search by a patch.")
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
