"""Parquet files whose labels follow from other columns, such as CLEVR's coordinates, however they are nested."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from vitral.data.parquet import ParquetReader, opened, row_keys, rows_of_groups
from vitral.data.vtab.labels import flattened

_IMAGE = "image"


class Columns(NamedTuple):
    """Rows of some files: a key, the wanted fields as lists of numbers, and a reader of the images."""

    keys: list[str]
    values: list[list[list[Any]]]  # of each row, of each field
    reader: ParquetReader


def read_columns(files: list[Path], fields: tuple[str, ...]) -> Columns | None:
    """The fields with these last words in their names; None where a file lacks one."""
    values: list[list[list[Any]]] = []
    rows: list[list[int]] = []
    for file in files:
        with opened(file) as table:
            leaves = {last_word(table.schema.column(place).path): place for place in range(len(table.schema.names))}
            if _IMAGE not in table.schema_arrow.names or not leaves.keys() >= set(fields):
                return None
            paths = [table.schema.column(leaves[field]).path for field in fields]
            columns = [table.read([path], use_threads=False).column(0).to_pylist() for path in paths]
            rows.append(rows_of_groups(table))
        values += [[flattened(value) for value in row] for row in zip(*columns, strict=True)]
    return Columns(row_keys(files, rows), values, ParquetReader(files, rows, _IMAGE))


def last_word(path: str) -> str:
    """The field's own name in "objects.list.element.location.list.element" and in TFDS's "objects/location"."""
    return [word for word in re.split("[./]", path) if word not in ("list", "element", "item")][-1]
