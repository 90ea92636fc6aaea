"""From an architecture to a model with fresh weights."""

from __future__ import annotations

from vitral.architecture import Architecture, ResNetConfig
from vitral.models.resnet import ResNet
from vitral.models.vit import ViT

Model = ViT | ResNet


def build(architecture: Architecture) -> Model:
    """A model with the paper's initialisation, in training mode."""
    return ResNet(architecture) if isinstance(architecture, ResNetConfig) else ViT(architecture)
