"""The training loop and its step: pre-training, fine-tuning, masked pre-training and every study run through these.

`train_step` is one optimizer step: forward, backward, clipping, update, EMA. `TrainStep` calls it, and on one GPU
replays it as a CUDA graph. `train_loop` feeds it batches, and evaluates and saves between steps.

A step's batch, augmentation and dropout are functions of (seed, step), and the whole state is saved, so a run that was
stopped and resumed equals the uninterrupted run bit for bit.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitral.data.loader import Batch
from vitral.errors import Interrupted, UserError
from vitral.events import Evaluated, EventHandler, Note, Saved, StepDone
from vitral.kernels.cuda_graph import EAGER_STEPS, CudaGraph
from vitral.training.metrics import AsyncMetrics, StepMetrics
from vitral.training.optimizer import set_lr
from vitral.training.parallel import World, all_ranks, all_reduce_sum, full_tensor, gradient_sync, local_shard
from vitral.training.state import TrainState

_GRAPH_MEMORY = 0.6  # the largest share of a GPU's memory that a captured step may take


@dataclass(frozen=True)
class LoopConfig:
    """The configuration of the loop."""

    steps: int
    batch: int  # images per step, over all processes
    microbatch: int  # images that one process computes at a time; only memory depends on it
    seed: int
    clip: float = 0.0  # largest global norm of the gradient; 0: not clipped
    evaluate_every: int = 0  # steps; 0: at the end only
    save_every: int = 0
    patience: int = 0  # evaluations without improvement before the run ends; 0: never
    autocast: torch.dtype | None = None
    mix_partner: bool = False  # batches have one more row in front, the mixing partner of the first
    cuda_graph: bool = False  # capture the whole step on one GPU, and replay it


class Diverged(UserError):
    """The loss, the gradient or the weights are not finite: the recipe does not work."""


class MicrobatchTooLarge(Exception):
    """The forward or backward pass of a microbatch ran out of memory; no weight has changed."""


def train_step(
    state: TrainState, config: LoopConfig, world: World, batch: Batch, draws: Tensor, *, sync: bool = True
) -> StepMetrics:
    """One optimizer step on this process's share of a global batch, images or features (rows, dim).

    `draws` are the random numbers of the objective for the whole batch (`Objective.draw`). Without `sync`, losses and
    gradients are not summed over processes. Returns the mean loss of the global batch, the number of correct
    predictions, and the gradient's norm before clipping. Raises MicrobatchTooLarge if memory runs out, before any
    weight has changed.
    """
    state.optimizer.zero_grad(set_to_none=True)
    sums = torch.zeros(2, device=world.device)
    microbatches = _microbatches(batch, config, world)
    draws = draws.to(world.device, non_blocking=True) if state.objective.capturable else draws
    try:
        for index, rows in enumerate(microbatches):
            images, labels, valid = (tensor.to(world.device, non_blocking=True) for tensor in rows)
            _seed_device(config, state.step, index, world)
            last = sync and index == len(microbatches) - 1
            with gradient_sync(state.wrapped, last), _autocast(config, world):
                loss, correct = state.wrapped(images, labels, valid, draws)
                loss = loss / config.batch  # the sum over microbatches and processes is the batch's mean
                (loss * world.size).backward()  # processes average their gradients; we want their sum
            sums += torch.stack([loss.detach().float(), correct.float()])
    except torch.OutOfMemoryError as error:
        raise MicrobatchTooLarge from error
    if sync:
        all_reduce_sum(sums, world)
    grad_norm = _clip_grad_norm(state, config.clip)
    state.optimizer.step()
    if state.ema is not None:
        state.ema.update(state.model)
    return StepMetrics(sums[0], sums[1], grad_norm)


class TrainStep:
    """Runs training steps. On one GPU the step is captured as a CUDA graph after a few eager steps, and then replayed:
    the speed of a small model is otherwise limited by kernel launches."""

    def __init__(self, state: TrainState, config: LoopConfig, world: World, on_event: EventHandler) -> None:
        self.state, self.config, self.world, self.on_event = state, config, world, on_event
        self.count = 0
        self.graph: CudaGraph | None = None
        single_gpu = world.device.type == "cuda" and world.size == 1
        self.captures = config.cuda_graph and single_gpu and state.objective.capturable
        if self.captures and not _graph_fits(world.device):
            self.captures = False
            on_event(Note("the step is not captured as a CUDA graph (it takes too much of the GPU's memory)"))

    def __call__(self, batch: Batch) -> StepMetrics:
        """Run a step; on a GPU it is queued when this returns. The caller increments the state's step count."""
        self.count += 1
        draws = self.state.objective.draw(self.state.step, tuple(batch.images.shape[-2:]))
        if self.captures and self.count > EAGER_STEPS and self._is_one_microbatch(batch):
            metrics = self._replay(batch, draws)
            if metrics is not None:
                return metrics
        while True:
            try:
                return train_step(self.state, self.config, self.world, batch, draws)
            except MicrobatchTooLarge as error:
                self._halve_microbatch(error)

    def _is_one_microbatch(self, batch: Batch) -> bool:
        return len(batch.valid) - int(self.config.mix_partner) <= self.config.microbatch

    def _replay(self, batch: Batch, draws: Tensor) -> StepMetrics | None:
        """Replay the captured step; None if capturing fails, which is tried once."""
        inputs = (batch.images, batch.labels, batch.valid, draws)
        if self.graph is None:
            try:
                self.graph = CudaGraph(self._captured_step, [tensor.to(self.world.device) for tensor in inputs])
            except (RuntimeError, MicrobatchTooLarge) as error:
                self.captures = False
                self.state.optimizer.zero_grad(set_to_none=True)
                cause = error.__cause__ if isinstance(error, MicrobatchTooLarge) else error
                reason = (str(cause).splitlines() or [type(cause).__name__])[0]
                self.on_event(Note(f"the step is not captured as a CUDA graph ({reason})"))
                return None
        torch.manual_seed(_seed(self.config.seed, self.state.step, 0, self.world.rank))
        return StepMetrics(*self.graph(*inputs))

    def _captured_step(self, images: Tensor, labels: Tensor, valid: Tensor, draws: Tensor) -> tuple[Tensor, ...]:
        return train_step(self.state, self.config, self.world, Batch(images, labels, valid, labels), draws)

    def _halve_microbatch(self, error: MicrobatchTooLarge) -> None:
        size = self.config.microbatch
        if size == 1 or self.world.size > 1:
            raise UserError(
                f"memory ran out with {size} images at a time: set micro_batch={max(size // 2, 1)} "
                "or grad_checkpointing=true, or choose a smaller model or image."
            ) from error
        self.config = replace(self.config, microbatch=size // 2)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self.on_event(Note(f"memory ran out: continuing with microbatches of {size // 2} images, same result"))


def train_loop(
    state: TrainState,
    config: LoopConfig,
    world: World,
    *,
    lr: Callable[[int], float],
    batches: Callable[[int], Iterator[Batch]],
    evaluate: Callable[[], dict[str, Any]],
    save: Callable[[], None],
    keep_best: Callable[[], None],
    image_names: Callable[[Tensor], list[str]],
    on_event: EventHandler,
    should_stop: Callable[[], bool],
    stop_early: Callable[[], str] = lambda: "",
) -> None:
    """Train from `state.step` to `config.steps`.

    Args:
        lr: the learning rate of a step.
        batches: `batches(step)` yields this process's share of every global batch from that step on.
        evaluate: returns metrics, with the one to select by under "score"; may raise Interrupted.
        save: writes the state.
        keep_best: stores the weights of the best score so far.
        image_names: the names of the images at these indices, over all processes.
        should_stop: whether a stop was requested; the state is then saved, and a pending evaluation is left to the
            resumed run.
        stop_early: why a callback ends the run after this step; empty if none does.

    Raises:
        Interrupted: after a stop request, once the state is saved.
        Diverged: if the loss, the gradient or the weights are not finite.
    """
    if state.progress.evaluation_due and _evaluate(state, config, evaluate, keep_best, on_event):
        save()
    stream = batches(state.step)
    take_step = TrainStep(state, config, world, on_event)
    saved_step = state.step  # step of the newest state on disk; 0 if there is none
    pending: _QueuedStep | None = None  # the previous step, whose metrics are read one step late
    try:
        while state.step < config.steps and not state.progress.stopped_early:
            began = time.perf_counter()
            batch = next(stream)
            data_seconds = time.perf_counter() - began
            step_lr = lr(state.step)
            set_lr(state.optimizer, step_lr)
            metrics = AsyncMetrics(take_step(batch))
            state.step += 1
            _report(pending, config, saved_step, image_names, on_event)
            seconds = time.perf_counter() - began
            images = config.batch if batch.images.ndim == 4 else 0  # cached features need no images
            pending = _QueuedStep(state.step, metrics, batch.indices, step_lr, images, seconds, data_seconds)
            reason = stop_early()
            last = state.step == config.steps or bool(reason)
            evaluating = last or _is_due(state.step, config.evaluate_every)
            stopping = not all_ranks(not should_stop(), world)
            saving = stopping or last or _is_due(state.step, config.save_every)
            if evaluating or saving:
                _report(pending, config, saved_step, image_names, on_event)
                _check_weights(state, world, saved_step)
                pending = None
            if reason:
                state.progress.stopped_early = True
                on_event(Note(f"stopping at step {state.step}: {reason}"))
            if evaluating:
                state.progress.evaluation_due = True
                stopping = stopping or not _evaluate(state, config, evaluate, keep_best, on_event)
            if saving or stopping or state.progress.stopped_early:
                save()
                saved_step = state.step
                on_event(Saved(state.step))
            if stopping:
                raise Interrupted
    finally:
        close = getattr(stream, "close", None)
        if close is not None:
            close()


class _QueuedStep(NamedTuple):
    """A step that was started; on a GPU it may not be finished."""

    step: int
    metrics: AsyncMetrics
    indices: Tensor
    lr: float
    images: int
    seconds: float
    data_seconds: float


def _report(
    done: _QueuedStep | None,
    config: LoopConfig,
    saved_step: int,
    image_names: Callable[[Tensor], list[str]],
    on_event: EventHandler,
) -> None:
    """Report a step's metrics, and end the run if they are not finite."""
    if done is None:
        return
    loss, correct, grad_norm = done.metrics.read()
    if not math.isfinite(loss + grad_norm):
        listed = shorten(image_names(done.indices))
        raise Diverged(
            f"the loss or its gradient is not finite (NaN or Inf) at step {done.step} (images {listed}; "
            f"{_last_checkpoint(saved_step)}): lower optim.lr, set optim.clip=1 or precision=float32, and train into "
            "another folder."
        )
    accuracy = None if correct < 0 else correct / config.batch
    on_event(StepDone(done.step, config.steps, loss, accuracy, done.lr, done.images, done.seconds, done.data_seconds))


def shorten(names: list[str]) -> str:
    """The first names, and how many there are besides."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _check_weights(state: TrainState, world: World, saved_step: int) -> None:
    """A step with a finite loss can still leave non-finite weights; such a state must not replace a good one."""
    finite = all(bool(torch.isfinite(local_shard(weight)).all()) for weight in state.model.parameters())
    if not all_ranks(finite, world):
        raise Diverged(
            f"the weights are not finite (NaN or Inf) after step {state.step} ({_last_checkpoint(saved_step)}): lower "
            "optim.lr or set optim.clip=1, and train into another folder."
        )


def _last_checkpoint(saved_step: int) -> str:
    return f"the last good state, of step {saved_step}, is kept" if saved_step else "no state was saved before"


def _evaluate(
    state: TrainState,
    config: LoopConfig,
    evaluate: Callable[[], dict[str, Any]],
    keep_best: Callable[[], None],
    on_event: EventHandler,
) -> bool:
    """Evaluate, and record whether this is the best score so far; False if a stop request interrupted it."""
    began, progress = time.perf_counter(), state.progress
    try:
        metrics = evaluate()
    except Interrupted:
        return False
    progress.evaluation_due = False
    best = progress.best_score is None or metrics["score"] > progress.best_score
    if best or not config.patience:  # the reported metrics are those of the weights that are kept
        progress.metrics = metrics
    if best:
        progress.best_score, progress.best_step, progress.evaluations_since_best = metrics["score"], state.step, 0
        keep_best()
    else:
        progress.evaluations_since_best += 1
    if config.patience and progress.evaluations_since_best >= config.patience:
        progress.stopped_early = True
        on_event(Note(f"no improvement in {config.patience} evaluations: stopping at step {state.step}"))
    on_event(Evaluated(state.step, metrics, time.perf_counter() - began, best and config.patience > 0))
    return True


def _is_due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0


def _microbatches(batch: Batch, config: LoopConfig, world: World) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Images, labels and validity of at most `config.microbatch` rows each, with their mixing partner in front.

    Processes whose share is one row smaller get the same number of microbatches, the last of which may be a single row
    marked as invalid: all processes gather sharded weights for every microbatch.
    """
    partner = int(config.mix_partner)
    rows = len(batch.valid) - partner
    microbatches = []
    for start in range(0, -(-config.batch // world.size), config.microbatch):
        part = slice(min(start, rows - 1), min(start + config.microbatch, rows) + partner)
        valid = batch.valid[part] if start < rows else torch.zeros_like(batch.valid[part])
        microbatches.append((batch.images[part], batch.labels[part], valid))
    return microbatches


def _autocast(config: LoopConfig, world: World) -> torch.autocast:
    return torch.autocast(world.device.type, dtype=config.autocast, enabled=config.autocast is not None)


def _clip_grad_norm(state: TrainState, clip: float) -> Tensor:
    """The gradient's global norm (); the gradient is scaled down to `clip` if it is larger."""
    parameters = [parameter for parameter in state.model.parameters() if parameter.grad is not None]
    return full_tensor(torch.nn.utils.clip_grad_norm_(parameters, clip or math.inf))


def _seed_device(config: LoopConfig, step: int, microbatch: int, world: World) -> None:
    """Seed dropout and augmentation on the device; a step that is being captured is seeded before each replay."""
    if not (world.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        torch.manual_seed(_seed(config.seed, step, microbatch, world.rank))


def _seed(*parts: int) -> int:
    """A seed for one microbatch of one step on one process."""
    text = ",".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def _graph_fits(device: torch.device) -> bool:
    """Whether an evaluation still fits into memory in addition to a CUDA graph, which keeps its memory."""
    limit = _GRAPH_MEMORY * torch.cuda.get_device_properties(device).total_memory
    return torch.cuda.max_memory_allocated(device) < limit
