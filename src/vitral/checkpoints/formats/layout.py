"""The names of a library's tensors, and the table of a format that follows from them.

Vision Transformers in PyTorch differ in names and in how projections are split, not in structure, and so do the ResNets
of BiT and of hybrids.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vitral.architecture import ViTConfig
from vitral.checkpoints.formats.table import CheckpointHeader, Entry, bias, heads_of, image_of_rows, linear, norm
from vitral.errors import UserError

TIMM_SHARED_BIAS = "rel_pos_bias.relative_position_bias_table"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The names of a ViT's tensors; names of a block's are below `block`, names of absent parts are empty."""

    patches: str
    positions: str
    class_token: str
    block: str  # with {} for the index
    norm1: str
    qkv: tuple[str, ...]  # the layer of all three, or those of queries, keys and values
    out: str
    norm2: str
    hidden: str
    output: str
    norm: str
    qkv_separator: str = "."  # between the name of such a layer and "weight" or "bias"
    qv_biases: tuple[str, ...] = ()  # where keys have none; if empty, the first and the last of `qkv_biases`
    registers: str = ""
    pre_norm: str = ""
    pooled_norm: str = ""  # the final norm, where it comes after pooling and has another name
    qk_norms: tuple[str, str] = ("", "")
    attention_norm: str = ""
    mlp_norm: str = ""
    gates: tuple[str, ...] = ()  # the first layer of a SwiGLU: gate and value together, or each by itself
    gated_output: str = ""  # the second, if it is not `output`
    scales: tuple[str, str] = ("", "")
    bias_table: str = ""
    shared_bias_table: str = ""  # one for all blocks, outside of them
    frequencies: str = ""  # of a learned RoPE
    map_head: tuple[str, ...] = ()  # probe, queries, keys and values, output, norm, and two layers of an MLP
    head_hidden: str = ""
    head: str = ""
    embedding: bool = False  # positions are an nn.Embedding, (rows, dim) instead of (1, rows, dim)
    register_rows: bool = False  # the position table has rows for the registers

    @property
    def qkv_biases(self) -> tuple[str, ...]:
        return tuple(f"{name}{self.qkv_separator}bias" for name in self.qkv)

    def in_block(self, index: int, name: str) -> str:
        """The full name of a part of a block."""
        return f"{self.block.format(index)}.{name}"


def timm_layout(
    *,
    gamma: bool = False,
    separate_qkv: bool = False,
    separate_gate: bool = False,
    shared_bias: bool = False,
    register_rows: bool = False,
) -> Layout:
    """The names of timm's VisionTransformer, Eva and Beit, which the code of DINO and of MAE shares.

    With `gamma`, LayerScale is gamma_1 instead of ls1.gamma; `shared_bias` is one table of relative positions for all
    blocks.
    """
    return Layout(
        patches="patch_embed.proj",
        positions="pos_embed",
        class_token="cls_token",
        registers="reg_token",
        pre_norm="norm_pre",
        block="blocks.{}",
        norm1="norm1",
        qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj") if separate_qkv else ("attn.qkv",),
        qv_biases=() if separate_qkv else ("attn.q_bias", "attn.v_bias"),
        qk_norms=("attn.q_norm", "attn.k_norm"),
        attention_norm="attn.norm",
        out="attn.proj",
        norm2="norm2",
        hidden="mlp.fc1",
        gates=("mlp.fc1_g", "mlp.fc1_x") if separate_gate else ("mlp.fc1",),
        mlp_norm="mlp.norm",
        output="mlp.fc2",
        scales=("gamma_1", "gamma_2") if gamma else ("ls1.gamma", "ls2.gamma"),
        bias_table="attn.relative_position_bias_table",
        shared_bias_table=TIMM_SHARED_BIAS if shared_bias else "",
        frequencies="rope.freqs",
        norm="norm",
        pooled_norm="fc_norm",
        map_head=tuple(f"attn_pool.{part}" for part in ("latent", "q", "kv", "proj", "norm", "mlp.fc1", "mlp.fc2")),
        head="head",
        register_rows=register_rows,
    )


def read_sizes(header: CheckpointHeader, names: Layout) -> dict[str, Any]:
    """The fields of `ViTConfig` that the shapes of every layout show."""
    kernel = header.shape(f"{names.patches}.weight", 4)
    width, channels, patch, columns = kernel
    if columns != patch:
        raise UserError(
            f"its patch embedding of the shape {list(kernel)} has patches that are not square, or its channels last, "
            "as MLX writes them: that is not supported."
        )
    gated = bool(names.gates) and header.has(names.in_block(0, f"{names.gates[0]}.weight"))
    mlp = header.shape(names.in_block(0, f"{names.gates[0] if gated else names.hidden}.weight"), 2)[0]
    if names.gates == (names.hidden,):  # the second layer shows whether the first is a gate and its value
        rows, mlp = mlp, header.shape(names.in_block(0, f"{names.output}.weight"), 2)[1]
        gated = rows == 2 * mlp
    elif gated and len(names.gates) == 1:
        mlp //= 2
    return {
        "depth": header.count(re.escape(names.block).replace(r"\{\}", r"(\d+)") + r"\."),
        **{"width": width, "mlp": mlp, "swiglu": gated, "patch": patch, "channels": channels},
        "class_token": bool(names.class_token),
        "registers": header.size(names.registers, 3, 1),
        "layer_scale": bool(names.scales[0]) and header.has(names.in_block(0, names.scales[0])),
        "classes": header.size(f"{names.head}.weight"),
    }


def plain_architecture(header: CheckpointHeader, names: Layout, **fields: Any) -> ViTConfig:
    """A ViT with a class token and learned positions; `fields` are what the names of this layout imply."""
    sizes = read_sizes(header, names)
    rows = header.shape(names.positions, 2 if names.embedding else 3)[-2]
    sizes |= {"image": image_of_rows(header, rows - 1, sizes["patch"]), "gelu": "erf"}
    sizes |= {"heads": heads_of(header, sizes["depth"], sizes["width"]), **fields}
    return ViTConfig(**sizes)


def read_parts(header: CheckpointHeader, names: Layout) -> dict[str, Any]:
    """The parts of a layout that a model may have or not, where every name of the layout is optional."""
    block = names.in_block(0, "")
    bias = any(header.has(block + name) for name in (*names.qkv_biases[:1], *names.qv_biases[:1]))
    key_bias = header.has(block + names.qkv_biases[len(names.qkv_biases) // 2])
    return {
        "class_token": header.has(names.class_token),
        "qkv_bias": bias,
        "key_bias": key_bias or not bias,
        "patch_bias": header.has(f"{names.patches}.bias"),
        "pre_norm": header.has(f"{names.pre_norm}.weight"),
        "qk_norm": header.has(f"{block}{names.qk_norms[0]}.weight"),
        "attention_norm": header.has(f"{block}{names.attention_norm}.weight"),
        "mlp_norm": header.has(f"{block}{names.mlp_norm}.weight"),
    }


def layout_entries(names: Layout, c: ViTConfig) -> list[Entry]:
    """All tensors of a model."""
    token = (c.width,) if names.embedding else (1, 1, c.width)
    entries = [Entry(f"{names.patches}.weight", "embed.weight", (c.width, c.channels, c.patch, c.patch))]
    entries += bias(names.patches, "embed", c.width) if c.patch_bias else []
    entries += [Entry(names.class_token, "class_token", token)] if c.class_token else []
    entries += [Entry(names.registers, "registers", (1, c.registers, c.width))] if c.registers else []
    if c.position == "1d":
        options = {"embedding": names.embedding, "register_rows": names.register_rows}
        entries += position_entries(names.positions, c, **options)
    entries += norm(names.pre_norm, "pre_norm", c.width) if c.pre_norm else []
    if c.rope and c.rope.learned:
        shape = (2, c.depth, c.heads, c.width // c.heads // 2)
        entries.append(Entry(names.frequencies, "rope.frequencies", shape))
    for i in range(c.depth):
        entries += block_entries(names, i, f"blocks.{i}", c)
    pooled = c.norm_place == "features" and names.pooled_norm
    entries += norm(names.pooled_norm if pooled else names.norm, "norm", c.width) if c.norm_place != "none" else []
    entries += _map_head(names.map_head, c) if c.pool == "map" else []
    entries += linear(names.head_hidden, "head.hidden", c.width, c.representation) if c.representation else []
    head = linear(names.head, "head.output", c.representation or c.features, c.classes) if c.classes else []
    return entries + (head if c.head_bias else head[:1])


def position_entries(key: str, c: ViTConfig, *, embedding: bool = False, register_rows: bool = False) -> list[Entry]:
    """A table (1, rows, dim): rows of the class token and the registers, if it has them, then of the patches."""
    rows, columns = c.grid(c.image)
    parts = [("positions.0.class_row", 1)] if c.class_row else []
    parts += [("registers", c.registers)] if register_rows else []  # added to them, which computes the same
    entries, start, lead = [], 0, () if embedding else (1,)
    for ours, count in (*parts, ("positions.0.table", rows * columns)):
        entries.append(Entry(key, ours, (*lead, count, c.width), rows=(start, start + count)))
        start += count
    return entries


def block_entries(names: Layout, index: int, ours: str, c: ViTConfig) -> list[Entry]:
    """The tensors of one block, which is called `ours`."""
    theirs, attention = names.block.format(index), f"{ours}.attention"
    entries = norm(f"{theirs}.{names.norm1}", f"{ours}.norm1", c.width)
    entries += norm(f"{theirs}.{names.norm2}", f"{ours}.norm2", c.width)
    weights = tuple(f"{name}{names.qkv_separator}weight" for name in names.qkv)
    entries += _parts(theirs, weights, f"{attention}.qkv.weight", (3 * c.width, c.width))
    if c.qkv_bias and c.key_bias:
        entries += _parts(theirs, names.qkv_biases, f"{attention}.qkv.bias", (3 * c.width,))
    elif c.qkv_bias:
        entries += _parts(theirs, names.qv_biases or names.qkv_biases[::2], f"{attention}.qv_bias", (2 * c.width,))
    for name, normed in zip(names.qk_norms, ("q_norm", "k_norm"), strict=True) if c.qk_norm else ():
        entries += norm(f"{theirs}.{name}", f"{attention}.{normed}", c.width // c.heads)
    entries += norm(f"{theirs}.{names.attention_norm}", f"{attention}.norm", c.width) if c.attention_norm else []
    entries += linear(f"{theirs}.{names.out}", f"{attention}.out", c.width, c.width)
    if c.position == "bias":
        key = names.shared_bias_table or f"{theirs}.{names.bias_table}"
        rows, columns = c.grid(c.image)
        n, relative = (2 * rows - 1) * (2 * columns - 1), f"{attention}.relative"  # one per offset of two patches
        entries.append(Entry(key, f"{relative}.table", (n, c.heads), rows=(0, n)))
        entries.append(Entry(key, f"{relative}.class_table", (3, c.heads), rows=(n, n + 3)))
    if c.swiglu:
        for kind, shape in (("weight", (2 * c.mlp, c.width)), ("bias", (2 * c.mlp,))):
            gates = tuple(f"{gate}.{kind}" for gate in names.gates)
            entries += _parts(theirs, gates, f"{ours}.mlp.hidden.{kind}", shape)
    else:
        entries += linear(f"{theirs}.{names.hidden}", f"{ours}.mlp.hidden", c.width, c.mlp)
    entries += norm(f"{theirs}.{names.mlp_norm}", f"{ours}.mlp.norm", c.mlp) if c.mlp_norm else []
    output = names.gated_output if c.swiglu and names.gated_output else names.output
    entries += linear(f"{theirs}.{output}", f"{ours}.mlp.output", c.mlp, c.width)
    if c.layer_scale:
        entries += [Entry(f"{theirs}.{names.scales[k - 1]}", f"{ours}.scale{k}.scale", (c.width,)) for k in (1, 2)]
    return entries


def _parts(theirs: str, names: tuple[str, ...], ours: str, shape: tuple[int, ...]) -> list[Entry]:
    """Tensors that fill equal parts of one of ours, whose shape is this."""
    n = len(names)
    rows = (shape[0] // n, *shape[1:])
    return [Entry(f"{theirs}.{name}", ours, rows, part=(k, n)) for k, name in enumerate(names)]


def _map_head(names: tuple[str, ...], c: ViTConfig) -> list[Entry]:
    probe, queries, keys_values, out, last_norm, hidden, output = names
    mlp = c.map_mlp or c.mlp
    return [
        Entry(probe, "map.probe", (1, 1, c.width)),
        *linear(queries, "map.q", c.width, c.width),
        *linear(keys_values, "map.kv", c.width, 2 * c.width),
        *linear(out, "map.out", c.width, c.width),
        *norm(last_norm, "map.norm", c.width),
        *linear(hidden, "map.mlp.hidden", c.width, mlp),
        *linear(output, "map.mlp.output", mlp, c.width),
    ]


@dataclass(frozen=True)
class ResNetLayout:
    """The names of the bottlenecks of a ResNet, and how a library stores convolutions and norms."""

    unit: Callable[[int, int], str]  # what the names of a unit's parts start with, by its stage and index
    convs: tuple[str, str, str]
    norms: tuple[str, str, str]
    projection: str
    projection_norm: str  # empty: a ResNet with norms before its convolutions, and none of the projection
    conv: Callable[[str, str, int, int, int], Entry]  # theirs, ours, side, inputs, outputs
    norm: Callable[[str, str, int], list[Entry]]  # theirs, ours, channels

    def entries(self, ours: str, blocks: tuple[int, ...], wide: int) -> list[Entry]:
        """The bottlenecks of all stages, which are below `ours`; the first takes `wide` channels."""
        entries, inputs = [], wide
        for stage, units in enumerate(blocks):
            hidden = wide * 2**stage
            for index in range(units):
                entries += self._unit(self.unit(stage, index), f"{ours}.{stage}.{index}", inputs, hidden, index == 0)
                inputs = 4 * hidden
        return entries

    def _unit(self, theirs: str, ours: str, inputs: int, hidden: int, first: bool) -> list[Entry]:
        entries = []
        sides = ((1, inputs, hidden), (3, hidden, hidden), (1, hidden, 4 * hidden))
        for k, (side, before, after) in enumerate(sides):
            conv = self.conv(theirs + self.convs[k], f"{ours}.conv{k + 1}", side, before, after)
            channels = after if self.projection_norm else before
            normed = self.norm(theirs + self.norms[k], f"{ours}.norm{k + 1}", channels)
            entries += [conv, *normed] if self.projection_norm else [*normed, conv]
        if first:
            entries.append(self.conv(theirs + self.projection, f"{ours}.projection", 1, inputs, 4 * hidden))
            if self.projection_norm:
                entries += self.norm(theirs + self.projection_norm, f"{ours}.projection_norm", 4 * hidden)
        return entries


def torch_resnet(unit: str, projection_norm: str = "") -> ResNetLayout:
    """The names of timm and transformers; `unit` has {} for a stage and for its unit."""
    return ResNetLayout(
        unit.format,
        convs=("conv1", "conv2", "conv3"),
        norms=("norm1", "norm2", "norm3"),
        projection="downsample.conv",
        projection_norm=projection_norm,
        conv=torch_conv,
        norm=norm,
    )


def torch_conv(theirs: str, ours: str, side: int, inputs: int, outputs: int) -> Entry:
    """A convolution of torch, as ours."""
    return Entry(f"{theirs}.weight", f"{ours}.weight", (outputs, inputs, side, side))
