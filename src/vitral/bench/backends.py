"""What is benchmarked: workloads and the libraries that run them, as plain data that is sent to worker processes.

Besides the paper's models there are families after it, by names such as DINOv3-B/16, DINOv2-B/14 and CLIP-B/16.
"""

from __future__ import annotations

import importlib.util
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from vitral.architecture import Architecture, ModelConfig, ResNetConfig, RopeConfig, ViTConfig, as_size
from vitral.errors import UserError
from vitral.export.int8 import calibrate
from vitral.export.int8_graph import quantize
from vitral.export.onnx import OPSET, import_onnx
from vitral.kernels.dispatch import FP8_MIN_WIDTH, has_fp8
from vitral.models.build import build
from vitral.models.layers import LayerScale
from vitral.names import name_of, parse

Work = Literal["train", "infer", "latency", "data", "predict", "start", "growth"]
OURS = "vitral"
EXPORTED = {"onnxruntime": ("float32", "int8"), "openvino": ("float32",)}  # run our model, exported; and how
PEERS = ("timm", "transformers", "torchvision", *EXPORTED)
_ONLY_MODES = {"data": "loader", "predict": "eager", "start": "command"}  # where PyTorch's do not apply
MODES = ("eager", "compile", "graphs", "autotune")
_EXPORT_TOLERANCES = {"float32": 1e-4, "int8": 0.1}  # of the norm of the logits, of random images and weights
ATTENTIONS = ("auto", "flash", "cudnn", "efficient")


@dataclass(frozen=True)
class Workload:
    """What every backend of a benchmark computes."""

    work: Work
    model: str
    batch: int
    device: str  # "cuda" or "cpu"
    image: int = 0  # pixels; 0: as the model's name says
    depth: int = 0  # layers; 0: as the model's name says
    classes: int = 1000
    folder: str = ""  # of images, if files are read
    workers: int = 0

    @property
    def architecture(self) -> Architecture:
        changes: dict[str, Any] = {"classes": self.classes}
        changes |= {"image": as_size(self.image)} if self.image else {}
        changes |= {"depth": self.depth} if self.depth else {}
        return parse_model(self.model, **changes)

    @property
    def model_name(self) -> str:
        """The name of the model with its changed image size or depth."""
        return model_name(self.architecture)

    @property
    def precision(self) -> str:
        """bfloat16 on a GPU; on most CPUs it is many times slower than float32."""
        return "bfloat16" if self.device == "cuda" else "float32"


@dataclass(frozen=True)
class Backend:
    """A library and its settings."""

    library: str
    mode: str = "eager"
    attention: str = "auto"
    float32_residual: bool = False  # ours with a residual stream in float32, as the others have it under autocast
    fp8: bool = False  # ours with its own FP8, timm with that of torchao

    @property
    def captures(self) -> bool:
        """Whether vitral's own CUDA graphs are used."""
        return self.library == OURS and self.mode == "graphs"

    @property
    def settings(self) -> str:
        parts = [self.mode, *([self.attention] if self.attention != "auto" else [])]
        parts += ["float32 residual"] if self.float32_residual else []
        return ", ".join([*parts, *(["fp8" if self.library == OURS else "torchao fp8"] if self.fp8 else [])])

    @property
    def label(self) -> str:
        return f"{self.library} ({self.settings})"


def select_backends(
    workload: Workload, against: Sequence[str], modes: Sequence[str], attentions: Sequence[str]
) -> tuple[list[Backend], list[str]]:
    """Choose ours first, then each peer that is installed and supports the workload, in each setting.

    Returns the backends, and one sentence for each library that cannot take part; raises UserError for unknown names,
    and for a setting that needs a GPU.
    """
    options = ("--against", against, PEERS), ("--settings", modes, MODES), ("--attention", attentions, ATTENTIONS)
    for option, names, choices in options:
        if unknown := [name for name in names if name not in choices]:
            raise UserError(f'{option} does not support "{unknown[0]}": use one or more of {", ".join(choices)}.')
    graphs = "graphs" in modes or "autotune" in modes
    if workload.device != "cuda" and (graphs or tuple(attentions) != ("auto",)):
        raise UserError("CUDA graphs and the choice of an attention need an NVIDIA GPU: use --settings eager,compile.")
    backends: list[Backend] = []
    excluded: list[str] = []
    for library in (OURS, *dict.fromkeys(against)):
        if reason := _unsupported_reason(library, workload):
            excluded.append(f"{library} is excluded: {reason}.")
        elif library in EXPORTED:
            backends += [Backend(library, mode) for mode in EXPORTED[library]]
        elif mode := _ONLY_MODES.get(workload.work):
            backends.append(Backend(library, mode))
        elif library == OURS:  # it chooses its attention itself, and compiling adds nothing to its CUDA graphs
            ours = [Backend(OURS, mode) for mode in (["graphs"] if graphs else modes)]
            backends += ours
            if workload.work == "train" and workload.precision == "bfloat16" and is_vit(workload.architecture):
                backends += [replace(backend, float32_residual=True) for backend in ours]
            backends += [replace(backend, fp8=True) for backend in ours if _has_fp8(workload)]
        else:
            backends += [Backend(library, mode, attention) for mode in modes for attention in attentions]
            if library == "timm" and _has_fp8(workload) and importlib.util.find_spec("torchao") is not None:
                backends += [Backend(library, mode, fp8=True) for mode in modes]
    if Backend("onnxruntime", "int8") in backends and is_vit(workload.architecture):
        backends.insert(1, Backend(OURS, "int8"))  # ours in int8 is compared where another's is
    return backends, excluded


def _has_fp8(workload: Workload) -> bool:
    """Whether FP8 is chosen for the model on this machine."""
    config = workload.architecture
    wide = isinstance(config, ViTConfig) and is_vit(config) and config.width >= FP8_MIN_WIDTH
    return wide and workload.work in ("train", "infer") and has_fp8(torch.device(workload.device))


def is_vit(architecture: Architecture) -> bool:
    """Whether it is a Vision Transformer without a ResNet in front and without axial attention."""
    return isinstance(architecture, ViTConfig) and architecture.stem is None and not architecture.axial


def default_modes(device: str) -> tuple[str, ...]:
    """The modes that are usually fastest: compiling does not help on a CPU, and needs a C++ compiler there."""
    return ("compile", "graphs") if device == "cuda" else ("eager",)


def _unsupported_reason(library: str, workload: Workload) -> str:
    if library == OURS:
        return ""
    if importlib.util.find_spec(library) is None:
        return f"it is not installed (pip install {library})"
    if library in EXPORTED and importlib.util.find_spec("onnxscript") is None:
        return "its models are exported with onnxscript, which is not installed (pip install onnx onnxscript)"
    if library in EXPORTED and (workload.work not in ("infer", "latency", "predict") or workload.device != "cpu"):
        return "it predicts on the CPU only"
    if library in EXPORTED:
        return ""
    supported = {"data": ("torchvision",), "start": ("transformers",)}.get(workload.work, PEERS)
    if library not in supported:
        return f"bench {workload.work} supports {supported[0]} only"
    config = workload.architecture
    # The peers have the Vision Transformer of section 3.1 only, and timm its successors, hybrids and ResNets.
    if library == "timm":
        supports = isinstance(config, ViTConfig | ResNetConfig) and not config.axial
    else:
        supports = is_vit(config) and not family_of(config)
    return "" if supports else f"it has no {workload.model_name}"


def build_model(backend: Backend, architecture: Architecture) -> nn.Module:
    """Build a library's model of this architecture, with random weights and a head that is not zero."""
    library = backend.library
    if library == OURS:
        return _with_visible_layers(build(architecture))
    if library in EXPORTED:
        return _ExportedModel(build_model(Backend(OURS), architecture), backend, architecture)
    if isinstance(architecture, ResNetConfig) and library == "timm":
        return _timm_resnet(architecture.blocks, architecture.width, classes=architecture.classes)
    if not isinstance(architecture, ViTConfig):
        raise UserError(f"{library} has no such model: omit it of --against.")
    return _BUILDERS[library](architecture)


def _with_visible_layers(model: nn.Module) -> nn.Module:
    """Replace linear layers of zeros, behind which all logits are zero, and the first LayerScale factors, 1e-5: the
    parity check would hardly see what is behind them."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear) and not layer.weight.any():
            nn.init.normal_(layer.weight, std=0.02)
        elif isinstance(layer, LayerScale):
            nn.init.normal_(layer.scale, mean=0.5, std=0.1)
    return model


def _timm(config: ViTConfig) -> nn.Module:
    from timm import create_model
    from timm.models.vision_transformer import VisionTransformer

    sizes: dict[str, Any] = {"embed_dim": config.width, "depth": config.depth, "num_heads": config.heads}
    sizes |= {"img_size": config.image, "patch_size": config.patch, "num_classes": config.classes}
    sizes |= {"mlp_ratio": config.mlp / config.width}
    if name := family_of(config):
        return create_model(FAMILIES[name].timm, **sizes, **FAMILIES[name].overrides)
    if config.stem is not None:
        from timm.models.vision_transformer_hybrid import HybridEmbed

        sizes["embed_layer"] = partial(HybridEmbed, backbone=_timm_resnet(config.stem.blocks, config.stem.width))
    return VisionTransformer(**sizes)


def _timm_resnet(blocks: Sequence[int], width: int, classes: int = 0) -> nn.Module:
    """A BiT ResNet or, without classes, the one in front of a hybrid."""
    from timm.layers import StdConv2dSame
    from timm.models.resnetv2 import ResNetV2, create_resnetv2_stem

    if classes:
        return ResNetV2([*blocks], width_factor=width, stem_type="fixed", num_classes=classes)
    options: dict[str, Any] = {"stem_type": "same", "preact": False, "conv_layer": partial(StdConv2dSame, eps=1e-8)}
    if not blocks:
        return create_resnetv2_stem(3, 64 * width, **options)
    return ResNetV2([*blocks], width_factor=width, num_classes=0, global_pool="", **options)


class _Logits(nn.Module):
    """A model of transformers that returns logits only."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        """(batch, channels, height, width) -> (batch, classes)"""
        return self.model(images, return_dict=False)[0]


def _transformers(config: ViTConfig) -> nn.Module:
    from transformers import ViTConfig as HFViTConfig
    from transformers import ViTForImageClassification

    options: dict[str, Any] = {"hidden_size": config.width, "num_hidden_layers": config.depth}
    options |= {"num_attention_heads": config.heads, "intermediate_size": config.mlp, "attn_implementation": "sdpa"}
    options |= {"image_size": config.image, "patch_size": config.patch, "num_labels": config.classes}
    return _Logits(ViTForImageClassification(HFViTConfig(**options)))


def _torchvision(config: ViTConfig) -> nn.Module:
    from torchvision.models import VisionTransformer

    side, width = config.image
    if side != width:
        raise UserError("torchvision takes square images only: choose one side, or omit it of --against.")
    sizes = {"num_layers": config.depth, "num_heads": config.heads, "hidden_dim": config.width, "mlp_dim": config.mlp}
    return _with_visible_layers(VisionTransformer(side, config.patch, num_classes=config.classes, **sizes))


class _ExportedModel(nn.Module):
    """Our model, exported to ONNX and run by another library with as many threads as PyTorch."""

    def __init__(self, model: nn.Module, backend: Backend, config: Architecture) -> None:
        super().__init__()
        pixels = torch.rand(8, config.channels, *config.image, generator=torch.Generator().manual_seed(0)) * 2 - 1
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.onnx"
            options: dict[str, Any] = {"dynamo": True, "verbose": False, "external_data": False, "opset_version": OPSET}
            options |= {"input_names": ["images"], "dynamic_shapes": ({0: torch.export.Dim("batch")},)}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the exporter warns about itself
                torch.onnx.export(model.eval(), (pixels[:2],), path, **options)
            if backend.mode == "int8":
                float_model = import_onnx().load(path)
                import_onnx().save(quantize(float_model, calibrate(path, pixels.numpy())), path)
            self.run = _RUNNERS[backend.library](path)
        with torch.no_grad():
            exact, outputs = model(pixels[:2]), self.forward(pixels[:2])
        difference = float((outputs - exact).norm() / exact.norm())
        if not difference <= _EXPORT_TOLERANCES[backend.mode]:  # NaN fails too
            raise UserError(f"its logits differ by {difference:.1e} of their norm from those of the exported model")

    def forward(self, images: Tensor) -> Tensor:
        """float32 (batch, channels, height, width) -> (batch, classes)"""
        return torch.from_numpy(self.run(images.numpy()))


def _onnxruntime(path: Path) -> Callable[[np.ndarray], np.ndarray]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda images: np.asarray(session.run(None, {"images": images})[0])


def _openvino(path: Path) -> Callable[[np.ndarray], np.ndarray]:
    import openvino  # type: ignore[import-not-found]

    options = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.Core().compile_model(path, "CPU", {**options, "PERFORMANCE_HINT": "LATENCY"})
    return lambda images: compiled(images)[0]


_RUNNERS = {"onnxruntime": _onnxruntime, "openvino": _openvino}
_BUILDERS = {"timm": _timm, "transformers": _transformers, "torchvision": _torchvision}


class Family(NamedTuple):
    """What a family changes in the ViT of the same size, and a name of it in timm, which overrides replace sizes of."""

    timm: str
    changes: dict[str, Any]
    overrides: dict[str, Any]


_CLIP: dict[str, Any] = {"pre_norm": True, "patch_bias": False, "norm_eps": 1e-5}
FAMILIES = {
    # As in timm, without the biases of queries and values, which Meta's checkpoints have.
    "DINOv3": Family(
        "vit_base_patch16_dinov3",
        {
            **{"rope": RopeConfig(), "position": "none", "registers": 4, "layer_scale": True},
            **{"qkv_bias": False, "gelu": "erf", "norm_eps": 1e-5},
        },
        {"global_pool": "token"},
    ),
    "DINOv2": Family("vit_base_patch14_dinov2", {"layer_scale": True, "gelu": "erf", "rope": None}, {}),
    "CLIP": Family("vit_base_patch16_clip_quickgelu_224", {**_CLIP, "gelu": "quick"}, {}),
    "OpenCLIP": Family("vit_base_patch16_clip_224", {**_CLIP, "gelu": "erf"}, {}),
}


def parse_model(name: str, **changes: Any) -> ModelConfig:
    """The architecture of a model's name, with fields replaced."""
    family, _, size = name.partition("-")
    if family not in FAMILIES:
        return parse(name, **changes)
    return parse(f"ViT-{size}", **FAMILIES[family].changes, **changes)


def model_name(architecture: Architecture) -> str:
    return name_of(architecture).replace("ViT", family_of(architecture) or "ViT", 1)


def family_of(architecture: Architecture) -> str:
    """The name of the family, empty for the paper's models."""
    if not isinstance(architecture, ViTConfig):
        return ""
    for name, family in FAMILIES.items():
        if all(getattr(architecture, field) == value for field, value in family.changes.items()):
            return name
    return ""
