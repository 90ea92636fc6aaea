"""Who races, and over what: plain data that travels to a contestant's own process."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from vitral.architecture import Architecture, ViTConfig, as_size
from vitral.errors import UserError
from vitral.names import name_of, parse

Work = Literal["train", "infer", "latency", "data", "predict", "start"]
OURS = "vitral"
PEERS = ("timm", "transformers", "torchvision", "onnxruntime")
MODES = ("eager", "compile", "graphs")
ATTENTIONS = ("auto", "flash", "cudnn", "efficient")

_RUNTIME = "onnxruntime"  # it brings its own way to compute


@dataclass(frozen=True)
class Task:
    """What every contestant of a race does."""

    work: Work
    model: str
    batch: int
    device: str  # "cuda" or "cpu"
    image: int = 0  # pixels; 0: what the name says
    depth: int = 0  # layers; 0: the model's own
    classes: int = 1000
    folder: str = ""  # of images, where files are read
    workers: int = 0

    @property
    def architecture(self) -> Architecture:
        changes: dict[str, Any] = {"classes": self.classes}
        changes |= {"image": as_size(self.image)} if self.image else {}
        changes |= {"depth": self.depth} if self.depth else {}
        return parse(self.model, **changes)

    @property
    def named(self) -> str:
        return name_of(self.architecture)

    @property
    def precision(self) -> str:
        """Half precision pays on a GPU; on most CPUs it is many times slower."""
        return "bfloat16" if self.device == "cuda" else "float32"

    def small(self, batch: int) -> Task:
        """The same with fewer images at a time, to check answers by."""
        return replace(self, batch=min(batch, self.batch))


@dataclass(frozen=True)
class Contestant:
    """A library and how it is set up."""

    library: str
    mode: str = "eager"
    attention: str = "auto"

    @property
    def settings(self) -> str:
        return self.mode if self.attention == "auto" else f"{self.mode}, {self.attention}"

    @property
    def label(self) -> str:
        return f"{self.library} ({self.settings})"


class Field(NamedTuple):
    """Those who start, and one sentence for each who cannot."""

    contestants: tuple[Contestant, ...]
    absent: tuple[str, ...]


def field(task: Task, against: Sequence[str], modes: Sequence[str], attentions: Sequence[str]) -> Field:
    """Ours first, then each peer that is installed and can do the work, in each setting."""
    _check("--against", against, PEERS)
    _check("--settings", modes, MODES)
    _check("--attention", attentions, ATTENTIONS)
    if task.device != "cuda" and ("graphs" in modes or tuple(attentions) != ("auto",)):
        raise UserError("CUDA graphs and the choice of an attention need an NVIDIA GPU: use --settings eager,compile.")
    found, absent = [], []
    for library in (OURS, *dict.fromkeys(against)):
        reason = _absence(library, task)
        if reason:
            absent.append(f"{library} is left out: {reason}.")
            continue
        only = _only_mode(library, task.work)
        found += [Contestant(library, only)] if only else _settings(library, modes, attentions)
    return Field(tuple(found), tuple(absent))


def default_modes(device: str) -> tuple[str, ...]:
    """What is usually the fastest: compiled on a GPU; on a CPU compiling brings nothing (and needs a C++ compiler)."""
    return ("compile", "graphs") if device == "cuda" else ("eager",)


def _settings(library: str, modes: Sequence[str], attentions: Sequence[str]) -> list[Contestant]:
    """Ours chooses its attention itself, and gains nothing from compiling where it records."""
    if library == OURS:
        return [Contestant(OURS, mode) for mode in (["graphs"] if "graphs" in modes else modes)]
    return [Contestant(library, mode, attention) for mode in modes for attention in attentions]


def _only_mode(library: str, work: Work) -> str:
    """How a library does it where no mode of torch applies; empty where they do."""
    if library == _RUNTIME:
        return "session"
    return {"data": "loader", "predict": "eager", "start": "command"}.get(work, "")


def _absence(library: str, task: Task) -> str:
    """Why a library cannot start; empty where it can."""
    if library == OURS:
        return ""
    if importlib.util.find_spec(library) is None:
        return f"it is not installed (pip install {library})"
    if library == _RUNTIME and importlib.util.find_spec("onnxscript") is None:
        return "its models are exported with onnxscript, which is not installed (pip install onnx onnxscript)"
    if library == _RUNTIME and (task.work not in ("infer", "latency", "predict") or task.device != "cpu"):
        return "it predicts on the CPU only"
    known = {"data": ("torchvision",), "start": ("transformers",)}.get(task.work, PEERS)
    if library not in known:
        return f"bench {task.work} knows {known[0]} only"
    return "" if _is_plain(task.architecture) else f"it has no {task.named}"


def _is_plain(architecture: Architecture) -> bool:
    """The Vision Transformer of section 3.1, which every peer has."""
    return isinstance(architecture, ViTConfig) and architecture.stem is None and not architecture.axial


def _check(option: str, words: Sequence[str], known: Sequence[str]) -> None:
    for word in words:
        if word not in known:
            raise UserError(f'{option} does not know "{word}": use one or more of {", ".join(known)}.')
