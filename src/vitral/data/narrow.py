"""Fewer training images: without those on a list, a part of them kept to choose on, a random draw of the rest."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from vitral.data.order import permute
from vitral.data.splits import DataSet, Split, strata, stratified
from vitral.errors import UserError

_MEASURED = "Measured on"  # how notes begin that name a split


def narrowed(
    data: DataSet, *, exclude: Collection[str] = (), subset: int = 0, subset_seed: int = 0, dev: float = 0.0
) -> DataSet:
    """The data set with less to train on, and a note for each reason.

    The share `dev` is carved out before `subset` images are drawn, so that subsets of any size are measured alike.
    """
    if exclude:
        data = _without(data, set(exclude))
    if dev:
        data = for_choosing(data, dev)
    if subset:
        data = _drawn(data, subset, subset_seed)
    return data


def for_choosing(data: DataSet, share: float) -> DataSet:
    """What choices are made on instead of test: the source's val split, else a share of each class of train."""
    if data.final is not None:
        return data
    held = stratified(data.train.keys, strata(data.train), share, seed=0)
    dev = data.train.select(np.flatnonzero(held), "dev")
    if not len(dev):
        raise UserError(f"{data.source} has too few images to keep {share:.0%} of each class: set data.dev=0.")
    train = data.train.select(np.flatnonzero(~held))
    note = f"{_MEASURED} dev, {len(dev):,} of {len(data.train):,} training images; test is left alone for the end."
    return DataSet(data.source, train, dev, (*data.notes, note), data.test)


def for_final(data: DataSet) -> DataSet:
    """What the last word is spoken on: trained on all of train, measured on test."""
    if data.final is None:
        return data
    kept = (note for note in data.notes if not note.startswith(_MEASURED))  # it names the other split
    note = f"{_MEASURED} {data.final.name}, {len(data.final):,} images."
    return replace(data, test=data.final, final=None, notes=(*kept, note))


def nested_draw(count: int, images: int, seed: int) -> np.ndarray:
    """`count` of `images` places in ascending order; a draw of fewer with the same seed lies inside it."""
    return np.sort(permute(np.arange(count), images, seed, epoch=0))


def _drawn(data: DataSet, count: int, seed: int) -> DataSet:
    train = data.train
    if count > len(train):
        raise UserError(f"data.subset={count} is more than the {len(train)} training images: choose a smaller one.")
    chosen = train.select(nested_draw(count, len(train), seed))
    note = f"Trained on {count:,} of {len(train):,} images, drawn with seed {seed}."
    return replace(data, train=chosen, notes=(*data.notes, note))


def _without(data: DataSet, exclude: set[str]) -> DataSet:
    kept = [place for place, key in enumerate(data.train.keys) if key not in exclude]
    left_out = len(data.train) - len(kept)
    held = (key for split in (data.test, data.final) if split is not None for key in split.keys)
    if not left_out and exclude.isdisjoint(held):  # all that the list names may have been held out for testing
        raise UserError(f"data.exclude names none of the training images of {data.source}: it is another set's list.")
    note = f"Left out {left_out:,} training images that data.exclude names."
    return replace(data, train=_select(data.train, kept), notes=(*data.notes, note))


def _select(split: Split, places: list[int]) -> Split:
    return split.select(np.array(places, np.int64))
