"""The table of timm's factories: it is that of the installed timm, and names find their rows."""

from __future__ import annotations

import json
from importlib.resources import files

import pytest
from oracles import outside

from vitral.checkpoints.formats.timm_arguments import factories, factory_named, named_architecture


def test_the_table_is_that_of_the_installed_timm():
    text = files("vitral.checkpoints").joinpath("timm_factories.json").read_text(encoding="utf-8")
    if outside("timm").__version__ != json.loads(text)["timm"]:
        pytest.skip("the table was made from another timm")
    capture = outside("timm_factories")
    assert capture.as_text(capture.table({name: capture.captured(name) for name in capture.names()})) == text


def test_arguments_of_groups_classes_and_sizes_are_joined():
    giant = factories()["vit_giant_patch14_reg4_dinov2"]
    expected = {"embed_dim": 1536, "num_heads": 24, "reg_tokens": 4, "no_embed_class": True, "qk_norm": False}
    assert giant.model == "VisionTransformer"
    assert expected.items() <= giant.arguments.items()
    assert factories()["resnetv2_50x3_bit"].arguments["width_factor"] == 3
    assert factories()["naflexvit_base_patch16_siglip"].arguments["cfg"]["act_layer"] == "gelu_tanh"


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("vit_base_patch16_224", "vit_base_patch16_224"),
        ("vit_base_patch16_clip_224.openai", "vit_base_patch16_clip_224"),
        ("vit_base_patch16_clip_quickgelu_224.openai", "vit_base_patch16_clip_quickgelu_224"),
        ("vit_base_patch16_224.augreg_in21k_ft_in1k.safetensors", "vit_base_patch16_224"),
        ("timm/vit_base_patch16_224_miil.in21k", "vit_base_patch16_224_miil"),
        ("vit_base_patch16_224_in21k.pth.tar", "vit_base_patch16_224"),
        ("deit3_small_patch16_384-best.pth", "deit3_small_patch16_384"),
        ("vit_base_patch16_2240", None),
        ("vit_base_patch16_224_of_mine", None),
        ("vit_base_patch16", None),
        ("model.safetensors", None),
        ("", None),
    ],
)
def test_a_name_finds_the_longest_architecture(name, architecture):
    factory = factory_named(name)
    assert (factory.name if factory else None) == architecture


def test_a_name_states_what_shapes_hide():
    siglip = named_architecture("vit_so400m_patch16_siglip_512.v2_webli")
    assert siglip is not None
    expected = {"gelu": "tanh", "pool": "map", "heads": 16, "width": 1152, "mlp": 4304, "norm_eps": 1e-6}
    assert expected.items() <= siglip.items()
    clip = named_architecture("vit_base_patch16_clip_quickgelu_224")
    assert clip is not None
    assert (clip["gelu"], clip["norm_eps"], clip["pre_norm"]) == ("quick", 1e-5, True)
    lingbot, giant = named_architecture("vit_giant_patch16_lingbot"), named_architecture("vit_giant_patch14_dinov2")
    assert lingbot is not None
    assert giant is not None
    assert (lingbot["swiglu"], giant["swiglu"], giant["mlp"]) == (True, True, 4096)
    assert named_architecture("vit_base_patch16_xp_224") is None
