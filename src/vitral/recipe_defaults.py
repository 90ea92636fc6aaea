"""The default recipe of `vitral train DATA`, chosen from the data, with a reason for each choice. No torch here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import geometric_mean
from typing import Any, NamedTuple

from vitral.architecture import Architecture, ResNetConfig, ViTConfig
from vitral.errors import UserError
from vitral.names import name_of, parse
from vitral.recipe import Recipe, from_dict

FLIP_REASON = (
    "random crops and horizontal flips vary the epochs (drop flip from data.train_transform if left and right matter)"
)
FEW_IMAGES = 8  # of a typical class; with fewer, only the head is trained
MIN_STEPS = 75  # of fine-tuning: 5 epochs of 480 images in batches of 32
UNEVEN = 3  # times as many images in the largest class as in the smallest; with more, classes are balanced
SECONDS_PER_IMAGE = 0.07  # to train ViT-Ti/16 on one image, measured on two CPU cores
SMALL_DATA = 100_000  # images; with more, optimizer and initial weights are the paper's
CPU_LIMIT = 2 * 3600  # seconds; if fine-tuning on a CPU took longer, only the head is trained


class Reason(NamedTuple):
    """Why a value was chosen. It is not shown if the user sets one of the `overridden_by` keys (or key=value)."""

    text: str
    overridden_by: tuple[str, ...] = ()


Choice = tuple[dict[str, Any], tuple[Reason, ...]]  # recipe keys with their values, and why


def default_recipe(
    *,
    images: int,
    class_counts: Sequence[int],
    pretrained: Architecture | None,
    device: str,
    model: str = "",
    multilabel: bool = False,
    pixels: int = 224,
    muon: bool = True,
    overrides: Mapping[str, str] | None = None,
) -> tuple[Recipe, tuple[str, ...]]:
    """Choose a recipe for a data set, and give one reason per choice; `pixels` is the shorter side of a typical image.

    With pre-trained weights, `model` can only ask for another image size. What the user overrides is not applied here,
    but reasons that it contradicts are left out, and length and learning rate suit an overridden `trainable`.
    """
    overrides = overrides or {}
    if pretrained is None:
        changes, reasons = _from_scratch(images, device, pixels, model, muon)
    else:
        counts = [] if overrides.get("objective") == "masked" else [int(count) for count in class_counts if count]
        changes, reasons = _fine_tuning(images, counts, device, pretrained, overrides.get("trainable", ""))
        changes |= _resized(pretrained, model)
        if counts and not multilabel and overrides.get("loss") != "sigmoid" and "balance" not in overrides:
            balance, why = _balance(counts)
            changes, reasons = changes | balance, (*reasons, *why)
    if multilabel:
        changes["loss"] = "sigmoid"
        reasons += (Reason("images have several labels: one sigmoid per class (loss=sigmoid)", ("loss",)),)
    changes["batch"] = min(changes["batch"], images)
    overridden = {*overrides, *map("=".join, overrides.items())}
    return from_dict(changes), tuple(text for text, keys in reasons if overridden.isdisjoint(keys))


def _fine_tuning(images: int, counts: Sequence[int], device: str, pretrained: Architecture, trainable: str) -> Choice:
    """The paper's recipe (section 4.1) is SGD over 256,000 images or more; AdamW needs fewer. `counts` are those of
    classes with images, `trainable` is the user's override, "" if there is none."""
    slow_device = device != "cuda"
    batch = 32 if images < 5_000 else 128 if images < SMALL_DATA else 512
    usual = 5.0 if slow_device else 20.0 if images < SMALL_DATA else 8.0
    epochs = max(usual, float(math.ceil(MIN_STEPS * min(batch, images) / images)))
    hours = images * epochs * SECONDS_PER_IMAGE * _relative_cost(pretrained) / 3600
    # a geometric mean: one large class does not hide that the others are small
    typical = round(geometric_mean(counts), 3) if counts else math.inf
    few, slow = typical < FEW_IMAGES, slow_device and hours * 3600 > CPU_LIMIT
    if trainable == "head" or (not trainable and (few or slow)):
        why = f"{images} images, {typical:.0f} in a typical class, are few" if few else ""
        return _head_only(why or f"{images} images would take {hours:.0f} hours", chosen=not trainable)
    lr = 2e-4 * (batch / 32) ** 0.5
    changes = {"epochs": epochs, "batch": batch, "optim.weight_decay": 0.05}
    further = [Reason(FLIP_REASON, ("data.train_transform",))]
    if epochs > usual:
        why = f"{images} images are few: {epochs:.0f} epochs make the {MIN_STEPS} steps that fine-tuning needs"
        further.append(Reason(why, ("epochs", "steps", "batch")))
    if trainable == "bias" or trainable.startswith("lora"):
        # a ViT-Ti/16 at 112 pixels on 480 pets, one seed: 93 %, with the rates of full fine-tuning 86
        parameters = "biases" if trainable == "bias" else "adapters"
        why = f"only {parameters} are trained: the same learning rate in every layer, {5 * lr:.2g}"
        return changes | {"optim.lr": 5 * lr}, (Reason(why, ("optim.lr", "optim.layer_decay")), *further)
    changes |= {"optim.lr": lr, "optim.layer_decay": 0.75, "optim.head_lr": 5.0}
    why = f"{images} images and pre-trained weights: all layers are fine-tuned, early ones with lower learning rates"
    reasons = (Reason(why, ("optim.layer_decay",)),) if trainable in ("", "full") else ()
    return changes, (*reasons, *further)


def _head_only(why: str, chosen: bool) -> Choice:
    epochs, lr = 30.0, 1e-3
    changes = {"trainable": "head", "epochs": epochs, "batch": 256, "optim.lr": lr}
    if not chosen:
        why = f"only the head is trained, on features computed once: {epochs:.0f} epochs at a learning rate of {lr}"
        return changes, (Reason(why, ("epochs", "steps", "optim.lr")),)
    return changes, (
        Reason(f"{why}: only a new head is trained, on features computed once (trainable=full trains all layers)"),
    )


def _balance(counts: Sequence[int]) -> Choice:
    """Logit adjustment where classes are uneven."""
    smallest, largest = min(counts), max(counts)
    if largest <= UNEVEN * smallest:
        return {}, ()
    why = (
        f"classes have {smallest} to {largest} images: the loss is adjusted so that each class counts alike "
        "(balance=logit-adjust; balance=none favours large classes)"
    )
    return {"balance": "logit-adjust"}, (Reason(why),)


def _from_scratch(images: int, device: str, pixels: int, model: str, muon: bool) -> Choice:
    changes: dict[str, Any] = {"optim.lr": 1e-3, "optim.weight_decay": 0.1}
    reasons = [Reason(f"{images} images and no weights: training from scratch (--init does better on few images)")]
    if model:
        changes["model"] = model
    else:
        shape, why = _model_for(images, device, pixels)
        changes |= shape
        reasons += why
    image_budget, max_epochs = 90_000, 100  # with AdamW on a CPU
    if muon and images < SMALL_DATA and not isinstance(parse(changes["model"]), ResNetConfig):
        image_budget, max_epochs = 45_000, 50
        changes |= {"optim.name": "muon", "optim.momentum": 0.95, "optim.lr": 2e-3, "shape.weight_init": "mimetic"}
        why = "Muon and mimetic initial weights need fewer epochs on small data"
        reasons.append(Reason(why, ("optim.name", "shape.weight_init")))
    changes["batch"] = 64 if images < 10_000 else 256 if images < SMALL_DATA else 1024
    cpu_epochs = min(max(image_budget // images, 10), max_epochs)
    changes["epochs"] = float(cpu_epochs if device != "cuda" else 300 if images < 1e6 else 90)
    if pixels > 16:
        changes |= {
            "data.train_transform": "decode|random_resized_crop({size}, 0.05)|flip|randaugment(2, 10)",
            "data.mixup": 0.2,
        }
        why = "random crops, flips, RandAugment and mixup make up for few images"
        reasons.append(Reason(why, ("data.train_transform", "data.mixup")))
    else:
        changes |= {
            "data.train_transform": "decode|random_resized_crop({size}, 0.75)",
            "data.eval_transform": "decode|resize({size})",
        }
        why = f"images of {pixels} pixels: mild crops and no flips, as digits and signs are not symmetric"
        reasons.append(Reason(why, ("data.train_transform",)))
    return changes, tuple(reasons)


def _model_for(images: int, device: str, pixels: int) -> Choice:
    if pixels <= 16:
        shape = {"shape.depth": 4, "shape.width": 64, "shape.heads": 4, "optim.lr": 2e-3}
        why = f"images of {pixels} pixels: a ViT of 4 layers, 64 wide, with patches of 2 pixels"
        name = f"ViT-Ti/2@{max(pixels - pixels % 2, 4)}"
        return {"model": name, **shape}, (Reason(why, ("shape.depth", "shape.width", "shape.heads")),)
    patch, side = (4, 32) if pixels <= 40 else (8, 64) if pixels <= 96 else (16, 224)
    size = "S" if device == "cuda" and images >= SMALL_DATA else "Ti"
    name = f"ViT-{size}/{patch}" + ("" if side == 224 else f"@{side}")
    return {"model": name}, (Reason(f"images of {pixels} pixels: {name}"),)


def _resized(pretrained: Architecture, model: str) -> dict[str, Any]:
    """With weights, a model's name can only ask for another image size."""
    changes: dict[str, Any] = {"model": name_of(pretrained)}
    if not model:
        return changes
    named = parse(model)
    if name_of(replace(named, image=pretrained.image)) != name_of(pretrained):
        raise UserError(f"the weights hold a {name_of(pretrained)}, not a {model}: leave out one of the two.")
    return changes | ({"image": named.image[0]} if "@" in model else {})


def _relative_cost(architecture: Architecture) -> float:
    """The approximate cost of an image relative to ViT-Ti/16 at 224 pixels."""
    if isinstance(architecture, ResNetConfig):
        return 3.3 * sum(architecture.blocks) / 16 * architecture.width**2
    if not isinstance(architecture, ViTConfig):
        return 1.0
    work = architecture.depth * architecture.width**2 * architecture.tokens(architecture.image)
    return work / (12 * 192**2 * 197) * (2 if architecture.axial else 1) + (3.3 if architecture.stem else 0)
