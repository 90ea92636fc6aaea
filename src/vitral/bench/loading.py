"""From image files to the device: our loader, and torchvision's folder, transforms and torch DataLoader (Pillow)."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from vitral.bench.backends import OURS, Backend, Task, default_modes
from vitral.bench.steps import TrainingStep, predictor
from vitral.data.batch_buffers import PackedCrops, ResizeCrops
from vitral.data.images import decode
from vitral.data.loader import (
    PREFETCH,
    buffer_count,
    default_workers,
    evaluation_batches,
    read_pixels,
    training_batches,
)
from vitral.data.preprocess import Pipeline, parse_pipeline
from vitral.data.sources import Split, open_data
from vitral.training.device_data import crop_uploader

_STAGED = 64  # images that each stage is timed on
_UPLOADS = 16  # of one batch
_FED = {"cuda": 40, "cpu": 4}  # training steps on images from files that are timed
_WARM_UP = 3  # steps before them


def loading_step(backend: Backend, task: Task) -> LoadingStep:
    """Batches for training, random crop and flip, as they come to the device."""
    return LoadingStep(backend, task)


def prediction_step(backend: Backend, task: Task) -> PredictionStep:
    """A batch of files to logits in the host's memory."""
    return PredictionStep(backend, task)


class LoadingStep:
    """A step is one batch on the device."""

    def __init__(self, backend: Backend, task: Task) -> None:
        self.backend, self.task = backend, task
        self.best = math.inf  # seconds of a batch

    def run(self, count: int) -> list[float]:
        """The mean of `count` batches or a few more: each worker makes as many, as they deliver in bursts. The loader
        starts anew, so that nobody's workers run ahead while others have their turn. Timed is what it does for long:
        neither its start, until all of its memory has been used once, nor its end, where some have nothing to do."""
        each = max(self.task.workers, 1)
        first, count = buffer_count(self.task.workers), math.ceil(count / each) * each
        batches = _batches(self.backend, self.task, first + count + each, training=True)
        self._take(islice(batches, first))
        start = time.perf_counter()
        self._take(islice(batches, count))
        seconds = (time.perf_counter() - start) / count
        self.best = min(self.best, seconds)
        return [seconds]

    def _take(self, batches: Iterable[Tensor]) -> None:
        for images in batches:
            images.to(self.task.device, non_blocking=True)
        if self.task.device == "cuda":
            torch.cuda.synchronize()

    def details(self) -> dict[str, float]:
        """How large the pictures are, images/s of each stage in one process, and what training on the files reaches."""
        stages = _stages(self.task) if self.backend.library == OURS else {}
        trained = training_from_files(self.backend, self.task, alone=self.best)
        return {"megapixels": _megapixels(self.task), **stages, "workers": self.task.workers, **trained}


class PredictionStep:
    """A step is one batch of files, read, prepared and classified."""

    def __init__(self, backend: Backend, task: Task) -> None:
        self.backend, self.task = backend, task
        self.model = predictor(backend, task)

    def run(self, count: int) -> list[float]:
        """The mean of `count` batches in one go through the files."""
        start = time.perf_counter()
        with torch.inference_mode():
            for images in _batches(self.backend, self.task, count, training=False):
                self.model(images.to(self.task.device, non_blocking=True)).float().cpu()
        return [(time.perf_counter() - start) / count]

    def details(self) -> dict[str, float]:
        return {"megapixels": _megapixels(self.task)}


def training_from_files(backend: Backend, task: Task, *, alone: float) -> dict[str, float]:
    """Images/s of training steps on files and, right before and after, of the same steps on a batch that stays on the
    device; with as many workers as training would start beside a model. These may hold batches made before: for long
    no step comes sooner than after the seconds that a batch takes where the loader is alone."""
    task = replace(task, workers=min(task.workers, default_workers(task.device)))
    step = TrainingStep(_trained(backend, task.device), task)
    for images in _batches(backend, task, 1, training=True):
        step.images = images.to(task.device)  # laid out as all batches are, which a recorded step takes for granted
    step.run(_WARM_UP)
    # What workers made before the first step must not count.
    count, first = _FED[task.device], PREFETCH * task.workers + 1
    before = step.run(count // 2)
    fed = feed(step, _batches(backend, task, first + count, training=True), first, task.device)
    fed = Fed(max(fed.seconds, alone), max(fed.waiting, 1 - (1 - fed.waiting) * fed.seconds / alone))
    there = statistics.mean([*before, *step.run(count // 2)])
    return {
        "workers beside the model": task.workers,
        "from files/s": task.batch / fed.seconds,
        "synthetic/s": task.batch / there,
        "of synthetic speed": there / fed.seconds,
        "share waiting": fed.waiting,
    }


def _trained(backend: Backend, device: str) -> Backend:
    """Ours records its steps on a GPU, and the others are compiled there."""
    modes = default_modes(device)
    return Backend(backend.library, modes[-1] if backend.library == OURS else modes[0])


class Fed(NamedTuple):
    """Training steps on images that come one batch after the other."""

    seconds: float  # of a step
    waiting: float  # share of them in which the device had nothing to do


class _Feedable(Protocol):
    def feed(self, images: Tensor) -> None: ...


def feed(step: _Feedable, batches: Iterable[Tensor], first: int, device: str) -> Fed:
    """Steps as in training, none of which waits for the one before to end; the first `first` do not count."""
    began, ended = [], []
    for images in batches:
        began.append(_Mark(device))
        step.feed(images)
        ended.append(_Mark(device))
        if len(ended) > 1:
            ended[-2].wait()  # training reads a step's numbers one step late
    ended[-1].wait()
    waits = [after.since(before) for before, after in zip(ended[first - 1 :], began[first:], strict=False)]
    steps = [after.since(before) for before, after in pairwise(ended[first - 1 :])]
    return Fed(statistics.mean(steps), sum(waits) / sum(steps))


class _Mark:
    """A moment by the device's own clock: a GPU reaches it when all that was queued before is done."""

    def __init__(self, device: str) -> None:
        self.moment = time.perf_counter()
        self.event = torch.cuda.Event(enable_timing=True) if device == "cuda" else None
        if self.event is not None:
            self.event.record()

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()

    def since(self, earlier: _Mark) -> float:
        """Seconds; both are past."""
        if self.event is not None and earlier.event is not None:
            return earlier.event.elapsed_time(self.event) / 1e3
        return self.moment - earlier.moment


def _batches(backend: Backend, task: Task, count: int, *, training: bool) -> Iterator[Tensor]:
    """`count` batches: uint8 from us, in training resized on a GPU, and normalised floats in the host's memory from the
    others."""
    if backend.library != OURS:
        return _torchvision_batches(task, count, training=training)
    split, pipeline = _split(task.folder), _pipeline(task, training=training)
    options: dict[str, Any] = {"batch": task.batch, "workers": task.workers, "pin": task.device == "cuda"}
    if training:
        resize = crop_uploader(pipeline, task.batch, 3, torch.device(task.device))
        found = training_batches(split, pipeline, seed=0, first_step=0, last_step=count, resize=resize, **options)
    else:
        found = evaluation_batches(split.select(np.arange(count * task.batch) % len(split)), pipeline, **options)
    return (batch.images for batch in found)


def _torchvision_batches(task: Task, count: int, *, training: bool) -> Iterator[Tensor]:
    """As its documentation has it: Pillow's pixels become normalised floats in the workers."""
    files = _image_folder(task.folder, task.architecture.image[0], training=training)
    places = np.arange(count * task.batch) % len(files)
    sampler = np.random.default_rng(0).permutation(places) if training else places
    pin = task.device == "cuda"
    loader = DataLoader(files, task.batch, sampler=sampler.tolist(), num_workers=task.workers, pin_memory=pin)
    return (images for images, _ in loader)


@cache  # a training run lists its files once, however often a loader starts
def _image_folder(folder: str, side: int, *, training: bool) -> Any:
    from torchvision import transforms
    from torchvision.datasets import ImageFolder

    crop = [transforms.RandomResizedCrop(side, (0.05, 1.0)), transforms.RandomHorizontalFlip()]
    centre = [transforms.Resize(side * 8 // 7), transforms.CenterCrop(side)]
    values = [transforms.ToTensor(), transforms.Normalize([0.5] * 3, [0.5] * 3)]
    return ImageFolder(folder, transforms.Compose([*(crop if training else centre), *values]))


@cache
def _split(folder: str) -> Split:
    return open_data(Path(folder), held_out=0).train


def _pipeline(task: Task, *, training: bool) -> Pipeline:
    side = task.architecture.image[0]
    steps = f"inception_crop({side})|flip" if training else f"resize_small({side * 8 // 7})|central_crop({side})"
    return parse_pipeline(f"decode|{steps}")


def _megapixels(task: Task) -> float:
    """Of a picture, on average"""
    split = _split(task.folder)
    pictures = [read_pixels(split, index, 3) for index in range(min(_STAGED, len(split)))]
    return statistics.mean(picture.shape[0] * picture.shape[1] for picture in pictures) / 1e6


def _stages(task: Task) -> dict[str, float]:
    """Images/s of reading, decoding, cropping with resizing, and making a batch of it, each alone in one process."""
    split, pipeline = _split(task.folder), _pipeline(task, training=True)
    places = [place % len(split) for place in range(_STAGED)]
    rng = np.random.default_rng(0)
    read, files = _clocked(split.reader.read, places)
    decode_, pictures = _clocked(lambda data: data if isinstance(data, np.ndarray) else decode(data), files)
    resize, prepared = _clocked(lambda image: pipeline(image, rng), pictures)
    block = np.empty_like(prepared[0])
    batch, _ = _clocked(lambda image: np.copyto(block, image), prepared)
    stages = {"read/s": read, "decode/s": decode_, "resize/s": resize, "batch/s": batch}
    upload = crop_uploader(pipeline, task.batch, 3, torch.device(task.device))
    return stages if upload is None else {**stages, "upload/s": _uploaded(split, pipeline, task.batch, upload)}


def _uploaded(split: Split, pipeline: Pipeline, batch: int, upload: ResizeCrops) -> float:
    """Images/s of a batch's way to the GPU, where it is resized."""
    handed: list[PackedCrops] = []

    def timed(parts: PackedCrops) -> None:
        upload(parts)
        torch.cuda.synchronize()

    def kept(parts: PackedCrops) -> Tensor:
        handed.append(parts)
        return upload(parts)

    for _ in training_batches(split, pipeline, batch=batch, seed=0, first_step=0, last_step=1, pin=True, resize=kept):
        pass
    return batch * _clocked(timed, handed * _UPLOADS)[0]


def _clocked(work: Callable[[Any], Any], items: list[Any]) -> tuple[float, list[Any]]:
    """Items per second by the median, and what came out."""
    seconds, found = [], []
    for item in items:
        start = time.perf_counter()
        found.append(work(item))
        seconds.append(time.perf_counter() - start)
    return 1 / statistics.median(seconds), found
