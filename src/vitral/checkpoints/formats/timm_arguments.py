"""timm's architectures by name, and what their arguments mean: fields of ours, or parts that vitral does not have.

timm_factories.json was generated from the installed timm (tests/helpers/timm_factories.py); a test compares them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from typing import Any

from vitral.architecture import Gelu, NormPlace, Pool, RopeConfig, Size, ViTConfig
from vitral.checkpoints.formats.layout import Layout, timm_layout
from vitral.errors import UserError

Arguments = Mapping[str, Any]

GELUS: dict[str, Gelu] = {"gelu": "erf", "gelu_erf": "erf", "gelu_tanh": "tanh", "quick_gelu": "quick"}
POOLS: dict[str, Pool] = {"token": "token", "avg": "mean", "map": "map"}
SWIGLU = "GluMlp(act_layer=SiLU, gate_last=False)"
_SUFFIXES = re.compile(r"\.(?:safetensors|pth|pt|bin|ckpt|tar|npz)$")
# After a name: a tag, or a data set or method that older versions of timm had in the names themselves.
_AFTER_NAME = re.compile(r"[.\-].*|_(?:in2[12]k|in2[12]ft1k|in22ft22k|in1k|dino|sam|mae|ft|finetuned?)(?:[_.\-].*)?")
_LAYER_NORM = re.compile(r"layer_?norm(?:\(eps=(?P<eps>[\d.e-]+)\))?", re.IGNORECASE)

# What vitral does not have, by the value of an argument.
_BLOCKS = {
    "ParallelScalingBlock": ["parallel blocks"],
    "ParallelThingsBlock": ["parallel blocks"],
    "DiffParallelScalingBlock": ["parallel blocks", "differential attention"],
}
_CLASSES = {
    "VisionTransformerRelPos": "relative positions computed by an MLP",
    "VisionTransformerDistilled": "a distillation token",
    "NaFlexVit": "NaFlexViT's positions for any aspect ratio",
    "ResNetV2": "a ResNet in timm's names",
}


@dataclass(frozen=True)
class TimmFactory:
    """One registered architecture of timm."""

    name: str
    model: str  # the class, such as "Eva"
    arguments: dict[str, Any]  # of the class, its defaults included; classes and functions by their names


@cache
def factories() -> dict[str, TimmFactory]:
    """All architectures of the table, by their names without tags."""
    table = json.loads(files("vitral.checkpoints").joinpath("timm_factories.json").read_text(encoding="utf-8"))
    found = {}
    for model, entry in table["classes"].items():
        for group in entry["groups"]:
            for name, sizes in group["models"].items():
                found[name] = TimmFactory(name, model, {**entry["defaults"], **group["arguments"], **sizes})
    return found


def stem_of(name: str) -> str:
    """The name of a file without suffixes of weight files, of which it may have two."""
    while (shorter := _SUFFIXES.sub("", name)) != name:
        name = shorter
    return name


def factory_named(name: str) -> TimmFactory | None:
    """The architecture that a name means, the longest one that fits: "vit_base_patch16_clip_224.openai",
    "vit_base_patch16_224.augreg_in21k_ft_in1k.safetensors", "timm/deit3_base_patch16_224".
    """
    return split_name(name)[0]


def split_name(name: str) -> tuple[TimmFactory | None, str]:
    """The architecture, and what follows it: a tag, an older name of one, a hash, ..."""
    stem, table = stem_of(name.rpartition("/")[2]), factories()
    for end in range(len(stem), 0, -1):
        rest = stem[end:]
        if stem[:end] in table and (not rest or _AFTER_NAME.fullmatch(rest)):
            return table[stem[:end]], rest.lstrip("._-")
    return None, ""


def named_architecture(name: str) -> dict[str, Any] | None:
    """Fields of the `ViTConfig` of the released model of this name; None if it is not known, or has missing parts.

    Sizes, against which shapes can be checked, and all that shapes do not show, such as gelu, pool, norm_eps and rope.
    """
    factory = factory_named(name)
    if factory is None or missing_parts(factory.model, factory.arguments):
        return None
    arguments = factory.arguments
    sizes = {"depth": "depth", "width": "embed_dim", "heads": "num_heads", "patch": "patch_size"}
    shown = {field: arguments[key] for field, key in sizes.items()}
    return {**shown, "mlp": mlp_width(factory.model, arguments), **fields_of(factory.model, arguments)}


# ------------------------------------------------------------------------------------------------ what arguments mean


def missing_parts(model: str, arguments: Arguments) -> list[str]:
    """The parts of a model of timm's that vitral does not have, as nouns, by its class and the complete arguments."""
    if model in _CLASSES:
        return [_CLASSES[model]]
    missing = []
    if _LAYER_NORM.fullmatch(arguments["norm_layer"] or "LayerNorm") is None:
        missing.append("RMSNorm" if "rms" in arguments["norm_layer"].lower() else str(arguments["norm_layer"]))
    if arguments["global_pool"] not in POOLS:
        missing.append(f'the pooling "{arguments["global_pool"]}"')
    specific = {"VisionTransformer": _missing_in_vit, "Eva": _missing_in_eva, "Beit": _missing_in_beit}
    return missing + specific[model](arguments)


def _missing_in_vit(arguments: Arguments) -> list[str]:
    missing = [*_BLOCKS.get(arguments["block_fn"], [])]
    if arguments["attn_layer"] not in ("Attention", "attn", ""):
        diff = arguments["attn_layer"] == "diff"
        missing.append("differential attention" if diff else f'the attention "{arguments["attn_layer"]}"')
    if arguments["embed_layer"] != "PatchEmbed":
        missing.append("a convolutional stem")
    if arguments["mlp_layer"] not in ("Mlp", SWIGLU):
        missing.append("GeGLU" if "GeGlu" in arguments["mlp_layer"] else f'the MLP "{arguments["mlp_layer"]}"')
    elif arguments["mlp_layer"] == "Mlp" and (arguments["act_layer"] or "gelu") not in GELUS:
        missing.append(f'the activation "{arguments["act_layer"]}"')
    elif arguments["mlp_layer"] == SWIGLU and arguments["global_pool"] == "map":
        missing.append("attention pooling with SiLU")
    if arguments["embed_norm_layer"]:
        missing.append("a norm of the patch embedding")
    if not arguments["proj_bias"]:
        missing.append("layers without a bias")
    if arguments["pool_include_prefix"] and arguments["global_pool"] == "avg":
        missing.append("pooling over class token and registers")
    return missing


def _missing_in_eva(arguments: Arguments) -> list[str]:
    missing = []
    if arguments["num_kv_heads"]:
        missing.append("grouped-query attention")
    if arguments["attn_only_layer_scale"]:
        missing.append("LayerScale of the attention alone")
    if _eva_norm_place(arguments) is None:
        missing.append("two final norms")
    kind, half = arguments["rope_type"], arguments["rope_rotate_half"]
    if arguments["use_rot_pos_emb"] and (kind, bool(half)) not in _ROPES:
        missing.append(f'the RoPE "{kind}"' + (" with rotated halves" if half else ""))
    elif arguments["use_rot_pos_emb"] and kind == "dinov3" and arguments["rope_grid_offset"]:
        missing.append("an offset of DINOv3's RoPE")
    return missing


def _missing_in_beit(arguments: Arguments) -> list[str]:
    both = arguments["use_abs_pos_emb"] and (arguments["use_rel_pos_bias"] or arguments["use_shared_rel_pos_bias"])
    two_tables = arguments["use_rel_pos_bias"] and arguments["use_shared_rel_pos_bias"]
    return ["absolute and relative positions together"] if both or two_tables else []


_ROPES = (("cat", False), ("mixed", False), ("dinov3", True))  # (rope_type, rope_rotate_half)

# Our fields and the arguments that mean the same, read and written.
_SAME: dict[str, dict[str, str]] = {
    "VisionTransformer": {
        **{"class_token": "class_token", "registers": "reg_tokens", "pre_norm": "pre_norm", "qk_norm": "qk_norm"},
        **{"attention_norm": "scale_attn_norm", "mlp_norm": "scale_mlp_norm", "map_prefix": "pool_include_prefix"},
        "qkv_bias": "qkv_bias",
    },
    "Eva": {
        **{"class_token": "class_token", "registers": "num_reg_tokens", "pre_norm": "use_pre_transformer_norm"},
        **{"qk_norm": "qk_norm", "attention_norm": "scale_attn_inner", "mlp_norm": "scale_mlp"},
        **{"swiglu": "swiglu_mlp", "post_norm": "use_post_norm", "qkv_bias": "qkv_bias"},
    },
    "Beit": {"swiglu": "swiglu_mlp", "mlp_norm": "scale_mlp", "qkv_bias": "qkv_bias"},
}
# Fields that arguments state, sizes aside; if a class has no argument, its models are as the paper's.
_STATED = (
    *("class_token", "registers", "class_position", "swiglu", "key_bias", "qk_norm", "pre_norm", "post_norm"),
    *("attention_norm", "mlp_norm", "rope", "map_heads", "map_prefix"),
)
_PAPER = {field.name: field.default for field in fields(ViTConfig) if field.name in _STATED}


def fields_of(model: str, arguments: Arguments) -> dict[str, Any]:
    """Fields of `ViTConfig` that the arguments of a class mean, without sizes. `missing_parts` must be empty."""
    specific = {"VisionTransformer": _vit_fields, "Eva": _eva_fields, "Beit": _beit_fields}
    same = {field: type(_PAPER.get(field, True))(arguments[name]) for field, name in _SAME[model].items()}
    stated: dict[str, Any] = {**_PAPER, "gelu": "erf", **same, **specific[model](arguments)}
    match = _LAYER_NORM.fullmatch(arguments["norm_layer"] or "LayerNorm")
    assert match is not None
    pool = POOLS[arguments["global_pool"]]
    if pool == "token" and not stated["class_token"]:
        raise UserError('its pooling "token" needs a class token, which its arguments leave out.')
    return {
        **stated,
        "pool": pool,
        "norm_eps": float(match["eps"] or 1e-6),
        "patch_bias": not stated["pre_norm"],
        "map_prefix": bool(stated["map_prefix"] and (stated["class_token"] or stated["registers"]) and pool == "map"),
        "resize": "timm",
    }


def arguments_of(model: str, c: ViTConfig) -> dict[str, Any]:
    """The inverse of `fields_of`, with sizes: the arguments of a class that make it an architecture."""
    specific = {"VisionTransformer": _vit_arguments, "Eva": _eva_arguments, "Beit": _beit_arguments}
    return {
        "img_size": list(c.image),
        "patch_size": c.patch,
        "in_chans": c.channels,
        "embed_dim": c.width,
        "depth": c.depth,
        "num_heads": c.heads,
        "mlp_ratio": _ratio(c.width, c.mlp),
        "global_pool": next(name for name, pool in POOLS.items() if pool == c.pool),
        **{name: getattr(c, field) for field, name in _SAME[model].items()},
        **specific[model](c),
    }


def _vit_fields(arguments: Arguments) -> dict[str, Any]:
    swiglu, post_norm = arguments["mlp_layer"] == SWIGLU, arguments["block_fn"] == "ResPostBlock"
    after = arguments["global_pool"] == "avg" if arguments["fc_norm"] is None else arguments["fc_norm"]
    return {
        "position": "none" if arguments["pos_embed"] in ("", "none") else "1d",
        "class_position": not arguments["no_embed_class"],
        "norm_place": "none" if not arguments["final_norm"] else "features" if after else "tokens",
        "gelu": "erf" if swiglu else GELUS[arguments["act_layer"] or "gelu"],
        "layer_scale": bool(arguments["init_values"]) and not post_norm,
        "swiglu": swiglu,
        "post_norm": post_norm,
    }


def _vit_arguments(c: ViTConfig) -> dict[str, Any]:
    # The first layer of a SwiGLU is packed, of twice the width.
    packed = {"mlp_ratio": _ratio(c.width, 2 * c.mlp)}
    return {
        "pos_embed": "learn" if c.position == "1d" else "none",
        "no_embed_class": not c.class_row,
        "init_values": 1e-5 if c.layer_scale else 0.0,
        "final_norm": c.norm_place != "none",
        "fc_norm": c.norm_place == "features",
        "pool_include_prefix": c.pool == "map" and c.map_prefix,
        **(packed if c.swiglu else {"act_layer": next(name for name, gelu in GELUS.items() if gelu == c.gelu)}),
    }


def _eva_fields(arguments: Arguments) -> dict[str, Any]:
    post_norm, heads = bool(arguments["use_post_norm"]), arguments["attn_pool_num_heads"] or 0
    return {
        "position": "1d" if arguments["use_abs_pos_emb"] else "none",
        "class_position": not arguments["no_embed_class"],
        "norm_place": _eva_norm_place(arguments),
        "layer_scale": arguments["init_values"] is not None and not post_norm,
        # Keys have a bias in timm's AttentionRope, not in EvaAttention.
        "key_bias": arguments["attn_type"] == "rope" or not arguments["qkv_bias"],
        "qk_norm": bool(arguments["qk_norm"]) and not post_norm,
        "rope": _rope(arguments) if arguments["use_rot_pos_emb"] else None,
        "map_heads": 0 if heads == arguments["num_heads"] else heads,
        "map_prefix": True,
    }


def _eva_arguments(c: ViTConfig) -> dict[str, Any]:
    return {
        "use_abs_pos_emb": c.position == "1d",
        "no_embed_class": not c.class_row,
        "qkv_fused": True,
        "attn_type": "rope" if c.key_bias else "eva",
        "swiglu_align_to": 0,
        "use_post_transformer_norm": c.norm_place == "tokens",
        "use_fc_norm": c.norm_place == "features",
        "attn_pool_num_heads": c.map_heads or c.heads,
        "attn_pool_mlp_ratio": _ratio(c.width, c.map_mlp or c.mlp),
        "use_rot_pos_emb": c.rope is not None,
        **(_rope_arguments(c.rope) if c.rope else {}),
        **({"init_values": 1e-5} if c.layer_scale else {}),
    }


def _eva_norm_place(arguments: Arguments) -> NormPlace | None:
    """None if both norms are there."""
    after = arguments["use_fc_norm"]
    after = arguments["global_pool"] == "avg" if after is None else after
    before = arguments["use_post_transformer_norm"]
    before = not after if before is None else before
    if after and before:
        return None
    return "features" if after else "tokens" if before else "none"


def _rope(arguments: Arguments) -> RopeConfig:
    temperature, kind = float(arguments["rope_temperature"]), arguments["rope_type"]
    if kind == "dinov3":
        return RopeConfig(temperature=temperature)
    reference = arguments["ref_feat_shape"] if kind == "cat" else None
    return RopeConfig(
        temperature=temperature,
        pairs="adjacent",
        coordinates="index",
        axes="xy" if arguments["rope_grid_indexing"] == "xy" else "yx",
        offset=float(arguments["rope_grid_offset"]) if kind == "cat" else 0.0,
        reference=None if reference is None else size_of_argument(reference),
        learned=kind == "mixed",
    )


def _rope_arguments(rope: RopeConfig) -> dict[str, Any]:
    kind = "mixed" if rope.learned else "dinov3" if rope.coordinates == "center" else "cat"
    return {
        "rope_type": kind,
        "rope_temperature": rope.temperature,
        "rope_rotate_half": kind == "dinov3",
        "rope_grid_indexing": "xy" if rope.axes == "xy" else "ij",
        "rope_grid_offset": rope.offset,
        **({"ref_feat_shape": list(rope.reference)} if rope.reference else {}),
    }


def _beit_fields(arguments: Arguments) -> dict[str, Any]:
    biased = arguments["use_rel_pos_bias"] or arguments["use_shared_rel_pos_bias"]
    return {
        "position": "1d" if arguments["use_abs_pos_emb"] else "bias" if biased else "none",
        "norm_place": "features" if arguments["global_pool"] == "avg" else "tokens",
        "layer_scale": bool(arguments["init_values"]),
        "key_bias": not arguments["qkv_bias"],
    }


def _beit_arguments(c: ViTConfig) -> dict[str, Any]:
    relative = {"use_abs_pos_emb": False, "use_rel_pos_bias": True, "use_shared_rel_pos_bias": False}
    return {**relative, "init_values": 1e-5 if c.layer_scale else 0.0}


def layout_of_arguments(model: str, arguments: Arguments) -> Layout:
    """The layout of the tensors of a class with these arguments, but for rows of registers."""
    if model == "VisionTransformer":
        return timm_layout()
    if model == "Beit":
        shared = bool(arguments["use_shared_rel_pos_bias"])
        return timm_layout(gamma=True, separate_gate=bool(arguments["swiglu_mlp"]), shared_bias=shared)
    aligned = arguments["swiglu_align_to"] and not arguments["use_post_norm"]
    separate_gate = bool(arguments["swiglu_mlp"] and (arguments["scale_mlp"] or aligned))
    return timm_layout(gamma=True, separate_qkv=not arguments["qkv_fused"], separate_gate=separate_gate)


def mlp_width(model: str, arguments: Arguments) -> int:
    """The width of the MLP that timm derives from its arguments."""
    width = int(arguments["embed_dim"] * arguments["mlp_ratio"])
    if model == "VisionTransformer" and arguments["mlp_layer"] == SWIGLU:
        return width // 2
    align = arguments.get("swiglu_align_to") or 0
    return width + (-width % align) if align and not arguments["use_post_norm"] else width


def _ratio(width: int, mlp: int) -> float:
    """timm takes int(width * ratio): the quotient, or the next float where rounding would lose one channel."""
    ratio = mlp / width
    return ratio if int(width * ratio) == mlp else math.nextafter(ratio, math.inf)


def size_of_argument(size: Any) -> Size:
    """224, [224, 224] or [3, 224, 224] -> (224, 224)"""
    return (size, size) if isinstance(size, int) else (int(size[-2]), int(size[-1]))
