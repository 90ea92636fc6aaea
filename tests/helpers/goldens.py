"""Golden arrays in small files: `unpack` reads the .xz files of tests/golden, `pack` made them.

An .xz file holds one line of JSON (for each array its key, encoding, and the dtype and shape of each stored part) and
then the bytes of all parts. Arrays of few distinct values are stored as a table and one byte per element, mostly-zero
ones as the gaps between non-zero elements. All of it is lossless.
"""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parents[1] / "golden"
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 0, "pb": 0}]
Arrays = dict[str, np.ndarray]


def pack(arrays: Arrays) -> bytes:
    entries = {key: _encode(array) for key, array in arrays.items()}
    header = [
        [key, kind, arrays[key].shape, [[part.dtype.str, part.shape] for part in parts]]
        for key, (kind, parts) in entries.items()
    ]
    body = b"".join(_planes(part) for _, parts in entries.values() for part in parts)
    return lzma.compress(json.dumps(header).encode() + b"\n" + body, filters=FILTERS)


def unpack(data: bytes) -> Arrays:
    header, _, body = lzma.decompress(data).partition(b"\n")
    arrays, start = {}, 0
    for key, kind, shape, stored in json.loads(header):
        parts = []
        for dtype, size in stored:
            count, width = int(np.prod(size)), np.dtype(dtype).itemsize
            planes = np.frombuffer(body, np.uint8, count * width, start).reshape(width, count)
            parts.append(np.ascontiguousarray(planes.T).view(dtype).reshape(size))
            start += count * width
        arrays[key] = _decode(kind, parts, shape)
    assert start == len(body)
    return arrays


def _encode(array: np.ndarray) -> tuple[str, list[np.ndarray]]:
    if array.size < 64 or array.dtype != np.float32:
        return "dense", [array]
    bits, codes = np.unique(array.ravel().view(np.uint32), return_inverse=True)
    if len(bits) > 256:
        return "dense", [array]
    values, codes = bits.view(np.float32), codes.astype(np.uint8)
    nonzero = np.flatnonzero(codes)
    if bits[0] != 0 or len(nonzero) > array.size / 2:
        return "coded", [values, codes]
    return "sparse", [values, np.diff(nonzero, prepend=0).astype(np.uint32), codes[nonzero]]


def _decode(kind: str, parts: list[np.ndarray], shape: list[int]) -> np.ndarray:
    if kind == "dense":
        return parts[0]
    codes = parts[-1]
    if kind == "sparse":
        codes = np.zeros(int(np.prod(shape)), np.uint8)
        codes[np.cumsum(parts[1], dtype=np.int64)] = parts[2]
    return parts[0][codes].reshape(shape)


def _planes(array: np.ndarray) -> bytes:
    """First bytes of all elements, then second bytes, ...: similar bytes side by side compress better."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(-1, array.itemsize).T.tobytes()
