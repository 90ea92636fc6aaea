"""Where a task's files lie: ROOT/TASK or ROOT/DATASET, with TFDS's own files, Parquet, tar shards or class folders."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vitral.data.folders import sub_folders
from vitral.data.splits import SPLIT_NAMES, files_by_split, natural, split_name
from vitral.data.vtab.splits import stored_split
from vitral.data.vtab.tasks import Task
from vitral.errors import UserError

_RECORDS = re.compile(r".+-([a-z_]+)\.tfrecord-([0-9]+)-of-([0-9]+)")


@dataclass(frozen=True)
class Found:
    """A task's files by split, in TFDS's words; of class folders the splits alone."""

    folder: Path
    layout: str  # tfrecord, parquet, tar or folders
    files: Mapping[str, list[Path]]


def find_files(task: Task, root: Path) -> Found:
    """The task's files with all the splits it needs; the task's own folder goes before the data set's."""
    names = tuple(dict.fromkeys((task.name, task.dataset)))
    folder = next((root / name for name in names if (root / name).is_dir()), None)
    if folder is None:
        raise UserError(f"{root} has no folder {' or '.join(names)}: put the files of {task.builder} there.")
    found = _records(task, folder) or _parquet(folder) or _tar(folder) or _folders(folder)
    needed = {stored_split(expression): None for expression in task.expressions().values()}
    missing = [split for split in needed if split not in found.files]
    if missing:
        raise UserError(f"{found.folder} has no {' and no '.join(missing)} split: {task.name} needs it, so add it.")
    return found


def _records(task: Task, folder: Path) -> Found | None:
    """TFDS's files, which lie in folders for the setting and the version; a split must have all its shards."""
    matches = [(file, _RECORDS.fullmatch(file.name)) for file in sorted(folder.rglob("*.tfrecord-*"))]
    places = {file.parent for file, match in matches if match}
    if task.setting:
        places = {place for place in places if task.setting in place.relative_to(folder).parts} or places
    if not places:
        return None
    place = _only(folder, places)
    files: dict[str, list[Path]] = {}
    for file, match in matches:
        if match and file.parent == place:
            files.setdefault(match[1], []).append(file)
    for split, members in files.items():
        stated = int(members[0].name.rpartition("-")[2])
        if len(members) != stated:
            raise UserError(f"{place} has {len(members)} of the {stated} files of {split}: copy the others too.")
    return Found(place, "tfrecord", files)


def _parquet(folder: Path) -> Found | None:
    files = list(folder.rglob("*.parquet"))
    # The hub's svhn has a third split, "extra", which nobody asked for.
    files = [file for file in files if split_name(file.stem) or split_name(file.parent.name)] or files
    return _by_split(folder, "parquet", files)


def _tar(folder: Path) -> Found | None:
    return _by_split(folder, "tar", list(folder.rglob("*.tar")))


def _by_split(folder: Path, layout: str, files: list[Path]) -> Found | None:
    if not files:
        return None
    place = _only(folder, {file.parent.parent if split_name(file.parent.name) else file.parent for file in files})
    splits = files_by_split(str(place), files)
    return Found(place, layout, {_word(split): members for split, members in splits.items()})


def _folders(folder: Path) -> Found:
    splits = {_word(SPLIT_NAMES[name.lower()]): [] for name in sub_folders(folder) if name.lower() in SPLIT_NAMES}
    if not sub_folders(folder):
        raise UserError(f"{folder} is empty: put TFRecord or Parquet files, tar shards or class folders there.")
    return Found(folder, "folders", splits or {"train": []})


def _only(folder: Path, places: set[Path]) -> Path:
    if len(places) > 1:
        names = sorted((str(place.relative_to(folder)) for place in places), key=natural)
        raise UserError(f"{folder} has several forms of the data ({', '.join(names)}): keep one of them.")
    return next(iter(places))


def _word(split: str) -> str:
    return "validation" if split == "val" else split


def stated_lengths(folder: Path) -> dict[str, list[int]]:
    """Records of each file by split, as TFDS's dataset_info.json states them; empty where there is none."""
    file = folder / "dataset_info.json"
    if not file.is_file():
        return {}
    try:
        splits = json.loads(file.read_text(encoding="utf-8")).get("splits", [])
        return {split["name"]: [int(length) for length in split["shardLengths"]] for split in splits}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is not what TFDS writes ({error}): copy it again, or remove it.") from error
