"""What tests of the server share: a tiny model, images, requests, and clients that never pause."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
from oracles import SMALL, random_weights

from vitral.checkpoints.card import Card, Preprocess
from vitral.checkpoints.weights import write
from vitral.data.images import encode_jpeg

NAMES = ("ant", "bee", "cat", "dog", "été")
PIPELINE = "decode|resize_small(40)|central_crop(32)"


def saved(path: Path, names: tuple[str, ...] = NAMES, seed: int = 0) -> Path:
    """A tiny model with random weights."""
    values = (0.4,) * 3, (0.3,) * 3
    write(random_weights(SMALL, seed), Card(SMALL, names, preprocess=Preprocess(PIPELINE, *values)), path, "vitral")
    return path


def photograph(seed: int = 0, height: int = 60, width: int = 90) -> bytes:
    coarse = np.random.default_rng(seed).integers(0, 256, (height // 10, width // 10, 3), np.uint8)
    return encode_jpeg(np.kron(coarse, np.ones((10, 10, 1), np.uint8)))


def post(image: bytes, *headers: str) -> bytes:
    """A request for a prediction, as it is sent."""
    lines = ["POST /predict HTTP/1.1", "Host: a", f"Content-Length: {len(image)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + image


async def clients_until_refused(
    port: int, server: subprocess.Popen[bytes], reloaded: Callable[[], bool]
) -> dict[str, int]:
    """Eight clients that never pause; SIGTERM when the models are reloaded and each client has had several answers."""
    counts = {"answered": 0, "lost": 0}
    request = post(photograph())

    async def client() -> None:
        while True:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
            except ConnectionRefusedError:
                return
            close = False
            while not close:
                try:
                    writer.write(request)
                    head = await reader.readuntil(b"\r\n\r\n")
                    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                    await reader.readexactly(length)
                except (OSError, asyncio.IncompleteReadError):
                    counts["lost"] += 1
                    return
                counts["answered"] += head.startswith(b"HTTP/1.1 200 ")
                close = b"connection: close" in head
            writer.close()

    tasks = [asyncio.ensure_future(client()) for _ in range(8)]
    while counts["answered"] < 50 or not reloaded():
        assert not counts["lost"]
        await asyncio.sleep(0.05)
    server.send_signal(signal.SIGTERM)
    await asyncio.gather(*tasks)
    return counts
