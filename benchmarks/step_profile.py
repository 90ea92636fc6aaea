"""Where the time of a training step, or of a batch of predictions, goes on a GPU, by category of kernels.

    python benchmarks/step_profile.py ViT-B/16:256
    python benchmarks/step_profile.py ViT-B/16@384:64 ViT-B/16:256:fp8 ViT-B/16:512:infer:fp8 --kernels 12

One CUDA graph of a step, as `vitral bench train` or `vitral bench infer` times it, is replayed under PyTorch's
profiler, and its kernels are grouped by name. A single profiled step runs at other clocks than many steps in a row, so
shares are more reliable than milliseconds.
"""

from __future__ import annotations

import argparse
import re

import torch
from torch.profiler import ProfilerActivity, profile

from vitral.bench.backends import OURS, Backend, Workload
from vitral.bench.worker import make_step

CATEGORIES = {
    "attention": r"^attention_|^pack_gradients|sdpa|flash",
    "matrix products": r"nvjet|gemm|cutlass|splitK|gemv|cublas|linear_gelu",
    "norms and residual sums": r"^norm_|fold_norm",
    "GELU": r"gelu",
    "quantisation to FP8": r"^quantize|^transpose$",
    "optimizer and clipping": r"multi_tensor|foreach|adam",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="+", help="model:batch, and :infer (predictions instead of training) or :fp8")
    parser.add_argument("--kernels", type=int, default=0, help="also list this many kernels by name")
    args = parser.parse_args()
    for text in args.steps:
        model, batch, *options = text.split(":")
        if unknown := set(options) - {"infer", "fp8"}:
            parser.error(f"{text}: unknown {', '.join(unknown)}")
        workload = Workload("infer" if "infer" in options else "train", model, int(batch), "cuda")
        profile_step(text, Backend(OURS, "graphs", fp8="fp8" in options), workload, args.kernels)


def profile_step(title: str, backend: Backend, workload: Workload, listed: int) -> None:
    step = make_step(backend, workload)
    seconds = sorted(step.run(20))[10]
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step.run(1)
    kernels = [(event.key, event.self_device_time_total / 1e3, event.count) for event in profiler.key_averages()]
    kernels = sorted(((name, ms, count) for name, ms, count in kernels if ms), key=lambda kernel: -kernel[1])
    totals = dict.fromkeys([*CATEGORIES, "other"], 0.0)
    for name, ms, _ in kernels:
        matches = (category for category, pattern in CATEGORIES.items() if re.search(pattern, name))
        totals[next(matches, "other")] += ms
    total = sum(totals.values())
    print(f"{title}, {torch.cuda.get_device_name()}: a step takes {seconds * 1e3:.2f} ms")
    for category, ms in totals.items():
        print(f"{category:<28} {ms:7.2f} ms {ms / total:7.1%}")
    print(f"{'all kernels':<28} {total:7.2f} ms in {sum(count for *_, count in kernels)} launches")
    for name, ms, count in kernels[:listed]:
        print(f"  {ms:7.3f} ms {count:4d} x {name[:90]}", flush=True)


if __name__ == "__main__":
    main()
