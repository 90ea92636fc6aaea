"""Class mapping: which output of a model each class of a data set is, by name, number or WordNet id.

ImageNet models are also scored by the ReaL labels, of which an image may have several, and on ObjectNet's classes.
"""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vitral.errors import UserError
from vitral.evaluation.calibration import check_scores

_WNID = re.compile(r"n\d{8}")
_IMAGENET = 1000


def class_mapping(
    folder_classes: Sequence[str], model_classes: Sequence[str], count: int, table: Path | None = None
) -> tuple[np.ndarray, str]:
    """Map the classes of a data set to the outputs of a model; one rule has to match all of them.

    `model_classes` are empty if the weights do not state them; `table` is a file that names the outputs in order, as
    `read_table` takes it, and comes before the model's own names. Returns the output of each class, (classes,) int64,
    and the rule that matched, as a sentence.
    """
    columns = read_table(table, count) if table else []
    lists = columns + ([("the model's classes", model_classes)] if model_classes else [])
    for title, names in lists:
        if (outputs := _look_up(folder_classes, names)) is not None:
            return outputs, f"Classes are matched by name with {title}."
    for title, names in lists:
        outputs = _look_up([_plain(name) for name in folder_classes], [_plain(name) for name in names])
        if outputs is not None:
            return outputs, f"Classes are matched by name with {title}, ignoring case, spaces as underscores."
    output_names = {_plain(name) for _, names in lists for name in names}
    if not output_names.intersection(map(_plain, folder_classes)):
        if (outputs := _by_number(folder_classes, model_classes, count)) is not None:
            first, output = folder_classes[0], int(outputs[0])
            name = f' ("{model_classes[output]}")' if model_classes else ""
            return outputs, f'Class names are read as output numbers from 0: "{first}" is output {output}{name}.'
        if not table and (outputs := _by_sorted_wnid(folder_classes, model_classes, count)) is not None:
            return outputs, f"The {count} WordNet ids are numbered in sorted order, as ImageNet numbers its classes."
    raise UserError(_mismatch(folder_classes, lists, output_names, count))


def _look_up(wanted: Sequence[str], names: Sequence[str]) -> np.ndarray | None:
    """(classes,) int64 where every wanted name occurs exactly once on either side."""
    occurrences, indices = Counter(names), {name: i for i, name in enumerate(names)}
    if not wanted or len(set(wanted)) < len(wanted) or any(occurrences[name] != 1 for name in wanted):
        return None
    return np.array([indices[name] for name in wanted], np.int64)


def _by_number(folder_classes: Sequence[str], model_classes: Sequence[str], count: int) -> np.ndarray | None:
    """Class names as output numbers, unless the model's own classes are named by numbers, which would be ambiguous."""
    if not all(name.isdecimal() for name in folder_classes) or any(name.isdecimal() for name in model_classes):
        return None
    numbers = [int(name) for name in folder_classes]
    fits = numbers and max(numbers) < count and len(set(numbers)) == len(numbers)
    return np.array(numbers, np.int64) if fits else None


def _by_sorted_wnid(folder_classes: Sequence[str], model_classes: Sequence[str], count: int) -> np.ndarray | None:
    """WordNet ids in sorted order: one per output, and 1000 if the model names its classes otherwise."""
    unnamed_or_imagenet = not model_classes or count == _IMAGENET
    all_wnids = all(_WNID.fullmatch(name) for name in folder_classes)
    if not (all_wnids and len(set(folder_classes)) == count and unnamed_or_imagenet):
        return None
    return _look_up(folder_classes, sorted(folder_classes))


def read_table(path: Path, count: int) -> list[tuple[str, list[str]]]:
    """Read a class table: a description and the names, in the order of `count` outputs, of each column.

    It is a text file with one line per output, optionally after a header line: a name, or a WordNet id and a name,
    separated by tab, comma or space. Or JSON: a list of names, names by output number, or a configuration with id2label
    or label_names, as of transformers and timm.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the class table {path} cannot be read ({_reason(error)}): give a text file.") from error
    lines = [line for line in text.splitlines() if line.strip()]
    if path.suffix.lower() == ".json":
        rows = _json_rows(path, text)
    elif "\t" in text or path.suffix == ".csv":
        rows = list(csv.reader(lines, delimiter="\t" if "\t" in text else ","))
    else:
        rows = [re.split(r"[\s,]+", line, maxsplit=1) if _WNID.match(line) else [line] for line in lines]
    rows = rows[1:] if len(rows) == count + 1 and path.suffix.lower() != ".json" else rows
    if len(rows) != count:
        raise UserError(
            f"the class table {path} has {len(rows)} names, and the model has {count} outputs: give one name each."
        )
    width = min(len(row) for row in rows)
    return [(f"column {i + 1} of {path.name}", [row[i].strip() for row in rows]) for i in range(width)]


def _json_rows(path: Path, text: str) -> list[list[str]]:
    """The names of each output, in order."""
    try:
        values = json.loads(text)
        if isinstance(values, dict):
            values = values.get("id2label") or values.get("label_names") or values
        if isinstance(values, dict):
            values = [values[str(number)] for number in range(len(values))]
        rows = [row if isinstance(row, list) else [row] for row in values]
        if not all(row and isinstance(name, str) for row in rows for name in row or [None]):
            raise TypeError
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UserError(
            f"the class table {path} is not JSON of names: give a list of names, or names by output number from 0."
        ) from error
    return rows


def _reason(error: OSError | UnicodeDecodeError) -> str:
    return (error.strerror or "").lower() if isinstance(error, OSError) else "not UTF-8"


def _plain(name: str) -> str:
    return name.replace("_", " ").strip().casefold()


def _mismatch(
    folder_classes: Sequence[str], lists: Sequence[tuple[str, Sequence[str]]], output_names: set[str], count: int
) -> str:
    unmatched = [name for name in folder_classes if _plain(name) not in output_names] or list(folder_classes)
    unmatched_text = f"{len(unmatched)} of {len(folder_classes)} classes of the data ({_examples(unmatched)})"
    candidates = [f"{title} ({_examples(names)})" for title, names in lists]
    outputs_text = " or ".join(candidates) if candidates else f"the {count} unnamed outputs of the model"
    return (
        f"{unmatched_text} do not match {outputs_text}: name all folders like the outputs, once each, or by output "
        f"number from 0 to {count - 1}, or give a table with one line per output (--classes)."
    )


def _examples(names: Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in names[:2]) + (", ..." if len(names) > 2 else "")


def class_order(reference: Sequence[str], names: Sequence[str], source: str) -> np.ndarray:
    """Where a model, `source` in messages, has each class of the first model, (classes,) int64.

    Models without names have their classes in one order.
    """
    if tuple(reference) == tuple(names):
        return np.arange(len(names))
    if len(set(names)) == len(names) and sorted(reference) == sorted(names):
        return np.array([list(names).index(name) for name in reference], np.int64)
    lacking = sorted(set(reference) ^ set(names))[:1] or [""]
    raise UserError(
        f'{source} has other classes than the first model (such as "{lacking[0]}"): average models of the same '
        "classes, or name those of models without names with --classes."
    )


def real_accuracy(logits: np.ndarray, keys: Sequence[str], real: Sequence[Sequence[int]]) -> tuple[float, int]:
    """ImageNet accuracy by the ReaL labels (Beyer et al. 2020), and the number of scored images.

    A prediction, by logits (n, 1000), of any of an image's labels is correct. `keys` contain ILSVRC2012_val_ and eight
    digits; entry i of `real` are the labels of number i + 1. Images without labels are not scored.
    """
    numbers = [re.search(r"ILSVRC2012_val_(\d{8})", key) for key in keys]
    for key, number in zip(keys, numbers, strict=True):
        if number is None or not 1 <= int(number[1]) <= len(real):
            raise UserError(f'ReaL labels belong to files named as in ILSVRC2012_val_00000001.JPEG, not "{key}".')
    allowed = [set(real[int(number[1]) - 1]) for number in numbers if number]
    if len(logits) == 0 or not any(allowed):
        raise UserError("none of these images has a ReaL label: there is nothing to score.")
    if max(max(labels) for labels in allowed if labels) >= logits.shape[1]:
        raise UserError(
            f"ReaL labels are of ImageNet's 1000 classes, and this model has {logits.shape[1]}: choose another model."
        )
    check_scores(logits, np.zeros(len(allowed), np.int64))
    predictions = logits.argmax(axis=1).tolist()
    correct = [prediction in labels for prediction, labels in zip(predictions, allowed, strict=True) if labels]
    return sum(correct) / len(correct), len(correct)


class ObjectNetScore(NamedTuple):
    """Accuracy on ObjectNet and the number of images."""

    top1: float
    top5: float
    n: int


def objectnet_accuracy(logits: np.ndarray, labels: np.ndarray, mapping: Sequence[Sequence[int]]) -> ObjectNetScore:
    """Top-1 and top-5 accuracy of ImageNet logits (n, 1000) on ObjectNet. Ties go to the lower class index.

    `mapping` has the ImageNet classes that are correct for each ObjectNet class, of which `labels` (n,) are.
    """
    check_scores(logits, labels)
    outputs = logits.shape[1]
    if max(map(max, mapping)) >= outputs:
        raise UserError(
            f"ObjectNet is mapped to ImageNet's 1000 classes, and this model has {outputs}: choose another model."
        )
    correct = np.zeros((len(mapping), outputs), bool)
    for label, allowed in enumerate(mapping):
        correct[label, list(allowed)] = True
    top5 = np.argsort(-logits, axis=1, kind="stable")[:, :5]
    hits = correct[labels[:, None], top5]
    return ObjectNetScore(float(hits[:, 0].mean()), float(hits.any(axis=1).mean()), len(labels))
