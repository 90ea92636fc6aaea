"""Seconds per optimizer step of vitral's Muon and of torch.optim.Muon with torch.optim.AdamW, on a ViT's parameters.

    python benchmarks/muon.py --model ViT-S/16 --device cuda

Both update the same weights: matrices of the blocks by Muon (vitral's splits queries, keys and values), the rest by
AdamW. Gradients are random and stay; the medians are over 20 steps after 5. "captured" replays the step as a CUDA
graph, which is how vitral trains on one GPU; torch.optim.Muon's attempt is reported as it ends.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

import vitral
from vitral.kernels.cuda_graph import CudaGraph
from vitral.training.optimizer import Muon, parameter_groups


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="ViT-S/16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    device = torch.device(options.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{options.model}, torch {torch.__version__}, {name}")
    for label, build in (("vitral", _vitral_muon), ("torch.optim", _torch_muon)):
        torch.manual_seed(0)
        model = vitral.create(options.model, classes=1000).to(device)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter) * 1e-3
        step = build(model)
        print(f"{label:<12} eager {_milliseconds(step, device):8.2f} ms   captured {_captured(step, device)}")


def _vitral_muon(model: torch.nn.Module) -> Callable[[], None]:
    device = next(model.parameters()).device
    groups = [{**group, "lr": torch.tensor(1e-3, device=device)} for group in parameter_groups(model, weight_decay=0.1)]
    optimizer = Muon(groups, lr=1e-3)
    return lambda: optimizer.step()


def _torch_muon(model: torch.nn.Module) -> Callable[[], None]:
    groups = parameter_groups(model, weight_decay=0.1)
    matrices = [parameter for group in groups if group["matrices"] for parameter in group["params"]]
    others = [parameter for group in groups if not group["matrices"] for parameter in group["params"]]
    muon = torch.optim.Muon(matrices, lr=1e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(others, lr=1e-3, fused=True)

    def step() -> None:
        muon.step()
        adamw.step()

    return step


def _milliseconds(step: Callable[[], object], device: torch.device) -> float:
    times = []
    for count in range(25):
        began = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if count >= 5:
            times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times)


def _captured(step: Callable[[], None], device: torch.device) -> str:
    if device.type != "cuda":
        return "-"

    def captured(flag: torch.Tensor) -> tuple[torch.Tensor, ...]:
        step()
        return (flag,)

    flag = torch.zeros((), device=device)
    try:
        graph = CudaGraph(captured, [flag])
    except RuntimeError as error:
        return f"fails: {(str(error).splitlines() or [''])[0]}"
    return f"{_milliseconds(lambda: graph(flag), device):8.2f} ms"


if __name__ == "__main__":
    main()
