"""Small models of every class of transformers that vitral reads: how to build one, and what its output is.

The tests of the Hugging Face formats and the sweep over checkpoints share them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from oracles import outside, quiet, randomised
from torch import Tensor

SIZES = {
    **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48},
    **{"image_size": 32, "patch_size": 8},
}
TEXT = {
    **{"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16},
    **{"vocab_size": 20, "max_position_embeddings": 8, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2},
}
DECODER = {
    **{"decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2},
    **{"decoder_intermediate_size": 16},
}


@dataclass(frozen=True)
class HfCase:
    """A class of transformers with settings, and the output that vitral's model must have."""

    model: str
    format: str
    output: Callable[[Any, Tensor], Tensor]
    settings: dict[str, Any] = field(default_factory=dict)
    vision: dict[str, Any] | None = None  # of two towers, the settings of the image tower
    skipped: str = ""  # words about what is not read, in `Card.changes`
    written: str = ""  # the class of the folder that vitral writes; empty: the same

    def build(self, seed: int = 0) -> Any:
        """A model with random weights, in evaluation mode."""
        library = outside("transformers")
        kind = getattr(library, self.model).config_class
        settings: dict[str, Any] = {"num_labels": 5, **self.settings}
        if self.vision is None:
            settings = {**SIZES, **settings}
        else:
            settings |= {"vision_config": {**SIZES, **self.vision}, "text_config": TEXT}
        if "image_size" in settings and settings["image_size"] is None:
            del settings["image_size"]
        torch.manual_seed(seed)
        with quiet():
            return randomised(getattr(library, self.model)(kind(**settings)), seed)

    def save(self, model: Any, folder: Path) -> Path:
        """A folder by transformers' own writer."""
        with quiet():
            model.save_pretrained(folder)
        return folder

    def forward(self, model: Any, images: Tensor) -> Tensor:
        """(batch, 3, 32, 32) -> the logits, embedding or features of transformers"""
        with torch.no_grad(), quiet():
            return self.output(model, images)


def logits(model: Any, images: Tensor) -> Tensor:
    return model(images).logits


def pooled(model: Any, images: Tensor) -> Tensor:
    return model(images).pooler_output


def token(model: Any, images: Tensor) -> Tensor:
    return model(images).last_hidden_state[:, 0]


def mean(model: Any, images: Tensor) -> Tensor:
    return model(images).last_hidden_state.mean(dim=1)


def mean_of_patches(model: Any, images: Tensor) -> Tensor:
    return model(images).last_hidden_state[:, 1:].mean(dim=1)


def projected(model: Any, images: Tensor) -> Tensor:
    return model(images).image_embeds


def features_of_two_towers(model: Any, images: Tensor) -> Tensor:
    return model.get_image_features(pixel_values=images).pooler_output


def unmasked(model: Any, images: Tensor) -> Tensor:
    """The class token of MAE's encoder, which then sees all patches in their order."""
    encoder = getattr(model, "vit", model)
    encoder.config.mask_ratio = 0.0
    return encoder(images, noise=torch.arange(16.0).expand(len(images), -1)).last_hidden_state[:, 0]


def masked_modeling(model: Any, images: Tensor) -> Tensor:
    """The mean of the patches that the head of the masked image modeling reads."""
    return model.layernorm(model.beit(images).last_hidden_state)[:, 1:].mean(dim=1)


def masked_modeling_token(model: Any, images: Tensor) -> Tensor:
    return model.beit(images).last_hidden_state[:, 0]


def _naflex(images: Tensor, patch: int = 8) -> dict[str, Tensor]:
    """Patches as rows of pixels, (patch, patch, channels), as SigLIP 2's own processor makes them."""
    pixels = images.unflatten(3, (-1, patch)).unflatten(2, (-1, patch)).permute(0, 2, 4, 3, 5, 1)
    batch, rows, columns = pixels.shape[:3]
    shapes = torch.tensor([[rows, columns]] * batch)
    mask = torch.ones(batch, rows * columns, dtype=torch.long)
    return {"pixel_values": pixels.flatten(3).flatten(1, 2), "pixel_attention_mask": mask, "spatial_shapes": shapes}


def naflex_logits(model: Any, images: Tensor) -> Tensor:
    return model(**_naflex(images)).logits


def naflex_pooled(model: Any, images: Tensor) -> Tensor:
    return model(**_naflex(images)).pooler_output


def naflex_two_towers(model: Any, images: Tensor) -> Tensor:
    return model.get_image_features(**_naflex(images)).pooler_output


RELATIVE = {"use_relative_position_bias": True}
SHARED = {"use_shared_relative_position_bias": True}
ABSOLUTE = {"use_absolute_position_embeddings": True}
NO_BIAS = {"qkv_bias": False}
FLAT = {"image_size": None, "num_patches": 16}

HF_CASES: dict[str, HfCase] = {
    "ViT": HfCase("ViTForImageClassification", "hf", logits),
    "ViT, pooler": HfCase("ViTModel", "hf", pooled),
    "ViT, no qkv bias, quick GELU": HfCase(
        "ViTForImageClassification", "hf", logits, {**NO_BIAS, "hidden_act": "quick_gelu"}
    ),
    "ViT, masked modeling": HfCase(
        "ViTForMaskedImageModeling",
        "hf",
        lambda model, images: model.vit(images).last_hidden_state[:, 0],
        {"encoder_stride": 8},
        skipped="decoder not read (2 tensors)",
        written="none",  # a ViTModel has a pooler
    ),
    "MSN": HfCase("ViTMSNForImageClassification", "hf-msn", logits),
    "MSN, features": HfCase("ViTMSNModel", "hf-msn", token),
    "I-JEPA": HfCase("IJepaForImageClassification", "hf-ijepa", logits),
    "I-JEPA, features": HfCase("IJepaModel", "hf-ijepa", mean),
    "MAE": HfCase("ViTMAEModel", "hf-mae", unmasked),
    "MAE, decoder": HfCase(
        "ViTMAEForPreTraining", "hf-mae", unmasked, DECODER, skipped="decoder not read (", written="ViTMAEModel"
    ),
    "DINOv2": HfCase("Dinov2Model", "hf-dinov2", pooled, skipped="mask token not read (1 tensor)"),
    "DINOv2, SwiGLU": HfCase("Dinov2Model", "hf-dinov2", pooled, {"use_swiglu_ffn": True}),
    "DINOv2, classifier": HfCase("Dinov2ForImageClassification", "hf-dinov2", logits),
    "DINOv2, classifier, SwiGLU": HfCase(
        "Dinov2ForImageClassification", "hf-dinov2", logits, {"use_swiglu_ffn": True, **NO_BIAS}
    ),
    "DINOv2, registers": HfCase("Dinov2WithRegistersModel", "hf-dinov2", pooled, {"num_register_tokens": 3}),
    "DINOv2, registers, classifier": HfCase("Dinov2WithRegistersForImageClassification", "hf-dinov2", logits),
    "DINOv3": HfCase("DINOv3ViTModel", "hf-dinov3", pooled, {"num_register_tokens": 4}, skipped="mask token not read"),
    "DINOv3, no registers, key bias": HfCase(
        "DINOv3ViTModel", "hf-dinov3", pooled, {"key_bias": True, "rope_theta": 50.0}
    ),
    "DINOv3, SwiGLU": HfCase(
        "DINOv3ViTModel",
        "hf-dinov3",
        pooled,
        {"num_register_tokens": 2, "use_gated_mlp": True, "hidden_act": "silu", "intermediate_size": 40},
    ),
    "CLIP": HfCase("CLIPVisionModel", "hf-clip", pooled),
    "CLIP, GELU": HfCase("CLIPVisionModel", "hf-clip", pooled, {"hidden_act": "gelu", "layer_norm_eps": 1e-6}),
    "CLIP, projection": HfCase("CLIPVisionModelWithProjection", "hf-clip", projected, {"projection_dim": 24}),
    "CLIP, two towers": HfCase(
        "CLIPModel",
        "hf-clip",
        features_of_two_towers,
        {"projection_dim": 24},
        vision={},
        skipped="text tower not read (",
        written="CLIPVisionModelWithProjection",
    ),
    "CLIP, classifier": HfCase(
        "CLIPForImageClassification",
        "hf-clip",
        logits,
        vision={},
        skipped="last norm, which the classifier does not run",
    ),
    "MetaCLIP 2, two towers": HfCase(
        "MetaClip2Model",
        "hf-clip",
        features_of_two_towers,
        {"projection_dim": 24},
        vision={},
        skipped="text tower not read (",
        written="CLIPVisionModelWithProjection",
    ),
    "Chinese-CLIP, two towers": HfCase(
        "ChineseCLIPModel",
        "hf-clip",
        features_of_two_towers,
        {"projection_dim": 24},
        vision={},
        skipped="text tower not read (",
        written="CLIPVisionModelWithProjection",
    ),
    "SigLIP": HfCase("SiglipVisionModel", "hf-siglip", pooled),
    "SigLIP, no pooling": HfCase("SiglipVisionModel", "hf-siglip", mean, {"vision_use_head": False}),
    "SigLIP, two towers": HfCase(
        "SiglipModel",
        "hf-siglip",
        features_of_two_towers,
        vision={},
        skipped="text tower not read (",
        written="SiglipVisionModel",
    ),
    "SigLIP, classifier": HfCase(
        "SiglipForImageClassification",
        "hf-siglip",
        logits,
        vision={},
        skipped="attention pooling, which the classifier does not run, not read (11 tensors)",
    ),
    "SigLIP 2": HfCase("Siglip2VisionModel", "hf-siglip2", naflex_pooled, FLAT),
    "SigLIP 2, two towers": HfCase(
        "Siglip2Model",
        "hf-siglip2",
        naflex_two_towers,
        vision=FLAT,
        skipped="text tower not read (",
        written="Siglip2VisionModel",
    ),
    "SigLIP 2, classifier": HfCase("Siglip2ForImageClassification", "hf-siglip2", naflex_logits, vision=FLAT),
    "BEiT": HfCase("BeitForImageClassification", "hf-beit", logits, RELATIVE),
    "BEiT, features": HfCase("BeitModel", "hf-beit", pooled, RELATIVE),
    "BEiT, token, absolute": HfCase(
        "BeitForImageClassification", "hf-beit", logits, {**ABSOLUTE, "use_mean_pooling": False}
    ),
    "BEiT, no LayerScale, no positions": HfCase(
        "BeitForImageClassification", "hf-beit", logits, {"layer_scale_init_value": 0.0}
    ),
    "BEiT, shared": HfCase("BeitForImageClassification", "hf-beit", logits, SHARED),
    "BEiT, shared and own": HfCase("BeitForImageClassification", "hf-beit", logits, {**SHARED, **RELATIVE}),
    "BEiT, masked modeling": HfCase(
        "BeitForMaskedImageModeling",
        "hf-beit",
        masked_modeling,
        {**SHARED, "use_mask_token": True, "vocab_size": 12},
        skipped="head of the masked image modeling not read (2 tensors)",
        written="none",
    ),
    "BEiT, masked modeling, token": HfCase(
        "BeitForMaskedImageModeling",
        "hf-beit",
        masked_modeling_token,
        {**SHARED, "use_mean_pooling": False, "vocab_size": 12},
        skipped="head of the masked image modeling not read (4 tensors)",
        written="BeitModel",
    ),
    "data2vec": HfCase("Data2VecVisionForImageClassification", "hf-data2vec", logits, RELATIVE),
    "data2vec, shared": HfCase("Data2VecVisionForImageClassification", "hf-data2vec", logits, SHARED),
    "data2vec, features": HfCase("Data2VecVisionModel", "hf-data2vec", mean_of_patches, ABSOLUTE),
}
