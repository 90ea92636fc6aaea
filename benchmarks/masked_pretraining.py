"""Does masked patch prediction help where labels are few? The same fine-tuning with and without it, over seeds.

    python benchmarks/masked_pretraining.py cifar10:FOLDER --out runs/masked     # minutes on a GPU, hours on a CPU

A ViT is pre-trained on all training images without their labels (appendix B.1.2, in small), then fine-tuned on a few
labelled ones; beside it the same model is trained on those from scratch, with the same recipe. What comes out is
printed as it is: mean and standard deviation over seeds, for each rate that was tried.
"""

from __future__ import annotations

import argparse
import math
import statistics
from pathlib import Path

from vitral import api, events

MODEL = "ViT-Ti/4@32"
IMAGES = ("data.train_transform=decode|inception_crop({size}, 0.3)|flip", "data.eval_transform=decode|resize({size})")
MASKED = ("batch=512", "schedule.warmup=400", "optim.lr=1e-3", "optim.weight_decay=0.05", *IMAGES)
TUNED = (
    *("batch=128", "trainable=full", "optim.weight_decay=0.05", "schedule.warmup=50", "optim.clip=1", *IMAGES),
    *("optim.layer_decay=1", "optim.head_lr=1", "data.mixup=0"),  # what is chosen otherwise depends on the start
)


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("data")
    words.add_argument("--out", type=Path, required=True)
    words.add_argument("--steps", type=int, default=4000, help="of pre-training, 512 images each")
    words.add_argument("--tuning", type=int, default=600, help="steps of fine-tuning, 128 images each")
    words.add_argument("--labels", type=int, nargs="+", default=[500, 5000])
    words.add_argument("--rates", type=float, nargs="+", default=[3e-4, 1e-3])
    words.add_argument("--seeds", type=int, default=3)
    asked = words.parse_args()
    overrides = [*MASKED, f"steps={asked.steps}", f"evaluate_every={max(asked.steps // 8, 1)}"]
    start = api.train(
        asked.data,
        model=MODEL,
        recipe="paper:pretrain/jft300m-masked",
        set=overrides,
        out=asked.out / "masked",
        on_event=_tell,
    ).results[0]
    found = start.metrics
    print(
        f"held-out loss {found['masked_loss']:.4f}; blind guess {math.log(512):.4f}, histogram "
        f"{found['histogram_entropy']:.4f}, mean of visible neighbours {found['neighbour_loss']:.4f}; "
        f"n = {found['n']}; {start.seconds:.0f} s, {start.flops:.3g} FLOPs on {start.device}"
    )
    print(f"{'labels':>7} {'rate':>7} {'start':>8}   test accuracy, mean +- deviation of {asked.seeds} seeds")
    for labels in asked.labels:
        for rate in asked.rates:
            for name, init in (("scratch", ""), ("masked", start.folder)):
                scores = [_tuned(asked, labels, rate, seed, name, init) for seed in range(asked.seeds)]
                spread = statistics.stdev(scores) if len(scores) > 1 else 0.0
                print(
                    f"{labels:>7} {rate:>7.0e} {name:>8}   {statistics.fmean(scores):.2%} +- {spread:.2%}", flush=True
                )


def _tuned(asked: argparse.Namespace, labels: int, rate: float, seed: int, name: str, init: str) -> float:
    """The accuracy of one run; every seed draws other labelled images."""
    overrides = [*TUNED, f"steps={asked.tuning}", f"optim.lr={rate}", f"seed={seed}", f"evaluate_every={asked.tuning}"]
    overrides += [f"data.subset={labels}", f"data.subset_seed={seed}"]
    done = api.train(
        asked.data,
        model="" if init else MODEL,
        init=init,
        set=overrides,
        out=asked.out / f"{name}-{labels}-{rate}-{seed}",
    )
    return done.results[0].metrics["top1"]


def _tell(event: events.Event) -> None:
    if isinstance(event, events.Evaluated):
        print(f"step {event.step}: held-out loss {event.metrics['masked_loss']:.4f}", flush=True)


if __name__ == "__main__":
    main()
