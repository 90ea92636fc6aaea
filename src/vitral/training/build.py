"""The model of a run with its card: from scratch, from weights or the user's own; checks before a run; and the record
of a run's recipe, images and own parts, with which a resumed run must agree.
"""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from vitral import recipe as recipes
from vitral.architecture import ModuleConfig, ViTConfig, as_size
from vitral.checkpoints.adapt import Adaptation, to_classes
from vitral.checkpoints.card import Card, Preprocess
from vitral.checkpoints.run import RunFolder
from vitral.checkpoints.weights import assemble, read_adapted
from vitral.data.augment import CallableTransform, mirrored_labels
from vitral.data.contents import RunContents
from vitral.data.preprocess import parse_deterministic, parse_pipeline
from vitral.data.sources import DataSet, channels_of_images
from vitral.errors import UserError
from vitral.events import EventHandler, Note
from vitral.models.build import Model, build, mimetic_init
from vitral.models.resnet import ResNet
from vitral.models.vit import ViT
from vitral.recipe import Recipe, flips
from vitral.training.augmentation import parse_augmentation
from vitral.training.callbacks import OwnParts, Transform, part_name
from vitral.training.optimizer import build_optimizer, freeze, parameter_groups
from vitral.validation import read_object

_DROP_RATES = ("dropout", "attention_dropout", "stochastic_depth")
# May differ in a resumed run: they affect memory, speed and disk, but not the result.
FREE_KEYS = {"workers", "micro_batch", "grad_checkpointing", "compile", "cuda_graph", "parallel", "keep", "save_every"}
# They choose the images of train and of the other splits.
_IMAGE_KEYS = {"patience", *(f"data.{name}" for name in ("held_out", "dev", "subset", "subset_seed", "exclude"))}


def check_recipe(recipe: Recipe, data: DataSet, card: Card | None, own_parts: OwnParts | None = None) -> None:
    """Raise UserError for a recipe that cannot work, before a run folder is created. The card is that of the weights in
    `init` or of the user's own model; None from scratch."""
    train, own_parts = data.train, own_parts or OwnParts()
    if recipe.trainable != "full" and card is None:
        raise UserError(
            f"trainable={recipe.trainable} needs trained weights to start from: add --init, or omit trainable."
        )
    architecture = card.architecture if card else recipes.architecture_of(recipe, len(train.classes))
    if recipe.batch > len(train):
        raise UserError(f"batch={recipe.batch} is more than the {len(train)} training images: choose a smaller one.")
    if recipe.objective == "masked" and not isinstance(architecture, ViTConfig):
        raise UserError(f"{recipe.model} has no patches to mask: objective=masked needs a ViT or a hybrid.")
    drops = [name for name in _DROP_RATES if getattr(recipe.regularization, name)]
    if drops and not isinstance(architecture, ViTConfig):
        raise UserError(
            f"regularization.{drops[0]} has no effect in {recipe.model}: set it to 0, or name a ViT or a hybrid."
        )
    if train.multilabel and recipe.loss != "sigmoid":
        raise UserError("images of this data have several labels: set loss=sigmoid.")
    if train.multilabel and recipe.balance == "sampler":
        raise UserError("balance=sampler needs one label per image: use balance=weights.")
    if recipe.image:
        architecture = replace(architecture, image=as_size(recipe.image))
    channels = len(recipe.data.mean)
    if own_parts.model is not None and channels != architecture.channels:
        raise UserError(f"data.mean needs one number for each of the {architecture.channels} channels of the model.")
    if own_parts.train_transform is None and (found := channels_of_images(train, channels)) != channels:
        raise UserError(
            f"the images have {found} channels and the model {channels}: set data.mean and data.std to {found} numbers "
            "each, such as 0.5,0.5,..."
        )
    architecture = replace(architecture, channels=channels)
    if recipe.data.augment:
        image = torch.zeros(1, architecture.channels, *architecture.image, dtype=torch.uint8)
        with torch.random.fork_rng(devices=[]):
            parse_augmentation(recipe.data.augment)(image)
    train_pipeline, eval_pipeline = recipes.pipelines(recipe, architecture.image)
    parse_pipeline(train_pipeline)
    parse_deterministic(eval_pipeline)
    _check_own_parts(recipe, own_parts, Card(architecture))
    if own_parts.model is None:
        with torch.device("meta"):
            headless = not architecture.classes and recipe.objective == "classes"  # weights of a backbone get a head
            model = build(replace(architecture, classes=len(train.classes)) if headless else architecture)
            freeze(model, recipe.trainable)
            groups = parameter_groups(model)
            if own_parts.optimizer is None:
                build_optimizer(groups, name=recipe.optim.name, lr=recipe.optim.lr)


def flip_warning(recipe: Recipe, data: DataSet) -> tuple[str, ...]:
    """A warning if random flips would give images the wrong label."""
    mirrored = mirrored_labels(data.source, data.train.classes)
    if not mirrored or not flips(recipe) or recipe.objective == "masked":
        return ()
    return (f"flip mirrors images, which changes the labels of {mirrored}: remove it from data.train_transform",)


def _check_own_parts(recipe: Recipe, own_parts: OwnParts, card: Card) -> None:
    if own_parts.loss is not None and recipe.objective == "masked":
        raise UserError("masked patch prediction has its own loss: omit loss=, or set objective=classes.")
    if own_parts.loss is not None and recipe.balance in ("weights", "logit-adjust"):
        raise UserError(f"balance={recipe.balance} changes vitral's own loss: omit balance, or loss=.")
    if own_parts.model is not None and recipe.init:
        raise UserError("the model comes with model=, so init= has nothing to load: omit one of them.")
    transforms = [
        transform for transform in (own_parts.train_transform, own_parts.eval_transform) if transform is not None
    ]
    if transforms and (recipe.objective == "masked" or recipe.trainable == "head"):
        raise UserError("masked patch prediction and trainable=head prepare images themselves: omit transform=.")
    dtypes = [own_transform(transform, card).dtype for transform in transforms]
    normalised = [dtype != np.uint8 for dtype in dtypes] + [False] * (len(dtypes) == 1)
    if len(set(normalised)) > 1:
        raise UserError(
            "normalise images in the same way for training and evaluation: return floats from both transforms or none."
        )


def own_transform(function: Transform, card: Card) -> CallableTransform:
    """A user's transform, which must give images of the model's size."""
    return CallableTransform(function, card.architecture.image, channels=card.architecture.channels)


def build_model(recipe: Recipe, classes: tuple[str, ...], own_parts: OwnParts | None = None) -> tuple[nn.Module, Card]:
    """The model to train, and its card with these classes and the recipe's preprocessing."""
    torch.manual_seed(recipe.seed)
    classes = () if recipe.objective == "masked" else classes  # a model without a head: patches have no class
    if own_parts is not None and own_parts.model is not None:
        model, card = own_parts.model, own_card(own_parts.model, recipe, len(classes))
    elif recipe.init:
        model, card = _loaded_model(recipe, classes)
    else:
        model, card = _new_model(recipe, len(classes))
    _, eval_pipeline = recipes.pipelines(recipe, card.architecture.image)
    return model, replace(
        card,
        class_names=classes,
        temperature=1.0,  # that of the initial weights does not apply to the trained ones
        preprocess=Preprocess(eval_pipeline, recipe.data.mean, recipe.data.std),
        multilabel=recipe.loss == "sigmoid",
    )


def keeps_head(card: Card, classes: tuple[str, ...]) -> bool:
    """Whether the head of these weights is for exactly these classes."""
    return card.class_names == classes and card.architecture.classes == len(classes)


def _loaded_model(recipe: Recipe, classes: tuple[str, ...]) -> tuple[Model, Card]:
    changes = Adaptation(image=recipe.image or None, channels=len(recipe.data.mean))
    checkpoint = read_adapted(recipe.init, changes)
    weights, card = checkpoint.weights, checkpoint.card
    if recipe.reset_head or not keeps_head(card, classes):
        weights = to_classes(weights, len(classes))
    if isinstance(weights.architecture, ViTConfig):
        rates = {name: getattr(recipe.regularization, name) for name in _DROP_RATES}
        weights = replace(weights, architecture=replace(weights.architecture, **rates))
    model = assemble(weights)
    return model, replace(card, architecture=model.config, changes=weights.changes)


def _new_model(recipe: Recipe, classes: int) -> tuple[Model, Card]:
    model = build(recipes.architecture_of(recipe, classes))
    if recipe.shape.head_bias and model.head.output is not None:
        torch.nn.init.constant_(model.head.output.bias, recipe.shape.head_bias)
    source = "trained from scratch"
    if recipe.shape.weight_init == "mimetic" and isinstance(model, ViT):
        mimetic_init(model)
        source = "trained from scratch, with mimetic initialisation"
    return model, Card(model.config, source=source, format="vitral")


def own_card(model: nn.Module, recipe: Recipe, classes: int) -> Card:
    """The card of a user's own module, whose output must have one value per class."""
    if isinstance(model, ViT | ResNet):
        if model.config.classes != classes:
            raise UserError(
                f"the model has {model.config.classes} outputs and the data {classes} classes: call "
                f"model.reset_classifier({classes}) first."
            )
        if recipe.image and as_size(recipe.image) != model.config.image:
            raise UserError(f"the model is for {model.config.image[0]} pixels: load it with image={recipe.image}.")
        return Card(model.config, source="model= of a Python call", format="vitral")
    side, channels = recipe.image or 224, len(recipe.data.mean)
    config = ModuleConfig(type(model).__name__, as_size(side), channels, classes)
    parameter = next(model.parameters(), torch.empty(0))
    training = model.training
    try:
        with torch.no_grad():
            output = model.eval()(torch.zeros(1, channels, side, side, device=parameter.device))
    except Exception as error:
        raise UserError(
            f"{config.name} fails on a batch of shape (1, {channels}, {side}, {side}) ({error}): set image= to the "
            "size it takes."
        ) from error
    finally:
        model.train(training)
    if not isinstance(output, torch.Tensor) or output.shape != (1, classes):
        shape = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
        raise UserError(f"{config.name} must give logits of shape (batch, {classes}), one per class, not {shape}.")
    return Card(config, source=f"model= of a Python call ({part_name(model)})", format="vitral")


def record_run(folder: RunFolder, recipe: Recipe, data: DataSet, own_parts: OwnParts, on_event: EventHandler) -> None:
    """Write recipe.toml, data.json and split.json into the folder of a new run."""
    reported = data.reported_split(recipe.patience > 0)
    contents = RunContents.of(data, reported.name if reported is not None else "", on_event)
    if contents.reason:
        on_event(Note(f"{contents.reason}: replaced images are not detected when the run is resumed"))
    repeats = contents.repeats()
    for note in repeats:
        on_event(Note(note))
    facts = {
        "source": data.source,
        **_fingerprints(data, recipe),
        "notes": [*data.messages, *repeats],
        "own_parts": own_parts.describe(),
    }
    folder.write_text("recipe.toml", recipes.to_toml(recipe))
    folder.write_text("data.json", json.dumps(facts, indent=2) + "\n")
    folder.write_text("split.json", contents.to_json())


def check_same_run(folder: RunFolder, recipe: Recipe, data: DataSet, own_parts: OwnParts) -> None:
    """Raise UserError if a resumed run has another recipe, other images or other parts than before."""
    before, now = recipes.values(recipes.from_file(folder.path / "recipe.toml")), recipes.values(recipe)
    keys = [key for key in now if key not in FREE_KEYS and before[key] != now[key]]
    changed = [f"{key} was {_stated(before[key])} and is {_stated(now[key])}" for key in keys]
    facts, images = read_object(folder.path / "data.json"), _fingerprints(data, recipe)
    others = [f"its {name} images were others" for name in images if images[name] != facts.get(name)]
    if others and (source := facts.get("source")) != data.source:
        others = [f'its data was "{source}" and is "{data.source}"']
    # Settings that are chosen for the data differ because the data does, unless a setting chooses other images.
    changed = [*others, *changed] if _IMAGE_KEYS.isdisjoint(keys) else [*changed, *others]
    old_parts, new_parts = facts.get("own_parts", {}), own_parts.describe()
    changed += [
        f"its {name} was {old_parts.get(name, 'vitral')} and is {new_parts.get(name, 'vitral')}"
        for name in sorted({*old_parts, *new_parts})
        if old_parts.get(name) != new_parts.get(name)
    ]
    if changed:
        raise UserError(f"{folder.path} contains another run ({changed[0]}): choose another folder, or remove it.")
    _check_contents(folder, data, recipe)


def _stated(value: object) -> object:
    return "not given" if value == "" else value


def _check_contents(folder: RunFolder, data: DataSet, recipe: Recipe) -> None:
    """Raise UserError if the content of images has changed."""
    contents = RunContents.read(folder.path / "split.json")
    if contents is None:
        return
    used = {
        split.name: split for split in (data.train, data.eval_split, data.reported_split(recipe.patience > 0)) if split
    }
    changed = [key for split in used.values() for key in contents.changed(split)]
    if changed:
        count = "1 image has" if len(changed) == 1 else f"{len(changed):,} images have"
        raise UserError(
            f"{count} changed since the run in {folder.path} began, first {changed[0]}: restore what was there, or "
            "start a new run in another folder with --out."
        )


def _fingerprints(data: DataSet, recipe: Recipe) -> dict[str, str]:
    """Fingerprints of the splits for training, for the result, and for the selection of weights."""
    reported, selected = data.reported_split(recipe.patience > 0), data.eval_split if recipe.patience else None
    splits = {"train": data.train, "evaluated": reported, **({"selected": selected} if selected else {})}
    return {name: split.fingerprint() if split is not None else "" for name, split in splits.items()}
