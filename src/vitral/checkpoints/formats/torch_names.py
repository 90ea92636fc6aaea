"""What the tables of PyTorch libraries share: weights lie as ours do, and only the names differ."""

from __future__ import annotations

from dataclasses import dataclass

from vitral.architecture import ViTConfig
from vitral.checkpoints.formats.table import Contents, Entry


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
