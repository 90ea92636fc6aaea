"""Forward passes of ViT-B/16 on the CPU: vitral beside transformers, with the same weights, threads and images.

    python benchmarks/cpu_forward.py

The two take turns, so that a busy machine slows both alike. Read the ratio; the milliseconds are this machine's.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import vitral

# transformers takes torchvision along where it finds it, and a torchvision built for another torch fails to import.
sys.modules["torchvision"] = None  # type: ignore[assignment]
os.environ["HF_HUB_OFFLINE"] = "1"

import transformers  # noqa: E402

BATCH = 8
ROUNDS = 15
WARM_UP = 2

Forward = Callable[[Tensor], Tensor]


def main() -> None:
    torch.manual_seed(0)
    transformers.utils.logging.disable_progress_bar()
    ours, theirs = models()
    images = torch.randn(BATCH, 3, 224, 224)
    with torch.inference_mode():
        difference = (ours(images) - theirs(images)).abs().max().item()
        times = take_turns({"vitral": ours, "transformers": theirs}, images)
    report(times, difference)


def models() -> tuple[Forward, Forward]:
    """transformers' ViT-B/16 with random weights, and ours with the same ones read from its file."""
    options: dict[str, Any] = {"num_labels": 1000, "attn_implementation": "sdpa"}
    theirs = transformers.ViTForImageClassification(transformers.ViTConfig(**options)).eval()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours, _ = vitral.load(Path(folder) / "model.safetensors")
    return ours.eval(), lambda images: theirs(images).logits


def take_turns(forwards: dict[str, Forward], images: Tensor) -> dict[str, list[float]]:
    """Seconds of each forward pass, the first few left out."""
    times: dict[str, list[float]] = {name: [] for name in forwards}
    for _ in range(WARM_UP + ROUNDS):
        for name, forward in forwards.items():
            start = time.perf_counter()
            forward(images)
            times[name].append(time.perf_counter() - start)
    return {name: values[WARM_UP:] for name, values in times.items()}


def report(times: dict[str, list[float]], difference: float) -> None:
    table = Table("", "median ms", "quartiles ms", "images/s")
    for name, values in times.items():
        low, median, high = statistics.quantiles(values)
        table.add_row(name, f"{1e3 * median:.0f}", f"{1e3 * low:.0f} - {1e3 * high:.0f}", f"{BATCH / median:.1f}")
    ratios = [ours / theirs for ours, theirs in zip(times["vitral"], times["transformers"], strict=True)]
    low, median, high = statistics.quantiles(ratios)
    console = Console()
    console.print(f"ViT-B/16, batch {BATCH}, float32, {ROUNDS} rounds in turns")
    console.print(table)
    console.print(f"vitral takes {median:.3f} of transformers' time (quartiles of the rounds {low:.3f} - {high:.3f})")
    console.print(f"largest difference between their logits: {difference:.1e}")
    console.print(f"vitral {vitral.__version__}, torch {torch.__version__}, transformers {transformers.__version__}")
    console.print(f"{processor()}, {torch.get_num_threads()} threads")


def processor() -> str:
    """The CPU's name; only Linux keeps it where a program can read it."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
