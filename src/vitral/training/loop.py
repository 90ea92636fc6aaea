"""The one loop: every kind of training hands different things to `train`.

A step's batch, augmentation and dropout are functions of (seed, step), and the trainee's state is saved whole, so a run
that was stopped and resumed is the run that was never stopped.
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
from vitral.errors import UserError
from vitral.training.events import Evaluated, Listener, Note, Saved, StepDone
from vitral.training.optimizer import set_rate
from vitral.training.parallel import World, accumulating, every, own_part, total, whole
from vitral.training.state import Trainee


@dataclass(frozen=True)
class Plan:
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


class Interrupted(Exception):
    """The run was asked to stop; its state is saved."""


class Diverged(UserError):
    """Numbers of the run are not finite: its recipe does not work."""


def train(
    trainee: Trainee,
    plan: Plan,
    world: World,
    *,
    rate: Callable[[int], float],
    batches: Callable[[int], Iterator[Batch]],
    evaluate: Callable[[], dict[str, Any]],
    save: Callable[[], None],
    keep_best: Callable[[], None],
    name_rows: Callable[[Tensor], list[str]],
    listen: Listener,
    stopping: Callable[[], bool],
) -> None:
    """Train from `trainee.step` to `plan.steps`.

    `batches(step)` yields this process's share of every global batch from that step on; `evaluate` returns metrics with
    the value to select by under "score"; `keep_best` stores the weights of the best score so far.
    """
    stream = batches(trainee.step)
    saved = trainee.step  # where the newest state on disk is; 0: there is none
    reported: _Step | None = None  # the step before, told one step late: reading it at once would make a GPU wait
    try:
        while trainee.step < plan.steps and not trainee.facts.get("ended"):
            began = time.perf_counter()
            batch = next(stream)
            waited = time.perf_counter() - began
            base = rate(trainee.step)
            set_rate(trainee.optimizer, base)
            loss, right, plan = gradients(trainee, plan, world, batch, listen)
            norm = _clipped(trainee, plan.clip)
            trainee.optimizer.step()
            if trainee.average is not None:
                trainee.average.update(trainee.model)
            trainee.step += 1
            _report(reported, plan, saved, name_rows, listen)
            seconds = time.perf_counter() - began
            reported = _Step(trainee.step, loss, right, norm, batch.indices, base, seconds, waited)
            done = trainee.step == plan.steps
            evaluating = _due(trainee.step, plan.evaluate_every, done)
            stop = not every(not stopping(), world)
            saving = stop or _due(trainee.step, plan.save_every, done)
            if evaluating or saving:
                _report(reported, plan, saved, name_rows, listen)
                _check_weights(trainee, world, saved)
                reported = None
            if evaluating:
                _evaluate(trainee, plan, evaluate, keep_best, listen)
            if saving or trainee.facts.get("ended"):
                save()
                saved = trainee.step
                listen(Saved(trainee.step))
            if stop and not done:
                raise Interrupted
    finally:
        close = getattr(stream, "close", None)
        if close is not None:
            close()


def _check_weights(trainee: Trainee, world: World, saved: int) -> None:
    """A step with a finite loss can still leave weights that are none; such a state must not replace a good one."""
    finite = all(bool(torch.isfinite(own_part(weight)).all()) for weight in trainee.model.parameters())
    if not every(finite, world):
        raise Diverged(
            f"the weights are not finite numbers after step {trainee.step} ({_kept(saved)}): lower optim.lr or set "
            "optim.clip=1, and train into another folder."
        )


def _kept(saved: int) -> str:
    return f"the last good state, of step {saved}, stays" if saved else "no state was saved before"


class _Step(NamedTuple):
    """A step that was computed, perhaps only queued on a GPU so far."""

    step: int
    loss: Tensor
    right: Tensor
    norm: Tensor
    indices: Tensor
    rate: float
    seconds: float
    waited: float


def _report(
    done: _Step | None, plan: Plan, saved: int, name_rows: Callable[[Tensor], list[str]], listen: Listener
) -> None:
    """Tell a step's numbers, and stop the run where they are not finite."""
    if done is None:
        return
    loss, right, norm = torch.stack([done.loss, done.right, done.norm.to(done.loss)]).tolist()
    if not math.isfinite(loss + norm):
        names = name_rows(done.indices)
        some = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        raise Diverged(
            f"the loss or its gradient is not a finite number at step {done.step} (images {some}; {_kept(saved)}): "
            "lower optim.lr, set optim.clip=1 or precision=float32, and train into another folder."
        )
    accuracy = None if right < 0 else right / plan.batch
    listen(StepDone(done.step, plan.steps, loss, accuracy, done.rate, plan.batch, done.seconds, done.waited))


def gradients(
    trainee: Trainee, plan: Plan, world: World, batch: Batch, listen: Listener
) -> tuple[Tensor, Tensor, Plan]:
    """Accumulate the gradient of the global batch's mean loss. Where memory runs out, the plan gets smaller pieces.

    Each row's loss is divided by the global batch: the sum over pieces and processes is the same for any number.
    """
    while True:
        try:
            return *accumulate(trainee, plan, world, batch), plan
        except torch.OutOfMemoryError as error:
            if plan.micro == 1 or world.size > 1:
                raise UserError(
                    f"memory ran out with {plan.micro} images at a time: set micro_batch={max(plan.micro // 2, 1)} "
                    "or checkpointing=true, or choose a smaller model or image."
                ) from error
            plan = replace(plan, micro=max(plan.micro // 2, 1))
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            listen(Note(f"memory ran out: going on with {plan.micro} images at a time, same maths"))


def accumulate(
    trainee: Trainee, plan: Plan, world: World, batch: Batch, exchange: bool = True
) -> tuple[Tensor, Tensor]:
    """The sums, over all processes, of the rows' losses divided by the batch, and of the right answers.

    Without `exchange` they are those of this process, and so is the gradient.
    """
    trainee.optimizer.zero_grad(set_to_none=True)
    sums = torch.zeros(2, device=world.device)
    pieces = _pieces(batch, plan, world)
    for piece, part in enumerate(pieces):
        rows = [tensor.to(world.device, non_blocking=True) for tensor in part]
        torch.manual_seed(_key(plan.seed, trainee.step, piece, world.rank))
        last = exchange and piece == len(pieces) - 1
        with accumulating(trainee.wrapped, last=last), _precision(plan, world):
            loss, right = trainee.wrapped(*rows, trainee.step)
            share = loss / plan.batch
            (share * world.size).backward()  # processes average their gradients; we want their sum
        sums += torch.stack([share.detach().float(), right.float()])
    if exchange:
        total(sums, world)
    return sums[0], sums[1]


def _pieces(batch: Batch, plan: Plan, world: World) -> list[tuple[Tensor, Tensor, Tensor]]:
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


def _precision(plan: Plan, world: World) -> torch.autocast:
    return torch.autocast(world.device.type, dtype=plan.autocast, enabled=plan.autocast is not None)


def _clipped(trainee: Trainee, clip: float) -> Tensor:
    """The gradient's global norm; the gradient is scaled down to `clip` where it is larger."""
    parameters = [parameter for parameter in trainee.model.parameters() if parameter.grad is not None]
    return whole(torch.nn.utils.clip_grad_norm_(parameters, clip or math.inf))


def _evaluate(
    trainee: Trainee,
    plan: Plan,
    evaluate: Callable[[], dict[str, Any]],
    keep_best: Callable[[], None],
    listen: Listener,
) -> None:
    began = time.perf_counter()
    metrics = evaluate()
    best = metrics["score"] > trainee.facts.get("best_score", -math.inf)
    if best:
        trainee.facts |= {"best_score": metrics["score"], "best_step": trainee.step, "worse": 0}
        keep_best()
    else:
        trainee.facts["worse"] = trainee.facts.get("worse", 0) + 1
    if best or not plan.patience:  # what is reported belongs to the weights that are kept
        trainee.facts["metrics"] = metrics
    if plan.patience and trainee.facts["worse"] >= plan.patience:
        trainee.facts["ended"] = True
        listen(Note(f"no better value in {plan.patience} evaluations: stopping at step {trainee.step}"))
    listen(Evaluated(trainee.step, metrics, time.perf_counter() - began, best))


def _due(step: int, interval: int, done: bool) -> bool:
    return done or (interval > 0 and step % interval == 0)


def _key(*parts: int) -> int:
    """A seed for one piece of one step on one process."""
    text = ",".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
