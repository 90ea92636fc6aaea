"""Content hashes of images: which ones a run was trained on and which it held out, independent of their names.

A run keeps them as RUN/split.json. Only stored bytes are hashed, never decoded images: the source is a folder, a
manifest, shards, Parquet or arrays of the catalog, and not so large that reading all of it would delay the run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from vitral.data.catalog.readers import ArrayReader
from vitral.data.folders import FileReader
from vitral.data.images import ImageError
from vitral.data.parquet import ParquetReader
from vitral.data.shards import TarReader
from vitral.data.splits import DataSet, Reader, Split, SubsetReader, content_bytes
from vitral.events import EventHandler, Progress, ignore_events
from vitral.validation import read_object

MAX_IMAGES = 100_000  # of a run, train and held out: hashing more would take minutes
_PARALLEL = (FileReader, TarReader)  # readers without a state of their own
_THREADS = 8  # hide the latency of a network file system
_CHUNK = 256
_HASH_DIGITS, _MARK_DIGITS = 16, 8  # 64 bits tell a million images apart; marks only spare the hashing


@dataclass(frozen=True)
class SplitContents:
    """What identifies the images of a split, in the split's order."""

    hashes: list[str]  # the first 16 digits of the sha256 of each stored image; empty if there is none to read
    marks: list[str]  # of each reader's mark: while it stays the same, so does the image


@dataclass(frozen=True)
class RunContents:
    """The images of a run: its splits by name, train included, or the reason why they were not hashed."""

    splits: dict[str, SplitContents]  # train first
    evaluated: str  # the split that the result of the run is of
    reason: str = ""

    @classmethod
    def of(cls, data: DataSet, evaluated: str, on_event: EventHandler = ignore_events) -> RunContents:
        """Hash all images of a data set; `evaluated` is the name of the split that the result of the run is of."""
        reason = not_hashed_reason(data.splits)
        if reason:
            return cls({}, evaluated, reason)
        splits = {
            split.name: SplitContents(content_hashes(split, on_event), [_mark(split, i) for i in range(len(split))])
            for split in data.splits
        }
        return cls(splits, evaluated)

    @classmethod
    def read(cls, path: Path) -> RunContents | None:
        """Those in split.json, None if there is no such file; a damaged one is a UserError."""
        if not path.is_file():
            return None
        values = read_object(path, "splits", "evaluated", "reason")
        splits = {name: SplitContents(**split) for name, split in values["splits"].items()}
        return cls(splits, values["evaluated"], values["reason"])

    def to_json(self) -> str:
        return json.dumps(asdict(self)) + "\n"

    def hashes(self, names: Iterable[str]) -> set[str]:
        """The hashes of the images of these splits."""
        return {digest for name in names for digest in self.splits[name].hashes if digest}

    def repeated(self, name: str) -> int:
        """The number of images of a split that equal a training image byte for byte."""
        trained = self.hashes(list(self.splits)[:1])  # train, whatever its name
        return sum(digest in trained for digest in self.splits[name].hashes)

    def repeats(self) -> list[str]:
        """A note per split that was held out and shares images with train."""
        counts = {name: self.repeated(name) for name in list(self.splits)[1:]}
        return [
            f"{count:,} of the {len(self.splits[name].hashes):,} {name} images equal{'s' * (count == 1)} a training "
            "image byte for byte, so that scores are too high: `vitral check` lists the copies"
            for name, count in counts.items()
            if count
        ]

    def changed(self, split: Split) -> list[str]:
        """The keys of images whose content is another than in the run's split of this name; keys and order must agree.

        Only images with a new time, size or path are read.
        """
        recorded = self.splits.get(split.name)
        if recorded is None or not_hashed_reason([split]):
            return []
        suspects = [i for i, mark in enumerate(recorded.marks) if mark != _mark(split, i)]
        hashes = content_hashes(split.select(np.array(suspects, np.int64)))
        return [split.keys[i] for i, digest in zip(suspects, hashes, strict=True) if digest != recorded.hashes[i]]


def not_hashed_reason(splits: Iterable[Split]) -> str:
    """The reason why the images of these splits are not hashed; empty if they are."""
    splits = list(splits)
    total = sum(map(len, splits))
    if total > MAX_IMAGES:
        return f"there are {total:,} images, and at most {MAX_IMAGES:,} are hashed"
    cheap = (FileReader, TarReader, ParquetReader, ArrayReader)
    if not all(isinstance(_base_reader(split), cheap) for split in splits):
        return "the images are not read from files as they are"
    return ""


def content_hashes(split: Split, on_event: EventHandler = ignore_events) -> list[str]:
    """The content hash of each image; of pixels, if the source stores pixels."""
    threads = _THREADS if isinstance(_base_reader(split), _PARALLEL) else 1
    hashes: list[str] = []
    with ThreadPoolExecutor(threads) as pool:
        starts = range(0, len(split), _CHUNK)
        for chunk in pool.map(lambda start: _chunk_hashes(split.reader, start, len(split)), starts):
            hashes += chunk
            on_event(Progress(f"hashing {split.name}", len(hashes), len(split)))
    return hashes


def _chunk_hashes(reader: Reader, start: int, end: int) -> list[str]:
    return [_content_hash(reader, index) for index in range(start, min(start + _CHUNK, end))]


def _content_hash(reader: Reader, index: int) -> str:
    try:
        data = reader.read(index)
    except ImageError:
        return ""
    content = content_bytes(data)
    return hashlib.sha256(content).hexdigest()[:_HASH_DIGITS] if len(content) else ""


def _mark(split: Split, index: int) -> str:
    mark = split.reader.mark(index).encode("utf-8", "surrogateescape")
    return hashlib.sha256(mark).hexdigest()[:_MARK_DIGITS]


def _base_reader(split: Split) -> Reader:
    return split.reader.reader if isinstance(split.reader, SubsetReader) else split.reader
