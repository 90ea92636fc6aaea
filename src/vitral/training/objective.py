"""The objective: a model and its loss as one module, the only module that is wrapped for several processes.

Mixup and cutmix mix each example with the one before it in the global batch. A batch has one more row than it trains
on, the mixing partner of its first example, so any number of ranks mixes the same pairs; how they are mixed is a
function of (seed, step), so every rank and every resumed run draws the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.architecture import Size
from vitral.errors import UserError
from vitral.models.model import normalize
from vitral.training.augmentation import parse_augmentation

Box = tuple[int, int, int, int]  # top, bottom, left, right
_STREAM = 0x6D6978  # a random stream apart from others that (seed, step) seeds


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

    `counts` (classes,) are training examples of each class, for balance "weights" and "logit-adjust" ("sampler" changes
    the order of examples instead); `loss` is the user's own.
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

        Images are uint8 (batch, channels, height, width), floating point of that shape if they come normalised, or
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
    logits = _at_least_float32(logits) if log_priors is None else _at_least_float32(logits) + log_priors
    shares = soft_targets(targets, logits.shape[-1])
    if smoothing:
        shares = shares * (1.0 - smoothing) + smoothing / logits.shape[-1]
    if weights is not None:
        shares = shares * weights
    return -(shares * logits.log_softmax(dim=-1)).sum(dim=-1)


def sigmoid_loss(logits: Tensor, targets: Tensor, *, weights: Tensor | None = None) -> Tensor:
    """Binary cross-entropy of every class, summed over classes as in big_vision: (b, k), (b,) or (b, k) -> (b,)"""
    shares = soft_targets(targets, logits.shape[-1])
    logits = _at_least_float32(logits)
    losses = F.binary_cross_entropy_with_logits(logits, shares.to(logits.dtype), reduction="none")
    return (losses if weights is None else losses * weights).sum(dim=-1)


def _at_least_float32(logits: Tensor) -> Tensor:
    """Half precision is too coarse for a loss; double precision stays."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


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


class Mix(NamedTuple):
    """How a batch is mixed: an example has weight `lam` and its partner 1 - `lam`, blended or inside `box`."""

    lam: float
    box: Box | None

    def numbers(self) -> Tensor:
        """As a tensor (6,), an input of the captured CUDA graph: the share of an example in its targets, that in its
        pixels outside the box, and the box, which is empty if there is none."""
        return torch.tensor([self.lam, self.lam if self.box is None else 1.0, *(self.box or (0, 0, 0, 0))])


def draw_mix(seed: int, step: int, image: Size, *, mixup: float, cutmix: float) -> Mix:
    """One share per batch, from Beta(p, p); with both kinds on, each step takes either with equal chance.

    Mixup folds the share to at least a half, so that an example stays the main part of its own row (big_vision).
    """
    generator = np.random.default_rng((seed, step, _STREAM))
    pick = generator.random()
    if cutmix and (not mixup or pick < 0.5):
        box = _draw_box(generator, image, float(generator.beta(cutmix, cutmix)))
        top, bottom, left, right = box
        return Mix(1.0 - (bottom - top) * (right - left) / (image[0] * image[1]), box)
    if not mixup:
        return Mix(1.0, None)
    lam = float(generator.beta(mixup, mixup))
    return Mix(max(lam, 1.0 - lam), None)


def mix_batch(images: Tensor, targets: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """float (b + 1, c, h, w), float (b + 1, k), Mix.numbers -> (b, c, h, w), (b, k): rows mixed with those before."""
    lam, blend, top, bottom, left, right = numbers.unbind()
    row, column = (torch.arange(side, device=images.device) for side in images.shape[-2:])
    boxed = ((row >= top) & (row < bottom)).unsqueeze(1) & (column >= left) & (column < right)
    share = torch.where(boxed, 0.0, blend)
    return _blended(images, share), _blended(targets, lam)


def _blended(rows: Tensor, share: Tensor) -> Tensor:
    return share * rows[1:] + (1.0 - share) * rows[:-1]


def _draw_box(generator: np.random.Generator, image: Size, lam: float) -> Box:
    """A box of the image's aspect and (1 - lam) of its area around a uniform centre, cut off at the borders."""
    side = math.sqrt(1.0 - lam)
    (top, bottom), (left, right) = (_draw_span(generator, length, side) for length in image)
    return top, bottom, left, right


def _draw_span(generator: np.random.Generator, length: int, share: float) -> tuple[int, int]:
    centre, extent = int(generator.integers(length)), round(length * share)
    return max(centre - extent // 2, 0), min(centre - extent // 2 + extent, length)
