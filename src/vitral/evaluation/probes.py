"""Probes of frozen features: k-nearest-neighbour classifier and logistic regression (linear probe)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.data.nearest import nearest, unit_vectors
from vitral.errors import UserError
from vitral.evaluation.fewshot import FOLDS, check_features, stratified_folds, whitening

NEIGHBOURS, TEMPERATURE = 20, 0.07  # those of DINO (Caron et al. 2021)
L2_CANDIDATES = tuple(10.0**power for power in range(1, -7, -1))  # largest first: each fit starts from the last one
_ROWS = 65536  # images whose logits are in memory at a time
_STEPS = 500  # of L-BFGS at most


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
    """Classify by the k nearest neighbours (cosine similarity), weighted by exp(cosine / temperature) as in DINO.

    Args:
        train_x: Features (n, d).
        train_y: Labels (n,).
        test_x: Features (m, d).
        classes: Number of classes.
        k: Neighbours.
        temperature: Smaller values give near neighbours more weight.
        device: Where similarities are computed.

    Returns:
        Each class's share of the votes, (m, classes) float32.
    """
    check_features(train_x, train_y, classes)
    if k < 1 or temperature <= 0:
        raise UserError(f"k must be at least 1 and the temperature above 0, not {k} and {temperature}.")
    stored, labels = unit_vectors(train_x).to(device), torch.from_numpy(train_y).long().to(device)
    cosines, indices = nearest(unit_vectors(test_x).to(device), stored, k)
    # Subtracting the highest cosine leaves the shares as they are, and no exponential overflows.
    weights = ((cosines - cosines[:, :1]) / temperature).exp()
    votes = torch.zeros(len(cosines), classes, device=device).scatter_add_(1, labels[indices], weights)
    return votes.div_(votes.sum(1, keepdim=True)).cpu().numpy()


@dataclass(frozen=True)
class LinearProbe:
    """Multinomial logistic regression of standardised features."""

    mean: np.ndarray  # (d,)
    std: np.ndarray  # (d,)
    weights: np.ndarray  # (d, classes)
    bias: np.ndarray  # (classes,)
    l2: float  # weight of half the squared weights beside the mean loss; the bias is not regularised

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
    l2_candidates: Sequence[float] = L2_CANDIDATES,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> LinearProbe:
    """Fit a linear probe, with the L2 regularisation that makes the fewest errors in cross-validation.

    Args:
        train_x: Features (n, d).
        train_y: Labels (n,).
        classes: Number of classes.
        l2_candidates: Regularisation strengths to choose from; ties go to the lower loss.
        seed: Assigns images to folds; nothing else is random.
        device: Where the probe is fitted.
    """
    check_features(train_x, train_y, classes)
    if not l2_candidates or min(l2_candidates) <= 0:
        raise UserError(f"l2_candidates must be above 0, not {tuple(l2_candidates)}.")
    descending = sorted(l2_candidates, reverse=True)
    l2 = descending[0]
    if len(descending) > 1:
        l2 = _choose_l2(train_x, train_y, classes, descending, seed, device)
    path = descending[: descending.index(l2) + 1]
    return _fit_path(train_x, train_y, classes, path, device)[-1]


def _choose_l2(
    x: np.ndarray, labels: np.ndarray, classes: int, candidates: list[float], seed: int, device: torch.device | str
) -> float:
    order = np.random.default_rng(seed).permutation(len(labels))
    errors, loss = np.zeros(len(candidates)), np.zeros(len(candidates))
    folds = [(order[training], order[held]) for training, held in stratified_folds(labels[order], FOLDS)]
    if not folds:
        raise UserError("l2 cannot be chosen with one image of each class: add images, or give one candidate.")
    for training, held in folds:
        for index, probe in enumerate(_fit_path(x[training], labels[training], classes, candidates, device)):
            logits = torch.from_numpy(probe.logits(x[held])).double()
            target = torch.from_numpy(labels[held]).long()
            errors[index] += int((logits.argmax(1) != target).sum())
            loss[index] += float(F.cross_entropy(logits, target, reduction="sum"))
    return candidates[int(np.lexsort((loss, errors))[0])]


def _fit_path(
    x: np.ndarray, labels: np.ndarray, classes: int, l2_path: Sequence[float], device: torch.device | str
) -> list[LinearProbe]:
    """One probe per descending L2 strength."""
    mean, std = whitening(x)
    inputs = torch.from_numpy((x - mean) / std).to(device)
    target = torch.from_numpy(labels).long().to(device)
    weights = torch.zeros(x.shape[1], classes, dtype=torch.float64, device=device, requires_grad=True)
    bias = torch.zeros(classes, dtype=torch.float64, device=device, requires_grad=True)
    probes = []
    for l2 in l2_path:
        _minimise(inputs, target, weights, bias, l2)
        fitted = [tensor.detach().cpu().numpy().copy() for tensor in (weights, bias)]
        probes.append(LinearProbe(mean, std, fitted[0], fitted[1], l2))
    return probes


def _minimise(inputs: Tensor, target: Tensor, weights: Tensor, bias: Tensor, l2: float) -> None:
    """Minimise mean cross-entropy + l2 / 2 |weights|^2 over weights and bias, in place."""
    optimizer = torch.optim.LBFGS(
        [weights, bias],
        max_iter=_STEPS,
        tolerance_grad=1e-7,
        tolerance_change=1e-12,
        history_size=20,
        line_search_fn="strong_wolfe",
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        total = l2 / 2 * weights.square().sum()
        total.backward()
        for rows, labels in zip(inputs.split(_ROWS), target.split(_ROWS), strict=True):
            part = F.cross_entropy(rows @ weights + bias, labels, reduction="sum") / len(target)
            part.backward()
            total = total.detach() + part.detach()
        return total

    optimizer.step(loss)
