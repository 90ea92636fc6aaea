"""The tensors of timm's VisionTransformer, Eva and Beit, which name and split some of them differently."""

from __future__ import annotations

from dataclasses import dataclass

from vitral.architecture import ViTConfig
from vitral.checkpoints.formats.table import CheckpointHeader, Entry, bias, linear, norm

_SHARED_BIAS = "rel_pos_bias.relative_position_bias_table"


@dataclass(frozen=True)
class Layout:
    """How a file stores what several classes of timm store differently."""

    gamma: bool = False  # LayerScale as gamma_1 (Eva, Beit), not ls1.gamma
    separate_qkv: bool = False  # q_proj, k_proj and v_proj, not qkv
    separate_gate: bool = False  # SwiGLU as fc1_g and fc1_x, not fc1
    shared_bias: bool = False  # one table of relative positions for all blocks
    register_rows: bool = False  # the position table has rows for the registers


def layout_of_file(header: CheckpointHeader, register_rows: bool) -> Layout:
    """The layout that a file's names show; whether its table has rows for registers depends on the grid."""
    return Layout(
        gamma=header.has("blocks.0.gamma_1"),
        separate_qkv=header.has("blocks.0.attn.q_proj.weight"),
        separate_gate=header.has("blocks.0.mlp.fc1_g.weight"),
        shared_bias=header.has(_SHARED_BIAS),
        register_rows=register_rows,
    )


def entries(c: ViTConfig, layout: Layout) -> list[Entry]:
    """All tensors of a model."""
    listed = encoder_entries(c, layout)
    listed += [Entry("reg_token", "registers", (1, c.registers, c.width))] if c.registers else []
    listed += norm("norm_pre", "pre_norm", c.width) if c.pre_norm else []
    if c.rope and c.rope.learned:
        listed.append(Entry("rope.freqs", "rope.frequencies", (2, c.depth, c.heads, c.width // c.heads // 2)))
    if c.norm_place != "none":
        listed += norm("fc_norm" if c.norm_place == "features" else "norm", "norm", c.width)
    listed += _map_entries(c) if c.pool == "map" else []
    head = linear("head", "head.output", c.width, c.classes) if c.classes else []
    return listed + (head if c.head_bias else head[:1])


def encoder_entries(c: ViTConfig, layout: Layout | None = None) -> list[Entry]:
    """The entries that timm and DINO share: patches, class token, positions and blocks."""
    layout = layout or Layout()
    kernel = (c.width, c.channels, c.patch, c.patch)
    listed = [Entry("patch_embed.proj.weight", "embed.weight", kernel)]
    listed += bias("patch_embed.proj", "embed", c.width) if c.patch_bias else []
    listed += [Entry("cls_token", "class_token", (1, 1, c.width))] if c.class_token else []
    listed += _position_entries(c, layout.register_rows) if c.position == "1d" else []
    for i in range(c.depth):
        listed += _block_entries(i, c, layout)
    return listed


def _position_entries(c: ViTConfig, register_rows: bool) -> list[Entry]:
    """A table (1, rows, dim): rows of the class token and the registers, where it has them, then of the patches."""
    rows, columns = c.grid(c.image)
    listed, start = [], 0
    if c.class_row:
        listed.append(Entry("pos_embed", "positions.0.class_row", (1, 1, c.width), rows=(0, 1)))
        start = 1
    if register_rows:  # added to the registers, which computes the same
        end = start + c.registers
        listed.append(Entry("pos_embed", "registers", (1, c.registers, c.width), rows=(start, end)))
        start = end
    n = rows * columns
    return [*listed, Entry("pos_embed", "positions.0.table", (1, n, c.width), rows=(start, start + n))]


def _block_entries(index: int, c: ViTConfig, layout: Layout) -> list[Entry]:
    block = f"blocks.{index}"
    listed = norm(f"{block}.norm1", f"{block}.norm1", c.width) + norm(f"{block}.norm2", f"{block}.norm2", c.width)
    listed += _attention_entries(f"{block}.attn", f"{block}.attention", c, layout)
    listed += _mlp_entries(f"{block}.mlp", c, layout)
    if c.layer_scale:
        scale = "{block}.gamma_{k}" if layout.gamma else "{block}.ls{k}.gamma"
        listed += [Entry(scale.format(block=block, k=k), f"{block}.scale{k}.scale", (c.width,)) for k in (1, 2)]
    return listed


def _attention_entries(theirs: str, ours: str, c: ViTConfig, layout: Layout) -> list[Entry]:
    width, dim = c.width, c.width // c.heads
    if layout.separate_qkv:
        projections = [f"{theirs}.{name}_proj" for name in "qkv"]
        weight, pieces = f"{ours}.qkv.weight", list(enumerate(projections))
        listed = [Entry(f"{name}.weight", weight, (width, width), part=(k, 3)) for k, name in pieces]
        fused = [Entry(f"{name}.bias", f"{ours}.qkv.bias", (width,), part=(k, 3)) for k, name in pieces]
        query, value = f"{projections[0]}.bias", f"{projections[2]}.bias"
    else:
        listed = [Entry(f"{theirs}.qkv.weight", f"{ours}.qkv.weight", (3 * width, width))]
        fused = bias(f"{theirs}.qkv", f"{ours}.qkv", 3 * width)
        query, value = f"{theirs}.q_bias", f"{theirs}.v_bias"
    if c.qkv_bias and c.key_bias:
        listed += fused
    elif c.qkv_bias:
        pair = enumerate((query, value))
        listed += [Entry(name, f"{ours}.qv_bias", (width,), part=(k, 2)) for k, name in pair]
    if c.qk_norm:
        listed += norm(f"{theirs}.q_norm", f"{ours}.q_norm", dim) + norm(f"{theirs}.k_norm", f"{ours}.k_norm", dim)
    listed += norm(f"{theirs}.norm", f"{ours}.norm", width) if c.attention_norm else []
    listed += linear(f"{theirs}.proj", f"{ours}.out", width, width)
    return listed + (_relative_entries(theirs, ours, c, layout) if c.position == "bias" else [])


def _relative_entries(theirs: str, ours: str, c: ViTConfig, layout: Layout) -> list[Entry]:
    """(offsets + 3, heads): a row per offset between two patches, then the class token's as query, key and both."""
    rows, columns = c.grid(c.image)
    offsets = (2 * rows - 1) * (2 * columns - 1)
    key = _SHARED_BIAS if layout.shared_bias else f"{theirs}.relative_position_bias_table"
    return [
        Entry(key, f"{ours}.relative.table", (offsets, c.heads), rows=(0, offsets)),
        Entry(key, f"{ours}.relative.class_table", (3, c.heads), rows=(offsets, offsets + 3)),
    ]


def _mlp_entries(name: str, c: ViTConfig, layout: Layout) -> list[Entry]:
    if layout.separate_gate:
        hidden = []
        for k, half in enumerate(("fc1_g", "fc1_x")):
            hidden.append(Entry(f"{name}.{half}.weight", f"{name}.hidden.weight", (c.mlp, c.width), part=(k, 2)))
            hidden.append(Entry(f"{name}.{half}.bias", f"{name}.hidden.bias", (c.mlp,), part=(k, 2)))
    else:
        hidden = linear(f"{name}.fc1", f"{name}.hidden", c.width, c.mlp * (2 if c.swiglu else 1))
    inner = norm(f"{name}.norm", f"{name}.norm", c.mlp) if c.mlp_norm else []
    return [*hidden, *inner, *linear(f"{name}.fc2", f"{name}.output", c.mlp, c.width)]


def _map_entries(c: ViTConfig) -> list[Entry]:
    mlp = c.map_mlp or c.mlp
    return [
        Entry("attn_pool.latent", "map.probe", (1, 1, c.width)),
        *linear("attn_pool.q", "map.q", c.width, c.width),
        *linear("attn_pool.kv", "map.kv", c.width, 2 * c.width),
        *linear("attn_pool.proj", "map.out", c.width, c.width),
        *norm("attn_pool.norm", "map.norm", c.width),
        *linear("attn_pool.mlp.fc1", "map.mlp.hidden", c.width, mlp),
        *linear("attn_pool.mlp.fc2", "map.mlp.output", mlp, c.width),
    ]
