"""Pictures to train on, and the command line as a function, for end-to-end tests."""

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
    """Write a picture of one colour with noise that depends on the seed."""
    noise = np.random.default_rng(seed).integers(-30, 31, (side, side, 3))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode_png((np.array(colour) + noise).clip(0, 255).astype(np.uint8)))
    return path


def colour_folder(folder: Path, images: int = 10, names: Mapping[str, str] | None = None, seed: int = 0) -> Path:
    """Write one class folder per colour, renamed by `names`; pictures with seeds 1000 apart are all different."""
    for index, (colour, values) in enumerate(COLOURS.items()):
        for number in range(images):
            paint(folder / (names or {}).get(colour, colour) / f"{number}.png", values, seed + 100 * index + number)
    return folder


ODD = ("moving.gif", "grey.jpg", "deep.png", "clear.png", "cmyk.jpg", "turned.jpg", "plain.webp")
BROKEN = {"cut.jpg": "truncated", "empty.jpg": "empty", "text.png": "not an image"}


def mixed_bag(folder: Path) -> Path:
    """Write three class folders; one of them also holds unusual formats, broken files and a text file."""
    colour_folder(folder)
    red = Image.new("RGB", (10, 8), COLOURS["red"])
    turned = Image.Exif()
    turned[0x0112] = 6
    red_folder = folder / "red"
    red.save(red_folder / "moving.gif", save_all=True, append_images=[Image.new("RGB", (10, 8), "white")])
    red.convert("L").save(red_folder / "grey.jpg")
    Image.fromarray(np.full((8, 10), 40_000, np.uint16)).save(red_folder / "deep.png")
    red.convert("RGBA").save(red_folder / "clear.png")
    red.convert("CMYK").save(red_folder / "cmyk.jpg")
    red.save(red_folder / "turned.jpg", exif=turned)
    red.save(red_folder / "plain.webp")
    whole = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(whole, "JPEG")
    (red_folder / "cut.jpg").write_bytes(whole.getvalue()[:700])
    (red_folder / "empty.jpg").touch()
    (red_folder / "text.png").write_text("no picture")
    (red_folder / "notes.txt").write_text("no picture either")
    return folder


class CommandResult(NamedTuple):
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


class Command:
    """`vitral WORDS...` in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys

    def __call__(self, *words: str | Path) -> CommandResult:
        self.monkeypatch.setattr(sys, "argv", ["vitral", *map(str, words)])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        return CommandResult(code, *self.capsys.readouterr())
