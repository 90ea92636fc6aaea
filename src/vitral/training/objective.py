"""The objective: a model and its loss as one module, the only thing that is ever wrapped for several processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.architecture import Size
from vitral.errors import UserError
from vitral.models.normalize import normalize
from vitral.training.augmentation import parse_augmentation
from vitral.training.mixing import draw_mix, mix_batch


@dataclass(frozen=True)
class LossSettings:
    """How images and labels become a loss."""

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
        """Whether each image is mixed with another one."""
        return self.mixup > 0 or self.cutmix > 0


class Objective(nn.Module):
    """Sums of losses and of correct predictions over the valid rows of a batch.

    Args:
        model: maps images to logits, or features to logits where only a head is trained.
        settings: normalisation, augmentation, mixing and the kind of loss.
        counts: (classes,) training examples of each class, for balance "weights" and "logit-adjust".
        balance: "none", "weights" or "logit-adjust" ("sampler" changes the order of examples instead).
        loss: the user's own loss in place of softmax or sigmoid cross-entropy.
    """

    weights: Tensor | None
    priors: Tensor | None

    def __init__(
        self,
        model: nn.Module,
        settings: LossSettings,
        counts: np.ndarray,
        balance: str = "none",
        loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.settings = settings
        self.loss = loss
        self.capturable = loss is None  # a step depends on the host through `draw` alone, so a CUDA graph may hold it
        self.augment = parse_augmentation(settings.augment) if settings.augment else None
        class_counts = torch.from_numpy(np.asarray(counts, np.float32))
        weights = class_weights(class_counts) if balance == "weights" else None
        priors = log_priors(class_counts) if balance == "logit-adjust" else None
        self.register_buffer("weights", weights, persistent=False)
        self.register_buffer("priors", priors, persistent=False)

    def draw(self, step: int, image: Size) -> Tensor:
        """The random numbers of a step for a whole batch (6,): how its images are mixed; empty without mixing."""
        s = self.settings
        return draw_mix(s.seed, step, image, mixup=s.mixup, cutmix=s.cutmix).numbers() if s.mixes else torch.zeros(0)

    def forward(self, images: Tensor, labels: Tensor, valid: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the sum of losses () and the number of correct predictions ().

        Images are uint8 (batch, channels, height, width), floating point of that shape where they come normalised, or
        features (batch, dim); labels (batch,) or (batch, classes); valid (batch,). With mixing there is one row more
        in front, the mixing partner of the first. Mixed and multi-label predictions are not counted: -1 is returned.
        """
        s = self.settings
        images = images if self.augment is None else self.augment(images)
        inputs = normalize(images, s.mean, s.std) if images.ndim == 4 else images
        targets = labels
        if s.mixes:
            inputs, targets = mix_batch(inputs, soft_targets(labels, s.classes), draws)
            valid = valid[1:] & valid[:-1]
        logits = self.model(inputs)
        if self.loss is not None:
            loss = own_loss(self.loss, logits, targets, valid)
        elif s.kind == "sigmoid":
            loss = torch.where(valid, sigmoid_loss(logits, targets, weights=self.weights), 0.0).sum()
        else:
            losses = softmax_loss(logits, targets, smoothing=s.smoothing, weights=self.weights, log_priors=self.priors)
            loss = torch.where(valid, losses, 0.0).sum()
        if s.mixes or labels.ndim > 1:
            return loss, torch.full_like(loss, -1.0).detach()
        return loss, ((logits.argmax(dim=1) == labels) & valid).sum()


def own_loss(loss: Callable[[Tensor, Tensor], Tensor], logits: Tensor, targets: Tensor, valid: Tensor) -> Tensor:
    """The sum () over valid rows of a user's loss, which gives (batch,) losses or their mean ()."""
    logits, targets = logits[valid].float(), targets[valid]
    if not len(logits):
        return logits.sum()  # zero, with a gradient for every process
    losses = loss(logits, targets)
    if losses.ndim == 0:
        return losses * len(logits)
    if losses.shape != logits.shape[:1]:
        raise UserError(
            f"loss must return one value per image ({len(logits)},) or their mean (), not a tensor of shape "
            f"{tuple(losses.shape)}."
        )
    return losses.sum()


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
