"""Rows of results: one JSON file that later calls complete, ratios between its rows, and a page for people."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from vitral.atomic import atomic_write
from vitral.bench.backends import OURS
from vitral.checkpoints.write import write_json
from vitral.errors import UserError


@dataclass(frozen=True)
class Row:
    """One backend's result, with all that is needed to judge it."""

    work: str
    model: str
    batch: int
    library: str
    settings: str
    device: str
    precision: str
    seconds: float  # of a step: the median
    low: float  # the quartiles
    high: float
    samples: int  # steps that were timed
    macs: int  # multiply-accumulates of a step by `cost.py`; 0 where none are meant
    rate: float  # FLOP/s of a large matrix product, measured in the same call
    peak_bytes: int
    cold_seconds: float  # from the start of the process to the end of its first step
    call: str  # when the call began: rows of one call were measured in turns
    facts: dict[str, str] = field(default_factory=dict)
    details: dict[str, float] = field(default_factory=dict)

    @property
    def per_second(self) -> float:
        """Images."""
        return self.batch / self.seconds

    @property
    def share(self) -> float:
        """Of the matrix rate; 0 where no arithmetic is meant."""
        return 2.0 * self.macs / self.seconds / self.rate if self.rate else 0.0

    @property
    def label(self) -> str:
        return f"{self.library} ({self.settings})"

    @property
    def place(self) -> tuple[str, str, int, str, str]:
        """What a later measurement of the same replaces."""
        return self.work, self.model, self.batch, self.library, self.settings

    @property
    def race(self) -> tuple[str, str, int, str, str, float]:
        """Rows that may be compared: the same work on the same hardware, with pictures as large where files are read"""
        hardware = self.facts.get("hardware", "")
        return self.work, self.model, self.batch, self.device, hardware, round(self.megapixels, 3)

    @property
    def megapixels(self) -> float:
        """Of a picture where files are read, else 0."""
        return self.details.get("megapixels", 0.0)

    @property
    def task(self) -> str:
        return f"{self.work}, {self.megapixels:.3f} megapixels" if self.megapixels else self.work


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, method="inclusive")
    return low, median, high


def read_rows(path: Path) -> list[Row]:
    """The rows of a results file; none where there is no file yet."""
    if not path.exists():
        return []
    names = {entry.name for entry in fields(Row)}
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        return [Row(**{name: value for name, value in row.items() if name in names}) for row in rows]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a file of results: give --out another name.") from error


def merged(old: Iterable[Row], new: Iterable[Row]) -> list[Row]:
    """New rows take the places of old ones of the same kind and hardware; all others stay."""
    rows = {(row.place, row.race): row for row in (*old, *new)}
    return sorted(rows.values(), key=_order)


def _order(row: Row) -> tuple[Any, ...]:
    """By the work, then by the size that grows, then the races, with our rows first."""
    return row.work, row.details.get("value", 0), row.race, row.library != OURS, row.place


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """With the derived numbers beside the measured ones, for readers that do not compute."""
    derived = [{**asdict(row), "images_per_second": row.per_second, "share": row.share} for row in rows]
    write_json(path, {"rows": derived})


def best_peer(row: Row, rows: Sequence[Row]) -> Row | None:
    """The fastest row of another library in the same race."""
    peers = [other for other in rows if other.race == row.race and other.library != OURS]
    return min(peers, key=lambda other: other.seconds, default=None)


def ratio(row: Row, rows: Sequence[Row]) -> tuple[float, bool] | None:
    """Our speed over that of the best peer in the same race, and whether both are of one call; None without a peer."""
    best = best_peer(row, rows)
    if row.library != OURS or best is None:
        return None
    return best.seconds / row.seconds, best.call == row.call


COLUMNS: tuple[str, ...] = (
    *("work", "model", "batch", "backend", "settings", "images/s", "ms", "quartiles ms", "of matrix rate"),
    *("peak GiB", "cold s", "ours / best peer"),
)


def table(rows: Sequence[Row]) -> list[list[str]]:
    """The cells of COLUMNS."""
    return [_cells(row, ratio(row, rows)) for row in rows]


def page(rows: Sequence[Row], *, remarks: Sequence[str] = (), figures: Sequence[str] = ()) -> str:
    """Markdown: how it was measured, what follows, the table, what some rows tell besides, and pictures."""
    lines = [f"# {rows[0].facts.get('hardware', rows[0].device)}", "", *_words(rows), ""]
    if remarks:
        lines += [*(f"- {sentence}" for sentence in remarks), ""]
    lines += _markdown(COLUMNS, table(rows))
    told = [row for row in rows if set(row.details) - {"value"}]
    if told:
        lines += ["", "## Details", ""]
        lines += _markdown(("work", "model", "backend", ""), [_told(row) for row in told])
    for figure in figures:
        lines += ["", f"![{Path(figure).stem}]({figure})"]
    return "\n".join(lines) + "\n"


def write_page(path: Path, text: str) -> None:
    with atomic_write(path) as aside:
        aside.write_text(text, encoding="utf-8")


def page_name(rows: Sequence[Row]) -> str:
    """<hardware>-<date>, of the newest row."""
    hardware = rows[0].facts.get("hardware", rows[0].device)
    plain = "-".join("".join(letter if letter.isalnum() else " " for letter in hardware.lower()).split())
    return f"{plain}-{max(row.call for row in rows)[:10]}"


def _words(rows: Sequence[Row]) -> list[str]:
    versions: dict[str, set[str]] = {}
    for row in rows:
        for name, value in row.facts.items():
            versions.setdefault(name, set()).add(value)
    known = ", ".join(f"{name} {' and '.join(sorted(values))}" for name, values in sorted(versions.items()))
    calls = sorted({row.call for row in rows})
    return [
        "Written by `vitral bench`. Contestants had a process each and took turns; times are medians over steps, with",
        "quartiles. The matrix rate was measured in the same call. A ratio above 1 is in our favour; `*` marks one",
        f"between rows of different calls on the same hardware. Calls: {len(calls)}, the last at {calls[-1]}.",
        "",
        f"{known}.",
    ]


def _cells(row: Row, compared: tuple[float, bool] | None) -> list[str]:
    return [
        row.task,
        row.model,
        str(row.batch),
        row.library,
        row.settings,
        shown(row.per_second),
        f"{1e3 * row.seconds:,.2f}",
        f"{1e3 * row.low:,.2f} - {1e3 * row.high:,.2f}",
        f"{row.share:.0%}" if row.share else "",
        f"{row.peak_bytes / 2**30:.2f}" if row.peak_bytes else "",
        f"{row.cold_seconds:.1f}" if row.cold_seconds else "",
        "" if compared is None else f"{compared[0]:.2f}{'' if compared[1] else '*'}",
    ]


def shown(rate: float) -> str:
    """Images per second, for people."""
    return f"{rate:,.1f}" if rate < 100 else f"{rate:,.0f}"


def _told(row: Row) -> list[str]:
    text = ", ".join(
        f"{name} {value:,.3g}" if value < 1000 else f"{name} {value:,.0f}" for name, value in row.details.items()
    )
    return [row.task, row.model, row.label, text]


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    return lines + [f"| {' | '.join(cells)} |" for cells in rows]


_PERCENTILES = ("p50 ms", "p95 ms", "p99 ms")


def remarks(rows: Sequence[Row]) -> list[str]:
    """One sentence for each race that has a peer, by the fastest row of each side, and one for each loader."""
    return [*_compared(rows), *(_fed(row) for row in rows if "of synthetic speed" in row.details)]


def _compared(rows: Sequence[Row]) -> list[str]:
    found = []
    for race in dict.fromkeys(row.race for row in rows if row.library == OURS):
        ours = min((row for row in rows if row.race == race and row.library == OURS), key=lambda row: row.seconds)
        peer = best_peer(ours, rows)
        if peer is not None:
            found.append(_beside(ours, peer))
    return found


def _beside(ours: Row, peer: Row) -> str:
    said = [f"{_what(ours)}: {ours.label} is {peer.seconds / ours.seconds:.2f} times as fast as {peer.label}"]
    if ours.peak_bytes and peer.peak_bytes and ours.work != "data":  # most of a loader's is in its workers
        said.append(f"with {ours.peak_bytes / peer.peak_bytes:.2f} times its peak memory")
    if all(name in ours.details and name in peer.details for name in _PERCENTILES):
        both = (f"{name[:3]} {ours.details[name]:.2f} against {peer.details[name]:.2f}" for name in _PERCENTILES)
        said.append(f"{', '.join(both)} ms")
    if ours.call != peer.call:
        said.append("measured in different calls")
    return ", ".join(said) + "."


def _fed(row: Row) -> str:
    told = row.details
    return (
        f"{_what(row)}: with {row.label}, training from files runs at {told['of synthetic speed']:.0%} of the speed on "
        f"synthetic images ({shown(told['from files/s'])} and {shown(told['synthetic/s'])} images/s), waiting "
        f"{told['share waiting']:.0%} of the time; {told['workers beside the model']:.0f} workers beside the model, "
        f"{told['workers']:.0f} where the loader is alone."
    )


def _what(row: Row) -> str:
    return f"{row.task}, {row.model}, batch {row.batch}"
