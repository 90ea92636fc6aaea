"""Tables for people and JSON for programs."""

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
        """The reader (head, less) has seen enough, which is no mistake of anybody's."""
        raise BrokenPipeError


def console() -> Console:
    """A console that never cuts a table short because its output goes to a file."""
    return _Output(width=None if sys.stdout.isatty() else 200, highlight=False)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1, note: str = "") -> None:
    """Columns after the first `left` hold numbers and are aligned to the right."""
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
    """Names and values, one a line; empty ones are left out."""
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
    return f"{size[0]}x{size[1]}"
