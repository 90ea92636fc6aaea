"""Loading of image files: vitral's loader, and torchvision's ImageFolder and transforms with a PyTorch DataLoader."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from vitral.bench.backends import OURS, Backend, Workload, default_modes
from vitral.bench.steps import TrainingStep, inference_model
from vitral.data.images import decode
from vitral.data.loader import buffer_count, default_workers, evaluation_batches, read_pixels, training_batches
from vitral.data.preprocess import Pipeline, parse_pipeline
from vitral.data.sources import Split, open_data
from vitral.data.workers import PREFETCH, PackedCrops, ResizeCrops
from vitral.training.device_data import crop_uploader

_STAGE_IMAGES = 64  # that each stage is timed on
_UPLOADS = 16  # of one batch
_FILE_STEPS = {"cuda": 40, "cpu": 4}  # timed training steps on images from files
_WARM_UP = 3  # steps before them


class LoadingStep:
    """Training batches, randomly cropped and flipped, on the device."""

    def __init__(self, backend: Backend, workload: Workload) -> None:
        self.backend, self.workload = backend, workload
        self.best = math.inf  # seconds per batch

    def run(self, count: int) -> list[float]:
        """The mean seconds of `count` batches, rounded up to a multiple of the workers, which deliver in bursts.

        The loader is restarted, so that no workers run ahead while others have their turn. Only its steady state is
        timed: not its start, until all of its memory was used once, nor its end, where some workers are idle.
        """
        workers = max(self.workload.workers, 1)
        first, count = buffer_count(self.workload.workers), math.ceil(count / workers) * workers
        batches = _batches(self.backend, self.workload, first + count + workers, training=True)
        self._upload(islice(batches, first))
        start = time.perf_counter()
        self._upload(islice(batches, count))
        seconds = (time.perf_counter() - start) / count
        self.best = min(self.best, seconds)
        return [seconds]

    def _upload(self, batches: Iterable[Tensor]) -> None:
        for images in batches:
            images.to(self.workload.device, non_blocking=True)
        if self.workload.device == "cuda":
            torch.cuda.synchronize()

    def details(self) -> dict[str, float]:
        """The size of the images, images/s of each stage in one process, and the speed of training from files."""
        stages = _time_stages(self.workload) if self.backend.library == OURS else {}
        training = time_training_from_files(self.backend, self.workload, loader_seconds=self.best)
        return {"megapixels": _megapixels(self.workload), **stages, "workers": self.workload.workers, **training}


class PredictionStep:
    """A batch of files to logits in host memory."""

    def __init__(self, backend: Backend, workload: Workload) -> None:
        self.backend, self.workload = backend, workload
        self.model = inference_model(backend, workload)

    def run(self, count: int) -> list[float]:
        start = time.perf_counter()
        with torch.inference_mode():
            for images in _batches(self.backend, self.workload, count, training=False):
                self.model(images.to(self.workload.device, non_blocking=True)).float().cpu()
        return [(time.perf_counter() - start) / count]

    def details(self) -> dict[str, float]:
        return {"megapixels": _megapixels(self.workload)}


def time_training_from_files(backend: Backend, workload: Workload, *, loader_seconds: float) -> dict[str, float]:
    """Compare training on files with training on a batch that stays on the device, timed right before and after.

    `loader_seconds` per batch are of the loader alone: batches that were prefetched may hide it for a few steps, but in
    the long run no step is shorter. Training may start fewer workers than the workload has.
    """
    workload = replace(workload, workers=min(workload.workers, default_workers(workload.device)))
    modes = default_modes(workload.device)  # ours captures CUDA graphs on a GPU, the others are compiled there
    step = TrainingStep(Backend(backend.library, modes[-1] if backend.library == OURS else modes[0]), workload)
    for images in _batches(backend, workload, 1, training=True):
        step.images = images.to(workload.device)  # in the memory layout of all batches, which a CUDA graph relies on
    step.run(_WARM_UP)
    count, first = _FILE_STEPS[workload.device], PREFETCH * workload.workers + 1  # the first ones were prefetched
    before = step.run(count // 2)
    batches = _batches(backend, workload, first + count, training=True)
    fed, wait_share = time_feeding(step.feed, batches, first, workload.device)
    seconds = max(fed, loader_seconds)
    waiting = max(wait_share, 1 - (1 - wait_share) * fed / loader_seconds)
    synthetic = statistics.mean([*before, *step.run(count // 2)])
    return {
        "training_workers": workload.workers,
        "files_per_second": workload.batch / seconds,
        "synthetic_per_second": workload.batch / synthetic,
        "relative_speed": synthetic / seconds,
        "data_wait_share": waiting,
    }


def time_feeding(
    feed: Callable[[Tensor], None], batches: Iterable[Tensor], first: int, device: str
) -> tuple[float, float]:
    """Train on batches as training does, with one step queued ahead, and not counting the first ones. Returns seconds
    per step, and the share of the time in which the device was idle."""
    began, ended = [], []
    for images in batches:
        began.append(_Timestamp(device))
        feed(images)
        ended.append(_Timestamp(device))
        if len(ended) > 1:
            ended[-2].wait()  # training reads metrics one step late
    ended[-1].wait()
    waits = [after.since(before) for before, after in zip(ended[first - 1 :], began[first:], strict=False)]
    steps = [after.since(before) for before, after in pairwise(ended[first - 1 :])]
    return statistics.mean(steps), sum(waits) / sum(steps)


class _Timestamp:
    """A time by the device's clock: on a GPU, when everything queued before is done."""

    def __init__(self, device: str) -> None:
        self.time = time.perf_counter()
        self.event = torch.cuda.Event(enable_timing=True) if device == "cuda" else None
        if self.event is not None:
            self.event.record()

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()

    def since(self, earlier: _Timestamp) -> float:
        """Seconds between two times in the past."""
        if self.event is not None and earlier.event is not None:
            return earlier.event.elapsed_time(self.event) / 1e3
        return self.time - earlier.time


def _batches(backend: Backend, workload: Workload, count: int, *, training: bool) -> Iterator[Tensor]:
    """Batches of images: ours uint8, in training resized on the GPU; the others' normalised floats in host memory."""
    if backend.library != OURS:
        return _torchvision_batches(workload, count, training=training)
    split, pipeline = _open_split(workload.folder), _pipeline(workload, training=training)
    pin = workload.device == "cuda"
    options: dict[str, Any] = {"batch": workload.batch, "workers": workload.workers, "pin": pin}
    if training:
        resize = crop_uploader(pipeline, workload.batch, 3, torch.device(workload.device))
        batches = training_batches(split, pipeline, seed=0, first_step=0, last_step=count, resize=resize, **options)
    else:
        repeated = split.select(np.arange(count * workload.batch) % len(split))
        batches = evaluation_batches(repeated, pipeline, **options)
    return (batch.images for batch in batches)


def _torchvision_batches(workload: Workload, count: int, *, training: bool) -> Iterator[Tensor]:
    """As in its documentation: Pillow decodes, and workers make normalised floats."""
    files = _image_folder(workload.folder, workload.architecture.image[0], training=training)
    indices = np.arange(count * workload.batch) % len(files)
    sampler = (np.random.default_rng(0).permutation(indices) if training else indices).tolist()
    pin = workload.device == "cuda"
    loader = DataLoader(files, workload.batch, sampler=sampler, num_workers=workload.workers, pin_memory=pin)
    return (images for images, _ in loader)


@cache  # a training run lists its files once, however often a loader is started
def _image_folder(folder: str, side: int, *, training: bool) -> Any:
    from torchvision import transforms
    from torchvision.datasets import ImageFolder

    crop = [transforms.RandomResizedCrop(side, (0.05, 1.0)), transforms.RandomHorizontalFlip()]
    centre = [transforms.Resize(side * 8 // 7), transforms.CenterCrop(side)]
    values = [transforms.ToTensor(), transforms.Normalize([0.5] * 3, [0.5] * 3)]
    return ImageFolder(folder, transforms.Compose([*(crop if training else centre), *values]))


@cache
def _open_split(folder: str) -> Split:
    return open_data(Path(folder), held_out=0).train


def _pipeline(workload: Workload, *, training: bool) -> Pipeline:
    side = workload.architecture.image[0]
    steps = (
        f"random_resized_crop({side}, 0.05)|flip" if training else f"resize_small({side * 8 // 7})|central_crop({side})"
    )
    return parse_pipeline(f"decode|{steps}")


def _megapixels(workload: Workload) -> float:
    split = _open_split(workload.folder)
    images = [read_pixels(split, index, 3) for index in range(min(_STAGE_IMAGES, len(split)))]
    return statistics.mean(image.shape[0] * image.shape[1] for image in images) / 1e6


def _time_stages(workload: Workload) -> dict[str, float]:
    """Images/s of reading, decoding, cropping with resizing, and filling a batch, each alone in one process."""
    split, pipeline = _open_split(workload.folder), _pipeline(workload, training=True)
    indices = [index % len(split) for index in range(_STAGE_IMAGES)]
    rng = np.random.default_rng(0)
    read, files = _time_items(split.reader.read, indices)
    decoded, images = _time_items(lambda data: data if isinstance(data, np.ndarray) else decode(data), files)
    resized, prepared = _time_items(lambda image: pipeline(image, rng), images)
    block = np.empty_like(prepared[0])
    batched, _ = _time_items(lambda image: np.copyto(block, image), prepared)
    rates = {"read": read, "decode": decoded, "resize": resized, "batch": batched}
    upload = crop_uploader(pipeline, workload.batch, 3, torch.device(workload.device))
    if upload is not None:
        rates["upload"] = _time_upload(split, pipeline, workload.batch, upload)
    return {f"{stage}_per_second": rate for stage, rate in rates.items()}


def _time_upload(split: Split, pipeline: Pipeline, batch: int, upload: ResizeCrops) -> float:
    """Images/s of copying a batch to the GPU and resizing it there."""
    received: list[PackedCrops] = []

    def timed(crops: PackedCrops) -> Tensor:
        received.append(crops)
        images = upload(crops)
        torch.cuda.synchronize()
        return images

    options: dict[str, Any] = {"batch": batch, "seed": 0, "first_step": 0, "last_step": 1, "pin": True}
    for _ in training_batches(split, pipeline, resize=timed, **options):
        pass
    return batch * _time_items(timed, received * _UPLOADS)[0]


def _time_items(work: Callable[[Any], Any], items: list[Any]) -> tuple[float, list[Any]]:
    """Items per second by the median, and the results."""
    seconds, results = [], []
    for item in items:
        start = time.perf_counter()
        results.append(work(item))
        seconds.append(time.perf_counter() - start)
    return 1 / statistics.median(seconds), results
