"""The factories of timm's Vision Transformers, with which arguments each instantiates which class, and the
preprocessing of its released weights.

timm_factories.json and timm_preprocess.json were generated from the installed timm (tests/helpers/timm_factories.py); a
test compares them.
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


@cache
def releases() -> dict[str, dict[str, Any]]:
    """timm's pretrained_cfg, as far as it states the preprocessing, by "architecture.tag", and by "architecture" that
    of timm's default release."""
    table = json.loads(files("vitral.checkpoints").joinpath("timm_preprocess.json").read_text(encoding="utf-8"))
    return {name: group for group in table for name in group["models"]}


def factory_named(name: str) -> TimmFactory | None:
    """The architecture that a name means, the longest one that fits.

    Args:
        name: of an architecture, with or without its tag, or of a file: "vit_base_patch16_clip_224.openai",
            "vit_base_patch16_224.augreg_in21k_ft_in1k.safetensors", "timm/deit3_base_patch16_224".
    """
    return _split_name(name)[0]


def release_named(name: str) -> dict[str, Any] | None:
    """The preprocessing of the release that a name means, as timm's pretrained_cfg states it.

    Args:
        name: as that of `factory_named`. Without a tag it is timm's default release. What follows may also be a part of
            a tag (vit_base_patch16_224_dino) or anything else (deit_tiny_patch16_224-a1311bcf), if all releases that
            it may be share mean and std.
    """
    factory, rest = _split_name(name)
    if factory is None:
        return None
    table = releases()
    exact = f"{factory.name}.{rest}" if rest else factory.name
    if exact in table:
        return table[exact]
    own = [release for release in table if release.startswith(f"{factory.name}.")]
    similar = [release for release in own if rest in release.partition(".")[2].split("_")] or own
    normalisations = {(*table[release]["mean"], *table[release]["std"]) for release in similar}
    if len(normalisations) > 1:
        return None
    return table[similar[0]] if similar != own else table[factory.name]


def _split_name(name: str) -> tuple[TimmFactory | None, str]:
    """The architecture, and what follows it: a tag, an older name of one, a hash, ..."""
    stem = name.rpartition("/")[2]
    while (shorter := _SUFFIXES.sub("", stem)) != stem:
        stem = shorter
    table = factories()
    for end in range(len(stem), 0, -1):
        rest = stem[end:]
        if stem[:end] in table and (not rest or _AFTER_NAME.fullmatch(rest)):
            return table[stem[:end]], rest.lstrip("._-")
    return None, ""
