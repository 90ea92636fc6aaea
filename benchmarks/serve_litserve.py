"""The model of `serve_load.py` in LitServe, as its documentation writes such a server; started by that benchmark.

    python benchmarks/serve_litserve.py WEIGHTS PORT DEVICE TIMM_NAME \
        timm|plain|packed WORKERS_PER_DEVICE MAX_BATCH_SIZE FAST_QUEUE NUM_API_SERVERS

`timm` is what its user writes: Pillow, timm's transforms and timm's model, on a GPU in bfloat16 and with a CUDA graph
for each batch size of 1, 2, 4, ... In `plain`, decoding, preprocessing and model are vitral's own, in both servers;
`packed` has the packed weights as well (CPU). NUM_API_SERVERS of 0 is LitServe's default, one per worker.
"""

import io
import os
import sys
from typing import Any

import litserve as ls  # type: ignore[import-not-found]
import numpy as np
import torch
from fastapi import Request  # type: ignore[import-not-found]
from PIL import Image

import vitral
from vitral.data.images import decode
from vitral.data.preprocess import parse_deterministic
from vitral.kernels.packed import pack
from vitral.models.model import normalize
from vitral.server.runtime import batch_sizes, torch_runtime


class Api(ls.LitAPI):
    def __init__(self, weights: str, name: str, kind: str, threads: int, **options: Any) -> None:
        super().__init__(**options)
        self.weights, self.name, self.kind, self.threads = weights, name, kind, threads

    def setup(self, device: str) -> None:
        torch.set_num_threads(self.threads)
        model, card = vitral.load(self.weights)
        assert card.preprocess is not None
        self.how = card.preprocess
        self.names = card.class_names or tuple(map(str, range(card.architecture.classes)))
        self.pipeline = parse_deterministic(self.how.pipeline)
        self.prepare(model, card, torch.device(device))

    def prepare(self, model: Any, card: Any, device: torch.device) -> None:
        self.run = None
        if device.type == "cuda":
            self.run = torch_runtime(model, card, self.how, device, max_batch=self.max_batch_size).runners[0]
        elif self.kind == "packed":
            pack(model)
        self.model = model

    def decode_request(self, request: Request) -> Any:  # LitServe reads the annotation: it must be no text
        return self.pipeline(decode(request["content"].file.read(), 3))

    def batch(self, inputs: list[Any]) -> Any:
        return np.stack(inputs)

    def unbatch(self, output: list[Any]) -> list[Any]:
        return output

    def predict(self, pixels: Any) -> list[Any]:
        pixels = pixels if pixels.ndim == 4 else pixels[None]  # without batching it is one image
        with torch.inference_mode():
            if self.run is not None:
                best = torch.from_numpy(self.run(pixels, False).probabilities).topk(5)
            else:
                images = normalize(torch.from_numpy(pixels).permute(0, 3, 1, 2), self.how.mean, self.how.std)
                best = self.model(images).softmax(-1).topk(5)
        return list(zip(best.indices.tolist(), best.values.tolist(), strict=True))

    def encode_response(self, output: Any) -> dict[str, Any]:
        indices, values = output if isinstance(output, tuple) else output[0]
        pairs = zip(indices, values, strict=True)
        return {"classes": [{"name": self.names[index], "probability": value} for index, value in pairs]}


class TimmApi(Api):
    def prepare(self, model: Any, card: Any, device: torch.device) -> None:
        import timm  # type: ignore[import-not-found]

        self.place = device
        self.timm_model = timm.create_model(self.name, checkpoint_path=self.weights).eval().to(device)
        settings: dict[str, Any] = timm.data.resolve_model_data_config(self.timm_model)
        self.transform: Any = timm.data.create_transform(**settings)
        self.graphs: dict[int, Any] = {}
        if device.type == "cuda":
            self.timm_model.to(torch.bfloat16)
            with torch.inference_mode():
                self.graphs = {batch: self.captured(batch) for batch in batch_sizes(self.max_batch_size)}

    def captured(self, batch: int) -> Any:
        """A CUDA graph, its input and its output."""
        images = torch.zeros(batch, 3, 224, 224, dtype=torch.bfloat16, device=self.place)
        for _ in range(3):
            self.timm_model(images)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = self.timm_model(images).float().softmax(-1)
        return graph, images, output

    def decode_request(self, request: Request) -> Any:
        return self.transform(Image.open(io.BytesIO(request["content"].file.read())).convert("RGB"))

    def batch(self, inputs: list[Any]) -> Any:
        return torch.stack(inputs)

    def predict(self, pixels: Any) -> list[Any]:
        pixels = pixels if pixels.ndim == 4 else pixels[None]
        with torch.inference_mode():
            if self.graphs:
                graph, images, output = self.graphs[min(batch for batch in self.graphs if batch >= len(pixels))]
                images[: len(pixels)] = pixels.to(self.place)
                graph.replay()
                best = output[: len(pixels)].topk(5)
            else:
                best = self.timm_model(pixels).softmax(-1).topk(5)
        return list(zip(best.indices.tolist(), best.values.tolist(), strict=True))


if __name__ == "__main__":
    weights, port, device, name, kind, *numbers = sys.argv[1:]
    workers, batch, fast, servers = map(int, numbers)
    threads = max(1, len(os.sched_getaffinity(0)) // workers)
    waiting = 0.002 if batch > 1 else 0.0
    api = (TimmApi if kind == "timm" else Api)(
        *(weights, name, kind, threads), max_batch_size=batch, batch_timeout=waiting
    )
    server = ls.LitServer(
        api, accelerator=device, devices=1, workers_per_device=workers, fast_queue=fast == 1, timeout=60
    )
    server.run(*("127.0.0.1", int(port), servers or None), generate_client_file=False, log_level="warning")
