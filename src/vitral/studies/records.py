"""Records of runs: one JSON line each, in any .jsonl file of a study's folder.

A line is appended in one write, and a line that is cut short by a power failure is ignored. Records of several machines
merge by copying their files into one folder: a run that two of them made counts once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from vitral.errors import UserError

FILE = "runs.jsonl"
Status = Literal["ok", "diverged", "failed"]
_BETTER: dict[str, int] = {"ok": 2, "diverged": 1, "failed": 0}


@dataclass(frozen=True)
class Record:
    """What is kept of a run."""

    id: str
    study: str
    changes: Mapping[str, Any]  # what the study varies, with the seed
    trial: bool = False  # made to choose a setting, on the dev split
    status: Status = "ok"
    reason: str = ""  # of a run that diverged or failed
    metrics: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    flops: float = 0.0
    peak_bytes: int = 0
    images_per_second: float = 0.0
    beside: int = 0  # other runs that shared the device, and took a part of its time
    recipe: str = ""  # hash of the complete recipe
    device: str = ""
    version: str = ""

    def to_json(self) -> str:
        """One line, without what is empty."""
        needed = ("id", "study", "changes")
        return json.dumps({key: value for key, value in asdict(self).items() if value or key in needed})


def read_records(folder: Path) -> dict[str, Record]:
    """The records of a folder by run: of several for one run the first that is ok, else the first that diverged, else
    the last failure.

    Raises:
        UserError: a file holds something else.
    """
    records: dict[str, Record] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            try:
                values = json.loads(line)
            except ValueError:  # cut short by a kill while it was written
                continue
            try:
                record = Record(**values)
            except TypeError as error:
                raise UserError(f"line {number} of {path} is not the record of a run: remove it.") from error
            known = records.get(record.id)
            if known is None or known.status == "failed" or _BETTER[record.status] > _BETTER[known.status]:
                records[record.id] = record
    return records


def append_record(folder: Path, record: Record) -> None:
    """Add a record; after a line that was cut short, it starts on a line of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(handle).st_size
        os.lseek(handle, max(size - 1, 0), os.SEEK_SET)
        start = "\n" if size and os.read(handle, 1) != b"\n" else ""
        os.write(handle, f"{start}{record.to_json()}\n".encode())
        os.fsync(handle)
    finally:
        os.close(handle)
