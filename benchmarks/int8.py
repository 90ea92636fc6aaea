"""Milliseconds per image of a model, plain, packed and in int8, beside exported files of it, in turns.

    vitral export SOURCE model.onnx --images FOLDER
    vitral export SOURCE int8.onnx --format onnx-int8 --images FOLDER --agreement 0.98
    python benchmarks/int8.py SOURCE model.onnx int8.onnx --threads 2
    python benchmarks/int8.py --layers --threads 1 --clock cpu       # PyTorch's int8 products at the sizes of a ViT

The clock counts seconds (--clock wall), or those that this process computes (--clock cpu), which others on the same
machine change less: with one thread, as threads that wait count too. `--profile` prints the time of each operator of a
file instead, for one image and one thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.api.checkpoints import load_source
from vitral.export.exported import open_exported
from vitral.kernels.packed import Int8Linear, PackedLinear, pack, pack_int8, weight_scales
from vitral.models.model import normalize

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def own_model(source: str, how: str) -> Callable[[np.ndarray], np.ndarray]:
    """Our own model as `vitral predict` runs it on a CPU: packed, or also int8; or plain."""
    model, card = load_source(source, None)
    model.eval()
    if how == "int8":
        pack_int8(model.get_submodule("blocks"))
    if how != "plain":
        pack(model)
    assert card.preprocess is not None
    mean, std = card.preprocess.mean, card.preprocess.std

    def predict(pixels: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            return model(normalize(torch.from_numpy(pixels).permute(0, 3, 1, 2), mean, std)).softmax(dim=-1).numpy()

    return predict


def layer_functions(inputs: int, outputs: int, rows: int) -> dict[str, Callable[[], Tensor]]:
    """A linear layer as PyTorch and we compute it, on tokens (rows, inputs); "product" is without rounding them."""
    torch.manual_seed(0)
    x, linear = torch.randn(rows, inputs), nn.Linear(inputs, outputs)
    packed, ours, weight, bias = PackedLinear(linear), Int8Linear(linear), linear.weight.detach(), linear.bias.detach()
    scales = torch.from_numpy(weight_scales(weight.numpy().T))
    rounded, zeros = (weight / scales[:, None]).round().to(torch.int8), torch.zeros(outputs, dtype=torch.int32)
    step = float(x.abs().max()) / 127
    signed = (x / step).round().to(torch.int8)
    unsigned, prepacked = (signed.int() + 128).to(torch.uint8), torch.ops.onednn.qlinear_prepack(rounded, None)
    quantized = torch.quantize_per_channel(weight, scales.double(), zeros.long(), 0, torch.qint8)
    half, transposed, output = x.bfloat16(), rounded.t(), (1.0, 0, torch.float32, "none", [], "")

    def dynamic(engine: str) -> Callable[[], Tensor]:
        torch.backends.quantized.engine = engine  # of what is packed; a packed layer keeps it
        parameters = torch.ops.quantized.linear_prepack(quantized, bias)
        return lambda: torch.ops.quantized.linear_dynamic(x, parameters)

    return {
        "float32, packed": lambda: packed(x),
        "float32, F.linear": lambda: F.linear(x, weight, bias),
        "int8, ours (by token)": lambda: ours(x),
        "linear_dynamic, fbgemm": dynamic("fbgemm"),
        "linear_dynamic, onednn": dynamic("onednn"),
        "qlinear_pointwise, product": lambda: torch.ops.onednn.qlinear_pointwise(
            unsigned, step, 128, prepacked, scales, zeros, bias, *output
        ),
        "_int_mm, product": lambda: torch._int_mm(signed, transposed),
        "_weight_int8pack_mm": lambda: torch._weight_int8pack_mm(half, rounded, scales.bfloat16()),
    }


def time_layers(clock: Callable[[], float], batches: Sequence[int], rounds: int) -> None:
    for width in (192, 384):
        for inputs, outputs in ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)):
            for batch in batches:
                with torch.inference_mode(), warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # quantized tensors are deprecated
                    times = in_turns(layer_functions(inputs, outputs, 197 * batch), clock, rounds)
                base = statistics.median(times["float32, packed"])
                for name, values in times.items():
                    found = statistics.median(values)
                    sizes = f"{inputs:5} -> {outputs:5}, batch {batch:2}"
                    print(
                        f"{sizes}  {name:28}  {1e3 * found:8.3f} ms, {base / found:5.2f} of packed float32", flush=True
                    )


def in_turns(
    functions: Mapping[str, Callable[[], object]], clock: Callable[[], float], rounds: int
) -> dict[str, list[float]]:
    """Seconds of each function in each round, after one that warms up."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(rounds + 1):
        for name in list(functions)[:: 1 if number % 2 else -1]:
            start = clock()
            functions[name]()
            times[name].append(clock() - start)
    return {name: values[1:] for name, values in times.items()}


def profile(path: str, pixels: np.ndarray, rounds: int) -> None:
    """Print the milliseconds of each operator: of its nodes, the lower quartile over rounds, added."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.enable_profiling = 1, True
    with tempfile.TemporaryDirectory() as folder:
        options.profile_file_prefix = f"{folder}/profile"
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        for _ in range(rounds):
            session.run(["probabilities"], {session.get_inputs()[0].name: pixels})
        events = json.loads(Path(session.end_profiling()).read_text())
    nodes: dict[tuple[str, str], list[float]] = {}
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            nodes.setdefault((event["args"]["op_name"], event["name"]), []).append(event["dur"] / 1000)
    operators: dict[str, float] = {}
    for (operator, _), times in nodes.items():
        operators[operator] = operators.get(operator, 0) + float(np.quantile(times, 0.25))
    total = sum(operators.values())
    print(f"{path}: {total:.1f} ms")
    for operator, spent in sorted(operators.items(), key=lambda item: -item[1]):
        count = sum(name == operator for name, _ in nodes)
        print(f"  {operator:24} {count:3} times {spent:6.2f} ms {spent / total:6.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="?")
    parser.add_argument("files", nargs="*")
    parser.add_argument("--layers", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--profile", action="store_true", help="print the time of each operator")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = CLOCKS[options.clock]
    if options.layers:
        return time_layers(clock, options.batches, options.rounds)
    models: dict[str, Callable[[np.ndarray], np.ndarray]] = {path: open_exported(path) for path in options.files}
    models |= {f"vitral, {how}": own_model(options.source, how) for how in ("plain", "packed", "int8")}
    config = load_source(options.source, None)[1].architecture
    images = np.random.default_rng(0).integers(
        0, 256, (max(options.batches), *config.image, config.channels), dtype=np.uint8
    )
    for path in options.files if options.profile else ():
        profile(path, images[:1], options.rounds)
    for batch in () if options.profile else options.batches:
        functions = {name: partial(model, images[:batch]) for name, model in models.items()}
        times = in_turns(functions, clock, options.rounds)
        base = statistics.median(times["vitral, packed"])
        for name, values in times.items():
            ms = [1000 * value / batch for value in values]
            print(
                f"batch {batch:3}  {name:30}  median {statistics.median(ms):7.2f} ms per image, least {min(ms):7.2f}; "
                f"{base / statistics.median(values):.2f} times as fast as vitral, packed",
                flush=True,
            )


if __name__ == "__main__":
    main()
