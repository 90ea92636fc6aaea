"""Results: Tables 2, 5, 6, 7, 8 and 9, ObjectNet, and a lookup over all of them (`reported`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from vitral.errors import UserError
from vitral.names import name_of, parse
from vitral.paper.setups import PaperRow, masked_training, read_rows

PRETRAININGS = ("jft300m", "imagenet21k", "imagenet", "jft300m-masked")
DATASETS = ("imagenet", "real", "cifar10", "cifar100", "pets", "flowers", "vtab", "objectnet")

Mean = tuple[float, ...]  # a mean in percent and its standard deviation if printed; empty if nothing is printed


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
    image: int = 0  # pixels for ImageNet and ReaL, where they are printed; all else is at 384
    ema_decay: float = 0.0  # decay of averaged weights (Polyak averaging) for the same two; 0: none


@dataclass(frozen=True, kw_only=True)
class ScoreRow(PaperRow):
    """One model after fine-tuning at 384 pixels: accuracies in percent."""

    model: str
    imagenet: float
    real: float
    cifar10: float
    cifar100: float
    pets: float
    flowers: float


@dataclass(frozen=True, kw_only=True)
class FinetunedRow(ScoreRow):
    """One model and pre-training set of Table 5."""

    pretraining: str


@dataclass(frozen=True, kw_only=True)
class ScalingRow(ScoreRow):
    """One pre-training run of Table 6 on JFT-300M, and its cost. `doubtful` names unreliable columns."""

    epochs: int
    exaflops: float
    doubtful: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class OptimizerRow(PaperRow):
    """One ResNet of Table 7, pre-trained on JFT-300M with Adam or SGD: accuracies in percent, and their mean."""

    model: str
    optimizer: str
    imagenet: float
    cifar10: float
    cifar100: float
    pets: float
    flowers: float
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


def table2() -> tuple[TransferRow, ...]:
    """The comparison with the state of the art."""
    return read_rows(TransferRow, "table2.toml")


def table5() -> tuple[FinetunedRow, ...]:
    """Transfer from each of the three pre-training sets, which figure 3 draws."""
    return read_rows(FinetunedRow, "table5.toml")


def table6() -> tuple[ScalingRow, ...]:
    """The scaling study on JFT-300M, which figure 5 draws."""
    return read_rows(ScalingRow, "table6.toml")


def table7() -> tuple[OptimizerRow, ...]:
    """ResNets pre-trained with Adam and with SGD."""
    return read_rows(OptimizerRow, "table7.toml")


def table8() -> tuple[PositionRow, ...]:
    """Position embeddings of ViT-B/16."""
    return read_rows(PositionRow, "table8.toml")


def table9() -> tuple[VtabRow, ...]:
    """VTAB-1k task by task."""
    return read_rows(VtabRow, "table9.toml")


def objectnet() -> tuple[ObjectnetRow, ...]:
    """ObjectNet, by BiT's protocol."""
    return read_rows(ObjectnetRow, "objectnet.toml")


def near_duplicates() -> tuple[DuplicateRow, ...]:
    """How many test images the pre-training sets contained before deduplication."""
    return read_rows(DuplicateRow, "duplicates.toml")


def reported(model: str, pretraining: str, dataset: str) -> tuple[Reported, ...]:
    """The results that the paper prints for a model.

    Args:
        model: model name.
        pretraining: one of `PRETRAININGS`.
        dataset: one of `DATASETS`, the data set of fine-tuning.

    Returns:
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


def _scores(
    row: ScoreRow | OptimizerRow, pretraining: str, about: str = ""
) -> Iterator[tuple[str, str, str, Reported]]:
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
