"""BiT's ResNetV2: `big_transfer`'s npz files, timm's `resnetv2_*_bit`, transformers' `BitForImageClassification`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from vitral.architecture import Architecture, ResNetConfig, Size
from vitral.checkpoints.card import Card
from vitral.checkpoints.formats import hf_config
from vitral.checkpoints.formats.google import flax_conv, plain_resize
from vitral.checkpoints.formats.layout import ResNetLayout, torch_conv, torch_resnet
from vitral.checkpoints.formats.table import CheckpointHeader, Entry, Format, norm
from vitral.checkpoints.formats.timm import TIMM, pretrained_cfg
from vitral.errors import UserError

# ------------------------------------------------------------------------------------------------------ big_transfer

_ROOT = "resnet/root_block/standardized_conv2d"
_HEAD = "resnet/head/conv2d"


def _npz_norm(theirs: str, ours: str, channels: int) -> list[Entry]:
    scale = Entry(f"{theirs}/group_norm/gamma", f"{ours}.weight", (channels,))
    return [scale, Entry(f"{theirs}/group_norm/beta", f"{ours}.bias", (channels,))]


_NPZ = ResNetLayout(
    unit=lambda stage, unit: f"resnet/block{stage + 1}/unit{unit + 1:02d}/",
    convs=("a/standardized_conv2d", "b/standardized_conv2d", "c/standardized_conv2d"),
    norms=("a", "b", "c"),
    projection="a/proj/standardized_conv2d",
    projection_norm="",
    conv=flax_conv,
    norm=_npz_norm,
)


def _npz_entries(c: ResNetConfig) -> list[Entry]:
    entries = [flax_conv(_ROOT, "root", 7, c.channels, 64 * c.width), *_NPZ.entries("stages", c.blocks, 64 * c.width)]
    entries += _npz_norm("resnet", "norm", c.features)
    if c.classes:
        entries.append(flax_conv(_HEAD, "head.output", 1, c.features, c.classes))
        entries.append(Entry(f"{_HEAD}/bias", "head.output.bias", (c.classes,)))
    return entries


def _npz_architecture(header: CheckpointHeader) -> ResNetConfig:
    _, _, channels, wide = header.shape(f"{_ROOT}/kernel", 4)
    units = [
        sum(header.has(f"resnet/block{stage}/unit{unit:02d}/a/group_norm/gamma") for unit in range(1, 100))
        for stage in range(1, 5)
    ]
    if 0 in units or wide % 64:
        raise UserError("the file is not a BiT ResNet of four stages: it is incomplete or of another kind.")
    classes = header.shape(f"{_HEAD}/kernel", 4)[3] if header.has(f"{_HEAD}/kernel") else 0
    blocks = (units[0], units[1], units[2], units[3])
    return ResNetConfig(blocks=blocks, width=wide // 64, channels=channels, classes=classes)


def _unsupported_reason(architecture: Architecture) -> str | None:
    if not isinstance(architecture, ResNetConfig):
        return "it is for BiT ResNets, not Vision Transformers"
    if architecture.axial:
        return "it does not support axial attention"
    if architecture.root_pool != "zero":
        return "its first max-pool is padded with zeros, not with minus infinity"
    return None


BIT = Format(
    name="bit",
    title="BiT npz (big_transfer)",
    container="npz",
    recognises=lambda header: header.has(f"{_ROOT}/kernel"),
    architecture=_npz_architecture,
    entries=_npz_entries,
    unsupported_reason=_unsupported_reason,
    preprocess=plain_resize,
)


# ------------------------------------------------------------------------------------------- timm and transformers


@dataclass(frozen=True)
class Names:
    """Names of the modules in one of the two libraries."""

    root: str
    blocks: str  # of a stage
    norm: str
    head: str
    kernel: tuple[int, ...]  # axes of the head's weight after (outputs, inputs): timm's is a 1x1 convolution


_TIMM = Names("stem.conv", "stages.{}.blocks", "norm", "head.fc", (1, 1))
_HF = Names("bit.embedder.convolution", "bit.encoder.stages.{}.layers", "bit.norm", "classifier.1", ())

# The bottlenecks of each stage and the width -> the factory of timm.
_FACTORIES: dict[tuple[tuple[int, ...], int], str] = {
    ((3, 4, 6, 3), 1): "resnetv2_50x1_bit",
    ((3, 4, 6, 3), 3): "resnetv2_50x3_bit",
    ((3, 4, 23, 3), 1): "resnetv2_101x1_bit",
    ((3, 4, 23, 3), 3): "resnetv2_101x3_bit",
    ((3, 8, 36, 3), 2): "resnetv2_152x2_bit",
    ((3, 8, 36, 3), 4): "resnetv2_152x4_bit",
}
# What transformers' config.json may state, and what our ResNet does.
_HF_SETTINGS = {
    **{"layer_type": "preactivation", "hidden_act": "relu", "global_padding": None, "num_groups": 32},
    **{"embedding_dynamic_padding": False, "output_stride": 32, "width_factor": 1},
}


def _entries(c: ResNetConfig, names: Names) -> list[Entry]:
    units = torch_resnet(lambda stage, unit: f"{names.blocks.format(stage)}.{unit}.")
    wide = 64 * c.width
    entries = [torch_conv(names.root, "root", 7, c.channels, wide), *units.entries("stages", c.blocks, wide)]
    entries += norm(names.norm, "norm", c.features)
    if c.classes:
        entries.append(Entry(f"{names.head}.weight", "head.output.weight", (c.classes, c.features, *names.kernel)))
        entries.append(Entry(f"{names.head}.bias", "head.output.bias", (c.classes,)))
    return entries


def _architecture(header: CheckpointHeader, names: Names, image: Size) -> ResNetConfig:
    wide, channels, _, _ = header.shape(f"{names.root}.weight", 4)
    first, second, third, fourth = (
        header.count(re.escape(names.blocks.format(stage)) + r"\.(\d+)\.conv1\.weight") for stage in range(4)
    )
    if wide % 64:
        raise UserError(f"the file's first convolution has {wide} channels, which is not a multiple of 64.")
    head = f"{names.head}.weight"
    return ResNetConfig(
        blocks=(first, second, third, fourth),
        width=wide // 64,
        image=image,
        channels=channels,
        classes=header.shapes[head][0] if header.has(head) else 0,
        epsilons="timm",
    )


def _timm_architecture(header: CheckpointHeader) -> ResNetConfig:
    config = header.config or {}
    name = str(config.get("architecture") or "")
    if name and not name.endswith("_bit"):
        raise UserError(f"timm's {name} is another ResNet than BiT's (resnetv2_*_bit): that is not supported.")
    size = (config.get("pretrained_cfg") or {}).get("input_size") or (3, 224, 224)
    return _architecture(header, _TIMM, (size[-2], size[-1]))


def _hf_architecture(header: CheckpointHeader) -> ResNetConfig:
    config = header.config or {}
    for key, value in _HF_SETTINGS.items():
        if config.get(key, value) != value:
            raise UserError(f"the file's {key} is {config[key]!r}, and only {value!r} is supported for BiT.")
    crop = (header.preprocessor or {}).get("crop_size") or 224
    sides = (crop["height"], crop["width"]) if isinstance(crop, dict) else (crop, crop)
    return _architecture(header, _HF, sides)


def _timm_unsupported_reason(architecture: Architecture) -> str | None:
    reason = BIT.unsupported_reason(architecture)
    if reason or not isinstance(architecture, ResNetConfig):
        return reason
    if (architecture.blocks, architecture.width) not in _FACTORIES:
        return f"timm has {', '.join(_FACTORIES.values())} only"
    return None


def _timm_config(card: Card, c: ResNetConfig) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architecture": _FACTORIES[c.blocks, c.width],
        "num_classes": c.classes,
        "num_features": c.features,
        "model_args": {"in_chans": c.channels},
        "pretrained_cfg": {**pretrained_cfg(card, c), "pool_size": None},
    }
    return {**config, "label_names": list(card.class_names)} if card.class_names else config


def _hf_config(card: Card, c: ResNetConfig) -> dict[str, Any]:
    return {
        "architectures": ["BitForImageClassification"],
        "model_type": "bit",
        "num_channels": c.channels,
        "embedding_size": 64 * c.width,
        "hidden_sizes": [256 * c.width * 2**stage for stage in range(4)],
        "depths": list(c.blocks),
        **_HF_SETTINGS,
        **hf_config.labels(card),
    }


def _hf_unsupported_reason(architecture: Architecture) -> str | None:
    reason = BIT.unsupported_reason(architecture)
    return reason or (None if architecture.classes else "BitForImageClassification has a head, this model has none")


TIMM_BIT = Format(
    name="timm-bit",
    title="timm's BiT ResNets (safetensors, or a folder with its config.json)",
    container="safetensors",
    recognises=lambda header: header.has("stem.conv.weight") and header.has("stages.0.blocks.0.conv1.weight"),
    architecture=_timm_architecture,
    entries=lambda c: _entries(c, _TIMM),
    unsupported_reason=_timm_unsupported_reason,
    epsilons="timm",
    preprocess=TIMM.preprocess,
    class_names=TIMM.class_names,
    config=_timm_config,
)

HUGGING_FACE_BIT = Format(
    name="hf-bit",
    title="Hugging Face BiT ResNets (a folder)",
    container="safetensors",
    recognises=lambda header: header.has("bit.embedder.convolution.weight"),
    architecture=_hf_architecture,
    entries=lambda c: _entries(c, _HF),
    unsupported_reason=_hf_unsupported_reason,
    epsilons="timm",
    preprocess=hf_config.preprocess,
    class_names=hf_config.class_names,
    config=_hf_config,
    preprocessor=hf_config.preprocessor,
    alone=hf_config.alone,
)
