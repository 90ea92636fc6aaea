"""The parity check: our fast settings must give the logits and gradients of the eager float32 model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.bench.backends import Backend, Workload
from vitral.bench.steps import (
    BenchmarkModel,
    BenchmarkStep,
    ParityError,
    StepOutputs,
    float32_model,
    parameters_with_gradient,
)

# Relative to the norm. bfloat16 keeps 8 bits of each number; float32 differs by the order of sums only.
TOLERANCES = {"bfloat16": 2e-2, "float32": 1e-4}
# The gradient of one parameter may differ by more than all together. Those that are nearly zero (a key's bias has no
# effect at all) are compared to a share of the norm of the whole gradient instead.
_PARAMETER_FACTOR = 4.0
_SMALL_SHARE = 1e-2
BATCH = 4  # images that are compared


class ParityResult(NamedTuple):
    """Differences relative to the norm."""

    logits: float
    gradients: float  # 0 where none are computed
    worst_gradient: float  # the largest difference of one parameter
    worst_parameter: str
    tolerance: float


def check_parity(step: BenchmarkStep, backend: Backend, workload: Workload) -> ParityResult:
    """Compare a step with the eager float32 model.

    Args:
        step: the step of `backend` and `workload`.
        backend: the library and settings that are checked.
        workload: what is computed, with a small batch.

    Returns:
        The differences.

    Raises:
        ParityError: if a difference is above its tolerance.
    """
    reference = reference_outputs(float32_model(backend, workload), step, training=workload.work == "train")
    return compare(step.outputs(), reference, TOLERANCES[workload.precision], backend.label)


def reference_outputs(model: BenchmarkModel, step: BenchmarkStep, *, training: bool) -> StepOutputs:
    """Run the model eagerly in float32, with PyTorch's math attention, on the batch of a step."""
    images = step.images if step.images.dtype == torch.uint8 else step.images.float()
    model.train(training)
    with (
        torch.backends.cudnn.flags(allow_tf32=False),
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        torch.set_grad_enabled(training),
    ):
        logits = model(images)
        if training:
            F.cross_entropy(logits, step.labels).backward()
    return StepOutputs(logits.detach(), {name: weight.grad for name, weight in parameters_with_gradient(model)})


def compare(fast: StepOutputs, reference: StepOutputs, tolerance: float, label: str) -> ParityResult:
    """Compare outputs; raises ParityError for a difference above its tolerance or a missing gradient."""
    if set(fast.gradients) != set(reference.gradients):
        names = ", ".join(sorted(set(fast.gradients) ^ set(reference.gradients))[:4])
        raise ParityError(f"{label} and the float32 model have gradients of different parameters: {names}.")
    logits = _relative(fast.logits, reference.logits, 0.0)
    norm = _norm(reference.gradients)
    differences = {name: fast.gradients[name].float() - gradient for name, gradient in reference.gradients.items()}
    gradients = _norm(differences) / norm if differences else 0.0
    worst, parameter = max(
        (
            (_relative(fast.gradients[name], grad, _SMALL_SHARE * norm), name)
            for name, grad in reference.gradients.items()
        ),
        default=(0.0, ""),
    )
    worst_tolerance = _PARAMETER_FACTOR * tolerance
    if not (logits <= tolerance and gradients <= tolerance and worst <= worst_tolerance):  # NaN fails too
        raise ParityError(
            f"{label} differs from the float32 model: logits by {logits:.1e} of their norm, gradients by "
            f"{gradients:.1e} (at most {tolerance:g}), that of {parameter or 'no parameter'} by {worst:.1e} "
            f"(at most {worst_tolerance:g}); no row is written."
        )
    return ParityResult(logits, gradients, worst, parameter, tolerance)


def _relative(fast: Tensor, reference: Tensor, least: float) -> float:
    difference = float(torch.linalg.vector_norm(fast.float() - reference.float()))
    return difference / max(float(torch.linalg.vector_norm(reference.float())), least, 1e-30)


def _norm(tensors: Mapping[str, Tensor]) -> float:
    norms = [torch.linalg.vector_norm(tensor.float()) for tensor in tensors.values()]
    return float(torch.stack(norms).norm()) if norms else 0.0
