"""The runs of a study as work for an engine: from settings to records, with shared data."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitral.api.checkpoints import load_source
from vitral.api.data import restricted
from vitral.api.engines import BESIDE, LOG, Work
from vitral.api.evaluation import evaluate
from vitral.api.inference import compute_device, reading_workers, resolve_preprocessing
from vitral.api.recipes import normalised_as
from vitral.bench.backends import OURS, Backend, Workload
from vitral.bench.steps import InferenceStep, TimedStep, TrainingStep, free_memory
from vitral.checkpoints.card import Preprocess
from vitral.checkpoints.hub import located
from vitral.checkpoints.lock import FolderLock
from vitral.checkpoints.weights import describe
from vitral.data.cache import decode_once
from vitral.data.loader import default_workers
from vitral.data.sources import DataSet, Split, open_data, with_test_split
from vitral.data.splits import HELD_OUT
from vitral.errors import UserError
from vitral.evaluation.predict import embed_split, predict_split
from vitral.evaluation.probes import fewshot
from vitral.events import EventHandler
from vitral.models.build import Model
from vitral.recipe import Recipe, recipe_hash, with_dev, with_overrides
from vitral.recipe_schema import ShapeRecipe
from vitral.studies.definition import PlannedRun, Study
from vitral.studies.planning import Record, append_record, is_done, plan, read_records
from vitral.training.build import check_recipe
from vitral.training.loop import Diverged
from vitral.training.parallel import init_distributed
from vitral.training.resources import autocast_dtype
from vitral.training.run import RunResult, run
from vitral.version import __version__

PROBE_SEEDS = 5  # draws of a few-shot evaluation, from so many times its shots, as Google's code draws from a part
_SMALLEST = 8  # images of the first batch whose speed is measured
_SLOW_STEP = 0.5  # seconds of a step that is not measured again
_FASTER = 1.01  # a batch that predicts faster than all smaller ones by less is the last


@dataclass
class StudyContext:
    """State shared by the runs of a process: paths of data and weights, opened data sets, decoded pixels."""

    study: Study
    out: Path
    sources: Mapping[str, str]  # by the name that the study has for them
    init: str = ""
    device: str = ""
    beside: int = 0  # other processes on the same device
    _opened: dict[tuple[str, float], DataSet] = field(default_factory=dict)
    _decoded: dict[tuple[str, float], DataSet] = field(default_factory=dict)
    _restricted: dict[tuple[Any, ...], DataSet] = field(default_factory=dict)

    def open(self, name: str, held_out: float = HELD_OUT) -> DataSet:
        if (name, held_out) not in self._opened:
            self._opened[name, held_out] = open_data(self.sources[name], held_out=held_out)
        return self._opened[name, held_out]

    def decoded(self, name: str, held_out: float) -> DataSet:
        """A data set whose images are decoded once, into files that processes share."""
        if (name, held_out) not in self._decoded:
            data, folder, workers = self.open(name, held_out), self.out / "pixels", default_workers("cuda")
            splits: dict[str, Any] = {part: getattr(data, part) for part in ("train", "val", "test")}
            for part, split in splits.items():
                splits[part] = None if split is None else decode_once(split, folder, workers=workers)[0]
            self._decoded[name, held_out] = replace(data, **splits)
        return self._decoded[name, held_out]

    def data_of(self, planned: PlannedRun, recipe: Recipe, *, decoded: bool = True) -> DataSet:
        """The images of a run: a trial is evaluated on the dev split, a final run on the test split.

        A trial has no test split: with patience, it would report that one.
        """
        wanted = recipe.data
        images = (wanted.held_out, wanted.dev, wanted.subset, wanted.subset_seed, wanted.exclude)
        key = (planned.cell.data, *images, planned.trial, decoded)
        if key not in self._restricted:
            opened = (self.decoded if decoded else self.open)(planned.cell.data, wanted.held_out)
            opened = restricted(opened, recipe)
            self._restricted[key] = replace(opened, test=None) if planned.trial else with_test_split(opened)
        return self._restricted[key]

    def recipe_of(self, planned: PlannedRun) -> Recipe:
        """The recipe of a run; pixels are normalised as the weights that it starts from state."""
        recipe = self.study.recipe_of(planned)
        if planned.trial and recipe.data.subset:  # the dev split may leave fewer images
            all_images = replace(recipe, data=replace(recipe.data, subset=0))
            left = len(self.data_of(planned, all_images, decoded=False).train)
            recipe = replace(recipe, data=replace(recipe.data, subset=min(recipe.data.subset, left)))
        if not recipe.init:
            return recipe
        recipe = replace(recipe, init=self.init or recipe.init)
        stated = "data.mean" in planned.settings
        return recipe if stated else normalised_as(recipe, describe(located(recipe.init)).card)


@dataclass(frozen=True)
class Measured:
    """The fields that a measurement adds to the record of a run."""

    metrics: Mapping[str, Any]
    flops: float = 0.0
    peak_bytes: int = 0
    images_per_second: float = 0.0
    device: str = ""
    shared_seconds: float = 0.0  # spent on what other runs use, too


def check_run(context: StudyContext, planned: PlannedRun) -> None:
    """Refuse what cannot work before the first run starts."""
    recipe, cell = context.recipe_of(planned), planned.cell
    card = describe(located(recipe.init)).card if recipe.init else None
    if cell.start:
        context.open(context.study.starts[cell.start].data)
    if cell.measure in ("train", "probe"):
        data = context.data_of(planned, recipe, decoded=False)
        if cell.measure == "train":
            check_recipe(recipe, data, card)


def execute(context: StudyContext, planned: PlannedRun, folder: Path, on_event: EventHandler) -> Record:
    """Carry out one run, or resume what its folder holds; what diverges or fails has a record, too."""
    began, shared, record = time.perf_counter(), 0.0, record_of(context, planned)
    try:
        measured = MEASURES[planned.cell.measure](context, planned, folder, on_event)
    except Diverged as error:
        record = replace(record, status="diverged", reason=str(error))
    except (UserError, OSError, RuntimeError, MemoryError) as error:
        record = replace(record, status="failed", reason=f"{type(error).__name__}: {error}".splitlines()[0][:200])
    else:
        scalars = {key: value for key, value in measured.metrics.items() if type(value) in (int, float)}
        values: dict[str, Any] = {**asdict(measured), "metrics": scalars}
        shared = values.pop("shared_seconds")
        record = replace(record, **values)
    free_memory()
    return replace(record, seconds=round(time.perf_counter() - began - shared, 1))


def record_of(context: StudyContext, planned: PlannedRun) -> Record:
    """The record of a run before it is known how it ended."""
    varied = {*planned.cell.changes, *planned.cell.choose, "seed"}
    return Record(
        id=planned.id,
        study=context.study.name,
        changes={key: value for key, value in planned.settings.items() if key in varied},
        trial=planned.trial,
        beside=context.beside,
        recipe=recipe_hash(context.study.recipe_of(planned)),
        version=__version__,
    )


def _train(context: StudyContext, planned: PlannedRun, folder: Path, on_event: EventHandler) -> Measured:
    """Train as the recipe says, and evaluate at the end; with patience, the dev split decides when that is."""
    recipe, began, started = context.recipe_of(planned), time.perf_counter(), {}
    if planned.cell.start:
        pretrained = _pretrained(context, planned, on_event)
        recipe = replace(recipe, init=pretrained.folder, shape=ShapeRecipe())  # the weights have a shape
        started = {"pretraining_flops": pretrained.flops, "pretraining_seconds": pretrained.seconds}
    shared_seconds = time.perf_counter() - began
    stops_early = bool(recipe.patience) and not planned.trial
    if stops_early:
        recipe = with_dev(recipe, context.study.dev)
    data = context.data_of(planned, with_dev(recipe, 0.0) if stops_early else recipe)
    learned = context.data_of(replace(planned, trial=True), recipe) if stops_early else data
    result = run(recipe, learned, folder, device=context.device, on_event=on_event)
    metrics = {**result.metrics, **started}
    if stops_early:  # the others are of the dev split
        metrics = {**started, "dev": result.metrics["score"], **_accuracy(str(folder), data, context.device)}
    if context.study.shots and not planned.trial:
        metrics |= _fewshot(str(folder), data, context.study.shots, context.device)
    numbers = (result.flops, result.peak_bytes, result.images_per_second, result.device)
    return Measured(metrics, *numbers, shared_seconds=shared_seconds)


def _pretrained(context: StudyContext, planned: PlannedRun, on_event: EventHandler) -> RunResult:
    """The pre-training that a run starts from, with the study's first seed; runs with the same one share its folder.

    On a machine that has the records but not the weights it is repeated.
    """
    start = context.study.starts[planned.cell.start]
    recipe = with_overrides(Recipe(), {**start.settings, "seed": planned.cell.seeds[0]})
    data = with_test_split(restricted(context.decoded(start.data, recipe.data.held_out), recipe))
    folder = context.out / "weights" / f"{planned.cell.start}-{recipe_hash(recipe)}"
    folder.mkdir(parents=True, exist_ok=True)
    lock = FolderLock(folder)
    lock.acquire(wait=True)
    try:
        (folder / "run" / ".lock").unlink(missing_ok=True)  # left by a lost machine: this process holds the folder
        return run(recipe, data, folder / "run", device=context.device, on_event=on_event)
    finally:
        lock.release()


def _probe(context: StudyContext, planned: PlannedRun, folder: Path, on_event: EventHandler) -> Measured:
    """Evaluate the frozen features of the weights in `init` with a few images per class."""
    recipe = context.recipe_of(planned)
    data = context.data_of(planned, recipe)
    scores = _fewshot(recipe.init, data, context.study.shots, context.device, context.study.preprocess)
    top = scores[f"{max(context.study.shots)}-shot"]
    return Measured({**scores, "top1": top, "n": len(data.splits[-1])}, device=init_distributed(context.device).name)


def _evaluate(context: StudyContext, planned: PlannedRun, folder: Path, on_event: EventHandler) -> Measured:
    """Evaluate the weights in `init` as they are, also on ImageNet's ReaL labels if real.json is next to the data."""
    recipe = context.recipe_of(planned)
    source = context.sources[planned.cell.data]
    real = Path(source.partition(":")[2] or source) / "real.json"
    labels = str(real) if real.is_file() else ""
    options: dict[str, Any] = {"preprocess": context.study.preprocess, "device": context.device, "batch": 256}
    result = evaluate(recipe.init, source, real=labels, on_event=on_event, **options)
    metrics = result.metrics if result.real is None else {**result.metrics, "real": result.real[0]}
    return Measured(metrics, device=init_distributed(context.device).name)


def _speed(context: StudyContext, planned: PlannedRun, folder: Path, on_event: EventHandler) -> Measured:
    """Images per second in training and prediction, the best of all batches, and the largest batch that trains."""
    recipe = context.recipe_of(planned)
    device = compute_device("", context.device).partition(":")[0]
    metrics: dict[str, float] = {}
    for work, step in (("train", TrainingStep), ("infer", InferenceStep)):
        workload = Workload(work, recipe.model, _SMALLEST, device, image=recipe.image)
        for batch, rate in _rates(step, workload, recipe.batch):
            name = f"{work}_images_per_second"
            fastest = metrics.get(name, 0.0)
            metrics[name] = max(fastest, rate)
            if work == "train":
                metrics["largest_batch"] = batch
            elif rate < _FASTER * fastest:
                break
    if "train_images_per_second" not in metrics:
        raise UserError(f"{recipe.model} at {recipe.image} pixels does not fit into memory with {_SMALLEST} images.")
    return Measured(metrics, device=init_distributed(context.device).name)


def _rates(step: type[TimedStep], workload: Workload, largest: int) -> Iterator[tuple[int, float]]:
    """Batches that double until memory runs out, and images per second of the fastest of a few steps with each."""
    batch, timed = workload.batch, None
    try:
        timed = step(Backend(OURS), workload)
        while batch <= largest:
            timed.run(1)  # pays for compilation and memory
            times = timed.run(1)
            times += timed.run(2) if times[0] < _SLOW_STEP else []
            yield batch, batch / min(times)
            timed.double_batch()
            batch *= 2
    except torch.OutOfMemoryError:
        return
    finally:
        timed = None
        free_memory()


def _accuracy(source: str, data: DataSet, device: str) -> dict[str, float]:
    """Top-1 accuracy of a model on the data's held-out split."""
    model, card = load_source(source, None)
    split = data.eval_split
    assert split is not None
    rows = predict_split(model, split, resolve_preprocessing(card, ""), **_computing(device))
    right = rows.logits[rows.valid].argmax(1) == split.labels[rows.indices[rows.valid]]
    top1 = float(right.mean())
    return {"top1": top1, "score": top1, "n": int(rows.valid.sum())}


def _fewshot(source: str, data: DataSet, shots: Sequence[int], device: str, preprocess: str = "") -> dict[str, float]:
    """Few-shot accuracies of a model by "5-shot"; images are drawn from the first ones of each class of train."""
    model, card = load_source(source, None)
    held_out = data.eval_split
    assert held_out is not None
    preprocessing = resolve_preprocessing(card, preprocess)
    pool, classes = _first_of_classes(data.train, PROBE_SEEDS * max(shots)), len(data.train.classes)
    features = [_features(model, preprocessing, split, device) for split in (pool, held_out)]
    (train_x, train_y), (test_x, test_y) = features
    rows = fewshot(train_x, train_y, test_x, test_y, classes=classes, shots=tuple(shots), seeds=PROBE_SEEDS)
    return {f"{row.shots}-shot": row.mean for row in rows}


def _features(model: Model, preprocessing: Preprocess, split: Split, device: str) -> tuple[np.ndarray, np.ndarray]:
    rows = embed_split(model, split, preprocessing, **_computing(device))
    return rows.features[rows.valid], split.labels[rows.indices[rows.valid]]


def _computing(device: str) -> dict[str, Any]:
    """How the images of a split are computed: as in the evaluations of training, in half precision on a GPU."""
    resolved = compute_device("", device)
    precision = "float32" if autocast_dtype("auto", torch.device(resolved)) is None else "bfloat16"
    return {"batch": 256, "device": resolved, "workers": reading_workers(resolved), "precision": precision}


def _first_of_classes(train: Split, count: int) -> Split:
    order = np.argsort(train.labels, kind="stable")
    ranks = np.arange(len(train)) - np.searchsorted(train.labels[order], train.labels[order])
    return train.select(np.sort(order[ranks < count]))


MEASURES: dict[str, Callable[[StudyContext, PlannedRun, Path, EventHandler], Measured]] = {
    "train": _train,
    "probe": _probe,
    "evaluate": _evaluate,
    "speed": _speed,
}


@dataclass(kw_only=True)
class StudyJob(Work):
    """A study as requested on the command line, from which commands for single runs are made."""

    study: Study
    name: str
    data: tuple[str, ...] = ()
    init: str = ""
    overrides: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    unit = "runs"

    def pending(self) -> list[PlannedRun]:
        """The runs to execute, as far as they are known."""
        current = plan(self.study, read_records(self.folder))
        unknown = {*self.only} - {run.id for run in current.runs}
        if unknown:
            raise UserError(f"the study has no run {unknown.pop()}: `--print-commands` lists those that are pending.")
        return [run for run in current.pending if not self.only or run.id in self.only]

    @cached_property
    def context(self) -> StudyContext:
        names, beside = self.study.data_names, int(os.environ.get(BESIDE, 0))
        sources = {name: _source(name, self.data, names) for name in names}
        return StudyContext(self.study, self.folder, sources, self.init, self.device, beside)

    @property
    def alone(self) -> bool:
        """A device that is shared says nothing about speed."""
        return any(run.cell.measure == "speed" for run in self.pending())

    def is_done(self, item: str) -> bool:
        return is_done(read_records(self.folder).get(item))

    def carry_out(self, item: str, folder: Path, on_event: EventHandler) -> None:
        (folder / "run" / ".lock").unlink(missing_ok=True)  # left by a lost machine: the engine holds the folder
        record = execute(self.context, self._run(item), folder / "run", on_event)
        if record.status == "failed" and LOG in os.environ:
            record = replace(record, reason=f"{record.reason}; log: {os.environ[LOG]}")
        append_record(self.folder, record)

    def outcome(self, item: str) -> str:
        return f"{self._run(item).text}: {_outcome(read_records(self.folder)[item], self.study.metric)}"

    def fail(self, item: str, reason: str, log: str) -> None:
        record = read_records(self.folder).get(item)
        if record is None or not record.reason.endswith(log):
            record = record_of(self.context, self._run(item))
            append_record(self.folder, replace(record, status="failed", reason=f"{reason}; log: {log}"))

    def arguments(self, items: Sequence[str]) -> list[str]:
        command = ["study", "run", self.name, "--out", str(self.folder), "--only", *items]
        options = {"--scale": [self.study.scale] if self.study.scale != "small" else [], "--data": self.data}
        options |= {"--init": [self.init] if self.init else [], "--device": [self.device] if self.device else []}
        options |= {"--set": self.overrides}
        command += [word for option, values in options.items() if values for word in (option, *values)]
        return [*command, *(["--keep"] if self.keep else [])]

    def _run(self, item: str) -> PlannedRun:
        return next(run for run in plan(self.study, read_records(self.folder)).runs if run.id == item)


def _outcome(record: Record, metric: str) -> str:
    if record.status != "ok":
        return f"{record.status} ({record.reason})"
    value = record.metrics.get("score" if record.trial else metric)
    shown = "" if value is None else f"{value:.2%}, " if 0 <= value <= 1 else f"{value:,.1f}, "
    return f"{shown}{record.seconds:.1f} s"


def _source(name: str, given: Sequence[str], names: Sequence[str]) -> str:
    """The source that the user gives for a data set of the study; one that is not given is its own name."""
    for word in given:
        label, separator, source = word.partition("=")
        if separator and label == name:
            return source
        if word.partition(":")[0] == name:
            return word
    only = len(given) == 1 and len(names) == 1 and "=" not in given[0]
    return given[0] if only else name
