"""Types of values at run time: fields of configurations, arguments of users, and JSON files. No torch here."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from vitral.errors import UserError, shorten

_LARGEST = 1 << 24  # no size of a model is larger; a damaged file may state anything
_KINDS = {
    int: f"a whole number from 0 to {_LARGEST:,}",
    float: "a number",
    bool: "true or false",
    tuple[int, int]: "a height and a width",
    tuple[int, ...]: "a list of whole numbers",
    tuple[int, int, int, int]: "four whole numbers",
    Sequence[str]: "a list of names",
    str: "a text",
}


def check_fields(config: Any) -> None:
    """UserError for a field of a dataclass that is not of its type, or a number out of all proportion."""
    for name, hint in _hints(type(config)).items():
        check_value(name, getattr(config, name), hint)


def check_options(function: Callable[..., Any], values: Mapping[str, Any]) -> None:
    """UserError for a keyword-only argument of a function that is not of its type; a list counts as a tuple.

    `values` has all arguments by their names, as `locals()` has at the beginning of the function.
    """
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            value = values[parameter.name]
            value = tuple(value) if isinstance(value, list) else value
            check_value(parameter.name, value, _hints(function)[parameter.name])


def check_value(name: str, value: Any, hint: Any) -> None:
    """UserError for a value that is not of a type."""
    if is_a(value, hint):
        return
    options = [option for option in _options(hint) if option is not NoneType]
    if get_origin(options[0]) is Literal:
        raise UserError(f'{name}="{shorten(value)}" is not one of {", ".join(get_args(options[0]))}.')
    kinds = " or ".join(_KINDS.get(option) or f"a {option.__module__}.{option.__name__}" for option in options)
    raise UserError(f"{name} must be {kinds}, not {shorten(repr(value))}.")


def is_a(value: Any, hint: Any) -> bool:
    """Whether a value is of the type of a field; an integer is a float as well, but no bool is a number."""
    if len(_options(hint)) > 1:
        return any(is_a(value, option) for option in _options(hint))
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_origin(hint) in (tuple, Sequence):
        kinds = get_args(hint)
        kinds = (kinds[0],) * len(value) if kinds[1:] in ((), (...,)) and isinstance(value, tuple) else kinds
        return isinstance(value, tuple) and len(value) == len(kinds) and all(map(is_a, value, kinds))
    if hint is int:
        return type(value) is int and 0 <= value <= _LARGEST
    if hint is float:
        return type(value) in (int, float) and abs(value) <= _LARGEST and math.isfinite(value)
    return isinstance(value, NoneType if hint is None else hint)


def read_object(path: Path, *keys: str) -> dict[str, Any]:
    """The object in a JSON file of a run, with these keys; UserError if the file is damaged or missing."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing: restore it from a copy, or use another run.") from error
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict) or not value.keys() >= set(keys):
        raise UserError(f"{path} is damaged: restore it from a copy, or use another run.")
    return value


def _options(hint: Any) -> tuple[Any, ...]:
    """The types of a union, or the type itself."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


@cache
def _hints(annotated: Any) -> dict[str, Any]:
    return get_type_hints(annotated)
