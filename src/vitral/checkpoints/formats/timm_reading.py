"""The architecture of a timm checkpoint: what its shapes show, and what they hide.

Heads, the kind of GELU, pooling, the LayerNorm's epsilon, RoPE and the place of the norms are not in the shapes. They
come from config.json: the arguments of the architecture that it names, overridden by its own. Without it they are those
of all of timm's architectures that have the same tensors, which is recorded; where these differ, the file is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from vitral.architecture import ResizeRule, Size, ViTConfig
from vitral.checkpoints.formats.layout import (
    TIMM_SHARED_BIAS,
    Layout,
    layout_entries,
    read_parts,
    read_sizes,
    timm_layout,
)
from vitral.checkpoints.formats.table import (
    HINTED,
    CheckpointHeader,
    Entry,
    Shape,
    heads_of,
    image_of_rows,
    is_square,
)
from vitral.checkpoints.formats.timm_arguments import (
    WITHOUT_EFFECT,
    TimmFactory,
    factories,
    factory_named,
    fields_of,
    layout_of_arguments,
    missing_parts,
    mlp_width,
    size_of_argument,
    table_version,
)
from vitral.errors import UserError

_PLAIN = "vit_base_patch16_224"
# Fields that no tensor shows, and the arguments of config.json that state them.
_STATED_BY = {
    **{"gelu": "act_layer", "pool": "global_pool", "norm_eps": "norm_layer", "post_norm": "use_post_norm"},
    **{"rope": "use_rot_pos_emb", "map_heads": "attn_pool_num_heads", "map_prefix": "pool_include_prefix"},
}
_SIZES = ("depth", "width", "mlp", "patch")
INDEX = "relative_position_index"  # which older files store with the table of relative positions
_FOLDED = "position rows of the registers folded into the registers"


@dataclass(frozen=True)
class TimmFile:
    """What was read from the header of a timm checkpoint."""

    architecture: ViTConfig
    register_rows: bool
    assumed: tuple[str, ...]  # for `Card.changes`


def _layout(header: CheckpointHeader, register_rows: bool = False) -> Layout:
    return timm_layout(
        gamma=header.has("blocks.0.gamma_1"),
        separate_qkv=header.has("blocks.0.attn.q_proj.weight"),
        separate_gate=header.has("blocks.0.mlp.fc1_g.weight"),
        shared_bias=header.has(TIMM_SHARED_BIAS),
        register_rows=register_rows,
    )


def file_entries(header: CheckpointHeader) -> list[Entry]:
    """The table of a file, whose names depend on timm's class and its options."""
    file = read_header(header)
    return layout_entries(_layout(header, file.register_rows), file.architecture)


def named_factory(header: CheckpointHeader) -> TimmFactory | None:
    """The architecture that config.json names, if timm has it."""
    name = (header.config or {}).get("architecture")
    return factory_named(name) if isinstance(name, str) else None


def plain_header(header: CheckpointHeader, shapes: Mapping[str, Shape], **changes: Any) -> CheckpointHeader:
    """The header of the plain ViT, of these shapes, in a model that is one but for a part of its own, such as a stem.

    `changes` are those of the arguments of the architecture that config.json names, which otherwise are the ViT's.
    """
    named, config = named_factory(header), dict(header.config or {})
    if named:
        plain = _defaults("VisionTransformer")
        arguments = {**named.arguments, **_overrides(header), **changes}
        arguments = {key: value for key, value in arguments.items() if key in plain}
        config |= {"architecture": _PLAIN, "model_args": arguments}
    return replace(header, shapes=shapes, config=config)


def read_header(header: CheckpointHeader) -> TimmFile:
    """Derive the architecture; UserError where what the file does not state would be a guess."""
    named, overrides = named_factory(header), _overrides(header)
    model = named.model if named else "Eva" if _is_eva(header) else "VisionTransformer"
    arguments = {**(named.arguments if named else _defaults(model)), **overrides}
    if missing := missing_parts(model, arguments):
        raise UserError(f"{named.name if named else 'the file'} uses {_listed(missing)}, which vitral does not have.")
    shown = _shown(header)
    stated = fields_of(model, arguments)
    if named:
        _check_config(named.name, shown, stated, arguments)
        hidden: dict[str, Any] = {key: stated[key] for key in _STATED_BY}
        hidden["heads"] = header.hints.heads or arguments["num_heads"]
        assumed: tuple[str, ...] = ()
    else:
        known = {key: stated[key] for key, name in _STATED_BY.items() if name in overrides}
        known |= {key: value for key in HINTED if (value := getattr(header.hints, key))}
        if shown["swiglu"] and "act_layer" in overrides:
            raise UserError(f"its gated MLPs with {overrides['act_layer']} are not supported: use timm for it.")
        hidden, assumed = _guessed(header, shown, known, overrides.get("num_heads"))
    return _file(header, shown, hidden, assumed, arguments if named else overrides)


def _rule(header: CheckpointHeader, shown: dict[str, Any], class_position: bool) -> ResizeRule:
    """How timm resizes positions when it loads the file, by its name or else by its tensors."""
    if named := named_factory(header):
        return named.resize
    stated = {**{key: shown[key] for key in (*_SIZES, "registers")}, "class_position": class_position}
    rules = {one.fields["resize"] for one in _similar(header) if stated.items() <= one.fields.items()}
    return rules.pop() if len(rules) == 1 else "timm"


def _overrides(header: CheckpointHeader) -> dict[str, Any]:
    """The arguments in config.json; timm leaves out those that are null. UserError for one that is not known."""
    config, named = header.config or {}, named_factory(header)
    given = {"global_pool": config.get("global_pool"), **(config.get("model_args") or {})}
    stated = {key: value for key, value in given.items() if value is not None}
    known = named.arguments.keys() if named else _defaults("VisionTransformer").keys() | _defaults("Eva").keys()
    if unknown := sorted(stated.keys() - known - WITHOUT_EFFECT):
        raise UserError(
            f"config.json states {unknown[0]}={stated[unknown[0]]!r}, which is no argument of the models that vitral "
            f"knows of timm {table_version()} and may change what it computes: use timm for it."
        )
    return stated


def _defaults(model: str) -> dict[str, Any]:
    plain = {"VisionTransformer": _PLAIN, "Eva": "eva_giant_patch14_224"}[model]
    return factories()[plain].arguments


def _listed(parts: list[str]) -> str:
    """a, b and c"""
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if parts[1:] else parts)


def _remedy(header: CheckpointHeader) -> str:
    """What a user can do about something that a file does not state."""
    if not (header.config or {}).get("architecture"):
        return "pass the folder with timm's config.json"
    return "state it in the model_args of config.json, whose architecture vitral does not know"


def _is_eva(header: CheckpointHeader) -> bool:
    block = "blocks.0."
    return any(header.has(block + key) for key in ("gamma_1", "attn.q_bias", "attn.q_proj.weight", "mlp.fc1_g.weight"))


# ------------------------------------------------------------------------------------------------- what shapes show


def _shown(header: CheckpointHeader) -> dict[str, Any]:
    """The fields of the architecture that the tensors show."""
    names = _layout(header)
    sizes = read_sizes(header, names)
    before, after = header.has("norm.weight"), header.has("fc_norm.weight")
    if before and after:
        raise UserError("the file has a final LayerNorm before and one after pooling: that is not supported.")
    absolute, biased = header.has("pos_embed"), _bias_table(header) is not None
    if biased and absolute:
        raise UserError("the file has absolute and relative positions together: that is not supported.")
    return {
        **sizes,
        **read_parts(header, names),
        "position": "bias" if biased else "1d" if absolute else "none",
        "norm_place": "features" if after else "tokens" if before else "none",
    }


def _bias_table(header: CheckpointHeader) -> str | None:
    return next((key for key in header.shapes if key.endswith("relative_position_bias_table")), None)


_MUST_AGREE = (
    *("class_token", "registers", "position", "layer_scale", "swiglu", "qkv_bias", "key_bias", "qk_norm", "pre_norm"),
    *("attention_norm", "mlp_norm", "patch_bias"),
)


def _check_config(name: str, shown: dict[str, Any], stated: dict[str, Any], arguments: dict[str, Any]) -> None:
    """A config.json of another model would state the wrong heads, GELU and pooling."""
    expected = {key: stated[key] for key in _MUST_AGREE}
    expected |= {"width": arguments["embed_dim"], "depth": arguments["depth"]}
    if "none" in (shown["norm_place"], stated["norm_place"]):
        expected["norm_place"] = stated["norm_place"]
    for key, value in expected.items():
        if shown[key] != value:
            raise UserError(
                f"config.json ({name}) states {key}={value}, the tensors have {key}={shown[key]}: "
                "use the config.json that was saved with these weights."
            )


# ------------------------------------------------------------------------------------------------- what shapes hide


@dataclass(frozen=True)
class _Candidate:
    """One of timm's architectures as its file without config.json looks."""

    name: str
    keys: frozenset[str]  # of block 0 and outside of the blocks
    heads: int
    fields: dict[str, Any]  # of the ViTConfig, with `_SIZES`


@cache
def _candidates() -> tuple[_Candidate, ...]:
    found = []
    for factory in factories().values():
        if missing_parts(factory.model, factory.arguments):
            continue
        arguments, fields = factory.arguments, fields_of(factory.model, factory.arguments)
        small = ViTConfig(depth=1, width=64, mlp=8, heads=2, patch=8, image=(16, 16), classes=0, **fields)
        table = layout_entries(layout_of_arguments(factory.model, arguments), small)
        keys = frozenset(entry.theirs for entry in table)
        sizes = {"depth": arguments["depth"], "width": arguments["embed_dim"], "patch": arguments["patch_size"]}
        fields |= {**sizes, "mlp": mlp_width(factory.model, arguments), "resize": factory.resize}
        found.append(_Candidate(factory.name, keys, arguments["num_heads"], fields))
    return tuple(found)


def _similar(header: CheckpointHeader) -> list[_Candidate]:
    """timm's architectures with tensors of these names."""
    outside = [key for key in header.shapes if not key.startswith(("blocks.", "head."))]
    blocks = [key for key in header.shapes if key.startswith("blocks.0.") and not key.endswith(INDEX)]
    return [one for one in _candidates() if one.keys == {*outside, *blocks}]


def _guessed(
    header: CheckpointHeader, shown: dict[str, Any], known: dict[str, Any], heads: int | None
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Hidden fields by what all of timm's architectures with the same tensors have, and the sentence that says so."""
    alike = _similar(header)
    similar = [one for one in alike if known.items() <= one.fields.items()]
    same = [one for one in similar if {key: shown[key] for key in _SIZES}.items() <= one.fields.items()]
    hidden = {**(_common(header, same or similar) if similar else _usual(header, shown)), **known}
    if hidden["rope"] and not hidden["rope"].learned:
        raise UserError(f"the file does not state the frequencies of its rotary positions (RoPE): {_remedy(header)}.")
    if hidden["post_norm"] and "post_norm" not in known:
        raise UserError(f"the file does not state if its norms come before or after the branches: {_remedy(header)}.")
    decided = {*known, *(["gelu"] if shown["swiglu"] else []), *([] if shown["class_token"] else ["pool"])}
    assumed = [f"{key}={hidden[key]}" for key in HINTED if key not in decided]
    if not similar and {one.fields["post_norm"] for one in alike} != {False}:
        assumed.append("norms before the branches")
    stated_heads = header.hints.heads or heads or _shown_heads(header, shown)
    hidden["heads"] = stated_heads or _heads(header, shown, same)
    assumed += [f"heads={hidden['heads']}"] if same and not stated_heads else []  # `heads_of` records others
    assumed += [f"axes of RoPE={hidden['rope'].axes}"] if hidden["rope"] else []
    if hidden["pool"] == "map" and "map_prefix" not in known and (shown["class_token"] or shown["registers"]):
        assumed.append(f"pool_include_prefix={hidden['map_prefix']}")
    options = " or ".join(f"{key}=" for key in (*HINTED, "heads") if any(one.startswith(key) for one in assumed))
    remedy = f"pass {options}, or {_remedy(header).removeprefix('pass ')}" if options else _remedy(header)
    models = "models with these tensors have" if similar else "plain ViT has"
    return hidden, (f"assumed: {', '.join(assumed)}, as timm's {models}; if not, {remedy}",) if assumed else ()


def _common(header: CheckpointHeader, similar: list[_Candidate]) -> dict[str, Any]:
    """The hidden fields of some architectures; UserError if they differ."""
    first = similar[0]
    for other in similar:
        different = [key for key in _STATED_BY if other.fields[key] != first.fields[key]]
        if different:
            names = f"{first.name} and {other.name}"
            options = " and ".join(f"{key}=" for key in different) if {*different} <= {*HINTED} else ""
            raise UserError(
                f"the file does not state its {_listed(different)}, in which {names}, of the same tensors, differ: "
                f"{f'pass {options}, or ' if options else ''}{_remedy(header)}."
            )
    return {key: first.fields[key] for key in _STATED_BY}


def _usual(header: CheckpointHeader, shown: dict[str, Any]) -> dict[str, Any]:
    """The defaults of timm's VisionTransformer, for a combination of parts that no known architecture of timm has."""
    incomplete = shown["position"] != "1d" or shown["norm_place"] == "none" or not shown["patch_bias"]
    if _is_eva(header) or shown["pre_norm"] or shown["swiglu"] or incomplete:
        if name := (header.config or {}).get("architecture"):
            raise UserError(f"config.json names {name}, which vitral does not know: use timm for it.")
        raise UserError(
            f"no model of timm that vitral knows has these tensors, so its GELU is unknown: {_remedy(header)}."
        )
    mean = not shown["class_token"] or shown["norm_place"] == "features"
    pool = "map" if header.has("attn_pool.latent") else "mean" if mean else "token"
    plain = {"post_norm": False, "rope": None, "map_heads": 0, "map_prefix": False}
    return {"gelu": "erf", "pool": pool, "norm_eps": 1e-6, **plain}


def _shown_heads(header: CheckpointHeader, shown: dict[str, Any]) -> int | None:
    """The heads by a tensor that has an axis for them."""
    if shown["qk_norm"]:
        return shown["width"] // header.shape("blocks.0.attn.q_norm.weight", 1)[0]
    if header.has("rope.freqs"):
        return header.shape("rope.freqs", 4)[2]
    key = _bias_table(header)
    return header.shape(key, 2)[1] if key else None


def _heads(header: CheckpointHeader, shown: dict[str, Any], same: list[_Candidate]) -> int:
    heads = {one.heads: one.name for one in same}
    if len(heads) > 1:
        names = " and ".join(f"{name} ({count})" for count, name in heads.items())
        raise UserError(f"the file does not state its number of heads, in which {names} differ: pass heads=.")
    return next(iter(heads)) if heads else heads_of(header, shown["depth"], shown["width"])


def _file(
    header: CheckpointHeader,
    shown: dict[str, Any],
    hidden: dict[str, Any],
    assumed: tuple[str, ...],
    arguments: dict[str, Any],
) -> TimmFile:
    image, rows, certain = _image(header, shown, arguments)
    patch, prefix = shown["patch"], int(shown["class_token"]) + shown["registers"]
    extra = rows - (image[0] // patch) * (image[1] // patch) if shown["position"] == "1d" else 0
    register_rows = bool(shown["registers"]) and extra == prefix
    if header.has("attn_pool.latent") != (hidden["pool"] == "map"):
        raise UserError(f'its pooling is "{hidden["pool"]}", which its tensors do not match: check its config.json.')
    notes = [_FOLDED] if register_rows else []
    notes += [] if certain else [f"assumed: image={image[0]}x{image[1]}; if not, {_remedy(header)}"]
    own = size_of_argument(_own_size(header) or image)
    if header.hints.grid is None and [side // patch for side in own] != [side // patch for side in image]:
        stated = f"config.json states {own[0]}x{own[1]}, to which timm resizes them"
        notes.append(f"assumed: image={image[0]}x{image[1]}, by its positions; {stated}")
    class_position = shown["class_token"] and extra > 0
    rule = _rule(header, shown, class_position)
    if rule != "timm" and named_factory(header) is None:
        notes.append(f"assumed: resize={rule}, as timm's models with these tensors have; if not, pass resize=")
    architecture = ViTConfig(**shown, **hidden, image=image, resize=rule, class_position=class_position)
    if architecture.pool == "map":
        mlp = header.shape("attn_pool.mlp.fc1.weight", 2)[0]
        architecture = replace(architecture, map_mlp=0 if mlp == architecture.mlp else mlp)
    return TimmFile(architecture, register_rows, (*notes, *assumed))


def _image(header: CheckpointHeader, shown: dict[str, Any], arguments: dict[str, Any]) -> tuple[Size, int, bool]:
    """The image size, the rows of the position table, and whether the file or its config states the size."""
    patch, prefix = shown["patch"], int(shown["class_token"]) + shown["registers"]
    configured = _configured_sizes(header, arguments) if header.hints.grid is None else []
    if shown["position"] == "none":
        grid = header.hints.grid
        if grid:
            return (grid[0] * patch, grid[1] * patch), 0, True
        return (configured[0], 0, True) if configured else ((224 // patch * patch,) * 2, 0, False)
    if shown["position"] == "bias":
        return _image_of_bias(header, patch, configured), 0, True
    rows = header.shape("pos_embed", 3)[1]
    possible = {rows, rows - prefix, rows - int(shown["class_token"])}
    for size in configured:
        if (size[0] // patch) * (size[1] // patch) in possible:
            return size, rows, True
    hint = header.hints.grid
    fitting = [n for n in sorted(possible, reverse=True) if (hint[0] * hint[1] == n if hint else is_square(n))]
    return image_of_rows(header, fitting[0] if fitting else rows - prefix, patch), rows, True


def _image_of_bias(header: CheckpointHeader, patch: int, configured: list[Size]) -> Size:
    """The image size of a table of relative positions: (2h - 1)(2w - 1) offsets and 3 rows of the class token."""
    offsets = header.size(_bias_table(header) or "") - 3
    for size in [(rows * patch, columns * patch) for rows, columns in [header.hints.grid or (0, 0)]] + configured:
        if (2 * (size[0] // patch) - 1) * (2 * (size[1] // patch) - 1) == offsets:
            return size
    if header.hints.grid or not is_square(offsets):
        raise UserError(f"its {offsets} relative positions are not those of a square grid: pass grid=(rows, columns).")
    side = (int(offsets**0.5) + 1) // 2 * patch
    return side, side


def _configured_sizes(header: CheckpointHeader, arguments: dict[str, Any]) -> list[Size]:
    """The model's image size, that of its pre-training, which timm does not update, and the architecture's."""
    config = header.config or {}
    pretrained = config.get("pretrained_cfg") or {}
    sizes = (_own_size(header), pretrained.get("input_size"), arguments.get("img_size"))
    return [size_of_argument(size) for size in sizes if size]


def _own_size(header: CheckpointHeader) -> Any:
    return ((header.config or {}).get("model_args") or {}).get("img_size")
