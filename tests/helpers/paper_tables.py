"""The tables of the notes on the paper, as rows of text."""

from __future__ import annotations

import re
from pathlib import Path

WORDS = {
    **{"ImageNet": "imagenet", "ImageNet ReaL": "real", "ReaL": "real", "CIFAR-10": "cifar10", "C10": "cifar10"},
    **{"CIFAR-100": "cifar100", "C100": "cifar100", "Pets": "pets", "Oxford-IIIT Pets": "pets", "Flowers": "flowers"},
    **{"Flowers-102": "flowers", "Oxford Flowers-102": "flowers", "VTAB (19)": "vtab", "Average": "average"},
    **{"ImageNet-21k": "imagenet21k", "I21k": "imagenet21k", "JFT-300M": "jft300m", "JFT": "jft300m"},
}


def printed_table(assets: Path, heading: str) -> list[dict[str, str]]:
    """The first Markdown table below a heading, a dict a row; an empty first cell repeats the one above."""
    below = notes(assets).split(heading, 1)[1].replace("**", "").splitlines()
    start = next(i for i, line in enumerate(below) if line.startswith("|"))
    stop = next(i for i, line in enumerate(below) if i > start and not line.startswith("|"))
    head, _, *body = [[cell.strip() for cell in line.strip("|").split("|")] for line in below[start:stop]]
    rows: list[dict[str, str]] = []
    for cells in body:
        cells[0] = cells[0] or rows[-1][head[0]]
        rows.append(dict(zip(head, cells, strict=True)))
    return rows


def notes(assets: Path) -> str:
    return (assets / "PAPER.md").read_text(encoding="utf-8")


def expanded(models: str) -> tuple[str, ...]:
    """ "ViT-B/{16,32}" -> ("ViT-B/16", "ViT-B/32")"""
    match = re.fullmatch(r"(.*)\{(.*)\}(.*)", models)
    return tuple(match[1] + middle + match[3] for middle in match[2].split(",")) if match else (models,)
