"""Google's npz files: those of `vision_transformer`, hybrids included, and of big_vision.

The released files of `vision_transformer` are older than Flax Linen, whose names the later ones have. A Linen file with
`posembed_input` is also the oldest version of big_vision, where positions are added before the class token is
prepended, so that it has no position row.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from vitral.architecture import Architecture, Pool, StemConfig, ViTConfig
from vitral.checkpoints.card import Preprocess
from vitral.checkpoints.formats.layout import ResNetLayout, position_entries
from vitral.checkpoints.formats.table import (
    CheckpointHeader,
    Entry,
    Format,
    Tensors,
    image_of_rows,
    is_square,
    later_parts,
    other_epsilon,
)
from vitral.errors import UserError

_POSITION = "Transformer/posembed_input/pos_embedding"
_BIG_VISION_POSITION = "pos_embedding"
_MAP = "MAPHead_0"
_IMAGES, _TEXTS = "img/", "txt/"  # two towers; their temperature and bias count as part of the text tower


@dataclass(frozen=True)
class _BlockNames:
    """Names of the modules of a block."""

    norm1: str
    attention: str
    norm2: str
    mlp: str


_PRE_LINEN = _BlockNames("LayerNorm_0", "MultiHeadDotProductAttention_1", "LayerNorm_2", "MlpBlock_3")
_LINEN = _BlockNames("LayerNorm_0", "MultiHeadDotProductAttention_0", "LayerNorm_1", "MlpBlock_0")


def _dense(theirs: str, ours: str, inputs: int, outputs: int) -> list[Entry]:
    """A Flax dense layer: kernel (in, out)."""
    return [
        Entry(f"{theirs}/kernel", f"{ours}.weight", (inputs, outputs), axes=(1, 0)),
        Entry(f"{theirs}/bias", f"{ours}.bias", (outputs,)),
    ]


def _norm(theirs: str, ours: str, shape: tuple[int, ...]) -> list[Entry]:
    return [Entry(f"{theirs}/scale", f"{ours}.weight", shape), Entry(f"{theirs}/bias", f"{ours}.bias", shape)]


def _attention(theirs: str, ours: dict[str, tuple[str, tuple[int, int]]], out: str, c: ViTConfig) -> list[Entry]:
    """Flax attention: kernels (dim, heads, dim / heads). `ours` maps q, k and v to parts of our projections."""
    head = c.width // c.heads
    entries = []
    for name, (projection, part) in ours.items():
        shape = (c.width, c.heads, head)
        entries.append(Entry(f"{theirs}/{name}/kernel", f"{projection}.weight", shape, axes=(1, 2, 0), part=part))
        entries.append(Entry(f"{theirs}/{name}/bias", f"{projection}.bias", (c.heads, head), part=part))
    entries.append(Entry(f"{theirs}/out/kernel", f"{out}.weight", (c.heads, head, c.width), axes=(2, 0, 1)))
    entries.append(Entry(f"{theirs}/out/bias", f"{out}.bias", (c.width,)))
    return entries


def _mlp(theirs: str, ours: str, c: ViTConfig) -> list[Entry]:
    hidden = _dense(f"{theirs}/Dense_0", f"{ours}.hidden", c.width, c.mlp)
    return hidden + _dense(f"{theirs}/Dense_1", f"{ours}.output", c.mlp, c.width)


def _encoder(c: ViTConfig, names: _BlockNames) -> list[Entry]:
    """Patch embedding, class token, blocks and final norm: the same in every version."""
    channels = c.stem.channels if c.stem else c.channels
    kernel = (c.patch, c.patch, channels, c.width)
    entries = [Entry("embedding/kernel", "embed.weight", kernel, axes=(3, 2, 0, 1))]
    entries += [Entry("embedding/bias", "embed.bias", (c.width,))]
    entries += [Entry("cls", "class_token", (1, 1, c.width))] if c.class_token else []
    for i in range(c.depth):
        theirs, ours = f"Transformer/encoderblock_{i}", f"blocks.{i}"
        qkv = {name: (f"{ours}.attention.qkv", (k, 3)) for k, name in enumerate(("query", "key", "value"))}
        entries += _norm(f"{theirs}/{names.norm1}", f"{ours}.norm1", (c.width,))
        entries += _attention(f"{theirs}/{names.attention}", qkv, f"{ours}.attention.out", c)
        entries += _norm(f"{theirs}/{names.norm2}", f"{ours}.norm2", (c.width,))
        entries += _mlp(f"{theirs}/{names.mlp}", f"{ours}.mlp", c)
    return entries + _norm("Transformer/encoder_norm", "norm", (c.width,))


def _head(c: ViTConfig) -> list[Entry]:
    entries = _dense("pre_logits", "head.hidden", c.width, c.representation) if c.representation else []
    return entries + (_dense("head", "head.output", c.representation or c.width, c.classes) if c.classes else [])


def _read_encoder(header: CheckpointHeader, names: _BlockNames) -> dict[str, Any]:
    """The sizes that the shapes of every version show."""
    patch, _, channels, width = header.shape("embedding/kernel", 4)
    first = "Transformer/encoderblock_0"
    _, heads, _ = header.shape(f"{first}/{names.attention}/query/kernel", 3)
    hidden = header.shape(f"{first}/{names.mlp}/Dense_0/kernel", 2)[1]
    depth = header.count(r"Transformer/encoderblock_(\d+)/")
    sizes = {"depth": depth, "width": width, "mlp": hidden, "heads": heads, "patch": patch, "channels": channels}
    outputs = {"representation": header.size("pre_logits/kernel", 2, 1), "classes": header.size("head/kernel", 2, 1)}
    return {**sizes, **outputs}


def _unsupported_reason(architecture: Architecture) -> str | None:
    """What no Flax file of Google's can say."""
    if not isinstance(architecture, ViTConfig):
        return "it holds Vision Transformers, not ResNets"
    c = architecture
    if reason := later_parts(c):
        return reason
    if c.gelu != "tanh":
        return "it implies the tanh GELU, and these weights use the exact (erf) one"
    if reason := other_epsilon(c):
        return reason
    if c.registers or c.layer_scale or c.axial:
        return "it does not support registers, LayerScale or axial blocks"
    if c.position == "relative" or c.injection != "input":
        return "it adds positions once, at the input, and does not support relative ones"
    if c.norm_place != "tokens":
        return "its last LayerNorm is before pooling, not after"
    if c.pool == "mean" and c.class_token:
        return "its mean would include the class token"
    if c.pool == "map" and c.class_token:
        return "its models with attention pooling have no class token"
    return None


def plain_resize(header: CheckpointHeader, architecture: Architecture) -> Preprocess:
    """Resize without antialiasing, values from -1 to 1: the input pipelines of `vision_transformer` and BiT."""
    height, width = architecture.image
    size = f"{height}" if height == width else f"{height}, {width}"
    half = (0.5,) * architecture.channels
    return Preprocess(f"decode|resize({size}, antialias=false)", half, half)


# ------------------------------------------------------------------------------------------------ vision_transformer


def flax_conv(theirs: str, ours: str, side: int, inputs: int, outputs: int) -> Entry:
    """A convolution of Flax or TensorFlow: kernel (height, width, in, out)."""
    return Entry(f"{theirs}/kernel", f"{ours}.weight", (side, side, inputs, outputs), axes=(3, 2, 0, 1))


def _stem_entries(c: ViTConfig, group_norm: bool) -> list[Entry]:
    assert c.stem is not None
    wide = 64 * c.stem.width

    def group(theirs: str, ours: str, channels: int) -> list[Entry]:
        return _norm(theirs, ours, (1, 1, 1, channels) if group_norm else (channels,))

    units = ResNetLayout(
        unit=lambda stage, unit: f"block{stage + 1}/unit{unit + 1}/",
        convs=("conv1", "conv2", "conv3"),
        norms=("gn1", "gn2", "gn3"),
        projection="conv_proj",
        projection_norm="gn_proj",
        conv=flax_conv,
        norm=group,
    )
    root = [flax_conv("conv_root", "stem.root.conv", 7, c.channels, wide), *group("gn_root", "stem.root.norm", wide)]
    return root + units.entries("stem.stages", c.stem.blocks, wide)


def _stem(header: CheckpointHeader) -> StemConfig | None:
    if not header.has("conv_root/kernel"):
        return None
    width = header.shape("conv_root/kernel", 4)[3] // 64
    blocks = []
    while any(key.startswith(f"block{len(blocks) + 1}/unit") for key in header.shapes):
        stage = len(blocks) + 1
        blocks.append(sum(header.has(f"block{stage}/unit{unit}/conv1/kernel") for unit in range(1, 100)))
    return StemConfig(blocks=tuple(blocks), width=width)


def _architecture(header: CheckpointHeader, names: _BlockNames) -> ViTConfig:
    sizes = _read_encoder(header, names)
    token, stem = header.has("cls"), _stem(header)
    if stem:
        sizes["channels"] = header.shape("conv_root/kernel", 4)[2]
    stride = sizes["patch"] * (stem.stride if stem else 1)
    image = image_of_rows(header, header.shape(_POSITION, 3)[1] - int(token), stride)
    return ViTConfig(**sizes, image=image, stem=stem, class_token=token, pool="token" if token else "mean")


def _lacks_class_row(header: CheckpointHeader) -> bool:
    """Whether there is a class token but only rows for patches: the oldest files of big_vision, with the same name."""
    shape, hint = header.shapes[_POSITION], header.hints.grid
    if len(shape) != 3 or not header.has("cls"):
        return False
    return shape[1] == hint[0] * hint[1] if hint else is_square(shape[1]) and not is_square(shape[1] - 1)


def _format(name: str, title: str, names: _BlockNames, group_norm: bool) -> Format[ViTConfig]:
    def entries(c: ViTConfig) -> list[Entry]:
        stem = _stem_entries(c, group_norm) if c.stem else []
        return stem + _encoder(c, names) + position_entries(_POSITION, c) + _head(c)

    def reason(architecture: Architecture) -> str | None:
        if isinstance(architecture, ViTConfig) and architecture.pool == "map":
            return "it does not support attention pooling (big_vision does)"
        return _unsupported_reason(architecture)

    return Format(
        name=name,
        title=title,
        container="npz",
        recognises=lambda header: (
            header.has(_POSITION)
            and header.has(f"Transformer/encoderblock_0/{names.attention}/query/kernel")
            and not any(key.startswith("MAPHead_0/") for key in header.shapes)
            and not _lacks_class_row(header)
        ),
        architecture=lambda header: _architecture(header, names),
        entries=entries,
        unsupported_reason=reason,
        ignored=r"opt/",
        preprocess=plain_resize,
    )


GOOGLE = _format("google", "Google npz, names of the released files", _PRE_LINEN, group_norm=True)
GOOGLE_LINEN = _format("google-linen", "Google npz, Flax Linen names", _LINEN, group_norm=False)


# -------------------------------------------------------------------------------------------------------- big_vision


def _renames(keys: Iterable[str]) -> dict[str, str]:
    """Keys of the image tower (of LiT and SigLIP), and the newest of three names of the table of positions."""
    renamed = {key: key.removeprefix("params/") for key in keys}
    if any(new.startswith(_IMAGES) for new in renamed.values()):
        texts = {key: _TEXTS + new.removeprefix(_TEXTS) for key, new in renamed.items()}
        renamed = {
            key: new.removeprefix(_IMAGES) if new.startswith(_IMAGES) else texts[key] for key, new in renamed.items()
        }
    older = {"Transformer/pos_embedding", _POSITION}
    return {key: _BIG_VISION_POSITION if new in older else new for key, new in renamed.items()}


def _big_vision_architecture(header: CheckpointHeader) -> ViTConfig:
    sizes = _read_encoder(header, _LINEN)
    token = header.has("cls")
    pool: Pool = "token" if token else "map" if header.has(f"{_MAP}/probe") else "mean"
    if not header.has(_BIG_VISION_POSITION):
        header.assume("assumed: fixed sin-cos positions, as the file has no table of positions")
        # The file does not show the grid, and nothing depends on it: 224 pixels without a hint.
        rows, columns = header.hints.grid or (224 // sizes["patch"], 224 // sizes["patch"])
        image = (rows * sizes["patch"], columns * sizes["patch"])
        return ViTConfig(**sizes, image=image, class_token=token, pool=pool, position="sincos2d", class_position=False)
    rows = header.shape(_BIG_VISION_POSITION, 3)[1]
    hint = header.hints.grid
    class_row = token and (rows - 1 == hint[0] * hint[1] if hint else not is_square(rows))
    image = image_of_rows(header, rows - int(class_row), sizes["patch"])
    return ViTConfig(**sizes, image=image, class_token=token, pool=pool, class_position=class_row)


def _assumptions(header: CheckpointHeader, c: ViTConfig) -> tuple[str, ...]:
    count = sum(key.startswith(_TEXTS) for key in header.shapes)
    return (f"text tower not read ({count} tensors)",) if count else ()


def _map_entries(c: ViTConfig) -> list[Entry]:
    inner = f"{_MAP}/{_LINEN.attention}"
    ours = {"query": ("map.q", (0, 1)), "key": ("map.kv", (0, 2)), "value": ("map.kv", (1, 2))}
    entries = [Entry(f"{_MAP}/probe", "map.probe", (1, 1, c.width))]
    entries += _attention(inner, ours, "map.out", c)
    entries += _norm(f"{_MAP}/LayerNorm_0", "map.norm", (c.width,))
    return entries + _mlp(f"{_MAP}/{_LINEN.mlp}", "map.mlp", c)


def _big_vision_entries(c: ViTConfig) -> list[Entry]:
    table = position_entries(_BIG_VISION_POSITION, c) if c.position == "1d" else []
    return _encoder(c, _LINEN) + table + (_map_entries(c) if c.pool == "map" else []) + _head(c)


def _big_vision_unsupported_reason(architecture: Architecture) -> str | None:
    if isinstance(architecture, ViTConfig) and architecture.stem:
        return "it does not support a hybrid's ResNet"
    return _unsupported_reason(architecture)


def _big_vision_preprocess(header: CheckpointHeader, architecture: Architecture) -> Preprocess:
    """Short side resized to 8/7 of the crop, as 256 is of 224; values from -1 to 1."""
    short = min(architecture.image)
    if architecture.image != (short, short):
        return plain_resize(header, architecture)
    half = (0.5,) * architecture.channels
    return Preprocess(f"decode|resize_small({round(short * 8 / 7)})|central_crop({short})", half, half)


BIG_VISION = Format(
    name="big_vision",
    title="big_vision npz",
    container="npz",
    recognises=lambda header: (
        header.has("embedding/kernel")  # a text tower has none
        and header.has(f"Transformer/encoderblock_0/{_LINEN.attention}/query/kernel")
    ),
    architecture=_big_vision_architecture,
    entries=_big_vision_entries,
    unsupported_reason=_big_vision_unsupported_reason,
    renames=_renames,
    ignored=rf"opt/|chrono/|{_TEXTS}",
    assumptions=_assumptions,
    positions=("1d", "sincos2d"),
    class_row=lambda c: "folded",
    preprocess=_big_vision_preprocess,
)


# Trained with `scan=True`, all blocks are one whose tensors have a leading axis of layers.
_STACKED, _NUMBERED = "Transformer/encoderblock/", "Transformer/encoderblock_{}/"


def _scan_architecture(header: CheckpointHeader) -> ViTConfig:
    shapes = {}
    for key, shape in header.shapes.items():
        numbered = [key.replace(_STACKED, _NUMBERED.format(i)) for i in range(shape[0] if shape else 0)]
        shapes |= dict.fromkeys(numbered, shape[1:]) if key.startswith(_STACKED) else {key: shape}
    return _big_vision_architecture(replace(header, shapes=shapes))


def _scan_unpack(tensors: Tensors, c: ViTConfig) -> Tensors:
    unpacked: Tensors = {}
    for key, tensor in tensors.items():
        if not key.startswith(_STACKED):
            unpacked[key] = tensor
        elif tensor.ndim and len(tensor) == c.depth:
            unpacked |= {key.replace(_STACKED, _NUMBERED.format(i)): layer for i, layer in enumerate(tensor)}
        else:
            raise UserError(f"tensor {key} has the shape {list(tensor.shape)} where {c.depth} layers are expected.")
    return unpacked


def _scan_pack(tensors: Tensors, c: ViTConfig) -> Tensors:
    first = _NUMBERED.format(0)
    packed = {key: tensor for key, tensor in tensors.items() if not key.startswith("Transformer/encoderblock_")}
    for key in [key for key in tensors if key.startswith(first)]:
        layers = [tensors[key.replace(first, _NUMBERED.format(i))] for i in range(c.depth)]
        packed[key.replace(first, _STACKED)] = torch.stack(layers)
    return packed


BIG_VISION_SCAN = replace(
    BIG_VISION,
    name="big_vision-scan",
    title="big_vision npz, layers stacked (scan=True)",
    recognises=lambda header: (
        header.has("embedding/kernel") and header.has(f"{_STACKED}{_LINEN.attention}/query/kernel")
    ),
    architecture=_scan_architecture,
    unpack=_scan_unpack,
    pack=_scan_pack,
)
