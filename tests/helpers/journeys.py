"""Pictures to train on, and the command line as a function, for the tests that go the way a user goes."""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from PIL import Image

from vitral.cli import main
from vitral.data.images import encode_png

MODEL = "ViT-Ti/4@8"
SHAPE = ("shape.depth=2", "shape.width=16", "shape.heads=2", "workers=0")
PLAIN = ("data.train_transform=decode|resize({size})", "data.eval_transform=decode|resize({size})", "data.mixup=0")
QUICK = (*SHAPE, *PLAIN, "steps=40", "batch=12", "optim.lr=0.01", "optim.weight_decay=0", "evaluate_every=40")
COLOURS = {"red": (210, 40, 40), "green": (40, 210, 40), "blue": (40, 40, 210)}


def paint(path: Path, colour: tuple[int, int, int], seed: int = 0, side: int = 8) -> Path:
    """A picture of one colour with some noise, each seed another one."""
    noise = np.random.default_rng(seed).integers(-30, 31, (side, side, 3))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode_png((np.array(colour) + noise).clip(0, 255).astype(np.uint8)))
    return path


def colour_folder(folder: Path, images: int = 10, names: Mapping[str, str] | None = None) -> Path:
    """One class per colour, by its own name or another."""
    for place, (colour, values) in enumerate(COLOURS.items()):
        for number in range(images):
            paint(folder / (names or {}).get(colour, colour) / f"{number}.png", values, 100 * place + number)
    return folder


ODD = ("moving.gif", "grey.jpg", "deep.png", "clear.png", "cmyk.jpg", "turned.jpg", "plain.webp")
BROKEN = {"cut.jpg": "truncated", "empty.jpg": "empty", "text.png": "not an image"}


def mixed_bag(folder: Path) -> Path:
    """Three colours, one of them also in every odd kind of file, in broken ones and in one that is no image."""
    colour_folder(folder)
    red = Image.new("RGB", (10, 8), COLOURS["red"])
    turned = Image.Exif()
    turned[0x0112] = 6
    place = folder / "red"
    red.save(place / "moving.gif", save_all=True, append_images=[Image.new("RGB", (10, 8), "white")])
    red.convert("L").save(place / "grey.jpg")
    Image.fromarray(np.full((8, 10), 40_000, np.uint16)).save(place / "deep.png")
    red.convert("RGBA").save(place / "clear.png")
    red.convert("CMYK").save(place / "cmyk.jpg")
    red.save(place / "turned.jpg", exif=turned)
    red.save(place / "plain.webp")
    whole = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(whole, "JPEG")
    (place / "cut.jpg").write_bytes(whole.getvalue()[:700])
    (place / "empty.jpg").touch()
    (place / "text.png").write_text("no picture")
    (place / "notes.txt").write_text("no picture either")
    return folder


class Said(NamedTuple):
    code: int
    out: str
    err: str


class Command:
    """`vitral WORDS...` in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys

    def __call__(self, *words: str | Path) -> Said:
        self.monkeypatch.setattr(sys, "argv", ["vitral", *map(str, words)])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        return Said(code, *self.capsys.readouterr())
