"""The resource estimate: memory and time, from one step and part of an evaluation before training."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from vitral.data.loader import Batch
from vitral.errors import UserError
from vitral.events import ignore_events
from vitral.kernels.dispatch import check_fp8
from vitral.training.loop import LoopConfig, MicrobatchTooLarge, TrainStep, train_step
from vitral.training.optimizer import set_lr
from vitral.training.parallel import World, all_ranks, is_sharded
from vitral.training.state import TrainState

_CPU_ROWS = 64  # more at a time is no faster on a CPU, and takes more memory


@dataclass(frozen=True)
class ResourceEstimate:
    """The loop's configuration with a microbatch that fits, and the estimated memory and time."""

    config: LoopConfig
    peak_bytes: int
    step_seconds: float
    evaluation_seconds: float


def estimate_resources(
    state: TrainState,
    config: LoopConfig,
    world: World,
    batches: Callable[[int], Iterator[Batch]],
    estimate_evaluation: Callable[[], float],
    nonfinite_reason: Callable[[Tensor], str],
) -> ResourceEstimate:
    """Run a whole step at a learning rate of 0, which changes no weight, and part of an evaluation; then clean up.

    The microbatch is halved until a step fits. `estimate_evaluation` evaluates a few images and returns the seconds
    that all would take. If the loss of the step is not finite, this raises UserError with the `nonfinite_reason`, which
    gets the indices of the step's images.
    """
    restore_buffers = _buffers_kept(state.objective)
    stream = batches(state.step)
    batch = next(stream)
    getattr(stream, "close", lambda: None)()
    config = _fitting(state, config, world, batch)
    evaluation_seconds = estimate_evaluation()
    step_seconds = _step_seconds(TrainStep(state, config, world, ignore_events), batch, nonfinite_reason)
    peak = peak_bytes(world.device)
    state.optimizer.state.clear()
    state.optimizer.zero_grad(set_to_none=True)
    restore_buffers()
    if state.ema is not None:
        state.ema.reset()
    return ResourceEstimate(config, peak, step_seconds, evaluation_seconds)


def _buffers_kept(module: nn.Module) -> Callable[[], None]:
    """A function that gives all buffers the tensors and values that they have now.

    The steps of the estimate would count in the running statistics of BatchNorm, and the machine's speed decides how
    many there are. Modules may also assign new tensors to their buffers, or hold some that cannot be written.
    """
    kept = [
        (owner, name, buffer, None if buffer is None else buffer.clone())
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
    ]

    @torch.no_grad()
    def restore() -> None:
        for owner, name, buffer, before in kept:
            if buffer is not None and before is not None and not torch.equal(buffer, before):
                buffer.copy_(before)
            if getattr(owner, name, None) is not buffer:
                setattr(owner, name, buffer)

    return restore


def initial_microbatch(rows: int, requested: int, device: torch.device) -> int:
    """Initial microbatch of a process, before it is known what fits."""
    if requested:
        return min(requested, rows)
    return min(rows, _CPU_ROWS) if device.type == "cpu" else rows


def reset_peak(device: torch.device) -> None:
    """Reset `peak_bytes` of a GPU, so that consecutive runs of one process are measured separately."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int:
    """Peak memory of this process: of the GPU if it uses one, else of the machine."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    if os.name == "nt":
        return 0  # not measured there
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _fitting(state: TrainState, config: LoopConfig, world: World, batch: Batch) -> LoopConfig:
    """The configuration with a microbatch that fits into the memory of every process."""
    while not all_ranks(_fits(state, config, world, batch), world):
        if config.microbatch == 1:
            raise UserError("memory runs out with one image at a time: choose a smaller model or image.")
        config = replace(config, microbatch=config.microbatch // 2)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return config


def _fits(state: TrainState, config: LoopConfig, world: World, batch: Batch) -> bool:
    """Whether a step fits into the memory of this process, tried without the others, which would wait for a failed one.

    Sharded weights need all processes; their shards have the same size, so they run out of memory together.
    """
    set_lr(state.optimizer, 0.0)
    try:
        draws = state.objective.draw(state.step, tuple(batch.images.shape[-2:]))
        train_step(state, config, world, batch, draws, sync=is_sharded(state.wrapped))
    except (MicrobatchTooLarge, torch.OutOfMemoryError):
        return False
    return True


def _step_seconds(take_step: TrainStep, batch: Batch, nonfinite_reason: Callable[[Tensor], str]) -> float:
    """Seconds of the fastest of a few steps, as in the run; slow steps are timed once.

    Once a step is captured, earlier steps and the capture itself are not counted: the run will replay.
    """
    times: list[float] = []
    while len(times) < 5 and all_ranks(sum(times) < 0.5, take_step.world):
        before, began = take_step.graph, time.perf_counter()
        _dry_step(take_step, batch, nonfinite_reason)
        times.append(time.perf_counter() - began)
        if take_step.graph is not before:
            times.clear()
    return min(times)


def _dry_step(take_step: TrainStep, batch: Batch, nonfinite_reason: Callable[[Tensor], str]) -> None:
    set_lr(take_step.state.optimizer, 0.0)
    if not torch.isfinite(take_step(batch).loss):
        raise UserError(nonfinite_reason(batch.indices))
    if take_step.world.device.type == "cuda":
        torch.cuda.synchronize(take_step.world.device)


def autocast_dtype(precision: str, device: torch.device) -> torch.dtype | None:
    """bfloat16 if requested (FP8 is within it), or on a GPU that computes in it; on a CPU only if requested."""
    if precision == "fp8":
        check_fp8(device)
    supported = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if precision in ("bfloat16", "fp8") or (precision == "auto" and supported) else None
