"""One step and one evaluation before the first: what fits, how much memory it takes, how long it will go on."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from vitral.data.loader import Batch
from vitral.errors import UserError
from vitral.training.optimizer import set_rate
from vitral.training.parallel import World, all_ranks, is_sharded
from vitral.training.state import TrainState
from vitral.training.step import LoopConfig, Steps, accumulate, drawn_numbers

_CPU_ROWS = 64  # more at a time is no faster on a CPU, and takes more memory


@dataclass(frozen=True)
class ResourceEstimate:
    """What a run will take if it goes on like its first step."""

    plan: LoopConfig
    peak_bytes: int
    step_seconds: float
    evaluation_seconds: float


def preflight(
    train_state: TrainState,
    plan: LoopConfig,
    world: World,
    batches: Callable[[int], Iterator[Batch]],
    evaluate_some: Callable[[], float],
) -> ResourceEstimate:
    """Run a whole step at a rate of 0, which moves no weight, and part of an evaluation; then clear what they left.

    `evaluate_some` evaluates a few images and returns the seconds that all of them would take.
    """
    stream = batches(train_state.step)
    batch = next(stream)
    getattr(stream, "close", lambda: None)()
    plan = _fitting(train_state, plan, world, batch)
    evaluation_seconds = evaluate_some()
    seconds = _step_seconds(train_state, plan, world, batch)
    peak = peak_bytes(world.device)
    train_state.optimizer.state.clear()
    train_state.optimizer.zero_grad(set_to_none=True)
    return ResourceEstimate(plan, peak, seconds, evaluation_seconds)


def first_guess(rows: int, asked: int, device: torch.device) -> int:
    """Rows of a process to compute at a time, before it is known what fits."""
    if asked:
        return min(asked, rows)
    return min(rows, _CPU_ROWS) if device.type == "cpu" else rows


def forget_peak(device: torch.device) -> None:
    """On a GPU `peak_bytes` starts anew: runs that follow each other in one process each have their own."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int:
    """The most memory this process has held: of the GPU where it computes there, else of the machine."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    if os.name == "nt":
        return 0  # not measured there
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _fitting(train_state: TrainState, plan: LoopConfig, world: World, batch: Batch) -> LoopConfig:
    """The plan with pieces small enough for the memory of every process."""
    while not all_ranks(_fits(train_state, plan, world, batch), world):
        if plan.micro == 1:
            raise UserError("memory runs out with one image at a time: choose a smaller model or image.")
        plan = replace(plan, micro=plan.micro // 2)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return plan


def _fits(train_state: TrainState, plan: LoopConfig, world: World, batch: Batch) -> bool:
    """Whether this process can take a step, tried without the others: they would wait for one that runs out of memory.

    Sharded weights cannot do without the others; all processes hold equally much of them, and run out together.
    """
    set_rate(train_state.optimizer, 0.0)
    try:
        numbers = drawn_numbers(train_state, batch)
        accumulate(train_state, plan, world, batch, numbers, exchange=is_sharded(train_state.wrapped))
        train_state.optimizer.step()
    except torch.OutOfMemoryError:
        return False
    return True


def _step_seconds(train_state: TrainState, plan: LoopConfig, world: World, batch: Batch) -> float:
    """The fastest of a few steps, taken as the run takes them; a slow one is run once, since it tells enough.

    Once a step is recorded, those before and the recording itself count no more: the run will replay.
    """
    steps = Steps(train_state, plan, world, lambda event: None)
    times: list[float] = []
    while len(times) < 5 and all_ranks(sum(times) < 0.5, world):
        before, began = steps.recording, time.perf_counter()
        _dry_step(steps, batch)
        times.append(time.perf_counter() - began)
        if steps.recording is not before:
            times.clear()
    return min(times)


def _dry_step(steps: Steps, batch: Batch) -> None:
    set_rate(steps.train_state.optimizer, 0.0)
    if not torch.isfinite(steps.take(batch).loss):
        raise UserError("the first loss is not a finite number: check the weights in init, or set precision=float32.")
    if steps.world.device.type == "cuda":
        torch.cuda.synchronize(steps.world.device)
