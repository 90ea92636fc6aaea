"""What a person typed wrongly, in one sentence; tyro alone would answer with a box of several lines."""

from __future__ import annotations

import difflib
import inspect
import io
import re
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import tyro

from vitral.errors import UserError


def run_words(name: str, function: Callable[..., None], words: Sequence[str]) -> None:
    """Call a verb with the words behind it."""
    _check_options(name, function, words)
    real, heard = sys.stderr, io.StringIO()

    @wraps(function)
    def started(*values: Any, **options: Any) -> None:
        sys.stderr = real
        function(*values, **options)

    sys.stderr = heard
    try:
        tyro.cli(started, prog=f"vitral {name}", args=words, config=(tyro.conf.FlagCreatePairsOff,))
    except SystemExit as end:
        if sys.stderr is heard and end.code:
            raise UserError(f"{_told(heard.getvalue())}: see `vitral {name} --help`.") from end
        raise
    finally:
        sys.stderr = real


def _check_options(name: str, function: Callable[..., None], words: Sequence[str]) -> None:
    """Refuse an option that the verb does not have, naming the nearest that it has."""
    parameters = inspect.signature(function).parameters.values()
    known = [f"--{each.name.replace('_', '-')}" for each in parameters if each.kind is each.KEYWORD_ONLY]
    for word in words:
        option = word.partition("=")[0].replace("_", "-")
        if option.startswith("--") and option not in ("--", "--help", *known):
            near = difflib.get_close_matches(option, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"`vitral {name} --help` lists the options."
            raise UserError(f"`{name}` has no option {option}: {hint}")


def _told(box: str) -> str:
    """What tyro's box says as one line. Its title stands in the frame, or where that is plain ASCII above a rule."""
    parts: list[list[str]] = [[]]
    for line in box.splitlines():
        text = line.strip("│| \t")
        if re.match("[╭╰─]|-{3,}", text):
            parts.append([])
        elif text:
            parts[-1].append(text.replace("(required)", "").strip())
    written = [" ".join(part) for part in parts if part]
    return written[0 if "╭" in box else 1].rstrip(".: ")
