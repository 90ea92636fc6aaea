"""`train` and `show_recipe` with the parameters of the command line, over `vitral.api.training` as it is now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from vitral.api import training
from vitral.api.overrides import Overrides, check_given_once, override_words
from vitral.api.training import Training, choose_recipe, read_recipe
from vitral.events import EventHandler
from vitral.progress import displayed
from vitral.recipe import Recipe, with_overrides


def train(
    data: str | Path,
    *,
    model: str = "",
    init: str | Path = "",
    out: str | Path = "",
    recipe: str | Path | Recipe = "",
    epochs: float | None = None,
    trainable: str = "",
    balance: str = "",
    seed: int | None = None,
    seeds: int = 1,
    device: str = "",
    set: Overrides = (),
    on_event: EventHandler | None = None,
    **old: Sequence[str],
) -> Training:
    """Train a model on images, or fine-tune one.

    What is not given is chosen to suit the data and the weights, and the reasons are printed.

    Args:
        data: a folder with one sub-folder per class, a CSV or JSONL manifest, Parquet, tar shards, or a known name
            (`vitral list data`).
        model: name of the model to train from scratch, such as ViT-Ti/16.
        init: weights to start from: a file, a run folder, hf:owner/name or timm:name.
        out: the run folder; a run that was interrupted resumes when its folder is given again.
        recipe: name of a recipe (`vitral list recipes`) or a TOML file; `vitral show` prints one to start from.
        epochs: passes over the training images.
        trainable: which parameters are trained: full, head, last:K, bias or lora:R.
        balance: how uneven classes are balanced: none, weights, sampler or logit-adjust.
        seed: seed of weights, data order, augmentation and dropout.
        seeds: number of runs, with seeds counted up from `seed`; the result is their mean and standard deviation.
        device: cpu, cuda, cuda:1 or mps; chosen when not given.
        set: other keys of the recipe, such as optim.lr=0.01 data.mixup=0.2.
        on_event: handler of the events of the run.

    Returns:
        The results of the runs and the recipe they followed.

    Raises:
        UserError: where an argument is wrong, or the data cannot be trained on.
    """
    words = (*override_words(set), *old.get("overrides", ()))
    parameters = {"epochs": epochs, "trainable": trainable or None, "balance": balance or None, "seed": seed}
    check_given_once({**parameters, "model": model, "init": str(init)}, words)
    named = [f"{key}={value}" for key, value in parameters.items() if value is not None]
    with displayed(on_event) as handler:
        return training.train(
            data,
            model=model,
            init=init,
            out=out,
            recipe=recipe,
            overrides=[*named, *words],
            seeds=seeds,
            device=device,
            on_event=handler,
        )


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
        device: device to choose a recipe for; chosen when not given.
        set: keys of the recipe to change, such as optim.lr=0.01.

    Returns:
        The complete recipe.
    """
    words = override_words(set)
    check_given_once({"model": model, "init": str(init)}, words)
    if data:
        return choose_recipe(data, model=model, init=init, recipe=recipe, overrides=words, device=device)[1]
    chosen = recipe if isinstance(recipe, Recipe) else read_recipe(recipe, model) if recipe else Recipe()
    return with_overrides(replace(chosen, model=model or chosen.model, init=str(init) or chosen.init), words)
