"""The training state (weights, optimizer state, EMA, progress), and how it is saved and restored.

Keys are parameter names, so a state that N processes saved is resumed by M, sharded or not.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vitral.checkpoints.run import RunFolder, SavedState
from vitral.errors import UserError
from vitral.training.parallel import World, full_tensor, is_sharded, on_rank0, placed_like


class EMA:
    """Exponential moving average of the trainable weights, the paper's Polyak averaging (section 4.2, decay 0.9999).

    sums = decay * sums + (1 - decay) * weights after every step, from 0 on. The average is sums / (1 - decay ** steps),
    bias-corrected like Adam's moments: initial weights have no influence, however short the run.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.sums: dict[str, Tensor] = {
            name: torch.zeros_like(parameter, requires_grad=False)
            for name, parameter in trainable_parameters(model).items()
        }

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Add the weights after the latest step."""
        current = list(trainable_parameters(model).values())
        torch._foreach_lerp_(list(self.sums.values()), current, 1.0 - self.decay)

    def reset(self) -> None:
        """Forget all steps."""
        torch._foreach_zero_(list(self.sums.values()))

    def average(self, steps: int) -> dict[str, Tensor]:
        """The averaged weights after this many steps; none before the first."""
        return {name: value / (1.0 - self.decay**steps) for name, value in self.sums.items()} if steps else {}


def trainable_parameters(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that require a gradient, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


@dataclass
class TrainProgress:
    """The state of a run besides its tensors; saved with them as JSON."""

    seconds: float = 0.0  # of all its sessions
    best_score: float | None = None
    best_step: int = 0
    evaluations_since_best: int = 0
    metrics: dict[str, Any] | None = None  # of the weights that are kept
    evaluation_due: bool = False  # a stop request came before the evaluation of this step was done
    stopped_early: bool = False  # by patience or a callback
    callbacks: list[Any] = field(default_factory=list)  # the state_dict() of each callback that has one


@dataclass
class TrainState:
    """The state that the loop updates and a checkpoint contains.

    `wrapped` is the objective (model and loss) as DDP or FSDP wrap it for several processes; `model` is the plain model
    inside it.
    """

    wrapped: nn.Module
    model: nn.Module
    optimizer: torch.optim.Optimizer
    ema: EMA | None = None
    step: int = 0  # steps done
    progress: TrainProgress = field(default_factory=TrainProgress)

    @property
    def objective(self) -> Any:
        """The model with its loss, without the wrapper."""
        return getattr(self.wrapped, "module", self.wrapped)


def save_state(state: TrainState, folder: RunFolder, world: World, keep: int) -> None:
    """Write the state. Every process takes part; one writes, or all write their shards."""
    tensors, progress = _tensors(state), asdict(state.progress)
    if is_sharded(state.wrapped):
        folder.write_shards(state.step, tensors)
        on_rank0(lambda: folder.name_shards(state.step, progress, keep), world)
    else:
        on_rank0(lambda: folder.save_state(state.step, tensors, progress, keep), world)


@torch.no_grad()
def restore_state(state: TrainState, saved: SavedState) -> None:
    """Load a saved state, written by any number of processes."""
    parameters = dict(state.model.named_parameters())
    if saved.is_sharded:
        tensors = {key: _empty_like(key, parameters) for key in saved.names()}
        saved.load_sharded(tensors)
    else:
        tensors = saved.tensors()
    for name, parameter in parameters.items():
        parameter.copy_(placed_like(tensors[f"model/{name}"], parameter))
    for name, buffer in _saved_buffers(state).items():
        buffer.copy_(tensors[f"buffer/{name}"].to(buffer.device))
    state.optimizer.state.clear()
    for key, value in tensors.items():
        if key.startswith("optimizer/"):
            _, moment, name = key.split("/", 2)
            state.optimizer.state[parameters[name]][moment] = _moment(value, parameters[name], state.optimizer)
    if state.ema is not None:
        for name, value in state.ema.sums.items():
            value.copy_(placed_like(tensors[f"ema/{name}"], value))
    state.step = saved.step
    state.progress = TrainProgress(**{key: value for key, value in saved.facts.items() if key != "step"})


def evaluated_weights(state: TrainState) -> dict[str, Tensor]:
    """The weights to evaluate and keep: the EMA if there is one, else the latest. All processes must call this."""
    weights = {name: full_tensor(value.detach()) for name, value in state.model.named_parameters()}
    if state.ema is not None:
        weights |= {name: full_tensor(value) for name, value in state.ema.average(state.step).items()}
    return weights | _saved_buffers(state)


def _tensors(state: TrainState) -> dict[str, Tensor]:
    names = {parameter: name for name, parameter in state.model.named_parameters()}
    tensors = {f"model/{name}": parameter.detach() for parameter, name in names.items()}
    tensors |= {f"buffer/{name}": buffer for name, buffer in _saved_buffers(state).items()}
    for parameter, name in names.items():
        for moment, value in state.optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"optimizer/{moment}/{name}"] = value
            elif value is not None:
                raise UserError(
                    f"{type(state.optimizer).__name__} keeps {moment!r} as a {type(value).__name__}, which cannot be "
                    "saved and resumed: use an optimizer whose state is tensors."
                )
    if state.ema is not None:
        tensors |= {f"ema/{name}": value for name, value in state.ema.sums.items()}
    return tensors


def _saved_buffers(state: TrainState) -> dict[str, Tensor]:
    """Persistent buffers, such as the running statistics of BatchNorm; vitral's own models have none."""
    parameters = dict(state.model.named_parameters())
    return {name: value for name, value in state.model.state_dict().items() if name not in parameters}


def _empty_like(key: str, parameters: dict[str, nn.Parameter]) -> Tensor:
    """Memory for a tensor of a sharded state: like its parameter, but for the optimizer's step counts."""
    if key.startswith("optimizer/step/"):
        return torch.zeros(())
    return torch.zeros_like(parameters[key.split("/", 2)[-1] if key.startswith("optimizer/") else key.split("/", 1)[1]])


def _moment(value: Tensor, parameter: nn.Parameter, optimizer: torch.optim.Optimizer) -> Tensor:
    if value.ndim:
        return placed_like(value, parameter)
    on_device = optimizer.defaults.get("fused") or optimizer.defaults.get("capturable")
    return value.to(parameter.device if on_device else "cpu")
