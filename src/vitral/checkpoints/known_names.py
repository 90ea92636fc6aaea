"""What the name of a released model states that its tensors do not."""

from __future__ import annotations

import re
from typing import Any

from vitral.architecture import Size
from vitral.checkpoints.card import Preprocess
from vitral.checkpoints.formats.timm_arguments import fields_of, missing_parts, mlp_width
from vitral.checkpoints.processors import CLIP_MEAN, CLIP_STD, from_timm
from vitral.checkpoints.timm_table import factory_named, release_named
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


def timm_name(name: str) -> str | None:
    """The architecture of timm that a name means, the longest one that fits.

    Args:
        name: a model's or a file's name, such as vit_base_patch16_224.augreg_in21k_ft_in1k.safetensors.

    Returns:
        What `{"architecture": ...}` of timm's config.json would state, None where the name is not timm's.
    """
    factory = factory_named(name)
    return factory.name if factory else None


def named_architecture(name: str) -> dict[str, Any] | None:
    """Fields of the architecture that a released model of this name has.

    Args:
        name: a model's or a file's name, with or without its tag and suffix.

    Returns:
        Fields of `ViTConfig`: depth, width, mlp, heads and patch, against which shapes can be checked, and all that the
        shapes do not show, such as gelu, pool, norm_eps and rope. None where the name is not known, or the model has
        parts that vitral does not have.
    """
    factory = factory_named(name)
    if factory is None or missing_parts(factory.model, factory.arguments):
        return None
    arguments = factory.arguments
    return {
        "depth": arguments["depth"],
        "width": arguments["embed_dim"],
        "mlp": mlp_width(factory.model, arguments),
        "heads": arguments["num_heads"],
        "patch": arguments["patch_size"],
        **fields_of(factory.model, arguments),
    }


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
