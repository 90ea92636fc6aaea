"""Steps written as words, which pipelines and augmentations are made of: "flip", "randaugment(2, 10)"."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

_STEP = re.compile(r"(\w+)\s*(?:\(([^()]*)\))?")


class Number(NamedTuple):
    """A number that a step takes, from `low` to `high`."""

    name: str
    low: float
    high: float
    default: float | None = None
    whole: bool = False

    def takes(self, value: float) -> bool:
        return self.low <= value <= self.high and (value == int(value) or not self.whole)

    @property
    def wanted(self) -> str:
        return f"a {'whole number' if self.whole else 'number'} from {self.low} to {self.high}"


def split_step(text: str) -> tuple[str, list[str]] | None:
    """ "name(word, word)" to its name and its words; None where the text is no step."""
    match = _STEP.fullmatch(text)
    if not match:
        return None
    inside = (match[2] or "").strip()
    return match[1], [word.strip() for word in inside.split(",")] if inside else []


def as_number(word: str) -> float | None:
    """None where the word is no finite number."""
    try:
        value = float(word)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
