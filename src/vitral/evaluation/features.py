"""Features of a split, computed once and cached: few-shot, nearest-neighbour and linear probes share them.

Together the files take at most MAX_BYTES (`data/cache.py` removes the least recently used ones).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from vitral.data.cache import DiskCache, cache_folder, cache_key
from vitral.data.sources import Split
from vitral.evaluation.predict import EmbeddingPool, Precision, Preprocessing, embed_split
from vitral.events import EventHandler, ignore_events
from vitral.models.build import Model
from vitral.version import __version__

MAX_BYTES = 20e9  # the features of ImageNet's 1.3 million images by ViT-L take 5.2e9


@dataclass(frozen=True, eq=False)
class SplitFeatures:
    """The features of a split by a frozen model, in the order of the split."""

    x: np.ndarray  # (n, d) float32
    labels: np.ndarray  # as the split's
    valid: np.ndarray  # (n,) bool: False where the image is unreadable; its row is undefined
    keys: Sequence[str]
    path: Path | None  # the cache file; None where the folder cannot be written

    def readable(self) -> tuple[np.ndarray, np.ndarray]:
        """Features and labels of the readable images."""
        return self.x[self.valid], self.labels[self.valid]


def cached_features(
    model: Model,
    split: Split,
    preprocess: Preprocessing,
    *,
    folder: Path | None = None,
    pool: EmbeddingPool = "pre_logits",
    batch: int = 32,
    device: torch.device | str = "cpu",
    workers: int = 0,
    precision: Precision = "float32",
    on_event: EventHandler = ignore_events,
) -> SplitFeatures:
    """The features of a split, read from the cache where they were computed before.

    Args:
        model: Computes the features.
        split: Images.
        preprocess: Preprocessing of the pixels.
        folder: Cache folder; the user's cache by default.
        pool: Which features, as in `embed_split`.
        batch: Images per forward pass.
        device: Where the model runs.
        workers: Processes that load images; 0 loads them in this one.
        precision: "bfloat16" runs under autocast.
        on_event: Receives `Progress("embedding", ...)` where features are computed.
    """
    key = _key(model, split, preprocess, pool, precision)
    cache = DiskCache(folder or cache_folder("features"), ".npz", limit_bytes=MAX_BYTES)
    arrays = cache.read(key, lambda path: _load(path, key, len(split)))
    written = True
    if arrays is None:
        embeddings = embed_split(
            model,
            split,
            preprocess,
            batch=batch,
            pool=pool,
            device=device,
            workers=workers,
            precision=precision,
            on_event=on_event,
        )
        arrays = embeddings.features, embeddings.valid
        # Features that cannot be cached are still useful: no error.
        written = _write(cache, key, *arrays)
    x, valid = arrays
    return SplitFeatures(x, split.labels, valid, split.keys, cache.path(key) if written else None)


def _key(model: Model, split: Split, preprocess: Preprocessing, pool: EmbeddingPool, precision: Precision) -> str:
    return cache_key(
        {
            "version": __version__,  # preprocessing or computation may differ between versions
            "model": weights_digest(model),
            "pipeline": str(preprocess.pipeline),
            "values": [list(preprocess.mean), list(preprocess.std)],
            "pool": pool,
            "precision": precision,
            "split": split.stamp(),
        }
    )


def weights_digest(model: Model) -> str:
    """sha256 of the architecture and all weights."""
    digest = hashlib.sha256(repr(model.config).encode())
    for key, tensor in sorted(model.state_dict().items()):
        digest.update(f"\n{key} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _load(path: Path, key: str, n: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Features (n, d) and validity (n,) from a complete file that matches its key, else None."""
    with path.open("rb") as stream, np.load(stream) as arrays:
        stored_key, x, valid = str(arrays["name"]), arrays["x"], arrays["valid"]
    matches = stored_key == key and x.ndim == 2 and len(x) == n and valid.shape == (n,)
    return (x, valid) if matches and (x.dtype, valid.dtype) == (np.float32, np.bool_) else None


def _write(cache: DiskCache, key: str, x: np.ndarray, valid: np.ndarray) -> bool:
    """Write a cache file; False where the folder cannot be written."""
    try:
        with cache.write(key) as temporary, temporary.open("wb") as stream:
            np.savez(stream, name=np.array(key), x=x, valid=valid)
    except OSError:
        return False
    return True
