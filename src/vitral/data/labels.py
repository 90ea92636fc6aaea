"""Labels of any form to class names: ints, strings, lists of either, vectors of zeros and ones."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from vitral.errors import UserError

# Data sets whose labels a mirror image does not keep, by a word of their name, and what is in the images.
ORIENTED = {
    **dict.fromkeys(("digits", "mnist", "svhn"), "digits"),
    **dict.fromkeys(("emnist", "kmnist", "qmnist", "omniglot"), "characters"),
    **{"gtsrb": "traffic signs", "dsprites": "positions and orientations", "smallnorb": "directions"},
}
_SIDE = re.compile("(?<![a-z])(left|right)(?![a-z])")
_ALPHABET = 10  # classes that are single letters; fewer may be names of anything

PlainLabel = int | str | tuple[int | str, ...]


def plain_label(label: Any) -> PlainLabel:
    """A label as an int, a string, or a tuple of either; vectors of zeros and ones become the indices of the ones."""
    if isinstance(label, Tensor | np.ndarray | np.generic):
        array = np.asarray(label.detach().cpu() if isinstance(label, Tensor) else label)
        if array.ndim == 1:
            if not np.isin(array, (0, 1)).all():
                raise UserError(f"A label is the vector {array.tolist()}: use zeros and ones, or a list of classes.")
            return _MultiHot(np.flatnonzero(array).tolist(), len(array))
        label = array.item() if array.ndim == 0 else label
    if isinstance(label, str) and label:
        return label
    if isinstance(label, int) and label >= -1:
        return int(label)
    if isinstance(label, list | tuple | set | frozenset):
        inner = [plain_label(item) for item in (sorted(label, key=str) if isinstance(label, set) else label)]
        if all(isinstance(item, int | str) for item in inner):
            return tuple(inner)  # type: ignore[arg-type]
    raise UserError(f"{label!r} is no label: use ints from 0, strings, or lists of either.")


class _MultiHot(tuple[int, ...]):
    """Indices of the ones in a vector of `length` zeros and ones."""

    length: int

    def __new__(cls, ones: Sequence[int], length: int) -> _MultiHot:
        self = super().__new__(cls, ones)
        self.length = length
        return self


def mirrored_labels(source: str, classes: Sequence[str]) -> str:
    """What a mirror image would get the wrong label of; empty where nothing is known.

    Args:
        source: the data as the user names it: a path, or a name of the catalog.
        classes: names of the classes.
    """
    name = source.partition(":")[0] if ":" in source and not source.startswith("hf:") else Path(source).name
    words = re.split("[^a-z]+", name.lower())
    known = next((ORIENTED[word] for word in words if word in ORIENTED and "fashion" not in words), "")
    if known:
        return f"the {known} in {name}"
    lower = {label.lower(): label for label in classes}
    for label in lower:
        other = _SIDE.sub(lambda match: "right" if match[0] == "left" else "left", label)
        if other != label and other in lower:
            return f'"{lower[label]}" and "{lower[other]}"'
    if len(classes) >= _ALPHABET and all(len(label) == 1 and label.isalpha() for label in classes):
        return "single letters"
    return ""


def name_labels(
    labels: list[PlainLabel], keys: Sequence[str], classes: tuple[str, ...] | None
) -> tuple[list[Any], tuple[str, ...] | None]:
    """Replace class indices by class names.

    Args:
        labels: of each image, from `plain_label`.
        keys: of the images, for messages.
        classes: class names by index, where the source has them; else the names are "0", "1", ...

    Returns:
        The labels by name, and all class names; None where these are the names that occur.
    """
    labels = _as_multi_hot(labels)
    flat = [name for label in labels for name in (label if isinstance(label, tuple) else (label,))]
    numbers = [name for name in flat if isinstance(name, int)]
    if numbers and len(numbers) < len(flat):
        raise UserError(f"Labels are numbers ({numbers[0]}) and strings: use one of them.")
    if numbers and min(numbers) < 0:
        where = keys[next(i for i, label in enumerate(labels) if label == min(numbers))]
        raise UserError(f"The label of {where} is {min(numbers)}: labels begin at 0.")
    if not numbers and not any(isinstance(label, _MultiHot) for label in labels):
        return labels, classes if classes and set(flat) <= set(classes) else None
    count = max([*(number + 1 for number in numbers), *(x.length for x in labels if isinstance(x, _MultiHot))])
    if classes is None or len(classes) < count:
        classes = tuple(map(str, range(count)))
    return [_named(label, classes) for label in labels], classes


def _named(label: Any, classes: tuple[str, ...]) -> str | tuple[str, ...]:
    return tuple(classes[index] for index in label) if isinstance(label, tuple) else classes[label]


def _as_multi_hot(labels: list[Any]) -> list[Any]:
    """Lists of zeros and ones as vectors, where a repeated value shows that they are no lists of classes."""
    lists = all(type(label) is tuple and len(label) > 1 for label in labels)
    vectors = lists and len({len(label) for label in labels}) == 1 and {x for label in labels for x in label} <= {0, 1}
    if not vectors or all(len(set(label)) == len(label) for label in labels):
        return labels
    return [_MultiHot([index for index, bit in enumerate(label) if bit], len(label)) for label in labels]
