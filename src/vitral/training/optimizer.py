"""Trainable parameters, their learning rates, and optimizers, including vitral's own Muon.

Muon (Jordan 2024; Liu et al. 2025) orthogonalises the momentum of a weight matrix before it updates the weight: a
matrix is then updated equally in all directions, not mostly in the few that its gradient is largest in. What is not a
matrix between hidden layers (embeddings, positions, norms, biases, the head) is updated by AdamW.

Why not `torch.optim.Muon`: it takes one matrix per parameter, where queries, keys and values are three in one, leaves
other parameters to a second optimizer, and its step cannot be captured in a CUDA graph; benchmarks/muon.py measures it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.adamw import adamw

from vitral.errors import UserError
from vitral.models.adapters import add_lora
from vitral.models.model import VisionModel
from vitral.training.parallel import local_shard

_BEFORE_BLOCKS = ("stem", "embed", "class_token", "registers", "root", "mask_token")
_MUON_STEPS = 5
# Jordan's quintic: steep at 0, so that five steps lift small singular values too; it ends near 1, not at it.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_UPDATE_RMS = 0.2  # root mean square of Adam's usual update, so that both kinds share one learning rate
_TINY = 1e-7  # the smallest norm that is divided by


def freeze(model: nn.Module, trainable: str) -> None:
    """Freeze all but a part of the model, and the head; any module but a ViT, hybrid or ResNet takes "full" or "bias".

    "last:K" trains the last K blocks or stages and what follows them, "lora:R" adapters, which are added.
    """
    kind, _, amount = trainable.partition(":")
    if kind == "lora":
        add_lora(model, int(amount))
        return
    if kind not in ("full", "head", "last", "bias"):
        raise UserError(f'trainable="{trainable}" is not one of full, head, bias, last:K, lora:R.')
    if kind in ("head", "last") and _depth(model) == 0:
        raise UserError(
            f'trainable="{trainable}" needs a model of vitral: train your own module in full, or freeze it.'
        )
    last = _depth(model) + 1
    first = {"full": 0, "last": last - int(amount or 0)}.get(kind, last + 1)
    if kind == "last" and not 1 <= first < last:
        raise UserError(
            f'trainable="{trainable}" does not fit a model of {last - 1} layers: use last:1 to '
            f"last:{last - 1}, or full."
        )
    if kind == "full" and _depth(model) == 0:
        return  # what the user froze in their own module stays frozen
    for name, parameter in model.named_parameters():
        trained = _is_head(name) or layer_index(name, model) >= first or (kind == "bias" and name.endswith(".bias"))
        parameter.requires_grad_(trained)


def layer_index(name: str, model: nn.Module) -> int:
    """How deep a parameter is: 0 before the first block (or stage), then 1, 2, ...; norm, pooling and head last."""
    # Of a model inside another, as for masked patches.
    part, *rest = name.removeprefix("model.").removeprefix("autoencoder.encoder.").split(".")
    if part in ("blocks", "stages"):
        return int(rest[0]) + 1
    if part == "positions":
        return int(rest[0])  # table i is added before block i
    return 0 if part in _BEFORE_BLOCKS else _depth(model) + 1


def parameter_groups(
    model: nn.Module,
    *,
    lr: float | None = None,
    weight_decay: float = 0.0,
    layer_decay: float = 1.0,
    head_lr: float = 1.0,
) -> list[dict[str, Any]]:
    """The trained parameters in groups for any optimizer of PyTorch, as recipes group them.

    Only kernels decay, the weights of linear layers and convolutions. Biases, norms, class token, registers, positions,
    LayerScale, the probe of attention pooling and adapters do not (big_vision's rule).

    Args:
        model: a model of vitral, not yet inside torch.compile or DistributedDataParallel.
        lr: learning rate of the last layers; without it, groups have none.
        weight_decay: weight decay of kernels.
        layer_decay: factor of the learning rate from one block to the block before it.
        head_lr: factor of the learning rate of the head.

    Returns:
        Groups that share a weight decay, a learning rate, its `factor`, and what Muon has to know (`matrices`).

    Raises:
        UserError: the layers are not known, as of a module of your own.
    """
    if _is_wrapped(model):
        raise UserError("parameter_groups needs the model itself: call it before torch.compile or DDP wraps the model.")
    kernels = {id(layer.weight) for layer in model.modules() if isinstance(layer, nn.Linear | nn.Conv2d)}
    matrices = _muon_matrices(model)
    last = _depth(model) + 1
    if last == 1 and layer_decay != 1.0:
        raise UserError("optim.layer_decay needs a model of vitral: set optim.layer_decay=1 for your own module.")

    def rate(factor: float) -> dict[str, float]:
        return {} if lr is None else {"lr": lr * factor}

    groups: dict[tuple[float, float, int], list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        factor = layer_decay ** (last - layer_index(name, model)) * (head_lr if _is_head(name) else 1.0)
        decay = weight_decay if id(parameter) in kernels else 0.0
        groups.setdefault((factor, decay, matrices.get(id(parameter), 0)), []).append(parameter)
    return [
        {"params": parameters, "weight_decay": decay, "factor": factor, "matrices": count, **rate(factor)}
        for (factor, decay, count), parameters in groups.items()
    ]


def build_optimizer(
    groups: list[dict[str, Any]],
    *,
    name: str = "adamw",
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    momentum: float = 0.9,
) -> torch.optim.Optimizer:
    """Build an optimizer of the recipe for the groups of `parameter_groups`, which multiply the rate with a `factor`:

    "adamw" (decay decoupled and multiplied by the rate, as in AugReg), "adam" (decay added to the gradient), "sgd"
    (momentum, decay added to the gradient, as in BiT) or "muon".
    """
    if not groups:
        raise UserError("no parameter is left to train: set trainable to full, head, bias, last:K or lora:R.")
    parameters = [parameter for group in groups for parameter in group["params"]]
    fused = all(parameter.is_cuda for parameter in parameters) or None
    capturable = bool(fused) and all(local_shard(parameter) is parameter for parameter in parameters)
    if capturable:  # a replayed CUDA graph reads the rate from the tensor it was captured with
        groups = [group | {"lr": torch.tensor(lr, device=group["params"][0].device)} for group in groups]
    if name in ("adam", "adamw"):
        kind = torch.optim.AdamW if name == "adamw" else torch.optim.Adam
        optimizer: torch.optim.Optimizer = kind(groups, lr=lr, betas=(beta1, beta2), fused=fused, capturable=capturable)
    elif name == "sgd":
        optimizer = torch.optim.SGD(groups, lr=lr, momentum=momentum, fused=fused)
    elif name == "muon":
        if not any(group.get("matrices") for group in groups):
            raise UserError("muon is for the linear layers of blocks, and none is trained: set optim.name=adamw.")
        optimizer = Muon(groups, lr=lr, betas=(beta1, beta2), momentum=momentum)
    else:
        raise UserError(f'unknown optimizer "{name}": use adamw, adam, sgd or muon.')
    set_lr(optimizer, lr)
    return optimizer


def own_optimizer(
    factory: Callable[[list[dict[str, object]]], torch.optim.Optimizer], groups: list[dict[str, Any]], peak_lr: float
) -> torch.optim.Optimizer:
    """A user's optimizer over our parameter groups. The rates it sets are the peaks that the schedule scales."""
    if isinstance(factory, torch.optim.Optimizer):
        name = type(factory).__name__
        raise UserError(
            f"optimizer= takes a function of parameter groups, not an optimizer: lambda groups: {name}(groups, lr=...)."
        )
    optimizer = factory([{"params": group["params"], "weight_decay": group["weight_decay"]} for group in groups])
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(f"optimizer= must return a torch.optim.Optimizer, not {type(optimizer).__name__}.")
    for group in optimizer.param_groups:
        group["factor"] = float(group["lr"]) / peak_lr
    return optimizer


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of the next step, times the factor of each group."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr * group["factor"])
        else:
            group["lr"] = lr * group["factor"]


def _muon_matrices(model: nn.Module) -> dict[int, int]:
    """The weights between hidden layers, by identity, and how many matrices each holds: queries, keys, values are 3."""
    layers = [(name.split("."), layer) for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    return {id(layer.weight): 3 if name[-1] == "qkv" else 1 for name, layer in layers if "blocks" in name}


def _depth(model: nn.Module) -> int:
    """The number of blocks or stages; 0 for a module that is not vitral's."""
    inner = getattr(model, "model", model)
    if not hasattr(inner, "patchify"):
        return 0
    layers = getattr(inner, "blocks", None) or getattr(inner, "stages", None)
    assert isinstance(layers, nn.ModuleList)
    return len(layers)


def _is_wrapped(model: nn.Module) -> bool:
    """Whether it is a model of vitral inside torch.compile or data parallelism, which rename its parameters."""
    parallel = isinstance(model, DataParallel | DistributedDataParallel)
    inner = model.module if parallel else getattr(model, "_orig_mod", None)
    return inner is not None and (isinstance(inner, VisionModel) or _is_wrapped(inner))


def _is_head(name: str) -> bool:
    return name.removeprefix("model.").startswith("head.")  # of a model inside another, too


def learning_rate(
    step: int,
    *,
    base: float,
    total: int,
    kind: str = "cosine",
    warmup: float = 0.0,
    full_steps: int = 0,
    end: float = 0.0,
    power: float = 2.0,
    drops: Sequence[float] = (),
    factors: Sequence[float] = (),
    timescale: float = 10_000.0,
    cooldown: float = 0.0,
) -> float:
    """The rate at a step counted from 0; beyond `total` the decay stays where it ended.

    `warmup`, `cooldown` and `drops` are steps, or shares of the run if they are below 1; for `full_steps` see
    `warmup_steps`. Warm-up multiplies the decay curve, whose progress runs from the end of warm-up to the end of the
    run. Google's `linear` ended at 1e-5 in the paper's code and ends at 0 in big_vision: `end` says which.
    """
    warm, cool = warmup_steps(warmup, total, full_steps), steps_of(cooldown, total)
    progress = min(max((step - warm) / max(total - warm, 1), 0.0), 1.0)
    if kind == "cosine":
        rate = base * 0.5 * (1.0 + math.cos(math.pi * progress))
    elif kind == "linear":
        rate = end + (base - end) * (1.0 - progress)
    elif kind == "polynomial":
        rate = end + (base - end) * (1.0 - progress) ** power
    elif kind == "rsqrt":
        rate = base / math.sqrt(1.0 + max(step - warm, 0.0) / timescale)
    elif kind == "multistep":
        passed = bisect_right([steps_of(drop, total) for drop in drops], step)
        rate = base * factors[passed - 1] if passed else base
    elif kind == "constant":
        rate = base
    else:
        raise UserError(f'unknown schedule "{kind}": use cosine, linear, constant, multistep, rsqrt or polynomial.')
    if warm:
        rate *= min(1.0, step / warm)
    if cool:
        rate *= min(1.0, (total - step) / cool)  # below 0 past the end, as in big_vision; no run goes there
    return rate


def warmup_steps(warmup: float, total: int, full_steps: int) -> float:
    """The steps of warm-up in a run of `total` steps.

    A run that is not longer than its warm-up would never reach the peak, nor decay: it takes the share that warm-up has
    of the full run of `full_steps`, or a tenth if that is not known.
    """
    if warmup < 1 or warmup < total:
        return steps_of(warmup, total)
    return float(round(total * (warmup / full_steps if full_steps > warmup else 0.1)))


def steps_of(amount: float, total: int) -> float:
    """Steps stay; below 1 the amount is a share of the run, rounded to whole steps."""
    return float(round(amount * total)) if amount < 1 else amount


class Muon(torch.optim.Optimizer):
    """Orthogonalised momentum for groups with `matrices`, AdamW for the others; weight decay is decoupled in both.

    `matrices` is how many matrices are stacked in each weight of a group: 1, or 3 if a layer computes queries, keys
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
        """Nesterov's look ahead: the gradient plus the momentum that it has just joined."""
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
    for _ in range(_MUON_STEPS):
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
