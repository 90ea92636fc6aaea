"""A data set as a recipe sees it."""

from __future__ import annotations

from pathlib import Path

from vitral.data.catalog import CATALOG
from vitral.data.narrow import narrowed
from vitral.data.sources import DataSet, open_data
from vitral.errors import UserError
from vitral.evaluation.duplicates import read_exclusions
from vitral.recipe import Recipe


def open_narrowed(data: str | Path, recipe: Recipe) -> DataSet:
    """The data with what the recipe leaves out of it; held-out images are always drawn with seed 0, so that runs with
    other seeds are tested on the same images."""
    wish = recipe.data
    return narrowed(
        open_data(data, held_out=wish.held_out),
        exclude=read_exclusions(Path(wish.exclude)) if wish.exclude else (),
        subset=wish.subset,
        subset_seed=wish.subset_seed,
        dev=wish.dev,
    )


def open_to_train(data: str | Path, recipe: Recipe) -> DataSet:
    """The same, with images to train on."""
    opened = open_narrowed(data, recipe)
    if not len(opened.train):
        raise UserError(f"{data} has no images to train on: it is for testing only.")
    return opened


def known_data() -> dict[str, str]:
    """The catalogue: names of data sets, and what each is."""
    return {name: known.about for name, known in CATALOG.items()}
