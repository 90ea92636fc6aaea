"""Models that are the plain ViT of their library but for one part: DeiT's distillation token, NaFlexVit's patches.

DeiT is that of timm (`deit_*_distilled_*`) and of transformers (a folder). Its token is our register; the mean of its
two heads, one on each token, is one linear layer on both. In timm's NaFlexVit the patch embedding is a linear layer,
and positions are a grid. Its images are given whole here; timm's batches of patches from images of several sizes are
not needed for that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vitral.architecture import Architecture, ResizeRule, Size, ViTConfig
from vitral.checkpoints.card import Card, Preprocess
from vitral.checkpoints.formats.hugging_face import HUGGING_FACE
from vitral.checkpoints.formats.table import (
    CheckpointHeader,
    Entry,
    Format,
    Shape,
    Tensors,
    later_parts,
    linear,
    other_epsilon,
)
from vitral.checkpoints.formats.timm import TIMM
from vitral.checkpoints.formats.timm_arguments import WITHOUT_EFFECT, factories
from vitral.checkpoints.formats.timm_reading import plain_header
from vitral.errors import UserError

# ------------------------------------------------------------------------------------------------------------- DeiT


@dataclass(frozen=True)
class _DeitNames:
    """Names of what DeiT adds to the plain ViT of a library, and of what it changes."""

    plain: Format[ViTConfig]
    token: str
    positions: str
    head: str  # of the plain ViT
    heads: tuple[str, str]  # of the class token and of the distillation token


_TIMM = _DeitNames(TIMM, "dist_token", "pos_embed", "head", ("head", "head_dist"))
_HF = _DeitNames(
    plain=HUGGING_FACE,
    token="embeddings.distillation_token",
    positions="embeddings.position_embeddings",
    head="classifier",
    heads=("cls_classifier", "distillation_classifier"),
)


def _without_token(header: CheckpointHeader, names: _DeitNames) -> CheckpointHeader:
    """The header of the plain ViT: one head and no distillation token."""
    shapes = dict(header.shapes)
    batch, rows, width = header.shape(names.positions, 3)
    if header.shape(names.token, 3)[2] != width:
        raise UserError(f"tensor {names.token} has the shape {list(shapes[names.token])}, not {[1, 1, width]}.")
    del shapes[names.token]
    shapes[names.positions] = (batch, rows - 1, width)
    if header.has(f"{names.heads[1]}.weight"):
        classifier = {key: header.shape(f"{names.heads[0]}.{key}", rank) for key, rank in (("weight", 2), ("bias", 1))}
        for name in names.heads:
            shapes.pop(f"{name}.weight", None)
            shapes.pop(f"{name}.bias", None)
        shapes |= {f"{names.head}.{key}": shape for key, shape in classifier.items()}
    return plain_header(header, shapes) if names is _TIMM else replace(header, shapes=shapes)


def _deit_architecture(header: CheckpointHeader, names: _DeitNames) -> ViTConfig:
    two = header.has(f"{names.heads[1]}.weight")
    if names is _TIMM and not two:
        raise UserError("the file has a distillation token without its head (head_dist): its features are not logits.")
    if names is _HF and header.has(f"{names.heads[0]}.weight") and not two:
        raise UserError(f"the file has {names.heads[0]} without {names.heads[1]}: it is incomplete.")
    plain = names.plain.architecture(_without_token(header, names))
    if plain.registers or not plain.class_row:
        raise UserError(
            "the file has a distillation token together with registers or without position rows: not supported."
        )
    if plain.norm_place == "features":
        raise UserError("the file has a norm (fc_norm) that its two heads do not read: not supported.")
    return replace(plain, registers=1, pool="token+register" if two else plain.pool)


def _plain(c: ViTConfig) -> ViTConfig:
    return replace(c, registers=0, pool="token")


def _deit_entries(c: ViTConfig, names: _DeitNames) -> list[Entry]:
    """The table of the plain ViT, but with the token, and a head on both tokens."""
    entries = [Entry(names.token, "registers", (1, 1, c.width))]
    if c.pool != "token+register":
        return entries + names.plain.entries(_plain(c))
    entries += names.plain.entries(replace(_plain(c), classes=0))
    return entries + linear(names.head, "head.output", c.features, c.classes)


def _deit_unpack(tensors: Tensors, c: ViTConfig, names: _DeitNames) -> Tensors:
    """Two heads -> one of half the weights side by side; the token's position row is added to the token."""
    positions, token = tensors.get(names.positions), tensors.get(names.token)
    if positions is None or token is None:
        return tensors  # the table reports what is missing
    tensors = dict(tensors)
    tensors[names.token] = token.float() + positions[:, 1:2].float()
    tensors[names.positions] = torch.cat([positions[:, :1], positions[:, 2:]], dim=1)
    if c.pool == "token+register":
        weights, biases = ([_taken(tensors, f"{name}.{key}") for name in names.heads] for key in ("weight", "bias"))
        if weights[0].shape != weights[1].shape or biases[0].shape != biases[1].shape:
            raise UserError("the heads of the class token and of the distillation token have different shapes.")
        tensors[f"{names.head}.weight"] = torch.cat(weights, dim=-1) / 2
        tensors[f"{names.head}.bias"] = (biases[0] + biases[1]) / 2
    return tensors


def _taken(tensors: Tensors, key: str) -> Tensor:
    if key not in tensors:
        raise UserError(f"the file has no tensor {key}: it is incomplete or not of this format.")
    return tensors.pop(key).float()


def _deit_pack(tensors: Tensors, c: ViTConfig, names: _DeitNames) -> Tensors:
    """The inverse of `_deit_unpack`, with a position row of zeros and both heads with the same bias."""
    tensors = dict(tensors)
    positions = tensors[names.positions]
    tensors[names.positions] = torch.cat([positions[:, :1], torch.zeros_like(positions[:, :1]), positions[:, 1:]], 1)
    if c.pool == "token+register":
        weight, bias = tensors.pop(f"{names.head}.weight"), tensors.pop(f"{names.head}.bias")
        for name, part in zip(names.heads, weight.chunk(2, dim=1), strict=True):
            tensors |= {f"{name}.weight": 2 * part, f"{name}.bias": bias.clone()}
    return tensors


def _deit_assumptions(header: CheckpointHeader, c: ViTConfig, names: _DeitNames) -> tuple[str, ...]:
    folded = "position row of the distillation token folded into the token"
    two = ("mean of the heads of class and distillation token made one linear layer",)
    changes = (folded, *(two if c.pool == "token+register" else ()))
    return (*names.plain.assumptions(_without_token(header, names), _plain(c)), *changes)


def _deit_pack_changes(c: ViTConfig) -> tuple[str, ...]:
    row = "distillation token given a position row of zeros"
    two = ("head split into those of class and distillation token, with the same bias",)
    return (row, *(two if c.pool == "token+register" else ()))


def _deit_unsupported_reason(architecture: Architecture, names: _DeitNames) -> str | None:
    c = architecture
    if not isinstance(c, ViTConfig) or c.registers != 1 or not c.class_token:
        return "it is for a ViT with a class token and one register, the distillation token"
    if c.pool == "token+register" and (not c.classes or c.representation):
        return "it needs a head without a tanh layer on class and distillation token"
    if c.pool not in ("token", "token+register") or c.norm_place != "tokens" or c.stem:
        return "its heads read the class token and the distillation token after the last LayerNorm"
    if names is _TIMM and c.pool == "token":
        return "it has a head on the distillation token, and this model has none"
    if names is _TIMM and (reason := other_epsilon(c)):
        return reason
    return later_parts(c, "pool") or names.plain.unsupported_reason(_plain(c))


def _timm_config(card: Card, c: ViTConfig) -> dict[str, Any]:
    assert TIMM.config is not None
    config = TIMM.config(card, _plain(c))
    # The class of the distilled models has none of these.
    arguments = {key: value for key, value in config["model_args"].items() if key not in ("class_token", "reg_tokens")}
    return {**config, "architecture": "deit_base_distilled_patch16_224", "model_args": arguments}


def _hf_config(card: Card, c: ViTConfig) -> dict[str, Any]:
    assert HUGGING_FACE.config is not None
    teacher = "WithTeacher" if c.pool == "token+register" else ""
    model = f"DeiTForImageClassification{teacher}" if c.classes else "DeiTModel"
    return {**HUGGING_FACE.config(card, _plain(c)), "architectures": [model], "model_type": "deit"}


def _deit_format(names: _DeitNames, **functions: Any) -> Format[ViTConfig]:
    return Format(
        architecture=lambda header: _deit_architecture(header, names),
        entries=lambda c: _deit_entries(c, names),
        unsupported_reason=lambda c: _deit_unsupported_reason(c, names),
        unpack=lambda tensors, c: _deit_unpack(tensors, c, names),
        pack=lambda tensors, c: _deit_pack(tensors, c, names),
        pack_changes=_deit_pack_changes,
        assumptions=lambda header, c: _deit_assumptions(header, c, names),
        preprocess=names.plain.preprocess,
        class_names=names.plain.class_names,
        alone=lambda c: names.plain.alone(_plain(c)),
        **functions,
    )


TIMM_DEIT = _deit_format(
    _TIMM,
    name="timm-deit",
    title="timm's distilled DeiT (safetensors, or a folder with its config.json)",
    recognises=lambda header: header.has("dist_token") and header.has("pos_embed"),
    config=_timm_config,
)

HUGGING_FACE_DEIT = _deit_format(
    _HF,
    name="hf-deit",
    title="Hugging Face DeiT with its distillation token (a folder)",
    recognises=lambda header: header.has("embeddings.distillation_token"),
    renames=HUGGING_FACE.renames,
    ignored=rf"{HUGGING_FACE.ignored}|pooler\.",
    config=_hf_config,
    preprocessor=HUGGING_FACE.preprocessor,
    file_key=lambda key, c: f"deit.{key}" if c.classes and "classifier." not in key else key,
)


# -------------------------------------------------------------------------------------------------------- NaFlexVit

_PROJECTION, _POSITIONS = "patch_embed.proj.weight", "pos_embed"
_ROWS, _COLUMNS = "embeds.pos_embed_y", "embeds.pos_embed_x"  # of factorized positions
_NAFLEX_KEYS = {
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
    "naflexvit_so400m_patch16_siglip": _SIGLIP,
}
# Arguments that NaFlexVit shares with timm's plain ViT.
_SHARED_ARGUMENTS = (
    *("patch_size", "in_chans", "embed_dim", "depth", "num_heads", "mlp_ratio", "class_token", "reg_tokens"),
    *("init_values", "act_layer", "fc_norm", "global_pool", "qkv_bias"),
)
# Arguments that the shapes or `_RULES` account for.
_READ = {
    *(*_SHARED_ARGUMENTS, *WITHOUT_EFFECT, "img_size", "pos_embed", "pos_embed_grid_size"),
    *("pos_embed_interp_mode", "pos_embed_ar_preserving"),
}
# The values of others that are not another network; of all that are not listed, only false ones and null.
_ONLY = {
    **{"rope_type": ("", "none"), "attn_type": ("standard",), "patchify_channels_last": (True,)},
    **{"dynamic_img_pad": (False,), "final_norm": (True,), "embed_proj_type": ("linear",)},
    **{"proj_bias": (True,), "qkv_fused": (True,), "pos_embed_antialias": (True,)},
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
    heads = factories()[name].arguments["cfg"].get("num_heads", 12)
    arguments = {"num_heads": heads, **_NAFLEX[name], **(config.get("model_args") or {})}
    for key, value in arguments.items():
        if value not in _ONLY[key] if key in _ONLY else value and key not in _READ:
            raise UserError(f"timm's {name} with {key}={value!r} is not supported: use timm for it.")
    return arguments


def _naflex_grid(header: CheckpointHeader) -> Size:
    if header.has(_ROWS):
        (_, rows, height), (_, columns, width) = header.shape(_ROWS, 3), header.shape(_COLUMNS, 3)
        if height != width:
            raise UserError(f"the file's positions of rows and columns have different widths, {height} and {width}.")
        return rows, columns
    _, rows, columns, _ = header.shape(_POSITIONS, 4)
    return rows, columns


def _plain_vit_header(header: CheckpointHeader) -> CheckpointHeader:
    """The header of the plain ViT with the same weights."""
    arguments = _naflex_arguments(header)
    pretrained = (header.config or {}).get("pretrained_cfg") or {}
    channels = arguments.get("in_chans") or (pretrained.get("input_size") or (3,))[0]
    width, inputs = header.shape(_PROJECTION, 2)
    patch = math.isqrt(inputs // channels)
    if channels * patch * patch != inputs:
        raise UserError(f"the file's patches have {inputs} values, which are not a square of {channels} channels.")
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
    vit = TIMM.architecture(_plain_vit_header(header))
    way = (
        arguments.get("pos_embed_interp_mode", "bicubic"),
        bool(arguments.get("pos_embed_ar_preserving")),
        header.has(_ROWS),
    )
    if way not in _RULES:
        raise UserError(f"the file's positions are resized in a way that is not supported ({way[0]} interpolation).")
    # Unlike timm's plain ViT, this one has position rows for patches alone, and pools them alone.
    return replace(vit, resize=_RULES[way], class_position=False, map_prefix=False)


def _naflex_unpack(tensors: Tensors, c: ViTConfig) -> Tensors:
    tensors = dict(tensors)
    if _ROWS in tensors and _COLUMNS in tensors:
        tensors[_POSITIONS] = tensors.pop(_ROWS).float().unsqueeze(2) + tensors.pop(_COLUMNS).float().unsqueeze(1)
    if _POSITIONS in tensors:
        tensors[_POSITIONS] = tensors[_POSITIONS].flatten(1, 2)
    if _PROJECTION in tensors:  # the channel varies fastest
        shape = (c.width, c.patch, c.patch, c.channels)
        tensors[_PROJECTION] = tensors[_PROJECTION].reshape(shape).permute(0, 3, 1, 2)
    return tensors


def _naflex_pack(tensors: Tensors, c: ViTConfig) -> Tensors:
    projection = tensors[_PROJECTION].permute(0, 2, 3, 1).flatten(1).contiguous()
    positions = tensors[_POSITIONS].unflatten(1, c.grid(c.image))
    return {**tensors, _PROJECTION: projection, _POSITIONS: positions}


def _naflex_preprocess(header: CheckpointHeader, architecture: Architecture) -> Preprocess | None:
    """For the size that timm evaluates at, which is not that of the position table."""
    size = ((header.config or {}).get("pretrained_cfg") or {}).get("input_size") or (0, *architecture.image)
    return TIMM.preprocess(header, replace(architecture, image=(size[-2], size[-1])))


def _naflex_unsupported_reason(architecture: Architecture) -> str | None:
    c = architecture
    if not isinstance(c, ViTConfig):
        return TIMM.unsupported_reason(c)
    if c.pool == "map":  # which reads patches alone here
        c = replace(c, class_token=False, registers=0)
    reason = later_parts(c, "qkv_bias") or other_epsilon(c) or TIMM.unsupported_reason(c)
    if reason or c.pool.startswith("token+"):
        return reason or "its features are one token's, or the patches'"
    if c.image[0] % c.patch or c.image[1] % c.patch:
        return "its positions are a grid, and this image size is not a multiple of the patch size"
    return None


def _naflex_config(card: Card, c: ViTConfig) -> dict[str, Any]:
    assert TIMM.config is not None
    config = TIMM.config(card, c)
    arguments = {key: config["model_args"][key] for key in _SHARED_ARGUMENTS}
    mode = "bilinear" if c.resize == "siglip" else "bicubic"
    arguments |= {"pos_embed_grid_size": list(c.grid(c.image)), "pos_embed_interp_mode": mode}
    arguments |= {"pos_embed_ar_preserving": c.resize.startswith("naflex"), "qkv_bias": c.qkv_bias}
    return {**config, "architecture": "naflexvit_base_patch16_gap", "model_args": arguments}


NAFLEX = Format(
    name="timm-naflex",
    title="timm's NaFlexVit (a folder with its config.json)",
    recognises=lambda header: (
        header.has("blocks.0.attn.qkv.weight") and (header.has(_ROWS) or len(header.shapes.get(_POSITIONS, ())) == 4)
    ),
    architecture=_naflex_architecture,
    entries=TIMM.entries,
    unsupported_reason=_naflex_unsupported_reason,
    renames=lambda keys: {key: _NAFLEX_KEYS.get(key, key) for key in keys},
    unpack=_naflex_unpack,
    pack=_naflex_pack,
    class_row=lambda c: "folded",
    assumptions=lambda header, c: ("factorized positions added up to a table",) if header.has(_ROWS) else (),
    preprocess=_naflex_preprocess,
    class_names=TIMM.class_names,
    config=_naflex_config,
    alone=lambda c: "timm needs config.json to know how positions are resized",
    file_key=lambda key, c: {theirs: file for file, theirs in _NAFLEX_KEYS.items()}.get(key, key),
)
