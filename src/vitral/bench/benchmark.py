"""Contestants in turns: each times a few steps while the others wait, so that a busy machine slows all alike."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, NamedTuple

from vitral.bench.backends import OURS, Backend, Task
from vitral.bench.results import Row, spread
from vitral.bench.steps import WrongAnswers
from vitral.bench.worker import Worker, WorkerFailed
from vitral.cost import cost
from vitral.errors import UserError

_WARM_UP = 3  # steps after the first, which compiles and allocates
_TURN = 1.0  # seconds that a turn should last
_LOADING_TURN = 4.0  # of loaders, which start their workers in each
_MOST = 50  # steps in a turn, of those that compute
CALLS = 200  # answers that percentiles of latency are taken over, at least
_COMPUTES = ("train", "infer", "latency")

Tell = Callable[[str], None]


class Outcome(NamedTuple):
    """The rows of a race, and one sentence for each backend who did not finish."""

    rows: list[Row]
    failed: list[str]


class Runner(NamedTuple):
    """A worker that is warm, and what is known about it."""

    worker: Worker
    facts: dict[str, str]
    cold: float
    memory: int
    steps: int  # in a turn
    seconds: list[float]


def now() -> str:
    """When a call began."""
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S")


def race(task: Task, backends: Sequence[Backend], *, rounds: int, tell: Tell) -> Outcome:
    """Time every backend in every round. A gate that does not open raises WrongAnswers, and nobody has a row."""
    failed: list[str] = []
    call = now()
    with ExitStack() as stack:
        runners = []
        for backend in backends:
            try:
                if backend.library == OURS and task.work in _COMPUTES:
                    _check_answers(backend, task, tell)
                tell(f"{backend.label}: starting")
                runners.append(warm(stack.enter_context(Worker(backend)), task, rounds))
            except WorkerFailed as failure:
                _sift(failure, backend)
                failed.append(f"{backend.label} is left out: {failure}.")
        rates = _rounds(runners, task, rounds, failed, tell)
        rate = statistics.median(rates or [0.0])
        rows = [replace(row(one, task, call, rate), details=_details(one, task, failed)) for one in runners]
    return Outcome(rows, failed)


def _check_answers(backend: Backend, task: Task, tell: Tell) -> None:
    """In a process of its own, so that what is compiled for a few images never meets what is timed."""
    with Worker(backend) as worker:
        found = worker.gate(task)
    gradients = f" and gradients within {found['gradients']:.0e}" if task.work == "train" else ""
    tell(
        f"{backend.label}: logits within {found['logits']:.0e}{gradients} of the plain float32 model, "
        f"of the norm (allowed: {found['tolerance']:g})"
    )


def _sift(failure: WorkerFailed, backend: Backend) -> None:
    """Peers may fail; our own answers may not be wrong, and a mistake in the request concerns all."""
    if failure.kind == "wrong":
        raise WrongAnswers(str(failure)) from failure
    if backend.library == OURS and failure.kind == "mistake":
        raise UserError(str(failure)) from failure


def warm(worker: Worker, task: Task, rounds: int) -> Runner:
    """Past compiling and allocating."""
    facts = worker.build(task)["facts"]
    worker.run(1)
    cold = time.perf_counter() - worker.began
    steps = _turn(worker, task, rounds)
    return Runner(worker, facts, cold, worker.ask("memory")["bytes"], steps, [])


def _turn(worker: Worker, task: Task, rounds: int) -> int:
    """As many steps as fit into a turn."""
    if task.work not in _COMPUTES:
        return _loading_turn(worker)
    seconds = statistics.median(worker.run(_WARM_UP))
    return math.ceil(CALLS / rounds) if task.work == "latency" else min(math.ceil(_TURN / seconds), _MOST)


def _loading_turn(worker: Worker) -> int:
    """Workers take a while to start and deliver many batches at once: short trials tell little, so they get longer."""
    count = _WARM_UP
    while (seconds := count * statistics.mean(worker.run(count))) < _LOADING_TURN / 2:
        count = math.ceil(count * _LOADING_TURN / seconds)
    return math.ceil(count * _LOADING_TURN / seconds)


def _rounds(runners: list[Runner], task: Task, rounds: int, failed: list[str], tell: Tell) -> list[float]:
    """The matrix rates; the times go to the runners. Every other round runs backwards, against a drift of clocks."""
    rates = []
    for number in range(rounds):
        tell(f"round {number + 1} of {rounds}")
        for runner in list(runners) if number % 2 == 0 else runners[::-1]:
            try:
                if runner is runners[0] and task.work in _COMPUTES:
                    rates.append(runner.worker.ask("rate")["flops"])
                runner.seconds.extend(runner.worker.run(runner.steps))
            except WorkerFailed as failure:
                failed.append(f"{runner.worker.backend.label} did not finish: {failure}.")
                runners.remove(runner)
    return rates


def row(runner: Runner, task: Task, call: str, rate: float) -> Row:
    backend = runner.worker.backend
    low, median, high = spread(runner.seconds)
    return Row(
        work=task.work,
        model=task.named,
        batch=task.batch,
        library=backend.library,
        settings=backend.settings,
        device=task.device,
        precision=task.precision,
        seconds=median,
        low=low,
        high=high,
        samples=len(runner.seconds),
        macs=macs(task),
        rate=rate,
        peak_bytes=runner.memory,
        cold_seconds=runner.cold,
        call=call,
        facts=runner.facts,
    )


def macs(task: Task) -> int:
    """Multiply-accumulates of a step: the backward pass takes twice those of the forward pass."""
    if task.work not in _COMPUTES:
        return 0
    return cost(task.architecture).macs * task.batch * (3 if task.work == "train" else 1)


def _details(runner: Runner, task: Task, failed: list[str]) -> dict[str, Any]:
    """What is known besides; who fails only now keeps its times."""
    if task.work != "latency":
        try:
            return runner.worker.ask("details")
        except WorkerFailed as failure:
            failed.append(f"{runner.worker.backend.label} tells no details: {failure}.")
            return {}
    ordered = sorted(runner.seconds)
    return {f"p{share} ms": 1e3 * ordered[min(len(ordered) * share // 100, len(ordered) - 1)] for share in (50, 95, 99)}
