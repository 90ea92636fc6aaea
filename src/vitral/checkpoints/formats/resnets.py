"""ResNets: those of BiT, as big_transfer, timm and transformers store them, and in front of timm's hybrids.

The hybrids are those of the paper (`vit_base_r50_s16_384`, ...); their files differ from a plain ViT's by the tensors
under `patch_embed.backbone`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from vitral.architecture import Architecture, ResNetConfig, Size, StemConfig, ViTConfig
from vitral.checkpoints.card import Card
from vitral.checkpoints.formats import hf_config
from vitral.checkpoints.formats.google import flax_conv, plain_resize
from vitral.checkpoints.formats.layout import ResNetLayout, torch_conv, torch_resnet
from vitral.checkpoints.formats.table import (
    CheckpointHeader,
    Entry,
    Format,
    bias,
    later_parts,
    linear,
    norm,
    other_epsilon,
)
from vitral.checkpoints.formats.timm import TIMM, pretrained_cfg
from vitral.checkpoints.formats.timm_arguments import size_of_argument
from vitral.checkpoints.formats.timm_reading import plain_header
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


def _npz_head(features: int, classes: int) -> list[Entry]:
    kernel = flax_conv(_HEAD, "head.output", 1, features, classes)
    return [kernel, Entry(f"{_HEAD}/bias", "head.output.bias", (classes,))]


def _entries(
    c: ResNetConfig, root: str, units: ResNetLayout, norm: str, head: Callable[[int, int], list[Entry]]
) -> list[Entry]:
    """All tensors of a BiT, by the names of its parts outside of the bottlenecks; `head` takes features and classes."""
    wide = 64 * c.width
    entries = [units.conv(root, "root", 7, c.channels, wide), *units.entries("stages", c.blocks, wide)]
    return entries + units.norm(norm, "norm", c.features) + (head(c.features, c.classes) if c.classes else [])


def _npz_architecture(header: CheckpointHeader) -> ResNetConfig:
    _, _, channels, wide = header.shape(f"{_ROOT}/kernel", 4)
    units = [
        sum(header.has(f"resnet/block{stage}/unit{unit:02d}/a/group_norm/gamma") for unit in range(1, 100))
        for stage in range(1, 5)
    ]
    if 0 in units or wide % 64:
        raise UserError("the file is not a BiT ResNet of four stages: it is incomplete or not of this format.")
    blocks = (units[0], units[1], units[2], units[3])
    classes = header.size(f"{_HEAD}/kernel", 4, 3)
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
    entries=lambda c: _entries(c, _ROOT, _NPZ, "resnet", _npz_head),
    unsupported_reason=_unsupported_reason,
    preprocess=plain_resize,
)


# ------------------------------------------------------------------------------ BiT as timm and transformers name it


_TIMM_BLOCKS, _HF_BLOCKS = "stages.{}.blocks", "bit.encoder.stages.{}.layers"

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


def _timm_entries(c: ResNetConfig) -> list[Entry]:
    def head(features: int, classes: int) -> list[Entry]:  # a 1x1 convolution
        return [torch_conv("head.fc", "head.output", 1, features, classes), *bias("head.fc", "head.output", classes)]

    return _entries(c, "stem.conv", torch_resnet(f"{_TIMM_BLOCKS}.{{}}."), "norm", head)


def _hf_entries(c: ResNetConfig) -> list[Entry]:
    def head(features: int, classes: int) -> list[Entry]:
        return linear("classifier.1", "head.output", features, classes)

    return _entries(c, "bit.embedder.convolution", torch_resnet(f"{_HF_BLOCKS}.{{}}."), "bit.norm", head)


def _architecture(header: CheckpointHeader, root: str, blocks: str, head: str, image: Size) -> ResNetConfig:
    wide, channels, _, _ = header.shape(f"{root}.weight", 4)
    first, second, third, fourth = (
        header.count(re.escape(blocks.format(stage)) + r"\.(\d+)\.conv1\.weight") for stage in range(4)
    )
    if wide % 64:
        raise UserError(f"the file's first convolution has {wide} channels, which is not a multiple of 64.")
    return ResNetConfig(
        blocks=(first, second, third, fourth),
        width=wide // 64,
        image=image,
        channels=channels,
        classes=header.shapes.get(f"{head}.weight", (0,))[0],
        epsilons="timm",
    )


def _timm_architecture(header: CheckpointHeader) -> ResNetConfig:
    config = header.config or {}
    name = str(config.get("architecture") or "")
    if name and not name.endswith("_bit"):
        raise UserError(f"timm's {name} is another ResNet than BiT's (resnetv2_*_bit): that is not supported.")
    size = (config.get("pretrained_cfg") or {}).get("input_size") or (3, 224, 224)
    return _architecture(header, "stem.conv", _TIMM_BLOCKS, "head.fc", (size[-2], size[-1]))


def _hf_architecture(header: CheckpointHeader) -> ResNetConfig:
    config = header.config or {}
    for key, value in _HF_SETTINGS.items():
        if config.get(key, value) != value:
            raise UserError(f"the file's {key} is {config[key]!r}, and only {value!r} is supported for BiT.")
    crop = (header.preprocessor or {}).get("crop_size") or 224
    sides = (crop["height"], crop["width"]) if isinstance(crop, dict) else (crop, crop)
    return _architecture(header, "bit.embedder.convolution", _HF_BLOCKS, "classifier.1", sides)


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
    recognises=lambda header: header.has("stem.conv.weight") and header.has("stages.0.blocks.0.conv1.weight"),
    architecture=_timm_architecture,
    entries=_timm_entries,
    unsupported_reason=_timm_unsupported_reason,
    epsilons="timm",
    preprocess=TIMM.preprocess,
    class_names=TIMM.class_names,
    config=_timm_config,
)

HUGGING_FACE_BIT = Format(
    name="hf-bit",
    title="Hugging Face BiT ResNets (a folder)",
    recognises=lambda header: header.has("bit.embedder.convolution.weight"),
    architecture=_hf_architecture,
    entries=_hf_entries,
    unsupported_reason=_hf_unsupported_reason,
    epsilons="timm",
    preprocess=hf_config.preprocess,
    class_names=hf_config.class_names,
    config=_hf_config,
    preprocessor=hf_config.preprocessor,
    alone=hf_config.alone,
)


# --------------------------------------------------------------------------------------------------- timm's hybrids

_BACKBONE = "patch_embed.backbone"
# The bottlenecks of the stem -> a factory of timm that builds it; only its name states the stem.
_HYBRIDS: dict[tuple[int, ...], str] = {
    (): "vit_tiny_r_s16_p8_224",
    (2, 2, 2, 2): "vit_small_r26_s32_224",
    (3, 4, 9): "vit_base_r50_s16_224",
    (3, 4, 6, 3): "vit_large_r50_s32_224",
}


def _root(blocks: tuple[int, ...]) -> str:
    """Without stages, timm's backbone is the root itself."""
    return f"{_BACKBONE}.stem" if blocks else _BACKBONE


_UNITS = torch_resnet(_BACKBONE + ".stages.{}.blocks.{}.", "downsample.norm")


def _hybrid_entries(c: ViTConfig) -> list[Entry]:
    assert c.stem is not None
    wide, root = 64 * c.stem.width, _root(c.stem.blocks)
    entries = [torch_conv(f"{root}.conv", "stem.root.conv", 7, c.channels, wide)]
    entries += norm(f"{root}.norm", "stem.root.norm", wide) + _UNITS.entries("stem.stages", c.stem.blocks, wide)
    return entries + TIMM.entries(_without_stem(c))


def _blocks(header: CheckpointHeader) -> tuple[int, ...]:
    """The bottlenecks of each stage; UserError if the backbone is not the paper's ResNet."""
    blocks: list[int] = []
    while header.has(f"{_BACKBONE}.stages.{len(blocks)}.blocks.0.conv1.weight"):
        blocks.append(header.count(rf"patch_embed\.backbone\.stages\.{len(blocks)}\.blocks\.(\d+)\."))
    if not header.has(f"{_root(tuple(blocks))}.conv.weight"):
        name = (header.config or {}).get("architecture")
        model = f"timm's {name}" if name else "the model, such as a vit_*_resnet26d, vit_base_mci or vitamin of timm,"
        raise UserError(f"{model} has another network in front than the paper's ResNet: use timm for it.")
    return tuple(blocks)


def _hybrid_architecture(header: CheckpointHeader) -> ViTConfig:
    blocks = _blocks(header)
    wide, channels, _, _ = header.shape(f"{_root(blocks)}.conv.weight", 4)
    stem = StemConfig(blocks=blocks, width=wide // 64, epsilons="timm")
    patch = header.shape("patch_embed.proj.weight", 4)[3]
    image = _stated_image(header, stem, patch)
    if image is not None:
        height, width = stem.grid(image)
        header = replace(header, hints=replace(header.hints, grid=(height // patch, width // patch)))
    # To the ViT, the stem's feature map is the image.
    shapes = {key: shape for key, shape in header.shapes.items() if not key.startswith(f"{_BACKBONE}.")}
    vit = TIMM.architecture(plain_header(header, shapes, embed_layer="PatchEmbed"))
    image = image or (vit.image[0] * stem.stride, vit.image[1] * stem.stride)
    return replace(vit, stem=stem, channels=channels, image=image)


def _stated_image(header: CheckpointHeader, stem: StemConfig, patch: int) -> Size | None:
    """The image size that config.json states, if its patches fill the position table."""
    config = header.config or {}
    arguments, pretrained = config.get("model_args") or {}, config.get("pretrained_cfg") or {}
    rows = header.shape("pos_embed", 3)[1]
    for size in (arguments.get("img_size"), pretrained.get("input_size")):
        if size and not header.hints.grid:
            image = size_of_argument(size)
            height, width = stem.grid(image)
            if (height // patch) * (width // patch) in (rows, rows - 1):
                return image
    return None


def _hybrid_unsupported_reason(architecture: Architecture) -> str | None:
    if not isinstance(architecture, ViTConfig) or architecture.stem is None:
        return "it is for hybrids, Vision Transformers behind a ResNet"
    stem = architecture.stem
    if stem.blocks not in _HYBRIDS or stem.width != 1:
        return "timm's hybrids have the root alone, an R26 or an R50, of one width, in front"
    reason = later_parts(architecture) or other_epsilon(architecture)
    return reason or TIMM.unsupported_reason(_without_stem(architecture))


def _without_stem(c: ViTConfig) -> ViTConfig:
    """The ViT whose image is the stem's feature map."""
    return c if c.stem is None else replace(c, stem=None, channels=c.stem.channels, image=c.stem.grid(c.image))


def _hybrid_config(card: Card, c: ViTConfig) -> dict[str, Any]:
    assert c.stem is not None
    assert TIMM.config is not None
    config = TIMM.config(card, _without_stem(c))
    whole = {"img_size": list(c.image), "in_chans": c.channels}
    arguments = {**config["model_args"], **whole}
    return {
        **config,
        "architecture": _HYBRIDS[c.stem.blocks],
        "model_args": arguments,
        "pretrained_cfg": pretrained_cfg(card, c),
    }


TIMM_HYBRID = Format(
    name="timm-hybrid",
    title="timm's hybrids with a ResNet (safetensors, or a folder with its config.json)",
    recognises=lambda header: any(key.startswith(f"{_BACKBONE}.") for key in header.shapes),
    architecture=_hybrid_architecture,
    entries=_hybrid_entries,
    unsupported_reason=_hybrid_unsupported_reason,
    class_row=TIMM.class_row,
    epsilons="timm",
    preprocess=TIMM.preprocess,
    class_names=TIMM.class_names,
    config=_hybrid_config,
    alone=lambda c: TIMM.alone(_without_stem(c)),
)
