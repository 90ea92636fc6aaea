"""Model names as the paper prints them, to architectures and back. No torch here.

ViT-B/16   B/16@384   ViT-b/32   R50+ViT-B/16   R26+ViT-S/32   R152x4   Axial-ViT-B/32   AxialResNet50
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any, NamedTuple

from vitral.architecture import (
    Architecture,
    ModelConfig,
    ModuleConfig,
    ResNetConfig,
    Size,
    StemConfig,
    ViTConfig,
    as_size,
)
from vitral.errors import UserError


class ViTSize(NamedTuple):
    """Dimensions of a ViT: a row of Table 1, or of its later extensions."""

    depth: int
    width: int
    mlp: int
    heads: int


VIT_SIZES = {
    "Ti": ViTSize(12, 192, 768, 3),
    "S": ViTSize(12, 384, 1536, 6),
    "M": ViTSize(12, 512, 2048, 8),
    # Section 4.3: "all hidden dimensions halved". It does not say how many heads; half of them keeps 64 per head.
    "b": ViTSize(12, 384, 1536, 6),
    "B": ViTSize(12, 768, 3072, 12),
    "L": ViTSize(24, 1024, 4096, 16),
    "So400m": ViTSize(27, 1152, 4304, 16),
    "H": ViTSize(32, 1280, 5120, 16),
    "g": ViTSize(40, 1408, 6144, 16),
    "g-opt": ViTSize(40, 1536, 6144, 16),
    "G": ViTSize(48, 1664, 8192, 16),
    "G-opt": ViTSize(48, 1536, 8192, 16),
    "e": ViTSize(56, 1792, 15360, 16),
}

RESNET_BLOCKS = {
    26: (2, 2, 2, 2),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
    200: (3, 24, 36, 3),
}

# What `vitral list models` prints: the paper's models and other common sizes.
NAMES = (
    *("ViT-Ti/16", "ViT-S/32", "ViT-S/16", "ViT-b/32", "ViT-B/32", "ViT-B/16", "ViT-B/8"),
    *("ViT-L/32", "ViT-L/16", "ViT-H/14", "ViT-g/14", "ViT-G/14"),
    *("R+ViT-Ti/16", "R26+ViT-S/32", "R26+ViT-B/32"),
    *("R50+ViT-B/32", "R50+ViT-B/16", "R50+ViT-L/32", "R50+ViT-L/16"),
    *("R26x1", "R50x1", "R50x2", "R50x3", "R101x1", "R101x3", "R152x1", "R152x2", "R152x4", "R200x3"),
    *("Axial-ViT-B/32", "Axial-ViT-B/16", "AxialResNet50"),
)

_VIT = re.compile(
    r"(?P<axial>Axial-)?(?:R(?P<depth>\d*)(?:x(?P<wide>\d+))?\+)?(?:ViT-)?(?P<size>[A-Za-z][\w-]*?)[/_](?P<patch>\d+)"
)
_RESNET = re.compile(r"(?P<axial>Axial)?(?:ResNet|R)(?P<depth>\d+)(?:x(?P<wide>\d+))?")
_IMAGE = re.compile(r"(\d+)(?:x(\d+))?")
# The fields that arguments of timm.create_model mean.
_TIMM_ARGUMENTS = {
    **{"num_classes": "classes", "img_size": "image", "in_chans": "channels", "patch_size": "patch"},
    **{"embed_dim": "width", "num_heads": "heads", "global_pool": "pool", "act_layer": "gelu"},
    **{"drop_rate": "dropout", "attn_drop_rate": "attention_dropout", "drop_path_rate": "stochastic_depth"},
}
_SIZE_WORDS = {"resnet": "r", "tiny": "ti", "small": "s", "base": "b", "large": "l", "huge": "h", "giant": "g"}


def parse(name: str, **changes: Any) -> ModelConfig:
    """The architecture of a model name such as "ViT-B/16" or "B/16@384", with fields such as `classes` replaced.

    Raises UserError for an unknown name, with the nearest known ones.
    """
    if not isinstance(name, str):
        raise UserError(f"{type(name).__name__} is not the name of a model: write one such as ViT-B/16.")
    body, at, image = name.strip().partition("@")
    architecture = _vit(body) or _resnet(body)
    if architecture is None:
        raise UserError(_unknown_message(name))
    if at:
        changes = {"image": _image(name, image), **changes}
    if "image" in changes:
        changes["image"] = as_size(changes["image"])
    _check_fields(architecture, changes)
    return replace(architecture, **changes)


def _check_fields(architecture: ModelConfig, changes: Iterable[str]) -> None:
    """UserError for what is not a field of the architecture, with the field that is meant."""
    names = [field.name for field in fields(architecture)]
    for name in changes:
        if name == "pretrained":
            raise UserError("`create` builds fresh weights and has no pretrained=: read weights with vitral.load.")
        if name not in names:
            close = [_TIMM_ARGUMENTS.get(name, ""), *difflib.get_close_matches(name, names, 1)]
            meant = next((field for field in close if field in names), "")
            fix = f"did you mean {meant}?" if meant else f"use one of {', '.join(names)}."
            raise UserError(f'{type(architecture).__name__} has no field "{name}": {fix}')


def name_of(architecture: Architecture) -> str:
    """The shortest name of an architecture; dimensions without a name are spelled out."""
    if isinstance(architecture, ModuleConfig):
        return architecture.name
    height, width = architecture.image
    at = "" if (height, width) == (224, 224) else f"@{height}" if height == width else f"@{height}x{width}"
    if isinstance(architecture, ResNetConfig):
        depths = {blocks: depth for depth, blocks in RESNET_BLOCKS.items()}
        depth = depths.get(architecture.blocks)
        label = str(depth) if depth else "(" + ",".join(map(str, architecture.blocks)) + ")"
        wide = "" if architecture.axial and architecture.width == 1 else f"x{architecture.width}"
        return f"{'AxialResNet' if architecture.axial else 'R'}{label}{wide}{at}"
    return f"{'Axial-' if architecture.axial else ''}{_stem_label(architecture)}{_size_label(architecture)}{at}"


def size_of(depth: int, width: int) -> ViTSize | None:
    """The named size with this depth and width, if any."""
    return next((size for size in VIT_SIZES.values() if (size.depth, size.width) == (depth, width)), None)


def _vit(body: str) -> ViTConfig | None:
    match = _VIT.fullmatch(body)
    if not match or match["size"] not in VIT_SIZES:
        return None
    size, patch, axial = VIT_SIZES[match["size"]], int(match["patch"]), bool(match["axial"])
    stem = None
    if match["depth"] is not None:
        stem, patch = _stem(body, match["depth"], int(match["wide"] or 1), patch)
    if patch < 1:
        raise UserError(f"{body}: the patch size must be at least 1.")
    # Appendix D.6 does not define a class token within a row or a column: axial models average the patches instead.
    pool: dict[str, Any] = {"pool": "mean", "class_token": False} if axial else {}
    side = max(224, patch * (stem.stride if stem else 1))  # a patch may be larger than 224 pixels
    return ViTConfig(**size._asdict(), patch=patch, image=(side, side), stem=stem, axial=axial, **pool)


def _stem(body: str, depth: str, width: int, stride: int) -> tuple[StemConfig, int]:
    """The ResNet and the patch size on its feature map, from the total stride in the name (section 3.1)."""
    if width < 1:
        raise UserError(f"{body}: the ResNet's width, after the x, must be at least 1.")
    if not depth:
        # The released config counts 2x downsampling for the root; its code max-pools as well (4x), as does ours.
        if stride % 2:
            raise UserError(f"{body}: a hybrid on the root alone needs an even number after the slash.")
        return StemConfig(blocks=(), width=width), stride // 2
    if int(depth) not in RESNET_BLOCKS:
        raise UserError(
            f"{body}: R{depth} is not a known ResNet; use one of {', '.join(f'R{d}' for d in RESNET_BLOCKS)}."
        )
    first, second, third, fourth = RESNET_BLOCKS[int(depth)]
    if stride == 16:  # variant (ii): stage 4 is removed and its bottlenecks go to stage 3
        return StemConfig(blocks=(first, second, third + fourth), width=width), 1
    if stride % 32 or not stride:
        raise UserError(f"{body}: a hybrid divides the image by 16, 32 or a multiple of 32, not by {stride}.")
    return StemConfig(blocks=(first, second, third, fourth), width=width), stride // 32


def _resnet(body: str) -> ResNetConfig | None:
    match = _RESNET.fullmatch(body)
    if not match or int(match["depth"]) not in RESNET_BLOCKS or not int(match["wide"] or 1):
        return None
    return ResNetConfig(
        blocks=RESNET_BLOCKS[int(match["depth"])], width=int(match["wide"] or 1), axial=bool(match["axial"])
    )


def _image(name: str, text: str) -> Size:
    match = _IMAGE.fullmatch(text)
    if not match:
        raise UserError(f'{name}: after "@" write an image size such as 384 or 384x512.')
    return int(match[1]), int(match[2] or match[1])


def _size_label(architecture: ViTConfig) -> str:
    size = ViTSize(architecture.depth, architecture.width, architecture.mlp, architecture.heads)
    label = next((name for name, named in VIT_SIZES.items() if named == size), None)
    label = label or f"({size.depth} layers, width {size.width}, MLP {size.mlp}, {size.heads} heads)"
    # On the root alone, names count 2x downsampling for it (see `_stem`).
    root = architecture.stem is not None and not architecture.stem.blocks
    return f"ViT-{label}/{architecture.stride // (2 if root else 1)}"


def _stem_label(architecture: ViTConfig) -> str:
    stem = architecture.stem
    if stem is None:
        return ""
    wide = "" if stem.width == 1 else f"x{stem.width}"
    if not stem.blocks:
        return f"R{wide}+"
    for depth, (first, second, third, fourth) in RESNET_BLOCKS.items():
        # Three stages with larger patches would be parsed as a four-stage model of the same stride.
        three_stages = stem.blocks == (first, second, third + fourth) and architecture.patch == 1
        if stem.blocks == (first, second, third, fourth) or three_stages:
            return f"R{depth}{wide}+"
    return f"R({','.join(map(str, stem.blocks))}){wide}+"


def _unknown_message(name: str) -> str:
    body = name.partition("@")[0]
    nearest = sorted(NAMES, key=lambda candidate: _similarity(body, candidate), reverse=True)[:4]
    if _similarity(body, nearest[0])[0] < 0.5:
        nearest = ["ViT-B/16", "R50+ViT-B/16", "R50x1"]
    return f'unknown model "{name}": did you mean {", ".join(nearest)}? `vitral list models` lists all names.'


def _similarity(text: str, name: str) -> tuple[float, float]:
    """Similarity of letters and digits alone; then with case, which alone distinguishes B from b."""
    spellings = (name, name.removeprefix("ViT-"))
    return max((_ratio(_simplified(text), _simplified(spelling)), _ratio(text, spelling)) for spelling in spellings)


def _ratio(text: str, other: str) -> float:
    return difflib.SequenceMatcher(None, text, other, autojunk=False).ratio()


def _simplified(text: str) -> str:
    """ "R50+ViT-B/16" -> "r50vitb16"; sizes spelled as in timm and Hugging Face become the paper's letters."""
    text = re.sub(r"patch\W?(\d+).*", r"\1", text.lower())  # then follow the image size and the data set
    for word, letters in _SIZE_WORDS.items():
        text = text.replace(word, letters)
    return re.sub(r"[\W_]", "", text)
