"""Milliseconds per image of exported files beside the model that they were exported from, in turns.

    vitral export SOURCE model.onnx --images FOLDER
    vitral export SOURCE int8.onnx --format onnx-int8 --images FOLDER --agreement 0.98
    python benchmarks/int8.py SOURCE model.onnx int8.onnx --threads 2

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
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from vitral.api.checkpoints import load_source
from vitral.export.exported import open_exported
from vitral.kernels.packed import pack
from vitral.models.model import normalize

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def packed_model(source: str) -> Callable[[np.ndarray], np.ndarray]:
    """Our own model as `vitral predict` runs it on a CPU."""
    model, card = load_source(source, None)
    pack(model.eval())
    assert card.preprocess is not None
    mean, std = card.preprocess.mean, card.preprocess.std

    def predict(pixels: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            return model(normalize(torch.from_numpy(pixels).permute(0, 3, 1, 2), mean, std)).softmax(dim=-1).numpy()

    return predict


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
    parser.add_argument("source")
    parser.add_argument("files", nargs="+")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--profile", action="store_true", help="print the time of each operator")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = CLOCKS[options.clock]
    files = [open_exported(path) for path in options.files]
    models: dict[str, Callable[[np.ndarray], np.ndarray]] = {str(file.path): file for file in files}
    models["vitral, packed"] = packed_model(options.source)
    config = files[0].card.architecture
    images = np.random.default_rng(0).integers(
        0, 256, (max(options.batches), *config.image, config.channels), dtype=np.uint8
    )
    for path in options.files if options.profile else ():
        profile(path, images[:1], options.rounds)
    for batch in () if options.profile else options.batches:
        times: dict[str, list[float]] = {name: [] for name in models}
        for number in range(options.rounds + 1):  # the first warms up
            for name in list(models)[:: 1 if number % 2 else -1]:
                start = clock()
                models[name](images[:batch])
                times[name].append(1000 * (clock() - start) / batch)
        for name, values in times.items():
            print(
                f"batch {batch:3}  {name:30}  median {statistics.median(values[1:]):7.2f} ms per image, "
                f"least {min(values[1:]):7.2f}"
            )


if __name__ == "__main__":
    main()
