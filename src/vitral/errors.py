"""Exceptions: errors that a user can fix, and interrupted runs; and text that is safe to print."""

import re

# Control characters (C0 but for the line feed, DEL, C1), which a terminal obeys, and those that reverse the direction
# of text. File and class names may hold any of them.
_CONTROLS = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


_LONGEST = 300  # characters of a sentence, paths and commands in backticks not counted


class UserError(ValueError):
    """An error that the user can fix: one sentence with the problem and the fix. The CLI prints it and exits with 2.

    A value of a damaged file may be of any length: long words other than paths are shortened, then the whole.
    """

    exit_code = 2

    def __init__(self, sentence: object = "") -> None:
        text = str(sentence)
        if _length(text) > _LONGEST:
            text = re.sub(r"[^\s/\\]{81,}", lambda word: shorten(word[0]), text)
        if (over := _length(text) - _LONGEST) > 0:
            start = _LONGEST // 2
            text = f"{text[:start]} ... {text[start + over + 5 :]}"
        super().__init__(text)


class UntrainableData(UserError):
    """Data that `check` was asked about and `train` would refuse: the answer to a question, not a mistake."""

    exit_code = 1


def shorten(value: object) -> str:
    """A value of a file for a message."""
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _length(text: str) -> int:
    """The characters of a sentence, paths and commands in backticks not counted."""
    text = re.sub(r"`[^`]*`", "", text)
    return len(text) - sum(len(word) for word in text.split() if "/" in word or "\\" in word)


class Interrupted(Exception):
    """A run was stopped by a signal; its state is saved. The CLI exits with 128 plus the number of the signal."""

    exit_code = 130  # of SIGINT


class Terminated(KeyboardInterrupt):
    """SIGTERM ended a run at once, as Ctrl-C would."""

    exit_code = 143


class PartsWritten(Exception):
    """The parts of a large list of images that were requested are written; there is no result of all images yet."""


def printable(text: str) -> str:
    """The text with each control character, but for line feeds, as an escape such as \\u001b, as JSON has it."""
    return _CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
