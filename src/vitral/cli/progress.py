"""A run as a person watches it: a bar with loss, accuracy, speed, waiting and time left; plain lines in a log file."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

if TYPE_CHECKING:
    from vitral.api import Evaluated, Event, Started, StepDone, ThroughputMeter
from pathlib import Path

from vitral.errors import UserError

if TYPE_CHECKING:
    from vitral.api import Event


_QUIET_SECONDS = 20.0  # between lines where there is no terminal


class RunDisplay:
    """Listens to a run and shows it on standard error."""

    def __init__(self, quiet: bool = False) -> None:
        # No markup: a class may be called "[red]".
        self.console = Console(stderr=True, highlight=False, markup=False, emoji=False, quiet=quiet)
        self.quiet = quiet
        self.live = self.console.is_terminal
        columns = (TextColumn("{task.description:<10}"), BarColumn(bar_width=28), TextColumn("{task.fields[words]}"))
        self.bar = Progress(*columns, console=self.console, transient=True)
        self.task = self.bar.add_task("preparing", total=None, words="")
        self.pace: ThroughputMeter | None = None
        self.last: StepDone | None = None
        self.folder = ""
        self.saved = 0  # the step to go on from; none where the run is at its end
        self.spoke = time.monotonic()

    def __enter__(self) -> RunDisplay:
        if self.live:
            self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.live:
            self.bar.stop()

    def hear(self, event: Event) -> None:
        from vitral import api

        if isinstance(event, api.Started):
            self._started(event)
        elif isinstance(event, api.Note):
            self.say(event.text)
        elif isinstance(event, api.RunDirChosen):
            self.folder = event.folder
            self.say(f"run folder: {event.folder}")
        elif isinstance(event, api.Decoding):
            self._show(f"reading {event.split}", event.done, event.total, f"{event.done:,} of {event.total:,} images")
        elif isinstance(event, api.EvaluationProgress):
            self._show("testing", event.done, event.total, f"{event.done:,} of {event.total:,} images")
        if self.pace is not None:
            self.pace.hear(event)
        if isinstance(event, api.StepDone):
            self._step(event)
        elif isinstance(event, api.Evaluated):
            self._evaluated(event)
        elif isinstance(event, api.Saved):
            self.saved = event.step if self.last and event.step < self.last.steps else 0

    def say(self, text: str) -> None:
        self.console.print(text, soft_wrap=True)

    def _started(self, event: Started) -> None:
        from vitral import api

        self.pace, self.saved = api.ThroughputMeter(event), event.step
        left = self.pace.seconds_left()
        share = -(-event.batch // event.processes)
        pieces = -(-share // event.micro)
        self.say(
            f"batch {event.batch} = {event.processes} process{'es' * (event.processes > 1)} x {pieces} piece"
            f"{'s' * (pieces > 1)} of {min(event.micro, share)}; {event.steps:,} steps; peak memory about "
            f"{event.peak_bytes / 1e9:.1f} GB; {'less than a second' if left < 1 else f'about {duration(left)}'}"
        )

    def _step(self, event: StepDone) -> None:
        assert self.pace is not None
        self.last = event
        accuracy = "" if event.accuracy is None else f"  accuracy {event.accuracy:.0%}"
        speed = self.pace.images_per_second  # not known after one step, nor for features
        rate = f"  {speed:,.0f} images/s  waiting {self.pace.waiting:.0%}" if speed else ""
        words = (
            f"{event.step:,}/{event.steps:,}  loss {event.loss:.3f}{accuracy}{rate}"
            f"  {duration(self.pace.seconds_left())} left"
        )
        self._show("training", event.step, event.steps, words)

    def _evaluated(self, event: Evaluated) -> None:
        best = "  (best so far)" if event.best else ""
        self.say(f"step {event.step:,}: {headline(event.metrics)}{best}")
        self.spoke = time.monotonic()

    def _show(self, what: str, done: int, total: int, words: str) -> None:
        if self.live:
            self.bar.update(self.task, description=what, completed=done, total=total, words=words)
        elif not self.quiet and time.monotonic() - self.spoke > _QUIET_SECONDS:
            self.spoke = time.monotonic()
            print(f"{what} {words}", file=sys.stderr, flush=True)


def headline(metrics: dict) -> str:
    """The numbers of an evaluation that a person wants first."""
    n = f"(n = {metrics['n']:,})"
    if "masked_loss" in metrics:
        rivals = {"neighbour_loss": "mean of neighbours", "histogram_entropy": "histogram"}
        known = ", ".join(f"{words} {metrics[key]:.3f}" for key, words in rivals.items() if key in metrics)
        return f"loss of hidden patches {metrics['masked_loss']:.4f} ({known}) {n}"
    if "mean_average_precision" in metrics:
        return f"mAP {metrics['mean_average_precision']:.2%}, macro F1 {metrics['macro_f1']:.2%} {n}"
    return f"accuracy {metrics['top1']:.2%}, mean per class {metrics['mean_per_class']:.2%} {n}"


def duration(seconds: float) -> str:
    """90 -> "1 min 30 s" """
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds // 60:.0f} min {seconds % 60:.0f} s"
    return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:.0f} min"


class TensorBoard:
    """Listens to a run and writes scalars into FOLDER/tensorboard."""

    def __init__(self, folder: str) -> None:
        if not folder:
            raise UserError("--tensorboard needs --out, the folder to write into.")
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise UserError("--tensorboard needs an extra: pip install 'vitral[track]'.") from error
        self.writer = SummaryWriter(str(Path(folder) / "tensorboard"))

    def hear(self, event: Event) -> None:
        from vitral import api

        if isinstance(event, api.StepDone):
            values = {"loss": event.loss, "rate": event.rate, "waited": event.waited, "accuracy": event.accuracy}
            for name, value in values.items():
                if value is not None:
                    self.writer.add_scalar(f"train/{name}", value, event.step)
        elif isinstance(event, api.Evaluated):
            for name, value in event.metrics.items():
                if isinstance(value, int | float):
                    self.writer.add_scalar(f"test/{name}", value, event.step)
            self.writer.flush()

    def close(self) -> None:
        """Write out what is still waiting."""
        self.writer.close()
