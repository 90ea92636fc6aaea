"""Everything that training changes, taken out and put back: weights, optimizer moments, their average.

Keys are names of parameters, so a state that N processes saved is resumed by M, sharded or not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vitral.checkpoints.run import RunFolder, SavedState
from vitral.training.parallel import World, full_tensor, is_sharded, on_rank0, placed_like


class EMA:
    """state = factor * state + (1 - factor) * weights, after every step, over the parameters that learn.

    The plain rule from the first step on: the average starts at the initial weights and forgets them over some
    1 / (1 - factor) steps, so a run much shorter than that wants a smaller factor. The state is all there is to save.
    """

    def __init__(self, model: nn.Module, factor: float) -> None:
        self.factor = factor
        self.state: dict[str, Tensor] = {name: weight.detach().clone() for name, weight in _learning(model).items()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Takes in the weights that a step just made."""
        torch._foreach_lerp_(list(self.state.values()), list(_learning(model).values()), 1.0 - self.factor)


def _learning(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


@dataclass
class TrainState:
    """What the loop works on. `wrapped` is the objective for processes, `model` the plain model inside it."""

    wrapped: nn.Module
    model: nn.Module
    optimizer: torch.optim.Optimizer
    average: EMA | None = None
    step: int = 0  # steps done
    facts: dict[str, Any] = field(default_factory=dict)  # the best value so far and the like; saved with the state

    @property
    def objective(self) -> Any:
        """The model with its loss, without what wraps it for processes."""
        return getattr(self.wrapped, "module", self.wrapped)


def save(train_state: TrainState, folder: RunFolder, world: World, keep: int) -> None:
    """Write the state; every process takes part, one writes (all write shards where the weights are sharded)."""
    tensors = _tensors(train_state)
    if is_sharded(train_state.wrapped):
        folder.write_shards(train_state.step, tensors)
        on_rank0(lambda: folder.name_shards(train_state.step, train_state.facts, keep), world)
    else:
        on_rank0(lambda: folder.save_state(train_state.step, tensors, train_state.facts, keep), world)


@torch.no_grad()
def restore(train_state: TrainState, saved: SavedState) -> None:
    """Put a saved state back, whatever number of processes wrote it."""
    parameters = dict(train_state.model.named_parameters())
    if saved.is_sharded:
        tensors = {key: _empty(key, parameters) for key in saved.names()}
        saved.load_sharded(tensors)
    else:
        tensors = saved.tensors()
    for name, parameter in parameters.items():
        parameter.copy_(placed_like(tensors[f"model/{name}"], parameter))
    train_state.optimizer.state.clear()
    for key, value in tensors.items():
        if key.startswith("optimizer/"):
            _, moment, name = key.split("/", 2)
            train_state.optimizer.state[parameters[name]][moment] = _moment(
                value, parameters[name], train_state.optimizer
            )
    if train_state.average is not None:
        for name, value in train_state.average.state.items():
            value.copy_(placed_like(tensors[f"average/{name}"], value))
    train_state.step = saved.step
    train_state.facts = {key: value for key, value in saved.facts.items() if key != "step"}


def full_weights(train_state: TrainState) -> dict[str, Tensor]:
    """The weights to evaluate and keep: the average where there is one, else the latest. All processes must call it."""
    weights = {name: full_tensor(value.detach()) for name, value in train_state.model.named_parameters()}
    if train_state.average is not None:
        weights |= {name: full_tensor(value) for name, value in train_state.average.state.items()}
    return weights


def _tensors(train_state: TrainState) -> dict[str, Tensor]:
    names = {parameter: name for name, parameter in train_state.model.named_parameters()}
    tensors = {f"model/{name}": parameter.detach() for parameter, name in names.items()}
    for parameter, name in names.items():
        for moment, value in train_state.optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"optimizer/{moment}/{name}"] = value
    if train_state.average is not None:
        tensors |= {f"average/{name}": value for name, value in train_state.average.state.items()}
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
