"""The Polyak average of the weights along a run (section 4.2: factor 0.9999 for the ImageNet results)."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Average:
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
