"""Which recipe suits this data: the choices behind `vitral train DATA`, with a sentence for each. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vitral.architecture import Architecture, ResNetConfig, ViTConfig
from vitral.errors import UserError
from vitral.names import name_of, parse
from vitral.recipe import Recipe, from_dict

Reason = tuple[str, tuple[str, ...]]  # a sentence, and the keys or key=value words that would make it untrue
Choice = tuple[dict[str, Any], tuple[Reason, ...]]  # keys of a recipe with their values, and why

MIRRORED = (
    "random crops and mirror images make epochs differ (drop flip from data.train_transform if left and right matter)"
)
FEW = 4  # images a class below which a whole model would learn them by heart
SECONDS = 0.07  # to train ViT-Ti/16 on one image, measured on two CPU cores
SMALL = 100_000  # images from which on optimizer and start are the paper's
PATIENCE = 2 * 3600  # seconds that fine-tuning on a CPU may take before only the head is worth it


def default_recipe(
    *,
    images: int,
    classes: int,
    pretrained: Architecture | None,
    device: str,
    model: str = "",
    multilabel: bool = False,
    pixels: int = 224,
    muon: bool = True,
    said: Mapping[str, str] | None = None,
) -> tuple[Recipe, tuple[str, ...]]:
    """A recipe and the reasons for it.

    `images` and `classes` count the training data, `pixels` is the short side of a typical image, `pretrained` is what
    the weights to start from hold, `device` is cpu, cuda or mps. Without `muon` the optimizer is Adam in any case.
    `said` are keys that the user sets to other values: the recipe does not follow them, but what they contradict is no
    reason, and how long and how fast it learns suits the `trainable` that is said.
    """
    said = said or {}
    if pretrained is None:
        changes, reasons = _from_scratch(images, device, pixels, model, muon)
    else:
        changes, reasons = _fine_tuning(images, classes, device, pretrained, said.get("trainable", ""))
        changes |= _resized(pretrained, model)
    if multilabel:
        changes["loss"] = "sigmoid"
        several = "images have several labels: each class is a yes or no of its own (loss=sigmoid)"
        reasons = (*reasons, (several, ("loss",)))
    changes["batch"] = min(changes["batch"], images)
    spoken = {*said, *map("=".join, said.items())}
    return from_dict(changes), tuple(reason for reason, against in reasons if spoken.isdisjoint(against))


def _fine_tuning(images: int, classes: int, device: str, pretrained: Architecture, trainable: str) -> Choice:
    """The paper's recipe (section 4.1) is SGD over 256,000 images or more; Adam needs fewer. `trainable` is what the user
    says of it, else empty."""
    small = device != "cuda"
    epochs = 5.0 if small else 20.0 if images < 100_000 else 8.0
    hours = images * epochs * SECONDS * _size(pretrained) / 3600
    few, slow = images < FEW * classes, small and hours * 3600 > PATIENCE
    if trainable == "head" or (not trainable and (few or slow)):
        length, rate = 100.0 if few else 30.0, 1e-3
        why = (
            f"{images} images of {classes} classes are few" if few else f"{images} images would take {hours:.0f} hours"
        )
        chosen = f"{why}: only a new head learns, on features computed once (trainable=full trains all layers)"
        asked = f"a head alone learns, on features computed once: {length:.0f} epochs at a rate of {rate}"
        changes = {"trainable": "head", "epochs": length, "batch": 256, "optim.lr": rate}
        return changes, ((asked, ("epochs", "steps", "optim.lr")) if trainable else (chosen, ()),)
    if few:  # a ViT-Ti/16 at 112 pixels, one seed: 12 breeds from 36 pets to 49 % in 5 epochs, 65 % in 60
        epochs = 60.0
    batch = 32 if images < 5_000 else 128 if images < 100_000 else 512
    rate = 2e-4 * (batch / 32) ** 0.5
    changes = {"epochs": epochs, "batch": batch, "optim.weight_decay": 0.05}
    mirrored = (MIRRORED, ("data.train_transform",))
    if trainable == "bias" or trainable.startswith("lora"):  # 480 pets, likewise: 93 %, with the rates of all layers 86
        what = "biases" if trainable == "bias" else "adapters"
        why = f"{what} learn beside weights that stay: equally fast in every layer, at a rate of {5 * rate:.2g}"
        return changes | {"optim.lr": 5 * rate}, ((why, ("optim.lr", "optim.layer_decay")), mirrored)
    changes |= {"optim.lr": rate, "optim.layer_decay": 0.75, "optim.head_lr": 5.0}
    gently = f"{images} images and pre-trained weights: all layers are fine-tuned, the early ones gently"
    reasons = [(gently, ("optim.layer_decay",))] if trainable in ("", "full") else []
    return changes, (*reasons, mirrored)


def _from_scratch(images: int, device: str, pixels: int, model: str, muon: bool) -> Choice:
    changes: dict[str, Any] = {"optim.lr": 1e-3, "optim.weight_decay": 0.1}
    nothing = f"{images} images and no weights: the model starts from nothing (--init does better on few images)"
    reasons: list[Reason] = [(nothing, ())]
    if model:
        changes["model"] = model
    else:
        named, fitting = _model_for(images, device, pixels)
        changes |= named
        reasons += fitting
    seen, most = 90_000, 100  # images and epochs, with Adam on a CPU
    if muon and images < SMALL and not isinstance(parse(changes["model"]), ResNetConfig):
        seen, most = 45_000, 50
        changes |= {"optim.name": "muon", "optim.momentum": 0.95, "optim.lr": 2e-3, "shape.start": "mimetic"}
        why = "Muon, and weights that start as trained ones look, learn few images in fewer epochs"
        reasons.append((why, ("optim.name", "shape.start")))
    changes["batch"] = 64 if images < 10_000 else 256 if images < 100_000 else 1024
    changes["epochs"] = float(min(max(seen // images, 10), most) if device != "cuda" else 300 if images < 1e6 else 90)
    if pixels > 16:
        changes |= {"data.train_transform": "decode|inception_crop({size})|flip|randaugment(2, 10)", "data.mixup": 0.2}
        why = "crops, mirror images, RandAugment and mixup stand in for more images"
        reasons.append((why, ("data.train_transform", "data.mixup")))
    else:
        changes |= {
            "data.train_transform": "decode|inception_crop({size}, 0.75)",
            "data.eval_transform": "decode|resize({size})",
        }
        why = f"images of {pixels} pixels: cropped a little, never mirrored, since digits and signs have a side"
        reasons.append((why, ("data.train_transform",)))
    return changes, tuple(reasons)


def _model_for(images: int, device: str, pixels: int) -> Choice:
    if pixels <= 16:
        shape = {"shape.depth": 4, "shape.width": 64, "shape.heads": 4, "optim.lr": 2e-3}
        why = f"images of {pixels} pixels: a ViT of 4 layers, 64 wide, with patches of 2 pixels"
        return {"model": f"ViT-Ti/2@{max(pixels - pixels % 2, 4)}", **shape}, (
            (why, ("shape.depth", "shape.width", "shape.heads")),
        )
    patch, side = (4, 32) if pixels <= 40 else (8, 64) if pixels <= 96 else (16, 224)
    size = "S" if device == "cuda" and images >= 100_000 else "Ti"
    name = f"ViT-{size}/{patch}" + ("" if side == 224 else f"@{side}")
    return {"model": name}, ((f"images of {pixels} pixels: {name}", ()),)


def _resized(pretrained: Architecture, model: str) -> dict[str, Any]:
    """With weights, a model's name can only ask for another image size."""
    changes: dict[str, Any] = {"model": name_of(pretrained)}
    if not model:
        return changes
    asked = parse(model)
    if name_of(replace(asked, image=pretrained.image)) != name_of(pretrained):
        raise UserError(f"the weights hold a {name_of(pretrained)}, not a {model}: leave out one of the two.")
    return changes | ({"image": asked.image[0]} if "@" in model else {})


def _size(architecture: Architecture) -> float:
    """How many times the work of ViT-Ti/16 at 224 pixels, roughly."""
    if isinstance(architecture, ResNetConfig):
        return 3.3 * sum(architecture.blocks) / 16 * architecture.width**2
    if not isinstance(architecture, ViTConfig):
        return 1.0
    work = architecture.depth * architecture.width**2 * architecture.tokens(architecture.image)
    return work / (12 * 192**2 * 197) * (2 if architecture.axial else 1) + (3.3 if architecture.stem else 0)
