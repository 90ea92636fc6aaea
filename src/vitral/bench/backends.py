"""Who races, and over what: plain data that travels to a backend's own process."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from vitral.architecture import Architecture, Size, ViTConfig, as_size
from vitral.errors import UserError
from vitral.models.build import build
from vitral.names import name_of, parse

Work = Literal["train", "infer", "latency", "data", "predict", "start"]
OURS = "vitral"
PEERS = ("timm", "transformers", "torchvision", "onnxruntime")
MODES = ("eager", "compile", "graphs")
ATTENTIONS = ("auto", "flash", "cudnn", "efficient")

_RUNTIME = "onnxruntime"  # it brings its own way to compute


@dataclass(frozen=True)
class Task:
    """What every backend of a race does."""

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
class Backend:
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

    backends: tuple[Backend, ...]
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
        found += [Backend(library, only)] if only else _settings(library, modes, attentions)
    return Field(tuple(found), tuple(absent))


def default_modes(device: str) -> tuple[str, ...]:
    """What is usually the fastest: compiled on a GPU; on a CPU compiling brings nothing (and needs a C++ compiler)."""
    return ("compile", "graphs") if device == "cuda" else ("eager",)


def _settings(library: str, modes: Sequence[str], attentions: Sequence[str]) -> list[Backend]:
    """Ours chooses its attention itself, and gains nothing from compiling where it records."""
    if library == OURS:
        return [Backend(OURS, mode) for mode in (["graphs"] if "graphs" in modes else modes)]
    return [Backend(library, mode, attention) for mode in modes for attention in attentions]


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


def build_model(library: str, architecture: Architecture) -> nn.Module:
    """A library's model of this shape; ours gets a head that is not zero, as any trained one is."""
    if library == "vitral":
        return _with_a_head(build(architecture))
    if not isinstance(architecture, ViTConfig):
        raise UserError(f"{library} has no such model: leave it out of --against.")
    return _BUILDERS[library](architecture)


def _with_a_head(model: nn.Module) -> nn.Module:
    """Behind a head of zeros every logit and nearly every gradient is zero, and wrong ones would look right."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear) and not layer.weight.any()]
    for layer in layers:
        nn.init.normal_(layer.weight, std=0.02)
    return model


def _timm(config: ViTConfig) -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(
        img_size=config.image,
        patch_size=config.patch,
        embed_dim=config.width,
        depth=config.depth,
        num_heads=config.heads,
        mlp_ratio=config.mlp / config.width,
        num_classes=config.classes,
    )


class _Logits(nn.Module):
    """A model of transformers without the other things that it returns."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        """(b, c, h, w) -> (b, classes)"""
        return self.model(images, return_dict=False)[0]


def _transformers(config: ViTConfig) -> nn.Module:
    from transformers import ViTConfig as TheirConfig
    from transformers import ViTForImageClassification

    options: dict[str, Any] = {"num_labels": config.classes, "attn_implementation": "sdpa"}
    theirs = TheirConfig(
        hidden_size=config.width,
        num_hidden_layers=config.depth,
        num_attention_heads=config.heads,
        intermediate_size=config.mlp,
        image_size=config.image,
        patch_size=config.patch,
        **options,
    )
    return _Logits(ViTForImageClassification(theirs))


def _torchvision(config: ViTConfig) -> nn.Module:
    from torchvision.models import VisionTransformer

    model = VisionTransformer(
        image_size=_side(config.image),
        patch_size=config.patch,
        num_layers=config.depth,
        num_heads=config.heads,
        hidden_dim=config.width,
        mlp_dim=config.mlp,
        num_classes=config.classes,
    )
    return _with_a_head(model)


def _side(image: Size) -> int:
    if image[0] != image[1]:
        raise UserError("torchvision takes square images only: choose one side, or leave it out of --against.")
    return image[0]


class _Session(nn.Module):
    """Our model, exported to ONNX in float32 and run by ONNX Runtime on as many threads as torch has."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        import onnxruntime  # type: ignore[import-not-found]

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        with tempfile.TemporaryDirectory() as folder:
            path = _exported(config, Path(folder))
            self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def forward(self, images: Tensor) -> Tensor:
        """float32 (b, c, h, w) -> (b, classes)"""
        return torch.from_numpy(self.session.run(None, {"images": images.numpy()})[0])


def _exported(config: ViTConfig, folder: Path) -> Path:
    """An ONNX file for any number of images."""
    model = _with_a_head(build(config)).eval()
    example = torch.zeros(2, config.channels, *config.image)
    shapes = ({0: torch.export.Dim("batch")},)
    path = folder / "model.onnx"
    torch.onnx.export(
        model, (example,), path, input_names=["images"], dynamo=True, dynamic_shapes=shapes, verbose=False
    )
    return path


_BUILDERS = {"timm": _timm, "transformers": _transformers, "torchvision": _torchvision, "onnxruntime": _Session}
