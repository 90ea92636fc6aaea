"""A plain model over a split: outputs or embeddings for each example, once, whatever the batch and the processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, Protocol, get_args

import numpy as np
import torch
from torch import Tensor

from vitral.data.loader import PADDING, Batch, evaluation_batches
from vitral.data.order import evaluation_indices
from vitral.data.preprocess import parse_deterministic
from vitral.data.sources import Split
from vitral.errors import UserError
from vitral.models.build import Model
from vitral.models.normalize import normalize
from vitral.models.vit import ViT

Precision = Literal["float32", "bfloat16"]
EmbeddingPool = Literal["features", "cls", "mean", "pre_logits"]
Progress = Callable[[int, int], None]  # examples done, examples in all (of this process)


class Preprocessing(Protocol):
    """What a model's card says about its input."""

    @property
    def pipeline(self) -> str: ...
    @property
    def mean(self) -> tuple[float, ...]: ...
    @property
    def std(self) -> tuple[float, ...]: ...


class Predictions(NamedTuple):
    """One process's share of a split, in its order."""

    indices: np.ndarray  # (m,) int64: places in the split
    logits: np.ndarray  # (m, k) float32
    valid: np.ndarray  # (m,) bool: False where the image could not be read, and the row means nothing


class Embeddings(NamedTuple):
    """One process's share of a split, in its order."""

    indices: np.ndarray  # (m,) int64
    features: np.ndarray  # (m, d) float32
    valid: np.ndarray  # (m,) bool


def predict_split(
    model: Model,
    split: Split,
    preprocess: Preprocessing,
    *,
    batch: int,
    device: torch.device | str = "cpu",
    rank: int = 0,
    world: int = 1,
    workers: int = 0,
    precision: Precision = "float32",
    on_progress: Progress | None = None,
) -> Predictions:
    """The logits of this process's share of `split`."""
    share = _Share(split, batch, rank, world, workers)
    return Predictions(*_compute(model, model, share, preprocess, torch.device(device), precision, on_progress))


def embed_split(
    model: Model,
    split: Split,
    preprocess: Preprocessing,
    *,
    batch: int,
    pool: EmbeddingPool = "features",
    device: torch.device | str = "cpu",
    rank: int = 0,
    world: int = 1,
    workers: int = 0,
    precision: Precision = "float32",
    on_progress: Progress | None = None,
) -> Embeddings:
    """The embeddings of this process's share of `split`.

    `pool`: "features", what the model's own head reads; "cls", the class token; "mean", the mean of the patches, into
    which neither the class token nor registers are averaged; "pre_logits", what the last linear layer reads, after
    the tanh layer where there is one.
    """
    share = _Share(split, batch, rank, world, workers)
    embed = _embedder(model, pool)
    return Embeddings(*_compute(model, embed, share, preprocess, torch.device(device), precision, on_progress))


class _Share(NamedTuple):
    split: Split
    batch: int
    rank: int
    world: int
    workers: int


def _compute(
    model: Model,
    function: Callable[[Tensor], Tensor],
    share: _Share,
    preprocess: Preprocessing,
    device: torch.device,
    precision: Precision,
    on_progress: Progress | None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Indices (m,), outputs (m, k) and validity (m,) of the share; the model comes back in the mode it came in."""
    if len(share.split) == 0:
        raise UserError("there is no image to compute anything for: the split is empty.")
    half = torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16")
    found: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    before, done, total = model.training, 0, len(evaluation_indices(len(share.split), share.rank, share.world))
    model.to(device).eval()
    try:
        with torch.inference_mode(), half:
            for batch in _batches(share, preprocess.pipeline, model.config.channels, device):
                real = int((batch.indices != PADDING).sum())  # the first ones
                # Padding costs as much as images do; one row is computed even so, to know how wide rows are.
                pixels = batch.images[: max(real, 1)].to(device, non_blocking=True)
                rows = function(normalize(pixels, preprocess.mean, preprocess.std)).float().cpu()
                found.append((batch.indices[:real].numpy(), rows[:real].numpy(), batch.valid[:real].numpy()))
                done += real
                if on_progress is not None:
                    on_progress(done, total)
    finally:
        model.train(before)
    indices, outputs, valid = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
    return indices, outputs, valid


def _batches(share: _Share, pipeline: str, channels: int, device: torch.device) -> Iterator[Batch]:
    steps = parse_deterministic(pipeline)
    split, batch, rank, world, workers = share
    pin = device.type == "cuda"
    return evaluation_batches(
        split, steps, batch=batch, rank=rank, world=world, workers=workers, channels=channels, pin=pin
    )


def _embedder(model: Model, pool: EmbeddingPool) -> Callable[[Tensor], Tensor]:
    """A function (b, c, h, w) -> (b, d)"""
    if pool not in get_args(EmbeddingPool):
        raise UserError(f'pool="{pool}" is not one of {", ".join(get_args(EmbeddingPool))}.')
    if pool == "pre_logits":
        return lambda images: model.head.represent(model.features(images))
    if pool == "features" or (pool == "mean" and not isinstance(model, ViT)):
        return model.features
    if not isinstance(model, ViT) or (pool == "cls" and not model.config.class_token):
        raise UserError('this model has no class token: choose pool="features" or pool="mean".')

    def embed(images: Tensor) -> Tensor:
        tokens = model.encode(model.patchify(images))
        pooled = tokens[:, 0] if pool == "cls" else tokens[:, model.config.prefix :].mean(dim=1)
        return model.norm(pooled) if model.config.norm_place == "features" else pooled

    return embed
