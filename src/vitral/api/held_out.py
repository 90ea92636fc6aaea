"""The images that `evaluate` scores: never those that a run was trained on, by the content of each file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vitral.api.checkpoints import Source
from vitral.api.data import open_as_trained
from vitral.data.contents import RunContents, content_hashes, not_hashed_reason
from vitral.data.sources import DataSet, Split, open_data
from vitral.errors import UserError
from vitral.recipe import from_toml


class EvalImages(NamedTuple):
    """What is scored."""

    split: Split
    is_new: np.ndarray  # (n,) bool: images that were not the run's, scored apart from those that it held out
    notes: tuple[str, ...]
    held_out: bool = (
        False  # whether the others are images that the run held out, and may have fitted its temperature on
    )


class RunRecord(NamedTuple):
    """A run's folder, and what it states of its images."""

    folder: Path
    contents: RunContents | None  # None in a folder without split.json
    fingerprints: dict[str, str]  # of data.json

    def fitted(self, split: Split) -> bool:
        """Whether the run evaluated this split during training, and so fitted its temperature on it."""
        stated = self.fingerprints
        return split.fingerprint() == stated.get("selected", stated["evaluated"])


def eval_images(sources: Sequence[Source], data: str | Path, name: str) -> EvalImages:
    """Choose the images to evaluate: those that all of the models can be evaluated on.

    Args:
        sources: what is evaluated; the images that one of them was trained on are left out.
        data: the data set.
        name: of the split; by default the one that the run was evaluated on, else the first that is held out.

    Raises:
        UserError: there is no such split, or no image is left.
    """
    first, *others = [_images_of(source, data, name) for source in sources]
    for other in others:
        positions = {key: index for index, key in enumerate(other.split.keys)}
        kept = [index for index, key in enumerate(first.split.keys) if key in positions]
        if not kept:
            raise UserError(
                "each image was trained on by one of the models: evaluate them on images that none has seen."
            )
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


def _images_of(source: Source, data: str | Path, name: str) -> EvalImages:
    """The images to evaluate one model on.

    Args:
        source: the model; where it is a run, the images that it was trained on are left out.
        data: the data set.
        name: of the split; by default the one that the run was evaluated on, else the first that is held out.

    Raises:
        UserError: there is no such split, or the model was trained on all of the images.
    """
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
            trained = contents.hashes(["train"])
            repeated = sum(digest in trained for digest in hashes)
            scored = _all(split, _held_out_note(split), *_repeated_note(repeated))
            return scored._replace(held_out=record.fitted(split))
    known = name if contents is not None and name in contents.splits and name != "train" else ""
    split, note = _candidates(data, name, known, contents.evaluated if contents is not None else "")
    reason = "the run has no split.json" if contents is None else contents.reason or not_hashed_reason([split])
    if contents is None or reason:
        return _all(split, note, f"Whether the model was trained on some of them is unknown: {reason}.")
    return _without_trained(split, note, contents, known)


def _run_record(source: Source) -> RunRecord | None:
    path = None if isinstance(source, tuple) else Path(source).expanduser()
    folder = path if path is None or path.is_dir() else path.parent
    if folder is None or not (folder / "recipe.toml").is_file() or not (folder / "data.json").is_file():
        return None
    contents = folder / "split.json"
    return RunRecord(
        folder,
        RunContents.from_json(contents.read_text("utf-8")) if contents.is_file() else None,
        json.loads((folder / "data.json").read_text("utf-8")),
    )


def _same_split(record: RunRecord, data: str | Path, name: str) -> Split | None:
    """The held-out split of data whose images are named as in the run; None where some are not."""
    recipe = from_toml((record.folder / "recipe.toml").read_text("utf-8"))
    same = open_as_trained(data, recipe, record.fingerprints["train"])
    return _split_named(same, name, record.fingerprints["evaluated"]) if same is not None else None


def _candidates(data: str | Path, name: str, known: str = "", evaluated: str = "") -> tuple[Split, str]:
    """A held-out split of the data, or all its images where it has none.

    Args:
        data: the data set.
        name: of the split that is asked for, if any.
        known: the same, where the run has a split of that name, which data without splits need not have.
        evaluated: of the split to choose, where the data has it and none is asked for.
    """
    opened = open_data(data, held_out=0.0)
    name = name or (evaluated if evaluated in [split.name for split in opened.splits[1:]] else "")
    split = _split_named(opened, "" if known and len(opened.splits) == 1 else name)
    if split is None:
        return opened.train, f"All {len(opened.train):,} images are scored."
    return split, f"The {len(split):,} images of the {split.name} split are scored."


def _without_trained(split: Split, note: str, contents: RunContents, name: str) -> EvalImages:
    """Leave out what the run was trained on, and keep apart what it held out and what is new."""
    hashes = content_hashes(split)

    def among(names: list[str]) -> np.ndarray:
        digests = contents.hashes(names)
        return np.array([digest in digests for digest in hashes], bool)

    trained = among(["train"])
    others = [other for other in contents.splits if other != "train"]
    # Data without splits mixes all of the run's; a split of the data is scored whole, whatever the run called it.
    asked = [name or contents.evaluated] if split.name == "train" else others
    held, new = among(asked) & ~trained, ~(trained | among(others))
    aside = ~(trained | held | new)
    if new.all():
        return _all(split, note)
    if not (held | new).any():
        raise UserError(f"the model was trained on all {len(split):,} images: evaluate it on images that it never saw.")
    counts = f"{trained.sum():,} of {len(split):,} images were trained on and are left out"
    if aside.any():
        names = " and ".join(other for other in others if other not in asked)
        counts += f", {aside.sum():,} of its {names} split as well"
    scored = np.flatnonzero(held | new)
    is_new = new[scored] & held.any()  # where nothing was held out there is nothing to keep them apart from
    note = f"{counts}; {held.sum():,} held out, {new.sum():,} new."
    return EvalImages(split.select(scored), is_new, (note,), held_out=bool(held.any()))


def _all(split: Split, *notes: str) -> EvalImages:
    return EvalImages(split, np.zeros(len(split), bool), notes)


def _held_out_note(split: Split) -> str:
    held_out = f"the {len(split):,} held-out images of its {split.name} split"
    return f"The model was trained on this data: only {held_out} are scored."


def _repeated_note(count: int) -> tuple[str, ...]:
    return (f"{count:,} of them equal{'s' * (count == 1)} a training image byte for byte.",) if count else ()


def _split_named(data: DataSet, name: str, evaluated: str = "") -> Split | None:
    """The split with this name; without a name the one with the fingerprint that a run evaluated, else the first."""
    held_out = list(data.splits[1:])
    matching = [split for split in held_out if name in ("", split.name)]
    if name and not matching:
        choices = " or ".join(f"--split {split.name}" for split in held_out)
        raise UserError(
            f'{data.source} has no split "{name}" to score: {f"use {choices}" if choices else "leave it out"}.'
        )
    if not name and evaluated:
        matching = [split for split in held_out if split.fingerprint() == evaluated] or matching
    return matching[0] if matching else None
