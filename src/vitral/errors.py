"""Exceptions: errors that a user can fix, and interrupted runs; and text that is safe to print."""

import re

# Control characters (C0 but for the line feed, DEL, C1), which a terminal obeys, and those that reverse the direction
# of text. File and class names may hold any of them.
_CONTROLS = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


_LONGEST = 300  # characters of a sentence, paths not counted


class UserError(ValueError):
    """An error that the user can fix: one sentence with the problem and the fix. The CLI prints it and exits with 2.

    A value of a damaged file may be of any length; the middle of a sentence that is far too long is left out.
    """

    def __init__(self, sentence: object = "") -> None:
        text = str(sentence)
        paths = sum(len(word) for word in text.split() if "/" in word or "\\" in word)
        if len(text) > max(2 * _LONGEST, _LONGEST + 2 * min(paths, 2 * 4096)):
            text = f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 3 :]}"
        super().__init__(text)


class Interrupted(Exception):
    """A run was stopped by a signal; its state is saved."""


def printable(text: str) -> str:
    """The text with each control character, but for line feeds, as an escape such as \\u001b, as JSON has it."""
    return _CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
