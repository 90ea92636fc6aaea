"""A format is a table: each entry names a foreign array, ours, and the layout between them, and is read both ways."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from vitral.architecture import Architecture, Position, Size, ViTConfig
from vitral.checkpoints.card import Card, Preprocess
from vitral.errors import UserError
from vitral.names import size_of

Shape = tuple[int, ...]
# What becomes of the class token's position row: a row of the table, summed into the token, or as the model has it.
ClassRow = Literal["kept", "folded", "either"]


@dataclass(frozen=True)
class Entry:
    """One line of a table.

    `shape` is the foreign array's shape (or that of its rows `rows`, along the last axis but one); `axes` reorders it
    into ours, None keeping the order. `part` = (k, n) says that it fills the k-th of n equal slices of our array.
    """

    theirs: str
    ours: str
    shape: Shape
    axes: tuple[int, ...] | None = None
    rows: tuple[int, int] | None = None
    part: tuple[int, int] = (0, 1)

    def to_ours(self, array: Tensor) -> Tensor:
        """Foreign array, whole -> our array or slice, still to be shaped like ours."""
        array = array if self.rows is None else array.narrow(-2, self.rows[0], self.rows[1] - self.rows[0])
        array = array.reshape(self.shape)
        return array if self.axes is None else array.permute(self.axes)

    def to_theirs(self, array: Tensor) -> Tensor:
        """Our array, whole -> the foreign array or its rows."""
        k, n = self.part
        array = array.chunk(n)[k]
        if self.axes is None:
            return array.reshape(self.shape)
        inverse = sorted(range(len(self.axes)), key=self.axes.__getitem__)
        return array.reshape([self.shape[axis] for axis in self.axes]).permute(inverse)


@dataclass(frozen=True)
class Hints:
    """What a user may have to add, because some formats do not hold it."""

    grid: Size | None = None
    heads: int | None = None


@dataclass(frozen=True)
class Contents:
    """What a file says before its tensors are read: names and shapes, and the configuration beside it."""

    shapes: Mapping[str, Shape]
    config: Mapping[str, Any] | None = None
    preprocessor: Mapping[str, Any] | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    hints: Hints = field(default_factory=Hints)

    def has(self, key: str) -> bool:
        return key in self.shapes

    def shape(self, key: str, rank: int) -> Shape:
        """The shape of an array that must be there, with this many axes."""
        found = self.shapes.get(key)
        if found is None:
            raise UserError(f"the file has no array {key}: it is incomplete or of another kind.")
        if len(found) != rank:
            raise UserError(f"array {key} has the shape {list(found)}, which is not one of {rank} axes.")
        return found

    def count(self, pattern: str) -> int:
        """How many different numbers stand in the group of `pattern`; they must be 0, 1, 2, ..."""
        numbers = {int(match[1]) for key in self.shapes if (match := re.match(pattern, key))}
        if numbers != set(range(len(numbers))):
            missing = min(set(range(max(numbers) + 1)) - numbers)
            raise UserError(f"the file's layers are not complete: number {missing} is missing.")
        if not numbers:
            raise UserError("the file has no transformer layers: it is incomplete or of another kind.")
        return len(numbers)


def _no_preprocess(contents: Contents, architecture: Architecture) -> Preprocess | None:
    return None


def _no_names(contents: Contents) -> tuple[str, ...]:
    return ()


def _as_it_is(shapes: Iterable[str]) -> dict[str, str]:
    return {key: key for key in shapes}


@dataclass(frozen=True)
class Format:
    """How one library writes a Vision Transformer (or a ResNet) down."""

    name: str
    title: str
    container: Literal["npz", "safetensors"]
    recognises: Callable[[Contents], bool]
    architecture: Callable[[Contents], Architecture]
    entries: Callable[[Architecture], list[Entry]]
    unsupported_reason: Callable[
        [Architecture], str | None
    ]  # why this format cannot say what the architecture computes
    # Older and wrapped spellings: every key of a file -> the key of the table.
    renames: Callable[[Iterable[str]], dict[str, str]] = _as_it_is
    ignored: str = r"$^"  # keys that belong to no classifier: mask tokens, optimizer state
    positions: tuple[Position, ...] = ("1d",)  # the kinds it holds as they are; others that are added become a table
    class_row: Callable[[ViTConfig], ClassRow] = lambda c: "kept"
    zeros: Callable[[Architecture], dict[str, Shape]] = lambda c: {}  # arrays a strict reader wants and nothing uses
    preprocess: Callable[[Contents, Architecture], Preprocess | None] = _no_preprocess
    class_names: Callable[[Contents], tuple[str, ...]] = _no_names
    config: Callable[[Card], dict[str, Any]] | None = None  # config.json, for formats that are a folder
    preprocessor: Callable[[Card], dict[str, Any] | None] = lambda card: None  # preprocessor_config.json beside it
    alone: Callable[[Architecture], str | None] = lambda c: None  # why the weights would mean something else without it
    spelling: Callable[[str, Architecture], str] = lambda key, c: key  # a key of the table -> the key in the file


def read_entries(
    entries: list[Entry], foreign: Mapping[str, Tensor], shapes: Mapping[str, Shape]
) -> tuple[dict[str, Tensor], list[str]]:
    """Our state dict, float32, and the foreign keys that no entry asked for. `shapes` are those of our arrays."""
    parts: dict[str, dict[int, Tensor]] = {}
    for entry in entries:
        array = _checked(entry, foreign)
        parts.setdefault(entry.ours, {})[entry.part[0]] = entry.to_ours(array)
    state = {key: _joined(key, pieces, shapes[key]) for key, pieces in parts.items()}
    used = {entry.theirs for entry in entries}
    return state, [key for key in foreign if key not in used]


def write_entries(entries: list[Entry], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The foreign arrays; rows of one table are joined in the order of the entries."""
    pieces: dict[str, list[Tensor]] = {}
    for entry in entries:
        pieces.setdefault(entry.theirs, []).append(entry.to_theirs(state[entry.ours]))
    return {key: torch.cat(rows, dim=-2) if len(rows) > 1 else rows[0].contiguous() for key, rows in pieces.items()}


def heads_of(contents: Contents, depth: int, width: int) -> int:
    """The head count, which fused projections do not show: told, known by the size, or 64 channels each."""
    if contents.hints.heads:
        return contents.hints.heads
    known = size_of(depth, width)
    if known:
        return known.heads
    if width % 64:
        raise UserError(f"the file does not say how many heads share its width of {width}: pass heads=.")
    return width // 64


def grid_of_rows(contents: Contents, rows: int) -> Size:
    """The grid behind a flat table of positions: told, or square."""
    told = contents.hints.grid
    if told:
        if told[0] * told[1] != rows:
            raise UserError(
                f"a grid of {told[0]}x{told[1]} does not have the {rows} positions of the file: check grid=."
            )
        return told
    side = math.isqrt(rows)
    if side * side != rows:
        raise UserError(f"{rows} positions are not a square grid: pass the file's own grid=(rows, columns).")
    return side, side


def position_entries(key: str, c: ViTConfig) -> list[Entry]:
    """A table (1, n, d) or, with the class token's row in front, (1, 1 + n, d)."""
    rows, columns = c.grid(c.image)
    n, first = rows * columns, int(c.class_row)
    row = [Entry(key, "positions.0.class_row", (1, 1, c.width), rows=(0, 1))] if first else []
    return [*row, Entry(key, "positions.0.table", (1, n, c.width), rows=(first, first + n))]


def is_square(rows: int) -> bool:
    return math.isqrt(rows) ** 2 == rows


def _checked(entry: Entry, foreign: Mapping[str, Tensor]) -> Tensor:
    if entry.theirs not in foreign:
        raise UserError(f"the file has no array {entry.theirs}: it is incomplete or of another kind.")
    array = foreign[entry.theirs]
    found = list(array.shape)
    expected = list(entry.shape)
    if entry.rows is not None and len(found) > 1 and len(expected) > 1:
        if found[-2] < entry.rows[1]:
            raise UserError(f"array {entry.theirs} has {found[-2]} rows where {entry.rows[1]} are expected.")
        found[-2] = expected[-2]
    # Some writers keep axes of length one (GroupNorm as (1, 1, 1, c)); they carry nothing.
    if [n for n in found if n != 1] != [n for n in expected if n != 1]:
        raise UserError(f"array {entry.theirs} has the shape {list(array.shape)} where {expected} is expected.")
    if not array.is_floating_point() or not bool(torch.isfinite(array).all()):
        raise UserError(f"array {entry.theirs} holds values that are not finite numbers: the file is damaged.")
    return array


def _joined(key: str, pieces: dict[int, Tensor], shape: Shape) -> Tensor:
    ordered = [pieces[k] for k in sorted(pieces)]
    rows = [piece.reshape(shape[0] // len(ordered), *shape[1:]) for piece in ordered] if len(ordered) > 1 else ordered
    array = torch.cat(rows) if len(rows) > 1 else rows[0]
    # A copy of its own: memory-mapped arrays lie at odd addresses, where matrix products may round differently.
    return array.reshape(shape).to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def linear(theirs: str, ours: str, inputs: int, outputs: int) -> list[Entry]:
    """A torch linear layer: weight (out, in), as ours."""
    return [Entry(f"{theirs}.weight", f"{ours}.weight", (outputs, inputs)), *bias(theirs, ours, outputs)]


def bias(theirs: str, ours: str, outputs: int) -> list[Entry]:
    return [Entry(f"{theirs}.bias", f"{ours}.bias", (outputs,))]


def norm(theirs: str, ours: str, width: int) -> list[Entry]:
    return [Entry(f"{theirs}.weight", f"{ours}.weight", (width,)), *bias(theirs, ours, width)]


def patches(theirs: str, c: ViTConfig) -> list[Entry]:
    kernel = (c.width, c.channels, c.patch, c.patch)
    return [Entry(f"{theirs}.weight", "embed.weight", kernel), *bias(theirs, "embed", c.width)]


def separate_qkv(theirs: tuple[str, str, str], ours: str, width: int) -> list[Entry]:
    """Query, key and value kept apart: each fills a third of our fused projection."""
    entries = []
    for k, name in enumerate(theirs):
        entries.append(Entry(f"{name}.weight", f"{ours}.weight", (width, width), part=(k, 3)))
        entries.append(Entry(f"{name}.bias", f"{ours}.bias", (width,), part=(k, 3)))
    return entries


@dataclass(frozen=True)
class Sizes:
    """What the shapes of any PyTorch ViT show."""

    width: int
    channels: int
    patch: int
    mlp: int
    depth: int


def read_sizes(contents: Contents, projection: str, hidden: str, block: str) -> Sizes:
    """From the patch convolution, the first dense layer of block 0, and a pattern that finds the blocks' numbers."""
    width, channels, patch, _ = contents.shape(projection, 4)
    mlp = contents.shape(hidden, 2)[0]
    return Sizes(width, channels, patch, mlp, contents.count(block))
