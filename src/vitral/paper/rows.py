"""How a table of the paper is read: a TOML file of rows, each a frozen dataclass."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib.resources import files
from types import MappingProxyType
from typing import Any, TypeVar


@dataclass(frozen=True, kw_only=True)
class Row:
    """What every row has: where it is printed, and what to know before trusting it."""

    source: str
    note: str = ""


R = TypeVar("R", bound=Row)


def read_rows(kind: type[R], file: str) -> tuple[R, ...]:
    """The rows of a data file. Each takes the file's source and its `every` table where it does not say otherwise."""
    data = tomllib.loads(files("vitral.paper").joinpath(file).read_text(encoding="utf-8"))
    shared = {"source": data["source"], **data.get("every", {})}
    return tuple(kind(**{key: _frozen(value) for key, value in (shared | row).items()}) for row in data["rows"])


def _frozen(value: Any) -> Any:
    """Lists become tuples and tables read-only, so that rows stay as they are printed."""
    if isinstance(value, list):
        return tuple(value)
    return MappingProxyType(value) if isinstance(value, dict) else value
