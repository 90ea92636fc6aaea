"""Plain PyTorch habits: saving wrapped models without a card, and loading plain state dicts of our own."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import ARCHITECTURES, ERF, SMALL, gap, pictures, random_weights, randomised, same_bits
from safetensors.torch import save_file
from torch import Tensor, nn

import vitral
from vitral.architecture import Architecture, ResNetConfig, ViTConfig
from vitral.checkpoints.card import Card
from vitral.checkpoints.weights import assemble
from vitral.checkpoints.wrappers import strip_wrappers
from vitral.errors import UserError
from vitral.models.adapters import LoraLinear, add_lora, merge_lora
from vitral.models.build import build
from vitral.models.vit import ViT


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda model: model,
    "torch.compile": compiled,
    "DataParallel": nn.DataParallel,
    "both": lambda model: nn.DataParallel(compiled(model)),
}


def small_model() -> ViT:
    model = ViT(SMALL)
    randomised(model)
    return model


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_saving_needs_no_card_and_removes_wrappers(tmp_path: Path, wrapper: str) -> None:
    model = small_model()
    card = vitral.save(WRAPPERS[wrapper](model), tmp_path / "model.safetensors")
    assert card == Card(SMALL)
    loaded, back = vitral.load(tmp_path / "model.safetensors")
    assert same_bits(loaded.state_dict(), model.state_dict())
    assert (back.architecture, back.class_names, back.preprocess, back.changes) == (SMALL, (), None, ())


def test_saving_removes_distributed_data_parallel(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = small_model()
        vitral.save(nn.parallel.DistributedDataParallel(model), tmp_path / "model.safetensors")
    finally:
        torch.distributed.destroy_process_group()
    assert same_bits(vitral.load(tmp_path / "model.safetensors")[0].state_dict(), model.state_dict())


def test_compiled_blocks_are_saved_under_their_plain_names(tmp_path: Path) -> None:
    model = small_model()
    expected = model.state_dict()
    model.blocks[0] = compiled(model.blocks[0])
    vitral.save(model, tmp_path / "model.safetensors")
    assert same_bits(vitral.load(tmp_path / "model.safetensors")[0].state_dict(), dict(expected))


def test_saving_merges_lora_into_the_file_and_leaves_the_model(tmp_path: Path) -> None:
    model = small_model()
    add_lora(model, rank=2)
    for module in model.modules():
        if isinstance(module, LoraLinear):
            nn.init.normal_(module.up, std=0.1)
    trained = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    card = vitral.save(model, tmp_path / "model.safetensors", Card(SMALL, changes=("head 3 -> 5 classes",)))
    assert same_bits(dict(model.state_dict()), trained)
    assert card.changes == ("head 3 -> 5 classes", "LoRA adapters merged into the weights")
    loaded, back = vitral.load(tmp_path / "model.safetensors")
    assert back.changes == card.changes
    images = pictures(2, 3, 32, 32)
    assert gap(loaded(images), model(images)) < 1e-5
    merge_lora(model)
    assert same_bits(dict(loaded.state_dict()), dict(model.state_dict()))


def test_saving_refuses_what_it_cannot_describe(tmp_path: Path) -> None:
    for other in (nn.Linear(2, 2), nn.DataParallel(nn.Linear(2, 2))):
        with pytest.raises(UserError, match=r"writes vitral's models, not a (Linear|DataParallel): write it with"):
            vitral.save(other, tmp_path / "model.safetensors")
    model = ViT(SMALL)
    model.head.output = nn.Linear(SMALL.width, 7)
    with pytest.raises(
        UserError, match=r"head.output.bias has the shape \(7,\) where \(5,\) is expected; set model.conf"
    ):
        vitral.save(model, tmp_path / "model.safetensors")
    model.config = replace(SMALL, classes=7)
    vitral.save(model, tmp_path / "model.safetensors")
    assert vitral.load(tmp_path / "model.safetensors")[1].architecture.classes == 7


OTHERS: dict[str, dict[str, Any]] = {
    "gelu": {"gelu": "erf"},
    "norm_eps": {"norm_eps": 1e-12},
    "heads": {"heads": 2},
    "pool": {"pool": "mean"},
    "position": {"position": "none"},
}


@pytest.mark.parametrize("field", OTHERS)
def test_weights_of_a_model_that_computes_something_else_warn(field: str) -> None:
    first = replace(SMALL, position="sincos2d") if field == "position" else SMALL
    other = replace(first, **OTHERS[field])
    state = build(other).state_dict()
    message = rf"are of a model with {field}={getattr(other, field)} \(here {getattr(first, field)}\): it computes"
    with pytest.warns(UserWarning, match=message):
        build(first).load_state_dict(state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build(other).load_state_dict(state)
        build(first).load_state_dict(dict(state))  # without metadata nothing is known
        nn.Sequential(build(other)).load_state_dict(nn.Sequential(build(other)).state_dict())
        build(replace(other, dropout=0.5)).load_state_dict(state)
    assert state.keys() == dict(build(other).named_parameters()).keys()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_state_dict_of_torch_save_states_what_its_tensors_do_not(tmp_path: Path, name: str) -> None:
    """The metadata of a state dict survive torch.save: the model computes the same without a hint."""
    model = build(ARCHITECTURES[name])
    randomised(model)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    loaded, card = vitral.load(tmp_path / "weights.pt", grid=(4, 4) if name == "relative" else None)
    images = pictures(1, model.config.channels, *model.config.image)
    with torch.no_grad():
        assert torch.equal(loaded(images), model(images))
    assert not re.search("gelu|heads|pool=token|norm", " ".join(card.changes)), card.changes


def write_plain(state: dict[str, Tensor], path: Path) -> Path:
    save_file(state, path) if path.suffix == ".safetensors" else torch.save(state, path)
    return path


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_plain_state_dict_loads(tmp_path: Path, name: str, suffix: str) -> None:
    """Shapes give the architecture but for what is listed as assumed, and the weights are the same bits."""
    weights = random_weights(ARCHITECTURES[name])
    path = write_plain(weights.state, tmp_path / f"weights.{suffix}")
    original = weights.architecture
    heads = original.heads if isinstance(original, ViTConfig) else None
    model, card = vitral.load(path, heads=heads)
    assert same_bits(dict(model.state_dict()), weights.state)
    (assumed,) = card.changes
    assert assumed.startswith("assumed: ")
    hidden = {item.partition("=")[0] for item in assumed.removeprefix("assumed: ").split(", ")}
    derived = card.architecture
    for field in vars(original):
        if field not in hidden:
            assert getattr(derived, field) == getattr(original, field), field
    known = {field: getattr(original, field) for field in hidden if hasattr(original, field)}
    assert replace(derived, **known) == original
    images = pictures(1, original.channels, *original.image)
    reference = assemble(replace(weights, architecture=replace(derived, **known)))
    assert torch.equal(reference(images), assemble(weights)(images))


@pytest.mark.parametrize(
    ("architecture", "hints", "expected"),
    [
        (
            SMALL,
            {"heads": 4},
            "image=32x32, gelu=tanh, norm_place=tokens, norm_eps=1e-06, resize=google, injection=input, pool=token, "
            "rope=none, post_norm=False",
        ),
        (
            replace(SMALL, pool="map", class_token=False, position="sincos2d"),
            {"heads": 4, "grid": (2, 3)},
            "image=16x24, gelu=tanh, norm_place=tokens, norm_eps=1e-06, resize=google, position=sincos2d, "
            "injection=input, rope=none, post_norm=False, map_heads=4, map_prefix=False",
        ),
        (
            replace(SMALL, position="relative", image=(16, 24)),
            {"grid": (2, 3), "gelu": "tanh", "pool": "token"},
            "image=16x24, norm_place=tokens, norm_eps=1e-06, resize=google, rope=none, post_norm=False",
        ),
        (ResNetConfig(blocks=(1, 1, 1, 1), classes=2), {}, "image=224x224, root_pool=zero, epsilons=google"),
    ],
)
def test_assumptions_are_listed(tmp_path: Path, architecture: Architecture, hints: dict, expected: str) -> None:
    path = write_plain(random_weights(architecture).state, tmp_path / "weights.pt")
    _, card = vitral.load(path, **hints)
    assert card.changes == (f"assumed: {expected}",)
    assert (card.source, card.format, card.class_names, card.preprocess) == ("weights.pt", "vitral", (), None)
    assert vitral.info(path, **hints).card.changes == card.changes


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_prefixes_of_wrappers_are_removed(tmp_path: Path, prefix: str) -> None:
    weights = random_weights(SMALL)
    for suffix in ("pt", "safetensors"):
        state = {f"{prefix}{key}": tensor for key, tensor in weights.state.items()}
        model, _ = vitral.load(write_plain(state, tmp_path / f"weights.{suffix}"), heads=4)
        assert same_bits(dict(model.state_dict()), weights.state)


def test_wrappers_are_removed_only_where_they_wrap() -> None:
    assert strip_wrappers(["blocks.0._orig_mod.norm", "a"]) == {"blocks.0._orig_mod.norm": "blocks.0.norm", "a": "a"}
    assert strip_wrappers(["_fsdp_wrapped_module._orig_mod.a"]) == {"_fsdp_wrapped_module._orig_mod.a": "a"}
    assert strip_wrappers(["my_orig_mod.a"]) == {"my_orig_mod.a": "my_orig_mod.a"}
    assert strip_wrappers([]) == {}
    with pytest.raises(UserError, match=r"has _orig_mod\.a and a, which are both a: remove one"):
        strip_wrappers(["_orig_mod.a", "a"])


def test_an_incomplete_plain_state_dict_is_refused(tmp_path: Path) -> None:
    state = random_weights(ERF).state
    with pytest.raises(UserError, match=r"2 layers of width 32 are not a standard size: pass heads="):
        vitral.load(write_plain(state, tmp_path / "a.pt"))
    missing = {key: tensor for key, tensor in state.items() if key != "norm.bias"}
    with pytest.raises(UserError, match=r"read as vitral: the file has no tensor norm\.bias"):
        vitral.load(write_plain(missing, tmp_path / "b.pt"), heads=4)
    with pytest.raises(UserError, match=r"1 of its tensors are not part of this format \(extra\)"):
        vitral.load(write_plain({**state, "extra": torch.ones(1)}, tmp_path / "c.pt"), heads=4)
    model = build(SMALL)
    add_lora(model, rank=2)
    with pytest.raises(UserError, match=r"has LoRA adapters: .*vitral\.save"):
        vitral.load(write_plain(dict(model.state_dict()), tmp_path / "d.pt"), heads=4)


def test_a_plain_state_dict_converts_and_adapts(tmp_path: Path) -> None:
    path = write_plain(random_weights(ERF).state, tmp_path / "a.pt")
    _, card = vitral.load(path, heads=4, image=64, classes=3)
    assert [change.split()[0] for change in card.changes] == ["assumed:", "image", "head"]
