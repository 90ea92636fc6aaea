"""Experiment trackers: write the events of a run to TensorBoard, Weights & Biases or MLflow.

A tracker has three methods, `start`, `log` and `finish`; `Tracking` calls them as the events of runs arrive. Each
package is an extra, imported on demand. Where data goes is configured as each package documents it
(`WANDB_PROJECT`, `MLFLOW_TRACKING_URI`, ...). No file of the run is uploaded.
"""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, get_args

from vitral.atomic import write_text
from vitral.errors import UserError
from vitral.events import Evaluated, Event, EventHandler, Note, RunFinished, RunStarted, StepDone

TrackerName = Literal["tensorboard", "wandb", "mlflow"]

_MLFLOW_BATCH = 100  # parameters in one request


class Tracker(Protocol):
    """Records one run after the other."""

    def start(self, folder: Path, recipe: Mapping[str, Any], step: int) -> None:
        """A run begins, or is resumed after this many steps; `recipe` has the value of each key."""
        ...

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of a step or an evaluation, such as train/loss and eval/top1."""
        ...

    def finish(self, result: Mapping[str, float] | None) -> None:
        """The run has ended: its final numbers, such as result/score; None if it failed or was interrupted."""
        ...


class TensorBoard:
    """Writes event files into RUN/tensorboard."""

    def __init__(self) -> None:
        self._package = _imported("tensorboardX", "track")
        self._step = 0

    def start(self, folder: Path, recipe: Mapping[str, Any], step: int) -> None:
        # Points after the step that a resumed run continues from are written again.
        purge = {"purge_step": step + 1} if step else {}
        self._writer = self._package.SummaryWriter(str(folder / "tensorboard"), **purge)
        self._writer.add_text("recipe", "\n".join(f"    {key} = {value}" for key, value in recipe.items()), step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._step = step
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def finish(self, result: Mapping[str, float] | None) -> None:
        self.log(self._step, result or {})
        self._writer.close()


class WeightsAndBiases:
    """One W&B run per run, with its local files in RUN/wandb; the project is WANDB_PROJECT, else vitral."""

    def __init__(self) -> None:
        self._package = _imported("wandb", "wandb")

    def start(self, folder: Path, recipe: Mapping[str, Any], step: int) -> None:
        identifier = _stored_id(folder, "wandb") if step else ""
        self._run = self._package.init(
            project=os.environ.get("WANDB_PROJECT") or "vitral",
            name=folder.name,
            dir=str(folder),
            config=dict(recipe),
            id=identifier or None,
            resume="allow" if identifier else None,
        )
        _store_id(folder, "wandb", self._run.id)
        self._run.define_metric("*", step_metric="step")  # W&B's own step may not go back, as a resumed run does

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def finish(self, result: Mapping[str, float] | None) -> None:
        self._run.summary.update(dict(result or {}))
        self._run.finish(exit_code=0 if result is not None else 1)


class MLflow:
    """One MLflow run per run, in the experiment that MLflow is configured for."""

    def __init__(self) -> None:
        self._package = _imported("mlflow", "mlflow")

    def start(self, folder: Path, recipe: Mapping[str, Any], step: int) -> None:
        identifier = _stored_id(folder, "mlflow") if step else ""
        nested = self._package.active_run() is not None
        named = {"run_id": identifier} if identifier else {"run_name": folder.name}
        run = self._package.start_run(nested=nested, **named)
        self._id = run.info.run_id
        _store_id(folder, "mlflow", self._id)
        if not identifier:  # parameters cannot be written twice
            items = [(key, str(value)) for key, value in recipe.items()]
            for start in range(0, len(items), _MLFLOW_BATCH):
                self._package.log_params(dict(items[start : start + _MLFLOW_BATCH]))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._package.log_metrics(dict(values), step=step, run_id=self._id, synchronous=False)

    def finish(self, result: Mapping[str, float] | None) -> None:
        if result:
            self._package.log_metrics(dict(result), run_id=self._id)
        self._package.flush_async_logging()
        self._package.end_run("FINISHED" if result is not None else "KILLED")


_TRACKERS: dict[str, Callable[[], Tracker]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "mlflow": MLflow}


class Tracking:
    """Event handler that passes every event on, and records runs; a tracker that fails is disabled."""

    def __init__(
        self, trackers: TrackerName | Tracker | Sequence[TrackerName | Tracker], on_event: EventHandler
    ) -> None:
        """Open the trackers: names, or objects with the methods of `Tracker`; raises UserError for an unknown name, or
        one whose package is not installed."""
        several = trackers if isinstance(trackers, Sequence) and not isinstance(trackers, str) else [trackers]
        self._trackers = [_opened(tracker) if isinstance(tracker, str) else tracker for tracker in several]
        self._on_event = on_event
        self._running = False

    def __enter__(self) -> Tracking:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._finish(None)

    def __call__(self, event: Event) -> None:
        self._on_event(event)
        if isinstance(event, RunStarted):
            self._running = True
            self._each(lambda tracker: tracker.start(Path(event.folder), event.recipe, event.step))
        elif isinstance(event, StepDone):
            numbers = {"loss": event.loss, "lr": event.lr, "data_seconds": event.data_seconds}
            self._log(event.step, "train", {**numbers, "accuracy": event.accuracy})
        elif isinstance(event, Evaluated):
            self._log(event.step, "eval", event.metrics)
        elif isinstance(event, RunFinished):
            self._finish(dict(_named("result", {**event.result, **event.result["metrics"]})))

    def _log(self, step: int, group: str, values: Mapping[str, Any]) -> None:
        self._each(lambda tracker: tracker.log(step, dict(_named(group, values))))

    def _finish(self, result: dict[str, float] | None) -> None:
        if self._running:
            self._running = False
            self._each(lambda tracker: tracker.finish(result))

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for tracker in tuple(self._trackers):
            try:
                call(tracker)
            except Exception as error:  # whatever a service or its package raises: the run is worth more
                self._trackers.remove(tracker)
                reason = textwrap.shorten(f"{type(error).__name__}: {error}", 160, placeholder=" ...")
                self._on_event(Note(f"{type(tracker).__name__} failed ({reason}): the run continues without it"))


def _named(group: str, values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers among values, with the group before their names."""
    for name, value in values.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{group}/{name}", value


def _opened(name: str) -> Tracker:
    if name not in _TRACKERS:
        raise UserError(f'track="{name}" is not a tracker: use {", ".join(get_args(TrackerName))}.')
    return _TRACKERS[name]()


def _imported(package: str, extra: str) -> Any:
    try:
        return import_module(package)
    except ImportError as error:
        raise UserError(f"tracking with {package} needs an extra: pip install 'vitral[{extra}]'.") from error


def _stored_id(folder: Path, tracker: str) -> str:
    """The tracker's own name of a run that it has recorded before."""
    path = folder / "tracker.json"
    return json.loads(path.read_text("utf-8")).get(tracker, "") if path.is_file() else ""


def _store_id(folder: Path, tracker: str, identifier: str) -> None:
    path = folder / "tracker.json"
    stored = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    write_text(path, json.dumps({**stored, tracker: identifier}) + "\n")
