"""Fast and wrong does not count: a backend's logits and gradients beside those of the plain float32 model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.bench.backends import Backend, Task
from vitral.bench.steps import Classifier, Outputs, Step, WrongAnswers, classifier, named_gradients

# Of the norm. Half precision keeps 8 bits of each number; float32 differs by the order of sums only.
TOLERANCES = {"bfloat16": 2e-2, "float32": 1e-4}
# The gradient of one parameter may be off by more than the whole is. Those that are nearly zero (a key's bias has no
# effect at all) are held against a share of the whole gradient instead.
_SINGLE = 4.0
_SMALL = 1e-2
BATCH = 4


class Agreement(NamedTuple):
    """Differences as shares of the norm."""

    logits: float
    gradients: float  # 0 where none are computed
    single: float  # the worst parameter's
    parameter: str
    tolerance: float


def check(step: Step, backend: Backend, task: Task) -> Agreement:
    """Compare with the plain model; raises WrongAnswers. `task` is the small one that `step` was made for."""
    plain = plain_outputs(classifier(backend, task), step, learning=task.work == "train")
    return compare(step.outputs(), plain, TOLERANCES[task.precision], backend.label)


def plain_outputs(model: Classifier, step: Step, *, learning: bool) -> Outputs:
    """Eager, in float32, with attention as it is written in the paper, on the step's own batch."""
    images = step.images if step.images.dtype == torch.uint8 else step.images.float()
    model.train(learning)
    with (
        torch.backends.cudnn.flags(allow_tf32=False),
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        torch.set_grad_enabled(learning),
    ):
        logits = model(images)
        if learning:
            F.cross_entropy(logits, step.labels).backward()
    return Outputs(logits.detach(), {name: weight.grad for name, weight in named_gradients(model)})


def compare(fast: Outputs, plain: Outputs, tolerance: float, label: str) -> Agreement:
    """Raises WrongAnswers where a difference is above its tolerance, or where a gradient is missing."""
    if set(fast.gradients) != set(plain.gradients):
        missing = ", ".join(sorted(set(fast.gradients) ^ set(plain.gradients))[:4])
        raise WrongAnswers(f"{label} and the plain model do not give gradients of the same parameters: {missing}.")
    logits = _apart(fast.logits, plain.logits, 0.0)
    whole = _norm(plain.gradients)
    differences = {name: fast.gradients[name].float() - gradient for name, gradient in plain.gradients.items()}
    gradients = _norm(differences) / whole if differences else 0.0
    single, parameter = max(
        ((_apart(fast.gradients[name], own, _SMALL * whole), name) for name, own in plain.gradients.items()),
        default=(0.0, ""),
    )
    found = Agreement(logits, gradients, single, parameter, tolerance)
    # Written so that a NaN fails too.
    if not (logits <= tolerance and gradients <= tolerance and single <= _SINGLE * tolerance):
        raise WrongAnswers(
            f"{label} is not the plain float32 model: logits differ by {logits:.1e} of their norm, gradients by "
            f"{gradients:.1e} (at most {tolerance:g}), that of {parameter or 'no parameter'} by {single:.1e} "
            f"(at most {_SINGLE * tolerance:g}); no row is written."
        )
    return found


def _apart(fast: Tensor, plain: Tensor, least: float) -> float:
    difference = float(torch.linalg.vector_norm(fast.float() - plain.float()))
    return difference / max(float(torch.linalg.vector_norm(plain.float())), least, 1e-30)


def _norm(tensors: Mapping[str, Tensor]) -> float:
    norms = [torch.linalg.vector_norm(tensor.float()) for tensor in tensors.values()]
    return float(torch.stack(norms).norm()) if norms else 0.0
