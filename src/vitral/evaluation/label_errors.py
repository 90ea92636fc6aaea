"""Images whose label is probably wrong, by what a cross-validated linear probe says about them.

No image is scored by a probe that was fitted to it. As in confident learning (Northcutt et al. 2021), a probability
counts relative to its class: a class that is hard throughout has low probabilities, and they are not suspicious.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from vitral.evaluation.calibration import probabilities
from vitral.evaluation.probes import FOLDS, linear_probe, stratified_folds

_L2_CANDIDATES = (10.0, 1.0, 0.1, 0.01)  # weaker regularisation fits wrong labels, and takes longest


class LabelError(NamedTuple):
    """An image that looks more like another class than like its own."""

    row: int
    suggested: int  # the class that it looks like
    confidence: float  # probability of its label
    suggested_confidence: float
    score: float  # from -2 to 0, the most suspicious first
    likely: bool  # it looks as much like the suggested class as the images of that class do on average


def find_label_errors(
    x: np.ndarray, labels: np.ndarray, *, classes: int, seed: int = 0, device: torch.device | str = "cpu"
) -> list[LabelError]:
    """Rank the images whose label is suspicious.

    Args:
        x: Features (n, d).
        labels: (n,); the only image of a class cannot be judged, and is left out.
        classes: Number of classes.
        seed: Assigns images to folds.
        device: Where the probes are fitted.

    Returns:
        The suspicious ones, the most suspicious first.
    """
    chances = probabilities(_held_out_logits(x, labels, classes, seed, device))
    rows = np.arange(len(labels))
    counts = np.bincount(labels, minlength=classes)
    typical = np.bincount(labels, chances[rows, labels], classes) / np.maximum(counts, 1)  # (classes,)
    typical[counts < 2] = np.inf  # such a class is never suggested
    relative = chances - typical
    own = np.where(counts[labels] < 2, np.inf, relative[rows, labels])
    relative[rows, labels] = -np.inf
    suggested = relative.argmax(1)
    scores = own - relative[rows, suggested]
    return [
        LabelError(
            row=int(row),
            suggested=int(suggested[row]),
            confidence=float(chances[row, labels[row]]),
            suggested_confidence=float(chances[row, suggested[row]]),
            score=float(scores[row]),
            likely=bool(relative[row, suggested[row]] >= 0),
        )
        for row in np.argsort(scores, kind="stable")
        if scores[row] < 0
    ]


def _held_out_logits(
    x: np.ndarray, labels: np.ndarray, classes: int, seed: int, device: torch.device | str
) -> np.ndarray:
    """(n, classes): of each image by the probe of the fold that it is held out from; zero where it never is."""
    l2 = linear_probe(x, labels, classes=classes, l2_candidates=_L2_CANDIDATES, seed=seed, device=device).l2
    order = np.random.default_rng(seed).permutation(len(labels))
    logits = np.zeros((len(labels), classes), np.float32)
    for training, held in stratified_folds(labels[order], FOLDS):
        rows = order[training]
        probe = linear_probe(x[rows], labels[rows], classes=classes, l2_candidates=(l2,), device=device)
        logits[order[held]] = probe.logits(x[order[held]])
    return logits
