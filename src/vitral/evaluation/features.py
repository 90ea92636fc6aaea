"""Features of a split, computed once and kept: few-shot, nearest neighbours and linear probes all read the same ones.

A file's name is a hash of all that decides its numbers, so a changed image, weight or pipeline means another file and
nothing kept is ever out of date. Files that are torn, or are not what their name says, are computed again.

Together they take at most ROOM bytes: when a new one has been written, those go that were not used for longest. The new
one stays whatever its size, and so does what was used within the last hour, by this process or by another.
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
from vitral.evaluation.predict import EmbeddingPool, Precision, Preprocessing, Progress, embed_split
from vitral.models.build import Model
from vitral.version import __version__

ROOM = 20e9  # bytes; the features of ImageNet's 1.3 million images by ViT-L take 5.2e9
IN_USE = 3600  # seconds: train is wanted again soon after test is computed, and what is being written has changed
# As we name them, and `atomic_write` while they are being written: a folder may hold files of others.
_OURS = re.compile(r"[0-9a-f]{64}\.npz|\.[0-9a-f]{64}\.npz\.[0-9a-f]{8}\.part")


@dataclass(frozen=True, eq=False)
class Features:
    """A split as a frozen model sees it, in the order of the split."""

    x: np.ndarray  # (n, d) float32
    labels: np.ndarray  # as the split's
    valid: np.ndarray  # (n,) bool: False where the image could not be read, and the row means nothing
    keys: Sequence[str]
    kept: Path | None  # the file they are kept in; None where the folder cannot be written

    def readable(self) -> tuple[np.ndarray, np.ndarray]:
        """Features and labels of the images that could be read."""
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
    on_progress: Progress | None = None,
) -> Features:
    """The features of `split`, from `folder` where they were computed before; `on_progress` hears of computing only."""
    name = _name(model, split, preprocess, pool, precision)
    path = (folder or cache_folder("features")) / f"{name}.npz"
    kept: Path | None = path
    arrays = _intact(path, name, len(split))
    if arrays is not None:
        with contextlib.suppress(OSError):
            os.utime(path)  # file systems seldom note a reading by themselves
    else:
        found = embed_split(
            model,
            split,
            preprocess,
            batch=batch,
            pool=pool,
            device=device,
            workers=workers,
            precision=precision,
            on_progress=on_progress,
        )
        arrays = found.features, found.valid
        # What cannot be kept has been computed all the same, and is worth more than an error.
        kept = path if _write(path, name, *arrays) else None
        if kept is not None:
            _make_room(kept)
    x, valid = arrays
    return Features(x, split.labels, valid, split.keys, kept)


def _name(model: Model, split: Split, preprocess: Preprocessing, pool: EmbeddingPool, precision: Precision) -> str:
    facts = {
        "version": __version__,  # another one may prepare pixels or compute differently
        "model": weights_digest(model),
        "pipeline": preprocess.pipeline,
        "values": [list(preprocess.mean), list(preprocess.std)],
        "pool": pool,
        "precision": precision,
        "split": split.stamp(),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def weights_digest(model: Model) -> str:
    """sha256 of the architecture and of every array: a model that was adapted or trained since is another one."""
    digest = hashlib.sha256(repr(model.config).encode())
    for key, tensor in sorted(model.state_dict().items()):
        digest.update(f"\n{key} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _intact(path: Path, name: str, n: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Features (n, d) and validity (n,) of a whole file that is what its name says, or None."""
    try:
        with path.open("rb") as stream, np.load(stream) as arrays:
            stated, x, valid = str(arrays["name"]), arrays["x"], arrays["valid"]
    except (OSError, ValueError, TypeError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return None
    expected = stated == name and x.ndim == 2 and len(x) == n and valid.shape == (n,)
    return (x, valid) if expected and (x.dtype, valid.dtype) == (np.float32, np.bool_) else None


def _write(path: Path, name: str, x: np.ndarray, valid: np.ndarray) -> bool:
    """False where the place cannot be written."""
    try:
        with atomic_write(path) as aside, aside.open("wb") as stream:
            np.savez(stream, name=np.array(name), x=x, valid=valid)
    except OSError:
        return False
    return True


def _make_room(newest: Path) -> None:
    """Remove the files beside `newest` that were not used for longest until all fit, and what killed processes left.

    Nothing is locked: what another process removes meanwhile is gone as well, and one that finds a file gone which it
    was about to read computes it again.
    """
    files = _files(newest.parent)
    total = sum(size for _, _, size, _ in files)
    for unfinished, age, size, path in sorted(files, reverse=True):
        if path != newest and age > IN_USE and (unfinished or total > ROOM):
            with contextlib.suppress(OSError):  # another user's, or open on a system that keeps such files
                path.unlink(missing_ok=True)
                total -= size


def _files(folder: Path) -> list[tuple[bool, float, int, Path]]:
    """Of each of our files whether it is unfinished, the seconds since it was used, and its bytes."""
    found, now = [], time.time()
    for path in folder.glob("*"):
        with contextlib.suppress(OSError):  # gone since
            if _OURS.fullmatch(path.name):
                facts = path.stat()
                found.append((path.suffix == ".part", now - facts.st_mtime, facts.st_size, path))
    return found
