"""Parquet files with image bytes and labels, in the layout of the Hugging Face hub.

One column holds images (bytes, or a struct of bytes and path), one the labels: class indices whose names are in the
file's metadata, plain numbers, or text; a list of them is multi-label. A file's split is in its name
(train-00000-of-00005.parquet) or its folder's (train/0000.parquet).

Reading one image means reading its row group, so a reader caches the latest groups. Small data sets are soon in memory;
on large ones random order is slow, because the format has no smaller unit of access.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vitral.data.images import ImageError
from vitral.data.splits import (
    IMAGE_COLUMNS,
    LABEL_COLUMNS,
    DataSet,
    RawSplit,
    files_by_split,
    make_dataset,
    split_name,
    unique_names,
)
from vitral.errors import UserError, shorten

_CACHED_BYTES = 256_000_000  # per process; the hub's groups of 100 photographs have about 10 MB
# What pyarrow raises for damaged files, the last two where the damage is in the metadata.
_DAMAGE = (OSError, ValueError, IndexError, NotImplementedError)


class ParquetReader:
    """The images of some files, by row; `rows` has the number of rows of each row group of each file."""

    def __init__(self, files: Sequence[Path], rows: Sequence[Sequence[int]], column: str) -> None:
        self.files = tuple(map(str, files))
        self.column = column
        self.groups = [(file, group) for file, counts in enumerate(rows) for group in range(len(counts))]
        # The first row of each group.
        self.starts = np.cumsum([0, *(count for counts in rows for count in counts)])[:-1]
        self._cached: dict[int, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cached": {}}  # each process has its own cache

    def read(self, index: int) -> bytes:
        group = self._group_of(index)
        try:
            value = self._group(group)[index - int(self.starts[group])].as_py()
        except _DAMAGE as error:
            raise ImageError(f"{self.files[self.groups[group][0]]} cannot be read ({_message(error)})") from error
        data = value["bytes"] if isinstance(value, dict) else value
        if not data:
            raise ImageError("the row contains no image")
        return data

    def mark(self, index: int) -> str:
        file = self.files[self.groups[self._group_of(index)][0]]
        stat = os.stat(file)
        return f"{os.path.abspath(file)} {stat.st_size} {stat.st_mtime_ns} {index}"

    def _group_of(self, index: int) -> int:
        return int(np.searchsorted(self.starts, index, "right")) - 1

    def _group(self, group: int) -> Any:
        """The image column of a row group, the latest groups from memory."""
        column = self._cached.pop(group, None)
        if column is None:
            file, number = self.groups[group]
            with _arrow().ParquetFile(self.files[file]) as table:
                column = table.read_row_group(number, [self.column], use_threads=False).column(0)
        self._cached[group] = column
        while len(self._cached) > 1 and sum(cached.nbytes for cached in self._cached.values()) > _CACHED_BYTES:
            self._cached.pop(next(iter(self._cached)))
        return column


def read_parquet(source: str, files: list[Path], *, held_out: float) -> DataSet:
    """Read the data set in these files; `source` is its name in messages."""
    notes: list[str] = []
    parts: dict[str, RawSplit] = {}
    classes: tuple[str, ...] | None = None
    for split, members in files_by_split(source, files).items():
        part, names = _read_split(members)
        if part is None:
            notes.append(f"Left out {split}: its labels are all -1, which means unknown.")
            continue
        parts[split] = part
        classes = names if split == "train" else classes
    if "train" not in parts:
        raise UserError(f"{source} has no labels in train: they are all -1.")
    return make_dataset(source, parts, held_out=held_out, classes=classes, notes=notes)


def download(name: str) -> tuple[Path, list[Path]]:
    """The folder and the Parquet files of `hf:owner/name[/folder][@revision]`, from the hub's cache or the network."""
    path, _, revision = name.removeprefix("hf:").partition("@")
    owner, _, rest = path.partition("/")
    repository, _, folder = rest.partition("/")
    identity = f"{owner}/{repository}" if repository else owner
    pattern = f"{folder}/*.parquet" if folder else "*.parquet"  # "*" goes through folders here
    root = hub_snapshot(name, identity, revision, [pattern], repo_type="dataset") / folder
    files = sorted(root.rglob("*.parquet"))
    if not files:
        raise UserError(f"{name} has no Parquet files: download it as a folder of images instead.")
    configs = sorted({file.parent.relative_to(root).parts[0] for file in files if _in_config_folder(root, file)})
    if len(configs) > 1:
        raise UserError(f"{name} has several configurations: name one of them, such as {name}/{configs[0]}.")
    return root, files


def hub_snapshot(
    name: str, repository: str, revision: str, patterns: list[str], *, repo_type: Literal["model", "dataset"]
) -> Path:
    """The folder of some files of a repository in huggingface_hub's cache; what is not there is downloaded.

    `name` is what the user calls it; an empty revision is the newest.
    """
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError as error:
        raise UserError(f"{name} is on the Hugging Face hub: pip install 'vitral[hub]' to download it.") from error
    what, otherwise = ("repository", ", or name a file") if repo_type == "model" else ("data set", "")
    options = {"repo_type": repo_type, "revision": revision or None, "allow_patterns": patterns}
    try:
        return Path(snapshot_download(repository, **options))
    # Some releases of huggingface_hub raise a plain ConnectionError in offline mode.
    except (errors.LocalEntryNotFoundError, ConnectionError) as error:
        reason = f"{name} is not in the cache and the hub cannot be reached"
        raise UserError(f"{reason}: go online once{otherwise}.") from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise UserError(f"{name}: the hub has no such {what}, or it needs `hf auth login`.") from error
    except errors.HfHubHTTPError as error:
        raise UserError(f"{name}: the hub answered with an error ({error}).") from error


def table_columns(table: Any, name: str) -> tuple[str, str, tuple[str, ...] | None]:
    """The columns of images and of labels of a `datasets.Dataset`, the split `name`, and its class names if it has any.

    It is recognised by its attributes: the library is not imported.
    """
    features: Mapping[str, Any] = table.features or {}
    columns = list(table.column_names)
    image = _usual_column(columns, IMAGE_COLUMNS, features, "Image")
    label = _usual_column([column for column in columns if column != image], LABEL_COLUMNS, features, "ClassLabel")
    if image is None or label is None:
        missing = "images" if image is None else "labels"
        raise UserError(
            f'The {name} data has no single column of {missing} among {", ".join(columns)}: call it "image" or "label".'
        )
    feature = features.get(label)
    feature = getattr(feature, "feature", feature)  # of a list of class labels
    return image, label, unique_names(getattr(feature, "names", None) or ()) or None


def _usual_column(columns: list[str], names: Sequence[str], features: Mapping[str, Any], type_name: str) -> str | None:
    """The first of the usual names, else the only column of the feature type."""
    typed = [column for column in columns if type(features.get(column)).__name__ == type_name]
    usual = next((name for name in names if name in columns), None)
    return usual or (typed[0] if len(typed) == 1 else None)


def _in_config_folder(root: Path, file: Path) -> bool:
    """Whether the file is in a folder that is neither a split's nor the hub's usual data/."""
    parts = file.parent.relative_to(root).parts
    return bool(parts) and parts[0] != "data" and split_name(parts[0]) is None


def _read_split(files: list[Path]) -> tuple[RawSplit | None, tuple[str, ...] | None]:
    """One split, or None if no row has a label; and the class names, if the files have them."""
    labels: list[Any] = []
    rows: list[list[int]] = []
    names: tuple[str, ...] | None = None
    image = ""
    for file in files:
        with open_parquet(file) as table:
            image, label = _columns(file, table.schema_arrow)
            _refuse_paths(file, table, image)
            names = _class_names(table.schema_arrow, label)
            labels += table.read([label], use_threads=False).column(0).to_pylist()
            rows.append(row_group_sizes(table))
    if labels and all(label == -1 for label in labels):
        return None, names
    keys = row_keys(files, rows)
    plain = [_label(key, label, names) for key, label in zip(keys, labels, strict=True)]
    return RawSplit(keys, plain, ParquetReader(files, rows, image)), names


def _label(key: str, label: Any, names: tuple[str, ...] | None) -> Any:
    if isinstance(label, list):
        return tuple(_label(key, item, names) for item in label)
    if label is None or label == "":
        raise UserError(f"{key} has no label: fill it in or remove the row.")
    if isinstance(label, int) and not 0 <= label < (len(names) if names else label + 1):
        expected = f"0 to {len(names) - 1}" if names else "0 and up"
        raise UserError(f"{key} has the label {label}, which is out of range: classes are {expected}.")
    return names[label] if names and isinstance(label, int) else str(label)


def _columns(file: Path, schema: Any) -> tuple[str, str]:
    import pyarrow as pa

    def holds_bytes(column: Any) -> bool:
        if pa.types.is_struct(column):
            return any(column.field(index).name == "bytes" for index in range(column.num_fields))
        return pa.types.is_binary(column) or pa.types.is_large_binary(column)

    images = [name for name in schema.names if holds_bytes(schema.field(name).type)]
    image = _pick(file, "image", "image bytes", [name for name in IMAGE_COLUMNS if name in images] or images, schema)
    labels = [name for name in LABEL_COLUMNS if name in schema.names and name != image]
    class_labels = [name for name in schema.names if _class_names(schema, name)]
    return image, _pick(file, "label", "labels", labels[:1] or class_labels, schema)


def _pick(file: Path, name: str, what: str, names: list[str], schema: Any) -> str:
    if len(names) != 1:
        has = f"several columns ({', '.join(names)})" if names else "no column"
        raise UserError(
            f'{file} has {has} of {what} among {shorten(", ".join(schema.names))}: name one "{name}"; '
            "where images are files, list their paths and labels in a CSV."
        )
    return names[0]


def _refuse_paths(file: Path, table: Any, column: str) -> None:
    """`datasets` writes paths instead of bytes by default: refuse them before every image is unreadable."""
    if table.metadata.num_rows == 0:
        return
    first = None
    with suppress(*_DAMAGE):  # one damaged group is no reason to refuse the others
        first = next(table.iter_batches(batch_size=1, columns=[column], use_threads=False)).column(0)[0].as_py()
    if isinstance(first, dict) and not first.get("bytes"):
        raise UserError(f"{file} contains paths without image bytes: write it again with the images embedded.")


def _class_names(schema: Any, column: str) -> tuple[str, ...] | None:
    """The names in the hub's metadata of a ClassLabel column, alone or in a list."""
    text = (schema.metadata or {}).get(b"huggingface")
    feature: Any = json.loads(text).get("info", {}).get("features", {}).get(column) if text else None
    if isinstance(feature, list) and feature:
        feature = feature[0]
    if isinstance(feature, dict) and isinstance(feature.get("feature"), dict):
        feature = feature["feature"]
    names: Iterable[str] | None = feature.get("names") if isinstance(feature, dict) else None
    return unique_names(names or ()) or None


@contextmanager
def open_parquet(file: Path) -> Generator[Any]:
    """The opened file; damage that is found while it is open becomes a UserError with the file's name."""
    arrow = _arrow()
    try:
        with arrow.ParquetFile(file) as table:
            yield table
    except UserError:
        raise
    except _DAMAGE as error:
        raise UserError(f"{file} is not a readable Parquet file ({_message(error)}): copy it again.") from error


def row_group_sizes(table: Any) -> list[int]:
    return [table.metadata.row_group(group).num_rows for group in range(table.num_row_groups)]


def row_keys(files: Sequence[Path], rows: Sequence[Sequence[int]]) -> list[str]:
    """Readable names of the rows, such as "train-0.parquet:3"."""
    return [f"{file.name}:{row}" for file, counts in zip(files, rows, strict=True) for row in range(sum(counts))]


def _message(error: Exception) -> str:
    """On one line: pyarrow uses several, and quotes bytes that it did not understand."""
    plain = (letter if letter.isprintable() else " " for letter in str(error))
    return " ".join("".join(plain).split()).rstrip(".")


def _arrow() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise UserError("Parquet needs pyarrow: pip install 'vitral[data]'.") from error
    return pyarrow.parquet
