"""An exported ONNX file in other runtimes: top-1 agreement with the model, and the largest difference of a probability.

    vitral export SOURCE model.onnx --images FOLDER
    python benchmarks/runtimes.py SOURCE model.onnx --images FOLDER --n 50

Runtimes that are not installed are left out; what one of them cannot read is printed with its reason.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

from vitral.api.checkpoints import load_source
from vitral.export.exported import open_exported
from vitral.export.graph import ExportGraph

Predict = Callable[[np.ndarray], np.ndarray]  # uint8 (batch, height, width, channels) -> (batch, classes)


def onnxruntime(path: str) -> Predict:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda pixels: np.asarray(session.run(["probabilities"], {"pixels": pixels})[0])


def openvino(path: str) -> Predict:
    import openvino  # type: ignore[import-not-found]

    compiled = openvino.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return lambda pixels: np.asarray(compiled(pixels)["probabilities"])


def opencv(path: str) -> Predict:
    import cv2  # type: ignore[import-not-found]

    network = cv2.dnn.readNetFromONNX(path)

    def predict(pixels: np.ndarray) -> np.ndarray:
        network.setInput(pixels)
        return network.forward("probabilities").reshape(len(pixels), -1)

    return predict


def tract(path: str) -> Predict:
    import tract  # type: ignore[import-not-found]

    model = tract.onnx().load(path).into_model().into_runnable()
    return lambda pixels: np.asarray(model.run([pixels])[0].to_numpy())


def reference(path: str) -> Predict:
    from onnx.reference import ReferenceEvaluator

    evaluator = ReferenceEvaluator(path)
    return lambda pixels: np.concatenate(list(evaluator.run(["probabilities"], {"pixels": pixels})))


RUNTIMES: dict[str, tuple[str, Callable[[str], Predict]]] = {  # by name: the package, and what opens a file
    "onnxruntime": ("onnxruntime", onnxruntime),
    "OpenVINO": ("openvino", openvino),
    "OpenCV": ("opencv-python-headless", opencv),
    "tract": ("tract", tract),
    "onnx.reference": ("onnx", reference),
}


def decoded(path: str, folder: Path, count: int) -> np.ndarray:
    """Evenly chosen images as the file takes them: uint8 (count, height, width, channels)."""
    card = open_exported(path).card
    assert card.preprocess is not None
    prepare = card.transform()
    mean, std = (torch.tensor(values)[:, None, None] for values in (card.preprocess.mean, card.preprocess.std))
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    chosen = files[:: max(1, len(files) // count)][:count]
    images = [(prepare(file) * std + mean).mul(255).round().byte().permute(1, 2, 0) for file in chosen]
    return torch.stack(images).numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("files", nargs="+")
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--n", type=int, default=50)
    arguments = parser.parse_args()
    pixels = decoded(arguments.files[0], arguments.images, arguments.n)
    batches = np.array_split(pixels, max(1, len(pixels) // 5))
    graph = ExportGraph(*load_source(arguments.source, None))
    with torch.inference_mode():
        expected = np.concatenate([graph(torch.from_numpy(batch))[0].numpy() for batch in batches])
    for path in arguments.files:
        for name, (package, opened) in RUNTIMES.items():
            try:
                label = f"{path}, {name} {version(package)}"
            except ModuleNotFoundError:
                continue
            try:
                predict = opened(path)
                found = np.concatenate([predict(batch) for batch in batches])
            except Exception as error:  # each runtime has errors of its own
                print(f"{label}: not read ({' '.join(str(error).split())[:200]})", flush=True)
                continue
            same, largest = (found.argmax(1) == expected.argmax(1)).sum(), np.abs(found - expected).max()
            print(f"{label}: top-1 agreement {same} of {len(pixels)}, largest difference {largest:.1e}", flush=True)


if __name__ == "__main__":
    main()
