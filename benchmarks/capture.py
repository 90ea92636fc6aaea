"""Overhead of `capture`: ViT-B/16 on the CPU, without and with the class-token attention of every layer.

    python benchmarks/capture.py

The two alternate, so that a busy machine slows both. The ratio is the result; milliseconds depend on the machine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from torch import Tensor, nn

import vitral
from vitral.models.build import build
from vitral.models.capture import capture
from vitral.names import parse

BATCH = 4
ROUNDS = 11
WARM_UP = 2


def main() -> None:
    torch.manual_seed(0)
    model = build(parse("ViT-B/16")).eval()
    images = torch.randn(BATCH, 3, 224, 224)
    with torch.inference_mode():
        same = torch.equal(model(images), with_capture(model, images))
        ratios, plain = alternate(model, images)
    low, median, high = statistics.quantiles(ratios)
    console = Console()
    console.print(f"ViT-B/16, batch {BATCH}, float32, {ROUNDS} alternating rounds, {torch.get_num_threads()} threads")
    console.print(f"a forward pass takes {1e3 * plain:.0f} ms")
    console.print(f"with the capture it takes {median:.3f} of that (quartiles of the rounds {low:.3f} - {high:.3f})")
    console.print(f"the logits are {'bit-identical' if same else 'different'}")
    console.print(f"vitral {vitral.__version__}, torch {torch.__version__}")


def with_capture(model: nn.Module, images: Tensor) -> Tensor:
    with capture(model, rows="cls"):
        return model(images)


def alternate(model: nn.Module, images: Tensor) -> tuple[list[float], float]:
    """The ratio of the times with and without capture, per round; and the median seconds of a plain pass."""
    rounds = [
        (seconds(lambda: model(images)), seconds(lambda: with_capture(model, images))) for _ in range(WARM_UP + ROUNDS)
    ][WARM_UP:]
    return [captured / plain for plain, captured in rounds], statistics.median(plain for plain, _ in rounds)


def seconds(function: Callable[[], Tensor]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
