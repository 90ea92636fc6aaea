"""Everything that training changes, taken out and put back: weights, optimizer moments, their average.

Keys are names of parameters, so a state that N processes saved is resumed by M, sharded or not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vitral.checkpoints.run import RunFolder, SavedState
from vitral.training.average import Average
from vitral.training.parallel import World, by_first, is_sharded, placed_like, whole


@dataclass
class Trainee:
    """What the loop works on. `wrapped` is the objective for processes, `model` the plain model inside it."""

    wrapped: nn.Module
    model: nn.Module
    optimizer: torch.optim.Optimizer
    average: Average | None = None
    step: int = 0  # steps done
    facts: dict[str, Any] = field(default_factory=dict)  # the best value so far and the like; saved with the state

    @property
    def objective(self) -> Any:
        """The model with its loss, without what wraps it for processes."""
        return getattr(self.wrapped, "module", self.wrapped)


def save(trainee: Trainee, folder: RunFolder, world: World, keep: int) -> None:
    """Write the state; every process takes part, one writes (all write shards where the weights are sharded)."""
    tensors = _tensors(trainee)
    if is_sharded(trainee.wrapped):
        folder.write_shards(trainee.step, tensors)
        by_first(lambda: folder.name_shards(trainee.step, trainee.facts, keep), world)
    else:
        by_first(lambda: folder.save_state(trainee.step, tensors, trainee.facts, keep), world)


@torch.no_grad()
def restore(trainee: Trainee, saved: SavedState) -> None:
    """Put a saved state back, whatever number of processes wrote it."""
    parameters = dict(trainee.model.named_parameters())
    if saved.is_sharded:
        tensors = {key: _empty(key, parameters) for key in saved.names()}
        saved.load_sharded(tensors)
    else:
        tensors = saved.tensors()
    for name, parameter in parameters.items():
        parameter.copy_(placed_like(tensors[f"model/{name}"], parameter))
    trainee.optimizer.state.clear()
    for key, value in tensors.items():
        if key.startswith("optimizer/"):
            _, moment, name = key.split("/", 2)
            trainee.optimizer.state[parameters[name]][moment] = _moment(value, parameters[name], trainee.optimizer)
    if trainee.average is not None:
        for name, value in trainee.average.state.items():
            value.copy_(placed_like(tensors[f"average/{name}"], value))
    trainee.step = saved.step
    trainee.facts = {key: value for key, value in saved.facts.items() if key != "step"}


def whole_weights(trainee: Trainee) -> dict[str, Tensor]:
    """The weights to evaluate and keep: the average where there is one, else the latest. All processes must call it."""
    weights = {name: whole(value.detach()) for name, value in trainee.model.named_parameters()}
    if trainee.average is not None:
        weights |= {name: whole(value) for name, value in trainee.average.state.items()}
    return weights


def _tensors(trainee: Trainee) -> dict[str, Tensor]:
    names = {parameter: name for name, parameter in trainee.model.named_parameters()}
    tensors = {f"model/{name}": parameter.detach() for parameter, name in names.items()}
    for parameter, name in names.items():
        for moment, value in trainee.optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"optimizer/{moment}/{name}"] = value
    if trainee.average is not None:
        tensors |= {f"average/{name}": value for name, value in trainee.average.state.items()}
    return tensors


def _empty(key: str, parameters: dict[str, nn.Parameter]) -> Tensor:
    """Room for a tensor of a sharded state: like its parameter, but for the optimizer's step counts."""
    if key.startswith("optimizer/step/"):
        return torch.zeros(())
    return torch.zeros_like(parameters[key.split("/", 2)[-1] if key.startswith("optimizer/") else key.split("/", 1)[1]])


def _moment(value: Tensor, parameter: nn.Parameter, optimizer: torch.optim.Optimizer) -> Tensor:
    if value.ndim:
        return placed_like(value, parameter)
    on_device = optimizer.defaults.get("fused") or optimizer.defaults.get("capturable")
    return value.to(parameter.device if on_device else "cpu")
