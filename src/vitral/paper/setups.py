"""Models, data and hyper-parameters: Tables 1, 3 and 4, appendix B.1.2, VTAB's tasks, BiT's recipe, and readings."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any, TypeVar


@dataclass(frozen=True, kw_only=True)
class PaperRow:
    """Fields of every row: where it is printed, and caveats."""

    source: str
    note: str = ""


R = TypeVar("R", bound=PaperRow)


@cache
def read_rows(row_type: type[R], file: str) -> tuple[R, ...]:
    """The rows of a data file; `source` and the `every` table of the file are defaults for each row."""
    data = tomllib.loads(files("vitral.paper").joinpath(file).read_text(encoding="utf-8"))
    shared = {"source": data["source"], **data.get("every", {})}
    return tuple(row_type(**{key: _frozen(value) for key, value in (shared | row).items()}) for row in data["rows"])


def _frozen(value: Any) -> Any:
    """Lists as tuples and dicts as read-only mappings, so that rows are immutable."""
    if isinstance(value, list):
        return tuple(value)
    return MappingProxyType(value) if isinstance(value, dict) else value


@dataclass(frozen=True, kw_only=True)
class SizeRow(PaperRow):
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
class PretrainingSet(PaperRow):
    """A data set that models were pre-trained on."""

    name: str
    images: int
    classes: int


@dataclass(frozen=True, kw_only=True)
class PretrainingRow(PaperRow):
    """One row of Table 3. `printed` is its first cell, `models` the models it stands for; two `epochs` are two runs."""

    printed: str
    models: tuple[str, ...]
    dataset: str
    epochs: tuple[int, ...]
    optimizer: str
    lr: float
    beta1: float
    beta2: float
    decay: str
    warmup: int
    batch: int
    weight_decay: float
    dropout: float
    clip: float
    image: int

    def covers(self, model: str) -> bool:
        """Whether the row covers this model (vitral's name)."""
        return any(fnmatchcase(model, pattern) for pattern in self.models)


@dataclass(frozen=True, kw_only=True)
class FinetuningRow(PaperRow):
    """One row of Table 4. `rates` are compared on a fraction `dev` of train; the final run trains on all of it."""

    dataset: str
    steps: int
    rates: tuple[float, ...]
    dev: float
    optimizer: str
    momentum: float
    decay: str
    batch: int
    weight_decay: float
    clip: float
    image: int


@dataclass(frozen=True, kw_only=True)
class MaskedRow(PaperRow):
    """Masked patch prediction, and the accuracy on ImageNet after fine-tuning in percent."""

    model: str
    dataset: str
    steps: int
    batch: int
    optimizer: str
    lr: float
    warmup: int
    decay: str
    ratio: float
    token_ratio: float
    random_ratio: float
    target: str
    imagenet: float


@dataclass(frozen=True, kw_only=True)
class VtabTaskRow(PaperRow):
    """One task of VTAB-1k. `paper` is its column in Table 9; `val` (200 images) and `test` are TFDS splits."""

    name: str
    group: str
    paper: str
    builder: str
    classes: int
    val: str
    test: str
    label: str
    flip: bool
    crop: bool


@dataclass(frozen=True, kw_only=True)
class BitPretrainingRow(PaperRow):
    """BiT's own pre-training; the learning rate is divided by 10 after each of `drops` epochs."""

    dataset: str
    epochs: int
    drops: tuple[int, ...]
    momentum: float
    batch: int
    lr: float
    weight_decay: float
    warmup: int


@dataclass(frozen=True, kw_only=True)
class BitFinetuningRow(PaperRow):
    """One size of BiT's HyperRule, for data of fewer than `below` images (None: any number)."""

    size: str
    below: int | None = None
    steps: int
    drops: tuple[float, ...]
    momentum: float
    batch: int
    lr: float
    warmup: int
    mixup: float


@dataclass(frozen=True, kw_only=True)
class Reading(PaperRow):
    """Our interpretation where the paper is silent or contradicts itself: the recipe keys it sets, and why.

    `source` is where the values come from. `about` are further keys that the sentence is true of only as they are in
    the preset. `requires` is what has to happen for it to be true: "sweep", "preset sweep" (the preset's own), "bit
    trial" or "vtab" (all tasks).
    """

    name: str
    why: str
    keys: Mapping[str, Any] = field(default_factory=dict)
    about: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()


def table1() -> tuple[SizeRow, ...]:
    """The three model sizes."""
    return read_rows(SizeRow, "table1.toml")


def table3() -> tuple[PretrainingRow, ...]:
    """The hyper-parameters of pre-training."""
    return read_rows(PretrainingRow, "table3.toml")


def table4() -> tuple[FinetuningRow, ...]:
    """The hyper-parameters of fine-tuning."""
    return read_rows(FinetuningRow, "table4.toml")


def masked_training() -> MaskedRow:
    """The self-supervised run of section 4.6."""
    (row,) = read_rows(MaskedRow, "masked.toml")
    return row


def vtab_tasks() -> tuple[VtabTaskRow, ...]:
    """The 19 tasks of VTAB-1k, in the order of Table 9."""
    return read_rows(VtabTaskRow, "vtab.toml")


def bit_pretraining() -> tuple[BitPretrainingRow, ...]:
    """BiT-S, BiT-M and BiT-L: the SGD that Table 7 compares Adam with."""
    return read_rows(BitPretrainingRow, "bit_pretraining.toml")


def bit_finetuning() -> tuple[BitFinetuningRow, ...]:
    """BiT's HyperRule, which the paper also tried for ResNets, from the smallest to the largest data."""
    return read_rows(BitFinetuningRow, "bit_finetuning.toml")


def readings() -> dict[str, Reading]:
    """Every reading by name."""
    return {row.name: row for row in read_rows(Reading, "readings.toml")}


def pretraining_sets() -> dict[str, PretrainingSet]:
    """The pre-training data sets by the paper's name for them."""
    return {row.name: row for row in read_rows(PretrainingSet, "pretraining.toml")}
