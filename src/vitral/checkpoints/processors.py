"""Preprocessing as timm and transformers state it: read so that the pixels are theirs, and written in their keys.

timm resizes with Pillow. transformers resizes tensors with torchvision wherever that is installed; its other backend,
which is Pillow, gives slightly different pixels. Our `bilinear` and `bicubic` are those of torchvision's tensors.

Released models are known by their names: timm_preprocess.json was generated from the installed timm
(tests/helpers/timm_factories.py); a test compares them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from vitral.architecture import Size
from vitral.checkpoints.card import Preprocess
from vitral.checkpoints.formats.timm_arguments import factory_named, split_name
from vitral.data.pixels import METHODS
from vitral.data.preprocess import IMAGENET_MEAN, IMAGENET_STD, PipelineStep, parse_pipeline

_TIMM_CROP = 0.875  # timm's crop_pct if none is stated

# Steps that differ only in their rounding, and methods that differ only in who computes them.
_THEIR_STEPS = {"resize_small": "resize_short", "central_crop": "center_crop"}
_METHOD_ORIGIN = re.compile("^(?:pil|float)_")

_RESAMPLE = {0: "nearest", 2: "bilinear", 3: "bicubic"}  # Pillow's codes, of what torchvision has for tensors
_HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
_IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_CLIP = {
    **{"image_mean": list(CLIP_MEAN), "image_std": list(CLIP_STD)},
    **{"resample": 3, "size": {"shortest_edge": 224}, "do_center_crop": True, "crop_size": 224},
    "default_to_square": False,
}
# The image processors of transformers that resize, crop and normalise in this order, with their defaults.
_PROCESSORS: dict[str, dict[str, Any]] = {
    "ViT": {"resample": 2, "size": 224, **_HALF},
    "DeiT": {"resample": 3, "size": 256, "do_center_crop": True, "crop_size": 224, **_HALF},
    "Beit": {"resample": 3, "size": 224, "crop_size": 224, **_HALF},
    "Bit": _CLIP,
    "CLIP": _CLIP,
    "Siglip": {"resample": 3, "size": {"height": 224, "width": 224}, "default_to_square": False, **_HALF},
    "DINOv3ViT": {"resample": 2, "size": 224, **_IMAGENET},
}
_PROCESSOR_OF_MODEL = {
    **{"vit": "ViT", "vit_mae": "ViT", "vit_msn": "ViT", "deit": "DeiT", "beit": "Beit", "data2vec-vision": "Beit"},
    **{"dinov2": "Bit", "dinov2_with_registers": "Bit", "dinov3_vit": "DINOv3ViT"},
    **{"clip": "CLIP", "clip_vision_model": "CLIP", "siglip": "Siglip", "siglip_vision_model": "Siglip"},
}
_HALF_MEAN_STD = ((0.5,) * 3, (0.5,) * 3)
_IMAGENET_MEAN_STD = (IMAGENET_MEAN, IMAGENET_STD)
# Releases of others than timm, by the beginnings of their names: on the Hugging Face hub, of torchvision, of Meta's
# repositories. {size} is the model's image size, {larger} 8/7 of it.
_RELEASES = (
    (r"vit-(?:base|large|huge)-patch\d+-\d|beit-(?:base|large)-patch16", "resize({size}, bilinear)", _HALF_MEAN_STD),
    (r"siglip-(?:base|large|so400m)-patch", "resize({size}, bicubic)", _HALF_MEAN_STD),
    (r"deit-(?:tiny|small|base)-", "resize({larger}, bicubic)|central_crop({size})", _IMAGENET_MEAN_STD),
    (r"dinov2-(?:small|base|large|giant|with)", "resize_short(256, bicubic)|central_crop(224)", _IMAGENET_MEAN_STD),
    (r"clip-vit-", "resize_short({size}, bicubic)|central_crop({size})", (CLIP_MEAN, CLIP_STD)),
    (r"vit_l_16(?!\w)", "resize_short(242, pil_bilinear)|center_crop(224)", _IMAGENET_MEAN_STD),
    (r"vit_(?:b_16|b_32|l_32)(?!\w)", "resize_short(256, pil_bilinear)|center_crop(224)", _IMAGENET_MEAN_STD),
    (r"vit_[blh]_\d\d_(?:lc_)?swag", "resize_short({size}, pil_bicubic)|center_crop({size})", _IMAGENET_MEAN_STD),
    (
        r"dino_(?:deitsmall|vitbase)\d|dinov2_vit[sblg]14|mae_(?:pretrain|finetuned)_vit_",
        "resize_short(256, pil_bicubic)|center_crop(224)",
        _IMAGENET_MEAN_STD,
    ),
)


def from_timm(pretrained_cfg: Mapping[str, Any], image: Size) -> Preprocess | None:
    """timm's evaluation transform; None if mean and std are not stated, or if timm has no such transform.

    `image` is the size that the model takes: the `test_input_size` is not timm's default.
    """
    mean, std = pretrained_cfg.get("mean"), pretrained_cfg.get("std")
    method, mode = pretrained_cfg.get("interpolation") or "bicubic", pretrained_cfg.get("crop_mode") or "center"
    if not mean or not std or f"pil_{method}" not in METHODS:
        return None
    percent = pretrained_cfg.get("crop_pct") or _TIMM_CROP
    scaled = math.floor(image[0] / percent), math.floor(image[1] / percent)
    steps = ["decode"]
    if mode == "squash":
        steps += [f"resize({_sides(scaled)}, pil_{method})"]
    elif mode == "border":
        colour = ", ".join(str(round(255 * value)) for value in mean)
        steps += [f"resize_fit({_sides(scaled)}, pil_{method})", f"pad({image[0]}, {image[1]}, {colour})"]
    elif mode == "center" and scaled[0] == scaled[1]:
        steps += [f"resize_short({scaled[0]}, pil_{method})"]
    elif mode == "center":  # timm then leaves the interpolation at its default
        steps += [f"resize_cover({_sides(scaled)}, pil_bilinear)"]
    else:
        return None
    steps += [] if mode == "squash" and scaled == image else [f"center_crop({_sides(image)})"]
    return Preprocess("|".join(steps), tuple(mean), tuple(std))


def to_timm(preprocess: Preprocess | None, image: Size) -> dict[str, Any]:
    """The preprocessing in the keys of timm's pretrained_cfg, also where timm rounds differently; {} if it has none."""
    if preprocess is None:
        return {}
    steps = _steps(preprocess)
    keys = {
        "mean": list(preprocess.mean),
        "std": list(preprocess.std),
        "interpolation": next((step.method for step in steps if step.name.startswith("resize")), ""),
    }
    percents = {_percent(side, before) for step in steps[:1] for side, before in zip(image, step.sides, strict=False)}
    for mode in ("center", "squash", "border"):
        for percent in sorted(percents):
            stated = {**keys, "crop_pct": percent, "crop_mode": mode}
            read = from_timm(stated, image)
            if read is not None and _steps(read) == steps:
                return stated
    return {}


def from_transformers(preprocessor: Mapping[str, Any], model_type: str) -> Preprocess | None:
    """The default (torchvision) backend of an image processor of transformers, by its name or else by the model_type.

    None if it is not known, or does more or less than to resize, crop, rescale and normalise.
    """
    processor = _processor(preprocessor, model_type)
    if not preprocessor or processor not in _PROCESSORS:
        return None
    settings = {**_PROCESSORS[processor], **preprocessor}
    required = all(settings.get(f"do_{step}", True) for step in ("resize", "rescale"))
    if not required or settings.get("do_pad") or settings.get("use_square_size"):
        return None
    pipeline = _pipeline(settings, in_float=processor == "DINOv3ViT")
    normalisation = _normalisation(settings)
    return Preprocess(pipeline, *normalisation) if pipeline and normalisation else None


def to_transformers(preprocess: Preprocess | None) -> dict[str, Any] | None:
    """preprocessor_config.json, also where transformers rounds differently; None if it has no such processor."""
    codes = {name: code for code, name in _RESAMPLE.items()}
    steps = _steps(preprocess) if preprocess else []
    if preprocess is None or not steps or steps[0].method not in codes:
        return None
    settings: dict[str, Any] = {
        "do_resize": True,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(preprocess.mean),
        "image_std": list(preprocess.std),
        "resample": codes[steps[0].method],
    }
    size, last = ({"height": step.size[0], "width": step.size[1]} for step in (steps[0], steps[-1]))
    crop = {"do_center_crop": True, "crop_size": last}
    match [step.name for step in steps]:
        case ["resize"]:
            processor, sides = "ViT", {"size": size}
        case ["resize", "center_crop"]:
            processor, sides = "DeiT", {"size": size, **crop}
        case ["resize_short", "center_crop"]:
            processor, sides = "Bit", {"size": {"shortest_edge": size["height"]}, **crop}
        case _:
            return None
    if "float_" in preprocess.pipeline:
        processor = "DINOv3ViT"
    return {**settings, **sides, "image_processor_type": f"{processor}ImageProcessor"}


def _sides(size: Size) -> str:
    return f"{size[0]}" if size[0] == size[1] else f"{size[0]}, {size[1]}"


def _percent(size: int, before: int) -> float:
    """timm takes floor(size / percent): the quotient, or the float before where rounding would lose a pixel."""
    percent = size / before
    return percent if math.floor(size / percent) == before else math.nextafter(percent, 0)


def _steps(preprocess: Preprocess) -> list[PipelineStep]:
    """The steps after decode, in torchvision's words whoever's rounding they state, with both sides."""
    return [
        PipelineStep(
            _THEIR_STEPS.get(step.name, step.name),
            step.size if step.sides else (),
            step.numbers,
            _METHOD_ORIGIN.sub("", step.method),
        )
        for step in parse_pipeline(preprocess.pipeline).steps[1:]
    ]


def _processor(preprocessor: Mapping[str, Any], model_type: str) -> str:
    """The name of the image processor without its suffix; older files call it a feature extractor."""
    class_name = str(preprocessor.get("image_processor_type") or preprocessor.get("feature_extractor_type") or "")
    return re.split("ImageProcessor|FeatureExtractor", class_name)[0] or _PROCESSOR_OF_MODEL.get(model_type, "")


def _pipeline(settings: Mapping[str, Any], *, in_float: bool) -> str | None:
    """The resize and the crop; with `in_float` rescaling comes first, and then bicubic would leave the range."""
    method, cropped = _RESAMPLE.get(settings["resample"]), settings.get("do_center_crop")
    size, crop = settings["size"], _height_width(settings.get("crop_size"))
    if isinstance(size, int) and not settings.get("default_to_square", True):
        size = {"shortest_edge": size}
    short = size.get("shortest_edge") if isinstance(size, dict) and not size.get("longest_edge") else None
    resized = (short, short) if short else _height_width(size)
    # A short side without a crop does not fix the other side, and a crop that is larger is padded.
    if method is None or (in_float and method != "bilinear") or not resized or (short and not cropped):
        return None
    if cropped and (not crop or crop[0] > resized[0] or crop[1] > resized[1]):
        return None
    method = f"float_{method}" if in_float else method
    resize = f"resize_short({short}, {method})" if short else f"resize({_sides(resized)}, {method})"
    return f"decode|{resize}" + (f"|central_crop({_sides(crop)})" if cropped and crop else "")


def _height_width(size: Any) -> Size | None:
    """Both sides, which may be one number; None if they are not stated."""
    match size:
        case {"height": int(height), "width": int(width)} | [int(height), int(width)]:
            pass
        case int(height):
            width = height
        case _:
            return None
    return (height, width) if min(height, width) > 0 else None


def _normalisation(settings: Mapping[str, Any]) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Mean and std for (pixel / 255 - mean) / std, from (pixel * rescale_factor - image_mean) / image_std."""
    mean, std = settings["image_mean"], settings["image_std"]
    if not settings.get("do_normalize", True):
        mean, std = [0.0] * 3, [1.0] * 3
    scale = 255 * (settings.get("rescale_factor", 1 / 255) or 0)
    if not isinstance(mean, list | tuple) or not isinstance(std, list | tuple) or scale <= 0 or min(std) <= 0:
        return None
    scale = 1.0 if math.isclose(scale, 1, rel_tol=1e-6) else scale
    return tuple(value / scale for value in mean), tuple(value / scale for value in std)


@cache
def releases() -> dict[str, dict[str, Any]]:
    """timm's pretrained_cfg, as far as it states the preprocessing, by "architecture.tag", and by "architecture" that
    of timm's default release."""
    table = json.loads(files("vitral.checkpoints").joinpath("timm_preprocess.json").read_text(encoding="utf-8"))
    return {name: group for group in table for name in group["models"]}


def named_preprocess(name: str, image: Size) -> Preprocess | None:
    """How the authors of a released model prepare images for it, by its name or that of its file.

    None if that is not known, or could be one of several releases whose pixels are normalised differently.
    """
    if factory_named(name) is not None:
        return from_timm(release_named(name) or {}, image)
    for beginning, steps, normalisation in _RELEASES:
        if re.match(beginning, name.rpartition("/")[2]):
            pipeline = steps.replace("{larger}", str(round(image[0] * 8 / 7))).replace("{size}", str(image[0]))
            return Preprocess(f"decode|{pipeline}", *normalisation)
    return None


def release_named(name: str) -> dict[str, Any] | None:
    """The preprocessing of the release that a name means, as timm's pretrained_cfg states it.

    Without a tag it is timm's default release. What follows the name of an architecture may also be a part of a tag
    (vit_base_patch16_224_dino) or anything else (deit_tiny_patch16_224-a1311bcf), if all releases that it may be share
    mean and std.
    """
    factory, rest = split_name(name)
    if factory is None:
        return None
    table = releases()
    exact = f"{factory.name}.{rest}" if rest else factory.name
    if exact in table:
        return table[exact]
    own = [release for release in table if release.startswith(f"{factory.name}.")]
    similar = [release for release in own if rest in release.partition(".")[2].split("_")] or own
    normalisations = {(*table[release]["mean"], *table[release]["std"]) for release in similar}
    if len(normalisations) > 1:
        return None
    return table[similar[0]] if similar != own else table[factory.name]
