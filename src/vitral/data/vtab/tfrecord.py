"""TFRecord files with tf.train.TFExample records, which is how TFDS stores a data set; read in place, in any order.

A record is its length (8 bytes), a checksum of that, the message, and a checksum of the message, all little-endian.
The length's checksum is verified, so that a damaged or cut file is refused. The message's is not: that would mean
reading every byte of a large data set in Python, and the list of ids states the sha256 of each image anyway.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from vitral.errors import UserError

Buffer = bytes | mmap.mmap
_VARINT, _EIGHT, _SIZED, _FOUR = 0, 1, 2, 5  # how a protocol buffer's field is stored


@dataclass
class TFExample:
    """A record's features by name: numbers in lists, and where the first of its byte strings begins and ends."""

    numbers: dict[str, list[int] | list[float]] = field(default_factory=dict)
    places: dict[str, tuple[int, int]] = field(default_factory=dict)


class TFRecordFiles:
    """The records of some files, one file after the other. `frames` is (n, 3) int64: file, offset, size."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = tuple(files)
        found = [(number, *frame) for number, file in enumerate(files) for frame in _frames(file)]
        self.frames = np.array(found, np.int64).reshape(-1, 3)

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
            for kind, values in _sized(data, *parts[2]) if 2 in parts else ():
                _keep(example, name, kind, data, values)
    return example


def _keep(example: TFExample, name: str, kind: int, data: Buffer, values: tuple[int, int]) -> None:
    """The list in a feature: byte strings (1), floats (2) or integers (3), numbers packed together or each alone."""
    if kind == 1:
        first = next(_sized(data, *values), None)
        if first is not None:
            example.places[name] = first[1]
    elif kind == 2:
        spans = [span for _, _, span in _fields(data, *values)]
        example.numbers[name] = [value for a, b in spans for value in struct.unpack(f"<{(b - a) // 4}f", data[a:b])]
    elif kind == 3:
        found: list[int] = []
        for _, _, (a, b) in _fields(data, *values):
            while a < b:
                value, a = _varint(data, a)
                found.append(value - (1 << 64) if value >> 63 else value)
        example.numbers[name] = found


def _sized(data: Buffer, start: int, end: int) -> Iterator[tuple[int, tuple[int, int]]]:
    """The fields of a message that are byte strings or messages: their number, and where they begin and end."""
    return ((number, span) for number, way, span in _fields(data, start, end) if way == _SIZED)


def _fields(data: Buffer, start: int, end: int) -> Iterator[tuple[int, int, tuple[int, int]]]:
    """A message's fields: number, way of storing, and where the value begins and ends."""
    while start < end:
        key, start = _varint(data, start)
        way = key & 7
        if way == _VARINT:
            last = _varint(data, start)[1]
        elif way == _SIZED:
            size, start = _varint(data, start)
            last = start + size
        elif way in (_EIGHT, _FOUR):
            last = start + (8 if way == _EIGHT else 4)
        else:
            raise ValueError(f"no field is stored in way {way}")
        if last > end:
            raise ValueError("a field ends after its message")
        yield key >> 3, way, (start, last)
        start = last


def _varint(data: Buffer, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[place]
        value |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            return value, place


def _frames(file: Path) -> list[tuple[int, int]]:
    """Where each record's message begins, and its size."""
    found: list[tuple[int, int]] = []
    if file.stat().st_size == 0:  # a shard may be empty, and a memory map may not
        return found
    with _mapped(file) as data:
        place = 0
        while place < len(data):
            head = data[place : place + 12]
            size = int.from_bytes(head[:8], "little")
            if len(head) < 12 or checksum(head[:8]) != int.from_bytes(head[8:], "little"):
                raise UserError(f"{file} is damaged at byte {place}: copy it again.")
            found.append((place + 12, size))
            place += 16 + size
        if place > len(data):
            raise UserError(f"{file} ends within a record: copy it again.")
    return found


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
    """CRC-32C, then turned by 15 bits and moved by a constant: a checksum of checksums would be weak otherwise."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
