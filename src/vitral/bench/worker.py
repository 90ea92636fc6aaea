"""A backend in its own process, so that memory, settings and compiled code of backends are separate.

`Worker` starts `python -m vitral.bench.worker`, which reads one JSON request per line and writes one JSON response per
line until its input ends, as it does when its parent dies.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from vitral.bench import loading, steps
from vitral.bench.backends import Backend, Workload
from vitral.bench.parity import PARITY_BATCH, check_parity
from vitral.errors import UserError
from vitral.training.resources import peak_bytes


class WorkerFailed(RuntimeError):
    """A backend failed; `kind` is parity, usage, error or died."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


class Worker:
    """The parent's side of a worker process, and what is measured of it."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.measured: dict[str, Any] = {}  # entries of its row that are not times of steps
        self.steps = 0  # per turn
        self.seconds: list[float] = []  # of the timed steps
        self.started = time.perf_counter()
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - it lives as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", "vitral.bench.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=child_environment(),
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._responses = self._process.stdin, self._process.stdout

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: object) -> None:
        """End the process by ending its input; kill it if it is still busy."""
        with contextlib.suppress(BrokenPipeError):
            self._requests.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._responses.close()
        self._log.close()

    def kill(self) -> None:
        """End the process at once: a call in another thread raises WorkerFailed."""
        self._process.kill()

    def log_tail(self, lines: int = 12) -> str:
        """The last lines that the process wrote to standard error."""
        self._log.seek(0)
        return "\n".join(self._log.read().strip().splitlines()[-lines:])

    def run(self, count: int) -> list[float]:
        """The seconds of `count` steps, one number each or one for all."""
        return self.call("run", count=count)

    def call(self, method: str, workload: Workload | None = None, **arguments: Any) -> Any:
        """Call a method of `RequestHandler` in the process; raises WorkerFailed."""
        if workload is not None:
            arguments |= {"backend": asdict(self.backend), "workload": asdict(workload)}
        try:
            self._requests.write(json.dumps({"method": method, "arguments": arguments}) + "\n")
            self._requests.flush()
            line = self._responses.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise WorkerFailed("died", f"its process ended: {self.log_tail(1) or 'no message'}")
        response = json.loads(line)
        if "error" in response:
            raise WorkerFailed(response["error"], response["reason"])
        return response["result"]


def child_environment() -> dict[str, str]:
    """Environment variables of child processes, which import this very package."""
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


class RequestHandler:
    """The process's side: each public method handles one kind of request."""

    def __init__(self) -> None:
        self.step: Any = None
        self.peak_memory: Callable[[], int] = lambda: 0

    def check_parity(self, backend: dict[str, Any], workload: dict[str, Any]) -> dict[str, float]:
        small: dict[str, Any] = {**workload, "batch": min(PARITY_BATCH, workload["batch"])}
        return check_parity(make_step(Backend(**backend), Workload(**small)))._asdict()

    def build(self, backend: dict[str, Any], workload: dict[str, Any]) -> dict[str, str]:
        """Make the step and return the environment; a second call replaces the step and frees the first."""
        compiled = self.step is not None and self.step.backend.mode == "compile"
        self.step = None
        gc.collect()
        if compiled:
            torch.compiler.reset()  # it compiles one function for a few shapes only
        self.peak_memory = peak_memory_counter(workload["device"])
        self.step = make_step(Backend(**backend), Workload(**workload))
        return environment_info(backend["library"], workload["device"])

    def run(self, count: int) -> list[float]:
        return self.step.run(count)

    def memory(self) -> int:
        """Peak bytes of the steps so far; to be called before anything else takes memory."""
        return self.peak_memory()

    def matmul_flops(self) -> float:
        return steps.matmul_flops(self.step.workload.device)

    def details(self) -> dict[str, float]:
        """Measurements of some workloads only, such as the stages of loading."""
        return self.step.details() if hasattr(self.step, "details") else {}


def make_step(backend: Backend, workload: Workload) -> Any:
    """The step of a workload, with `run` and possibly `outputs` or `details`."""
    makers = {
        "train": steps.TrainingStep,
        "infer": steps.InferenceStep,
        "latency": steps.LatencyStep,
        "data": loading.LoadingStep,
        "predict": loading.PredictionStep,
    }
    return makers[workload.work](backend, workload)


def handle_request(handler: RequestHandler, line: str) -> dict[str, Any]:
    """{"method", "arguments"} -> {"result"}, or {"error", "reason"}"""
    request = json.loads(line)
    try:
        return {"result": getattr(handler, request["method"])(**request["arguments"])}
    except steps.ParityError as error:
        return {"error": "parity", "reason": str(error)}
    except UserError as error:
        return {"error": "usage", "reason": str(error)}
    except Exception as error:  # a library may fail in any way, and the benchmark goes on with the others
        traceback.print_exc()
        first_line = (str(error).strip().splitlines() or [""])[0]
        return {"error": "error", "reason": f"{type(error).__name__}: {first_line}"}


def environment_info(library: str, device: str) -> dict[str, str]:
    versions = {name: importlib.metadata.version(name) for name in ("torch", library) if name != "vitral"}
    threads = str(torch.get_num_threads())
    return {"hardware": hardware_name(device), "threads": threads, "python": platform.python_version(), **versions}


def hardware_name(device: str) -> str:
    """The name of the GPU, or of the CPU with its vector instructions: clouds give several processors one name."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} cores"


def peak_memory_counter(device: str) -> Callable[[], int]:
    """A function that returns the peak bytes since now: allocated on the GPU, or added to this process."""
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated
    status = Path("/proc/self/status")  # if the system does not tell the bytes now, the peak so far stands for them
    lines = status.read_text().splitlines() if status.exists() else []
    sizes = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:")]
    cpu = torch.device("cpu")
    before = sizes[0] if sizes else peak_bytes(cpu)
    return lambda: max(peak_bytes(cpu) - before, 0)


def _serve() -> None:
    """Answer requests; standard output is for responses alone, and what libraries print goes to standard error."""
    handler = RequestHandler()
    with os.fdopen(os.dup(1), "w") as responses:
        os.dup2(2, 1)
        for line in iter(sys.stdin.readline, ""):
            responses.write(json.dumps(handle_request(handler, line)) + "\n")
            responses.flush()


if __name__ == "__main__":
    _serve()
    os._exit(0)  # an orderly shutdown of torch takes seconds, while the others wait
