"""Tables, lists of facts and JSON on standard output."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text


class _Output(Console):
    def on_broken_pipe(self) -> None:
        """Let `main` handle a reader (head, less) that has closed the pipe."""
        raise BrokenPipeError


def console() -> Console:
    """A console that does not cut tables where the output is not a terminal."""
    return _Output(width=None if sys.stdout.isatty() else 200, highlight=False)


def print_json(value: Any) -> None:
    """Print a value as indented JSON."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1, note: str = "") -> None:
    """Print a table; columns after the first `left` hold numbers and are aligned to the right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < left else "right", no_wrap=i == 0 or i >= left, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    out = console()
    out.print(table)
    if note:
        out.print(Text(note))


def print_facts(facts: Mapping[str, str]) -> None:
    """Print names and values, one per line, without those that are empty."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        if value:
            table.add_row(name, Text(value))
    console().print(table)


def counted(number: int, thing: str) -> str:
    """1 -> "1 image", 2 -> "2 images" """
    return f"{number:,} {thing}" + "s" * (number != 1)


def by(size: tuple[int, int]) -> str:
    """(3, 4) -> "3x4" """
    return f"{size[0]}x{size[1]}"


def percent(value: float | None, missing: str = "-") -> str:
    """0.5 -> "50.00%" """
    return missing if value is None else f"{value:.2%}"
