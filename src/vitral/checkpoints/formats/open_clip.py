"""CLIP with the names of OpenAI's code, which OpenCLIP shares: the image tower.

The projection into the space of texts is a head without a bias, stored transposed. A file does not state its heads, its
GELU or its pooling: open_clip_config.json does. OpenAI's own models have the "quick" GELU, those that OpenCLIP trained
mostly the exact one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vitral.architecture import Architecture, Gelu, Pool, ViTConfig, as_size
from vitral.checkpoints.card import Preprocess
from vitral.checkpoints.files import OPEN_CLIP_CONFIG
from vitral.checkpoints.formats.hf_config import Variant, square_only, unsupported
from vitral.checkpoints.formats.layout import Layout, layout_entries, plain_architecture
from vitral.checkpoints.formats.table import CheckpointHeader, Entry, Format
from vitral.checkpoints.processors import CLIP_MEAN, CLIP_STD, from_timm
from vitral.errors import UserError

_CROP_MODES = {"shortest": "center", "squash": "squash", "longest": "border"}  # OpenCLIP's names and timm's
_BLOCK = "visual.transformer.resblocks"
_LAYOUT = Layout(
    patches="visual.conv1",
    positions="visual.positional_embedding",
    class_token="visual.class_embedding",
    pre_norm="visual.ln_pre",
    block=_BLOCK + ".{}",
    norm1="ln_1",
    qkv=("attn.in_proj",),
    qkv_separator="_",
    out="attn.out_proj",
    norm2="ln_2",
    hidden="mlp.c_fc",
    output="mlp.c_proj",
    scales=("ls_1.gamma", "ls_2.gamma"),
    norm="visual.ln_post",
    embedding=True,
)
_OPENAI = "input_resolution"  # in the state dict of OpenAI's programs only
_UNUSED = re.compile(
    r"text\.|transformer\.|token_embedding\.|positional_embedding$|ln_final\.|text_projection|logit_scale$|logit_bias$"
    r"|(input_resolution|context_length|vocab_size|attn_mask)$"
)


def from_open_clip(config: Mapping[str, Any]) -> dict[str, Any]:
    """The image tower as timm's architecture if it is one, else under "open_clip"; and the preprocessing.

    A linear layer that follows timm's model, its projection into the space of texts, is under "projection".
    """
    model = config["model_cfg"]
    vision = dict(model["vision_cfg"])
    size = vision.get("image_size", 224)
    found: dict[str, Any] = {"pretrained_cfg": _preprocessing(config.get("preprocess_cfg") or {})}
    if "timm_model_name" not in vision:
        return {**found, "open_clip": {**vision, "quick_gelu": model.get("quick_gelu", False)}}
    projection, pool = vision.get("timm_proj", "linear"), vision.get("timm_pool", "avg")
    own = projection in ("linear", "mlp")  # behind timm's model, which then keeps its pooling unless another is stated
    arguments = {"img_size": size, "global_pool": pool or (None if own else "")}
    if projection == "linear":
        found["projection"] = "visual.head.proj"
    return {**found, "architecture": vision["timm_model_name"], "model_args": arguments}


def _preprocessing(stated: Mapping[str, Any]) -> dict[str, Any]:
    mode = stated.get("resize_mode") or "shortest"
    usual = {"mean": CLIP_MEAN, "std": CLIP_STD, "interpolation": "bicubic"}
    given = {key: value for key in usual if (value := stated.get(key))}
    return {**usual, **given, "crop_pct": 1.0, "crop_mode": _CROP_MODES.get(mode, mode)}


def _architecture(header: CheckpointHeader) -> ViTConfig:
    """CLIPA's towers have no norm before the blocks, pool by the mean and normalise it; no tensor shows the pooling."""
    pre_norm, pool, stated = header.has("visual.ln_pre.weight"), header.hints.pool, _config(header)
    if header.has("visual.attn_pool.query"):
        raise UserError("it pools by attention with queries, as OpenCLIP's CoCa does: use open_clip for it.")
    if stated is None and not pre_norm and pool is None:
        raise UserError(
            "the file has no LayerNorm before its blocks, as OpenCLIP's CLIPA, and does not state its pooling: "
            f'pass pool="mean" for CLIPA, else pool="token", or put its {OPEN_CLIP_CONFIG} next to it.'
        )
    usual = {
        "norm_place": "tokens" if pre_norm or pool == "token" else "features",
        "norm_eps": 1e-5,
        "gelu": "quick" if header.has(_OPENAI) else "erf",
    }
    return plain_architecture(
        header if stated is None else _with_sizes(header, stated),
        _LAYOUT,
        classes=header.size("visual.proj", 2, 1),
        head_bias=False,
        patch_bias=False,
        pre_norm=pre_norm,
        resize="timm",  # OpenCLIP resizes its positions by cubic interpolation with antialiasing
        **(usual if stated is None else _fields(stated)),
    )


# Keys of vision_cfg that are read below, shown by the tensors, or of no effect on outputs; others must be false.
_KEYS = {
    *("layers", "width", "head_width", "mlp_ratio", "patch_size", "image_size", "ls_init_value", "patch_dropout"),
    *("no_ln_pre", "pos_embed_type", "final_ln_after_pool", "pool_type", "output_tokens", "act_kwargs", "norm_kwargs"),
    *("quick_gelu", "attn_pooler_queries", "attn_pooler_heads"),
}
_POOLS: dict[str, Pool] = {"tok": "token", "avg": "mean"}
_GELUS: dict[str, Gelu] = {"none": "erf", "tanh": "tanh"}


def _config(header: CheckpointHeader) -> dict[str, Any] | None:
    return (header.config or {}).get("open_clip")


def _fields(stated: dict[str, Any]) -> dict[str, Any]:
    """The pooling, GELU and epsilon of a vision_cfg; UserError for what vitral does not have."""
    act, norm = stated.get("act_kwargs") or {}, stated.get("norm_kwargs") or {}
    missing = [key for key, value in stated.items() if key not in _KEYS and value]
    missing += ["norm_kwargs"] if norm.keys() - {"eps"} else []
    missing += ["pool_type"] if stated.get("pool_type", "tok") not in _POOLS else []
    gelu: Gelu | None = "quick" if stated.get("quick_gelu") else _GELUS.get(act.get("approximate", "none"))
    missing += ["act_kwargs"] if gelu is None or (gelu == "quick" and act) or act.keys() - {"approximate"} else []
    if missing:
        value = stated[missing[0]]
        raise UserError(
            f"{OPEN_CLIP_CONFIG} states {missing[0]}={value!r}, which vitral does not have: use open_clip for it."
        )
    return {
        "pool": _POOLS[stated.get("pool_type", "tok")],
        "norm_place": "features" if stated.get("final_ln_after_pool") else "tokens",
        "norm_eps": float(norm.get("eps", 1e-5)),
        "gelu": gelu,
    }


def _with_sizes(header: CheckpointHeader, stated: dict[str, Any]) -> CheckpointHeader:
    """The header with the heads and the grid that a vision_cfg states, unless others were passed."""
    width, _, *patch = header.shape("visual.conv1.weight", 4)
    for key, found in {"width": [width], "patch_size": patch}.items():
        if stated.get(key, found) not in (found, found[0]):
            raise UserError(
                f"{OPEN_CLIP_CONFIG} states {key}={stated[key]} and the tensors are of {found[0]}: use the model's own."
            )
    rows, columns = (side // patch[0] for side in as_size(stated.get("image_size", 224)))
    hints, heads = header.hints, width // stated.get("head_width", 64)
    return replace(header, hints=replace(hints, heads=hints.heads or heads, grid=hints.grid or (rows, columns)))


def _assumptions(header: CheckpointHeader, c: ViTConfig) -> tuple[str, ...]:
    gelu = (
        "quick GELU, as of OpenAI's models"
        if c.gelu == "quick"
        else "exact (erf) GELU, which OpenAI's models and OpenCLIP's with -quickgelu in their name do not have"
    )
    pooled = "the class token as the feature" if c.pool == "token" else "the mean of the patches as the feature"
    if c.pool == "mean":
        pooled += f" {'after' if c.norm_place == 'tokens' else 'before'} the last LayerNorm"
    parts = f"{c.heads} heads, {pooled}, a LayerNorm epsilon of 1e-5 and the {gelu}"
    notes = [] if _config(header) else [f"assumed: {parts}; pass heads=, pool= or gelu= if not"]
    count = sum(bool(_UNUSED.match(key)) for key in header.shapes)
    return (*notes, f"text tower not read ({count} tensors)") if count else tuple(notes)


def _preprocess(header: CheckpointHeader, architecture: Architecture) -> Preprocess | None:
    stated = (header.config or {}).get("pretrained_cfg")
    return from_timm(stated, architecture.image) if stated else None


def _entries(c: ViTConfig) -> list[Entry]:
    projection = Entry("visual.proj", "head.output.weight", (c.width, c.classes), axes=(1, 0))
    return layout_entries(_LAYOUT, replace(c, classes=0)) + ([projection] if c.classes else [])


def _reason(c: ViTConfig) -> str | None:
    if c.norm_eps != 1e-5 or c.gelu != "erf":
        return "its file would be read with a LayerNorm epsilon of 1e-5 and the exact (erf) GELU: write hf-clip instead"
    return square_only(c)


_ACCEPTS = {"pre_norm": (True,), "layer_scale": (True, False), "patch_bias": (False,)}
_TOWERS = (
    Variant("CLIP", True, {**_ACCEPTS, "head_bias": (False,), "norm_place": ("tokens", "features")}, _reason),
    Variant("CLIP", False, {**_ACCEPTS, "norm_place": ("tokens", "features")}, _reason),
)

OPEN_CLIP = Format(
    name="open_clip",
    title="CLIP as OpenAI and OpenCLIP name it, the image tower (safetensors)",
    recognises=lambda header: header.has(f"{_BLOCK}.0.attn.in_proj_weight"),
    architecture=_architecture,
    entries=_entries,
    unsupported_reason=unsupported(_TOWERS),
    assumptions=_assumptions,
    preprocess=_preprocess,
    ignored=_UNUSED.pattern,
)
