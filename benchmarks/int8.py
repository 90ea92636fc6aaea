"""Milliseconds per image of exported files beside the model that they were exported from, in turns.

    vitral export SOURCE model.onnx --images FOLDER
    vitral export SOURCE int8.onnx --format onnx-int8 --images FOLDER --agreement 0.98
    python benchmarks/int8.py SOURCE model.onnx int8.onnx --threads 2

The clock counts seconds (--clock wall), or those that this process computes (--clock cpu), which others on the same
machine change less: with one thread, as threads that wait count too.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("files", nargs="+")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
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
    for batch in options.batches:
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
