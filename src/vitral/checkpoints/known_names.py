"""What the name of a released model states that its tensors do not."""

from __future__ import annotations

from typing import Any


def named_architecture(name: str) -> dict[str, Any] | None:
    """Fields of the architecture that a released model of this name has.

    Args:
        name: a file's or model's name without its suffix, such as vit_base_patch16_224.augreg_in21k.

    Returns:
        Fields of `ViTConfig`: heads, gelu, pool and norm_eps; also depth, width, mlp and patch, against which the
        shapes are checked. None where the name is not known.
    """
    return None
