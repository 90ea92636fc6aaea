"""The entry point: any source of labelled images to a DataSet, and image files to a Split without labels.

| source | is |
|---|---|
| a folder | one sub-folder per class, with or without train, val, test around them |
| x.csv, x.tsv, x.jsonl | a manifest: a path and one or several labels per line, possibly a split |
| x.parquet, or a folder of them | image bytes and labels, in the layout of the Hugging Face hub |
| x-{000..099}.tar, x-*.tar, or a folder of them | WebDataset shards |
| hf:owner/name | a data set of the Hugging Face hub, downloaded once |
| cifar10:FOLDER, or cifar10, digits | a name of the catalog; write ./digits for a folder of that name |
| an object in memory | a torch Dataset, a Hugging Face dataset, a list: see `objects.py` |
"""

from __future__ import annotations

import contextlib
import difflib
import os
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from vitral.data import manifests, parquet
from vitral.data.arrays import dim_note
from vitral.data.catalog import CATALOG, in_catalog, open_from_catalog
from vitral.data.copies import ImageSignature, identical, near_pairs, signatures
from vitral.data.folders import MANIFESTS, FileReader, find_images, read_folder, sub_folders
from vitral.data.images import ImageError, channels_of, describe, largest_deep_value
from vitral.data.loader import permute
from vitral.data.objects import open_objects
from vitral.data.shards import expand_pattern, read_shards
from vitral.data.splits import HELD_OUT, SPLIT_NAMES, DataSet, Reader, Split, evenly, key_hash, strata, stratified
from vitral.errors import UserError
from vitral.events import EventHandler, Progress, ignore_events

__all__ = ["DataSet", "Reader", "Split", "open_data", "open_images"]

_ARCHIVES = (".zip", ".gz", ".tgz", ".bz2", ".xz", ".7z", ".rar")  # which are not read; .tar is taken for shards


def open_data(source: Any, *, held_out: float = HELD_OUT, on_event: EventHandler = ignore_events) -> DataSet:
    """Open any source of the table above, or an object in memory (`objects.py`); a `DataSet` is returned as it is.

    Args:
        held_out: if the source has neither a val nor a test split, the share of each class that becomes test;
            0 leaves everything in train, and a single class is accepted.
        on_event: receives `Progress` where labels have to be read item by item.
    """
    if isinstance(source, DataSet):
        return source
    if not isinstance(source, str | os.PathLike):
        return open_objects(source, held_out=held_out, on_event=on_event)
    text = str(source)
    if not text:
        raise UserError("The name of the data is empty: name a folder, a file or a known data set; . is this folder.")
    if isinstance(source, str) and in_catalog(text):
        return open_from_catalog(text, held_out=held_out)
    if text.startswith("hf:"):
        folder, files = parquet.download(text)
        return replace(parquet.read_parquet(str(folder), files, held_out=held_out), source=text)
    path = Path(text).expanduser()
    if os.path.isdir(path):
        return _open_folder(path, held_out)
    if path.suffix.lower() == ".tar":
        return read_shards(text, expand_pattern(str(path)), held_out=held_out)
    if path.suffix.lower() == ".parquet":
        return parquet.read_parquet(text, expand_pattern(str(path)), held_out=held_out)
    if path.suffix.lower() in MANIFESTS and os.path.isfile(path):
        return manifests.read_manifest(path, held_out=held_out)
    exists = os.path.exists(path)
    close = [] if exists else difflib.get_close_matches(text.partition(":")[0], CATALOG, 1)
    hint = "name a folder of class folders, a CSV or JSONL file of labels, Parquet or tar shards."
    if close:
        hint = f"did you mean {close[0]}?"
    elif path.suffix.lower() in _ARCHIVES:
        hint = "unpack it, and name the folder of class folders."
    raise UserError(f"{text} {'is not a data set' if exists else 'does not exist'}: {hint}")


def _open_folder(folder: Path, held_out: float) -> DataSet:
    """Parquet files or shards in the folder, or in its split folders, are read as such; else it has class folders."""
    folders = [folder, *(folder / name for name in sub_folders(folder) if name == "data" or name in SPLIT_NAMES)]
    for suffix, read in ((".parquet", parquet.read_parquet), (".tar", read_shards)):
        files = [path for parent in folders for path in parent.iterdir() if path.suffix.lower() == suffix]
        if files:
            return read(str(folder), files, held_out=held_out)
    return read_folder(folder, held_out=held_out)


def open_images(sources: Sequence[str | Path]) -> Split:
    """Open image files, and all those in folders, without labels (-1); a file given by name need not look like one."""
    if not sources:
        raise UserError("IMAGES are missing: name image files, or folders that have some.")
    if "" in sources:
        raise UserError('IMAGES have an empty name: remove it, or name "." for the current folder.')
    names: list[str] = []
    for source in sources:
        path = Path(source).expanduser()
        if os.path.isdir(path):
            names += [os.path.join(path, name) for name in find_images(path).names]
        elif os.path.isfile(path):
            names.append(str(path))
        else:
            raise UserError(f"{source} does not exist: name image files, or folders that have some.")
    names = list(dict.fromkeys(names))
    if not names:
        raise UserError(f"There is no image in {', '.join(map(str, sources))}: name files or folders.")
    return Split("images", names, np.full(len(names), -1, np.int64), (), FileReader("", names))


def restrict_train(
    data: DataSet, *, exclude: Collection[str] = (), subset: int = 0, subset_seed: int = 0, dev: float = 0.0
) -> DataSet:
    """Remove images from train, with a note for each reason: keys, all but `subset` images, and a dev split.

    The dev split is split off before the subset is drawn, so that subsets of any size are evaluated on the same images.
    """
    if exclude:
        data = _exclude(data, set(exclude))
    if dev:
        data = with_dev_split(data, dev)
    if subset:
        data = _draw_subset(data, subset, subset_seed)
    return data


def with_dev_split(data: DataSet, share: float) -> DataSet:
    """The data with a val split to select hyper-parameters on: its own beside test, else a share of each class."""
    if data.val is not None and data.test is not None:
        return data
    held = stratified(data.train.keys, strata(data.train), share)
    dev = data.train.select(np.flatnonzero(held), "dev")
    if not len(dev):
        raise UserError(f"{data.source} has too few images to keep {share:.0%} of each class: set data.dev=0.")
    train = data.train.select(np.flatnonzero(~held))
    note = f"{len(dev):,} of {len(data.train):,} training images are the dev split."
    return DataSet(data.source, train, val=dev, test=data.eval_split, notes=(*data.notes, note))


def with_test_split(data: DataSet) -> DataSet:
    """The data with the split used for the final evaluation, test if there is one, as its only held-out split."""
    return data if data.test is None or data.val is None else replace(data, val=None)


def nested_subset(count: int, images: int, seed: int) -> np.ndarray:
    """`count` of `images` indices in ascending order; a smaller draw with the same seed is a subset of it."""
    return np.sort(permute(np.arange(count), images, seed, epoch=0))


def _draw_subset(data: DataSet, count: int, seed: int) -> DataSet:
    train = data.train
    if count > len(train):
        raise UserError(f"data.subset={count} is more than the {len(train)} training images: choose a smaller one.")
    selected = train.select(nested_subset(count, len(train), seed))
    note = f"Trained on {count:,} of {len(train):,} images, drawn with seed {seed}."
    return replace(data, train=selected, notes=(*data.notes, note))


def _exclude(data: DataSet, exclude: set[str]) -> DataSet:
    kept = [index for index, key in enumerate(data.train.keys) if key not in exclude]
    left_out = len(data.train) - len(kept)
    held = (key for split in data.splits[1:] for key in split.keys)
    if not left_out and exclude.isdisjoint(held):  # all listed images may have been held out
        raise UserError(
            f"data.exclude names none of the training images of {data.source}: name a list of this data set."
        )
    note = f"Left out {left_out:,} training images that data.exclude names."
    return replace(data, train=data.train.select(np.array(kept, np.int64)), notes=(*data.notes, note))


def assign_folds(keys: Sequence[str], classes: np.ndarray, groups: np.ndarray, folds: int, seed: int) -> np.ndarray:
    """Which fold each image belongs to, (n,) int64 from 0.

    Each group goes to the fold with the fewest images of its class, then to the smallest one. Groups are taken from
    large to small and in the order of a hash of key and seed, so the order of files changes nothing. Images of the same
    entry in groups (n,) are one group; the class of its first image, in classes (n,), counts.
    """
    members: dict[int, list[int]] = {}
    for index, group in enumerate(groups.tolist()):
        members.setdefault(group, []).append(index)

    def rank(indices: list[int]) -> tuple[int, bytes]:
        return -len(indices), key_hash(min(keys[index] for index in indices), f"{seed} ")

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

    same = identical([image.pixel_digest for image in images])
    pairs = [(members[0], member) for members in same for member in members[1:]]
    pairs += [(first, second) for first, second, _ in near_pairs(images, np.zeros(len(images), np.int64), on_event)]
    for pair in pairs:
        first, second = sorted(map(root, pair))
        group[second] = first
    return np.array([root(index) for index in range(len(images))], np.int64)


def fold_data(data: DataSet, folds: int, *, workers: int = 0, on_event: EventHandler = ignore_events) -> list[DataSet]:
    """The data once per fold, with that fold of train as the test split and the others as train. Drawn with seed 0."""
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
        listed = ", ".join(f'"{train.classes[index]}"' for index in rare[:3]) + ", ..." * (len(rare) > 3)
        notes.append(f"{len(rare)} classes have fewer images than folds, so that some folds lack them: {listed}.")
    return [
        DataSet(
            data.source,
            train.select(np.flatnonzero(numbers != fold)),
            test=train.select(np.flatnonzero(numbers == fold), f"fold-{fold + 1}"),
            notes=(*data.notes, *notes),
        )
        for fold in range(folds)
    ]


_SAMPLE = 32


def median_short_side(split: Split) -> int:
    """The median length in pixels of the shorter side, of a sample of images; only headers are read."""
    sides = []
    for index in evenly(len(split), _SAMPLE).tolist():
        try:
            sides.append(_short_side(split.reader.read(index)))
        except (ImageError, OSError):
            continue
    return int(np.median(sides)) if sides else 224


def channels_of_images(split: Split, wanted: int = 3) -> int:
    """The channels that the first image needs that can be read and is not grey, see `channels_of`."""
    for index in evenly(len(split), _SAMPLE).tolist():
        with contextlib.suppress(ImageError, OSError):
            image = split.reader.read(index)
            bands = image.shape[2] if isinstance(image, np.ndarray) else describe(image).channels
            needed = channels_of(image, wanted)
            if bands > 1 or needed != wanted:
                return needed
    return wanted


def dim_warning(split: Split) -> tuple[str, ...]:
    """A warning if a sample of images has grey ones of 16 bits, of which 8 bits keep few levels."""
    largest = 0
    for index in evenly(len(split), _SAMPLE).tolist():
        with contextlib.suppress(ImageError, OSError):
            image = split.reader.read(index)
            if isinstance(image, bytes) and describe(image).bits > 8:
                largest = max(largest, largest_deep_value(image))
    return tuple(filter(None, [dim_note(largest)]))


def _short_side(image: bytes | np.ndarray) -> int:
    if isinstance(image, np.ndarray):
        return min(image.shape[:2])
    header = describe(image)
    return min(header.width, header.height)
