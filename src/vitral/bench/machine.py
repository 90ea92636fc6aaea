"""The machine that is benchmarked: its hardware, its versions, and the memory that steps take."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path

import torch


def environment_info(library: str, device: str) -> dict[str, str]:
    """Hardware, threads and versions that a result depends on."""
    versions = {name: importlib.metadata.version(name) for name in ("torch", library) if name != "vitral"}
    threads = str(torch.get_num_threads())
    return {"hardware": hardware_name(device), "threads": threads, "python": platform.python_version(), **versions}


def hardware_name(device: str) -> str:
    """The name of the GPU, or of the CPU as far as the system tells it."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def peak_memory_counter(device: str) -> Callable[[], int]:
    """A function that returns the peak bytes since now: allocated on the GPU, or added to this process."""
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated
    before = _resident_bytes()
    return lambda: max(_peak_resident_bytes() - before, 0)


def _resident_bytes() -> int:
    """Bytes of this process now; where the system does not tell, the peak so far."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    sizes = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:")]
    return sizes[0] if sizes else _peak_resident_bytes()


def _peak_resident_bytes() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
