"""Types of options that several verbs take, with the words that stand for their values in the help."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import tyro
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text as RichText

from vitral.architecture import Size
from vitral.errors import UserError

Data = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")]
Source = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
Count = Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")]
Grid = Annotated[tuple[int, int] | None, tyro.conf.arg(metavar="ROWS COLUMNS", help_behavior_hint="")]
Image = Annotated[tuple[int, ...] | None, tyro.conf.arg(metavar="PIXELS [WIDTH]", help_behavior_hint="")]
Text = Annotated[str, tyro.conf.arg(metavar="TEXT", help_behavior_hint="")]
Folder = Annotated[str, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="")]
Words = Annotated[tuple[str, ...], tyro.conf.arg(metavar="KEY=VALUE ...", help_behavior_hint="")]
Tried = Annotated[tuple[str, ...], tyro.conf.arg(metavar="KEY=VALUE,VALUE ...", help_behavior_hint="")]
Number = Annotated[int, tyro.conf.arg(metavar="N")]
Times = Annotated[int, tyro.conf.arg(metavar="N", help_behavior_hint="")]  # its help says what none means
Flag = Annotated[bool, tyro.conf.arg(help_behavior_hint="")]
FormatName = Annotated[str | None, tyro.conf.arg(metavar="FORMAT", help_behavior_hint="")]


def image_size(image: tuple[int, ...] | None) -> Size | None:
    """`--image 384` or `--image 384 512`, as (height, width)."""
    if image is None:
        return None
    if len(image) not in (1, 2) or min(image) < 1:
        raise UserError("--image takes one number of pixels, or a height and a width.")
    return image[0], image[-1]


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
        table.add_row(*(RichText(cell) for cell in row))
    out = console()
    out.print(table)
    if note:
        out.print(RichText(note))


def print_facts(facts: Mapping[str, str]) -> None:
    """Names and values, one a line; empty ones are left out."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        if value:
            table.add_row(name, RichText(value))
    console().print(table)


def counted(number: int, thing: str) -> str:
    """1 -> "1 image", 2 -> "2 images" """
    return f"{number:,} {thing}" + "s" * (number != 1)


def by(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"
