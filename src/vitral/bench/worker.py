"""A backend's own process, `python -m vitral.bench.child`: a JSON line in, a JSON line out, until the input ends.

It ends with whoever started it, since its input ends then. What libraries print goes to standard error.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import torch

from vitral.bench import loading, parity, steps
from vitral.bench.backends import OURS, Backend, Task
from vitral.bench.machine import facts, peak_memory
from vitral.errors import UserError

_STEPS: dict[str, Callable[[Backend, Task], Any]] = {
    "train": steps.training_step,
    "infer": steps.inference_step,
    "latency": steps.latency_step,
    "data": loading.loading_step,
    "predict": loading.prediction_step,
}


class Child:
    """Answers requests; each method is one."""

    def __init__(self) -> None:
        self.backend = Backend(OURS)
        self.task = Task("train", "ViT-Ti/16", 1, "cpu")
        self.step: Any = None
        self.count_memory: Callable[[], int] = lambda: 0

    def gate(self, backend: dict[str, str], task: dict[str, Any]) -> dict[str, Any]:
        """Compare with the plain model on a few images."""
        who, small = Backend(**backend), Task(**task).small(parity.BATCH)
        return parity.check(_STEPS[small.work](who, small), who, small)._asdict()

    def build(self, backend: dict[str, str], task: dict[str, Any]) -> dict[str, Any]:
        """Make the step; a second call makes another one, and leaves nothing of the first."""
        self.step = None
        gc.collect()
        if self.backend.mode == "compile":
            torch.compiler.reset()  # it compiles one function for a few shapes only
        self.backend, self.task = Backend(**backend), Task(**task)
        self.count_memory = peak_memory(self.task.device)
        self.step = _STEPS[self.task.work](self.backend, self.task)
        return {"facts": facts(self.backend.library, self.task.device)}

    def run(self, count: int) -> dict[str, Any]:
        return {"seconds": self.step.run(count)}

    def memory(self) -> dict[str, Any]:
        """The most bytes that the steps so far took; to be asked before anything else takes memory."""
        return {"bytes": self.count_memory()}

    def rate(self) -> dict[str, Any]:
        return {"flops": steps.matrix_rate(self.task.device)}

    def details(self) -> dict[str, Any]:
        """What only some kinds of work can tell, such as the stages of loading."""
        return self.step.details() if hasattr(self.step, "details") else {}


def answer(child: Child, line: str) -> dict[str, Any]:
    """{"do": name, ...} -> {"ok": ...}, or {"error": kind, "reason": ...}"""
    words = json.loads(line)
    try:
        return {"ok": getattr(child, words.pop("do"))(**words)}
    except steps.WrongAnswers as wrong:
        return {"error": "wrong", "reason": str(wrong)}
    except UserError as mistake:
        return {"error": "mistake", "reason": str(mistake)}
    except Exception as error:  # a library may fail in any way, and the others still race
        text = str(error).strip().splitlines() or [""]
        return {"error": "failed", "reason": f"{type(error).__name__}: {text[0]}"}


def serve(lines: Iterator[str], out: IO[str]) -> None:
    child = Child()
    for line in lines:
        out.write(json.dumps(answer(child, line)) + "\n")
        out.flush()


def _own_output() -> IO[str]:
    """Standard output for answers alone: whatever else is written there, also by C libraries, joins standard error."""
    own = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return own


if __name__ == "__main__":
    serve(iter(sys.stdin.readline, ""), _own_output())
    os._exit(0)  # taking torch down in order lasts seconds, and the others wait


_SOURCE = Path(__file__).parents[2]


class WorkerFailed(RuntimeError):
    """A backend cannot go on; `kind` is wrong, mistake, failed or gone."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


class Worker:
    """A backend in its own process, so that memory, settings and compiled code of two never meet."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.began = time.perf_counter()
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - it lives as long as the process
        paths = [str(_SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "vitral.bench.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def build(self, task: Task) -> dict[str, Any]:
        return self.ask("build", backend=asdict(self.backend), task=asdict(task))

    def gate(self, task: Task) -> dict[str, Any]:
        return self.ask("gate", backend=asdict(self.backend), task=asdict(task))

    def run(self, count: int) -> list[float]:
        return self.ask("run", count=count)["seconds"]

    def ask(self, what: str, **words: Any) -> dict[str, Any]:
        """The answer to one request; raises WorkerFailed."""
        try:
            self._requests.write(json.dumps({"do": what, **words}) + "\n")
            self._requests.flush()
            line = self._answers.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise WorkerFailed("gone", f"its process ended: {self._last_words()}")
        found = json.loads(line)
        if "error" in found:
            raise WorkerFailed(found["error"], found["reason"])
        return found["ok"]

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        """End the process: its input ends, and where it is still busy it is killed."""
        with contextlib.suppress(BrokenPipeError):
            self._requests.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()
        self._log.close()

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().strip().splitlines()
        return lines[-1] if lines else "without a word"
