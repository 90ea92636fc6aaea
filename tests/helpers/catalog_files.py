"""Tiny copies of known data sets, as several tests write them."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
from PIL import Image

from vitral.data.catalog import BORDER

RNG = np.random.default_rng(0)


def small_pictures(count: int, side: int = 32) -> np.ndarray:
    return RNG.integers(0, 256, (count, side, side, 3), dtype=np.uint8)


def png(pixels: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def put(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def objectnet(folder: Path) -> tuple[Path, dict[str, np.ndarray]]:
    """Photographs with a red border; ImageNet's names in the order of ILSVRC, which is not that of the outputs."""
    inside = {}
    labels = {"alarm_clock": "Alarm clock", "air_freshener": "Air freshener", "banana": "Banana"}
    for name in labels:
        pixels = small_pictures(1, 12)[0]
        inside[f"images/{name}/1.png"] = pixels[BORDER:-BORDER, BORDER:-BORDER].copy()
        pixels[:BORDER], pixels[-BORDER:], pixels[:, :BORDER], pixels[:, -BORDER:] = ((255, 0, 0),) * 4
        put(folder / f"images/{name}/1.png", png(pixels))
    overlap = {"Alarm clock": "analog clock; digital clock", "Banana": "banana"}
    put(folder / "mappings/folder_to_objectnet_label.json", json.dumps(labels))
    put(folder / "mappings/objectnet_to_imagenet_1k.json", json.dumps(overlap))
    put(
        folder / "mappings/imagenet_to_label_2012_v2", "banana\ndigital clock\nkit fox, Vulpes macrotis\nanalog clock\n"
    )
    put(folder / "mappings/pytorch_to_imagenet_2012_id.json", json.dumps({"0": 2, "1": 3, "2": 0, "3": 1}))
    return folder, inside
