"""Google's `vision_transformer` npz files, hybrids included: names of the released files and of Flax Linen.

The released files are older than Linen. A Linen file with `posembed_input` is also the oldest version of big_vision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vitral.architecture import Architecture, StemConfig, ViTConfig
from vitral.checkpoints.card import Preprocess
from vitral.checkpoints.formats.table import (
    CheckpointHeader,
    Entry,
    Format,
    grid_of_rows,
    is_square,
    later_parts,
    position_entries,
)

POSITION = "Transformer/posembed_input/pos_embedding"


@dataclass(frozen=True)
class BlockNames:
    """Names of the modules of a block."""

    norm1: str
    attention: str
    norm2: str
    mlp: str


PRE_LINEN = BlockNames("LayerNorm_0", "MultiHeadDotProductAttention_1", "LayerNorm_2", "MlpBlock_3")
LINEN = BlockNames("LayerNorm_0", "MultiHeadDotProductAttention_0", "LayerNorm_1", "MlpBlock_0")


def dense(theirs: str, ours: str, inputs: int, outputs: int) -> list[Entry]:
    """A Flax dense layer: kernel (in, out)."""
    return [
        Entry(f"{theirs}/kernel", f"{ours}.weight", (inputs, outputs), axes=(1, 0)),
        Entry(f"{theirs}/bias", f"{ours}.bias", (outputs,)),
    ]


def norm(theirs: str, ours: str, shape: tuple[int, ...]) -> list[Entry]:
    return [Entry(f"{theirs}/scale", f"{ours}.weight", shape), Entry(f"{theirs}/bias", f"{ours}.bias", shape)]


def attention(theirs: str, ours: dict[str, tuple[str, tuple[int, int]]], out: str, c: ViTConfig) -> list[Entry]:
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


def mlp(theirs: str, ours: str, c: ViTConfig) -> list[Entry]:
    hidden = dense(f"{theirs}/Dense_0", f"{ours}.hidden", c.width, c.mlp)
    return hidden + dense(f"{theirs}/Dense_1", f"{ours}.output", c.mlp, c.width)


def encoder(c: ViTConfig, names: BlockNames) -> list[Entry]:
    """Patch embedding, class token, blocks and final norm: the same in every version."""
    channels = c.stem.channels if c.stem else c.channels
    kernel = (c.patch, c.patch, channels, c.width)
    entries = [Entry("embedding/kernel", "embed.weight", kernel, axes=(3, 2, 0, 1))]
    entries += [Entry("embedding/bias", "embed.bias", (c.width,))]
    entries += [Entry("cls", "class_token", (1, 1, c.width))] if c.class_token else []
    for i in range(c.depth):
        theirs, ours = f"Transformer/encoderblock_{i}", f"blocks.{i}"
        qkv = {name: (f"{ours}.attention.qkv", (k, 3)) for k, name in enumerate(("query", "key", "value"))}
        entries += norm(f"{theirs}/{names.norm1}", f"{ours}.norm1", (c.width,))
        entries += attention(f"{theirs}/{names.attention}", qkv, f"{ours}.attention.out", c)
        entries += norm(f"{theirs}/{names.norm2}", f"{ours}.norm2", (c.width,))
        entries += mlp(f"{theirs}/{names.mlp}", f"{ours}.mlp", c)
    return entries + norm("Transformer/encoder_norm", "norm", (c.width,))


def head(c: ViTConfig) -> list[Entry]:
    entries = dense("pre_logits", "head.hidden", c.width, c.representation) if c.representation else []
    return entries + (dense("head", "head.output", c.representation or c.width, c.classes) if c.classes else [])


def read_encoder(header: CheckpointHeader, names: BlockNames) -> dict[str, Any]:
    """The sizes that the shapes of every version show."""
    patch, _, channels, width = header.shape("embedding/kernel", 4)
    first = "Transformer/encoderblock_0"
    _, heads, _ = header.shape(f"{first}/{names.attention}/query/kernel", 3)
    hidden = header.shape(f"{first}/{names.mlp}/Dense_0/kernel", 2)[1]
    depth = header.count(r"Transformer/encoderblock_(\d+)/")
    representation = header.shape("pre_logits/kernel", 2)[1] if header.has("pre_logits/kernel") else 0
    classes = header.shape("head/kernel", 2)[1] if header.has("head/kernel") else 0
    sizes = {"depth": depth, "width": width, "mlp": hidden, "heads": heads, "patch": patch, "channels": channels}
    return {**sizes, "representation": representation, "classes": classes}


def unsupported_reason(architecture: Architecture) -> str | None:
    """What no Flax file of Google's can say."""
    if not isinstance(architecture, ViTConfig):
        return "it holds Vision Transformers, not ResNets"
    c = architecture
    if reason := later_parts(c):
        return reason
    if c.gelu != "tanh":
        return "it implies the tanh GELU, and these weights use the exact (erf) one"
    if c.norm_eps != 1e-6:
        return f"it implies a LayerNorm epsilon of 1e-6, not {c.norm_eps:g}"
    if c.registers or c.layer_scale or c.axial:
        return "it does not support registers, LayerScale or axial blocks"
    if c.position == "relative" or c.injection != "input":
        return "it adds positions once, at the input, and does not support relative ones"
    if c.norm_place != "tokens":
        return "its last LayerNorm is before pooling, not after"
    if c.pool == "mean" and c.class_token:
        return "its mean would include the class token"
    return None


def plain_resize(header: CheckpointHeader, architecture: Architecture) -> Preprocess:
    """Resize without antialiasing, values from -1 to 1: the input pipelines of `vision_transformer` and BiT."""
    height, width = architecture.image
    size = f"{height}" if height == width else f"{height}, {width}"
    half = (0.5,) * architecture.channels
    return Preprocess(f"decode|resize({size}, antialias=false)", half, half)


def _stem_entries(c: ViTConfig, group_norm: bool) -> list[Entry]:
    assert c.stem is not None
    wide = 64 * c.stem.width

    def conv(theirs: str, ours: str, side: int, inputs: int, outputs: int) -> Entry:
        return Entry(f"{theirs}/kernel", f"{ours}.weight", (side, side, inputs, outputs), axes=(3, 2, 0, 1))

    def group(theirs: str, ours: str, channels: int) -> list[Entry]:
        return norm(theirs, ours, (1, 1, 1, channels) if group_norm else (channels,))

    entries = [conv("conv_root", "stem.root.conv", 7, c.channels, wide), *group("gn_root", "stem.root.norm", wide)]
    inputs = wide
    for stage, units in enumerate(c.stem.blocks):
        f = wide * 2**stage
        for unit in range(units):
            theirs, ours = f"block{stage + 1}/unit{unit + 1}", f"stem.stages.{stage}.{unit}"
            sides = ((1, inputs, f), (3, f, f), (1, f, 4 * f))
            for k, (side, before, after) in enumerate(sides, start=1):
                entries.append(conv(f"{theirs}/conv{k}", f"{ours}.conv{k}", side, before, after))
                entries += group(f"{theirs}/gn{k}", f"{ours}.norm{k}", after)
            if unit == 0:
                entries.append(conv(f"{theirs}/conv_proj", f"{ours}.projection", 1, inputs, 4 * f))
                entries += group(f"{theirs}/gn_proj", f"{ours}.projection_norm", 4 * f)
            inputs = 4 * f
    return entries


def _stem(header: CheckpointHeader) -> StemConfig | None:
    if not header.has("conv_root/kernel"):
        return None
    width = header.shape("conv_root/kernel", 4)[3] // 64
    blocks = []
    while any(key.startswith(f"block{len(blocks) + 1}/unit") for key in header.shapes):
        stage = len(blocks) + 1
        blocks.append(sum(header.has(f"block{stage}/unit{unit}/conv1/kernel") for unit in range(1, 100)))
    return StemConfig(blocks=tuple(blocks), width=width)


def _architecture(header: CheckpointHeader, names: BlockNames) -> ViTConfig:
    sizes = read_encoder(header, names)
    token = header.has("cls")
    rows = header.shape(POSITION, 3)[1]
    grid = grid_of_rows(header, rows - int(token))
    stem = _stem(header)
    stride = sizes["patch"] * (stem.stride if stem else 1)
    if stem:
        sizes["channels"] = header.shape("conv_root/kernel", 4)[2]
    image = (grid[0] * stride, grid[1] * stride)
    return ViTConfig(**sizes, image=image, stem=stem, class_token=token, pool="token" if token else "mean")


def _lacks_class_row(header: CheckpointHeader) -> bool:
    """Whether there is a class token but only rows for patches: the oldest files of big_vision, with the same name."""
    shape, hint = header.shapes[POSITION], header.hints.grid
    if len(shape) != 3 or not header.has("cls"):
        return False
    return shape[1] == hint[0] * hint[1] if hint else is_square(shape[1]) and not is_square(shape[1] - 1)


def _format(name: str, title: str, names: BlockNames, group_norm: bool) -> Format:
    def entries(c: Architecture) -> list[Entry]:
        assert isinstance(c, ViTConfig)
        stem = _stem_entries(c, group_norm) if c.stem else []
        return stem + encoder(c, names) + position_entries(POSITION, c) + head(c)

    def reason(architecture: Architecture) -> str | None:
        if isinstance(architecture, ViTConfig) and architecture.pool == "map":
            return "it does not support attention pooling (big_vision does)"
        return unsupported_reason(architecture)

    return Format(
        name=name,
        title=title,
        container="npz",
        recognises=lambda header: (
            header.has(POSITION)
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


GOOGLE = _format("google", "Google npz, names of the released files", PRE_LINEN, group_norm=True)
GOOGLE_LINEN = _format("google-linen", "Google npz, Flax Linen names", LINEN, group_norm=False)
