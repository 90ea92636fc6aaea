"""`search`: the images of a folder, or the patches in them, that look most like one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from vitral.api.checkpoints import load
from vitral.api.data import unread_of
from vitral.api.inspection import readable_pixels
from vitral.api.prediction import none_read, prepared
from vitral.architecture import Size
from vitral.atomic import check_writable
from vitral.checkpoints.card import Preprocess
from vitral.data.loader import PADDING, evaluation_batches
from vitral.data.preprocess import parse_deterministic
from vitral.data.sources import Split, open_images
from vitral.errors import UserError
from vitral.evaluation.features import weights_digest
from vitral.evaluation.predict import embed_split
from vitral.events import EventHandler, Progress, ignore_events
from vitral.inspection.representations import patch_features
from vitral.inspection.search import (
    FeatureIndex,
    index_images,
    index_patches,
    load_index,
    nearest_images,
    nearest_patches,
    save_index,
)
from vitral.models.build import Model
from vitral.models.device import resolve_device
from vitral.models.normalize import normalize
from vitral.serving.results import Unreadable, unread

BATCH = 16  # images at a time


class Neighbour(NamedTuple):
    """An image, or a patch of it (row and column from 0), that is like the one asked for."""

    path: str
    score: float  # cosine similarity
    row: int | None = None
    column: int | None = None


def search(
    source: str | Path,
    folder: str | Path,
    *,
    query: str | Path,
    patch: Size | None = None,
    top: int = 5,
    index: str | Path = "",
    preprocess: str = "",
    device: str = "",
    on_event: EventHandler = ignore_events,
    on_unreadable: Callable[[tuple[Unreadable, ...]], None] | None = None,
) -> list[Neighbour]:
    """The images of a folder most like `query`, or the patches most like its patch (row, column), the best first.

    The features of the folder are kept in the npz file `index`, and read from there where it exists; one that another
    model made, or that was made of other images, is refused. The image asked about is left out. `on_unreadable` hears
    which images of the folder cannot be read, where there are any.
    """
    kept = Path(index) if index else None
    if kept is not None and not kept.exists():
        check_writable(kept)
    model, card = load(source)
    model.to(resolve_device(device))
    how = prepared(card, preprocess)
    asked_for = open_images([query])
    if len(asked_for) != 1:
        raise UserError(f"{query} holds {len(asked_for):,} images: name the one to compare with.")
    _, pixels = readable_pixels(asked_for, how.pipeline, card.architecture.channels)
    asked = normalize(pixels, how.mean, how.std).to(next(model.parameters()).device)
    rows, columns = model.config.grid((asked.shape[2], asked.shape[3]))
    if patch is not None and not (0 <= patch[0] < rows and 0 <= patch[1] < columns):
        raise UserError(f"the image has {rows} rows and {columns} columns of patches: choose one of these.")
    split = open_images([folder])
    known = _index(model, split, how, patch is not None, kept, on_event)
    if on_unreadable is not None and len(known.paths) < len(split):
        on_unreadable(unread_of(split, known.paths))
    same = {Path(path).resolve(): place for place, path in enumerate(known.paths)}
    own = same.get(Path(query).expanduser().resolve())
    if patch is not None:
        feature = patch_features(model, asked)[0][patch].float().cpu().numpy()
        found = nearest_patches(known, feature, top, skip=own)
        return [Neighbour(known.paths[match.image], match.score, match.row, match.column) for match in found]
    with torch.inference_mode():
        features = model.features(asked).float().cpu().numpy()
    scores, places = nearest_images(known, features, top + 1)
    pairs = zip(places[0].tolist(), scores[0].tolist(), strict=True)
    return [Neighbour(known.paths[place], score) for place, score in pairs if place != own][:top]


def _index(
    model: Model, split: Split, how: Preprocess, patches: bool, path: Path | None, on_event: EventHandler
) -> FeatureIndex:
    """Read from its file, or made and written there."""
    origin = _origin(model, split, how) if path is not None else ""
    if path is not None and path.exists():
        known = load_index(path)
        if known.origin != origin:
            raise UserError(
                f"{path} is not the index of these images, as they are now, by this model: "
                "remove it, or name another file."
            )
        return known
    if patches:
        known = index_patches(model, _readable(model, split, how, on_event), len(split))
    else:
        device = next(model.parameters()).device
        found = embed_split(model, split, how, batch=BATCH, device=device, on_event=on_event)
        known = index_images([split.keys[i] for i in found.indices[found.valid]], found.features[found.valid])
    if not known.paths:
        raise UserError(f"{none_read(unread(split, 0, model.config.channels))}: name whole image files.")
    if path is not None:
        save_index(path, replace(known, origin=origin))
    return known


def _readable(
    model: Model, split: Split, how: Preprocess, on_event: EventHandler
) -> Iterator[tuple[Sequence[str], Tensor]]:
    """Paths (b,) and images (b, c, height, width) of those that can be read, normalised, where the model computes.

    `on_event` receives a batch when the next one is asked for, which is when it has been computed.
    """
    device, done = next(model.parameters()).device, 0
    for batch in evaluation_batches(
        split, parse_deterministic(how.pipeline), batch=BATCH, channels=model.config.channels
    ):
        kept = [split.keys[place] for place in batch.indices[batch.valid].tolist()]
        yield kept, normalize(batch.images[batch.valid].to(device), how.mean, how.std)
        done += int((batch.indices != PADDING).sum())
        on_event(Progress("embedding", done, len(split)))


def _origin(model: Model, split: Split, how: Preprocess) -> str:
    """All that features depend on: the weights, how pixels are prepared, and the images."""
    return f"weights {weights_digest(model)}, pixels {how.pipeline} {how.mean} {how.std}, images {split.stamp()}"
