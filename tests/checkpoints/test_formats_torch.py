"""PyTorch's formats against the libraries they come from: what they save we compute, and what we write they compute."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import (
    HF,
    SMALL,
    by_torch,
    gap,
    hf_loaded,
    hf_model,
    hf_saved,
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
    tv_model,
    written,
)
from safetensors.torch import load_file, save_file

from vitral.architecture import ResizeRule, ViTConfig
from vitral.checkpoints.adapt import Adaptation, adapt, resize_patch_kernel
from vitral.checkpoints.formats.table import Hints
from vitral.checkpoints.weights import read
from vitral.models.position import resize_table

LIMIT = 1e-5

# ---------------------------------------------------------------------------------------------------- Hugging Face

HF_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "patch 4, one channel": {"patch_size": 4, "image_size": 16, "num_channels": 1},
    "patch 16, not square": {"patch_size": 16, "image_size": (32, 80)},
    "tanh GELU, eps 1e-6": {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6},
    "one block, eps 1e-5": {"num_hidden_layers": 1, "layer_norm_eps": 1e-5, "hidden_size": 64},
}


@pytest.mark.parametrize("case", HF_CASES)
def test_a_classifier_of_transformers_is_read(case, tmp_path):
    settings = {**HF, **HF_CASES[case]}
    model = hf_model("ViTForImageClassification", **HF_CASES[case])
    found = read(hf_saved(model, tmp_path))
    size = settings["image_size"] if isinstance(settings["image_size"], tuple) else (settings["image_size"],) * 2
    images = pictures(2, settings.get("num_channels", 3), *size)
    assert (found.card.format, found.unmapped, found.weights.changes) == ("hf", (), ())
    assert found.weights.architecture.image == size
    assert gap(run(found.weights, images), outcome(model, images).logits) <= LIMIT


def test_the_pooler_of_transformers_is_our_tanh_layer(tmp_path):
    model = hf_model("ViTModel")
    found = read(hf_saved(model, tmp_path / "pooler"))
    images = pictures(2, 3, 32, 32)
    assert gap(run(found.weights, images), outcome(model, images).pooler_output) <= LIMIT
    bare = hf_model("ViTModel")
    bare.pooler = None
    features = run(read(hf_saved(bare, tmp_path / "bare")).weights, images)
    assert gap(features, outcome(bare, images).last_hidden_state[:, 0]) <= LIMIT


@pytest.mark.parametrize("kind", ["ViTForImageClassification", "ViTModel", "Dinov2Model", "Dinov2WithRegistersModel"])
def test_names_in_memory_are_read_too(kind, tmp_path):
    model = hf_model(kind)
    saved = load_file(hf_saved(model, tmp_path / "saved") / "model.safetensors")
    memory = {key: array.contiguous() for key, array in model.state_dict().items()}
    (tmp_path / "memory").mkdir()
    save_file(memory, tmp_path / "memory" / "model.safetensors")
    (tmp_path / "memory" / "config.json").write_bytes((tmp_path / "saved" / "config.json").read_bytes())
    images = pictures(2, 3, 32, 32)
    ours = [run(read(tmp_path / name).weights, images) for name in ("saved", "memory")]
    assert memory.keys() != saved.keys()
    assert torch.equal(*ours)


HF_WRITTEN = {
    "tanh": SMALL,
    "erf, eps 1e-12, one channel": replace(SMALL, gelu="erf", norm_eps=1e-12, channels=1, patch=4),
    "not square": replace(SMALL, image=(16, 40)),
    "not a multiple of the patch": replace(SMALL, image=(37, 43)),
    "fixed positions": replace(SMALL, position="sincos2d"),
    "no class row": replace(SMALL, class_position=False),
    "2d": replace(SMALL, position="2d", image=(16, 40)),
}


@pytest.mark.parametrize("case", HF_WRITTEN)
def test_transformers_reads_our_classifier(case, tmp_path):
    c = HF_WRITTEN[case]
    weights = random_weights(c)
    written(weights, tmp_path / "model", "hf")
    model = hf_loaded("ViTForImageClassification", tmp_path / "model")
    images = pictures(2, c.channels, *c.image)
    assert gap(outcome(model, images).logits, run(weights, images)) <= LIMIT
    assert read(tmp_path / "model").weights.architecture.image == c.image


@pytest.mark.parametrize("representation", [32, 24])
def test_transformers_reads_our_tanh_layer(representation, tmp_path):
    weights = random_weights(replace(SMALL, classes=0, representation=representation))
    written(weights, tmp_path / "model", "hf")
    images = pictures(2, 3, 32, 32)
    model = hf_loaded("ViTModel", tmp_path / "model")
    assert gap(outcome(model, images).pooler_output, run(weights, images)) <= LIMIT


def test_class_names_are_those_of_the_config(tmp_path):
    names = {i: name for i, name in enumerate(("ant", "bee", "cat", "dog", "elk"))}
    model = hf_model("ViTForImageClassification", id2label=names)
    found = read(hf_saved(model, tmp_path))
    assert found.card.class_names == tuple(names.values())


@pytest.mark.parametrize(
    ("dtype", "words"), [(torch.float16, "float16 -> float32 (exact)"), (torch.float64, "float64 -> float32 (rounded)")]
)
def test_other_precisions_become_float32_and_are_recorded(dtype, words, tmp_path):
    model = hf_model("ViTForImageClassification").to(dtype)
    found = read(hf_saved(model, tmp_path))
    images = pictures(2, 3, 32, 32)
    assert found.weights.changes == (f"weights {words}",)
    assert all(array.dtype == torch.float32 for array in found.weights.state.values())
    assert gap(run(found.weights, images), outcome(model.float(), images).logits) <= LIMIT


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
def test_weights_of_8_bits_become_float32(dtype, suffix, tmp_path):
    weights = random_weights(replace(SMALL, gelu="erf"))
    written(weights, tmp_path / "model.safetensors", "torchvision")
    state = {key: tensor.to(dtype) for key, tensor in load_file(tmp_path / "model.safetensors").items()}
    path = tmp_path / f"narrow.{suffix}"
    save_file(state, path) if suffix == "safetensors" else torch.save(state, path)
    found = read(path, hints=Hints(heads=SMALL.heads)).weights
    assert f"weights {str(dtype)[6:]} -> float32 (exact)" in found.changes
    assert same_bits(found.state, {key: tensor.to(dtype).float() for key, tensor in weights.state.items()})


@pytest.mark.parametrize("size", [(48, 48), (24, 56), (16, 16), (8, 40)])
def test_transformers_interpolates_as_rule_hf(size, tmp_path):
    model = hf_model("ViTForImageClassification")
    weights = read(hf_saved(model, tmp_path)).weights
    images = pictures(2, 3, *size)
    theirs = outcome(model, images, interpolate_pos_encoding=True).logits
    assert isinstance(weights.architecture, ViTConfig)
    assert weights.architecture.resize == "hf"
    assert gap(run(weights, images), theirs) <= LIMIT
    assert gap(run(adapt(weights, Adaptation(image=size)), images), theirs) <= LIMIT


@pytest.mark.parametrize("kind", ["Dinov2Model", "Dinov2WithRegistersModel"])
@pytest.mark.parametrize("size", [(32, 32), (48, 24)])
def test_dinov2_of_transformers_is_read(kind, size, tmp_path):
    model = hf_model(kind, mlp_ratio=2)
    found = read(hf_saved(model, tmp_path))
    images = pictures(2, 3, *size)
    assert found.card.format == "hf-dinov2"
    assert found.unmapped == ("embeddings.mask_token",)
    assert gap(run(found.weights, images), outcome(model, images).last_hidden_state[:, 0]) <= LIMIT


@pytest.mark.parametrize(("kind", "registers"), [("Dinov2Model", 0), ("Dinov2WithRegistersModel", 3)])
@pytest.mark.parametrize("size", [(32, 32), (48, 24)])
def test_transformers_reads_our_dinov2(kind, registers, size, tmp_path):
    resize: ResizeRule = "timm" if registers else "hf"
    c = replace(SMALL, classes=0, layer_scale=True, registers=registers, gelu="erf", mlp=96, resize=resize)
    weights = random_weights(c)
    written(weights, tmp_path / "model", "hf-dinov2")
    model = hf_loaded(kind, tmp_path / "model")
    images = pictures(2, 3, *size)
    assert gap(outcome(model, images).last_hidden_state[:, 0], run(weights, images)) <= LIMIT


# ------------------------------------------------------------------------------------------------------------ timm

TIMM_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "not square, one channel": {"img_size": (16, 40), "in_chans": 1},
    "registers": {"reg_tokens": 3, "no_embed_class": True},
    "no class row": {"no_embed_class": True},
    "LayerScale": {"init_values": 0.1},
    "mean, norm after": {"global_pool": "avg"},
    "mean, norm before": {"global_pool": "avg", "fc_norm": False},
    "mean without a class token": {"global_pool": "avg", "class_token": False},
    "token, norm after": {"fc_norm": True},
    "map": {"global_pool": "map", "class_token": False},
    "tanh GELU": {"act_layer": "gelu_tanh"},
    "no classes": {"num_classes": 0},
}


@pytest.mark.parametrize("case", TIMM_CASES)
def test_a_folder_of_timm_is_read(case, tmp_path):
    settings = TIMM_CASES[case]
    model = timm_model(**settings)
    found = read(timm_saved(model, tmp_path, **settings))
    size = settings.get("img_size", (32, 32))
    images = pictures(2, settings.get("in_chans", 3), *size)
    assert (found.card.format, found.unmapped, found.weights.changes) == ("timm", (), ())
    assert gap(run(found.weights, images), outcome(model, images)) <= LIMIT


@pytest.mark.parametrize("case", ["plain", "registers", "LayerScale", "mean, norm after"])
def test_weights_of_timm_are_read_alone(case, tmp_path):
    model = timm_model(**TIMM_CASES[case])
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    found = read(tmp_path / "weights.safetensors", hints=Hints(heads=4))
    images = pictures(2, 3, 32, 32)
    assert gap(run(found.weights, images), outcome(model, images)) <= LIMIT


TIMM_WRITTEN = {
    "tanh": SMALL,
    "erf": replace(SMALL, gelu="erf", channels=1),
    "odd MLP": replace(SMALL, width=28, mlp=61),  # int(28 * (61 / 28)) is 60
    "not square, no class row": replace(SMALL, image=(16, 40), class_position=False),
    "not a multiple of the patch": replace(SMALL, image=(37, 43)),
    "registers, LayerScale": replace(SMALL, registers=2, layer_scale=True, mlp=128),
    "mean beside a class token": replace(SMALL, pool="mean", gelu="erf"),
    "mean, norm after": replace(SMALL, pool="mean", norm_place="features"),
    "token, norm after": replace(SMALL, norm_place="features"),
    "mean of the patches": replace(SMALL, pool="mean", class_token=False),
    "map": replace(SMALL, pool="map", class_token=False),
    "fixed positions": replace(SMALL, position="sincos2d", pool="mean", class_token=False),
    "no classes": replace(SMALL, classes=0),
}


@pytest.mark.parametrize("case", TIMM_WRITTEN)
def test_timm_reads_our_folder(case, tmp_path):
    c = TIMM_WRITTEN[case]
    weights = random_weights(c)
    written(weights, tmp_path / "model", "timm")
    model = timm_loaded(tmp_path / "model")
    images = pictures(2, c.channels, *c.image)
    assert gap(outcome(model, images), run(weights, images)) <= LIMIT
    back = read(tmp_path / "model").weights
    assert gap(run(back, images), run(weights, images)) <= 1e-6
    assert back.architecture.image == c.image


@pytest.mark.parametrize("size", [(48, 48), (24, 56), (16, 16), (8, 40)])
@pytest.mark.parametrize("native", [(32, 32), (16, 40)])
def test_timm_resizes_as_rule_timm(native, size, tmp_path):
    model = timm_model(img_size=native, dynamic_img_size=True)
    weights = read(timm_saved(model, tmp_path, img_size=native)).weights
    images = pictures(2, 3, *size)
    assert gap(run(weights, images), outcome(model, images)) <= LIMIT
    assert gap(run(adapt(weights, Adaptation(image=size)), images), outcome(model, images)) <= LIMIT


@pytest.mark.parametrize(
    ("format", "changes"),
    [
        ("google", {}),
        ("google", {"pool": "mean", "class_token": False}),
        ("big_vision", {}),
        ("big_vision", {"pool": "map", "class_token": False}),
    ],
)
def test_timm_reads_our_npz(format, changes, tmp_path):
    """Google's files in the eyes of timm's own converter."""
    c = replace(SMALL, **changes)
    weights = random_weights(c)
    written(weights, tmp_path / "model.npz", format)
    pool = {"token": "token", "mean": "avg", "map": "map"}[c.pool]
    model = timm_model(
        **{"act_layer": "gelu_tanh", "class_token": c.class_token, "global_pool": pool},
        **{"no_embed_class": format == "big_vision", "fc_norm": False},
    )
    with quiet():
        model.load_pretrained(str(tmp_path / "model.npz"))
    images = pictures(2, 3, 32, 32)
    assert gap(outcome(model, images), run(weights, images)) <= LIMIT


@pytest.mark.parametrize("registers", [0, 3])
def test_timm_reads_our_dino_names(registers, tmp_path):
    c = replace(SMALL, classes=0, layer_scale=True, registers=registers, gelu="erf")
    weights = random_weights(c)
    written(weights, tmp_path / "dino.safetensors", "dino")
    model = timm_model(num_classes=0, init_values=0.1, reg_tokens=registers, no_embed_class=bool(registers))
    keys = load_file(tmp_path / "dino.safetensors")
    model.load_state_dict(outside("timm.models.vision_transformer").checkpoint_filter_fn(keys, model), strict=True)
    images = pictures(2, 3, 32, 32)
    assert gap(outcome(model, images), run(weights, images)) <= LIMIT


def test_dino_training_checkpoints_are_read(tmp_path):
    c = replace(SMALL, depth=4, classes=0, layer_scale=True, gelu="erf", resize="dino")
    weights = random_weights(c)
    written(weights, tmp_path / "plain.safetensors", "dino")
    plain = load_file(tmp_path / "plain.safetensors")
    chunks = {key: f"blocks.{int(key.split('.')[1]) // 2}.{key[7:]}" for key in plain if key.startswith("blocks.")}
    wrapped = {f"teacher.backbone.{chunks.get(key, key)}": array for key, array in plain.items()}
    wrapped["teacher.dino_head.mlp.0.weight"] = torch.zeros(3, 3)
    save_file(wrapped, tmp_path / "wrapped.safetensors")
    found = read(tmp_path / "wrapped.safetensors", hints=Hints(heads=4))
    assert set(found.unmapped) == {"teacher.backbone.mask_token", "teacher.dino_head.mlp.0.weight"}
    images = pictures(2, 3, 40, 24)
    assert torch.equal(run(found.weights, images), run(weights, images))


# ----------------------------------------------------------------------------------------------------- torchvision


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("representation", [None, 24])
def test_torchvision_is_read(representation, older, tmp_path):
    model = tv_model(representation_size=representation)
    state = model.state_dict()
    if older:  # as releases before 0.13 spelt it
        state = {
            key.replace("mlp.0.", "mlp.linear_1.").replace("mlp.3.", "mlp.linear_2."): a for key, a in state.items()
        }
    torch.save(state, tmp_path / "vit.pth")
    found = read(tmp_path / "vit.pth", hints=Hints(heads=4))
    images = pictures(2, 3, 32, 32)
    assert (found.card.format, found.unmapped) == ("torchvision", ())
    assert gap(run(found.weights, images), outcome(model, images)) <= LIMIT


@pytest.mark.parametrize("representation", [0, 24])
def test_torchvision_reads_ours(representation, tmp_path):
    weights = random_weights(replace(SMALL, gelu="erf", representation=representation))
    written(weights, tmp_path / "vit.safetensors", "torchvision")
    model = tv_model(representation_size=representation or None)
    model.load_state_dict(load_file(tmp_path / "vit.safetensors"), strict=True)
    images = pictures(2, 3, 32, 32)
    assert gap(outcome(model, images), run(weights, images)) <= LIMIT


@pytest.mark.parametrize("side", [16, 24, 56])
def test_torchvision_interpolates_as_rule_torchvision(side, tmp_path):
    model, larger = tv_model(), tv_model(image_size=side)
    torch.save(model.state_dict(), tmp_path / "vit.pth")
    weights = read(tmp_path / "vit.pth", hints=Hints(heads=4)).weights
    library = outside("torchvision.models.vision_transformer")
    larger.load_state_dict(library.interpolate_embeddings(side, 8, model.state_dict()))
    images = pictures(2, 3, side, side)
    assert gap(run(weights, images), outcome(larger, images)) <= LIMIT
    assert gap(run(adapt(weights, Adaptation(image=side)), images), outcome(larger, images)) <= LIMIT


# --------------------------------------------------------------------------- position tables by each rule, and patches

SIDES = st.integers(1, 12)


@pytest.mark.parametrize("rule", ["dino", "timm", "hf", "torchvision", "google"])
@given(old=st.tuples(SIDES, SIDES), new=st.tuples(SIDES, SIDES), seed=st.integers(0, 99))
def test_a_table_is_resized_as_torch_does(rule, old, new, seed):
    table = pictures(*old, 3, seed=seed)
    ours = resize_table(table, new, rule)
    if old == new:
        assert ours is table
    else:
        assert gap(ours, by_torch(table.double(), new, rule)) <= LIMIT
        assert gap(resize_table(table.double(), new, rule), by_torch(table.double(), new, rule)) <= 1e-6


@pytest.mark.parametrize(("old", "new"), [(8, 16), (8, 11), (16, 8), (14, 9)])
@pytest.mark.parametrize("rule", ["timm", "siglip", "linear"])
def test_a_patch_kernel_is_resized_as_timm_does(rule, old, new):
    kernel = pictures(6, 3, old, old)
    library = outside("timm.layers.patch_embed")
    mode, antialias = "bicubic" if rule == "timm" else "bilinear", rule != "linear"
    theirs = library.resample_patch_embed(kernel, [new, new], interpolation=mode, antialias=antialias)
    ours = resize_patch_kernel(kernel, new, rule)
    assert gap(ours, theirs) <= 2e-5 * float(theirs.abs().max())  # theirs is in float32
