"""`create`, `load`, `save`, `convert` and `info`: checkpoints to models and back."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitral.architecture import Architecture, ResizeRule, Size, ViTConfig
from vitral.atomic import check_writable
from vitral.checkpoints.adapt import Adaptation, Weights
from vitral.checkpoints.card import Card
from vitral.checkpoints.files import open_weights, sha256
from vitral.checkpoints.formats import FORMATS as FORMATS
from vitral.checkpoints.formats import format_named
from vitral.checkpoints.formats.table import Hints
from vitral.checkpoints.weights import (
    assemble,
    describe,
    is_hub_name,
    located,
    prepared,
    read,
    read_adapted,
    unstated,
    weights_of,
    write,
)
from vitral.cost import Cost, cost
from vitral.errors import UserError
from vitral.models.build import Model, build
from vitral.names import name_of, parse

# Both models compute in float32; a written file may differ by the rounding of a sum that was made beforehand.
_SAME = 1e-5


def create(name: str, **changes: Any) -> Model:
    """A model with fresh weights by name: `create("ViT-B/16@384", classes=10)`."""
    return build(parse(name, **changes))


def load(
    source: str | Path,
    *,
    format: str | None = None,
    image: int | Size | None = None,
    classes: int | None = None,
    patch: int | None = None,
    channels: int | None = None,
    resize: ResizeRule | None = None,
    grid: Size | None = None,
    heads: int | None = None,
) -> tuple[Model, Card]:
    """Load a checkpoint as a model in evaluation mode, and its card.

    Args:
        source: a weight file, a folder, `hf:owner/name` or `timm:name`. vitral's own plain state dicts load as well.
        format: name of the format, None to recognise it.
        image: adapt the weights to this image size.
        classes: replace the head by a zero-initialised one for this many classes; 0 removes it.
        patch: adapt the weights to this patch size.
        channels: adapt the weights to this many input channels.
        resize: another interpolation rule for position embeddings.
        grid: rows and columns of the position embeddings, if the file does not state them.
        heads: number of attention heads, if the file does not state it.

    Returns:
        The model, and the card. `card.changes` lists what was adapted or assumed.

    Raises:
        UserError: if the file cannot be read, or is not in a supported format.
    """
    changes = Adaptation(image, patch, channels, classes, resize)
    checkpoint = read_adapted(source, changes, format, Hints(grid, heads))
    return assemble(checkpoint.weights), checkpoint.card


def save(model: nn.Module, path: str | Path, card: Card | None = None, format: str = "vitral") -> Card:
    """Write a model atomically, in any format that can represent it.

    LoRA adapters are merged in the file; the model itself is not changed.

    Args:
        model: a model of vitral's, perhaps inside torch.compile, DistributedDataParallel or DataParallel.
        path: a file or, for formats with a config.json (timm, hf), a folder.
        card: class names, preprocessing and origin of the weights; None if they are unknown.
        format: name of the format.

    Returns:
        The card as written.

    Raises:
        UserError: if it is not a model of vitral's, or the format cannot represent it.
    """
    weights = weights_of(model, card.changes if card else ())
    return write(weights, card or Card(weights.architecture), Path(path), format)


@dataclass(frozen=True)
class Conversion:
    """The certificate of a conversion."""

    source: str
    source_format: str
    target: Path
    target_format: str
    model: str
    image: Size
    difference: float  # largest |difference| of the outputs for the same image
    changes: tuple[str, ...]
    unmapped: tuple[str, ...]  # arrays of the source that no classifier uses
    unstated: tuple[str, ...]  # what the written file does not say about itself


def convert(
    source: str | Path,
    target: str | Path,
    *,
    to: str,
    format: str | None = None,
    image: int | Size | None = None,
    classes: int | None = None,
    patch: int | None = None,
    channels: int | None = None,
    resize: ResizeRule | None = None,
    grid: Size | None = None,
    heads: int | None = None,
) -> Conversion:
    """Rewrite a checkpoint in the format `to`; read it back, run both on one image, and keep it only if they agree."""
    target = Path(target)
    if target.exists():
        raise UserError(f"{target} exists: choose another name, or remove it first.")
    check_writable(target)
    table = format_named(to)
    changes = Adaptation(image, patch, channels, classes, resize)
    checkpoint = read_adapted(source, changes, format, Hints(grid, heads))
    written = prepared(checkpoint.weights, table).architecture
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".vitral-", dir=target.parent) as folder:
        aside = Path(folder) / target.name
        card = write(checkpoint.weights, checkpoint.card, aside, to)
        back = read(aside, to, _hints(written))
        difference = _difference(checkpoint.weights, back.weights)
        if not difference <= _SAME:
            raise UserError(
                f"the {to} file would compute something else (difference {difference:.2g}): nothing was written."
            )
        os.replace(aside, target)
    return Conversion(
        source=str(source),
        source_format=checkpoint.format,
        target=target,
        target_format=to,
        model=name_of(card.architecture),
        image=card.architecture.image,
        difference=difference,
        changes=card.changes,
        unmapped=checkpoint.unmapped,
        unstated=tuple(unstated(card, back.card, table)),
    )


@dataclass(frozen=True)
class Info:
    """What a file is, from its headers and its bytes; no tensor is loaded."""

    path: Path
    format: str
    container: str
    bytes: int
    sha256: str
    model: str
    cost: Cost
    card: Card


def info(source: str | Path, *, format: str | None = None, grid: Size | None = None, heads: int | None = None) -> Info:
    """Describe a checkpoint without loading its weights."""
    described = describe(located(source), format, Hints(grid, heads))
    path, card = described.file.path, described.card
    return Info(
        path=path,
        format=described.format.name,
        container=described.file.container,
        bytes=path.stat().st_size,
        sha256=sha256(path),
        model=name_of(card.architecture),
        cost=cost(card.architecture),
        card=card,
    )


def is_model(source: str) -> bool:
    """Whether this is something to `load`, by its headers; a name of the hub is believed, and nothing is fetched."""
    if is_hub_name(source):
        return True
    try:
        open_weights(Path(source).expanduser())
    except (UserError, OSError):
        return False
    return True


def _hints(architecture: Architecture) -> Hints:
    if not isinstance(architecture, ViTConfig):
        return Hints()
    return Hints(architecture.grid(architecture.image), architecture.heads)


def _difference(ours: Weights, theirs: Weights) -> float:
    """The largest difference of the outputs for one random image of the native size."""
    config = ours.architecture
    noise = torch.rand(1, config.channels, *config.image, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        return float((assemble(ours)(2 * noise - 1) - assemble(theirs)(2 * noise - 1)).abs().max())
