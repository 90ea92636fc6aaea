"""BiT's ResNetV2 in PyTorch: timm's `resnetv2_*_bit`, and transformers' `BitForImageClassification` (a folder)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from vitral.architecture import Architecture, ResNetConfig, Size
from vitral.checkpoints.card import Card
from vitral.checkpoints.formats.bit import BIT
from vitral.checkpoints.formats.hugging_face import HUGGING_FACE
from vitral.checkpoints.formats.table import CheckpointHeader, Entry, Format, norm
from vitral.checkpoints.formats.timm import TIMM
from vitral.checkpoints.processors import to_timm
from vitral.errors import UserError


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


def _conv(theirs: str, ours: str, side: int, inputs: int, outputs: int) -> Entry:
    return Entry(f"{theirs}.weight", f"{ours}.weight", (outputs, inputs, side, side))


def _entries(c: Architecture, names: Names) -> list[Entry]:
    assert isinstance(c, ResNetConfig)
    wide = 64 * c.width
    entries = [_conv(names.root, "root", 7, c.channels, wide)]
    inputs = wide
    for stage, units in enumerate(c.blocks):
        hidden = wide * 2**stage
        for unit in range(units):
            theirs, ours = f"{names.blocks.format(stage)}.{unit}", f"stages.{stage}.{unit}"
            sides = ((1, inputs, hidden), (3, hidden, hidden), (1, hidden, 4 * hidden))
            for k, (side, before, after) in enumerate(sides, start=1):
                entries += norm(f"{theirs}.norm{k}", f"{ours}.norm{k}", before)
                entries.append(_conv(f"{theirs}.conv{k}", f"{ours}.conv{k}", side, before, after))
            if unit == 0:
                entries.append(_conv(f"{theirs}.downsample.conv", f"{ours}.projection", 1, inputs, 4 * hidden))
            inputs = 4 * hidden
    entries += norm(names.norm, "norm", inputs)
    if c.classes:
        entries.append(Entry(f"{names.head}.weight", "head.output.weight", (c.classes, inputs, *names.kernel)))
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


def _timm_config(card: Card) -> dict[str, Any]:
    c = card.architecture
    assert isinstance(c, ResNetConfig)
    config: dict[str, Any] = {
        "architecture": _FACTORIES[c.blocks, c.width],
        "num_classes": c.classes,
        "num_features": c.features,
        "model_args": {"in_chans": c.channels},
        "pretrained_cfg": {
            **{"input_size": [c.channels, *c.image], "num_classes": c.classes, "pool_size": None},
            **to_timm(card.preprocess, card.architecture.image),
        },
    }
    return {**config, "label_names": list(card.class_names)} if card.class_names else config


def _hf_config(card: Card) -> dict[str, Any]:
    c = card.architecture
    assert isinstance(c, ResNetConfig)
    names = card.class_names or tuple(f"LABEL_{i}" for i in range(c.classes))
    return {
        "architectures": ["BitForImageClassification"],
        "model_type": "bit",
        "num_channels": c.channels,
        "embedding_size": 64 * c.width,
        "hidden_sizes": [256 * c.width * 2**stage for stage in range(4)],
        "depths": list(c.blocks),
        **_HF_SETTINGS,
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
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
    preprocess=HUGGING_FACE.preprocess,
    class_names=HUGGING_FACE.class_names,
    config=_hf_config,
    preprocessor=HUGGING_FACE.preprocessor,
    alone=lambda c: "transformers reads its shape from config.json",
)
