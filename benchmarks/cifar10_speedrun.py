"""How soon a plain ViT on CIFAR-10 reaches 90.9 %, from scratch, and how far it gets within five minutes: over seeds.

    python benchmarks/cifar10_speedrun.py cifar10:FOLDER --out runs/speedrun > benchmarks/cifar10_speedrun.log

Both recipes are in the book (`vitral show speedrun/cifar10`). Printed for each run: the test accuracy after its last
step, the seconds of training from the first step to the last (waiting for data included), and apart from that what
comes before and after: images read, kernels compiled in the first run, the evaluation. Nothing is averaged over views
of a test image, and no run is left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

from vitral import api

GOALS = {"speedrun/cifar10": (0.909, 60.0), "speedrun/cifar10-94": (0.94, 300.0)}


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("data")
    words.add_argument("--out", type=Path, required=True)
    words.add_argument("--recipes", nargs="+", default=list(GOALS), choices=list(GOALS))
    words.add_argument("--seeds", type=int, default=3)
    words.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="changes to try")
    asked = words.parse_args()
    print(f"{'recipe':<20} {'seed':>4} {'test':>7} {'training':>9} {'around it':>9}", flush=True)
    for recipe in asked.recipes:
        runs = [_run(asked, recipe, seed) for seed in range(asked.seeds)]
        scores, seconds = zip(*runs, strict=True)
        goal, limit = GOALS[recipe]
        spread = statistics.stdev(scores) if len(scores) > 1 else 0.0
        print(
            f"{recipe}: {statistics.fmean(scores):.2%} +- {spread:.2%} over {len(scores)} seeds (goal {goal:.1%}), "
            f"{statistics.fmean(seconds):.1f} s of training, at most {max(seconds):.1f} s (limit {limit:.0f} s)",
            flush=True,
        )


def _run(asked: argparse.Namespace, recipe: str, seed: int) -> tuple[float, float]:
    """Test accuracy and seconds of training."""
    folder = asked.out / f"{recipe.replace('/', '-')}-{seed}"
    began = time.perf_counter()
    result = api.train(asked.data, recipe=recipe, overrides=[f"seed={seed}", *asked.set], out=folder).results[0]
    whole = time.perf_counter() - began
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    steps = sum(line["seconds"] for line in lines if "loss" in line)
    score = result.metrics["top1"]
    print(f"{recipe:<20} {seed:>4} {score:>7.2%} {steps:>7.1f} s {whole - steps:>7.1f} s   {result.device}", flush=True)
    return score, steps


if __name__ == "__main__":
    main()
