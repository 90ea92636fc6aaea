"""timm's Vision Transformers, one of each kind: read with and without config.json, and written for timm."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from oracles import (
    SMALL,
    gap,
    outcome,
    outside,
    pictures,
    quiet,
    random_weights,
    run,
    same_bits,
    timm_loaded,
    timm_model,
    timm_saved,
    written,
)
from safetensors.torch import load_file, save_file
from timm_cases import CLASSES, build, images, relative_gap, save, save_header, shrunk
from timm_factories import captured, class_defaults

import vitral
from vitral.architecture import RopeConfig, ViTConfig
from vitral.checkpoints.formats import FORMATS
from vitral.checkpoints.formats.table import CheckpointHeader, Hints
from vitral.checkpoints.formats.timm_arguments import TimmFactory, factories, missing_parts
from vitral.checkpoints.weights import describe, read
from vitral.errors import UserError

LIMIT = 1e-5  # relative to the largest output
_SIZES = {"img_size", "patch_size", "embed_dim", "depth", "num_heads", "mlp_ratio", "layers", "width_factor", "cfg"}


def distinct() -> list[TimmFactory]:
    """The smallest architecture of each group that has the same arguments but for sizes."""
    groups: dict[str, list[TimmFactory]] = {}
    for factory in factories().values():
        arguments = {key: value for key, value in factory.arguments.items() if key not in _SIZES}
        groups.setdefault(json.dumps([factory.model, arguments]), []).append(factory)
    return [min(group, key=lambda one: one.arguments.get("embed_dim", 0)) for group in groups.values()]


def is_refused(factory: TimmFactory) -> bool:
    return bool(missing_parts(factory.model, factory.arguments))


READ = [factory.name for factory in distinct() if not is_refused(factory)]
REFUSED = [factory.name for factory in distinct() if is_refused(factory)]


# One in three runs always, the others with `pytest -m slow`; benchmarks/sweep_checkpoints.py reads all.
MARKED = [pytest.param(name, marks=[pytest.mark.slow] if number % 3 else []) for number, name in enumerate(READ)]


@pytest.mark.parametrize("name", MARKED)
def test_outputs_are_those_of_timm_in_both_directions(name, tmp_path):
    if not outside("timm").is_model(name):
        pytest.skip(f"the installed timm does not have {name}")
    arguments = shrunk(name)
    if name.startswith("beit"):  # timm does not load other grids
        arguments["img_size"] = arguments["img_size"][:1] * 2
    model, pixels = build(name, arguments), images(arguments)
    found = read(save(model, tmp_path / "theirs", arguments)).weights
    assert relative_gap(run(found, pixels), outcome(model, pixels)) <= LIMIT
    written(found, tmp_path / "ours", "timm")
    assert relative_gap(outcome(timm_loaded(tmp_path / "ours"), pixels), outcome(model, pixels)) <= LIMIT
    assert relative_gap(run(read(tmp_path / "ours").weights, pixels), outcome(model, pixels)) <= LIMIT


def test_few_kinds_are_refused():
    """More than these would be a loss; the sweep counts all architectures."""
    assert len(READ) >= 55
    assert {factories()[name].model for name in READ} == {"VisionTransformer", "Eva", "Beit"}


@pytest.mark.parametrize("name", REFUSED)
def test_parts_that_vitral_does_not_have_are_named(name):
    shapes = {"patch_embed.proj.weight": (1, 3, 16, 16), "blocks.0.norm1.weight": (1,)}
    header = CheckpointHeader(shapes, {"architecture": name})
    assert FORMATS["timm"].recognises(header)
    with pytest.raises(UserError, match=f"^{name} uses .*, which vitral does not have.$") as caught:
        FORMATS["timm"].architecture(header)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("vit_base_patch16_xp_224", "RMSNorm and parallel blocks"),
        ("vit_dpwee_patch16_reg1_gap_256", "parallel blocks and differential attention"),
        ("vit_large_patch16_sapiens2", "RMSNorm, grouped-query attention and LayerScale of the attention alone"),
        ("vitamin_small_224", "a convolutional stem and GeGLU"),
        ("vit_relpos_base_patch16_224", "relative positions computed by an MLP"),
    ],
)
def test_all_missing_parts_are_named(name, words):
    with pytest.raises(UserError, match=words):
        FORMATS["timm"].architecture(CheckpointHeader({}, {"architecture": name}))


# ------------------------------------------------------------------------------------------------------- alone

AMBIGUOUS = {
    "vit_base_patch16_clip_224": "gelu",  # vit_base_patch16_clip_quickgelu_224
    "vit_large_patch16_siglip_512": "gelu",  # vit_large_patch16_siglip_384
    "vit_base_patch16_gap_224": "number of heads",  # vit_base_patch16_siglip_gap_224
    "eva02_tiny_patch14_224": "RoPE",
    "vit_small_patch16_dinov3": "RoPE",
    "vit_base_patch16_rpn_224": "norms come before or after the branches",
}
CLEAR = [
    *("vit_tiny_patch16_224", "deit3_small_patch16_224", "vit_small_patch14_reg4_dinov2", "beit_base_patch16_224"),
    *("vit_base_patch16_siglip_224", "vit_small_patch16_rope_mixed_ape_224", "beit3_base_patch16_224"),
    *("vit_so150m2_patch16_reg1_gap_256", "vit_wee_patch16_reg1_gap_256", "test_vit3", "flexivit_small"),
]


@pytest.mark.parametrize("name", CLEAR)
def test_a_file_alone_is_read_where_its_shapes_suffice(name, tmp_path):
    """Headers of full-size models, as timm has them."""
    outside("timm")
    header = save_header(name, tmp_path / "weights.safetensors")
    alone = describe(header).card
    (tmp_path / "config.json").write_text(json.dumps({"architecture": name}))
    stated = describe(header).card
    assert alone.architecture == stated.architecture
    assert any("assumed: gelu=erf" in change for change in alone.changes)
    assert not any("assumed" in change for change in stated.changes)


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_a_file_alone_is_refused_where_it_would_be_a_guess(name, tmp_path):
    outside("timm")
    with pytest.raises(UserError, match=AMBIGUOUS[name]) as caught:
        describe(save_header(name, tmp_path / "weights.safetensors"))
    assert len(str(caught.value)) - len(str(tmp_path)) < 300


def test_weights_alone_compute_what_timm_computes(tmp_path):
    outside("timm")
    model = build("test_vit", {})
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    found = read(tmp_path / "weights.safetensors")
    assert found.card.changes == (
        "assumed: gelu=erf, pool=token, norm_eps=1e-06, heads=2, as timm's models with these tensors have; "
        "if not, pass gelu= or pool= or norm_eps= or heads=, or the folder with timm's config.json",
    )
    pixels = pictures(2, 3, 160, 160)
    assert relative_gap(run(found.weights, pixels), outcome(model, pixels)) <= LIMIT


@pytest.mark.parametrize("pool", ["avgmax", "max"])
def test_assumed_heads_are_listed_once(pool, tmp_path):
    """No architecture of timm in this size has these tensors: the heads are those of a standard ViT."""
    outside("timm")
    save_header("vit_tiny_patch16_224", tmp_path / "weights.safetensors", global_pool=pool)
    first, *others = describe(tmp_path / "weights.safetensors").card.changes
    assert first.startswith("assumed: gelu=erf, pool=mean, norm_eps=1e-06, as timm's")
    assert others == ["assumed: 3 heads, as every standard ViT of 12 layers and width 192; pass heads= if not"]


def test_what_is_assumed_of_a_distilled_model_is_listed_once(tmp_path):
    outside("timm")
    changes = describe(save_header("deit_tiny_distilled_patch16_224", tmp_path / "weights.safetensors")).card.changes
    assert sum("gelu=" in change for change in changes) == 1


def test_an_unusual_combination_of_parts_is_read_as_a_plain_vit(tmp_path):
    """No architecture of timm has LayerScale, registers and a class token without a row, but norms its queries."""
    outside("timm")
    small = {"embed_dim": 64, "depth": 2, "num_heads": 2, "img_size": [32, 48], "qk_norm": True, "init_values": 0.1}
    model = build("vit_tiny_patch16_224", {**small, "patch_size": 16})
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    found = read(tmp_path / "weights.safetensors", hints=Hints(grid=(2, 3)))
    pixels = pictures(2, 3, 32, 48)
    assert relative_gap(run(found.weights, pixels), outcome(model, pixels)) <= LIMIT
    assert "heads" not in found.card.changes[0]  # the width of the norms shows them
    assert "norms before the branches, as timm's plain ViT has" in found.card.changes[0]


# ------------------------------------------------------------------------------------- arguments of users' own models

VALUES: dict[str, list[Any]] = {
    "global_pool": ["avg", "token", "map", "max", ""],
    "pos_embed": ["none", ""],
    "norm_layer": ["layernorm", "rmsnorm", "layernormfp32"],
    "act_layer": ["relu", "silu", "quick_gelu", "gelu_tanh"],
    "fc_norm": [True, False],
    "init_values": [None, 0.1],
    "in_chans": [1],
    "reg_tokens": [2],
    "num_reg_tokens": [2],
    "attn_layer": ["diff"],
    "rope_type": ["cat", "mixed"],
    "rope_temperature": [50.0],
    "rope_grid_offset": [0.5],
    "rope_grid_indexing": ["xy", "ij"],
    "ref_feat_shape": [[3, 3]],
    "attn_pool_num_heads": [1],
}
NO_EFFECT = {"fix_init", "qkv_fused"}


@pytest.mark.parametrize(
    ("name", "fewest"),
    [
        *(("vit_tiny_patch16_224", 18), ("deit_tiny_distilled_patch16_224", 14), ("vit_small_patch16_dinov3", 18)),
        *(("eva02_tiny_patch14_224", 18), ("beit_base_patch16_224", 8), ("vit_giant_patch14_dinov2", 17)),
    ],
)
def test_any_changed_argument_is_read_or_refused(name, fewest, tmp_path):
    """Each argument that switches something, changed alone, in a folder of timm's writer: equal outputs or an error."""
    outside("timm")
    kind, own = captured(name)
    stated = {**class_defaults(kind), **own}
    switches = {key: [not value] for key, value in stated.items() if isinstance(value, bool) and key not in NO_EFFECT}
    changes = [(key, value) for key in stated for value in {**switches, **VALUES}.get(key, [])]
    equal = 0
    for number, (key, value) in enumerate(changes):
        arguments = {**shrunk(name), key: value}
        try:
            model = build(name, arguments)
            pixels = images(arguments)[:, : arguments.get("in_chans", 3)]
            expected = outcome(model, pixels)
        except Exception:  # combinations that timm does not have, either
            continue
        try:
            found = read(save(model, tmp_path / str(number), arguments)).weights
        except UserError:
            continue
        assert relative_gap(run(found, pixels), expected) <= LIMIT, (key, value)
        equal += 1
    assert equal >= fewest


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "quick_gelu"])
def test_a_gate_of_an_unknown_architecture_with_another_activation_is_refused(activation, tmp_path):
    """The tensors of an MLP with a gate do not show its activation, which is SiLU in every model of timm."""
    outside("timm")
    arguments = {**shrunk("vit_giant_patch14_dinov2"), "act_layer": activation}
    folder = save(build("vit_giant_patch14_dinov2", arguments), tmp_path / "model", arguments)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architecture": "vit_of_ones_own"}))
    with pytest.raises(UserError, match=f"gated MLPs with {activation} are not supported"):
        read(folder)


@pytest.mark.parametrize("stated", [{}, {"pool_include_prefix": False}, {"pool_include_prefix": True}])
def test_what_attention_pooling_of_an_unknown_architecture_reads_is_assumed_with_a_note(stated, tmp_path):
    outside("timm")
    arguments = {**shrunk("vit_base_patch16_siglip_224"), "reg_tokens": 3, **stated}
    model, pixels = build("vit_base_patch16_siglip_224", arguments), images(arguments)
    folder = save(model, tmp_path / "model", arguments)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architecture": "vit_of_ones_own"}))
    found = read(folder).weights
    assert relative_gap(run(found, pixels), outcome(model, pixels)) <= LIMIT
    assert any("pool_include_prefix=False" in change for change in found.changes) == (not stated)


# -------------------------------------------------------------------------------------------- details of folders


def test_position_rows_of_registers_are_folded_and_recorded(tmp_path):
    outside("timm")
    arguments = {**shrunk("test_vit"), "reg_tokens": 3, "class_token": True}
    model, pixels = build("test_vit", arguments), images(arguments)
    found = read(save(model, tmp_path / "model", arguments))
    assert found.weights.changes == ("position rows of the registers folded into the registers",)
    assert relative_gap(run(found.weights, pixels), outcome(model, pixels)) <= LIMIT
    state = model.state_dict()
    assert (found.weights.state["registers"] == state["reg_token"][0] + state["pos_embed"][0, 1:4]).all()


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "flexivit_small", "deit3_small_patch16_224"])
@pytest.mark.parametrize(("image", "patch"), [(48, 8), (24, 8), (32, 4), (48, 16)])
def test_other_sizes_are_those_of_timm(name, image, patch, tmp_path):
    """timm resizes positions and patches when it loads a file; those of FlexiViT with another interpolation."""
    arguments = {"depth": 2, "embed_dim": 32, "num_heads": 4, "img_size": 32, "patch_size": 8}
    timm = outside("timm")
    folder = save(build(name, arguments), tmp_path, arguments)
    overlay = {"file": str(folder / "model.safetensors"), "custom_load": False, "num_classes": CLASSES}
    changed = {**arguments, "img_size": image, "patch_size": patch}
    with quiet():
        theirs = timm.create_model(
            name, pretrained=True, num_classes=CLASSES, pretrained_cfg_overlay=overlay, **changed
        ).eval()
    ours, _ = vitral.load(folder, image=image, patch=patch)
    pixels = pictures(2, 3, image, image)
    assert relative_gap(outcome(ours, pixels), outcome(theirs, pixels)) <= LIMIT


def test_radio_is_read_by_its_name(tmp_path):
    """It has registers, LayerScale and no final norm; timm has it since 1.0.31."""
    arguments = {"depth": 2, "embed_dim": 32, "num_heads": 4, "img_size": [32, 48], "patch_size": 8}
    parts = {"reg_tokens": 7, "no_embed_class": True, "final_norm": False, "init_values": 1e-5}
    outside("timm")
    model = build("vit_base_patch16_224", {**arguments, **parts})
    folder = save(model, tmp_path, arguments)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architecture": "vit_base_patch16_radio_v3"}))
    pixels = images(arguments)
    assert relative_gap(run(read(folder).weights, pixels), outcome(model, pixels)) <= LIMIT


def test_relative_positions_that_blocks_share_are_given_to_each(tmp_path):
    outside("timm")
    arguments = {**shrunk("beit_base_patch16_224"), "use_rel_pos_bias": False, "use_shared_rel_pos_bias": True}
    model, pixels = build("beit_base_patch16_224", arguments), images(arguments)
    found = read(save(model, tmp_path / "model", arguments)).weights
    assert relative_gap(run(found, pixels), outcome(model, pixels)) <= LIMIT


def saved(path: Path, **config: Any) -> CheckpointHeader:
    """A plain ViT of timm with this config.json."""
    written(random_weights(replace(SMALL, gelu="erf")), path, "timm")
    shapes = {key: tuple(value.shape) for key, value in load_file(path / "model.safetensors").items()}
    return CheckpointHeader(shapes, config)


def test_a_config_of_another_model_is_refused(tmp_path):
    header = saved(tmp_path / "clip", architecture="vit_base_patch16_clip_224")
    with pytest.raises(UserError, match=r"config.json \(vit_base_patch16_clip_224\) states pre_norm=True"):
        FORMATS["timm"].architecture(header)
    header = saved(tmp_path / "base", architecture="vit_base_patch16_224")
    with pytest.raises(UserError, match="states width=768, the tensors have width=32"):
        FORMATS["timm"].architecture(header)


def test_arguments_of_an_unknown_architecture_count(tmp_path):
    """What config.json states is used, the rest is assumed."""
    arguments = {"num_heads": 2, "act_layer": "gelu_tanh", "img_size": 32}
    header = saved(tmp_path / "model", architecture="vit_of_mine", model_args=arguments)
    architecture = FORMATS["timm"].architecture(header)
    assert isinstance(architecture, ViTConfig)
    assert (architecture.heads, architecture.gelu) == (2, "tanh")
    (assumed,) = FORMATS["timm"].assumptions(header, architecture)
    assert "pool=token" in assumed
    assert "model_args of config.json" in assumed
    assert "gelu" not in assumed


def test_an_unknown_architecture_of_unknown_tensors_is_refused_by_its_name(tmp_path):
    """Such as timm's aimv2_large_patch14_224, which is not in the table: nothing is said about what timm has."""
    header = saved(tmp_path / "model", architecture="aimv2_large_patch14_224")
    shapes = {key: shape for key, shape in header.shapes.items() if key != "patch_embed.proj.bias"}
    with pytest.raises(UserError, match=r"^config\.json names aimv2_large_patch14_224, which vitral does not know: "):
        FORMATS["timm"].architecture(replace(header, shapes=shapes))
    with pytest.raises(UserError, match=r"^no model of timm that vitral knows .* pass the folder with timm's config"):
        FORMATS["timm"].architecture(replace(header, shapes=shapes, config=None))


# ---------------------------------------------------------------------------------------------------- writing

ERF = replace(SMALL, gelu="erf", width=64, mlp=96, image=(32, 40))
EVA = replace(ERF, key_bias=False, rope=RopeConfig(temperature=1e4, pairs="adjacent", coordinates="index"))
BEIT = replace(ERF, position="bias", key_bias=False, image=(32, 32))
HALVES = RopeConfig()
WRITTEN: dict[str, ViTConfig] = {
    "quick GELU, pre-norm": replace(ERF, gelu="quick", pre_norm=True, patch_bias=False, norm_eps=1e-5),
    "QK norm, no bias of qkv": replace(ERF, qk_norm=True, qkv_bias=False),
    "sub-norms": replace(ERF, attention_norm=True, mlp_norm=True, norm_eps=1e-5, pool="mean", norm_place="features"),
    "packed SwiGLU": replace(ERF, swiglu=True, layer_scale=True),
    "packed SwiGLU without LayerScale": replace(ERF, swiglu=True, mlp=61),
    "post-norm": replace(ERF, post_norm=True),
    "no final norm": replace(ERF, norm_place="none"),
    "no positions": replace(ERF, position="none", class_position=False),
    "map beside a class token": replace(ERF, pool="map"),
    "map of all tokens": replace(ERF, pool="map", map_prefix=True, registers=2, class_position=False),
    "map with its own heads": replace(EVA, pool="map", map_prefix=True, map_heads=8, map_mlp=32),
    "EVA-02": replace(EVA, swiglu=True, mlp_norm=True, attention_norm=True),
    "EVA-02, epsilon 1e-5": replace(
        EVA, swiglu=True, norm_eps=1e-5, rope=RopeConfig(pairs="adjacent", coordinates="index", reference=(3, 3))
    ),
    "no bias of the keys": replace(EVA, rope=None, pool="mean", norm_place="features"),
    "RoPE, biases": replace(EVA, key_bias=True, qk_norm=True, layer_scale=True, norm_eps=1e-5),
    "RoPE, post-norm": replace(EVA, post_norm=True, position="none", class_position=False),
    "RoPE of DINOv3": replace(ERF, rope=HALVES, key_bias=False, registers=4, position="none", norm_eps=1e-5),
    "RoPE of DINOv3, LayerScale": replace(ERF, rope=HALVES, key_bias=False, layer_scale=True, norm_eps=1e-5),
    "learned RoPE": replace(
        EVA, rope=RopeConfig(learned=True, axes="xy", pairs="adjacent", coordinates="index"), class_position=False
    ),
    "relative positions": replace(BEIT, pool="mean", norm_place="features"),
    "relative positions, SwiGLU": replace(BEIT, swiglu=True, mlp_norm=True, layer_scale=True),
}


@pytest.mark.parametrize("case", WRITTEN)
def test_timm_reads_what_was_written(case, tmp_path):
    c = WRITTEN[case]
    weights = random_weights(c)
    written(weights, tmp_path / "model", "timm")
    pixels = pictures(2, 3, *c.image)
    expected = run(weights, pixels)
    assert relative_gap(outcome(timm_loaded(tmp_path / "model"), pixels), expected) <= LIMIT
    back = read(tmp_path / "model").weights
    assert relative_gap(run(back, pixels), expected) <= 1e-6
    assert back.changes == ()


UNWRITABLE: dict[str, tuple[ViTConfig, str]] = {
    "two poolings": (replace(ERF, pool="token+mean"), r'the pooling "token\+mean"'),
    "a head without bias": (replace(ERF, head_bias=False), "heads have a bias"),
    "pre-norm and a bias of the patches": (replace(ERF, pre_norm=True), "patch embedding has a bias"),
    "tanh GELU and RoPE": (replace(EVA, gelu="tanh"), "exact .erf. GELU"),
    "SwiGLU after a norm of 1e-5": (replace(ERF, swiglu=True, norm_eps=1e-5, gelu="tanh", pool="map"), "combination"),
    "periods in bfloat16": (replace(ERF, rope=RopeConfig(periods="bfloat16")), "DINOv3 in float32"),
    "relative positions of registers": (replace(BEIT, registers=1), "no registers"),
    "relative positions, not square": (replace(BEIT, image=(32, 40)), "square grids only, not of 4x5"),
}


@pytest.mark.parametrize("case", UNWRITABLE)
def test_what_timm_has_no_slot_for_is_refused(case, tmp_path):
    c, words = UNWRITABLE[case]
    with pytest.raises(UserError, match=words):
        written(random_weights(c), tmp_path / "model", "timm")


@pytest.mark.parametrize("format", ["hf", "torchvision", "dino", "google", "google-linen", "big_vision"])
@pytest.mark.parametrize("case", ["EVA-02", "no bias of the keys", "no final norm", "relative positions"])
def test_formats_of_plain_models_do_not_drop_later_parts(case, format, tmp_path):
    c = replace(WRITTEN[case], pool="token", norm_place="none" if case == "no final norm" else "tokens")
    gelu = "tanh" if FORMATS[format].container == "npz" else "erf"
    with pytest.raises(UserError, match=f"format {format} cannot represent this model: "):
        written(random_weights(replace(c, gelu=gelu, classes=0 if format == "dino" else 5)), tmp_path / "model", format)


@pytest.mark.parametrize("case", WRITTEN)
def test_our_own_format_keeps_every_part(case, tmp_path):
    weights = random_weights(WRITTEN[case])
    assert written(weights, tmp_path / "model.safetensors", "vitral").changes == ()
    back = read(tmp_path / "model.safetensors").weights
    assert back.architecture == weights.architecture
    assert same_bits(back.state, weights.state)


def test_positions_of_another_image_size_than_stated_are_recorded(tmp_path):
    """timm resizes them to the stated size, which is what vitral computes on images of that size."""
    folder = timm_saved(timm_model(), tmp_path / "a")
    state = load_file(folder / "model.safetensors")
    save_file({**state, "pos_embed": state["pos_embed"][:, :10].contiguous()}, folder / "model.safetensors")
    loaded, card = vitral.load(folder)
    assert card.architecture.image == (24, 24)
    stated = "config.json states 32x32, to which timm resizes them"
    assert card.changes == (f"assumed: image=24x24, by its positions; {stated}",)
    images = pictures(2, 3, 32, 32)
    assert gap(outcome(loaded, images), outcome(timm_loaded(folder), images)) <= 1e-5
