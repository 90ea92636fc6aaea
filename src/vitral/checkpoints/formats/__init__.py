"""The checkpoint formats that vitral reads and writes, one table each."""

from __future__ import annotations

import difflib

from vitral.checkpoints.formats.big_vision import BIG_VISION
from vitral.checkpoints.formats.bit import BIT
from vitral.checkpoints.formats.deit import HUGGING_FACE_DEIT, TIMM_DEIT
from vitral.checkpoints.formats.dino import DINO
from vitral.checkpoints.formats.dinov3 import DINOV3
from vitral.checkpoints.formats.google import GOOGLE, GOOGLE_LINEN
from vitral.checkpoints.formats.hf_beit import HUGGING_FACE_BEIT, HUGGING_FACE_DATA2VEC
from vitral.checkpoints.formats.hf_clip import HUGGING_FACE_CLIP, HUGGING_FACE_SIGLIP, HUGGING_FACE_SIGLIP2
from vitral.checkpoints.formats.hf_dino import HUGGING_FACE_DINO, HUGGING_FACE_DINOV3
from vitral.checkpoints.formats.hugging_face import (
    HUGGING_FACE,
    HUGGING_FACE_IJEPA,
    HUGGING_FACE_MAE,
    HUGGING_FACE_MSN,
)
from vitral.checkpoints.formats.naflex import NAFLEX
from vitral.checkpoints.formats.native import NATIVE
from vitral.checkpoints.formats.open_clip import OPEN_CLIP
from vitral.checkpoints.formats.table import Format
from vitral.checkpoints.formats.timm import TIMM
from vitral.checkpoints.formats.timm_bit import HUGGING_FACE_BIT, TIMM_BIT
from vitral.checkpoints.formats.timm_hybrid import TIMM_HYBRID
from vitral.checkpoints.formats.torchvision import TORCHVISION
from vitral.errors import UserError

# In the order of recognition: a wrapped timm file resembles DINO's, a Linen file big_vision's.
FORMATS: dict[str, Format] = {
    table.name: table
    for table in (
        *(NATIVE, GOOGLE, GOOGLE_LINEN, BIG_VISION, BIT),
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


def format_named(name: str) -> Format:
    """The format of this name; UserError with a suggestion if there is none."""
    if name not in FORMATS:
        near = difflib.get_close_matches(name.lower(), (*FORMATS, *_ALIASES), n=1, cutoff=0.4)
        hint = f"did you mean {_ALIASES.get(near[0], near[0])}?" if near else "`vitral list formats` lists them."
        raise UserError(f'unknown format "{name}": {hint}')
    return FORMATS[name]
