"""The machine that numbers come from, and how much of its memory steps take."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path

import torch


def facts(library: str, device: str) -> dict[str, str]:
    """Hardware and versions, for a result that others shall trust."""
    versions = {name: importlib.metadata.version(name) for name in ("torch", library) if name != "vitral"}
    threads = str(torch.get_num_threads())
    return {"hardware": hardware(device), "threads": threads, "python": platform.python_version(), **versions}


def hardware(device: str) -> str:
    """The name of the GPU or of the CPU; only Linux keeps the latter where a program can read it."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def peak_memory(device: str) -> Callable[[], int]:
    """A function that tells the most bytes taken since now: of the GPU, or by how much this process grew."""
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated
    before = _resident()
    return lambda: max(_largest() - before, 0)


def _resident() -> int:
    """Bytes of this process now; where the system does not tell, the most so far."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    sizes = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:")]
    return sizes[0] if sizes else _largest()


def _largest() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return 0
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024
