"""Nearest neighbours of feature vectors by cosine similarity; exact, every pair is compared."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

QUERY_BLOCK, STORED_BLOCK = 1 << 10, 1 << 14  # similarities of this many vectors exist at a time


def unit_vectors(features: np.ndarray | Tensor) -> Tensor:
    """(..., d) -> float32 (..., d) of length 1; a vector of zeros stays one, and is similar to nothing."""
    vectors = torch.from_numpy(np.ascontiguousarray(features)) if isinstance(features, np.ndarray) else features
    return F.normalize(vectors.float(), dim=-1, eps=torch.finfo(torch.float32).tiny)


def nearest(queries: Tensor, stored: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k most similar stored vectors (n, d) of each query (q, d), all of length 1; every pair is compared.

    Returns cosine similarities (q, min(k, n)) float32, the highest first, and indices (q, min(k, n)) int64; among equal
    similarities the lower index comes first.
    """
    results = [_nearest_of_block(block, stored, k) for block in queries.split(QUERY_BLOCK)]
    scores, indices = zip(*results, strict=True)
    return torch.cat(scores), torch.cat(indices)


def _nearest_of_block(queries: Tensor, stored: Tensor, k: int) -> tuple[Tensor, Tensor]:
    scores = queries.new_zeros(len(queries), 0)
    indices = torch.zeros(len(queries), 0, dtype=torch.long, device=queries.device)
    for start in range(0, len(stored), STORED_BLOCK):
        block = queries @ stored[start : start + STORED_BLOCK].float().T
        columns = _top(block, k)
        scores = torch.cat([scores, block.gather(1, columns)], 1)
        indices = torch.cat([indices, columns + start], 1)
        kept = _top(scores, k)
        scores, indices = scores.gather(1, kept), indices.gather(1, kept)
    return scores, indices


def _top(scores: Tensor, k: int) -> Tensor:
    """(q, m) -> (q, min(k, m)): the columns of the highest scores; unlike in `topk`, the first of equal ones."""
    if k >= scores.shape[1]:
        return scores.argsort(dim=1, descending=True, stable=True)
    if k == 1:
        return scores.argmax(1, keepdim=True)
    least = scores.topk(k).values[:, -1:]
    above, equal = scores > least, scores == least
    chosen = above | (equal & (equal.cumsum(1) <= k - above.sum(1, keepdim=True)))
    columns = chosen.nonzero()[:, 1].view(len(scores), k)
    order = scores.gather(1, columns).argsort(dim=1, descending=True, stable=True)
    return columns.gather(1, order)
