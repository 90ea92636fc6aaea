"""DeiT with its distillation token, and timm's NaFlexVit, against timm and transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import (
    HF,
    SMALL,
    TIMM,
    gap,
    hf_loaded,
    hf_saved,
    outcome,
    outside,
    pictures,
    quiet,
    random_weights,
    randomised,
    run,
    timm_loaded,
    written,
)
from safetensors.torch import load_file, save_file

import vitral
from vitral import UserError
from vitral.architecture import ViTConfig
from vitral.checkpoints.adapt import Adaptation, adapt
from vitral.checkpoints.weights import assemble, read

LIMIT = 1e-5
DISTILLED = replace(SMALL, registers=1, pool="token+register", resize="timm")


def created(name: str, **settings: Any) -> Any:
    with quiet():
        return randomised(outside("timm").create_model(name, **settings))


def saved(model: Any, folder: Path, arguments: dict[str, Any]) -> Path:
    """As timm writes it for the hub; a factory's own arguments are not written."""
    arguments = {key: value for key, value in arguments.items() if key != "num_classes"}
    with quiet():
        outside("timm.models._hub").save_for_hf(model, folder, model_args=arguments, safe_serialization=True)
    return folder


# ------------------------------------------------------------------------------------------------------------ timm


@pytest.mark.parametrize("settings", [{}, {"img_size": (16, 40), "in_chans": 1}])
def test_distilled_deit_of_timm_is_read_and_written(settings, tmp_path):
    arguments = {**TIMM, **settings}
    model = created("deit_tiny_distilled_patch16_224", **arguments)
    found = read(saved(model, tmp_path / "theirs", arguments))
    images = pictures(2, settings.get("in_chans", 3), *settings.get("img_size", (32, 32)))
    assert (found.card.format, found.unmapped, len(found.weights.changes)) == ("timm-deit", (), 2)
    assert gap(run(found.weights, images), outcome(model, images)) <= LIMIT
    card = written(found.weights, tmp_path / "ours", "timm-deit")
    assert "with the same bias" in card.changes[-1]
    assert gap(outcome(timm_loaded(tmp_path / "ours"), images), run(found.weights, images)) <= LIMIT
    again = read(tmp_path / "ours").weights
    assert all(torch.equal(again.state[key], found.weights.state[key]) for key in found.weights.state)


@pytest.mark.parametrize("size", [(48, 48), (24, 56)])
def test_distilled_deit_of_timm_at_another_size(size, tmp_path):
    model = created("deit_tiny_distilled_patch16_224", **TIMM, dynamic_img_size=True)
    weights = read(saved(model, tmp_path, TIMM)).weights
    images = pictures(2, 3, *size)
    assert gap(run(weights, images), outcome(model, images)) <= LIMIT
    assert gap(run(adapt(weights, Adaptation(image=size)), images), outcome(model, images)) <= LIMIT


def test_distilled_weights_in_half_precision_are_added_in_float32(tmp_path):
    model = created("deit_tiny_distilled_patch16_224", **TIMM).bfloat16()
    weights = read(saved(model, tmp_path, TIMM)).weights
    images = pictures(2, 3, 32, 32)
    assert gap(run(weights, images), outcome(model.float(), images)) <= LIMIT


@pytest.mark.parametrize("gelu", ["tanh", "erf"])
def test_timm_reads_our_distilled_model(gelu, tmp_path):
    weights = random_weights(replace(DISTILLED, gelu=gelu, class_position=False))
    written(weights, tmp_path / "model", "timm-deit")
    images = pictures(2, 3, 32, 32)
    assert gap(outcome(timm_loaded(tmp_path / "model"), images), run(weights, images)) <= LIMIT


def test_a_distillation_token_without_its_head_is_refused(tmp_path):
    model = created("deit_tiny_distilled_patch16_224", **{**TIMM, "num_classes": 0})
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    with pytest.raises(UserError, match="without its head"):
        read(tmp_path / "weights.safetensors")


def test_a_norm_that_the_heads_do_not_read_is_refused(tmp_path):
    arguments = {**TIMM, "fc_norm": True}
    folder = saved(created("deit_tiny_distilled_patch16_224", **arguments), tmp_path, arguments)
    with pytest.raises(UserError, match="two heads do not read"):
        read(folder)


def test_heads_of_different_shapes_are_refused(tmp_path):
    model = created("deit_tiny_distilled_patch16_224", **TIMM)
    saved(model, tmp_path, TIMM)
    state = load_file(tmp_path / "model.safetensors")
    for change in ({"head_dist.weight": torch.zeros(4, 32)}, {"head_dist.bias": torch.zeros(4)}):
        save_file({**state, **change}, tmp_path / "model.safetensors")
        with pytest.raises(UserError, match="different shapes"):
            read(tmp_path)
    del state["head_dist.bias"]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"no tensor head_dist\.bias"):
        read(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        *({"registers": 2, "pool": "token"}, {"classes": 0}, {"representation": 8}, {"pool": "token"}),
        *({"pool": "mean"}, {"swiglu": True}, {"gelu": "quick"}, {"qkv_bias": False}),
    ],
)
def test_models_that_timm_deit_cannot_hold(changes, tmp_path):
    with pytest.raises(UserError, match="format timm-deit cannot represent this model"):
        written(random_weights(replace(DISTILLED, **changes)), tmp_path / "model", "timm-deit")


# ---------------------------------------------------------------------------------------------------- transformers


def hf_deit(kind: str, **settings: Any) -> Any:
    library = outside("transformers")
    with quiet():
        return randomised(getattr(library, kind)(library.DeiTConfig(**{**HF, **settings})))


KINDS = {"DeiTForImageClassificationWithTeacher": 2, "DeiTForImageClassification": 1, "DeiTModel": 0}


def hf_output(model: Any, images: torch.Tensor, **options: Any) -> torch.Tensor:
    result = outcome(model, images, **options)
    return result.logits if hasattr(result, "logits") else result.pooler_output


@pytest.mark.parametrize("kind", KINDS)
def test_deit_of_transformers_is_read_and_written(kind, tmp_path):
    model = hf_deit(kind)
    found = read(hf_saved(model, tmp_path / "theirs"))
    images = pictures(2, 3, 32, 32)
    assert (found.card.format, found.unmapped) == ("hf-deit", ())
    assert gap(run(found.weights, images), hf_output(model, images)) <= LIMIT
    card = written(found.weights, tmp_path / "ours", "hf-deit")
    assert len(card.changes) == (4 if KINDS[kind] == 2 else 2)
    assert gap(hf_output(hf_loaded(kind, tmp_path / "ours"), images), run(found.weights, images)) <= LIMIT


@pytest.mark.parametrize("size", [(48, 48), (24, 56)])
def test_deit_of_transformers_at_another_size(size, tmp_path):
    model = hf_deit("DeiTForImageClassificationWithTeacher")
    weights = read(hf_saved(model, tmp_path)).weights
    images = pictures(2, 3, *size)
    assert gap(run(weights, images), hf_output(model, images, interpolate_pos_encoding=True)) <= LIMIT


def test_names_of_deit_in_memory_are_read_too(tmp_path):
    model = hf_deit("DeiTForImageClassificationWithTeacher")
    hf_saved(model, tmp_path)
    save_file({key: array.contiguous() for key, array in model.state_dict().items()}, tmp_path / "model.safetensors")
    images = pictures(2, 3, 32, 32)
    assert gap(run(read(tmp_path).weights, images), hf_output(model, images)) <= LIMIT


def test_a_deit_of_masked_image_modeling_is_read_without_its_decoder(tmp_path):
    library = outside("transformers")
    with quiet():
        model: Any = randomised(library.DeiTForMaskedImageModeling(library.DeiTConfig(**HF, encoder_stride=8)))
    found = read(hf_saved(model, tmp_path / "a"))
    images = pictures(2, 3, 32, 32)
    assert gap(run(found.weights, images), outcome(model.deit, images).last_hidden_state[:, 0]) <= LIMIT
    assert 'ignored: 2 tensors under "decoder."' in found.weights.changes


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("cls_classifier", r"has no tensor cls_classifier\.weight"),
        ("distillation_classifier", "cls_classifier without"),
    ],
)
def test_one_of_two_heads_is_not_taken_for_the_classifier(missing, words, tmp_path):
    library = outside("transformers")
    with quiet():
        model = randomised(library.DeiTForImageClassificationWithTeacher(library.DeiTConfig(**HF)))
    folder = hf_saved(model, tmp_path / "a")
    state = load_file(folder / "model.safetensors")
    kept = {key: tensor for key, tensor in state.items() if not key.startswith(f"{missing}.")}
    assert len(kept) == len(state) - 2
    save_file(kept, folder / "model.safetensors")
    with pytest.raises(UserError, match=words):
        read(folder)


def test_a_model_of_timm_becomes_one_of_transformers(tmp_path):
    model = created("deit_tiny_distilled_patch16_224", **TIMM)
    weights = read(saved(model, tmp_path / "timm", TIMM)).weights
    written(weights, tmp_path / "hf", "hf-deit")
    images = pictures(2, 3, 32, 32)
    theirs = hf_loaded("DeiTForImageClassificationWithTeacher", tmp_path / "hf")
    assert gap(hf_output(theirs, images), outcome(model, images)) <= LIMIT


# ---------------------------------------------------------------------------------------------------------- NaFlex

NAFLEX = {
    **{"embed_dim": 64, "depth": 2, "num_heads": 4, "mlp_ratio": 1.5},
    **{"patch_size": 8, "num_classes": 5, "pos_embed_grid_size": (4, 4)},
}
NAFLEX_RULES = {
    "naflexvit_base_patch16_gap": "timm",
    "naflexvit_base_patch16_map": "timm",
    "naflexvit_base_patch16_par_gap": "naflex-par",
    "naflexvit_base_patch16_parfac_gap": "naflex-parfac",
    "naflexvit_so150m2_patch16_reg1_gap": "timm",
    "naflexvit_so150m2_patch16_reg1_map": "timm",
    "naflexvit_base_patch16_siglip": "siglip",
    "naflexvit_so400m_patch16_siglip": "siglip",
}


NAFLEX_SLOW = [name for name in NAFLEX_RULES if "so" in name or name.endswith(("_map", "_par_gap"))]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in NAFLEX_SLOW else []) for name in NAFLEX_RULES]
)
def test_naflex_of_timm_is_read_and_written(name, tmp_path):
    model = created(name, **NAFLEX)
    found = read(saved(model, tmp_path / "theirs", NAFLEX))
    c = found.weights.architecture
    assert isinstance(c, ViTConfig)
    assert (found.card.format, found.unmapped, c.resize) == ("timm-naflex", (), NAFLEX_RULES[name])
    assert found.weights.changes == (("factorized positions added up to a table",) if "parfac" in name else ())
    written(found.weights, tmp_path / "ours", "timm-naflex")
    ours = timm_loaded(tmp_path / "ours")
    for size in ((32, 32), (48, 48), (24, 56), (16, 16), (56, 8)):
        images = pictures(2, 3, *size)
        assert gap(run(found.weights, images), outcome(model, images)) <= LIMIT, size
        if "parfac" not in name or size == (32, 32):  # a table is resized by another rule than its factors
            assert gap(outcome(ours, images), run(found.weights, images)) <= LIMIT, size


def test_the_heads_of_a_named_naflex_are_read_without_arguments(tmp_path):
    settings = {"depth": 1, "mlp_ratio": 0.25, "embed_dim": 128, "pos_embed_grid_size": (2, 2), "num_classes": 5}
    model = created("naflexvit_so400m_patch16_siglip", **settings)
    found = read(saved(model, tmp_path, {}))
    images = pictures(2, 3, 32, 32)
    assert gap(run(found.weights, images), outcome(model, images)) <= LIMIT
    assert found.card.preprocess is not None
    assert "384" in found.card.preprocess.pipeline


@pytest.mark.parametrize(
    "setting",
    [
        {"rope_type": "axial", "attn_type": "rope"},
        {"pos_embed_interp_mode": "nearest"},
        {"pos_embed_antialias": False},
        {"pos_embed_align_corners": True},
        {"attn_pool_num_heads": 2},
    ],
)
def test_other_kinds_of_naflex_are_refused(setting, tmp_path):
    model = created("naflexvit_base_patch16_gap", **NAFLEX)
    with pytest.raises(UserError, match="not supported"):
        read(saved(model, tmp_path, {**NAFLEX, **setting}))


def test_naflex_without_its_config_is_refused(tmp_path):
    model = created("naflexvit_base_patch16_gap", **NAFLEX)
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    with pytest.raises(UserError, match=r"put its config\.json next to them"):
        read(tmp_path / "weights.safetensors")


@pytest.mark.parametrize("resize", ["siglip", "naflex-par", "timm"])
def test_timm_reads_our_naflex(resize, tmp_path):
    weights = random_weights(replace(SMALL, pool="mean", resize=resize, image=(16, 40), gelu="erf"))
    written(weights, tmp_path / "model", "timm-naflex")
    model = timm_loaded(tmp_path / "model")
    for size in ((16, 40), (48, 24)):
        images = pictures(2, 3, *size)
        assert gap(outcome(model, images), run(weights, images)) <= LIMIT


def test_what_a_saved_file_does_not_state_is_printed(tmp_path, capsys):
    weights = random_weights(replace(SMALL, pool="mean", resize="naflex-parfac", gelu="erf"))
    card = vitral.save(assemble(weights), tmp_path / "theirs", format="timm-naflex")
    vitral.save(assemble(weights), tmp_path / "ours.safetensors", card)
    printed = capsys.readouterr().err
    assert "by rule naflex-parfac, its readers use naflex-par" in printed
    assert printed.count("not in the file") == 1


DAMAGED = [("timm-deit", DISTILLED), ("hf-deit", DISTILLED), ("timm-naflex", replace(SMALL, registers=2))]


@pytest.mark.slow
@pytest.mark.parametrize(("format", "architecture"), DAMAGED)
def test_every_tensor_must_exist_with_its_shape(format, architecture, tmp_path):
    written(random_weights(architecture), tmp_path / "model", format)
    file = tmp_path / "model" / "model.safetensors"
    whole = load_file(file)
    for key in whole.keys() - {"embeds.reg_token"}:  # a NaFlexVit without it is another one
        without = {name: array for name, array in whole.items() if name != key}
        for damaged in (without, *({**whole, key: torch.cat([whole[key]] * 2, axis)} for axis in (0, -1))):
            save_file(damaged, file)
            with pytest.raises(UserError):
                read(tmp_path / "model")


def test_factors_of_different_widths_are_refused(tmp_path):
    model = created("naflexvit_base_patch16_parfac_gap", **NAFLEX)
    saved(model, tmp_path, NAFLEX)
    state = load_file(tmp_path / "model.safetensors")
    save_file({**state, "embeds.pos_embed_x": torch.zeros(1, 4, 63)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="different widths, 64 and 63"):
        read(tmp_path)
