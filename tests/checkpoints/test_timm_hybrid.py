"""timm's hybrids and the BiT ResNets of timm and transformers, against the libraries themselves."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import (
    hf_loaded,
    hf_saved,
    outcome,
    outside,
    pictures,
    quiet,
    random_weights,
    randomised,
    timm_loaded,
    written,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from vitral import UserError
from vitral.architecture import Epsilons, ResNetConfig, StemConfig, ViTConfig, as_dict, from_dict
from vitral.checkpoints.adapt import Adaptation, Weights, adapt, to_epsilons
from vitral.checkpoints.formats.table import Hints
from vitral.checkpoints.weights import assemble, read

LIMIT = 1e-5  # relative: the largest difference over the largest output
SMALL_VIT = {"embed_dim": 32, "depth": 2, "num_heads": 4, "mlp_ratio": 1.5, "num_classes": 5}
HYBRIDS = {"vit_tiny_r_s16_p8_224": (), "vit_small_r26_s32_224": (2, 2, 2, 2)}


def relative(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    return float((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max())


def run64(weights: Weights, images: Tensor) -> Tensor:
    """In float64, as random ResNets amplify the rounding of float32."""
    with torch.no_grad():
        return assemble(weights).double()(images.double())


def theirs64(model: Any, images: Tensor) -> Tensor:
    result = outcome(model.double(), images.double())
    return result if isinstance(result, Tensor) else result.logits


def faint(model: Any) -> Any:
    """Filters so small that the epsilon of their standardization shows."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 4 and "proj.weight" not in name and "head" not in name:
                parameter.mul_(1e-2)
    return model


def created(name: str, **settings: Any) -> Any:
    with quiet():
        return faint(randomised(outside("timm").create_model(name, **settings)))


def saved(model: Any, folder: Path, **arguments: Any) -> Path:
    with quiet():
        outside("timm.models._hub").save_for_hf(model, folder, model_args=arguments, safe_serialization=True)
    return folder


def arguments_of(settings: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key != "num_classes"}


HYBRID_CASES = [pytest.param(name, marks=[pytest.mark.slow] if blocks else []) for name, blocks in HYBRIDS.items()]


@pytest.mark.parametrize("name", HYBRID_CASES)
def test_hybrids_of_timm_are_read_and_written(name, tmp_path):
    settings = {**SMALL_VIT, "img_size": 64}
    model = created(name, **settings)
    found = read(saved(model, tmp_path / "theirs", **arguments_of(settings)))
    c = found.weights.architecture
    assert isinstance(c, ViTConfig)
    assert (found.card.format, found.unmapped, found.weights.changes) == ("timm-hybrid", (), ())
    assert c.stem == StemConfig(blocks=HYBRIDS[name], epsilons="timm")
    images = pictures(2, 3, 64, 64)
    assert relative(run64(found.weights, images), theirs64(model, images)) <= LIMIT
    written(found.weights, tmp_path / "ours", "timm-hybrid")
    assert relative(theirs64(timm_loaded(tmp_path / "ours"), images), run64(found.weights, images)) <= LIMIT
    theirs, ours = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert all(torch.equal(theirs[key], ours[key]) for key in theirs.keys() | ours.keys())


@pytest.mark.parametrize("size", [pytest.param((96, 64), marks=pytest.mark.slow), (70, 90)])
def test_hybrids_of_timm_at_another_size(size, tmp_path):
    settings = {**SMALL_VIT, "img_size": (64, 96), "in_chans": 1}
    model = created("vit_tiny_r_s16_p8_224", **settings, dynamic_img_size=True)
    weights = read(saved(model, tmp_path, **arguments_of(settings))).weights
    assert weights.architecture.image == (64, 96)
    images = pictures(2, 1, *size)
    assert relative(run64(weights, images), theirs64(model, images)) <= LIMIT
    assert relative(run64(adapt(weights, Adaptation(image=size)), images), theirs64(model, images)) <= LIMIT


def test_weights_of_a_hybrid_alone(tmp_path):
    settings = {**SMALL_VIT, "embed_dim": 64, "num_heads": 1, "img_size": 64}
    model = created("vit_tiny_r_s16_p8_224", **settings)
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    images = pictures(2, 3, 64, 64)
    weights = read(tmp_path / "weights.safetensors", hints=Hints(heads=1)).weights
    assert weights.architecture.image == (64, 64)
    assert relative(run64(weights, images), theirs64(model, images)) <= LIMIT


def test_hybrids_with_another_network_are_refused_by_name(tmp_path):
    with quiet():
        model = outside("timm").create_model("vit_small_resnet26d_224", embed_dim=32, depth=1, num_heads=2)
    saved(model, tmp_path)
    with pytest.raises(UserError, match="timm's vit_small_resnet26d_224 has another network"):
        read(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(UserError, match=r"such as a vit_\*_resnet26d, vit_base_mci or vitamin of timm, has another"):
        read(tmp_path)


HYBRID = ViTConfig(
    **{"depth": 2, "width": 32, "mlp": 48, "heads": 4, "classes": 5, "patch": 8},
    image=(64, 64),
    stem=StemConfig(blocks=()),
    resize="timm",
)
BIT = ResNetConfig(blocks=(1, 1, 1, 1), classes=5, image=(64, 64))


def with_epsilons(architecture: Any, epsilons: Epsilons) -> Any:
    if isinstance(architecture, ResNetConfig):
        return replace(architecture, epsilons=epsilons)
    return replace(architecture, stem=replace(architecture.stem, epsilons=epsilons))


def with_faint_filters(weights: Weights) -> Weights:
    small = {key: 1e-3 * array for key, array in weights.state.items() if array.ndim == 4 and key != "embed.weight"}
    return replace(weights, state={**weights.state, **small})


@pytest.mark.parametrize(("architecture", "format"), [(HYBRID, "timm-hybrid"), (BIT, "hf-bit")])
def test_filters_of_google_are_scaled_for_the_epsilons_of_others(architecture, format, tmp_path):
    weights = with_faint_filters(random_weights(architecture))
    card = written(weights, tmp_path / "model", format)
    model = timm_loaded(tmp_path / "model") if architecture is HYBRID else hf_bit(tmp_path / "model")
    images = pictures(2, 3, 64, 64)
    assert "weight standardization with the epsilons of timm" in card.changes[0]
    assert card.architecture == with_epsilons(architecture, "timm")
    assert relative(theirs64(model, images), run64(weights, images)) <= LIMIT
    copied = replace(weights, architecture=card.architecture)
    assert relative(run64(copied, images), run64(weights, images)) > 100 * LIMIT


@pytest.mark.parametrize(("architecture", "format"), [(HYBRID, "google"), (BIT, "bit")])
def test_filters_of_timm_are_scaled_for_the_epsilons_of_google(architecture, format, tmp_path):
    weights = with_faint_filters(random_weights(with_epsilons(architecture, "timm")))
    written(weights, tmp_path / "model.npz", format)
    back = read(tmp_path / "model.npz").weights
    images = pictures(2, 3, 64, 64)
    assert relative(run64(back, images), run64(weights, images)) <= LIMIT
    assert from_dict(as_dict(weights.architecture)) == weights.architecture
    assert to_epsilons(back, "google") is back


# -------------------------------------------------------------------------------------------------------------- BiT


def hf_bit(folder: Path) -> Any:
    return hf_loaded("BitForImageClassification", folder)


def test_bit_of_timm_is_read_and_written(tmp_path):
    model = created("resnetv2_50x1_bit", num_classes=5, in_chans=1)
    found = read(saved(model, tmp_path / "theirs", in_chans=1))
    assert (found.card.format, found.unmapped, found.weights.changes) == ("timm-bit", (), ())
    images = pictures(1, 1, 48, 63)
    assert relative(run64(found.weights, images), theirs64(model, images)) <= LIMIT
    written(found.weights, tmp_path / "ours", "timm-bit")
    assert relative(theirs64(timm_loaded(tmp_path / "ours"), images), run64(found.weights, images)) <= LIMIT


@pytest.mark.slow
def test_wide_bit_of_timm_is_read(tmp_path):
    """A model of one block per stage with timm's own layers: its wide factories are deep as well."""
    conv = partial(outside("timm.layers").StdConv2d, eps=1e-8)
    sizes = {"layers": (1, 1, 1, 1), "width_factor": 2, "num_classes": 5}
    model = faint(randomised(outside("timm.models.resnetv2").ResNetV2(**sizes, stem_type="fixed", conv_layer=conv)))
    save_file(model.state_dict(), tmp_path / "bit.safetensors")
    images = pictures(1, 3, 48, 48)
    weights = read(tmp_path / "bit.safetensors").weights
    assert weights.architecture == ResNetConfig(blocks=(1, 1, 1, 1), width=2, classes=5, epsilons="timm")
    assert relative(run64(weights, images), theirs64(model, images)) <= LIMIT
    with pytest.raises(UserError, match="timm has resnetv2_50x1_bit"):
        written(weights, tmp_path / "ours", "timm-bit")


def test_other_resnets_of_timm_are_refused_by_name(tmp_path):
    with quiet():
        model = outside("timm").create_model("resnetv2_50", num_classes=5)
    saved(model, tmp_path)
    with pytest.raises(UserError, match="timm's resnetv2_50 is another ResNet than BiT's"):
        read(tmp_path)


def hf_model_bit(**settings: Any) -> Any:
    library = outside("transformers")
    with quiet():
        config = library.BitConfig(**{"depths": [1, 1, 1, 1], "num_labels": 5, **settings})
        return faint(randomised(library.BitForImageClassification(config)))


@pytest.mark.slow
def test_bit_of_transformers_is_read_and_written(tmp_path):
    model = hf_model_bit(id2label={i: name for i, name in enumerate(("ant", "bee", "cat", "dog", "elk"))})
    found = read(hf_saved(model, tmp_path / "theirs"))
    assert (found.card.format, found.unmapped, found.weights.changes) == ("hf-bit", (), ())
    assert found.card.class_names == ("ant", "bee", "cat", "dog", "elk")
    images = pictures(2, 3, 63, 90)
    assert relative(run64(found.weights, images), theirs64(model, images)) <= LIMIT
    written(found.weights, tmp_path / "ours", "hf-bit")
    assert relative(theirs64(hf_bit(tmp_path / "ours"), images), run64(found.weights, images)) <= LIMIT


@pytest.mark.parametrize("setting", [{"global_padding": "SAME"}, {"output_stride": 8}])
def test_other_resnets_of_transformers_are_refused(setting, tmp_path):
    hf_saved(hf_model_bit(**setting), tmp_path)
    with pytest.raises(UserError, match=f"the file's {next(iter(setting))} is"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("format", "changes"),
    [("timm-bit", {"root_pool": "-inf"}), ("hf-bit", {"classes": 0}), ("timm-bit", {"axial": True})],
)
def test_resnets_that_these_formats_cannot_hold(format, changes, tmp_path):
    with pytest.raises(UserError, match=f"format {format} cannot represent this model"):
        written(random_weights(replace(BIT, **changes)), tmp_path / "model", format)
