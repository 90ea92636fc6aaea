"""Write named tensors as npz or safetensors: atomically, and the same bytes for the same tensors."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from vitral.atomic import atomic_write
from vitral.checkpoints.files import NUMPY_DTYPES, SAFETENSORS_DTYPES
from vitral.errors import UserError

_CODES = {dtype: code for code, dtype in SAFETENSORS_DTYPES.items()}


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON. NaN is an error, as other readers do not accept it."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    with atomic_write(path) as temporary:
        # File names need not be valid UTF-8; Python's backslash escapes of such bytes are valid JSON, too.
        temporary.write_text(text + "\n", encoding="utf-8", errors="backslashreplace")


def write_npz(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write an uncompressed npz file for `numpy.load`; bfloat16 as two untyped bytes, as JAX does."""
    for name, tensor in tensors.items():
        if _dtype(tensor) not in NUMPY_DTYPES | {"bfloat16"}:
            raise UserError(f'an npz file cannot hold "{name}" as {_dtype(tensor)}: convert it or write safetensors.')
    with atomic_write(path) as temporary, zipfile.ZipFile(temporary, "w") as archive:
        for name, tensor in tensors.items():
            member = zipfile.ZipInfo(f"{name}.npy")  # dated 1980: equal tensors make equal files
            member.create_system = 3  # likewise on every operating system
            with archive.open(member, "w", force_zip64=True) as stream:
                np.lib.format.write_array(stream, _array(tensor), version=(1, 0), allow_pickle=False)


def write_safetensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file in PyTorch's flavour. Tensors may share memory or be strided; each is written in full.

    The safetensors library is not used: its order of metadata is random, and it refuses tensors that share memory.
    """
    for name, tensor in tensors.items():
        if _dtype(tensor) not in _CODES:
            raise UserError(f'a safetensors file cannot hold "{name}" as {_dtype(tensor)}: convert it first.')
    # The widest dtypes first keep every tensor aligned, as the format requires.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    with atomic_write(path) as temporary, temporary.open("wb") as stream:
        stream.write(_safetensors_header(ordered, {"format": "pt", **(metadata or {})}))
        for _, tensor in ordered:
            _write_bytes(stream, tensor)


def _safetensors_header(tensors: list[tuple[str, torch.Tensor]], metadata: dict[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    position = 0
    for name, tensor in tensors:
        end = position + tensor.nbytes
        entries[name] = {"dtype": _CODES[_dtype(tensor)], "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    header = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header


def _write_bytes(stream: IO[bytes], tensor: torch.Tensor) -> None:
    stream.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _array(tensor: torch.Tensor) -> np.ndarray:
    plain = tensor.detach().cpu().contiguous()
    if plain.dtype == torch.bfloat16:
        return plain.view(torch.int16).numpy().view("V2")
    return plain.numpy()


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
