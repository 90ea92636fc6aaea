"""Probes of frozen features: few-shot ridge regression, k-nearest-neighbour classifier, linear probe, label errors.

The few-shot algorithm is that of the paper's authors (section 4.1 and their later code): features are standardised by
the drawn images, a constant feature of 100 is a bias that is hardly regularised, and the targets are -1 and +1.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.data.neighbours import nearest, unit_vectors
from vitral.errors import UserError
from vitral.evaluation.accuracy import interval
from vitral.evaluation.calibration import probabilities

NEIGHBOURS, TEMPERATURE = 20, 0.07  # those of DINO (Caron et al. 2021)
L2_CANDIDATES = tuple(10.0**power for power in range(1, -7, -1))  # largest first: each fit starts from the last one
_ROWS = 65536  # images whose logits are in memory at a time
_STEPS = 500  # of L-BFGS at most
RIDGE_L2 = 1024.0  # of the authors' later code; the paper does not state it
RIDGE_L2_CANDIDATES = tuple(2.0**power for power in range(-10, 21, 2))
BIAS = 100.0
FOLDS = 5
_LABEL_ERROR_L2 = (10.0, 1.0, 0.1, 0.01)  # weaker regularisation fits wrong labels, and takes longest
_RIDGE_ROWS = 4096  # rows in float64 at a time
_EPSILON = 1e-5  # added to standard deviations, against division by zero


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

    Features (n, d), labels (n,) and features (m, d) -> each class's share of the votes, (m, classes) float32.
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
    l2: float  # weight of half the squared weights relative to the mean loss; the bias is not regularised

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
    """Fit a linear probe to features (n, d) and labels (n,).

    The L2 regularisation is the candidate that makes the fewest errors in cross-validation; ties go to the lower loss.
    The seed assigns images to folds; nothing else is random.
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


@dataclass(frozen=True)
class FewShotResult:
    """Accuracy with `shots` training images per class, drawn once per seed."""

    shots: int
    accuracies: tuple[float, ...]  # per seed
    l2: tuple[float, ...]  # per seed
    drawn: int  # training images per draw; fewer than shots * classes if a class has fewer
    n: int  # test images

    @property
    def mean(self) -> float:
        return statistics.fmean(self.accuracies)

    @property
    def interval(self) -> float | None:
        """Half the width of the 95 % confidence interval of the mean; None for one seed."""
        return interval(self.accuracies)


def fewshot(
    train_x: np.ndarray,
    train_y: np.ndarray,
    test_x: np.ndarray,
    test_y: np.ndarray,
    *,
    classes: int,
    shots: Sequence[int] = (1, 5, 10, 25),
    seeds: int = 5,
    l2: float | Literal["choose"] = RIDGE_L2,
) -> list[FewShotResult]:
    """Measure few-shot accuracy on features (m, d), for each number of `shots`, training images per class.

    They are drawn from features (n, d), `seeds` times. With "choose" the strength of the regularisation is selected by
    cross-validation within each draw.
    """
    check_features(train_x, train_y, classes)
    check_features(test_x, test_y, classes)
    if not shots or min(shots) < 1 or seeds < 1:
        raise UserError(f"shots and seeds must be at least 1, not {tuple(shots)} and {seeds}.")
    if l2 != "choose" and not 0 < l2 < math.inf:
        raise UserError(f'l2 must be a number above 0, such as {RIDGE_L2:.0f}, or "choose", not {l2}.')
    results = []
    for count in shots:
        draws = [draw(train_y, count, seed) for seed in range(seeds)]
        fits = [Ridge.fit(train_x[rows], train_y[rows], classes, l2) for rows in draws]
        accuracies = tuple(float((ridge.predict(test_x) == test_y).mean()) for ridge in fits)
        strengths = tuple(ridge.l2 for ridge in fits)
        results.append(FewShotResult(count, accuracies, strengths, drawn=len(draws[0]), n=len(test_y)))
    return results


def draw(labels: np.ndarray, shots: int, seed: int) -> np.ndarray:
    """(n,) -> indices of `shots` examples per class, or of all that a class has, class by class.

    One generator permutes the rows of class 0, then of class 1, and so on: the same rows as Google's code draws. Draws
    with the same seed are nested.
    """
    generator = np.random.default_rng(seed)
    by_class = (generator.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels))
    return np.concatenate([rows[:shots] for rows in by_class])


@dataclass(frozen=True)
class Ridge:
    """A linear classifier of standardised features; the last row of the weights is that of the constant feature."""

    mean: np.ndarray  # (d,)
    std: np.ndarray  # (d,)
    weights: np.ndarray  # (d + 1, classes)
    l2: float

    @classmethod
    def fit(cls, x: np.ndarray, labels: np.ndarray, classes: int, l2: float | Literal["choose"] = RIDGE_L2) -> Ridge:
        """(n, d), (n,) -> the minimum of |XW - Y|^2 + l2 |W|^2"""
        strength = choose_l2(x, labels, classes) if l2 == "choose" else l2
        return _NormalEquations.of(x, labels, classes).solve(strength)

    def scores(self, x: np.ndarray) -> np.ndarray:
        """(m, d) -> (m, classes) float64"""
        return _standardised(x, self.mean, self.std) @ self.weights

    def predict(self, x: np.ndarray) -> np.ndarray:
        """(m, d) -> (m,) int64; ties go to the lower class."""
        blocks = [self.scores(x[start : start + _RIDGE_ROWS]).argmax(1) for start in range(0, len(x), _RIDGE_ROWS)]
        return np.concatenate(blocks) if blocks else np.zeros(0, np.int64)


class _NormalEquations(NamedTuple):
    """The part of a fit that does not depend on l2, so that each candidate takes one solve only."""

    mean: np.ndarray
    std: np.ndarray
    x: np.ndarray  # (n, d + 1) standardised, with the constant
    gram: np.ndarray  # X'X (d + 1, d + 1), or in the dual form XX' (n, n): whichever is smaller
    right: np.ndarray  # X'Y (d + 1, classes), or in the dual form Y (n, classes)

    @classmethod
    def of(cls, x: np.ndarray, labels: np.ndarray, classes: int) -> _NormalEquations:
        mean, std = whitening(x)
        extended = _standardised(x, mean, std)
        targets = np.full((len(x), classes), -1.0)
        targets[np.arange(len(x)), labels] = 1.0
        if _is_dual(extended):
            return cls(mean, std, extended, extended @ extended.T, targets)
        return cls(mean, std, extended, extended.T @ extended, extended.T @ targets)

    def solve(self, l2: float) -> Ridge:
        """X' (XX' + l2)^-1 Y if there are fewer examples than features, else (X'X + l2)^-1 X'Y: the same weights."""
        matrix = self.gram.copy()
        np.fill_diagonal(matrix, matrix.diagonal() + l2)
        solution = np.linalg.solve(matrix, self.right)
        return Ridge(self.mean, self.std, self.x.T @ solution if _is_dual(self.x) else solution, l2)


def choose_l2(x: np.ndarray, labels: np.ndarray, classes: int) -> float:
    """The candidate with the fewest errors in cross-validation; ties go to the one nearest to the default.

    Squared errors could separate more candidates, but prefer weaker regularisation than the errors do; leave-one-out in
    closed form leaves out one example of the correct class, which disadvantages strong regularisation. Each fold is
    standardised by its own training rows, so nothing leaks. With one example per class the result is the default.
    """
    folds = list(stratified_folds(labels, FOLDS))
    if not folds:
        return RIDGE_L2
    errors = np.zeros(len(RIDGE_L2_CANDIDATES), np.int64)
    for training, held in folds:
        system = _NormalEquations.of(x[training], labels[training], classes)
        for index, candidate in enumerate(RIDGE_L2_CANDIDATES):
            errors[index] += (system.solve(candidate).predict(x[held]) != labels[held]).sum()
    distance = np.abs(np.log2(RIDGE_L2_CANDIDATES) - np.log2(RIDGE_L2))
    return RIDGE_L2_CANDIDATES[int(np.lexsort((distance, errors))[0])]


def stratified_folds(labels: np.ndarray, folds: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(n,) -> the training and held-out rows, (n,) bool each, of every fold of a stratified cross-validation.

    Rows of a class are assigned in turn; the only example of a class is never held out.
    """
    fold = np.full(len(labels), -1)
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)
        if len(rows) > 1:
            fold[rows] = np.arange(len(rows)) % folds
    for number in range(fold.max(initial=-1) + 1):
        yield fold != number, fold == number


def whitening(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(n, d) -> mean and standard deviation of each feature, (d,) float64 each; the latter are above zero."""
    exact = x.astype(np.float64)
    return exact.mean(0), exact.std(0) + _EPSILON


def check_features(x: np.ndarray, labels: np.ndarray, classes: int) -> None:
    """Raise a UserError for features and labels that no classifier can be fitted to."""
    if labels.ndim != 1:
        raise UserError(
            "a classifier of features needs one label per image, and these images may have several: choose other data."
        )
    if x.ndim != 2 or len(x) != len(labels) or len(x) == 0:
        raise UserError(
            f"features of shape {x.shape} and labels of shape {labels.shape} do not fit: give one row per image."
        )
    if labels.min() < 0 or labels.max() >= classes:
        raise UserError(f"labels from {labels.min()} to {labels.max()} do not fit {classes} classes, counted from 0.")
    if not np.isfinite(x).all():
        raise UserError("some features are not finite (NaN or Inf): the weights are damaged or training diverged.")


def _standardised(x: np.ndarray, mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    """(n, d) -> (n, d + 1) float64, with the constant feature"""
    extended = np.full((len(x), x.shape[1] + 1), BIAS)
    extended[:, :-1] = (x - mean) / std
    return extended


def _is_dual(extended: np.ndarray) -> bool:
    return extended.shape[0] < extended.shape[1]


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
    """The images, of features (n, d) and labels (n,), whose label is probably wrong, the most suspicious first.

    No image is scored by a probe that was fitted to it; the seed assigns images to folds. As in confident learning
    (Northcutt et al. 2021), a probability counts relative to its class: a class that is hard throughout has low
    probabilities, and they are not suspicious. The only image of a class cannot be judged, and is left out.
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
    """(n, classes): of each image by the probe of the fold that it is held out from; zero if it never is."""
    l2 = linear_probe(x, labels, classes=classes, l2_candidates=_LABEL_ERROR_L2, seed=seed, device=device).l2
    order = np.random.default_rng(seed).permutation(len(labels))
    logits = np.zeros((len(labels), classes), np.float32)
    for training, held in stratified_folds(labels[order], FOLDS):
        rows = order[training]
        probe = linear_probe(x[rows], labels[rows], classes=classes, l2_candidates=(l2,), device=device)
        logits[order[held]] = probe.logits(x[order[held]])
    return logits
