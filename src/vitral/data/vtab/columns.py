"""Parquet files whose labels follow from other columns, such as CLEVR's coordinates, however they are nested."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitral.data.parquet import ParquetReader
from vitral.data.vtab.labels import flattened
from vitral.errors import UserError

_IMAGE = "image"


class Columns(NamedTuple):
    """Rows of some files: a key, the wanted fields as lists of numbers, and a reader of the images."""

    keys: list[str]
    values: list[list[list[Any]]]  # of each row, of each field
    reader: ParquetReader


def read_columns(files: list[Path], fields: tuple[str, ...]) -> Columns | None:
    """The fields with these last words in their names; None where a file lacks one."""
    keys: list[str] = []
    values: list[list[list[Any]]] = []
    groups: list[tuple[int, int]] = []
    sizes: list[int] = []
    for number, file in enumerate(files):
        with _opened(file) as table:
            leaves = {last_word(table.schema.column(place).path): place for place in range(len(table.schema.names))}
            if _IMAGE not in table.schema_arrow.names or not leaves.keys() >= set(fields):
                return None
            paths = [table.schema.column(leaves[field]).path for field in fields]
            columns = [table.read([path], use_threads=False).column(0).to_pylist() for path in paths]
            rows = [table.metadata.row_group(group).num_rows for group in range(table.num_row_groups)]
        values += [[flattened(value) for value in row] for row in zip(*columns, strict=True)]
        keys += [f"{file.name}:{row}" for row in range(sum(rows))]
        groups += [(number, group) for group in range(len(rows))]
        sizes += rows
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)
    reader = ParquetReader(tuple(map(str, files)), np.array(groups, np.int64).reshape(-1, 2), starts, _IMAGE)
    return Columns(keys, values, reader)


def last_word(path: str) -> str:
    """The field's own name in "objects.list.element.location.list.element" and in TFDS's "objects/location"."""
    return [word for word in re.split("[./]", path) if word not in ("list", "element", "item")][-1]


def _opened(file: Path) -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise UserError("Parquet needs pyarrow: pip install 'vitral[data]' to have it.") from error
    try:
        return pyarrow.parquet.ParquetFile(file)
    except (OSError, ValueError) as error:
        raise UserError(f"{file} is no readable Parquet file: {error}") from error
