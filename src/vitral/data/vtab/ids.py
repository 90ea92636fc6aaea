"""Which images a task takes, as a text that two machines can compare: ROOT/vtab-ids/TASK.txt.

A line states the split, the place in it, the key and the sha256 of the image as it is stored. Keys are for people: the
same images may lie in files of another layout, so what is compared, and what the checksum on top covers, is the rest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from vitral.aside import written_aside
from vitral.data.images import UnreadableImage
from vitral.data.splits import Reader
from vitral.data.vtab.readers import Masks
from vitral.data.vtab.task_data import VtabTask
from vitral.errors import UserError

FOLDER = "vtab-ids"


def write_ids(task: VtabTask, folder: str | Path | None = None) -> str:
    """Writes the list, or compares with the one that is there, and says which. Reads every image of the task.

    `folder` is where lists are kept, `vtab-ids` beside the tasks' folders unless given.
    """
    place = Path(folder) if folder is not None else task.root / FOLDER
    file = place / f"{task.task.name}.txt"
    lines = list(_lines(task))
    if file.is_file():
        _compare(file, file.read_text(encoding="utf-8", errors="surrogateescape").split("\n"), lines)
        return f"The images of {task.task.name} are those of {file}, {len(lines):,} of them."
    text = "\n".join([*_head(task, lines), *lines])
    with written_aside(file) as aside:
        aside.write_text(f"{text}\n", encoding="utf-8", errors="surrogateescape")
    return f"The {len(lines):,} images of {task.task.name} are listed in {file}."


def _head(task: VtabTask, lines: list[str]) -> list[str]:
    digest = hashlib.sha256("\n".join(map(_compared, lines)).encode()).hexdigest()
    about = f"{task.task.name}, {len(lines)} images, sha256 of the list: {digest}"
    return [f"# {text}" for text in (about, task.order, *task.notes)]


def _lines(task: VtabTask) -> Iterator[str]:
    for split in (task.train800, task.val200, task.test):
        for index, key in enumerate(split.keys):
            try:
                digest = _digest(split.reader, index)
            except UnreadableImage as error:
                raise UserError(f"{key} of {task.task.name} cannot be read ({error}): copy it again.") from error
            yield f"{split.name}\t{index}\t{key}\t{digest}"


def _digest(reader: Reader, index: int) -> str:
    data = reader.stored.read(index) if isinstance(reader, Masks) else reader.read(index)
    return hashlib.sha256(data if isinstance(data, bytes) else data.tobytes()).hexdigest()


def _compared(line: str) -> str:
    split, index, *_, digest = line.split("\t")
    return f"{split} {index} {digest}"


def _compare(file: Path, before: list[str], lines: list[str]) -> None:
    listed = [line for line in before if line and not line.startswith("#")]
    if any(line.count("\t") < 3 for line in listed):
        raise UserError(f"{file} is damaged: remove it to list the images anew.")
    for old, new in zip(listed, lines, strict=False):
        if _compared(old) != _compared(new):
            where = " ".join(new.split()[:2])
            raise UserError(
                f"{file} lists another image at {where} ({old!r} is now {new!r}): restore that one, "
                "or remove the list to have it made anew."
            )
    if len(listed) != len(lines):
        raise UserError(f"{file} lists {len(listed)} images and there are {len(lines)}: remove it to list them anew.")
