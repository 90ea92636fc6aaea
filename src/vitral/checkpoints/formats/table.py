"""A format as a table: each entry maps a tensor of the format to one of ours, in both directions.

"Theirs" is the name or tensor in the format's file, "ours" the one in vitral's state dict.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor

from vitral.architecture import Architecture, Epsilons, Gelu, Pool, Position, Size, ViTConfig
from vitral.checkpoints.card import Card, Preprocess
from vitral.errors import UserError
from vitral.names import size_of

A = TypeVar("A")
Shape = tuple[int, ...]
Tensors = dict[str, Tensor]
# The class token's position row in a format: a row of the table, folded into the class token, or as in the model.
ClassRow = Literal["kept", "folded", "either"]

# Counts in the config.json of transformers and timm, which a file without some of its tensors contradicts.
CONFIG_COUNTS = {
    **{"num_hidden_layers": "depth", "num_register_tokens": "registers", "num_channels": "channels"},
    **{"depth": "depth", "reg_tokens": "registers", "in_chans": "channels"},
}
HINTED = ("gelu", "pool", "norm_eps")  # fields that no tensor shows and `Hints` has


@dataclass(frozen=True)
class Entry:
    """The mapping between one tensor of a format and one of ours."""

    theirs: str
    ours: str
    shape: Shape  # of their tensor, or of its `rows`
    axes: tuple[int, ...] | None = None  # permutation from their axes to ours
    rows: tuple[int, int] | None = None  # start and end of the rows to take, along the second to last axis
    part: tuple[int, int] = (0, 1)  # (k, n): it fills the k-th of n equal slices of our tensor

    def to_ours(self, array: Tensor) -> Tensor:
        """Their full tensor -> our tensor or slice of it, not yet reshaped to our shape."""
        array = array if self.rows is None else array.narrow(-2, self.rows[0], self.rows[1] - self.rows[0])
        array = array.reshape(self.shape)
        return array if self.axes is None else array.permute(self.axes)

    def to_theirs(self, array: Tensor) -> Tensor:
        """Our full tensor -> their tensor or the rows of it."""
        k, n = self.part
        array = array.chunk(n)[k]
        if self.axes is None:
            return array.reshape(self.shape)
        inverse = sorted(range(len(self.axes)), key=self.axes.__getitem__)
        return array.reshape([self.shape[axis] for axis in self.axes]).permute(inverse)


@dataclass(frozen=True)
class Hints:
    """What some files do not state and a user may have to pass."""

    grid: Size | None = None
    heads: int | None = None
    gelu: Gelu | None = None
    pool: Pool | None = None
    norm_eps: float | None = None
    part: str | None = None  # which of several models in a file
    classifier: str | None = None  # which linear layer beside a backbone
    replaces_head: bool = False  # the classifier of the file will not be used

    def __post_init__(self) -> None:
        if self.heads is not None and self.heads < 1:
            raise UserError(f"heads must be at least 1, not {self.heads}.")
        if self.norm_eps is not None and self.norm_eps <= 0:
            raise UserError(f"norm_eps must be above 0, not {self.norm_eps}.")
        if self.grid is not None and min(self.grid) < 1:
            raise UserError(f"grid takes rows and columns of at least 1, not {self.grid[0]} and {self.grid[1]}.")


@dataclass(frozen=True)
class CheckpointHeader:
    """A checkpoint without its tensors: their names and shapes, the metadata, and the JSON files next to it."""

    shapes: Mapping[str, Shape]
    config: Mapping[str, Any] | None = None  # config.json
    preprocessor: Mapping[str, Any] | None = None  # preprocessor_config.json
    metadata: Mapping[str, str] = field(default_factory=dict)
    hints: Hints = field(default_factory=Hints)
    assumed: list[str] = field(default_factory=list)  # for `Card.changes`; formats add to it with `assume`

    def assume(self, sentence: str) -> None:
        """Record what the file does not state and a format takes for granted."""
        if sentence not in self.assumed:
            self.assumed.append(sentence)

    def has(self, key: str) -> bool:
        return key in self.shapes

    def shape(self, key: str, rank: int) -> Shape:
        """The shape of a tensor that must exist and have `rank` axes."""
        shape = self.shapes.get(key)
        if shape is None:
            raise UserError(f"the file has no tensor {key}: it is incomplete or not of this format.")
        if len(shape) != rank:
            raise UserError(f"tensor {key} has the shape {list(shape)}, which does not have {rank} axes.")
        return shape

    def size(self, key: str, rank: int = 2, axis: int = 0) -> int:
        """The length of an axis of a tensor with `rank` axes, 0 if the file does not have it."""
        return self.shape(key, rank)[axis] if self.has(key) else 0

    def count(self, pattern: str) -> int:
        """The number of layers, whose indices are the group of `pattern`; they must be 0, 1, 2, ..."""
        numbers = {int(match[1]) for key in self.shapes if (match := re.match(pattern, key))}
        if numbers != set(range(len(numbers))):
            missing = min(set(range(max(numbers) + 1)) - numbers)
            raise UserError(f"the file's layers are not complete: layer {missing} is missing.")
        if not numbers:
            raise UserError("the file has no transformer layers: it is incomplete or not of this format.")
        return len(numbers)


@dataclass(frozen=True, kw_only=True)
class Format(Generic[A]):
    """How one library stores a Vision Transformer (or a ResNet): the functions take architectures of type A alone."""

    name: str
    title: str
    container: Literal["npz", "safetensors"] = "safetensors"
    recognises: Callable[[CheckpointHeader], bool]
    architecture: Callable[[CheckpointHeader], A]
    entries: Callable[[A], list[Entry]]
    unsupported_reason: Callable[[Architecture], str | None]  # why the format cannot represent an architecture
    # Where files of one architecture differ in their tensors: the entries of this file; None for `entries`.
    file_entries: Callable[[CheckpointHeader, A], list[Entry]] | None = None
    # Older keys -> the table's.
    renames: Callable[[Iterable[str]], dict[str, str]] = lambda keys: {key: key for key in keys}
    # For what no entry expresses, such as two heads whose outputs are averaged: `unpack` turns the tensors of a file,
    # by the keys of the table, into those of the table, and `pack` is its inverse. What `unpack` changes is known from
    # the header, so `assumptions` states it; `pack_changes` states what `pack` does.
    unpack: Callable[[Tensors, A], Tensors] = lambda tensors, c: tensors
    pack: Callable[[Tensors, A], Tensors] = lambda tensors, c: tensors
    pack_changes: Callable[[A], tuple[str, ...]] = lambda c: ()  # for `Card.changes`
    ignored: str = r"$^"  # pattern of keys that no classifier uses: mask tokens, optimizer state
    positions: tuple[Position, ...] = ("1d",)  # supported position embeddings; others are written as a learned table
    class_row: Callable[[ViTConfig], ClassRow] = lambda c: "kept"
    epsilons: Epsilons | None = "google"  # of ResNets and stems; None: any
    zeros: Callable[[A], dict[str, Shape]] = lambda c: {}  # unused tensors that strict readers expect
    assumptions: Callable[[CheckpointHeader, A], tuple[str, ...]] = lambda header, c: ()  # for `Card.changes`
    preprocess: Callable[[CheckpointHeader, Architecture], Preprocess | None] = lambda header, c: None
    class_names: Callable[[CheckpointHeader], tuple[str, ...]] = lambda header: ()
    config: Callable[[Card, A], dict[str, Any]] | None = None  # config.json, if the format is a folder
    preprocessor: Callable[[Card], dict[str, Any] | None] = lambda card: None  # preprocessor_config.json
    alone: Callable[[A], str | None] = lambda c: None  # why the weights need config.json to be read correctly
    file_key: Callable[[str, A], str] = lambda key, c: key  # key of the table -> key in a written file

    def table_of(self, header: CheckpointHeader, c: A) -> list[Entry]:
        """The entries of a file."""
        return self.file_entries(header, c) if self.file_entries else self.entries(c)


def read_entries(
    entries: list[Entry], theirs: Mapping[str, Tensor], shapes: Mapping[str, Shape]
) -> tuple[dict[str, Tensor], list[str]]:
    """Our state dict in float32, and the keys of the file that no entry uses; `shapes` are those of our tensors.

    Two tensors that fill the same part of one of ours are added.
    """
    parts: dict[str, dict[int, Tensor]] = {}
    rows: dict[str, int] = {}
    for entry in entries:
        rows[entry.theirs] = max(rows.get(entry.theirs, 0), entry.rows[1] if entry.rows else 0)
    for entry in entries:
        piece = entry.to_ours(_checked(entry, theirs, rows[entry.theirs]))
        pieces = parts.setdefault(entry.ours, {})
        earlier = pieces.get(entry.part[0])
        pieces[entry.part[0]] = piece if earlier is None else earlier.float() + piece.float()
    state = {key: _joined(key, pieces, shapes[key]) for key, pieces in parts.items()}
    used = {entry.theirs for entry in entries}
    return state, [key for key in theirs if key not in used]


def write_entries(entries: list[Entry], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert our tensors to those of a format; rows of one tensor are joined in the order of the entries."""
    pieces: dict[str, list[Tensor]] = {}
    for entry in entries:
        pieces.setdefault(entry.theirs, []).append(entry.to_theirs(state[entry.ours]))
    return {key: torch.cat(rows, dim=-2) if len(rows) > 1 else rows[0].contiguous() for key, rows in pieces.items()}


def heads_of(header: CheckpointHeader, depth: int, width: int) -> int:
    """The number of heads, which fused projections hide: the hint, or that of the standard size, which is recorded.

    Any number for another size would be a guess: UserError.
    """
    if header.hints.heads:
        return header.hints.heads
    standard = size_of(depth, width)
    if standard is None:
        usual = f", such as heads={width // 64} for 64 channels each" if width % 64 == 0 else ""
        raise UserError(
            f"the file does not state its number of heads, and {depth} layers of width {width} are not a standard "
            f"size: pass heads={usual}."
        )
    size = f"{depth} layers and width {width}"
    header.assume(f"assumed: {standard.heads} heads, as every standard ViT of {size}; pass heads= if not")
    return standard.heads


def grid_of_rows(header: CheckpointHeader, rows: int) -> Size:
    """The grid of a flat table of positions: the hint, or a square."""
    hint = header.hints.grid
    if hint:
        if hint[0] * hint[1] != rows:
            raise UserError(
                f"a grid of {hint[0]}x{hint[1]} does not have the {rows} positions of the file: check grid=."
            )
        return hint
    side = math.isqrt(rows)
    if side * side != rows:
        raise UserError(f"{rows} positions are not a square grid: pass the file's own grid=(rows, columns).")
    return side, side


def image_of_rows(header: CheckpointHeader, rows: int, stride: int) -> Size:
    """The image size whose patches fill a flat table of positions."""
    grid = grid_of_rows(header, rows)
    return grid[0] * stride, grid[1] * stride


def is_square(rows: int) -> bool:
    return math.isqrt(rows) ** 2 == rows


def _checked(entry: Entry, theirs: Mapping[str, Tensor], rows: int) -> Tensor:
    """Their tensor, of which all entries together take this many rows, or all of it (0)."""
    if entry.theirs not in theirs:
        raise UserError(f"the file has no tensor {entry.theirs}: it is incomplete or not of this format.")
    tensor = theirs[entry.theirs]
    shape, expected = list(tensor.shape), list(entry.shape)
    if rows and len(shape) > 1 and len(expected) > 1:
        if shape[-2] != rows:
            raise UserError(f"tensor {entry.theirs} has {shape[-2]} rows where {rows} are expected.")
        shape[-2] = expected[-2]
    # Some writers keep axes of length one, such as (1, 1, 1, channels) for GroupNorm.
    if [n for n in shape if n != 1] != [n for n in expected if n != 1]:
        raise UserError(f"tensor {entry.theirs} has the shape {list(tensor.shape)} where {expected} is expected.")
    if not tensor.is_floating_point():
        raise UserError(f"tensor {entry.theirs} has the type {tensor.dtype} where floating-point weights are expected.")
    # torch.isfinite does not take numbers of 8 bits.
    if not bool(torch.isfinite(tensor.float() if tensor.itemsize == 1 else tensor).all()):
        raise UserError(f"tensor {entry.theirs} has non-finite values (NaN or Inf): the file is damaged.")
    return tensor


def _joined(key: str, pieces: dict[int, Tensor], shape: Shape) -> Tensor:
    ordered = [pieces[k] for k in sorted(pieces)]
    rows = [piece.reshape(shape[0] // len(ordered), *shape[1:]) for piece in ordered] if len(ordered) > 1 else ordered
    array = torch.cat(rows) if len(rows) > 1 else rows[0]
    # Copied: memory-mapped tensors may be unaligned, where matrix products may round differently.
    return array.reshape(shape).to(torch.float32, copy=True, memory_format=torch.contiguous_format)


_LATER_PARTS = (
    *("rope", "swiglu", "qkv_bias", "key_bias", "patch_bias", "head_bias", "qk_norm", "pre_norm", "post_norm"),
    *("attention_norm", "mlp_norm", "map_heads", "map_mlp", "map_prefix"),
)


def later_parts(c: ViTConfig, *allowed: str) -> str | None:
    """Why a format of the paper's ViT cannot represent an architecture: a part of later ones that is not `allowed`."""
    defaults = {field.name: field.default for field in fields(ViTConfig)}
    for name in _LATER_PARTS:
        if name not in allowed and getattr(c, name) != defaults[name]:
            return f"it does not support {name}={getattr(c, name)}"
    for name, value in {"gelu": "quick", "position": "bias", "norm_place": "none"}.items():
        if name not in allowed and getattr(c, name) == value:
            return f"it does not support {name}={value}"
    if c.pool.startswith("token+") and "pool" not in allowed:
        return f"it does not support pool={c.pool}"
    return None


def other_epsilon(c: ViTConfig) -> str | None:
    """Why a format that does not state the epsilon of LayerNorm cannot represent an architecture."""
    return None if c.norm_eps == 1e-6 else f"it implies a LayerNorm epsilon of 1e-6, not {c.norm_eps:g}"


def linear(theirs: str, ours: str, inputs: int, outputs: int) -> list[Entry]:
    """A torch linear layer: weight (out, in), as ours."""
    return [Entry(f"{theirs}.weight", f"{ours}.weight", (outputs, inputs)), *bias(theirs, ours, outputs)]


def bias(theirs: str, ours: str, outputs: int) -> list[Entry]:
    return [Entry(f"{theirs}.bias", f"{ours}.bias", (outputs,))]


def norm(theirs: str, ours: str, width: int) -> list[Entry]:
    return [Entry(f"{theirs}.weight", f"{ours}.weight", (width,)), *bias(theirs, ours, width)]
