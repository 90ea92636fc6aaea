"""`benchmark`: the speed of this machine beside other libraries, in a file and on a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from vitral.atomic import checked_output
from vitral.bench import start, sweep
from vitral.bench.backends import Field, Task, default_modes, field
from vitral.bench.backends import Work as Raced
from vitral.bench.benchmark import Tell, race
from vitral.bench.plot import chart
from vitral.bench.results import (
    COLUMNS,
    Row,
    merged,
    page,
    page_name,
    ratio,
    read_rows,
    remarks,
    table,
    write_page,
    write_rows,
)
from vitral.data.loader import cores, default_workers
from vitral.errors import UserError
from vitral.events import EventHandler, Note
from vitral.models.device import check_device, default_device
from vitral.progress import displayed
from vitral.reprs import SummaryRepr

Work = Literal[Raced, "growth"]

_MODELS = {"cuda": "ViT-B/16", "cpu": "ViT-Ti/16"}
_TORCH = ("timm", "transformers", "torchvision")
_PEERS = {
    **dict.fromkeys(("infer", "latency", "predict"), (*_TORCH, "onnxruntime")),
    **{"train": _TORCH, "data": ("torchvision",), "start": ("transformers",), "growth": ()},
}
_BATCHES = {
    "cuda": {"train": 256, "infer": 512, "data": 256, "predict": 256, "growth": 32},
    "cpu": {"train": 8, "infer": 8, "data": 32, "predict": 32, "growth": 1},
}


@dataclass(frozen=True, repr=False)
class BenchmarkResult(SummaryRepr):
    """The rows of a call, and the file that they were added to."""

    rows: list[Row]  # of this call
    known: list[Row]  # of the file, these among them, on the same hardware
    notes: tuple[str, ...]  # who was left out, how ours compares, and what grows too fast
    results: Path
    page: Path

    def summary(self) -> dict[str, str]:
        ratios = ", ".join(f"{value:.2f}" for _, value in self.ratios())
        return {
            "speed over the best peer": ratios or "not compared",
            "n": f"{len(self.rows):,}",
            "page": str(self.page),
        }

    def as_dict(self) -> list[dict[str, Any]]:
        """JSON-ready: the rows of this call."""
        return [asdict(row) for row in self.rows]

    def table(self) -> tuple[tuple[str, ...], list[list[str]]]:
        """Columns and cells: the rows of this call, and older ones that they may be compared with."""
        races = {row.race for row in self.rows}
        return COLUMNS, table([row for row in self.known if row.race in races])

    def ratios(self) -> list[tuple[Row, float]]:
        """Our rows of this call with their speed over the best peer's."""
        found = [(row, ratio(row, self.known)) for row in self.rows]
        return [(row, compared[0]) for row, compared in found if compared is not None]


def benchmark(
    work: Work = "train",
    *,
    model: str = "",
    batch: int | None = None,
    against: Sequence[str] | None = None,
    settings: Sequence[str] = (),
    attention: Sequence[str] = ("auto",),
    rounds: int = 5,
    data: str | Path = "",
    workers: int | None = None,
    out: str | Path = "benchmarks/results.json",
    device: str = "",
    on_event: EventHandler | None = None,
) -> BenchmarkResult:
    """Measure the speed of this machine beside other libraries.

    Each library runs in a process of its own, in turns, after a check that its outputs agree with ours.

    Args:
        work: train (whole steps), infer (batches on the device), latency (one image in, five names out), data (files to
            the device), predict (files to predictions), start (the first answer of a command) or growth (larger images,
            batches and depths).
        model: name of the model; ViT-B/16 on a GPU and ViT-Ti/16 on a CPU when not given.
        batch: images per step; chosen when not given.
        against: timm, transformers, torchvision, onnxruntime, or none; all that are installed when not given.
        settings: eager, compile, graphs (compiled, with CUDA graphs); usually the fastest when not given.
        attention: attention backends to try on an NVIDIA GPU: auto, flash, cudnn, efficient.
        rounds: turns of each library.
        data: folder of class folders, for data and predict.
        workers: processes that read images; chosen when not given.
        out: .json file that keeps all rows; a page for this hardware is written beside it.
        device: cpu or cuda; chosen when not given.
        on_event: handler of notes about the progress.

    Returns:
        The rows of this call, those of the file for the same hardware, and notes that compare them.

    Raises:
        UserError: where an argument is wrong, or nothing can be timed.
    """
    if against is not None:
        against = [name for name in against if name != "none"]
    with displayed(on_event) as handler:
        return _benchmark(
            work,
            model,
            batch,
            against,
            settings,
            attention,
            rounds,
            data,
            workers,
            out,
            device,
            lambda text: handler(Note(text)),
        )


def _benchmark(
    work: Work,
    model: str,
    batch: int | None,
    against: Sequence[str] | None,
    settings: Sequence[str],
    attention: Sequence[str],
    rounds: int,
    data: str | Path,
    workers: int | None,
    out: str | Path,
    device: str,
    tell: Tell,
) -> BenchmarkResult:
    check_device(device)
    if device not in ("", "cpu", "cuda"):
        raise UserError("the bench runs on cpu or cuda; CUDA_VISIBLE_DEVICES chooses one of several GPUs.")
    _check(work, rounds, batch, data, workers)
    if work == "growth" and (against or len(settings) > 1):
        raise UserError("growth times vitral alone, in one setting: leave out --against, and name one of --settings.")
    out = checked_output(out, (".json",), "--out")
    before = read_rows(out)
    task = _task(work, model, batch, data, workers, device or default_device().type)
    rows, notes = _measured(work, task, _field(work, task, against, settings, attention), rounds, tell)
    if not rows:
        raise UserError(f"nobody could be timed ({' '.join(notes)}): choose other settings.")
    everything = merged(before, rows)
    write_rows(out, everything)
    known = [row for row in everything if row.facts.get("hardware") == rows[0].facts.get("hardware")]
    races = {row.race for row in rows}
    said = (*notes, *_remarks([row for row in known if row.race in races]))
    return BenchmarkResult(rows, known, said, out, _write_page(out.parent, known))


def _measured(work: Work, task: Task, starting: Field, rounds: int, tell: Tell) -> tuple[list[Row], tuple[str, ...]]:
    for sentence in starting.absent:
        tell(sentence)
    if work == "growth":
        return sweep.measure(task, starting.backends[0], tell), ()
    if work == "start":
        return start.measure(task.model, [one.library for one in starting.backends], rounds, tell), starting.absent
    outcome = race(task, starting.backends, rounds=rounds, tell=tell)
    return outcome.rows, (*starting.absent, *outcome.failed)


def _task(work: Work, model: str, batch: int | None, data: str | Path, workers: int | None, device: str) -> Task:
    kind = "cuda" if device == "cuda" else "cpu"
    if work == "start":
        kind, model = "cpu", model or "ViT-Ti/16"
    raced: Raced = "train" if work == "growth" else work
    size = 1 if work in ("latency", "start") else batch or _BATCHES[kind][work]
    return Task(
        raced,
        model or _MODELS[kind],
        size,
        kind,
        folder=str(_class_folders(Path(data))) if data else "",
        workers=_workers(work, kind) if workers is None else workers,
    )


def _field(
    work: Work, task: Task, against: Sequence[str] | None, settings: Sequence[str], attention: Sequence[str]
) -> Field:
    peers = _PEERS[work] if against is None else against
    if against is None and task.device == "cuda":
        peers = tuple(name for name in peers if name != "onnxruntime")  # who could never do it needs no mention
    return field(task, peers, tuple(settings) or default_modes(task.device), attention)


def _workers(work: Work, device: str) -> int:
    """Loaders alone get all cores, and those beside a model what training would give them."""
    return cores() if work == "data" else default_workers(device)


def _class_folders(folder: Path) -> Path:
    """Where the classes are: torchvision does not look for splits."""
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder: name one that has a sub-folder of images per class.")
    return folder / "train" if (folder / "train").is_dir() else folder


def _check(work: str, rounds: int, batch: int | None, data: str | Path, workers: int | None) -> None:
    if work not in get_args(Work):
        raise UserError(f'there is no bench "{work}": use {", ".join(get_args(Work))}.')
    if rounds < 1 or (batch is not None and batch < 1):
        raise UserError("rounds and batch must be whole numbers above 0.")
    if workers is not None and workers < 0:
        raise UserError("workers must be 0 or more processes.")
    if work in ("data", "predict") and not data:
        raise UserError(f"bench {work} reads files: name a folder of class folders with --data.")


def _remarks(rows: list[Row]) -> list[str]:
    return [*remarks(rows), *sweep.too_steep(sweep.points(rows))]


def _write_page(folder: Path, rows: list[Row]) -> Path:
    name = page_name(rows)
    figures = []
    if grown := sweep.newest(rows):
        write_page(folder / f"{name}-growth.svg", chart(sweep.points(grown), sweep.title(grown)))
        figures.append(f"{name}-growth.svg")
    write_page(folder / f"{name}.md", page(rows, remarks=_remarks(rows), figures=figures))
    return folder / f"{name}.md"
