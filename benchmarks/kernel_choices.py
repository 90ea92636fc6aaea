"""Alternatives for the parts of a block, timed on a GPU: what `kernels/` chooses, and what it could choose instead.

    python benchmarks/kernel_choices.py          # about 20 seconds

Printed are microseconds per call, medians of calls that a CUDA graph repeats, and the share of the bfloat16 matrix rate
or of the copy bandwidth, both measured in the same run.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from vitral.bench.steps import matmul_flops, timed
from vitral.kernels import attention, fp8, gelu
from vitral.kernels.cuda_graph import CudaGraph

_CALLS = 5  # in a CUDA graph
_ROUNDS = 15


def main() -> None:
    rate, bandwidth = matmul_flops("cuda"), copy_bandwidth()
    print(
        f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}: {rate / 1e12:.0f} TFLOP/s in bfloat16, "
        f"{bandwidth / 1e12:.2f} TB/s"
    )

    def show(name: str, work: Callable[[], object], *, flops: float = 0.0, size: float = 0.0) -> None:
        time = seconds(work)
        share = flops / time / rate if flops else size / time / bandwidth
        print(
            f"{name:<72} {time * 1e6:8.1f} us  {share:4.0%} of the {'products' if flops else 'bandwidth'}", flush=True
        )

    for batch, heads, tokens in ((64, 12, 577), (8, 16, 1370)):
        show_attention(show, batch, heads, tokens)
    for rows, width in ((256 * 197, 768), (256 * 197, 1024), (512 * 197, 768)):
        show_hidden_layer(show, rows, width)


def copy_bandwidth() -> float:
    """Bytes per second that are read and written."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda: target.copy_(source))


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


def show_attention(show: Callable[..., None], batch: int, heads: int, tokens: int) -> None:
    """Attention of long rows and the packing of its gradients."""
    qkv = torch.randn(batch, tokens, 3, heads, 64, device="cuda", dtype=torch.bfloat16)
    title = f"{batch} x {tokens} tokens, {heads} heads"
    flops = 4.0 * batch * heads * tokens**2 * 64
    out, lse = attention.forward(qkv)
    grad = torch.randn_like(out)
    grads = attention._long_backward(qkv, out, lse, grad)
    print(f"{title}: gradients have the strides {grads[0].stride()}")
    show(f"{title}: forward", lambda: attention.forward(qkv), flops=flops)
    show(f"{title}: backward", lambda: attention._long_backward(qkv, out, lse, grad), flops=2.5 * flops)
    size = 2.0 * qkv.numel() * 2
    show(f"{title}: packing", lambda: attention.pack_gradients(*grads), size=size)
    show(f"{title}: packing by PyTorch", lambda: attention.pack_gradients_reference(*grads), size=size)


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
    ), flops=flops)  # fmt: skip
    show(f"{title}: FP8 product alone", lambda: fp8.linear(fp8_rows, layer), flops=flops)
    show(
        f"{title}: FP8 product and pass", lambda: fp8.quantize(fp8.linear(fp8_rows, layer), scale, "tanh"), flops=flops
    )
    show(f"{title}: FP8 in one kernel", lambda: fused(None), flops=flops)
    show(f"{title}: FP8 in one kernel that saves", lambda: fused(h), flops=flops)


if __name__ == "__main__":
    main()
