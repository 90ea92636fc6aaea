"""The one loop: every kind of training hands different things to `train`.

A step's batch, augmentation and dropout are functions of (seed, step), and the train_state's state is saved whole, so a run
that was stopped and resumed is the run that was never stopped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitral.data.loader import Batch
from vitral.errors import Interrupted, UserError
from vitral.events import Evaluated, EventHandler, Note, Saved, StepDone
from vitral.training.optimizer import set_rate
from vitral.training.parallel import World, all_ranks, local_shard
from vitral.training.state import TrainState
from vitral.training.step import AsyncMetrics, LoopConfig, Steps


class Diverged(UserError):
    """StepMetrics of the run are not finite: its recipe does not work."""


def train(
    train_state: TrainState,
    plan: LoopConfig,
    world: World,
    *,
    rate: Callable[[int], float],
    batches: Callable[[int], Iterator[Batch]],
    evaluate: Callable[[], dict[str, Any]],
    save: Callable[[], None],
    keep_best: Callable[[], None],
    name_rows: Callable[[Tensor], list[str]],
    on_event: EventHandler,
    stopping: Callable[[], bool],
) -> None:
    """Train from `train_state.step` to `plan.steps`.

    `batches(step)` yields this process's share of every global batch from that step on; `evaluate` returns metrics with
    the value to select by under "score", and may raise Interrupted; `keep_best` stores the weights of the best score so
    far. A run that is asked to stop saves its state and leaves an evaluation that is due to the one that goes on.
    """
    if "owed" in train_state.facts and _evaluate(train_state, plan, evaluate, keep_best, on_event):
        save()
    stream = batches(train_state.step)
    steps = Steps(train_state, plan, world, on_event)
    saved = train_state.step  # where the newest state on disk is; 0: there is none
    reported: _Step | None = None  # the step before, told one step late: reading it at once would make a GPU wait
    try:
        while train_state.step < plan.steps and not train_state.facts.get("ended"):
            began = time.perf_counter()
            batch = next(stream)
            waited = time.perf_counter() - began
            base = rate(train_state.step)
            set_rate(train_state.optimizer, base)
            numbers = AsyncMetrics(steps.take(batch))
            train_state.step += 1
            _report(reported, plan, saved, name_rows, on_event)
            seconds = time.perf_counter() - began
            images = plan.batch if batch.images.ndim == 4 else 0  # features are of images that were seen before
            reported = _Step(train_state.step, numbers, batch.indices, base, images, seconds, waited)
            done = train_state.step == plan.steps
            evaluating = _due(train_state.step, plan.evaluate_every, done)
            stop = not all_ranks(not stopping(), world)
            saving = stop or _due(train_state.step, plan.save_every, done)
            if evaluating or saving:
                _report(reported, plan, saved, name_rows, on_event)
                _check_weights(train_state, world, saved)
                reported = None
            if evaluating:
                train_state.facts["owed"] = True  # an evaluation of this step's weights
                stop = stop or not _evaluate(train_state, plan, evaluate, keep_best, on_event)
            if saving or stop or train_state.facts.get("ended"):
                save()
                saved = train_state.step
                on_event(Saved(train_state.step))
            if stop:
                raise Interrupted
    finally:
        close = getattr(stream, "close", None)
        if close is not None:
            close()


def _check_weights(train_state: TrainState, world: World, saved: int) -> None:
    """A step with a finite loss can still leave weights that are none; such a state must not replace a good one."""
    finite = all(bool(torch.isfinite(local_shard(weight)).all()) for weight in train_state.model.parameters())
    if not all_ranks(finite, world):
        raise Diverged(
            f"the weights are not finite numbers after step {train_state.step} ({_kept(saved)}): lower optim.lr or set "
            "optim.clip=1, and train into another folder."
        )


def _kept(saved: int) -> str:
    return f"the last good state, of step {saved}, stays" if saved else "no state was saved before"


class _Step(NamedTuple):
    """A step that was computed, perhaps only queued on a GPU so far."""

    step: int
    numbers: AsyncMetrics
    indices: Tensor
    rate: float
    images: int
    seconds: float
    waited: float


def _report(
    done: _Step | None, plan: LoopConfig, saved: int, name_rows: Callable[[Tensor], list[str]], on_event: EventHandler
) -> None:
    """Tell a step's numbers, and stop the run where they are not finite."""
    if done is None:
        return
    loss, right, norm = done.numbers.read()
    if not math.isfinite(loss + norm):
        names = name_rows(done.indices)
        some = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        raise Diverged(
            f"the loss or its gradient is not a finite number at step {done.step} (images {some}; {_kept(saved)}): "
            "lower optim.lr, set optim.clip=1 or precision=float32, and train into another folder."
        )
    accuracy = None if right < 0 else right / plan.batch
    on_event(StepDone(done.step, plan.steps, loss, accuracy, done.rate, done.images, done.seconds, done.waited))


def _evaluate(
    train_state: TrainState,
    plan: LoopConfig,
    evaluate: Callable[[], dict[str, Any]],
    keep_best: Callable[[], None],
    on_event: EventHandler,
) -> bool:
    """Whether the evaluation came to its end."""
    began = time.perf_counter()
    try:
        metrics = evaluate()
    except Interrupted:
        return False
    del train_state.facts["owed"]
    best = metrics["score"] > train_state.facts.get("best_score", -math.inf)
    if best:
        train_state.facts |= {"best_score": metrics["score"], "best_step": train_state.step, "worse": 0}
        keep_best()
    else:
        train_state.facts["worse"] = train_state.facts.get("worse", 0) + 1
    if best or not plan.patience:  # what is reported belongs to the weights that are kept
        train_state.facts["metrics"] = metrics
    if plan.patience and train_state.facts["worse"] >= plan.patience:
        train_state.facts["ended"] = True
        on_event(Note(f"no better value in {plan.patience} evaluations: stopping at step {train_state.step}"))
    on_event(Evaluated(train_state.step, metrics, time.perf_counter() - began, best))
    return True


def _due(step: int, interval: int, done: bool) -> bool:
    return done or (interval > 0 and step % interval == 0)
