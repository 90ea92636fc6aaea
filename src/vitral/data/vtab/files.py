"""The files of a task, in ROOT/TASK or ROOT/DATASET: TFDS's own, Parquet, tar shards or class folders.

TFDS stores tf.train.Example records in TFRecord files, which are read in place, in any order. A record is its length (8
bytes), a checksum of that, the message, and a checksum of the message, all little-endian. The length's checksum is
verified, so that a damaged or cut file is refused. The message's is not: that would mean reading every byte of a large
data set in Python, and the list of ids states the sha256 of each image anyway.
"""

from __future__ import annotations

import json
import mmap
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from vitral.data.folders import sub_folders
from vitral.data.splits import SPLIT_NAMES, files_by_split, natural_key, split_name
from vitral.data.vtab.tasks import TaskSpec, stored_split
from vitral.errors import UserError

Buffer = bytes | mmap.mmap
_VARINT, _EIGHT, _SIZED, _FOUR = 0, 1, 2, 5  # wire types of protocol buffers
_RECORDS = re.compile(r".+-([a-z_]+)\.tfrecord-([0-9]+)-of-([0-9]+)")


@dataclass(frozen=True)
class TaskFiles:
    """A task's files by TFDS's split names; for class folders the lists are empty."""

    folder: Path
    layout: str  # tfrecord, parquet, tar or folders
    files: Mapping[str, list[Path]]


def find_files(task: TaskSpec, root: Path) -> TaskFiles:
    """Find the task's files, with all the splits it needs; a folder named after the task takes precedence."""
    names = tuple(dict.fromkeys((task.name, task.dataset)))
    folder = next((root / name for name in names if (root / name).is_dir()), None)
    if folder is None:
        raise UserError(f"{root} has no folder {' or '.join(names)}: put the files of {task.builder} there.")
    task_files = _records(task, folder) or _parquet(folder)
    task_files = task_files or _by_split(folder, "tar", list(folder.rglob("*.tar"))) or _folders(folder)
    needed = {stored_split(expression): None for expression in task.expressions().values()}
    missing = [split for split in needed if split not in task_files.files]
    if missing:
        raise UserError(
            f"{task_files.folder} has no {' and no '.join(missing)} split: {task.name} needs it, so add it."
        )
    return task_files


def _records(task: TaskSpec, folder: Path) -> TaskFiles | None:
    """TFDS's files, in folders for the configuration and the version; a split must have all its shards."""
    matches = [(file, _RECORDS.fullmatch(file.name)) for file in sorted(folder.rglob("*.tfrecord-*"))]
    folders = {file.parent for file, match in matches if match}
    if task.setting:
        folders = {path for path in folders if task.setting in path.relative_to(folder).parts} or folders
    if not folders:
        return None
    source = _only(folder, folders)
    files: dict[str, list[Path]] = {}
    for file, match in matches:
        if match and file.parent == source:
            files.setdefault(match[1], []).append(file)
    for split, members in files.items():
        expected = int(members[0].name.rpartition("-")[2])
        if len(members) != expected:
            raise UserError(f"{source} has {len(members)} of the {expected} files of {split}: copy the others too.")
    return TaskFiles(source, "tfrecord", files)


def _parquet(folder: Path) -> TaskFiles | None:
    files = list(folder.rglob("*.parquet"))
    # The hub's svhn has a third split, "extra", which is not needed.
    files = [file for file in files if split_name(file.stem) or split_name(file.parent.name)] or files
    return _by_split(folder, "parquet", files)


def _by_split(folder: Path, layout: str, files: list[Path]) -> TaskFiles | None:
    if not files:
        return None
    source = _only(folder, {file.parent.parent if split_name(file.parent.name) else file.parent for file in files})
    splits = files_by_split(str(source), files)
    return TaskFiles(source, layout, {_tfds_name(split): members for split, members in splits.items()})


def _folders(folder: Path) -> TaskFiles:
    splits = {_tfds_name(SPLIT_NAMES[name.lower()]): [] for name in sub_folders(folder) if name.lower() in SPLIT_NAMES}
    if not sub_folders(folder):
        raise UserError(f"{folder} is empty: put TFRecord or Parquet files, tar shards or class folders there.")
    return TaskFiles(folder, "folders", splits or {"train": []})


def _only(folder: Path, candidates: set[Path]) -> Path:
    if len(candidates) > 1:
        names = sorted((str(path.relative_to(folder)) for path in candidates), key=natural_key)
        raise UserError(f"{folder} has several forms of the data ({', '.join(names)}): keep one of them.")
    return next(iter(candidates))


def _tfds_name(split: str) -> str:
    return "validation" if split == "val" else split


def recorded_lengths(folder: Path) -> dict[str, list[int]]:
    """The number of records of each file by split, from TFDS's dataset_info.json; empty if there is none."""
    file = folder / "dataset_info.json"
    if not file.is_file():
        return {}
    try:
        splits = json.loads(file.read_text(encoding="utf-8")).get("splits", [])
        return {split["name"]: [int(length) for length in split["shardLengths"]] for split in splits}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is not what TFDS writes ({error}): copy it again, or remove it.") from error


@dataclass
class TFExample:
    """A record's features by name: lists of numbers, and start and end of the first byte string."""

    numbers: dict[str, list[int] | list[float]] = field(default_factory=dict)
    spans: dict[str, tuple[int, int]] = field(default_factory=dict)


class TFRecordFiles:
    """The records of some files, one file after the other. `frames` is (n, 3) int64: file, offset, size."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = tuple(files)
        frames = [(number, *frame) for number, file in enumerate(files) for frame in _frames(file)]
        self.frames = np.array(frames, np.int64).reshape(-1, 3)

    def __len__(self) -> int:
        return len(self.frames)

    def lengths(self) -> list[int]:
        """Records of each file."""
        return np.bincount(self.frames[:, 0], minlength=len(self.files)).tolist()

    def examples(self, indices: Iterable[int]) -> Iterator[TFExample]:
        """These records, in this order."""
        with ExitStack() as stack:
            opened: dict[int, Buffer] = {}
            for index in indices:
                file, start, size = self.frames[index].tolist()
                if file not in opened:
                    opened[file] = stack.enter_context(_mapped(self.files[file]))
                try:
                    yield parse(opened[file], start, start + size)
                except (IndexError, ValueError, struct.error) as error:
                    raise UserError(f"{self.files[file]} is damaged at byte {start}: copy it again.") from error


def parse(data: Buffer, start: int, end: int) -> TFExample:
    """A tf.train.Example: field 1 is the Features, whose field 1 are the entries, a name (1) and a feature (2) each."""
    example = TFExample()
    for _, features in _sized(data, start, end):
        for _, entry in _sized(data, *features):
            parts = dict(_sized(data, *entry))
            name = data[slice(*parts[1])].decode()
            for field_number, values in _sized(data, *parts[2]) if 2 in parts else ():
                _keep(example, name, field_number, data, values)
    return example


def _keep(example: TFExample, name: str, field_number: int, data: Buffer, values: tuple[int, int]) -> None:
    """The list in a feature: byte strings (1), floats (2) or integers (3), numbers packed together or each alone."""
    if field_number == 1:
        first = next(_sized(data, *values), None)
        if first is not None:
            example.spans[name] = first[1]
    elif field_number == 2:
        spans = [span for _, _, span in _fields(data, *values)]
        example.numbers[name] = [value for a, b in spans for value in struct.unpack(f"<{(b - a) // 4}f", data[a:b])]
    elif field_number == 3:
        numbers: list[int] = []
        for _, _, (a, b) in _fields(data, *values):
            while a < b:
                value, a = _varint(data, a)
                numbers.append(value - (1 << 64) if value >> 63 else value)
        example.numbers[name] = numbers


def _sized(data: Buffer, start: int, end: int) -> Iterator[tuple[int, tuple[int, int]]]:
    """The fields of a message that are byte strings or messages: number, and start and end."""
    return ((number, span) for number, wire_type, span in _fields(data, start, end) if wire_type == _SIZED)


def _fields(data: Buffer, start: int, end: int) -> Iterator[tuple[int, int, tuple[int, int]]]:
    """A message's fields: number, wire type, and start and end of the value."""
    while start < end:
        key, start = _varint(data, start)
        wire_type = key & 7
        if wire_type == _VARINT:
            last = _varint(data, start)[1]
        elif wire_type == _SIZED:
            size, start = _varint(data, start)
            last = start + size
        elif wire_type in (_EIGHT, _FOUR):
            last = start + (8 if wire_type == _EIGHT else 4)
        else:
            raise ValueError(f"unknown wire type {wire_type}")
        if last > end:
            raise ValueError("a field ends after its message")
        yield key >> 3, wire_type, (start, last)
        start = last


def _varint(data: Buffer, offset: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[offset]
        value |= (byte & 0x7F) << shift
        offset, shift = offset + 1, shift + 7
        if byte < 0x80:
            return value, offset


def _frames(file: Path) -> list[tuple[int, int]]:
    """The offset and the size of each record's message."""
    frames: list[tuple[int, int]] = []
    if file.stat().st_size == 0:  # a shard may be empty, and a memory map may not
        return frames
    with _mapped(file) as data:
        offset = 0
        while offset < len(data):
            head = data[offset : offset + 12]
            size = int.from_bytes(head[:8], "little")
            if len(head) < 12 or checksum(head[:8]) != int.from_bytes(head[8:], "little"):
                raise UserError(f"{file} is damaged at byte {offset}: copy it again.")
            frames.append((offset + 12, size))
            offset += 16 + size
        if offset > len(data):
            raise UserError(f"{file} ends within a record: copy it again.")
    return frames


def _mapped(file: Path) -> mmap.mmap:
    with file.open("rb") as stream:
        return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)


def _crc_table() -> list[int]:
    """CRC-32C (Castagnoli), whose reflected polynomial is 82F63B78, for one byte at a time."""
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


_CRC = _crc_table()


def checksum(data: bytes) -> int:
    """The masked CRC-32C of TFRecord: rotated by 15 bits, plus a constant."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
