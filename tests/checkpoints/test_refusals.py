"""What a format can hold goes through it bit for bit; the rest is refused, in one sentence and before writing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from oracles import (
    ARCHITECTURES,
    ERF,
    SMALL,
    gap,
    hints_for,
    pictures,
    random_weights,
    run,
    same_bits,
    save_npz,
    written,
)
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from vitral.architecture import Architecture, ResNetConfig, StemConfig, ViTConfig
from vitral.checkpoints.formats import FORMATS
from vitral.checkpoints.formats.table import Hints
from vitral.checkpoints.weights import Checkpoint, describe, read
from vitral.errors import UserError

Arrays = dict[str, Tensor]


def refusal(call: Callable[[], object]) -> str:
    """The one sentence that a call is refused with."""
    with pytest.raises(UserError) as caught:
        call()
    text = str(caught.value)
    assert text.endswith((".", "...")), text
    assert "\n" not in text
    return text


def place(folder: Path, format: str, name: str = "model") -> Path:
    """Where a format is written: a file, or a folder for those with a config.json."""
    return folder / (name if FORMATS[format].config else f"{name}.{FORMATS[format].container}")


def arrays_in(path: Path) -> Arrays:
    if path.suffix == ".npz":
        with np.load(path) as file:
            return {key: torch.from_numpy(file[key]) for key in file.files}
    return load_file(path / "model.safetensors" if path.is_dir() else path)


def put(arrays: Arrays, path: Path) -> None:
    """Replace what a file holds, by the libraries' own writers; the card of our own files stays."""
    if path.suffix == ".npz":
        save_npz(path, {key: array.numpy() for key, array in arrays.items()})
        return
    file = path / "model.safetensors" if path.is_dir() else path
    with safe_open(file, "pt") as old:
        metadata = old.metadata()
    save_file({key: array.contiguous() for key, array in arrays.items()}, file, metadata)


# What each format can say of each architecture. "=": as it is, "~": the same function in the format's words.
HOLDS = {
    "tanh": "google= google-linen= big_vision~ big_vision-scan~ timm= timm-naflex~ hf= hf-msn=",
    "erf": "timm= timm-naflex~ hf= torchvision= hf-msn=",
    "tanh layer": "google= google-linen= big_vision~ big_vision-scan~",
    "erf, tanh layer": "torchvision=",
    "mean": "google= google-linen= big_vision= big_vision-scan= timm= timm-naflex= hf-ijepa= hf-siglip= hf-siglip2=",
    "no class row, not square": "google~ google-linen~ big_vision= big_vision-scan= timm= timm-naflex= hf~ hf-msn~",
    "map, fixed positions": "big_vision= big_vision-scan= timm~ timm-naflex~",
    "mean beside a class token, norm after": "timm= timm-naflex~",
    "mean beside a class token, norm before": "timm= timm-naflex~",
    "eps 1e-12, one channel": "hf= hf-msn=",
    "DINOv2 with registers": "timm~ timm-naflex~ hf-dinov2= dino=",
    "2d, every block": "",
    "relative": "",
    "axial": "",
    "hybrid": "google= google-linen=",
    "BiT": "bit= hf-bit~",
    "AxialResNet": "",
}


def holds(name: str) -> dict[str, str]:
    """format: how"""
    return {"vitral": "=", **{words[:-1]: words[-1] for words in HOLDS[name].split()}}


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("format", FORMATS)
def test_a_round_trip_is_exact_or_refused(name, format, tmp_path):
    architecture = ARCHITECTURES[name]
    weights = random_weights(architecture)
    how = holds(name).get(format)
    path = place(tmp_path, format)
    if how is None:
        with pytest.raises(UserError, match="cannot represent this model"):
            written(weights, path, format)
        assert list(tmp_path.iterdir()) == []
        return
    card = written(weights, path, format)
    hints = hints_for(architecture, format)
    found = read(path, hints=hints)
    assert describe(path, hints=hints).format.name == format
    if how == "=":
        assert card.changes == ()
        assert same_bits(found.weights.state, weights.state)
        assert without_resize(found.weights.architecture) == without_resize(architecture)
    else:
        assert len(card.changes) >= 1
        images = pictures(2, architecture.channels, *architecture.image)
        # All filters of a ResNet are multiplied by 10 and rounded; other formats change a sum or two.
        limit = 1e-5 if isinstance(architecture, ResNetConfig) else 1e-6
        assert gap(run(found.weights, images), run(weights, images)) <= limit
        again = place(tmp_path, format, "again")
        written(found.weights, again, format)
        assert same_bits(read(again, hints=hints).weights.state, found.weights.state)


def without_resize(architecture: Architecture) -> Architecture:
    """How positions are resized is a library's habit: no format but ours states it. BiT's has no image size either."""
    if isinstance(architecture, ViTConfig):
        return replace(architecture, resize="google", class_position=architecture.class_row)
    return architecture if getattr(architecture, "axial", False) else replace(architecture, image=(224, 224))


REAL = "vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors"
REAL_REFUSED = {
    "google": "tanh GELU",
    "google-linen": "tanh GELU",
    "big_vision": "tanh GELU",
    "big_vision-scan": "tanh GELU",
    "bit": "BiT ResNets",
    "timm-hybrid": "it is for hybrids",
    "timm-bit": "BiT ResNets",
    "timm-deit": "one register, the distillation token",
    "hf-deit": "one register, the distillation token",
    "hf-bit": "BiT ResNets",
    "hf-dinov2": "pool='token.mean', not 'token'",
    "hf-ijepa": "pool='mean', not 'token'",
    "hf-mae": "without a classifier",
    "hf-dinov3": "without a classifier",
    "hf-clip": "patch_bias=False, not True",
    "hf-siglip": "pool='mean', not 'token'",
    "hf-siglip2": "pool='mean', not 'token'",
    "open_clip": "patch_bias=False, not True",
    "dinov3": "without a classifier",
    "hf-beit": "key_bias=False, not True",
    "hf-data2vec": "key_bias=False, not True",
    "dino": "without a classifier",
}


@cache
def released(assets: Path) -> Checkpoint:
    return read(assets / "data" / REAL)


@pytest.mark.parametrize("format", FORMATS)
def test_a_released_model_goes_through_every_format_that_can_hold_it(assets, format, tmp_path):
    source = released(assets)
    path = place(tmp_path, format)
    if format in REAL_REFUSED:
        with pytest.raises(UserError, match=REAL_REFUSED[format]):
            written(source.weights, path, format)
        return
    written(source.weights, path, format)
    found = read(path)
    assert describe(path).format.name == format
    if format == "timm-naflex":  # folds the position row of the class token into the token
        image = pictures(1, 3, 224, 224)
        assert gap(run(found.weights, image), run(source.weights, image)) <= 1e-5
        return
    assert same_bits(found.weights.state, source.weights.state)
    assert without_resize(found.weights.architecture) == without_resize(source.weights.architecture)


# ------------------------------------------------------------------------------------------------- writing, refused

UNSAYABLE: list[tuple[str, Architecture, str]] = [
    ("google", ERF, "tanh GELU"),
    ("google", replace(SMALL, pool="map", class_token=False), "attention pooling"),
    ("google", replace(SMALL, norm_eps=1e-12), "epsilon of 1e-6, not 1e-12"),
    ("google", replace(SMALL, pool="mean"), "include the class token"),
    ("google", replace(SMALL, pool="mean", norm_place="features", class_token=False), "before pooling"),
    ("google", replace(SMALL, injection="shared"), "once, at the input"),
    ("google", ARCHITECTURES["BiT"], "not ResNets"),
    ("big_vision", ARCHITECTURES["hybrid"], "hybrid's ResNet"),
    ("big_vision", replace(SMALL, pool="map"), "no class token"),
    ("bit", ResNetConfig(blocks=(1, 1, 1, 1), root_pool="-inf"), "minus infinity"),
    ("bit", SMALL, "not Vision Transformers"),
    ("timm", replace(SMALL, norm_eps=1e-12), "epsilon of 1e-5 or 1e-6, not 1e-12"),
    ("timm", ARCHITECTURES["hybrid"], "hybrid's ResNet"),
    ("timm", replace(SMALL, representation=8), "tanh layer"),
    ("timm", replace(SMALL, pool="token+mean"), "pooling"),
    ("timm-naflex", replace(ERF, norm_eps=1e-5), "epsilon of 1e-6, not 1e-05"),
    ("timm-deit", replace(ERF, norm_eps=1e-5, registers=1, pool="token+register"), "epsilon of 1e-6, not 1e-05"),
    ("timm-hybrid", replace(ERF, norm_eps=1e-5, stem=StemConfig(blocks=())), "epsilon of 1e-6, not 1e-05"),
    ("torchvision", replace(ERF, layer_scale=True), "LayerScale"),
    ("torchvision", replace(ERF, image=(16, 40)), "square images only"),
    ("torchvision", SMALL, "exact .erf. GELU"),
    ("hf", replace(SMALL, registers=2), "registers"),
    ("hf", replace(SMALL, representation=32), "tanh layer"),
    ("hf-dinov2", replace(SMALL, classes=0), "LayerScale"),
    ("hf-dinov2", replace(SMALL, classes=0, layer_scale=True), "a multiple of"),
    ("hf-dinov3", replace(SMALL, classes=0, layer_scale=True, position="none"), "its RoPE turns by the centers"),
    ("dino", replace(ERF, layer_scale=True), "classes=0"),
    ("dino", replace(ERF, classes=0, image=(16, 40)), "square images only"),
    ("dino", replace(SMALL, classes=0), "exact .erf. GELU"),
]


@pytest.mark.parametrize(("format", "architecture", "words"), UNSAYABLE)
def test_unsupported_architectures_are_not_written(format, architecture, words, tmp_path):
    weights = random_weights(architecture)
    text = refusal(lambda: written(weights, place(tmp_path, format), format))
    assert re.search(words, text), text
    assert text.startswith(f"format {format} cannot represent this model: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("format", "architecture", "words"),
    [
        ("timm", SMALL, "assumes the exact"),
        ("timm", replace(ERF, pool="mean"), "class token is the feature"),
        ("timm", replace(ERF, norm_place="features"), "follows a mean"),
        ("hf", ERF, "config.json"),
        ("hf-dinov2", ARCHITECTURES["DINOv2 with registers"], "config.json"),
    ],
)
def test_weights_that_need_their_config_are_not_written_alone(format, architecture, words, tmp_path):
    weights = random_weights(architecture)
    text = refusal(lambda: written(weights, tmp_path / "model.safetensors", format))
    assert words in text
    assert "name a folder" in text
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_format_suggests_a_similar_one(tmp_path):
    text = refusal(lambda: written(random_weights(SMALL), tmp_path / "model", "torchvison"))
    assert "write torchvision" in text


# ------------------------------------------------------------------------------------------------- reading, refused


def without(key: str) -> Callable[[Arrays], Arrays]:
    return lambda arrays: {name: array for name, array in arrays.items() if name != key}


def changed(key: str, change: Callable[[Tensor], Tensor]) -> Callable[[Arrays], Arrays]:
    return lambda arrays: {**arrays, key: change(arrays[key])}


def spoilt(value: float) -> Callable[[Tensor], Tensor]:
    """One value in the middle replaced."""

    def change(array: Tensor) -> Tensor:
        flat = array.flatten().clone()
        flat[len(flat) // 2] = value
        return flat.reshape(array.shape)

    return change


DAMAGE: dict[str, tuple[Callable[[Arrays], Arrays], str]] = {
    "a key is missing": (without("blocks.1.mlp.fc2.bias"), "no tensor blocks.1.mlp.fc2.bias"),
    "a key too many": (
        lambda arrays: {**arrays, "blocks.0.attn.gate.weight": torch.ones(8)},
        r"1 of its tensors are not part of this format \(blocks.0.attn.gate.weight\)",
    ),
    "a wrong shape": (
        changed("norm.weight", lambda a: torch.ones(33)),
        r"norm.weight has the shape \[33\] where \[32\]",
    ),
    "a wrong rank": (changed("pos_embed", lambda a: a[0]), "pos_embed has the shape"),
    "a layer is missing": (
        lambda arrays: {key: array for key, array in arrays.items() if not key.startswith("blocks.1.")},
        "layer 1 is missing",
    ),
    "NaN": (
        changed("blocks.2.attn.qkv.weight", spoilt(float("nan"))),
        "tensor blocks.2.attn.qkv.weight has non-finite values",
    ),
    "infinity": (changed("head.bias", spoilt(float("inf"))), "tensor head.bias has non-finite values"),
    "integers": (changed("cls_token", lambda a: a.long()), "tensor cls_token has the type torch.int"),
    "no keys of a ViT": (lambda arrays: {"fc.weight": arrays["head.weight"]}, "its tensors are fc.weight"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_files_are_refused_with_the_name_of_the_tensor(case, tmp_path):
    damage, words = DAMAGE[case]
    path = tmp_path / "model.safetensors"
    written(random_weights(replace(ERF, depth=3)), path, "timm")
    put(damage(arrays_in(path)), path)
    text = refusal(lambda: read(path, hints=Hints(heads=4)))
    assert re.search(words, text), text
    assert str(path) in text


@pytest.mark.parametrize("rows", [51, 53])
def test_a_table_of_relative_positions_has_exactly_its_rows(rows, tmp_path):
    path, key = tmp_path / "model", "blocks.1.attn.relative_position_bias_table"
    written(random_weights(replace(ERF, position="bias", key_bias=False)), path, "timm")
    put(changed(key, lambda table: torch.zeros(rows, table.shape[1]))(arrays_in(path)), path)
    assert f"{key} has {rows} rows where 52 are expected" in refusal(lambda: read(path))


# Dropped, these leave a complete file of another model: no table means fixed positions, no reg_token no registers.
OPTIONAL = {
    "google-linen": {"Transformer/posembed_input/pos_embedding"},
    "big_vision": {"pos_embedding"},
    "big_vision-scan": {"pos_embedding"},
    "timm": {"reg_token"},
    "dino": {"register_tokens", "mask_token"},
    "hf-dinov2": {"embeddings.register_tokens", "embeddings.mask_token"},
}
# format, architecture, and how many arrays to go on by: the files of ResNets are large
EXHAUSTED = [
    ("vitral", "tanh layer", 1),
    ("google", "tanh layer", 1),
    ("google", "hybrid", 7),
    ("google-linen", "tanh layer", 1),
    ("big_vision", "mean", 1),
    ("big_vision-scan", "mean", 1),
    ("bit", "BiT", 20),
    ("timm", "DINOv2 with registers", 1),
    ("hf", "erf", 1),
    ("hf-dinov2", "DINOv2 with registers", 1),
    ("torchvision", "erf, tanh layer", 1),
    ("dino", "DINOv2 with registers", 1),
]


@pytest.mark.parametrize(("format", "name", "step"), EXHAUSTED)
def test_every_tensor_must_exist_with_its_shape(format, name, step, tmp_path):
    architecture = ARCHITECTURES[name]
    path, hints = place(tmp_path, format), hints_for(architecture, format)
    written(random_weights(architecture), path, format)
    whole = arrays_in(path)
    accepted = set()
    for key in list(whole)[::step]:
        for damage in (without(key), changed(key, lambda array: torch.cat([array, array]))):
            put(damage(whole), path)
            try:
                read(path, hints=hints)
            except UserError:
                continue
            accepted.add(key)
    assert accepted <= OPTIONAL.get(format, set())


def test_a_grid_that_is_not_square_needs_a_hint(tmp_path):
    weights = random_weights(replace(SMALL, image=(16, 40)))
    written(weights, tmp_path / "model.npz", "google")
    assert "10 positions are not a square grid: pass" in refusal(lambda: read(tmp_path / "model.npz"))
    wrong = refusal(lambda: read(tmp_path / "model.npz", hints=Hints(grid=(3, 3))))
    assert "a grid of 3x3 does not have the 10 positions" in wrong
    assert same_bits(read(tmp_path / "model.npz", hints=Hints(grid=(2, 5))).weights.state, weights.state)
    assert run(read(tmp_path / "model.npz", hints=Hints(grid=(5, 2))).weights, pictures(1, 3, 40, 16)).shape == (1, 5)


def test_an_unknown_number_of_heads_needs_a_hint(tmp_path):
    weights = random_weights(ERF)
    written(weights, tmp_path / "model.safetensors", "torchvision")
    text = refusal(lambda: read(tmp_path / "model.safetensors"))
    assert "does not state its number of heads, and 2 layers of width 32 are not a standard size: pass heads=" in text
    assert "5 heads do not divide" in refusal(lambda: read(tmp_path / "model.safetensors", hints=Hints(heads=5)))
    found = read(tmp_path / "model.safetensors", hints=Hints(heads=4)).weights
    assert same_bits(found.state, weights.state)
    assert isinstance(found.architecture, ViTConfig)
    assert found.architecture.heads == 4


def test_a_file_of_another_format_is_not_read_as_this_one(tmp_path):
    written(random_weights(SMALL), tmp_path / "model.npz", "google")
    assert "is not a torchvision file" in refusal(lambda: read(tmp_path / "model.npz", "torchvision"))


# What config.json says beside weights of the right names and shapes, and what we do not compute.
STATED: list[tuple[str, Architecture, dict[str, object], str]] = [
    ("timm", ERF, {"model_args": {"num_heads": 4, "act_layer": "silu"}}, "activation"),
    ("timm", ERF, {"model_args": {"num_heads": 4, "global_pool": "max"}}, "pooling"),
    ("timm", ERF, {"model_args": {"num_heads": 4}, "global_pool": "avgmax"}, "pooling"),
    ("timm", ERF, {"model_args": {"num_heads": 4, "pool_include_prefix": True, "global_pool": "avg"}}, "pooling"),
    (
        "timm",
        ERF,
        {"model_args": {"num_heads": 4, "gated": True}},
        "gated=True, which is no argument of the models that vitral knows",
    ),
    (
        "timm",
        ERF,
        {"architecture": "vit_base_patch16_224", "model_args": {"gated": False}},
        "gated=False, which is no argument",
    ),
    ("hf", ERF, {"hidden_act": "relu", "num_attention_heads": 4}, "activation"),
    ("hf", replace(ERF, classes=0, representation=32), {"pooler_act": "gelu", "num_attention_heads": 4}, "pooler"),
]


@pytest.mark.parametrize(("format", "architecture", "config", "words"), STATED)
def test_a_config_that_asks_for_another_function_is_refused(format, architecture, config, words, tmp_path):
    written(random_weights(architecture), tmp_path / "model", format)
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    assert words in refusal(lambda: read(tmp_path / "model"))
