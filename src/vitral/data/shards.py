"""WebDataset tar shards: key.jpg with key.cls, key.json or key.txt, read in place and in any order.

A shard is indexed once: the offset and label of each image go into SHARD.index.json next to it, or into the cache
if the shard's folder is read-only. A changed shard is indexed again. Samples without a label file have the folder in
their key as the class.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import itertools
import json
import os
import re
import tarfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitral.data.cache import DiskCache, cache_folder
from vitral.data.folders import EXTENSIONS, is_array_file
from vitral.data.images import ImageError
from vitral.data.splits import DataSet, RawSplit, files_by_split, make_dataset, natural_key
from vitral.errors import UserError

_FORMAT = 1
_LONGEST_TEXT = 1 << 20  # bytes of a label file; a sparse member may claim any length
_LABELS = ("label", "labels", "class", "cls")


class ShardSample(NamedTuple):
    """An image in a shard; a list of labels means multi-label."""

    name: str
    offset: int
    size: int
    label: str | list[str]


@dataclass(frozen=True)
class TarReader:
    """Byte ranges of files; `spans` is (n, 3) int64: shard, offset, size."""

    shards: tuple[str, ...]
    spans: np.ndarray

    def read(self, index: int) -> bytes:
        shard, offset, size = self.spans[index].tolist()
        try:
            # Opened for each read: nothing to share between processes or threads, and cheap compared with decoding.
            with open(self.shards[shard], "rb") as stream:
                stream.seek(offset)
                data = stream.read(size)
        except OSError as error:
            raise ImageError((error.strerror or "cannot be read").lower()) from error
        if len(data) < size:
            raise ImageError("the shard ends before the image does")
        return data

    def mark(self, index: int) -> str:
        shard, offset, size = self.spans[index].tolist()
        return f"{os.path.abspath(self.shards[shard])} {os.stat(self.shards[shard]).st_mtime_ns} {offset} {size}"


def expand_pattern(pattern: str) -> list[Path]:
    """Expand "shards-{000..099}.tar" or "{train,val}-*.tar" to files in natural order; each must exist."""
    files: list[str] = []
    for text in _braces(pattern):
        matches = glob.glob(text) if glob.has_magic(text) else [text]
        missing = [name for name in matches if not os.path.isfile(name)]
        if missing or not matches:
            raise UserError(f"There is no shard {(missing or [text])[0]}: check the numbers in {pattern}.")
        files += matches
    return [Path(name) for name in sorted(dict.fromkeys(files), key=natural_key)]


def read_shards(source: str, files: list[Path], *, held_out: float) -> DataSet:
    """Read the data set in these shards; `source` is its name in messages."""
    parts = {split: _read_split(members) for split, members in files_by_split(source, files).items()}
    return make_dataset(source, parts, held_out=held_out)


def index_shard(file: Path) -> list[ShardSample]:
    """The samples of a shard, from its index file if that is valid."""
    stat = file.stat()
    state = {"format": _FORMAT, "size": stat.st_size, "time": stat.st_mtime_ns}

    def load(path: Path) -> list[ShardSample] | None:
        stored = json.loads(path.read_text(encoding="utf-8"))
        samples = [ShardSample(*entry) for entry in stored["samples"]] if stored["shard"] == state else None
        return samples if samples and all(_is_valid(sample, stat.st_size) for sample in samples) else None

    for cache, key in _index_caches(file):
        if (samples := cache.read(key, load)) is not None:
            return samples
    samples = _scan(file)
    # In ASCII: names of members need not be valid UTF-8, and lone surrogates cannot be written as such.
    text = json.dumps({"shard": state, "samples": samples}, separators=(",", ":"))
    for cache, key in _index_caches(file):
        with contextlib.suppress(OSError), cache.write(key) as path:
            path.write_text(text, encoding="utf-8")
            break
    return samples


def _is_valid(sample: ShardSample, size: int) -> bool:
    """Whether an entry of an index lies inside its shard; anybody may have written the index."""
    labels = sample.label if isinstance(sample.label, list) else [sample.label]
    texts = all(isinstance(text, str) for text in (sample.name, *labels))
    numbers = type(sample.offset) is int and type(sample.size) is int
    return texts and numbers and 0 <= sample.offset <= sample.offset + sample.size <= size


def _read_split(files: list[Path]) -> RawSplit:
    keys: list[str] = []
    labels: list[Any] = []
    spans: list[tuple[int, int, int]] = []
    for number, file in enumerate(files):
        for sample in index_shard(file):
            keys.append(f"{file.name}/{sample.name}")
            labels.append(tuple(sample.label) if isinstance(sample.label, list) else sample.label)
            spans.append((number, sample.offset, sample.size))
    if not keys:
        raise UserError(f"{files[0]} contains no labelled image: it needs pairs such as 0001.jpg and 0001.cls.")
    reader = TarReader(tuple(map(str, files)), np.array(spans, np.int64))
    return RawSplit(keys, labels, reader)


def _scan(file: Path) -> list[ShardSample]:
    images: dict[str, tuple[str, int, int]] = {}
    beside: dict[str, dict[str, bytes]] = defaultdict(dict)
    try:
        with tarfile.open(file, "r:") as archive:
            for member in archive:
                folder, _, name = member.name.rpartition("/")
                stem, _, extension = name.partition(".")
                if not member.isfile() or not stem:
                    continue
                key = f"{folder}/{stem}" if folder else stem
                if f".{extension.lower().rpartition('.')[2]}" in EXTENSIONS:
                    if key not in images or (is_array_file(images[key][0]) and not is_array_file(name)):
                        images[key] = (member.name, member.offset_data, member.size)
                elif extension.lower() in ("cls", "json", "txt"):
                    stream = archive.extractfile(member)
                    beside[key][extension.lower()] = stream.read(_LONGEST_TEXT) if stream else b""
    except (tarfile.TarError, ValueError, OverflowError, EOFError) as error:
        with file.open("rb") as stream:
            packed = stream.read(2) == b"\x1f\x8b"
        hint = "it is compressed: unpack it with gunzip" if packed else str(error).rstrip(".")
        raise UserError(f"{file} is not a plain tar file: {hint}.") from error
    return [ShardSample(*image, _label(file, key, beside[key])) for key, image in images.items()]


def _label(file: Path, key: str, texts: dict[str, bytes]) -> str | list[str]:
    where = f"{file}: {key}"
    try:
        if "cls" in texts:
            return _checked(where, texts["cls"].decode().strip())
        if "json" in texts:
            entry = json.loads(texts["json"])
            value = next((entry[name] for name in _LABELS if name in entry), "") if isinstance(entry, dict) else entry
            return [_checked(where, item) for item in value] if isinstance(value, list) else _checked(where, value)
        if "txt" in texts:
            return _checked(where, texts["txt"].decode().strip())
    except (ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{where} has a label that cannot be read ({type(error).__name__}): correct it.") from error
    return _checked(where, key.rpartition("/")[0].rpartition("/")[2])


def _checked(where: str, label: Any) -> str:
    if label is None or isinstance(label, dict | list) or not str(label).strip():
        raise UserError(f"{where} has no label: add {where.rpartition('/')[2].rpartition(' ')[2]}.cls to the shard.")
    if re.fullmatch("-[0-9]+", str(label)):
        raise UserError(f"{where} has the label {str(label)[:20]}, which is out of range: classes begin at 0.")
    text = str(label)
    if re.search(r"[\ud800-\udc7f\udd00-\udfff]", text):  # half of a pair; the others stand for bytes of names
        raise UserError(f"{where} has a label that is not valid Unicode: correct it.")
    return text


def _braces(pattern: str) -> list[str]:
    pieces = re.split(r"\{([^{}]*)\}", pattern)
    choices = [[piece] if index % 2 == 0 else _choices(piece) for index, piece in enumerate(pieces)]
    return ["".join(parts) for parts in itertools.product(*choices)]


def _choices(inside: str) -> list[str]:
    numbers = re.fullmatch(r"([0-9]+)\.\.([0-9]+)", inside)
    if not numbers:
        return inside.split(",")
    first, last = numbers.groups()
    if int(last) < int(first):
        raise UserError(f"{{{inside}}} counts down: write the smaller number first.")
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]


def _index_caches(file: Path) -> list[tuple[DiskCache, str]]:
    """Where a shard's index may be: next to it, or in the user's cache folder."""
    key = hashlib.sha256(os.path.abspath(file).encode("utf-8", "surrogateescape")).hexdigest()[:24]
    return [(DiskCache(file.parent, ".index.json"), file.name), (DiskCache(cache_folder("shards"), ".json"), key)]
