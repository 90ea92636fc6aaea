"""Train a plain ViT on CIFAR-10 from scratch: times to 90.9 % and 94 %, and the accuracy in three minutes, over seeds.

    python benchmarks/cifar10_speedrun.py cifar10:FOLDER --out runs/speedrun > benchmarks/cifar10_speedrun.log

The recipes are presets (`vitral show speedrun/cifar10`). Printed for each run: the test accuracy after the last step;
the seconds from the end of the tenth step to the end of the last; those of the first ten steps, in which the CUDA graph
is captured; and those of everything else: reading images, compiling kernels, estimating resources, evaluating, writing
files. There is no test-time augmentation, and no run is left out.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import NamedTuple

import vitral
from vitral import events

GOALS = {"speedrun/cifar10": (0.909, 60.0), "speedrun/cifar10-94": (0.94, 60.0), "speedrun/cifar10-96": (0.94, 300.0)}
_FIRST_STEPS = 10


class RunTiming(NamedTuple):
    """Test accuracy, and seconds of the first steps, of the others, and of everything else."""

    score: float
    steps: float
    first_steps: float
    other: float


class StepClock:
    """An event handler that notes when steps begin and end."""

    def __init__(self) -> None:
        self.began = self.captured = self.ended = 0.0

    def __call__(self, event: object) -> None:
        now = time.perf_counter()
        if isinstance(event, events.RunStarted):
            self.began = now
        if isinstance(event, events.StepDone) and event.step == _FIRST_STEPS:
            self.captured = now
        if isinstance(event, events.Evaluated):
            self.ended = now - event.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recipes", nargs="+", default=list(GOALS), choices=list(GOALS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="overrides of the recipe")
    args = parser.parse_args()
    print(f"{'recipe':<20} {'seed':>4} {'test':>7} {'training':>9} {'first ten':>9} {'other':>9}", flush=True)
    for recipe in args.recipes:
        _print_summary(recipe, [_train(args, recipe, seed) for seed in range(args.seeds)])


def _print_summary(recipe: str, runs: list[RunTiming]) -> None:
    goal, limit = GOALS[recipe]
    scores, seconds = [run.score for run in runs], [run.steps for run in runs]
    deviation = statistics.stdev(scores) if len(scores) > 1 else 0.0
    print(
        f"{recipe}: {statistics.fmean(scores):.2%} +- {deviation:.2%} "
        f"(standard deviation of {len(scores)} seeds; goal {goal:.1%}), "
        f"{statistics.fmean(seconds):.1f} s of training, at most {max(seconds):.1f} s (limit {limit:.0f} s)",
        flush=True,
    )


def _train(args: argparse.Namespace, recipe: str, seed: int) -> RunTiming:
    folder = args.out / f"{recipe.replace('/', '-')}-{seed}"
    clock, began = StepClock(), time.perf_counter()
    overrides = [f"seed={seed}", *args.set]
    result = vitral.train(args.data, recipe=recipe, set=overrides, out=folder, on_event=clock).results[0]
    total = time.perf_counter() - began
    first_steps, steps = clock.captured - clock.began, clock.ended - clock.captured
    run = RunTiming(result.metrics["top1"], steps, first_steps, total - steps - first_steps)
    print(
        f"{recipe:<20} {seed:>4} {run.score:>7.2%} {run.steps:>7.1f} s {run.first_steps:>7.1f} s {run.other:>7.1f} s   "
        f"{result.device}",
        flush=True,
    )
    return run


if __name__ == "__main__":
    main()
