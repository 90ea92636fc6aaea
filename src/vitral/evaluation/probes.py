"""What frozen features know, asked in two further ways: nearest neighbours, and logistic regression."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.data.nearest import nearest, unit_vectors
from vitral.errors import UserError
from vitral.evaluation.fewshot import FOLDS, check_features, parts, whitening

NEIGHBOURS, TEMPERATURE = 20, 0.07  # DINO's (Caron et al. 2021): best or nearly so for all of its models
STRENGTHS = tuple(10.0**power for power in range(1, -7, -1))  # strongest first: each fit starts from the one before
_ROWS = 65536  # scores of this many images exist at a time
_STEPS = 500  # of L-BFGS; it stops earlier where the slope is flat


def knn(
    train_x: np.ndarray,
    train_y: np.ndarray,
    test_x: np.ndarray,
    *,
    classes: int,
    k: int = NEIGHBOURS,
    temperature: float = TEMPERATURE,
    device: torch.device | str = "cpu",
) -> np.ndarray:
    """(n, d), (n,), (m, d) -> (m, classes) float32: each class's share of the votes of the k nearest by cosine.

    A neighbour's vote weighs exp(cosine / temperature), as in DINO. Every pair is compared; the blocks only bound the
    memory.
    """
    check_features(train_x, train_y, classes)
    if k < 1 or temperature <= 0:
        raise UserError(f"k must be at least 1 and the temperature above 0, not {k} and {temperature}.")
    stored, labels = unit_vectors(train_x).to(device), torch.from_numpy(train_y).long().to(device)
    cosines, indices = nearest(unit_vectors(test_x).to(device), stored, k)
    # Subtracting the highest cosine leaves the shares as they are, and no exponential overflows.
    weights = ((cosines - cosines[:, :1]) / temperature).exp()
    votes = torch.zeros(len(cosines), classes, device=device).scatter_add_(1, labels[indices], weights)
    return (votes / votes.sum(1, keepdim=True)).cpu().numpy()


@dataclass(frozen=True)
class LinearProbe:
    """Multinomial logistic regression of standardised features."""

    mean: np.ndarray  # (d,)
    std: np.ndarray  # (d,)
    weights: np.ndarray  # (d, classes)
    bias: np.ndarray  # (classes,)
    strength: float  # what the halved squares of the weights weigh beside the mean loss; the bias is free

    def logits(self, x: np.ndarray) -> np.ndarray:
        """(m, d) -> (m, classes) float32"""
        blocks = (x[start : start + _ROWS] for start in range(0, max(len(x), 1), _ROWS))
        rows = [((block - self.mean) / self.std @ self.weights + self.bias).astype(np.float32) for block in blocks]
        return np.concatenate(rows)


def linear_probe(
    train_x: np.ndarray,
    train_y: np.ndarray,
    *,
    classes: int,
    strengths: Sequence[float] = STRENGTHS,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> LinearProbe:
    """(n, d), (n,) -> the probe with the strength that made the fewest mistakes in cross-validation.

    Among equals the likeliest wins. The seed deals the images out to the parts; nothing else is random.
    """
    check_features(train_x, train_y, classes)
    if not strengths or min(strengths) <= 0:
        raise UserError(f"the strengths to choose from must be above 0, not {tuple(strengths)}.")
    falling = sorted(strengths, reverse=True)
    strength = falling[0]
    if len(falling) > 1:
        strength = _chosen(train_x, train_y, classes, falling, seed, device)
    until = falling[: falling.index(strength) + 1]
    return _path(train_x, train_y, classes, until, device)[-1]


def _chosen(
    x: np.ndarray, labels: np.ndarray, classes: int, strengths: list[float], seed: int, device: torch.device | str
) -> float:
    order = np.random.default_rng(seed).permutation(len(labels))
    wrong, loss = np.zeros(len(strengths)), np.zeros(len(strengths))
    held_out = [(order[training], order[held]) for training, held in parts(labels[order], FOLDS)]
    if not held_out:
        raise UserError("a strength cannot be chosen with one image of each class: add images, or state one strength.")
    for training, held in held_out:
        for place, probe in enumerate(_path(x[training], labels[training], classes, strengths, device)):
            logits = torch.from_numpy(probe.logits(x[held])).double()
            truth = torch.from_numpy(labels[held]).long()
            wrong[place] += int((logits.argmax(1) != truth).sum())
            loss[place] += float(F.cross_entropy(logits, truth, reduction="sum"))
    return strengths[int(np.lexsort((loss, wrong))[0])]


def _path(
    x: np.ndarray, labels: np.ndarray, classes: int, strengths: Sequence[float], device: torch.device | str
) -> list[LinearProbe]:
    """A probe for each of the falling strengths."""
    mean, std = whitening(x)
    inputs = torch.from_numpy((x - mean) / std).to(device)
    truth = torch.from_numpy(labels).long().to(device)
    weights = torch.zeros(x.shape[1], classes, dtype=torch.float64, device=device, requires_grad=True)
    bias = torch.zeros(classes, dtype=torch.float64, device=device, requires_grad=True)
    found = []
    for strength in strengths:
        _minimise(inputs, truth, weights, bias, strength)
        now = [tensor.detach().cpu().numpy().copy() for tensor in (weights, bias)]
        found.append(LinearProbe(mean, std, now[0], now[1], strength))
    return found


def _minimise(inputs: Tensor, truth: Tensor, weights: Tensor, bias: Tensor, strength: float) -> None:
    """Moves weights and bias, in place, to where mean cross-entropy + strength / 2 |weights|^2 is smallest."""
    search = torch.optim.LBFGS(
        [weights, bias],
        max_iter=_STEPS,
        tolerance_grad=1e-7,
        tolerance_change=1e-12,
        history_size=20,
        line_search_fn="strong_wolfe",
    )

    def loss() -> Tensor:
        search.zero_grad()
        total = strength / 2 * weights.square().sum()
        total.backward()
        for rows, labels in zip(inputs.split(_ROWS), truth.split(_ROWS), strict=True):
            part = F.cross_entropy(rows @ weights + bias, labels, reduction="sum") / len(truth)
            part.backward()
            total = total.detach() + part.detach()
        return total

    search.step(loss)
