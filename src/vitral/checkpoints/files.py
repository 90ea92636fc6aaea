"""Read weight files (npz, safetensors, PyTorch) as named tensors, safely.

A file is recognised by its first bytes, never by its suffix. Every size in its header is checked against the bytes in
the file before memory is allocated, and no code in it is executed. `write.py` is the inverse.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import warnings
import zipfile
from argparse import Namespace
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import numpy as np
import safetensors.torch
import torch

from vitral.atomic import check_name
from vitral.checkpoints.containers import Container, other_folder, recognise
from vitral.errors import UserError
from vitral.models.model import CONFIG

# safetensors dtype -> PyTorch dtype; except for the last three, also NumPy's.
SAFETENSORS_DTYPES = {
    **{"BOOL": "bool", "U8": "uint8", "U16": "uint16", "U32": "uint32", "U64": "uint64"},
    **{"I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64"},
    **{"F16": "float16", "F32": "float32", "F64": "float64"},
    **{"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"},
}
NUMPY_DTYPES = frozenset(SAFETENSORS_DTYPES.values()) - {"bfloat16", "float8_e4m3fn", "float8_e5m2"}

_HUB_MODEL = re.compile(r"(?P<hf>[\w-]+/[\w.-]+)|(?P<timm>[a-z]\w*_patch\d+_\w+(?:\.\w+)?)")  # owner/name; timm's
OPEN_CLIP_CONFIG = "open_clip_config.json"
FOLDER_FILES = (
    *("model.safetensors", "model.safetensors.index.json"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json"),
    *("open_clip_model.safetensors", "open_clip_pytorch_model.bin"),
)
EXPORTED_SUFFIXES = (".onnx", ".pt2")  # of what `vitral export` writes: programs, not weights
_SUFFIXES = (".npz", ".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".pth.tar")
_DEFLATE_LIMIT = 1032  # no deflate stream grows by more than this factor
_CHUNK = 1 << 24


class TensorHeader(NamedTuple):
    """Shape and dtype of a tensor; `dtype` is PyTorch's name, such as "float32"."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class WeightFile:
    """The header of a weight file and the JSON files next to it, read without loading the tensors."""

    path: Path  # the weight file; of a sharded set, its index
    container: Container
    headers: dict[str, TensorHeader]
    metadata: dict[str, str]  # of a safetensors file; the configuration in a plain state dict of ours
    config: dict[str, Any] | None  # config.json or open_clip_config.json in the same folder
    preprocessor: dict[str, Any] | None  # preprocessor_config.json in the same folder


def open_weights(source: Path) -> WeightFile:
    """Find and check a weight file, given by its path or its folder, without loading its tensors."""
    path = _find(source)
    with _readable(path):
        shards = [_open_shard(shard) for shard in _shards(path)]
    headers: dict[str, TensorHeader] = {}
    metadata: dict[str, str] = {}
    for _, shard, stated in shards:
        if repeated := sorted(headers.keys() & shard.keys()):
            raise UserError(f"{path} lists shards that both have {repeated[0]!r}: download the set again.")
        headers.update(shard)
        metadata.update(stated)
    if not headers:
        raise UserError(f"{path} has no tensors: choose another weight file.")
    folder = path.parent
    names = ["config.json", OPEN_CLIP_CONFIG]
    if path.name.startswith("open_clip"):  # among files of transformers, too
        names.reverse()
    config = next((found for name in names if (found := _json_object(folder / name)) is not None), None)
    preprocessor = _json_object(folder / "preprocessor_config.json")
    return WeightFile(path, shards[0][0], headers, metadata, config, preprocessor)


def read_tensors(file: WeightFile) -> dict[str, torch.Tensor]:
    """All tensors of a file, on the CPU, with the dtypes of the file."""
    tensors: dict[str, torch.Tensor] = {}
    with _readable(file.path):
        for shard in _shards(file.path):
            tensors.update(_read_shard(shard))
    if {name: _header_of(tensor) for name, tensor in tensors.items()} != file.headers:
        raise UserError(f"{file.path} changed while it was being read: try again.")
    return tensors


def sha256(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def _readable(path: Path) -> Generator[None]:
    """Turn any error of a reader into one sentence: damaged files fail in many ways."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except PermissionError as error:
        raise UserError(f"{path} cannot be read: you have no permission; change its permissions.") from error
    except Exception as error:
        if _is_short_of_memory(path, error):
            raise MemoryError(str(error)) from error
        raise UserError(f"{path} is truncated or damaged: download or copy it again.") from error


def _find(source: Path) -> Path:
    if not source.exists():
        name = None if source.suffix in _SUFFIXES else _HUB_MODEL.fullmatch(str(source))
        hub = name.lastgroup if name and (name["timm"] or not source.parent.exists()) else ""
        hub = f", or write {hub}:{source} for a model on the Hugging Face hub" if hub else ""
        raise UserError(f"{source} does not exist: check the path{hub}.")
    if not source.is_dir():
        if not source.is_file():  # a pipe would be waited for
            raise UserError(f"{source} is not a regular file: copy the weights into one.")
        if source.suffix.lower() in EXPORTED_SUFFIXES:
            raise UserError(f"{source} is an exported model, for prediction alone: name the weights it was made from.")
        return source
    for name in FOLDER_FILES:
        if (source / name).is_file():
            return source / name
    if (source / "recipe.toml").is_file() and (source / "data.json").is_file():
        fix = "resume it with the same `vitral train` command and its --out"
        raise UserError(f"the run in {source} is not finished: {fix}.")
    files = sorted(path for path in source.iterdir() if path.is_file() and path.name.endswith(_SUFFIXES))
    if not files and (seeds := sorted(source.glob("seed-*/"))):
        raise UserError(f"{source} has several runs: name one of them, such as {seeds[0]}.")
    if not files:
        raise UserError(other_folder(source) or f"the folder {source} contains no weight file{_below(source)}.")
    if len(files) > 1:
        names = ", ".join(path.name for path in files)
        raise UserError(f"the folder {source} contains several weight files: choose one of {names}.")
    return files[0]


def _below(source: Path) -> str:
    """The rest of a sentence about a folder without weights: a folder below that has some, or what weight files are."""
    for folder in sorted(folder for folder in source.iterdir() if folder.is_dir()):
        if any(path.name in FOLDER_FILES or path.name.endswith(_SUFFIXES) for path in folder.glob("*")):
            return f": name one of the folders in it, such as {folder}"
    return f" ({', '.join(_SUFFIXES)}): check the path"


def _shards(path: Path) -> list[Path]:
    """The files of a sharded set that an index names, or the file itself."""
    if not path.name.endswith(".index.json"):
        return [path]
    shards = (_json_object(path) or {}).get("weight_map")
    if not isinstance(shards, dict) or not shards or not all(isinstance(name, str) for name in shards.values()):
        raise UserError(f'{path} is not an index of shards (no "weight_map"): download it again.')
    names = sorted(set(shards.values()))
    for name in names:
        # An index from an untrusted source must not open files outside its folder.
        if Path(name).name != name:
            raise UserError(f"{path} names a shard outside its folder ({name!r}): download it again.")
        if not (path.parent / name).is_file():
            raise UserError(f"{path} needs the shard {name}, which is missing: download it into the same folder.")
    return [path.parent / name for name in names]


def _json_object(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_bytes()) if path.is_file() else None
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _open_shard(path: Path) -> tuple[Container, dict[str, TensorHeader], dict[str, str]]:
    """The header of one file: its container, its tensors and its metadata."""
    with _readable(path):
        container = recognise(path)
        if container == "npz":
            return container, {name: header for name, _, header in _npz_members(path)}, {}
        if container == "safetensors":
            return container, *_safetensors_headers(path)
        tensors, metadata = _load_torch(path, "meta")
        return container, {name: _header_of(tensor) for name, tensor in tensors.items()}, metadata


def _read_shard(path: Path) -> dict[str, torch.Tensor]:
    with _readable(path):
        container = recognise(path)
        if container == "npz":
            with zipfile.ZipFile(path) as archive:
                return {name: _read_npy(archive, member) for name, member, _ in _npz_members(path)}
        check_name(path)
        if container == "safetensors":
            _safetensors_headers(path)
            return safetensors.torch.load_file(path)
        return _load_torch(path, "cpu")[0]


def _header_of(tensor: torch.Tensor) -> TensorHeader:
    return TensorHeader(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def _npz_members(path: Path) -> list[tuple[str, zipfile.ZipInfo, TensorHeader]]:
    """Name, zip entry and header of every array."""
    with zipfile.ZipFile(path) as archive:
        entries = [entry for entry in archive.infolist() if entry.filename.endswith(".npy")]
        if len({entry.filename for entry in entries}) < len(entries):
            raise UserError(f"{path} has two arrays of the same name: write it again.")
        return [(entry.filename.removesuffix(".npy"), entry, _npz_header(path, archive, entry)) for entry in entries]


def _npz_header(path: Path, archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> TensorHeader:
    """Shape and dtype of an array, checked against the bytes in the file."""
    with archive.open(entry) as stream:
        shape, _, dtype = _npy_header(stream)
        claimed = stream.tell() + math.prod(shape) * dtype.itemsize
    name = _torch_name(dtype)
    if name is None:
        values = "Python objects" if dtype.hasobject else f"numbers of type {dtype}"
        raise UserError(f"{path} stores {values} in {entry.filename!r}: write it again with plain numbers only.")
    growth = 1 if entry.compress_type == zipfile.ZIP_STORED else _DEFLATE_LIMIT
    limit = growth * min(entry.compress_size, path.stat().st_size)
    if claimed != entry.file_size or claimed > limit or min(shape, default=0) < 0:
        claim = f"{claimed:,} bytes for {entry.filename!r}, which the file does not have"
        raise UserError(f"{path} claims {claim}: download it again.")
    return TensorHeader(shape, name)


def _npy_header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, whether it is in Fortran order, and dtype. Version 3 is for structured arrays, which are not weights."""
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    return readers[np.lib.format.read_magic(stream)](stream)


def _torch_name(dtype: np.dtype[Any]) -> str | None:
    """PyTorch's name of a NumPy dtype. NumPy has no bfloat16: JAX stores it as two untyped bytes."""
    return "bfloat16" if dtype == np.dtype("V2") else dtype.name if dtype.name in NUMPY_DTYPES else None


def _read_npy(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> torch.Tensor:
    """Read one array in chunks; the zip reader verifies the checksum at the end."""
    with archive.open(member) as stream:
        shape, fortran, dtype = _npy_header(stream)
        data = np.empty(math.prod(shape) * dtype.itemsize, np.uint8)
        for start in range(0, data.size, _CHUNK):
            size = min(_CHUNK, data.size - start)
            data[start : start + size] = np.frombuffer(stream.read(size), np.uint8, size)
    array = data.view(dtype).reshape(shape, order="F" if fortran else "C")
    if _torch_name(dtype) == "bfloat16":
        return torch.from_numpy(np.asarray(array, order="C").view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.asarray(array, dtype.newbyteorder("="), order="C"))


def _safetensors_headers(path: Path) -> tuple[dict[str, TensorHeader], dict[str, str]]:
    size = path.stat().st_size
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > size - 8:
            raise UserError(f"{path} claims a header of {length:,} bytes, more than the file has: download it again.")
        header = json.loads(stream.read(length), object_pairs_hook=lambda pairs: _unique_entries(path, pairs))
    metadata = {str(key): str(value) for key, value in (header.pop("__metadata__", None) or {}).items()}
    headers, spans = {}, []
    for name, entry in header.items():
        shape, dtype, (start, end) = entry["shape"], SAFETENSORS_DTYPES.get(entry["dtype"]), entry["data_offsets"]
        if dtype is None:
            raise UserError(f"{path} stores {name!r} as {entry['dtype']!r}, which is not supported: convert it first.")
        if any(type(number) is not int or number < 0 for number in (*shape, start, end)):
            raise ValueError(name)
        if end - start != math.prod(shape) * getattr(torch, dtype).itemsize:
            raise UserError(f"{path} claims a shape for {name!r} that does not match its bytes: download it again.")
        headers[name] = TensorHeader(tuple(shape), dtype)
        spans.append((start, end))
    position = 0
    for start, end in sorted(spans):
        if start != position:
            raise UserError(f"{path} has tensors that overlap or leave a gap: download it again or write it again.")
        position = end
    if position != size - 8 - length:
        claim = f"it claims {position:,} bytes of tensors and has {size - 8 - length:,}"
        raise UserError(f"{path} is truncated or damaged ({claim}): download it again.")
    return headers, metadata


def _unique_entries(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object without repeated names, of which a reader would silently drop the first."""
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise UserError(f"{path} has two header entries of the same name: download it again or write it again.")
    return entries


def _load_torch(path: Path, device: Literal["cpu", "meta"]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors of a file, nested ones under dotted names, and the configuration that a state dict of ours has."""
    mapped = device == "cpu" and zipfile.is_zipfile(path)  # so optimizer state in the file takes no memory
    try:
        # Training scripts store their options as a Namespace, a plain object that runs no code.
        with torch.serialization.safe_globals([Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            content = torch.load(path, map_location=device, weights_only=True, mmap=mapped)
    except Exception as error:
        if isinstance(error, MemoryError) or _is_short_of_memory(path, error):
            raise
        raise UserError(_refusal(path, str(error))) from error
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in _nested_tensors(content, "", set()) if isinstance(content, Mapping) else ():
        if name in tensors:
            raise UserError(f"{path} has two tensors that are both called {name!r}: save model.state_dict() alone.")
        if tensor.layout is not torch.strided or tensor.nbytes > path.stat().st_size:
            raise UserError(f"{path} claims more of {name!r} than the file has: save it again as plain tensors.")
        tensors[name] = tensor
    if not tensors:
        keys = ", ".join(map(repr, islice(content, 8))) if isinstance(content, Mapping) else type(content).__name__
        raise UserError(f"{path} has no named tensors (but: {keys}): save only model.state_dict().")
    return tensors, _configuration(content)


def _is_short_of_memory(path: Path, error: Exception) -> bool:
    """On a CPU, torch reports this in a message only. A damaged file requests more memory than it has bytes."""
    requested = re.search(r"allocate (\d+) bytes", str(error))
    return "allocate memory" in str(error) and (requested is None or int(requested[1]) <= path.stat().st_size)


def _nested_tensors(content: object, name: str, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in nested dicts and lists with its dotted name.

    A container is visited once: a dict may contain itself, and repeated ones could grow exponentially.
    """
    if isinstance(content, torch.Tensor):
        yield name, content.detach()
    elif isinstance(content, Mapping | list | tuple) and id(content) not in seen:
        seen.add(id(content))
        items = content.items() if isinstance(content, Mapping) else enumerate(content)
        for key, value in items:
            yield from _nested_tensors(value, f"{name}.{key}" if name else str(key), seen)


def _configuration(content: object) -> dict[str, str]:
    """The configuration in the metadata of state dicts of ours, as JSON; empty if there is none or several differ."""
    dicts = [content, *content.values()] if isinstance(content, Mapping) else []
    metadata = [found for state in dicts if isinstance(found := getattr(state, "_metadata", None), Mapping)]
    modules = [module for found in metadata for module in found.values() if isinstance(module, Mapping)]
    stated = {json.dumps(module[CONFIG]) for module in modules if CONFIG in module}
    return {CONFIG: stated.pop()} if len(stated) == 1 else {}


def _refusal(path: Path, message: str) -> str:
    trusted = (
        f'on a machine that trusts it, checkpoint = torch.load("{path.name}", weights_only=False) and '
        'torch.save(checkpoint["model"], "weights.pth"), or checkpoint.state_dict() of a whole model'
    )
    if "TorchScript" in message:
        return f"{path} is a TorchScript program, not weights: save its model.state_dict() instead."
    if "Quantized" in message:
        return f"{path} has quantised tensors, which are not supported: save the weights from before quantisation."
    if refused := re.search(r"GLOBAL (\w+(?:\.\w+)+)\s", message):
        return f"{path} has {refused[1]}, which is refused because unpickling it can run code: {trusted}."
    if "weights_only" in message:
        return f"{path} is damaged, or not a plain torch.save file: download it again or, {trusted}."
    return f"{path} is truncated or damaged: download or copy it again."
