"""`show_recipe`, and the choice of the recipe of `train` for given data and weights, with reasons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from torch import nn

from vitral.api.data import Data, open_to_train
from vitral.checkpoints.card import Card, Preprocess
from vitral.checkpoints.hub import located
from vitral.checkpoints.weights import describe
from vitral.data.augment import mirrored_labels
from vitral.data.sources import DataSet, channels_of_images, dim_warning, median_short_side
from vitral.errors import UserError
from vitral.models.build import default_device
from vitral.models.model import VisionModel
from vitral.names import parse
from vitral.recipe import (
    Overrides,
    Recipe,
    check_given_once,
    flips,
    from_file,
    keys_of,
    override_list,
    with_dev,
    with_overrides,
    without_flip,
)
from vitral.recipe_defaults import FLIP_REASON, default_recipe
from vitral.recipe_presets import get_preset, is_preset
from vitral.training.build import check_recipe, flip_warning, keeps_head, own_card
from vitral.training.callbacks import OwnParts

_DATA_KEYS = ("held_out", "dev", "subset", "subset_seed", "exclude")  # of recipe.data: which images there are
_EARLY = tuple(f"{key}=" for key in ("init", "patience", *(f"data.{name}" for name in _DATA_KEYS)))


def show_recipe(
    recipe: str | Path | Recipe = "",
    *,
    data: str | Path = "",
    model: str = "",
    init: str | Path = "",
    device: str = "",
    set: Overrides = (),
) -> Recipe:
    """Show a training recipe, every key with its meaning.

    Without arguments it has the default values; with `data` it is the recipe that `vitral train DATA` would follow.

    Args:
        recipe: name of a recipe (`vitral list recipes`), a TOML file or a run folder.
        data: data set to choose a recipe for.
        model: name of the model to train from scratch.
        init: weights to start from.
        device: device to choose a recipe for; chosen automatically by default.
        set: keys of the recipe to change, such as optim.lr=0.01.

    Returns:
        The complete recipe.
    """
    overrides = override_list(set)
    check_given_once({"model": model, "init": str(init)}, overrides)
    if data:
        return choose_recipe(data, model=model, init=init, recipe=recipe, set=overrides, device=device)[1]
    chosen = recipe if isinstance(recipe, Recipe) else read_recipe(recipe, model) if recipe else Recipe()
    return with_overrides(replace(chosen, model=model or chosen.model, init=str(init) or chosen.init), overrides)


def choose_recipe(
    data: Data,
    *,
    model: str | nn.Module = "",
    init: str | Path = "",
    recipe: str | Path | Recipe = "",
    set: Sequence[str] = (),
    device: str = "",
    own_parts: OwnParts | None = None,
) -> tuple[DataSet, Recipe, tuple[str, ...]]:
    """Open the data and choose the recipe that `train` would follow, with the reasons."""
    own_parts, name = own_parts or OwnParts(), "" if isinstance(model, nn.Module) else model
    written = recipe if isinstance(recipe, Recipe) else read_recipe(recipe, name) if recipe else None
    early = _early_recipe(written, set)
    opened, dev = open_to_train(data, early)
    start = str(init) or early.init
    path = located(start) if start else None
    card = describe(path).card if path is not None else None
    if written is not None:
        chosen, reasons = replace(written, model=name or written.model, init=start), ("following the recipe given",)
        if isinstance(recipe, str) and is_preset(recipe):
            # A preset's are those of the paper's own weights; a recipe file states what the user wants.
            chosen = normalised_as(chosen, card)
    elif own_parts.model is not None:
        chosen, reasons = _recipe_for_module(opened, own_parts.model, keys_of(set), device)
    else:
        fixed = (
            {} if own_parts.optimizer is None else {"optim.name": "adamw"}
        )  # lengths that suit an optimizer unlike Muon
        fixed |= {} if own_parts.loss is None else {"balance": "none"}  # balances change vitral's own loss
        if own_parts.train_transform is not None or own_parts.eval_transform is not None:
            fixed["trainable"] = "full"  # a head alone is trained on features, without own transforms
        chosen, reasons = _suited_recipe(opened, card, name, {**fixed, **keys_of(set)}, device)
        chosen = replace(chosen, init=start)
        if path is not None and card is not None:
            chosen, reasons = _with_preprocessing_of(chosen, reasons, path, card, early, set)
    if written is None:
        chosen, reasons = _with_channels(chosen, reasons, opened, own_parts.model, set)
    chosen = with_dev(with_overrides(chosen, set), dev)
    if dev and not early.data.dev:
        share = f"a share of {dev:g} of train (data.dev) is the dev split for that"
        reasons = (*reasons, f"patience selects weights by their evaluations: {share}, and the result is on test")
    if own_parts.model is not None:
        classes = 0 if chosen.objective == "masked" else len(opened.train.classes)
        card = own_card(own_parts.model, chosen, classes)
        chosen = replace(chosen, model=type(own_parts.model).__name__)
    check_recipe(chosen, opened, card, own_parts)
    reasons = (*reasons, *_head_reason(chosen, opened, card))
    if own_parts.train_transform is None:
        reasons += flip_warning(chosen, opened) + dim_warning(opened.train)
    return opened, chosen, (*reasons, *((f"overridden: {', '.join(set)}",) if set else ()))


def _head_reason(recipe: Recipe, data: DataSet, card: Card | None) -> tuple[str, ...]:
    """That the run starts from the head of the weights, if it does."""
    reset = not recipe.init or card is None or recipe.reset_head or recipe.objective == "masked"
    if reset or not keeps_head(card, data.train.classes):
        return ()
    return ("the weights have a head for the same classes, which is kept (reset_head=true starts from zeros)",)


def _suited_recipe(
    opened: DataSet, card: Card | None, model: str, overrides: dict[str, str], device: str
) -> tuple[Recipe, tuple[str, ...]]:
    """The recipe that suits this data and these weights, and why."""
    recipe, reasons = default_recipe(
        images=len(opened.train),
        class_counts=opened.train.counts().tolist(),
        pretrained=card.architecture if card else None,
        device=device.split(":")[0] or default_device().type,
        model=model or overrides.get("model", ""),
        multilabel=opened.train.multilabel,
        pixels=median_short_side(opened.train),
        muon=_allows_muon(overrides),
        overrides=overrides,
    )
    mirrored = mirrored_labels(opened.source, opened.train.classes)
    if not mirrored or not flips(recipe):
        return recipe, reasons
    kept = (reason.replace("flips, ", "") for reason in reasons if reason != FLIP_REASON)
    return without_flip(recipe), (*kept, f"no flips, which would change the labels of {mirrored}")


def _recipe_for_module(
    opened: DataSet, module: nn.Module, overrides: dict[str, str], device: str
) -> tuple[Recipe, tuple[str, ...]]:
    """The recipe for a user's own module: length, batch and augmentation by the data, AdamW without layer decay."""
    config = getattr(module, "config", None)
    recipe, _ = _suited_recipe(opened, None, "", {**overrides, "optim.name": "adamw"}, device)
    vitral_model = config is not None and hasattr(module, "patchify")
    image = 0 if vitral_model else int(overrides.get("image") or parse(recipe.model).image[0])
    recipe = replace(recipe, image=image, shape=Recipe().shape)
    return recipe, (
        f"a module of your own: AdamW at a rate of {recipe.optim.lr:g}, images of {image or 'its own'} pixels",
    )


def _with_preprocessing_of(
    chosen: Recipe, reasons: tuple[str, ...], path: Path, card: Card, early: Recipe, overrides: Sequence[str]
) -> tuple[Recipe, tuple[str, ...]]:
    """The recipe with the preprocessing that the weights were trained with: the data part of their run's recipe, else
    what their card states."""
    if (path / "recipe.toml").is_file():
        images = {name: getattr(early.data, name) for name in _DATA_KEYS}
        chosen = replace(chosen, data=replace(read_recipe(path).data, **images))
        augmented = "" if chosen.trainable == "head" else " and augmented"
        reason = f"images are preprocessed{augmented} as in the run it starts from"
        return chosen, (*(other for other in reasons if other != FLIP_REASON), reason)
    stated = card.preprocess or Preprocess.assumed(card.architecture.image, card.architecture.channels)
    image = with_overrides(chosen, overrides).image
    if image:
        stated = stated.adapted(card.architecture.image, (image, image), len(stated.mean))
    data = replace(chosen.data, mean=stated.mean, std=stated.std, eval_transform=stated.pipeline)
    chosen = replace(chosen, data=data)
    if card.preprocess is None:
        reasons = (*reasons, *assumed_pixels(overrides))
    elif keys_of(overrides).keys().isdisjoint(("data.mean", "data.std", "data.eval_transform")):
        reason = f"preprocessing as the weights state: {stated.pipeline}, mean {stated.mean}, std {stated.std}"
        reasons = (*reasons, reason)
    return chosen, reasons


def _with_channels(
    chosen: Recipe, reasons: tuple[str, ...], opened: DataSet, module: nn.Module | None, overrides: Sequence[str]
) -> tuple[Recipe, tuple[str, ...]]:
    """The recipe with one mean and std for each channel of the user's own module, or of arrays that are not RGB."""
    own = module.config.channels if isinstance(module, VisionModel) else 0
    channels = own or channels_of_images(opened.train)
    if channels == len(chosen.data.mean) or (channels == 3 and not own):
        return chosen, reasons
    mean, std = (round(fmean(values), 6) for values in (chosen.data.mean, chosen.data.std))
    chosen = replace(chosen, data=replace(chosen.data, mean=(mean,) * channels, std=(std,) * channels))
    if own or not keys_of(overrides).keys().isdisjoint(("data.mean", "data.std")):
        return chosen, reasons
    return chosen, (
        *reasons,
        f"the images have {channels} channels, and so has the model; mean {mean} and std {std} are assumed for each "
        "(else --set data.mean=... data.std=...)",
    )


def normalised_as(recipe: Recipe, card: Card | None) -> Recipe:
    """The recipe with the mean and std of the pixels that weights state, if they do."""
    if card is None or card.preprocess is None:
        return recipe
    return replace(recipe, data=replace(recipe.data, mean=card.preprocess.mean, std=card.preprocess.std))


def assumed_pixels(overrides: Sequence[str]) -> tuple[str, ...]:
    """The note about weights that do not state their preprocessing, if the user does not either."""
    missing = [name for name in ("mean", "std") if f"data.{name}" not in keys_of(overrides)]
    if not missing:
        return ()
    assumed = f"{' and '.join(missing)} 0.5 {'are' if missing[1:] else 'is'} assumed"
    fix = " ".join(f"data.{name}=..." for name in missing)
    return (f"the weights do not state their preprocessing: {assumed} (else --set {fix})",)


def read_recipe(path: str | Path, model: str = "") -> Recipe:
    """A recipe by its name (paper:finetune/pets; some need the model's, too), from a TOML file or a run's folder."""
    if is_preset(str(path)):
        return get_preset(str(path), model).recipe
    file = Path(path).expanduser()
    file = file / "recipe.toml" if file.is_dir() else file
    if not file.is_file():
        raise UserError(f"{file} is not a recipe file: `vitral show` prints one to start from.")
    return from_file(file)


def _early_recipe(recipe: Recipe | None, overrides: Sequence[str]) -> Recipe:
    """The keys that are needed before the others are chosen: which images there are, and the weights to start from."""
    words = [word for word in overrides if word.replace(" ", "").startswith(_EARLY)]
    return with_overrides(recipe or Recipe(), words)


def _allows_muon(overrides: dict[str, str]) -> bool:
    """Whether no override rules out Muon, which needs unsharded matrices and was not tried with masked patches."""
    required = {"optim.name": "muon", "parallel": "ddp", "objective": "classes"}
    return all(overrides.get(key, value) == value for key, value in required.items())
