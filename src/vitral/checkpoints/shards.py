"""Sharded training states: torch.distributed.checkpoint with its index as JSON.

torch keeps the index in `.metadata`, a pickle that runs code when it is read. A run folder may come from anybody, so
the index is written as `index.json` and `.metadata` is never opened. The shards themselves are files of `torch.save`,
which torch reads with `weights_only=True`; entries that it would unpickle (anything but tensors) have no place here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from vitral.checkpoints.files import SAFETENSORS_DTYPES
from vitral.checkpoints.write import write_json

INDEX = "index.json"
_DTYPES = frozenset(SAFETENSORS_DTYPES.values())


class ShardWriter(FileSystemWriter):
    """Writes shards as torch does, and `index.json` instead of the pickled metadata."""

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index of the shards of all processes; called in one of them."""
        stored = {result.index: result.storage_data for shard in results for result in shard}
        tensors: dict[str, Any] = {}
        for name, tensor in metadata.state_dict_metadata.items():
            if not isinstance(tensor, TensorStorageMetadata):
                raise TypeError(f"{name} is not a tensor")
            chunks = []
            for chunk in tensor.chunks:
                info = stored[MetadataIndex(name, chunk.offsets)]
                span = {"file": info.relative_path, "start": info.offset, "length": info.length}
                chunks.append({"offsets": list(chunk.offsets), "sizes": list(chunk.sizes), **span})
            dtype = str(tensor.properties.dtype).removeprefix("torch.")
            tensors[name] = {"dtype": dtype, "shape": list(tensor.size), "chunks": chunks}
        write_json(Path(self.path) / INDEX, {"tensors": tensors})


class ShardReader(FileSystemReader):
    """Reads shards with the index that `ShardWriter` wrote."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index; torch's metadata of single processes (`rank`) is not written and so not read."""
        return read_index(Path(self.path))


def read_index(folder: Path) -> Metadata:
    """The tensors of a sharded state and where they are.

    Raises:
        ValueError: the index is damaged, or names a file outside the folder.
        OSError: it cannot be read.
    """
    try:
        tensors = json.loads((folder / INDEX).read_bytes())["tensors"]
        metadata: dict[str, Any] = {}
        stored: dict[MetadataIndex, _StorageInfo] = {}
        for name, tensor in tensors.items():
            chunks = []
            for chunk in tensor["chunks"]:
                chunks.append(ChunkStorageMetadata(_sizes(chunk["offsets"]), _sizes(chunk["sizes"])))
                stored[MetadataIndex(name, chunks[-1].offsets)] = _span(chunk)
            if tensor["dtype"] not in _DTYPES:
                raise ValueError(f"the dtype {tensor['dtype']}")
            properties = TensorProperties(dtype=getattr(torch, tensor["dtype"]))
            metadata[name] = TensorStorageMetadata(properties, _sizes(tensor["shape"]), chunks)
    except (AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{folder / INDEX} is damaged") from error
    return Metadata(metadata, storage_data=stored)


def _sizes(numbers: Any) -> torch.Size:
    if not isinstance(numbers, list) or any(type(number) is not int or not 0 <= number < 1 << 62 for number in numbers):
        raise ValueError(f"the sizes {str(numbers)[:40]}")
    return torch.Size(numbers)


def _span(chunk: Mapping[str, Any]) -> _StorageInfo:
    """Where a chunk is. An index from an untrusted source must not open files outside its folder."""
    name = chunk["file"]
    if not isinstance(name, str) or Path(name).name != name:
        raise ValueError("a shard outside the folder")
    start, length = _sizes([chunk["start"], chunk["length"]])
    return _StorageInfo(name, start, length)
