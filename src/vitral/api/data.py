"""Input and output of verbs: the data set of a recipe, images to predict, and run folders.

A run is written neither among its images, nor among other files, nor over another run. `evaluate` never scores the
images that a run was trained on, by the content of each file.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, cast

import numpy as np
from torch import Tensor

from vitral.api.checkpoints import Source
from vitral.atomic import check_writable
from vitral.data.catalog import CATALOG
from vitral.data.contents import RunContents, content_hashes, not_hashed_reason
from vitral.data.images import ImageError, PILImage, UnreadableImage
from vitral.data.objects import ObjectReader
from vitral.data.pixels import eight_bit_array
from vitral.data.sources import DataSet, Split, open_data, open_images, restrict_train, with_test_split
from vitral.data.splits import SPLIT_NAMES
from vitral.errors import UserError
from vitral.evaluation.duplicates import read_exclusions
from vitral.recipe import Recipe, from_file, with_dev
from vitral.recipe_schema import DataRecipe
from vitral.serving import unread
from vitral.validation import read_object

Encoded = bytes | bytearray | memoryview
# A file or folder; a PIL image, uint8 pixels (height, width, channels) or (channels, height, width) of a tensor; an
# encoded image, or an open file of one.
ImageLike = str | Path | PILImage | np.ndarray | Tensor | Encoded | BinaryIO
Images = ImageLike | Sequence[ImageLike] | Iterator[ImageLike]
_DEV = 0.1  # share of train to select weights by, if the user requests this without naming images for it
_BEGUN = ("recipe.toml", "protocol.json", "sweep", "seed-*", "fold-*")  # what a run leaves in its folder


class Examples(Protocol):
    """Labelled images in memory: a torch Dataset, a datasets.Dataset, a list of (image or path, label), or a pair
    (train, test) of these."""

    def __getitem__(self, index: Any, /) -> Any: ...


Data = str | Path | Examples


def open_restricted(data: Data, recipe: Recipe) -> DataSet:
    """The data with what the recipe leaves out of it; held-out images are always drawn with seed 0, so that runs with
    other seeds are tested on the same images."""
    return restricted(open_data(data, held_out=recipe.data.held_out), recipe)


def restricted(opened: DataSet, recipe: Recipe) -> DataSet:
    """Opened data with what the recipe leaves out of its training images."""
    settings = recipe.data
    return restrict_train(
        opened, exclude=_excluded(recipe), subset=settings.subset, subset_seed=settings.subset_seed, dev=settings.dev
    )


def _excluded(recipe: Recipe) -> list[str]:
    return read_exclusions(Path(recipe.data.exclude)) if recipe.data.exclude else []


def open_as_trained(data: str | Path, recipe: Recipe, train: str) -> DataSet | None:
    """The data as in a run whose training images have this fingerprint; None if it is other data."""
    _excluded(recipe)  # raises if the list is missing: without it the training images would seem to be others
    try:
        opened = open_restricted(data, recipe)
    except UserError:  # too few images for what the recipe draws, or none of those listed: another data set
        return None
    return opened if opened.train.fingerprint() == train else None


def open_to_probe(data: str | Path, source: Path | None) -> DataSet:
    """All of the data with its test split. Where the data has no splits, a run's share of held-out images is used, so
    that its weights are not tested on images that they were trained on."""
    folder = source if source is None or source.is_dir() else source.parent
    recipe = None if folder is None else folder / "recipe.toml"
    share = from_file(recipe).data.held_out if recipe is not None and recipe.is_file() else 0.0
    return with_test_split(open_data(data, held_out=share or DataRecipe().held_out))


def open_to_train(data: Data, recipe: Recipe) -> tuple[DataSet, float]:
    """The same, with images to train on, and the share of train that is the dev split.

    A recipe with patience selects weights by their evaluations. Its result is of test, so if the data has no val
    beside test and the recipe no `data.dev`, a tenth of train becomes the dev split.
    """
    whole = open_data(data, held_out=recipe.data.held_out)
    dev = recipe.data.dev
    if recipe.patience and (whole.val is None or whole.test is None):
        dev = dev or _DEV
    return _to_train(data, restricted(whole, with_dev(recipe, dev))), dev


def open_to_choose(
    data: str | Path, recipe: Recipe, dev: float, *, uses_val: bool = True
) -> tuple[DataSet, DataSet | None]:
    """The data to train on, and the same with a split to choose on: the source's val, else a share `dev` of train.

    With `uses_val=False` a val split beside test is left out, and the share of train is used.
    """
    whole = open_data(data, held_out=recipe.data.held_out)
    whole = whole if uses_val else with_test_split(whole)
    opened = _to_train(data, restricted(whole, with_dev(recipe, 0.0)))
    if not dev and (opened.val is None or opened.test is None):
        return opened, None
    return opened, restricted(whole, with_dev(recipe, dev))


def _to_train(data: Data, opened: DataSet) -> DataSet:
    if not len(opened.train):
        raise UserError(f"{data} has no images to train on: it is for testing only; pass data with a train split.")
    return opened


def open_any_images(images: Images) -> Split:
    """Open images to predict on, as a split without labels.

    Images are files, folders of them, PIL images, arrays (height, width, channels) and tensors (channels, height,
    width) of uint8 pixels or of values from 0 to 1, and encoded images, as bytes or in open files; one, several, or an
    array or tensor of several. Those in memory are called "image 0", "image 1", ... by their position.
    """
    several = _several(images)
    paths = [image for image in several if isinstance(image, str | Path)]
    if len(paths) == len(several):
        return open_images(paths)
    keys: list[str] = []
    opened: list[str | bytes | np.ndarray] = []
    for position, image in enumerate(several):
        if isinstance(image, str | Path):
            files = open_images([image]).keys
            keys += files
            opened += files
        else:
            keys.append(f"image {position}")
            opened.append(_in_memory(image, keys[-1]))
    return Split("images", keys, np.full(len(keys), -1, np.int64), (), ObjectReader(opened.__getitem__, keys))


def _several(images: Images) -> Sequence[ImageLike]:
    if isinstance(images, str | Encoded):
        return [images]
    dimensions = getattr(images, "ndim", 0)
    if dimensions == 1:  # paths in an array, or in a column of a data frame
        return cast(Any, images).tolist()
    if dimensions == 4 or (isinstance(images, Iterator) and not hasattr(images, "read")):
        return list(cast(Any, images))
    if isinstance(images, Sequence):
        return images
    return [cast(ImageLike, images)]


def _in_memory(image: PILImage | np.ndarray | Tensor | Encoded | BinaryIO, name: str) -> bytes | np.ndarray:
    """An encoded image as it is, others as uint8 pixels (height, width, channels)."""
    encoded = _contents(cast(BinaryIO, image), name) if hasattr(image, "read") else image
    if isinstance(encoded, Encoded):
        return bytes(encoded)
    try:
        return eight_bit_array(image, name)
    except ImageError as error:
        raise UserError(f"cannot read {name}: {error}; pass a complete image.") from error


def _contents(stream: BinaryIO, name: str) -> bytes:
    """All of an open file, from its beginning as Pillow reads it: an image may just have been written to it."""
    try:
        if stream.seekable():
            stream.seek(0)
        return stream.read()
    except (OSError, ValueError) as error:
        raise UserError(f'cannot read {name} ({error}): open its file with mode "rb".') from error


def unread_images(split: Split, read: Collection[str]) -> tuple[UnreadableImage, ...]:
    """The images of a split whose keys are not among those that were read, with the reasons."""
    keys = frozenset(read)
    return tuple(unread(split, index) for index, key in enumerate(split.keys) if key not in keys)


def known_data() -> dict[str, str]:
    """Names and descriptions of the data sets in the catalogue."""
    return {name: entry.about for name, entry in CATALOG.items()}


def data_name(data: object) -> str:
    """The source as it was given; of data in memory, its class."""
    return str(data) if isinstance(data, str | Path) else f"{type(data).__name__} in memory"


def check_out(out: str | Path, data: object) -> None:
    """Refuse a run folder that lies among the images of the data, holds other files, or cannot be written; without one
    there will be one in runs/."""
    source = str(data) if isinstance(data, str | Path) else ""
    name, _, location = source.partition(":")
    source = location if name in known_data() else source
    folder = Path(source).expanduser()
    check_folder(out, [folder] if source and folder.is_dir() else [])


def check_folder(out: str | Path, data: Iterable[Path], begun: Sequence[str] = _BEGUN) -> None:
    """The same for several folders of data, existing or not; `begun` are patterns of what a run to resume has."""
    folder = Path(out or "runs")
    for images in (images for source in data for images in _image_folders(source)):
        if folder.resolve().is_relative_to(images.resolve()):
            raise UserError(
                f"the run folder {folder} is inside the data folder {images}, where its files would be read as images: "
                "choose another with --out."
            )
    check_writable(folder / "recipe.toml")
    if out and folder.is_dir() and _holds_others(folder, begun):
        raise UserError(f"{folder} contains other files and no run to resume: choose another folder with --out.")


def _image_folders(data: Path) -> list[Path]:
    """The folders that hold class folders: those of the splits, or the data folder itself."""
    inside = data.iterdir() if data.is_dir() else ()
    return [path for path in inside if path.is_dir() and path.name.lower() in SPLIT_NAMES] or [data]


def _holds_others(folder: Path, begun: Sequence[str]) -> bool:
    if any(any(folder.glob(pattern)) for pattern in begun):
        return False
    names = (path.name for path in folder.iterdir() if not path.name.startswith("."))
    return any(name not in ("state", "tensorboard", "vtab-ids") for name in names)


def new_folder(data: str | Path, recipe: Recipe) -> Path:
    """runs/NAME, or runs/NAME-2, ... where that exists: no run is overwritten by another."""
    name = Path(str(data)).expanduser().name.split(".")[0] or "run"
    weights = Path(recipe.init)
    weights = weights.parent if weights.name.startswith("seed-") else weights
    model = weights.name.split(".")[0] if recipe.init else re.sub("[/+@]", "-", recipe.model)
    base = f"{name}-{model}"
    number = 1
    while (folder := Path("runs") / (base if number == 1 else f"{base}-{number}")).exists():
        number += 1
    return folder


class EvalImages(NamedTuple):
    """What is scored."""

    split: Split
    is_new: np.ndarray  # (n,) bool: images that were not the run's, scored apart from those that it held out
    notes: tuple[str, ...]
    held_out: bool = False  # whether the run held out the others, and may have fitted its temperature on them


class RunRecord(NamedTuple):
    """A run's folder, and its record of its images."""

    folder: Path
    contents: RunContents | None  # None in a folder without split.json
    fingerprints: dict[str, str]  # of data.json

    def fitted(self, split: Split) -> bool:
        """Whether the run evaluated this split during training, and so fitted its temperature on it."""
        stated = self.fingerprints
        return split.fingerprint() == stated.get("selected", stated["evaluated"])


def eval_images(sources: Sequence[Source], data: str | Path, name: str) -> EvalImages:
    """Choose the images to evaluate: those that all of the models can be evaluated on, and none was trained on.

    `name` is that of the split; by default the one that the run was evaluated on, else the first that is held out.
    Raises UserError if there is no such split, or no image is left.
    """
    first, *others = [_images_of(source, data, name) for source in sources]
    for other in others:
        positions = {key: index for index, key in enumerate(other.split.keys)}
        kept = [index for index, key in enumerate(first.split.keys) if key in positions]
        if not kept:
            raise UserError("each image was trained on by one of the models: evaluate them on other images.")
        same = [positions[first.split.keys[index]] for index in kept]
        left = len(first.split) - len(kept)
        note = (f"{left:,} more are left out, which another model was trained on or not evaluated on.",) if left else ()
        first = EvalImages(
            first.split if not left else first.split.select(np.array(kept)),
            first.is_new[kept] & other.is_new[same],
            (*first.notes, *note),
            first.held_out or other.held_out,
        )
    return first


def is_recorded(source: Source) -> bool:
    """Whether the folder of the weights tells which images they were trained on."""
    return _run_record(source) is not None


def _images_of(source: Source, data: str | Path, name: str) -> EvalImages:
    """The images to evaluate one model on; if it is a run, those that it was trained on are left out."""
    record = _run_record(source)
    if record is None:
        return _all(*_candidates(data, name))
    split = _same_split(record, data, name)
    contents = record.contents
    if split is not None and (contents is None or contents.reason or not_hashed_reason([split])):
        return _all(split, _held_out_note(split))._replace(held_out=record.fitted(split))
    if split is not None and contents is not None:
        hashes = content_hashes(split)
        if split.name in contents.splits and hashes == contents.splits[split.name].hashes:
            repeated = contents.repeated(split.name)
            equal = f"{repeated:,} of them equal{'s' * (repeated == 1)} a training image byte for byte."
            scored = _all(split, _held_out_note(split), *([equal] if repeated else []))
            return scored._replace(held_out=record.fitted(split))
    run_split = name if contents is not None and name in contents.splits and name != "train" else ""
    split, note = _candidates(data, name, run_split, contents.evaluated if contents is not None else "")
    reason = "the run has no split.json" if contents is None else contents.reason or not_hashed_reason([split])
    if contents is None or reason:
        return _all(split, note, f"Whether the model was trained on some of them is unknown: {reason}.")
    return _without_trained(split, note, contents, run_split)


def _run_record(source: Source) -> RunRecord | None:
    path = None if isinstance(source, tuple) else Path(source).expanduser()
    folder = path if path is None or path.is_dir() else path.parent
    if folder is None or not (folder / "recipe.toml").is_file() or not (folder / "data.json").is_file():
        return None
    fingerprints = read_object(folder / "data.json", "train", "evaluated")
    return RunRecord(folder, RunContents.read(folder / "split.json"), fingerprints)


def _same_split(record: RunRecord, data: str | Path, name: str) -> Split | None:
    """The held-out split of data whose images are named as in the run; None if some are not."""
    recipe = from_file(record.folder / "recipe.toml")
    same = open_as_trained(data, recipe, record.fingerprints["train"])
    return _split_named(same, name, record.fingerprints["evaluated"]) if same is not None else None


def _candidates(data: str | Path, name: str, run_split: str = "", evaluated: str = "") -> tuple[Split, str]:
    """A held-out split of the data, or all its images if it has none: the one that is named, else the one evaluated
    by the run. `run_split` is the name if the run has a split of that name, which data without splits need not have."""
    opened = open_data(data, held_out=0.0)
    name = name or (evaluated if evaluated in [split.name for split in opened.splits[1:]] else "")
    split = _split_named(opened, "" if run_split and len(opened.splits) == 1 else name)
    if split is None:
        return opened.train, f"All {len(opened.train):,} images are scored."
    return split, f"The {len(split):,} images of the {split.name} split are scored."


def _without_trained(split: Split, note: str, contents: RunContents, name: str) -> EvalImages:
    """Exclude images that the run was trained on, and mark those that are new."""
    hashes = content_hashes(split)

    def among(names: list[str]) -> np.ndarray:
        digests = contents.hashes(names)
        return np.array([digest in digests for digest in hashes], bool)

    trained = among(["train"])
    held_out_splits = [split_name for split_name in contents.splits if split_name != "train"]
    # Data without splits mixes all of the run's; a split of the data is scored whole, whatever the run called it.
    requested = [name or contents.evaluated] if split.name == "train" else held_out_splits
    held_out, new = among(requested) & ~trained, ~(trained | among(held_out_splits))
    excluded = ~(trained | held_out | new)
    if new.all():
        return _all(split, note)
    if not (held_out | new).any():
        raise UserError(f"the model was trained on all {len(split):,} images: evaluate it on other images.")
    counts = f"{trained.sum():,} of {len(split):,} images were trained on and are left out"
    if excluded.any():
        names = " and ".join(split_name for split_name in held_out_splits if split_name not in requested)
        counts += f", {excluded.sum():,} of its {names} split as well"
    scored = np.flatnonzero(held_out | new)
    is_new = new[scored] & held_out.any()  # if nothing was held out there is nothing to keep them apart from
    note = f"{counts}; {held_out.sum():,} held out, {new.sum():,} new."
    return EvalImages(split.select(scored), is_new, (note,), held_out=bool(held_out.any()))


def _all(split: Split, *notes: str) -> EvalImages:
    return EvalImages(split, np.zeros(len(split), bool), notes)


def _held_out_note(split: Split) -> str:
    held_out = f"the {len(split):,} held-out images of its {split.name} split"
    return f"The model was trained on this data: only {held_out} are scored."


def _split_named(data: DataSet, name: str, evaluated: str = "") -> Split | None:
    """The split with this name; without a name the one with the fingerprint that a run evaluated, else the first."""
    held_out = list(data.splits[1:])
    matching = [split for split in held_out if name in ("", split.name)]
    if name and not matching:
        choices = " or ".join(f"--split {split.name}" for split in held_out)
        raise UserError(f'{data.source} has no split "{name}" to score: {f"use {choices}" if choices else "omit it"}.')
    if not name and evaluated:
        matching = [split for split in held_out if split.fingerprint() == evaluated] or matching
    return matching[0] if matching else None
