"""Changes of recipe keys, as `set` and `sweep` of the verbs take them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vitral.errors import UserError

Overrides = Sequence[str] | Mapping[str, Any]  # ["optim.lr=0.01"] or {"optim.lr": 0.01}
Sweep = Sequence[str] | Mapping[str, Sequence[Any]]  # ["optim.lr=0.003,0.01"] or {"optim.lr": [0.003, 0.01]}


def override_words(overrides: Overrides | Sweep) -> tuple[str, ...]:
    """Overrides as "key=value" texts.

    Args:
        overrides: texts, or a mapping from keys to values; a sequence of values is joined by commas.

    Returns:
        One text per key.
    """
    if isinstance(overrides, str):
        raise UserError(f'set and sweep take a list: write ["{overrides}"].')
    if isinstance(overrides, Mapping):
        return tuple(f"{key}={_text(value)}" for key, value in overrides.items())
    return tuple(overrides)


def check_given_once(parameters: Mapping[str, Any], words: Sequence[str]) -> None:
    """Refuse a recipe key that is given both as a parameter of its own and in `set`.

    Args:
        parameters: values by recipe key; None and "" mean that the parameter was not given.
        words: the overrides as "key=value" texts.
    """
    for key in (word.partition("=")[0].strip() for word in words):
        if parameters.get(key) not in (None, ""):
            raise UserError(f"{key} is given twice, as an option and as --set {key}=...: leave one of them out.")


def _text(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ",".join(map(_text, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
