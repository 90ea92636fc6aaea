"""`search`: the images of a folder, or the patches in them, most similar to one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitral.api.checkpoints import Source, load_source
from vitral.api.data import ImageLike, open_any_images, unread_images
from vitral.api.ensembles import compute_device, prepared
from vitral.api.inspection import readable_pixels
from vitral.api.prediction import none_read
from vitral.architecture import Size
from vitral.atomic import check_writable
from vitral.checkpoints.card import Preprocess
from vitral.data.images import UnreadableImage
from vitral.data.loader import PADDING, evaluation_batches
from vitral.data.preprocess import parse_deterministic
from vitral.data.sources import Split, open_images
from vitral.display import SummaryRepr, displayed
from vitral.errors import UserError
from vitral.evaluation.predict import embed_split, weights_digest
from vitral.events import EventHandler, Progress
from vitral.inspection.representations import (
    FeatureIndex,
    index_images,
    index_patches,
    load_index,
    nearest_images,
    nearest_patches,
    patch_features,
    save_index,
)
from vitral.models.build import Model
from vitral.models.model import normalize
from vitral.serving import unread

BATCH = 16


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

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "query": self.query,
            "neighbours": [neighbour._asdict() for neighbour in self.neighbours],
            "unreadable": [asdict(image) for image in self.unreadable],
        }


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
        index: .npz file that keeps the features of the folder, read where it exists.
        preprocess: how pixels are prepared, where the weights do not state it.
        device: cpu, cuda or mps; chosen when not given.
        on_event: handler of progress events.

    Returns:
        The nearest images or patches by cosine similarity, and the images that cannot be read.

    Raises:
        UserError: where an argument is wrong, or `index` belongs to another model or to other images.
    """
    kept = Path(index) if index else None
    if kept is not None and not kept.exists():
        check_writable(kept)
    model, card = load_source(source, on_event)
    model.to(compute_device(source, device))
    how = prepared(card, preprocess, on_event)
    asked = open_any_images(query)
    if len(asked) != 1:
        raise UserError(f"{query} holds {len(asked):,} images: name the one to compare with.")
    _, pixels = readable_pixels(asked, how.pipeline, card.architecture.channels)
    image = normalize(pixels, how.mean, how.std).to(next(model.parameters()).device)
    rows, columns = model.config.grid((image.shape[2], image.shape[3]))
    if patch is not None and not (0 <= patch[0] < rows and 0 <= patch[1] < columns):
        raise UserError(f"the image has {rows} rows and {columns} columns of patches: choose one of these.")
    split = open_images([folder])
    with displayed(on_event) as handler:
        indexed = _index(model, split, how, patch is not None, kept, handler)
    positions = {Path(path).resolve(): position for position, path in enumerate(indexed.paths)}
    own = positions.get(Path(query).expanduser().resolve()) if isinstance(query, str | Path) else None
    if patch is not None:
        feature = patch_features(model, image)[0][patch].float().cpu().numpy()
        matches = nearest_patches(indexed, feature, top, skip=own)
        neighbours = [Neighbour(indexed.paths[match.image], match.score, match.row, match.column) for match in matches]
    else:
        with torch.inference_mode():
            features = model.features(image).float().cpu().numpy()
        scores, indices = nearest_images(indexed, features, top + 1)
        pairs = zip(indices[0].tolist(), scores[0].tolist(), strict=True)
        neighbours = [Neighbour(indexed.paths[i], score) for i, score in pairs if i != own][:top]
    unreadable = unread_images(split, indexed.paths) if len(indexed.paths) < len(split) else ()
    return SearchResult(asked.keys[0], tuple(neighbours), unreadable)


def _index(
    model: Model, split: Split, how: Preprocess, patches: bool, path: Path | None, on_event: EventHandler
) -> FeatureIndex:
    """The index from its file, or computed and written there."""
    origin = _origin(model, split, how) if path is not None else ""
    if path is not None and path.exists():
        indexed = load_index(path)
        if indexed.origin != origin:
            raise UserError(
                f"{path} is not the index of these images, as they are now, by this model: "
                "remove it, or name another file."
            )
        return indexed
    if patches:
        indexed = index_patches(model, _readable(model, split, how, on_event), len(split))
    else:
        device = next(model.parameters()).device
        embeddings = embed_split(model, split, how, batch=BATCH, device=device, on_event=on_event)
        paths = [split.keys[i] for i in embeddings.indices[embeddings.valid]]
        indexed = index_images(paths, embeddings.features[embeddings.valid])
    if not indexed.paths:
        raise UserError(f"{none_read(unread(split, 0, model.config.channels))}: name whole image files.")
    if path is not None:
        save_index(path, replace(indexed, origin=origin))
    return indexed


def _readable(
    model: Model, split: Split, how: Preprocess, on_event: EventHandler
) -> Iterator[tuple[Sequence[str], Tensor]]:
    """Paths (batch,) and normalised images (batch, channels, height, width) of those that can be read.

    `on_event` is called when the next batch is requested, since the one before has been computed by then.
    """
    device, done = next(model.parameters()).device, 0
    for batch in evaluation_batches(
        split, parse_deterministic(how.pipeline), batch=BATCH, channels=model.config.channels
    ):
        kept = [split.keys[i] for i in batch.indices[batch.valid].tolist()]
        yield kept, normalize(batch.images[batch.valid].to(device), how.mean, how.std)
        done += int((batch.indices != PADDING).sum())
        on_event(Progress("embedding", done, len(split)))


def _origin(model: Model, split: Split, how: Preprocess) -> str:
    """What features depend on: the weights, the preprocessing and the images."""
    return f"weights {weights_digest(model)}, pixels {how.pipeline} {how.mean} {how.std}, images {split.stamp()}"
