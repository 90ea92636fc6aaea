"""What FP8 costs in quality, on an NVIDIA GPU that has it, and at any width: also where it would not be chosen.

    python benchmarks/fp8_quality.py agree WEIGHTS FOLDER
    python benchmarks/fp8_quality.py train DATA --recipe speedrun/cifar10 --out runs/fp8
    python benchmarks/fp8_quality.py train DATA --out runs/fp8 --set init=WEIGHTS trainable=full

`agree` compares the top-1 classes of the images of a folder in FP8 and in bfloat16 with those in float32. `train`
trains with both precisions over seeds, and prints the test accuracies and the difference of their means.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import numpy as np

import vitral
from vitral.api.inference import resolve_preprocessing
from vitral.data.sources import open_images
from vitral.evaluation.predict import predict_split
from vitral.models import fused


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    agree = commands.add_parser("agree")
    agree.add_argument("weights")
    agree.add_argument("folder")
    agree.add_argument("--preprocess", default="", help="where the weights do not state it")
    train = commands.add_parser("train")
    train.add_argument("data")
    train.add_argument("--recipe", default="", help="instead of the one that `vitral train` would choose")
    train.add_argument("--out", type=Path, required=True)
    train.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    train.add_argument("--precisions", nargs="+", default=["bfloat16", "fp8"], help="one of them, to run both at once")
    train.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="overrides of the recipe")
    args = parser.parse_args()
    fused.FP8_MIN_WIDTH = 0
    if args.command == "agree":
        _agree(args.weights, args.folder, args.preprocess)
    else:
        _train(args)


def _agree(weights: str, folder: str, preprocess: str) -> None:
    model, card = vitral.load(weights)
    split, preprocessing = open_images([folder]), resolve_preprocessing(card, preprocess)
    logits: dict[str, np.ndarray] = {}
    for precision in ("float32", "bfloat16", "fp8"):
        if precision == "fp8" and (reason := fused.enable_fp8(model.cuda(), freeze=True)):
            raise SystemExit(f"not in FP8: {reason}")
        logits[precision] = predict_split(
            model, split, preprocessing, batch=100, device="cuda", precision=precision
        ).logits
    exact = logits["float32"]
    for first, second in (("bfloat16", "float32"), ("fp8", "float32"), ("fp8", "bfloat16")):
        same = np.mean(logits[first].argmax(1) == logits[second].argmax(1))
        distance = np.linalg.norm(logits[first] - logits[second]) / np.linalg.norm(exact)
        print(
            f"{first} and {second}: top-1 agrees in {same:.2%} of {len(exact)} images, logits differ by {distance:.4f}"
        )


def _train(args: argparse.Namespace) -> None:
    scores: dict[str, list[float]] = {precision: [] for precision in args.precisions}
    for seed in args.seeds:
        for precision, values in scores.items():
            overrides = [f"seed={seed}", f"precision={precision}", *args.set]
            folder = args.out / f"{precision}-{seed}"
            result = vitral.train(args.data, recipe=args.recipe, set=overrides, out=folder).results[0]
            values.append(result.metrics["top1"])
            print(f"seed {seed} {precision:<8} {values[-1]:.2%}", flush=True)
    means = {precision: statistics.fmean(values) for precision, values in scores.items()}
    parts = [f"{precision} {mean:.2%}" for precision, mean in means.items()]
    if len(means) == 2:
        parts.append(f"{100 * (means['fp8'] - means['bfloat16']):+.2f} points")
    print(f"{len(args.seeds)} seeds: {', '.join(parts)}")


if __name__ == "__main__":
    main()
