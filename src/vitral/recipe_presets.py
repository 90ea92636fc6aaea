"""Preset recipes: the tables of the paper and of BiT as recipes, and our own speed runs. No torch here.

`get_preset("paper:pretrain/imagenet21k", "ViT-L/16")` is a row of Table 3, `get_preset("paper:finetune/pets")` one of
Table 4. Printed values come from `vitral.paper`. Values that the paper does not print come from its `readings`: each is
our interpretation of one gap, with a sentence that says why.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any, NamedTuple

from vitral import paper
from vitral.architecture import ResNetConfig
from vitral.errors import UserError
from vitral.names import name_of, parse
from vitral.recipe import Recipe, from_dict, values

CROPS = {"": "square", ":inception": "inception", ":resmall": "resmall"}  # suffix of a preset: name of the reading
SHORT_WARMUP = ("pets", "flowers", "vtab")  # data sets
WITH_DROPOUT = ("ViT-L/16", "ViT-H/14", "R50+ViT-B/16", "R50+ViT-L/*")  # models released with a dropout of 0.1
# Models that the paper pre-trains on a data set without a row of Table 3: the model whose row is taken, the reading.
NEAREST = {
    ("jft300m", "ViT-S/32"): ("ViT-B/32", "half row"),  # the paper's ViT-b/32
    ("jft300m", "R200x3"): ("R152x2", "R200x3 row"),
    ("jft300m", "Axial-ViT-B/16"): ("ViT-B/16", "axial row"),
    ("jft300m", "Axial-ViT-B/32"): ("ViT-B/32", "axial row"),
    ("jft300m", "AxialResNet50"): ("R50x1", "axial row"),
    ("imagenet21k", "ViT-H/14"): ("ViT-L/16", "H/14 row"),
}
TITLES = {
    "jft300m": "JFT-300M",
    "imagenet21k": "ImageNet-21k",
    "imagenet": "ImageNet",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "pets": "Oxford-IIIT Pets",
    "flowers": "Oxford Flowers-102",
    "vtab": "the 19 tasks of VTAB-1k",
}


_SPEEDRUNS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("cifar10", "CIFAR-10 from scratch: 91.7 % in 35 s on an H200", {"epochs": 45, "data.augment": "shift(4)|flip"}),
    (
        "cifar10-94",
        "CIFAR-10 from scratch: 94.7 % in 54 s on an H200",
        {
            "epochs": 66,
            "shape.rope": True,
            "data.augment": "shift(4)|flip|randaugment(1, 5)",
            "optim.lr": 2e-3,
        },
    ),
    (
        "cifar10-96",
        "CIFAR-10 from scratch: 95.9 % in 165 s on an H200",
        {"epochs": 200, "data.augment": "shift(4)|flip|randaugment(1, 5)"},
    ),
)


@dataclass(frozen=True)
class Preset:
    """A named recipe, and the protocol around it."""

    name: str
    recipe: Recipe
    sweep: dict[str, tuple[Any, ...]]  # keys, and the values to compare on the dev split
    dev: float  # fraction of train held out for the sweep; the final run trains on all of it
    seeds: int  # 3 if the paper reports mean and standard deviation
    readings: tuple[paper.Reading, ...]  # one for each gap or contradiction of the paper
    uses_val: bool = True  # False: choices are made on a share of train even if the data has a val split

    def changed(self, recipe: Recipe, swept: Collection[str] = ()) -> frozenset[str]:
        """The keys that a run with this recipe does not take from the preset: overridden, or swept over. Its weights,
        model and normalisation are not the preset's to choose."""
        ours, theirs = values(recipe), values(self.recipe)
        differing = {key for key in ours if ours[key] != theirs[key]}
        return frozenset((differing | set(swept)) - {"model", "init", "data.mean", "data.std"})

    def true_readings(self, recipe: Recipe, swept: Collection[str], happens: Collection[str]) -> tuple[str, ...]:
        """The sentences of the readings that are true of a run, where `happens` has the words of `Reading.requires`
        that are true of the protocol. Values of keys that are swept over do not count."""
        ours, changed = values(recipe), self.changed(recipe, swept)
        return tuple(
            reading.why
            for reading in self.readings
            if set(reading.requires) <= set(happens)
            and changed.isdisjoint(reading.about)
            and all(ours[key] == value for key, value in reading.keys.items() if key not in swept)
        )


@dataclass(frozen=True)
class PresetValues:
    """The printed keys of a preset, the names of the readings that fill the gaps, and the protocol."""

    keys: dict[str, Any]
    readings: tuple[str, ...] = ()
    sweep: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    dev: float = 0.0
    seeds: int = 1
    uses_val: bool = True


class PresetEntry(NamedTuple):
    """One line about a preset, the models it is for (the first is the default), and its values for a model."""

    about: str
    models: tuple[str, ...]
    values_for: Callable[[str], PresetValues]


def is_preset(text: str) -> bool:
    """Whether a text is meant as the name of a preset, not of a file."""
    return text.partition(":")[0] in ("paper", "bit") or text.startswith("speedrun/")


def preset_names() -> dict[str, str]:
    """The name of every preset with a line about it."""
    return {name: entry.about for name, entry in _presets().items()}


def get_preset(name: str, model: str = "") -> Preset:
    """The preset of this name for a model, by default the first that the table lists.

    An image size in the model's name does not select the row, and fine-tuning takes its image size from the table.
    Raises UserError if there is no such preset, or it has no row for the model.
    """
    if name not in _presets():
        near = difflib.get_close_matches(name, _presets(), n=3, cutoff=0.5) or list(_presets())[:3]
        raise UserError(f'there is no recipe "{name}": did you mean {", ".join(near)}?')
    entry = _presets()[name]
    plain = _model(name, entry.models, model)
    preset = entry.values_for(plain)
    readings = [paper.readings()[reading] for reading in preset.readings]
    keys = {"model": plain + "".join(model.partition("@")[1:]), **preset.keys}
    for reading in readings:
        keys.update(reading.keys)
    recipe = from_dict(keys)
    return Preset(name, recipe, preset.sweep, preset.dev, preset.seeds, tuple(readings), preset.uses_val)


def hyperrule(images: int) -> str:
    """The name of BiT's preset for fine-tuning on this many images."""
    row = next(row for row in paper.bit_finetuning() if row.below is None or images < row.below)
    return f"bit:finetune/{row.size}"


def _model(name: str, models: tuple[str, ...], requested: str) -> str:
    """vitral's spelling of the requested model, without its image size, if the preset is for it."""
    if not requested:
        return models[0]
    unnamed = "(" in requested  # a custom shape, as `name_of` writes it for weights
    model = requested if unnamed else name_of(parse(requested)).partition("@")[0]
    if not any(fnmatchcase(model, pattern) for pattern in models):
        raise UserError(f"{name} has no row for {model}: choose one of {', '.join(models)}.")
    return models[0] if unnamed else model


def _pretraining(dataset: str, model: str) -> PresetValues:
    """Table 3."""
    nearest, *readings = NEAREST.get((dataset, model), (model,))
    row = next(row for row in paper.table3() if row.dataset == dataset and row.covers(nearest))
    resnet, small = isinstance(parse(model), ResNetConfig), dataset == "imagenet"
    readings += ["crops", "decoupled decay", *(["softmax"] if small else ["sigmoid", "head bias"])]
    readings += ["resnet head"] if resnet else []
    readings += ["linear end"] if row.decay == "linear" else []
    readings += ["label smoothing"] if small else []
    readings += ["lengths"] if len(row.epochs) > 1 else []
    readings += ["hybrid rate"] if model == "R50+ViT-L/32" else []
    keys = {
        **{"epochs": row.epochs[0], "batch": row.batch, "regularization.dropout": row.dropout},
        **{"optim.name": row.optimizer, "schedule.kind": row.decay, "schedule.warmup": row.warmup},
        "schedule.full_steps": _full_steps(dataset, row.epochs[0], row.batch),
        **{f"optim.{key}": getattr(row, key) for key in ("lr", "beta1", "beta2", "weight_decay", "clip")},
    }
    return PresetValues(keys if resnet else keys | {"shape.head": "tanh"}, tuple(readings))


def _masked(model: str) -> PresetValues:
    """Appendix B.1.2."""
    row = paper.masked_training()
    keys = {
        **{"objective": "masked", "steps": row.steps, "batch": row.batch},
        **{"optim.name": row.optimizer, "optim.lr": row.lr},
        **{"schedule.kind": row.decay, "schedule.warmup": row.warmup, "schedule.full_steps": row.steps},
        **{f"masked.{key}": getattr(row, key) for key in ("ratio", "token_ratio", "random_ratio", "target")},
    }
    return PresetValues(keys, ("crops", "decoupled decay", "masked decay"))


def _finetuning(dataset: str, crops: str, model: str) -> PresetValues:
    """Table 4."""
    row = next(row for row in paper.table4() if row.dataset == dataset)
    readings = [crops, "short warm-up" if dataset in SHORT_WARMUP else "warm-up"]
    readings += ["dropout" if any(fnmatchcase(model, pattern) for pattern in WITH_DROPOUT) else "no dropout"]
    readings += ["rate"] if len(row.rates) > 1 else ["vtab sweep", "vtab dev", "vtab crops"]
    readings += ["largest rate"] if dataset == "imagenet" else []
    readings += ["odd grid"] if model == "ViT-H/14" else []
    readings += ["bit for resnets"] if isinstance(parse(model), ResNetConfig) else []
    readings += ["flowers dev"] if dataset == "flowers" else []
    keys = {
        **{"steps": row.steps, "batch": row.batch, "image": row.image, "loss": "softmax", "reset_head": True},
        **{"optim.name": row.optimizer, "schedule.kind": row.decay, "schedule.full_steps": row.steps},
        **{f"optim.{key}": getattr(row, key) for key in ("momentum", "weight_decay", "clip")},
    }
    sweep: dict[str, tuple[Any, ...]] = {"optim.lr": row.rates}
    if dataset == "vtab":
        short = paper.bit_finetuning()[0]
        sweep = {"optim.lr": (short.lr, *row.rates), "steps": (short.steps, row.steps)}
    seeds = 1 if dataset == "imagenet" else 3  # at 384 pixels ImageNet is in Table 5, which prints no spread
    return PresetValues(keys, tuple(readings), sweep, row.dev, seeds, uses_val=dataset != "flowers")


def _high_resolution(best: paper.TransferRow, crops: str, model: str) -> PresetValues:
    """Table 2's ImageNet runs: Table 4 at a higher resolution, with averaged weights."""
    base = _finetuning("imagenet", crops, model)
    keys = base.keys | {"image": best.image, "ema_decay": best.ema_decay}
    readings = [reading for reading in base.readings if reading != "odd grid"]
    readings += ["ema_decay"] if crops == "inception" else ["size before the crop", "ema_decay"]
    return PresetValues(keys, tuple(readings), base.sweep, base.dev, seeds=3)


def _bit_pretraining(dataset: str, model: str) -> PresetValues:
    """BiT-S, BiT-M and BiT-L."""
    row = next(row for row in paper.bit_pretraining() if row.dataset == dataset)
    paper_epochs = paper.readings()["bit epochs"].keys["epochs"] if dataset == "jft300m" else row.epochs
    keys = {
        "epochs": row.epochs,
        "batch": row.batch,
        "optim.lr": row.lr,
        "optim.weight_decay": row.weight_decay,
        "schedule.full_steps": _full_steps(dataset, paper_epochs, row.batch),
        **_multistep_sgd(tuple(drop / row.epochs for drop in row.drops), row.momentum, row.warmup),
    }
    readings = ["crops", "bit decay", *(["softmax"] if dataset == "imagenet" else ["sigmoid", "head bias"])]
    return PresetValues(keys, (*readings, *(["bit epochs"] if dataset == "jft300m" else [])))


def _bit_finetuning(row: paper.BitFinetuningRow, model: str) -> PresetValues:
    """BiT's HyperRule."""
    keys = {
        "steps": row.steps,
        "batch": row.batch,
        "reset_head": True,
        "schedule.full_steps": row.steps,
        "data.mixup": row.mixup,
        "optim.lr": row.lr,
        "optim.clip": 0.0,
        **_multistep_sgd(row.drops, row.momentum, row.warmup),
    }
    readings = ("bit size", "bit flip", *(["bit drops"] if row.size == "small" else []))
    return PresetValues(keys, readings)


def _full_steps(dataset: str, epochs: float, batch: int) -> int:
    """The length of the paper's own run."""
    return round(epochs * paper.pretraining_sets()[TITLES[dataset]].images / batch)


def _multistep_sgd(drops: tuple[float, ...], momentum: float, warmup: int) -> dict[str, Any]:
    """SGD whose learning rate is divided by 10 at fractions of the run."""
    return {
        "optim.name": "sgd",
        "optim.momentum": momentum,
        "schedule.kind": "multistep",
        "schedule.warmup": warmup,
        "schedule.drops": drops,
        "schedule.factors": tuple(10.0**-count for count, _ in enumerate(drops, 1)),
    }


def _speedrun(changes: dict[str, Any], model: str) -> PresetValues:
    """A plain ViT on CIFAR-10 from scratch, on one GPU. Tuned by hand; benchmarks/cifar10_speedrun.py measures it."""
    keys: dict[str, Any] = {
        "batch": 512,
        "evaluate_every": 1_000_000,  # only at the end
        "shape.depth": 6,
        "shape.pool": "mean",
        "shape.weight_init": "mimetic",
        "data.train_transform": "decode|resize({size})",
        "data.eval_transform": "decode|resize({size})",
        "data.cutmix": 0.5,
        "optim.name": "muon",
        "optim.lr": 3e-3,
        "optim.momentum": 0.95,
        "optim.weight_decay": 0.1,
        "schedule.warmup": 0.1,
        "regularization.label_smoothing": 0.1,
    }
    return PresetValues(keys | changes, seeds=3)


@cache
def _presets() -> dict[str, PresetEntry]:
    return {**_pretraining_presets(), **_finetuning_presets(), **_bit_presets(), **_speedrun_presets()}


def _pretraining_presets() -> dict[str, PresetEntry]:
    presets = {}
    for dataset in ("jft300m", "imagenet21k", "imagenet"):
        models = [model for row in paper.table3() if row.dataset == dataset for model in row.models]
        models += [model for trained_on, model in NEAREST if trained_on == dataset]
        about = f"Table 3: pre-train on {TITLES[dataset]}"
        presets[f"paper:pretrain/{dataset}"] = PresetEntry(
            about, _with_default(*models), partial(_pretraining, dataset)
        )
    about = "Appendix B.1.2: pre-train ViT-B/16 on JFT-300M without labels; other ViTs with the same values"
    models = (paper.masked_training().model, "ViT-*", "*+ViT-*")
    return presets | {"paper:pretrain/jft300m-masked": PresetEntry(about, models, _masked)}


def _finetuning_presets() -> dict[str, PresetEntry]:
    presets = {}
    for suffix, crops in CROPS.items():
        for row in paper.table4():
            about = f"Table 4: fine-tune on {TITLES[row.dataset]} at {row.image} pixels ({crops} crops)"
            entry = PresetEntry(about, _with_default("*"), partial(_finetuning, row.dataset, crops))
            presets[f"paper:finetune/{row.dataset}{suffix}"] = entry
        for best in (best for best in paper.table2() if best.image):
            about = f"Table 2: fine-tune {best.model} on ImageNet at {best.image} pixels ({crops} crops)"
            entry = PresetEntry(about, (best.model,), partial(_high_resolution, best, crops))
            presets[f"paper:finetune/imagenet-{best.image}{suffix}"] = entry
    return presets


def _bit_presets() -> dict[str, PresetEntry]:
    presets, models = {}, ("R50x1", "*")
    for row in paper.bit_pretraining():
        about = f"BiT: pre-train on {TITLES[row.dataset]} with SGD"
        presets[f"bit:pretrain/{row.dataset}"] = PresetEntry(about, models, partial(_bit_pretraining, row.dataset))
    for rule in paper.bit_finetuning():
        size = f"fewer than {rule.below:,} images" if rule.below else "more images"
        about = f"BiT-HyperRule: fine-tune on {size}"
        presets[f"bit:finetune/{rule.size}"] = PresetEntry(about, models, partial(_bit_finetuning, rule))
    return presets


def _speedrun_presets() -> dict[str, PresetEntry]:
    return {
        f"speedrun/{name}": PresetEntry(about, ("ViT-S/4@32",), partial(_speedrun, changes))
        for name, about, changes in _SPEEDRUNS
    }


def _with_default(*models: str) -> tuple[str, ...]:
    """The models with ViT-B/16, the default, in front."""
    return tuple(dict.fromkeys(("ViT-B/16", *models)))
