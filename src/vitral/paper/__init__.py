"""What "An Image is Worth 16x16 Words" (arXiv 2010.11929) prints, as data: one TOML file per table. No torch here.

Every row carries its `source`, and a `note` where the paper contradicts itself or rounds. No other file quotes them.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Row:
    """What every row has: where it is printed, and what to know before trusting it."""

    source: str
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class SizeRow(Row):
    """One model size of Table 1. `params` is rounded as printed; `model` is the one whose exact count is nearest."""

    name: str
    size: str
    layers: int
    width: int
    mlp: int
    heads: int
    params: float
    model: str


@dataclass(frozen=True, kw_only=True)
class ScalingRow(Row):
    """One pre-training run of Table 6: accuracies in percent, and its cost. `doubtful` names columns not to rely on."""

    model: str
    epochs: int
    imagenet: float
    real: float
    cifar10: float
    cifar100: float
    pets: float
    flowers: float
    exaflops: float
    doubtful: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PretrainingSet(Row):
    """A data set that models were pre-trained on."""

    name: str
    images: int
    classes: int


@cache
def table1() -> tuple[SizeRow, ...]:
    """The three model sizes."""
    return tuple(SizeRow(**row) for row in _rows("table1.toml"))


@cache
def table6() -> tuple[ScalingRow, ...]:
    """The scaling study on JFT-300M, which figure 5 draws."""
    return tuple(ScalingRow(**row) for row in _rows("table6.toml"))


@cache
def pretraining_sets() -> dict[str, PretrainingSet]:
    """The pre-training data sets by the paper's name for them."""
    return {row["name"]: PretrainingSet(**row) for row in _rows("pretraining.toml")}


def _rows(file: str) -> list[dict[str, Any]]:
    """The rows of a data file, each with the file's source; lists become tuples, so that rows stay frozen."""
    data = tomllib.loads(files(__name__).joinpath(file).read_text(encoding="utf-8"))
    return [
        {"source": data["source"]}
        | {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
        for row in data["rows"]
    ]
