"""Parity check: whether vitral's fast settings give the logits and gradients of the eager float32 model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.bench.backends import is_vit
from vitral.bench.steps import (
    ParityError,
    StepOutputs,
    TimedStep,
    float32_model,
    is_int8,
    parameters_with_gradient,
)

# Relative to the norm. bfloat16 keeps 8 bits of each number, FP8 (e4m3) 4 of those that the blocks multiply; float32
# differs by the order of sums only.
TOLERANCES = {"fp8": 0.15, "int8": 0.1, "bfloat16": 2e-2, "float32": 1e-4}
# The gradient of one parameter may differ by more than all together. Those that are nearly zero (a key's bias has no
# effect at all) are compared to a share of the norm of the whole gradient instead.
_PARAMETER_FACTOR = 4.0
_SMALL_SHARE = 1e-2
PARITY_BATCH = 4  # images that are compared
_ROUNDING_FACTOR = 1.5  # our kernels against PyTorch's operators, where rounding alone exceeds the tolerance


class ParityResult(NamedTuple):
    """Differences relative to the norm."""

    logits: float
    gradients: float  # 0 if none are computed
    worst_gradient: float  # the largest difference of one parameter
    tolerance: float


def check_parity(step: TimedStep) -> ParityResult:
    """Compare a step of a small batch with the eager float32 model; raises ParityError above a tolerance.

    In a ResNet rounding flips ReLUs: there, as far as PyTorch's own norms in bfloat16 are from float32 is tolerated.
    """
    reference = reference_outputs(step)
    precision = "fp8" if step.backend.fp8 else "int8" if is_int8(step.backend) else step.workload.precision
    tolerance = TOLERANCES[precision]
    if precision == "bfloat16" and not is_vit(step.workload.architecture):
        rounding, _ = _differences(reference_outputs(step, half=True), reference, tolerance)
        worst = rounding.worst_gradient / _PARAMETER_FACTOR
        tolerance = max(tolerance, _ROUNDING_FACTOR * max(rounding.logits, rounding.gradients, worst))
    return compare(step.outputs(), reference, tolerance, step.backend.label)


def reference_outputs(step: TimedStep, *, half: bool = False) -> StepOutputs:
    """Run the model eagerly in float32, with PyTorch's math attention, on the batch of a step.

    With `half`, in bfloat16 with PyTorch's own GroupNorm, which a hook keeps from being replaced.
    """
    training = step.workload.work == "train"
    model = float32_model(step.backend, step.workload).train(training)
    for module in model.modules():
        if half and isinstance(module, nn.GroupNorm):
            module.register_forward_hook(lambda *_: None)
    with (
        torch.backends.cudnn.flags(enabled=True, allow_tf32=False),
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        torch.set_grad_enabled(training),
        torch.autocast(step.workload.device, torch.bfloat16, enabled=half),
    ):
        logits = model(step.images)  # the model is float32, and so are the images that it takes
        if training:
            F.cross_entropy(logits.float(), step.labels).backward()
    return StepOutputs(logits.detach(), {name: weight.grad for name, weight in parameters_with_gradient(model)})


def compare(fast: StepOutputs, reference: StepOutputs, tolerance: float, label: str) -> ParityResult:
    """Compare outputs; raises ParityError for a difference above its tolerance or a missing gradient."""
    if set(fast.gradients) != set(reference.gradients):
        names = ", ".join(sorted(set(fast.gradients) ^ set(reference.gradients))[:4])
        raise ParityError(f"{label} and the float32 model have gradients of different parameters: {names}.")
    result, parameter = _differences(fast, reference, tolerance)
    worst, most = result.worst_gradient, _PARAMETER_FACTOR * tolerance
    if not (result.logits <= tolerance and result.gradients <= tolerance and worst <= most):  # NaN fails too
        raise ParityError(
            f"{label} differs from the float32 model: logits by {result.logits:.1e} of their norm, gradients by "
            f"{result.gradients:.1e} (at most {tolerance:.2g}), that of {parameter} by {worst:.1e} "
            f"(at most {most:.2g}); no row is written."
        )
    return result


def _differences(fast: StepOutputs, reference: StepOutputs, tolerance: float) -> tuple[ParityResult, str]:
    """Relative to the norm; and the parameter whose gradient differs most."""
    logits = _relative(fast.logits, reference.logits, 0.0)
    norm = _norm(reference.gradients.values())
    pairs = {name: (fast.gradients[name], gradient) for name, gradient in reference.gradients.items()}
    gradients = _norm(first.float() - second for first, second in pairs.values()) / norm if pairs else 0.0
    relative = ((_relative(*pair, _SMALL_SHARE * norm), name) for name, pair in pairs.items())
    worst, parameter = max(relative, default=(0.0, "no parameter"))
    return ParityResult(logits, gradients, worst, tolerance), parameter


def _relative(fast: Tensor, reference: Tensor, least: float) -> float:
    difference = float(torch.linalg.vector_norm(fast.float() - reference.float()))
    return difference / max(float(torch.linalg.vector_norm(reference.float())), least, 1e-30)


def _norm(tensors: Iterable[Tensor]) -> float:
    norms = [torch.linalg.vector_norm(tensor.float()) for tensor in tensors]
    return float(torch.stack(norms).norm()) if norms else 0.0
