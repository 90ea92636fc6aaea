"""The module that is exported: from uint8 pixels to probabilities, including normalisation."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Literal, TypeGuard

import torch
from torch import Tensor, nn

from vitral.architecture import Architecture, Size, ViTConfig
from vitral.checkpoints.card import Card
from vitral.data.preprocess import parse_deterministic
from vitral.errors import UserError
from vitral.models.build import Model
from vitral.models.capture import AttentionCapture, Rows, capture
from vitral.models.model import scale_and_shift
from vitral.models.position import grid_of
from vitral.models.resnet import StdConv2d

Output = Literal["features", "attention"]
INPUT, PROBABILITIES = "pixels", "probabilities"


class ExportGraph(nn.Module):
    """uint8 pixels (batch, height, width, channels), resized and cropped already, to a tuple of outputs.

    probabilities  (batch, classes): softmax or, for multi-label models, sigmoid of the logits / temperature
    features       (batch, dim): the input of the head
    attention      (batch, rows, columns): how the class token of the last block attends to the patches; without a class
                   token, how the patches attend to them. Mean over heads (and queries), scaled to sum to 1.

    Attributes:
        names: names of the outputs, in order.
        image: height and width that the card's preprocessing gives.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, model: Model, card: Card, outputs: Sequence[Output] = ()) -> None:
        """Put pre- and postprocessing around a model.

        Args:
            model: float32, on the CPU.
            card: states the preprocessing, the temperature and whether the classes are exclusive.
            outputs: what else is returned.

        Raises:
            UserError: the model cannot give these outputs.
        """
        super().__init__()
        if card.preprocess is None:
            raise UserError("the card does not state the preprocessing, which the exported file must contain: set it.")
        self.queries: Rows = _attention_queries(model) if "attention" in outputs else "cls"
        self.names: tuple[str, ...] = (PROBABILITIES, *(name for name in ("features", "attention") if name in outputs))
        self.image: Size = parse_deterministic(card.preprocess.pipeline).size
        self.model, self.multilabel = model, card.multilabel
        scale, shift = scale_and_shift(card.preprocess.mean, card.preprocess.std, torch.device("cpu"))
        self.register_buffer("scale", scale.clone())
        self.register_buffer("shift", shift.clone())
        self.register_buffer("temperature", torch.tensor(card.temperature))
        self.eval().requires_grad_(False)

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        """(batch, height, width, channels) uint8 -> the outputs of `names`"""
        images = torch.addcmul(self.shift, pixels.permute(0, 3, 1, 2).float(), self.scale)
        if "attention" in self.names:
            with capture(self.model, layers=[-1], rows=self.queries) as captured:
                patches = self.model.patchify(images)
                features = self.model.pool(self.model.encode(patches))
            attention = [attention_map(captured, grid_of(patches))]
        else:
            features, attention = self.model.features(images), []
        logits = self.model.head(features) / self.temperature
        probabilities = logits.sigmoid() if self.multilabel else logits.softmax(dim=-1)
        return probabilities, *([features] if "features" in self.names else []), *attention

    def example(self) -> Tensor:
        """Two different images to trace the graph with: (2, height, width, channels) uint8"""
        shape = (2, *self.image, self.model.config.channels)
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))

    def dynamic_shapes(self, *, size: bool) -> dict[str, dict[int, torch.export.Dim]]:
        """Which sizes of the input may vary: the batch and, with `size`, height and width in whole patches."""
        dims = {0: torch.export.Dim("batch", min=1)}
        if size:
            stride = self.model.config.stride
            dims |= {1: stride * torch.export.Dim("rows", min=2), 2: stride * torch.export.Dim("columns", min=2)}
        return {INPUT: dims}


def with_constant_filters(graph: ExportGraph) -> ExportGraph:
    """The graph to trace: filters that a ResNet standardizes in each forward pass are computed once, in a copy."""
    if not any(isinstance(module, StdConv2d) for module in graph.modules()):
        return graph
    copied = copy.deepcopy(graph)
    for module in copied.modules():
        if isinstance(module, StdConv2d):
            module.weight = nn.Parameter(module.standardized(), requires_grad=False)
            module.standardized = partial(getattr, module, "weight")
    return copied


def attention_map(captured: AttentionCapture, grid: Size) -> Tensor:
    """(batch, heads, queries, prefix + n) -> (batch, rows, columns)"""
    height, width = grid
    attention = captured[-1]
    patches = attention[..., attention.shape[-1] - height * width :]
    # Of the queries only the class token was captured, or all: without a class token, registers are left out.
    queries = patches if patches.shape[2] == 1 else patches[:, :, patches.shape[2] - height * width :]
    weights = queries.mean(dim=(1, 2))
    return (weights / weights.sum(dim=1, keepdim=True)).unflatten(1, (height, width))


def has_attention(config: Architecture) -> TypeGuard[ViTConfig]:
    """Whether a model has attention between all patches."""
    return isinstance(config, ViTConfig) and not config.axial


def _attention_queries(model: Model) -> Literal["cls", "all"]:
    """The queries whose attention is exported.

    Raises:
        UserError: the model has no attention between all patches.
    """
    if not has_attention(model.config):
        raise UserError("this model has no attention between all patches: export it without the attention output.")
    return "cls" if model.config.class_token else "all"
