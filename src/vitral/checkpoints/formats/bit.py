"""BiT npz: ResNetV2 with TensorFlow's names, as `big_transfer` released it."""

from __future__ import annotations

from vitral.architecture import Architecture, ResNetConfig
from vitral.checkpoints.formats.google import plain_resize
from vitral.checkpoints.formats.table import CheckpointHeader, Entry, Format
from vitral.errors import UserError

_ROOT = "resnet/root_block/standardized_conv2d/kernel"
_HEAD = "resnet/head/conv2d"


def _conv(theirs: str, ours: str, side: int, inputs: int, outputs: int) -> Entry:
    return Entry(f"{theirs}/kernel", f"{ours}.weight", (side, side, inputs, outputs), axes=(3, 2, 0, 1))


def _norm(theirs: str, ours: str, channels: int) -> list[Entry]:
    scale = Entry(f"{theirs}/group_norm/gamma", f"{ours}.weight", (channels,))
    return [scale, Entry(f"{theirs}/group_norm/beta", f"{ours}.bias", (channels,))]


def _unit(theirs: str, ours: str, inputs: int, inner: int, first: bool) -> list[Entry]:
    sides = (("a", 1, inputs, inner), ("b", 3, inner, inner), ("c", 1, inner, 4 * inner))
    entries = []
    for k, (letter, side, before, after) in enumerate(sides, start=1):
        entries += _norm(f"{theirs}/{letter}", f"{ours}.norm{k}", before)
        entries.append(_conv(f"{theirs}/{letter}/standardized_conv2d", f"{ours}.conv{k}", side, before, after))
    if first:
        entries.append(_conv(f"{theirs}/a/proj/standardized_conv2d", f"{ours}.projection", 1, inputs, 4 * inner))
    return entries


def _entries(c: Architecture) -> list[Entry]:
    assert isinstance(c, ResNetConfig)
    wide = 64 * c.width
    entries = [Entry(_ROOT, "root.weight", (7, 7, c.channels, wide), axes=(3, 2, 0, 1))]
    inputs = wide
    for stage, units in enumerate(c.blocks):
        inner = wide * 2**stage
        for unit in range(units):
            theirs = f"resnet/block{stage + 1}/unit{unit + 1:02d}"
            entries += _unit(theirs, f"stages.{stage}.{unit}", inputs, inner, first=unit == 0)
            inputs = 4 * inner
    entries += _norm("resnet", "norm", inputs)
    if c.classes:
        kernel = (1, 1, inputs, c.classes)
        entries.append(Entry(f"{_HEAD}/kernel", "head.output.weight", kernel, axes=(3, 2, 0, 1)))
        entries.append(Entry(f"{_HEAD}/bias", "head.output.bias", (c.classes,)))
    return entries


def _architecture(header: CheckpointHeader) -> ResNetConfig:
    _, _, channels, wide = header.shape(_ROOT, 4)
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
    recognises=lambda header: header.has(_ROOT),
    architecture=_architecture,
    entries=_entries,
    unsupported_reason=_unsupported_reason,
    preprocess=plain_resize,
)
