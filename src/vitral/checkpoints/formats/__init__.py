"""The checkpoint formats that vitral reads and writes, one table each."""

from __future__ import annotations

import difflib
from typing import Any

from vitral.checkpoints.formats.clip import HUGGING_FACE_CLIP, HUGGING_FACE_SIGLIP, HUGGING_FACE_SIGLIP2
from vitral.checkpoints.formats.dino import DINO, DINOV3, HUGGING_FACE_DINO, HUGGING_FACE_DINOV3
from vitral.checkpoints.formats.google import BIG_VISION, BIG_VISION_SCAN, GOOGLE, GOOGLE_LINEN
from vitral.checkpoints.formats.hugging_face import (
    HUGGING_FACE,
    HUGGING_FACE_BEIT,
    HUGGING_FACE_DATA2VEC,
    HUGGING_FACE_IJEPA,
    HUGGING_FACE_MAE,
    HUGGING_FACE_MSN,
)
from vitral.checkpoints.formats.native import NATIVE
from vitral.checkpoints.formats.open_clip import OPEN_CLIP
from vitral.checkpoints.formats.resnets import BIT, HUGGING_FACE_BIT, TIMM_BIT, TIMM_HYBRID
from vitral.checkpoints.formats.table import Format
from vitral.checkpoints.formats.timm import TIMM, TORCHVISION
from vitral.checkpoints.formats.variants import HUGGING_FACE_DEIT, NAFLEX, TIMM_DEIT
from vitral.errors import UserError

# In the order of recognition: a wrapped timm file resembles DINO's, a Linen file big_vision's.
FORMATS: dict[str, Format[Any]] = {
    table.name: table
    for table in (
        *(NATIVE, GOOGLE, GOOGLE_LINEN, BIG_VISION, BIG_VISION_SCAN, BIT),
        # Before the plain ViTs, which they resemble.
        *(TIMM_HYBRID, TIMM_BIT, TIMM_DEIT, NAFLEX, HUGGING_FACE_DEIT, HUGGING_FACE_BIT),
        TIMM,
        *(HUGGING_FACE, HUGGING_FACE_MSN, HUGGING_FACE_IJEPA, HUGGING_FACE_MAE),
        *(HUGGING_FACE_DINO, HUGGING_FACE_DINOV3, HUGGING_FACE_CLIP, HUGGING_FACE_SIGLIP, HUGGING_FACE_SIGLIP2),
        *(HUGGING_FACE_BEIT, HUGGING_FACE_DATA2VEC),
        *(TORCHVISION, OPEN_CLIP, DINOV3, DINO),
    )
}

_ALIASES = {"huggingface": "hf", "transformers": "hf"}


def format_named(name: str) -> Format[Any]:
    """The format of this name; UserError with a suggestion if there is none."""
    if name not in FORMATS:
        near = difflib.get_close_matches(name.lower(), (*FORMATS, *_ALIASES), n=1, cutoff=0.6)
        hint = f"write {_ALIASES.get(near[0], near[0])}, or see" if near else "see"
        raise UserError(f'unknown format "{name}": {hint} `vitral list formats`.')
    return FORMATS[name]
