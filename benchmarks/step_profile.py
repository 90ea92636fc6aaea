"""Where the time of a training step goes on a GPU, by kind of work.

    python benchmarks/step_profile.py --model ViT-B/16 --batch 256

One recorded step, as `vitral bench train` times it, is replayed under torch's profiler; kernels are told apart by name.
What a profiler sees of one step runs at other clocks than many steps in a row: shares are worth more than milliseconds.
"""

from __future__ import annotations

import argparse
import re

import torch
from torch.profiler import ProfilerActivity, profile

from vitral.bench.backends import OURS, Backend, Task
from vitral.bench.steps import TrainingStep

KINDS = {
    "matrix products": r"nvjet|gemm|cutlass|splitK|gemv|cublas",
    "attention": r"^attention_",
    "norms and residual sums": r"^norm_|fold_norm",
    "GELU": r"gelu",
    "optimizer and clipping": r"multi_tensor|foreach|adam",
}


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--model", default="ViT-B/16")
    words.add_argument("--batch", type=int, default=256)
    words.add_argument("--kernels", type=int, default=0, help="so many kernels by name, too")
    asked = words.parse_args()
    step = TrainingStep(Backend(OURS, "graphs"), Task("train", asked.model, asked.batch, "cuda"))
    seconds = sorted(step.run(20))[10]
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step.run(1)
    kernels = [(event.key, event.self_device_time_total / 1e3, event.count) for event in seen.key_averages()]
    kernels = sorted(((name, spent, count) for name, spent, count in kernels if spent), key=lambda kernel: -kernel[1])
    totals = dict.fromkeys([*KINDS, "the rest"], 0.0)
    for name, spent, _ in kernels:
        kind = next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), "the rest")
        totals[kind] += spent
    whole = sum(totals.values())
    print(f"{asked.model}, batch {asked.batch}, {torch.cuda.get_device_name()}: a step takes {seconds * 1e3:.2f} ms")
    for kind, spent in totals.items():
        print(f"{kind:<28} {spent:7.2f} ms {spent / whole:7.1%}")
    print(f"{'kernels together':<28} {whole:7.2f} ms in {sum(count for *_, count in kernels)} launches")
    for name, spent, count in kernels[: asked.kernels]:
        print(f"  {spent:7.3f} ms {count:4d} x {name[:90]}")


if __name__ == "__main__":
    main()
