"""Products of a block, timed on a GPU: PyTorch's, and what `kernels/` chooses instead.

    python benchmarks/kernel_choices.py          # about 15 seconds

Printed are microseconds per call, medians of calls that a CUDA graph repeats, and the share of the bfloat16 matrix
rate, which is measured in the same run. In bfloat16 both products have the same bits.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from vitral.bench.steps import matmul_flops, timed
from vitral.kernels import cublas, fp8, quantize
from vitral.kernels.cuda_graph import CudaGraph

_CALLS = 5  # in a CUDA graph
_ROUNDS = 15


def main() -> None:
    rate = matmul_flops("cuda")
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}: {rate / 1e12:.0f} TFLOP/s in bfloat16")

    def show(name: str, work: Callable[[], object], flops: float) -> None:
        time = seconds(work)
        print(f"{name:<72} {time * 1e6:8.1f} us  {flops / time / rate:4.0%} of the matrix rate", flush=True)

    for rows, width in ((256 * 197, 768), (64 * 577, 768), (256 * 197, 1024)):
        for inputs, outputs in ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)):
            show_product(show, rows, inputs, outputs)
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


def show_product(show: Callable[..., None], rows: int, inputs: int, outputs: int) -> None:
    """A linear layer and the gradient of its input, in bfloat16."""
    flops = 2.0 * rows * inputs * outputs
    x, grad, weight, bias = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        for shape in ((rows, inputs), (rows, outputs), (outputs, inputs), (outputs,))
    )
    title = f"{rows} x {inputs} -> {outputs}"
    assert torch.equal(cublas.linear(x, weight, bias), torch.addmm(bias, x, weight.t()))
    assert torch.equal(cublas.input_grad(grad, weight), grad @ weight)
    show(f"{title}: PyTorch's product", lambda: torch.addmm(bias, x, weight.t()), flops)
    show(f"{title}: chosen product", lambda: cublas.linear(x, weight, bias), flops)
    show(f"{title}: PyTorch's gradient of the input", lambda: grad @ weight, flops)
    show(f"{title}: chosen gradient of the input", lambda: cublas.input_grad(grad, weight), flops)


def show_hidden_layer(show: Callable[..., None], rows: int, width: int) -> None:
    """The MLP's hidden layer with its GELU, and in FP8."""
    outputs, flops = 4 * width, 8.0 * rows * width**2
    x = torch.randn(rows, width, device="cuda").to(torch.float8_e4m3fn)
    weight = quantize.quantize_weight(torch.randn(outputs, width, device="cuda") * width**-0.5)
    bias = torch.randn(outputs, device="cuda", dtype=torch.bfloat16)
    scale = torch.tensor(0.02, device="cuda")
    layer = fp8.Fp8Linear(weight, weight.scale, bias, torch.bfloat16)
    fp8_rows = quantize.Fp8Rows(x, quantize.unit_scales(x))
    half, half_weight = x.bfloat16(), weight.values.bfloat16()
    title = f"hidden layer {rows} x {width} -> {outputs}"
    show(f"{title}: GELU by PyTorch's product", lambda: torch._addmm_activation(
        bias, half, half_weight.t(), use_gelu=True
    ), flops)  # fmt: skip
    show(f"{title}: GELU by the chosen one", lambda: cublas.linear(half, half_weight, bias, gelu=True), flops)
    show(f"{title}: and its input", lambda: cublas.linear_gelu(half, half_weight, bias), flops)
    show(f"{title}: FP8 product alone", lambda: fp8.linear(fp8_rows, layer), flops)
    show(f"{title}: FP8 product and pass", lambda: fp8.linear_gelu_saved(fp8_rows, layer, scale, "tanh"), flops)
    show(f"{title}: FP8 in one kernel", lambda: fp8.linear_gelu(fp8_rows, layer, scale, "tanh"), flops)


if __name__ == "__main__":
    main()
