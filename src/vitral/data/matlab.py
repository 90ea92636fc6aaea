"""Arrays of numbers out of MATLAB files of version 5, plain or compressed; texts, cells and structures are left out.

After 128 bytes of heading come elements, little-endian: a type and a length, 4 bytes each, then the content, filled up
to 8 bytes. One of up to 4 bytes stands within its tag: 2 bytes of type, 2 of length, the content. An array is an
element of elements: its class, its shape, its name, its numbers (by columns, in the smallest type that holds them).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from vitral.errors import UserError

HEADING = 128
MATRIX, COMPRESSED = 14, 15
# What numbers are stored as, and the classes that arrays of numbers have.
TYPES = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
CLASSES = {6: "f8", 7: "f4", 8: "i1", 9: "u1", 10: "i2", 11: "u2", 12: "i4", 13: "u4", 14: "i8", 15: "u8"}


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Every array of numbers in the file, by its name."""
    data = path.read_bytes()
    if data[:19] != b"MATLAB 5.0 MAT-file" or data[126:HEADING] != b"IM":
        raise UserError(f"{path} is no MATLAB file of version 5: save it with -v7, or fetch it again.")
    try:
        return dict(_arrays(data[HEADING:]))
    except (struct.error, zlib.error, ValueError, KeyError) as error:
        raise UserError(f"{path} is damaged: fetch it again.") from error


def _arrays(data: bytes) -> Iterator[tuple[str, np.ndarray]]:
    for kind, content in _elements(data):
        if kind == COMPRESSED:
            yield from _arrays(zlib.decompress(content))
        elif kind == MATRIX:
            (_, flags), (_, shape), (_, name), *rest = _elements(content)
            stored = CLASSES.get(struct.unpack_from("<I", flags)[0] & 0xFF)
            if stored and rest:
                numbers = np.frombuffer(rest[0][1], f"<{TYPES[rest[0][0]]}").astype(stored)
                yield name.decode("ascii"), numbers.reshape(np.frombuffer(shape, "<i4"), order="F")


def _elements(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The type and the content of each element."""
    place = 0
    while place < len(data):
        kind, length = struct.unpack_from("<II", data, place)
        start, after = place + 8, place + 8 + length
        if kind >> 16:  # within its tag
            kind, length = kind & 0xFFFF, kind >> 16
            start, after = place + 4, place + 8
        content = data[start : start + length]
        if len(content) < length:
            raise ValueError("the file ends within an element")
        yield kind, content
        place = after if kind == COMPRESSED else after + -after % 8
