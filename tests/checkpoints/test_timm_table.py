"""The table of timm's factories: it is that of the installed timm, and names find their rows."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

import pytest
from oracles import outside

from vitral.checkpoints.card import Preprocess
from vitral.checkpoints.formats.timm_arguments import factories, factory_named, named_architecture, table_version
from vitral.checkpoints.processors import from_transformers, named_preprocess, release_named, releases
from vitral.data.preprocess import IMAGENET_MEAN, IMAGENET_STD


def test_the_table_is_that_of_the_installed_timm():
    """In another version than the table's, what both have must be the same."""
    text = files("vitral.checkpoints").joinpath("timm_factories.json").read_text(encoding="utf-8")
    capture = outside("timm_factories")
    captured = {name: capture.captured(name) for name in capture.names()}
    if outside("timm").__version__ == table_version():
        assert capture.as_text(capture.table(captured)) == text
    for name, (kind, own) in captured.items():
        if factory := factories().get(name):
            theirs = {**capture.class_defaults(kind), **own}
            ours = {key: factory.arguments[key] for key in theirs if key in factory.arguments}
            assert (name, factory.model, ours) == (name, kind, _squared({key: theirs[key] for key in ours}))


def _squared(arguments: dict[str, Any]) -> dict[str, Any]:
    """With a square image by one number, as the table has it."""
    size = arguments.get("img_size")
    return {**arguments, "img_size": size[0]} if isinstance(size, list) and size[0] == size[1] else arguments


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


def test_preprocessing_is_that_of_the_installed_timm():
    """Every release, by timm's own transform of it, and the table as a whole if it is of the same version."""
    capture = outside("timm_factories")
    stated = json.loads(files("vitral.checkpoints").joinpath("timm_preprocess.json").read_text(encoding="utf-8"))
    assert len(releases()) == sum(len(group["models"]) for group in stated)
    theirs = capture.preprocess_table()
    if outside("timm").__version__ == table_version():
        assert theirs == stated
    ours = {name: {**group, "models": None} for group in stated for name in group["models"]}
    for group in theirs:
        for name in group["models"]:
            assert (name, ours.get(name)) == (name, {**group, "models": None})


@pytest.mark.parametrize(
    ("name", "mean", "crop"),
    [
        ("vit_base_patch16_224.augreg_in21k_ft_in1k.safetensors", 0.5, 0.9),
        ("vit_base_patch16_224", 0.5, 0.9),  # timm's default release
        ("vit_base_patch16_224.dino", 0.485, 0.9),
        ("vit_base_patch16_224_dino.pth", 0.485, 0.9),  # as timm called it once
        ("vit_base_patch16_224_mae", 0.485, 0.9),
        ("vit_base_patch16_224_in21k", 0.5, 0.9),
        ("vit_base_patch16_clip_224.openai", 0.48145466, 0.9),
        ("timm/vit_base_patch16_224_miil.in21k", 0.0, 0.875),
        ("deit_tiny_patch16_224-a1311bcf.pth", 0.485, 0.9),
        ("vit_base_patch16_224-best.pth", None, None),  # its releases differ
        ("mine.pth", None, None),
    ],
)
def test_a_name_finds_the_preprocessing_of_its_release(name, mean, crop):
    found = release_named(name)
    assert (found["mean"][0], found["crop_pct"]) == (mean, crop) if found else mean is None


@pytest.mark.parametrize(
    "name", ["vit_b_16", "vit_b_32", "vit_l_16", "vit_l_32", "vit_b_16_swag", "vit_b_16_lc_swag", "vit_h_14_swag"]
)
def test_names_of_torchvision_have_its_transforms(name):
    models = outside("torchvision").models
    plain = name.partition("_swag")[0]
    linear = plain.endswith("_lc")
    weights = models.get_model_weights(plain.removesuffix("_lc"))
    release = "IMAGENET1K_V1" if "swag" not in name else f"IMAGENET1K_SWAG_{'LINEAR' if linear else 'E2E'}_V1"
    theirs = weights[release].transforms()
    (side,) = theirs.crop_size
    method = theirs.interpolation.value
    ours = named_preprocess(f"{name}-c867db91.pth", (side, side))
    pipeline = f"decode|resize_short({theirs.resize_size[0]}, pil_{method})|center_crop({side})"
    assert ours == Preprocess(pipeline, tuple(theirs.mean), tuple(theirs.std))


@pytest.mark.parametrize("name", ["dinosaur_classifier", "vit_b_16x", "clipart-vit", "mae", "my-vit-base-patch16-224"])
def test_other_names_are_not_taken_for_releases(name):
    assert named_preprocess(name, (224, 224)) is None


def test_names_of_the_hub_have_their_image_processors():
    """The image processors' defaults of transformers, at the size of the model, where its classes have them."""
    for name, model_type, size in (
        ("vit-base-patch16-384", "vit", {"height": 384, "width": 384}),
        ("clip-vit-large-patch14-336", "clip", {"shortest_edge": 336}),
        ("siglip-base-patch16-384", "siglip", {"height": 384, "width": 384}),
    ):
        side = next(iter(size.values()))
        theirs = from_transformers({"size": size, "crop_size": side}, model_type)
        assert named_preprocess(f"google/{name}", (side, side)) == theirs, name
    assert named_preprocess("deit-base-distilled-patch16-224", (224, 224)) == from_transformers(
        {"image_mean": list(IMAGENET_MEAN), "image_std": list(IMAGENET_STD), "size": 256}, "deit"
    )
    assert named_preprocess("dinov2-base", (518, 518)) == from_transformers(
        {"image_mean": list(IMAGENET_MEAN), "image_std": list(IMAGENET_STD), "size": {"shortest_edge": 256}}, "dinov2"
    )
