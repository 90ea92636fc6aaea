"""Benchmark rows: one JSON file that later benchmarks add to, comparisons between rows, and a Markdown page."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vitral.bench.backends import OURS, Backend, Workload
from vitral.checkpoints.write import write_json
from vitral.errors import UserError

_PERCENTILES = (50, 95, 99)


@dataclass(frozen=True)
class BenchmarkRow:
    """The result of one backend, with everything that is needed to interpret it."""

    work: str
    model: str
    batch: int
    library: str
    settings: str
    device: str
    precision: str
    seconds: float  # of a step: the median
    seconds_q1: float  # the quartiles
    seconds_q3: float
    samples: int  # timed steps
    started_at: str  # of the benchmark: rows of one benchmark were timed in turns
    macs: int = 0  # multiply-accumulates of a step by `cost.py`; 0 if the arithmetic is not what is timed
    matmul_flops: float = 0.0  # FLOP/s of a large matrix product, measured in the same benchmark
    peak_bytes: int = 0
    startup_seconds: float = 0.0  # from the start of the process to the end of its first step
    axis: str = ""  # what grows in "growth": image, batch or depth
    axis_value: int = 0
    environment: dict[str, str] = field(default_factory=dict)
    details: dict[str, float] = field(default_factory=dict)

    @property
    def images_per_second(self) -> float:
        return self.batch / self.seconds

    @property
    def matmul_share(self) -> float:
        """Achieved FLOP/s relative to `matmul_flops`; 0 if the arithmetic is not what is timed."""
        return 2.0 * self.macs / self.seconds / self.matmul_flops if self.matmul_flops else 0.0

    @property
    def label(self) -> str:
        return f"{self.library} ({self.settings})"

    @property
    def hardware(self) -> str:
        return self.environment.get("hardware", self.device)

    @property
    def megapixels(self) -> float:
        """Mean size of the images where files are read, else 0."""
        return self.details.get("megapixels", 0.0)

    @property
    def work_label(self) -> str:
        size = f"{self.megapixels:.3f} megapixels" if self.megapixels else ""
        return ", ".join(filter(None, (self.work, self.axis, size)))

    @property
    def title(self) -> str:
        return f"{self.work_label}, {self.model}, batch {self.batch}"

    @property
    def comparison_key(self) -> tuple[Any, ...]:
        """Equal for rows that may be compared: the same work on the same hardware, on images of the same size."""
        size = round(self.megapixels, 3)
        return self.work, self.axis, self.axis_value, self.model, self.batch, self.device, self.hardware, size

    @property
    def identity(self) -> tuple[Any, ...]:
        """Equal for rows that replace each other."""
        return *self.comparison_key, self.library != OURS, self.library, self.settings


def timed_row(
    backend: Backend, workload: Workload, seconds: Sequence[float], started_at: str, **values: Any
) -> BenchmarkRow:
    """The row of a backend with the median and the quartiles of its times."""
    low, median, high = quartiles(seconds)
    return BenchmarkRow(
        work=workload.work,
        model=workload.model_name,
        batch=workload.batch,
        library=backend.library,
        settings=backend.settings,
        device=workload.device,
        precision="fp8" if backend.fp8 else workload.precision,
        seconds=median,
        seconds_q1=low,
        seconds_q3=high,
        samples=len(seconds),
        started_at=started_at,
        **values,
    )


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S")


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    low, median, high = statistics.quantiles(values if len(values) > 1 else [*values, *values], method="inclusive")
    return low, median, high


def percentiles_ms(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {f"p{share}_ms": 1e3 * ordered[min(len(ordered) * share // 100, len(ordered) - 1)] for share in _PERCENTILES}


def read_rows(path: Path) -> list[BenchmarkRow]:
    """Read the rows of a results file; none if there is no file yet."""
    if not path.exists():
        return []
    names = {entry.name for entry in fields(BenchmarkRow)}
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        return [BenchmarkRow(**{name: value for name, value in row.items() if name in names}) for row in rows]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a file of benchmark results: give --out another name.") from error


def write_rows(path: Path, rows: Sequence[BenchmarkRow]) -> None:
    """Write a results file, with derived numbers in addition to the measured ones."""
    derived = [
        {**asdict(row), "images_per_second": row.images_per_second, "matmul_share": row.matmul_share} for row in rows
    ]
    write_json(path, {"rows": derived})


def merge_rows(old: Iterable[BenchmarkRow], new: Iterable[BenchmarkRow]) -> list[BenchmarkRow]:
    """All rows, sorted, ours first in each comparison; new rows replace old ones of the same identity."""
    return sorted({row.identity: row for row in (*old, *new)}.values(), key=lambda row: row.identity)


def best_peer(row: BenchmarkRow, rows: Sequence[BenchmarkRow]) -> BenchmarkRow | None:
    """The fastest row of another library; in FP8 only for rows that are, too."""
    peers = [other for other in rows if other.comparison_key == row.comparison_key and other.library != OURS]
    peers = [other for other in peers if other.precision != "fp8" or row.precision == "fp8"]
    return min(peers, key=lambda other: other.seconds, default=None)


def speedup(row: BenchmarkRow, rows: Sequence[BenchmarkRow]) -> float | None:
    """Our speed relative to the best peer; None for rows of peers and without a peer."""
    peer = best_peer(row, rows) if row.library == OURS else None
    return None if peer is None else peer.seconds / row.seconds


COLUMNS: tuple[str, ...] = (
    *("work", "model", "batch", "backend", "settings", "images/s", "ms", "quartiles ms", "of matmul FLOP/s"),
    *("peak GiB", "startup s", "speed-up"),
)


def table(rows: Sequence[BenchmarkRow]) -> list[list[str]]:
    """The cells of COLUMNS."""
    return [_cells(row, rows) for row in rows]


def _cells(row: BenchmarkRow, rows: Sequence[BenchmarkRow]) -> list[str]:
    peer, ratio = best_peer(row, rows), speedup(row, rows)
    other_run = peer is not None and peer.started_at != row.started_at
    return [
        row.work_label,
        row.model,
        str(row.batch),
        row.library,
        row.settings,
        format_rate(row.images_per_second),
        f"{1e3 * row.seconds:,.2f}",
        f"{1e3 * row.seconds_q1:,.2f} - {1e3 * row.seconds_q3:,.2f}",
        f"{row.matmul_share:.0%}" if row.matmul_share else "",
        f"{row.peak_bytes / 2**30:.2f}" if row.peak_bytes else "",
        f"{row.startup_seconds:.1f}" if row.startup_seconds else "",
        "" if ratio is None else f"{ratio:.2f}{'*' if other_run else ''}",
    ]


def format_rate(rate: float) -> str:
    return f"{rate:,.1f}" if rate < 100 else f"{rate:,.0f}"


def page(rows: Sequence[BenchmarkRow], *, summary: Sequence[str] = (), figures: Sequence[str] = ()) -> str:
    """A Markdown page of the rows of one machine: sentences, the table, and images at these paths."""
    versions: dict[str, set[str]] = {}
    for row in rows:
        for name, value in row.environment.items():
            versions.setdefault(name, set()).add(value)
    runs = sorted({row.started_at for row in rows})
    lines = [
        f"# {rows[0].hardware}",
        "",
        "Written by `vitral bench`. Every backend ran in its own process, and the backends took turns. Times are",
        "medians over steps, with quartiles. The FLOP/s of a large matrix product were measured in the same run. A",
        "speed-up above 1 means that vitral is faster than the best other library; `*` marks a comparison between runs",
        f"on the same hardware. Runs: {len(runs)}, the last at {runs[-1]}.",
        "",
        ", ".join(f"{name} {' and '.join(sorted(values))}" for name, values in sorted(versions.items())) + ".",
        "",
    ]
    if summary:
        lines += [*(f"- {sentence}" for sentence in summary), ""]
    lines += _markdown_table(COLUMNS, table(rows))
    if detailed := [row for row in rows if row.details]:
        cells = [[row.work_label, row.model, row.label, _details_text(row)] for row in detailed]
        lines += ["", "## Details", "", *_markdown_table(("work", "model", "backend", "details"), cells)]
    for figure in figures:
        lines += ["", f"![{Path(figure).stem}]({figure})"]
    return "\n".join(lines) + "\n"


def page_name(rows: Sequence[BenchmarkRow]) -> str:
    """<hardware>-<date of the newest row>"""
    letters = "".join(letter if letter.isalnum() else " " for letter in rows[0].hardware.lower())
    return f"{'-'.join(letters.split())}-{max(row.started_at for row in rows)[:10]}"


def _details_text(row: BenchmarkRow) -> str:
    values = {name.replace("_", " "): value for name, value in row.details.items()}
    return ", ".join(
        f"{name} {value:,.3g}" if value < 1000 else f"{name} {value:,.0f}" for name, value in values.items()
    )


def _markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    return lines + [f"| {' | '.join(cells)} |" for cells in rows]


def summarize(rows: Sequence[BenchmarkRow]) -> list[str]:
    """One sentence per comparison with a peer, by the fastest row of each side, FP8 apart; and one per loader."""
    fastest: dict[tuple[Any, ...], BenchmarkRow] = {}
    for row in sorted(rows, key=lambda row: row.seconds):
        if row.library == OURS:
            fastest.setdefault((row.comparison_key, row.precision == "fp8"), row)
    keys = dict.fromkeys((row.comparison_key, row.precision == "fp8") for row in rows if row.library == OURS)
    pairs = [(fastest[key], best_peer(fastest[key], rows)) for key in keys]
    compared = [_compare(ours, peer) for ours, peer in pairs if peer is not None]
    return [*compared, *(_describe_loader(row) for row in rows if "synthetic_per_second" in row.details)]


def _compare(ours: BenchmarkRow, peer: BenchmarkRow) -> str:
    parts = [f"{ours.title}: {ours.label} is {peer.seconds / ours.seconds:.2f} times as fast as {peer.label}"]
    if ours.peak_bytes and peer.peak_bytes and ours.work != "data":  # most of a loader's memory is in its workers
        parts.append(f"with {ours.peak_bytes / peer.peak_bytes:.2f} times its peak memory")
    latencies = {f"p{share}": f"p{share}_ms" for share in _PERCENTILES}
    if all(key in ours.details and key in peer.details for key in latencies.values()):
        both = (f"{name} {ours.details[key]:.2f} against {peer.details[key]:.2f}" for name, key in latencies.items())
        parts.append(f"{', '.join(both)} ms")
    if ours.started_at != peer.started_at:
        parts.append("measured in different runs")
    return ", ".join(parts) + "."


def _describe_loader(row: BenchmarkRow) -> str:
    details = row.details
    return (
        f"{row.title}: with {row.label}, training from files reaches {details['relative_speed']:.0%} of the speed on "
        f"synthetic images ({format_rate(details['files_per_second'])} and "
        f"{format_rate(details['synthetic_per_second'])} images/s), waiting for data "
        f"{details['data_wait_share']:.0%} of the time; {details['training_workers']:.0f} workers in training, "
        f"{details['workers']:.0f} where the loader runs alone."
    )
