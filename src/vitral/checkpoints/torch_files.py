"""The tensors of `torch.save` files, read without running the code that a pickle may contain."""

from __future__ import annotations

import json
import re
import warnings
import zipfile
from argparse import Namespace
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Literal

import torch

from vitral.errors import UserError
from vitral.models.model import CONFIG


def load_torch(path: Path, device: Literal["cpu", "meta"]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors of a file, nested ones under dotted names, and the configuration that a state dict of ours has.

    Args:
        path: a file of `torch.save`.
        device: "meta" reads no values.

    Raises:
        UserError: the file holds more than plain values, or no tensors.
    """
    mapped = device == "cpu" and zipfile.is_zipfile(path)  # so optimizer state in the file takes no memory
    try:
        # Training scripts store their options as a Namespace, a plain object that runs no code.
        with torch.serialization.safe_globals([Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            content = torch.load(path, map_location=device, weights_only=True, mmap=mapped)
    except Exception as error:
        if isinstance(error, MemoryError) or is_short_of_memory(path, error):
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


def is_short_of_memory(path: Path, error: Exception) -> bool:
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
        f'on a machine that trusts it, save only the tensors, checkpoint = torch.load("{path.name}", '
        f'weights_only=False) and torch.save(checkpoint["model"], "weights.pth")'
    )
    if "TorchScript" in message:
        return f"{path} is a TorchScript program, not weights: save its model.state_dict() instead."
    if refused := re.search(r"GLOBAL (\w+(?:\.\w+)+)\s", message):
        return f"{path} has {refused[1]}, which is refused because unpickling it can run code: {trusted}."
    if "weights_only" in message:
        return f"{path} is damaged, or not a plain torch.save file: download it again or, {trusted}."
    return f"{path} is truncated or damaged: download or copy it again."
