"""Losses per example, (b, k) -> (b,): the caller leaves out what is not valid and divides by the global batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


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
