"""timm's models that are its plain ViT but for the way in: hybrids behind a ResNet, and NaFlexVit.

The hybrids are those of the paper (`vit_base_r50_s16_384`, ...), whose ResNet standardizes its weights; their files
differ from a plain ViT's by the tensors under `patch_embed.backbone`. In NaFlexVit the patch embedding is a linear
layer, and positions are a grid. Its images are given whole here; timm's batches of patches from images of several sizes
are not needed for that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from vitral.architecture import Architecture, ResizeRule, Size, StemConfig, ViTConfig
from vitral.checkpoints.card import Card, Preprocess
from vitral.checkpoints.formats.layout import torch_conv, torch_resnet
from vitral.checkpoints.formats.table import CheckpointHeader, Entry, Format, Shape, Tensors, later_parts, norm
from vitral.checkpoints.formats.timm import TIMM, pretrained_cfg
from vitral.checkpoints.formats.timm_arguments import size_of_argument
from vitral.checkpoints.formats.timm_reading import plain_header
from vitral.errors import UserError

# ---------------------------------------------------------------------------------------------------------- hybrids

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


_UNITS = torch_resnet(lambda stage, unit: f"{_BACKBONE}.stages.{stage}.blocks.{unit}.", "downsample.norm")


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
        name = (header.config or {}).get("architecture") or "vit_*_resnet26d, vit_*_resnet50d or vit_base_mci"
        raise UserError(f"timm's {name} has another network in front than the paper's ResNet: that is not supported.")
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
    return later_parts(architecture) or TIMM.unsupported_reason(_without_stem(architecture))


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
    container="safetensors",
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


# -------------------------------------------------------------------------------------------------------- NaFlexVit

_PROJECTION, _POSITIONS = "patch_embed.proj.weight", "pos_embed"
_ROWS, _COLUMNS = "embeds.pos_embed_y", "embeds.pos_embed_x"  # of factorized positions
_KEYS = {
    "embeds.proj.weight": _PROJECTION,
    "embeds.proj.bias": "patch_embed.proj.bias",
    "embeds.pos_embed": _POSITIONS,
    "embeds.cls_token": "cls_token",
    "embeds.reg_token": "reg_token",
}
_SIGLIP = {"act_layer": "gelu_tanh", "global_pool": "map", "pos_embed_interp_mode": "bilinear"}
# What the factories of timm set and the shapes do not show.
_NAFLEX: dict[str, dict[str, Any]] = {
    "naflexvit_base_patch16_gap": {"global_pool": "avg"},
    "naflexvit_base_patch16_par_gap": {"global_pool": "avg", "pos_embed_ar_preserving": True},
    "naflexvit_base_patch16_parfac_gap": {"global_pool": "avg", "pos_embed_ar_preserving": True},
    "naflexvit_base_patch16_map": {"global_pool": "map"},
    "naflexvit_so150m2_patch16_reg1_gap": {"global_pool": "avg"},
    "naflexvit_so150m2_patch16_reg1_map": {"global_pool": "map"},
    "naflexvit_base_patch16_siglip": _SIGLIP,
    "naflexvit_so400m_patch16_siglip": {**_SIGLIP, "num_heads": 16},
}
# Arguments that NaFlexVit shares with timm's plain ViT.
_ARGUMENTS = (
    *("patch_size", "in_chans", "embed_dim", "depth", "num_heads", "mlp_ratio", "class_token", "reg_tokens"),
    *("init_values", "act_layer", "fc_norm", "global_pool", "qkv_bias"),
)
# Arguments that another network would need.
_PLAIN = {
    **{"rope_type": ("", "none"), "attn_type": ("standard",), "patchify_channels_last": (True,)},
    **{"dynamic_img_pad": (False,), "input_norm_layer": (None,), "embed_norm_layer": (None,), "norm_layer": (None,)},
    **{"pool_include_prefix": (False,), "final_norm": (True,), "embed_proj_type": ("linear",)},
}
_RULES: dict[tuple[str, bool, bool], ResizeRule] = {  # interpolation, aspect ratio preserved, factorized
    ("bicubic", False, False): "timm",
    ("bilinear", False, False): "siglip",
    ("bicubic", True, False): "naflex-par",
    ("bicubic", True, True): "naflex-parfac",
}


def _naflex_arguments(header: CheckpointHeader) -> dict[str, Any]:
    """The arguments of the factory that config.json names, with those of the file."""
    config = header.config or {}
    name = str(config.get("architecture") or "")
    if name not in _NAFLEX:
        raise UserError(
            f'timm\'s NaFlexVit "{name}" is not supported: it needs a config.json that names {", ".join(_NAFLEX)}.'
            if name
            else "a NaFlexVit of timm is not defined by its weights alone: put its config.json next to them."
        )
    arguments = {**_NAFLEX[name], **(config.get("model_args") or {})}
    for key, plain in _PLAIN.items():
        if arguments.get(key, plain[0]) not in plain:
            raise UserError(f"timm's {name} with {key}={arguments[key]!r} is not supported.")
    return arguments


def _naflex_grid(header: CheckpointHeader) -> Size:
    if header.has(_ROWS):
        (_, rows, height), (_, columns, width) = header.shape(_ROWS, 3), header.shape(_COLUMNS, 3)
        if height != width:
            raise UserError(f"the file's positions of rows and columns have different widths, {height} and {width}.")
        return rows, columns
    _, rows, columns, _ = header.shape(_POSITIONS, 4)
    return rows, columns


def _classic(header: CheckpointHeader) -> CheckpointHeader:
    """The header of the plain ViT with the same weights."""
    arguments = _naflex_arguments(header)
    pretrained = (header.config or {}).get("pretrained_cfg") or {}
    channels = arguments.get("in_chans") or (pretrained.get("input_size") or (3,))[0]
    width, inputs = header.shape(_PROJECTION, 2)
    patch = math.isqrt(inputs // channels)
    if channels * patch * patch != inputs:
        raise UserError(f"the file's patches have {inputs} values, which are no square of {channels} channels.")
    grid = _naflex_grid(header)
    shapes: dict[str, Shape] = {key: shape for key, shape in header.shapes.items() if key not in (_ROWS, _COLUMNS)}
    shapes |= {_PROJECTION: (width, channels, patch, patch), _POSITIONS: (1, grid[0] * grid[1], width)}
    known = ("num_heads", "act_layer", "global_pool")
    config = {"model_args": {key: arguments[key] for key in known if key in arguments}, "pretrained_cfg": pretrained}
    return replace(header, shapes=shapes, config=config, hints=replace(header.hints, grid=grid))


def _naflex_architecture(header: CheckpointHeader) -> ViTConfig:
    arguments = _naflex_arguments(header)
    if header.has("norm.weight") and header.has("fc_norm.weight"):
        raise UserError("the file has a LayerNorm before and after pooling: that is not supported.")
    vit = TIMM.architecture(_classic(header))
    way = (
        arguments.get("pos_embed_interp_mode", "bicubic"),
        bool(arguments.get("pos_embed_ar_preserving")),
        header.has(_ROWS),
    )
    if way not in _RULES:
        raise UserError(f"the file's positions are resized in a way that is not supported ({way[0]} interpolation).")
    # Unlike timm's plain ViT, this one has position rows for patches alone, and pools them alone.
    biased = header.has("blocks.0.attn.qkv.bias")
    return replace(vit, resize=_RULES[way], class_position=False, qkv_bias=biased, map_prefix=False)


def _naflex_entries(c: ViTConfig) -> list[Entry]:
    entries = TIMM.entries(c)
    return entries if c.qkv_bias else [entry for entry in entries if not entry.theirs.endswith("attn.qkv.bias")]


def _unpack(tensors: Tensors, c: ViTConfig) -> Tensors:
    tensors = dict(tensors)
    if _ROWS in tensors and _COLUMNS in tensors:
        tensors[_POSITIONS] = tensors.pop(_ROWS).float().unsqueeze(2) + tensors.pop(_COLUMNS).float().unsqueeze(1)
    if _POSITIONS in tensors:
        tensors[_POSITIONS] = tensors[_POSITIONS].flatten(1, 2)
    if _PROJECTION in tensors:  # the channel varies fastest
        shape = (c.width, c.patch, c.patch, c.channels)
        tensors[_PROJECTION] = tensors[_PROJECTION].reshape(shape).permute(0, 3, 1, 2)
    return tensors


def _pack(tensors: Tensors, c: ViTConfig) -> Tensors:
    projection = tensors[_PROJECTION].permute(0, 2, 3, 1).flatten(1).contiguous()
    positions = tensors[_POSITIONS].unflatten(1, c.grid(c.image))
    return {**tensors, _PROJECTION: projection, _POSITIONS: positions}


def _renames(keys: Iterable[str]) -> dict[str, str]:
    return {key: _KEYS.get(key, key) for key in keys}


def _file_key(key: str, c: ViTConfig) -> str:
    return {theirs: file for file, theirs in _KEYS.items()}.get(key, key)


def _assumptions(header: CheckpointHeader, c: ViTConfig) -> tuple[str, ...]:
    return ("factorized positions added up to a table",) if header.has(_ROWS) else ()


def _preprocess(header: CheckpointHeader, architecture: Architecture) -> Preprocess | None:
    """For the size that timm evaluates at, which is not that of the position table."""
    size = ((header.config or {}).get("pretrained_cfg") or {}).get("input_size") or (0, *architecture.image)
    return TIMM.preprocess(header, replace(architecture, image=(size[-2], size[-1])))


def _naflex_unsupported_reason(architecture: Architecture) -> str | None:
    c = architecture
    if not isinstance(c, ViTConfig):
        return TIMM.unsupported_reason(c)
    if c.pool == "map":  # which reads patches alone here
        c = replace(c, class_token=False, registers=0)
    reason = later_parts(c, "qkv_bias") or TIMM.unsupported_reason(c)
    if reason or c.pool.startswith("token+"):
        return reason or "its features are one token's, or the patches'"
    if c.image != _whole(c):
        return "its positions are a grid, and this image size is not a multiple of the patch size"
    return None


def _whole(c: ViTConfig) -> Size:
    rows, columns = c.grid(c.image)
    return rows * c.patch, columns * c.patch


def _naflex_config(card: Card, c: ViTConfig) -> dict[str, Any]:
    assert TIMM.config is not None
    config = TIMM.config(card, c)
    arguments = {key: config["model_args"][key] for key in _ARGUMENTS}
    mode = "bilinear" if c.resize == "siglip" else "bicubic"
    arguments |= {"pos_embed_grid_size": list(c.grid(c.image)), "pos_embed_interp_mode": mode}
    arguments |= {"pos_embed_ar_preserving": c.resize.startswith("naflex"), "qkv_bias": c.qkv_bias}
    return {**config, "architecture": "naflexvit_base_patch16_gap", "model_args": arguments}


NAFLEX = Format(
    name="timm-naflex",
    title="timm's NaFlexVit (a folder with its config.json)",
    container="safetensors",
    recognises=lambda header: (
        header.has("blocks.0.attn.qkv.weight") and (header.has(_ROWS) or len(header.shapes.get(_POSITIONS, ())) == 4)
    ),
    architecture=_naflex_architecture,
    entries=_naflex_entries,
    unsupported_reason=_naflex_unsupported_reason,
    renames=_renames,
    unpack=_unpack,
    pack=_pack,
    class_row=lambda c: "folded",
    assumptions=_assumptions,
    preprocess=_preprocess,
    class_names=TIMM.class_names,
    config=_naflex_config,
    alone=lambda c: "timm needs config.json to know how positions are resized",
    file_key=_file_key,
)
