"""Build a model with initial weights from an architecture, and choose its device."""

from __future__ import annotations

import math
import os

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.architecture import Architecture, ModuleConfig, ResNetConfig, ViTConfig
from vitral.errors import UserError
from vitral.events import EventHandler, Note
from vitral.kernels.dispatch import check_fp8
from vitral.models.layers import Attention
from vitral.models.position import FactorizedPosition, LearnedPosition, sincos2d
from vitral.models.resnet import ResNet
from vitral.models.vit import ViT

Model = ViT | ResNet

_SHARED = 0.9  # share of a mimetic matrix that its partner has, too
_QUERY_KEY, _VALUE_OUTPUT = 0.75, 0.5  # scales of the products of queries and keys, and of values and outputs


def build(architecture: Architecture) -> Model:
    """A model with the paper's weight initialization, in training mode; UserError for a user's own module, which only
    the user's code can build."""
    if isinstance(architecture, ModuleConfig):
        raise UserError(
            f'vitral cannot build "{architecture.name}", your own module: build it in your code and pass it in.'
        )
    return ResNet(architecture) if isinstance(architecture, ResNetConfig) else ViT(architecture)


def use_fp8(model: nn.Module, on_event: EventHandler | None, *, freeze: bool) -> None:
    """Compute a model's blocks in FP8 if that is faster; a note says why it is left in bfloat16.

    Args:
        model: on its device, in training or evaluation mode.
        on_event: receives the note.
        freeze: quantise the weights once, for inference: it can then neither be trained nor moved.

    Raises:
        UserError: the device has no FP8 of ours.
    """
    check_fp8(next(model.parameters()).device)
    from vitral.models.fused import enable_fp8  # imports Triton

    if (reason := enable_fp8(model, freeze=freeze)) and on_event is not None:
        on_event(Note(f"the model is computed in bfloat16 instead of FP8: {reason}"))


@torch.no_grad()
def mimetic_init(model: ViT) -> None:
    """Give a ViT initial weights that look like trained ones, for data sets too small to learn these patterns from.

    After Trockman and Kolter, "Mimetic Initialization of Self-Attention Layers", 2023:

        keys       similar to queries, so that a patch attends to similar patches
        outputs    similar to the negative of values, so that a patch is contrasted with what it attends to
        positions  sines and cosines (2d), so that neighboring patches are similar; they are trained from there on

    The authors take the matrices from a singular value decomposition; here they are random orthogonal matrices that
    share most of their entries. Changes the attention of all blocks, and position tables that are learned.
    """
    for module in model.blocks.modules():
        if isinstance(module, Attention):
            _init_attention(module)
    for position in model.positions[:1]:
        if isinstance(position, LearnedPosition | FactorizedPosition):
            _init_position(position, model.config)


def _init_position(position: LearnedPosition | FactorizedPosition, config: ViTConfig) -> None:
    """Sines and cosines, without their mean over the grid, which distinguishes no position."""
    table = sincos2d(config.grid(config.image), config.width)
    table -= table.mean(dim=(0, 1))
    half = config.width // 2  # columns where 4 does not divide it are left at zero
    x, y = (F.pad(part, (0, half - part.shape[-1])) for part in table.chunk(2, dim=-1))
    if isinstance(position, LearnedPosition):
        position.table.copy_(F.pad(torch.cat([x, y], dim=-1), (0, config.width % 2)))
    else:
        position.x.copy_(x[0])
        position.y.copy_(y[:, 0])


def _init_attention(attention: Attention) -> None:
    queries, keys, values = attention.qkv.weight.chunk(3)
    for query, key in zip(queries.chunk(attention.heads), keys.chunk(attention.heads), strict=True):
        for weight, matrix in zip((query, key), _similar_pair(query), strict=True):
            weight.copy_(matrix * math.sqrt(_QUERY_KEY))
    value, output = _similar_pair(values)
    values.copy_(value * math.sqrt(_VALUE_OUTPUT))
    attention.out.weight.copy_(output.t() * -math.sqrt(_VALUE_OUTPUT))


def _similar_pair(like: Tensor) -> tuple[Tensor, Tensor]:
    """Two matrices of this shape: a shared orthogonal one, plus a smaller one of each."""
    shared, first, second = (nn.init.orthogonal_(torch.empty_like(like)) for _ in range(3))
    rest = math.sqrt(1 - _SHARED**2)
    return _SHARED * shared + rest * first, _SHARED * shared + rest * second


def default_device() -> torch.device:
    """The GPU of this process (by LOCAL_RANK), else Apple's (MPS), else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def resolve_device(name: str) -> str:
    """The name of the device to compute on, "" for `default_device()`; UserError if this machine does not have it."""
    check_device(name)
    return name or str(default_device())


def check_device(name: str) -> None:
    """Raise UserError unless `name` is a device of this machine; "" means the default and always passes."""
    if not name:
        return
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda", "mps"):
        raise UserError(f'"{name}" is not a device: use cpu, cuda, cuda:1 or mps, or omit it.')
    counts = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    if (device.index or 0) >= counts[device.type]:
        raise UserError(f'this machine has no device "{name}": omit it to use the best available device.')
