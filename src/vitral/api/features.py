"""`fewshot` and `search`: classification with few images per class, and image search, by frozen features."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitral.api.checkpoints import Source, load_source, source_name
from vitral.api.data import ImageLike, data_name, open_any_images, open_to_probe, unread_images
from vitral.api.inference import compute_device, reading_workers, resolve_preprocessing
from vitral.api.inspection import readable_pixels
from vitral.api.prediction import none_readable_message
from vitral.architecture import Size
from vitral.atomic import check_writable
from vitral.checkpoints.card import Card, Preprocess
from vitral.checkpoints.hub import located
from vitral.cost import cost
from vitral.data.images import UnreadableImage
from vitral.data.loader import PADDING, evaluation_batches
from vitral.data.preprocess import parse_deterministic
from vitral.data.sources import Split, open_images
from vitral.display import SummaryRepr, displayed
from vitral.errors import UserError
from vitral.evaluation.predict import SplitFeatures, cached_features, embed_split, weights_digest
from vitral.evaluation.probes import FewShotResult, knn, linear_probe
from vitral.evaluation.probes import fewshot as ridge_fewshot
from vitral.events import EventHandler, Progress
from vitral.inspection import representations
from vitral.models.build import Model
from vitral.models.model import normalize
from vitral.serving import unread

ProbeMethod = Literal["ridge", "knn", "linear"]
BATCH = 16  # images per forward pass of a search


@dataclass(frozen=True, repr=False)
class ProbeResult(SummaryRepr):
    """Accuracy of classifiers on frozen features: few-shot rows, and those trained on all of train if requested."""

    source: str
    data: str
    split: str  # the split that was tested on
    features: int
    train: int
    test: int
    shots: tuple[FewShotResult, ...]
    knn: float | None
    linear: float | None
    flops: float  # of the features, in one forward pass of each image
    kept: str  # the file of cached features
    notes: tuple[str, ...]  # about the data, and the shots that some classes have too few images for
    seeds: int = 1
    l2: float | Literal["choose"] = 1024.0

    def summary(self) -> dict[str, str]:
        rows = {f"{row.shots}-shot": f"{row.mean:.2%}" for row in self.shots}
        rows |= {} if self.knn is None else {"knn": f"{self.knn:.2%}"}
        rows |= {} if self.linear is None else {"linear": f"{self.linear:.2%}"}
        return {"n": f"{self.test:,}", **rows, "data": self.data}

    def as_dict(self) -> dict[str, Any]:
        rows = [{**asdict(row), "mean": row.mean, "interval": row.interval} for row in self.shots]
        return {**asdict(self), "shots": rows}


def fewshot(
    source: Source,
    data: str | Path,
    *,
    shots: Sequence[int] = (1, 5, 10, 25),
    seeds: int = 5,
    l2: float | Literal["choose"] = 1024.0,
    methods: Sequence[ProbeMethod] = ("ridge",),
    preprocess: str = "",
    batch: int = 32,
    device: str = "",
    on_event: EventHandler | None = None,
) -> ProbeResult:
    """Evaluate frozen features with a few images per class, as the paper does.

    The classifier is ridge regression in closed form. Features are computed once and cached.

    Args:
        source: a run folder, weights, hf:owner/name or timm:name.
        data: any data that `vitral train` accepts.
        shots: numbers of training images per class.
        seeds: draws of those images, over which mean and 95 % interval are computed.
        l2: strength of the regularisation, or choose: by cross-validation on the few images.
        methods: ridge (few-shot); knn and linear use all of train.
        preprocess: preprocessing pipeline, instead of the one that the weights state.
        batch: images per batch.
        device: cpu, cuda or mps; chosen automatically by default.
        on_event: handler of progress events.

    Returns:
        The accuracy for each number of shots and by each method.

    Raises:
        UserError: if an argument is wrong, or the data has no images to train or to test on.
    """
    if seeds < 1 or batch < 1 or not shots or min(shots) < 1:
        raise UserError("shots, seeds and batch must be at least 1.")
    opened = open_to_probe(data, None if isinstance(source, tuple) else located(source))
    held_out = opened.eval_split
    if held_out is None or not len(opened.train):
        raise UserError(f"{data} has no images to learn from, or none to test on: name a data set with both.")
    if opened.train.multilabel:
        raise UserError("few-shot classification needs one label per image.")
    model, card = load_source(source, on_event)
    preprocessing, resolved = resolve_preprocessing(card, preprocess, on_event), compute_device(source, device)

    def features(split: Split, handler: EventHandler) -> SplitFeatures:
        workers = reading_workers(resolved)
        return cached_features(
            model, split, preprocessing, batch=batch, device=resolved, workers=workers, on_event=handler
        )

    with displayed(on_event) as handler:
        train, test = features(opened.train, handler), features(held_out, handler)
    left_out = _left_out(opened.train, train, card) + _left_out(held_out, test, card)
    (train_x, train_y), (test_x, test_y) = train.readable(), test.readable()
    classes = len(opened.train.classes)
    few: list[FewShotResult] = []
    if "ridge" in methods:
        few = ridge_fewshot(train_x, train_y, test_x, test_y, classes=classes, shots=tuple(shots), seeds=seeds, l2=l2)
    near = knn(train_x, train_y, test_x, classes=classes).argmax(1) if "knn" in methods else None
    lines = linear_probe(train_x, train_y, classes=classes).logits(test_x).argmax(1) if "linear" in methods else None
    return ProbeResult(
        source=source_name(source),
        data=data_name(data),
        split=held_out.name,
        features=train_x.shape[1],
        train=len(train_y),
        test=len(test_y),
        shots=tuple(few),
        knn=None if near is None else float(np.mean(near == test_y)),
        linear=None if lines is None else float(np.mean(lines == test_y)),
        flops=2.0 * cost(card.architecture).macs * (len(train_y) + len(test_y)),
        kept=str(train.path or ""),
        notes=(
            *opened.messages,
            *left_out,
            *(_too_few(train_y, classes, row.shots) for row in few if row.drawn < row.shots * classes),
        ),
        seeds=seeds,
        l2=l2,
    )


def _left_out(split: Split, features: SplitFeatures, card: Card) -> tuple[str, ...]:
    """A note about the images that the model cannot read; raises if those are all of the split."""
    missing = np.flatnonzero(~features.valid)
    if not len(missing):
        return ()
    first = unread(split, int(missing[0]), card.architecture.channels)
    if len(missing) == len(split):
        raise UserError(f"{none_readable_message(first)}: see `vitral check`, or name other data.")
    return (f"{len(missing):,} of {len(split):,} {split.name} images cannot be read ({first.path}: {first.reason}).",)


def _too_few(labels: np.ndarray, classes: int, shots: int) -> str:
    short = int((np.bincount(labels, minlength=classes) < shots).sum())
    return f"{short:,} of {classes:,} classes have fewer than {shots:,} training images: all of these were used."


class Neighbour(NamedTuple):
    """An image, or a patch of it (row and column from 0), that is similar to the query."""

    path: str
    score: float  # cosine similarity
    row: int | None = None
    column: int | None = None


@dataclass(frozen=True, repr=False)
class SearchResult(SummaryRepr):
    """The nearest neighbours of a query, the most similar first."""

    query: str
    neighbours: tuple[Neighbour, ...]
    unreadable: tuple[UnreadableImage, ...]  # images of the folder

    def __iter__(self) -> Iterator[Neighbour]:
        return iter(self.neighbours)

    def __len__(self) -> int:
        return len(self.neighbours)

    def summary(self) -> dict[str, str]:
        best = f"{self.neighbours[0].path} ({self.neighbours[0].score:.3f})" if self.neighbours else "none"
        return {"best": best, "n": f"{len(self):,}", "query": self.query}


def search(
    source: Source,
    folder: str | Path,
    *,
    query: ImageLike,
    patch: Size | None = None,
    top: int = 5,
    index: str | Path = "",
    preprocess: str = "",
    device: str = "",
    on_event: EventHandler | None = None,
) -> SearchResult:
    """Search a folder for the images, or patches, most similar to one.

    Args:
        source: a run folder, weights, hf:owner/name or timm:name.
        folder: folder of the images to search.
        query: the image to compare with; it is left out of the result.
        patch: row and column, counted from 0, of a patch of the query to compare with all patches.
        top: number of results.
        index: .npz file that keeps the features of the folder, read if it exists.
        preprocess: preprocessing pipeline, for weights that do not state theirs.
        device: cpu, cuda or mps; chosen automatically by default.
        on_event: handler of progress events.

    Returns:
        The nearest images or patches by cosine similarity, and the images that cannot be read.

    Raises:
        UserError: if an argument is wrong, or `index` belongs to another model or to other images.
    """
    kept = Path(index) if index else None
    if kept is not None and not kept.exists():
        check_writable(kept)
    if top < 1:
        raise UserError(f"top must be at least 1, not {top}.")
    model, card = load_source(source, on_event)
    model.to(compute_device(source, device))
    preprocessing = resolve_preprocessing(card, preprocess, on_event)
    query_images = open_any_images(query)
    if len(query_images) != 1:
        raise UserError(f"{query} contains {len(query_images):,} images: name the one to compare with.")
    _, pixels = readable_pixels(query_images, preprocessing.pipeline, card.architecture.channels)
    image = normalize(pixels, preprocessing.mean, preprocessing.std).to(next(model.parameters()).device)
    rows, columns = model.config.grid((image.shape[2], image.shape[3]))
    if patch is not None and not (0 <= patch[0] < rows and 0 <= patch[1] < columns):
        raise UserError(f"the image has {rows} rows and {columns} columns of patches: choose one of these.")
    split = open_images([folder])
    with displayed(on_event) as handler:
        indexed = _index(model, split, preprocessing, patch is not None, kept, handler)
    positions = {Path(path).resolve(): position for position, path in enumerate(indexed.paths)}
    own = positions.get(Path(query).expanduser().resolve()) if isinstance(query, str | Path) else None
    if patch is not None:
        feature = representations.patch_features(model, image)[0][patch].float().cpu().numpy()
        matches = representations.nearest_patches(indexed, feature, top, skip=own)
        neighbours = [Neighbour(indexed.paths[match.image], match.score, match.row, match.column) for match in matches]
    else:
        with torch.inference_mode():
            features = model.features(image).float().cpu().numpy()
        scores, indices = representations.nearest_images(indexed, features, top + 1)
        pairs = zip(indices[0].tolist(), scores[0].tolist(), strict=True)
        neighbours = [Neighbour(indexed.paths[i], score) for i, score in pairs if i != own][:top]
    unreadable = unread_images(split, indexed.paths) if len(indexed.paths) < len(split) else ()
    return SearchResult(query_images.keys[0], tuple(neighbours), unreadable)


def _index(
    model: Model, split: Split, preprocessing: Preprocess, patches: bool, path: Path | None, on_event: EventHandler
) -> representations.FeatureIndex:
    """The index from its file, or computed and written there."""
    origin = _origin(model, split, preprocessing) if path is not None else ""
    if path is not None and path.exists():
        indexed = representations.load_index(path)
        if indexed.origin != origin:
            raise UserError(
                f"{path} is not the index of these images, as they are now, by this model: "
                "remove it, or name another file."
            )
        return indexed
    if patches:
        indexed = representations.index_patches(model, _readable(model, split, preprocessing, on_event), len(split))
    else:
        device = next(model.parameters()).device
        embeddings = embed_split(model, split, preprocessing, batch=BATCH, device=device, on_event=on_event)
        paths = [split.keys[i] for i in embeddings.indices[embeddings.valid]]
        indexed = representations.index_images(paths, embeddings.features[embeddings.valid])
    if not indexed.paths:
        raise UserError(f"{none_readable_message(unread(split, 0, model.config.channels))}: pass complete image files.")
    if path is not None:
        representations.save_index(path, replace(indexed, origin=origin))
    return indexed


def _readable(
    model: Model, split: Split, preprocessing: Preprocess, on_event: EventHandler
) -> Iterator[tuple[Sequence[str], Tensor]]:
    """Paths (batch,) and normalised images (batch, channels, height, width) of those that can be read.

    `on_event` is called when the next batch is requested, since the one before has been computed by then.
    """
    device, done = next(model.parameters()).device, 0
    for batch in evaluation_batches(
        split, parse_deterministic(preprocessing.pipeline), batch=BATCH, channels=model.config.channels
    ):
        kept = [split.keys[i] for i in batch.indices[batch.valid].tolist()]
        yield kept, normalize(batch.images[batch.valid].to(device), preprocessing.mean, preprocessing.std)
        done += int((batch.indices != PADDING).sum())
        on_event(Progress("embedding", done, len(split)))


def _origin(model: Model, split: Split, preprocessing: Preprocess) -> str:
    """What features depend on: the weights, the preprocessing and the images."""
    pixels = f"{preprocessing.pipeline} {preprocessing.mean} {preprocessing.std}"
    return f"weights {weights_digest(model)}, pixels {pixels}, images {split.stamp()}"
