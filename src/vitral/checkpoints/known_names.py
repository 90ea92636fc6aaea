"""What the name of a released model states that its tensors do not."""

from __future__ import annotations

from typing import Any

from vitral.checkpoints.formats.timm_arguments import fields_of, missing_parts, mlp_width
from vitral.checkpoints.timm_table import factory_named


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
