"""Features of a split, computed once and cached: few-shot, nearest-neighbour and linear probes share them.

The name of a cache file is a hash of everything that determines its contents, so files never become outdated. Truncated
files, and files that do not match their name, are computed again.

Together they take at most MAX_BYTES: after a new file is written, the least recently used ones are removed. The new
file is kept whatever its size, and so are files used within the last hour, by this or another process.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from vitral.atomic import atomic_write
from vitral.data.cache import cache_folder
from vitral.data.sources import Split
from vitral.evaluation.predict import EmbeddingPool, Precision, Preprocessing, embed_split
from vitral.events import EventHandler, ignore_events
from vitral.models.build import Model
from vitral.version import __version__

MAX_BYTES = 20e9  # the features of ImageNet's 1.3 million images by ViT-L take 5.2e9
IN_USE_SECONDS = 3600  # train is read again soon after test is computed; a file being written was modified recently
# Our files, and those of `atomic_write` before they are complete: the folder may hold files of others.
_CACHE_FILE = re.compile(r"[0-9a-f]{64}\.npz|\.[0-9a-f]{64}\.npz\.[0-9a-f]{8}\.part")


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
    name = _name(model, split, preprocess, pool, precision)
    path = (folder or cache_folder("features")) / f"{name}.npz"
    arrays = _read(path, name, len(split))
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
        written = _write(path, name, *arrays)
    x, valid = arrays
    return SplitFeatures(x, split.labels, valid, split.keys, path if written else None)


def _name(model: Model, split: Split, preprocess: Preprocessing, pool: EmbeddingPool, precision: Precision) -> str:
    key = {
        "version": __version__,  # preprocessing or computation may differ between versions
        "model": weights_digest(model),
        "pipeline": preprocess.pipeline,
        "values": [list(preprocess.mean), list(preprocess.std)],
        "pool": pool,
        "precision": precision,
        "split": split.stamp(),
    }
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()


def weights_digest(model: Model) -> str:
    """sha256 of the architecture and all weights."""
    digest = hashlib.sha256(repr(model.config).encode())
    for key, tensor in sorted(model.state_dict().items()):
        digest.update(f"\n{key} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _read(path: Path, name: str, n: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Features (n, d) and validity (n,) from a complete file that matches its name, else None."""
    try:
        with path.open("rb") as stream, np.load(stream) as arrays:
            stored_name, x, valid = str(arrays["name"]), arrays["x"], arrays["valid"]
    except (OSError, ValueError, TypeError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return None
    matches = stored_name == name and x.ndim == 2 and len(x) == n and valid.shape == (n,)
    if not matches or (x.dtype, valid.dtype) != (np.float32, np.bool_):
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # few file systems record reads by themselves
    return x, valid


def _write(path: Path, name: str, x: np.ndarray, valid: np.ndarray) -> bool:
    """Write a cache file and remove old ones; False where the folder cannot be written."""
    try:
        with atomic_write(path) as temporary, temporary.open("wb") as stream:
            np.savez(stream, name=np.array(name), x=x, valid=valid)
    except OSError:
        return False
    _evict(path)
    return True


def _evict(newest: Path) -> None:
    """Remove the least recently used files beside `newest` until all fit, and incomplete files of killed processes.

    There is no lock: a process that finds a file removed computes it again.
    """
    files = _files(newest.parent)
    total = sum(size for _, _, size, _ in files)
    for incomplete, age, size, path in sorted(files, reverse=True):
        if path != newest and age > IN_USE_SECONDS and (incomplete or total > MAX_BYTES):
            with contextlib.suppress(OSError):  # another user's, or open on a system that locks open files
                path.unlink(missing_ok=True)
                total -= size


def _files(folder: Path) -> list[tuple[bool, float, int, Path]]:
    """(incomplete, seconds since it was used, bytes, path) of each cache file."""
    files, now = [], time.time()
    for path in folder.glob("*"):
        with contextlib.suppress(OSError):  # removed meanwhile
            if _CACHE_FILE.fullmatch(path.name):
                stat = path.stat()
                files.append((path.suffix == ".part", now - stat.st_mtime, stat.st_size, path))
    return files
