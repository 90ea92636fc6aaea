"""What a person typed wrongly, in one sentence; tyro alone would answer with a box of several lines."""

from __future__ import annotations

import difflib
import inspect
import io
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import tyro

from vitral.errors import UserError
from vitral.recipe import keys

# Tyro's sentences, and ours.
_SENTENCES = (
    (r"Error parsing (--\S+): .*\bint\(\).*: '(.*)'", r'\1 takes a whole number, not "\2"'),
    (r"Error parsing (--\S+): .*\bto float: '(.*)'", r'\1 takes a number, not "\2"'),
    (r"Error parsing (--\S+): .* (?:from|arguments:) \['(.*?)'\].*", r'\1 does not take "\2"'),
    (r"Missing value for argument '(.*)'\. .*", r"\1 needs a value"),
    (r"Missing from vitral \w+: (.*)", r"missing: \1"),
    (r"Unrecognized options: (.*)", r"not understood: \1"),
    (r"invalid choice '(.*)' for argument .* one of \((.*)\)", r'"\1" is none of \2'),
)


# Options that take several words. Tyro also takes none, and of two such options the last.
_SEVERAL = {"--set": "KEY=VALUE", "--sweep": "KEY=VALUE,VALUE"}

_BEHIND = ("images", "data", "folder", "root")  # what verbs take behind a model
_SHOWN = 3  # images of a command that is given back


def run_words(name: str, function: Callable[..., None], words: Sequence[str]) -> None:
    """Call a verb with the words behind it."""
    _check_options(name, function, words)
    real, heard = sys.stderr, io.StringIO()

    @wraps(function)
    def started(*values: Any, **options: Any) -> None:
        sys.stderr = real
        try:
            function(*values, **options)
        except UserError as mistake:
            if hint := _swapped(name, function, values, words):
                raise UserError(hint) from mistake
            raise

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
            raise UserError(f"`{name}` has no option {option}: {_hint(name, option, known)}")
    for option, needed in _SEVERAL.items():
        _check_several(option, needed, words)


def _check_several(option: str, needed: str, words: Sequence[str]) -> None:
    places = [at for at, word in enumerate(words) if word.partition("=")[0] == option]
    if len(places) > 1:
        raise UserError(f"{option} is given twice: write it once, with all its words behind it.")
    for at in places:
        after = words[at + 1 : at + 2]
        if words[at] == f"{option}=" or (words[at] == option and (not after or after[0].startswith("--"))):
            raise UserError(f"{option} needs {needed}.")


def _swapped(name: str, function: Callable[..., None], values: Sequence[Any], words: Sequence[str]) -> str:
    """The right order, where a model stands behind what should stand behind it; else nothing."""
    places = list(inspect.signature(function).parameters)[: len(values)]
    if len(places) != 2 or places[0] != "source" or places[1] not in _BEHIND:
        return ""
    given = [values[0], *([values[1]] if isinstance(values[1], str) else values[1])]
    model = _model_behind(given, places[1])
    if not model:
        return ""
    rest, options = [word for word in given if word != model], list(words)
    for word in given:
        options.remove(word)
    shown = shlex.join([model, *rest[:_SHOWN], *["..."] * (len(rest) > _SHOWN), *options])
    return f"`{name}` takes the model first and the {places[1]} behind it: write `vitral {name} {shown}`."


def _model_behind(given: Sequence[str], behind: str) -> str:
    """The model among the later words where the first is there and is none."""
    from vitral.api.checkpoints import is_model
    from vitral.api.data import known_data

    there = os.path.exists(os.path.expanduser(given[0])) or given[0].partition(":")[0] in known_data()
    if not there or is_model(given[0]):
        return ""
    maybe_data = ("hf:",) if behind == "data" else ()  # the hub has both under such names
    return next((word for word in given[1:] if not word.startswith(maybe_data) and is_model(word)), "")


def _hint(name: str, option: str, known: Sequence[str]) -> str:
    """A key of the recipe by its last word, as --lr, or else the nearest option."""
    wanted = option.removeprefix("--").replace("-", "_")
    found = [key for key in keys() if wanted in (key, key.rpartition(".")[2])] if "--set" in known else []
    if found:
        return f"write {' or '.join(f'--set {key}=VALUE' for key in found)}."
    near = difflib.get_close_matches(option, known, n=1)
    return f"did you mean {near[0]}?" if near else f"`vitral {name} --help` lists the options."


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
    told = written[0 if "╭" in box else 1].rstrip(".: ")
    for pattern, sentence in _SENTENCES:
        if match := re.fullmatch(pattern, told):
            return re.sub(r"(?<!\w)'([^']*)'", r"\1", match.expand(sentence))
    return told
