"""Data sets in memory: torch datasets, Hugging Face datasets, and lists of images with labels.

| object | images and labels |
|---|---|
| a map-style torch `Dataset` | items `(image, label)`, or mappings with such fields |
| a Hugging Face `Dataset` | its image column and its label column |
| a list of `(image, label)` | as it is |
| a pair `(images, labels)` | two sequences of one length |
| `(train, test)`, `(train, val, test)`, or a mapping by split name | splits, each one of the above |

An image is a path, encoded bytes, a PIL image, a uint8 array (h, w) or (h, w, c), a uint8 tensor (c, h, w), or a
floating-point one in [0, 1]. A label is an int or a string; a list of them, or a vector of zeros and ones, means
multi-label.

Items are read when they are needed, by worker processes too. So two runs are equal, and a resumed run continues
exactly, if the dataset itself is deterministic; random augmentation belongs in `transform=`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset

from vitral.data.folders import FileReader
from vitral.data.images import ImageError, is_pil
from vitral.data.labels import name_labels, plain_label
from vitral.data.splits import (
    HELD_OUT,
    IMAGE_COLUMNS,
    LABEL_COLUMNS,
    SPLIT_NAMES,
    DataSet,
    RawSplit,
    make_dataset,
    unique_names,
)
from vitral.data.transforms import eight_bit_array
from vitral.errors import UserError
from vitral.events import EventHandler, Progress, ignore_events

_PROGRESS_EVERY = 100  # items

Labels = Sequence[Any] | np.ndarray | Tensor


@dataclass(frozen=True, eq=False)
class ObjectReader:
    """The images of an object in memory; `image` returns the value at an index.

    `mark` is a path's size and time of change, else a hash of the content, for which the image is read: pixels and
    features that are cached on disk are used again only for images that are equal.
    """

    image: Callable[[int], Any]
    keys: Sequence[str]

    def read(self, index: int) -> bytes | np.ndarray:
        value = self._value(index)
        if isinstance(value, str | Path):
            return FileReader("", [os.path.expanduser(value)]).read(0)
        if isinstance(value, bytes):
            return value
        return eight_bit_array(value, f"the image of {self.keys[index]}")

    def mark(self, index: int) -> str:
        value = self._value(index)
        if isinstance(value, str | Path):
            return FileReader("", [os.path.expanduser(value)]).mark(0)
        try:
            data = self.read(index)
        except ImageError as error:
            return str(error)
        content = data if isinstance(data, bytes) else f"{data.shape}".encode() + data.tobytes()
        return hashlib.sha256(content).hexdigest()

    def _value(self, index: int) -> Any:
        value = self.image(index)
        if isinstance(value, Mapping):  # the undecoded form of a Hugging Face image
            return value.get("bytes") or value.get("path")
        return value


@dataclass(frozen=True, eq=False)
class _Items:
    """Access to an object's images, its labels as it has them, its class names if it has any, and keys."""

    image: Callable[[int], Any]
    labels: Labels
    classes: tuple[str, ...] | None
    keys: Sequence[str]


@dataclass(frozen=True, eq=False)
class _DatasetImages:
    """The image of an item of a map-style dataset."""

    dataset: Any

    def __call__(self, index: int) -> Any:
        return _image_and_label(self.dataset, index)[0]


@dataclass(frozen=True, eq=False)
class _ColumnImages:
    dataset: Any
    column: str

    def __call__(self, index: int) -> Any:
        return self.dataset[index][self.column]


def open_objects(
    data: Any, *, seed: int = 0, held_out: float = HELD_OUT, on_event: EventHandler = ignore_events
) -> DataSet:
    """Open an object of the table above.

    Args:
        data: the object.
        seed: of the held-out split.
        held_out: the share of each class that becomes the test split, where only one split is given.
        on_event: receives `Progress` while labels are read item by item.

    Raises:
        UserError: the object is none of the table, is empty, or holds something else than images and labels.
    """
    splits, notes = _splits(data)
    parts: dict[str, RawSplit] = {}
    classes: tuple[str, ...] | None = None
    for name, source in splits.items():
        items = _items(source, name, on_event)
        if not len(items.labels):
            raise UserError(f"The {name} data ({_type_name(source)}) is empty: add images.")
        labels = [plain_label(label) for label in _listed(items.labels)]
        if name != "train" and all(label == -1 for label in labels):
            notes.append(f"Left out {name}: its labels are all -1, which stands for unknown.")
            continue
        names, split_classes = name_labels(labels, items.keys, items.classes)
        classes = split_classes if name == "train" else classes
        reader = ObjectReader(items.image, items.keys)
        parts[name] = RawSplit(items.keys, names, reader)
        if _first_is_float(reader) and not any("floating" in note for note in notes):
            notes.append("The images are floating-point: they are rounded to 8 bits.")
    source = f"{_type_name(splits['train'])} object"
    return make_dataset(source, parts, seed=seed, held_out=held_out, classes=classes, notes=notes)


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
            raise UserError(f"Item {wrong} of the {name} list is no pair (image, label): give a list of such pairs.")
        return _from_sequences([item[0] for item in source], [item[1] for item in source])
    if _is_table(source):
        return _from_table(source, name)
    if not _is_map_style(source):
        what = "its dataset" if isinstance(source, DataLoader) else "a map-style Dataset or a list of (image, label)"
        raise UserError(f"The {name} data is a {_type_name(source)}, which has no items by index: pass {what}.")
    return _from_dataset(source, name, on_event)


def _from_sequences(images: Any, labels: Any) -> _Items:
    if len(images) != len(labels):
        raise UserError(f"There are {len(images)} images and {len(labels)} labels: give one label per image.")
    paths = [str(image) if isinstance(image, str | Path) else None for image in images] if len(images) else []
    return _Items(images.__getitem__, labels, None, _keys(paths))


def _from_table(table: Any, name: str) -> _Items:
    features: Mapping[str, Any] = table.features or {}
    columns = list(table.column_names)
    image = _column(columns, IMAGE_COLUMNS, features, "Image")
    label = _column([column for column in columns if column != image], LABEL_COLUMNS, features, "ClassLabel")
    if image is None or label is None:
        missing = "images" if image is None else "labels"
        raise UserError(
            f'The {name} data has no single column of {missing} among {", ".join(columns)}: call it "image" or "label".'
        )
    feature = features.get(label)
    feature = getattr(feature, "feature", feature)  # of a list of class labels
    names = getattr(feature, "names", None)
    labels = list(table[label])
    return _Items(
        _ColumnImages(table, image), labels, unique_names(names) if names else None, _keys([None] * len(labels))
    )


def _column(columns: list[str], names: Sequence[str], features: Mapping[str, Any], type_name: str) -> str | None:
    """The first of the usual names, else the only column of the feature type."""
    usual = [name for name in names if name in columns]
    typed = [column for column in columns if type(features.get(column)).__name__ == type_name]
    if usual:
        return usual[0]
    return typed[0] if len(typed) == 1 else None


def _from_dataset(dataset: Any, name: str, on_event: EventHandler) -> _Items:
    count = _size(dataset)
    if count is None:
        raise UserError(f"The {name} data ({_type_name(dataset)}) has no length: pass a map-style Dataset.")
    labels = _stored_labels(dataset, count)
    if labels is not None and count and not _same_label(labels[0], _image_and_label(dataset, 0)[1]):
        labels = None  # something else than what the items give
    if labels is None:
        labels = []
        for index in range(count):
            labels.append(_image_and_label(dataset, index)[1])
            if (index + 1) % _PROGRESS_EVERY == 0 or index + 1 == count:
                on_event(Progress(f"reading labels of {name}", index + 1, count))
    return _Items(_DatasetImages(dataset), labels, _stored_classes(dataset), _keys(_stored_paths(dataset, count)))


def _stored_labels(dataset: Any, count: int) -> Labels | None:
    """The labels without reading any image, where the dataset keeps them; None where it does not."""
    if isinstance(dataset, Subset):
        inner = _stored_labels(dataset.dataset, _size(dataset.dataset) or 0)
        return None if inner is None else [inner[index] for index in dataset.indices]
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
    if isinstance(dataset, Subset):
        return _stored_classes(dataset.dataset)
    classes = getattr(dataset, "classes", None)
    named = isinstance(classes, list | tuple) and classes and all(isinstance(name, str) for name in classes)
    return unique_names(classes) if named else None


def _stored_paths(dataset: Any, count: int) -> list[str | None]:
    """The paths of `samples`, as torchvision's folders of images have them, relative to the dataset's root."""
    if isinstance(dataset, Subset):
        inner = _stored_paths(dataset.dataset, _size(dataset.dataset) or 0)
        return [inner[index] or f"item {index}" for index in dataset.indices]
    samples, root = getattr(dataset, "samples", None), getattr(dataset, "root", "")
    if not isinstance(samples, list) or len(samples) != count or not all(map(_is_pair, samples)):
        return [None] * count
    paths = [sample[0] for sample in samples]
    if not all(isinstance(path, str | Path) for path in paths):
        return [None] * count
    return [os.path.relpath(path, root) if isinstance(root, str | Path) and str(root) else str(path) for path in paths]


def _keys(paths: Sequence[str | None]) -> list[str]:
    """The paths where all are known and different, else numbers."""
    known = [path for path in paths if path]
    if len(known) == len(paths) == len(set(known)):
        return known
    return [f"item {index}" for index in range(len(paths))]


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
    """Plain Python values, where one conversion does it."""
    array = labels.detach().cpu().numpy() if isinstance(labels, Tensor) else labels
    return array.tolist() if isinstance(array, np.ndarray) and array.ndim == 1 else array


def _size(value: Any) -> int | None:
    try:
        return len(value)
    except (TypeError, NotImplementedError, AttributeError):
        return None


def _type_name(value: Any) -> str:
    return type(value).__name__
