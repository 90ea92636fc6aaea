"""The other libraries' models of the same shape, with random weights: (b, c, h, w) -> (b, classes)."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitral.architecture import Architecture, Size, ViTConfig
from vitral.errors import UserError
from vitral.models.build import build


def build_model(library: str, architecture: Architecture) -> nn.Module:
    """A library's model of this shape; ours gets a head that is not zero, as any trained one is."""
    if library == "vitral":
        return _with_a_head(build(architecture))
    if not isinstance(architecture, ViTConfig):
        raise UserError(f"{library} has no such model: leave it out of --against.")
    return _BUILDERS[library](architecture)


def _with_a_head(model: nn.Module) -> nn.Module:
    """Behind a head of zeros every logit and nearly every gradient is zero, and wrong ones would look right."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear) and not layer.weight.any()]
    for layer in layers:
        nn.init.normal_(layer.weight, std=0.02)
    return model


def _timm(config: ViTConfig) -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(
        img_size=config.image,
        patch_size=config.patch,
        embed_dim=config.width,
        depth=config.depth,
        num_heads=config.heads,
        mlp_ratio=config.mlp / config.width,
        num_classes=config.classes,
    )


class _Logits(nn.Module):
    """A model of transformers without the other things that it returns."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        """(b, c, h, w) -> (b, classes)"""
        return self.model(images, return_dict=False)[0]


def _transformers(config: ViTConfig) -> nn.Module:
    from transformers import ViTConfig as TheirConfig
    from transformers import ViTForImageClassification

    options: dict[str, Any] = {"num_labels": config.classes, "attn_implementation": "sdpa"}
    theirs = TheirConfig(
        hidden_size=config.width,
        num_hidden_layers=config.depth,
        num_attention_heads=config.heads,
        intermediate_size=config.mlp,
        image_size=config.image,
        patch_size=config.patch,
        **options,
    )
    return _Logits(ViTForImageClassification(theirs))


def _torchvision(config: ViTConfig) -> nn.Module:
    from torchvision.models import VisionTransformer

    model = VisionTransformer(
        image_size=_side(config.image),
        patch_size=config.patch,
        num_layers=config.depth,
        num_heads=config.heads,
        hidden_dim=config.width,
        mlp_dim=config.mlp,
        num_classes=config.classes,
    )
    return _with_a_head(model)


def _side(image: Size) -> int:
    if image[0] != image[1]:
        raise UserError("torchvision takes square images only: choose one side, or leave it out of --against.")
    return image[0]


class _Session(nn.Module):
    """Our model, exported to ONNX in float32 and run by ONNX Runtime on as many threads as torch has."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        import onnxruntime  # type: ignore[import-not-found]

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        with tempfile.TemporaryDirectory() as folder:
            path = _exported(config, Path(folder))
            self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def forward(self, images: Tensor) -> Tensor:
        """float32 (b, c, h, w) -> (b, classes)"""
        return torch.from_numpy(self.session.run(None, {"images": images.numpy()})[0])


def _exported(config: ViTConfig, folder: Path) -> Path:
    """An ONNX file for any number of images."""
    model = _with_a_head(build(config)).eval()
    example = torch.zeros(2, config.channels, *config.image)
    shapes = ({0: torch.export.Dim("batch")},)
    path = folder / "model.onnx"
    torch.onnx.export(
        model, (example,), path, input_names=["images"], dynamo=True, dynamic_shapes=shapes, verbose=False
    )
    return path


_BUILDERS = {"timm": _timm, "transformers": _transformers, "torchvision": _torchvision, "onnxruntime": _Session}
