"""Many rows of speed against timm in a few minutes on a GPU: processes compile at the same time, then take turns.

    python benchmarks/side_by_side.py --check 384 518              # ours against the float32 model
    python benchmarks/side_by_side.py 384                          # one topic
    python benchmarks/side_by_side.py openclip+small base+resnet large+hybrid 518+384 --deadline 400 --out rows.json

An argument is a group of topics (see TOPICS) whose workers fit into the memory of the GPU together. Every backend is a
process of its own. Those of a group start, compile and warm up at the same time; then the workers of each workload take
turns, and every other round is reversed. Groups follow one another. What is not ready in time is left out and listed.
The logits and gradients of our captured steps are first compared with the float32 model; rows that differ are left out.

"captured" is our own CUDA graph of the whole step, as `vitral train` and `vitral.graphed` use it; "loop" is
`torch.compile(mode="reduce-overhead")` around our model in a plain loop. timm is compiled in the same way, for each
attention of PyTorch that may be the fastest, for OpenCLIP also with max-autotune, and with torchao's FP8 for ViT-B and
ViT-L; ratios are to its best in bfloat16. --out is a file of benchmark rows as `vitral bench --out` writes it; rows
that it has are kept.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from vitral.bench.backends import OURS, Backend, Work, Workload
from vitral.bench.benchmark import warm_up, worker_row
from vitral.bench.results import BenchmarkRow, merge_rows, now, read_rows, write_rows
from vitral.bench.worker import Worker, WorkerFailed, hardware_name

CAPTURED, LOOP = Backend(OURS, "graphs"), Backend(OURS, "loop")
FP8 = replace(CAPTURED, fp8=True)
CUDNN, FLASH = Backend("timm", "graphs", "cudnn"), Backend("timm", "graphs", "flash")
AUTOTUNE = replace(CUDNN, mode="autotune")
TORCHAO = replace(CUDNN, fp8=True)  # left out where torchao is not installed
CONVOLUTIONS = Backend("timm", "graphs")
_NAMES = {CAPTURED: "vitral, captured", LOOP: "vitral, loop", FP8: "vitral, captured, FP8"}
_TURNS_SECONDS = 4.0  # that are kept for the turns of each worker
_LEAST_WARM_UP = 40.0  # seconds
_THREADS = {"TORCHINDUCTOR_COMPILE_THREADS": "4", "OMP_NUM_THREADS": "2"}  # of each process, as all start at once


class Race(NamedTuple):
    """A workload and the backends that take turns at it."""

    workload: Workload
    backends: tuple[Backend, ...]

    @property
    def title(self) -> str:
        return f"{self.workload.work} {self.workload.model_name}, batch {self.workload.batch}"


def _race(work: Work, model: str, batch: int, *backends: Backend) -> Race:
    return Race(Workload(work, model, batch, "cuda"), backends)


TOPICS: dict[str, tuple[Race, ...]] = {
    "openclip": (
        _race("train", "OpenCLIP-B/16", 256, CAPTURED, CUDNN),
        _race("infer", "OpenCLIP-B/16", 512, CAPTURED, CUDNN, AUTOTUNE),
    ),
    "autotune": (  # takes minutes to compile: --warm-up 300
        _race("train", "OpenCLIP-B/16", 128, CAPTURED, CUDNN, AUTOTUNE),
        _race("train", "CLIP-B/16", 128, CAPTURED, CUDNN, AUTOTUNE),
        _race("train", "DINOv3-B/16", 128, CAPTURED, CUDNN, AUTOTUNE),
    ),
    "small": (
        _race("train", "ViT-Ti/16", 256, CAPTURED, LOOP, CUDNN, FLASH),
        _race("train", "ViT-S/16", 256, CAPTURED, LOOP, CUDNN, FLASH),
    ),
    "base": (
        _race("train", "ViT-B/16", 256, CAPTURED, LOOP, FP8, CUDNN, FLASH, TORCHAO),
        _race("infer", "ViT-B/16", 512, CAPTURED, FP8, CUDNN, TORCHAO),
    ),
    "large": (
        _race("train", "ViT-L/16", 256, CAPTURED, FP8, CUDNN),
        _race("infer", "ViT-L/16", 256, CAPTURED, FP8, CUDNN, TORCHAO),
    ),
    "resnet": (
        _race("train", "R50x1", 256, CAPTURED, LOOP, CONVOLUTIONS),
        _race("train", "R50x1", 64, CAPTURED, LOOP, CONVOLUTIONS),
    ),
    "hybrid": (
        _race("train", "R50+ViT-B/16", 128, CAPTURED, LOOP, CUDNN),
        _race("train", "R50+ViT-B/16", 64, CAPTURED, LOOP, CUDNN),
    ),
    "518": (_race("train", "ViT-L/14@518", 8, CAPTURED, CUDNN, FLASH),),
    "384": (
        _race("train", "ViT-B/16@384", 64, CAPTURED, LOOP, CUDNN, FLASH),
        _race("infer", "ViT-B/16@384", 128, CAPTURED, LOOP, CUDNN, FLASH),
    ),
    "dino": (
        _race("train", "DINOv3-B/16@256", 128, CAPTURED, LOOP, CUDNN, FLASH),
        _race("train", "DINOv2-B/14@518", 16, CAPTURED, LOOP, CUDNN, FLASH),
        _race("infer", "DINOv2-B/14@518", 32, CAPTURED, LOOP, CUDNN, FLASH),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="+", help=f"topics, joined by +: {', '.join(TOPICS)}")
    parser.add_argument("--check", action="store_true", help="only compare ours with the float32 model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turn", type=float, default=0.7, help="seconds")
    parser.add_argument("--warm-up", type=float, default=120.0, help="seconds that a group may start and compile")
    parser.add_argument("--deadline", type=float, default=math.inf, help="seconds in which all should end")
    parser.add_argument("--out", type=Path, help="JSON file of the rows")
    args = parser.parse_args()
    groups = [[race for topic in group.split("+") for race in TOPICS.get(topic, ())] for group in args.groups]
    if unknown := [topic for group in args.groups for topic in group.split("+") if topic not in TOPICS]:
        parser.error(f"there is no topic {unknown[0]}: use {', '.join(TOPICS)}")
    if not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU")
    began = time.perf_counter()
    os.environ.update(_THREADS)
    print(
        f"{hardware_name('cuda')}, PyTorch {torch.__version__}, {attention_name()} attention for long rows", flush=True
    )
    if args.check:
        failures = check([race for group in groups for race in group])
        print(f"{failures} failed, {time.perf_counter() - began:.0f} s")
        raise SystemExit(failures > 0)
    print("| workload | backend | images/s | ms | GiB | start s | of the best timm | of ours captured |")
    print("|---|---|--:|--:|--:|--:|--:|--:|")
    for names, group in zip(args.groups, groups, strict=True):
        reserve = _TURNS_SECONDS * sum(len(race.backends) for race in group)
        limit = min(args.warm_up, args.deadline - (time.perf_counter() - began) - reserve)
        if limit < _LEAST_WARM_UP:
            print(f"{names} is left out: too little time is left", flush=True)
            continue
        run_group(group, args, limit)
        print(f"{names}: {time.perf_counter() - began:.0f} s since the start", flush=True)


def attention_name() -> str:
    """Which attention our blocks use for rows of 577 tokens."""
    from vitral.kernels import attention

    q = torch.zeros(1, 577, 3, 1, 64, device="cuda", dtype=torch.bfloat16).permute(2, 0, 3, 1, 4)
    return "cuDNN's" if attention._uses_cudnn(*q.unbind(0)) else "flash"


def check(races: Sequence[Race]) -> int:
    """Print one line per workload and setting of ours; the number of those that differ from the float32 model."""
    cases = [(race, backend) for race in races for backend in race.backends if backend.library == OURS]
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda case: check_one(*case), cases))
    for (race, backend), (passed, text) in zip(cases, results, strict=True):
        print(f"{'ok    ' if passed else 'FAILED'} {race.title}, {backend.label}: {text}")
    return sum(not passed for passed, _ in results)


def check_one(race: Race, backend: Backend) -> tuple[bool, str]:
    try:
        with Worker(backend) as worker:
            return True, parity_text(worker, race)
    except WorkerFailed as failure:
        return False, str(failure)


def parity_text(worker: Worker, race: Race) -> str:
    parity = worker.call("check_parity", race.workload)
    return f"logits within {parity['logits']:.1e}, gradients within {parity['gradients']:.1e} of their norm"


def run_group(races: Sequence[Race], args: argparse.Namespace, limit: float) -> None:
    """Warm all workers up at the same time, then print the rows of each workload."""
    cases = [(race, backend) for race in races for backend in race.backends]
    with ExitStack() as stack:
        workers = [(race, stack.enter_context(Worker(backend))) for race, backend in cases]
        pool = stack.enter_context(ThreadPoolExecutor(len(workers)))
        pending = {pool.submit(is_ready, race, worker, args.rounds): worker for race, worker in workers}
        for late in wait(pending, limit).not_done:
            print(f"{pending[late].backend.label} was not ready after {limit:.0f} s", flush=True)
            pending[late].kill()
        ready = {worker for future, worker in pending.items() if future.result()}
        for race in races:
            ready_workers = [worker for of, worker in workers if of is race and worker in ready]
            try:
                rows = time_workers(race, ready_workers, args)
            except WorkerFailed as failure:
                print(f"{race.title} is excluded: {failure}", flush=True)
                continue
            print_rows(race, ready_workers, rows)
            if args.out:
                write_rows(args.out, merge_rows(read_rows(args.out), rows))


def is_ready(race: Race, worker: Worker, rounds: int) -> bool:
    """Check, compile and warm up; whether the worker can take its turns."""
    try:
        if worker.backend.captures:  # not what is compiled, which another batch would change
            print(f"{race.title}, {worker.backend.label}: {parity_text(worker, race)}", flush=True)
        warm_up(worker, race.workload, rounds)
    except WorkerFailed as failure:
        print(f"{race.title}, {worker.backend.label} is excluded: {failure}\n{worker.log_tail()}", flush=True)
        return False
    return True


def time_workers(race: Race, workers: Sequence[Worker], args: argparse.Namespace) -> list[BenchmarkRow]:
    """Let the workers take turns; one row for each."""
    started_at, rates = now(), []
    for worker in workers:  # the first choice was made while others were compiling
        worker.steps = min(math.ceil(args.turn / statistics.median(worker.run(3))), 50)
    for number in range(args.rounds):
        rates += [workers[0].call("matmul_flops")] if workers else []
        for worker in workers if number % 2 == 0 else workers[::-1]:
            worker.seconds += worker.run(worker.steps)
    return [worker_row(worker, race.workload, started_at, statistics.median(rates)) for worker in workers]


def print_rows(race: Race, workers: Sequence[Worker], rows: Sequence[BenchmarkRow]) -> None:
    others = [(worker, row) for worker, row in zip(workers, rows, strict=True) if row.library != OURS]
    best_timm = min((row.seconds for worker, row in others if not worker.backend.fp8), default=math.nan)
    captured = next((row.seconds for worker, row in zip(workers, rows, strict=True) if worker.backend == CAPTURED), 0.0)
    for worker, row in zip(workers, rows, strict=True):
        cells = (
            race.title, _NAMES.get(worker.backend, worker.backend.label), f"{row.images_per_second:,.0f}",
            f"{row.seconds * 1e3:.2f}", f"{row.peak_bytes / 2**30:.1f}", f"{row.startup_seconds:.0f}",
            f"{best_timm / row.seconds:.2f}", f"{captured / row.seconds:.2f}",
        )  # fmt: skip
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
