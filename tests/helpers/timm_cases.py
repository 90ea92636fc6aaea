"""Every registered ViT of timm, with its own arguments but two blocks, few heads and a small image."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from oracles import randomised
from timm_factories import captured, class_defaults
from torch import Tensor, nn

CLASSES = 7


def shrunk(name: str) -> dict[str, Any]:
    """Arguments that make a factory's model small, but leave its kinds of layers and the width of its heads."""
    kind, own = captured(name)
    if kind == "ResNetV2":  # its factory does not take other sizes; see `build`
        return {}
    if kind == "NaFlexVit":
        return {"depth": 2}
    arguments = {**class_defaults(kind), **own}
    width, heads, patch = arguments["embed_dim"], arguments["num_heads"], arguments["patch_size"]
    if "embed_layer" in own:  # a stem without a projection has the width of the blocks
        return {"depth": 2, "img_size": [64, 96]}
    few = min(heads, 4)
    small = {"depth": 2, "embed_dim": width // heads * few, "num_heads": few, "img_size": [4 * patch, 5 * patch]}
    if int(small["embed_dim"] * arguments["mlp_ratio"]) % 2:  # a packed SwiGLU has two halves
        small["mlp_ratio"] = 3.0
    return {**small, "num_kv_heads": [few, few // 2]} if own.get("num_kv_heads") else small


def build(name: str, arguments: dict[str, Any]) -> nn.Module:
    """A model of timm with random parameters, norms and biases included."""
    import timm
    from timm.models.resnetv2 import _create_resnetv2_bit

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        if name.startswith("resnetv2"):
            return randomised(_create_resnetv2_bit(name, layers=[1, 1, 1, 1], num_classes=CLASSES))
        return randomised(timm.create_model(name, num_classes=CLASSES, **arguments))


def save(model: nn.Module, folder: Path, arguments: dict[str, Any]) -> Path:
    """The folder that timm's own writer for the hub makes."""
    from timm.models._hub import save_for_hf

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save_for_hf(model, str(folder), model_args=arguments, safe_serialization=True)
    return folder


def images(arguments: dict[str, Any]) -> Tensor:
    size = arguments.get("img_size", [96, 96])
    return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))


def save_header(name: str, path: Path, **settings: Any) -> Path:
    """A safetensors file of the model in its full size, sparse: the header is real, the tensors are holes."""
    import timm

    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = timm.create_model(name, num_classes=CLASSES, **settings).state_dict()
    header, end = {}, 0
    for key, tensor in state.items():
        size = 4 * tensor.numel()
        header[key] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + end)
    return path


def relative_gap(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, relative to the largest output; infinite where the shapes differ."""
    if ours.shape != theirs.shape:
        return float("inf")
    return float((ours - theirs).abs().max() / theirs.abs().max())
