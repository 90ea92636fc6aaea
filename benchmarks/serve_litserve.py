"""The model of `serve_load.py` in LitServe, as its documentation writes such a server; started by that benchmark.

    python benchmarks/serve_litserve.py WEIGHTS PORT timm|plain|packed WORKERS_PER_DEVICE MAX_BATCH_SIZE FAST_QUEUE

`timm` is what its user writes: Pillow, timm's transforms and timm's model. In `plain`, decoding, preprocessing and
model are vitral's own, in both servers; `packed` has the packed weights as well.
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


class Api(ls.LitAPI):
    def __init__(self, weights: str, kind: str, threads: int, **options: Any) -> None:
        super().__init__(**options)
        self.weights, self.kind, self.threads = weights, kind, threads

    def setup(self, device: str) -> None:
        torch.set_num_threads(self.threads)
        self.model, card = vitral.load(self.weights)
        if self.kind == "packed":
            pack(self.model)
        assert card.preprocess is not None
        self.how = card.preprocess
        self.names = card.class_names or tuple(map(str, range(card.architecture.classes)))
        self.pipeline = parse_deterministic(self.how.pipeline)

    def decode_request(self, request: Request) -> Any:  # LitServe reads the annotation: it must be no text
        return self.pipeline(decode(request["content"].file.read(), 3))

    def batch(self, inputs: list[Any]) -> Any:
        return np.stack(inputs)

    def unbatch(self, output: list[Any]) -> list[Any]:
        return output

    def predict(self, pixels: Any) -> list[Any]:
        pixels = pixels if pixels.ndim == 4 else pixels[None]  # without batching it is one image
        with torch.inference_mode():
            images = normalize(torch.from_numpy(pixels).permute(0, 3, 1, 2), self.how.mean, self.how.std)
            best = self.model(images).softmax(-1).topk(5)
        return list(zip(best.indices.tolist(), best.values.tolist(), strict=True))

    def encode_response(self, output: Any) -> dict[str, Any]:
        indices, values = output if isinstance(output, tuple) else output[0]
        pairs = zip(indices, values, strict=True)
        return {"classes": [{"name": self.names[index], "probability": value} for index, value in pairs]}


class TimmApi(Api):
    def setup(self, device: str) -> None:
        import timm  # type: ignore[import-not-found]

        super().setup(device)
        name = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
        self.timm_model = timm.create_model(name, checkpoint_path=self.weights).eval()
        settings: dict[str, Any] = timm.data.resolve_model_data_config(self.timm_model)
        self.transform: Any = timm.data.create_transform(**settings)

    def decode_request(self, request: Request) -> Any:
        return self.transform(Image.open(io.BytesIO(request["content"].file.read())).convert("RGB"))

    def batch(self, inputs: list[Any]) -> Any:
        return torch.stack(inputs)

    def predict(self, pixels: Any) -> list[Any]:
        with torch.inference_mode():
            best = self.timm_model(pixels if pixels.ndim == 4 else pixels[None]).softmax(-1).topk(5)
        return list(zip(best.indices.tolist(), best.values.tolist(), strict=True))


if __name__ == "__main__":
    weights, port, kind, workers, batch, fast = sys.argv[1:]
    threads = max(1, len(os.sched_getaffinity(0)) // int(workers))
    waiting = 0.002 if int(batch) > 1 else 0.0
    api = (TimmApi if kind == "timm" else Api)(weights, kind, threads, max_batch_size=int(batch), batch_timeout=waiting)
    server = ls.LitServer(api, accelerator="cpu", workers_per_device=int(workers), fast_queue=fast == "1", timeout=60)
    server.run(port=int(port), host="127.0.0.1", generate_client_file=False, log_level="warning")
