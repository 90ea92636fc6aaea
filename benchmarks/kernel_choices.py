"""Alternatives for a block's hidden layer in FP8, timed on a GPU: what `kernels/` chooses, and what it could choose.

    python benchmarks/kernel_choices.py          # about 15 seconds

Printed are microseconds per call, medians of calls that a CUDA graph repeats, and the share of the bfloat16 matrix
rate, which is measured in the same run.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from vitral.bench.steps import matmul_flops, timed
from vitral.kernels import fp8, gelu
from vitral.kernels.cuda_graph import CudaGraph

_CALLS = 5  # in a CUDA graph
_ROUNDS = 15


def main() -> None:
    rate = matmul_flops("cuda")
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}: {rate / 1e12:.0f} TFLOP/s in bfloat16")

    def show(name: str, work: Callable[[], object], flops: float) -> None:
        time = seconds(work)
        print(f"{name:<72} {time * 1e6:8.1f} us  {flops / time / rate:4.0%} of the matrix rate", flush=True)

    for rows, width in ((256 * 197, 768), (256 * 197, 1024), (512 * 197, 768)):
        show_hidden_layer(show, rows, width)


def seconds(work: Callable[[], object]) -> float:
    """The median time of a call."""
    work()

    def calls() -> tuple[()]:
        for _ in range(_CALLS):
            work()
        return ()

    graph = CudaGraph(calls, [])
    timed(graph.graph.replay, 2, "cuda")
    return statistics.median(timed(graph.graph.replay, _ROUNDS, "cuda")) / _CALLS


def show_hidden_layer(show: Callable[..., None], rows: int, width: int) -> None:
    """The MLP's hidden layer with its GELU in FP8, as one kernel or as a product and a pass."""
    outputs, flops = 4 * width, 8.0 * rows * width**2
    x = torch.randn(rows, width, device="cuda").to(torch.float8_e4m3fn)
    weight = fp8.quantize_weight(torch.randn(outputs, width, device="cuda") * width**-0.5)
    bias = torch.randn(outputs, device="cuda", dtype=torch.bfloat16)
    scale = torch.tensor(0.02, device="cuda")
    layer = fp8.Fp8Linear(weight, weight.scale, bias, torch.bfloat16)
    fp8_rows = fp8.Fp8Rows(x, fp8.unit_scales(x))
    h = torch.empty(rows, outputs, device="cuda", dtype=torch.bfloat16)
    title = f"hidden layer {rows} x {width} -> {outputs}"

    def fused(h: torch.Tensor | None) -> None:
        gelu.fused_linear_gelu(x, weight.values, bias, "tanh", (layer.scale, scale), h)

    half, half_weight = x.bfloat16(), weight.values.bfloat16()
    show(f"{title}: bfloat16 product and GELU by cuBLAS", lambda: torch._addmm_activation(
        bias, half, half_weight.t(), use_gelu=True
    ), flops)  # fmt: skip
    show(f"{title}: FP8 product alone", lambda: fp8.linear(fp8_rows, layer), flops)
    show(f"{title}: FP8 product and pass", lambda: fp8.quantize(fp8.linear(fp8_rows, layer), scale, "tanh"), flops)
    show(f"{title}: FP8 in one kernel", lambda: fused(None), flops)
    show(f"{title}: FP8 in one kernel that saves", lambda: fused(h), flops)


if __name__ == "__main__":
    main()
