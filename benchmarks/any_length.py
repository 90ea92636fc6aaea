"""Our fused blocks at the lengths of fine-tuning and of DINO, and inside a user's torch.compile, against timm on a GPU.

    python benchmarks/any_length.py --check      # a minute: our logits and gradients against the float32 model
    python benchmarks/any_length.py              # about six minutes: one table
    python benchmarks/any_length.py --only 384 --rounds 5

Every backend is a process of its own. Those of a group of workloads start, compile and warm up at the same time;
then the workers of each workload take turns, and every other round is reversed. "captured" is our own CUDA graph of
the whole step, as `vitral train` and `vitral.graphed` use it; "loop" is `torch.compile(mode="reduce-overhead")` around
our model in a plain loop; timm is compiled the same way, once for each attention of PyTorch.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import torch

from vitral.bench.backends import OURS, Backend, Workload
from vitral.bench.benchmark import warm_up
from vitral.bench.worker import Worker, WorkerFailed, hardware_name

CAPTURED, LOOP = Backend(OURS, "graphs"), Backend(OURS, "loop")
TIMM = (Backend("timm", "graphs", "cudnn"), Backend("timm", "graphs", "flash"))
# Workloads whose workers fit into the memory of an H200 at the same time.
GROUPS = (
    (
        Workload("train", "ViT-B/16@384", 64, "cuda"),
        Workload("infer", "ViT-B/16@384", 128, "cuda"),
        Workload("train", "ViT-L/14@518", 8, "cuda"),
    ),
    (
        Workload("train", "ViT-Ti/16", 256, "cuda"),
        Workload("train", "ViT-S/16", 256, "cuda"),
        Workload("train", "ViT-B/16", 128, "cuda"),
    ),
    (
        Workload("train", "DINOv3-B/16@256", 128, "cuda"),
        Workload("train", "DINOv2-B/14@518", 16, "cuda"),
        Workload("infer", "DINOv2-B/14@518", 32, "cuda"),
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare ours with the float32 model")
    parser.add_argument("--only", default="", help="workloads whose name contains this")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU")
    began = time.perf_counter()
    groups = [[workload for workload in group if args.only in title(workload)] for group in GROUPS]
    print(
        f"{hardware_name('cuda')}, PyTorch {torch.__version__}, {attention_name()} attention for long rows", flush=True
    )
    if args.check:
        failures = check([workload for group in groups for workload in group])
        print(f"{failures} failed, {time.perf_counter() - began:.0f} s")
        raise SystemExit(failures > 0)
    print("| workload | backend | images/s | ms | GiB | of the best timm | of ours captured |")
    print("|---|---|--:|--:|--:|--:|--:|")
    for group in groups:
        race(group, args.rounds)
    print(f"{time.perf_counter() - began:.0f} s")


def title(workload: Workload) -> str:
    return f"{workload.work} {workload.model_name}, batch {workload.batch}"


def attention_name() -> str:
    """Which attention our blocks use for rows of 577 tokens."""
    from vitral.kernels import attention

    q = torch.zeros(1, 577, 3, 1, 64, device="cuda", dtype=torch.bfloat16).permute(2, 0, 3, 1, 4)
    return "cuDNN's" if attention._uses_cudnn(*q.unbind(0)) else "flash"


def check(workloads: Sequence[Workload]) -> int:
    """Print one line per workload and setting; the number of those that differ from the float32 model."""
    cases = [(workload, backend) for workload in workloads for backend in (CAPTURED, LOOP)]
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda case: check_one(*case), cases))
    for (workload, backend), (passed, text) in zip(cases, results, strict=True):
        print(f"{'ok    ' if passed else 'FAILED'} {title(workload)}, {backend.label}: {text}")
    return sum(not passed for passed, _ in results)


def check_one(workload: Workload, backend: Backend) -> tuple[bool, str]:
    try:
        with Worker(backend) as worker:
            parity = worker.call("check_parity", workload)
    except WorkerFailed as failure:
        return False, str(failure)
    return True, f"logits within {parity['logits']:.1e}, gradients within {parity['gradients']:.1e} of their norm"


def race(workloads: Sequence[Workload], rounds: int) -> None:
    """Print the rows of each workload."""
    cases = [(workload, backend) for workload in workloads for backend in (CAPTURED, LOOP, *TIMM)]
    with ExitStack() as stack:
        workers = [(workload, stack.enter_context(Worker(backend))) for workload, backend in cases]
        with ThreadPoolExecutor(max(len(workers), 1)) as pool:
            ready = list(pool.map(lambda pair: is_ready(pair[0], pair[1], rounds), workers))
        for workload in workloads:
            pairs = zip(workers, ready, strict=True)
            ready_workers = [worker for (of, worker), started in pairs if of is workload and started]
            for worker in ready_workers:  # the first choice was made while others were compiling
                worker.steps = min(math.ceil(1.0 / statistics.median(worker.run(3))), 30)
            for number in range(rounds):
                for worker in ready_workers if number % 2 == 0 else ready_workers[::-1]:
                    worker.seconds += worker.run(worker.steps)
            print_rows(workload, ready_workers)


def is_ready(workload: Workload, worker: Worker, rounds: int) -> bool:
    try:
        warm_up(worker, workload, rounds)
    except WorkerFailed as failure:
        print(f"{title(workload)}, {worker.backend.label} is excluded: {failure}", flush=True)
        return False
    return True


def print_rows(workload: Workload, workers: Sequence[Worker]) -> None:
    medians = {worker.backend: statistics.median(worker.seconds) for worker in workers}
    best_timm = min((seconds for backend, seconds in medians.items() if backend.library != OURS), default=float("nan"))
    captured = medians.get(CAPTURED, float("nan"))
    for worker in workers:
        seconds = medians[worker.backend]
        name = {CAPTURED: "vitral, captured", LOOP: "vitral, loop"}.get(worker.backend, worker.backend.label)
        print(
            f"| {title(workload)} | {name} | {workload.batch / seconds:,.0f} | {seconds * 1e3:.2f} "
            f"| {worker.measured['peak_bytes'] / 2**30:.1f} | {best_timm / seconds:.2f} | {captured / seconds:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
