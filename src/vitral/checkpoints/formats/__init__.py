"""The checkpoint formats that vitral reads and writes, one table each, and what files in none of them are."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

from vitral.checkpoints.formats.clip import HUGGING_FACE_CLIP, HUGGING_FACE_SIGLIP, HUGGING_FACE_SIGLIP2, OPEN_CLIP
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
from vitral.checkpoints.formats.resnets import BIT, HUGGING_FACE_BIT, TIMM_BIT, TIMM_HYBRID
from vitral.checkpoints.formats.table import Format
from vitral.checkpoints.formats.timm import TIMM, TORCHVISION
from vitral.checkpoints.formats.variants import HUGGING_FACE_DEIT, NAFLEX, TIMM_DEIT
from vitral.errors import UserError
from vitral.names import VIT_SIZES

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
        near = difflib.get_close_matches(name.lower(), (*FORMATS, *_ALIASES), n=1, cutoff=0.4)
        hint = f"write {_ALIASES.get(near[0], near[0])}, or see" if near else "see"
        raise UserError(f'unknown format "{name}": {hint} `vitral list formats`.')
    return FORMATS[name]


# ------------------------------------------------------------------------------------------ files in none of these


_USE_TIMM = "use timm for it"
_USE_TRANSFORMERS = "use transformers for it"
_MERGE_LORA = "merge them into the model (peft: merge_and_unload) and save its state dict"

# What a kind of file is and what to do, and patterns of keys that it has, each after any prefix. The first that fits is
# named: adapters and parts of models come before the models they belong to.
_FAMILIES = (
    (f"a model with LoRA adapters that are not merged: {_MERGE_LORA}", (r"lora_(A|down)\b", r"base_layer\.weight$")),
    (f"LoRA adapters without their model: {_MERGE_LORA}", (r"lora_(A|down)\b",)),
    (
        "a Segment Anything model (SAM), whose image encoder has windows and relative positions: use segment_anything",
        (r"(mask_decoder|image_encoder\.blocks\.0\.attn\.rel_pos_h|vision_encoder\.layers\.0\.attn\.rel_pos_h)",),
    ),
    (
        f"a DETR detector, not an image classifier: {_USE_TRANSFORMERS}",
        (r"(query_embed\.weight|query_position_embeddings\.weight)$", r"decoder\.layers\.0\."),
    ),
    (
        "a diffusion model, not an image classifier: use diffusers for it",
        (r"(down_blocks\.0\.|diffusion_model\.|input_blocks\.0\.|blocks\.0\.adaLN_modulation\.)",),
    ),
    (
        "{size} of DINOv3, which has rotary positions: {use}",
        (r"(storage_tokens|rope_embed\.periods)$",),
    ),
    (
        "{size} of DINOv3 in the names of transformers, which has rotary positions: {use}",
        (r"embeddings\.register_tokens$", r"layer\.0\.attention\.q_proj\.weight$", r"layer\.0\.layer_scale1\.lambda1$"),
    ),
    (
        f"a Swin Transformer, whose attention has windows: {_USE_TIMM}",
        (r"(layers\.\d\.blocks|features\.\d)\.\d+\.(attn|attention)\..*relative_position_bias_table$",),
    ),
    (
        "{size} of BEiT, which has relative positions in every block: {use}",
        (r"(blocks|layers?)\.0\..*relative_position_bias_table$",),
    ),
    ("{size} of EVA, which has rotary positions or gated MLPs: {use}", (r"blocks\.0\.attn\.(q_bias|q_proj\.)",)),
    ("{size} of EVA, which has rotary positions or gated MLPs: {use}", (r"blocks\.0\.attn\.qkv\.", r"gamma_1$")),
    (
        f"a ConvNeXt, a convolutional network: {_USE_TIMM}",
        (r"(stages\.0\.(blocks|layers)\.0\.(conv_dw|dwconv)|stages\.0\.0\.dwconv|features\.1\.0\.layer_scale)",),
    ),
    (f"an MLP-Mixer, which has no attention: {_USE_TIMM}", (r"(blocks\.0\.mlp_tokens\.|MixerBlock_0/)",)),
    (
        f"a ResNet with BatchNorm; only BiT's, with GroupNorm, are supported: {_USE_TIMM}",
        (r"layer1\.0\.conv1\.weight$", r"layer4\.0\.conv1\.weight$"),
    ),
    (f"an EfficientNet or MobileNet, a convolutional network: {_USE_TIMM}", (r"conv_stem\.weight$",)),
    (
        "a CLIP model in a format whose vision tower is not supported: use open_clip or transformers for it",
        (r"(visual\.transformer\.resblocks\.0\.|vision_model\.encoder\.layers\.0\.)",),
    ),
    (
        "the text tower of a CLIP model, without its vision tower: use the whole model",
        (r"(encoder\.layers\.0\.self_attn\.|transformer\.resblocks\.0\.)", r"token_embedding\.weight$"),
    ),
    (
        f"a language model, not a vision model: {_USE_TRANSFORMERS}",
        (r"(embed_tokens|wte|word_embeddings|tok_embeddings|token_embedding|shared)\.weight$",),
    ),
)
_OPTIMIZER = re.compile(r"(?:^|\.)(?:exp_avg|exp_avg_sq|max_exp_avg_sq|momentum_buffer|square_avg|step)$")


def family_of(shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """What a file that no format recognises is, by its shapes, and what to do; None if that is not known either."""
    if all(map(_OPTIMIZER.search, shapes)):
        return "the state of an optimizer without the weights: choose the file of the model"
    lines = "\n".join(shapes)
    for sentence, patterns in _FAMILIES:
        if all(re.search(rf"(?m)(?:^|[./]){pattern}", lines) for pattern in patterns):
            return sentence.format(size=_size(shapes), use=_USE_TIMM)
    return None


def _size(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """ "a ViT-S/16" by its patch embedding and its layers, "a ViT" of another size."""
    embedding = next((shape for key, shape in shapes.items() if "patch_embed" in key and len(shape) == 4), None)
    layers = {int(match[1]) for key in shapes if (match := re.search(r"(?:blocks|layers?)\.(\d+)\.", key))}
    sizes = {(size.depth, size.width): name for name, size in reversed(VIT_SIZES.items())}
    name = sizes.get((len(layers), embedding[0])) if embedding else None
    return f"a ViT-{name}/{embedding[-1]}" if name and embedding else "a ViT"
