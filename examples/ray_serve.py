"""`vitral serve` as a Ray Serve deployment: replicas on the GPUs or cores of a cluster, with the same paths.

    pip install 'vitral[serve]' 'ray[serve]'
    VITRAL_SOURCES="pets=/models/pets.safetensors" serve run examples.ray_serve:app

Sources are separated by spaces, and every machine of the cluster must be able to read them. A replica takes one GPU
where `VITRAL_DEVICE` is cuda, and otherwise `VITRAL_CORES` cores; `VITRAL_REPLICAS` is their number.
"""

from __future__ import annotations

import os
from typing import Any

from ray import serve  # type: ignore[import-not-found]
from starlette.requests import Request
from starlette.responses import Response

from vitral.api.serve import asgi_app

DEVICE = os.environ.get("VITRAL_DEVICE", "cpu")
CORES = int(os.environ.get("VITRAL_CORES", "2"))


@serve.deployment(
    num_replicas=int(os.environ.get("VITRAL_REPLICAS", "1")),
    ray_actor_options={"num_gpus": 1} if DEVICE == "cuda" else {"num_cpus": CORES},
    max_ongoing_requests=256,
)
class Models:
    """One replica with all models; requests are batched inside it."""

    def __init__(self, sources: list[str], device: str) -> None:
        self.app = asgi_app(sources, device=device)

    async def __call__(self, request: Request) -> Response:
        messages: list[Any] = []

        async def send(message: Any) -> None:
            messages.append(message)

        await self.app(request.scope, request.receive, send)
        start, *bodies = messages
        response = Response(b"".join(body.get("body", b"") for body in bodies), start["status"])
        response.raw_headers = list(start["headers"])
        return response


app = Models.bind(os.environ["VITRAL_SOURCES"].split(), DEVICE)  # type: ignore[attr-defined]
