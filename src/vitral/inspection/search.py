"""What looks alike: exact nearest neighbours among the features of images, or among those of all their patches."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import Tensor

from vitral.atomic import atomic_write
from vitral.errors import UserError
from vitral.inspection.embeddings import patch_features
from vitral.models.build import Model

ROWS, QUERIES = 1 << 14, 1 << 8  # compared at a time: a search adds some 50 MB, however large the index


@dataclass(frozen=True)
class Index:
    """Images and their features, each vector of length 1 (a vector of zeros stays one, and is like nothing).

    Whole images: (n, d) float32. Patches: (n, h, w, d) float16, that is 2 * h * w * d bytes an image, 300 MB for 1,000
    images by ViT-B/16; rounding to float16 moves a score by less than 0.001.
    """

    paths: list[str]
    features: np.ndarray
    origin: str = ""  # what the features depend on: whoever made the index says it in words of his own

    def __post_init__(self) -> None:
        if len(self.paths) != len(self.features):
            raise UserError(f"{len(self.paths)} paths do not fit {len(self.features)} features: give one for each.")


class Match(NamedTuple):
    """A patch that is like the one asked for."""

    image: int  # its place in `Index.paths`
    row: int
    column: int
    score: float  # cosine similarity


def index_images(paths: Sequence[str], features: np.ndarray) -> Index:
    """Features (n, d) of the images, as `embed` gives them."""
    if features.ndim != 2:
        raise UserError(f"features of shape {features.shape} are no rows of images: give one vector an image.")
    return Index(list(paths), _unit(features))


def index_patches(model: Model, batches: Iterable[tuple[Sequence[str], Tensor]], most: int) -> Index:
    """Every patch of every image; batches are b paths and their images (b, c, height, width), normalised, of one size.

    One array for at most so many images is filled as the batches come, so the index is all the memory it takes.
    """
    paths, features = [], np.empty((0, 0, 0, 0), np.float16)
    for names, images in batches:
        found = patch_features(model, images).float().cpu().numpy()
        if not paths:
            features = np.zeros((most, *found.shape[1:]), np.float16)
        done = len(paths) + len(found)
        if found.shape[1:] != features.shape[1:] or len(names) != len(found) or done > most:
            raise UserError("patches are compared among images of one size, with a path for each: prepare all alike.")
        features[len(paths) : done] = _unit(found)
        paths.extend(names)
    return Index(paths, features[: len(paths)])


def save_index(path: Path, index: Index) -> None:
    """As npz with `paths`, `features` and `origin`; a reader sees the old file or the whole new one."""
    with atomic_write(path) as aside, aside.open("wb") as stream:
        paths = np.array(index.paths, np.str_)
        np.savez(stream, paths=paths, features=index.features, origin=np.array(index.origin))


def load_index(path: Path) -> Index:
    """What `save_index` wrote, or `vitral embed`, which states no origin."""
    try:
        with np.load(path, allow_pickle=False) as file:
            paths, features = file["paths"].tolist(), file["features"]
            origin = str(file["origin"]) if "origin" in file else ""
    except (OSError, ValueError, TypeError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} is no index of images: `vitral search --index` writes one.") from error
    known = Index(paths, _finite(features)) if features.ndim == 4 else index_images(paths, features)
    return replace(known, origin=origin)


def nearest(index: Index, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Queries (q, d) -> cosine similarities (q, k) float32, best first, and places in the index (q, k) int64.

    Exact: every image is compared. Of equals the earlier comes first; fewer than k images all come.
    """
    if index.features.ndim != 2:
        raise UserError("this index holds patches: search it by a patch, or make one of whole images.")
    return _search(index.features, queries, k)


def nearest_patches(index: Index, query: np.ndarray, k: int, *, skip: int | None = None) -> list[Match]:
    """The k patches most like `query` (d,), best first; `index.features[image, row, column]` is such a query.

    `skip` is the place of an image to leave out: the query's own, whose neighbouring patches would come first.
    """
    if index.features.ndim != 4:
        raise UserError("this index holds whole images: make one of patches to search by a patch.")
    _, height, width, depth = index.features.shape
    spare = 0 if skip is None else height * width  # no more patches than these are left out
    scores, places = _search(index.features.reshape(-1, depth), query[None], k + spare)
    spots = np.unravel_index(places[0], index.features.shape[:3])
    found = zip(*(axis.tolist() for axis in (*spots, scores[0])), strict=True)
    return [match for match in (Match(*each) for each in found) if match.image != skip][:k]


def _search(rows: np.ndarray, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows (n, d) of length 1 and queries (q, d) -> scores and places (q, min(k, n))"""
    if k < 1:
        raise UserError(f"the number of neighbours must be at least 1, not {k}.")
    if queries.ndim != 2 or queries.shape[1] != rows.shape[1]:
        raise UserError(
            f"queries of shape {queries.shape} do not fit features of width {rows.shape[1]}: "
            "make them with the model that made the index."
        )
    scores = np.empty((len(queries), min(k, len(rows))), np.float32)
    places = np.empty(scores.shape, np.int64)
    for start in range(0, len(queries), QUERIES):
        few = slice(start, start + QUERIES)
        scores[few], places[few] = _search_few(rows, _unit(queries[few]), k)
    return scores, places


def _search_few(rows: np.ndarray, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """As `_search`, for queries of length 1 whose scores with one block of rows fit in memory."""
    scores, places = np.empty((len(queries), 0), np.float32), np.empty((len(queries), 0), np.int64)
    for start in range(0, len(rows), ROWS):
        found = queries @ rows[start : start + ROWS].astype(np.float32, copy=False).T
        best = _best(found, k)
        scores = np.concatenate([scores, np.take_along_axis(found, best, 1)], axis=1)
        places = np.concatenate([places, best + start], axis=1)
        kept = _best(scores, k)
        scores, places = np.take_along_axis(scores, kept, 1), np.take_along_axis(places, kept, 1)
    return scores, places


def _best(scores: np.ndarray, k: int) -> np.ndarray:
    """(q, m) -> (q, min(k, m)): the columns of the highest scores, best first, of equals the first."""
    if k >= scores.shape[1]:
        return np.argsort(-scores, axis=1, kind="stable")
    least = -np.partition(-scores, k - 1, axis=1)[:, k - 1 : k]
    # What equals the least chosen score is taken from the left, which a partition alone does not promise.
    spare = k - (scores > least).sum(1, keepdims=True)
    level = scores == least
    chosen = (scores > least) | (level & (level.cumsum(1) <= spare))
    columns = np.nonzero(chosen)[1].reshape(len(scores), k)
    order = np.argsort(-np.take_along_axis(scores, columns, 1), axis=1, kind="stable")
    return np.take_along_axis(columns, order, 1)


def _unit(vectors: np.ndarray) -> np.ndarray:
    """(..., d) -> (..., d) float32, each of length 1 or 0"""
    exact = _finite(vectors).astype(np.float32, copy=False)
    return exact / np.maximum(np.linalg.norm(exact, axis=-1, keepdims=True), np.finfo(np.float32).tiny)


def _finite(features: np.ndarray) -> np.ndarray:
    if not np.isfinite(features).all():
        raise UserError("some features are not finite numbers: check the weights that made them.")
    return features
