"""`predict`, `classifier` and `embed`."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitral.api.checkpoints import Source, load_source
from vitral.api.data import Images, open_any_images, unread_images
from vitral.api.ensembles import (
    Sources,
    check_head,
    check_normalization,
    compute_device,
    load_predictor,
    named_card,
    open_ensemble,
    prepared,
    reading_workers,
)
from vitral.atomic import atomic_write, checked_output
from vitral.checkpoints.card import Card
from vitral.data.images import UnreadableImage, encode_png
from vitral.data.loader import read_pixels
from vitral.data.preprocess import parse_deterministic
from vitral.data.sources import open_data
from vitral.display import SummaryRepr, displayed
from vitral.errors import UserError
from vitral.evaluation.averaging import TestTimeAugmentation
from vitral.evaluation.predict import EmbeddingPool, embed_split
from vitral.events import EventHandler
from vitral.export.exported import PixelLogits
from vitral.kernels.packed import pack
from vitral.models.build import Model
from vitral.serving import (
    NamedClassifier,
    PredictionResults,
    TopKClassifier,
    collect_predictions,
    unread,
    write_results,
)


def predict(
    source: Sources,
    images: Images,
    *,
    output: str | Path = "",
    top: int = 5,
    classes: str | Path = "",
    ensemble: Sequence[str | Path] = (),
    tta: TestTimeAugmentation | None = None,
    preprocess: str = "",
    batch: int = 32,
    device: str = "",
    on_event: EventHandler | None = None,
) -> PredictionResults:
    """Predict the classes of images.

    Args:
        source: a run folder, weights, an exported file, hf:owner/name or timm:name; the folder of several folds or
            seeds stands for all of them, and in Python a list for several models: their probabilities are averaged.
        images: image files, and folders of them.
        output: .csv or .json file to write the predictions to.
        top: number of classes per image.
        classes: file that names the model's outputs in order: a name per line, a table or JSON.
        ensemble: further models to average with, each with its own preprocessing and temperature.
        tta: test-time augmentation, views of each image to average over: the image and its mirror image (flip), four
            corners and the centre (five-crop), or these and their mirror images (ten-crop).
        preprocess: how pixels are prepared, where the weights do not state it.
        batch: images per batch.
        device: cpu, cuda or mps; chosen when not given.
        on_event: handler of progress events.

    Returns:
        The most likely classes of each image with their probabilities, and the reason for each image that cannot be
        read.

    Raises:
        UserError: where an argument is wrong, or there is an `output` and no image can be read.
    """
    check_numbers(batch=batch, top=top)
    target = checked_output(output, (".csv", ".json"), "--output") if output else None
    split = open_any_images(images)
    models = open_ensemble(source, ensemble, classes=classes, tta=tta, device=device, packed=True, on_event=on_event)
    with displayed(on_event) as handler:
        predictions = models.predict(split, preprocess=preprocess, batch=batch, task="predicting", on_event=handler)
    card = models.card
    named = collect_predictions(
        predictions,
        split,
        card.class_names,
        top=top,
        sigmoid=card.multilabel,
        temperature=models.temperature,
        channels=card.architecture.channels,
    )
    if target is not None:
        if not named.rows:
            raise UserError(f"{none_read(named.unreadable[0])}: nothing was written.")
        write_results(target, named)
    return named


def none_read(first: UnreadableImage) -> str:
    """The beginning of a sentence about images of which not one could be read."""
    return f"none of these images can be read, {first.path} first ({first.reason})"


def classifier(
    source: Source, *, top: int = 5, classes: str | Path = "", preprocess: str = "", device: str = ""
) -> NamedClassifier:
    """Build a function that classifies single images with low latency.

    `classify = classifier(source)`, then `classify(image)` returns the most likely classes and their probabilities; an
    image is a path, a PIL image, uint8 pixels (height, width, channels) or the bytes of a file. A list of images gives
    a list of answers. On an NVIDIA GPU it computes in half precision, unlike `predict`.

    Args:
        source: a run folder, weights, an exported file, hf:owner/name or timm:name.
        top: number of classes per image.
        classes: file that names the model's outputs in order: a name per line, a table or JSON.
        preprocess: how pixels are prepared, where the weights do not state it.
        device: cpu, cuda or mps; chosen when not given.

    Returns:
        The function.
    """
    check_numbers(top=top)
    model, card = load_predictor(source, device)
    if isinstance(source, tuple):
        model = copy.deepcopy(model)  # a classifier changes the weights of its model
    resolved = compute_device(source, device)
    check_head(source, card)
    card = named_card(card, classes)
    how, channels, outputs = prepared(card, preprocess), card.architecture.channels, card.architecture.classes
    pipeline, names = parse_deterministic(how.pipeline), card.class_names or tuple(map(str, range(outputs)))
    if isinstance(model, PixelLogits):
        check_normalization(how, card)
        return NamedClassifier(partial(model.exported.top_classes, top=min(top, outputs)), pipeline, channels, names)
    likeliest = TopKClassifier(
        model,
        torch.device(resolved),
        size=pipeline.size,
        channels=channels,
        mean=how.mean,
        std=how.std,
        top=min(top, outputs),
        sigmoid=card.multilabel,
        temperature=card.temperature,
    )
    return NamedClassifier(likeliest, pipeline, channels, names)


@dataclass(frozen=True, repr=False)
class EmbedResult(SummaryRepr):
    """The features of images, in their order."""

    paths: list[str]  # or "image 0", ... for images in memory
    features: np.ndarray  # (n, dim) float32
    unreadable: tuple[UnreadableImage, ...]
    output: str  # the file they were written to

    def __iter__(self) -> Iterator[Any]:
        """Unpack as `paths, features`."""
        return iter((self.paths, self.features))

    def summary(self) -> dict[str, str]:
        unreadable = {"unreadable": f"{len(self.unreadable):,}"} if self.unreadable else {}
        return {"n": f"{len(self.paths):,}", "dim": f"{self.features.shape[1]:,}", **unreadable}

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready: the features themselves where they were not written to a file."""
        values = {"output": self.output, "images": len(self.paths), "features": self.features.shape[1]}
        if not self.output:
            values |= {"paths": self.paths, "features": self.features.tolist()}
        return {**values, "unreadable": [asdict(image) for image in self.unreadable]}


def embed(
    source: Source,
    images: Images,
    *,
    output: str | Path = "",
    pool: EmbeddingPool = "features",
    preprocess: str = "",
    batch: int = 32,
    device: str = "",
    on_event: EventHandler | None = None,
) -> EmbedResult:
    """Compute the features of images.

    Args:
        source: a run folder, weights, hf:owner/name or timm:name.
        images: image files, and folders of them.
        output: .npz file to write, with the arrays paths and features (n, dim).
        pool: the input of the head (features) or of its last layer (pre_logits), the class token (cls), or the mean of
            the patch tokens (mean).
        preprocess: how pixels are prepared, where the weights do not state it.
        batch: images per batch.
        device: cpu, cuda or mps; chosen when not given.
        on_event: handler of progress events.

    Returns:
        Paths and features (n, dim) of the images that can be read; `paths, features = embed(...)` unpacks them.

    Raises:
        UserError: where an argument is wrong, or no image can be read.
    """
    check_numbers(batch=batch)
    target = checked_output(output, (".npz",), "--output") if output else None
    split = open_any_images(images)
    model, card, resolved, workers = _predictor(source, device, on_event)
    with displayed(on_event) as handler:
        embeddings = embed_split(
            model,
            split,
            prepared(card, preprocess, on_event),
            batch=batch,
            pool=pool,
            device=resolved,
            workers=workers,
            on_event=handler,
        )
    paths = [split.keys[index] for index in embeddings.indices[embeddings.valid]]
    if not paths:
        raise UserError(f"{none_read(unread(split, 0, card.architecture.channels))}: nothing was written.")
    features = embeddings.features[embeddings.valid]
    if target is not None:
        with atomic_write(target) as temporary, temporary.open("wb") as stream:
            np.savez(stream, paths=np.array(paths), features=features)
    return EmbedResult(paths, features, unread_images(split, paths), str(output))


def write_sample_images(data: str | Path, folder: Path, *, count: int) -> list[Path]:
    """Write held-out images as PNG files named by their class, taking one of each class in turn.

    Args:
        data: what `vitral train` takes.
        folder: where to write them.
        count: number of images.

    Returns:
        The paths of the files.
    """
    split = open_data(data).eval_split
    if split is None or split.multilabel:
        raise UserError(f"{data} has no held-out images with one label each.")
    per_class = [np.flatnonzero(split.labels == label) for label in range(len(split.classes))]
    chosen = [int(indices[turn]) for turn in range(count) for indices in per_class if turn < len(indices)][:count]
    paths = []
    for number, index in enumerate(chosen):
        path = folder / f"{split.classes[split.labels[index]]}-{number}.png"
        with atomic_write(path) as temporary:
            temporary.write_bytes(encode_png(read_pixels(split, index, 3)))
        paths.append(path)
    return paths


def _predictor(source: Source, device: str, on_event: EventHandler | None) -> tuple[Model, Card, str, int]:
    """A model to predict with, its card, its device, and the number of processes that read images.

    On a CPU a model that was loaded here is packed, which changes the last bits of a float32: `evaluate`, which repeats
    a run's own numbers exactly, uses a plain one.
    """
    model, card = load_source(source, on_event)
    resolved = compute_device(source, device)
    if resolved.split(":")[0] == "cpu" and not isinstance(source, tuple):
        pack(model)
    return model, card, resolved, reading_workers(resolved)


def check_numbers(**numbers: int) -> None:
    """Refuse numbers below 1."""
    for name, number in numbers.items():
        if number < 1:
            raise UserError(f"{name} must be at least 1, not {number}.")
