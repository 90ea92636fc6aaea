"""Which weights learn, how fast each of them, and with which rule."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vitral.errors import UserError
from vitral.models.adapters import add_lora
from vitral.training.muon import Muon
from vitral.training.parallel import local_shard


def freeze(model: nn.Module, trainable: str) -> None:
    """Lets only a part learn: "full", "head", "last:K" (blocks or stages), "bias", "lora:R" (adds the adapters).

    Whatever learns, the head does; "last:K" includes what stands between the blocks and the head.
    """
    kind, _, amount = trainable.partition(":")
    if kind == "lora":
        add_lora(model, int(amount))
        return
    if kind not in ("full", "head", "last", "bias"):
        raise UserError(f'trainable="{trainable}" is not one of full, head, bias, last:K, lora:R.')
    last = _layers(model) + 1
    first = {"full": 0, "last": last - int(amount or 0)}.get(kind, last + 1)
    if kind == "last" and not 1 <= first < last:
        raise UserError(
            f'trainable="{trainable}" does not fit a model of {last - 1} layers: use last:1 to last:{last - 1}, or full.'
        )
    for name, parameter in model.named_parameters():
        learns = _is_head(name) or layer_of(name, model) >= first or (kind == "bias" and name.endswith(".bias"))
        parameter.requires_grad_(learns)


def layer_of(name: str, model: nn.Module) -> int:
    """How deep a parameter sits: 0 before the first block (or stage), then 1, 2, ...; norm, pooling and head last."""
    room, *rest = name.removeprefix("model.").split(".")  # of a model inside another, as for masked patches
    if room in ("blocks", "stages"):
        return int(rest[0]) + 1
    if room == "positions":
        return int(rest[0])  # table i is added before block i
    return 0 if room in ("stem", "embed", "class_token", "registers", "root", "mask_token") else _layers(model) + 1


def parameter_groups(
    model: nn.Module, *, weight_decay: float = 0.0, layer_decay: float = 1.0, head_lr: float = 1.0
) -> list[dict[str, Any]]:
    """What learns, in groups that share a weight decay, a `factor` on the learning rate, and how many `matrices` Muon
    sees in each of their weights.

    Only kernels decay: the weights of linear layers and convolutions. Biases, norms, class token, registers, positions,
    LayerScale, the probe of attention pooling and adapters do not (big_vision's rule).
    """
    kernels = {id(layer.weight) for layer in model.modules() if isinstance(layer, nn.Linear | nn.Conv2d)}
    matrices = _matrices(model)
    last = _layers(model) + 1
    groups: dict[tuple[float, float, int], list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        factor = layer_decay ** (last - layer_of(name, model)) * (head_lr if _is_head(name) else 1.0)
        decay = weight_decay if id(parameter) in kernels else 0.0
        groups.setdefault((factor, decay, matrices.get(id(parameter), 0)), []).append(parameter)
    return [
        {"params": parameters, "weight_decay": decay, "factor": factor, "matrices": number}
        for (factor, decay, number), parameters in groups.items()
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
    """Adam with decoupled decay (the rate multiplies it, as in AugReg), SGD with L2 decay and momentum (BiT), Muon."""
    if not groups:
        raise UserError("nothing is left to learn: set trainable to full, head, bias, last:K or lora:R.")
    parameters = [parameter for group in groups for parameter in group["params"]]
    fused = all(parameter.is_cuda for parameter in parameters) or None
    recordable = bool(fused) and all(local_shard(parameter) is parameter for parameter in parameters)
    if recordable:  # rates in tensors of their own: a step that is replayed reads what stands there then
        groups = [group | {"lr": torch.tensor(lr, device=group["params"][0].device)} for group in groups]
    if name == "adamw":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            groups, lr=lr, betas=(beta1, beta2), fused=fused, capturable=recordable
        )
    elif name == "sgd":
        optimizer = torch.optim.SGD(groups, lr=lr, momentum=momentum, fused=fused)
    elif name == "muon":
        if not any(group.get("matrices") for group in groups):
            raise UserError("muon is for the linear layers of blocks, and none learns here: set optim.name=adamw.")
        optimizer = Muon(groups, lr=lr, betas=(beta1, beta2), momentum=momentum)
    else:
        raise UserError(f'unknown optimizer "{name}": use adam, sgd or muon.')
    set_rate(optimizer, lr)
    return optimizer


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """The learning rate of the step to come, times the factor of each group."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate * group["factor"])
        else:
            group["lr"] = rate * group["factor"]


def _matrices(model: nn.Module) -> dict[int, int]:
    """The weights between hidden layers, by identity, and how many matrices each is: queries, keys and values are 3."""
    layers = [(name.split("."), layer) for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    return {id(layer.weight): 3 if name[-1] == "qkv" else 1 for name, layer in layers if "blocks" in name}


def _layers(model: nn.Module) -> int:
    model = getattr(model, "model", model)
    layers = getattr(model, "blocks", None) or getattr(model, "stages", None)
    assert isinstance(layers, nn.ModuleList)
    return len(layers)


def _is_head(name: str) -> bool:
    return name.startswith("head.")


def learning_rate(
    step: int,
    *,
    base: float,
    total: int,
    kind: str = "cosine",
    warmup: float = 0.0,
    end: float = 0.0,
    power: float = 2.0,
    drops: Sequence[float] = (),
    factors: Sequence[float] = (),
    timescale: float = 10_000.0,
    cooldown: float = 0.0,
) -> float:
    """The rate at a step counted from 0; beyond `total` the decay stays where it ended.

    `warmup`, `cooldown` and `drops` are steps, or shares of the run where they are below 1. Warm-up multiplies the
    decay curve, whose progress runs from the end of warm-up to the end of the run. Google's `linear` ended at 1e-5 in
    the paper's code and ends at 0 in big_vision: `end` says which.
    """
    warm, cool = steps_of(warmup, total), steps_of(cooldown, total)
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


def steps_of(amount: float, total: int) -> float:
    """Steps stay; below 1 the amount is a share of the run, rounded to whole steps."""
    return float(round(amount * total)) if amount < 1 else amount
