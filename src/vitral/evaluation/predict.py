"""Run a model over a split: logits or embeddings of each image, once, for any batch size and number of processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol, get_args

import numpy as np
import torch
from torch import Tensor, nn

from vitral.data.loader import PADDING, evaluation_batches
from vitral.data.order import evaluation_indices
from vitral.data.preprocess import Pipeline, parse_deterministic
from vitral.data.sources import Split
from vitral.data.transforms import CallableTransform
from vitral.errors import UserError
from vitral.events import EventHandler, Progress, ignore_events
from vitral.models.build import Model
from vitral.models.normalize import normalize
from vitral.models.vit import ViT

Precision = Literal["float32", "bfloat16"]
EmbeddingPool = Literal["features", "cls", "mean", "pre_logits"]


class Preprocessing(Protocol):
    """The part of a model card that describes its input."""

    @property
    def pipeline(self) -> str | Pipeline | CallableTransform: ...
    @property
    def mean(self) -> tuple[float, ...]: ...
    @property
    def std(self) -> tuple[float, ...]: ...


class Predictions(NamedTuple):
    """Logits of the images of a split that this process computed, in the order of the split."""

    indices: np.ndarray  # (m,) int64, into the split
    logits: np.ndarray  # (m, k) float32
    valid: np.ndarray  # (m,) bool: False where the image is unreadable; its row is undefined


class Embeddings(NamedTuple):
    """Embeddings of the images of a split that this process computed, in the order of the split."""

    indices: np.ndarray  # (m,) int64, into the split
    features: np.ndarray  # (m, d) float32
    valid: np.ndarray  # (m,) bool: False where the image is unreadable; its row is undefined


def predict_split(
    model: nn.Module,
    split: Split,
    preprocess: Preprocessing,
    *,
    batch: int,
    device: torch.device | str = "cpu",
    rank: int = 0,
    world: int = 1,
    workers: int = 0,
    precision: Precision = "float32",
    function: Callable[[Tensor], Tensor] | None = None,
    normalized: bool = True,
    task: str = "evaluating",
    on_event: EventHandler = ignore_events,
) -> Predictions:
    """Compute the logits of this process's shard of a split.

    Args:
        model: Moved to the device; returned in the training or evaluation mode it was in.
        split: Images.
        preprocess: Preprocessing of the pixels.
        batch: Images per forward pass.
        device: Where the model runs.
        rank: Number of this process.
        world: Number of processes.
        workers: Processes that load images; 0 loads them in this one.
        precision: "bfloat16" runs under autocast.
        function: What computes logits (batch, k) of images; the model itself by default.
        normalized: Whether it takes normalised images, or uint8 pixels, both (batch, channels, height, width).
        task: What the progress is called.
        on_event: Receives `Progress(task, ...)` over this process's shard.

    Raises:
        UserError: The split is empty.
    """
    loading = {"batch": batch, "rank": rank, "world": world, "workers": workers}
    compute = function or model
    if normalized:
        compute = _of_pixels(compute, preprocess)
    return Predictions(
        *_compute(model, compute, split, loading, preprocess, torch.device(device), precision, task, on_event)
    )


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
    on_event: EventHandler = ignore_events,
) -> Embeddings:
    """Compute the embeddings of this process's shard of a split.

    Args:
        model: Moved to the device; returned in the training or evaluation mode it was in.
        split: Images.
        preprocess: Preprocessing of the pixels.
        batch: Images per forward pass.
        pool: "features", the input of the model's head; "cls", the class token; "mean", the mean of the patch tokens,
            without class token and registers; "pre_logits", the input of the last linear layer, after the tanh layer
            where there is one.
        device: Where the model runs.
        rank: Number of this process.
        world: Number of processes.
        workers: Processes that load images; 0 loads them in this one.
        precision: "bfloat16" runs under autocast.
        on_event: Receives `Progress("embedding", ...)` over this process's shard.

    Raises:
        UserError: The split is empty, or the model has no such pool.
    """
    loading = {"batch": batch, "rank": rank, "world": world, "workers": workers}
    embed = _of_pixels(_embedder(model, pool), preprocess)
    return Embeddings(
        *_compute(model, embed, split, loading, preprocess, torch.device(device), precision, "embedding", on_event)
    )


def _of_pixels(function: Callable[[Tensor], Tensor], preprocess: Preprocessing) -> Callable[[Tensor], Tensor]:
    """A function of normalised images as one of pixels; images that are normalised already are left as they are."""
    return lambda pixels: function(normalize(pixels, preprocess.mean, preprocess.std))


def _compute(
    model: nn.Module,
    function: Callable[[Tensor], Tensor],
    split: Split,
    loading: dict[str, int],
    preprocess: Preprocessing,
    device: torch.device,
    precision: Precision,
    task: str,
    on_event: EventHandler,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Indices (m,), outputs (m, k) and validity (m,) of this process's shard; `loading`: as `evaluation_batches`."""
    if len(split) == 0:
        raise UserError("there is no image to compute anything for: the split is empty.")
    pipeline, channels = preprocess.pipeline, len(preprocess.mean)
    steps = parse_deterministic(pipeline) if isinstance(pipeline, str) else pipeline
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16")
    results: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    training, done, total = model.training, 0, len(evaluation_indices(len(split), loading["rank"], loading["world"]))
    model.to(device).eval()
    try:
        with torch.inference_mode(), autocast:
            for batch in evaluation_batches(split, steps, channels=channels, pin=device.type == "cuda", **loading):
                count = int((batch.indices != PADDING).sum())  # images come first, padding last
                # Padding is not computed, except for one row of an empty shard, which tells the width of the outputs.
                pixels = batch.images[: max(count, 1)].to(device, non_blocking=True)
                rows = function(pixels).float().cpu()
                results.append((batch.indices[:count].numpy(), rows[:count].numpy(), batch.valid[:count].numpy()))
                done += count
                on_event(Progress(task, done, total))
    finally:
        model.train(training)
    indices, outputs, valid = (np.concatenate(arrays) for arrays in zip(*results, strict=True))
    return indices, outputs, valid


def _embedder(model: Model, pool: EmbeddingPool) -> Callable[[Tensor], Tensor]:
    """A function (batch, channels, height, width) -> (batch, d)"""
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
