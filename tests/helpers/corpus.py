"""Hostile inputs: images, checkpoints, configurations and data, each a small valid file with something changed."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import random
import signal
import struct
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from oracles import random_weights, written
from PIL import Image
from safetensors.torch import load_file

from vitral.architecture import Architecture, ViTConfig
from vitral.checkpoints.formats import FORMATS
from vitral.checkpoints.weights import fit_to_format

BASE = ViTConfig(depth=2, width=16, mlp=24, heads=2, patch=5, image=(10, 10), classes=6)
CANDIDATES: tuple[Architecture, ...] = (
    BASE,
    ViTConfig(depth=2, width=16, mlp=24, heads=2, patch=5, image=(10, 10), classes=6, gelu="erf"),
    ViTConfig(depth=1, width=16, mlp=32, heads=2, patch=5, image=(10, 10), classes=0, gelu="erf", layer_scale=True),
    ViTConfig(depth=2, width=16, mlp=24, heads=2, patch=5, image=(10, 10), classes=0),
    ViTConfig(depth=2, width=16, mlp=24, heads=2, patch=5, image=(10, 10), classes=0, gelu="erf"),
)
# What a number, a text or a list may be replaced by.
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 7, 3.5, -0.0, 1e308, float("nan"), float("inf"), 10**12, 10**30, 2**63),
    *("", "text", "\x00", "\ud800", "x" * 5000, "1", "é\x1b[2J", "../../etc/passwd"),
    *([], [1], [1, 2], [None, None], ["a", "b"], [[]], [-1, -1], [0, 0], [10**9, 10**9], list(range(5000))),
    *({}, {"a": 1}, {"height": None, "width": "x"}, {"shortest_edge": 10**9}, {"height": -1, "width": -1}),
)
MODES = ("RGB", "L", "RGBA", "P", "1", "CMYK", "I;16", "F", "LA")
IMAGES = ("JPEG", "PNG", "GIF", "WEBP", "TIFF", "BMP", "PPM", "TGA", "ICO", "JPEG2000", "AVIF", "PCX", "DIB", "QOI")


class TooSlow(BaseException):
    """An input took longer than allowed; not an Exception, which a reader of files may catch."""


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise `TooSlow` in the main thread when the block computes longer, or waits for 30 times as long."""

    def stop(*_: Any) -> None:
        raise TooSlow

    # The time of this process, whatever else the machine does; a block that only waits uses none of it.
    timers = {signal.ITIMER_PROF: (signal.SIGPROF, seconds), signal.ITIMER_REAL: (signal.SIGALRM, 30 * seconds)}
    before = {number: signal.signal(number, stop) for number, _ in timers.values()}
    for timer, (_, limit) in timers.items():
        signal.setitimer(timer, limit)
    try:
        yield
    finally:
        for timer in timers:
            signal.setitimer(timer, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def changed_bytes(data: bytes, rng: random.Random) -> bytes:
    """Flipped bits, a cut, a changed number, a removed, repeated or foreign part; at the front more often."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        reach = len(changed) if rng.random() < 0.4 else min(len(changed), 400)
        at, size = rng.randrange(max(reach, 1)), rng.choice((1, 2, 4, 8, 64))
        match rng.randrange(6):
            case 0:
                changed[at : at + 1] = bytes([changed[at] ^ 1 << rng.randrange(8)]) if changed else b""
            case 1:
                changed[at : at + size] = rng.choice((b"\xff", b"\0", b"\x7f", b"\x80")) * size
            case 2:
                changed[at : at + 4] = struct.pack(
                    rng.choice((">I", "<I")), rng.choice((0, 1, 65535, 2**31, 2**32 - 1))
                )
            case 3:
                del changed[at : at + size]
            case 4:
                changed[at:at] = changed[at : at + size] * rng.choice((1, 50))
            case _:
                changed[at : at + size] = rng.randbytes(size)
    return bytes(changed[: rng.randrange(len(changed) + 1)]) if rng.random() < 0.15 else bytes(changed)


def changed_json(value: Any, rng: random.Random) -> Any:
    """One or two values anywhere in a JSON document replaced, removed or renamed."""
    changed = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2))):
        holder, key = rng.choice(list(_places(changed)) or [(None, None)])
        if holder is None:
            return rng.choice(VALUES)
        if rng.random() < 0.1:
            del holder[key]
        else:
            holder[key] = copy.deepcopy(rng.choice(VALUES))
    return changed


def json_text(value: Any, rng: random.Random) -> str:
    """JSON of a changed document, now and then too deep, with too many digits, or not JSON at all."""
    text = json.dumps(value)
    match rng.randrange(40):
        case 0:
            return "[" * 50_000
        case 1:
            return text.replace("1", "1" * 6000, 1)
        case 2:
            return text[: rng.randrange(len(text) + 1)]
    return text


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        yield value, key
        yield from _places(inner)


def images() -> dict[str, bytes]:
    """A small image of every format and mode that Pillow writes."""
    pixels = np.random.default_rng(0).integers(0, 256, (24, 31, 3), dtype=np.uint8)
    found = {}
    for form in IMAGES:
        for mode in MODES:
            stream = io.BytesIO()
            image = Image.fromarray(pixels)
            image = Image.new(mode, (31, 24), 1) if mode in ("I;16", "F") else image.convert(mode)
            exif = Image.Exif()
            exif[274] = 6
            options = {"exif": exif} if form in ("JPEG", "PNG", "WEBP", "TIFF") and mode == "RGB" else {}
            with contextlib.suppress(OSError, KeyError, ValueError):
                image.save(stream, form, **options)
                found[f"{form} {mode}"] = stream.getvalue()
    return found


def checkpoints(folder: Path) -> dict[str, Path]:
    """A small checkpoint in every format, and as PyTorch writes it."""
    paths = {}
    for name, table in FORMATS.items():
        architecture = next((c for c in CANDIDATES if table.unsupported_reason(c) is None), None)
        if architecture is None:  # only a ResNet, which has 30 MB
            continue
        paths[name] = folder / name / ("model" if table.config else f"model.{table.container}")
        paths[name].parent.mkdir()
        written(fit_to_format(random_weights(architecture), table), paths[name], name)
    weights = load_file(paths["torchvision"])
    for name, options in (("torch", {}), ("old-torch", {"_use_new_zipfile_serialization": False})):
        paths[name] = folder / f"{name}.pth"
        torch.save({"model": weights, "epoch": 3}, paths[name], **options)
    return paths


def change_safetensors(data: bytes, rng: random.Random) -> bytes:
    """Other values in the header, with its length corrected; the card is a JSON text inside."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    metadata = header.get("__metadata__", {})
    if "vitral.card" in metadata and rng.random() < 0.8:
        metadata["vitral.card"] = json_text(changed_json(json.loads(metadata["vitral.card"]), rng), rng)
        text = json.dumps(header)
    else:
        text = json_text(changed_json(header, rng), rng)
    body = text.encode("utf-8", "surrogatepass")
    return len(body).to_bytes(8, "little") + body + data[8 + length :]


def tar_shard() -> bytes:
    """Four labelled images."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for number in range(4):
            picture = io.BytesIO()
            Image.new("RGB", (8, 8), (number, 0, 0)).save(picture, "PNG")
            label = json.dumps({"label": number % 2, "name": "x"}).encode()
            for name, data in ((f"{number}.png", picture.getvalue()), (f"{number}.json", label)):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return stream.getvalue()
