"""Data sets in memory: torch datasets, Hugging Face datasets, and lists of images with labels.

| object | images and labels |
|---|---|
| a map-style torch `Dataset` | items `(image, label)`, or mappings with such fields |
| a Hugging Face `Dataset`, a data frame of pandas | its image column and its label column |
| a list of `(image, label)` | as it is |
| a pair `(images, labels)` | two sequences of one length |
| `(train, test)`, `(train, val, test)`, or a mapping by split name | splits, each one of the above |

An image is a path, encoded bytes, a PIL image, a uint8 array (h, w) or (h, w, c), a uint8 tensor (c, h, w), or a
floating-point one in [0, 1], with any number of channels. A label is an int or a string; a list of them, or a vector of
zeros and ones, means multi-label. Where every vector has exactly one 1, they are refused: most likely they are one-hot.

Items are read when they are needed, by worker processes too. So two runs are equal, and a resumed run continues
exactly, if the dataset itself is deterministic; random augmentation belongs in `transform=`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset

from vitral.data.folders import ObjectReader
from vitral.data.images import ImageError, is_pil
from vitral.data.manifests import frame_in, without_pandas
from vitral.data.parquet import table_columns
from vitral.data.splits import (
    IMAGE_COLUMNS,
    LABEL_COLUMNS,
    SPLIT_NAMES,
    DataSet,
    RawSplit,
    make_dataset,
    unique_names,
)
from vitral.errors import UserError
from vitral.events import EventHandler, Progress

_PROGRESS_EVERY = 100  # items

PlainLabel = int | str | tuple[int | str, ...]
Labels = Sequence[Any] | np.ndarray | Tensor


class _Items(NamedTuple):
    """Access to an object's images, its labels as it has them, its class names if it has any, and keys."""

    image: Callable[[int], Any]
    labels: Labels
    classes: tuple[str, ...] | None
    keys: Sequence[str]


def open_objects(data: Any, *, held_out: float, on_event: EventHandler) -> DataSet:
    """Open an object of the table above; the other arguments are those of `open_data`."""
    splits, notes = _splits(without_pandas(data))
    items_by_split: dict[str, _Items] = {}
    labels_by_split: dict[str, list[PlainLabel]] = {}
    for name, source in splits.items():
        items = _items(source, name, on_event)
        if not len(items.labels):
            raise UserError(f"The {name} data ({_type_name(source)}) is empty: add images.")
        labels = [plain_label(label) for label in _listed(items.labels)]
        if name != "train" and all(label == -1 for label in labels):
            notes.append(f"Left out {name}: its labels are all -1, which means unknown.")
            continue
        items_by_split[name], labels_by_split[name] = items, labels
    parts: dict[str, RawSplit] = {}
    classes: tuple[str, ...] | None = None
    labels_by_split = _with_multi_hot(labels_by_split)
    if _are_one_hot(labels_by_split):
        if held_out:  # to train on
            raise UserError(
                "Each label is a vector with exactly one 1, as one-hot labels are: use `label.argmax()` if each image "
                "has one class, or lists of class indices, such as [2], if it can have several."
            )
        notes.append("Each label is a vector with exactly one 1, taken as a list of classes.")
    for name, labels in labels_by_split.items():
        items = items_by_split[name]
        names, split_classes = name_labels(labels, items.keys, items.classes)
        classes = split_classes if name == "train" else classes
        reader = ObjectReader(partial(_item_image, items.image, items.keys, name), items.keys)
        parts[name] = RawSplit(items.keys, names, reader)
        if _first_is_float(reader) and not any("floating" in note for note in notes):
            notes.append("The images are floating-point: they are rounded to 8 bits.")
    frame = frame_in(data)
    source = f"{_type_name(splits['train'] if frame is None else frame)} object"
    return make_dataset(source, parts, held_out=held_out, classes=classes, notes=notes)


def _splits(data: Any) -> tuple[dict[str, Any], list[str]]:
    """Objects by split name, and notes about those that are left out."""
    if isinstance(data, Mapping):
        splits = {SPLIT_NAMES.get(str(name).lower(), str(name)): source for name, source in data.items()}
        if "train" not in splits:
            raise UserError(f"The data has the splits {', '.join(map(str, data)) or 'of an empty mapping'}: add train.")
        others = [name for name in splits if name not in ("train", "val", "test")]
        kept = {name: splits[name] for name in ("train", "val", "test") if name in splits}
        return kept, [f"Left out the split {name}." for name in others]
    if isinstance(data, tuple) and len(data) in (2, 3) and all(map(_is_source, data)):
        return dict(zip(("train", "test") if len(data) == 2 else ("train", "val", "test"), data, strict=True)), []
    return {"train": data}, []


def _is_source(value: Any) -> bool:
    """Whether the object is one split by itself."""
    if isinstance(value, list):
        return not value or _is_pair(value[0])
    if isinstance(value, tuple):
        return _is_images_and_labels(value)
    return _is_table(value) or _is_map_style(value)


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2 and _is_image(value[0])


def _is_image(value: Any) -> bool:
    return isinstance(value, str | Path | bytes | np.ndarray | Tensor) or is_pil(value)


def _is_images_and_labels(value: Any) -> bool:
    if not isinstance(value, tuple) or len(value) != 2:
        return False
    images, labels = value
    sequences = isinstance(labels, list | tuple | np.ndarray | Tensor) and _size(images) is not None
    if isinstance(images, np.ndarray | Tensor):
        return sequences and images.ndim in (3, 4)
    return sequences and isinstance(images, list | tuple) and all(map(_is_image, images))


def _is_table(value: Any) -> bool:
    """A Hugging Face dataset, recognised by its attributes: the library is not imported."""
    return hasattr(value, "column_names") and hasattr(value, "features") and _is_map_style(value)


def _is_map_style(value: Any) -> bool:
    plain = isinstance(value, str | bytes | list | tuple | Mapping | np.ndarray | Tensor) or is_pil(value)
    return not plain and hasattr(value, "__getitem__") and hasattr(value, "__len__")


def _items(source: Any, name: str, on_event: EventHandler) -> _Items:
    if _is_images_and_labels(source):
        images, labels = source
        return _from_sequences(images, labels)
    if isinstance(source, list | tuple):
        wrong = next((index for index, item in enumerate(source) if not _is_pair(item)), None)
        if wrong is not None:
            raise UserError(f"Item {wrong} of the {name} list is not a pair (image, label): give a list of such pairs.")
        return _from_sequences([item[0] for item in source], [item[1] for item in source])
    if _is_table(source):
        return _from_table(source, name)
    if not _is_map_style(source):
        fix = "its dataset" if isinstance(source, DataLoader) else "a map-style Dataset or a list of (image, label)"
        raise UserError(f"The {name} data is a {_type_name(source)}, which has no items by index: pass {fix}.")
    return _from_dataset(source, name, on_event)


def _from_sequences(images: Any, labels: Any) -> _Items:
    if len(images) != len(labels):
        raise UserError(f"There are {len(images)} images and {len(labels)} labels: give one label per image.")
    paths = [str(image) if isinstance(image, str | Path) else None for image in images] if len(images) else []
    if paths and not any(path is None or os.path.exists(os.path.expanduser(path)) for path in paths):
        raise UserError(
            f"None of the image files exists, such as {paths[0]}: correct the paths, which are relative to "
            f"{os.getcwd()}."
        )
    return _Items(images.__getitem__, labels, None, _keys(paths))


def _from_table(table: Any, name: str) -> _Items:
    image, label, classes = table_columns(table, name)
    labels = list(table[label])
    return _Items(partial(_cell, table, image), labels, classes, _keys([None] * len(labels)))


def _cell(table: Any, column: str, index: int) -> Any:
    return table[index][column]


def _from_dataset(dataset: Any, name: str, on_event: EventHandler) -> _Items:
    count = _size(dataset)
    if count is None:
        raise UserError(f"The {name} data ({_type_name(dataset)}) has no length: pass a map-style Dataset.")
    base, indices = dataset, range(count)
    while isinstance(base, Subset):
        base, indices = base.dataset, [base.indices[index] for index in indices]
    stored = _stored_labels(base, _size(base) or 0)
    labels = stored if stored is None or base is dataset else [stored[index] for index in indices]
    paths = _stored_paths(base, _size(base) or 0)
    keys = _keys([paths[index] or f"item {index}" for index in indices])
    if labels is not None and count and not _same_label(labels[0], _item_label(dataset, 0, keys, name)):
        labels = None  # something else than what the items give
    if labels is None:
        labels = []
        for index in range(count):
            labels.append(_item_label(dataset, index, keys, name))
            if (index + 1) % _PROGRESS_EVERY == 0 or index + 1 == count:
                on_event(Progress(f"reading labels of {name}", index + 1, count))
    return _Items(partial(_dataset_image, dataset), labels, _stored_classes(base), keys)


def _stored_labels(dataset: Any, count: int) -> Labels | None:
    """The labels without reading any image, if the dataset keeps them; None if it does not."""
    if isinstance(dataset, TensorDataset):
        return dataset.tensors[1] if len(dataset.tensors) == 2 else None
    if getattr(dataset, "target_transform", None) is not None:
        return None
    for attribute in ("targets", "labels"):
        labels = getattr(dataset, attribute, None)
        if isinstance(labels, Sequence | np.ndarray | Tensor) and not isinstance(labels, str) and len(labels) == count:
            return labels
    return None


def _stored_classes(dataset: Any) -> tuple[str, ...] | None:
    classes = getattr(dataset, "classes", None)
    named = isinstance(classes, list | tuple) and classes and all(isinstance(name, str) for name in classes)
    return unique_names(classes) if named else None


def _stored_paths(dataset: Any, count: int) -> list[str | None]:
    """The paths of `samples`, as torchvision's folders of images have them, relative to the dataset's root."""
    samples, root = getattr(dataset, "samples", None), getattr(dataset, "root", "")
    if not isinstance(samples, list) or len(samples) != count or not all(map(_is_pair, samples)):
        return [None] * count
    paths = [sample[0] for sample in samples]
    if not all(isinstance(path, str | Path) for path in paths):
        return [None] * count
    return [os.path.relpath(path, root) if isinstance(root, str | Path) and str(root) else str(path) for path in paths]


def _keys(paths: Sequence[str | None]) -> list[str]:
    """The paths where all are known and different, else numbers."""
    given_paths = [path for path in paths if path]
    if len(given_paths) == len(paths) == len(set(given_paths)):
        return given_paths
    return [f"item {index}" for index in range(len(paths))]


def _item_label(dataset: Any, index: int, keys: Sequence[str], name: str) -> Any:
    with _noted(keys[index], name):
        return _image_and_label(dataset, index)[1]


def _item_image(image: Callable[[int], Any], keys: Sequence[str], name: str, index: int) -> Any:
    with _noted(keys[index], name):
        return image(index)


@contextlib.contextmanager
def _noted(key: str, name: str) -> Iterator[None]:
    """Add to an exception of the user's own code which item was read; worker processes pass the note on."""
    try:
        yield
    except Exception as error:
        error.add_note(f"while reading {key} of the {name} data")
        raise


def _dataset_image(dataset: Any, index: int) -> Any:
    return _image_and_label(dataset, index)[0]


def _image_and_label(dataset: Any, index: int) -> tuple[Any, Any]:
    item = dataset[index]
    if isinstance(item, Mapping):
        image = next((item[name] for name in IMAGE_COLUMNS if name in item), None)
        label = next((item[name] for name in LABEL_COLUMNS if name in item), None)
        if image is not None and label is not None:
            return image, label
    if isinstance(item, tuple | list) and len(item) == 2:
        return item[0], item[1]
    raise UserError(f"Item {index} of {_type_name(dataset)} is a {type(item).__name__}: return (image, label).")


def _same_label(stored: Any, item: Any) -> bool:
    with contextlib.suppress(UserError):
        return plain_label(stored) == plain_label(item)
    return False


def _first_is_float(reader: ObjectReader) -> bool:
    """Whether the first image is floating-point; one that is no image is refused here, before any work is done."""
    with contextlib.suppress(ImageError):
        reader.read(0)
    value = reader.image(0)
    if isinstance(value, Tensor):
        return value.is_floating_point()
    return isinstance(value, np.ndarray) and np.issubdtype(value.dtype, np.floating)


def _listed(labels: Labels) -> Iterable[Any]:
    """Plain Python values, if one conversion is enough."""
    array = labels.detach().cpu().numpy() if isinstance(labels, Tensor) else labels
    return array.tolist() if isinstance(array, np.ndarray) and array.ndim == 1 else array


def _size(value: Any) -> int | None:
    try:
        return len(value)
    except (TypeError, NotImplementedError, AttributeError):
        return None


def _type_name(value: Any) -> str:
    return type(value).__name__


def plain_label(label: Any) -> PlainLabel:
    """A label as an int, a string, or a tuple of either; vectors of zeros and ones become the indices of the ones."""
    if isinstance(label, Tensor | np.ndarray | np.generic):
        array = np.asarray(label.detach().cpu() if isinstance(label, Tensor) else label)
        if array.ndim == 1:
            if not np.isin(array, (0, 1)).all():
                raise UserError(f"A label is the vector {array.tolist()}: use zeros and ones, or a list of classes.")
            return _MultiHot(array.tolist())
        label = array.item() if array.ndim == 0 else label
    if isinstance(label, str) and label:
        return label
    if isinstance(label, int) and label >= -1:
        return int(label)
    if isinstance(label, list | tuple | set | frozenset):
        inner = [plain_label(item) for item in (sorted(label, key=str) if isinstance(label, set) else label)]
        if all(isinstance(item, int | str) for item in inner):
            return tuple(inner)  # type: ignore[arg-type]
    raise UserError(f"{label!r} is not a label: use ints from 0, strings, or lists of either.")


class _MultiHot(tuple[int, ...]):
    """Indices of the ones in a vector of `length` zeros and ones."""

    length: int

    def __new__(cls, bits: Sequence[int]) -> _MultiHot:
        self = super().__new__(cls, [index for index, bit in enumerate(bits) if bit])
        self.length = len(bits)
        return self


def name_labels(
    labels: list[PlainLabel], keys: Sequence[str], classes: tuple[str, ...] | None
) -> tuple[list[Any], tuple[str, ...] | None]:
    """Replace the class indices of `plain_label` by class names; `keys` are for messages.

    Without `classes`, which are names by index, the names are "0", "1", ...; the result has the labels by name, and all
    class names, or None if these are the names that occur.
    """
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
    named = [tuple(classes[i] for i in x) if isinstance(x, tuple) else classes[x] for x in labels]  # type: ignore[index]
    return named, classes


def _with_multi_hot(by_split: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Lists of zeros and ones as vectors, unless they can be lists of classes: no value repeated, nor all of both."""
    every = [label for labels in by_split.values() for label in labels]
    lists = all(type(label) is tuple and len(label) > 1 for label in every)
    bits = lists and len({len(label) for label in every}) == 1 and {x for label in every for x in label} <= {0, 1}
    if not bits or not (any(len(set(label)) < len(label) for label in every) or len(every[0]) == 2):
        return by_split
    return {name: [_MultiHot(label) for label in labels] for name, labels in by_split.items()}


def _are_one_hot(by_split: dict[str, list[Any]]) -> bool:
    return all(isinstance(label, _MultiHot) and len(label) == 1 for labels in by_split.values() for label in labels)
