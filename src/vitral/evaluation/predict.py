"""Run a model over a split: logits or embeddings of each image, once, for any batch size and number of processes.

Features of a split are cached. Probabilities are averaged over views of an image (test-time augmentation) and over
models (an ensemble).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax, logsigmoid

from vitral.architecture import Size
from vitral.data.augment import CallableTransform
from vitral.data.cache import DiskCache, cache_folder, cache_key
from vitral.data.loader import PADDING, evaluation_batches, rank_slice
from vitral.data.pixels import ImageInput, center_crop, central_crop, cut, fitting, padded, whole_image
from vitral.data.preprocess import Pipeline, parse_deterministic
from vitral.data.sources import Split
from vitral.errors import UserError
from vitral.events import EventHandler, Progress, ignore_events
from vitral.models.build import Model
from vitral.models.model import normalize
from vitral.models.vit import ViT
from vitral.version import __version__

Precision = Literal["float32", "bfloat16", "fp8", "int8"]
EmbeddingPool = Literal["features", "cls", "mean", "pre_logits"]
TestTimeAugmentation = Literal["flip", "five-crop", "ten-crop"]
MAX_BYTES = 20e9  # of cached features; those of ImageNet's 1.3 million images by ViT-L take 5.2e9
VIEWS: dict[str, int] = {"flip": 2, "five-crop": 5, "ten-crop": 10}


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
    valid: np.ndarray  # (m,) bool: False if the image is unreadable; its row is undefined


class Embeddings(NamedTuple):
    """Embeddings of the images of a split that this process computed, in the order of the split."""

    indices: np.ndarray  # (m,) int64, into the split
    features: np.ndarray  # (m, d) float32
    valid: np.ndarray  # (m,) bool: False if the image is unreadable; its row is undefined


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
    """Compute the logits of this process's shard of a split; an empty split is a UserError.

    Args:
        model: moved to the device; returned in the training or evaluation mode it was in.
        workers: processes that load images; 0 loads them in this one.
        precision: "bfloat16" and "fp8" run under autocast; for FP8 the model is one that `use_fp8` has set up, for
            int8 one that `pack_int8` has changed.
        function: what computes logits (batch, k) of images; the model itself by default.
        normalized: whether it takes normalised images, or uint8 pixels, both (batch, channels, height, width).
        on_event: receives `Progress(task, ...)` over this process's shard.
    """
    if len(split) == 0:
        raise UserError("there is no image to compute anything for: the split is empty.")
    function, device, pipeline = function or model, torch.device(device), preprocess.pipeline
    steps = parse_deterministic(pipeline) if isinstance(pipeline, str) else pipeline
    loading = {"batch": batch, "rank": rank, "world": world, "workers": workers, "channels": len(preprocess.mean)}
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=precision in ("bfloat16", "fp8"))
    results: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    training, done, total = model.training, 0, len(range(len(split))[rank_slice(len(split), rank, world)])
    model.to(device).eval()
    try:
        with torch.inference_mode(), autocast:
            for part in evaluation_batches(split, steps, pin=device.type == "cuda", **loading):
                count = int((part.indices != PADDING).sum())  # images come first, padding last
                # Padding is not computed, except for one row of an empty shard, which tells the width of the outputs.
                images = part.images[: max(count, 1)].to(device, non_blocking=True)
                # Images that are normalised already are left as they are.
                images = normalize(images, preprocess.mean, preprocess.std) if normalized else images
                rows = function(images).float().cpu()
                results.append((part.indices[:count].numpy(), rows[:count].numpy(), part.valid[:count].numpy()))
                done += count
                on_event(Progress(task, done, total))
    finally:
        model.train(training)
    return Predictions(*(np.concatenate(arrays) for arrays in zip(*results, strict=True)))


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
    """Compute the embeddings of this process's shard of a split; arguments are those of `predict_split`, and `pool`:

    "features", the input of the model's head; "cls", the class token; "mean", the mean of the patch tokens, without
    class token and registers; "pre_logits", the input of the last linear layer, after a tanh layer if there is one.
    """
    options = {"batch": batch, "device": device, "rank": rank, "world": world, "workers": workers}
    function = _embedder(model, pool)
    return Embeddings(
        *predict_split(
            model,
            split,
            preprocess,
            function=function,
            task="embedding",
            precision=precision,
            on_event=on_event,
            **options,
        )
    )


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


@dataclass(frozen=True)
class FiveCrops(Pipeline):
    """A pipeline that gives five crops where another gives the central one: the corners, then the centre.

    The crops of an image are stacked along its height: `size` is (5 * height, width). An image of one size that the
    other pipeline does not crop is resized to 8/7 of it first.
    """

    crop: Size
    pads: bool  # as torchvision's center_crop does; big_vision's central_crop enlarges

    @classmethod
    def of(cls, pipeline: Pipeline) -> FiveCrops:
        """The crops of a pipeline that ends in central_crop, center_crop or resize; a UserError for any other."""
        *before, last = pipeline.steps
        (height, width), name = pipeline.size, last.name
        if name == "resize":
            before.append(replace(last, sides=(round(height * 8 / 7), round(width * 8 / 7))))
        elif name not in ("central_crop", "center_crop"):
            raise UserError(f'"{pipeline.text}" does not end in a crop or a resize that five crops replace: use flip.')
        return cls(pipeline.text, tuple(before), (5 * height, width), False, (height, width), name == "center_crop")

    def __call__(self, image: ImageInput, rng: np.random.Generator | None = None) -> np.ndarray:
        """(h, w, c) -> (*size, c)"""
        pixels = super().__call__(image, rng)
        pixels = whole_image(padded(pixels, self.crop) if self.pads else fitting(pixels, self.crop))
        bottom, right = pixels.shape[0] - self.crop[0], pixels.shape[1] - self.crop[1]
        corners = [cut(pixels, top, left, self.crop) for top in (0, bottom) for left in (0, right)]
        middle = center_crop(pixels, self.crop) if self.pads else central_crop(pixels, self.crop)
        return np.concatenate([*corners, middle])


class ViewPreprocess(NamedTuple):
    """Preprocessing whose images are stacks of views."""

    pipeline: Pipeline
    mean: tuple[float, ...]
    std: tuple[float, ...]


def view_pipeline(text: str, tta: TestTimeAugmentation) -> Pipeline:
    """The pipeline that gives the views of an image, stacked along its height; mirrored ones are made by the model."""
    if tta not in VIEWS:
        raise UserError(f'tta="{tta}" is not one of {", ".join(VIEWS)}.')
    pipeline = parse_deterministic(text)
    return pipeline if tta == "flip" else FiveCrops.of(pipeline)


def averaging(
    model: Callable[[Tensor], Tensor], tta: TestTimeAugmentation, *, temperature: float = 1.0, sigmoid: bool = False
) -> Callable[[Tensor], Tensor]:
    """A function from stacks of views (batch, channels, stacked height, width) to logits (batch, classes).

    "flip" is the image and its mirror image; "ten-crop", five crops and their mirror images. Logits of each view are
    divided by the temperature; at 1 the result gives the mean of the views' probabilities.
    """

    def compute(images: Tensor) -> Tensor:
        views = [*images.chunk(1 if tta == "flip" else 5, dim=2)]
        views += [] if tta == "five-crop" else [view.flip(-1) for view in views]
        return mean_logits([model(view).float() / temperature for view in views], sigmoid=sigmoid)

    return compute


def mean_logits(logits: Sequence[Tensor], *, sigmoid: bool = False) -> Tensor:
    """Several (batch, classes) -> (batch, classes): logits of the mean probabilities, computed without underflow."""

    def log_mean(logs: list[Tensor]) -> Tensor:
        return torch.logsumexp(torch.stack(logs), dim=0) - math.log(len(logs))

    if sigmoid:
        return log_mean([logsigmoid(z) for z in logits]) - log_mean([logsigmoid(-z) for z in logits])
    return log_mean([log_softmax(z, dim=-1) for z in logits])


def mean_predictions(members: Sequence[Predictions], *, sigmoid: bool = False) -> Predictions:
    """The mean of several models' predictions of the same images, whose logits are divided by their temperatures."""
    first = members[0]
    assert all(np.array_equal(first.indices, member.indices) for member in members)
    valid = np.logical_and.reduce([member.valid for member in members])
    logits = mean_logits([torch.from_numpy(member.logits).double() for member in members], sigmoid=sigmoid)
    return Predictions(first.indices, logits.float().numpy(), valid)


@dataclass(frozen=True, eq=False)
class SplitFeatures:
    """The features of a split by a frozen model, in the order of the split."""

    x: np.ndarray  # (n, d) float32
    labels: np.ndarray  # as the split's
    valid: np.ndarray  # (n,) bool: False if the image is unreadable; its row is undefined
    keys: Sequence[str]
    path: Path | None  # the cache file; None if the folder cannot be written

    def readable(self) -> tuple[np.ndarray, np.ndarray]:
        """Features and labels of the readable images."""
        return self.x[self.valid], self.labels[self.valid]


def cached_features(
    model: Model,
    split: Split,
    preprocess: Preprocessing,
    *,
    folder: Path | None = None,
    batch: int = 32,
    device: torch.device | str = "cpu",
    workers: int = 0,
    on_event: EventHandler = ignore_events,
) -> SplitFeatures:
    """The "pre_logits" of a split, read from the cache folder, the user's by default, if they were computed before.

    Few-shot, nearest-neighbour and linear probes share them. Together the files take at most MAX_BYTES.
    """
    key = _key(model, split, preprocess)
    cache = DiskCache(folder or cache_folder("features"), ".npz", limit_bytes=MAX_BYTES)
    arrays = cache.read(key, lambda path: _load(path, key, len(split)))
    written = True
    if arrays is None:
        options = {"batch": batch, "device": device, "workers": workers, "on_event": on_event}
        _, *arrays = embed_split(model, split, preprocess, pool="pre_logits", **options)
        # Features that cannot be cached are still useful: no error.
        written = _write(cache, key, *arrays)
    x, valid = arrays
    return SplitFeatures(x, split.labels, valid, split.keys, cache.path(key) if written else None)


def _key(model: Model, split: Split, preprocess: Preprocessing) -> str:
    return cache_key(
        {
            "version": __version__,  # preprocessing or computation may differ between versions
            "model": weights_digest(model),
            "pipeline": str(preprocess.pipeline),
            "values": [list(preprocess.mean), list(preprocess.std)],
            "pool": "pre_logits",
            "precision": "float32",
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
    """Write a cache file; False if the folder cannot be written."""
    try:
        with cache.write(key) as temporary, temporary.open("wb") as stream:
            np.savez(stream, name=np.array(key), x=x, valid=valid)
    except OSError:
        return False
    return True
