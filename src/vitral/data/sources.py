"""The front door: whatever holds labelled images to a DataSet, and image files to a Split without labels.

| source | is |
|---|---|
| a folder | one sub-folder per class, with or without train, val, test around them |
| x.csv, x.tsv, x.jsonl | a manifest: a path and one or several labels per line, perhaps a split |
| x.parquet, or a folder of them | image bytes and labels, in the layout of the Hugging Face hub |
| x-{000..099}.tar, x-*.tar, or a folder of them | WebDataset shards |
| hf:owner/name | a data set of the hub, fetched when asked for by this name only |
| cifar10:FOLDER, or cifar10, digits | a name of the catalogue; write ./digits for a folder that is called so |
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from vitral.data import manifests, parquet
from vitral.data.catalog import CATALOG, is_known, open_known
from vitral.data.folders import FileReader, find_images, read_folder, sub_folders
from vitral.data.shards import expand, read_shards
from vitral.data.splits import HELD_OUT, SPLIT_NAMES, DataSet, Reader, Split
from vitral.errors import UserError

__all__ = ["DataSet", "Reader", "Split", "open_data", "open_images"]


def open_data(source: str | Path, *, seed: int = 0, held_out: float = HELD_OUT) -> DataSet:
    """Open any source of the table above.

    `test` is the source's val split, else its test split; with both, test is left alone and the notes say so. Without
    either, `held_out` of each class is drawn with `seed`; `held_out=0` leaves everything in train and test None,
    and takes a single class too.
    """
    text = str(source)
    if isinstance(source, str) and is_known(text):
        return open_known(text, held_out=held_out)
    if text.startswith("hf:"):
        folder, files = parquet.fetch(text)
        return replace(parquet.read_parquet(str(folder), files, seed=seed, held_out=held_out), source=text)
    path = Path(text).expanduser()
    if os.path.isdir(path):
        return _open_folder(path, seed, held_out)
    if path.suffix.lower() == ".tar":
        return read_shards(text, expand(str(path)), seed=seed, held_out=held_out)
    if path.suffix.lower() == ".parquet":
        return parquet.read_parquet(text, expand(str(path)), seed=seed, held_out=held_out)
    if path.suffix.lower() in manifests.SUFFIXES and os.path.isfile(path):
        return manifests.read_manifest(path, seed=seed, held_out=held_out)
    near = difflib.get_close_matches(text.partition(":")[0], CATALOG, 1)
    hint = f"did you mean {near[0]}?" if near else "name a folder of class folders, a manifest, Parquet or tar shards."
    raise UserError(f"{text} is no data set: {hint}")


def _open_folder(folder: Path, seed: int, held_out: float) -> DataSet:
    """Parquet files or shards in the folder, or in folders for splits, make it such a source; else it has classes."""
    inside = [folder, *(folder / name for name in sub_folders(folder) if name == "data" or name in SPLIT_NAMES)]
    for suffix, read in ((".parquet", parquet.read_parquet), (".tar", read_shards)):
        files = [path for place in inside for path in place.iterdir() if path.suffix.lower() == suffix]
        if files:
            return read(str(folder), files, seed=seed, held_out=held_out)
    return read_folder(folder, seed=seed, held_out=held_out)


def open_images(sources: Sequence[str | Path]) -> Split:
    """Image files, and all those in folders, without labels (-1). A file given by name is taken whatever it is."""
    if not sources:
        raise UserError("IMAGES are missing: name image files, or folders that have some.")
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
