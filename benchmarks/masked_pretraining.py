"""Does masked patch prediction help with few labels? Fine-tuning with and without it, over seeds.

    python benchmarks/masked_pretraining.py cifar10:FOLDER --out runs/masked     # minutes on a GPU, hours on a CPU

A ViT is pre-trained on all training images without their labels (appendix B.1.2, at a small scale), then fine-tuned on
a few labelled ones; the same model is trained on those from scratch with the same recipe. Printed are the mean and
standard deviation over seeds for each learning rate.
"""

from __future__ import annotations

import argparse
import math
import statistics
from pathlib import Path

import vitral
from vitral import events

MODEL = "ViT-Ti/4@32"
IMAGES = (
    "data.train_transform=decode|random_resized_crop({size}, 0.3)|flip",
    "data.eval_transform=decode|resize({size})",
)
PRETRAINING = ("batch=512", "schedule.warmup=400", "optim.lr=1e-3", "optim.weight_decay=0.05", *IMAGES)
FINE_TUNING = (
    *("batch=128", "trainable=full", "optim.weight_decay=0.05", "schedule.warmup=50", "optim.clip=1", *IMAGES),
    *("optim.layer_decay=1", "optim.head_lr=1", "data.mixup=0"),  # the defaults of these depend on the initial weights
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=4000, help="steps of pre-training, 512 images each")
    parser.add_argument("--tuning", type=int, default=600, help="steps of fine-tuning, 128 images each")
    parser.add_argument("--labels", type=int, nargs="+", default=[500, 5000])
    parser.add_argument("--rates", type=float, nargs="+", default=[3e-4, 1e-3])
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    overrides = [*PRETRAINING, f"steps={args.steps}", f"evaluate_every={max(args.steps // 8, 1)}"]
    start = vitral.train(
        args.data,
        model=MODEL,
        recipe="paper:pretrain/jft300m-masked",
        set=overrides,
        out=args.out / "masked",
        on_event=_print_evaluation,
    ).results[0]
    metrics = start.metrics
    print(
        f"held-out loss {metrics['masked_loss']:.4f}; blind guess {math.log(512):.4f}, histogram "
        f"{metrics['histogram_entropy']:.4f}, mean of visible neighbours {metrics['neighbour_loss']:.4f}; "
        f"n = {metrics['n']}; {start.seconds:.0f} s, {start.flops:.3g} FLOPs on {start.device}"
    )
    print(f"{'labels':>7} {'lr':>7} {'start':>8}   test accuracy, mean +- standard deviation of {args.seeds} seeds")
    for labels in args.labels:
        for rate in args.rates:
            for name, init in (("scratch", ""), ("masked", start.folder)):
                scores = [_fine_tune(args, labels, rate, seed, name, init) for seed in range(args.seeds)]
                deviation = statistics.stdev(scores) if len(scores) > 1 else 0.0
                print(
                    f"{labels:>7} {rate:>7.0e} {name:>8}   {statistics.fmean(scores):.2%} +- {deviation:.2%}",
                    flush=True,
                )


def _fine_tune(args: argparse.Namespace, labels: int, rate: float, seed: int, name: str, init: str) -> float:
    """The test accuracy of one run; every seed draws other labelled images."""
    overrides = [
        *FINE_TUNING,
        f"steps={args.tuning}",
        f"optim.lr={rate}",
        f"seed={seed}",
        f"evaluate_every={args.tuning}",
    ]
    overrides += [f"data.subset={labels}", f"data.subset_seed={seed}"]
    training = vitral.train(
        args.data,
        model="" if init else MODEL,
        init=init,
        set=overrides,
        out=args.out / f"{name}-{labels}-{rate}-{seed}",
    )
    return training.results[0].metrics["top1"]


def _print_evaluation(event: events.Event) -> None:
    if isinstance(event, events.Evaluated):
        print(f"step {event.step}: held-out loss {event.metrics['masked_loss']:.4f}", flush=True)


if __name__ == "__main__":
    main()
