"""The factories of timm's Vision Transformers: which class each instantiates, with which arguments.

timm_factories.json was generated from the installed timm (tests/helpers/timm_factories.py); a test compares them.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

_SUFFIXES = re.compile(r"\.(?:safetensors|pth|pt|bin|ckpt|tar|npz)$")
# After a name: a tag, or a data set or method that older versions of timm had in the names themselves.
_AFTER_NAME = re.compile(r"[.\-].*|_(?:in2[12]k|in2[12]ft1k|in22ft22k|in1k|dino|sam|mae|ft|finetuned?)(?:[_.\-].*)?")


@dataclass(frozen=True)
class TimmFactory:
    """One registered architecture of timm."""

    name: str
    model: str  # the class, such as "Eva"
    arguments: dict[str, Any]  # of the class, its defaults included; classes and functions by their names


@cache
def factories() -> dict[str, TimmFactory]:
    """All architectures of the table, by their names without tags."""
    table = json.loads(files("vitral.checkpoints").joinpath("timm_factories.json").read_text(encoding="utf-8"))
    found = {}
    for model, entry in table["classes"].items():
        for group in entry["groups"]:
            for name, sizes in group["models"].items():
                found[name] = TimmFactory(name, model, {**entry["defaults"], **group["arguments"], **sizes})
    return found


def factory_named(name: str) -> TimmFactory | None:
    """The architecture that a name means, the longest one that fits.

    Args:
        name: of an architecture, with or without its tag, or of a file: "vit_base_patch16_clip_224.openai",
            "vit_base_patch16_224.augreg_in21k_ft_in1k.safetensors", "timm/deit3_base_patch16_224".
    """
    stem = name.rpartition("/")[2]
    while (shorter := _SUFFIXES.sub("", stem)) != stem:
        stem = shorter
    table = factories()
    for end in range(len(stem), 0, -1):
        rest = stem[end:]
        if stem[:end] in table and (not rest or _AFTER_NAME.fullmatch(rest)):
            return table[stem[:end]]
    return None
