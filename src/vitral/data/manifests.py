"""Manifests: CSV, TSV or JSON lines with a path, one or several labels, and optionally a split in each line.

CSV begins with the names of its columns. Several labels are separated by "|" in CSV and are a list in JSON lines, which
is empty for an image of no class; one such line makes the whole manifest multi-label. Paths are relative to the
manifest's folder. Where no line is of the split train, the data is for testing only and train is empty.
"""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Iterator, Mapping
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from vitral.data.folders import FileReader, find_images
from vitral.data.splits import SPLIT_NAMES, DataSet, RawSplit, make_dataset
from vitral.errors import UserError, shorten

_COLUMNS = {
    **dict.fromkeys(("path", "file", "image", "filename", "file_name", "filepath"), "path"),
    **dict.fromkeys(("label", "labels", "class", "classes"), "label"),
    "split": "split",
}
_NO_TEXT = re.compile(r"[\ud800-\udc7f\udd00-\udfff]")  # half of a pair; the others stand for bytes of file names


class ManifestRow(NamedTuple):
    line: int
    path: str
    labels: tuple[str, ...]
    split: str
    listed: bool  # whether its labels are a list


def read_manifest(path: Path, *, held_out: float) -> DataSet:
    """Read a manifest; `held_out` as in `make_dataset`."""
    rows = [_with_slashes(path.parent, _row(path, line, entry)) for line, entry in _entries(path)]
    multilabel = any(row.listed for row in rows)
    if not rows:
        raise UserError(f"{path} lists no images: it needs a path and a label in each line.")
    _refuse_empty(path, rows, multilabel)
    _refuse_negative(path, rows)
    present, notes = _present(path, rows)
    if held_out:  # else the data is not opened for training
        _refuse_without_training(path, rows, present)
    rows, repeated = _deduplicate(path, present)
    if repeated:
        notes.append(f"{repeated} repeated line{'s' * (repeated > 1)} of {path.name} {_is(repeated)} left out.")
    parts: dict[str, RawSplit] = {}
    for split in _splits(path, rows):
        names = [row.path for row in rows if row.split == split]
        labels = [row.labels for row in rows if row.split == split]
        plain = labels if multilabel else [label for (label,) in labels]
        parts[split or "train"] = RawSplit(names, plain, FileReader(str(path.parent), names))
    if "train" not in parts:
        notes.append("No image is of the split train: this is for testing only.")
    try:
        return make_dataset(str(path), parts, held_out=held_out, notes=notes)
    except UserError as error:  # the lines left out may be its cause
        raise UserError(" ".join([*notes, str(error)])) from error


def without_pandas(data: Any) -> Any:
    """Data frames as `(paths, labels)`, by split if they have such a column, and their columns as lists.

    They are recognised by their attributes, also in tuples and mappings; anything else is returned as it is.
    """
    if isinstance(data, tuple):
        return tuple(map(without_pandas, data))
    if isinstance(data, dict):
        return {name: without_pandas(value) for name, value in data.items()}
    if _is_frame(data):
        return _from_frame(data)
    return data.tolist() if getattr(data, "ndim", 0) == 1 and hasattr(data, "tolist") else data


def frame_in(data: Any) -> Any:
    """The data frame that the data is, or consists of; None if it is none."""
    parts = data.values() if isinstance(data, Mapping) else data if isinstance(data, tuple) else (data,)
    return next(filter(_is_frame, parts), None)


def _is_frame(value: Any) -> bool:
    return hasattr(value, "columns") and hasattr(value, "iloc")


def _from_frame(frame: Any) -> Any:
    _require_columns(Path("The data frame"), frame.columns)
    columns = {_COLUMNS.get(str(name).strip().lower()): frame[name].tolist() for name in reversed(frame.columns)}
    paths, labels = columns["path"], columns["label"]
    if any(isinstance(label, str) and "|" in label for label in labels):
        labels = [str(label).split("|") for label in labels]
    if "split" not in columns:
        return paths, labels
    rows: dict[str, tuple[list[str], list[Any]]] = {}
    for path, label, split in zip(paths, labels, columns["split"], strict=True):
        listed = rows.setdefault(str(split), ([], []))
        listed[0].append(path)
        listed[1].append(label)
    return rows


def _entries(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers, and each line's values by our column names."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            if path.suffix.lower() in (".csv", ".tsv"):
                yield from _csv_entries(path, stream)
            else:
                for number, line in enumerate(stream, 1):
                    if line.strip():
                        yield number, _parsed(path, number, line)
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not written in UTF-8: save it as such.") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read as a manifest: {error}.") from error


def _csv_entries(path: Path, stream: TextIO) -> Iterator[tuple[int, dict[str, Any]]]:
    """Entries of a CSV file, whose separator is the one that its header has most of; rows of empty cells, which Excel
    writes, are left out."""
    header = stream.readline()
    stream.seek(0)
    delimiter = "\t" if path.suffix.lower() == ".tsv" else max(",;\t", key=header.count)
    rows = csv.reader(stream, delimiter=delimiter, strict=True)
    end = 0  # the last line of the row before
    try:
        names = next(rows, [])
        _require_columns(path, names)
        end = rows.line_num
        for cells in rows:
            end = rows.line_num
            if any(cell.strip() for cell in cells[len(names) :]):
                raise UserError(
                    f"{path}, line {end}: {len(cells)} values for {len(names)} columns; put a value with separators in "
                    'it in "...".'
                )
            if any(cell.strip() for cell in cells):
                yield end, _renamed(dict(zip(names, cells, strict=False)))
    except csv.Error as error:
        lines = f"line {end + 1}" if rows.line_num <= end + 1 else f"lines {end + 1} to {rows.line_num}"
        raise UserError(
            f'{path}, {lines}: not valid CSV ({error}); put a value that has quotes or separators in it in "...", and '
            'double each quote inside, as in "a ""b"" c".'
        ) from error


def _require_columns(path: Path, names: Any) -> None:
    columns = {_COLUMNS.get(str(name).strip().lower()) for name in names}
    for column in ("path", "label"):
        if column not in columns:
            has = shorten(", ".join(map(str, names))) or "nothing"
            raise UserError(
                f'{path} has no column "{column}": its columns are {has}, and must be named as in "path,label" (in the '
                "first line of a CSV file); several labels of an image are joined by |."
            )


def _parsed(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:  # also of too many digits or brackets
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "a value is too long or too deep"
        raise UserError(f"{path}, line {number} is not valid JSON: {reason}.") from error
    if not isinstance(entry, dict):
        raise UserError(f'{path}, line {number}: write {{"path": ..., "label": ...}} in each line.')
    return _renamed(entry)


def _renamed(entry: dict[Any, Any]) -> dict[str, Any]:
    return {_COLUMNS.get(str(name).strip().lower(), str(name)): value for name, value in entry.items()}


def _row(path: Path, line: int, entry: dict[str, Any]) -> ManifestRow:
    where = f"{path}, line {line}"
    name, label = entry.get("path"), entry.get("label")
    if not isinstance(name, str) or not name.strip():
        raise UserError(f"{where} has no path: name the image file.")
    listed = isinstance(label, list) or (isinstance(label, str) and "|" in label)
    labels = label if isinstance(label, list) else label.split("|") if isinstance(label, str) else [label]
    plain = tuple("" if item is None or isinstance(item, dict | list) else str(item).strip() for item in labels)
    if _NO_TEXT.search("".join((name, *plain))):
        raise UserError(f"{where} has a path or label that is not valid Unicode: correct it.")
    split = str(entry.get("split") or "").strip().lower()
    if split and split not in SPLIT_NAMES:
        raise UserError(f'{where} has the split "{shorten(split)}": write train, val or test.')
    return ManifestRow(line, name.strip(), tuple(dict.fromkeys(plain)), SPLIT_NAMES.get(split, ""), listed)


def _with_slashes(folder: Path, row: ManifestRow) -> ManifestRow:
    """The row with the path as it is written here, if its manifest comes from Windows."""
    if "\\" not in row.path or os.path.isfile(folder / row.path):
        return row
    return row._replace(path=row.path.replace("\\", "/"))


def _refuse_empty(path: Path, rows: list[ManifestRow], multilabel: bool) -> None:
    for row in rows:
        if "" in row.labels:
            fix = '; an image of no class is written "label": [] in a .jsonl file' if multilabel else ""
            raise UserError(f"{path}, line {row.line} has an empty label: name the class of {row.path}{fix}.")


def _refuse_negative(path: Path, rows: list[ManifestRow]) -> None:
    """Where all labels are numbers they are class indices, and -1 commonly means "unknown"."""
    if all(label.removeprefix("-").isdecimal() for row in rows for label in row.labels):
        for row in rows:
            if any(label.startswith("-") for label in row.labels):
                raise UserError(
                    f"{path}, line {row.line}: the label {row.labels[0]} is out of range; classes begin at 0."
                )


def _present(path: Path, rows: list[ManifestRow]) -> tuple[list[ManifestRow], list[str]]:
    """The rows whose file exists, and a note about the others."""
    exists = [os.path.isfile(path.parent / row.path) for row in rows]
    present, missing = list(compress(rows, exists)), exists.count(False)
    if not missing:
        return present, []
    first = rows[exists.index(False)].path
    if not present:
        raise UserError(
            f"None of the files that {path} names exists, such as {path.parent / first}: "
            f"correct the paths{_similar(path.parent, first)}."
        )
    return present, [f"{missing} of {len(rows)} files in {path.name} {_is(missing)} missing, such as {first}."]


def _similar(folder: Path, name: str) -> str:
    """The advice to write an image's path for a name that may lack its folder or its ending."""
    wanted = Path(name).name
    paths = (path for path in find_images(folder).names if wanted in (Path(path).name, Path(path).stem))
    path = next(paths, "")
    return f" (instead of {name}, write {path})" if path else ""


def _refuse_without_training(path: Path, rows: list[ManifestRow], present: list[ManifestRow]) -> None:
    """Refuse training lines whose files are all missing; to have no training line is no mistake."""
    listed = [path.parent / row.path for row in rows if row.split == "train"]
    if listed and all(row.split != "train" for row in present):
        raise UserError(f"None of the training files that {path} names exists, such as {listed[0]}: correct the paths.")


def _is(count: int) -> str:
    return "is" if count == 1 else "are"


def _deduplicate(path: Path, rows: list[ManifestRow]) -> tuple[list[ManifestRow], int]:
    """Each file once per split, and the number of repeated lines; different labels for one file are an error."""
    first: dict[tuple[str, str], ManifestRow] = {}
    for row in rows:
        earlier = first.setdefault((row.split, row.path), row)
        if set(earlier.labels) != set(row.labels):
            raise UserError(
                f"{path}, lines {earlier.line} and {row.line} give {row.path} different labels: "
                "keep one, or write both in one line as a|b."
            )
    return list(first.values()), len(rows) - len(first)


def _splits(path: Path, rows: list[ManifestRow]) -> list[str]:
    names = list(dict.fromkeys(row.split for row in rows))
    if names != [""] and "" in names:
        line = next(row.line for row in rows if not row.split)
        raise UserError(f"{path}, line {line} has no split while others have one: write train, val or test.")
    return names
