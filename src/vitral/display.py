"""Display of progress and results: a bar in terminals and notebooks, lines in log files, summaries of results, and
tables on standard output.

`vitral.train(...)` and the command line use the same display; trackers (`trackers.py`) handle the same events.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from html import escape
from pathlib import Path
from types import TracebackType
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as ProgressBar
from rich.table import Column, Table
from rich.text import Text

from vitral.errors import printable
from vitral.events import (
    Evaluated,
    Event,
    EventHandler,
    Note,
    Progress,
    RunDirChosen,
    RunStarted,
    Saved,
    StepDone,
)

_LOG_SECONDS = 20.0  # between lines if there is no terminal
_WARM_UP = 5  # steps: workers start, three steps run eagerly and one is captured before a GPU replays them
_RECENT = 100  # steps; their mean and not their median, since batches come in bursts where loading is the slower part
_WAITING = 0.05  # share of the time that is shown as spent waiting for data; less is not worth acting on
_SHOWN = 4  # entries of the summary in one line
_PRINTED_NOTES: set[str] = set()  # by this process, to log files


class ThroughputMeter:
    """Speed and remaining time of a run: the mean of its recent steps, before those its resource estimate."""

    def __init__(self, started: RunStarted) -> None:
        self.steps_left = started.steps - started.step
        self.evaluations_left = started.evaluations
        self.step_seconds = started.step_seconds
        self.evaluation_seconds = started.evaluation_seconds
        self.data_share = 0.0  # share of a step's time spent waiting for data
        self.images_per_second = 0.0  # 0: not known yet
        self._warm = started.step + _WARM_UP
        self._recent: deque[StepDone] = deque(maxlen=_RECENT)

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepDone):
            self.steps_left = event.steps - event.step
            if event.step > self._warm:
                self._add_step(event)
        elif isinstance(event, Evaluated):
            self.evaluations_left = max(self.evaluations_left - 1, 0)
            self.evaluation_seconds = event.seconds

    def seconds_left(self) -> float:
        return self.steps_left * self.step_seconds + self.evaluations_left * self.evaluation_seconds

    def _add_step(self, event: StepDone) -> None:
        self._recent.append(event)
        seconds = max(sum(step.seconds for step in self._recent), 1e-9)
        self.step_seconds = seconds / len(self._recent)
        self.data_share = sum(step.data_seconds for step in self._recent) / seconds
        self.images_per_second = event.images / self.step_seconds


class Display:
    """Shows events on standard error, or in the output of a notebook's cell; an event handler and context manager."""

    def __init__(self, quiet: bool = False) -> None:
        # No markup: a class may be called "[red]".
        self.console = Console(stderr=True, highlight=False, markup=False, emoji=False, quiet=quiet)
        self.quiet = quiet
        self.live = self.console.is_terminal or self.console.is_jupyter
        # The bar shrinks first, so that a narrow terminal cuts neither the name of the task nor the time left.
        columns = (
            TextColumn("{task.description:<10}", table_column=Column(no_wrap=True, min_width=10)),
            BarColumn(bar_width=None, table_column=Column(min_width=1, max_width=28, ratio=1)),
            TextColumn("{task.fields[text]}", table_column=Column(no_wrap=True)),
        )
        self.bar = ProgressBar(*columns, console=self.console, transient=True)
        self.task = self.bar.add_task("preparing", total=None, text="")
        self.throughput: ThroughputMeter | None = None
        self.last_step: StepDone | None = None
        self.folder = ""
        self.saved_step = 0  # the step to resume from; 0 if there is none, or the run is complete
        self.task_progress = Progress("", 0, 0, "")
        self.task_started = 0.0
        self.last_line = time.monotonic()

    def __enter__(self) -> Display:
        if self.live:
            self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.live:
            self.bar.stop()

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._show_start(event)
        elif isinstance(event, Note):
            self.print(event.text)
        elif isinstance(event, RunDirChosen):
            self.folder = event.folder
            self.print(f"run folder: {event.folder}")
        elif isinstance(event, Progress):
            self._show(event.task, event.done, event.total, self._progress_text(event))
        if self.throughput is not None:
            self.throughput(event)
        if isinstance(event, StepDone):
            self._show_step(event)
        elif isinstance(event, Evaluated):
            best = "  (best so far)" if event.best else ""
            self.print(f"step {event.step:,}: {headline(event.metrics)}{best}")
            self.last_line = time.monotonic()
        elif isinstance(event, Saved):
            self.saved_step = event.step if self.last_step and event.step < self.last_step.steps else 0

    def print(self, text: str) -> None:
        """Print a line above the bar; in a terminal it is wrapped between words, in a log file it stays one line."""
        self.console.print(printable(text), soft_wrap=not self.live)

    def _progress_text(self, event: Progress) -> str:
        text = f"{event.done:,} of {event.total:,} {event.unit}"
        last, self.task_progress = self.task_progress, event
        if last.task != event.task or event.done < last.done:  # a run evaluates many times: each starts at 0 again
            self.task_started = time.monotonic()
        elif 0 < event.done < event.total:
            left = (time.monotonic() - self.task_started) / event.done * (event.total - event.done)
            text += f"  {duration(left)} left" if left >= 1 else ""
        return text

    def _show_start(self, event: RunStarted) -> None:
        self.throughput, self.saved_step = ThroughputMeter(event), event.step
        left = self.throughput.seconds_left()
        share = -(-event.batch // event.processes)
        microbatches = -(-share // event.microbatch)
        self.print(
            f"batch {event.batch} = {event.processes} process{'es' * (event.processes > 1)} x {microbatches} microbatch"
            f"{'es' * (microbatches > 1)} of {min(event.microbatch, share)}; {event.steps:,} "
            f"step{'s' * (event.steps > 1)}; peak memory about {event.peak_bytes / 1e9:.1f} GB; "
            f"{'less than a second' if left < 1 else f'about {duration(left)}'}"
        )

    def _show_step(self, event: StepDone) -> None:
        assert self.throughput is not None
        self.last_step = event
        accuracy = "" if event.accuracy is None else f"  accuracy {event.accuracy:.0%}"
        speed = self.throughput.images_per_second  # not known after one step, nor for cached features
        rate = f"  {speed:,.0f} images/s" if speed else ""
        share = self.throughput.data_share
        waiting = f"  waiting for data {share:.0%}" if share >= _WAITING else ""
        left = duration(self.throughput.seconds_left())
        text = f"{event.step:,}/{event.steps:,}  loss {event.loss:.3f}{accuracy}  {left} left{rate}{waiting}"
        self._show("training", event.step, event.steps, text)

    def _show(self, task: str, done: int, total: int, text: str) -> None:
        if self.live:
            self.bar.update(self.task, description=task, completed=done, total=total, text=text)
        elif not self.quiet and time.monotonic() - self.last_line > _LOG_SECONDS:
            self.last_line = time.monotonic()
            self.console.print(f"{task} {text}", soft_wrap=True)


@contextmanager
def displayed(on_event: EventHandler | None) -> Iterator[EventHandler]:
    """The handler given; without one a `Display`, of the first of several processes.

    In a log file a note is printed once, so that a program which calls a verb for each image does not fill it.
    """
    if on_event is not None:
        yield on_event
        return
    with Display(quiet=os.environ.get("RANK", "0") != "0") as display:
        yield display if display.live else _without_repeated_notes(display)


def _without_repeated_notes(display: Display) -> EventHandler:
    def handle(event: Event) -> None:
        if isinstance(event, Note):
            if event.text in _PRINTED_NOTES:
                return
            _PRINTED_NOTES.add(event.text)
        display(event)

    return handle


def headline(metrics: dict[str, Any]) -> str:
    """The main numbers of an evaluation, in one line."""
    n = f"(n = {metrics['n']:,})"
    if "masked_loss" in metrics:
        baselines = {"neighbour_loss": "mean of neighbours", "histogram_entropy": "histogram"}
        compared = ", ".join(f"{name} {metrics[key]:.3f}" for key, name in baselines.items() if key in metrics)
        return f"masked loss {metrics['masked_loss']:.4f} ({compared}) {n}"
    if "mean_average_precision" in metrics:
        return f"mAP {metrics['mean_average_precision']:.2%}, macro F1 {metrics['macro_f1']:.2%} {n}"
    return f"accuracy {metrics['top1']:.2%}, mean per class {metrics['mean_per_class']:.2%} {n}"


def with_deviation(mean: str, deviation: str, runs: int) -> str:
    """A mean over runs; "+-" always means their standard deviation, and intervals are written "a to b"."""
    return f"{mean} +- {deviation} (mean and standard deviation of {runs} seeds)"


def interval_text(low: float, high: float) -> str:
    """(0.9, 0.95) -> "95 % interval 90.00% to 95.00%" """
    return f"95 % interval {low:.2%} to {high:.2%}"


def duration(seconds: float) -> str:
    """90 -> "1 min 30 s" """
    if round(seconds, 1) < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min"


class SummaryRepr:
    """Base of result classes: `repr` and the HTML of notebooks are made of `summary`."""

    def summary(self) -> Mapping[str, str]:
        """The result in a few values, the headline number first."""
        raise NotImplementedError

    def as_dict(self) -> Any:
        """The result as JSON can hold it."""
        return {name: _plain(value) for name, value in vars(self).items()}

    def __repr__(self) -> str:
        entries = list(self.summary().items())[:_SHOWN]
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in entries)})"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in self.summary().items()
        )
        return f"<table><caption>{type(self).__name__}</caption>{rows}</table>"


def _plain(value: Any) -> Any:
    """A value as JSON can hold it: what has fields as a dict, a path as text."""
    if hasattr(value, "as_dict"):
        return value.as_dict()
    if is_dataclass(value):
        return {name: _plain(inner) for name, inner in vars(value).items()}
    if hasattr(value, "_asdict"):
        return value._asdict()
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value))
    return str(value) if isinstance(value, Path) else value


def score_summary(metrics: Mapping[str, float | None]) -> dict[str, str]:
    """The headline number of an evaluation and its number of images."""
    for key, name in (("masked_loss", "masked_loss"), ("mean_average_precision", "mAP"), ("top1", "top1")):
        value = metrics.get(key)
        if value is not None:
            return {name: f"{value:.4f}" if key == "masked_loss" else f"{value:.2%}", "n": f"{metrics['n']:,}"}
    return {"n": f"{metrics['n']:,}"}


class _Stdout(Console):
    def on_broken_pipe(self) -> None:
        """Let `main` handle a reader (head, less) that has closed the pipe."""
        raise BrokenPipeError


def _stdout() -> Console:
    """A console that does not cut tables if the output is not a terminal."""
    return _Stdout(width=None if sys.stdout.isatty() else 200, highlight=False)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1, note: str = "") -> None:
    """Print a table; columns after the first `left` hold numbers and are aligned to the right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < left else "right", no_wrap=i == 0 or i >= left, overflow="fold")
    for row in rows:
        table.add_row(*(_text(cell) for cell in row))
    out = _stdout()
    out.print(table)
    for line in note.split("\n") if note else []:
        out.print(_text(line))


def _text(cell: str) -> Text:
    """A cell without markup or control characters; a line feed in a name would look like another row."""
    return Text(printable(cell).replace("\n", "\\n"))


def print_facts(facts: Mapping[str, str]) -> None:
    """Print names and values, one per line, without those that are empty."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        if value:
            table.add_row(name, _text(value))
    _stdout().print(table)
