"""The objective: a model and its loss as one module, the only thing that is ever wrapped for several processes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitral.architecture import Size
from vitral.models.normalize import normalize
from vitral.models.resnet import ResNet
from vitral.models.vit import ViT
from vitral.training.augmentation import parse_augmentation
from vitral.training.mixing import draw_mix, mix_batch


@dataclass(frozen=True)
class LossSettings:
    """How images and labels become a number."""

    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    kind: Literal["softmax", "sigmoid"] = "softmax"
    smoothing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    augment: str = ""  # of whole batches, on the device
    seed: int = 0

    @property
    def mixes(self) -> bool:
        return self.mixup > 0 or self.cutmix > 0


class Objective(nn.Module):
    """Sums of losses and of right answers over the valid rows of a batch.

    `model` maps images to logits, or features to logits where only a head is trained.
    """

    weights: Tensor | None
    priors: Tensor | None
    replayable = True  # a step depends on the host through `numbers` alone

    def __init__(self, model: nn.Module, settings: LossSettings, counts: np.ndarray, balance: str = "none") -> None:
        """`counts` (k,): training examples of each class, which `balance` "weights" and "logit-adjust" go by."""
        super().__init__()
        self.model = model
        self.settings = settings
        self.augment = parse_augmentation(settings.augment) if settings.augment else None
        numbers = torch.from_numpy(np.asarray(counts, np.float32))
        weights = class_weights(numbers) if balance == "weights" else None
        priors = log_priors(numbers) if balance == "logit-adjust" else None
        self.register_buffer("weights", weights, persistent=False)
        self.register_buffer("priors", priors, persistent=False)

    def numbers(self, step: int, image: Size) -> Tensor:
        """What a step draws for a whole batch; empty where nothing is mixed."""
        s = self.settings
        return draw_mix(s.seed, step, image, mixup=s.mixup, cutmix=s.cutmix).numbers() if s.mixes else torch.zeros(0)

    def forward(self, images: Tensor, labels: Tensor, valid: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """uint8 (b, c, h, w) or features (b, d), labels (b,) or (b, k), valid (b,) -> loss (), right answers ().

        With mixing there is one row in front, the partner of the first; answers are then not counted, and -1 returned.
        """
        s = self.settings
        images = images if self.augment is None else self.augment(images)
        inputs = normalize(images, s.mean, s.std) if images.ndim == 4 else images
        targets = labels
        if s.mixes:
            inputs, targets = mix_batch(inputs, soft_targets(labels, s.classes), numbers)
            valid = valid[1:] & valid[:-1]
        logits = self.model(inputs)
        losses = self._losses(logits, targets)
        loss = torch.where(valid, losses, 0.0).sum()
        if s.mixes or labels.ndim > 1:
            return loss, torch.full_like(loss, -1.0).detach()
        return loss, ((logits.argmax(dim=1) == labels) & valid).sum()

    def _losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """(b, k), (b,) or (b, k) -> (b,)"""
        if self.settings.kind == "sigmoid":
            return sigmoid_loss(logits, targets, weights=self.weights)
        return softmax_loss(
            logits, targets, smoothing=self.settings.smoothing, weights=self.weights, log_priors=self.priors
        )


def recompute_activations(model: nn.Module) -> None:
    """Keep only what enters a block or a ResNet's unit, and compute the rest again in the backward pass."""
    parts: list[nn.Module] = []
    if isinstance(model, ViT):
        parts = list(model.blocks)
    elif isinstance(model, ResNet):
        parts = [unit for stage in model.stages for unit in stage.children()]
    for part in parts:
        part.forward = partial(checkpoint, part.forward, use_reentrant=False)  # type: ignore[method-assign]


def softmax_loss(
    logits: Tensor,
    targets: Tensor,
    *,
    smoothing: float = 0.0,
    weights: Tensor | None = None,
    log_priors: Tensor | None = None,
) -> Tensor:
    """Cross-entropy, (b, k), (b,) or (b, k) -> (b,), for class indices or for shares of classes.

    `smoothing` spreads that share of the target over all classes; `weights` (k,) multiply each class's part; with
    `log_priors` (k,) the logits are adjusted (Menon et al. 2020): rare classes must win by a margin.
    """
    logits = logits.float() if log_priors is None else logits.float() + log_priors
    shares = soft_targets(targets, logits.shape[-1])
    if smoothing:
        shares = shares * (1.0 - smoothing) + smoothing / logits.shape[-1]
    if weights is not None:
        shares = shares * weights
    return -(shares * logits.log_softmax(dim=-1)).sum(dim=-1)


def sigmoid_loss(logits: Tensor, targets: Tensor, *, weights: Tensor | None = None) -> Tensor:
    """Binary cross-entropy of every class, summed over classes as in big_vision: (b, k), (b,) or (b, k) -> (b,)"""
    shares = soft_targets(targets, logits.shape[-1])
    losses = F.binary_cross_entropy_with_logits(logits.float(), shares, reduction="none")
    return (losses if weights is None else losses * weights).sum(dim=-1)


def soft_targets(targets: Tensor, classes: int) -> Tensor:
    """(b,) class indices or (b, k) of any type -> float (b, k); a label out of range gives a row of zeros."""
    if targets.ndim == 2:
        return targets.float()
    return (targets.unsqueeze(1) == torch.arange(classes, device=targets.device)).float()


def class_weights(counts: Tensor) -> Tensor:
    """(k,) examples per class -> (k,): inverse frequencies whose mean over the examples is 1."""
    counts = counts.float().clamp(min=1.0)
    return counts.sum() / (len(counts) * counts)


def log_priors(counts: Tensor) -> Tensor:
    """(k,) examples per class -> (k,): logarithms of the classes' shares of the training data."""
    counts = counts.float().clamp(min=1.0)
    return (counts / counts.sum()).log()
