"""The models of a server: loaded once, reloaded without a pause, each with a queue of limited length."""

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
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vitral.data.images import ImageError
from vitral.errors import UserError
from vitral.server.batching import Answer, Batcher
from vitral.server.monitoring import Metrics, log
from vitral.server.runtime import Runtime, core_share


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
    reuse_port: bool = False  # other workers listen on the same port
    metrics_dir: str = ""  # where workers share their metrics


class QueueFull(Exception):
    """A model has as many images waiting as it may have."""


@dataclass(frozen=True)
class Prediction:
    """An image's answer, and the part of the image that the model saw."""

    answer: Answer
    region: tuple[float, float, float, float]


class LoopCalls:
    """Calls of other threads into an event loop, which is woken once for all that wait there."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._waiting: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._woken = False

    def call(self, function: Callable[..., None], *arguments: Any) -> None:
        self._waiting.append((function, arguments))
        if not self._woken:  # two threads may both find it so, which wakes the loop twice and harms nothing
            self._woken = True
            with suppress(RuntimeError):  # the loop has ended, and nobody waits
                self.loop.call_soon_threadsafe(self._run)

    def _run(self) -> None:
        self._woken = False  # before the first is taken: what comes later wakes the loop again
        while self._waiting:
            function, arguments = self._waiting.popleft()
            function(*arguments)


class PendingResults:
    """The results of a request's images, which arrive in any order; used in the event loop, but for `queued`."""

    def __init__(self, count: int) -> None:
        self.done: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self.values: list[Any] = [None] * count
        self.cancelled = False
        self._left = count
        self._futures: list[Future[Answer]] = []

    def set(self, index: int, value: Prediction | Answer | ImageError) -> None:
        """Store the result of an image; the last one ends the waiting."""
        self.values[index] = value
        self._left -= 1
        if not self._left and not self.done.done():
            self.done.set_result(self.values)

    def fail(self, error: BaseException) -> None:
        """End the waiting with an error, unless it has ended."""
        if not self.done.done():
            self.done.set_exception(error)

    def queued(self, future: Future[Answer]) -> None:
        """Note what is to be cancelled with the request."""
        self._futures.append(future)
        if self.cancelled:
            future.cancel()

    def cancel(self) -> int:
        """Let all images without a result leave their queue; their number."""
        self.cancelled = True
        if self._left:
            for future in list(self._futures):
                future.cancel()
        return self._left


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
        self._calls: LoopCalls | None = None
        self.version = 0
        self._reloading = threading.Lock()
        self.runtime = self._loaded()
        self.batcher = Batcher(
            *(name, len(self.runtime.runners), metrics), max_batch=settings.max_batch, max_wait=settings.max_wait
        )
        metrics.set_pending(name, 0)

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
        self._add_pending(count)
        try:
            yield
        finally:
            self._add_pending(-count)

    def _add_pending(self, count: int) -> None:
        self.pending += count
        self._metrics.set_pending(self.name, self.pending)

    def predict(self, images: Sequence[bytes], attention: bool, pool: ThreadPoolExecutor) -> PendingResults:
        """Decode images in the pool and compute them in batches: a `Prediction` or `ImageError` for each."""
        results, calls, runtime = PendingResults(len(images)), self._loop_calls(), self.runtime
        for index, data in enumerate(images):
            pool.submit(self._decode_and_queue, runtime, data, attention, results, index, calls)
        return results

    def predict_pixels(self, pixels: np.ndarray, attention: bool) -> PendingResults:
        """uint8 (batch, height, width, channels), resized and cropped already: an `Answer` for each."""
        results, calls, runtime = PendingResults(len(pixels)), self._loop_calls(), self.runtime
        for index, image in enumerate(pixels):
            self._queue(runtime, image, attention, results, index, calls, lambda answer: answer)
        return results

    def finish(self, results: PendingResults) -> None:
        """Count a request's images; those that nobody waits for any more leave their queue."""
        cancelled = results.cancel()
        unreadable = sum(isinstance(value, ImageError) for value in results.values)
        predicted = len(results.values) - unreadable - cancelled
        for result, count in (("unreadable", unreadable), ("cancelled", cancelled), ("predicted", predicted)):
            if count:
                self._metrics.count_images(self.name, result, count)

    def _loop_calls(self) -> LoopCalls:
        loop = asyncio.get_running_loop()
        if self._calls is None or self._calls.loop is not loop:
            self._calls = LoopCalls(loop)
        return self._calls

    def _decode_and_queue(
        self, runtime: Runtime, data: bytes, attention: bool, results: PendingResults, index: int, calls: LoopCalls
    ) -> None:
        """In a thread of the pool, which hands the pixels to the batcher itself: the event loop is not woken."""
        if results.cancelled:
            return
        started = time.monotonic()
        try:
            image = runtime.decode(data)
            self._metrics.observe_decoding(self.name, time.monotonic() - started)
            self._queue(
                *(runtime, image.pixels, attention, results, index, calls),
                lambda answer: Prediction(answer, image.region),
            )
        except ImageError as error:
            calls.call(results.set, index, error)
        except BaseException as error:
            calls.call(results.fail, error)

    def _queue(
        self,
        runtime: Runtime,
        pixels: np.ndarray,
        attention: bool,
        results: PendingResults,
        index: int,
        calls: LoopCalls,
        result: Callable[[Answer], Prediction | Answer],
    ) -> None:
        def computed(future: Future[Answer]) -> None:
            if future.cancelled():
                return
            if (error := future.exception()) is not None:
                calls.call(results.fail, error)
            else:
                calls.call(results.set, index, result(future.result()))

        future = self.batcher.submit(runtime, pixels, attention)
        future.add_done_callback(computed)
        results.queued(future)


def freeze_objects() -> None:
    """Let the garbage collector skip all that exists now, which is about to stay: the modules and models of a server
    take it more than 100 ms each time, during which no request is served."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def _release_memory() -> None:
    """Give back the memory of a model that was replaced: the C library would keep it for later."""
    if gc.get_freeze_count():
        freeze_objects()
    else:
        gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def top_classes(ranking: np.ndarray, count: int) -> np.ndarray:
    """The first classes of a ranking (classes,), highest first, ties in the order of the classes: (count,)"""
    candidates = np.arange(len(ranking))
    if count < len(ranking):
        least = np.partition(ranking, -count)[-count]
        candidates = np.flatnonzero(ranking >= least)
        if len(candidates) < count:  # NaN
            candidates = np.arange(len(ranking))
    return candidates[np.argsort(-ranking[candidates], kind="stable")[:count]]


def decoding_pool() -> ThreadPoolExecutor:
    """A thread per core of this process; decoders release Python's lock."""
    return ThreadPoolExecutor(
        core_share(), thread_name_prefix="decode", initializer=torch.set_num_threads, initargs=(1,)
    )
