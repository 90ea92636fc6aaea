"""How soon a plain ViT on CIFAR-10 reaches 90.9 %, from scratch, and how far it gets within five minutes: over seeds.

    python benchmarks/cifar10_speedrun.py cifar10:FOLDER --out runs/speedrun > benchmarks/cifar10_speedrun.log

Both recipes are in the book (`vitral show speedrun/cifar10`). Printed for each run: the test accuracy after its last
step; the seconds from the end of the tenth step to the end of the last; those first ten apart, in which the step is
recorded; and apart from that what comes before and after: images read, kernels compiled while it is found out what
fits, the evaluation, files written. Nothing is averaged over views of a test image, and no run is left out.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import NamedTuple

from vitral import api, events

GOALS = {"speedrun/cifar10": (0.909, 60.0), "speedrun/cifar10-94": (0.94, 300.0)}
_FIRST = 10  # steps


class Run(NamedTuple):
    """Test accuracy and seconds: of the steps, of the first of them, and of the whole program around them."""

    score: float
    steps: float
    first: float
    around: float


class Watch:
    """Reads the clock when steps begin and end, as the run tells of them."""

    def __init__(self) -> None:
        self.began = self.recorded = self.ended = 0.0

    def __call__(self, event: object) -> None:
        now = time.perf_counter()
        if isinstance(event, events.RunStarted):
            self.began = now
        if isinstance(event, events.StepDone) and event.step == _FIRST:
            self.recorded = now
        if isinstance(event, events.Evaluated):
            self.ended = now - event.seconds


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("data")
    words.add_argument("--out", type=Path, required=True)
    words.add_argument("--recipes", nargs="+", default=list(GOALS), choices=list(GOALS))
    words.add_argument("--seeds", type=int, default=3)
    words.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="changes to try")
    asked = words.parse_args()
    print(f"{'recipe':<20} {'seed':>4} {'test':>7} {'training':>9} {'first ten':>9} {'around it':>9}", flush=True)
    for recipe in asked.recipes:
        _tell(recipe, [_run(asked, recipe, seed) for seed in range(asked.seeds)])


def _tell(recipe: str, runs: list[Run]) -> None:
    goal, limit = GOALS[recipe]
    scores, seconds = [run.score for run in runs], [run.steps for run in runs]
    spread = statistics.stdev(scores) if len(scores) > 1 else 0.0
    print(
        f"{recipe}: {statistics.fmean(scores):.2%} +- {spread:.2%} over {len(scores)} seeds (goal {goal:.1%}), "
        f"{statistics.fmean(seconds):.1f} s of training, at most {max(seconds):.1f} s (limit {limit:.0f} s)",
        flush=True,
    )


def _run(asked: argparse.Namespace, recipe: str, seed: int) -> Run:
    folder = asked.out / f"{recipe.replace('/', '-')}-{seed}"
    watch, began = Watch(), time.perf_counter()
    words = [f"seed={seed}", *asked.set]
    result = api.train(asked.data, recipe=recipe, set=words, out=folder, on_event=watch).results[0]
    whole = time.perf_counter() - began
    first, steps = watch.recorded - watch.began, watch.ended - watch.recorded
    run = Run(result.metrics["top1"], steps, first, whole - steps - first)
    print(
        f"{recipe:<20} {seed:>4} {run.score:>7.2%} {run.steps:>7.1f} s {run.first:>7.1f} s {run.around:>7.1f} s   "
        f"{result.device}",
        flush=True,
    )
    return run


if __name__ == "__main__":
    main()
