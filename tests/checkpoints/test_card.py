"""What travels with weights: how pixels are prepared, in our words and in those of others; names in any spelling."""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from journeys import COLOURS, MODEL, QUICK, colour_folder, paint
from oracles import SMALL, outside, quiet, random_weights
from PIL import Image
from safetensors import safe_open

import vitral
from vitral.api.inspection import inspect, write_run_page
from vitral.architecture import ViTConfig
from vitral.checkpoints.adapt import Adaptation
from vitral.checkpoints.card import Card, Preprocess, ResizeAndCrop
from vitral.checkpoints.formats import FORMATS
from vitral.checkpoints.formats.table import CheckpointHeader
from vitral.checkpoints.weights import describe, read_adapted, write
from vitral.data.preprocess import parse_pipeline
from vitral.errors import UserError

DINO = "decode|resize_small(256, bicubic)|central_crop(224)"
HALF = (0.5, 0.5, 0.5)
VALUES = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.4]}


# --- another image size


@pytest.mark.parametrize(
    ("pipeline", "before", "after", "expected"),
    [
        (DINO, 518, (224, 224), DINO),  # the table is for 518 pixels, the crop is its own
        (DINO, 518, (112, 112), "decode|resize_small(128, bicubic)|central_crop(112)"),
        (DINO, 518, (518, 518), DINO),
        (DINO, 224, (384, 384), "decode|resize_small(439, bicubic)|central_crop(384)"),
        (DINO, 224, (96, 160), "decode|resize(96, 160, bicubic)"),
        ("decode|resize(64,64)", 64, (32, 32), "decode|resize(32,32)"),
        ("decode|resize(96, 160)", 96, (64, 64), "decode|resize(64, 64)"),
        ("decode|resize(300, 400)|central_crop(200)", 200, (100, 100), "decode|resize(150, 200)|central_crop(100)"),
        (
            "decode|resize_small (40) | central_crop(20, 20)",
            20,
            (10, 10),
            "decode|resize_small (20) | central_crop(10, 10)",
        ),
        (
            "decode|randaugment(2, 10)|resize(32)|erase(0.25)",
            32,
            (16, 16),
            "decode|randaugment(2, 10)|resize(16)|erase(0.25)",
        ),
    ],
)
def test_a_pipeline_is_scaled_from_the_size_it_ends_in(pipeline, before, after, expected):
    found = Preprocess(pipeline, HALF, HALF).adapted((before, before), after, 3)
    assert found.pipeline == expected


@given(st.integers(8, 600), st.integers(0, 100), st.integers(8, 600), st.integers(8, 600))
def test_a_scaled_pipeline_ends_in_the_size_that_was_asked_for(crop, more, side, native):
    scaled = Preprocess(f"decode|resize_small({crop + more})|central_crop({crop})", HALF, HALF)
    found = scaled.adapted((native, native), (side, side), 3).pipeline
    assert native == side or parse_pipeline(found).size == (side, side)


def test_loaded_at_another_size_the_stated_crop_counts(tmp_path):
    c = replace(SMALL, image=(56, 56), classes=0, layer_scale=True, mlp=64)
    card = Card(c, preprocess=Preprocess("decode|resize_small(37)|central_crop(32)", HALF, HALF))
    write(random_weights(c), card, tmp_path / "model", "hf-dinov2")
    found = read_adapted(tmp_path / "model", Adaptation(image=32)).card
    assert found.preprocess is not None
    assert found.preprocess.pipeline == "decode|resize_small(37, bilinear)|central_crop(32)"


# --- in the words of other libraries


def hf_preprocess(**stated: Any) -> Preprocess | None:
    plain = {"size": {"height": 32, "width": 32}, "resample": 3, **VALUES}
    return FORMATS["hf"].preprocess(CheckpointHeader({}, preprocessor={**plain, **stated}), SMALL)


def timm_preprocess(c: ViTConfig = SMALL, **stated: Any) -> Preprocess | None:
    return FORMATS["timm"].preprocess(
        CheckpointHeader({}, {"pretrained_cfg": {"mean": HALF, "std": HALF, **stated}}), c
    )


@pytest.mark.parametrize(
    "stated",
    [
        *({"resample": 1}, {"resample": 4}, {"resample": 5}, {"resample": None}),
        *({"do_normalize": False}, {"do_rescale": False}, {"do_resize": False}, {"rescale_factor": 1 / 127.5}),
        *({"size": {"shortest_edge": 32}}, {"size": {"longest_edge": 32}}, {"size": None}, {"size": 0}),
        *({"do_center_crop": True}, {"do_center_crop": True, "crop_size": {"shortest_edge": 32}}),
    ],
    ids=str,
)
def test_preprocessing_that_no_pipeline_expresses_stays_unknown(stated):
    assert hf_preprocess() == Preprocess("decode|resize(32, 32, bicubic)", (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
    assert hf_preprocess(**stated) is None


@pytest.mark.parametrize("stated", [{"interpolation": "lanczos"}, {"interpolation": "random"}, {"crop_mode": "border"}])
def test_timm_preprocessing_that_no_pipeline_expresses_stays_unknown(stated):
    assert timm_preprocess() is not None
    assert timm_preprocess(**stated) is None
    assert timm_preprocess(replace(SMALL, image=(32, 48))) is None  # timm keeps the proportions and covers it


def photo() -> np.ndarray:
    """uint8 (48, 96, 3), smooth, and cut evenly: libraries round resized values and halves of a pixel differently."""
    y, x = np.mgrid[0:48, 0:96]
    return np.stack([2 * x, 3 * y, x + y], axis=-1).astype(np.uint8)


def prepared(how: Preprocess | None) -> torch.Tensor:
    """(3, h, w)"""
    assert how is not None
    pixels = torch.from_numpy(parse_pipeline(how.pipeline)(photo())).permute(2, 0, 1) / 255
    return (pixels - torch.tensor(how.mean)[:, None, None]) / torch.tensor(how.std)[:, None, None]


PROCESSORS = {
    "both sides": ("ViTImageProcessor", {"size": {"height": 32, "width": 48}, "resample": 3}),
    "a crop": ("BitImageProcessor", {"size": {"shortest_edge": 40}, "crop_size": {"height": 32, "width": 24}}),
    "both sides, a crop": (
        "DeiTImageProcessor",
        {"size": {"height": 40, "width": 40}, "crop_size": {"height": 32, "width": 32}, "resample": 2},
    ),
}


@pytest.mark.parametrize("case", PROCESSORS)
def test_pixels_are_those_of_transformers(case, tmp_path):
    kind, settings = PROCESSORS[case]
    with quiet():
        processor = getattr(outside("transformers"), kind)(**settings, **VALUES)
        processor.save_pretrained(tmp_path)
        theirs = processor(Image.fromarray(photo()), return_tensors="pt")["pixel_values"][0]
    ours = prepared(hf_preprocess(**json.loads((tmp_path / "preprocessor_config.json").read_text())))
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() <= 1.5 / 255 / 0.2


@pytest.mark.parametrize("size", [{}, {"size": 40}])
@pytest.mark.parametrize("kind", ["ViT", "DeiT", "Bit"])
def test_missing_keys_take_the_defaults_of_transformers(kind, size):
    written = {**VALUES, **size, **({} if kind == "ViT" else {"crop_size": 32})}
    with quiet():
        processor = getattr(outside("transformers"), f"{kind}ImageProcessor")(**written)
        theirs = processor(Image.fromarray(photo()), return_tensors="pt")["pixel_values"][0]
    model = {"ViT": "vit", "DeiT": "deit", "Bit": "dinov2"}[kind]
    for named in (
        {"image_processor_type": f"{kind}ImageProcessor"},
        {"feature_extractor_type": f"{kind}FeatureExtractor"},
    ):
        how = FORMATS["hf"].preprocess(CheckpointHeader({}, preprocessor={**written, **named}), SMALL)
        assert how == FORMATS["hf"].preprocess(CheckpointHeader({}, {"model_type": model}, preprocessor=written), SMALL)
        assert prepared(how).shape == theirs.shape
        assert (prepared(how) - theirs).abs().max() <= 1.5 / 255 / 0.2
    assert FORMATS["hf"].preprocess(CheckpointHeader({}, preprocessor=written), SMALL) is None  # nobody's


@pytest.mark.parametrize("pipeline", ["decode|resize(20, 28)", "decode|resize_small(40, bicubic)|central_crop(32, 24)"])
def test_transformers_preprocesses_as_our_folder_states(pipeline, tmp_path):
    how = Preprocess(pipeline, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
    write(random_weights(SMALL), Card(SMALL, preprocess=how), tmp_path / "model", "hf")
    with quiet():
        processor = outside("transformers").AutoImageProcessor.from_pretrained(tmp_path / "model")
        theirs = processor(Image.fromarray(photo()), return_tensors="pt")["pixel_values"][0]
    assert theirs.shape == prepared(how).shape
    assert (prepared(how) - theirs).abs().max() <= 1.5 / 255 / 0.2
    assert (prepared(describe(tmp_path / "model").card.preprocess) - prepared(how)).abs().max() == 0


TRANSFORMS = {
    "nothing said": {},
    "all of it": {"crop_pct": 1.0, "crop_mode": "center"},
    "squashed": {"crop_pct": 1.0, "crop_mode": "squash"},
    "squashed and cut": {"crop_pct": 0.8, "crop_mode": "squash", "interpolation": "bilinear"},
    "cut": {"crop_pct": 0.8, "crop_mode": "center", "interpolation": "bilinear"},
}


@pytest.mark.parametrize("case", TRANSFORMS)
def test_pixels_are_those_of_timm(case):
    stated: dict[str, Any] = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4), **TRANSFORMS[case]}
    library = outside("timm.data")
    with quiet():
        settings = library.resolve_data_config(pretrained_cfg={"input_size": (3, 32, 32), **stated})
        theirs = library.create_transform(**settings)(Image.fromarray(photo()))
    assert (prepared(timm_preprocess(**stated)) - theirs).abs().max() <= 1.5 / 255 / 0.2


@given(st.integers(16, 600), st.integers(0, 300), st.sampled_from(["bilinear", "bicubic", "nearest"]))
def test_a_crop_comes_back_from_timms_percent(size, more, method):
    c = replace(SMALL, image=(size, size), patch=16)
    how = Preprocess(f"decode|resize_small({size + more}, {method})|central_crop({size})", HALF, HALF)
    config = FORMATS["timm"].config
    assert config is not None
    stated = config(Card(c, preprocess=how))["pretrained_cfg"]
    assert math.floor(size / stated["crop_pct"]) == size + more
    assert FORMATS["timm"].preprocess(CheckpointHeader({}, {"pretrained_cfg": stated}), c) == how


@pytest.mark.parametrize("format", ["hf", "timm"])
@pytest.mark.parametrize(
    "pipeline", ["decode|resize(32, area)", "decode|resize(40)|resize(32)", "decode|random_crop(32)"]
)
def test_preprocessing_that_a_format_cannot_express_is_left_out(format, pipeline, tmp_path):
    card = Card(replace(SMALL, gelu="erf"), preprocess=Preprocess(pipeline, HALF, HALF))
    assert card.preprocess is not None
    write(random_weights(card.architecture), card, tmp_path / "model", format)
    assert describe(tmp_path / "model").card.preprocess is None


def test_resize_and_crop_of_a_pipeline():
    assert Preprocess(DINO, HALF, HALF).resize_and_crop() == ResizeAndCrop(256, (224, 224), "bicubic")
    assert Preprocess("decode|resize(16, 24)", HALF, HALF).resize_and_crop() == ResizeAndCrop(
        None, (16, 24), "bilinear"
    )
    assert Preprocess("decode|resize(32)|central_crop(24)", HALF, HALF).resize_and_crop() is None


# --- names that are not UTF-8

LATIN = os.fsdecode(b"caf\xe9")
bytewise = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system knows no such names")


def test_a_card_holds_any_name(tmp_path):
    card = Card(replace(SMALL, classes=3), class_names=(LATIN, "crème", "\ud800"), source=LATIN)
    assert Card.from_json(card.to_json()) == card
    write(random_weights(card.architecture), card, tmp_path / "model.safetensors", "vitral")
    assert describe(tmp_path / "model.safetensors").card.class_names == card.class_names
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert Card.from_json(file.metadata()["vitral.card"]) == card
    write(random_weights(card.architecture), card, tmp_path / "folder", "hf")
    assert describe(tmp_path / "folder").card.class_names == card.class_names


@bytewise
def test_class_names_that_are_not_utf_8_survive_a_round_trip(tmp_path, monkeypatch):
    monkeypatch.setenv("VITRAL_CACHE", str(tmp_path / "cache"))
    data = colour_folder(tmp_path / "data", 5, {"red": LATIN, "green": "crème"})
    out = tmp_path / "run"
    vitral.train(data, model=MODEL, out=out, set=[*QUICK, "steps=2", "evaluate_every=2"])
    found = vitral.predict(out, [paint(data / LATIN / "new.png", COLOURS["red"])])
    assert {*found.rows[0].names} == {LATIN, "crème", "blue"}
    result = vitral.evaluate(out, data)
    assert LATIN in {row["name"] for row in result.metrics["per_class"]}
    predicted = tmp_path / "found.json"
    vitral.predict(out, data / LATIN, output=predicted)
    assert {row["path"] for row in json.loads(predicted.read_text("utf-8"))["predictions"]} >= {
        str(data / LATIN / "0.png")
    }
    inspect(out, [data / LATIN / "new.png"], output=tmp_path / "page.html")
    for page in (write_run_page(out, data), tmp_path / "page.html"):
        assert "caf\N{REPLACEMENT CHARACTER}" in page.read_text("utf-8")


@bytewise
def test_output_paths_that_are_not_utf_8_are_refused_early(tmp_path):
    data = colour_folder(tmp_path / "data", 5)
    with pytest.raises(UserError, match=r"not valid UTF-8, .*: choose another name"):
        vitral.train(data, model=MODEL, out=tmp_path / LATIN, set=QUICK)
    assert not (tmp_path / LATIN).exists()
    write(random_weights(SMALL), Card(SMALL), tmp_path / LATIN / "model.safetensors", "vitral")
    with pytest.raises(UserError, match=r"not valid UTF-8, .*: choose another name"):
        vitral.load(tmp_path / LATIN)
