"""Readers around readers: two splits as one, and dSprites' masks as pictures."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vitral.data.images import decode
from vitral.data.splits import Reader, Split


@dataclass(frozen=True)
class Joined:
    """The `count` images of one reader, then those of another."""

    first: Reader
    count: int
    second: Reader

    def read(self, index: int) -> bytes | np.ndarray:
        return self.first.read(index) if index < self.count else self.second.read(index - self.count)

    def mark(self, index: int) -> str:
        return self.first.mark(index) if index < self.count else self.second.mark(index - self.count)


@dataclass(frozen=True)
class Masks:
    """Pictures of zeros and ones as black and white ones in colour, uint8 (h, w, 3); others as they are."""

    stored: Reader

    def read(self, index: int) -> np.ndarray:
        data = self.stored.read(index)
        pixels = decode(data) if isinstance(data, bytes) else data
        return pixels * 255 if pixels.max() <= 1 else pixels

    def mark(self, index: int) -> str:
        return self.stored.mark(index)


def joined(first: Split, second: Split, name: str) -> Split:
    """One split of both, whose keys say from which each image came."""
    keys = [f"{split.name}/{key}" for split in (first, second) for key in split.keys]
    labels = np.concatenate([first.labels, second.labels])
    return Split(name, keys, labels, first.classes, Joined(first.reader, len(first), second.reader))
