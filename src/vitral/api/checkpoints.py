"""`create`, `load`, `save`, `convert` and `info`: checkpoints to models and back."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from vitral.architecture import Architecture, Gelu, Pool, ResizeRule, Size, ViTConfig
from vitral.atomic import check_writable
from vitral.checkpoints.adapt import Adaptation, Weights
from vitral.checkpoints.card import Card
from vitral.checkpoints.files import open_weights, sha256
from vitral.checkpoints.formats import FORMATS as FORMATS
from vitral.checkpoints.formats import format_named
from vitral.checkpoints.formats.table import Hints
from vitral.checkpoints.hub import is_hub_name, located
from vitral.checkpoints.weights import (
    Checkpoint,
    assemble,
    describe,
    fit_to_format,
    read,
    read_adapted,
    unstated,
    weights_of,
    write,
)
from vitral.cost import Cost, cost
from vitral.display import SummaryRepr, displayed
from vitral.errors import UserError
from vitral.events import EventHandler, Note
from vitral.models.build import Model, build
from vitral.names import name_of, parse
from vitral.validation import check_options, check_value

Source = str | Path | tuple[Model, Card]  # what `load` takes, or what it returns

# Both models compute in float32; a written file may differ by the rounding of a sum that was made beforehand.
_TOLERANCE = 1e-5


def create(name: str, **changes: object) -> Model:
    """Build a model with fresh weights.

    Args:
        name: such as ViT-B/16, R50+ViT-B/16 or R152x4; @384 sets the image size.
        **changes: fields of its configuration to change, such as classes=10.

    Returns:
        The model in training mode.
    """
    return build(parse(name, **changes))


def load(
    source: str | Path,
    *,
    format: str | None = None,
    image: int | Size | None = None,
    classes: int | Sequence[str] | None = None,
    patch: int | None = None,
    channels: int | None = None,
    resize: ResizeRule | None = None,
    grid: Size | None = None,
    heads: int | None = None,
    gelu: Gelu | None = None,
    pool: Pool | None = None,
    norm_eps: float | None = None,
    part: str | None = None,
    classifier: str | None = None,
) -> tuple[Model, Card]:
    """Load a checkpoint of any supported format.

    Args:
        source: a file, a run folder, hf:owner/name or timm:name.
        format: format of the checkpoint, if not recognised (`vitral list formats`).
        image: adapt the position embeddings to this image size, one number or height and width.
        classes: replace the head by a zero head with this many classes, or with classes of these names; 0 removes it.
        patch: change the patch size.
        channels: change the number of input channels.
        resize: rule for resizing position embeddings, instead of the one of the format.
        grid: rows and columns of the checkpoint's position embeddings, if they are not square.
        heads: number of attention heads, if not stated in the file.
        gelu: GELU of the MLPs, if not stated in the file.
        pool: pooling of the tokens, if not stated in the file.
        norm_eps: epsilon of the LayerNorms, if not stated in the file.
        part: which model to read from a file with several, such as teacher.
        classifier: name of the linear layer beside a backbone that is its classifier, if it is not certain.

    Returns:
        The model in evaluation mode and its card; `card.changes` lists what was adapted, assumed and ignored.

    Raises:
        UserError: if there is no such checkpoint, or it cannot be read.
    """
    check_options(load, locals())
    names = tuple(classes) if isinstance(classes, Sequence) else ()
    if isinstance(classes, Sequence) and len(set(names)) < max(len(names), 1):
        raise UserError("classes must be one name or more, each of them once: 0 removes the head.")
    count = len(names) if isinstance(classes, Sequence) else classes
    changes = Adaptation(image, patch, channels, count, resize)
    hints = Hints(grid, heads, gelu, pool, norm_eps, part, classifier)
    checkpoint = read_adapted(source, changes, format, hints, names)
    return assemble(checkpoint.weights), checkpoint.card


def load_source(source: Source, on_event: EventHandler | None = None) -> tuple[Model, Card]:
    """Load a source; a model that is loaded already is returned as it is.

    Args:
        source: whatever `load` takes, or the model and card that it returns.
        on_event: handler of a note for each assumption about the weights.

    Returns:
        The model and its card.
    """
    if isinstance(source, tuple):
        return source
    model, card = load(source)
    for change in card.changes:
        if on_event is not None and change.startswith(("assumed: ", "ignored: ")):
            on_event(Note(f"{source}: {change}"))
    return model, card


def source_name(source: Source) -> str:
    """A source as results name it."""
    if not isinstance(source, tuple):
        return str(source)
    _, card = source
    return card.source or name_of(card.architecture)


def save(model: nn.Module, path: str | Path, card: Card | None = None, format: str = "vitral") -> Card:
    """Write a model to a file or folder, completely or not at all.

    LoRA adapters are merged in the file; the model itself is not changed.

    Args:
        model: a model of vitral, possibly inside torch.compile, DistributedDataParallel or DataParallel.
        path: the file or, for hf and timm, the folder to write.
        card: class names, preprocessing and origin of the weights; None if they are unknown.
        format: format to write (`vitral list formats`).

    Returns:
        The card as written.

    Raises:
        UserError: if it is not a model of vitral, or the format cannot express what it computes.
    """
    check_value("card", card, Card | None)
    check_value("path", path, str | os.PathLike)
    check_value("format", format, str)
    weights = weights_of(model, card.changes if card else ())
    card = write(weights, card or Card(weights.architecture), Path(path), format)
    back = describe(Path(path), format, _hints(card.architecture)).card
    with displayed(None) as handler:
        for text in unstated(card, back, format_named(format)):
            handler(Note(f"not in the file: {text}"))
    return card


@dataclass(frozen=True, repr=False)
class ConvertResult(SummaryRepr):
    """The result of a conversion, with the compared outputs."""

    source: str
    source_format: str
    target: Path
    target_format: str
    model: str
    image: Size
    difference: float  # largest |difference| of the outputs for the same image
    changes: tuple[str, ...]
    unmapped: tuple[str, ...]  # arrays of the source that no classifier uses
    unstated: tuple[str, ...]  # what the written file does not state about itself

    def summary(self) -> dict[str, str]:
        return {
            "difference": f"{self.difference:.3g}",
            "target": str(self.target),
            "format": self.target_format,
            "model": self.model,
        }


def convert(
    source: Source,
    target: str | Path,
    *,
    format: str,
    image: int | Size | None = None,
    classes: int | None = None,
    patch: int | None = None,
    channels: int | None = None,
    resize: ResizeRule | None = None,
    source_format: str | None = None,
    grid: Size | None = None,
    heads: int | None = None,
    gelu: Gelu | None = None,
    pool: Pool | None = None,
    norm_eps: float | None = None,
    part: str | None = None,
    classifier: str | None = None,
) -> ConvertResult:
    """Convert a checkpoint to another format, verified on an image.

    The written file is read back and both models are run on the same image; it is kept only if they agree.

    Args:
        source: a file, a run folder, hf:owner/name or timm:name.
        target: the file or, for hf and timm, the folder to write.
        format: format to write (`vitral list formats`).
        image: adapt the position embeddings to this image size, one number or height and width.
        classes: replace the head by a zero head with this many classes; 0 removes it.
        patch: change the patch size.
        channels: change the number of input channels.
        resize: rule for resizing position embeddings, instead of the one of the format.
        source_format: format of the source, if not recognised.
        grid: rows and columns of the source's position embeddings, if they are not square.
        heads: number of attention heads of the source, if not stated in the file.
        gelu: GELU of the MLPs, if not stated in the file.
        pool: pooling of the tokens, if not stated in the file.
        norm_eps: epsilon of the LayerNorms, if not stated in the file.
        part: which model to read from a file with several, such as teacher.
        classifier: name of the linear layer beside a backbone that is its classifier, if it is not certain.

    Returns:
        What was written, and the largest difference of the outputs.

    Raises:
        UserError: if the target exists, or the format cannot express what the model computes.
    """
    check_options(convert, locals())
    target = Path(target)
    if target.exists():
        raise UserError(f"{target} exists: choose another name, or remove it first.")
    check_writable(target)
    table = format_named(format)
    changes = Adaptation(image, patch, channels, classes, resize)
    checkpoint = _checkpoint(source, changes, source_format, Hints(grid, heads, gelu, pool, norm_eps, part, classifier))
    written = fit_to_format(checkpoint.weights, table).architecture
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".vitral-", dir=target.parent) as folder:
        temporary = Path(folder) / target.name
        card = write(checkpoint.weights, checkpoint.card, temporary, format)
        back = read(temporary, format, _hints(written))
        difference = _difference(checkpoint.weights, back.weights)
        if not difference <= _TOLERANCE:
            raise UserError(
                f"the {format} file would compute something else (difference {difference:.2g}): nothing was written."
            )
        os.replace(temporary, target)
    return ConvertResult(
        source=source_name(source),
        source_format=checkpoint.format,
        target=target,
        target_format=format,
        model=name_of(card.architecture),
        image=card.architecture.image,
        difference=difference,
        changes=card.changes,
        unmapped=checkpoint.unmapped,
        unstated=tuple(unstated(card, back.card, table)),
    )


@dataclass(frozen=True, repr=False)
class CheckpointInfo(SummaryRepr):
    """A checkpoint's description, from its headers and its bytes; no tensor is loaded."""

    path: Path
    format: str
    container: str
    bytes: int
    sha256: str
    model: str
    cost: Cost
    card: Card

    def summary(self) -> dict[str, str]:
        return {
            "model": self.model,
            "parameters": f"{self.cost.params:,}",
            "format": self.format,
            "file": f"{self.path} ({self.bytes / 1e6:,.1f} MB)",
        }


def info(
    source: str | Path,
    *,
    format: str | None = None,
    grid: Size | None = None,
    heads: int | None = None,
    gelu: Gelu | None = None,
    pool: Pool | None = None,
    norm_eps: float | None = None,
    part: str | None = None,
    classifier: str | None = None,
) -> CheckpointInfo:
    """Describe a checkpoint without loading its weights.

    Args:
        source: a file, a run folder, hf:owner/name or timm:name.
        format: format of the checkpoint, if not recognised (`vitral list formats`).
        grid: rows and columns of its position embeddings, if they are not square.
        heads: number of attention heads, if not stated in the file.
        gelu: GELU of the MLPs, if not stated in the file.
        pool: pooling of the tokens, if not stated in the file.
        norm_eps: epsilon of the LayerNorms, if not stated in the file.
        part: which model to read from a file with several, such as teacher.
        classifier: name of the linear layer beside a backbone that is its classifier, if it is not certain.

    Returns:
        Architecture, classes, preprocessing, origin, size and sha256.

    Raises:
        UserError: if there is no such checkpoint, or it is not recognised.
    """
    check_options(info, locals())
    described = describe(located(source), format, Hints(grid, heads, gelu, pool, norm_eps, part, classifier))
    path, card = described.file.path, described.card
    return CheckpointInfo(
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
    """Whether `load` takes this, by its headers; a name of the hub is taken for a model, and nothing is fetched."""
    if is_hub_name(source):
        return True
    try:
        open_weights(Path(source).expanduser())
    except (UserError, OSError):
        return False
    return True


def _checkpoint(source: Source, changes: Adaptation, format: str | None, hints: Hints) -> Checkpoint:
    if not isinstance(source, tuple):
        return read_adapted(source, changes, format, hints)
    model, card = source
    if changes != Adaptation():
        raise UserError("a loaded model is converted without changes: pass the changes to `load`.")
    return Checkpoint(card.format, weights_of(model, card.changes), replace(card, architecture=model.config), ())


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
