"""Muon (Jordan 2024; Liu et al. 2025): the momentum of a weight matrix is orthogonalised before it updates the weight.

A matrix is then updated equally in all directions, not mostly in the few that its gradient is largest in. What is not a
matrix between hidden layers (embeddings, positions, norms, biases, the head) is updated by AdamW.

Why not `torch.optim.Muon`: it takes one matrix per parameter, where queries, keys and values are three in one, leaves
other parameters to a second optimizer, and its step cannot be captured in a CUDA graph; benchmarks/muon.py measures it.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from vitral.errors import UserError
from vitral.training.parallel import local_shard

_STEPS = 5
# Jordan's quintic: steep at 0, so that five steps lift small singular values too; it ends near 1, not at it.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_UPDATE_RMS = 0.2  # root mean square of Adam's usual update, so that both kinds share one learning rate
_TINY = 1e-7  # the smallest norm that is divided by


class Muon(torch.optim.Optimizer):
    """Orthogonalised momentum for groups with `matrices`, AdamW for the others; weight decay is decoupled in both.

    `matrices` is how many matrices are stacked in each weight of a group: 1, or 3 where a layer computes queries, keys
    and values; 0 means AdamW. A learning rate may be a number, or a tensor on the weights' device. A step reads nothing
    back from the device, so a CUDA graph can capture it once a first step has made the state.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float | Tensor,
        betas: tuple[float, float] = (0.9, 0.999),
        momentum: float = 0.95,
    ) -> None:
        rule = {"lr": lr, "betas": betas, "eps": 1e-8, "momentum": momentum, "weight_decay": 0.0, "matrices": 0}
        super().__init__(groups, rule | {"capturable": True})  # the counts of steps live on the device
        if any(local_shard(weight) is not weight for group in self.param_groups for weight in group["params"]):
            raise UserError("muon needs unsharded matrices: set parallel=ddp or optim.name=adamw.")

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every weight that has a gradient."""
        updates = []
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if weights and group["matrices"]:
                updates.append((group, weights, self._directions(weights, group)))
            elif weights:
                self._adam(weights, group)
        matrices = [
            matrix
            for group, _, directions in updates
            for direction in directions
            for matrix in direction.unflatten(0, (group["matrices"], -1))
        ]
        _orthogonalize_by_shape(matrices)
        for group, weights, directions in updates:
            torch._foreach_mul_(directions, group["lr"])
            if group["weight_decay"]:
                torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_sub_(weights, directions)

    def _directions(self, weights: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        """Nesterov's look ahead: the gradient plus the momentum that it has just init_distributed."""
        momentum = self._moments(weights, "momentum")
        gradients = _gradients(weights)
        torch._foreach_mul_(momentum, group["momentum"])
        torch._foreach_add_(momentum, gradients)
        return list(torch._foreach_add(gradients, momentum, alpha=group["momentum"]))

    def _adam(self, weights: list[Tensor], group: dict[str, Any]) -> None:
        for weight in weights:
            if "step" not in self.state[weight]:
                self.state[weight]["step"] = torch.zeros((), device=weight.device)
        adamw(
            weights,
            _gradients(weights),
            self._moments(weights, "exp_avg"),
            self._moments(weights, "exp_avg_sq"),
            [],
            [self.state[weight]["step"] for weight in weights],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _moments(self, weights: list[Tensor], name: str) -> list[Tensor]:
        for weight in weights:
            if name not in self.state[weight]:
                self.state[weight][name] = torch.zeros_like(weight)
        return [self.state[weight][name] for weight in weights]


def orthogonalize(matrices: Tensor) -> Tensor:
    """(k, rows, columns) -> (k, rows, columns): singular values near 1 for each, by the Newton-Schulz iteration.

    Only products of matrices, hence fast in half precision, unlike a decomposition.
    """
    a, b, c = _COEFFICIENTS
    upright = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if upright else matrices  # the products are then of the shorter side
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=_TINY)
    for _ in range(_STEPS):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if upright else x


def _orthogonalize_by_shape(matrices: list[Tensor]) -> None:
    """Orthogonalise in place, all matrices of a shape at once, and scale each to the size of Adam's update."""
    by_shape: dict[tuple[int, ...], list[Tensor]] = {}
    for matrix in matrices:
        by_shape.setdefault(tuple(matrix.shape), []).append(matrix)
    for shape, group in by_shape.items():
        dtype = torch.bfloat16 if group[0].is_cuda else group[0].dtype
        stacked = group[0].new_empty((len(group), *shape), dtype=dtype)
        torch._foreach_copy_(list(stacked), group)
        stacked = orthogonalize(stacked).mul_(_UPDATE_RMS * math.sqrt(max(shape)))
        torch._foreach_copy_(group, list(stacked))


def _gradients(weights: list[Tensor]) -> list[Tensor]:
    return [cast(Tensor, weight.grad) for weight in weights]
