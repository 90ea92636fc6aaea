"""How images are prepared for a released model, by its name.

timm_preprocess.json was generated from the installed timm (tests/helpers/timm_factories.py); a test compares them.
"""

from __future__ import annotations

import json
import re
from functools import cache
from importlib.resources import files
from typing import Any

from vitral.architecture import Size
from vitral.checkpoints.card import Preprocess
from vitral.checkpoints.formats.timm_arguments import factory_named, split_name
from vitral.checkpoints.processors import CLIP_MEAN, CLIP_STD, from_timm
from vitral.data.preprocess import IMAGENET_MEAN, IMAGENET_STD

_HALF = ((0.5,) * 3, (0.5,) * 3)
_IMAGENET = (IMAGENET_MEAN, IMAGENET_STD)
# Releases of others than timm, by the beginnings of their names: on the Hugging Face hub, of torchvision, of Meta's
# repositories. {size} is the model's image size, {larger} 8/7 of it.
_RELEASES = (
    (r"vit-(?:base|large|huge)-patch\d+-\d|beit-(?:base|large)-patch16", "resize({size}, bilinear)", _HALF),
    (r"siglip-(?:base|large|so400m)-patch", "resize({size}, bicubic)", _HALF),
    (r"deit-(?:tiny|small|base)-", "resize({larger}, bicubic)|central_crop({size})", _IMAGENET),
    (r"dinov2-(?:small|base|large|giant|with)", "resize_short(256, bicubic)|central_crop(224)", _IMAGENET),
    (r"clip-vit-", "resize_short({size}, bicubic)|central_crop({size})", (CLIP_MEAN, CLIP_STD)),
    (r"vit_l_16(?!\w)", "resize_short(242, pil_bilinear)|center_crop(224)", _IMAGENET),
    (r"vit_(?:b_16|b_32|l_32)(?!\w)", "resize_short(256, pil_bilinear)|center_crop(224)", _IMAGENET),
    (r"vit_[blh]_\d\d_(?:lc_)?swag", "resize_short({size}, pil_bicubic)|center_crop({size})", _IMAGENET),
    (
        r"dino_(?:deitsmall|vitbase)\d|dinov2_vit[sblg]14|mae_(?:pretrain|finetuned)_vit_",
        "resize_short(256, pil_bicubic)|center_crop(224)",
        _IMAGENET,
    ),
)


@cache
def releases() -> dict[str, dict[str, Any]]:
    """timm's pretrained_cfg, as far as it states the preprocessing, by "architecture.tag", and by "architecture" that
    of timm's default release."""
    table = json.loads(files("vitral.checkpoints").joinpath("timm_preprocess.json").read_text(encoding="utf-8"))
    return {name: group for group in table for name in group["models"]}


def named_preprocess(name: str, image: Size) -> Preprocess | None:
    """How the authors of a released model prepare images for it.

    Args:
        name: a model's or a file's name, such as vit_base_patch16_224.augreg_in21k_ft_in1k or deit-base-patch16-224.
        image: height and width that the model takes.

    Returns:
        None where the name is not known, or could be that of several releases whose pixels are normalised differently.
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

    Args:
        name: as that of `factory_named`. Without a tag it is timm's default release. What follows may also be a part of
            a tag (vit_base_patch16_224_dino) or anything else (deit_tiny_patch16_224-a1311bcf), if all releases that
            it may be share mean and std.
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
