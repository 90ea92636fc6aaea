"""A data set as a recipe sees it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from vitral.data.catalog import CATALOG
from vitral.data.sources import DataSet, Split, open_data, open_images, restrict_train, with_test_split
from vitral.errors import UserError
from vitral.evaluation.duplicates import read_exclusions
from vitral.recipe import Recipe, from_toml, with_dev
from vitral.recipe_schema import DataRecipe
from vitral.serving.results import Unreadable, unread


def open_narrowed(data: str | Path, recipe: Recipe) -> DataSet:
    """The data with what the recipe leaves out of it; held-out images are always drawn with seed 0, so that runs with
    other seeds are tested on the same images."""
    return _narrowed(open_data(data, held_out=recipe.data.held_out), recipe)


def _narrowed(opened: DataSet, recipe: Recipe) -> DataSet:
    wish = recipe.data
    return restrict_train(
        opened,
        exclude=_excluded(recipe),
        subset=wish.subset,
        subset_seed=wish.subset_seed,
        dev=wish.dev,
    )


def _excluded(recipe: Recipe) -> list[str]:
    return read_exclusions(Path(recipe.data.exclude)) if recipe.data.exclude else []


def open_as_trained(data: str | Path, recipe: Recipe, train: str) -> DataSet | None:
    """The data as a run saw it that was trained on images with this fingerprint; None where they are others."""
    _excluded(recipe)  # with a list that is lost, the images that were trained on would look like others
    try:
        opened = open_narrowed(data, recipe)
    except UserError:  # too few images for what the recipe draws, or none of those listed: another data set
        return None
    return opened if opened.train.fingerprint() == train else None


def open_to_probe(data: str | Path, source: Path) -> DataSet:
    """All of the data, measured on its test split. The weights of a run that held out images of its own are not to be
    tested on what they were trained on, so its share decides where the data has no split."""
    recipe = (source if source.is_dir() else source.parent) / "recipe.toml"
    share = from_toml(recipe.read_text("utf-8")).data.held_out if recipe.is_file() else 0.0
    return with_test_split(open_data(data, held_out=share or DataRecipe().held_out))


def open_to_train(data: str | Path, recipe: Recipe) -> DataSet:
    """The same, with images to train on."""
    return _to_train(data, open_narrowed(data, recipe))


def open_to_choose(data: str | Path, recipe: Recipe, dev: float) -> tuple[DataSet, DataSet | None]:
    """All to train on, and the same with images to choose on: a share `dev` of train, or the source's val split."""
    whole = open_data(data, held_out=recipe.data.held_out)
    opened = _to_train(data, _narrowed(whole, with_dev(recipe, 0.0)))
    return opened, _narrowed(whole, with_dev(recipe, dev)) if dev or (
        opened.val is not None and opened.test is not None
    ) else None


def _to_train(data: str | Path, opened: DataSet) -> DataSet:
    if not len(opened.train):
        raise UserError(f"{data} has no images to train on: it is for testing only, so name one with a train split.")
    return opened


def unread_files(images: Sequence[str | Path], read: Collection[str]) -> tuple[Unreadable, ...]:
    """Those of image files, and of all in folders, that are not among the ones that were read; with the reason."""
    return unread_of(open_images(images), read)


def unread_of(split: Split, read: Collection[str]) -> tuple[Unreadable, ...]:
    """The images of a split that are not among the keys of those that were read; with the reason."""
    known = set(read)
    return tuple(unread(split, place, channels=3) for place, key in enumerate(split.keys) if key not in known)


def known_data() -> dict[str, str]:
    """The catalogue: names of data sets, and what each is."""
    return {name: known.about for name, known in CATALOG.items()}
