"""One step of training: the gradient of a batch in pieces that fit, clipping, the optimizer, the average.

On one GPU the whole of it is recorded as a CUDA graph after a few steps, and replayed from then on: a small model is
otherwise as fast as the host can launch its kernels.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from vitral.data.loader import Batch
from vitral.errors import UserError
from vitral.events import EventHandler, Note
from vitral.kernels.cuda_graph import CudaGraph
from vitral.training.parallel import World, accumulating, full_tensor, total
from vitral.training.state import TrainState

_BEFORE_RECORDING = 3  # steps
_ROOM = 0.6  # of a GPU's memory that a step may take to be recorded


@dataclass(frozen=True)
class LoopConfig:
    """What the loop must know about a run."""

    steps: int
    batch: int  # over all processes
    micro: int  # rows that one process computes at a time; only memory depends on it
    seed: int
    clip: float = 0.0  # largest global norm of the gradient; 0: not clipped
    evaluate_every: int = 0  # steps; 0: at the end only
    save_every: int = 0
    patience: int = 0  # evaluations without a better value before the run ends; 0: never
    autocast: torch.dtype | None = None
    partners: bool = False  # batches carry one row in front, the mixing partner of the first
    cuda_graph: bool = False  # on one GPU the whole step is recorded once, and replayed


class StepMetrics(NamedTuple):
    """What is told of a step: the mean loss, right answers (-1: not counted), the norm of the gradient."""

    loss: Tensor
    right: Tensor
    norm: Tensor


class AsyncMetrics:
    """StepMetrics on their way to the host. Read late, they do not make it wait for steps that were queued since: a plain
    copy would be queued behind those."""

    def __init__(self, numbers: StepMetrics) -> None:
        stacked = torch.stack([number.float() for number in numbers])
        self.arrived = torch.cuda.Event() if stacked.is_cuda else None
        self.host = stacked
        if self.arrived is not None:
            self.host = torch.empty(stacked.shape, pin_memory=True).copy_(stacked, non_blocking=True)
            self.arrived.record()

    def read(self) -> tuple[float, float, float]:
        """Loss, right answers, norm."""
        if self.arrived is not None:
            self.arrived.synchronize()
        loss, right, norm = self.host.tolist()
        return loss, right, norm


class Steps:
    """Takes one step after the other."""

    def __init__(self, train_state: TrainState, plan: LoopConfig, world: World, on_event: EventHandler) -> None:
        self.train_state, self.plan, self.world, self.on_event = train_state, plan, world, on_event
        self.taken = 0
        self.recording: CudaGraph | None = None
        alone = world.device.type == "cuda" and world.size == 1
        self.records = plan.cuda_graph and alone and train_state.objective.replayable
        if self.records and not _has_room(world.device):
            self.records = False
            on_event(Note("the step is not recorded as a CUDA graph (it takes too much of the GPU's memory)"))

    def take(self, batch: Batch) -> StepMetrics:
        """The step is done when this returns, on a GPU queued; the train_state's count is the caller's to raise."""
        self.taken += 1
        if self.records and self.taken > _BEFORE_RECORDING and self._is_one_piece(batch):
            found = self._replayed(batch)
            if found is not None:
                return found
        loss, right, self.plan = gradients(self.train_state, self.plan, self.world, batch, self.on_event)
        return StepMetrics(loss, right, self._update())

    def _is_one_piece(self, batch: Batch) -> bool:
        return len(batch.valid) - int(self.plan.partners) <= self.plan.micro

    def _replayed(self, batch: Batch) -> StepMetrics | None:
        """None where the step cannot be recorded, which is tried once."""
        inputs = (batch.images, batch.labels, batch.valid, drawn_numbers(self.train_state, batch))
        if self.recording is None:
            try:
                self.recording = CudaGraph(self._computed, [tensor.to(self.world.device) for tensor in inputs])
            except RuntimeError as error:  # memory that ran out is one, too
                self.records = False
                self.train_state.optimizer.zero_grad(set_to_none=True)
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                self.on_event(Note(f"the step is not recorded as a CUDA graph ({reason})"))
                return None
        torch.manual_seed(_key(self.plan.seed, self.train_state.step, 0, self.world.rank))
        return StepMetrics(*self.recording(*inputs))

    def _computed(self, images: Tensor, labels: Tensor, valid: Tensor, numbers: Tensor) -> tuple[Tensor, ...]:
        batch = Batch(images, labels, valid, labels)
        loss, right = accumulate(self.train_state, self.plan, self.world, batch, numbers)
        return loss, right, self._update()

    def _update(self) -> Tensor:
        norm = _clipped(self.train_state, self.plan.clip)
        self.train_state.optimizer.step()
        if self.train_state.average is not None:
            self.train_state.average.update(self.train_state.model)
        return norm


def _has_room(device: torch.device) -> bool:
    """A recording keeps all of its memory, and an evaluation must still fit beside it."""
    return torch.cuda.max_memory_allocated(device) < _ROOM * torch.cuda.get_device_properties(device).total_memory


def gradients(
    train_state: TrainState, plan: LoopConfig, world: World, batch: Batch, on_event: EventHandler
) -> tuple[Tensor, Tensor, LoopConfig]:
    """Accumulate the gradient of the global batch's mean loss. Where memory runs out, the plan gets smaller pieces.

    Each row's loss is divided by the global batch: the sum over pieces and processes is the same for any number.
    """
    while True:
        try:
            return *accumulate(train_state, plan, world, batch, drawn_numbers(train_state, batch)), plan
        except torch.OutOfMemoryError as error:
            if plan.micro == 1 or world.size > 1:
                raise UserError(
                    f"memory ran out with {plan.micro} images at a time: set micro_batch={max(plan.micro // 2, 1)} "
                    "or grad_checkpointing=true, or choose a smaller model or image."
                ) from error
            plan = replace(plan, micro=max(plan.micro // 2, 1))
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            on_event(Note(f"memory ran out: going on with {plan.micro} images at a time, same maths"))


def accumulate(
    train_state: TrainState, plan: LoopConfig, world: World, batch: Batch, numbers: Tensor, exchange: bool = True
) -> tuple[Tensor, Tensor]:
    """The sums, over all processes, of the rows' losses divided by the batch, and of the right answers.

    `numbers` are what the step draws for all rows. Without `exchange` the sums and the gradient are of this process.
    """
    train_state.optimizer.zero_grad(set_to_none=True)
    sums = torch.zeros(2, device=world.device)
    pieces = _pieces(batch, plan, world)
    numbers = numbers.to(world.device, non_blocking=True) if train_state.objective.replayable else numbers
    for piece, part in enumerate(pieces):
        rows = [tensor.to(world.device, non_blocking=True) for tensor in part]
        if not (world.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            torch.manual_seed(_key(plan.seed, train_state.step, piece, world.rank))
        last = exchange and piece == len(pieces) - 1
        with accumulating(train_state.wrapped, last=last), _precision(plan, world):
            loss, right = train_state.wrapped(*rows, numbers)
            share = loss / plan.batch
            (share * world.size).backward()  # processes average their gradients; we want their sum
        sums += torch.stack([share.detach().float(), right.float()])
    if exchange:
        total(sums, world)
    return sums[0], sums[1]


def _pieces(batch: Batch, plan: LoopConfig, world: World) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Images, labels and validity of at most `plan.micro` rows at a time, with their partners where rows are mixed.

    Processes whose share is a row smaller get equally many, one perhaps of a row that does not count: shards of weights
    come together for every piece.
    """
    extra = int(plan.partners)
    rows = len(batch.valid) - extra
    pieces = []
    for start in range(0, -(-plan.batch // world.size), plan.micro):
        part = slice(min(start, rows - 1), min(start + plan.micro, rows) + extra)
        valid = batch.valid[part] if start < rows else torch.zeros_like(batch.valid[part])
        pieces.append((batch.images[part], batch.labels[part], valid))
    return pieces


def _precision(plan: LoopConfig, world: World) -> torch.autocast:
    return torch.autocast(world.device.type, dtype=plan.autocast, enabled=plan.autocast is not None)


def drawn_numbers(train_state: TrainState, batch: Batch) -> Tensor:
    """What the objective draws for the step to come."""
    return train_state.objective.numbers(train_state.step, tuple(batch.images.shape[-2:]))


def _clipped(train_state: TrainState, clip: float) -> Tensor:
    """The gradient's global norm; the gradient is scaled down to `clip` where it is larger."""
    parameters = [parameter for parameter in train_state.model.parameters() if parameter.grad is not None]
    return full_tensor(torch.nn.utils.clip_grad_norm_(parameters, clip or math.inf))


def _key(*parts: int) -> int:
    """A seed for one piece of one step on one process."""
    text = ",".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
