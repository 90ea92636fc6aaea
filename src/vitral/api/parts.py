"""Large lists of images, computed in parts.

Parts are contiguous pieces that processes of an engine compute, each in a file next to the output. They begin where a
batch of a single process begins, so that every batch has the same images and the merged output is the same to the last
bit.
"""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vitral.api.engines import ENGINES, Work, sbatch_options
from vitral.atomic import atomic_write, write_text
from vitral.data.sources import Split
from vitral.errors import PartsWritten, UserError
from vitral.events import EventHandler

Arrays = tuple[np.ndarray, ...]
_OPTIONS = ("parts", "part", "engine", "slurm", "parallel", "on_event")


@dataclass(kw_only=True)
class Parts(Work):
    """How a verb's images are divided; one part if the user does not ask for more."""

    verb: list[str]  # its words on the command line, without those about parts
    count: int
    only: tuple[int, ...]  # the parts to compute, from 0; all of them if there are none
    engine: str
    weights: list[list[Any]]  # name, size and time of each file of weights
    unit = "parts"
    _compute: Callable[[int], Arrays] | None = None
    _failures: dict[str, str] = field(default_factory=dict)

    def compute(
        self, split: Split, block: int, compute: Callable[[Split], Arrays], on_event: EventHandler
    ) -> list[tuple[int, Arrays]]:
        """Compute arrays of the images, in parts: of each the index of its first image, and its arrays.

        Blocks of this many images, which are batches, stay together. Raises UserError if a part has failed or the
        folder has the parts of another command, and PartsWritten if the user asked for single parts.
        """
        if self.count == 1 and not self.only:
            return [(0, compute(split))]
        blocks = -(-len(split) // block)
        edges = [min(number * blocks // self.count * block, len(split)) for number in range(self.count + 1)]
        self._compute = lambda number: compute(split.select(np.arange(edges[number], edges[number + 1])))
        self._check_folder(split)
        numbers = [number for number in range(self.count) if edges[number] < edges[number + 1]]  # few images: fewer
        chosen = [number for number in numbers if not self.only or number in self.only]
        items = [f"{number + 1}/{self.count}" for number in chosen]
        if missing := [item for item in items if not self.is_done(item)]:
            ENGINES[self.engine](self, missing, on_event)
        missing = [item for item in items if not self.is_done(item)]
        if self.only:  # what is missing, another process has claimed
            raise PartsWritten(f"{len(items) - len(missing)} of {self.count} parts are written: {self.folder}")
        if missing:
            reason = self._failures.get(missing[0], "see above")
            raise UserError(f"{len(missing)} parts are missing, {missing[0]} first ({reason}): run the command again.")
        return [(edges[number], self._read(item)) for number, item in zip(chosen, items, strict=True)]

    def finish(self) -> None:
        """Remove the parts, once the output is written."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def is_done(self, item: str) -> bool:
        return self._file(item).is_file()

    def carry_out(self, item: str, folder: Path, on_event: EventHandler) -> None:
        assert self._compute is not None
        arrays = self._compute(int(item.partition("/")[0]) - 1)
        with atomic_write(self._file(item)) as temporary, temporary.open("wb") as stream:
            np.savez(stream, *arrays)

    def outcome(self, item: str) -> str:
        return f"part {item}{f' failed: {self._failures[item]}' if item in self._failures else ''}"

    def fail(self, item: str, reason: str, log: str) -> None:
        self._failures[item] = f"{reason}; log: {log}"

    def arguments(self, items: Sequence[str]) -> list[str]:
        return [*self.verb, "--part", *items]

    def _file(self, item: str) -> Path:
        return self.folder / f"part-{item.replace('/', '-of-')}.npz"

    def _read(self, item: str) -> Arrays:
        with np.load(self._file(item)) as arrays:
            return tuple(arrays[name] for name in arrays.files)

    def _check_folder(self, split: Split) -> None:
        """Note what the parts in the folder are of, or refuse those of another command, other weights or images."""
        about = {"command": self.verb, "parts": self.count, "weights": self.weights, "images": split.fingerprint()}
        path = self.folder / "parts.json"
        if not path.is_file():
            write_text(path, json.dumps(about, indent=2))
        elif json.loads(path.read_text("utf-8")) != about:
            raise UserError(f"{self.folder} has parts of another command, of other weights or images: remove it first.")


def parts_of(verb: Callable[..., Any], arguments: Mapping[str, Any]) -> Parts:
    """The parts that the arguments of a verb, a function called as its command, ask for."""
    part, count, output = arguments["part"], arguments["parts"], str(arguments["output"])
    slurm = sbatch_options(arguments["slurm"])
    only, counts = [], {count} if count != 1 or not part else set[int]()
    for text in part:
        number, separator, of = str(text).partition("/")
        if not (separator and number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
            raise UserError(f'--part takes NUMBER/COUNT, such as 3/16, not "{text}".')
        only.append(int(number) - 1)
        counts.add(int(of))
    if len(counts) > 1 or min(counts) < 1:
        raise UserError("--parts takes a number of at least 1, and every --part the same one after its slash.")
    count = counts.pop()
    verb_arguments, weights = [], []
    if count > 1 or only:
        if not output:
            raise UserError("parts are written next to the output: set it with --output.")
        verb_arguments = _verb_arguments(verb, arguments)
        models = [arguments.get(name, ()) for name in ("source", "ensemble", "weights")]
        weights = [mark for model in models for word in _several(model) for mark in _marks(Path(word).expanduser())]
    options = {name: arguments[name] for name in ("engine", "parallel", "device")}
    parts = {"verb": verb_arguments, "count": count, "only": tuple(only), "weights": weights, "slurm": slurm}
    return Parts(folder=Path(f"{output}.parts"), **parts, **options)


def concat_parts(results: Sequence[tuple[int, Arrays]]) -> Arrays:
    """The arrays of all parts together; the first of each are indices into its images."""
    shifted = [(indices + start, *others) for start, (indices, *others) in results]
    return shifted[0] if len(shifted) == 1 else tuple(map(np.concatenate, zip(*shifted, strict=True)))


def _verb_arguments(verb: Callable[..., Any], arguments: Mapping[str, Any]) -> list[str]:
    """The command that calls a verb with these arguments; what has its default is left out."""
    positional, options = [], []
    for name, parameter in inspect.signature(verb).parameters.items():
        value = arguments[name]
        if name in _OPTIONS or (type(value) is type(parameter.default) and value == parameter.default):
            continue
        values = _several(value)
        if not all(isinstance(each, str | Path | int | float) for each in values):
            raise UserError(f"parts are computed by commands, which cannot take {name} from memory: name files.")
        if name == "source" and len(values) > 1:
            raise UserError("in parts, one model is the source and the others are in ensemble: name them so.")
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            positional += map(str, values)
        else:
            options += [f"--{name.replace('_', '-')}", *map(str, values)]
    return [verb.__name__, *positional, *options]


def _several(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else [value]


def _marks(path: Path) -> list[list[Any]]:
    """Name, size and time of each file of weights at a path."""
    files = sorted([*path.glob("*.safetensors"), *path.glob("*/*.safetensors")]) if path.is_dir() else [path]
    stats = [(str(file), file.stat()) for file in files if file.is_file()]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
