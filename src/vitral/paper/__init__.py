"""The tables of "An Image is Worth 16x16 Words" (arXiv 2010.11929) as data: one TOML file per table. No torch here.

Every row has its `source`, and a `note` if the paper contradicts itself or rounds. A `Reading` is our interpretation
of a detail that the paper leaves open. No other file quotes numbers of the paper.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache, partial
from importlib.resources import files
from types import MappingProxyType
from typing import Any, TypeVar

from vitral.errors import UserError
from vitral.names import name_of, parse

PRETRAININGS = ("jft300m", "imagenet21k", "imagenet", "jft300m-masked")
DATASETS = ("imagenet", "real", "cifar10", "cifar100", "pets", "flowers", "vtab", "objectnet")

Mean = tuple[float, ...]  # a mean in percent and its standard deviation if printed; empty if nothing is printed


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


@dataclass(frozen=True, kw_only=True)
class TransferRow(PaperRow):
    """One column of Table 2: means over three fine-tuning runs, and the cost of pre-training in TPUv3-core-days."""

    model: str
    pretraining: str
    imagenet: Mean
    real: Mean
    cifar10: Mean = ()
    cifar100: Mean = ()
    pets: Mean = ()
    flowers: Mean = ()
    vtab: Mean = ()
    core_days: int
    image: int = 0  # pixels for ImageNet and ReaL, if they are printed; all else is at 384
    ema_decay: float = 0.0  # decay of averaged weights (Polyak averaging) for the same two; 0: none


@dataclass(frozen=True, kw_only=True)
class ScoreRow(PaperRow):
    """One model after fine-tuning at 384 pixels: accuracies in percent."""

    model: str
    imagenet: float
    cifar10: float
    cifar100: float
    pets: float
    flowers: float


@dataclass(frozen=True, kw_only=True)
class FinetunedRow(ScoreRow):
    """One model and pre-training set of Table 5."""

    pretraining: str
    real: float


@dataclass(frozen=True, kw_only=True)
class ScalingRow(ScoreRow):
    """One pre-training run of Table 6 on JFT-300M, and its cost. `doubtful` names unreliable columns."""

    epochs: int
    exaflops: float
    real: float
    doubtful: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class OptimizerRow(ScoreRow):
    """One ResNet of Table 7, pre-trained on JFT-300M with Adam or SGD, and the mean of its accuracies."""

    optimizer: str
    average: float


@dataclass(frozen=True, kw_only=True)
class PositionRow(PaperRow):
    """One position embedding of Table 8: 5-shot accuracy as a fraction, by where it is added; None: not applicable."""

    position: str
    input: float
    every: float | None = None
    shared: float | None = None


@dataclass(frozen=True, kw_only=True)
class VtabRow(PaperRow):
    """One model of Table 9: accuracy in percent by the task's name, and the plain mean as printed."""

    model: str
    pretraining: str
    scores: Mapping[str, float]
    mean: float


@dataclass(frozen=True, kw_only=True)
class ObjectnetRow(PaperRow):
    """Accuracies in percent on ObjectNet, without training on it."""

    model: str
    pretraining: str
    top1: float
    top5: float


@dataclass(frozen=True, kw_only=True)
class DuplicateRow(PaperRow):
    """Near-duplicates of a data set's test images, counted in each pre-training set."""

    dataset: str
    jft300m: int
    imagenet21k: int
    imagenet: int


@dataclass(frozen=True)
class Reported:
    """One printed result: in percent, its standard deviation over three runs if printed, and the table."""

    value: float
    spread: float | None
    source: str
    note: str = ""


# The rows of each table, read when they are first needed.
table1 = partial(read_rows, SizeRow, "table1.toml")  # the three model sizes
table2 = partial(read_rows, TransferRow, "table2.toml")  # the comparison with the state of the art
table3 = partial(read_rows, PretrainingRow, "table3.toml")  # the hyper-parameters of pre-training
table4 = partial(read_rows, FinetuningRow, "table4.toml")  # the hyper-parameters of fine-tuning
table5 = partial(read_rows, FinetunedRow, "table5.toml")  # transfer from each pre-training set, which figure 3 draws
table6 = partial(read_rows, ScalingRow, "table6.toml")  # the scaling study on JFT-300M, which figure 5 draws
table7 = partial(read_rows, OptimizerRow, "table7.toml")  # ResNets pre-trained with Adam and with SGD
table8 = partial(read_rows, PositionRow, "table8.toml")  # position embeddings of ViT-B/16
table9 = partial(read_rows, VtabRow, "table9.toml")  # VTAB-1k task by task
objectnet = partial(read_rows, ObjectnetRow, "objectnet.toml")  # by BiT's protocol
near_duplicates = partial(read_rows, DuplicateRow, "duplicates.toml")  # before deduplication
vtab_tasks = partial(read_rows, VtabTaskRow, "vtab.toml")  # the 19 tasks of VTAB-1k, in the order of Table 9
bit_pretraining = partial(read_rows, BitPretrainingRow, "bit_pretraining.toml")  # the SGD of Table 7: BiT-S, -M and -L
bit_finetuning = partial(read_rows, BitFinetuningRow, "bit_finetuning.toml")  # BiT's HyperRule, the smallest data first


def masked_training() -> MaskedRow:
    """The self-supervised run of section 4.6."""
    (row,) = read_rows(MaskedRow, "masked.toml")
    return row


def readings() -> dict[str, Reading]:
    """Every reading by name."""
    return {row.name: row for row in read_rows(Reading, "readings.toml")}


def pretraining_sets() -> dict[str, PretrainingSet]:
    """The pre-training data sets by the paper's name for them."""
    return {row.name: row for row in read_rows(PretrainingSet, "pretraining.toml")}


def reported(model: str, pretraining: str, dataset: str) -> tuple[Reported, ...]:
    """The results that the paper prints for a model of one of `PRETRAININGS`, fine-tuned on one of `DATASETS`.

    One number per table that has the model, in the order of the tables; the notes say how they differ.
    """
    for name, choices in ((pretraining, PRETRAININGS), (dataset, DATASETS)):
        if name not in choices:
            raise UserError(f'the paper reports nothing about "{name}": use one of {", ".join(choices)}.')
    return _numbers().get((_plain(model), pretraining, dataset), ())


@cache
def _numbers() -> dict[tuple[str, str, str], tuple[Reported, ...]]:
    """Every number of every table, by model, pre-training and data set."""
    numbers: dict[tuple[str, str, str], tuple[Reported, ...]] = {}
    for model, pretraining, dataset, number in _all():
        key = (_plain(model), pretraining, dataset)
        numbers[key] = (*numbers.get(key, ()), number)
    return numbers


def _all() -> Iterator[tuple[str, str, str, Reported]]:
    for best in table2():
        for dataset in DATASETS:
            if printed := getattr(best, dataset, ()):
                value, spread = (*printed, None)[:2]
                yield best.model, best.pretraining, dataset, _number(best, value, spread)
    for tuned in table5():
        yield from _scores(tuned, tuned.pretraining)
    for scaled in table6():
        yield from _scores(scaled, "jft300m", f"{scaled.epochs} epochs of pre-training.")
    for optimized in table7():
        yield from _scores(optimized, "jft300m")
    for tasks in table9():
        yield tasks.model, tasks.pretraining, "vtab", _number(tasks, tasks.mean)
    for row in objectnet():
        yield row.model, row.pretraining, "objectnet", _number(row, row.top1, about=f"Top-1; {row.top5} top-5.")
    masked = masked_training()
    yield masked.model, "jft300m-masked", "imagenet", _number(masked, masked.imagenet)


def _scores(row: ScoreRow, pretraining: str, about: str = "") -> Iterator[tuple[str, str, str, Reported]]:
    for dataset in DATASETS:
        if (value := getattr(row, dataset, None)) is not None:
            yield row.model, pretraining, dataset, _number(row, value, about=about)


def _number(row: PaperRow, value: float, spread: float | None = None, about: str = "") -> Reported:
    return Reported(value, spread, row.source.partition(",")[0], f"{about} {row.note}".strip())


def _plain(model: str) -> str:
    """vitral's spelling of a name, without an image size: "ResNet50x1" -> "R50x1". Other names are kept."""
    try:
        return name_of(parse(model)).partition("@")[0]
    except UserError:
        return model
