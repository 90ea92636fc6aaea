"""`benchmark`: the speed compared with other libraries, in a file and on a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

from vitral.atomic import checked_output, write_text
from vitral.bench import results
from vitral.bench.backends import EXPORTED, Backend, Work, Workload, default_modes, select_backends
from vitral.bench.benchmark import (
    measure_cold_start,
    newest_sweep,
    run_benchmark,
    run_sweep,
    summarize_sweep,
    sweep_chart,
)
from vitral.bench.results import BenchmarkRow
from vitral.data.loader import cores, default_workers
from vitral.display import SummaryRepr, displayed
from vitral.errors import UserError
from vitral.events import EventHandler, Note
from vitral.models.build import check_device, default_device

_MODELS = {"cuda": "ViT-B/16", "cpu": "ViT-Ti/16"}
_TORCH_PEERS = ("timm", "transformers", "torchvision")
_PEERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("infer", "latency", "predict"), (*_TORCH_PEERS, *EXPORTED)),
    **{"train": _TORCH_PEERS, "data": ("torchvision",), "start": ("transformers",), "growth": ()},
}
_BATCHES = {
    "cuda": {"train": 256, "infer": 512, "data": 256, "predict": 256, "growth": 32},
    "cpu": {"train": 8, "infer": 8, "data": 32, "predict": 32, "growth": 1},
}


@dataclass(frozen=True, repr=False)
class BenchmarkReport(SummaryRepr):
    """The rows of a call, and the file that they were added to."""

    rows: list[BenchmarkRow]
    hardware_rows: list[BenchmarkRow]  # all rows of the file on the same hardware, these included
    notes: tuple[str, ...]  # excluded backends, comparisons, and where time grows faster than the arithmetic
    results: Path
    page: Path

    def summary(self) -> dict[str, str]:
        ratios = ", ".join(f"{value:.2f}" for _, value in self.speedups())
        return {
            "speed over the best peer": ratios or "not compared",
            "n": f"{len(self.rows):,}",
            "page": str(self.page),
        }

    def as_dict(self) -> list[dict[str, Any]]:
        return [asdict(row) for row in self.rows]

    def table(self) -> tuple[tuple[str, ...], list[list[str]]]:
        """Columns and cells: the rows of this benchmark, and older ones that they may be compared with."""
        return results.COLUMNS, results.table(_comparable(self.rows, self.hardware_rows))

    def speedups(self) -> list[tuple[BenchmarkRow, float]]:
        """Our rows of this benchmark with their speed relative to the best peer."""
        ratios = [(row, results.speedup(row, self.hardware_rows)) for row in self.rows]
        return [(row, ratio) for row, ratio in ratios if ratio is not None]


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
) -> BenchmarkReport:
    """Measure the speed on this machine, compared with other libraries.

    Each library runs in a separate process, alternating, after a check that vitral's outputs are right.

    Args:
        work: train (whole steps), infer (batches on the device), latency (one image to five classes), data (files to
            the device), predict (files to predictions), start (the first output of a command) or growth (larger images,
            batches and depths).
        model: name of the model, also DINOv3-B/16, CLIP-B/16 and OpenCLIP-B/16 (or another size); by default ViT-B/16
            on a GPU and ViT-Ti/16 on a CPU.
        batch: images per step; chosen automatically by default.
        against: timm, transformers, torchvision, onnxruntime and openvino (which run vitral's exported model), or none;
            by default all that are installed.
        settings: eager, compile, graphs (compiled, with CUDA graphs), autotune (the same, with the fastest of many
            kernels for each product); by default the one that is usually fastest.
        attention: attention backends to try on an NVIDIA GPU: auto, flash, cudnn, efficient.
        rounds: number of rounds in which the libraries alternate.
        data: folder of class folders, for data and predict.
        workers: processes that read images; chosen automatically by default.
        out: .json file of all rows; a page for this hardware is written next to it.
        device: cpu or cuda; chosen automatically by default.
        on_event: handler of notes about the progress.

    Returns:
        The rows of this call, those of the file for the same hardware, and notes that compare them.

    Raises:
        UserError: if an argument is wrong, or nothing can be timed.
    """
    if against is not None:
        against = [name for name in against if name != "none"]
    check_device(device)
    if device not in ("", "cpu", "cuda"):
        raise UserError("bench runs on cpu or cuda: select a GPU with CUDA_VISIBLE_DEVICES.")
    _check(work, rounds, batch, data, workers)
    if work == "growth" and (against or len(settings) > 1):
        raise UserError("growth times vitral alone, in one setting: omit --against, and name one of --settings.")
    out = checked_output(out, (".json",), "--out")
    old_rows = results.read_rows(out)
    workload = _workload(work, model, batch, data, workers, device or default_device().type)
    backends, excluded = _select(workload, against, settings, attention)
    with displayed(on_event) as handler:
        for sentence in excluded:
            handler(Note(sentence))
        rows, failed = _measure(workload, backends, rounds, handler)
    failures = [*excluded, *failed]
    if not rows:
        raise UserError(f"no backend could be timed ({' '.join(failures)}): choose other settings.")
    all_rows = results.merge_rows(old_rows, rows)
    results.write_rows(out, all_rows)
    hardware_rows = [row for row in all_rows if row.hardware == rows[0].hardware]
    comparable = _comparable(rows, hardware_rows)
    notes = (*failures, *results.summarize(comparable), *summarize_sweep(comparable))
    return BenchmarkReport(rows, hardware_rows, notes, out, write_page(out.parent, hardware_rows))


def write_page(folder: Path, rows: Sequence[BenchmarkRow]) -> Path:
    """Write the Markdown page about the rows of one machine, and the chart of its last sweep."""
    name, figures = results.page_name(rows), []
    if sweep := newest_sweep(rows):
        figures.append(f"{name}-growth.svg")
        write_text(folder / figures[0], sweep_chart(sweep))
    path = folder / f"{name}.md"
    write_text(path, results.page(rows, summary=[*results.summarize(rows), *summarize_sweep(rows)], figures=figures))
    return path


def _measure(
    workload: Workload, backends: Sequence[Backend], rounds: int, on_event: EventHandler
) -> tuple[list[BenchmarkRow], list[str]]:
    """The rows, and one sentence for each backend that failed."""
    if workload.work == "growth":
        return run_sweep(replace(workload, work="train"), backends[0], on_event), []
    if workload.work == "start":
        return measure_cold_start(workload, [backend.library for backend in backends], rounds, on_event), []
    return run_benchmark(workload, backends, rounds=rounds, on_event=on_event)


def _workload(
    work: Work, model: str, batch: int | None, data: str | Path, workers: int | None, device: str
) -> Workload:
    device = "cuda" if device == "cuda" and work != "start" else "cpu"
    if workers is None:  # loaders alone get all cores, and those that run beside a model what training gives them
        workers = cores() if work == "data" else default_workers(device)
    return Workload(
        work,
        model or _MODELS[device],
        1 if work in ("latency", "start") else batch or _BATCHES[device][work],
        device,
        folder=str(_class_folders(Path(data))) if data else "",
        workers=workers,
    )


def _select(
    workload: Workload, against: Sequence[str] | None, settings: Sequence[str], attention: Sequence[str]
) -> tuple[list[Backend], list[str]]:
    peers = _PEERS[workload.work] if against is None else against
    if against is None and workload.device == "cuda":  # not worth a note on a GPU, where they never take part
        peers = tuple(name for name in peers if name not in EXPORTED)
    return select_backends(workload, peers, tuple(settings) or default_modes(workload.device), attention)


def _class_folders(folder: Path) -> Path:
    """The folder of the class folders: torchvision does not look for splits."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder: name one that has a sub-folder of images per class.")
    return folder / "train" if (folder / "train").is_dir() else folder


def _check(work: str, rounds: int, batch: int | None, data: str | Path, workers: int | None) -> None:
    if work not in get_args(Work):
        raise UserError(f'there is no benchmark "{work}": use {", ".join(get_args(Work))}.')
    if rounds < 1 or (batch is not None and batch < 1):
        raise UserError("rounds and batch must be whole numbers above 0.")
    if workers is not None and workers < 0:
        raise UserError("workers must be 0 or more processes.")
    if work in ("data", "predict") and not data:
        raise UserError(f"bench {work} reads files: name a folder of class folders with --data.")


def _comparable(rows: Sequence[BenchmarkRow], hardware_rows: Sequence[BenchmarkRow]) -> list[BenchmarkRow]:
    keys = {row.comparison_key for row in rows}
    return [row for row in hardware_rows if row.comparison_key in keys]
