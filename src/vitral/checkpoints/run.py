"""A run folder: the recipe, metrics as JSON lines, the training state to resume from, and the model at the end.

    RUN/recipe.toml   RUN/metrics.jsonl   RUN/state/step-00000100...   RUN/model.safetensors   RUN/result.json

A training state is one safetensors file or, for sharded training, a folder of torch.distributed.checkpoint with its
index as JSON. Both are written under a temporary name and renamed when complete; a state that cannot be read is skipped
when resuming.

torch keeps the index of a sharded state in `.metadata`, a pickle that runs code when it is read. A run folder may come
from anybody, so the index is written as `index.json` and `.metadata` is never opened. The shards themselves are files
of `torch.save`, which torch reads with `weights_only=True`; entries that it would unpickle (anything but tensors) have
no place here.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as sharded
from torch import Tensor
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

from vitral.atomic import atomic_write, check_name
from vitral.checkpoints.files import SAFETENSORS_DTYPES, open_weights, read_tensors
from vitral.checkpoints.lock import FolderLock
from vitral.checkpoints.write import write_json, write_safetensors
from vitral.errors import UserError

_FACTS = "vitral.state"
INDEX = "index.json"
_DTYPES = frozenset(SAFETENSORS_DTYPES.values())
_NAME = re.compile(r"step-(\d{8})(\.safetensors|\.shards)")


@dataclass(frozen=True)
class SavedState:
    """A saved training state: its path and its metadata (`facts`), without the tensors."""

    step: int
    path: Path
    facts: dict[str, Any]

    @property
    def is_sharded(self) -> bool:
        return self.path.is_dir()

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of a state that is one file."""
        return {key: array.clone() for key, array in read_tensors(open_weights(self.path)).items()}

    def names(self) -> list[str]:
        """The names of the tensors in a sharded state."""
        return list(read_index(self.path).state_dict_metadata)

    def load_sharded(self, tensors: dict[str, Tensor]) -> None:
        """Fill tensors, sharded over any number of processes, in place from a sharded state."""
        alone = not dist.is_initialized()
        with warnings.catch_warnings():
            if alone:
                warnings.simplefilter("ignore")  # torch warns about a single process
            try:
                sharded.load(tensors, storage_reader=ShardReader(str(self.path)), no_dist=alone)
            except sharded.CheckpointException as error:  # raised in all processes
                raise UserError(f"{self.path} is damaged: remove it to resume from an earlier state.") from error


class RunFolder:
    """The folder of a training run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.states = path / "state"
        self.model = path / "model.safetensors"
        self.best = path / "best.safetensors"
        self._lock = FolderLock(path)
        self._created = False  # by this object

    def make(self) -> None:
        """Create and lock the folder, and remove leftovers of interrupted writes; UserError if another run uses it."""
        check_name(self.path)
        self._created = not self.path.exists()
        self.states.mkdir(parents=True, exist_ok=True)
        self._lock.acquire()
        for leftover in (*self.states.glob(".*.part"), *self.path.glob(".*.part")):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()

    def unlock(self) -> None:
        """Leave the folder to other runs; nothing happens if it is not locked by this one."""
        self._lock.release()

    def discard(self) -> None:
        """Remove the folder, where this object created it and no step of a run is recorded in it."""
        if self._created and not self.begun and not (self.path / "metrics.jsonl").exists():
            shutil.rmtree(self.path, ignore_errors=True)

    @property
    def begun(self) -> bool:
        """Whether the run has a state or a result; until then another run may use the folder."""
        return (self.path / "result.json").exists() or any(self.states.glob("step-*"))

    def save_state(self, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], keep: int) -> Path:
        """Write a state as one file, with JSON-ready `facts`, then remove all but the newest `keep` states."""
        self._lock.confirm()
        path = self.states / f"step-{step:08d}.safetensors"
        write_safetensors(path, tensors, {_FACTS: json.dumps({"step": step, **facts})})
        self._forget(path, keep)
        return path

    def write_shards(self, step: int, tensors: dict[str, Tensor]) -> None:
        """Write the shards of every process; `name_shards` then makes them a state to resume from."""
        try:
            sharded.save(tensors, storage_writer=ShardWriter(str(self._shards(step))))
        except sharded.CheckpointException as error:  # raised in all processes
            reason, _ = next(iter(error.failures.values()))
            raise UserError(
                f"the state of step {step} cannot be written ({reason}): free disk space for {self.states}."
            ) from error

    def name_shards(self, step: int, facts: Mapping[str, Any], keep: int) -> Path:
        """Rename the shards that all processes have written to their final name; called by one process."""
        self._lock.confirm()
        path, aside = self.states / f"step-{step:08d}.shards", self._shards(step)
        write_json(aside / "facts.json", {"step": step, **facts})
        if path.exists():
            shutil.rmtree(path)
        os.replace(aside, path)
        self._forget(path, keep)
        return path

    def _shards(self, step: int) -> Path:
        return self.states / f".step-{step:08d}.shards.part"

    def newest_state(self) -> SavedState | None:
        """The newest complete state; damaged ones are skipped."""
        for path in sorted(self.states.glob("step-*"), reverse=True):
            match = _NAME.fullmatch(path.name)
            facts = _facts(path) if match else None
            if match and facts is not None:
                return SavedState(int(match[1]), path, facts)
        return None

    def add_metrics(self, values: Mapping[str, Any]) -> None:
        """Append a line to metrics.jsonl."""
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(dict(values)) + "\n")

    def rewind_metrics(self, step: int) -> None:
        """Remove the lines after a step, which a resumed run writes again, and a truncated line."""
        path = self.path / "metrics.jsonl"
        if not path.exists():
            return
        kept = [line for line in path.read_text("utf-8").splitlines() if _step_of(line) <= step]
        self.write_text(path.name, "".join(f"{line}\n" for line in kept))

    def metrics(self) -> list[dict[str, Any]]:
        path = self.path / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []

    def write_text(self, name: str, text: str) -> None:
        self._lock.confirm()
        with atomic_write(self.path / name) as aside:
            aside.write_text(text, encoding="utf-8")

    def forget_states(self) -> None:
        """Remove all states at the end of a run, when the model file is written."""
        shutil.rmtree(self.states, ignore_errors=True)

    def _forget(self, newest: Path, keep: int) -> None:
        """Remove all but the `keep` states up to the newest; later ones are damaged, as resuming skipped them."""
        states = sorted(path for path in self.states.glob("step-*") if _NAME.fullmatch(path.name))
        last = states.index(newest) + 1
        for path in (*states[: max(last - keep, 0)], *states[last:]):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _facts(path: Path) -> dict[str, Any] | None:
    """The metadata of a state, None if it is damaged."""
    try:
        if path.is_dir():
            facts = json.loads((path / "facts.json").read_text("utf-8")) if _shards_are_complete(path) else None
        else:
            facts = json.loads(open_weights(path).metadata[_FACTS])
    except (UserError, KeyError, OSError, ValueError, RecursionError):
        return None
    return facts if isinstance(facts, dict) else None


def _shards_are_complete(path: Path) -> bool:
    """Whether every file of a sharded state has the length that its index states."""
    table = read_index(path).storage_data
    ends = {(path / part.relative_path, part.offset + part.length) for part in table.values()}
    return all(file.is_file() and file.stat().st_size >= end for file, end in ends)


def _step_of(line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return 1 << 62  # truncated or not a metrics line: dropped


# ---------------------------------------------------------------------------------------------------- sharded states


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
    """The tensors of a sharded state and where they are; ValueError if it is damaged, or names a file elsewhere."""
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
