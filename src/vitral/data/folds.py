"""Folds for cross-validation: each class spread evenly over them, and copies of an image in one of them."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

import numpy as np

from vitral.data.check import MAX_CROP_SEARCH
from vitral.data.copies import CHUNK, CROPS, UNCROPPED, CopyIndex, ImageSignature, signatures
from vitral.data.splits import DataSet, Split, strata
from vitral.errors import UserError
from vitral.events import EventHandler, Progress, ignore_events


def assign_folds(keys: Sequence[str], classes: np.ndarray, groups: np.ndarray, folds: int, seed: int) -> np.ndarray:
    """Which fold each image belongs to, (n,) int64 from 0.

    Each group goes to the fold with the fewest images of its class, then to the smallest one. Groups are taken from
    large to small and in the order of a hash of key and seed, so the order of files changes nothing.

    Args:
        keys: names of the images.
        classes: the class of each, (n,); of a group that of its first image counts.
        groups: images with the same number stay together, (n,).
        folds: number of folds.
        seed: of the draw.
    """
    members: dict[int, list[int]] = {}
    for index, group in enumerate(groups.tolist()):
        members.setdefault(group, []).append(index)

    def rank(indices: list[int]) -> tuple[int, bytes]:
        key = min(keys[index] for index in indices).encode("utf-8", "surrogateescape")
        return -len(indices), hashlib.blake2b(f"{seed} ".encode() + key, digest_size=16).digest()

    result = np.zeros(len(keys), np.int64)
    sizes, of_class = [0] * folds, Counter()
    for indices in sorted(members.values(), key=rank):
        label = int(classes[indices[0]])
        fold = min(range(folds), key=lambda number: (of_class[number, label], sizes[number], number))
        result[indices] = fold
        sizes[fold] += len(indices)
        of_class[fold, label] += len(indices)
    return result


def copy_groups(split: Split, workers: int = 0, on_event: EventHandler = ignore_events) -> np.ndarray:
    """(n,) int64: the same number for images that are copies of each other, by the rules of `vitral check`."""
    images: list[ImageSignature] = []
    for chunk in signatures(split, workers):
        images += chunk
        on_event(Progress("looking for copies", len(images), len(split)))
    group = list(range(len(images)))

    def root(index: int) -> int:
        while group[index] != index:
            group[index] = group[group[index]]
            index = group[index]
        return index

    def join(first: int, second: int) -> None:
        first, second = sorted((root(first), root(second)))
        group[second] = first

    seen: dict[bytes, int] = {}
    for index, image in enumerate(images):
        if image.pixel_digest:
            join(seen.setdefault(image.pixel_digest, index), index)
    copies = CopyIndex(images, UNCROPPED if len(images) > MAX_CROP_SEARCH else CROPS)
    for start in range(0, len(images), CHUNK):
        for row, index, _ in copies.near_copies(images[start : start + CHUNK], first=start):
            join(start + row, index)
    return np.array([root(index) for index in range(len(images))], np.int64)


def fold_data(data: DataSet, folds: int, *, workers: int = 0, on_event: EventHandler = ignore_events) -> list[DataSet]:
    """The data once per fold, with that fold of train as the test split and the others as train. Drawn with seed 0.

    Raises:
        UserError: there are fewer images than folds.
    """
    train = data.train
    groups = copy_groups(train, workers, on_event)
    if len(np.unique(groups)) < folds:
        raise UserError(f"{data.source} has {len(np.unique(groups))} different images, too few for {folds} folds.")
    numbers = assign_folds(train.keys, strata(train), groups, folds, seed=0)
    copies = len(train) - len(np.unique(groups))
    notes = [f"{len(train):,} images in {folds} folds (drawn with seed 0), evenly by class."]
    notes += [f"{copies:,} of them are copies of others, and in the same fold as those."] * bool(copies)
    notes += ["Folds are made of train alone: the other splits are not used."] * bool(data.splits[1:])
    rare = np.flatnonzero(train.counts() < folds)
    if len(rare):
        some = ", ".join(f'"{train.classes[index]}"' for index in rare[:3]) + ", ..." * (len(rare) > 3)
        notes.append(f"{len(rare)} classes have fewer images than folds, so that some folds lack them: {some}.")
    return [
        DataSet(
            data.source,
            train.select(np.flatnonzero(numbers != fold)),
            test=train.select(np.flatnonzero(numbers == fold), f"fold-{fold + 1}"),
            notes=(*data.notes, *notes),
        )
        for fold in range(folds)
    ]
