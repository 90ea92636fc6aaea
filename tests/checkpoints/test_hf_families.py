"""Every class of transformers that vitral reads: its output is transformers' own, which reads what we write."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_cases import HF_CASES, HfCase, masked_modeling_token, naflex_pooled, pooled, projected
from oracles import HF, gap, hf_loaded, hf_model, hf_saved, outcome, outside, pictures, quiet, randomised, run, written
from safetensors.torch import load_file, save_file
from torch import Tensor

from vitral.architecture import ViTConfig
from vitral.checkpoints.adapt import Weights
from vitral.checkpoints.formats.table import Hints
from vitral.checkpoints.weights import describe, read
from vitral.errors import UserError

IMAGES = pictures(3, 3, 32, 32)
LIMIT = 1e-5  # of the largest output


def difference(ours: Tensor, theirs: Tensor) -> float:
    return gap(ours, theirs) / float(theirs.abs().max())


@pytest.mark.parametrize("name", HF_CASES)
def test_a_model_of_transformers_is_read_and_written(name, tmp_path):
    case = HF_CASES[name]
    model = case.build()
    folder = case.save(model, tmp_path / "theirs")
    expected = case.forward(model, IMAGES)
    found = read(folder)
    assert found.card.format == case.format
    assert case.skipped in "; ".join(found.card.changes)
    assert difference(run(found.weights, IMAGES), expected) <= LIMIT
    if case.written != "none":
        _check_written(case, found.weights, expected, tmp_path / "ours")
    # A plain state dict has the names that transformers 5 uses in memory.
    memory = {key: tensor.contiguous() for key, tensor in model.state_dict().items()}
    save_file(memory, folder / "model.safetensors")
    assert difference(run(read(folder).weights, IMAGES), expected) <= LIMIT


def _check_written(case: HfCase, weights: Weights, expected: Tensor, folder: Path) -> None:
    written(weights, folder, case.format)
    kind = json.loads((folder / "config.json").read_text())["architectures"][0]
    assert kind == (case.written or case.model)
    back = hf_loaded(kind, folder)
    outputs = {"CLIPModel": projected, "SiglipModel": pooled, "Siglip2Model": naflex_pooled}
    outputs |= {"MetaClip2Model": projected, "ChineseCLIPModel": projected, "BeitForMaskedImageModeling": pooled}
    with torch.no_grad(), quiet():
        theirs = outputs.get(case.model, case.output)(back, IMAGES)
    assert difference(theirs, expected) <= LIMIT
    assert describe(folder).format.name == case.format
    assert describe(folder).card.architecture == weights.architecture


# What transformers calls interpolate_pos_encoding.
RESIZED = ["DINOv2, SwiGLU", "DINOv2, registers, classifier", "DINOv3", "CLIP", "SigLIP", "MSN", "I-JEPA"]


@pytest.mark.parametrize("name", RESIZED)
def test_other_image_sizes(name, tmp_path):
    case, images = HF_CASES[name], pictures(2, 3, 24, 48)
    model = case.build()
    options = {} if "DINO" in name else {"interpolate_pos_encoding": True}
    theirs = outcome(model, images, **options)
    expected = theirs["logits"] if "logits" in theirs else theirs["pooler_output"]
    assert difference(run(read(case.save(model, tmp_path)).weights, images), expected) <= LIMIT


@pytest.mark.parametrize(
    ("name", "height", "width"),
    [
        *(("SigLIP 2", 24, 48), ("BEiT", 48, 48), ("BEiT", 24, 24), ("BEiT, shared", 40, 40), ("BEiT, shared", 16, 16)),
        *(("data2vec", 24, 24), ("data2vec, shared", 48, 48)),
    ],
)
def test_linear_resize_rules(name, height, width, tmp_path):
    """transformers resizes a relative bias for squares only."""
    case, images = HF_CASES[name], pictures(2, 3, height, width)
    model = case.build()
    with torch.no_grad(), quiet():
        theirs = case.output(model, images) if "SigLIP" in name else model(images, interpolate_pos_encoding=True).logits
    found = read(case.save(model, tmp_path))
    assert difference(run(found.weights, images), theirs) <= LIMIT


# One of each family with all of its tensors, and those whose absence leaves a complete file of another model.
COMPLETE: dict[str, set[str]] = {
    "DINOv2, classifier, SwiGLU": {"dinov2.embeddings.mask_token"},
    "DINOv3": {"embeddings.mask_token"},
    "CLIP, projection": {"visual_projection.weight"},
    "CLIP, classifier": {"vision_model.post_layernorm.weight", "vision_model.post_layernorm.bias"},
    "SigLIP 2": set(),
    "BEiT": set(),
}


@pytest.mark.parametrize("name", COMPLETE)
def test_every_tensor_must_exist_with_its_shape(name, tmp_path):
    case = HF_CASES[name]
    file = case.save(case.build(), tmp_path) / "model.safetensors"
    tensors = load_file(file)
    accepted = set()
    for key in (key for key in tensors if ".1." not in key):
        for changed in ({}, {key: torch.cat([tensors[key], tensors[key]])}):
            save_file({**{other: tensors[other] for other in tensors if other != key}, **changed}, file)
            try:
                read(tmp_path)
            except UserError:
                continue
            accepted.add(key)
    assert accepted == COMPLETE[name]


# ------------------------------------------------------------------------------------------- older files and configs


def released(name: str, folder: Path, rename: Callable[[str], str], **buffers: Tensor) -> Any:
    """A folder whose tensors have other names, and which holds further tensors."""
    model = HF_CASES[name].build()
    file = HF_CASES[name].save(model, folder) / "model.safetensors"
    save_file({**{rename(key): tensor for key, tensor in load_file(file).items()}, **buffers}, file)
    return model


@pytest.mark.parametrize("name", ["CLIP", "SigLIP"])
def test_the_tower_of_releases_has_its_name_in_front(name, tmp_path):
    buffers = {"vision_model.embeddings.position_ids": torch.arange(17)[None]}
    model = released(name, tmp_path, lambda key: f"vision_model.{key}", **buffers)
    found = read(tmp_path)
    assert found.unmapped == tuple(buffers)
    assert difference(run(found.weights, IMAGES), HF_CASES[name].forward(model, IMAGES)) <= LIMIT


def test_index_buffers_of_older_beit_files_are_ignored(tmp_path):
    inner = "beit.encoder.layer.0.attention.attention.relative_position_bias.relative_position_index"
    model = released("BEiT", tmp_path, lambda key: key, **{inner: torch.zeros(17, 17, dtype=torch.long)})
    found = read(tmp_path)
    assert found.unmapped == (inner,)
    assert difference(run(found.weights, IMAGES), HF_CASES["BEiT"].forward(model, IMAGES)) <= LIMIT


def configured(folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_defaults_that_a_config_leaves_out_are_those_of_transformers(tmp_path):
    """Released configurations of two towers state differences from the defaults alone."""
    case = HfCase("SiglipModel", "hf-siglip", HF_CASES["SigLIP, two towers"].output, vision={"hidden_size": 48} | HEADS)
    model = case.build()
    kept = ("hidden_size", "num_hidden_layers", "intermediate_size", "image_size", "patch_size", "model_type")

    def forget(config: dict[str, Any]) -> None:
        config["vision_config"] = {key: config["vision_config"][key] for key in kept}

    folder = configured(case.save(model, tmp_path), forget)
    assert difference(run(read(folder).weights, IMAGES), case.forward(model, IMAGES)) <= LIMIT


HEADS = {"num_attention_heads": 12}


def test_the_second_copy_of_a_tower_settings_counts(tmp_path):
    case = HF_CASES["CLIP, two towers"]
    folder = case.save(case.build(), tmp_path)
    found = read(configured(folder, lambda config: config.update(vision_config_dict={"hidden_act": "gelu"})))
    assert isinstance(found.weights.architecture, ViTConfig)
    assert found.weights.architecture.gelu == "erf"


ALONE = {"ViT": "hf", "I-JEPA": "hf-ijepa", "MAE, decoder": "hf-mae", "BEiT": "hf-beit", "data2vec": "hf-beit"}
ALONE |= {"DINOv2, SwiGLU": "hf-dinov2", "DINOv3": "hf-dinov3", "CLIP": "hf-clip", "SigLIP": "hf-siglip"}
ALONE |= {"SigLIP 2": "hf-siglip2"}


@pytest.mark.parametrize("name", ALONE)
def test_what_no_config_states_is_assumed_and_recorded(name, tmp_path):
    case = HF_CASES[name]
    model = case.build()
    folder = case.save(model, tmp_path)
    (folder / "config.json").unlink()
    with pytest.raises(UserError, match="does not state its number of heads"):
        read(folder)
    found = read(folder, hints=Hints(heads=4))
    assert found.card.format == ALONE[name]
    assert sum("gelu=" in change for change in found.card.changes) == 1
    assert not any("4 heads" in change for change in found.card.changes)  # they are passed, not assumed
    assert difference(run(found.weights, IMAGES), case.forward(model, IMAGES)) <= LIMIT


# ---------------------------------------------------------------------------------------------------------- refused

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "another type": ("BEiT", {"model_type": "yolos"}, 'model_type "yolos" is not supported'),
    "another tower": ("CLIP", {"model_type": "altclip_vision_model"}, 'model_type "altclip_vision_model"'),
    "another DINO": ("DINOv3", {"model_type": "dinov9"}, 'model_type "dinov9"'),
    "an activation": ("MSN", {"hidden_act": "relu"}, 'activation "relu"'),
    "fewer layers": ("MAE", {"num_hidden_layers": 1}, '"num_hidden_layers": 1, but its tensors show 2'),
    "wide heads": ("ViT", {"head_dim": 16}, '"head_dim" of 16'),
    "no biases": ("ViT", {"qkv_bias": False}, '"qkv_bias": False, but its tensors show True'),
    "no SwiGLU": ("DINOv2, SwiGLU", {"use_swiglu_ffn": False}, '"use_swiglu_ffn": False, but'),
    "other registers": ("DINOv3", {"num_register_tokens": 5}, '"num_register_tokens": 5, but its tensors show 4'),
    "a gate": ("DINOv3, SwiGLU", {"hidden_act": "gelu"}, 'gated MLP has the activation "gelu"'),
    "MLP biases": ("DINOv3", {"mlp_bias": False}, '"mlp_bias": False, which is not supported'),
    "a kind of RoPE": ("DINOv3", {"rope_parameters": {"rope_type": "yarn"}}, 'type "yarn"'),
    "no pooling": ("SigLIP", {"vision_use_head": False}, '"vision_use_head": False'),
    "token pooling": ("BEiT", {"use_mean_pooling": False}, '"use_mean_pooling": False'),
    "a bias": ("BEiT", {"use_relative_position_bias": False}, '"use_relative_position_bias": False'),
    "not square": ("BEiT", {"image_size": [32, 64]}, "not square"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_config_that_changes_the_computation_is_refused(name, tmp_path):
    model, changes, words = REFUSED[name]
    folder = HF_CASES[model].save(HF_CASES[model].build(), tmp_path)
    read(folder)
    with pytest.raises(UserError) as error:
        read(configured(folder, lambda config: config.update(changes)))
    assert words in str(error.value)
    assert len(str(error.value).partition("model.safetensors")[2]) < 300


@pytest.mark.parametrize("name", ["ViT", "DINOv3"])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1)])  # as MLX stores kernels
def test_other_patches_are_refused_by_their_shape(name, order, tmp_path):
    patch = (8, 4) if order == (0, 1, 2, 3) else 8
    case = replace(HF_CASES[name], settings={**HF_CASES[name].settings, "patch_size": patch})
    folder = case.save(case.build(), tmp_path)
    state = {key: t.permute(order) if t.ndim == 4 else t for key, t in load_file(folder / "model.safetensors").items()}
    save_file({key: tensor.contiguous() for key, tensor in state.items()}, folder / "model.safetensors")
    shape = [32, 3, 8, 4] if patch == (8, 4) else [32, 8, 8, 3]
    with pytest.raises(UserError, match=re.escape(f"its patch embedding of the shape {shape} has patches that are")):
        read(folder)


def test_absolute_positions_beside_a_relative_bias_are_refused(tmp_path):
    both = {"use_absolute_position_embeddings": True, "use_shared_relative_position_bias": True}
    case = HfCase("BeitForMaskedImageModeling", "hf-beit", masked_modeling_token, {**both, "vocab_size": 12})
    with pytest.raises(UserError, match="both absolute positions and a relative bias"):
        read(case.save(case.build(), tmp_path))


@pytest.mark.parametrize("kind", ["ViTForImageClassification", "Dinov2Model"])
def test_a_position_table_of_another_image_size_than_stated_is_refused(kind, tmp_path):
    """transformers does not load it either: the sizes mismatch."""
    folder = hf_saved(hf_model(kind), tmp_path / "a")
    state = load_file(folder / "model.safetensors")
    (key,) = [key for key in state if key.endswith("position_embeddings")]
    save_file({**state, key: state[key][:, :10].contiguous()}, folder / "model.safetensors")
    with pytest.raises(UserError, match=r'states "image_size": 32, but its tensors have 9 positions of patches: use'):
        read(folder)
    assert read(folder, hints=Hints(grid=(3, 3))).weights.architecture.image == (24, 24)


def test_a_classifier_of_beit_without_its_norm_is_refused(tmp_path):
    library = outside("transformers")
    with quiet():
        model = randomised(
            library.BeitForImageClassification(library.BeitConfig(**HF, use_relative_position_bias=True))
        )
    folder = hf_saved(model, tmp_path / "a")
    state = load_file(folder / "model.safetensors")
    kept = {key: tensor for key, tensor in state.items() if "pooler.layernorm" not in key}
    assert len(kept) == len(state) - 2
    save_file(kept, folder / "model.safetensors")
    with pytest.raises(UserError, match="a classifier and no LayerNorm in front of it: it is incomplete"):
        read(folder)
    save_file(state, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "image_size": 48}))
    with pytest.raises(UserError, match=r'states "image_size": 48, but its relative bias is of 4x4 patches'):
        read(folder)
