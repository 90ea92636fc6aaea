"""The models of a server: loaded once, reloaded without a pause, each with a queue of limited length.

Where batches gain time (on a GPU), images of different requests are computed together, and none waits longer than a
stated bound. A thread that is free takes what is waiting. If that is less than a full batch it waits for more, but only
until the oldest image has waited `max_wait`; a busy server therefore never waits, since the queue fills while it
computes. On a CPU batches gain almost nothing, and each of their images waits for all: there images are computed one by
one until a full batch waits for every thread.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from vitral.data.images import ImageError
from vitral.data.loader import cores
from vitral.errors import UserError
from vitral.server.monitoring import Metrics, log
from vitral.server.runtime import Runtime, ServedImage, cpu_threads


@dataclass(frozen=True)
class Answer:
    """What the model says about one image."""

    probabilities: np.ndarray  # (classes,) float32
    ranking: np.ndarray  # (classes,)
    attention: np.ndarray | None  # (rows, columns)


@dataclass(frozen=True)
class QueuedImage:
    """An image that waits for its batch."""

    pixels: np.ndarray
    attention: bool
    runtime: Runtime  # that it was decoded for: a model may be reloaded meanwhile
    future: Future[Answer] = field(default_factory=Future)
    arrived: float = field(default_factory=time.monotonic)

    def goes_with(self, other: QueuedImage) -> bool:
        """Whether both can be computed in one batch."""
        return self.runtime is other.runtime and self.attention == other.attention


class Batcher:
    """The queue of one model and the threads that compute its batches."""

    def __init__(self, name: str, runners: int, metrics: Metrics, *, max_batch: int, max_wait: float) -> None:
        """Start the threads.

        Args:
            name: of the model.
            runners: of its runtimes, one thread for each.
            metrics: where batches are counted.
            max_batch: images per batch at most.
            max_wait: seconds that an image waits at most for its batch to fill.
        """
        self.name, self.metrics = name, metrics
        self.max_batch, self.max_wait = max_batch, max_wait
        self._queue: deque[QueuedImage] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._threads = [
            threading.Thread(target=self._work, args=(index,), name=f"{name}-{index}", daemon=True)
            for index in range(runners)
        ]
        for thread in self._threads:
            thread.start()

    def __len__(self) -> int:
        return len(self._queue)

    def submit(self, runtime: Runtime, pixels: np.ndarray, attention: bool) -> Future[Answer]:
        """Queue one image: uint8 (height, width, channels), as the runtime takes it."""
        image = QueuedImage(pixels, attention, runtime)
        with self._changed:
            if self._closing:
                raise RuntimeError("the batcher is closed")
            self._queue.append(image)
            # A thread that waits for a batch to fill need not wake for each of its images.
            if not runtime.gains_by_batch or len(self._queue) == 1 or len(self._queue) >= self.max_batch:
                self._changed.notify()
        return image.future

    def close(self) -> None:
        """Compute what is queued, then end the threads."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self, index: int) -> None:
        torch.set_num_threads(cpu_threads()[1])  # of this thread alone
        while batch := self._next_batch():
            live = [image for image in batch if image.future.set_running_or_notify_cancel()]
            if live:
                self._compute(index, live)

    def _next_batch(self) -> list[QueuedImage]:
        """The next images, oldest first and alike in whether attention is needed; none when closed."""
        with self._changed:
            while True:
                if not self._queue:
                    if self._closing:
                        return []
                    self._changed.wait()
                    continue
                left = self._queue[0].arrived + self.max_wait - time.monotonic()
                full = not self._queue[0].runtime.gains_by_batch or len(self._queue) >= self.max_batch
                if full or left <= 0 or self._closing:
                    return self._taken()
                self._changed.wait(left)

    def _taken(self) -> list[QueuedImage]:
        first = self._queue[0]
        most = self.max_batch
        if not first.runtime.gains_by_batch and len(self._queue) < self.max_batch * len(self._threads):
            most = 1
        batch: list[QueuedImage] = []
        while self._queue and len(batch) < most and self._queue[0].goes_with(first):
            batch.append(self._queue.popleft())
        if self._queue:
            self._changed.notify()
        return batch

    def _compute(self, index: int, batch: Sequence[QueuedImage]) -> None:
        started = time.monotonic()
        try:
            outputs = batch[0].runtime.runners[index](np.stack([image.pixels for image in batch]), batch[0].attention)
        except Exception as error:
            for image in batch:
                image.future.set_exception(error)
            return
        self.metrics.observe_batch(self.name, [image.arrived for image in batch], started)
        for row, image in enumerate(batch):
            shown = None if outputs.attention is None else outputs.attention[row]
            image.future.set_result(Answer(outputs.probabilities[row], outputs.ranking[row], shown))


@dataclass(frozen=True)
class Settings:
    """How a server behaves; the options of `vitral serve`."""

    host: str = "127.0.0.1"
    port: int = 8000
    max_batch: int = 8
    max_wait: float = 0.002  # seconds
    max_queue: int = 256  # images per model
    max_body: int = 16_000_000  # bytes
    timeout: float = 30.0  # seconds
    token: str = ""
    reuse_port: bool = False


class QueueFull(Exception):
    """A model has as many images waiting as it may have."""


@dataclass(frozen=True)
class Prediction:
    """An image's answer, and the part of the image that the model saw."""

    answer: Answer
    region: tuple[float, float, float, float]


class ServedModel:
    """One model under its name."""

    def __init__(self, name: str, load: Callable[[], Runtime], settings: Settings, metrics: Metrics) -> None:
        """Load the model and start its threads.

        Args:
            name: what requests call it.
            load: loads it from its source, again whenever it is called.
            settings: limits of batches and of the queue.
            metrics: counts the images.
        """
        self.name, self._load, self._settings, self._metrics = name, load, settings, metrics
        self.pending = 0  # images accepted and not yet answered
        self.version = 0
        self._reloading = threading.Lock()
        self.runtime = self._loaded()
        self.batcher = Batcher(
            *(name, len(self.runtime.runners), metrics), max_batch=settings.max_batch, max_wait=settings.max_wait
        )
        metrics.watch_pending(name, lambda: self.pending)

    def _loaded(self) -> Runtime:
        started = time.monotonic()
        runtime = self._load()
        runtime.warm_up()
        self.version += 1
        self._metrics.count_load(self.name, "loaded")
        log("model_loaded", model=self.name, version=self.version, seconds=round(time.monotonic() - started, 3))
        return runtime

    def reload(self) -> None:
        """Load the source again and use it from the next request on; if that fails the old model stays.

        Raises:
            UserError: the source cannot be loaded now.
        """
        with self._reloading:
            try:
                self.runtime = self._loaded()
            except Exception as error:  # whatever a broken file causes must not stop the server
                self._metrics.count_load(self.name, "failed")
                log("reload_failed", level="error", model=self.name, error=str(error))
                if isinstance(error, UserError):
                    raise
                raise UserError(f"{self.name} cannot be loaded ({type(error).__name__}): see the log.") from error
            finally:
                _release_memory()

    @contextmanager
    def admitted(self, count: int) -> Iterator[None]:
        """Take places in the queue for the images of a request.

        Raises:
            QueueFull: there are not as many left.
        """
        if self.pending + count > self._settings.max_queue:
            self._metrics.count_images(self.name, "refused", count)
            raise QueueFull
        self.pending += count
        try:
            yield
        finally:
            self.pending -= count

    async def predict(
        self, images: Sequence[bytes], attention: bool, pool: ThreadPoolExecutor
    ) -> list[Prediction | ImageError]:
        """Decode images in the pool and compute them in batches; one result per image, in order."""
        runtime = self.runtime
        return await asyncio.gather(*(self._predicted(runtime, data, attention, pool) for data in images))

    async def predict_pixels(self, pixels: np.ndarray, attention: bool) -> list[Answer]:
        """uint8 (batch, height, width, channels), resized and cropped already -> one answer per image."""
        runtime = self.runtime
        return await asyncio.gather(*(self._answer(runtime, image, attention) for image in pixels))

    async def _predicted(
        self, runtime: Runtime, data: bytes, attention: bool, pool: ThreadPoolExecutor
    ) -> Prediction | ImageError:
        try:
            image = await asyncio.get_running_loop().run_in_executor(pool, self._decoded, runtime, data)
        except ImageError as error:
            self._metrics.count_images(self.name, "unreadable")
            return error
        return Prediction(await self._answer(runtime, image.pixels, attention), image.region)

    def _decoded(self, runtime: Runtime, data: bytes) -> ServedImage:
        started = time.monotonic()
        image = runtime.decode(data)
        self._metrics.observe_decoding(self.name, time.monotonic() - started)
        return image

    async def _answer(self, runtime: Runtime, pixels: np.ndarray, attention: bool) -> Answer:
        try:
            answer = await asyncio.wrap_future(self.batcher.submit(runtime, pixels, attention))
        except asyncio.CancelledError:  # by a client that has gone, or a timeout: the image leaves its queue
            self._metrics.count_images(self.name, "cancelled")
            raise
        self._metrics.count_images(self.name, "predicted")
        return answer


def _release_memory() -> None:
    """Give back the memory of a model that was replaced: the C library would keep it for later."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def decoding_pool() -> ThreadPoolExecutor:
    """A thread per core: decoders release Python's lock, so processes would only add copies of the bytes."""
    return ThreadPoolExecutor(cores(), thread_name_prefix="decode", initializer=torch.set_num_threads, initargs=(1,))
