"""timm's hybrids of the paper (`vit_base_r50_s16_384`, ...): timm's ViT behind a ResNet with weight standardization.

The file differs from a plain ViT's by the tensors under `patch_embed.backbone`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vitral.architecture import Architecture, Size, StemConfig, ViTConfig
from vitral.checkpoints.card import Card
from vitral.checkpoints.formats.table import CheckpointHeader, Entry, Format, later_parts, norm
from vitral.checkpoints.formats.timm import TIMM
from vitral.checkpoints.formats.timm_reading import plain_header
from vitral.checkpoints.processors import to_timm
from vitral.errors import UserError

_BACKBONE = "patch_embed.backbone"
# The bottlenecks of the stem -> a factory of timm that builds it; only its name states the stem.
_FACTORIES: dict[tuple[int, ...], str] = {
    (): "vit_tiny_r_s16_p8_224",
    (2, 2, 2, 2): "vit_small_r26_s32_224",
    (3, 4, 9): "vit_base_r50_s16_224",
    (3, 4, 6, 3): "vit_large_r50_s32_224",
}


def _root(blocks: tuple[int, ...]) -> str:
    """Without stages, timm's backbone is the root itself."""
    return f"{_BACKBONE}.stem" if blocks else _BACKBONE


def _conv(theirs: str, ours: str, side: int, inputs: int, outputs: int) -> Entry:
    return Entry(f"{theirs}.weight", f"{ours}.weight", (outputs, inputs, side, side))


def _stem_entries(stem: StemConfig, channels: int) -> list[Entry]:
    wide, root = 64 * stem.width, _root(stem.blocks)
    entries = [_conv(f"{root}.conv", "stem.root.conv", 7, channels, wide)]
    entries += norm(f"{root}.norm", "stem.root.norm", wide)
    inputs = wide
    for stage, units in enumerate(stem.blocks):
        hidden = wide * 2**stage
        for unit in range(units):
            theirs, ours = f"{_BACKBONE}.stages.{stage}.blocks.{unit}", f"stem.stages.{stage}.{unit}"
            sides = ((1, inputs, hidden), (3, hidden, hidden), (1, hidden, 4 * hidden))
            for k, (side, before, after) in enumerate(sides, start=1):
                entries.append(_conv(f"{theirs}.conv{k}", f"{ours}.conv{k}", side, before, after))
                entries += norm(f"{theirs}.norm{k}", f"{ours}.norm{k}", after)
            if unit == 0:
                entries.append(_conv(f"{theirs}.downsample.conv", f"{ours}.projection", 1, inputs, 4 * hidden))
                entries += norm(f"{theirs}.downsample.norm", f"{ours}.projection_norm", 4 * hidden)
            inputs = 4 * hidden
    return entries


def _entries(c: Architecture) -> list[Entry]:
    assert isinstance(c, ViTConfig)
    assert c.stem is not None
    return _stem_entries(c.stem, c.channels) + TIMM.entries(_without_stem(c))


def _blocks(header: CheckpointHeader) -> tuple[int, ...]:
    """The bottlenecks of each stage; UserError if the backbone is not the paper's ResNet."""
    blocks: list[int] = []
    while header.has(f"{_BACKBONE}.stages.{len(blocks)}.blocks.0.conv1.weight"):
        blocks.append(header.count(rf"patch_embed\.backbone\.stages\.{len(blocks)}\.blocks\.(\d+)\."))
    if not header.has(f"{_root(tuple(blocks))}.conv.weight"):
        name = (header.config or {}).get("architecture") or "vit_*_resnet26d, vit_*_resnet50d or vit_base_mci"
        raise UserError(f"timm's {name} has another network in front than the paper's ResNet: that is not supported.")
    return tuple(blocks)


def _architecture(header: CheckpointHeader) -> ViTConfig:
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
    assert isinstance(vit, ViTConfig)
    image = image or (vit.image[0] * stem.stride, vit.image[1] * stem.stride)
    return replace(vit, stem=stem, channels=channels, image=image)


def _stated_image(header: CheckpointHeader, stem: StemConfig, patch: int) -> Size | None:
    """The image size that config.json states, if its patches fill the position table."""
    config = header.config or {}
    arguments, pretrained = config.get("model_args") or {}, config.get("pretrained_cfg") or {}
    rows = header.shape("pos_embed", 3)[1]
    for size in (arguments.get("img_size"), pretrained.get("input_size")):
        if size and not header.hints.grid:
            image = (size, size) if isinstance(size, int) else (size[-2], size[-1])
            height, width = stem.grid(image)
            if (height // patch) * (width // patch) in (rows, rows - 1):
                return image
    return None


def _unsupported_reason(architecture: Architecture) -> str | None:
    if not isinstance(architecture, ViTConfig) or architecture.stem is None:
        return "it is for hybrids, Vision Transformers behind a ResNet"
    stem = architecture.stem
    if stem.blocks not in _FACTORIES or stem.width != 1:
        return "timm's hybrids have the root alone, an R26 or an R50, of one width, in front"
    return later_parts(architecture) or TIMM.unsupported_reason(_without_stem(architecture))


def _without_stem(c: ViTConfig) -> ViTConfig:
    """The ViT whose image is the stem's feature map."""
    return c if c.stem is None else replace(c, stem=None, channels=c.stem.channels, image=c.stem.grid(c.image))


def _config(card: Card) -> dict[str, Any]:
    c = card.architecture
    assert isinstance(c, ViTConfig)
    assert c.stem is not None
    assert TIMM.config is not None
    config = TIMM.config(replace(card, architecture=_without_stem(c)))
    whole = {"img_size": list(c.image), "in_chans": c.channels}
    pretrained = {"input_size": [c.channels, *c.image], "num_classes": c.classes, **to_timm(card.preprocess, c.image)}
    arguments = {**config["model_args"], **whole}
    return {**config, "architecture": _FACTORIES[c.stem.blocks], "model_args": arguments, "pretrained_cfg": pretrained}


def _alone(architecture: Architecture) -> str | None:
    assert isinstance(architecture, ViTConfig)
    return TIMM.alone(_without_stem(architecture))


TIMM_HYBRID = Format(
    name="timm-hybrid",
    title="timm's hybrids with a ResNet (safetensors, or a folder with its config.json)",
    container="safetensors",
    recognises=lambda header: any(key.startswith(f"{_BACKBONE}.") for key in header.shapes),
    architecture=_architecture,
    entries=_entries,
    unsupported_reason=_unsupported_reason,
    class_row=TIMM.class_row,
    epsilons="timm",
    preprocess=TIMM.preprocess,
    class_names=TIMM.class_names,
    config=_config,
    alone=_alone,
)
