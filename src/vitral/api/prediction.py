"""`predict`, `classifier` and `embed`."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from vitral.api.checkpoints import Source, load_source
from vitral.api.data import Images, open_any_images, unread_images
from vitral.api.engines import Engine, SlurmOptions
from vitral.api.inference import (
    Sources,
    check_head,
    check_normalization,
    compute_device,
    in_precision,
    load_predictor,
    named_card,
    open_ensemble,
    reading_workers,
    resolve_preprocessing,
)
from vitral.api.parts import concat_parts, parts_of
from vitral.atomic import atomic_write, checked_output
from vitral.data.images import UnreadableImage
from vitral.data.preprocess import parse_deterministic
from vitral.data.sources import Split
from vitral.display import SummaryRepr, displayed
from vitral.errors import UserError
from vitral.evaluation.predict import (
    EmbeddingPool,
    Embeddings,
    Precision,
    Predictions,
    TestTimeAugmentation,
    embed_split,
)
from vitral.events import EventHandler, Note
from vitral.export.exported import PixelLogits
from vitral.kernels.packed import pack
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
    precision: Precision = "float32",
    batch: int = 32,
    device: str = "",
    parts: int = 1,
    part: Sequence[str] = (),
    engine: Engine = "local",
    slurm: SlurmOptions = (),
    parallel: int = 0,
    on_event: EventHandler | None = None,
) -> PredictionResults:
    """Predict the classes of images.

    Args:
        source: a run folder, weights, an exported file, hf:owner/name or timm:name. For the folder of several folds or
            seeds, and in Python for a list of models, probabilities are averaged.
        images: image files, and folders of them.
        output: .csv or .json file to write the predictions to.
        top: number of classes per image.
        classes: file with the names of the model's outputs in order: one per line, a table or JSON.
        ensemble: additional models to average with, each with its own preprocessing and temperature.
        tta: test-time augmentation, the views of each image to average over: the image and its mirror image (flip),
            four corners and the centre (five-crop), or these and their mirror images (ten-crop).
        preprocess: preprocessing pipeline, for weights that do not state theirs.
        precision: float32, bfloat16, fp8 (NVIDIA GPUs of the Hopper generation or newer) or int8 (linear layers of a
            Vision Transformer on a CPU); the last two are faster and approximate.
        batch: images per batch.
        device: cpu, cuda or mps; chosen automatically by default.
        parts: number of parts to divide the images into, each computed by a separate command. Parts are stored next to
            the output until all are complete; the output is the same as with one part.
        part: compute only these parts, such as 3/16, and write no output.
        engine: where parts are computed: local, on the GPUs or cores of this machine, or slurm, as a job array.
        slurm: options of sbatch as KEY=VALUE, such as partition=gpu time=4:00:00 gres=gpu:1.
        parallel: number of concurrent parts; one per GPU by default.
        on_event: handler of progress events.

    Returns:
        The most likely classes of each image with their probabilities, and the reason for each image that cannot be
        read.

    Raises:
        UserError: if an argument is wrong, or there is an `output` and no image can be read.
        PartsWritten: with `part`, once these parts are written.
    """
    divided = parts_of(predict, locals())
    check_numbers(batch=batch, top=top)
    target = checked_output(output, (".csv", ".json"), "--output") if output else None
    split = open_any_images(images)
    loading = {"classes": classes, "tta": tta, "precision": precision, "device": device, "packed": True}
    models = open_ensemble(source, ensemble, **loading, on_event=on_event)
    with displayed(on_event) as handler:
        models = models.checked(split, preprocess=preprocess, batch=batch, on_event=handler)
        if models.recheck is not None:
            handler(Note(str(models.recheck)))

        def compute(images: Split) -> Predictions:
            return models.predict(images, preprocess=preprocess, batch=batch, task="predicting", on_event=handler)

        predictions = Predictions(*concat_parts(divided.compute(split, batch, compute, handler)))
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
    named = replace(named, precision=models.precision)
    if target is not None:
        if not named.rows:
            raise UserError(f"{none_readable_message(named.unreadable[0])}: nothing was written.")
        write_results(target, named)
        divided.finish()
    return named


def none_readable_message(first: UnreadableImage) -> str:
    """The beginning of a sentence about images of which not one could be read."""
    return f"none of these images can be read, {first.path} first ({first.reason})"


def classifier(
    source: Source,
    *,
    top: int = 5,
    classes: str | Path = "",
    preprocess: str = "",
    precision: Literal["auto", "int8"] = "auto",
    device: str = "",
) -> NamedClassifier:
    """Build a function that classifies single images with low latency.

    `classify = classifier(source)`, then `classify(image)` returns the most likely classes and their probabilities; an
    image is a path, a PIL image, uint8 pixels (height, width, channels) or the bytes of a file. A list of images gives
    a list of answers. On an NVIDIA GPU it computes in half precision, unlike `predict`.

    Args:
        source: a run folder, weights, an exported file, hf:owner/name or timm:name.
        top: number of classes per image.
        classes: file with the names of the model's outputs in order: one per line, a table or JSON.
        preprocess: preprocessing pipeline, for weights that do not state theirs.
        precision: auto, or int8 on a CPU as `predict` takes it.
        device: cpu, cuda or mps; chosen automatically by default.

    Returns:
        The function.
    """
    check_numbers(top=top)
    model, card = load_predictor(source, device)
    if isinstance(source, tuple):
        model = copy.deepcopy(model)  # a classifier changes the weights of its model
    resolved = compute_device(source, device)
    check_head(source, card)
    if precision != "auto":
        model = in_precision(model, precision, source, resolved)
    card = named_card(card, classes)
    preprocessing, channels, outputs = (
        resolve_preprocessing(card, preprocess),
        card.architecture.channels,
        card.architecture.classes,
    )
    pipeline, names = parse_deterministic(preprocessing.pipeline), card.class_names or tuple(map(str, range(outputs)))
    if isinstance(model, PixelLogits):
        check_normalization(preprocessing, card)
        return NamedClassifier(partial(model.exported.top_classes, top=min(top, outputs)), pipeline, channels, names)
    likeliest = TopKClassifier(
        model,
        torch.device(resolved),
        size=pipeline.size,
        channels=channels,
        mean=preprocessing.mean,
        std=preprocessing.std,
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
    precision: Precision = "float32"

    def __iter__(self) -> Iterator[Any]:
        """Unpack as `paths, features`."""
        return iter((self.paths, self.features))

    def summary(self) -> dict[str, str]:
        unreadable = {"unreadable": f"{len(self.unreadable):,}"} if self.unreadable else {}
        return {"n": f"{len(self.paths):,}", "dim": f"{self.features.shape[1]:,}", **unreadable}

    def as_dict(self) -> dict[str, Any]:
        values = {"output": self.output, "images": len(self.paths), "features": self.features.shape[1]}
        values |= {"precision": self.precision} if self.precision != "float32" else {}
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
    precision: Precision = "float32",
    batch: int = 32,
    device: str = "",
    parts: int = 1,
    part: Sequence[str] = (),
    engine: Engine = "local",
    slurm: SlurmOptions = (),
    parallel: int = 0,
    on_event: EventHandler | None = None,
) -> EmbedResult:
    """Compute the features of images.

    Args:
        source: a run folder, weights, hf:owner/name or timm:name.
        images: image files, and folders of them.
        output: .npz file to write, with the arrays paths and features (n, dim).
        pool: the input of the head (features) or of its last layer (pre_logits), the class token (cls), or the mean of
            the patch tokens (mean).
        preprocess: preprocessing pipeline, for weights that do not state theirs.
        precision: float32, bfloat16, fp8 (NVIDIA GPUs of the Hopper generation or newer) or int8 (linear layers of a
            Vision Transformer on a CPU); the last two are faster and approximate.
        batch: images per batch.
        device: cpu, cuda or mps; chosen automatically by default.
        parts: number of parts to divide the images into, each computed by a separate command. Parts are stored next to
            the output until all are complete; the output is the same as with one part.
        part: compute only these parts, such as 3/16, and write no output.
        engine: where parts are computed: local, on the GPUs or cores of this machine, or slurm, as a job array.
        slurm: options of sbatch as KEY=VALUE, such as partition=gpu time=4:00:00 gres=gpu:1.
        parallel: number of concurrent parts; one per GPU by default.
        on_event: handler of progress events.

    Returns:
        Paths and features (n, dim) of the images that can be read; `paths, features = embed(...)` unpacks them.

    Raises:
        UserError: if an argument is wrong, or no image can be read.
        PartsWritten: with `part`, once these parts are written.
    """
    divided = parts_of(embed, locals())
    check_numbers(batch=batch)
    target = checked_output(output, (".npz",), "--output") if output else None
    split = open_any_images(images)
    model, card = load_source(source, on_event)
    preprocessing, resolved = resolve_preprocessing(card, preprocess, on_event), compute_device(source, device)
    model = in_precision(model, precision, source, resolved, on_event)
    if resolved.split(":")[0] == "cpu" and not isinstance(source, tuple) and precision != "bfloat16":  # loaded here
        pack(model)
    workers = reading_workers(resolved)
    with displayed(on_event) as handler:

        def compute(images: Split) -> Embeddings:
            options = {"batch": batch, "pool": pool, "device": resolved, "precision": precision, "workers": workers}
            return embed_split(model, images, preprocessing, **options, on_event=handler)

        embeddings = Embeddings(*concat_parts(divided.compute(split, batch, compute, handler)))
    paths = [split.keys[index] for index in embeddings.indices[embeddings.valid]]
    if not paths:
        raise UserError(f"{none_readable_message(unread(split, 0, card.architecture.channels))}: nothing was written.")
    features = embeddings.features[embeddings.valid]
    if target is not None:
        with atomic_write(target) as temporary, temporary.open("wb") as stream:
            np.savez(stream, paths=np.array(paths), features=features)
        divided.finish()
    return EmbedResult(paths, features, unread_images(split, paths), str(output), precision)


def check_numbers(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise UserError(f"{name} must be at least 1, not {number}.")
