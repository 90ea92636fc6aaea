"""Preprocessing of timm and transformers: read from their files it gives their pixels, written they give ours."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import SMALL, outside, quiet, random_weights
from PIL import Image

from vitral.architecture import Size
from vitral.checkpoints.card import Card, ImageTransform, Preprocess
from vitral.checkpoints.processors import from_timm, from_transformers, to_timm, to_transformers
from vitral.checkpoints.weights import describe, write
from vitral.data.images import decode
from vitral.data.preprocess import parse_pipeline

HALF = (0.5, 0.5, 0.5)
MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
VALUES = {"image_mean": list(MEAN), "image_std": list(STD)}
Processor = Callable[[Image.Image], np.ndarray]  # to (h, w, 3), in grey levels


def picture(height: int, width: int) -> np.ndarray:
    """uint8 (height, width, 3): gradients, edges and noise, down to single pixels."""
    rng = np.random.default_rng([height, width])
    y, x = np.mgrid[0:height, 0:width]
    waves = [127 + 120 * np.sin(x / 7 + band) * np.cos(y / (5 + band)) for band in range(3)]
    return np.where(
        rng.random((height, width, 1)) < 0.2, rng.integers(0, 256, (height, width, 3)), np.dstack(waves)
    ).astype(np.uint8)


SIZES = [(333, 500), (500, 375), (257, 999), (999, 257), (31, 40), (40, 31), (224, 224), (225, 224), (1, 5)]
PICTURES = [picture(*size) for size in SIZES]


@pytest.fixture(scope="module")
def photographs(assets: Path) -> list[Path]:
    data = assets / "data"
    files = sorted(data.glob("imagenet_val_1000/*/*"))[::20] + sorted(data.glob("pets_mini/test/*/*"))[::6]
    assert len(files) == 100
    return files


def grey(values: Any, mean: tuple[float, ...], std: tuple[float, ...]) -> np.ndarray:
    """Normalised (3, h, w) -> (h, w, 3) in grey levels, which need not be whole."""
    return 255 * (np.asarray(values, np.float64).transpose(1, 2, 0) * std + mean)


def timm_transform(stated: dict[str, Any], image: Size) -> Processor:
    library = outside("timm.data")
    with quiet():
        settings = library.resolve_data_config(pretrained_cfg={**stated, "input_size": (3, *image)})
        transform = library.create_transform(**settings)
    return lambda photo: grey(transform(photo), settings["mean"], settings["std"])


def transformers_processor(folder: Path, stated: dict[str, Any], model_type: str = "") -> Processor:
    """The image processor that AutoImageProcessor makes of a folder."""
    folder.mkdir(exist_ok=True)
    (folder / "preprocessor_config.json").write_text(json.dumps(stated))
    if model_type:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    with quiet():
        processor = outside("transformers").AutoImageProcessor.from_pretrained(folder)
    mean, std = tuple(processor.image_mean), tuple(processor.image_std)

    def run(photo: Image.Image) -> np.ndarray:
        with quiet():
            return grey(processor(photo, return_tensors="pt")["pixel_values"][0], mean, std)

    return run


def equal_pixels(how: Preprocess | None, theirs: Processor, images: list[np.ndarray], least: float = 1.0) -> None:
    """Their pixels are on our grid, but for rounding in the normalisation; `least` is the share that must be equal."""
    assert how is not None
    pipeline = parse_pipeline(how.pipeline)
    for image in images:
        ours, expected = pipeline(image), theirs(Image.fromarray(image))
        assert ours.shape == expected.shape
        difference = np.abs(ours - np.rint(expected))
        assert (difference == 0).mean() >= least, (how.pipeline, image.shape, difference.max(), (difference > 0).mean())
        assert difference.max() <= 1


# --- timm

CENTER = {"crop_pct": 0.9, "interpolation": "bicubic", "crop_mode": "center"}
TIMM: dict[str, tuple[dict[str, Any], Size]] = {
    "augreg": (CENTER, (224, 224)),
    "nothing stated": ({}, (224, 224)),
    "odd margins": ({**CENTER, "crop_pct": 0.95}, (223, 223)),
    "everything": ({**CENTER, "crop_pct": 1.0}, (384, 384)),
    "more than everything": ({**CENTER, "crop_pct": 1.1}, (224, 224)),
    "bilinear": ({**CENTER, "interpolation": "bilinear", "crop_pct": 0.875}, (160, 160)),
    "nearest": ({**CENTER, "interpolation": "nearest"}, (224, 224)),
    "lanczos": ({**CENTER, "interpolation": "lanczos"}, (224, 224)),
    "box": ({**CENTER, "interpolation": "box"}, (224, 224)),
    "hamming": ({**CENTER, "interpolation": "hamming"}, (224, 224)),
    "not square": (CENTER, (224, 160)),
    "squashed": ({"crop_pct": 1.0, "crop_mode": "squash"}, (224, 224)),
    "squashed and cropped": ({"crop_pct": 0.8, "crop_mode": "squash", "interpolation": "bilinear"}, (96, 161)),
    "border": ({"crop_pct": 1.0, "crop_mode": "border"}, (224, 224)),
    "border and cropped": ({"crop_pct": 0.8, "crop_mode": "border", "interpolation": "bilinear"}, (96, 161)),
    "another size for tests": ({**CENTER, "test_input_size": (3, 288, 288), "test_crop_pct": 1.0}, (224, 224)),
}


@pytest.mark.parametrize("case", TIMM)
def test_pixels_are_those_of_timm(case):
    stated, image = TIMM[case]
    stated = {"mean": MEAN, "std": STD, **stated}
    how = from_timm(stated, image)
    equal_pixels(how, timm_transform(stated, image), PICTURES)
    assert how is not None
    assert (how.mean, how.std) == (MEAN, STD)
    assert from_timm(to_timm(how, image), image) == how  # and written they come back


@given(st.tuples(st.integers(1, 90), st.integers(1, 90)), st.sampled_from([(32, 32), (24, 31)]), st.floats(0.5, 1.2))
def test_sides_are_those_of_timm(size, image, percent):
    for mode in ("center", "border"):
        stated = {"mean": MEAN, "std": STD, "crop_pct": percent, "crop_mode": mode}
        if max(size) <= 16 * min(size):  # longer ones are cut by us
            equal_pixels(from_timm(stated, image), timm_transform(stated, image), [picture(*size)])


@pytest.mark.parametrize(
    "case", ["augreg", *[pytest.param(case, marks=pytest.mark.slow) for case in ("squashed", "not square")]]
)
def test_photographs_have_the_pixels_of_timm(case, photographs):
    stated, image = TIMM[case]
    stated = {"mean": MEAN, "std": STD, **stated}
    images = [np.array(Image.open(file).convert("RGB")) for file in photographs]
    equal_pixels(from_timm(stated, image), timm_transform(stated, image), images)


def test_files_of_photographs_have_the_pixels_of_timm(photographs):
    """With our decoder: at most one grey level, of one value in a thousand."""
    how, theirs = (
        from_timm({"mean": HALF, "std": HALF, **CENTER}, (224, 224)),
        timm_transform({"mean": HALF, "std": HALF, **CENTER}, (224, 224)),
    )
    assert how is not None
    transform = ImageTransform(parse_pipeline(how.pipeline), 3, how.mean, how.std)
    for file in photographs:
        difference = np.abs(
            np.rint(grey(transform(file), HALF, HALF)) - np.rint(theirs(Image.open(file).convert("RGB")))
        )
        assert difference.max() <= 1
        assert (difference > 0).mean() <= 1e-3


@pytest.mark.parametrize(
    "stated", [{"interpolation": "random"}, {"crop_mode": "mosaic"}, {"mean": None}, {"std": None}]
)
def test_timm_preprocessing_that_is_unknown_stays_so(stated):
    known = {"mean": HALF, "std": HALF}
    assert from_timm(known, (32, 32)) is not None
    assert from_timm({**known, **stated}, (32, 32)) is None
    assert from_timm({}, (32, 32)) is None


@given(st.integers(16, 600), st.integers(0, 300), st.sampled_from(["bilinear", "bicubic", "nearest"]))
def test_a_crop_comes_back_from_timms_percent(size, more, method):
    ours = Preprocess(f"decode|resize_small({size + more}, {method})|central_crop({size})", HALF, HALF)
    theirs = f"decode|resize_short({size + more}, pil_{method})|center_crop({size})"
    stated = to_timm(ours, (size, size))
    assert math.floor(size / stated["crop_pct"]) == size + more
    assert from_timm(stated, (size, size)) == Preprocess(theirs, HALF, HALF)
    assert to_timm(Preprocess(theirs, HALF, HALF), (size, size)) == stated


@pytest.mark.parametrize(
    "pipeline",
    [
        *(
            "resize(32, area)",
            "resize(40)|resize(32)",
            "random_crop(32)",
            "central_crop(32)",
            "resize_small(40)|central_crop(24)",
        ),
        *("resize_short(40)|center_crop(32)|flip", "resize_fit(32)|pad(32, 32, 1, 2, 3)|center_crop(32)"),
    ],
)
def test_preprocessing_that_timm_does_not_have_is_left_out(pipeline):
    assert to_timm(Preprocess(f"decode|{pipeline}", HALF, HALF), (32, 32)) == {}
    assert to_timm(None, (32, 32)) == {}


# --- transformers

PROCESSORS: dict[str, dict[str, Any]] = {
    "both sides": {"image_processor_type": "ViTImageProcessor", "size": {"height": 224, "width": 224}, "resample": 3},
    "not square": {"image_processor_type": "ViTImageProcessorFast", "size": {"height": 96, "width": 161}},
    "nearest": {"image_processor_type": "ViTImageProcessor", "size": {"height": 224, "width": 224}, "resample": 0},
    "DeiT": {"image_processor_type": "DeiTImageProcessor"},
    "odd margins": {"image_processor_type": "DeiTImageProcessor", "size": 257, "crop_size": 224, "resample": 2},
    "Bit": {"image_processor_type": "BitImageProcessor", "size": {"shortest_edge": 256}},
    "Bit, a crop that is not square": {
        **{"image_processor_type": "BitImageProcessor", "size": {"shortest_edge": 225}},
        "crop_size": {"height": 224, "width": 160},
    },
    "CLIP": {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 224}, "do_convert_rgb": True},
    "an old CLIP": {"feature_extractor_type": "CLIPFeatureExtractor", "size": 224, "crop_size": 224, "resample": 3},
    "SigLIP": {"image_processor_type": "SiglipImageProcessor", "size": {"height": 256, "width": 256}},
    "BEiT": {"feature_extractor_type": "BeitFeatureExtractor", "size": 224, "do_center_crop": False, "crop_size": 224},
    "a cropped BEiT": {"image_processor_type": "BeitImageProcessor", "size": 256, "do_center_crop": True},
    "MAE": {"feature_extractor_type": "ViTFeatureExtractor", "size": 224, "do_resize": True, "do_normalize": True},
    "null is no": {"image_processor_type": "DeiTImageProcessor", "do_center_crop": None},
}


@pytest.mark.parametrize("case", PROCESSORS)
def test_pixels_are_those_of_transformers(case, tmp_path):
    stated = {**VALUES, **PROCESSORS[case]}
    how = from_transformers(stated, "")
    equal_pixels(how, transformers_processor(tmp_path, stated), PICTURES)
    assert how is not None
    assert (how.mean, how.std) == (MEAN, STD)
    written = to_transformers(how)
    assert written is not None
    assert from_transformers(written, "") == how
    equal_pixels(how, transformers_processor(tmp_path, written), PICTURES)


@pytest.mark.parametrize("crop", [{}, {"do_center_crop": True, "crop_size": {"height": 193, "width": 200}}])
def test_pixels_of_dinov3_are_rounded_once(crop, tmp_path):
    """It resizes in floating point: its values are between our grey levels, and none is rounded to another one."""
    stated = {"image_processor_type": "DINOv3ViTImageProcessorFast", **VALUES, **crop}
    how, theirs = from_transformers(stated, ""), transformers_processor(tmp_path, stated)
    equal_pixels(how, theirs, PICTURES, least=0.999)
    assert how is not None
    for image in PICTURES:
        assert np.abs(parse_pipeline(how.pipeline)(image) - theirs(Image.fromarray(image))).max() < 0.501
    assert from_transformers(to_transformers(how) or {}, "") == how
    assert from_transformers({**stated, "resample": 3}, "") is None  # it overshoots black and white


@pytest.mark.parametrize(
    "case", ["Bit", *[pytest.param(case, marks=pytest.mark.slow) for case in ("both sides", "CLIP", "SigLIP")]]
)
def test_photographs_have_the_pixels_of_transformers(case, photographs, tmp_path):
    stated = {**VALUES, **PROCESSORS[case]}
    images = [np.array(Image.open(file).convert("RGB")) for file in photographs]
    equal_pixels(from_transformers(stated, ""), transformers_processor(tmp_path, stated), images)


@pytest.mark.parametrize(
    ("kind", "model_type"),
    [
        *(
            ("ViT", "vit"),
            ("ViT", "vit_mae"),
            ("ViT", "vit_msn"),
            ("DeiT", "deit"),
            ("Beit", "beit"),
            ("Bit", "dinov2"),
        ),
        *(("CLIP", "clip"), ("Siglip", "siglip"), ("DINOv3ViT", "dinov3_vit")),
    ],
)
def test_missing_keys_take_the_defaults_of_transformers(kind, model_type, tmp_path):
    stated = {"do_rescale": True}
    how = from_transformers(stated, model_type)
    equal_pixels(how, transformers_processor(tmp_path, stated, model_type), PICTURES[:3], least=0.999)
    assert how == from_transformers({**stated, "image_processor_type": f"{kind}ImageProcessor"}, "")
    assert how == from_transformers({**stated, "feature_extractor_type": f"{kind}FeatureExtractor"}, "bert")
    with quiet():
        processor = getattr(outside("transformers"), f"{kind}ImageProcessor")()
    assert how is not None
    assert (how.mean, how.std) == (tuple(processor.image_mean), tuple(processor.image_std))
    assert from_transformers(stated, "") is None  # nobody's
    assert from_transformers({}, model_type) is None  # no file


@pytest.mark.parametrize("stated", [{"do_normalize": False}, {"rescale_factor": 1 / 127.5}, {"rescale_factor": 0.0039}])
def test_other_ranges_of_values_are_normalised(stated, tmp_path):
    stated = {"image_processor_type": "ViTImageProcessor", **VALUES, **stated}
    transformers_processor(tmp_path, stated)
    with quiet():
        processor = outside("transformers").AutoImageProcessor.from_pretrained(tmp_path)
        theirs = processor(Image.fromarray(PICTURES[0]), return_tensors="pt")["pixel_values"][0].numpy()
    how = from_transformers(stated, "")
    assert how is not None
    ours = ImageTransform(parse_pipeline(how.pipeline), 3, how.mean, how.std)(PICTURES[0])
    np.testing.assert_allclose(ours.numpy(), theirs, atol=2e-5)


@pytest.mark.parametrize(
    "stated",
    [
        *({"resample": 1}, {"resample": 4}, {"resample": 5}, {"do_rescale": False}, {"do_resize": False}),
        *({"size": {"shortest_edge": 32}}, {"size": {"longest_edge": 32}}, {"size": 0}, {"do_pad": True}),
        {"size": {"shortest_edge": 32, "longest_edge": 64}, "do_center_crop": True, "crop_size": 32},
        {"size": {"max_height": 32, "max_width": 32}},
        *({"do_center_crop": True}, {"do_center_crop": True, "crop_size": {"shortest_edge": 32}}),
        {"do_center_crop": True, "crop_size": 33},
        *({"image_mean": 0.5}, {"rescale_factor": -1}, {"rescale_factor": None}, {"resample": None}, {"size": None}),
        *({"image_processor_type": kind} for kind in ("ConvNextImageProcessor", "Siglip2ImageProcessor", "Other")),
    ],
    ids=str,
)
def test_preprocessing_that_no_pipeline_expresses_stays_unknown(stated):
    plain = {"image_processor_type": "ViTImageProcessor", "size": {"height": 32, "width": 32}, "resample": 3, **VALUES}
    assert from_transformers(plain, "vit") == Preprocess("decode|resize(32, bicubic)", MEAN, STD)
    assert from_transformers({**plain, **stated}, "vit") is None


@pytest.mark.parametrize(
    "pipeline",
    [
        "decode|resize(20, 28)",
        "decode|resize_small(40, bicubic)|central_crop(32, 24)",
        "decode|resize(40)|central_crop(32)",
    ],
)
def test_transformers_preprocesses_as_our_folder_states(pipeline, tmp_path):
    how = Preprocess(pipeline, MEAN, STD)
    write(random_weights(SMALL), Card(SMALL, preprocess=how), tmp_path / "model", "hf")
    with quiet():
        processor = outside("transformers").AutoImageProcessor.from_pretrained(tmp_path / "model")
    even = [picture(48, 96), picture(80, 40)]  # whose longer side needs no rounding
    equal_pixels(how, lambda photo: grey(processor(photo, return_tensors="pt")["pixel_values"][0], MEAN, STD), even)
    read = describe(tmp_path / "model").card.preprocess
    equal_pixels(read, lambda photo: parse_pipeline(pipeline)(np.array(photo)), even)


@pytest.mark.parametrize("format", ["hf", "timm"])
@pytest.mark.parametrize(
    "pipeline", ["decode|resize(32, area)", "decode|resize(40)|resize(32)", "decode|random_crop(32)"]
)
def test_preprocessing_that_a_format_cannot_express_is_left_out(format, pipeline, tmp_path):
    card = Card(replace(SMALL, gelu="erf"), preprocess=Preprocess(pipeline, HALF, HALF))
    write(random_weights(card.architecture), card, tmp_path / "model", format)
    assert describe(tmp_path / "model").card.preprocess is None


def test_ours_turns_photographs_upright_and_theirs_do_not(tmp_path):
    """A documented difference: the libraries open a file with Image.open(file).convert("RGB")."""
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.fromarray(picture(40, 64)).save(tmp_path / "turned.png", exif=turned)
    assert np.array(Image.open(tmp_path / "turned.png").convert("RGB")).shape == (40, 64, 3)
    assert decode((tmp_path / "turned.png").read_bytes()).shape == (64, 40, 3)
