"""Types of options that several verbs take, with the words that stand for their values in the help."""

from __future__ import annotations

from typing import Annotated

import tyro

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
