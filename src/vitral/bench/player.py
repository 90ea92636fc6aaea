"""The parent's side of a contestant's process."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from vitral.bench.contestants import Contestant, Task

_SOURCE = Path(__file__).parents[2]


class PlayerFailed(RuntimeError):
    """A contestant cannot go on; `kind` is wrong, mistake, failed or gone."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


class Player:
    """A contestant in its own process, so that memory, settings and compiled code of two never meet."""

    def __init__(self, contestant: Contestant) -> None:
        self.contestant = contestant
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

    def __enter__(self) -> Player:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def build(self, task: Task) -> dict[str, Any]:
        return self.ask("build", contestant=asdict(self.contestant), task=asdict(task))

    def gate(self, task: Task) -> dict[str, Any]:
        return self.ask("gate", contestant=asdict(self.contestant), task=asdict(task))

    def run(self, count: int) -> list[float]:
        return self.ask("run", count=count)["seconds"]

    def ask(self, what: str, **words: Any) -> dict[str, Any]:
        """The answer to one request; raises PlayerFailed."""
        try:
            self._requests.write(json.dumps({"do": what, **words}) + "\n")
            self._requests.flush()
            line = self._answers.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise PlayerFailed("gone", f"its process ended: {self._last_words()}")
        found = json.loads(line)
        if "error" in found:
            raise PlayerFailed(found["error"], found["reason"])
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
