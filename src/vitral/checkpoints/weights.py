"""Any checkpoint in, any format out: `read` and `write` stand between files, tables and architectures."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from vitral.architecture import Architecture, ViTConfig
from vitral.atomic import atomic_write
from vitral.checkpoints.adapt import Adaptation, Weights, adapt, to_table, with_class_row, without_class_row
from vitral.checkpoints.card import Card
from vitral.checkpoints.files import WeightFile, open_weights, read_tensors, sha256
from vitral.checkpoints.formats import FORMATS, format_named
from vitral.checkpoints.formats.own import CARD, card_of, entries
from vitral.checkpoints.formats.table import Contents, Format, Hints, heads_of, read_entries, write_entries
from vitral.checkpoints.write import write_json, write_npz, write_safetensors
from vitral.errors import UserError
from vitral.models.build import Model, build


@dataclass(frozen=True)
class Description:
    """What a file is, from its headers alone."""

    file: WeightFile
    format: Format
    contents: Contents
    card: Card


@dataclass(frozen=True)
class Checkpoint:
    """What a file holds: our arrays, the card, and the foreign keys that have no place in a classifier."""

    format: str
    weights: Weights
    card: Card
    unmapped: tuple[str, ...]


def describe(path: Path, format: str | None = None, hints: Hints | None = None) -> Description:
    """Recognise a file and derive its architecture without reading its tensors."""
    file = open_weights(path)
    table, contents = _recognise(file, format, hints or Hints())
    try:
        architecture = table.architecture(contents)
    except UserError as error:
        raise UserError(f"{file.path}, read as {table.name}: {error}") from error
    if CARD in contents.metadata and table.name == "vitral":
        return Description(file, table, contents, card_of(contents))
    names = table.class_names(contents)
    card = Card(
        architecture=architecture,
        class_names=names if len(names) == architecture.classes else (),
        preprocess=table.preprocess(contents, architecture),
        source=path.name,
        format=table.name,
    )
    return Description(file, table, contents, card)


def read(path: Path, format: str | None = None, hints: Hints | None = None) -> Checkpoint:
    """Read and check every array. A file that is not exactly the architecture it looks like is refused."""
    described = describe(path, format, hints)
    table, card = described.format, described.card
    try:
        foreign, ignored = _foreign(described)
        ours = {entry.ours: entry.shape for entry in entries(card.architecture)}
        state, left = read_entries(table.entries(card.architecture), foreign, ours)
        if left:
            some = ", ".join(left[:3]) + (", ..." if left[3:] else "")
            raise UserError(f"{len(left)} of its arrays have no place in this format ({some}): another architecture.")
    except UserError as error:
        raise UserError(f"{described.file.path}, read as {table.name}: {error}") from error
    if not card.sha256:
        card = replace(card, sha256=sha256(described.file.path))
    notes = _dtype_notes(described.file)
    return Checkpoint(table.name, Weights(card.architecture, state, (*card.changes, *notes)), card, tuple(ignored))


def read_adapted(
    source: str | Path, changes: Adaptation, format: str | None = None, hints: Hints | None = None
) -> Checkpoint:
    """Read a file, a folder or a hub name and adapt it; the card follows."""
    checkpoint = read(located(source), format, hints)
    card, before = checkpoint.card, checkpoint.weights.architecture
    if is_hub_name(str(source)) and checkpoint.format != "vitral":
        card = replace(card, source=str(source))
    weights = adapt(checkpoint.weights, **vars(changes))
    after = weights.architecture
    preprocess = card.preprocess and card.preprocess.adapted(before.image, after.image, after.channels)
    names = card.class_names if after.classes == before.classes else ()
    card = replace(card, architecture=after, preprocess=preprocess, class_names=names, changes=weights.changes)
    return replace(checkpoint, weights=weights, card=card)


def located(source: str | Path) -> Path:
    """The file or folder that a source stands for; only a hub name touches the network."""
    text = str(source)
    return fetch(text) if is_hub_name(text) else Path(source).expanduser()


def assemble(weights: Weights) -> Model:
    """A model that holds these arrays, in evaluation mode."""
    with torch.device("meta"):
        model = build(weights.architecture)
    model.load_state_dict(weights.state, strict=True, assign=True)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    return model.eval()


def write(weights: Weights, card: Card, path: Path, format: str) -> Card:
    """Write a file or, for formats with a config.json, a folder; all of it or nothing. Returns the card as written.

    `path` ending in .safetensors writes the weights alone where the format allows it.
    """
    table = format_named(format)
    weights = prepared(weights, table)
    card = replace(card, architecture=weights.architecture, changes=weights.changes)
    arrays = {table.spelling(key, card.architecture): array for key, array in _arrays(weights, table).items()}
    if table.config is None:
        _write_file(path, table, arrays, card)
    elif path.suffix == ".safetensors":
        reason = table.alone(card.architecture)
        if reason:
            raise UserError(f"{path.name} would be read differently, since {reason}: name a folder instead.")
        _write_file(path, table, arrays, card)
    else:
        with atomic_write(path, folder=True) as folder:
            _write_file(folder / "model.safetensors", table, arrays, card)
            write_json(folder / "config.json", table.config(card))
            preprocessor = table.preprocessor(card)
            if preprocessor is not None:
                write_json(folder / "preprocessor_config.json", preprocessor)
    return card


def prepared(weights: Weights, table: Format) -> Weights:
    """The same function in the words of a format, or a sentence that says why it has none."""
    reason = table.unsupported_reason(weights.architecture)
    if reason:
        raise UserError(f"format {table.name} cannot hold this model: {reason}.")
    weights = to_table(weights, table.positions)
    architecture = weights.architecture
    if not isinstance(architecture, ViTConfig):
        return weights
    row = table.class_row(architecture)
    return {"kept": with_class_row, "folded": without_class_row, "either": lambda same: same}[row](weights)


def unstated(card: Card, back: Card, table: Format) -> list[str]:
    """What a file of this format, written with one card and read with the other, does not say of itself: its reader has
    to be told, or will do otherwise at other sizes."""
    missing = _unstated_shape(card.architecture, back.architecture, table)
    if card.class_names and not back.class_names:
        missing.append("the names of its classes")
    if card.preprocess is not None and back.preprocess is None:
        missing.append("how its images were prepared")
    return missing


def _unstated_shape(written: Architecture, back: Architecture, table: Format) -> list[str]:
    if not isinstance(written, ViTConfig) or not isinstance(back, ViTConfig):
        return []
    rows, columns = written.grid(written.image)
    alone = table.config is None and table.name != "vitral"
    missing = [f"its grid is {rows}x{columns}"] if alone and rows != columns else []
    if alone and table.container == "safetensors" and _guessed_heads(written) != written.heads:
        missing.append(f"it has {written.heads} heads")
    if back.resize != written.resize:
        missing.append(f"other image sizes resized positions by rule {written.resize}, its readers do by {back.resize}")
    return missing


def _guessed_heads(architecture: ViTConfig) -> int | None:
    try:
        return heads_of(Contents({}), architecture.depth, architecture.width)
    except UserError:
        return None


def _recognise(file: WeightFile, name: str | None, hints: Hints) -> tuple[Format, Contents]:
    tables = [format_named(name)] if name else list(FORMATS.values())
    for table in tables:
        contents = _contents(file, table, hints)
        if table.recognises(contents):
            return table, contents
    some = ", ".join(list(file.headers)[:3])
    kind = f"a {name} file" if name else "a checkpoint that vitral knows"
    raise UserError(f"{file.path} is not {kind}: its arrays are called {some}, ...")


def _contents(file: WeightFile, table: Format, hints: Hints) -> Contents:
    renames = table.renames(file.headers)
    shapes = {renames[key]: header.shape for key, header in file.headers.items()}
    return Contents(shapes, file.config, file.preprocessor, file.metadata, hints)


def _foreign(described: Description) -> tuple[dict[str, Tensor], list[str]]:
    """The arrays under the table's names, and the keys that the format says to leave out."""
    tensors = read_tensors(described.file)
    renames = described.format.renames(tensors)
    pattern = re.compile(described.format.ignored)
    wanted = {entry.theirs for entry in described.format.entries(described.card.architecture)}
    ignored = [key for key, new in renames.items() if pattern.match(new) and new not in wanted]
    for key in ignored:
        del tensors[key]
    return {renames[key]: array for key, array in tensors.items()}, ignored


def _arrays(weights: Weights, table: Format) -> Mapping[str, Tensor]:
    arrays = write_entries(table.entries(weights.architecture), weights.state)
    for key, shape in table.zeros(weights.architecture).items():
        arrays[key] = torch.zeros(shape)
    return arrays


def _write_file(path: Path, table: Format, arrays: Mapping[str, Tensor], card: Card) -> None:
    if table.container == "npz":
        write_npz(path, arrays)
    else:
        write_safetensors(path, arrays, {CARD: card.to_json()} if table.name == "vitral" else None)


def _dtype_notes(file: WeightFile) -> list[str]:
    kinds = sorted({header.dtype for header in file.headers.values()} - {"float32"})
    floats = [kind for kind in kinds if kind in ("float16", "bfloat16", "float64")]
    exact = {"float16": " (exact)", "bfloat16": " (exact)", "float64": " (rounded)"}
    return [f"weights {kind} -> float32{exact[kind]}" for kind in floats]


# One of the first group holds the weights; the second says what they are.
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_BESIDE = ("config.json", "preprocessor_config.json")


def is_hub_name(source: str) -> bool:
    return source.startswith(("hf:", "timm:"))


def fetch(name: str) -> Path:
    """The folder in huggingface_hub's cache with the weights of `hf:owner/name[@revision]` or `timm:name[@revision]`.

    Files that are in the cache are not fetched again; HF_HUB_OFFLINE=1 and HF_HOME are honoured.
    """
    prefix, _, rest = name.partition(":")
    repository, _, revision = rest.partition("@")
    if prefix == "timm":
        repository = f"timm/{repository.removeprefix('timm/')}"
    if repository.count("/") != 1 or repository.endswith("/"):
        raise UserError(f"{name} is not a hub name: write hf:owner/name or timm:name.")
    patterns = [*_BESIDE, "*.safetensors", "*.safetensors.index.json"]
    folder = _snapshot(name, repository, revision or None, patterns)
    if not any((folder / file).exists() for file in _WEIGHTS):
        # Old repositories have pickles alone; they are read without running what is in them.
        folder = _snapshot(name, repository, revision or None, [*_BESIDE, "*.bin", "*.bin.index.json"])
    return folder


def _snapshot(name: str, repository: str, revision: str | None, patterns: list[str]) -> Path:
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError as error:
        raise UserError(f"{name} is on the Hugging Face hub: pip install 'vitral[hub]' to fetch it.") from error
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=patterns))
    # Some releases of the hub raise a plain ConnectionError where it is switched to offline.
    except (errors.LocalEntryNotFoundError, ConnectionError) as error:
        raise UserError(
            f"{name} is not in the cache and the hub cannot be reached: go online once, or name a file."
        ) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise UserError(f"{name}: the hub has no such repository, or it needs `hf auth login`.") from error
    except errors.HfHubHTTPError as error:
        raise UserError(f"{name}: the hub answered with an error ({error}).") from error
