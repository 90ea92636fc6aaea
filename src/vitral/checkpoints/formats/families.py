"""What files are that no format reads: by the names of their tensors, and by config.json beside them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from vitral.names import VIT_SIZES

Shapes = Mapping[str, tuple[int, ...]]
_Table = tuple[tuple[str, tuple[str, ...]], ...]

_USE_TIMM = "use timm for it"
_USE_TRANSFORMERS = "use transformers for it"
_USE_EITHER = "use timm or transformers for it"
_MERGE = "merge them into the model (peft: merge_and_unload) and save its state dict"
_ADAPTER = (
    r"(lora_(A|down|embedding_A|magnitude_vector)|ia3_l|hada_w1_a|lokr_w\d|vera_lambda_b|b?oft_R|fourierft_spectrum"
    r"|ln_tuning_layers)\b"
)

# What a kind of file is and what to do, and patterns of keys that it has, each after any prefix. The first that fits is
# named. These have parts that no format has, but resemble one: they are refused before their format is looked for.
_FOREIGN: _Table = (
    (f"a model with adapters (such as LoRA) that are not merged: {_MERGE}", (_ADAPTER, r"(base_layer\.|cls_token$)")),
    (f"LoRA adapters without their model: {_MERGE}", (r"lora_(A|down)\b",)),
    (f"adapters of PEFT without their model: {_MERGE}", (_ADAPTER,)),
    (
        "a model with parametrized weights (as of weight_norm or pruning): make them plain with torch's "
        "remove_parametrizations or prune.remove and save its state dict",
        (r"(blocks|layers?|resblocks)\.\d+\.[\w.]+\.(weight_orig|weight_g|parametrizations\.weight\.original\d?)$",),
    ),
    ("torchvision's ViT with a convolutional stem: use torchvision for it", (r"conv_proj\.conv_bn_relu_0\.",)),
    (
        "a Segment Anything model (SAM 2), whose image encoder is a Hiera with windows: use sam2 for it",
        (r"(sam_mask_decoder\.|image_encoder\.trunk\.blocks\.0\.|vision_encoder\.backbone\.blocks\.0\.)",),
    ),
    (
        "a Segment Anything model (SAM), whose image encoder has windows and relative positions: use segment_anything",
        (r"(mask_decoder\.|image_encoder\.blocks\.0\.attn\.rel_pos_h|vision_encoder\.layers\.0\.attn\.rel_pos_h)",),
    ),
    (
        f"an image encoder with windows or pooling and relative positions, as of SAM, ViTDet or MViT: {_USE_EITHER}",
        (r"rel_pos_h$",),
    ),
    (
        f"a Hiera, whose blocks have several widths: {_USE_TIMM}",
        (r"(blocks\.\d+\.proj\.weight|stages\.\d\.layers\.\d+\.proj\.weight)$", r"attn\.qkv\.weight$"),
    ),
    (f"a Hiera, whose blocks have several widths: {_USE_TIMM}", (r"hiera\.",)),
    (
        f"a FLAVA, which has an image, a text and a multimodal model: {_USE_TRANSFORMERS}",
        (r"multimodal_model\.encoder\.layer\.0\.",),
    ),
    (f"a CvT, whose queries and keys are convolutions: {_USE_TRANSFORMERS}", (r"convolution_projection_query\.",)),
    ("an RF-DETR detector, whose DINOv2 has windows: use rfdetr for it", (r"refpoint_embed\.weight$",)),
    (f"a CaiT, whose class token has blocks of its own: {_USE_TIMM}", (r"blocks_token_only\.0\.",)),
    (
        f"a ViT of timm (vit_relpos) with relative positions computed by an MLP: {_USE_TIMM}",
        (r"rel_pos\.mlp\.", r"patch_embed\.proj\.weight$"),
    ),
    (f"a ViT of timm with parallel blocks: {_USE_TIMM}", (r"blocks\.0\.(attns\.0|in_proj)\.", r"patch_embed\.proj\.")),
)
# Files that no format recognises.
_FAMILIES: _Table = (
    (
        "a model of vit-pytorch, which normalises the pixels of a patch and has other names: use vit_pytorch for it",
        (r"to_patch_embedding\.",),
    ),
    (
        "a ViT of mmpretrain, whose names are not supported: use mmpretrain for it",
        (r"layers\.0\.ffn\.layers\.0\.0\.weight$", r"patch_embed\.projection\.weight$"),
    ),
    (
        "a ViT of pytorch_pretrained_vit, whose names are not supported: load the npz that it was converted from",
        (r"blocks\.0\.attn\.proj_q\.weight$", r"blocks\.0\.pwff\.fc1\.weight$"),
    ),
    (
        "a RADIO in the names of NVIDIA: load it with timm (such as vit_base_patch16_radio_v3) and save it from there",
        (r"(radio_model\.|patch_generator\.embedder\.weight)",),
    ),
    (
        f"an AIMv2, which has RMSNorm: {_USE_TRANSFORMERS}",
        (r"(rms_norm1\.weight|preprocessor\.patchifier\.proj\.weight)$",),
    ),
    (
        f"a BLIP model, whose vision tower is not supported: {_USE_TRANSFORMERS}",
        (r"encoder\.layers\.0\.self_attn\.qkv\.weight$", r"embeddings\.(class_embedding|patch_embedding\.)"),
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
        f"a Swin Transformer V2, whose attention has windows: {_USE_TIMM}",
        (r"(attn|self|attention)\.(cpb_mlp|continuous_position_bias_mlp)\.",),
    ),
    (
        f"a ConvNeXt or a network with blocks like its: {_USE_TIMM}",
        (
            r"(stages\.0\.(blocks|layers)\.0\.(conv_dw|dwconv|depthwise_conv)|stages\.0\.0\.dwconv"
            r"|features\.1\.0\.layer_scale)",
        ),
    ),
    (
        f"a network of several stages, not a plain Vision Transformer: {_USE_TIMM}",
        (r"(stages|levels)\.[1-3]\.",),
    ),
    (
        "{size} of BEiT, which has relative positions in every block: {use}",
        (r"(blocks|layers?)\.0\..*relative_position_bias_table$",),
    ),
    ("{size} of EVA, which has rotary positions or gated MLPs: {use}", (r"blocks\.0\.attn\.(q_bias|q_proj\.)",)),
    ("{size} of EVA, which has rotary positions or gated MLPs: {use}", (r"blocks\.0\.attn\.qkv\.", r"gamma_1$")),
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
    (f"a network with BatchNorm, not a plain Vision Transformer: {_USE_TIMM}", (r"running_mean$",)),
)
_FRAMES = f"a model whose patches span several frames, of videos or as Qwen-VL's: {_USE_TRANSFORMERS}"
_LIBRARY = re.compile(f"{_USE_TIMM}|{_USE_TRANSFORMERS}|{_USE_EITHER}")
_OPTIMIZER = re.compile(r"(?:^|\.)(?:exp_avg|exp_avg_sq|max_exp_avg_sq|momentum_buffer|square_avg|step)$")


def foreign_family(shapes: Shapes, config: Mapping[str, Any] | None = None) -> str | None:
    """What a file is, and what to do, if it has parts that no format has; None if it has none of the known ones.

    A config.json of timm or transformers decides which of the two is named.
    """
    frames = any("patch_embed" in key and len(shape) == 5 for key, shape in shapes.items())
    sentence = _FRAMES if frames else _first(_FOREIGN, shapes)
    if sentence is None or config is None:
        return sentence
    use = _USE_TRANSFORMERS if "model_type" in config else _USE_TIMM if "architecture" in config else None
    return _LIBRARY.sub(use, sentence) if use else sentence


def family_of(shapes: Shapes) -> str | None:
    """What a file that no format recognises is, by its shapes, and what to do; None if that is not known either."""
    if all(map(_OPTIMIZER.search, shapes)):
        return "the state of an optimizer without the weights: choose the file of the model"
    return foreign_family(shapes) or _first(_FAMILIES, shapes)


def stated_family(config: Mapping[str, Any]) -> str | None:
    """What a file that no format recognises is by its config.json, of transformers or timm."""
    classes = config.get("architectures")
    if isinstance(kind := config.get("model_type"), str):
        name = classes[0] if isinstance(classes, list) and classes else kind
        return f'a "{name}" of transformers, which is not supported: {_USE_TRANSFORMERS}'
    if isinstance(name := config.get("architecture"), str):
        return f"timm's {name}, which is not supported: {_USE_TIMM}"
    return None


def _first(table: _Table, shapes: Shapes) -> str | None:
    lines = "\n".join(shapes)
    for sentence, patterns in table:
        if all(re.search(rf"(?m)(?:^|[./]){pattern}", lines) for pattern in patterns):
            return sentence.format(size=_size(shapes), use=_USE_TIMM)
    return None


def _size(shapes: Shapes) -> str:
    """ "a ViT-S/16" by its patch embedding and its layers, "a ViT" of another size."""
    embedding = next((shape for key, shape in shapes.items() if "patch_embed" in key and len(shape) == 4), None)
    layers = {int(match[1]) for key in shapes if (match := re.search(r"(?:blocks|layers?)\.(\d+)\.", key))}
    sizes = {(size.depth, size.width): name for name, size in reversed(VIT_SIZES.items())}
    name = sizes.get((len(layers), embedding[0])) if embedding else None
    return f"a ViT-{name}/{embedding[-1]}" if name and embedding else "a ViT"
