"""Recipes by name: the tables of the paper and of BiT as recipes, and records of our own. No torch here.

`named("paper:pretrain/imagenet21k", "ViT-L/16")` is a row of Table 3, `named("paper:finetune/pets")` one of Table 4.
What is printed comes from `vitral.paper`, and what is not from its `readings`, each with a sentence that says why.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any, NamedTuple

from vitral import paper
from vitral.architecture import ResNetConfig
from vitral.errors import UserError
from vitral.names import name_of, parse
from vitral.recipe import Recipe, from_dict

CROPS = {"": "square", ":inception": "inception", ":resmall": "resmall"}  # suffix of a name, and its reading
SMALL = ("pets", "flowers", "vtab")  # data sets with a short warm-up
DROPOUT = ("ViT-L/16", "ViT-H/14", "R50+ViT-B/16", "R50+ViT-L/*")  # released with dropout of 0.1
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
        "CIFAR-10 from scratch: 95.9 % in 165 s on an H200",
        {"epochs": 200, "data.augment": "shift(4)|flip|randaugment(1, 5)"},
    ),
)


@dataclass(frozen=True)
class Preset:
    """A recipe of the book, and the protocol around it."""

    name: str
    recipe: Recipe
    sweep: dict[str, tuple[Any, ...]]  # keys, and the values that are tried on the dev split
    dev: float  # share of train that choices are made on; the final run trains on all
    seeds: int  # 3 where the paper reports mean and spread
    readings: tuple[str, ...]  # a sentence for each place where the paper is silent or contradicts itself


@dataclass(frozen=True)
class Draft:
    """A recipe as it is printed: its keys, the names of the readings that fill the gaps, and the protocol."""

    keys: dict[str, Any]
    readings: tuple[str, ...] = ()
    sweep: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    dev: float = 0.0
    seeds: int = 1


class Page(NamedTuple):
    """One entry of the book: a line about it, the models it is for (the first by default), and what drafts it."""

    about: str
    models: tuple[str, ...]
    draft: Callable[[str], Draft]


def is_name(text: str) -> bool:
    """Whether a text is meant as a name of the book, not as a file's."""
    return text.partition(":")[0] in ("paper", "bit") or text.startswith("speedrun/")


def recipe_names() -> dict[str, str]:
    """Every name of the book with a line about it."""
    return {name: page.about for name, page in _book().items()}


def named(name: str, model: str = "") -> Preset:
    """A recipe of the book for a model, by default the first that its table lists.

    An image size in the model's name does not pick the row, and the size of fine-tuning comes from its table.
    """
    if name not in _book():
        near = difflib.get_close_matches(name, _book(), n=3, cutoff=0.5) or list(_book())[:3]
        raise UserError(f'there is no recipe "{name}": did you mean {", ".join(near)}?')
    page = _book()[name]
    plain = _model(name, page.models, model)
    draft = page.draft(plain)
    readings = [paper.readings()[reading] for reading in draft.readings]
    keys = {"model": plain + "".join(model.partition("@")[1:]), **draft.keys}
    for reading in readings:
        keys.update(reading.keys)
    recipe = from_dict(keys)
    return Preset(name, recipe, draft.sweep, draft.dev, draft.seeds, tuple(reading.why for reading in readings))


def hyperrule(images: int) -> str:
    """The name of BiT's recipe for fine-tuning on so many images."""
    row = next(row for row in paper.bit_finetuning() if row.below is None or images < row.below)
    return f"bit:finetune/{row.size}"


def _model(name: str, models: tuple[str, ...], asked: str) -> str:
    """vitral's spelling of the model that was asked for, without its image size, if the recipe is for it."""
    if not asked:
        return models[0]
    unnamed = "(" in asked  # a shape of its own, as `name_of` spells those of weights
    model = asked if unnamed else name_of(parse(asked)).partition("@")[0]
    if not any(fnmatchcase(model, pattern) for pattern in models):
        raise UserError(f"{name} has no row for {model}: choose one of {', '.join(models)}.")
    return models[0] if unnamed else model


def _pretraining(dataset: str, model: str) -> Draft:
    """Table 3."""
    row = next(row for row in paper.table3() if row.dataset == dataset and row.covers(model))
    resnet, small = isinstance(parse(model), ResNetConfig), dataset == "imagenet"
    readings = ["crops", "decoupled decay", "softmax" if small else "sigmoid"]
    readings += ["resnet head"] if resnet else [] if small else ["head bias"]
    readings += ["linear end"] if row.decay == "linear" else []
    readings += ["label smoothing"] if small else []
    readings += ["lengths"] if len(row.epochs) > 1 else []
    readings += ["hybrid rate"] if model == "R50+ViT-L/32" else []
    keys = {
        "epochs": row.epochs[0],
        "batch": row.batch,
        "optim.name": row.optimizer,
        "optim.lr": row.lr,
        "optim.beta1": row.beta1,
        "optim.beta2": row.beta2,
        "optim.weight_decay": row.weight_decay,
        "optim.clip": row.clip,
        "schedule.kind": row.decay,
        "schedule.warmup": row.warmup,
        "regularization.dropout": row.dropout,
    }
    return Draft(keys if resnet else keys | {"shape.head": "tanh"}, tuple(readings))


def _masked(model: str) -> Draft:
    """Appendix B.1.2."""
    row = paper.masked_training()
    keys = {
        "objective": "masked",
        "steps": row.steps,
        "batch": row.batch,
        "optim.name": row.optimizer,
        "optim.lr": row.lr,
        "schedule.kind": row.decay,
        "schedule.warmup": row.warmup,
        "masked.share": row.share,
        "masked.token": row.token,
        "masked.random": row.random,
        "masked.target": row.target,
    }
    return Draft(keys, ("crops", "decoupled decay", "masked decay"))


def _finetuning(dataset: str, crops: str, model: str) -> Draft:
    """Table 4."""
    row = next(row for row in paper.table4() if row.dataset == dataset)
    readings = [crops, "short warm-up" if dataset in SMALL else "warm-up"]
    readings += ["dropout" if any(fnmatchcase(model, pattern) for pattern in DROPOUT) else "no dropout"]
    readings += ["rate"] if len(row.rates) > 1 else ["vtab sweep", "vtab dev", "vtab crops"]
    readings += ["largest rate"] if dataset == "imagenet" else []
    readings += ["odd grid"] if model == "ViT-H/14" else []
    readings += ["bit for resnets"] if isinstance(parse(model), ResNetConfig) else []
    keys = {
        "steps": row.steps,
        "batch": row.batch,
        "image": row.image,
        "loss": "softmax",
        "optim.name": row.optimizer,
        "optim.momentum": row.momentum,
        "optim.weight_decay": row.weight_decay,
        "optim.clip": row.clip,
        "schedule.kind": row.decay,
    }
    sweep: dict[str, tuple[Any, ...]] = {"optim.lr": row.rates}
    if dataset == "vtab":
        short = paper.bit_finetuning()[0]
        sweep = {"optim.lr": (short.lr, *row.rates), "steps": (short.steps, row.steps)}
    seeds = 1 if dataset == "imagenet" else 3  # at 384 pixels ImageNet is in Table 5, which prints no spread
    return Draft(keys, tuple(readings), sweep, row.dev, seeds)


def _larger(best: paper.TransferRow, crops: str, model: str) -> Draft:
    """Table 2's ImageNet runs: Table 4 at more pixels, with averaged weights."""
    draft = _finetuning("imagenet", crops, model)
    keys = draft.keys | {"image": best.image, "ema_decay": best.average}
    readings = [reading for reading in draft.readings if reading != "odd grid"]
    readings += ["ema_decay"] if crops == "inception" else ["size before the crop", "ema_decay"]
    return Draft(keys, tuple(readings), draft.sweep, draft.dev, seeds=3)


def _bit_pretraining(dataset: str, model: str) -> Draft:
    """BiT-S, BiT-M and BiT-L."""
    row = next(row for row in paper.bit_pretraining() if row.dataset == dataset)
    keys = {
        "epochs": row.epochs,
        "batch": row.batch,
        "optim.lr": row.lr,
        "optim.weight_decay": row.weight_decay,
        **_stairs(tuple(drop / row.epochs for drop in row.drops), row.momentum, row.warmup),
    }
    loss = "softmax" if dataset == "imagenet" else "sigmoid"
    return Draft(keys, ("crops", loss, "bit decay", *(["bit epochs"] if dataset == "jft300m" else [])))


def _bit_finetuning(row: paper.BitFinetuningRow, model: str) -> Draft:
    """BiT's HyperRule."""
    keys = {
        "steps": row.steps,
        "batch": row.batch,
        "data.mixup": row.mixup,
        "optim.lr": row.lr,
        **_stairs(row.drops, row.momentum, row.warmup),
    }
    return Draft(keys, ("bit size", "bit flip"))


def _stairs(drops: tuple[float, ...], momentum: float, warmup: int) -> dict[str, Any]:
    """SGD whose rate is divided by 10 at shares of the run."""
    return {
        "optim.name": "sgd",
        "optim.momentum": momentum,
        "schedule.kind": "multistep",
        "schedule.warmup": warmup,
        "schedule.drops": drops,
        "schedule.factors": tuple(10.0**-place for place, _ in enumerate(drops, 1)),
    }


def _speedrun(changes: dict[str, Any], model: str) -> Draft:
    """A plain ViT on CIFAR-10 from scratch, on one GPU. Found by trying; benchmarks/cifar10_speedrun.py measures it."""
    keys: dict[str, Any] = {
        "batch": 512,
        "evaluate_every": 1_000_000,  # at the end alone
        "shape.depth": 6,
        "shape.pool": "mean",
        "shape.start": "mimetic",
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
    return Draft(keys | changes, seeds=3)


@cache
def _book() -> dict[str, Page]:
    """Every recipe by its name. A recipe of another kind is one more entry."""
    book = {}
    for dataset in ("jft300m", "imagenet21k", "imagenet"):
        models = (model for row in paper.table3() if row.dataset == dataset for model in row.models)
        page = Page(f"Table 3: pre-train on {TITLES[dataset]}", _first(*models), partial(_pretraining, dataset))
        book[f"paper:pretrain/{dataset}"] = page
    about = "Appendix B.1.2: pre-train ViT-B/16 on JFT-300M without labels; other ViTs by the same values"
    book["paper:pretrain/jft300m-masked"] = Page(about, (paper.masked_training().model, "ViT-*", "*+ViT-*"), _masked)
    for suffix, crops in CROPS.items():
        for row in paper.table4():
            about = f"Table 4: fine-tune on {TITLES[row.dataset]} at {row.image} pixels ({crops} crops)"
            page = Page(about, _first("*"), partial(_finetuning, row.dataset, crops))
            book[f"paper:finetune/{row.dataset}{suffix}"] = page
        for best in (best for best in paper.table2() if best.image):
            about = f"Table 2: fine-tune {best.model} on ImageNet at {best.image} pixels ({crops} crops)"
            page = Page(about, (best.model,), partial(_larger, best, crops))
            book[f"paper:finetune/imagenet-{best.image}{suffix}"] = page
    for start in paper.bit_pretraining():
        about = f"BiT: pre-train on {TITLES[start.dataset]} with SGD"
        book[f"bit:pretrain/{start.dataset}"] = Page(about, ("R50x1", "*"), partial(_bit_pretraining, start.dataset))
    for rule in paper.bit_finetuning():
        about = f"BiT-HyperRule: fine-tune on {f'fewer than {rule.below:,} images' if rule.below else 'more images'}"
        book[f"bit:finetune/{rule.size}"] = Page(about, ("R50x1", "*"), partial(_bit_finetuning, rule))
    for name, about, changes in _SPEEDRUNS:
        book[f"speedrun/{name}"] = Page(about, ("ViT-S/4@32",), partial(_speedrun, changes))
    return book


def _first(*models: str) -> tuple[str, ...]:
    """ViT-B/16 before all others: the one that is meant where none is named."""
    return tuple(dict.fromkeys(("ViT-B/16", *models)))
