"""A contestant's own process, `python -m vitral.bench.child`: a JSON line in, a JSON line out, until the input ends.

It ends with whoever started it, since its input ends then. What libraries print goes to standard error.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import IO, Any

import torch

from vitral.bench import gate, loading, steps
from vitral.bench.contestants import OURS, Contestant, Task
from vitral.bench.machine import facts, peak_memory
from vitral.errors import UserError

_STEPS: dict[str, Callable[[Contestant, Task], Any]] = {
    "train": steps.training_step,
    "infer": steps.inference_step,
    "latency": steps.latency_step,
    "data": loading.loading_step,
    "predict": loading.prediction_step,
}


class Child:
    """Answers requests; each method is one."""

    def __init__(self) -> None:
        self.contestant = Contestant(OURS)
        self.task = Task("train", "ViT-Ti/16", 1, "cpu")
        self.step: Any = None
        self.count_memory: Callable[[], int] = lambda: 0

    def gate(self, contestant: dict[str, str], task: dict[str, Any]) -> dict[str, Any]:
        """Compare with the plain model on a few images."""
        who, small = Contestant(**contestant), Task(**task).small(gate.BATCH)
        return gate.check(_STEPS[small.work](who, small), who, small)._asdict()

    def build(self, contestant: dict[str, str], task: dict[str, Any]) -> dict[str, Any]:
        """Make the step; a second call makes another one, and leaves nothing of the first."""
        self.step = None
        gc.collect()
        if self.contestant.mode == "compile":
            torch.compiler.reset()  # it compiles one function for a few shapes only
        self.contestant, self.task = Contestant(**contestant), Task(**task)
        self.count_memory = peak_memory(self.task.device)
        self.step = _STEPS[self.task.work](self.contestant, self.task)
        return {"facts": facts(self.contestant.library, self.task.device)}

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
