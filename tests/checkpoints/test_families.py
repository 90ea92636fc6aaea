"""Files that no format reads are refused by what they are."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hf_cases import HF_CASES
from oracles import SMALL, hf_model, outside, quiet, random_weights, timm_model
from safetensors.torch import save_file
from torch import nn

import vitral
from vitral.architecture import ViTConfig
from vitral.checkpoints.formats.families import family_of, foreign_family
from vitral.checkpoints.formats.layout import layout_entries
from vitral.checkpoints.formats.timm_arguments import factories, fields_of, layout_of_arguments, missing_parts
from vitral.errors import UserError


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}


def of_timm(name: str) -> dict[str, tuple[int, ...]]:
    with quiet(), torch.device("meta"):
        return shapes_of(outside("timm").create_model(name))


def of_transformers(model: str, **settings: Any) -> dict[str, tuple[int, ...]]:
    library = outside("transformers")
    with quiet(), torch.device("meta"):
        return shapes_of(getattr(library, f"{model}Model")(getattr(library, f"{model}Config")(**settings)))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("swin_tiny_patch4_window7_224", "a Swin Transformer"),
        ("swinv2_tiny_window8_256", "a Swin Transformer V2"),
        ("convnext_atto", "a ConvNeXt"),
        ("hiera_tiny_224", "a Hiera"),
        ("cait_xxs24_224", "a CaiT"),
        ("samvit_base_patch16", "an image encoder with windows"),
        ("vit_relpos_small_patch16_224", "a ViT of timm (vit_relpos)"),
        ("vit_small_patch16_18x2_224", "a ViT of timm with parallel blocks"),
        ("maxvit_tiny_tf_224", "a network of several stages"),
        ("pvt_v2_b0", "a network of several stages"),
        ("regnety_002", "a network with BatchNorm"),
        ("resnet18", "a ResNet with BatchNorm"),
        ("efficientnet_b0", "an EfficientNet or MobileNet"),
        ("mixer_s32_224", "an MLP-Mixer"),
        ("beit_base_patch16_224", "a ViT-B/16 of BEiT"),
        ("eva02_tiny_patch14_224", "a ViT-Ti/14 of EVA"),
    ],
)
def test_models_of_timm_are_named(name, words):
    assert str(family_of(of_timm(name))).startswith(words)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("Bert", "a language model"),
        ("GPT2", "a language model"),
        ("CLIPText", "the text tower of a CLIP model"),
        ("Swin", "a Swin Transformer"),
        ("ConvNext", "a ConvNeXt"),
        ("DINOv3ConvNext", "a ConvNeXt"),
        ("Hiera", "a Hiera"),
        ("Aimv2Vision", "an AIMv2"),
        ("BlipVision", "a BLIP model"),
        ("VideoMAE", "a model whose patches span several frames"),
        ("DINOv3ViT", "a ViT-S/16 of DINOv3"),
        ("Flava", "a FLAVA"),
    ],
)
def test_models_of_transformers_are_named(model, words):
    settings = {"DINOv3ViT": {"hidden_size": 384, "num_hidden_layers": 12, "num_register_tokens": 4}}
    assert str(family_of(of_transformers(model, **settings.get(model, {})))).startswith(words)


KEYS = {
    "DETR": (["query_embed.weight", "transformer.decoder.layers.0.norm1.weight"], "a DETR detector"),
    "SAM": (["image_encoder.blocks.0.attn.rel_pos_h", "mask_decoder.x"], "a Segment Anything model"),
    "UNet": (["down_blocks.0.resnets.0.conv1.weight", "up_blocks.0.x"], "a diffusion model"),
    "LLaMA": (["model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"], "a language model"),
    "DINOv3": (["cls_token", "storage_tokens", "blocks.0.attn.qkv.weight"], "a ViT of DINOv3"),
    "SAM 2": (
        ["image_encoder.trunk.blocks.0.attn.qkv.weight", "sam_mask_decoder.x"],
        "a Segment Anything model (SAM 2)",
    ),
    "vit-pytorch": (["cls_token", "to_patch_embedding.1.weight", "transformer.layers.0.0.x"], "a model of vit-pytorch"),
    "RADIO": (
        ["radio_model.model.blocks.0.norm1.weight", "radio_model.summary_idxs"],
        "a RADIO in the names of NVIDIA",
    ),
    "RF-DETR": (["refpoint_embed.weight", "backbone.0.encoder.encoder.x"], "an RF-DETR detector"),
    "IA3": (["base_model.model.blocks.0.attn.qkv.ia3_l"], "adapters of PEFT without their model"),
    "unmerged": (["blocks.0.attn.qkv.base_layer.weight", "blocks.0.attn.qkv.lora_A.x"], "a model with adapters"),
    "LoRA": (["base_model.model.blocks.0.attn.qkv.lora_A.weight"], "LoRA adapters without their model"),
    "pruned": (["blocks.0.mlp.fc1.weight_orig", "blocks.0.mlp.fc1.weight_mask"], "a model with parametrized weights"),
    "weight norm": (
        ["m.encoder.layer.0.output.dense.parametrizations.weight.original0", "m.embeddings.cls_token"],
        "a model with parametrized weights",
    ),
    "convolutions": (["conv_proj.conv_bn_relu_0.0.weight", "class_token"], "torchvision's ViT with a convolutional"),
    "optimizer": (["state.0.exp_avg", "state.0.exp_avg_sq", "state.0.step"], "the state of an optimizer"),
    "CLIP": (["visual.transformer.resblocks.0.x", "token_embedding.weight"], "a CLIP model"),
}


@pytest.mark.parametrize("case", KEYS)
def test_a_refusal_names_the_file(tmp_path, case):
    keys, words = KEYS[case]
    path = tmp_path / "a.safetensors"
    save_file({key: torch.ones(2) for key in keys}, path)
    with pytest.raises(UserError) as caught:
        vitral.load(path)
    text = str(caught.value).removeprefix(str(path))
    assert text.startswith(f" is {words}")
    assert ": " in text
    assert text.endswith(".")
    assert len(text) < 200


def test_a_model_of_ours_is_no_foreign_family():
    for state in (random_weights(SMALL).state, timm_model().state_dict(), hf_model("ViTModel").state_dict()):
        assert family_of({key: tuple(tensor.shape) for key, tensor in state.items()}) is None


def test_no_model_that_is_read_is_foreign():
    """Every architecture of timm's table, and the classes of transformers, by their shapes."""
    for factory in factories().values():
        if factory.model in ("VisionTransformer", "Eva", "Beit") and not missing_parts(
            factory.model, factory.arguments
        ):
            small: dict[str, Any] = {**fields_of(factory.model, factory.arguments), "image": (32, 32)}
            c = ViTConfig(depth=2, width=64, mlp=96, heads=4, patch=8, **small)
            entries = layout_entries(layout_of_arguments(factory.model, factory.arguments), c)
            assert foreign_family({entry.theirs: entry.shape for entry in entries}) is None, factory.name
    for name, case in HF_CASES.items():
        assert foreign_family(shapes_of(case.build())) is None, name


@pytest.mark.parametrize(
    ("key", "config", "use"),
    [
        ("blocks.0.attn.rel_pos_h", {"architecture": "samvit_base_patch16"}, "use timm for it."),
        ("blocks.0.attn.rel_pos_h", {"model_type": "vitdet"}, "use transformers for it."),
        ("blocks.0.attn.rel_pos_h", {}, "use timm or transformers for it."),
        ("hiera.x", {"model_type": "hiera"}, "use transformers for it."),
        ("refpoint_embed.weight", {"model_type": "rf_detr"}, "use rfdetr for it."),
    ],
)
def test_the_library_of_the_config_is_named(key, config, use, tmp_path):
    save_file({key: torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError) as caught:
        vitral.load(tmp_path)
    assert str(caught.value).endswith(f": {use}")


def test_a_model_of_another_library_is_named_by_its_config(tmp_path):
    save_file({"layers.0.x": torch.ones(2)}, tmp_path / "model.safetensors")
    for config, words in (
        ({"model_type": "pvt", "architectures": ["PvtModel"]}, 'a "PvtModel" of transformers'),
        ({"architecture": "volo_d1_224"}, "timm's volo_d1_224"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(UserError, match=words):
            vitral.load(tmp_path)
