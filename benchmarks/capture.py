"""What watching costs: ViT-B/16 on the CPU, without and with a capture of the class-token row of every layer.

    python benchmarks/capture.py

The two take turns, so that a busy machine slows both alike. Read the ratio; the milliseconds are this machine's.
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
        same = torch.equal(model(images), watched(model, images))
        ratios, plain = take_turns(model, images)
    low, median, high = statistics.quantiles(ratios)
    console = Console()
    console.print(f"ViT-B/16, batch {BATCH}, float32, {ROUNDS} rounds in turns, {torch.get_num_threads()} threads")
    console.print(f"a forward pass takes {1e3 * plain:.0f} ms")
    console.print(f"with the capture it takes {median:.3f} of that (quartiles of the rounds {low:.3f} - {high:.3f})")
    console.print(f"the logits are {'the same, bit for bit' if same else 'different'}")
    console.print(f"vitral {vitral.__version__}, torch {torch.__version__}")


def watched(model: nn.Module, images: Tensor) -> Tensor:
    with capture(model, rows="cls"):
        return model(images)


def take_turns(model: nn.Module, images: Tensor) -> tuple[list[float], float]:
    """Watched over plain, for each round; and the median seconds of a plain pass."""
    rounds = [
        (seconds(lambda: model(images)), seconds(lambda: watched(model, images))) for _ in range(WARM_UP + ROUNDS)
    ][WARM_UP:]
    return [with_capture / plain for plain, with_capture in rounds], statistics.median(plain for plain, _ in rounds)


def seconds(work: Callable[[], Tensor]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
